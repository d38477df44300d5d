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

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from common import UserError
from common import checkpoint, cli, data, exits, flops, guard, initial, keymap, metrics, precision, process_group
from common import run_dir, sampler, schedule, session
from common.process_group import World
from common.workloads import gpt, text

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args:
    """Train a small GPT on text."""

    out: str = f"runs/{Path(__file__).parent.name}"  # folder for runs
    name: str = ""  # name of this run, by default date and time; the same name again continues the run
    resume: str = ""  # continue from this run or checkpoint, of any recipe with the same model
    data: str = "stdlib"  # "stdlib" (built in: Python's own text), a folder, or a data set of the Hugging Face hub
    seed: cli.Seed = 0  # decides initial weights and order of samples
    workers: cli.NonNegativeInt = 0  # loader processes per rank; a set that fits in memory needs none
    backend: str = "auto"  # auto (NCCL on GPUs, else gloo), gloo, nccl or mpi
    epochs: cli.PositiveInt = 1  # length of the training, if max_steps is 0
    max_steps: cli.NonNegativeInt = 200  # length of the training in optimizer steps
    stop_after: cli.NonNegativeInt = 0  # stop, saved, once this step is done; 0 for never
    deadline: cli.NonNegativeFloat = 0.0  # stop, saved, after this many minutes; 0 for never
    log_every: cli.PositiveInt = 10  # steps between lines of the log
    eval_every: cli.NonNegativeInt = 100  # steps between evaluations; 0 for once an epoch
    save_every: cli.NonNegativeInt = 100  # steps between checkpoints; 0 for once an epoch
    keep: cli.PositiveInt = 2  # number of newest checkpoints to keep
    async_save: bool = False  # write checkpoints while the training continues
    check_every: cli.NonNegativeInt = 100  # steps between comparisons of the replicas; 0 for never
    max_skips: cli.NonNegativeInt = 3  # updates in a row that may be skipped because their gradient is not finite
    hang_timeout: cli.Timeout = (
        300.0  # seconds without progress after which the hanging rank is named and the run stops
    )
    global_batch_size: cli.PositiveInt = 32  # sequences per optimizer step, over all ranks
    micro_batch_size: cli.NonNegativeInt = 0  # most sequences of a forward pass on a rank; 0 for one micro-batch a step
    lr: cli.NonNegativeFloat = 2e-3  # peak learning rate at lr_reference_batch sequences per step, scaled linearly
    lr_reference_batch: cli.PositiveInt = 32  # sequences per step that lr is meant for
    weight_decay: cli.NonNegativeFloat = 0.1  # on matrices, not on norms
    warmup_steps: cli.NonNegativeInt = 20  # steps of linear warm-up
    max_grad_norm: cli.NonNegativeFloat = 1.0  # clip the global gradient norm to this; 0 for never
    dtype: str = "auto"  # auto (bfloat16 where the hardware has it), float32, bfloat16 or float64
    compile: bool = False  # torch.compile the model
    seq_len: cli.PositiveInt = 128  # tokens of a sequence
    tokenizer: str = ""  # a Hugging Face tokenizer.json; "" for bytes
    num_layers: cli.PositiveInt = 4  # transformer blocks
    num_heads: cli.PositiveInt = 4  # heads of the queries
    num_kv_heads: cli.NonNegativeInt = 0  # heads of keys and values; 0 for as many
    width: cli.PositiveInt = 192  # of the residual stream
    mlp_width: cli.NonNegativeInt = 0  # of the hidden layer in each MLP; 0 for 8/3 of the width, rounded up to 64
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
    lr = schedule.linear_scaling(args.lr, args.global_batch_size, args.lr_reference_batch)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def forward(args: Args, model: Any, batch: data.Batch) -> metrics.Sums:
    """Sums over one rank's micro-batch, of which "loss" carries the gradient."""
    dtype = precision.compute_dtype(args.dtype, batch.inputs.device)
    with precision.autocast(batch.inputs.device, dtype):
        losses = model(batch.inputs, batch.targets)  # (b,), the mean over each sequence
    return {"loss": losses.sum(), "count": torch.full((), len(losses), device=losses.device)}


# --- 3 Strategy -------------------------------------------------------------------------------------------


def make_mesh(args: Args, world: World) -> DeviceMesh:
    """The ranks and their axes."""
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))


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


def make_accelerator(args: Args, world: World, path: Path, dtype: torch.dtype) -> Accelerator:
    """Accelerate as its launcher's environment wants it, or a refusal where something else would come of it."""
    mixed, on_cpu = "bf16" if dtype == torch.bfloat16 else "no", world.device.type == "cpu"
    sharded = ENV.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    decided = DECIDED | {"ACCELERATE_MIXED_PRECISION": (mixed, "--dtype")}
    decided |= {} if sharded else {"PARALLELISM_CONFIG_DP_SHARD_SIZE": ("1", "distributed_type: FSDP")}
    decided |= {} if on_cpu else {"ACCELERATE_USE_CPU": ("false", "CUDA_VISIBLE_DEVICES= in front of the command")}
    for name, (fine, instead) in decided.items():
        if ENV.get(name, "no").lower() not in ("no", fine):
            raise UserError(f"{name}={ENV[name]}, of Accelerate's file, is not what is done here: use {instead}")
    state = PartialState(cpu=on_cpu)  # else ranks that torchrun starts without a GPU believe that they are alone
    left_alone = world.size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ and "ACCELERATE_MIXED_PRECISION" in ENV
    several = "several, as MASTER_PORT says" if left_alone and "MASTER_PORT" in os.environ else str(world.size)
    if (asked := ENV.get("ACCELERATE_CONFIG_PROCESSES", several)) != str(state.num_processes):
        there = f"Accelerate has {state.num_processes} of the processes, asked for were {asked}"
        raise UserError(f"{there}: configs/cpu.yaml starts two on a CPU; for launch/torchrun.sh set NPROC_PER_NODE")
    if sharded and state.distributed_type in ("NO", "MULTI_CPU"):
        raise UserError("Accelerate's file asks for FSDP: on a CPU plain DDP would come of it; recipes/fsdp_gpt shards")
    # Its own policy would add up gradients, and return losses, in bfloat16.
    policy = MixedPrecisionPolicy(torch.bfloat16 if mixed == "bf16" else None, precision.param_dtype(dtype))
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
    model = initial.materialize(model, args.seed, accelerator.device, precision.param_dtype(dtype))
    return accelerator.prepare(model, make_optimizer(args, model))


def clip_gradients(args: Args, accelerator: Accelerator, model: nn.Module) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; of parts, if the ranks hold parts."""
    norm: Any = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
    return norm.full_tensor() if accelerator.is_fsdp2 else norm


# --- 4 Step -----------------------------------------------------------------------------------------------


def train_step(
    args: Args, model: Any, optimizer: Optimizer, finite: guard.FiniteGuard, batches: data.Loader, dp_size: int
) -> tuple[metrics.Sums, torch.Tensor]:
    """One optimizer step; returns this rank's sums and the global gradient norm, ()."""
    sums = forward_backward(args, model, batches.step(), dp_size)
    grad_norm = clip_gradients(args, model)
    finite.skip_if_not_finite(grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sums, grad_norm


@torch.no_grad()
def evaluate(args: Args, model: Any, batches: data.Loader) -> metrics.Sums:
    """This rank's sums over its part of the validation split."""
    model.eval()
    sums = forward_only(args, model, batches)
    model.train()
    return sums


# --- 5 Main -----------------------------------------------------------------------------------------------


@exits.entry
def main() -> None:
    """Train from the newest checkpoint, or from the start, to the end."""
    args = cli.parse(Args)
    # Compares flags and code over the ranks: those that differ would train together unnoticed.
    world = process_group.start(args.backend, flag=dataclasses.asdict(args), code=run_dir.code_digests(__file__))
    mesh = make_mesh(args, world)
    dp_rank, dp_size = dp_coordinates(mesh)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
    train, validation = make_data(args)
    model = make_model(args, train)
    # Refuses a checkpoint of another model before this one takes memory. Optional: seed and data, which it compares.
    found = checkpoint.find(
        run_dir.choose(args.out, args.name), args.resume, model, seed=args.seed, data=train.digest()
    )
    plan = sampler.make_plan(
        division, len(train), run_seed=args.seed, epochs=args.epochs, max_steps=args.max_steps, progress=found.progress
    )
    # Optional: without it, neither MFU nor tokens per second are shown.
    sample = flops.count_sample(lambda plain, batch: forward(args, plain, batch)["loss"], model, train)
    model = parallelize(args, model, mesh, world.device)
    if args.compile:
        model.compile()
    optimizer = make_optimizer(args, model)  # now: the strategy may have replaced the parameters
    checkpoint.load(found.path, keymap.tensors(model, optimizer))
    batches = data.Loader(train, sampler.training_requests(plan, dp_rank), args.workers, world.device)
    # Claims the run's folder, and takes over signals before the first loader worker is forked.
    run = session.Session(
        args, __file__, world, mesh, found=found, plan=plan, model=model, optimizer=optimizer, sample=sample
    )
    for step in run.steps(dp_rank):
        lr = schedule.scale_rates(optimizer, schedule.warmup_cosine(step - 1, args.warmup_steps, plan.max_steps))
        sums, grad_norm = train_step(args, model, optimizer, run.finite, batches, dp_size)
        run.log_train(step, sums, grad_norm=grad_norm, data_wait_s=batches.wait_s, lr=lr)
        run.check_replicas(step)  # optional: finds replicas that have drifted apart
        if run.evaluates(step):
            requests = sampler.evaluation_requests(plan, len(validation), dp_rank)
            sums = evaluate(args, model, data.Loader(validation, requests, args.workers, world.device))
            run.log_validation(step, validation.metrics(metrics.means(sums)))
        run.save(step)
    run.finish()


if __name__ == "__main__":
    main()
