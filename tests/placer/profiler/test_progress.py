from __future__ import annotations

import pytest

from placer.profiler.progress import progress_bar


def test_a_bar_that_is_asked_for_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("always", 2) as step:
        step("layer1")
        step("layer2")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "layer2" in shown.err
    assert "2/2" in shown.err


@pytest.mark.parametrize("shown", [True, False])
def test_nothing_is_shown_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str], shown: bool) -> None:
    with progress_bar(shown, 1) as step:  # type: ignore[arg-type]
        step("layer1")
    assert capsys.readouterr() == ("", "")
