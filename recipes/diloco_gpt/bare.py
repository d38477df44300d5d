"""DiLoCo and nothing else: processes train apart, and meet every few steps, for links that are slow.

Each makes its own steps. Then all take the mean of how far each has come as one gradient of an outer optimizer, SGD
with Nesterov momentum, and go on from where that leads (Douillard et al. 2023, https://arxiv.org/abs/2311.08105).

    torchrun --nproc-per-node 2 recipes/diloco_gpt/bare.py
    torchrun --nproc-per-node 2 recipes/diloco_gpt/bare.py --checkpoint diloco  # again: continues, on as many processes

train.py has the same strategy, and adds replicas of several processes, parts that are sent beside the computation,
differences of 8 bits; and what a long run needs: bfloat16, accumulation, evaluations of the mean weights, exact
resumes, hangs named by rank, and checkpoints that every other recipe reads.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from common.workloads import gpt, text

BATCH = 32  # sequences of a step, of all processes together
INNER_STEPS = 10  # that each process makes alone


def make_model(vocab_size: int) -> gpt.GPT:
    """A small GPT; the same weights in every process."""
    model = gpt.GPT(gpt.Shape(vocab_size, num_layers=4, num_heads=4, width=192))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = model.initial(name, parameter.shape, generator)
    return model


def parallelize(model: Any, device: torch.device) -> Any:
    """Send nothing: note the weights, which are the same in all processes, and make the outer optimizer for them."""
    model = model.to(device)
    model.before = [parameter.detach().clone() for parameter in model.parameters()]
    model.outer = torch.optim.SGD(model.before, lr=0.7, momentum=0.9, nesterov=True)
    return model


def outer_step(model: Any) -> None:
    """Let all processes follow the mean of their differences since the last outer step."""
    for before, parameter in zip(model.before, model.parameters(), strict=True):
        before.grad = before - parameter.detach()
        dist.all_reduce(before.grad)
        before.grad /= dist.get_world_size()
    model.outer.step()
    for before, parameter in zip(model.before, model.parameters(), strict=True):
        parameter.data.copy_(before)


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on this process's part of a batch; returns the mean loss of the batch, and the gradient norm."""
    loss = model(inputs, targets).mean()  # of sequences, (b,)
    loss.backward()  # the gradient is that of this process alone
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # for the log alone
    return mean / dist.get_world_size(), grad_norm


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let each process write what is its own, into a new folder: the name of the newest whole one changes last."""
    folder = path / f"step_{steps}"
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
    state |= {"before": model.before, "outer": model.outer.state_dict()}
    torch.save(state, folder / f"{dist.get_rank()}.pt")
    written = torch.ones((), device=next(model.parameters()).device)
    dist.all_reduce(written)
    if written.item() == dist.get_world_size() and dist.get_rank() == 0:  # .item() waits for all
        (path / "newest.part").write_text(folder.name)
        os.replace(path / "newest.part", path / "newest")


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Let each process read what is its own; returns the steps that are done."""
    folder = path / (path / "newest").read_text()
    state = torch.load(folder / f"{dist.get_rank()}.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for before, saved in zip(model.before, state["before"], strict=True):
        before.copy_(saved)
    model.outer.load_state_dict(state["outer"])
    optimizer.load_state_dict(state["optimizer"])
    return state["steps"]


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    done = load(args.checkpoint, model, optimizer) if args.checkpoint and (args.checkpoint / "newest").exists() else 0
    for step in range(done + 1, args.steps + 1):
        chosen = np.random.default_rng(step).integers(len(train), size=BATCH)  # the same in every process
        part = chosen[rank::size]  # for each another one
        batch = train.read(np.zeros_like(part), part)  # of epoch 0
        loss, grad_norm = train_step(model, optimizer, *(part.to(device) for part in batch))
        if step % INNER_STEPS == 0:
            outer_step(model)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{args.steps}  loss {loss:.4f}  grad_norm {grad_norm:.3f}")
        if args.checkpoint and (step % 50 == 0 or step == args.steps):
            save(args.checkpoint, model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
