"""The executor cuts stages into the pieces whose exchange the solver predicts."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from placer.capture.capture import capture_graph
from placer.executor.state.replication import Replication
from placer.executor.training.stage_pieces import piece_starts
from placer.schedule import gradient_pieces


def test_the_executor_cuts_a_chain_where_the_solver_expects_it() -> None:
    widths = [3, 9, 4, 4, 7, 5, 12, 2, 6]
    layers = [nn.Linear(*ends) for ends in pairwise(widths)]
    model = nn.Sequential(*layers)
    graph = capture_graph(model, torch.zeros(2, widths[0]))
    sizes = [sum(item.nbytes for item in layer.parameters()) for layer in layers]
    crossing = [0, *(2 * 4 * width for width in widths[1:-1])]
    assert [layer.name for layer in graph.layers] == [str(index) for index in range(len(layers))]
    predicted = {
        piece.start + first
        for first, last in ((0, 5), (5, 8))
        for piece in gradient_pieces.gradient_pieces(sizes[first:last], crossing[first:last])
    }
    cpus = [torch.device("cpu", index) for index in range(4)]
    places = cpus[:1] * 5 + cpus[1:2] * 3
    both = {cpus[0]: (cpus[0], cpus[2]), cpus[1]: (cpus[1], cpus[3])}
    assert piece_starts(graph, places, Replication(both, (1, 1))) == predicted - {0, 5}
    first = {cpus[0]: (cpus[0], cpus[2])}
    alone = {start for start in predicted if start > 5}
    assert alone
    assert piece_starts(graph, places, Replication(first, (1, 1))) == predicted - {0, 5} - alone


def test_a_start_that_few_bytes_cross_is_preferred_to_one_about_as_near() -> None:
    # equal shares end before layers 4, 8 and 12; layer 7 is a quarter of a share from layer 8
    sizes = [4] * 16
    crossing = [9] * 4 + [1, 9, 9, 1, 3] + [9] * 7
    assert gradient_pieces.piece_starts(sizes, [0] * 16) == [4, 8, 12]
    assert gradient_pieces.piece_starts(sizes, crossing) == [4, 7, 12]


def test_no_piece_starts_where_many_bytes_cross() -> None:
    # 65 bytes are more than four times a share of 16
    sizes, few, many = [4] * 16, [64] * 16, [65] * 16
    assert gradient_pieces.piece_starts(sizes, few) == [4, 8, 12]
    assert gradient_pieces.piece_starts(sizes, many) == []
    # layers 1 and 15 are too far from their shares, layer 11 is not
    assert gradient_pieces.piece_starts(sizes, [65, 0, *many[2:11], 0, *many[12:15], 0]) == [11, 15]


def test_values_cross_from_behind_the_layer_that_makes_them_to_their_last_reader() -> None:
    values = [(8, 0, 1), (1, 0, 3)]
    assert gradient_pieces.crossing_bytes(values, 4) == [0, 9, 1, 1]


def test_each_piece_has_gradients() -> None:
    assert gradient_pieces.piece_starts([5, 0, 0, 5], [0] * 4) == [1]
    assert gradient_pieces.piece_starts([0, 0, 0], [0] * 3) == []
