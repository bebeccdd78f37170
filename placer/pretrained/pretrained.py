"""A pretrained model on its devices, with its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from placer.errors import InputError
from placer.executor.dataflow import DataFlow
from placer.executor.engine.compiled_segments import Backend
from placer.pretrained.text_stream import TextStream
from placer.schema import Placement

Prompt = str | Sequence[Mapping[str, str]]
"""Text, or the messages of a chat: ``[{"role": "user", "content": "..."}]``."""


def prompt_tokens(tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    """Return the token ids and the mask of a prompt, shape (1, tokens) each.

    Args:
        tokenizer: of the checkpoint; None if it has none.
        prompt: text, or messages of a chat.

    Raises:
        InputError: there is no tokenizer, no chat template for messages, or no token.
    """
    if tokenizer is None:
        raise InputError(
            "the checkpoint has no tokenizer that can be read; give token ids to `generate`"
        )
    if isinstance(prompt, str):
        found = tokenizer(prompt, return_tensors="pt")
    elif getattr(tokenizer, "chat_template", None):
        found = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        raise InputError(
            "prompt is not text, and the tokenizer has no chat template for messages; give text"
        )
    if not found["input_ids"].numel():
        raise InputError(f"prompt is {prompt!r}, which has no tokens; give a longer text")
    # Some tokenizers add types of tokens, which no generating model reads.
    return {name: found[name] for name in ("input_ids", "attention_mask") if name in found}


@dataclass(frozen=True, repr=False)
class Pretrained:
    """A model of transformers whose layers run on their devices.

        llm = placer.from_pretrained("path/to/checkpoint", devices=2)
        for piece in llm.stream_text("Once upon a time", max_new_tokens=64):
            print(piece, end="", flush=True)

    Attributes:
        model: the model; its own methods work inside ``flow.applied()``.
        flow: runs the model, as in ``flow(input_ids)``; see ``DataFlow``.
        placement: the device of each layer, and the predictions.
        tokenizer: of the checkpoint; None if it has none.
        context: tokens of the longest text, prompt included, for whose keys and values there is
            memory; None if the model generates no text.
        compile: whether decoding is compiled, as for ``flow.applied``.
    """

    model: nn.Module
    flow: DataFlow
    placement: Placement
    tokenizer: Any = None
    context: int | None = None
    compile: bool | Backend = False

    def generate(self, inputs: Any = None, **options: Any) -> Any:
        """Generate texts: ``model.generate`` inside ``flow.applied()``.

        Args:
            inputs: token ids of the prompts, shape (texts, tokens), on any device; as
                ``model.generate`` takes them.
            options: as ``model.generate`` takes them, such as ``max_new_tokens`` or ``do_sample``.

        Returns:
            The result of ``model.generate``: token ids, shape (texts, tokens), prompts included.

        Raises:
            InputError: the model generates no text.
        """
        self._require_generate()
        with self.flow.applied(compile=self.compile) as model:
            return model.generate(inputs, **options)  # type: ignore[operator]

    def stream_text(
        self, prompt: Prompt, max_new_tokens: int | None = None, **options: Any
    ) -> TextStream:
        """Generate a text, and return its pieces while they come, without the prompt.

        A thread generates the text, from the first piece that is taken. Texts that are streamed at
        the same time take turns at every token.

        Args:
            prompt: text; or messages of a chat, for tokenizers with a chat template.
            max_new_tokens: maximum number of new tokens; by default the rest of ``context``.
            options: further arguments of ``model.generate``, such as ``do_sample``.

        Returns:
            An iterator over pieces of text. It counts the tokens and measures their speed.

        Raises:
            InputError: the model generates no text; there is no tokenizer; or the prompt and the
                new tokens are longer than ``context``.
        """
        self._require_generate()
        tokens = prompt_tokens(self.tokenizer, prompt)
        length = tokens["input_ids"].shape[1]
        new_tokens = self._new_tokens(length, max_new_tokens)

        def generate(streamer: Any) -> None:
            self.generate(**tokens, max_new_tokens=new_tokens, streamer=streamer, **options)

        return TextStream(self.tokenizer, generate)

    def _require_generate(self) -> None:
        if self.context is None:
            raise InputError(
                f"{type(self.model).__name__} generates no text; call `flow(...)` with its inputs"
            )

    def _new_tokens(self, length: int, wanted: int | None) -> int:
        """Return the maximum number of new tokens behind a prompt of this length."""
        assert self.context is not None
        is_number = isinstance(wanted, int) and not isinstance(wanted, bool)
        if wanted is not None and (not is_number or wanted < 1):
            raise InputError(f"max_new_tokens is {wanted!r}; give a number from 1")
        if self.model.config.is_encoder_decoder:  # type: ignore[union-attr]
            length = 1  # the cache holds the decoder's tokens alone
        room = self.context - length
        if room < (wanted or 1):
            raise InputError(
                f"a text of {length + (wanted or 1)} tokens, {length} of them in the prompt, is"
                f" longer than the context of {self.context} tokens; give a larger context to"
                " from_pretrained, or shorten the text"
            )
        return wanted or room

    def __repr__(self) -> str:
        used = dict.fromkeys(self.placement.layer_devices.values())
        return f"Pretrained({type(self.model).__name__} on {', '.join(used)})"
