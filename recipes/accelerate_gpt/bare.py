"""Hugging Face Accelerate and nothing else: its `prepare` puts the model under a strategy that its settings choose.

Without settings that is DistributedDataParallel, as in ddp_gpt; the loop calls `accelerator.backward` and its clipping.

    torchrun --nproc-per-node 2 recipes/accelerate_gpt/bare.py
    torchrun --nproc-per-node 2 recipes/accelerate_gpt/bare.py --checkpoint acc.pt  # if stopped, again: it continues

train.py has the same strategy, checks that Accelerate does what the flags say, and adds what a long run needs:
bfloat16, accumulation, warm-up, FSDP2 by a file; evaluations, exact resumes on any number of processes, skipped
updates, hangs named by rank, TensorBoard, and checkpoints that every other recipe reads.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator

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
    """Let Accelerate move and wrap the model; on a CPU, it has to be told so, or it believes that it is alone."""
    accelerator = Accelerator(cpu=device.type == "cpu")
    model = accelerator.prepare(model)
    model.accelerator = accelerator
    return model


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on this process's part of a batch; returns the mean loss of the batch, and the gradient norm."""
    loss = model(inputs, targets).mean()  # of sequences, (b,)
    model.accelerator.backward(loss)  # the gradient becomes the mean over the processes
    grad_norm = model.accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # for the log alone
    return mean / dist.get_world_size(), grad_norm


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let one process write, first beside the old file: a crash in the middle leaves that one."""
    if dist.get_rank() == 0:
        weights = model.accelerator.unwrap_model(model).state_dict()
        state = {"model": weights, "optimizer": optimizer.state_dict(), "steps": steps}
        torch.save(state, f"{path}.part")
        os.replace(f"{path}.part", path)


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Let every process read; returns the steps that are done."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.accelerator.unwrap_model(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["steps"]


def main() -> None:
    """Train a small GPT on Python's own text."""
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's own text.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--checkpoint", type=Path, help="written every 50 steps; if it is there, continue from it")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # with whom, torchrun has set
    rank, size = dist.get_rank(), dist.get_world_size()
    train, _ = text.load("stdlib", seq_len=128)
    model = parallelize(make_model(train.vocab_size), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    done = load(args.checkpoint, model, optimizer) if args.checkpoint and args.checkpoint.exists() else 0
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
