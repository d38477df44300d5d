"""Context parallelism and nothing else but FSDP2: every process holds a part of each sequence, and of each parameter.

Only attention looks at other tokens: there, each process gathers the keys and values of all, and computes its own
queries. The gradients of keys and values go back to the processes whose they are.

    torchrun --nproc-per-node 2 recipes/context_gpt/bare.py
    torchrun --nproc-per-node 2 recipes/context_gpt/bare.py --checkpoint context  # if stopped, the same again continues

train.py has the same strategy, and adds two ways that need less memory, a ring and Ulysses, with equally much to
compute on each rank, beside data parallel groups; and what a long run needs: bfloat16, accumulation, recomputation,
evaluations, exact resumes, hangs named by rank, and checkpoints that every other recipe reads.
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
from torch.nn import functional as F

from common.workloads import gpt, text

BATCH = 32  # sequences of a step, which all processes share


def make_model(vocab_size: int) -> gpt.GPT:
    """A small GPT; the same weights in every process."""
    model = gpt.GPT(gpt.Shape(vocab_size, num_layers=4, num_heads=4, width=192))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = model.initial(name, parameter.shape, generator)
    return model


class Gather(torch.autograd.Function):
    """The parts of all processes, (N, ...), of one (...); the gradient of each goes back, and is added up there."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        """Gather the parts."""
        parts = part.new_empty(dist.get_world_size(), *part.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), part.contiguous())
        return parts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradients to the processes whose parts they are of."""
        part = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(part, grad.contiguous().flatten(0, 1))
        return part


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of this process's queries, (B, heads, T / N, D), to the keys up to each, of all processes."""
    keys, values = Gather.apply(torch.stack([key, value])).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # (B, heads, T, D)
    positions = torch.arange(keys.shape[2], device=keys.device)
    reads = positions.chunk(dist.get_world_size())[dist.get_rank()][:, None] >= positions
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=reads)


def parallelize(model: Any, device: torch.device) -> Any:
    """Let attention read the tokens of all processes; and split the parameters over them, as in fsdp_gpt."""
    model = model.to(device)
    for block in model.blocks.values():
        block.attention.attend = attend
        fully_shard(block)
    return fully_shard(model)


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on whole sequences, of which each process computes a part; returns their mean loss, and the norm."""
    rank, size = dist.get_rank(), dist.get_world_size()
    positions = torch.arange(inputs.shape[1], device=inputs.device).chunk(size)[rank]
    loss = model(inputs.chunk(size, 1)[rank], targets.chunk(size, 1)[rank], positions).mean()
    loss.backward()  # the gradient is the mean over the processes; their parts are equal, so over the sequences
    grad_norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the parts of all processes
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # for the log alone
    return mean / dist.get_world_size(), grad_norm.full_tensor()


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
    rank = dist.get_rank()
    train, _ = text.load("stdlib", seq_len=128)
    model = parallelize(make_model(train.vocab_size), device)
    # After the split: these parameters are others.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    done = load(args.checkpoint, model, optimizer) if args.checkpoint and (args.checkpoint / "newest").exists() else 0
    for step in range(done + 1, args.steps + 1):
        chosen = np.random.default_rng(step).integers(len(train), size=BATCH)  # the same in every process
        batch = train.read(np.zeros_like(chosen), chosen)  # of epoch 0
        loss, grad_norm = train_step(model, optimizer, *(part.to(device) for part in batch))
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{args.steps}  loss {loss:.4f}  grad_norm {grad_norm:.3f}")
        if args.checkpoint and (step % 50 == 0 or step == args.steps):
            save(args.checkpoint, model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
