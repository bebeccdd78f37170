"""Modules that hold some tensors of a model under the names that the model has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Names:
    """The names of a model's tensors.

    Attributes:
        aliases: a tensor's first name -> all its names; tied tensors have several.
        transient: names of buffers that are not saved.
        saved: the keys of the model's ``state_dict``, in order.
    """

    aliases: Mapping[str, tuple[str, ...]]
    transient: frozenset[str]
    saved: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        """The names of that model's tensors."""
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
    """Make a module hold tensors under the names that the model has for them.

    Args:
        root: gets modules without code of its own for the steps of every name.
        tensors: by their first names.
        names: of the model.
    """
    # In the model's order, other names behind all first ones, so that those are first here too.
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
        # Straight into the table: add_module refuses names that are attributes of every module, as
        # "half".
        module = module._modules.setdefault(step, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:
        module._buffers[leaf] = tensor
        if transient:
            module._non_persistent_buffers_set.add(leaf)


def slot(root: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """Where a planted module holds the tensor of that name: a table and a key.

    The table stays while ``Module.to`` and the like put other tensors into it.
    """
    *path, leaf = name.split(".")
    module = root
    for step in path:
        module = module._modules[step]  # type: ignore[assignment]
    if leaf in module._parameters:
        return module._parameters, leaf  # type: ignore[return-value]
    return module._buffers, leaf
