"""Expert parallel and nothing else: each process holds some of each layer's experts, and tokens travel to them.

A router chooses experts for each token. An all-to-all sends the tokens to the processes of their experts, another one
the results back; in the backward pass, gradients take the same ways. All other parameters are split as in fsdp_gpt.

    torchrun --nproc-per-node 2 recipes/moe_gpt/bare.py
    torchrun --nproc-per-node 2 recipes/moe_gpt/bare.py --checkpoint moe  # if stopped, the same again continues

train.py has the same strategy, and adds what a long run needs: fewer processes than experts have parts, shared experts,
balance by biases, a capacity, accumulation, HSDP, bfloat16, recomputation, warm-up; evaluations, exact resumes on any
number of processes, skipped updates, hangs named by rank, TensorBoard, and checkpoints for any other number.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from common.workloads import gpt, moe, text

BATCH = 32  # sequences of a step, of all processes together
EXPERTS = 8
TOP_K = 2  # of them, for each token
BALANCE = 0.01  # factor on the balance loss


def make_model(vocab_size: int) -> gpt.GPT:
    """A small GPT with experts; the same weights in every process."""
    model = gpt.GPT(gpt.Shape(vocab_size, num_layers=4, num_heads=4, width=192))
    model = moe.with_experts(model, moe.Routing(EXPERTS, TOP_K))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = model.initial(name, parameter.shape, generator)
    return model


class Exchange(torch.autograd.Function):
    """Send rows to each process, given[i] to the i-th, and get taken[i] from it; gradients return the same way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, given: list[int], taken: list[int]) -> torch.Tensor:
        """Send rows."""
        ctx.way_back = (taken, given)
        received = rows.new_empty(sum(taken), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), taken, given)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Send gradients back."""
        return Exchange.apply(grad, *ctx.way_back), None, None


def mix(experts: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the chosen experts (N, k), of all processes, make of tokens (N, C), with their weights (N, k)."""
    size = dist.get_world_size()
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    coming = torch.empty_like(counts)  # the rows for our experts, by the process that sends them
    dist.all_to_all_single(coming, counts)
    ours, theirs = (part.view(size, -1).tolist() for part in (counts, coming))  # by process and expert
    given, taken = list(map(sum, ours)), list(map(sum, theirs))
    order = chosen.flatten().argsort(stable=True)  # a row for each choice, by expert
    rows = Exchange.apply(x.repeat_interleave(TOP_K, 0)[order], given, taken)
    # They come process by process, and of each expert by expert.
    owners = torch.arange(len(experts), device=x.device).repeat(size).repeat_interleave(coming)
    by_expert = owners.argsort(stable=True)
    results = experts(rows[by_expert], coming.view(size, -1).sum(0), list(map(sum, zip(*theirs, strict=True))))
    back = Exchange.apply(results[by_expert.argsort()], taken, given)
    return (back[order.argsort()].view(*weights.shape, -1) * weights[..., None]).sum(1)


def parallelize(model: Any, device: torch.device) -> Any:
    """Keep this process's part of the experts; split all else over the processes, as in fsdp_gpt."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = model.to(device)
    alone = init_device_mesh(device.type, (size, 1), mesh_dim_names=("all", "one"))["one"]
    for block in model.blocks.values():
        for i in range(EXPERTS):
            if i * size // EXPERTS != rank:
                delattr(block.mlp.experts, str(i))
        block.mlp.mix = mix
        fully_shard(block.mlp.experts, mesh=alone)  # in one part, for an optimizer that has parts of all others
        fully_shard(block)
    return fully_shard(model)


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on this process's part of a batch; returns the mean loss of the batch, and the gradient norm."""
    size = dist.get_world_size()
    loss = model(inputs, targets).mean()  # of sequences, (b,)
    here: Any = moe.routed(model)
    counts = here.counts.clone()  # how many tokens choose each expert of each layer
    dist.all_reduce(counts)  # of all processes: the balance loss is that of the whole batch
    (loss + BALANCE * moe.losses(here, counts, inputs.numel())["balance_loss"]).backward()
    for block in model.blocks.values():
        for parameter in block.mlp.experts.parameters():
            parameter.grad.div_(size)  # a sum over the tokens of all processes, where FSDP has means for all else
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum()
    dist.all_reduce(norm)  # of the parts of all processes
    norm = norm.sqrt()
    for grad in grads:
        grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # for the log alone
    return mean / size, norm


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
