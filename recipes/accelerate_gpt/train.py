"""Train a GPT through Hugging Face Accelerate: a config file chooses the strategy, and this code stays the same.

`Accelerator.prepare` puts the model under DistributedDataParallel or FSDP2, as the file says. The rest is ddp_gpt with
Accelerate's calls in the place of torch's. The run stops where Accelerate would train something else than its file and
the flags ask for.

    what                               cpu.yaml, ddp.yaml    fsdp2.yaml, of N ranks (hsdp.yaml: of those of a group)
    parameters, gradients, optimizer   all, a replica        1/N of each; before `prepare`, all parameters
    batch                              an equal part         an equal part

One step sends the same as in ddp_gpt or fsdp_gpt.

    accelerate launch --config_file recipes/accelerate_gpt/configs/cpu.yaml recipes/accelerate_gpt/train.py
    ACCELERATE_CONFIG=configs/ddp.yaml bash launch/torchrun.sh recipes/accelerate_gpt
    ACCELERATE_CONFIG=configs/hsdp.yaml bash launch/slurm.sh -N2 --gpus-per-node=4 recipes/accelerate_gpt

Measured beside ddp_gpt: docs/measured/accelerate.md. Several GPUs, NCCL, and so fsdp2.yaml and hsdp.yaml as they
are: not run.

Base: recipes/ddp_gpt. Open: 0 3
"""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.optim import Optimizer

from common import UserError, bounds, precision, ranks, session
from common.run import cli, exits
from common.run.process import Process, World
from common.state import start
from common.train import data, flops, guard, initial, metrics, sampler, schedule
from common.workloads import gpt, muon, rates, step_loss, text

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args(text.TextArgs, gpt.ShapeArgs, session.TrainArgs):
    """Train a small GPT on text."""

    # run
    out: str = f"runs/{Path(__file__).parent.name}"  # folder that holds the runs
    epochs: bounds.PositiveInt = 1  # length of the training in epochs, if max_steps is 0
    max_steps: bounds.NonNegativeInt = 200  # length of the training in optimizer steps; 0 for epochs
    eval_every: bounds.NonNegativeInt = 100  # steps between evaluations; 0 for once per epoch
    save_every: bounds.NonNegativeInt = 100  # steps between checkpoints; 0 for once per epoch
    # data
    data: str = "stdlib"  # "stdlib" (Python's own text), a folder, a set of the hub, or a mixture: "a=0.7,b=0.3"
    workers: bounds.NonNegativeInt = 0  # loader processes per rank; a data set in memory needs none
    seq_len: bounds.PositiveInt = 128  # tokens in a sequence
    # batch and rate
    global_batch_size: bounds.PositiveInt = 32  # sequences per optimizer step, over all ranks
    micro_batch_size: bounds.Smaller = 0  # most sequences of a rank's forward pass; 0 for one micro-batch per step
    lr: bounds.NonNegativeFloat = 2e-3  # peak learning rate at lr_reference_batch sequences per step, scaled linearly
    lr_reference_batch: bounds.PositiveInt = 32  # sequences per step that lr was chosen for
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon is for the blocks' matrices, with AdamW for the rest
    weight_decay: bounds.NonNegativeFloat = 0.1  # weight decay of matrices; none on norms
    rates: str = ""  # factors on the rate of parts, 0 to freeze them: "all=0,PART=1"; "" for 1 everywhere
    warmup_steps: bounds.NonNegativeInt = 20  # steps of linear warm-up
    max_grad_norm: bounds.NonNegativeFloat = 1.0  # clip the global gradient norm to this; 0 for never
    # model
    num_layers: bounds.PositiveInt = 4  # transformer blocks
    num_heads: bounds.PositiveInt = 4  # query heads
    width: bounds.PositiveInt = 192  # width of the residual stream
    recompute: Annotated[gpt.Recompute, bounds.Saves("memory", "full")] = "none"  # what backward passes compute again


# --- 2 Workload -------------------------------------------------------------------------------------------


def make_data(args: Args) -> tuple[text.Text, text.Text]:
    """The training and the validation split, the same on every rank."""
    return text.load(args.data, args.seq_len, args.tokenizer, args.text_columns, args.attend, args.loss_on)


def make_model(args: Args, train: text.Text) -> nn.Module:
    """The plain model on the meta device: names and shapes, no weights yet, whatever its size."""
    with torch.device("meta"):
        return rates.freeze(gpt.GPT(gpt.Shape.of(args, train.vocab_size)), args.rates)


def make_optimizer(args: Args, model: nn.Module) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), or Muon; no weight decay on norms."""
    lr = schedule.linear_scaling(args.lr, args.global_batch_size, args.lr_reference_batch)
    groups = rates.groups(model, args.rates, lr, args.weight_decay)
    adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    return muon.for_matrices(model, adamw, args.dtype) if args.optimizer == "muon" else adamw


def lr_factor(args: Args, step: int, max_steps: int) -> float:
    """Factor on the peak rates in a step: linear warm-up, then half a cosine."""
    return schedule.warmup_cosine(step - 1, args.warmup_steps, max_steps)


def forward(args: Args, model: Any, batch: data.Batch) -> metrics.Sums:
    """Sums over one rank's micro-batch; the backward pass starts from "loss"."""
    dtype = precision.compute_dtype(args.dtype, batch.inputs.device)
    with precision.autocast(batch.inputs.device, dtype):
        losses = model(batch.inputs, batch.targets)  # (b,), the mean over each sequence
    more = text.sums(batch, losses)  # the weight, if some tokens do not count; each source of a mixture
    return {"loss": losses.sum(), "count": torch.full((), len(losses), device=losses.device), **more}


# --- 3 Strategy -------------------------------------------------------------------------------------------


def make_mesh(args: Args, world: World) -> DeviceMesh:
    """The ranks and their axes."""
    check_accelerator(args, world)  # before the data is read
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of the part of each batch that this rank reads, and number of parts."""
    return mesh.get_local_rank("dp"), mesh.size()


def make_accelerator(device: torch.device) -> Any:
    """Accelerate, as its launcher's environment sets it up; all objects of a process share these settings."""
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    # Without `cpu`, ranks without a GPU would believe that they are alone.
    return Accelerator(cpu=device.type == "cpu", kwargs_handlers=[ddp])


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Put the plain model on its device and under the strategy, which Accelerate's file has chosen."""
    dtype = precision.compute_dtype(args.dtype, device)
    model = initial.materialize(model, args.seed, device, precision.param_dtype(dtype))
    gpt.recompute(model, args.recompute)
    accelerator = make_accelerator(device)
    if accelerator.is_fsdp2:
        plugin = accelerator.state.fsdp_plugin
        # Its own policy would add up gradients, and return losses, in bfloat16.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, precision.param_dtype(dtype))
    # FSDP2 needs an optimizer beside the model. Main makes its own later, of the parameters of the prepared model.
    model, _ = accelerator.prepare(model, make_optimizer(args, model))
    model.accelerator = accelerator
    return model


def forward_backward(args: Args, model: Any, batches: Iterator[data.Batch], scale: Any) -> metrics.Sums:
    """Forward and backward passes of a step's micro-batches; only the last backward pass sends gradients."""
    sums: metrics.Sums = {}
    for batch in batches:
        with contextlib.nullcontext() if batch.last else model.accelerator.no_sync(model):
            batch_sums = forward(args, model, batch)
            # The mean over the samples of the whole step; dp_size in `scale` cancels DDP's mean over the ranks.
            model.accelerator.backward(batch_sums["loss"] * (scale / batch.step_samples))
        sums = metrics.add(sums, batch_sums)
    return sums


def forward_only(args: Args, model: Any, batches: Iterator[data.Batch]) -> metrics.Sums:
    """Forward passes of an evaluation."""
    sums: metrics.Sums = {}
    for batch in batches:
        sums = metrics.add(sums, forward(args, model, batch))
    return sums


def clip_gradients(args: Args, model: Any) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; of parts, if the ranks hold parts."""
    norm: Any = model.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def check_accelerator(args: Args, world: World) -> None:
    """Stop where Accelerate would train something else than the flags and its own file ask for (all ranks).

    Raises:
        UserError: Accelerate refuses its file; or one of its settings differs, with both values and a remedy.
    """

    def require(setting: str, found: Any, wanted: Any, instead: str) -> None:
        if found != wanted:
            raise UserError(f"Accelerate's {setting} is {found}, not {wanted}: {instead}")

    env = {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))}
    ranks.check_same(accelerate=env)  # else one rank could build FSDP2, and another one DDP
    try:
        accelerator = make_accelerator(world.device)
        sizes = accelerator.parallelism_config or ParallelismConfig()  # Accelerate may ignore those of the environment
    except (ImportError, RuntimeError, ValueError) as error:
        raise UserError(
            f"Accelerate refuses its config file (configs/cpu.yaml trains without GPUs): {error}"
        ) from error
    processes = env.get("ACCELERATE_CONFIG_PROCESSES", str(world.size))
    if "ACCELERATE_MIXED_PRECISION" in env:  # of `accelerate launch`, which does not pass on its file's name
        os.environ.setdefault("LAUNCHED_AS", f"accelerate launch --config_file FILE {shlex.quote(__file__)}")
        if world.size == 1 and "MASTER_PORT" in os.environ and "RANK" not in os.environ:
            processes = "several"  # on a CPU it prepares the environment of several processes, and starts one
    kinds = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    sharded = any(env.get(f"ACCELERATE_USE_{kind}", "").lower() == "true" for kind in kinds)
    became = "FSDP2" if accelerator.is_fsdp2 else accelerator.distributed_type.value
    offload = accelerator.is_fsdp2 and isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    in_bfloat16 = precision.compute_dtype(args.dtype, world.device) == torch.bfloat16
    # Accelerate's autocast may compute in the flag's type. With "no", section 2's forward chooses it alone.
    computes = "bf16" if in_bfloat16 and accelerator.mixed_precision != "no" else "no"
    require("config file", env.get("ACCELERATE_CONFIG", "none"), "none", "only launch/torchrun.sh and slurm.sh read it")
    require("num_processes", str(accelerator.num_processes), processes, "use configs/cpu.yaml, or set NPROC_PER_NODE")
    require("device", accelerator.device.type, world.device.type, "to train on the CPU, set CUDA_VISIBLE_DEVICES=")
    require("strategy", became, "FSDP2" if sharded else became, "use configs/fsdp2.yaml on GPUs, or recipes/fsdp_gpt")
    require("tp x cp x sp size", sizes.non_data_parallel_size, 1, "use recipes/tensor_gpt, or a shorter --seq-len")
    require("dynamo_backend", accelerator.state.dynamo_plugin.backend.value, "NO", "use --compile")
    require("gradient_accumulation_steps", accelerator.gradient_accumulation_steps, 1, "use --micro-batch-size")
    require("mixed_precision", accelerator.mixed_precision, computes, f"--dtype {args.dtype} decides it")
    require("CPU offload", offload, False, "use more GPUs")
    if not accelerator.is_fsdp2:
        require("dp_shard_size", sizes.dp_shard_size, 1, "only distributed_type: FSDP shards")


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
