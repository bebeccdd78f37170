"""DataFlows: the flows of several models that are used one after another, as in a pipeline.

    found = placer.suggest_together(models)
    flows = placer.DataFlows(models, found)
    with flows.applied():
        image = pipe(prompt).images[0]        # the pipeline calls its models as always
    flows.undo()

Recorded passes keep their memory. If a model lacks memory, the recorded passes of the other models
are discarded, and recorded again when they come again::

    unet(x)     ──▶ recorded, keeps its activations
    decoder(z)  ──▶ out of memory ──▶ discard the passes of unet ──▶ decoder(z)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from placer.devices import DeviceLike
from placer.errors import InputError, kind_of
from placer.executor.dataflow import DataFlow
from placer.executor.placed_calls import nothing_freed
from placer.schema.joint import JointPlacement

__all__ = ["DataFlows"]


class DataFlows(Mapping[str, DataFlow]):
    """A flow for each of several models, placed together; a mapping from names to flows.

    Args:
        models: the models by name, or the ``ModelUse`` of each, as ``suggest_together`` takes them.
        placement: of all of them, as ``suggest_together`` returns it.
        device_ids: devices that layers may run on, as for ``DataFlow``.
        output_device: the device of results of all models, as for ``DataFlow``.

    Raises:
        InputError: the names of the models are not the names of the placements, or there are no
            placements.
        PlacementError: a placement is of another model, or does not fit into memory. No model is
            moved then.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        placement: JointPlacement,
        device_ids: Sequence[DeviceLike] | int | None = None,
        output_device: DeviceLike | None = None,
    ) -> None:
        modules = _modules(models, placement)
        self._flows = {
            name: DataFlow(module, device_ids, output_device) for name, module in modules.items()
        }
        with ExitStack() as undone:
            for name, flow in self._flows.items():
                flow.update_flow(placement.placements[name])
                undone.callback(flow.undo)
            undone.pop_all()
        for name, flow in self._flows.items():
            flow.calls.make_room = partial(self._discard_recordings, name)

    def __getitem__(self, name: str) -> DataFlow:
        return self._flows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._flows)

    def __len__(self) -> int:
        return len(self._flows)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let all models run placed inside the block; see ``DataFlow.applied``."""
        with ExitStack() as stack:
            for flow in self._flows.values():
                stack.enter_context(flow.applied())
            yield

    def undo(self) -> None:
        """Restore the devices and flags of all models."""
        for flow in self._flows.values():
            flow.calls.make_room = nothing_freed
            flow.undo()

    def _discard_recordings(self, needed_by: str) -> bool:
        """Discard the recorded passes of all models but one; return whether there were any."""
        others = [flow for name, flow in self._flows.items() if name != needed_by]
        found = [flow for flow in others if flow.calls.streams.pipelines()]
        for flow in found:
            with flow.lock:  # another thread may replay them
                flow.calls.streams.clear()
        return bool(found)


def _modules(models: Any, placement: Any) -> dict[str, nn.Module]:
    """Return the modules by name.

    Raises:
        InputError: they do not belong to the placement.
    """
    if not isinstance(models, Mapping):
        raise InputError(f"models is {kind_of(models)}; give a dict from names to models")
    if not isinstance(placement, JointPlacement):
        raise InputError(
            f"placement is {kind_of(placement)}; give the JointPlacement that "
            "placer.suggest_together returned"
        )
    if models.keys() != placement.runs.keys():
        raise InputError(
            f"models names {', '.join(map(repr, models))}, but the placement has "
            f"{', '.join(map(repr, placement.runs))}; give the models that were placed together"
        )
    if not placement.placements:
        raise InputError(
            f"the placement has status {placement.joint.status!r}, so no model has a device; allow "
            "more memory or devices"
        )
    return {name: _module(one) for name, one in models.items()}


def _module(given: Any) -> Any:
    """Return the module of a ``ModelUse``, or what was given."""
    # some modules have a submodule of this name
    return given if isinstance(given, nn.Module) else getattr(given, "model", given)
