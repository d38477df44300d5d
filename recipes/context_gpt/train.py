"""Train a GPT on sequences that are too long for one device: context parallel, and FSDP2 over all ranks.

Each of the --cp ranks of a group holds two pieces of every sequence, an early and a late one, so that all have as much
to compute. Only attention reads beyond a rank's own pieces: --cp-kind says how the keys and values of the others come.

    what                          each rank, of N in N / cp groups
    parameters                    1/N of each, and the whole of one or two blocks during their computation
    gradients, optimizer state    1/N; with several micro-batches, all gradients until the last one
    batch                         each group: an equal part of its sequences; each rank: 1/cp of each sequence
    activations                   1/cp; allgather: also all keys and values of one block during its attention

    --cp-kind     in each block's forward pass         in its backward pass
    ring          keys and values go round, cp - 1     the same again, and their gradients go round
                  hops, each during a computation
    allgather     all-gathers keys and values          the same again, and reduce-scatters their gradients
    ulysses       all-to-all from pieces of all        the same two
                  heads to whole sequences of some,
                  and another one back

Parameters and gradients travel as in fsdp_gpt, over all ranks, whether these share sequences or not.

    bash launch/torchrun.sh recipes/context_gpt --seq-len 1024                                # one group of 2
    NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/context_gpt --cp 2 --cp-kind ulysses     # 2 groups of 2
    bash launch/slurm.sh -N2 --gpus-per-node=8 recipes/context_gpt --cp 16 --seq-len 131072 --recompute full

Measured: docs/measured/context.md. Several GPUs and NCCL: not run.

Base: recipes/fsdp_gpt. Open: 0 1 3
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from common import UserError, bounds, precision, session
from common.run import cli, exits
from common.run.process import Process, World
from common.state import start
from common.train import data, flops, guard, initial, metrics, sampler, schedule
from common.workloads import gpt, muon, private_api, rates, step_loss, text

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
    # strategy
    cp: Annotated[bounds.PositiveInt, bounds.Saves("exposed", "smaller")] = 2  # ranks that share every sequence
    cp_kind: Literal["ring", "allgather", "ulysses"] = "ring"  # how attention reads other ranks' pieces
    reshard_after_forward: bool = True  # free gathered parameters until the backward pass, which saves memory


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


def pieces_of(rank: int, size: int, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """A rank's part of whole sequences: of 2 N pieces, number r and number 2 N - 1 - r.

    Causal attention has less to compute for early pieces, and more for late ones: together, all ranks have the same.

    Args:
        rank: r, in its cp group.
        size: N.
        x: (..., T, ...), in order.
        dim: whose size is T.
    """
    pieces = x.tensor_split(2 * size, dim)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim)


def visible(rank: int, owner: int, length: int) -> tuple[slice, slice, bool]:
    """The queries of a rank that read keys of an owner, these keys, and whether a query reads only the keys before it.

    Of another rank's block, half of the queries or half of the keys are left out, whole. So all these blocks take
    equally long, and none needs a mask.
    """
    every, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if owner == rank:
        return every, every, True
    return (every, early, False) if owner < rank else (late, every, False)


def apart(
    documents: torch.Tensor | None, group: dist.ProcessGroup, owner: int, rows: slice, columns: slice
) -> torch.Tensor | None:
    """Which of these keys of an owner each of this rank's queries does not read, (B, 1, rows, columns).

    Args:
        documents: number of each token's document in whole sequences, (B, T); None for one document.
        group: the cp ranks.
        owner: of the keys, in the group.
        rows: the queries.
        columns: the keys.
    """
    if documents is None:
        return None
    ours, theirs = (pieces_of(rank, group.size(), documents) for rank in (group.rank(), owner))
    return ours[:, None, rows, None] != theirs[:, None, None, columns]


# A block: the keys and values of one rank's pieces, (2, B, kv heads, T / N, D).
Blocks = Iterator[tuple[int, torch.Tensor]]  # of all ranks, each with its rank


def passed_round(ours: torch.Tensor, group: dist.ProcessGroup) -> Blocks:
    """One block after the other, this rank's first: the next one travels while the caller computes with this one."""
    block = ours
    for hop in range(group.size()):
        wait = pass_on(block, group) if hop < group.size() - 1 else None
        yield (group.rank() - hop) % group.size(), block
        if wait:
            block = wait()


def pass_on(outgoing: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin to send to the next rank, and to receive from the one before. The result waits for the received tensor.

    The receive comes first: behind a large message, gloo would announce it late.
    """
    before, after = ((group.rank() + hop) % group.size() for hop in (-1, 1))
    incoming = torch.empty_like(outgoing)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=before)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=after)
    works = dist.batch_isend_irecv([receive, send])

    def wait() -> torch.Tensor:
        for work in works:
            work.wait()
        return incoming

    return wait


def sum_round(parts: Iterator[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Gradient of this rank's block, added up while it follows the block round, one computation behind."""
    ours = next(parts)
    wait = None
    for part in parts:
        wait = pass_on(part + wait() if wait else part, group)
    return ours + wait() if wait else ours


class BlockAttention(torch.autograd.Function):
    """Attention to the keys of one rank after another; each result is joined to the sum of those before.

    The backward pass sends the blocks again: kept, they would take N times the memory of a rank's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        group: dist.ProcessGroup,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The result for this rank's queries, (B, heads, T / N, D); key and value: (B, kv heads, T / N, D)."""
        ours = torch.stack([key, value])
        out = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        logs = out.new_full(query.shape[:3], -torch.inf)  # of the divisors of the softmax so far, (B, heads, T / N)
        for owner, block in BLOCKS[kind](ours, group):
            rows, columns, causal = visible(group.rank(), owner, query.shape[2])
            keys, values = block[..., columns, :]
            unseen = apart(documents, group, owner, rows, columns)
            part, part_logs = private_api.block_attention(query[:, :, rows], keys, values, causal, unseen)
            both = torch.logaddexp(logs[:, :, rows], part_logs)
            # Each part was divided by its own divisor, and has to be divided by that of both.
            correction = (logs[:, :, rows] - both).exp()[..., None]
            out[:, :, rows] = out[:, :, rows] * correction + part * (part_logs - both).exp()[..., None]
            logs[:, :, rows] = both
        out = out.to(query.dtype)
        ctx.save_for_backward(query, ours, out, logs)
        ctx.kind = kind
        ctx.group = group
        ctx.documents = documents
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of query, key and value; the query's is this rank's alone."""
        query, ours, out, logs = ctx.saved_tensors
        by_query = torch.zeros_like(query, dtype=logs.dtype)

        def by_blocks() -> Iterator[torch.Tensor]:
            for owner, block in BLOCKS[ctx.kind](ours, ctx.group):
                rows, columns, causal = visible(ctx.group.rank(), owner, query.shape[2])
                keys, values = block[..., columns, :]
                unseen = apart(ctx.documents, ctx.group, owner, rows, columns)
                by_rows, *by_columns = private_api.block_attention_backward(
                    grad[:, :, rows], query[:, :, rows], out[:, :, rows], logs[:, :, rows], keys, values, causal, unseen
                )
                by_query[:, :, rows] += by_rows
                by_block = torch.zeros_like(ours, dtype=logs.dtype)
                by_block[..., columns, :] = torch.stack(by_columns)
                yield by_block

        by_ours = SUM[ctx.kind](by_blocks(), ctx.group)
        return None, None, by_query.to(query.dtype), *by_ours.to(query.dtype), None


def share_sequences(args: Args, model: Any, group: dist.ProcessGroup) -> None:
    """Let the model read this rank's pieces of its inputs, at their positions, and attend to all pieces."""
    mine = functools.partial(pieces_of, group.rank(), group.size())
    whole = model.forward

    def forward_pieces(tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        # The loss is the mean over this rank's pieces. They are equally long on all ranks, so FSDP's mean over the
        # gradients of all ranks, and the mean of the metrics, are the means over whole sequences.
        positions = mine(torch.arange(tokens.shape[-1], device=tokens.device), dim=0)
        documents = gpt.documents_of(tokens[:, 1]) if tokens.ndim == 3 else None  # beside tokens: other positions
        return whole(mine(tokens, dim=-1), None if targets is None else mine(targets), positions, documents)

    model.forward = forward_pieces
    attend = ulysses_attention if args.cp_kind == "ulysses" else functools.partial(BlockAttention.apply, args.cp_kind)
    for block in model.blocks.values():  # torch.compile knows no messages, so it compiles the code around them
        block.attention.attend = torch.compiler.disable(functools.partial(attend, group))


def make_mesh(args: Args, world: World) -> DeviceMesh:
    """The ranks and their axes: dp groups, which read different sequences, and the cp ranks that share each of them."""
    check_flags(args, world.size)
    return init_device_mesh(world.device.type, (world.size // args.cp, args.cp), mesh_dim_names=("dp", "cp"))


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of the part of each batch that this rank reads, and number of parts; one per cp group."""
    return mesh.get_local_rank("dp"), mesh["dp"].size()


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Put the plain model on its device and under the strategy."""
    dtype = precision.compute_dtype(args.dtype, device)
    model = model.to(precision.param_dtype(dtype))
    compute = dtype if dtype in precision.HALVES else None
    # param_dtype: parameters are gathered and computed in it. reduce_dtype: gradients are summed in it.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.param_dtype(dtype))
    # Parameters come in the compute type, so section 2's autocast has nothing to do. On GPUs it would compute each norm
    # in float32, and cast the result back once for each matrix that reads it.
    model.forward = torch.autocast(device.type, enabled=False)(model.forward)
    share_sequences(args, model, mesh.get_group("cp"))
    model.part = mesh.get_local_rank("cp")  # the ranks hold other tokens of a sequence
    axes = DeviceMesh(device.type, list(range(mesh.size())), mesh_dim_names=("dp_cp",))  # over all ranks
    gpt.recompute(model, args.recompute)  # inside FSDP's hooks: they gather the parameters before
    for block in model.blocks.values():
        fully_shard(block, mesh=axes, mp_policy=policy, reshard_after_forward=args.reshard_after_forward)
    # The rest: embedding, last norm and head. It stays gathered, as the backward pass begins with the head.
    fully_shard(model, mesh=axes, mp_policy=policy, reshard_after_forward=False)
    # After the split, so each rank keeps only its part of the weights.
    return initial.materialize(model, args.seed, device, precision.param_dtype(dtype))


def forward_backward(args: Args, model: Any, batches: Iterator[data.Batch], scale: Any) -> metrics.Sums:
    """Forward and backward passes of a step's micro-batches; only the last backward pass reduces gradients."""
    sums: metrics.Sums = {}
    for batch in batches:
        model.set_requires_gradient_sync(batch.last)
        batch_sums = forward(args, model, batch)
        # The mean over the samples of the whole step; dp_size in `scale` cancels FSDP's mean over all ranks.
        (batch_sums["loss"] * (scale / batch.step_samples)).backward()
        sums = metrics.add(sums, batch_sums)
    return sums


def forward_only(args: Args, model: Any, batches: Iterator[data.Batch]) -> metrics.Sums:
    """Forward passes of an evaluation."""
    sums: metrics.Sums = {}
    for batch in batches:
        sums = metrics.add(sums, forward(args, model, batch))
    model.reshard()  # without a backward pass, embedding, norm and head would stay gathered
    return sums


def clip_gradients(args: Args, model: Any) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; the norm is over all ranks' parts."""
    if args.max_grad_norm:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    else:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.full_tensor()  # a DTensor: this adds up the ranks' parts


def gathered(ours: torch.Tensor, group: dist.ProcessGroup) -> Blocks:
    """All blocks at once, by one all-gather."""
    blocks = ours.new_empty(group.size() * len(ours), *ours.shape[1:])  # (2 N, B, kv heads, T / N, D)
    dist.all_gather_into_tensor(blocks, ours, group=group)
    yield from enumerate(blocks.chunk(group.size()))


def sum_gathered(parts: Iterator[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """The same sum of blocks that came by `gathered`: one reduce-scatter."""
    blocks = list(parts)
    ours = torch.empty_like(blocks[0])
    dist.reduce_scatter_tensor(ours, torch.cat(blocks), group=group)
    return ours


BLOCKS = {"ring": passed_round, "allgather": gathered}
SUM = {"ring": sum_round, "allgather": sum_gathered}


def ulysses_attention(
    group: dist.ProcessGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each rank computes some of the heads over whole sequences (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509).

    Args:
        group: the cp ranks.
        query: this rank's pieces, (B, heads, T / N, D).
        key: (B, kv heads, T / N, D).
        value: the same shape.
        documents: as in `apart`.
    """
    size = group.size()
    heads = [x.shape[1] // size for x in (query, key, value)]
    # (N, B, (heads + 2 kv heads) / N, T / N, D)
    parts = torch.cat([torch.stack(x.chunk(size, dim=1)) for x in (query, key, value)], dim=2)
    pieces = torch.cat(AllToAll.apply(parts, group).unbind(), dim=2).tensor_split(2 * size, dim=2)
    whole = torch.cat([*pieces[::2], *reversed(pieces[1::2])], dim=2)  # early ones, late ones; (..., T, D)
    query, key, value = whole.split(heads, dim=1)
    mixed = gpt.causal_attention(query, key, value, documents)  # (B, heads / N, T, D)
    parts = torch.stack([pieces_of(rank, size, mixed, 2) for rank in range(size)])  # (N, B, heads / N, T / N, D)
    return torch.cat(AllToAll.apply(parts, group).unbind(), dim=1)  # (B, heads, T / N, D)


class AllToAll(torch.autograd.Function):
    """Send part i to rank i of a group, and get a part of each; all parts are of one size, (N, ...)."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The parts from all ranks, in their order."""
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Each gradient returns to the rank of its part."""
        return AllToAll.apply(grad.contiguous(), ctx.group), None


def check_flags(args: Args, num_ranks: int) -> None:
    """Refuse sequences and heads that the ranks cannot share, before the data is read."""
    cli.check_divides("--cp", args.cp, {"the number of ranks": num_ranks})
    if args.cp > 1 and args.seq_len % (2 * args.cp):  # two pieces for each rank
        raise UserError(f"--seq-len {args.seq_len} must be a multiple of {2 * args.cp}, twice the --cp {args.cp} ranks")
    if args.cp_kind == "ulysses":
        heads = {"--num-heads": args.num_heads, "--num-kv-heads": gpt.Shape.of(args, vocab_size=1).num_kv_heads}
        cli.check_divides("--cp-kind ulysses: --cp", args.cp, heads)


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
