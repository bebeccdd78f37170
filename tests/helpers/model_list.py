"""The models that must be captured and run split, shared by the tests of capture, execution and
GPUs.

case = CASES["resnet18"]
model, (args, kwargs) = case.make(), case.inputs(training=True)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_models import DiffusionUNet, Skips, StackedLSTMs, Tagger
from torch import Tensor, nn

from placer.zoo import SeqNet, ToyModel, gpt, resnet18, unet
from placer.zoo.resnet import Bottleneck, ResNet

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One model of the list.

    Attributes:
        name: for test ids.
        make: builds it; random weights, small where that changes no structure.
        inputs: training -> (args, kwargs).
        large: takes seconds: one map a mode is enough.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[bool], Inputs]
    large: bool = False

    def __str__(self) -> str:
        return self.name


def torchvision_models() -> Any:
    """torchvision's models, also where torchvision was installed without its compiled operators."""
    if not _operators:
        _operators.append(torch.library.Library("torchvision", "FRAGMENT"))
    try:
        import torchvision.models as models
    except RuntimeError:
        for operator in (
            "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            "qnms() -> ()",
        ):
            with contextlib.suppress(RuntimeError):
                _operators[0].define(operator)
    models = pytest.importorskip("torchvision.models")
    return models


# an operator goes when its library does
_operators: list[torch.library.Library] = []


def _vision(name: str, **options: Any) -> Case:
    def make() -> nn.Module:
        model: nn.Module = getattr(torchvision_models(), name)(weights=None, **options)
        return model

    return Case(name, make, _image, large=True)


def _small_vit() -> nn.Module:
    """vit_b_16's class at half its depth and a smaller width: 86 million parameters would only add
    time."""
    vit: nn.Module = torchvision_models().VisionTransformer(
        image_size=48,
        patch_size=16,
        num_layers=6,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
        dropout=0.1,
    )
    return vit


def _small_swin() -> nn.Module:
    """swin_t's class with a third of its blocks, at a smaller width."""
    swin: nn.Module = torchvision_models().SwinTransformer(
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=[7, 7],
        stochastic_depth_prob=0.2,
        num_classes=10,
    )
    return swin


def _small_convnext() -> nn.Module:
    """convnext_tiny's class and stages, at a smaller width and depth."""
    convnext = torchvision_models().convnext
    stages = [
        convnext.CNBlockConfig(16, 32, 2),
        convnext.CNBlockConfig(32, 48, 2),
        convnext.CNBlockConfig(48, None, 2),
    ]
    model: nn.Module = convnext.ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=10)
    return model


def _small_densenet() -> nn.Module:
    """densenet121's class and four blocks, with a quarter of their layers and of what each adds."""
    model: nn.Module = torchvision_models().DenseNet(
        growth_rate=8, block_config=(3, 4, 4, 3), num_init_features=16
    )
    return model


def _inception() -> nn.Module:
    """inception_v3 with an auxiliary head for images of 171 pixels; it takes 299 at least."""
    models = torchvision_models()
    model: nn.Module = models.inception_v3(weights=None, init_weights=False, aux_logits=True)
    assert isinstance(model.AuxLogits, nn.Module)
    model.AuxLogits.conv1 = models.inception.BasicConv2d(128, 768, kernel_size=2)
    return model


def _small_resnet() -> nn.Module:
    """resnet50's class and stages with fewer blocks."""
    resnet = torchvision_models().resnet
    model: nn.Module = resnet.ResNet(resnet.Bottleneck, [1, 2, 1, 1], num_classes=10)
    return model


def _small_mobilenet() -> nn.Module:
    """mobilenet_v3_small's class and one of each kind of its blocks; that of the fourth row has a
    skip."""
    mobilenet = torchvision_models().mobilenetv3
    rows = [
        (16, 3, 16, 16, True, "RE", 2),
        (16, 3, 72, 24, False, "RE", 2),
        (24, 5, 96, 40, True, "HS", 2),
        (40, 5, 240, 40, True, "HS", 1),
        (40, 5, 120, 48, True, "HS", 1),
    ]
    blocks = [mobilenet.InvertedResidualConfig(*row, dilation=1, width_mult=1.0) for row in rows]
    model: nn.Module = mobilenet.MobileNetV3(blocks, last_channel=64, num_classes=10)
    return model


def _small_efficientnet() -> nn.Module:
    """efficientnet_b0's class with one of each kind of its blocks: kernels, strides, with and
    without a skip."""
    efficientnet = torchvision_models().efficientnet
    rows = [(1, 3, 1, 16, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2), (6, 5, 1, 40, 56, 1)]
    blocks = [efficientnet.MBConvConfig(*row, width_mult=1.0, depth_mult=1.0) for row in rows]
    model: nn.Module = efficientnet.EfficientNet(blocks, dropout=0.2, num_classes=10)
    return model


def _small_shufflenet() -> nn.Module:
    """Return shufflenet_v2_x1_0's stages, each with a block that halves and one that does not."""
    model: nn.Module = torchvision_models().ShuffleNetV2(
        [2, 2, 2], [24, 48, 96, 192, 64], num_classes=10
    )
    return model


def _small_fcn() -> nn.Module:
    """fcn_resnet50 with fewer blocks."""
    resnet = torchvision_models().resnet
    from torchvision.models.segmentation.fcn import _fcn_resnet

    dilated = [False, True, True]
    backbone = resnet.ResNet(resnet.Bottleneck, [1, 2, 1, 1], replace_stride_with_dilation=dilated)
    model: nn.Module = _fcn_resnet(backbone, num_classes=3, aux=True)
    return model


def _model_parallel_resnet() -> nn.Module:
    """The tutorial's ModelParallelResNet50 with fewer blocks: two sequences over modules that the
    model names too."""
    resnet = torchvision_models().resnet

    class ModelParallelResNet(resnet.ResNet):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(resnet.Bottleneck, [1, 2, 1, 1], num_classes=10)
            self.seq1 = nn.Sequential(
                self.conv1, self.bn1, self.relu, self.maxpool, self.layer1, self.layer2
            )
            self.seq2 = nn.Sequential(self.layer3, self.layer4, self.avgpool)

        def forward(self, x: Tensor) -> Tensor:
            x = self.seq2(self.seq1(x))
            result: Tensor = self.fc(x.view(x.size(0), -1))
            return result

    return ModelParallelResNet()


def _images(pixels: int) -> Inputs:
    return (torch.randn(2, 3, pixels, pixels),), {}


def _image(training: bool) -> Inputs:
    return _images(64)


VISION = [
    Case("zoo_resnet18", resnet18, _image, large=True),
    Case("zoo_resnet50", lambda: ResNet(Bottleneck, [1, 2, 1, 1]), _image, large=True),
    Case("model_parallel_resnet50", _model_parallel_resnet, _image, large=True),
    _vision("resnet18"),
    Case("resnet50", _small_resnet, _image, large=True),
    _vision("googlenet", init_weights=False, aux_logits=True),
    Case("inception_v3", _inception, lambda training: _images(171 if training else 96), large=True),
    Case("densenet121", _small_densenet, _image, large=True),
    Case("vit_b_16", _small_vit, lambda training: ((torch.randn(2, 3, 48, 48),), {}), large=True),
    Case("swin_t", _small_swin, _image, large=True),
    Case("fcn_resnet50", _small_fcn, lambda training: _images(32), large=True),
    Case("mobilenet_v3_small", _small_mobilenet, _image, large=True),
    Case("efficientnet_b0", _small_efficientnet, _image, large=True),
    Case("convnext_tiny", _small_convnext, _image, large=True),
    Case("shufflenet_v2_x1_0", _small_shufflenet, _image, large=True),
]


def transformers() -> Any:
    # transformers imports torchvision, and fails where its compiled operators are missing
    torchvision_models()
    return pytest.importorskip("transformers")


def _transformer(name: str, config: str, labels: bool = False, **options: Any) -> Case:
    def make() -> nn.Module:
        library = transformers()
        model: nn.Module = getattr(library, name)(
            getattr(library, config)(vocab_size=50, **options)
        )
        return model

    def inputs(training: bool) -> Inputs:
        tokens = {"input_ids": torch.randint(3, 50, (2, 8))}
        if labels:
            tokens["labels"] = torch.randint(3, 50, (2, 6))
        return (), tokens

    return Case(name, make, inputs)


def _vit() -> nn.Module:
    library = transformers()
    vit: nn.Module = library.ViTForImageClassification(
        library.ViTConfig(image_size=16, patch_size=8, **_SIZES)
    )
    return vit


_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_MIXED = {"num_key_value_heads": 2, **_SIZES}

LANGUAGE = [
    _transformer("GPT2LMHeadModel", "GPT2Config", n_layer=2, n_embd=32, n_head=4, n_positions=16),
    _transformer("BertForMaskedLM", "BertConfig", **_SIZES),
    _transformer(
        "T5ForConditionalGeneration",
        "T5Config",
        labels=True,
        num_layers=2,
        d_model=32,
        num_heads=4,
        d_kv=8,
        d_ff=48,
        decoder_start_token_id=0,
    ),
    _transformer("LlamaForCausalLM", "LlamaConfig", **_MIXED),
    # Its default, grouped_mm, has no float64 kernel.
    _transformer(
        "MixtralForCausalLM",
        "MixtralConfig",
        num_local_experts=4,
        experts_implementation="batched_mm",
        **_MIXED,
    ),
    Case("ViTForImageClassification", _vit, lambda training: ((torch.randn(2, 3, 16, 16),), {})),
]


def _tokens(training: bool) -> Inputs:
    return (torch.randint(0, 20, (3, 7)),), {}


SMALL = [
    Case("toy", ToyModel, lambda training: ((torch.randn(4, 10),), {})),
    Case("seqnet", SeqNet, lambda training: ((torch.randn(4, 1, 8, 8),), {})),
    Case("unet", lambda: unet(width=4), lambda training: ((torch.randn(2, 3, 32, 32),), {})),
    Case(
        "unet_bilinear",
        lambda: unet(width=4, bilinear=True),
        lambda training: ((torch.randn(2, 3, 32, 32),), {}),
    ),
    Case(
        "gpt",
        lambda: gpt(layers=3, width=16, heads=2, context=8, vocabulary=20, dropout=0.1),
        lambda training: ((torch.randint(0, 20, (3, 8)),), {}),
    ),
    Case(
        "gpt_tied",
        lambda: gpt(layers=2, width=16, heads=2, context=8, vocabulary=20, tied=True),
        lambda training: ((torch.randint(0, 20, (3, 8)),), {}),
    ),
    Case(
        "diffusion_unet",
        DiffusionUNet,
        lambda training: ((torch.randn(2, 3, 8, 8), torch.tensor([3, 40])), {"return_dict": True}),
    ),
    Case("lstm_bidirectional", Tagger, _tokens),
    Case(
        "lstm_time_first", lambda: Tagger(bidirectional=False, batch_first=False, layers=1), _tokens
    ),
    Case("lstm_stacked", StackedLSTMs, lambda training: ((torch.randn(3, 5, 4),), {})),
    Case("skips", Skips, lambda training: ((torch.randn(4, 5),), {})),
]

CASES: dict[str, Case] = {case.name: case for case in (*SMALL, *LANGUAGE, *VISION)}


def converted(nest: Any, dtype: torch.dtype) -> Any:
    """Inputs with their floating point tensors in another dtype."""
    if isinstance(nest, Tensor):
        return nest.to(dtype) if nest.is_floating_point() else nest
    if isinstance(nest, dict):
        return {key: converted(value, dtype) for key, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(converted(value, dtype) for value in nest)
    return nest
