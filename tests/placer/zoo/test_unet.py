from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from placer.zoo.unet import unet


@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize(("height", "width"), [(32, 48), (37, 51)])
def test_logits_have_the_size_of_the_image(bilinear: bool, height: int, width: int) -> None:
    model = unet(width=4, bilinear=bilinear)
    assert model(torch.randn(2, 3, height, width)).shape == (2, 2, height, width)


def test_parameter_count_is_that_of_the_documentation() -> None:
    with torch.device("meta"):
        model = unet()
    # By hand, per level of c channels: 9 * in * c + 9 * c * c + 4 * c; up: 4 * 2c * c + c; out: 64
    # * 2 + 2.
    channels = [64, 128, 256, 512, 1024]
    doubles = [(3, 64), *pairwise(channels), *((2 * c, c) for c in channels[:4])]
    expected = sum(9 * i * o + 9 * o * o + 4 * o for i, o in doubles)
    expected += sum(8 * c * c + c for c in channels[:4]) + 130
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert round(expected / 1e6, 1) == 31.0


def test_every_level_skips_to_the_step_up_of_its_size() -> None:
    model = unet(width=4)
    made, read = {}, {}
    for down, up in (("inc", "up4"), ("down1", "up3"), ("down2", "up2"), ("down3", "up1")):
        model.get_submodule(down).register_forward_hook(
            lambda _, inputs, output, up=up: made.update({up: output})
        )
        model.get_submodule(up).register_forward_pre_hook(
            lambda _, inputs, up=up: read.update({up: inputs[1]})
        )
    model(torch.randn(1, 3, 32, 32))
    assert sorted(read) == ["up1", "up2", "up3", "up4"]
    assert all(read[up] is made[up] for up in read)


def test_the_two_ways_up_differ_in_their_modules() -> None:
    transposed = {type(module).__name__ for module in unet(width=4).modules()}
    interpolated = {type(module).__name__ for module in unet(width=4, bilinear=True).modules()}
    assert transposed - interpolated == {"ConvTranspose2d"}
    assert interpolated - transposed == {"Upsample"}
