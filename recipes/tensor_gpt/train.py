"""Train a GPT whose layers are too wide for one device: tensor parallel, and FSDP2 over the other ranks.

Each of the --tp ranks of a group holds a slice of every matrix. They compute on the same sequences and sum their
results. Between the matrices, each keeps a part of every sequence (sequence parallel); logits stay sliced in the loss.

    what                          each rank, of N in N / tp groups
    parameters                    1/N of each matrix: a slice (1/tp), split over the groups by FSDP
    gradients, optimizer state    1/N; with several micro-batches, 1/tp of the gradients until the last one
    batch                         each group: an equal part of its sequences

Within a group, each block all-gathers its input twice and reduce-scatters its output twice, in the forward pass and
again in the backward pass, so a group should be within one machine. Groups send each other 1/tp of fsdp_gpt's traffic.

    bash launch/torchrun.sh recipes/tensor_gpt                                        # one group of 2
    NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/tensor_gpt --tp 2                # 2 x 2
    bash launch/slurm.sh -N2 --gpus-per-node=8 recipes/tensor_gpt --tp 8 --num-layers 24 --num-heads 16 --width 2048

Measured: val/loss 1.757 nats a byte after 200 steps and 101 s of training, 2 processes, Intel Xeon, 2 cores, bfloat16,
gloo, torch 2.15.0, 2026-11-23 (docs/measured/language.md; a bigram model has 2.403). Several GPUs and NCCL: not run.

Base: recipes/fsdp_gpt. Open: 0 1 3
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.optim import Optimizer

from common import bounds, precision, private_api, session
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
    # strategy
    tp: Annotated[bounds.PositiveInt, bounds.Saves("exposed", "smaller")] = 2  # ranks that split every matrix
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


def make_mesh(args: Args, world: World) -> DeviceMesh:
    """The ranks and their axes: dp ranks, between which FSDP splits slices, and tp ranks, which slice matrices."""
    shape = gpt.Shape.of(args, vocab_size=1)
    sizes = {"--num-heads": args.num_heads, "--num-kv-heads": shape.num_kv_heads, "--mlp-width": shape.mlp_width}
    cli.check_divides("--tp", args.tp, {"the number of ranks": world.size, "--seq-len": args.seq_len} | sizes)
    mesh = init_device_mesh(world.device.type, (world.size // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    private_api.merge_axes(mesh)  # a norm is one all-reduce, not one for each axis
    return mesh


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of the part of each batch that this rank reads, and number of parts; one per tp group."""
    return mesh.get_local_rank("dp"), mesh["dp"].size()


def slice_matrices(model: Any, tp: DeviceMesh) -> None:
    """Slice the first matrix of each pair by outputs and the second by inputs, so nothing is sent between the two.

    Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053); what lies between the pairs works on a part of each
    sequence, as in Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198).
    """
    colwise = parallel.ColwiseParallel()
    rowwise = parallel.RowwiseParallel(output_layouts=Shard(1))
    gather = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())  # (B, T, C)
    # Attention also takes the rotary positions, which each rank has whole.
    gather_first = parallel.PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    plan: dict[str, parallel.ParallelStyle] = {
        "embed": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.*_norm": parallel.SequenceParallel(),
        "blocks.*.attention": gather_first,
        "blocks.*.attention.query": colwise,
        "blocks.*.attention.key": colwise,
        "blocks.*.attention.value": colwise,
        "blocks.*.attention.output": rowwise,
        "blocks.*.mlp": gather,
        "blocks.*.mlp.gate": colwise,
        "blocks.*.mlp.up": colwise,
        "blocks.*.mlp.down": rowwise,
        "norm": parallel.SequenceParallel(),
    }
    if model.shape.qk_norm:  # of this rank's heads, (B, T, heads, D): its gradient is summed over the group
        plan["blocks.*.attention.*_norm"] = parallel.SequenceParallel(sequence_dim=2, use_local_output=True)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parallel.parallelize_module(model, tp, plan if model.head is None else plan | {"head": colwise})
    for name in frozen:  # SequenceParallel has made new parameters
        model.get_parameter(name).requires_grad_(False)
    # The loss takes logits of the whole sequence, sliced over the vocabulary.
    model.norm.register_forward_hook(lambda module, inputs, output: output.redistribute(placements=[Replicate()]))
    model.register_forward_hook(lambda module, inputs, output: output.to_local().clone())  # FSDP wants no view


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Put the plain model on its device and under the strategy."""
    dtype = precision.compute_dtype(args.dtype, device)
    model = model.to(precision.param_dtype(dtype))
    slice_matrices(model, mesh["tp"])
    model.part = mesh.get_local_rank("tp")  # between the matrices, the ranks hold other tokens
    compute = dtype if dtype in precision.HALVES else None
    # param_dtype: parameters are gathered and computed in it. reduce_dtype: gradients are summed in it.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.param_dtype(dtype))
    # Parameters come in the compute type, so section 2's autocast has nothing to do. On GPUs it would compute each norm
    # in float32, and cast the result back once for each matrix that reads it.
    model.forward = torch.autocast(device.type, enabled=False)(model.forward)
    axes = mesh["dp"]
    model.compile = lambda: [part.compile() for part in model.modules() if isinstance(part, (gpt.Attention, gpt.Mlp))]
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
        with parallel.loss_parallel():
            batch_sums = forward(args, model, batch)
            # The mean over the samples of the whole step; dp_size in `scale` cancels FSDP's mean over the groups.
            (batch_sums["loss"] * (scale / batch.step_samples)).backward()
        sums = metrics.add(sums, batch_sums)
    return sums


def forward_only(args: Args, model: Any, batches: Iterator[data.Batch]) -> metrics.Sums:
    """Forward passes of an evaluation."""
    sums: metrics.Sums = {}
    for batch in batches:
        with parallel.loss_parallel():
            sums = metrics.add(sums, forward(args, model, batch))
    model.reshard()  # without a backward pass, embedding, norm and head would stay gathered
    return sums


def share_norms(model: Any) -> None:
    """Give all tp ranks the gradients of norms that the first one has: each holds a copy of the norms.

    FSDP adds them up in another dp group for each tp rank. NCCL may add in another order there, and the copies would
    drift apart by their last bits.
    """
    copies = [one.grad for one in model.parameters() if one.grad is not None and one.placements[1].is_replicate()]
    parts = [copy.to_local() for copy in copies]
    if parts:
        sent = torch.cat([part.flatten() for part in parts])
        dist.broadcast(sent, group=copies[0].device_mesh.get_group("tp"), group_src=0)
        for part, came in zip(parts, sent.split([part.numel() for part in parts]), strict=True):
            part.copy_(came.view_as(part))


def clip_gradients(args: Args, model: Any) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; the norm is over all ranks' parts."""
    share_norms(model)
    if args.max_grad_norm:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    else:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.full_tensor()  # a DTensor: this adds up the ranks' parts


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
