from __future__ import annotations

from types import ModuleType

import pytest
import torch

from placer.zoo import resnet

NAMES = ["resnet18", "resnet50", "resnet101"]


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_state_has_torchvisions_names_and_initial_values(
    name: str, torchvision_models: ModuleType
) -> None:
    torch.manual_seed(0)
    theirs = getattr(torchvision_models, name)(num_classes=10).state_dict()
    torch.manual_seed(0)
    ours = getattr(resnet, name)(num_classes=10).state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=0)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_output_and_gradients_equal_torchvisions(name: str, torchvision_models: ModuleType) -> None:
    theirs = getattr(torchvision_models, name)(num_classes=10).double()
    with torch.device("meta"):
        ours = getattr(resnet, name)(num_classes=10)
    ours.load_state_dict(
        {key: value.clone() for key, value in theirs.state_dict().items()}, assign=True
    )
    images = torch.randn(2, 3, 40, 33, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=0, atol=1e-12)
    mine, other = ours.train()(images), theirs.train()(images)
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    mine.square().sum().backward()
    other.square().sum().backward()
    for (key, one), another in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, another.grad, rtol=1e-10, atol=1e-10, msg=key)


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet18", 11.7), ("resnet50", 25.6), ("resnet101", 44.5)]
)
def test_parameter_counts_are_those_of_the_documentation(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = getattr(resnet, name)()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions
