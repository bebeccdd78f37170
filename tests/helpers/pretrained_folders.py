"""Checkpoint folders of tiny language models, with tokenizers of a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from generating_models import MAKERS
from model_list import transformers

WORDS = ["Once", "upon", "a", "time", *(f"w{number}" for number in range(48))]
"""Words of the tokenizer; the vocabulary of the models is larger."""

CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}w1"
"""A template that ends a chat with the word w1."""


def saved(name: str, folder: Path, **sizes: int) -> Path:
    """Save a model of ``generating_models`` and a tokenizer, as ``save_pretrained`` does.

    Args:
        name: of the model.
        folder: where to save.
        sizes: of a model like Llama, other than the usual ones.
    """
    torch.manual_seed(0)
    model: Any = MAKERS[name](**sizes)
    model.save_pretrained(folder)
    return save_tokenizer(folder)


def save_tokenizer(folder: Path, chat: str | None = None) -> Path:
    """Save a tokenizer whose tokens are whole words.

    Args:
        folder: where to save.
        chat: its template for messages; None for none.
    """
    library = transformers()
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *WORDS]
    inner = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = library.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(folder)
    return folder
