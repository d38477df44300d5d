"""Fully sharded data parallel (FSDP2) and nothing else: every process holds a part of each parameter.

It gathers the parameters of a block just before it computes with them, and frees them afterwards: an all-gather in the
forward pass, and again in the backward pass. That ends with a reduce-scatter, which leaves each process its part of the
averaged gradients, where DDP's all-reduce would leave all; the optimizer has the state of that part alone.

    torchrun --nproc-per-node 2 recipes/fsdp_gpt/bare.py
    torchrun --nproc-per-node 2 recipes/fsdp_gpt/bare.py --checkpoint fsdp  # if stopped, the same again continues

train.py has the same strategy, and adds what a long run needs: weights that are drawn after the split, HSDP,
bfloat16, accumulation, recomputation, warm-up; evaluations, exact resumes on any number of processes, skipped updates,
hangs named by rank, TensorBoard, and checkpoints that every other recipe reads.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from common.workloads import gpt, text

BATCH = 32  # sequences of a step, of all processes together


def make_model(vocab_size: int) -> gpt.GPT:
    """A small GPT; the same weights in every process."""
    model = gpt.GPT(gpt.Shape(vocab_size, num_layers=4, num_heads=4, width=192))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = model.initial(name, parameter.shape, generator)
    return model


def parallelize(model: Any, device: torch.device) -> Any:
    """Split each block's parameters over the processes, in place; and then what is left: embedding, last norm, head.

    Parts that are split first are gathered one by one. The model as one part would be whole on each process.
    """
    model = model.to(device)
    for block in model.blocks.values():
        fully_shard(block)
    return fully_shard(model)


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on this process's part of a batch; returns the mean loss of the batch, and the gradient norm."""
    loss = model(inputs, targets).mean()  # of sequences, (b,)
    # Its gradient becomes the mean over the processes: their parts are equal, so it is the mean over the batch.
    loss.backward()
    grad_norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the parts of all processes
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # for the log alone
    return mean / dist.get_world_size(), grad_norm.full_tensor()  # a DTensor: here the parts are added up


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let each process write its parts, into a new folder: the name of the newest whole one changes last."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "steps": steps}, checkpoint_id=path / f"step_{steps}")
    if dist.get_rank() == 0:  # dcp.save has waited for all
        (path / "newest.part").write_text(f"step_{steps}")
        os.replace(path / "newest.part", path / "newest")


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Let each process read its parts, of any number of processes; returns the steps that are done."""
    weights, state = get_state_dict(model, optimizer)
    saved: Any = {"model": weights, "optimizer": state, "steps": 0}
    dcp.load(saved, checkpoint_id=path / (path / "newest").read_text())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return saved["steps"]


def main() -> None:
    """Train a small GPT on Python's own text."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own text.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--checkpoint", type=Path, help="folder, written every 50 steps; continue from it")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # with whom, torchrun has set
    rank, size = dist.get_rank(), dist.get_world_size()
    train, _ = text.load("stdlib", seq_len=128)
    model = parallelize(make_model(train.vocab_size), device)
    # After the split: these parameters are others.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    done = load(args.checkpoint, model, optimizer) if args.checkpoint and (args.checkpoint / "newest").exists() else 0
    for step in range(done + 1, args.steps + 1):
        chosen = np.random.default_rng(step).integers(len(train), size=BATCH)  # the same in every process
        mine = chosen[rank::size]  # a part for each
        batch = train.read(np.zeros_like(mine), mine)  # of epoch 0
        loss, grad_norm = train_step(model, optimizer, *(part.to(device) for part in batch))
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{args.steps}  loss {loss:.4f}  grad_norm {grad_norm:.3f}")
        if args.checkpoint and (step % 50 == 0 or step == args.steps):
            save(args.checkpoint, model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
