"""The toy model of PyTorch's model-parallel tutorial, split without a change to its source.

python examples/toy_model.py        on two GPUs, or without them on two CPU stand-ins
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

import placer
from placer.zoo import ToyModel


def main() -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(20, 10), torch.randn(20, 5)
    unsplit = ToyModel()
    expected = unsplit(inputs)

    model = ToyModel()
    model.load_state_dict(unsplit.state_dict())
    two_gpus = torch.cuda.device_count() > 1
    names = ["cuda:0", "cuda:1"] if two_gpus else ["cpu:0", "cpu:1"]
    # On stand-ins, logical_devices raises where tensors of two devices meet, as GPUs would.
    with nullcontext() if two_gpus else placer.testing.logical_devices(2):
        flow = placer.DataFlow(model, device_ids=names)
        # a map by hand; or placer.suggest(model, inputs)
        flow.layer_gpus.update(net1=0, relu=0, net2=1)
        flow.update_flow()
        outputs = flow(inputs)
        print(f"placed by hand: {dict(flow.layer_gpus)}")
        print(f"largest difference of outputs: {(outputs.cpu() - expected).abs().max():.3g}")

        optimizer = torch.optim.SGD(flow.parameters(), lr=0.05)
        for step in range(10):
            optimizer.zero_grad()
            outputs = flow(inputs)
            loss = nn.functional.mse_loss(outputs, labels.to(outputs.device))
            loss.backward()
            optimizer.step()
            if step in (0, 9):
                print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
