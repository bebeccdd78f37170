"""The weights of samples that follow from labels, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from placer.capture.batch_dims.value_names import name_from_path
from placer.capture.pytrees import flatten
from placer.executor.training.loss.label_weights import CountedLabels


def test_counted_labels_are_added_per_sample_along_their_batch_dimension() -> None:
    # two positions of three samples; 0 does not count
    labels = torch.tensor([[1, 0, 2], [2, 2, 0]])
    name = name_from_path(flatten(labels)[1].paths[0])
    counted = CountedLabels(name, dim=1, ignore_index=0, weight=None)
    weighted = replace(counted, weight=torch.tensor([9.0, 1.0, 4.0]))
    assert torch.equal(_sums(counted, labels), torch.tensor([2, 1, 1]))
    assert torch.equal(_sums(weighted, labels), torch.tensor([5.0, 4.0, 4.0]))
    assert torch.equal(_sums(replace(weighted, dim=0), labels), torch.tensor([5.0, 8.0]))
    assert replace(counted, dim=2)(None, labels) is None


def _sums(weights: CountedLabels, labels: torch.Tensor) -> torch.Tensor:
    found = weights(None, labels)
    assert found is not None
    return found
