"""The names of a model's state in a checkpoint: ties, prefixes, and tensors that are not saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from placer.checkpoints.transformers_models import converted, superfluous
from placer.executor.state.assignment import WRAPPERS


class StateNames:
    """The names under which a model saves its state.

    Args:
        model: any module; its tensors may be on meta.

    Attributes:
        saved: the ``state_dict``.
        tensors: the parameters and buffers by each of their names.
        unsaved: the buffers that ``state_dict`` leaves out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.saved: Mapping[str, Any] = model.state_dict(keep_vars=True)
        self.tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.tensors.update(model.named_buffers(remove_duplicate=False))
        self.unsaved = {
            name: buffer
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if name not in self.saved
        }
        self._ties: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            self._ties.setdefault(id(tensor), []).append(name)

    def same(self, name: str) -> list[str]:
        """Return the names of the tensor with a name; the first is the one that places it."""
        tensor = self.tensors.get(name)
        return [name] if tensor is None else self._ties[id(tensor)]

    def renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a checkpoint under the names of the model.

        Checkpoints of a base model lack the prefix of the model with a head, as in ``layers.0`` for
        ``model.layers.0``; or they have it, and the model lacks it. Wrappers add a prefix, too.

        Args:
            values: by the key of the checkpoint.

        Returns:
            By name: values of the checkpoint, and ``Derived`` for those that are converted.
        """
        values = converted(self._model, values, self.saved)
        best = max(self._renamings(values), key=lambda keys: len(self.saved.keys() & {*keys}))
        ignored = superfluous(self._model)
        return {
            name: value
            for name, value in zip(best, values.values(), strict=True)
            if name in self.saved
            or (name not in self.unsaved and not (ignored and ignored.search(name)))
        }

    def _renamings(self, values: Mapping[str, Any]) -> Iterator[list[str]]:
        """Yield the keys unchanged, then with one prefix less or more; the first best one wins."""
        yield list(values)
        for wrapper in WRAPPERS:
            yield [key.removeprefix(f"{wrapper}.") for key in values]
        base = getattr(self._model, "base_model_prefix", "")
        if isinstance(base, str) and base:
            yield [key.removeprefix(f"{base}.") for key in values]
            yield [
                key if key in self.saved or f"{base}.{key}" not in self.saved else f"{base}.{key}"
                for key in values
            ]
