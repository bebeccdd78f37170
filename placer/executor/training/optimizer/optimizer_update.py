"""The end of a training step: unscale gradients, clip them, step the optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from placer.capture.argument_checks import optimizer_list, refuse_closures
from placer.errors import InputError, PlacerError, kind_of
from placer.executor.training.optimizer.host_state import HostState
from placer.schema.base import StatePlace
from placer.utils.error_translation import ErrorTranslation

# Required methods of a gradient scaler.
_OF_SCALERS = ("scale", "unscale_", "step", "update", "is_enabled")


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""The optimizers of a training step: one, a list, or None."""


@dataclass
class Update:
    """The end of a training step, for parameters on any devices.

    Args:
        optimizer: the optimizer to step, or a list, stepped in order; None to leave the step to the
            caller.
        scaler: a ``torch.amp.GradScaler``. Gradients are of the scaled loss, and an infinite
            gradient on any device skips the optimizer's step on all devices. Each optimizer of a
            list decides separately, as in a loop that calls ``scaler.step`` for each.
        max_norm: the maximum total norm of the gradients; None for no clipping.
        optimizer_state: where the optimizers' state is between steps, ``"device"`` or ``"host"``.

    Attributes:
        optimizers: as a list.
        steppers: what steps each optimizer: itself, or the keeper of its state on the host.
        norm: total norm of the latest gradients before clipping; None without clipping.

    Raises:
        InputError: if an optimizer does not support several devices, or state on the host where
            that is asked for, a scaler has no optimizer, ``max_norm`` is not a positive number, or
            ``optimizer_state`` is another word.
    """

    optimizer: Optimizers = None
    scaler: Any = None
    max_norm: float | None = None
    optimizer_state: StatePlace = "device"
    norm: Tensor | None = None
    optimizers: list[Any] = field(init=False)
    steppers: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.optimizers = optimizer_list(self.optimizer)
        for optimizer in self.optimizers:
            _refuse_no_optimizer(optimizer)
            refuse_closures(optimizer)
            if isinstance(optimizer, torch.optim.SparseAdam):
                raise InputError(
                    "SparseAdam needs sparse gradients, and a training step makes dense ones; "
                    "give another optimizer, such as SGD or Adagrad, or call the flow, "
                    "loss.backward() and optimizer.step() yourself"
                )
        if self.scaler is not None and not self.optimizers:
            raise InputError(
                "a scaler skips and unscales the optimizer's steps: give train_step the optimizer "
                "too"
            )
        if self.scaler is not None and not all(
            callable(getattr(self.scaler, name, None)) for name in _OF_SCALERS
        ):
            raise InputError(
                f"scaler is {self.scaler!r}; give a torch.amp.GradScaler, or leave it out"
            )
        number = isinstance(self.max_norm, int | float) and not isinstance(self.max_norm, bool)
        if self.max_norm is not None and not (
            number and self.max_norm > 0 and math.isfinite(self.max_norm)
        ):
            raise InputError(f"max_norm={self.max_norm!r}: give a positive number, or leave it out")
        if self.optimizer_state not in get_args(StatePlace):
            raise InputError(
                f"optimizer_state={self.optimizer_state!r}: give 'device' or 'host', or leave it "
                "out for the placement's"
            )
        self.steppers = [*map(HostState, self.optimizers)] if self.is_on_host else self.optimizers

    @property
    def is_on_host(self) -> bool:
        """Return whether the optimizers' state rests on the host between steps."""
        return self.optimizer_state == "host"

    @property
    def count(self) -> int:
        """Return the number of parameters that the optimizers step; cheap enough for every step."""
        return sum(len(group["params"]) for group in self._groups)

    def parameters(self) -> list[Tensor]:
        """Return the parameters that the optimizers step, as listed in ``param_groups``."""
        return [parameter for group in self._groups for parameter in group["params"]]

    @property
    def _groups(self) -> list[Mapping[str, Any]]:
        return [
            group
            for optimizer in self.optimizers
            for group in getattr(optimizer, "param_groups", ())
        ]

    def scale(self, device: torch.device) -> Tensor | None:
        """Return the factor of the loss before backward; None for 1.

        Args:
            device: of the loss.
        """
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        scale: Tensor = self.scaler.scale(torch.ones((), device=device))
        return scale

    def __call__(self, module: nn.Module) -> None:
        """Update the parameters of a module from their gradients.

        After an error, parameters and gradients stay as the optimizer left them, and the next step
        starts fresh.
        """
        try:
            self._step(module)
        except BaseException as error:
            error.add_note(
                "in the optimizer's part of a training step: gradients are in place, and "
                "parameters as it left them"
            )
            if self.scaler is not None:
                # otherwise the scaler would treat the next batch's gradients as unscaled already
                with suppress(Exception):
                    self.scaler.update()
            raise

    def _step(self, module: nn.Module) -> None:
        self._clip(module)
        for optimizer, stepper in zip(self.optimizers, self.steppers, strict=True):
            with ErrorTranslation(partial(_named, optimizer)):
                if self.scaler is None:
                    stepper.step()
                    continue
                with _overflow_counted_once(stepper):
                    self.scaler.step(stepper)
        if self.scaler is not None:
            self.scaler.update()

    def _clip(self, module: nn.Module) -> None:
        if self.max_norm is None:
            return
        if self.scaler is not None:
            for stepper in self.steppers:
                self.scaler.unscale_(stepper)
        # torch sums the norms of parameters on several devices
        self.norm = nn.utils.clip_grad_norm_(module.parameters(), self.max_norm)


def _refuse_no_optimizer(given: Any) -> None:
    if isinstance(given, type):
        wanted = f"{given.__name__}(flow.parameters(), ...)"
        raise InputError(
            f"optimizer is the class {given.__name__}; give an instance, such as {wanted}"
        )
    if isinstance(given, LRScheduler):
        raise InputError(
            f"optimizer is {kind_of(given)}, which steps no parameters; give the optimizer that it "
            "was made for, and step the scheduler yourself"
        )
    if not callable(getattr(given, "step", None)):
        raise InputError(f"optimizer is {given!r}; give a torch.optim.Optimizer, or a list of them")


def _named(optimizer: Any, error: BaseException) -> BaseException:
    """Return an InputError for an optimizer that fails without a closure.

    Its ``step`` has a default for the closure, so this shows only when it runs.
    """
    called_none = isinstance(error, TypeError) and "'NoneType' object is not callable" in str(error)
    asks = (
        isinstance(error, Exception)
        and not isinstance(error, PlacerError)
        and "closure" in str(error).lower()
    )
    if not (called_none or asks):
        return error
    named = InputError(
        f"{type(optimizer).__name__}.step() failed without a closure ({type(error).__name__}: "
        f"{error}); a training step evaluates the loss once, so give an optimizer that steps by "
        "gradients alone, such as AdamW"
    )
    named.__cause__ = error
    return named


@contextmanager
def _overflow_counted_once(optimizer: Any) -> Iterator[None]:
    """Let a fused optimizer skip its step if gradients overflowed on several devices.

    A scaler passes it the number of those devices, and its kernels skip at exactly 1.
    """
    hooks = getattr(optimizer, "register_step_pre_hook", None)
    handle = None if hooks is None else hooks(_at_most_one)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _at_most_one(optimizer: Any, *_: Any) -> None:
    found = getattr(optimizer, "found_inf", None)
    if found is not None:
        optimizer.found_inf = found.clamp(max=1.0)
