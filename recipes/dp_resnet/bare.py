"""nn.DataParallel and nothing else: one process, and a thread for each GPU of the machine.

Each forward pass copies the model to all GPUs and divides the batch; the backward pass adds up gradients on the first.

    python recipes/dp_resnet/bare.py
    python recipes/dp_resnet/bare.py --checkpoint dp.pt  # if stopped, the same again continues

train.py has the same strategy, and adds what a long run needs: bfloat16, accumulation, warm-up; an evaluation that
counts each sample once; a stop at any step that a resume repeats exactly; skipped updates, TensorBoard, and checkpoints
that every other recipe reads.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, RandomSampler

from common.workloads import images, resnet

BATCH = 128  # samples of a step, of all GPUs together


def parallelize(model: Any, device: torch.device) -> Any:
    """Wrap the model, which lies on the first GPU; without GPUs, the wrapper only calls it."""
    return nn.DataParallel(model.to(device))


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on a batch; returns its mean loss, and the gradient norm."""
    pixels = inputs.to(next(model.parameters()).dtype).div(127.5).sub(1)  # (b, C, H, W), from bytes to -1 ... 1
    loss = F.cross_entropy(model(pixels), targets)
    loss.backward()
    grad_norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), grad_norm


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Write, first beside the old file: a crash in the middle leaves that one."""
    # `module` is the model without the wrapper.
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Read; returns the epochs that are done."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epochs"]


def main() -> None:
    """Train a ResNet-20 on the digits."""
    parser = argparse.ArgumentParser(description="Train a ResNet-20 on the digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch; if it is there, continue from it")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    train: Any = images.load("digits", run_seed=0, flip=False)[0]
    torch.manual_seed(0)
    model = resnet.make_resnet("resnet20", train.channels, len(train.class_names), train.size)
    model = parallelize(model, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    done = load(args.checkpoint, model, optimizer) if args.checkpoint and args.checkpoint.exists() else 0
    for epoch in range(done, args.epochs):
        sampler = RandomSampler(train, generator=torch.Generator().manual_seed(epoch))
        for indices in BatchSampler(sampler, BATCH, drop_last=True):
            batch = train.read(np.full(len(indices), epoch), np.array(indices))  # augmentation may depend on the epoch
            loss, grad_norm = train_step(model, optimizer, *(part.to(device) for part in batch))
        print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  grad_norm {grad_norm:.3f}")
        if args.checkpoint:
            save(args.checkpoint, model, optimizer, epoch + 1)


if __name__ == "__main__":
    main()
