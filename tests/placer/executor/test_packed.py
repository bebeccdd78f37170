"""Packed sequences: their lengths are on the host, where torch wants them, and the rest follows the
map."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from splitting import assert_same, step, twins
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import placer
from placer import DataFlow, devices
from placer.profiler.profile import profile
from placer.testing import logical_devices

TOKENS = torch.randint(30, (4, 7), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([5, 7, 2, 4])


class _Encoder(nn.Module):
    """It is given the lengths, and packs by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> PackedSequence:
        packed, _ = self.rnn(
            pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        )
        assert isinstance(packed, PackedSequence)
        return packed


class _Tagger(nn.Module):
    """Layers that are given lengths, a packed sequence, and a padded one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(30, 6), _Encoder()
        self.decoder, self.head = nn.LSTM(6, 6, 2, bidirectional=True), nn.Linear(12, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.decoder(self.encoder(self.embedding(tokens), lengths))
        padded, _ = pad_packed_sequence(packed, batch_first=True, total_length=tokens.shape[1])
        result: Tensor = self.head(padded)
        return result


def _placed(model: nn.Module, names: list[str]) -> DataFlow:
    flow = DataFlow(model, names)
    flow.layer_gpus.update(
        zip(("embedding", "encoder", "decoder", "head"), names * 2, strict=False)
    )
    flow.update_flow()
    return flow


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_packs_gives_what_it_gives_unsplit(training: bool) -> None:
    model, whole = twins(_Tagger, training=training)
    with logical_devices(3):
        flow = _placed(model, ["cpu:0", "cpu:1", "cpu:2"])
        split = step(flow, model, (TOKENS, LENGTHS), {})
        assert flow.not_captured_because
    assert_same(split, step(whole, whole, (TOKENS, LENGTHS), {}))


def test_the_lengths_of_a_packed_sequence_stay_on_the_host() -> None:
    model, _ = twins(_Tagger)
    places: list[Any] = []

    def note(_: nn.Module, args: tuple[PackedSequence]) -> None:
        places.extend(devices.location(tensor) for tensor in args[0][:2])

    model.decoder.register_forward_pre_hook(note)
    with logical_devices(3) as (_, _, last):
        _placed(model, ["cpu:0", "cpu:1", "cpu:2"])(TOKENS, LENGTHS)
    assert places == [last, torch.device("cpu")]


def test_it_is_profiled() -> None:
    with logical_devices(2):
        found = profile(
            _Tagger(), (TOKENS, LENGTHS), ["cpu:0", "cpu:1"], progress=False, repeats=1, cache=False
        )
    assert {"embedding", "encoder", "decoder", "head"} <= {
        layer.name.split(".")[0] for layer in found.layers
    }


@pytest.mark.gpu
def test_on_a_gpu_a_model_that_packs_is_placed_and_gives_what_it_gives_unsplit() -> None:
    model, whole = twins(_Tagger)
    names = [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]
    placement = placer.suggest(model, (TOKENS, LENGTHS), devices=names, progress=False)
    flow = DataFlow(model, names)
    flow.update_flow(placement)
    with torch.backends.cudnn.flags(enabled=False):
        split = step(flow, model, (TOKENS, LENGTHS), {})
    assert_same(split, step(whole, whole, (TOKENS, LENGTHS), {}))
