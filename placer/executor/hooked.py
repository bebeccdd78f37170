"""Running a model that cannot be captured, through forward hooks: micro-batches one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from placer.executor.pipeline import to_device
from placer.executor.state.assignment import Assignment
from placer.graph import checkpoints
from placer.graph.alignment import Alignment, Arrivals
from placer.graph.structure import Structure, flatten
from placer.graph.trace import refuse_scripts


class HookPath:
    """The hooks of one model; between runs there are none, unless a backward pass will run modules again.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._arrivals: Arrivals | None = None

    def run(
        self, assignment: Assignment, parts: Sequence[Sequence[Any]], inputs: Structure, target: torch.device
    ) -> tuple[list[list[Any]], Structure, Any]:
        """Run every micro-batch.

        Args:
            assignment: the devices of the modules, whose state is there.
            parts: the flattened inputs of each.
            inputs: their structure.
            target: where results go.

        Returns:
            The flattened results of each, their structure, and what the last one was given, as the model left it.

        Raises:
            CaptureError: a module allows no hooks.
        """
        refuse_scripts(self._module, "the model could not be captured")
        modules = {
            child: place
            for path, child in self._module.named_modules()
            if path and (place := assignment.of_path(path)) is not None
        }
        self.leave()
        alignment = Alignment()
        arrivals = Arrivals(modules, alignment)
        results: list[list[Any]] = []
        again: list[str] = []
        try:
            with checkpoints.noticed(self._module, reentrant=True) as again:
                for part in parts:
                    args, kwargs = inputs.unflatten(part)
                    with alignment:
                        leaves, structure = flatten(self._module(*args, **kwargs))
                    results.append(to_device(leaves, target))
        finally:
            if again:
                arrivals.stay(map(self._module.get_submodule, again))
                self._arrivals = arrivals
            else:
                arrivals.remove()
        return results, structure, (args, kwargs)

    def leave(self) -> None:
        """Take hooks away that a run left for its backward pass."""
        if self._arrivals is not None:
            self._arrivals.remove()
            self._arrivals = None
