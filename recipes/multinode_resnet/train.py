"""Train a ResNet over several machines, where the network between them is the bottleneck.

DistributedDataParallel as on one machine, with less to send: gradients travel once per optimizer step, after as
many passes as the global batch needs, and --compress makes them smaller. Each pass of 32 samples has BatchNorm
statistics of its own (as in Goyal et al. 2017): the same on any number of ranks that divides the batch into such.

    what                           each rank
    parameters, optimizer state    all, a replica
    gradients                      all, the mean over the ranks; with powersgd also what it has left out so far
    batch                          an equal part, in passes of --micro-batch-size

One step sends: one all-reduce of the gradients, in its last backward pass, whole, in bfloat16, or as two thin
matrices for each weight (powersgd); one broadcast of BatchNorm's running statistics in a forward pass.

    bash launch/slurm.sh -N2 --gpus-per-node=8 recipes/multinode_resnet                       # Slurm
    NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash launch/torchrun.sh recipes/multinode_resnet   # without; 1 on the other

Measured: val/top1 0.9890 after 202 steps, 2 processes, AMD EPYC, torch 2.15.0 (docs/compress.md). NCCL: not run.

Base: recipes/ddp_resnet. Open: 0 1 3
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common import checkpoint, cli, data, guard, initial, keymap, log, metrics, precision, run_dir, sampler, saver
from common import schedule, seed, stop, sync_batchnorm, watch, world
from common.workloads import images, resnet

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args:
    """Train a residual network on labelled images."""

    out: str = f"runs/{Path(__file__).parent.name}"  # folder for runs
    name: str = ""  # name of this run, by default date and time; the same name again continues the run
    resume: str = ""  # continue from this run or checkpoint, of any recipe with the same model
    data: str = "digits"  # "digits" (built in), a folder, or a data set of the Hugging Face hub
    seed: int = 0  # decides initial weights, order of samples and augmentation
    workers: int = 0  # loader processes per rank; a set that fits in memory needs none
    backend: str = "auto"  # auto (NCCL on GPUs, else gloo), gloo, nccl or mpi
    epochs: int = 18  # length of the training, if max_steps is 0
    max_steps: int = 0  # length of the training in optimizer steps
    stop_after: int = 0  # leave, saved, once this step is done; 0 for never
    deadline: float = 0.0  # leave, saved, after this many minutes; 0 for never
    log_every: int = 10  # steps between lines of the log
    eval_every: int = 0  # steps between evaluations; 0 for once an epoch
    save_every: int = 0  # steps between checkpoints; 0 for once an epoch
    keep: int = 2  # newest checkpoints that stay on the disk
    async_save: bool = False  # write checkpoints while the training goes on
    check_every: int = 100  # steps between comparisons of the replicas; 0 for never
    max_skips: int = 3  # updates in a row that may be left out because their gradient is not finite
    hang_timeout: float = 300.0  # seconds without progress after which a hang is named and ended
    global_batch_size: int = 128  # samples per optimizer step, over all ranks
    micro_batch_size: int = 32  # most samples per forward pass of a rank; 0 for one pass a step
    lr: float = 0.2  # peak learning rate at lr_reference_batch samples per step, scaled linearly
    lr_reference_batch: int = 256  # samples per step that lr is meant for
    weight_decay: float = 5e-4  # on weights, not on norms and biases
    warmup_steps: int = 30  # steps of linear warm-up
    max_grad_norm: float = 0.0  # clip the global gradient norm to this; 0 for never
    dtype: str = "auto"  # auto (bfloat16 where the hardware has it), float32, bfloat16 or float64
    compile: bool = False  # torch.compile the model
    model: str = "resnet18"  # a residual network of torchvision
    momentum: float = 0.9  # of SGD
    label_smoothing: float = 0.1  # share of the target that is spread over all classes
    flip: bool = False  # mirror half of the images: for photographs, not for digits
    sync_bn: bool = False  # BatchNorm over the samples of all ranks, not of each rank alone
    compress: Literal["none", "bf16", "powersgd"] = "none"  # how gradients are sent
    powersgd_rank: int = 4  # columns of the two matrices that stand for a gradient


# --- 2 Workload -------------------------------------------------------------------------------------------


def make_data(args: Args) -> tuple[images.Images, images.Images]:
    """The training and the validation split, the same on every rank."""
    return images.load(args.data, args.seed, args.flip)


def make_model(args: Args, train: images.Images) -> nn.Module:
    """The plain model, with the same initial weights on every rank."""
    seed.everything(args.seed, seed.INIT)
    model = resnet.make_resnet(args.model, train.channels, len(train.class_names), train.size)
    return model.to(memory_format=torch.channels_last)  # the layout that fast convolutions read


def make_optimizer(args: Args, model: nn.Module) -> Optimizer:
    """SGD with momentum; no weight decay on norms and biases (Jia et al. 2018, https://arxiv.org/abs/1807.11205)."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum, fused=True)


def forward(args: Args, model: nn.Module, batch: data.Batch) -> metrics.Sums:
    """Sums over one rank's batch, of which "loss" carries the gradient."""
    dtype = precision.pick(args.dtype, batch.inputs.device)
    wide = precision.storage(dtype)
    pixels = batch.inputs.to(wide, memory_format=torch.channels_last)  # (b, C, H, W), read and sent as bytes
    pixels = pixels.div_(127.5).sub_(1)
    with precision.autocast(pixels.device, dtype):
        logits = model(pixels).to(wide)  # (b, num_classes)
    return {
        "loss": F.cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=args.label_smoothing),
        "top1": (logits.argmax(1) == batch.targets).sum(),
        "count": torch.full((), len(logits), device=logits.device),
    }


# --- 3 Strategy -------------------------------------------------------------------------------------------


def make_mesh(args: Args, here: world.World) -> DeviceMesh:
    """The ranks and their axes."""
    return init_device_mesh(here.device.type, (here.size,), mesh_dim_names=("dp",))


def data_shard(mesh: DeviceMesh) -> tuple[int, int]:
    """Which part of each batch this rank reads, of how many."""
    return mesh.get_local_rank("dp"), mesh.size()


def parallelize(args: Args, model: nn.Module, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Put the plain model on its device and under the strategy."""
    model = initial.place(model, args.seed, device, precision.storage(dtype))
    if args.sync_bn:
        model = sync_batchnorm.convert(model, mesh.get_group("dp"))
    group = mesh.get_group("dp")
    # PowerSGD's second all-reduce starts where the first ends: of several buckets, in another order on each rank.
    bucket_mb = 10_000 if args.compress == "powersgd" else None
    model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if args.compress == "bf16":
        model.register_comm_hook(group, default_hooks.bf16_compress_hook)
    if args.compress == "powersgd":  # Vogels et al. 2019, https://arxiv.org/abs/1905.13727; not before warm-up is over
        power = powerSGD_hook.PowerSGDState(group, args.powersgd_rank, max(2, args.warmup_steps), random_seed=args.seed)
        model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
    return model


def gradient_sync(model: Any, last: bool) -> contextlib.AbstractContextManager:
    """Around one forward and backward pass: only the `last` one of a step sends gradients."""
    return contextlib.nullcontext() if last else model.no_sync()


def clip_gradients(args: Args, model: nn.Module) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; every rank holds all of the gradients."""
    return nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))


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
