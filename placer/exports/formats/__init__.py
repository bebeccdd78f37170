"""The formats of other engines, one module each."""

from __future__ import annotations

from typing import Any

from placer.errors import InputError, kind_of
from placer.exports.format import Format
from placer.exports.formats.accelerate import Accelerate
from placer.exports.formats.deepspeed import DeepSpeed
from placer.exports.formats.llama_cpp import LlamaCpp
from placer.exports.formats.megatron import Megatron
from placer.exports.formats.pipedream import PipeDream
from placer.exports.formats.pipelining import Pipelining
from placer.exports.formats.piper import Piper
from placer.exports.formats.torchgpipe import TorchGPipe
from placer.exports.formats.torchtitan import TorchTitan
from placer.exports.formats.vllm import VLLM
from placer.schema.faults import similar

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Accelerate(),
        DeepSpeed(),
        LlamaCpp(),
        Megatron(),
        PipeDream(),
        Pipelining(),
        Piper(),
        TorchGPipe(),
        TorchTitan(),
        VLLM(),
    )
}
"""Each format, by the name that users write."""


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
            f"there is no format {name!r}; give one of {', '.join(FORMATS)}{similar(name, FORMATS)}"
        )
    return found
