"""Models whose parameters are on ``meta`` and whose buffers have values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

_threads: list[int] = []
"""The threads inside ``on_meta``, once for each block."""


@contextmanager
def on_meta() -> Iterator[None]:
    """Put the parameters of modules that the block makes on ``meta``; buffers keep their values.

    The block needs the memory of one parameter at a time. Checkpoints hold the parameters but not
    every buffer: the model's own code computes the others, such as rotary frequencies. Under
    ``torch.device("meta")`` their values would be lost.

    Only modules that this thread makes are affected. Parameters of other classes than
    ``nn.Parameter`` keep their memory.

    Example:
        ::

            with placer.on_meta():
                model = LlamaForCausalLM(config)
            placer.load(model, placement, "path/to/checkpoint")
    """
    thread = get_ident()
    # a parameter that two modules share stays one parameter
    made: Any = WeakIdKeyDictionary()

    def register(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        if get_ident() != thread or type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if parameter not in made:
            made[parameter] = _on_meta(parameter)
        found: nn.Parameter = made[parameter]
        return found

    handle = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
    _threads.append(thread)
    try:
        yield
    finally:
        _threads.remove(thread)
        handle.remove()


def is_active() -> bool:
    """Return whether this thread is inside ``on_meta``."""
    return get_ident() in _threads


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    data = torch.empty_like(parameter, device="meta", requires_grad=False)
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made
