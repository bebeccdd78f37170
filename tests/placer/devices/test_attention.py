"""Attention without cuDNN: in blocks that nest and overlap, and where other kernels may run."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Barrier, Thread

import pytest
from torch.backends import cuda

from placer import devices


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()
    yield
    cuda.enable_cudnn_sdp(before[0])
    cuda.enable_flash_sdp(before[1])


@pytest.mark.parametrize("enabled", [True, False])
def test_the_users_choice_comes_back_after_nested_blocks(enabled: bool) -> None:
    cuda.enable_cudnn_sdp(enabled)
    with pytest.raises(KeyError), devices.without_attention_plans():
        with devices.without_attention_plans():
            assert not cuda.cudnn_sdp_enabled()
        assert not cuda.cudnn_sdp_enabled()
        raise KeyError
    assert cuda.cudnn_sdp_enabled() is enabled


def test_blocks_of_threads_overlap() -> None:
    cuda.enable_cudnn_sdp(True)
    first_is_inside, second_is_inside, first_has_left = (Barrier(2, timeout=10) for _ in range(3))
    seen = []

    def first() -> None:
        with devices.without_attention_plans():
            first_is_inside.wait()
            second_is_inside.wait()
        first_has_left.wait()

    thread = Thread(target=first)
    thread.start()
    first_is_inside.wait()
    with devices.without_attention_plans():
        second_is_inside.wait()
        first_has_left.wait()
        seen.append(cuda.cudnn_sdp_enabled())
    thread.join()
    assert seen == [False]
    assert cuda.cudnn_sdp_enabled()


def test_cudnn_stays_where_another_kernel_is_disabled() -> None:
    cuda.enable_cudnn_sdp(True)
    cuda.enable_flash_sdp(False)
    with devices.without_attention_plans():
        assert cuda.cudnn_sdp_enabled()
