"""Train a GPT through Hugging Face Accelerate: a config file chooses the strategy, and this code stays the same.

`Accelerator.prepare` puts the model under DistributedDataParallel or FSDP2, as the file says. The rest is ddp_gpt with
Accelerate's calls in the place of torch's. Where Accelerate became something else than was asked for, the run stops.

    what                               cpu.yaml, ddp.yaml    fsdp2.yaml, of N ranks (hsdp.yaml: of those of a group)
    parameters, gradients, optimizer   all, a replica        1/N of each; before `prepare`, all parameters
    batch                              an equal part         an equal part

One step sends what it does in ddp_gpt or fsdp_gpt.

    accelerate launch --config_file recipes/accelerate_gpt/configs/cpu.yaml recipes/accelerate_gpt/train.py
    ACCELERATE_CONFIG=configs/ddp.yaml bash launch/torchrun.sh recipes/accelerate_gpt
    ACCELERATE_CONFIG=configs/hsdp.yaml bash launch/slurm.sh -N2 --gpus-per-node=4 recipes/accelerate_gpt

Measured beside ddp_gpt: docs/accelerate.md. Several GPUs, NCCL, and so fsdp2.yaml and hsdp.yaml as they are: not run.

Base: recipes/ddp_gpt. Open: 0 3
"""

import contextlib
import dataclasses
import functools
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

from common import UserError, ranks
from common import devices, precision
from common.run import cli, exits
from common.state import checkpoint
from common.train import data, flops, guard, initial, metrics
from common import session
from common.run import process_group, run_dir
from common.state import start
from common.train import rates, sampler, schedule
from common.run.process_group import World
from common.workloads import gpt, text

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args:
    """Train a small GPT on text."""

    out: str = f"runs/{Path(__file__).parent.name}"  # folder that holds the runs
    name: str = ""  # name of the run, "" for date and time; the same name again resumes that run
    resume: str = ""  # start from this run or checkpoint, of any recipe with the same model
    init: str = ""  # begin with the weights that fit: a checkpoint, folder, .safetensors, .pth, torchvision:NAME
    data: str = "stdlib"  # "stdlib" (built in: Python's own text), a folder, or a data set of the Hugging Face hub
    seed: cli.Seed = 0  # seed of initial weights and order of samples
    workers: cli.NonNegativeInt = 0  # loader processes per rank; a data set in memory needs none
    backend: str = "auto"  # auto (NCCL on GPUs, else gloo), gloo or nccl
    epochs: cli.PositiveInt = 1  # length of the training in epochs, if max_steps is 0
    max_steps: cli.NonNegativeInt = 200  # length of the training in optimizer steps; 0 for epochs
    stop_after: cli.NonNegativeInt = 0  # save and stop after this step; 0 for never
    deadline: cli.NonNegativeFloat = 0.0  # save and stop after this many minutes; 0 for never
    log_every: cli.PositiveInt = 10  # steps between log lines
    eval_every: cli.NonNegativeInt = 100  # steps between evaluations; 0 for once per epoch
    save_every: cli.NonNegativeInt = 100  # steps between checkpoints; 0 for once per epoch
    keep: cli.PositiveInt = 2  # number of newest checkpoints to keep
    keep_best: str = ""  # also keep the checkpoint that is best in this metric, such as loss; "" for none
    patience: cli.NonNegativeInt = 0  # stop after this many evaluations without a better keep_best, or loss; 0: never
    async_save: bool = False  # write checkpoints while the training continues
    check_every: cli.NonNegativeInt = 100  # steps between comparisons of the replicas; 0 for never
    max_skips: cli.NonNegativeInt = 3  # updates in a row that may be skipped because of a gradient that is not finite
    on_bad_state: Literal["stop", "rewind"] = "stop"  # a faulty state, never saved: stop, or compute it again
    hang_timeout: cli.Timeout = 300.0  # seconds without progress until the run names the hanging rank and exits
    profile: cli.NonNegativeInt = 0  # steps to profile, after the first 5: where their time goes; 0 for none
    global_batch_size: cli.PositiveInt = 32  # sequences per optimizer step, over all ranks
    micro_batch_size: cli.Smaller = 0  # most sequences of a rank's forward pass; 0 for one micro-batch per step
    lr: cli.NonNegativeFloat = 2e-3  # peak learning rate at lr_reference_batch sequences per step, scaled linearly
    lr_reference_batch: cli.PositiveInt = 32  # sequences per step that lr was chosen for
    weight_decay: cli.NonNegativeFloat = 0.1  # weight decay of matrices; none on norms
    rates: str = ""  # factors on the rate of parts, 0 to freeze them: "all=0,PART=1"; "" for 1 everywhere
    warmup_steps: cli.NonNegativeInt = 20  # steps of linear warm-up
    max_grad_norm: cli.NonNegativeFloat = 1.0  # clip the global gradient norm to this; 0 for never
    dtype: str = "auto"  # auto (bfloat16 if the hardware computes in it), float32, bfloat16, float16 or float64
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32; high is TF32 on GPUs
    deterministic: bool = False  # the same bits each time on GPUs too, if slower; a CPU gives them anyway
    compile: bool = False  # torch.compile the model
    recompute: Annotated[gpt.Recompute, cli.Frees("full")] = "none"  # what the backward pass computes again
    seq_len: cli.PositiveInt = 128  # tokens in a sequence
    tokenizer: str = ""  # path of a Hugging Face tokenizer.json; "" makes each byte a token
    text_columns: str = ""  # columns to read, such as "title,body"; "" for the one with the most text
    num_layers: cli.PositiveInt = 4  # transformer blocks
    num_heads: cli.PositiveInt = 4  # query heads
    num_kv_heads: cli.NonNegativeInt = 0  # key and value heads; 0 for num_heads
    width: cli.PositiveInt = 192  # width of the residual stream
    mlp_width: cli.NonNegativeInt = 0  # hidden units of each MLP; 0 for 8/3 of width, rounded up to a multiple of 64
    tied: bool = False  # share the embedding's weights with the output layer
    rope_base: cli.AtLeastOne = 10_000.0  # base of the rotary positions' wavelengths
    norm_eps: cli.NonNegativeFloat = 1e-5  # added to the variance in each norm
    vocab_size: cli.NonNegativeInt = 0  # rows of the embedding; 0 for as many as the tokenizer has tokens
    head_width: cli.NonNegativeInt = 0  # width of each head; 0 for width / num_heads
    qkv_bias: bool = False  # add a bias to queries, keys and values
    qk_norm: bool = False  # pass each head's query and key through a norm
    rope_scaling: str = ""  # stretched positions: "linear:FACTOR" or "llama3:FACTOR:LOW:HIGH:CONTEXT"; "" for none


# --- 2 Workload -------------------------------------------------------------------------------------------


def make_data(args: Args) -> tuple[text.Text, text.Text]:
    """The training and the validation split, the same on every rank."""
    return text.load(args.data, args.seq_len, args.tokenizer, args.text_columns)


def make_model(args: Args, train: text.Text) -> nn.Module:
    """The plain model on the meta device: names and shapes, no weights yet, whatever its size."""
    with torch.device("meta"):
        return rates.freeze(gpt.GPT(gpt.Shape.of(args, train.vocab_size)), args.rates)


def make_optimizer(args: Args, model: nn.Module) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101); no weight decay on norms."""
    lr = schedule.linear_scaling(args.lr, args.global_batch_size, args.lr_reference_batch)
    groups = rates.groups(model, args.rates, lr, args.weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def forward(args: Args, model: Any, batch: data.Batch) -> metrics.Sums:
    """Sums over one rank's micro-batch; the backward pass starts from "loss"."""
    dtype = precision.compute_dtype(args.dtype, batch.inputs.device)
    with precision.autocast(batch.inputs.device, dtype):
        losses = model(batch.inputs, batch.targets)  # (b,), the mean over each sequence
    return {"loss": losses.sum(), "count": torch.full((), len(losses), device=losses.device)}


# --- 3 Strategy -------------------------------------------------------------------------------------------


def make_mesh(args: Args, world: World) -> DeviceMesh:
    """The ranks and their axes."""
    make_accelerator(args)  # here, so that it refuses before the data is read
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of the part of each batch that this rank reads, and number of parts."""
    return mesh.get_local_rank("dp"), mesh.size()


def require(what: str, found: Any, wanted: Any, instead: str) -> None:
    """Stop where Accelerate has become something else than this run was asked for."""
    if found != wanted:
        raise UserError(f"Accelerate's {what} is {found}, not {wanted}: {instead}")


@functools.lru_cache(maxsize=1)
def make_accelerator(args: Args) -> Accelerator:
    """Accelerate as its launcher's environment sets it up, compared with what was asked for (all ranks).

    Raises:
        UserError: Accelerate refuses its config file, or has become something else; names both, and what to use.
    """
    env = {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))}
    ranks.check_same(accelerate=env)  # else one rank could build FSDP2, and another one DDP
    world: Any = process_group.joined
    dtype = precision.compute_dtype(args.dtype, world.device)
    processes = env.get("ACCELERATE_CONFIG_PROCESSES", str(world.size))
    if "ACCELERATE_MIXED_PRECISION" in env:  # of `accelerate launch`, which does not pass on its file's name
        os.environ.setdefault("LAUNCHED_AS", f"accelerate launch --config_file FILE {shlex.quote(__file__)}")
        if world.size == 1 and "MASTER_PORT" in os.environ and "RANK" not in os.environ:
            processes = "several"  # on a CPU it prepares the environment of several processes, and starts one
    kinds = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    sharded = any(env.get(f"ACCELERATE_USE_{kind}", "").lower() == "true" for kind in kinds)
    require("config file", env.get("ACCELERATE_CONFIG", "none"), "none", "only launch/torchrun.sh and slurm.sh read it")
    try:
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        # Without `cpu`, ranks without a GPU would believe that they are alone.
        accelerator: Any = Accelerator(cpu=world.device.type == "cpu", kwargs_handlers=[ddp])
        sizes = accelerator.parallelism_config or ParallelismConfig()  # or what the environment asks for in vain
    except (ImportError, RuntimeError, ValueError) as error:
        raise UserError(
            f"Accelerate refuses its config file (configs/cpu.yaml trains without GPUs): {error}"
        ) from error
    require("num_processes", str(accelerator.num_processes), processes, "use configs/cpu.yaml, or set NPROC_PER_NODE")
    require("device", accelerator.device.type, world.device.type, "to train on the CPU, set CUDA_VISIBLE_DEVICES=")
    became = "FSDP2" if accelerator.is_fsdp2 else accelerator.distributed_type.value
    require("strategy", became, "FSDP2" if sharded else became, "use configs/fsdp2.yaml on GPUs, or recipes/fsdp_gpt")
    require("tp x cp x sp size", sizes.non_data_parallel_size, 1, "use recipes/tensor_gpt, or a shorter --seq-len")
    require("dynamo_backend", accelerator.state.dynamo_plugin.backend.value, "NO", "use --compile")
    require("gradient_accumulation_steps", accelerator.gradient_accumulation_steps, 1, "use --micro-batch-size")
    if accelerator.mixed_precision != "no":  # with which `forward` decides alone
        computes = "bf16" if dtype == torch.bfloat16 else "no"
        require("mixed_precision", accelerator.mixed_precision, computes, f"--dtype {args.dtype} decides it")
    if accelerator.is_fsdp2:
        plugin = accelerator.state.fsdp_plugin
        require("CPU offload", isinstance(plugin.cpu_offload, CPUOffloadPolicy), False, "use more GPUs")
        # Its own policy would add up gradients, and return losses, in bfloat16.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, precision.param_dtype(dtype))
    else:
        require("dp_shard_size", sizes.dp_shard_size, 1, "only distributed_type: FSDP shards")
    return accelerator


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Put the plain model on its device and under the strategy, which Accelerate's file has chosen."""
    dtype = precision.compute_dtype(args.dtype, device)
    model = initial.materialize(model, args.seed, device, precision.param_dtype(dtype))
    gpt.recompute(model, args.recompute)
    # FSDP2 wants an optimizer beside the model. Main makes its own, of the parameters that come of this.
    make_accelerator(args).free_memory()  # of models before --on-bad-state rewind
    model, _ = make_accelerator(args).prepare(model, make_optimizer(args, model))
    return model


def forward_backward(args: Args, model: Any, batches: Iterator[data.Batch], scale: Any) -> metrics.Sums:
    """Forward and backward passes of a step's micro-batches; only the last backward pass sends gradients."""
    accelerator = make_accelerator(args)
    sums: metrics.Sums = {}
    for batch in batches:
        with contextlib.nullcontext() if batch.last else accelerator.no_sync(model):
            batch_sums = forward(args, model, batch)
            # The mean over the samples of the whole step; dp_size in `scale` cancels DDP's mean over the ranks.
            accelerator.backward(batch_sums["loss"] * (scale / batch.step_samples))
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
    norm: Any = make_accelerator(args).clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


# --- 4 Step -----------------------------------------------------------------------------------------------


def train_step(
    args: Args, model: Any, optimizer: Optimizer, finite: guard.FiniteGuard, batches: data.Loader, dp_size: int
) -> tuple[metrics.Sums, torch.Tensor]:
    """One optimizer step; returns this rank's sums and the global gradient norm, ()."""
    # Other types than float16 have a loss scale of 1.
    sums = forward_backward(args, model, batches.step(), dp_size * finite.loss_scale)
    finite.unscale_gradients()
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
    """Train to the end, from the newest checkpoint or from the start."""
    args = cli.parse(Args)
    devices.configure(args.matmul_precision, args.deterministic)
    # Compares flags and code over the ranks, because nothing else would notice a rank with others.
    world = process_group.start(args.backend, args.dtype, __file__, flag=dataclasses.asdict(args))
    mesh = make_mesh(args, world)
    dp_rank, dp_size = dp_coordinates(mesh)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
    train, validation = make_data(args)
    model = make_model(args, train)
    # Refuses a checkpoint of another model before this one takes memory. Optional: the comparison of seed and data.
    found = checkpoint.find(
        run_dir.choose(args.out, args.name), args.resume, model, seed=args.seed, data=train.digest()
    )
    plan = sampler.make_plan(
        division, len(train), run_seed=args.seed, epochs=args.epochs, max_steps=args.max_steps, progress=found.progress
    )
    # Optional: without it, the log shows neither MFU nor tokens per second.
    sample = flops.count_sample(lambda plain, batch: forward(args, plain, batch)["loss"], model, train)
    model = parallelize(args, model, mesh, world.device)
    optimizer = make_optimizer(args, model)  # now: the strategy may have replaced the parameters
    # Optional: refuses a forward that returns a mean. Before restore, because forward may change buffers, and before
    # compile, which would remember these small batches.
    metrics.check_sums(*(evaluate(args, model, batches) for batches in data.twins(train, plan, world.device)))
    start.restore(found.path, args.init, model, optimizer)
    if args.compile:
        model.compile()
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
