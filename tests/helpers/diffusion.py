"""A diffusion pipeline in plain torch: a text encoder, a UNet that runs repeatedly, a decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from placer import ModelUse, zoo

STEPS = 3
"""Steps of denoising, each with one run of the UNet."""


class TextEncoder(nn.Module):
    """Token ids ``(N, 6)`` to a condition, one more channel of each image: ``(N, 1, 16, 16)``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.image = nn.Linear(48, 256)

    def forward(self, ids: Tensor) -> Tensor:
        states = torch.tanh(self.mix(self.embed(ids)))
        image: Tensor = self.image(states.flatten(1))
        return image.unflatten(1, (1, 16, 16))


class Pipeline:
    """The three models, and plain Python around them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.text_encoder = TextEncoder().eval()
        self.unet = zoo.unet(in_channels=5, num_classes=4, width=2).eval()
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.ConvTranspose2d(8, 3, 2, 2)
        ).eval()

    @torch.no_grad()
    def __call__(self, ids: Tensor, noise: Tensor) -> Tensor:
        """Return images ``(N, 3, 32, 32)``."""
        condition = self.text_encoder(ids)
        latents = noise
        for step in range(STEPS):
            latents = latents - self.unet(torch.cat([latents, condition], dim=1)) / (step + 1)
        images: Tensor = self.decoder(latents)
        return images

    def models(self) -> dict[str, nn.Module]:
        """Return the models by name."""
        return {
            "text_encoder": self.text_encoder,
            "unet": self.unet,
            "decoder": self.decoder,
        }

    def uses(self, device: torch.device | str = "cpu") -> dict[str, ModelUse]:
        """Return the models with example inputs and their runs in one request."""
        inputs = {
            "text_encoder": torch.zeros(1, 6, dtype=torch.long, device=device),
            "unet": torch.zeros(1, 5, 16, 16, device=device),
            "decoder": torch.zeros(1, 4, 16, 16, device=device),
        }
        runs = {"unet": STEPS}
        return {
            name: ModelUse(model, inputs[name], runs=runs.get(name, 1))
            for name, model in self.models().items()
        }


def requests(device: torch.device | str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Return the arguments of some requests."""
    random = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(20, (1, 6), generator=random).to(device),
            torch.randn(1, 4, 16, 16, generator=random).to(device),
        )
        for _ in range(3)
    ]
