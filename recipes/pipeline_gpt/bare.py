"""Pipeline parallelism and nothing else: every process holds some of the layers, and micro-batches flow through all.

Processes next to each other send activations forward and their gradients back. While one computes a micro-batch, the
next one computes the one before. 1F1B: each begins a backward pass as soon as it can, so that few activations wait.

    torchrun --nproc-per-node 2 recipes/pipeline_gpt/bare.py
    torchrun --nproc-per-node 2 recipes/pipeline_gpt/bare.py --checkpoint pipeline  # if stopped, again: it continues

train.py has the same strategy, and adds other schedules, pipelines beside each other, tied embeddings; and what a
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
    """Keep this process's layers: the first one also has the embedding, the last one norm and head.

    GPT's forward skips what is None, and takes activations where it has no embedding. There are 4 layers, so at most 4
    processes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in [name for name in model.blocks if int(name) * size // model.shape.num_layers != rank]:
        del model.blocks[name]
    model.embed = model.embed if rank == 0 else None
    model.norm = model.norm if rank == size - 1 else None
    model.head = model.head if rank == size - 1 else None
    stage = PipelineStage(model.to(device), rank, size, device)
    # The schedule adds up the gradients of the micro-batches, and divides by their number: the mean over the batch.
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda logits, y: gpt.sequence_losses(logits, y).mean())
    model.run = schedule.step
    return model


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on a batch; returns its mean loss, and the gradient norm over the layers of all processes."""
    losses: list[torch.Tensor] = []  # of the micro-batches, in the last process
    tokens = [inputs] if dist.get_rank() == 0 else []  # the others get activations
    model.run(*tokens, target=targets, losses=losses)  # forward and backward passes of all micro-batches
    # Each parameter is in one process: what there is of all is added up, not averaged.
    square = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, square.sqrt())
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack(losses).mean().detach() if losses else torch.zeros_like(square)
    dist.all_reduce(mean)  # for the log alone
    return mean, square.sqrt()


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let each process write its layers, into a new folder: the name of the newest whole one changes last."""
    folder = path / f"step_{steps}"
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
    torch.save(state, folder / f"{dist.get_rank()}.pt")
    written = torch.ones((), device=next(model.parameters()).device)
    dist.all_reduce(written)
    if written.item() == dist.get_world_size() and dist.get_rank() == 0:  # .item() waits for all
        (path / "newest.part").write_text(folder.name)
        os.replace(path / "newest.part", path / "newest")


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Let each process read its layers; returns the steps that are done."""
    folder = path / (path / "newest").read_text()
    state = torch.load(folder / f"{dist.get_rank()}.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
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
    rank = dist.get_rank()
    train, _ = text.load("stdlib", seq_len=128)
    model = parallelize(make_model(train.vocab_size), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    done = load(args.checkpoint, model, optimizer) if args.checkpoint and (args.checkpoint / "newest").exists() else 0
    for step in range(done + 1, args.steps + 1):
        chosen = np.random.default_rng(step).integers(
            len(train), size=BATCH
        )  # the same in every process: the last one needs the targets
        batch = train.read(np.zeros_like(chosen), chosen)  # of epoch 0
        loss, grad_norm = train_step(model, optimizer, *(part.to(device) for part in batch))
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{args.steps}  loss {loss:.4f}  grad_norm {grad_norm:.3f}")
        if args.checkpoint and (step % 50 == 0 or step == args.steps):
            save(args.checkpoint, model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
