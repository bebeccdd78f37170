"""Optimizers that step other tensors than the parameters of one model: another flow's parameters,
or an input.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn

from placer.errors import InputError
from placer.executor.training.optimizer.optimizer_update import Update
from placer.executor.training.stages.weight_aliases import Keep
from placer.executor.training.training_pipeline import TrainingPipeline

# The flows whose gradients have waited for a step.
_waiting: WeakSet[Any] = WeakSet()

_noting = Lock()


def _all_waiting() -> list[Any]:
    """Those whose gradients wait now; other threads may note some meanwhile."""
    with _noting:
        return [flow for flow in _waiting if flow.gradients_wait]


def note_waiting(flow: Any) -> None:
    """A flow's gradients wait for a step, which may be of an optimizer that steps other flows too.

    Args:
        flow: with ``gradients_wait``, which is True.
    """
    with _noting:
        _waiting.add(flow)


def kept(flow: Any, keep: bool) -> Keep:
    """Which parameters' gradients wait for the next batch of a flow.

    Args:
        flow: of a model that may share parameters with another flow's, whose gradients wait.
        keep: whether all of the flow's own do.
    """
    if keep:
        return lambda parameter: True
    wait = {
        id(one)
        for other in _all_waiting()
        if other is not flow
        for one in other.module.parameters()
    }
    return lambda parameter: id(parameter) in wait


class Others:
    """The parameters that an optimizer steps and the model does not have: another flow's, or an
    input.

    A step begins for them as ``optimizer.zero_grad()`` does, which knows of no model.

    Args:
        update: with the optimizer.
        model: the flow's.

    Raises:
        InputError: the optimizer holds no parameter of the model, of which some require a gradient.
    """

    def __init__(self, update: Update, model: nn.Module) -> None:
        self._update, self._model = update, model
        self._parameters: list[Tensor] = []
        self._are_all = _steps_inputs_alone(update, model)
        self._seen: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}

    def refuse_nothing_stepped(self, given: Iterable[Any]) -> None:
        """An optimizer of none of the model's parameters steps what the batch is made of, or
        nothing.

        Args:
            given: the flattened inputs and target.

        Raises:
            InputError: it would step nothing.
        """
        if self._are_all and not any(
            isinstance(one, Tensor) and one.requires_grad for one in given
        ):
            raise InputError(
                f"the optimizer holds no parameter of this {type(self._model).__name__}, and no "
                "input requires a gradient, so a step would change nothing; make it from "
                "flow.parameters(), or give an input that is, or is made of, what it holds"
            )

    def look(self, pipeline: TrainingPipeline | None) -> None:
        """Find them, where the model or the optimizer may have others than at the last look.

        Args:
            pipeline: what a batch goes through, made anew for a model that is changed; None where
                it runs through hooks.
        """
        seen = pipeline and ref(pipeline), self._update.count
        if pipeline is None or seen != self._seen:
            own = {id(parameter) for parameter in self._model.parameters()}
            self._parameters = [one for one in self._update.parameters() if id(one) not in own]
            self._seen = seen

    def drop_gradients(self, keep: Keep) -> None:
        """Let the gradients of earlier steps go, but for those that wait for this one."""
        for parameter in self._parameters:
            if not keep(parameter):
                parameter.grad = None

    def wait_no_longer(self) -> None:
        """Flows whose parameters were stepped beside the model's begin anew."""
        stepped = {id(parameter) for parameter in self._parameters}
        for flow in _all_waiting() if stepped else ():
            if any(id(parameter) in stepped for parameter in flow.module.parameters()):
                flow.gradients_wait = False


def _steps_inputs_alone(update: Update, model: nn.Module) -> bool:
    """Whether an optimizer holds no parameter of a model, which is frozen: a prompt, say.

    Raises:
        InputError: it holds none of a model that is not.
    """
    stepped, own = (
        update.parameters(),
        {id(parameter): parameter for parameter in model.parameters()},
    )
    if not stepped or any(id(parameter) in own for parameter in stepped):
        return False
    if any(parameter.requires_grad for parameter in own.values()):
        raise InputError(
            f"the optimizer holds no parameter of this {type(model).__name__}, so a step would "
            "change nothing; make it from flow.parameters()"
        )
    return True
