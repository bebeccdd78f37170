"""The formats of other engines, one module each."""

from __future__ import annotations

from typing import Any

from placer.errors import InputError, kind_of
from placer.exports.format import Format
from placer.exports.formats.llama_cpp import LlamaCpp
from placer.exports.formats.megatron import Megatron
from placer.exports.formats.pipedream import PipeDream
from placer.exports.formats.piper import Piper
from placer.exports.formats.vllm import VLLM
from placer.schema.faults import nearest

FORMATS: dict[str, Format] = {
    form.name: form for form in (LlamaCpp(), Megatron(), PipeDream(), Piper(), VLLM())
}
"""Each format, by the name that users write."""

__all__ = ["FORMATS", "format_named"]


def format_named(name: Any) -> Format:
    """Return a format by its name.

    Raises:
        InputError: there is no such format.
    """
    if not isinstance(name, str):
        raise InputError(f"format is {kind_of(name)}; give one of {', '.join(FORMATS)}")
    found = FORMATS.get(name)
    if found is None:
        raise InputError(
            f"there is no format {name!r}; give one of {', '.join(FORMATS)}"
            f"{nearest(name, list(FORMATS))}"
        )
    return found
