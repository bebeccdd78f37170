"""Pieces of a traced pass as functions of ``torch.compile``, kept where they are faster.

    piece of a trace ──▶ graph of torch.fx ──▶ torch.compile ──▶ trial ──▶ replay

The operations of a piece become a graph whose inputs are the weights, the cache and what other
pieces made. The plain replay stays complete, so that decoding goes on with it if anything fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from placer import devices
from placer.executor.engine.compiled_segments import (
    INDUCTOR,
    Backend,
    error_line,
    gains,
    known_to_compilers,
    modes_kept,
    trial_ms,
)
from placer.executor.generation.tracing.operation_trace import Operation, Trace, filled
from placer.executor.generation.tracing.trace_replay import Piece, TraceReplay

_OPTIONS = {"coordinate_descent_tuning": True, "realize_opcount_threshold": 4}
"""Options of torch's compiler for products of one token's activations with weights.

With the first one, such a product is a reduction that is tuned on the device and fused with what
uses it. The second one is a number of operations: those that make an activation are not repeated
for each row of the weights if they are more than 4 (torch: 30)."""


@dataclass
class Compilation:
    """A pass whose pieces are compiled where that is faster.

    Attributes:
        replay: runs the pass; None if no piece is faster.
        gains: by piece that is compiled, its device and its times.
        obstacles: by piece that is not, its device and the reason.
    """

    replay: TraceReplay | None = None
    gains: list[str] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)


def compilation(
    trace: Trace,
    results: Collection[int],
    plain: TraceReplay,
    backend: Backend,
    restore: Callable[[torch.device], None],
) -> Compilation:
    """Compile the pieces of a pass, and try each. The caller records the replay.

    Args:
        trace: of the pass.
        results: numbers of the values that the caller reads afterwards.
        plain: the pass without a compiler; it has run.
        backend: of ``torch.compile``.
        restore: gives everything on a device that a pass changes its value before the pass, apart
            from keys and values, which a repeated pass writes to the same place.
    """
    found = Compilation()
    replay = TraceReplay(trace, results)
    if any(piece.resting is not None for piece in replay.pieces):
        found.obstacles.append("weights rest on the host, and are copied between operations")
    elif devices.registries:  # the compiler would trace the observer
        found.obstacles.append("logical_devices looks at every operation")
    if found.obstacles:
        return found
    for piece in replay.pieces:
        if not piece.operations:
            continue
        try:
            with modes_kept(), devices.current(piece.device):
                times = _try_out(piece, replay, plain, backend, restore)
        except Exception as error:  # whatever a compiler may raise: the piece runs without it
            piece.work = None
            found.obstacles.append(f"{piece.device}: {error_line(error)}")
            continue
        notes = found.obstacles if piece.work is None else found.gains
        notes.append(f"{piece.device}: {times}")
    found.replay = replay if found.gains else None
    return found


def _try_out(
    piece: Piece,
    replay: TraceReplay,
    plain: TraceReplay,
    backend: Backend,
    restore: Callable[[torch.device], None],
) -> str:
    """Let a piece run compiled if that is faster, and return both times in words."""
    function = CompiledPiece(piece.operations, replay.left_by(piece), backend)
    # its own results, apart from the values that recordings have
    values = plain.values()

    def run_plain() -> None:
        restore(piece.device)
        replay.run_piece(piece, dict(values))

    def run_compiled() -> None:
        restore(piece.device)
        function.run(dict(values))

    before_ms = trial_ms([run_plain], piece.device)
    after_ms = trial_ms([run_compiled], piece.device)
    times = f"{after_ms:.3g} ms, {before_ms:.3g} ms without"
    if not gains(after_ms, before_ms):
        return f"it is no faster: {times}"
    piece.work = function.run
    return times


class CompiledPiece:
    """The operations of a piece as one compiled function.

    Args:
        operations: of the piece, without transfers.
        results: numbers of the values that are needed after it.
        backend: of ``torch.compile``.
    """

    def __init__(
        self, operations: Sequence[Operation], results: Sequence[int], backend: Backend
    ) -> None:
        self._inputs = _inputs(operations)
        self._results = results
        graph = _graph(operations, self._inputs, results)
        options: Any = _OPTIONS if backend == INDUCTOR else None
        self._function = torch.compile(graph, backend=backend, dynamic=False, options=options)

    def run(self, values: dict[int, Tensor]) -> None:
        """Compute the piece.

        Args:
            values: by number; its results are added.
        """
        made = self._function(*(values[number] for number in self._inputs))
        values.update(zip(self._results, made, strict=True))


def _inputs(operations: Sequence[Operation]) -> list[int]:
    """Return the numbers of the values that operations read and do not make."""
    made: set[int] = set()
    found: dict[int, None] = {}
    for operation in operations:
        found.update(dict.fromkeys(one for one in operation.reads if one not in made))
        made.update(number for number in operation.makes if number not in found)
    return list(found)


def _graph(
    operations: Sequence[Operation], inputs: Sequence[int], results: Sequence[int]
) -> fx.GraphModule:
    """Return operations as a function of their inputs."""
    graph = fx.Graph()
    nodes = {number: graph.placeholder(f"value_{number}") for number in inputs}
    for operation in operations:
        arguments = filled((operation.args, operation.kwargs), nodes)
        node = graph.call_function(
            operation.function, *fx.node.map_aggregate(arguments, _known_device)
        )
        nodes.update(zip(operation.makes, _tensors(operation, node, graph), strict=True))
    graph.output(tuple(nodes[number] for number in results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _known_device(argument: Any) -> Any:
    """Return an argument, of the devices those that compilers know."""
    return known_to_compilers(argument) if isinstance(argument, torch.device) else argument


def _tensors(operation: Operation, node: fx.Node, graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of the tensors that an operation makes.

    Raises:
        NotImplementedError: it is unknown which of its results they are.
    """
    if operation.places is None:
        return [node]
    if len(operation.places) != len(operation.makes):
        raise NotImplementedError(f"{operation.function} returns lists of tensors among others")
    return [graph.call_function(operator.getitem, (node, place)) for place in operation.places]
