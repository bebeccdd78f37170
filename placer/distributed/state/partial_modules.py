"""Modules that hold some of a model's tensors under the model's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Names:
    """The names of a model's tensors.

    Attributes:
        aliases: by a tensor's first name, all of its names; tied tensors have several.
        transient: names of buffers that are not saved.
        saved: the keys of the model's ``state_dict``, in order.
    """

    aliases: Mapping[str, tuple[str, ...]]
    transient: frozenset[str]
    saved: tuple[str, ...]

    @classmethod
    def from_model(cls, model: nn.Module) -> Names:
        """Return the names of a model's tensors."""
        first: dict[int, str] = {}
        aliases: dict[str, list[str]] = {}
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                aliases.setdefault(first.setdefault(id(tensor), name), []).append(name)
        transient = {
            f"{path}.{leaf}" if path else leaf
            for path, module in model.named_modules(remove_duplicate=False)
            for leaf in module._non_persistent_buffers_set
        }
        return cls(
            {name: tuple(names) for name, names in aliases.items()},
            frozenset(transient),
            tuple(model.state_dict()),
        )


def plant(root: nn.Module, tensors: Mapping[str, Tensor], names: Names) -> None:
    """Register tensors in a module under the model's names.

    Args:
        root: receives empty submodules for the parts of every name.
        tensors: by their first names.
        names: of the model.
    """
    # In the model's order, with aliases after all first names, so that first names stay first.
    planted = [(first, others) for first, (_, *others) in names.aliases.items() if first in tensors]
    for first, _ in planted:
        _plant(root, first, tensors[first], first in names.transient)
    for first, others in planted:
        for name in others:
            _plant(root, name, tensors[first], name in names.transient)


def _plant(root: nn.Module, name: str, tensor: Tensor, transient: bool) -> None:
    *path, leaf = name.split(".")
    module = root
    for step in path:
        # directly into the table: add_module rejects names of Module's own attributes, such as
        # "half"
        module = module._modules.setdefault(step, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:
        module._buffers[leaf] = tensor
        if transient:
            module._non_persistent_buffers_set.add(leaf)


def slot(root: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """Return the table and the key under which a planted module holds a tensor.

    The table persists when ``Module.to`` and similar methods replace tensors in it.
    """
    *path, leaf = name.split(".")
    module = root
    for step in path:
        module = module._modules[step]  # type: ignore[assignment]
    if leaf in module._parameters:
        return module._parameters, leaf  # type: ignore[return-value]
    return module._buffers, leaf
