"""Train a ResNet with nn.DataParallel: one process, all GPUs of one machine. The baseline to beat.

One process holds the model on its first GPU. Each forward pass copies the model to the other GPUs, splits
the batch between them and gathers the outputs. Each backward pass adds up the copies' gradients on the first GPU.

    what               first GPU             other GPUs
    parameters         all                   a copy, new in each forward pass
    gradients          all, summed           of their part, sent to the first
    optimizer state    all                   none
    batch              an equal part         an equal part

One step sends, through one Python process: in a forward pass, parameters and inputs from the first GPU to the others,
and the outputs back; in a backward pass, the outputs' gradients to the others, and the parameters' gradients back.
None of it goes through a process group.

    python recipes/dp_resnet/train.py                            # one process, all GPUs, or the CPU
    CUDA_VISIBLE_DEVICES=0,1 python recipes/dp_resnet/train.py   # two GPUs
    bash launch/torchrun.sh recipes/dp_resnet                    # the same, through the launcher

Measured: val/top1 0.9808 after 224 steps and 13 s of training, unwrapped, by the first command on a CPU (AMD
EPYC, 2 cores, bfloat16, torch 2.15.0, 2026-11-27). Several GPUs: not run.

Base: none.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.optim import Optimizer

from common import UserError, bounds, precision, seed, session
from common.run import cli, exits
from common.run.process import Process, World
from common.state import start
from common.train import data, flops, guard, initial, metrics, sampler, schedule
from common.workloads import images, rates, resnet, step_loss

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args(session.TrainArgs):
    """Train a residual network on labelled images."""

    # run
    out: str = f"runs/{Path(__file__).parent.name}"  # folder that holds the runs
    epochs: bounds.PositiveInt = 20  # length of the training in epochs, if max_steps is 0
    max_steps: bounds.NonNegativeInt = 0  # length of the training in optimizer steps; 0 for epochs
    # data
    data: str = "digits"  # "digits" (built in), a folder, or a data set of the Hugging Face hub
    workers: bounds.NonNegativeInt = 0  # loader processes per rank; a data set in memory needs none
    flip: bool = False  # mirror half of the training images; for photographs, not for digits
    image_size: bounds.NonNegativeInt = (
        0  # side of the images in pixels; 0 for small ones as they are, others at most 224
    )
    skip_unreadable: bool = False  # let the next image take the place of one that cannot be decoded; up to 5 %
    # batch and rate
    global_batch_size: bounds.PositiveInt = 128  # samples per optimizer step, over all ranks
    micro_batch_size: bounds.Smaller = 0  # most samples of a rank's forward pass; 0 for one micro-batch per step
    lr: bounds.NonNegativeFloat = 0.4  # peak learning rate at lr_reference_batch samples per step, scaled linearly
    lr_reference_batch: bounds.PositiveInt = 256  # samples per step that lr was chosen for
    weight_decay: bounds.NonNegativeFloat = 5e-4  # weight decay of weights; none on norms and biases
    momentum: bounds.Fraction = 0.9  # momentum of SGD
    label_smoothing: bounds.Fraction = 0.1  # share of the target probability that is spread over all classes
    rates: str = ""  # factors on the rate of parts, 0 to freeze them: "all=0,PART=1"; "" for 1 everywhere
    warmup_steps: bounds.NonNegativeInt = 10  # steps of linear warm-up
    max_grad_norm: bounds.NonNegativeFloat = 0.0  # clip the global gradient norm to this; 0 for never
    # model
    model: str = "auto"  # a residual network such as resnet50; auto: resnet20 up to 16 pixels, else resnet18


# --- 2 Workload -------------------------------------------------------------------------------------------


def make_data(args: Args) -> tuple[images.Images, images.Images]:
    """The training and the validation split, the same on every rank."""
    return images.load(args.data, args.seed, args.flip, args.image_size, args.skip_unreadable)


def make_model(args: Args, train: images.Images) -> nn.Module:
    """The plain model, with the same initial weights on every rank."""
    seed.everything(args.seed, seed.INIT)
    model = resnet.make_resnet(args.model, train.channels, len(train.class_names), train.size)
    # The order in memory that the convolutions read fastest; they bring the pixels into it.
    return rates.freeze(model.to(memory_format=resnet.memory_format(args.dtype)), args.rates)


def make_optimizer(args: Args, model: nn.Module) -> Optimizer:
    """SGD with momentum; no weight decay on norms and biases (Jia et al. 2018, https://arxiv.org/abs/1807.11205)."""
    lr = schedule.linear_scaling(args.lr, args.global_batch_size, args.lr_reference_batch)
    groups = rates.groups(model, args.rates, lr, args.weight_decay)
    return torch.optim.SGD(groups, lr=lr, momentum=args.momentum, fused=True)


def lr_factor(args: Args, step: int, max_steps: int) -> float:
    """Factor on the peak rates in a step: linear warm-up, then half a cosine."""
    return schedule.warmup_cosine(step - 1, args.warmup_steps, max_steps)


def forward(args: Args, model: Any, batch: data.Batch) -> metrics.Sums:
    """Sums over one rank's micro-batch; the backward pass starts from "loss"."""
    dtype = precision.compute_dtype(args.dtype, batch.inputs.device)
    param_dtype = precision.param_dtype(dtype)
    pixels = batch.inputs.to(param_dtype).div_(127.5).sub_(1)  # (b, C, H, W), read and sent as bytes
    with precision.autocast(pixels.device, dtype):
        logits = model(pixels).to(param_dtype)  # (b, num_classes)
    return {
        "loss": F.cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=args.label_smoothing),
        "top1": (logits.argmax(1) == batch.targets).sum(),
        "count": torch.full((), len(logits), device=logits.device),
    }


# --- 3 Strategy -------------------------------------------------------------------------------------------


def make_mesh(args: Args, world: World) -> DeviceMesh:
    """The ranks and their axes."""
    if world.size > 1:
        raise UserError(f"nn.DataParallel needs 1 process, not {world.size}: NPROC_PER_NODE=1, or recipes/ddp_resnet")
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of the part of each batch that this rank reads, and number of parts."""
    return mesh.get_local_rank("dp"), mesh.size()


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Put the plain model on its device and under the strategy."""
    dtype = precision.compute_dtype(args.dtype, device)
    model = initial.materialize(model, args.seed, device, precision.param_dtype(dtype))
    wrapped: Any = nn.DataParallel(model)
    wrapped.parallel_apply = in_dtype(wrapped.parallel_apply, device, dtype)
    return wrapped


def in_dtype(parallel_apply: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Let each GPU's thread compute in `dtype`: nn.DataParallel gives autocast to it without its type, so float16."""

    def apply(replicas: Any, inputs: Any, kwargs: Any) -> Any:
        for replica in replicas:
            replica.forward = precision.autocast(device, dtype)(replica.forward)
        return parallel_apply(replicas, inputs, kwargs)

    return apply


def forward_backward(args: Args, model: Any, batches: Iterator[data.Batch], scale: Any) -> metrics.Sums:
    """Forward and backward passes of a step's micro-batches."""
    sums: metrics.Sums = {}
    for batch in batches:
        with contextlib.nullcontext():  # one process sends no gradients
            batch_sums = forward(args, model, batch)
            # The mean over the samples of the whole step, on this process alone.
            (batch_sums["loss"] * (scale / batch.step_samples)).backward()
        sums = metrics.add(sums, batch_sums)
    return sums


def forward_only(args: Args, model: Any, batches: Iterator[data.Batch]) -> metrics.Sums:
    """Forward passes of an evaluation."""
    sums: metrics.Sums = {}
    for batch in batches:
        sums = metrics.add(sums, forward(args, model, batch))
    return sums


def clip_gradients(args: Args, model: Any) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; every rank holds all of the gradients."""
    if args.max_grad_norm:
        return nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


# --- 4 Step -----------------------------------------------------------------------------------------------


def train_step(
    args: Args, model: Any, optimizer: Optimizer, finite: guard.FiniteGuard, batches: data.Loader, dp_size: int
) -> tuple[metrics.Sums, torch.Tensor]:
    """One optimizer step; returns this rank's sums and the global gradient norm, ()."""
    # The loss scale is 1 except for float16.
    sums = forward_backward(args, model, batches.step(), dp_size * finite.loss_scale)
    finite.unscale_gradients(sums)
    grad_norm = clip_gradients(args, model)
    finite.skip_if_not_finite(grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sums, grad_norm


@torch.no_grad()
def evaluate(args: Args, model: Any, batches: data.Loader) -> metrics.Sums:
    """This rank's sums over its part of the validation split."""
    resting = [module for module in model.modules() if not module.training]
    model.eval()
    sums = forward_only(args, model, batches)
    model.train()
    for module in resting:  # make_model has put them into eval mode, such as a frozen teacher
        module.training = False
    return sums


# --- 5 Main -----------------------------------------------------------------------------------------------


@exits.entry
def main(process: Process) -> None:
    """Train to the end, from the newest checkpoint or from the start."""
    args = cli.parse(Args)
    # Stops if the ranks run with different flags or code.
    world = session.join(args, __file__, process)
    mesh = make_mesh(args, world)
    dp_rank, dp_size = dp_coordinates(mesh)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
    train, validation = make_data(args)
    model = make_model(args, train)
    # Refuses a checkpoint of another model before this one takes memory. Optional: seed and data, which are compared.
    found = start.find(args.out, process.name, args.resume, model, seed=args.seed, data=train.digest())
    plan = sampler.make_plan(
        division, train, run_seed=args.seed, epochs=args.epochs, max_steps=args.max_steps, progress=found.progress
    )
    # Optional: without it, the log shows neither MFU nor tokens per second.
    counted = flops.count_sample(lambda plain, batch: forward(args, plain, batch)["loss"], model, train)
    model = parallelize(args, model, mesh, world.device)
    # After parallelize, which may replace the parameters.
    optimizer = make_optimizer(args, model)
    start.restore(found.path, args.init, model, optimizer)
    # Optional: stops if forward returns a mean. It runs before compile, which it would disturb.
    step_loss.check(args, model, evaluate, train, validation, plan, dp_rank, world.device)
    if args.compile:
        model.compile()
    batches = data.training(train, plan, dp_rank, args.workers, world.device)
    # Claims the run's folder, and takes over signals before the first loader worker is forked.
    run = session.Session(args, world, mesh, found, plan, model, optimizer, counted)
    for step in run.steps(dp_rank):
        lr = schedule.scale_rates(optimizer, lr_factor(args, step, plan.max_steps))
        sums, grad_norm = train_step(args, model, optimizer, run.finite, batches, dp_size)
        run.log_train(step, sums, grad_norm=grad_norm, data_wait_s=batches.wait_s, lr=lr)
        if run.evaluates(step):
            sums = evaluate(args, model, data.evaluation(validation, plan, dp_rank, args.workers, world.device))
            run.log_validation(step, sums, validation.metrics)
        run.save(step)
    run.finish()


if __name__ == "__main__":
    main()
