"""Train a GPT that is too deep for one device: ranks hold stages of layers, and micro-batches flow through them.

    what                          each rank
    parameters                    its own layers, in one stage, or in two (all but GPipe and 1F1B)
    gradients, optimizer state    of its own layers
    batch                         each pipeline: an equal part, in micro-batches of --micro-batch-size

--schedule decides when each rank computes which stage, and so how long ranks wait. Neighbours send on the activations
of every micro-batch (samples x length x width) in its forward pass; they send back the gradients of these in its
backward pass. Three all-reduces follow: all gradients of a stage over the pipelines; a tied embedding's over its two
stages; the norm over all ranks.

    bash launch/torchrun.sh recipes/pipeline_gpt                                         # 2 stages
    NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/pipeline_gpt --pp 2                 # 2 pipelines of 2
    bash launch/slurm.sh -N2 --gpus-per-node=8 recipes/pipeline_gpt --pp 8 --num-layers 32

Measured: val/loss 1.795 nats a byte after 200 steps and 68 s of training, 2 processes, Intel Xeon, 2 cores, bfloat16,
gloo, torch 2.15.0, 2026-11-23 (docs/measured/language.md; a bigram model has 2.403). Several GPUs and NCCL: not run.

Base: recipes/ddp_gpt. Open: 0 1 3
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.optim import Optimizer

from common import UserError, bounds, precision, private_api, session
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
    micro_batch_size: Annotated[bounds.Smaller, bounds.Saves("slower", "smaller")] = (
        4  # most sequences of a rank's forward pass; 0 for one micro-batch per step
    )
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
    # strategy
    pp: bounds.PositiveInt = 2  # ranks of each pipeline
    schedule: Literal["1F1B", "DualPipeV", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = (
        "1F1B"  # when each rank computes which stage: see stage_numbers
    )


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

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stage_numbers(args: Args, rank: int) -> list[int]:
    """Stages of a pipeline's rank: one, or two to start sooner; in a V shape, the first rank has both ends.

    GPipe (https://arxiv.org/abs/1811.06965): all forward, then all backward. 1F1B (https://arxiv.org/abs/1806.03377):
    backward as soon as it can, to keep less. Interleaved1F1B (https://arxiv.org/abs/2104.04473): half the bubble.
    InterleavedZeroBubble, ZBVZeroBubble (https://arxiv.org/abs/2401.10241): the weights' gradients fill the bubble.
    DualPipeV (https://arxiv.org/abs/2412.19437): forward and backward passes beside each other.
    """
    if args.schedule in ("GPipe", "1F1B"):
        return [rank]
    # --pp 2, in a V:     rank 0 has stages 0 and 3, rank 1 has 1 and 2.
    # --pp 2, otherwise:  rank 0 has stages 0 and 2, rank 1 has 1 and 3.
    return [rank, 2 * args.pp - 1 - rank if args.schedule in V_SHAPED else rank + args.pp]


def make_stage(args: Args, model: Any, i: int, num_stages: int) -> Any:
    """Stage i of the plain model: its layers, under their names in the whole model."""
    stage = copy.deepcopy(model)  # on the meta device, a copy takes no memory
    # Layer l goes to stage l * stages / layers.
    for name in [name for name in stage.blocks if int(name) * num_stages // args.num_layers != i]:
        del stage.blocks[name]
    stage.part = i
    is_last = i == num_stages - 1
    # The last stage has a copy of a tied embedding: its output layer.
    stage.embed = stage.embed if i == 0 or (is_last and args.tied) else None
    stage.norm = stage.norm if is_last else None
    stage.head = stage.head if is_last else None
    return stage


class Pipeline(nn.Module):
    """This rank's stages, and the schedule that runs them."""

    stages: nn.ModuleDict  # by number
    ends: tuple[Any, Any]  # the first and the last stage of all; None where another rank has it
    process_group: Any  # the ranks with the same stages, as DistributedDataParallel calls it
    division: sampler.Division
    schedule: Any  # of torch, which sends micro-batches through the stages
    weight: Any = 1.0  # of each loss in the gradient
    losses: Any = ()  # of the sequences of each micro-batch; the rank with the last stage appends them
    tied_group: Any = None  # the two ranks that each have a copy of a tied embedding, if this rank is one of them

    def compile(self) -> None:
        """Compile each stage on its own."""
        private_api.keep_compiled_activations()  # zero-bubble schedules go back through a compiled graph twice
        for stage in self.stages.values():
            stage.compile()


def make_mesh(args: Args, world: World) -> DeviceMesh:
    """The ranks and their axes: the ranks of a pipeline, and pipelines."""
    check_limits(args, world.size)
    # Ranks with the same stage are neighbours: on several machines, activations cross the network, not gradients.
    return init_device_mesh(world.device.type, (args.pp, world.size // args.pp), mesh_dim_names=("pp", "dp"))


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of the part of each batch that this rank reads, and number of parts; one per pipeline."""
    return mesh.get_local_rank("dp"), mesh["dp"].size()


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Put this rank's layers of the plain model on its device and under the strategy."""
    if args.schedule in ZERO_BUBBLE and len(trained(model)) < len(list(model.parameters())):  # torch 2.15 loses some
        raise UserError(f"--schedule {args.schedule} has wrong gradients beside frozen parts: use 1F1B or GPipe")
    dtype = precision.compute_dtype(args.dtype, device)
    group = mesh.get_group("pp")
    num_stages = args.pp * len(stage_numbers(args, 0))
    stages = {i: make_stage(args, model, i, num_stages) for i in stage_numbers(args, group.rank())}
    for stage in stages.values():
        initial.materialize(stage, args.seed, device, precision.param_dtype(dtype))
        gpt.recompute(stage, args.recompute)
        # A schedule calls the stage itself, without the autocast of section 2's forward.
        stage.forward = precision.autocast(device, dtype)(stage.forward)
        # Stages send in the compute type: bfloat16 has half the bytes. GPT's forward adds up in float32 again.
        stage.register_forward_hook(lambda stage, x, y: y.to(dtype) if stage.norm is None else y)
    pipeline = Pipeline()
    pipeline.stages = nn.ModuleDict({str(i): stage for i, stage in stages.items()})
    pipeline.ends = stages.get(0), stages.get(num_stages - 1)
    pipeline.process_group = mesh.get_group("dp")
    pipeline.division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, mesh["dp"].size())
    if args.tied and all(pipeline.ends):  # on one rank: it is one parameter
        pipeline.ends[1].embed = pipeline.ends[0].embed
    if args.tied and args.pp > 1 and args.schedule not in V_SHAPED and model.embed.weight.requires_grad:
        # The first and the last rank of each pipeline.
        pipeline.tied_group, _ = dist.new_subgroups_by_enumeration(mesh.mesh[[0, -1]].T.tolist())
    parts = [PipelineStage(stage, i, num_stages, device, group=group) for i, stage in stages.items()]
    # scale_grads=False: the weight divides, by the samples of the whole step.
    pipeline.schedule = schedules.get_schedule_class(args.schedule)(
        parts if len(parts) > 1 else parts[0],
        pipeline.division.num_micro_batches,
        loss_fn=lambda logits, targets: gpt.loss(logits, targets, pipeline.losses) * pipeline.weight,
        scale_grads=False,
    )
    return pipeline


def run_schedule(model: Any, batches: list[data.Batch], run: Callable[..., Any]) -> metrics.Sums:
    """Send micro-batches through the stages by the schedule's `step` or `eval`; only the last stage has the sums."""
    batch = text.joined(batches)
    # A schedule always runs the same number of micro-batches of one size: pad with empty sequences, whose loss is 0.
    # F.pad takes the last dim first: nothing to the length, then rows.
    fill = (0, 0, 0, model.division.num_micro_batches * model.division.micro_batch_size - len(batch.inputs))
    model.losses = []
    # Only the rank with the first stage passes inputs; the last stage compares with the targets.
    tokens, *positions = batch.inputs.unbind(1) if batch.inputs.ndim == 3 else [batch.inputs]
    for_all = {"positions": F.pad(positions[0], fill)} if positions else {}  # where documents are kept apart
    first = [F.pad(tokens, fill)] if model.ends[0] else []
    run(*first, **for_all, target=F.pad(batch.targets, fill, value=-100))
    # Only the rank with the last stage counts, or samples would count once per stage.
    # The last ones: torch may have computed one before, to learn its shape.
    losses = model.losses[-model.division.num_micro_batches :] or [torch.zeros(0, device=batch.inputs.device)]
    losses = torch.cat(losses)[: len(batch.inputs)]
    more = text.sums(batch, losses)  # the weight, if some tokens do not count; each source of a mixture
    return {"loss": losses.sum(), "count": torch.full((), len(losses), device=losses.device), **more}


def forward_backward(args: Args, model: Any, batches: Iterator[data.Batch], scale: Any) -> metrics.Sums:
    """Forward and backward passes of a step's micro-batches; then adds up the gradients over the pipelines."""
    step = list(batches)
    # The mean over the samples of the whole step; gradients are added up over the pipelines, which are dp_size.
    model.weight = scale / model.process_group.size() / step[0].step_samples
    sums = run_schedule(model, step, model.schedule.step)
    mine = trained(model) if model.process_group.size() > 1 else []  # one pipeline alone has the sums
    if mine:  # in one buffer, because by now the activations' memory is free
        total = torch.cat([p.grad.flatten() for p in mine])
        dist.all_reduce(total, group=model.process_group)
        for p, part in zip(mine, total.split([p.numel() for p in mine]), strict=True):
            p.grad = part.view_as(p)
    if model.tied_group:  # the embedding has a gradient at both ends of the pipeline
        # Last, because a sum of two is the same at both, and sums over the pipelines may be rounded in another order.
        dist.all_reduce((model.ends[0] or model.ends[1]).embed.weight.grad, group=model.tied_group)
    return sums


def forward_only(args: Args, model: Any, batches: Iterator[data.Batch]) -> metrics.Sums:
    """Forward passes of an evaluation."""
    sums: metrics.Sums = {}
    # torch's V-shaped schedules always run backward passes, and all schedules of torch 2.11 begin with them; the
    # gradients are dropped.
    backward = args.schedule in V_SHAPED or torch.__version__ < "2.15"
    run = model.schedule.step if backward else model.schedule.eval
    while some := list(itertools.islice(batches, model.division.num_micro_batches)):
        with torch.set_grad_enabled(backward):
            sums = metrics.add(sums, run_schedule(model, some, run))
        model.zero_grad(set_to_none=True)
    return sums


def clip_gradients(args: Args, model: Any) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; it is over all stages, and counts a tied embedding once."""
    copied = model.ends[1].embed.weight if model.tied_group and model.ends[1] else None
    grads = [p.grad for p in trained(model) if p is not copied]
    norm = nn.utils.get_total_norm(grads) if grads else next(model.parameters()).new_zeros(())
    # Over all ranks, so that all have the same bits. The pipelines have equal gradients by now.
    square = norm.square() / model.process_group.size()
    dist.all_reduce(square)
    if args.max_grad_norm:
        nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, square.sqrt())
    return square.sqrt()


def trained(model: Any) -> list[Any]:
    """This rank's parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# Their backward pass has two parts: the gradients of a stage's inputs first, those of its weights later.
ZERO_BUBBLE = ("InterleavedZeroBubble", *V_SHAPED)


def check_limits(args: Args, num_ranks: int) -> None:
    """Refuse flags and sizes that the schedule cannot run, before the data is read.

    Raises:
        UserError: names the schedule, its limit, and the flags to change.
    """
    cli.check_divides("--pp", args.pp, {"the number of ranks": num_ranks})
    count = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, num_ranks // args.pp).num_micro_batches
    name = f"--schedule {args.schedule}"
    if args.schedule in V_SHAPED and torch.__version__ < "2.15":  # 2.11 sends between two stages of one rank, and stops
        raise UserError(f"{name} needs torch 2.15, and this is {torch.__version__}: try another one")
    if args.schedule in ZERO_BUBBLE and args.recompute == "selective":  # torch computes again for one backward pass
        raise UserError(f"{name} goes back through a stage twice: use --recompute full or none")
    # torch's own limits for 1F1B and DualPipeV. With fewer than --pp, the other schedules could not fill a pipeline.
    least = {"GPipe": 1, "DualPipeV": 2 * args.pp}.get(args.schedule, args.pp)
    remainder = count % args.pp if "Interleaved" in args.schedule else 0
    if count < least or remainder:
        needs = f"a multiple of --pp {args.pp}" if remainder else f"{least} or more"
        raise UserError(f"--micro-batch-size {args.micro_batch_size} makes {count} a step, and {name} needs {needs}")
    stages_here = len(stage_numbers(args, 0))
    if args.pp < stages_here or args.num_layers < args.pp * stages_here:
        raise UserError(
            f"{name} needs --pp {stages_here} or more, and --num-layers for every stage ({stages_here} a rank), "
            f"not --pp {args.pp} and --num-layers {args.num_layers}"
        )


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
