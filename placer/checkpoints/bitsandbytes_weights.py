"""Weights that bitsandbytes quantised, put together from their keys in a checkpoint.

A checkpoint holds a four-bit weight as packed numbers and the state of their quantisation::

    layer.weight                                    uint8, two numbers in each
    layer.weight.absmax, layer.weight.quant_map     and, if scales are quantised, nested_...
    layer.weight.quant_state.bitsandbytes__nf4      settings

and an eight-bit weight as ``layer.weight`` (int8), ``layer.SCB`` (scales) and
``layer.weight_format``.

Source: ``Linear4bit`` and ``Linear8bitLt`` of bitsandbytes.nn (read for version 0.50).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn

_SETTINGS = ".weight.quant_state.bitsandbytes__"
"""Part of the key of a four-bit weight's settings; the name of the format follows."""


def joined(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a checkpoint with one parameter for each weight of bitsandbytes.

    The modules of such weights get the parameter, because its shape is not the layer's.

    Args:
        model: whose layers of bitsandbytes read the weights.
        values: by the names of the model.
    """
    found = dict(values)
    for path, module in model.named_modules():
        if not type(module).__module__.startswith("bitsandbytes."):
            continue
        prefix = f"{path}." if path else ""
        data = found.get(f"{prefix}weight")
        if isinstance(data, Tensor):
            # the layer's class has imported it; only users of bitsandbytes need it
            library = import_module("bitsandbytes.nn")
            for make in (_four_bits, _eight_bits):
                weight = make(library, prefix, data, found)
                if weight is not None:
                    found[f"{prefix}weight"] = module.weight = weight
    return found


def unread(keys: list[str]) -> bool:
    """Return whether unknown keys belong to weights of bitsandbytes."""
    return any(_SETTINGS in key or key.endswith(".SCB") for key in keys)


def _four_bits(
    library: Any, prefix: str, data: Tensor, values: dict[str, Any]
) -> nn.Parameter | None:
    """Return a four-bit weight, and take its state out of the values; None if it has none."""
    start = f"{prefix}weight."
    names = [name for name in values if name.startswith(start)]
    if not any(_SETTINGS in f".{name}" for name in names):
        return None
    state = {name.removeprefix(start): values.pop(name) for name in names}
    made: nn.Parameter = library.Params4bit.from_prequantized(data, state, device="cpu")
    return made


def _eight_bits(
    library: Any, prefix: str, data: Tensor, values: dict[str, Any]
) -> nn.Parameter | None:
    """Return an eight-bit weight, and take its scales out of the values; None without them."""
    scales = values.pop(f"{prefix}SCB", None)
    if scales is None:
        return None
    # the layer takes the numbers from CB when it runs for the first time
    made: nn.Parameter = library.Int8Params(
        data, False, has_fp16_weights=False, CB=data, SCB=scales
    )
    return made
