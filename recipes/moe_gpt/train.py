"""Train a GPT with experts, which lie on different ranks: expert parallel, and FSDP2 for everything else.

Each layer has --experts MLPs, and a router sends each token to --top-k of them. A rank of an --ep group holds an equal
part of the experts. So tokens travel to the ranks of their experts, and the results come back.

    what                          each rank, of N in N / ep groups
    parameters                    1/N of each, and the whole of one or two blocks during their computation
    parameters of experts         1/N: 1/ep of the experts, split over the groups by FSDP
    gradients, optimizer state    1/N; with several micro-batches, all gradients until the last one
    batch                         an equal part of its sequences

    --ep-kind     in each block's forward pass             in its backward pass
    exchange      all-to-all of the numbers of tokens,     all-to-all of the gradients
                  of the tokens, and of the results        of results, and of tokens
    gather        all-gathers all tokens, and              all-gathers gradients, and
                  reduce-scatters the results              reduce-scatters those of tokens

Parameters and gradients travel as in fsdp_gpt, an expert's between the groups alone. Each forward pass ends with one
all-reduce of the numbers of choices, so the balance loss is that of the whole step.

    bash launch/torchrun.sh recipes/moe_gpt                                              # one per GPU, else 2
    NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/moe_gpt --ep 2 --router sigmoid --balance-loss 0
    bash launch/slurm.sh -N2 --gpus-per-node=8 recipes/moe_gpt --ep 8 --experts 64 --top-k 8 --shared-experts 1

Measured: val/loss 1.764 nats a byte after 200 steps, 2 processes, CPU, bfloat16, gloo, torch 2.15.0, 2026-11-27. The
fullest expert had 3.7 equal shares of the tokens at first, 1.7 in the end. Several GPUs and NCCL: not run.

Base: recipes/fsdp_gpt. Open: 0 1 2 3 (the model has experts)
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.optim import Optimizer

from common import UserError, bounds, precision, session
from common.run import cli, exits
from common.run.process import Process, World
from common.state import start
from common.train import data, flops, guard, initial, metrics, sampler, schedule
from common.workloads import gpt, moe, muon, rates, step_loss, text

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args(text.TextArgs, moe.RouterArgs, gpt.ShapeArgs, session.TrainArgs):
    """Train a small GPT with experts on text."""

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
    # strategy
    dp_replicate: bounds.PositiveInt = 1  # groups that each hold the whole model (HSDP)
    ep: bounds.NonNegativeInt = 0  # ranks that share the experts of a layer; 0 for as many as can
    ep_kind: Literal["exchange", "gather"] = "exchange"  # how tokens come to the experts of other ranks
    reshard_after_forward: bool = True  # free gathered parameters until the backward pass, which saves memory


# --- 2 Workload -------------------------------------------------------------------------------------------


def make_data(args: Args) -> tuple[text.Text, text.Text]:
    """The training and the validation split, the same on every rank."""
    return text.load(args.data, args.seq_len, args.tokenizer, args.text_columns, args.attend, args.loss_on)


def make_model(args: Args, train: text.Text) -> nn.Module:
    """The plain model on the meta device: names and shapes, no weights yet, whatever its size."""
    with torch.device("meta"):
        model = moe.with_experts(gpt.GPT(gpt.Shape.of(args, train.vocab_size)), moe.Routing.of(args))
        return rates.freeze(model, args.rates)


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
    """The ranks and their axes: groups that each hold the whole model, in them ep groups, and the ranks of these."""
    cli.check_divides("--dp-replicate", args.dp_replicate, {"the number of ranks": world.size})
    moe.Routing.of(args)  # refuses before the data is read
    of_group = world.size // args.dp_replicate
    ep = args.ep or math.gcd(args.experts, of_group)
    cli.check_divides("--ep", ep, {"--experts": args.experts, "the ranks that hold the model": of_group})
    sizes = (args.dp_replicate, of_group // ep, ep)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "ep"))


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of the part of each batch that this rank reads, and number of parts."""
    return mesh.get_rank(), mesh.size()  # all axes are data parallel: every rank reads its own part


class Exchange(torch.autograd.Function):
    """Send rows to the ranks of a group, and get theirs; the gradient of each row returns the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        """The first given[0] rows go to rank 0 of the group; the result begins with the taken[0] that it has sent."""
        ctx.way_back = (taken, given, group)
        received = rows.new_empty(sum(taken), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), taken, given, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send gradients back."""
        return Exchange.apply(grad, *ctx.way_back), None, None, None


def mix_by_exchange(
    group: dist.ProcessGroup, experts: moe.Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """As `moe.mix`, of experts on all ranks of a group: tokens travel to them, and results back."""
    counts = moe.count(chosen, group.size() * len(experts))
    coming = torch.empty_like(counts)  # the rows for our experts, by the rank that sends them
    dist.all_to_all_single(coming, counts, group=group)
    # By rank and expert.
    ours, theirs = moe.to_host(torch.stack([counts, coming]).view(2, group.size(), -1), chosen.numel())
    given, taken = list(map(sum, ours)), list(map(sum, theirs))
    rows, order = moe.rows_of(x, chosen, sum(given))
    rows = Exchange.apply(rows, given, taken, group)
    # They come rank by rank, and of each rank expert by expert.
    owners = torch.arange(len(experts), device=x.device).repeat(group.size())
    by_expert = owners.repeat_interleave(coming, output_size=len(rows)).argsort(stable=True)
    sizes = list(map(sum, zip(*theirs, strict=True)))
    results = experts(rows[by_expert], coming.view(group.size(), -1).sum(0), sizes)
    results = results[by_expert.argsort()]
    return moe.combine(Exchange.apply(results, taken, given, group), order, weights)


class Gather(torch.autograd.Function):
    """The rows of all ranks of a group, one rank's after the other's; the gradients for each are added up there."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """All ranks have as many rows, (n, ...)."""
        ctx.group = group
        every = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(every, rows.contiguous(), group=group)
        return every

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """One reduce-scatter."""
        return Scatter.apply(grad, ctx.group), None


class Scatter(torch.autograd.Function):
    """Add up all ranks' results for the rows of all ranks, and keep those of our own: the reverse of `Gather`."""

    @staticmethod
    def forward(ctx: Any, every: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """One reduce-scatter of (N n, ...)."""
        ctx.group = group
        rows = every.new_empty(len(every) // group.size(), *every.shape[1:])
        dist.reduce_scatter_tensor(rows, every.contiguous(), group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Each rank's result has the gradient of the sum."""
        return Gather.apply(grad, ctx.group), None


def mix_by_gather(
    group: dist.ProcessGroup, experts: moe.Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The same without an exchange: every rank gets all tokens, and computes what its own experts make of them."""
    lengths = torch.tensor([len(x)], device=x.device)
    dist.all_reduce(lengths, dist.ReduceOp.MAX, group=group)
    (longest,) = moe.to_host(lengths, len(x))  # a second wait, as all parts that are gathered have one size
    padding = (0, 0, 0, longest - len(x))
    first = group.rank() * len(experts)
    mine = Gather.apply(F.pad(chosen, padding, value=-1), group) - first
    mine = mine.where((mine >= 0) & (mine < len(experts)), len(experts))  # the others are none
    x_of_all, weights_of_all = (Gather.apply(F.pad(part, padding), group) for part in (x, weights))
    return Scatter.apply(moe.mix(experts, x_of_all, mine, weights_of_all, group.size()), group)[: len(x)]


MIX = {"exchange": mix_by_exchange, "gather": mix_by_gather}


def share_experts(args: Args, model: Any, group: dist.ProcessGroup) -> None:
    """Leave each rank of a group its part of the experts, and let tokens travel to them."""
    for layer in moe.layers(model).values():
        names = [name for name, _ in layer.experts.named_children()]
        size = len(names) // group.size()
        for name in names[: group.rank() * size] + names[(group.rank() + 1) * size :]:
            delattr(layer.experts, name)
        if group.size() > 1:
            layer.mix = functools.partial(MIX[args.ep_kind], group)
        layer.mix = torch.compiler.disable(layer.mix)  # the sizes of its tensors are other ones each time


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Put the plain model on its device and under the strategy."""
    dtype = precision.compute_dtype(args.dtype, device)
    model = model.to(precision.param_dtype(dtype))
    share_experts(args, model, mesh.get_group("ep"))
    model.mesh = mesh
    model.idle = moe.Idle(args.log_every)
    compute = dtype if dtype in precision.HALVES else None
    # param_dtype: parameters are gathered and computed in it. reduce_dtype: gradients are summed in it.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.param_dtype(dtype))
    # Parameters come in the compute type, so section 2's autocast has nothing to do. On GPUs it would compute each norm
    # in float32, and cast the result back once for each matrix that reads it.
    model.forward = torch.autocast(device.type, enabled=False)(model.forward)
    # Two axes make it HSDP. An expert is split over the ranks that have it, all else over all ranks of a group.
    size = mesh.size() // args.dp_replicate
    groups = [list(range(first, first + size)) for first in range(0, mesh.size(), size)]
    every = DeviceMesh(device.type, groups, mesh_dim_names=("dp_replicate", "dp"))
    axes = every if args.dp_replicate > 1 else every["dp"]
    of_experts = mesh["dp_replicate", "dp_shard"] if args.dp_replicate > 1 else mesh["dp_shard"]
    gpt.recompute(model, args.recompute)  # inside FSDP's hooks: they gather the parameters before
    for layer in moe.layers(model).values():
        fully_shard(layer.experts, mesh=of_experts, mp_policy=policy, reshard_after_forward=args.reshard_after_forward)
    for block in model.blocks.values():
        fully_shard(block, mesh=axes, mp_policy=policy, reshard_after_forward=args.reshard_after_forward)
    # The rest: embedding, last norm and head. It stays gathered, as the backward pass begins with the head.
    fully_shard(model, mesh=axes, mp_policy=policy, reshard_after_forward=False)
    # After the split, so each rank keeps only its part of the weights.
    return initial.materialize(model, args.seed, device, precision.param_dtype(dtype))


def forward_backward(args: Args, model: Any, batches: Iterator[data.Batch], scale: Any) -> metrics.Sums:
    """Forward and backward passes of a step's micro-batches; only the last backward pass reduces gradients."""
    step = list(batches)
    counts_first = args.balance == "step" and args.balance_loss > 0 and len(step) > 1 and moe.layers(model)
    first, whole = count_first(args, model, step) if counts_first else ({}, None)
    sums: metrics.Sums = {}
    total: Any = 0
    for batch in step:
        model.set_requires_gradient_sync(batch.last)
        batch_sums = forward(args, model, batch)
        # The mean over the samples of the whole step; dp_size in `scale` cancels FSDP's mean over all ranks.
        loss = batch_sums["loss"] * (scale / batch.step_samples)
        if routed := moe.routed(model):
            counts = sum_ranks(routed.counts) if whole is None else whole
            total = counts if whole is not None else total + counts
            weight = mean_weight(first or batch_sums, len(step) > 1 and not first)
            parts = moe.losses(routed, counts, batch.step_samples * batch.inputs.shape[-1])
            router = args.balance_loss * parts["balance_loss"] + args.z_loss * parts["z_loss"]
            loss = loss + router * (scale * weight)
            logged = {name: part * batch.step_samples for name, part in parts.items() if getattr(args, name)}
            logged |= moe.loads(model, routed, batch.inputs.shape[-1])
            batch_sums |= {name: value * weight for name, value in logged.items()}
        loss.backward()
        moe.forget(model)
        sums = metrics.add(sums, batch_sums)
    if moe.layers(model):
        average_experts(model)
        moe.shift_biases(model, total, args.bias_rate)
        model.idle.add(model, total)
        sums["load_max"] = total.max() / total.double().mean() * sums["count"] * weight
    return sums


def sum_ranks(counts: torch.Tensor) -> torch.Tensor:
    """Choices of all ranks, who take part."""
    total = counts.clone()
    dist.all_reduce(total)
    return total


@torch.no_grad()
def count_first(args: Args, model: Any, step: list[data.Batch]) -> tuple[metrics.Sums, torch.Tensor]:
    """Forward passes before those with gradients: this rank's sums, and the choices of all ranks, (L, E).

    The balance loss has a gradient for each token that depends on the choices of all micro-batches.
    """
    sums: metrics.Sums = {}
    counts: Any = 0
    devices = [torch.cuda.current_device()] if step[0].inputs.is_cuda else []
    with torch.random.fork_rng(devices):  # dropout draws the same again
        for batch in step:
            sums = metrics.add(sums, forward(args, model, batch))
            routed: Any = moe.routed(model)
            counts = counts + routed.counts
    return sums, sum_ranks(counts)


def mean_weight(sums: metrics.Sums, several: bool) -> Any:
    """What the gradients are divided by later, if forward returns "weight": the router's losses are means over tokens.

    Raises:
        UserError: nobody knows it yet, because other micro-batches follow.
    """
    if "weight" in sums and several:
        raise UserError('forward returns "weight": with several micro-batches, use --balance step and a --balance-loss')
    return metrics.weight_per_sample(sums) if "weight" in sums else 1.0


def average_experts(model: Any) -> None:
    """Divide the gradients of experts by ep: FSDP has divided the sum over all ranks' tokens by its own ranks only."""
    grads: list[Any] = [one.grad for layer in moe.layers(model).values() for one in layer.experts.parameters()]
    ep = model.mesh.get_group("ep").size()
    for grad in grads:
        if grad is not None:  # of one that is frozen
            grad.to_local().div_(ep)


def forward_only(args: Args, model: Any, batches: Iterator[data.Batch]) -> metrics.Sums:
    """Forward passes of an evaluation."""
    sums: metrics.Sums = {}
    for batch in batches:
        sums = metrics.add(sums, forward(args, model, batch))
    model.reshard()  # without a backward pass, embedding, norm and head would stay gathered
    return sums


def clip_gradients(args: Args, model: Any) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; the norm is over all ranks' parts, also of experts."""
    grads = [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]
    # The groups have equal gradients by now. Over all ranks, so that all have the same bits.
    square = nn.utils.get_total_norm(grads).square() / model.mesh.get_group("dp_replicate").size()
    dist.all_reduce(square)
    norm = square.sqrt()
    if args.max_grad_norm:
        factor = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)
    return norm


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
