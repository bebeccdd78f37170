"""Layers quantised by torchao and bitsandbytes, and what each stores; both support CPUs.

Both libraries import all of torch's compiler. A layer that is made imports its library, so that
processes that collect tests need not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from weight_kinds import Kind

WIDTH = 64


def _torchao(config: str, names: tuple[str, ...], **options: Any) -> Kind:
    def make() -> nn.Module:
        from torchao import quantization

        layer = nn.Linear(WIDTH, WIDTH)
        quantization.quantize_(layer, getattr(quantization, config)(**options))
        return layer

    def stored(layer: Any) -> list[Tensor]:
        return [*(getattr(layer.weight, name) for name in names), layer.bias]

    return Kind(make, stored, trained=True, width=WIDTH)


def _four_bits(packed: bool, **options: Any) -> Kind:
    def make() -> nn.Module:
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, **options).to(
            "cpu"
        )
        layer.weight.requires_grad_(False)
        # On a CPU with AVX-512 the first call in evaluation mode packs the weight in another way.
        layer.support_avx512bf16_for_cpu = layer.support_avx512bf16_for_cpu and packed
        with torch.no_grad():
            layer.eval()(torch.zeros(2, WIDTH))
        return layer

    def stored(layer: Any) -> list[Tensor]:
        states = [layer.weight.quant_state]
        if getattr(states[0], "state2", None) is not None:
            states.append(states[0].state2)
        found = [
            getattr(state, name, None) for state in states for name in ("absmax", "code", "offset")
        ]
        return [layer.weight.data, layer.bias, *(tensor for tensor in found if tensor is not None)]

    return Kind(make, stored, captured=False, trained=True, width=WIDTH)


def _eight_bits(has_run: bool) -> Kind:
    def make() -> nn.Module:
        import bitsandbytes

        layer = bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False).to("cpu")
        if has_run:  # the first call moves the state from the weight to the module
            with torch.no_grad():
                layer.eval()(torch.zeros(2, WIDTH))
        return layer

    def stored(layer: Any) -> list[Tensor]:
        scale = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
        return [layer.weight.data, scale, layer.bias]

    return Kind(make, stored, captured=False, trained=True, width=WIDTH)


QUANTISED: dict[str, Kind] = {
    "torchao int8 weights": _torchao("Int8WeightOnlyConfig", ("qdata", "scale", "zero_point")),
    "torchao int8 activations": _torchao(
        "Int8DynamicActivationInt8WeightConfig", ("qdata", "scale", "zero_point")
    ),
    "torchao int4 weights": _torchao(
        "IntxWeightOnlyConfig", ("qdata", "scale", "zero_point"), weight_dtype=torch.int4
    ),
    "torchao int4 weights, int8 activations": _torchao(
        "Int8DynamicActivationIntxWeightConfig",
        ("qdata", "scale", "zero_point"),
        weight_dtype=torch.int4,
    ),
    "torchao float8 weights": _torchao("Float8WeightOnlyConfig", ("qdata", "scale")),
    "bitsandbytes nf4": _four_bits(False, quant_type="nf4", compress_statistics=False),
    "bitsandbytes nf4 twice": _four_bits(False, quant_type="nf4", compress_statistics=True),
    "bitsandbytes fp4": _four_bits(False, quant_type="fp4", compress_statistics=False),
    "bitsandbytes nf4 packed": _four_bits(True, quant_type="nf4", compress_statistics=False),
    "bitsandbytes nf4 twice packed": _four_bits(True, quant_type="nf4", compress_statistics=True),
    "bitsandbytes int8": _eight_bits(False),
    "bitsandbytes int8 that has run": _eight_bits(True),
}
