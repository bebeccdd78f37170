"""From a checkpoint of transformers to a running, placed model in one call.

    folder or name ──▶ model on meta ──▶ profile ──▶ placement ──▶ weights on devices ──▶ Pretrained

checkpoint_folder.py    the folder of a checkpoint, and its weights and tokenizer
from_pretrained.py      the steps above
pretrained.py           the placed model: generate, stream_text
text_stream.py          text that a thread generates, piece by piece
"""
