"""Train a GPT with DistributedDataParallel: one process per GPU of one machine, or per share of a CPU.

Every rank holds the whole model and reads its own part of each batch of sequences. While the backward pass still
runs, DDP averages the gradients over the ranks, bucket by bucket, so every rank then takes the same step.

    what               each rank
    parameters         all, a replica
    gradients          all, the mean over the ranks
    optimizer state    all, a replica
    batch              an equal part of its sequences

One step sends: one all-reduce of the gradients, in buckets of up to 25 MB, in the last backward pass (earlier ones
of an accumulated step send nothing).

    python recipes/ddp_gpt/train.py                                                      # one process
    bash launch/torchrun.sh recipes/ddp_gpt                                              # one per GPU, else 2
    bash launch/slurm.sh -N2 --gpus-per-node=8 recipes/ddp_gpt --data roneneldan/TinyStories --max-steps 5000

Measured: val/loss 1.760 nats a byte after 200 steps and 50 s of training, 2 processes, Intel Xeon, 2 cores, bfloat16,
gloo, torch 2.15.0, 2026-11-23 (docs/language.md; a bigram model has 2.403). Several GPUs and NCCL: not run.

Base: recipes/ddp_resnet. Open: 0 1 2 3 (3 because there is no BatchNorm to convert)
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

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
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of the part of each batch that this rank reads, and number of parts."""
    return mesh.get_local_rank("dp"), mesh.size()


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Put the plain model on its device and under the strategy."""
    dtype = precision.compute_dtype(args.dtype, device)
    model = initial.materialize(model, args.seed, device, precision.param_dtype(dtype))
    gpt.recompute(model, args.recompute)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)


def forward_backward(args: Args, model: Any, batches: Iterator[data.Batch], scale: Any) -> metrics.Sums:
    """Forward and backward passes of a step's micro-batches; only the last backward pass sends gradients."""
    sums: metrics.Sums = {}
    for batch in batches:
        with contextlib.nullcontext() if batch.last else model.no_sync():
            batch_sums = forward(args, model, batch)
            # The mean over the samples of the whole step; dp_size in `scale` cancels DDP's mean over the ranks.
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
