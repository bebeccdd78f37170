"""The real names of the modules that a traced model calls.

torch.export names a call by the way that code took to the module. Where a module has two names, that way is not always
a name: ``self.layers[:4]`` gives ``layers.slice(None, 4, None).0``. So modules are matched by identity instead:

    forward pre-hook: module that runs  ──▶  its first name in named_modules()
    tracer: name of the call            ──▶  written over in the nodes
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_forward_pre_hook

from placer.graph.attributes import identity

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
        self._is_ambiguous = len(self._names) < sum(1 for _ in root.named_modules(remove_duplicate=False))
        self._real: dict[str, str | None] = {}
        self._root = identity(root)
        self._above = ""  # the tracer's name of the root, which names in the finished graph leave out

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
        """Give the calls around each node the real names; calls of modules that are no part of the root go away."""
        for node in graph.nodes if self._real else ():
            stack = node.meta.get(STACK)
            if stack:
                renamed = ((key, (self._real.get(name, name), *rest)) for key, (name, *rest) in stack.items())
                node.meta[STACK] = {key: entry for key, entry in renamed if entry[0] is not None}

    def _note(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond, which is one operation
            return
        mode = get_proxy_mode()
        stack = getattr(getattr(mode, "tracer", None), "module_stack", None)
        if not stack:
            return
        name = next(reversed(stack.values()))[0]
        if identity(module) == self._root:
            self._above = f"{name}." if name else ""
        self._real[name.removeprefix(self._above)] = self._names.get(identity(module))
