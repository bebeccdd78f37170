"""Modules of experts, as transformers has them, and the parameters that stack their weights.

Such a module has parameters of shape (experts, ...), and its ``forward`` takes the numbers of the
chosen experts. Execution copies the chosen experts of resting parameters, and profiles say how many
of a layer's bytes are experts; both find them here.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_CHOICE = "top_k_index"
"""The argument with the numbers of the chosen experts."""


def stacks_in(module: nn.Module, names: Collection[str]) -> dict[str, list[str]]:
    """Return, by path of a module of experts, the names of the parameters that stack them.

    Args:
        module: the model.
        names: of parameters of the model; modules of which others stack experts are left out.
    """
    found = {}
    for path, child in module.named_modules():
        stacks = [f"{path}.{name}".lstrip(".") for name in _stacks_of(child)]
        if stacks and all(name in names for name in stacks):
            found[path] = stacks
    return found


def _stacks_of(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters that stack experts."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or _CHOICE not in inspect.signature(module.forward).parameters:
        return []
    own = module.named_parameters(recurse=False)
    return [name for name, one in own if one.dim() > 1 and one.shape[0] == count]


def choice_of(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Return the numbers of the chosen experts, shape (tokens, chosen experts of a token).

    Args:
        signature: of a module of experts' ``forward``.
        args: positional arguments of a call.
        kwargs: its keyword arguments.
    """
    chosen: Tensor = signature.bind(*args, **kwargs).arguments[_CHOICE]
    return chosen


@contextmanager
def noted_choices(model: nn.Module, paths: Collection[str]) -> Iterator[dict[str, int]]:
    """Note inside the block how many experts the latest call of each module of experts chose.

    Args:
        model: the model; it may run on ``meta``.
        paths: of modules of experts.

    Yields:
        By path, the number of choices of all tokens of the call.
    """
    found: dict[str, int] = {}

    def noting(path: str, signature: inspect.Signature) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[path] = choice_of(signature, args, kwargs).numel()

        return note

    modules = {path: model.get_submodule(path) for path in paths}
    handles = [
        module.register_forward_pre_hook(
            noting(path, inspect.signature(module.forward)), with_kwargs=True
        )
        for path, module in modules.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
