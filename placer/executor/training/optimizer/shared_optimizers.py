"""Optimizers that step tensors outside the model: another flow's parameters, or an input."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn

from placer.errors import InputError
from placer.executor.placed_model import PlacedModel
from placer.executor.training.optimizer.optimizer_update import Update
from placer.executor.training.stages.weight_aliases import Keep
from placer.executor.training.training_pipeline import TrainingPipeline

# Models of flows with gradients that have waited for a step.
_waiting: WeakSet[PlacedModel] = WeakSet()

_noting = Lock()


def _all_waiting() -> list[PlacedModel]:
    """Return the models whose gradients wait now."""
    # other threads may add models while the set is iterated
    with _noting:
        return [placed for placed in _waiting if placed.gradients_wait]


def note_waiting(placed: PlacedModel) -> None:
    """Record that a model's gradients wait for a step, perhaps of an optimizer of several flows.

    Args:
        placed: with ``gradients_wait``, which is True.
    """
    with _noting:
        _waiting.add(placed)


def kept(placed: PlacedModel, keep: bool) -> Keep:
    """Return a predicate for the parameters whose gradients wait for the flow's next batch.

    Args:
        placed: the model, which may share parameters with another one whose gradients wait.
        keep: whether all of the model's own gradients wait.
    """
    if keep:
        return lambda parameter: True
    wait = {
        id(one)
        for other in _all_waiting()
        if other is not placed
        for one in other.module.parameters()
    }
    return lambda parameter: id(parameter) in wait


class Others:
    """The parameters that an optimizer steps but the model does not have.

    A step resets their gradients like ``optimizer.zero_grad()``, which does not distinguish models.

    Args:
        update: with the optimizer.
        model: the flow's.

    Raises:
        InputError: if the optimizer holds no parameter of a model that requires gradients.
    """

    def __init__(self, update: Update, model: nn.Module) -> None:
        self._update, self._model = update, model
        self._parameters: list[Tensor] = []
        self._are_all = _steps_inputs_alone(update, model)
        self._seen: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}

    def refuse_nothing_stepped(self, given: Iterable[Any]) -> None:
        """Raise an InputError if the optimizer would step nothing.

        An optimizer without parameters of the model must hold tensors that the batch is made of.

        Args:
            given: the flattened inputs and target.

        Raises:
            InputError: if no input requires a gradient.
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
        """Find these parameters again, if model or optimizer changed since the last call.

        Args:
            pipeline: the batch's pipeline, which is created again after the model changed; None for
                hooks.
        """
        # a weak reference, so that a replaced pipeline is freed
        seen = pipeline and ref(pipeline), self._update.count
        if pipeline is None or seen != self._seen:
            own = {id(parameter) for parameter in self._model.parameters()}
            self._parameters = [one for one in self._update.parameters() if id(one) not in own]
            self._seen = seen

    def drop_gradients(self, keep: Keep) -> None:
        """Release the gradients of earlier steps, except those that wait for this one."""
        for parameter in self._parameters:
            if not keep(parameter):
                parameter.grad = None

    def wait_no_longer(self) -> None:
        """Reset flows whose parameters were stepped together with the model's."""
        stepped = {id(parameter) for parameter in self._parameters}
        for placed in _all_waiting() if stepped else ():
            if any(id(parameter) in stepped for parameter in placed.module.parameters()):
                placed.gradients_wait = False


def _steps_inputs_alone(update: Update, model: nn.Module) -> bool:
    """Return whether an optimizer holds no parameter of a frozen model, but a prompt, say.

    Raises:
        InputError: if it holds none of a model that is not frozen.
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
