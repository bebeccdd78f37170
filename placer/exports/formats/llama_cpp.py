"""llama.cpp's number of layers on GPUs, and their division among GPUs."""

from __future__ import annotations

import re
import shlex
import struct
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from placer.errors import InputError, PlacementError
from placer.exports.block_counts import BlockCounts, around_blocks, known_blocks, units_with_ends
from placer.exports.plan import Plan
from placer.exports.units import Unit
from placer.schema.base import in_order
from placer.schema.request import PlacementRequest
from placer.utils.units import count_text

EMBEDDING, OUTPUT = "embedding", "output layer"
"""Names of the units around the blocks."""
OPTIONS = {
    "layers": ("-ngl", "--gpu-layers", "--n-gpu-layers", "LLAMA_ARG_N_GPU_LAYERS"),
    "split": ("-ts", "--tensor-split", "LLAMA_ARG_TENSOR_SPLIT"),
    "mode": ("-sm", "--split-mode", "LLAMA_ARG_SPLIT_MODE"),
    "device": ("-dev", "--device", "LLAMA_ARG_DEVICE"),
}
"""The options and environment variables that place layers, by what they say."""
EVERY = ("all", "auto", "-1", "-2")
"""Values of ``--n-gpu-layers`` that mean all layers; ``auto`` where they fit."""


class LlamaCpp(BlockCounts):
    """The options ``--n-gpu-layers 33 --tensor-split 9,8,16``.

    Blocks and the output layer are one line of layers. The last ``--n-gpu-layers`` of them are on
    GPUs, in proportion to ``--tensor-split``. The others are on the host, as is the embedding::

        blocks  0    1    2    3    output      --n-gpu-layers 4 --tensor-split 2,2
               host |  GPU 0  |   GPU 1
    """

    name = "llama.cpp"
    title = "--n-gpu-layers and --tensor-split of llama.cpp"
    source = (
        "src/llama-model.cpp, load_tensors, and common/arg.cpp of ggml-org/llama.cpp, at commit "
        "0c1e5709"
    )
    trains = False
    copies_shared = True

    def restricted(self, request: PlacementRequest) -> PlacementRequest:
        """Return the request with the embedding, or else the first layers, on the host.

        If the host is one of the devices, it has the embedding, and no value comes back to it. If
        not, the embedding counts for the first GPU.

        Raises:
            InputError: the embedding is pinned to a GPU although the host is one of the devices.
        """
        names = [device.name for device in request.devices]
        hosts = _hosts(names)
        layers = [layer.name for layer in request.profile.layers]
        before, _ = around_blocks(layers)
        rules = request.constraints
        if not hosts:
            first = layers[: len(before) + 1]
            rules = rules.model_copy(update={"colocated": (*rules.colocated, tuple(first))})
            return request.model_copy(update={"constraints": rules}) if before else request
        gpus = tuple(name for name in names if name not in hosts)
        for layer in before:
            if rules.pinned.get(layer) in gpus:
                raise InputError(
                    f"constraints.pinned pins {layer!r} to {rules.pinned[layer]!r}, and llama.cpp "
                    f"keeps the embedding on the host; pin it to {hosts[0]!r}, or leave it out"
                )
        banned = {layer: (*rules.forbidden.get(layer, ()), *gpus) for layer in before}
        rules = rules.model_copy(update={"forbidden": in_order({**rules.forbidden, **banned})})
        changed: dict[str, object] = {"constraints": rules}
        if not request.is_training:  # gradients would need these links
            cluster = request.placed_on
            links = tuple(link for link in cluster.links if link.target not in hosts)
            changed["cluster"] = cluster.model_copy(update={"links": links})
        return request.model_copy(update=changed)

    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return the embedding, the blocks and the output layer; see ``BlockCounts.units``."""
        return units_with_ends(super().units(layers), layers, EMBEDDING, OUTPUT)

    def text(self, plan: Plan) -> str:
        """Return both options; see ``Format.text``."""
        counts = self._gpu_layers(plan)
        split = f" --tensor-split {','.join(map(str, counts.values()))}" if counts else ""
        return f"--n-gpu-layers {sum(counts.values())}{split}"

    def notes(self, plan: Plan) -> list[str]:
        """Return the devices to name, and where the embedding is; see ``Format.notes``."""
        gpus = list(self._gpu_layers(plan))
        if not gpus:
            return super().notes(plan)
        if all(gpu.startswith("cuda:") for gpu in gpus):
            names = ",".join(gpu.replace("cuda:", "CUDA") for gpu in gpus)
            found = [f"Start llama.cpp with --device {names}."]
        else:
            found = [f"The GPUs of llama.cpp (--device), in order, are {', '.join(gpus)}."]
        return [*found, "llama.cpp keeps the embedding on the host.", *super().notes(plan)]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``.

        The text is a command line, or only its options. ``--device`` with names such as ``CUDA1``
        selects and orders the GPUs. Options without a meaning for layers are ignored. The devices
        are the GPUs in llama.cpp's order and, if it keeps layers there, the host (``cpu:0``). CPU
        stand-ins count as GPUs if no device is a GPU.
        """
        options = _options(text)
        hosts = _hosts(devices)
        gpus = [device for device in devices if device not in hosts]
        if "device" in options:
            gpus = _named_gpus(options["device"], gpus)
        units = self.units(layers)
        blocks = [unit for unit in units if unit.keys[0] not in (EMBEDDING, OUTPUT)]
        count = known_blocks(blocks)
        # llama.cpp counts the output as one layer more, and keeps the first layers on the host.
        on_gpus = _gpu_layer_count(options.get("layers", "auto"), count + 1)
        split = _split_points(options.get("split"), gpus) if on_gpus else []
        on = [*hosts[:1] * (count + 1 - on_gpus)]
        if len(on) < count + 1 - on_gpus:
            raise InputError(
                f"--n-gpu-layers {on_gpus} keeps {count + 1 - on_gpus} of {count + 1} layers on "
                "the host, which is not one of the devices; add the device 'cpu:0'"
            )
        # As in llama.cpp, single precision decides at a split point.
        for layer in range(on_gpus):
            on.append(gpus[bisect_right(split, _float32(layer / on_gpus))])
        found = self.placed_blocks(blocks, on)
        ends = {EMBEDDING: hosts[0] if hosts else on[0], OUTPUT: on[-1]}
        for unit in units:
            if unit not in blocks:
                found |= dict.fromkeys(unit.layers, ends[unit.keys[0]])
        return {layer: found[layer] for layer in layers}

    def _gpu_layers(self, plan: Plan) -> dict[str, int]:
        """Return the number of layers on each GPU, by the GPU's name, in pipeline order.

        Raises:
            PlacementError: the format cannot express the placement.
        """
        hosts = _hosts(plan.devices or list(plan.layer_devices.values()))
        units = self.units(list(plan.layer_devices))
        if units[0].keys[0] == EMBEDDING:
            embedding, first = (plan.layer_devices[unit.layers[0]] for unit in units[:2])
            if embedding != first and embedding not in hosts:
                raise PlacementError(
                    f"{self.title} keep the embedding on the host, and this placement has it on "
                    f"{embedding} and the first block on {first}: {self.advice}"
                )
        segments = self.segments(plan)
        for segment in segments[1:]:
            if segment.device in hosts:
                raise PlacementError(
                    f"{self.title} keep the first layers on the host, and this placement has "
                    f"{segment.units[0].layers[0]!r} on {segment.device} after layers on "
                    f"{segments[0].device}: {self.advice}"
                )
        blocks = [unit for unit in units if unit.keys[0] not in (EMBEDDING, OUTPUT)]
        sizes = self.sizes(plan, blocks)
        for unit in units:
            sizes.setdefault(unit, int(unit.keys[0] == OUTPUT))
        counts = {
            segment.device: sum(sizes[unit] for unit in segment.units) for segment in segments
        }
        if units[-1].keys[0] != OUTPUT:  # llama.cpp has one, which computes nothing in this model
            counts[segments[-1].device] += 1
        return {device: count for device, count in counts.items() if device not in hosts}


def _hosts(devices: Sequence[str]) -> list[str]:
    """Return the devices that are the host: CPUs, if there are other devices."""
    cpus = [device for device in devices if device.rpartition("/")[2].partition(":")[0] == "cpu"]
    return list(dict.fromkeys(cpus)) if set(cpus) != set(devices) else []


def _options(text: str) -> dict[str, str]:
    """Return the values of the options that place layers, by what they say."""
    try:
        words = [part for word in shlex.split(text) for part in word.split("=", 1)]
    except ValueError as error:
        raise InputError(f"{text.strip()!r:.80} is not a command line: {error}") from error
    found = {}
    for what, names in OPTIONS.items():
        at = [index for index, word in enumerate(words) if word in names]
        if at and at[-1] + 1 == len(words):
            raise InputError(f"{words[-1]} has no value in {text.strip()!r:.80}; give one")
        if at:
            found[what] = words[at[-1] + 1]  # the last one counts, as in llama.cpp
    if found.get("mode", "layer") != "layer":
        raise InputError(
            f"--split-mode is {found['mode']!r}, and Placer judges whole layers on devices; use "
            "--split-mode layer"
        )
    if not found.keys() & {"layers", "split"}:
        raise InputError(
            f"{text.strip()!r:.80} has neither --n-gpu-layers nor --tensor-split; give both, such "
            "as --n-gpu-layers 33 --tensor-split 9,8,16"
        )
    return found


def _named_gpus(value: str, gpus: Sequence[str]) -> list[str]:
    """Return the GPUs that ``--device CUDA1,CUDA0`` names, in its order."""
    names = {gpu.replace("cuda:", "CUDA"): gpu for gpu in gpus}
    for name in value.split(","):
        if name not in names:
            raise InputError(
                f"--device names {name!r}, which is not one of {', '.join(names)}; give its device"
            )
    return [names[name] for name in value.split(",")]


def _gpu_layer_count(value: str, most: int) -> int:
    """Return the number of layers on GPUs, the output layer included."""
    if value in EVERY:
        return most
    if not value.isdecimal():
        raise InputError(f"--n-gpu-layers is {value!r:.80}; give a number, 'all' or 'auto'")
    return min(int(value), most)


def _split_points(value: str | None, gpus: Sequence[str]) -> list[float]:
    """Return where the share of each GPU ends, from 0 to 1, in llama.cpp's single precision."""
    try:
        shares = [float(share) for share in re.split(r"[,/]+", value)] if value else []
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share < inf for share in shares):
        raise InputError(
            f"--tensor-split is {value!r:.80}; give the proportion of each GPU, such as 3,1"
        )
    if any(shares[len(gpus) :]):
        raise InputError(
            f"--tensor-split {value} has shares for {len(shares)} GPUs, and there are "
            f"{count_text(len(gpus), 'GPU')}; give as many devices"
        )
    shares = [*shares, *[0.0] * len(gpus)][: len(gpus)]
    if len(gpus) == 1:
        return [1.0]
    if not any(shares):
        raise InputError(
            "--tensor-split gives no GPU a share, so llama.cpp divides layers by the memory that "
            "is free when it starts; give the proportion of each GPU, such as 3,1"
        )
    ends = list(accumulate(shares, lambda total, share: _float32(total + share)))
    return [_float32(end / ends[-1]) for end in ends]


def _float32(value: float) -> float:
    """Return the nearest number in single precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
