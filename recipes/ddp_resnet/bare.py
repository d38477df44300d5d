"""DistributedDataParallel and nothing else: every process holds the model, and reads its own part of each batch.

While the backward pass runs, DDP averages the gradients over the processes, so that all take the same step.

    torchrun --nproc-per-node 2 recipes/ddp_resnet/bare.py
    torchrun --nproc-per-node 2 recipes/ddp_resnet/bare.py --checkpoint ddp.pt  # if stopped, the same again continues

train.py has the same strategy, and adds what a long run needs: bfloat16, accumulation, warm-up, SyncBatchNorm; an
evaluation that counts each sample once; a stop at any step that a resume repeats exactly, on any number of processes;
skipped updates, hangs named by rank, TensorBoard, and checkpoints that every other recipe reads.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DistributedSampler

from common.workloads import images, resnet

BATCH = 128  # samples of a step, of all processes together


def parallelize(model: Any, device: torch.device) -> Any:
    """Wrap the model: DDP sends the first process's weights to all now, and its buffers before each forward pass."""
    return DistributedDataParallel(model.to(device))


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on this process's part of a batch; returns the mean loss of the batch, and the gradient norm."""
    pixels = inputs.to(next(model.parameters()).dtype).div(127.5).sub(1)  # (b, C, H, W), from bytes to -1 ... 1
    loss = F.cross_entropy(model(pixels), targets)
    # Its gradient becomes the mean over the processes: their parts are equal, so it is the mean over the batch.
    loss.backward()
    grad_norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # for the log alone
    return mean / dist.get_world_size(), grad_norm


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Let one process write, first beside the old file: a crash in the middle leaves that one."""
    if dist.get_rank() == 0:
        # `module` is the model without the wrapper.
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}
        torch.save(state, f"{path}.part")
        os.replace(f"{path}.part", path)


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Let every process read; returns the epochs that are done."""
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # with whom, torchrun has set
    rank, size = dist.get_rank(), dist.get_world_size()
    train: Any = images.load("digits", run_seed=0, flip=False)[0]
    torch.manual_seed(0)
    model = resnet.make_resnet("resnet20", train.channels, len(train.class_names), train.size)
    model = parallelize(model, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    done = load(args.checkpoint, model, optimizer) if args.checkpoint and args.checkpoint.exists() else 0
    sampler: Any = DistributedSampler(train, size, rank)  # shuffles, and deals a part to each
    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)  # without it, each epoch has the same order
        for indices in BatchSampler(sampler, BATCH // size, drop_last=True):
            batch = train.read(np.full(len(indices), epoch), np.array(indices))  # augmentation may depend on the epoch
            loss, grad_norm = train_step(model, optimizer, *(part.to(device) for part in batch))
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  grad_norm {grad_norm:.3f}")
        if args.checkpoint:
            save(args.checkpoint, model, optimizer, epoch + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
