"""Train a GPT that is too big for one device with FSDP2: every parameter is split over the ranks.

A rank gathers the parameters of a block just before it computes with them, and gives them back after; gradients
are averaged into the part that it keeps. With --dp-replicate R (HSDP) R groups hold the model once each: gathering
stays within a group, such as a machine, and only gradients travel between them.

    what                          each rank, of N (HSDP: of the N / R in its group)
    parameters                    1/N of each, and all of the block or two that it computes with
    gradients, optimizer state    1/N; but of an accumulated step all gradients, until its last pass
    batch                         an equal part of its sequences

A pass all-gathers each block's parameters, forward and (but for --no-reshard-after-forward) again backward; a step's
last one reduce-scatters each block's gradients and, with HSDP, all-reduces the results. Clipping adds one all-reduce.

    bash launch/torchrun.sh recipes/fsdp_gpt                                             # one per GPU, else 2
    NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/fsdp_gpt --dp-replicate 2           # HSDP, 2 groups of 2
    bash launch/slurm.sh -N2 --gpus-per-node=8 recipes/fsdp_gpt --num-layers 24 --num-heads 16 --width 2048

Measured: val/loss 1.789 nats a byte after 200 steps and 77 s of training, 2 processes, AMD EPYC, 2 cores, bfloat16,
gloo, torch 2.15.0, 2026-11-21 (docs/language.md; a bigram model has 2.403). Several GPUs and NCCL: not run.

Base: recipes/ddp_gpt. Open: 0 1 3
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from common import UserError, checkpoint, cli, data, guard, initial, keymap, log, metrics, precision, run_dir, sampler
from common import saver, schedule, seed, stop, watch, world
from common.workloads import gpt, text

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args:
    """Train a small GPT on text."""

    out: str = f"runs/{Path(__file__).parent.name}"  # folder for runs
    name: str = ""  # name of this run, by default date and time; the same name again continues the run
    resume: str = ""  # continue from this run or checkpoint, of any recipe with the same model
    data: str = "stdlib"  # "stdlib" (built in: Python's own text), a folder, or a data set of the Hugging Face hub
    seed: int = 0  # decides initial weights and order of samples
    workers: int = 0  # loader processes per rank; a set that fits in memory needs none
    backend: str = "auto"  # auto (NCCL on GPUs, else gloo), gloo, nccl or mpi
    epochs: int = 1  # length of the training, if max_steps is 0
    max_steps: int = 200  # length of the training in optimizer steps
    stop_after: int = 0  # leave, saved, once this step is done; 0 for never
    deadline: float = 0.0  # leave, saved, after this many minutes; 0 for never
    log_every: int = 10  # steps between lines of the log
    eval_every: int = 100  # steps between evaluations; 0 for once an epoch
    save_every: int = 100  # steps between checkpoints; 0 for once an epoch
    keep: int = 2  # newest checkpoints that stay on the disk
    async_save: bool = False  # write checkpoints while the training goes on
    check_every: int = 100  # steps between comparisons of the replicas; 0 for never
    max_skips: int = 3  # updates in a row that may be left out because their gradient is not finite
    hang_timeout: float = 300.0  # seconds without progress after which a hang is named and ended
    global_batch_size: int = 32  # sequences per optimizer step, over all ranks
    micro_batch_size: int = 0  # most sequences per forward pass of a rank; 0 for one pass a step
    lr: float = 2e-3  # peak learning rate at lr_reference_batch sequences per step, scaled linearly
    lr_reference_batch: int = 32  # sequences per step that lr is meant for
    weight_decay: float = 0.1  # on matrices, not on norms
    warmup_steps: int = 20  # steps of linear warm-up
    max_grad_norm: float = 1.0  # clip the global gradient norm to this; 0 for never
    dtype: str = "auto"  # auto (bfloat16 where the hardware has it), float32, bfloat16 or float64
    compile: bool = False  # torch.compile the model
    seq_len: int = 128  # tokens of a sequence
    tokenizer: str = ""  # a Hugging Face tokenizer.json; "" for bytes
    num_layers: int = 4  # transformer blocks
    num_heads: int = 4  # heads of the queries
    num_kv_heads: int = 0  # heads of keys and values; 0 for as many
    width: int = 192  # of the residual stream
    mlp_width: int = 0  # of the hidden layer in each MLP; 0 for 8/3 of the width, rounded up to 64
    tied: bool = False  # let the output layer be the embedding
    dp_replicate: int = 1  # groups that hold the model once each (HSDP)
    reshard_after_forward: bool = True  # give gathered parameters back before the backward pass: less memory
    recompute: bool = False  # compute each block again in the backward pass, instead of keeping its activations


# --- 2 Workload -------------------------------------------------------------------------------------------


def make_data(args: Args) -> tuple[text.Text, text.Text]:
    """The training and the validation split, the same on every rank."""
    return text.load(args.data, args.seq_len, args.tokenizer)


def make_model(args: Args, train: text.Text) -> nn.Module:
    """The plain model on the meta device: names and shapes, no weights yet, whatever its size."""
    sizes = (args.num_layers, args.num_heads, args.width, args.num_kv_heads, args.mlp_width, args.tied)
    with torch.device("meta"):
        return gpt.GPT(gpt.Shape(train.vocab_size, *sizes))


def make_optimizer(args: Args, model: nn.Module) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101); no weight decay on norms."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def forward(args: Args, model: nn.Module, batch: data.Batch) -> metrics.Sums:
    """Sums over one rank's batch, of which "loss" carries the gradient."""
    dtype = precision.pick(args.dtype, batch.inputs.device)
    with precision.autocast(batch.inputs.device, dtype):
        losses = model(batch.inputs, batch.targets)  # (b,), the mean over each sequence
    return {"loss": losses.sum(), "count": torch.full((), len(losses), device=losses.device)}


# --- 3 Strategy -------------------------------------------------------------------------------------------


def make_mesh(args: Args, here: world.World) -> DeviceMesh:
    """The ranks and their axes: groups that hold the same, by ranks of a group, which share the model."""
    if here.size % args.dp_replicate:
        raise UserError(f"--dp-replicate {args.dp_replicate} does not divide the {here.size} ranks")
    sizes = (args.dp_replicate, here.size // args.dp_replicate)
    return init_device_mesh(here.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))


def data_shard(mesh: DeviceMesh) -> tuple[int, int]:
    """Which part of each batch this rank reads, of how many."""
    return mesh.get_rank(), mesh.size()


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Put the plain model on its device and under the strategy."""
    model = model.to(precision.storage(dtype))
    if args.recompute:
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, gpt.Block))
    compute = torch.bfloat16 if dtype == torch.bfloat16 else None  # gathered in it; gradients are added up in float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.storage(dtype))
    axes = mesh["dp_replicate", "dp_shard"] if args.dp_replicate > 1 else mesh["dp_shard"]
    for block in model.blocks.values():
        fully_shard(block, mesh=axes, mp_policy=policy, reshard_after_forward=args.reshard_after_forward)
    fully_shard(model, mesh=axes, mp_policy=policy, reshard_after_forward=False)  # what is left: used first and last
    return initial.place(model, args.seed, device, precision.storage(dtype))


@contextlib.contextmanager
def gradient_sync(model: Any, last: bool) -> Iterator[None]:
    """Around one forward and backward pass: only the `last` one of a step sends gradients."""
    model.set_requires_gradient_sync(last)
    yield


def clip_gradients(args: Args, model: nn.Module) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it: of all parts of all ranks."""
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
    return norm.full_tensor()


# --- 4 Step -----------------------------------------------------------------------------------------------


def train_step(
    args: Args, model: nn.Module, optimizer: Optimizer, finite: guard.FiniteGuard, batches: data.Loader, num_shards: int
) -> tuple[metrics.Sums, torch.Tensor]:
    """One optimizer step; returns this rank's sums and the global gradient norm, ()."""
    sums: metrics.Sums = {}
    for batch in batches.step():
        with gradient_sync(model, batch.last):
            batch_sums = forward(args, model, batch)
            # The mean over the samples of the whole step. Gradients are averaged over the shards where they
            # are synchronised, so each shard's part counts num_shards times.
            (batch_sums["loss"] * (num_shards / batch.step_samples)).backward()
        sums = metrics.add(sums, batch_sums)
    grad_norm = clip_gradients(args, model)
    finite.judge(grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sums, grad_norm


@torch.no_grad()
def evaluate(args: Args, model: nn.Module, batches: data.Loader) -> metrics.Sums:
    """This rank's sums over its part of the validation split."""
    model.eval()
    sums: metrics.Sums = {}
    for batch in batches:
        with gradient_sync(model, batch.last):
            sums = metrics.add(sums, forward(args, model, batch))
    model.train()
    return sums


# --- 5 Main -----------------------------------------------------------------------------------------------


@cli.entry
def main() -> None:
    """Train from the newest checkpoint, or from the start, to the end."""
    args = cli.parse(Args)
    here = world.start(args.backend, flag=dataclasses.asdict(args), code=world.code_digests(__file__))
    mesh = make_mesh(args, here)
    shard, num_shards = data_shard(mesh)
    pass_size = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, num_shards)
    dtype = precision.pick(args.dtype, here.device)
    train, validation = make_data(args)
    terms = {"seed": args.seed, "data": train.digest()}  # a position in the data is valid for these alone

    path = run_dir.choose(args.out, args.name)
    model = make_model(args, train)
    source, done = checkpoint.find(path, args.resume, terms, model)
    flops = metrics.count_flops(lambda m, sample: forward(args, m, sample)["loss"], model, train)
    model = parallelize(args, model, mesh, here.device, dtype)
    if args.compile:
        model.compile()
    optimizer = make_optimizer(args, model)
    checkpoint.load(source, keymap.tensors(model, optimizer))

    length = (args.epochs, args.max_steps, args.global_batch_size)
    plan = sampler.make_plan(len(train), args.seed, *length, pass_size, num_shards, done, guard.least_samples(model))
    batches = data.Loader(train, sampler.training_requests(plan, shard), args.workers, here.device)

    run_dir.claim(path)
    stopping = stop.Stop(args.deadline, plan.first_step)
    watching = watch.Watch(here, path, plan.first_step, args.hang_timeout)
    finite = guard.FiniteGuard(model, optimizer, plan, args.max_skips)
    saving = saver.Saver(path, __file__, mesh, terms, args.keep, args.async_save)
    run = log.Run(path, __file__, args, here, plan, flops, dtype)

    last_step = min(plan.max_steps, args.stop_after or plan.max_steps)
    peak_lr = schedule.linear_scaling(args.lr, args.global_batch_size, args.lr_reference_batch)
    for step in range(plan.first_step + 1, last_step + 1):
        watching.step(step)
        seed.everything(args.seed, seed.STEP, step, shard)
        lr = schedule.set_rate(optimizer, peak_lr * schedule.warmup_cosine(step - 1, args.warmup_steps, plan.max_steps))
        sums, grad_norm = train_step(args, model, optimizer, finite, batches, num_shards)
        run.add(sums)
        finite.after(step)
        last = stopping.after(step) or step == last_step
        if step % args.log_every == 0 or last:
            run.train(step, lr=lr, grad_norm=grad_norm.item(), data_wait_s=batches.wait_s)
            finite.check()
        with run.paused():
            if args.check_every and (step % args.check_every == 0 or last):
                guard.check_replicas(model, step)
            if step % (args.eval_every or plan.epoch_steps) == 0 or step == last_step:
                requests = sampler.evaluation_requests(plan, len(validation), shard)
                held_out = data.Loader(validation, requests, args.workers, here.device)
                run.validation(step, validation.figures(metrics.means(evaluate(args, model, held_out))))
            if step % (args.save_every or plan.epoch_steps) == 0 or last:
                saving.save(step, keymap.tensors(model, optimizer), plan.position(step), last)
        if last:
            break
    run.finish(stopping.reason)
    world.finish()


if __name__ == "__main__":
    main()
