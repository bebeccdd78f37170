"""What holds a tensor's data: the tensor itself, or the dense tensors that a sparse one is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a tensor's data are in; of a sparse one its values come last."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where the data of tensors are, each of their parts: other numbers where one was moved or replaced."""
    try:
        return [*map(Tensor.data_ptr, tensors)]
    except RuntimeError:  # one is sparse
        return [part.data_ptr() for tensor in tensors for part in parts(tensor)]
