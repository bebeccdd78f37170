"""The real names of the modules that a traced model calls.

torch.export names a call by the path that the code took to the module. If a module has two names,
the path may be no name at all: ``self.layers[:4]`` gives ``layers.slice(None, 4, None).0``. So
modules are matched by identity:

    forward pre-hook   module that runs   ->  its first name in named_modules(), number of the call
    tracer             name, call number  ->  replaced in the nodes by the above
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_forward_pre_hook

from placer.capture.python_state.attribute_reads import identity

MODULE_STACK = "nn_module_stack"
"""Key in a node's metadata of the calls around it: call -> (name, class)."""


class CalledNames:
    """The names of calls in a trace, and the modules that they refer to.

    Args:
        root: the module that is traced.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names: dict[int, str] = {}
        for name, module in root.named_modules():
            self._names.setdefault(identity(module), name)
        self._is_ambiguous = len(self._names) < sum(
            1 for _ in root.named_modules(remove_duplicate=False)
        )
        self._real: dict[tuple[str, int], tuple[str, int] | None] = {}
        self._calls: Counter[str] = Counter()
        self._root = identity(root)
        # The tracer's name of the root, which names in the finished graph omit.
        self._above = ""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the module calls of the code inside."""
        # Every module has one name, so the tracer's names are right.
        if not self._is_ambiguous:
            yield
            return
        handle = register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def rename(self, graph: fx.Graph) -> None:
        """Replace the tracer's names of the calls around each node by the real names.

        Calls of modules outside of the root are removed.

        Args:
            graph: the traced graph; its metadata is changed.
        """
        for node in graph.nodes if self._real else ():
            stack: dict[str, tuple[str, Any]] = node.meta.get(MODULE_STACK) or {}
            renamed: dict[str, tuple[str, Any]] = {}
            for key, (name, *rest) in stack.items():
                call = name, call_number(key)
                real = self._real.get(call, call)
                if real is not None:
                    renamed[f"{real[0]}@{real[1]}" if real[1] else real[0]] = (real[0], *rest)
            if stack:
                node.meta[MODULE_STACK] = renamed

    def _note(self, module: nn.Module, _: object) -> None:
        # torch.compile traces a branch of torch.cond here, which is one operation.
        if torch.compiler.is_dynamo_compiling():
            return
        mode = get_proxy_mode()
        stack = getattr(getattr(mode, "tracer", None), "module_stack", None)
        if not stack:
            return
        key, (name, *_) = next(reversed(stack.items()))
        # The code may be traced more than once; only the last trace counts.
        if identity(module) == self._root:
            self._above = f"{name}." if name else ""
            self._calls.clear()
        real = self._names.get(identity(module))
        call = name.removeprefix(self._above), call_number(key)
        self._real[call] = None if real is None else (real, self._calls[real])
        if real is not None:
            self._calls[real] += 1


def call_number(key: str) -> int:
    """Return the number of a module's call, from 0: the key of the second call ends in ``@1``.

    Args:
        key: key of an entry in the stack of calls.
    """
    number = key.rpartition("@")[2] if "@" in key else "0"
    return int(number) if number.isdecimal() else 0
