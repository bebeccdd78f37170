"""Optimizer state that rests on the host between steps, in pinned memory where there are GPUs.

Each device steps its parameters in buckets, and has two buffers for their state. While the
optimizer steps one bucket, the state of the next one is copied to the device::

    to the device    [1][2]    [3]    [4]
    optimizer           [1]    [2]    [3]    [4]
    to the host            [1]    [2]    [3]    [4]

A bucket consists of whole parameters. A parameter that is larger than a bucket is a bucket of its
own, and has a third buffer. ``solver/step/state_on_host.py`` has the memory and the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from placer import devices
from placer.capture.layers import tensor_bytes
from placer.devices import Courier, Lane, Mark, PinnedBlocks
from placer.errors import InputError
from placer.executor.state.state_moves import is_kept_on_host, keep_on_host, state_on_its_device
from placer.optimizers import OptimizerState
from placer.schedule.state_buckets import BUCKET_BYTES, BUFFERS

# Optimizers whose ``load_state_dict`` leaves state on the host.
_loading_to_host: WeakSet[torch.optim.Optimizer] = WeakSet()


@dataclass(eq=False)
class _Bucket:
    """Parameters of one device that are stepped together.

    Attributes:
        device: the device.
        groups: the parameters, by the number of their group in the optimizer.
        buffer: the number of the device's buffer for the state.
        block: the state on the host, one tensor after another; None before the first step.
        places: of each tensor of the state: the parameter's state, the name in it, and the tensor
            in ``block``.
        entries: by parameter, its state and the number of entries when it was brought to ``block``.
    """

    device: torch.device
    groups: dict[int, list[Tensor]]
    buffer: int
    block: Tensor | None = None
    places: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    entries: list[tuple[dict[str, Any] | None, int]] = field(default_factory=list)

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups."""
        return [*chain.from_iterable(self.groups.values())]

    def rests(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether all of the state is in the block."""
        now = self.entries_of(optimizer)
        return (
            len(now) == len(self.entries)
            and all(
                one is other and count == known
                for (one, count), (other, known) in zip(now, self.entries, strict=True)
            )
            and self.are_in_use([view for _, _, view in self.places])
        )

    def entries_of(
        self, optimizer: torch.optim.Optimizer
    ) -> list[tuple[dict[str, Any] | None, int]]:
        """Return the current ``entries``."""
        # ``get``, since indexing would make an empty state
        found = [optimizer.state.get(one) for one in self.parameters]
        return [(state, len(state or ())) for state in found]

    def put(self, views: Sequence[Tensor]) -> None:
        """Give the optimizer these tensors for its state."""
        for (state, name, _), view in zip(self.places, views, strict=True):
            state[name] = view

    def are_in_use(self, views: Sequence[Tensor]) -> bool:
        """Return whether the state still consists of these tensors, which ``put`` gave it."""
        return all(
            state.get(name) is view
            for (state, name, _), view in zip(self.places, views, strict=True)
        )


class HostState:
    """An optimizer whose state rests on the host. A scaler steps it like the optimizer.

    Args:
        optimizer: the optimizer; one of torch's, all of which step each parameter by itself.
        bucket_bytes: of the state and the gradients of the parameters that are stepped together.

    Raises:
        InputError: the optimizer is not torch's, has hooks of its steps, or holds parameters that
            are not plain tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, bucket_bytes: int = BUCKET_BYTES) -> None:
        _refuse_others(optimizer)
        self.optimizer = optimizer
        self.bucket_bytes = bucket_bytes
        self._forget()

    def _forget(self) -> None:
        """Begin without buckets, as before the first step."""
        keep_on_host(self.optimizer)
        _load_to_host(self.optimizer)
        self._courier = Courier()
        self._buckets: list[_Bucket] = []
        self._blocks = PinnedBlocks(0)
        self._planned: list[tuple[int, int, torch.device]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "bucket_bytes": self.bucket_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, whose gradients a scaler unscales."""
        return self.optimizer.param_groups

    @torch.inference_mode(False)
    def step(self) -> None:
        """Step all parameters; then all of the state is in the host's memory.

        If a bucket fails, its parameters and state stay as the optimizer left them, and later
        buckets are not stepped.
        """
        keep_on_host(self.optimizer)
        self._plan()
        for bucket in self._buckets:
            if not bucket.rests(self.optimizer):
                self._pack(bucket)
        queues: dict[torch.device, list[_Bucket]] = {}
        for bucket in self._buckets:
            queues.setdefault(bucket.device, []).append(bucket)
        loading = [_Loading(self._courier, place, own) for place, own in queues.items()]
        try:
            # by turns, so that all devices work at the same time
            for number in range(max(map(len, queues.values()), default=0)):
                for one in loading:
                    if number < len(one.buckets):
                        self._step(one, number)
        finally:
            for one in loading:
                one.finish()

    def _step(self, loading: _Loading, number: int) -> None:
        """Step a bucket, and start to copy the state of the next one meanwhile."""
        bucket = loading.buckets[number]
        for each in loading.buckets[number : number + BUFFERS]:
            if each is bucket or each.buffer != bucket.buffer:
                loading.load(each)
        views = loading.ready(bucket)
        bucket.put(views)
        try:
            with self._only(bucket):
                self.optimizer.step()
        finally:
            is_same = bucket.are_in_use(views)
            if is_same:
                loading.unload(bucket)
                bucket.put([view for _, _, view in bucket.places])
            else:
                loading.release(bucket)
            if not bucket.rests(self.optimizer):
                # the first step, or tensors that the optimizer replaced
                loading.finish()
                self._pack(bucket)

    @contextmanager
    def _only(self, bucket: _Bucket) -> Iterator[None]:
        """Let the optimizer hold only the parameters of a bucket inside the block."""
        groups = self.optimizer.param_groups
        chosen = [groups[number] for number in bucket.groups]
        held = [group["params"] for group in chosen]
        try:
            for group, own in zip(chosen, bucket.groups.values(), strict=True):
                group["params"] = own
            self.optimizer.param_groups = chosen
            yield
        finally:
            self.optimizer.param_groups = groups
            for group, own in zip(chosen, held, strict=True):
                group["params"] = own

    def _plan(self) -> None:
        """Divide the parameters into buckets, unless parameters and devices are the same."""
        parameters = [
            (number, one)
            for number, group in enumerate(self.param_groups)
            for one in group["params"]
        ]
        found = [(number, id(one), devices.location(one)) for number, one in parameters]
        if found == self._planned:
            return
        with devices.unobserved():
            state = OptimizerState(self.optimizer)
            sizes = [state.bytes(one) for _, one in parameters]
        self._blocks = PinnedBlocks(sum(sizes))
        self._buckets = []
        open_now: dict[torch.device, tuple[_Bucket, int]] = {}
        counts: dict[torch.device, int] = {}
        for (number, one), (*_, place), state_bytes in zip(parameters, found, sizes, strict=True):
            size = state_bytes + tensor_bytes(one)
            bucket, used = open_now.get(place, (None, 0))
            if size > self.bucket_bytes:
                self._buckets.append(_Bucket(place, {number: [one]}, BUFFERS))
                continue
            if bucket is None or used + size > self.bucket_bytes:
                bucket, used = _Bucket(place, {}, counts.get(place, 0) % BUFFERS), 0
                counts[place] = counts.get(place, 0) + 1
                self._buckets.append(bucket)
            bucket.groups.setdefault(number, []).append(one)
            open_now[place] = bucket, used + size
        self._planned = found

    @torch.no_grad()
    def _pack(self, bucket: _Bucket) -> None:
        """Bring the state of a bucket, wherever it is, into one block on the host."""
        found = [
            (self.optimizer.state[one], name, value)
            for one in bucket.parameters
            if one in self.optimizer.state
            for name, value in state_on_its_device(one, self.optimizer).items()
        ]
        values = [value for _, _, value in found]
        sizes = [*map(devices.aligned_bytes, values)]
        # Other sizes need another block, as a tensor may be moved to where another one still is.
        if bucket.block is None or sizes != [
            devices.aligned_bytes(view) for _, _, view in bucket.places
        ]:
            bucket.block = self._blocks.taken(sum(sizes))
        views = devices.views(bucket.block, values)
        for view, value in zip(views, values, strict=True):
            if view is not value:
                devices.fill(view, value.detach())
        bucket.places = [
            (state, name, view) for (state, name, _), view in zip(found, views, strict=True)
        ]
        bucket.put(views)
        bucket.entries = bucket.entries_of(self.optimizer)


class _Loading:
    """The buffers of one device during a step.

    Args:
        courier: copies the state.
        device: the device.
        buckets: of the device, in the order of their steps.

    Attributes:
        buckets: as given.
    """

    def __init__(self, courier: Courier, device: torch.device, buckets: list[_Bucket]) -> None:
        self.buckets = buckets
        self._courier, self._device = courier, device
        self._caller = Lane(device, caller=True)
        self._memory: dict[int, Tensor] = {}
        # by buffer, the copy after which it may be overwritten
        self._free: dict[int, Mark] = {}
        self._loaded: dict[_Bucket, tuple[list[Tensor], Mark]] = {}

    def load(self, bucket: _Bucket) -> None:
        """Start to copy a bucket's state to the device, unless it was started."""
        if bucket in self._loaded:
            return
        views: list[Tensor] = []
        copied: Mark = None
        if bucket.block is not None and bucket.places:
            buffer = self._buffer(bucket)
            views = devices.views(buffer, [view for _, _, view in bucket.places])
            free = self._free.get(bucket.buffer)
            copied = self._courier.send(bucket.block, None, buffer, free, "optimizer state")
        self._loaded[bucket] = views, copied

    def _buffer(self, bucket: _Bucket) -> Tensor:
        """Return the part of a buffer that a bucket's state fills."""
        if bucket.buffer not in self._memory:
            size = max(
                one.block.numel()
                for one in self.buckets
                if one.buffer == bucket.buffer and one.block is not None
            )
            self._memory[bucket.buffer] = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._free[bucket.buffer] = self._caller.mark()
        assert bucket.block is not None
        return self._memory[bucket.buffer][: bucket.block.numel()]

    def ready(self, bucket: _Bucket) -> list[Tensor]:
        """Let the caller's work wait for a bucket's state, and return its tensors."""
        views, copied = self._loaded[bucket]
        self._caller.wait(copied)
        return views

    def unload(self, bucket: _Bucket) -> None:
        """Start to copy a bucket's state to the host, behind the caller's work so far."""
        views, _ = self._loaded.pop(bucket)
        if views:
            assert bucket.block is not None
            buffer = self._buffer(bucket)
            self._free[bucket.buffer] = self._courier.send(
                buffer, self._caller.mark(), bucket.block, None, "optimizer state"
            )

    def release(self, bucket: _Bucket) -> None:
        """Let a bucket's buffer be overwritten behind the caller's work so far."""
        del self._loaded[bucket]
        self._free[bucket.buffer] = self._caller.mark()

    def finish(self) -> None:
        """Wait until all copies to the host are done, as the host may read the state then.

        After a failure there may be a copy to the device that no bucket has waited for. The buffers
        must not be freed before it.
        """
        host = Lane(devices.HOST)
        for mark in [*self._free.values(), *(copied for _, copied in self._loaded.values())]:
            host.wait(mark)
            self._caller.wait(mark)


def _refuse_others(optimizer: torch.optim.Optimizer) -> None:
    name, advice = type(optimizer).__name__, "keep its state on the devices"
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        raise InputError(
            f"{name} is not an optimizer of torch.optim, and may not step parameters one by one, "
            f"as state on the host requires; {advice}"
        )
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if any(hooks):
        raise InputError(
            f"{name} has hooks of its step, which would run once for every bucket of parameters "
            f"whose state rests on the host; remove them, or {advice}"
        )
    for group in optimizer.param_groups:
        for one in group["params"]:
            if not devices.is_plain(one):
                raise InputError(
                    f"{name} holds a parameter of type {type(one).__name__} and shape "
                    f"{tuple(one.shape)}, whose state cannot rest on the host; {advice}"
                )


def _load_to_host(optimizer: torch.optim.Optimizer) -> None:
    """Let ``load_state_dict`` leave state on the host, since it may not fit the devices.

    It would copy all state to the devices of the parameters.
    """
    if optimizer in _loading_to_host:
        return
    _loading_to_host.add(optimizer)
    taken: list[dict[str, Any]] = []

    def take(loaded: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
        taken.clear()
        if not is_kept_on_host(loaded):
            return None
        taken.append(given)
        return {**given, "state": {}}

    def put(loaded: torch.optim.Optimizer) -> None:
        for given in taken:
            keys = chain.from_iterable(group["params"] for group in given["param_groups"])
            own = chain.from_iterable(group["params"] for group in loaded.param_groups)
            parameters = dict(zip(keys, own, strict=True))
            for key, state in given["state"].items():
                one = parameters.get(key)
                if one is None:
                    loaded.state[key] = state  # of no parameter
                    continue
                loaded.state[one] = {
                    name: _as_loaded(value, name, one) for name, value in state.items()
                }
        taken.clear()

    optimizer.register_load_state_dict_pre_hook(take)
    optimizer.register_load_state_dict_post_hook(put)


def _as_loaded(value: Any, name: str, parameter: Tensor) -> Any:
    """Return an entry of loaded state as ``load_state_dict`` does, but on the host."""
    if not isinstance(value, Tensor):
        return value
    kept = name == "step" or not parameter.is_floating_point()
    return devices.move(value, devices.HOST).to(dtype=value.dtype if kept else parameter.dtype)
