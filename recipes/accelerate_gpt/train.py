"""Train a GPT through Hugging Face Accelerate: how it is dealt out is a matter of a file, not of this code.

`Accelerator.prepare` puts the model under DistributedDataParallel or FSDP2, as the file says. The rest is ddp_gpt with
Accelerate's calls in the place of torch's, and with checks: Accelerate rather trains something else than refuse.

    what                               cpu.yaml, ddp.yaml    fsdp2.yaml, of N ranks (hsdp.yaml: of those of a group)
    parameters, gradients, optimizer   all, a replica        1/N of each; before `prepare`, all parameters
    batch                              an equal part         an equal part

One step sends what it does in ddp_gpt or fsdp_gpt. An evaluation gathers the losses of all sequences on all ranks.

    accelerate launch --config_file recipes/accelerate_gpt/configs/cpu.yaml recipes/accelerate_gpt/train.py
    ACCELERATE_CONFIG=configs/ddp.yaml bash launch/torchrun.sh recipes/accelerate_gpt
    ACCELERATE_CONFIG=configs/hsdp.yaml bash launch/slurm.sh -N2 --gpus-per-node=4 recipes/accelerate_gpt

Measured beside ddp_gpt: docs/accelerate.md. Several GPUs, NCCL, and so fsdp2.yaml and hsdp.yaml as they are: not run.

Base: recipes/ddp_gpt. Open: 0 1 3 4 5 (1 because of --tracker)
"""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

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
    tracker: str = "tensorboard"  # where figures go: trackers of Accelerate by name, with commas between them


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
    """The ranks and their axes."""
    return init_device_mesh(here.device.type, (here.size,), mesh_dim_names=("dp",))


# What Accelerate's environment may hold beside the strategy: the value that is fine, and what decides it here.
DECIDED = {
    "ACCELERATE_CONFIG": ("", "launch/torchrun.sh, which reads that file"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "--compile"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "--micro-batch-size"),
    **dict.fromkeys(("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"), ("false", "configs/fsdp2.yaml")),
    "FSDP_OFFLOAD_PARAMS": ("false", "more GPUs"),
    "FSDP_VERSION": ("2", "fsdp_version: 2"),
    "PARALLELISM_CONFIG_TP_SIZE": ("1", "recipes/tensor_gpt"),
    **dict.fromkeys(("PARALLELISM_CONFIG_CP_SIZE", "PARALLELISM_CONFIG_SP_SIZE"), ("1", "a shorter --seq-len")),
}
# What Accelerate's launcher, or launch/strategy.py, has made of the file.
ENV = {
    key: value for key, value in os.environ.items() if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
}


def make_accelerator(args: Args, here: world.World, path: Path, dtype: torch.dtype) -> Accelerator:
    """Accelerate as its launcher's environment wants it, or a refusal where something else would come of it."""
    mixed, on_cpu = "bf16" if dtype == torch.bfloat16 else "no", here.device.type == "cpu"
    sharded = ENV.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    decided = DECIDED | {"ACCELERATE_MIXED_PRECISION": (mixed, "--dtype")}
    decided |= {} if sharded else {"PARALLELISM_CONFIG_DP_SHARD_SIZE": ("1", "distributed_type: FSDP")}
    decided |= {} if on_cpu else {"ACCELERATE_USE_CPU": ("false", "CUDA_VISIBLE_DEVICES= in front of the command")}
    for name, (fine, instead) in decided.items():
        if ENV.get(name, "no").lower() not in ("no", fine):
            raise UserError(f"{name}={ENV[name]}, of Accelerate's file, is not what is done here: use {instead}")
    state = PartialState(cpu=on_cpu)  # else ranks that torchrun starts without a GPU believe that they are alone
    left_alone = here.size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ and "ACCELERATE_MIXED_PRECISION" in ENV
    several = "several, as MASTER_PORT says" if left_alone and "MASTER_PORT" in os.environ else str(here.size)
    if (asked := ENV.get("ACCELERATE_CONFIG_PROCESSES", several)) != str(state.num_processes):
        there = f"Accelerate has {state.num_processes} of the processes, asked for were {asked}"
        raise UserError(f"{there}: configs/cpu.yaml starts two on a CPU; for launch/torchrun.sh set NPROC_PER_NODE")
    if sharded and state.distributed_type in ("NO", "MULTI_CPU"):
        raise UserError("Accelerate's file asks for FSDP: on a CPU plain DDP would come of it; recipes/fsdp_gpt shards")
    # Its own policy would add up gradients, and return losses, in bfloat16.
    policy = MixedPrecisionPolicy(torch.bfloat16 if mixed == "bf16" else None, precision.storage(dtype))
    trackers = set(args.tracker.split(",")) - {"", "tensorboard"}  # `log.Run` writes TensorBoard's events
    try:
        accelerator = Accelerator(
            mixed_precision=mixed,
            fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy=policy) if sharded else None,
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
            log_with=sorted(trackers) or None,
            project_dir=path,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"Accelerate refuses its file, or --tracker {args.tracker}: {error}") from error
    if missing := trackers - set(map(str, accelerator.log_with)):
        raise UserError(f"--tracker {', '.join(missing)} is not installed, and Accelerate would leave it out")
    assert accelerator.is_fsdp2 == (accelerator.distributed_type == "FSDP") == sharded, accelerator.distributed_type
    return accelerator


def parallelize(args: Args, accelerator: Accelerator, model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """Put the plain model on its device and, with its optimizer, under the strategy."""
    model = initial.place(model, args.seed, accelerator.device, precision.storage(dtype))
    return accelerator.prepare(model, make_optimizer(args, model))


def clip_gradients(args: Args, accelerator: Accelerator, model: nn.Module) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; of parts, if the ranks hold parts."""
    norm: Any = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
    return norm.full_tensor() if accelerator.is_fsdp2 else norm


# --- 4 Step -----------------------------------------------------------------------------------------------


def train_step(
    args: Args, accelerator: Accelerator, model: Any, optimizer: Any, finite: guard.FiniteGuard, batches: data.Loader
) -> tuple[metrics.Sums, torch.Tensor]:
    """One optimizer step; returns this rank's sums and the global gradient norm, ()."""
    sums: metrics.Sums = {}
    for batch in batches.step():
        with contextlib.nullcontext() if batch.last else accelerator.no_sync(model):  # only the last pass sends
            batch_sums = forward(args, model, batch)
            # The mean over the samples of the whole step. Gradients are averaged over the processes where they
            # are synchronised, so each one's part counts num_processes times.
            accelerator.backward(batch_sums["loss"] * (accelerator.num_processes / batch.step_samples))
        sums = metrics.add(sums, batch_sums)
    grad_norm = clip_gradients(args, accelerator, model)
    finite.judge(grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sums, grad_norm


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, batches: DataLoader) -> metrics.Sums:
    """Sums over the validation split, the same on every rank (all ranks)."""
    model.eval()
    sums: metrics.Sums = {}
    for inputs, targets in batches:
        with accelerator.autocast():
            losses = accelerator.gather_for_metrics(model(inputs, targets))  # (b,) of all ranks, none of them twice
        sums = metrics.add(sums, {"loss": losses.sum(), "count": torch.full((), len(losses), device=losses.device)})
    model.train()
    return sums


# --- 5 Main -----------------------------------------------------------------------------------------------


@cli.entry
def main() -> None:
    """Train from the newest checkpoint, or from the start, to the end."""
    args = cli.parse(Args)
    here = world.start(args.backend, flag=dataclasses.asdict(args), code=world.code_digests(__file__), accelerate=ENV)
    path = run_dir.choose(args.out, args.name)
    dtype = precision.pick(args.dtype, here.device)
    accelerator = make_accelerator(args, here, path, dtype)
    mesh = make_mesh(args, here)
    shard, num_shards = accelerator.process_index, accelerator.num_processes
    pass_size = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, num_shards)
    train, validation = make_data(args)
    terms = {"seed": args.seed, "data": train.digest()}  # a position in the data is valid for these alone

    model = make_model(args, train)
    source, done = checkpoint.find(path, args.resume, terms, model)
    flops = metrics.count_flops(lambda m, sample: forward(args, m, sample)["loss"], model, train)
    model, optimizer = parallelize(args, accelerator, model, dtype)
    if args.compile:
        model.compile()
    inner = optimizer.optimizer  # what is set on Accelerate's, such as found_inf, does not reach it
    checkpoint.load(source, keymap.tensors(model, inner))

    length = (args.epochs, args.max_steps, args.global_batch_size)
    plan = sampler.make_plan(len(train), args.seed, *length, pass_size, num_shards, done, guard.least_samples(model))
    batches = data.Loader(train, sampler.training_requests(plan, shard), args.workers, here.device)
    every: Any = range(len(validation))
    rows = DataLoader(
        every, pass_size // num_shards, collate_fn=lambda i: validation.read(np.zeros_like(i), np.array(i))
    )
    held_out = accelerator.prepare(rows)

    run_dir.claim(path)
    stopping = stop.Stop(args.deadline, plan.first_step)
    watching = watch.Watch(here, path, plan.first_step, args.hang_timeout)
    finite = guard.FiniteGuard(model, inner, plan, args.max_skips)
    saving = saver.Saver(path, __file__, mesh, terms, args.keep, args.async_save)
    run = log.Run(path, __file__, args, here, plan, flops, dtype)
    accelerator.init_trackers(path.name, dataclasses.asdict(args))

    last_step = min(plan.max_steps, args.stop_after or plan.max_steps)
    peak_lr = schedule.linear_scaling(args.lr, args.global_batch_size, args.lr_reference_batch)
    for step in range(plan.first_step + 1, last_step + 1):
        watching.step(step)
        seed.everything(args.seed, seed.STEP, step, shard)
        lr = schedule.set_rate(optimizer, peak_lr * schedule.warmup_cosine(step - 1, args.warmup_steps, plan.max_steps))
        sums, grad_norm = train_step(args, accelerator, model, optimizer, finite, batches)
        run.add(sums)
        finite.after(step)
        last = stopping.after(step) or step == last_step
        if step % args.log_every == 0 or last:
            accelerator.log(run.train(step, lr=lr, grad_norm=grad_norm.item(), data_wait_s=batches.wait_s), step)
            finite.check()
        with run.paused():
            if args.check_every and (step % args.check_every == 0 or last):
                guard.check_replicas(model, step)
            if step % (args.eval_every or plan.epoch_steps) == 0 or step == last_step:
                means = metrics.means(evaluate(accelerator, model, held_out))
                accelerator.log(run.validation(step, validation.figures(means)), step)
            if step % (args.save_every or plan.epoch_steps) == 0 or last:
                saving.save(step, keymap.tensors(model, inner), plan.position(step), last)
        if last:
            break
    run.finish(stopping.reason)
    for tracker in accelerator.trackers:  # end_training would take the process group down as well
        tracker.finish()
    world.finish()


if __name__ == "__main__":
    main()
