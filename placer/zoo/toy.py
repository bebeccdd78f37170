"""The two linear layers of PyTorch's model-parallel tutorial, before the split."""

from __future__ import annotations

from torch import Tensor, nn


class ToyModel(nn.Module):
    """Linear, ReLU, linear: ``(N, features)`` to ``(N, outputs)``.

    Args:
        features: of the input and between the two linear layers.
        outputs: of the second linear layer.
    """

    def __init__(self, features: int = 10, outputs: int = 5) -> None:
        super().__init__()
        self.net1 = nn.Linear(features, features)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs of shape ``(N, outputs)`` for an input of shape ``(N, features)``."""
        y: Tensor = self.net2(self.relu(self.net1(x)))
        return y
