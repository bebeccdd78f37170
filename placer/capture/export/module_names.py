"""The real names of the modules that a traced model calls.

torch.export names a call by the way that code took to the module. Where a module has two names,
that way is not always a name: ``self.layers[:4]`` gives ``layers.slice(None, 4, None).0``. So
modules are matched by identity instead:

    forward pre-hook: module that runs   ──▶  its first name in named_modules(), and which of its calls this is
    tracer: name and number of the call  ──▶  written over in the nodes
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

STACK = "nn_module_stack"
"""The entry of a node's metadata that has the calls around it: key -> (name, class)."""


class CalledNames:
    """The names of calls in a trace, and the modules that they mean.

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
        # the tracer's name of the root, which names in the finished graph leave out
        self._above = ""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calls of the code inside."""
        if not self._is_ambiguous:  # the tracer's names are right
            yield
            return
        handle = register_module_forward_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def rename(self, graph: fx.Graph) -> None:
        """Give the calls around each node the real names; calls of modules that are no part of the
        root go away.
        """
        for node in graph.nodes if self._real else ():
            stack: dict[str, tuple[str, Any]] = node.meta.get(STACK) or {}
            renamed: dict[str, tuple[str, Any]] = {}
            for key, (name, *rest) in stack.items():
                call = name, call_number(key)
                real = self._real.get(call, call)
                if real is not None:
                    renamed[f"{real[0]}@{real[1]}" if real[1] else real[0]] = (real[0], *rest)
            if stack:
                node.meta[STACK] = renamed

    def _note(self, module: nn.Module, _: object) -> None:
        # a branch of torch.cond, which is one operation
        if torch.compiler.is_dynamo_compiling():
            return
        mode = get_proxy_mode()
        stack = getattr(getattr(mode, "tracer", None), "module_stack", None)
        if not stack:
            return
        key, (name, *_) = next(reversed(stack.items()))
        if identity(module) == self._root:  # the code may be traced more than once
            self._above = f"{name}." if name else ""
            self._calls.clear()
        real = self._names.get(identity(module))
        call = name.removeprefix(self._above), call_number(key)
        self._real[call] = None if real is None else (real, self._calls[real])
        if real is not None:
            self._calls[real] += 1


def call_number(key: str) -> int:
    """Return which call of a module an entry of the stack is, counted from 0: its key ends in
    ``@1`` for the second.
    """
    number = key.rpartition("@")[2] if "@" in key else "0"
    return int(number) if number.isdecimal() else 0
