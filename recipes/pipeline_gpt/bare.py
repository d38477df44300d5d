"""Pipeline parallelism and nothing else: every process holds some of the layers, and micro-batches flow through all.

Processes next to each other send activations forward and gradients back. While one computes a micro-batch, the next one
computes the micro-batch before: 1F1B, a forward and a backward pass by turns.

    torchrun --nproc-per-node 2 recipes/pipeline_gpt/bare.py
    torchrun --nproc-per-node 2 recipes/pipeline_gpt/bare.py --checkpoint pipeline  # again: continues from there

train.py beside it trains the same, and adds other schedules, pipelines beside each other, tied embeddings; and what a
long run needs: bfloat16, recomputation, warm-up, evaluations, exact resumes on any number of processes, hangs named by
rank, TensorBoard, and checkpoints that every other recipe reads.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from common.workloads import gpt, text

BATCH = 32  # sequences of a step
MICRO_BATCHES = 8  # into which they are divided


def make_model(vocab_size: int) -> gpt.GPT:
    """A small GPT; the same weights in every process."""
    model = gpt.GPT(gpt.Shape(vocab_size, num_layers=4, num_heads=4, width=192))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = model.initial(name, parameter.shape, generator)
    return model


def parallelize(model: Any, device: torch.device) -> Any:
    """Keep this process's layers: the first one also has the embedding, the last one norm and head."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in [name for name in model.blocks if int(name) * size // model.shape.num_layers != rank]:
        del model.blocks[name]
    model.embed = model.embed if rank == 0 else None
    model.norm = model.norm if rank == size - 1 else None
    model.head = model.head if rank == size - 1 else None
    stage = PipelineStage(model.to(device), rank, size, device)
    # Gradients of the micro-batches are added up and divided by their number: the mean over the batch.
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda logits, y: gpt.sequence_losses(logits, y).mean())
    model.run = [schedule.step]  # in a list: it is no part of the model
    return model


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on a batch; returns its mean loss, and the gradient norm over the layers of all processes."""
    losses: list[torch.Tensor] = []  # of the micro-batches, in the last process
    tokens = [inputs] if dist.get_rank() == 0 else []  # the others get activations
    model.run[0](*tokens, target=targets, losses=losses)
    square = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, square.sqrt())
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack(losses).mean().detach() if losses else torch.zeros_like(square)
    dist.all_reduce(mean)  # for the log alone
    return mean, square.sqrt()


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let each process write its layers, first beside the old file: a crash in the middle leaves that one."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
    torch.save(state, f"{path}.part")
    # Wait for all: their files are whole before one takes the place of an old one.
    dist.all_reduce(torch.zeros((), device=next(model.parameters()).device))
    os.replace(f"{path}.part", path)


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Let each process read its layers; returns the steps that are done."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
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
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # torchrun's environment says with whom
    rank = dist.get_rank()
    train, _ = text.load("stdlib", seq_len=128)
    model = parallelize(make_model(train.vocab_size), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    mine = Path(f"{args.checkpoint}.{rank}")
    done = load(mine, model, optimizer) if args.checkpoint and mine.exists() else 0
    for step in range(done + 1, args.steps + 1):
        chosen = np.random.default_rng(step).integers(len(train), size=BATCH)  # the same in every process
        batch = train.read(np.zeros_like(chosen), chosen)
        loss, grad_norm = train_step(model, optimizer, *(part.to(device) for part in batch))
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{args.steps}  loss {loss:.4f}  grad_norm {grad_norm:.3f}")
        if args.checkpoint and (step % 50 == 0 or step == args.steps):
            save(mine, model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
