"""The solver predicts the exchange of the pieces that the executor cuts stages into."""

from placer.executor.training import stage_pieces
from placer.schedule import gradient_pieces


def test_solver_and_executor_cut_a_stage_into_equally_many_pieces() -> None:
    assert gradient_pieces.PIECES == stage_pieces.PIECES
