"""Reference models as plain modules, for the demo, the examples and the benchmarks."""

from placer.utils.extras import extra

with extra("torch"):
    from placer.zoo.gpt import GPT, gpt
    from placer.zoo.llama import Llama, llama, llama_70b
    from placer.zoo.resnet import ResNet, resnet18, resnet50, resnet101
    from placer.zoo.seqnet import SeqNet
    from placer.zoo.toy import ToyModel
    from placer.zoo.unet import UNet, unet

__all__ = [
    "GPT",
    "Llama",
    "ResNet",
    "SeqNet",
    "ToyModel",
    "UNet",
    "gpt",
    "llama",
    "llama_70b",
    "resnet18",
    "resnet50",
    "resnet101",
    "unet",
]
