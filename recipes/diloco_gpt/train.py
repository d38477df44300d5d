"""Train a GPT on slow links, as DiLoCo does: replicas take many steps apart, and then average their progress.

A replica is one rank, or a group of ranks with fast links, such as a machine, which is one DistributedDataParallel.
Each takes --inner-steps steps of AdamW on its part of the batches. Then all average the differences from where they
began, and one outer step of Nesterov momentum follows that average (Douillard et al. 2023,
https://arxiv.org/abs/2311.08105). The default, --outer-lr 1 --outer-momentum 0, is local SGD (Stich 2019); the paper
has 0.7 and 0.9, for long trainings.

    what               each rank
    parameters         all; equal in a replica, and everywhere after an outer step
    gradients          all, the mean over its replica
    optimizer state    all, its replica's; and for the outer step the weights before, and their momentum
    batch              an equal part of its sequences

Inside a replica, a step sends the same as in ddp_gpt. Between replicas it sends nothing. After each --inner-steps-th
step, the outer step sends one all-reduce of all differences, whole or in bfloat16, or an all-gather of them in 8 bits.
An evaluation, comparison or checkpoint after another step averages the weights, which sends them once more.

    python recipes/diloco_gpt/train.py                                                  # one process
    bash launch/torchrun.sh recipes/diloco_gpt                                          # each GPU, or half of a CPU
    bash launch/slurm.sh -N2 --gpus-per-node=8 recipes/diloco_gpt --replicas 2          # each machine

Its numbers are not those of ddp_gpt, by design. With --replicas 1, and the default outer step, they are, up to
rounding. Measured: docs/measured/diloco.md. Several GPUs and NCCL: not run.

Base: recipes/ddp_gpt. Open: 0 1 3
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common import UserError, bounds, keymap, precision, session
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
    replicas: bounds.NonNegativeInt = 0  # groups of ranks that train apart, such as machines; 0 for each rank by itself
    inner_steps: bounds.PositiveInt = 20  # optimizer steps of each replica between two outer steps
    outer_lr: bounds.NonNegativeFloat = 1.0  # rate of the outer step: how far it follows the mean difference
    outer_momentum: bounds.Fraction = 0.0  # Nesterov momentum of the outer step; 0.9 with --outer-lr 0.7 is DiLoCo's
    compress: Literal["none", "bf16", "int8"] = "none"  # how the differences are sent
    fragments: bounds.PositiveInt = 1  # parts of the layers, whose outer steps take turns within the inner steps
    delay: bounds.NonNegativeInt = 0  # inner steps that differences may be on the way; 0 to wait for them
    mixing: bounds.Fraction = 0.5  # share of its own weights in what a replica continues from after a delay


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
    """The ranks and their axes: replicas that train apart, and the ranks of a replica."""
    check_flags(args, world)
    replicas = args.replicas or world.size
    return init_device_mesh(world.device.type, (replicas, world.size // replicas), mesh_dim_names=("replica", "dp"))


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of the part of each batch that this rank reads, and number of parts."""
    return mesh.get_rank(), mesh.size()  # both axes are data parallel: every rank reads its own part


def parallelize(args: Args, model: Any, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Put the plain model on its device and under the strategy."""
    dtype = precision.compute_dtype(args.dtype, device)
    model = initial.materialize(model, args.seed, device, precision.param_dtype(dtype))
    gpt.recompute(model, args.recompute)
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    model.strategy = Outer(args, model, mesh["replica"])
    return model


Arrive = Callable[[], list[torch.Tensor]]


class Outer:
    """The outer step of a replica, and its part of a checkpoint.

    Section 4 is that of ddp_gpt: it makes the inner step alone. `end_step` makes the outer step that follows, before
    anything reads the weights: the next step, an evaluation or a checkpoint.
    """

    def __init__(self, args: Args, model: nn.Module, mesh: DeviceMesh) -> None:
        """Begin with the model's weights; `mesh` has the replicas."""
        self.args = args
        self.mesh = mesh
        self.steps = 0  # inner steps, since the training began
        self.in_step = False  # whether the last of them still waits for `end_step`
        named = {keymap.canonical(name): one for name, one in model.named_parameters() if one.requires_grad}
        self.weights = {name: one.detach() for name, one in named.items()}  # the model's own
        self.before = {name: one.clone() for name, one in self.weights.items()}  # at the last outer step
        self.momentum = {name: torch.zeros_like(one) for name, one in self.weights.items()}
        self.errors = {name: torch.zeros_like(one) for name, one in self.weights.items() if args.compress == "int8"}
        self.fragments = [[name for name in named if fragment_of(args, name) == i] for i in range(args.fragments)]
        self.on_the_way: dict[int, Arrive] = {}  # by fragment: waits for the mean differences that it has sent

    def begin_step(self) -> None:
        """Begin an inner step (all ranks); the first one notes the weights, which have been loaded by now."""
        self.end_step()
        if self.steps == 0:
            for name, before in self.before.items():
                before.copy_(self.weights[name])
        self.steps += 1
        self.in_step = True

    def end_step(self) -> None:
        """End an inner step (all ranks): the fragments whose turn it is send their differences, or follow the mean."""
        for i, names in enumerate(self.fragments if self.in_step else []):
            turn = (i + 1) * self.args.inner_steps // len(self.fragments)
            since = (self.steps - turn) % self.args.inner_steps
            if since == 0:
                self.on_the_way[i] = self.send(names)
            if since == self.args.delay and self.steps > self.args.delay:
                self.outer_step(i)
                for name in names:
                    self.weights[name].lerp_(self.before[name], 1 - self.args.mixing if self.args.delay else 1)
        self.in_step = False

    def outer_step(self, i: int) -> None:
        """Wait for the differences of a fragment, if they are on the way, and follow their mean (all ranks)."""
        if i not in self.on_the_way:  # a checkpoint has made this step already
            return
        for name, mean in zip(self.fragments[i], self.on_the_way.pop(i)(), strict=True):
            momentum = self.momentum[name].mul_(self.args.outer_momentum).add_(mean)
            self.before[name].sub_(mean + self.args.outer_momentum * momentum, alpha=self.args.outer_lr)

    def send(self, names: list[str]) -> Arrive:
        """Begin to send these differences, as --compress says (all ranks). The result waits, and returns the means."""
        group = self.mesh.get_group()
        differences = [self.before[name] - self.weights[name] for name in names]
        if self.args.compress == "int8":
            return self.send_codes(names, differences)
        flat = torch.cat([one.flatten() for one in differences])
        sent = flat.bfloat16() if self.args.compress == "bf16" else flat
        work: Any = dist.all_reduce(sent, group=group, async_op=True)

        def arrive() -> list[torch.Tensor]:
            work.wait()
            return split(sent.to(flat.dtype) / group.size(), differences)

        return arrive

    def are_equal(self) -> bool:
        """Whether all replicas have the same weights now."""
        at_once = len(self.fragments) == 1 and self.args.delay == 0
        return self.steps == 0 or (at_once and self.steps % self.args.inner_steps == 0)

    def mean_weights(self) -> dict[str, torch.Tensor]:
        """Mean weights of all replicas, in copies (all ranks); only between outer steps they have to be sent."""
        found = {name: one.clone() for name, one in self.weights.items()}
        if not self.are_equal():
            self.agree(found)
        return found

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean weights into the model for a while (all ranks)."""
        self.end_step()
        own = {name: one.clone() for name, one in self.weights.items()}
        self.fill(self.mean_weights())
        yield
        self.fill(own)

    def agree(self, tensors: dict[str, torch.Tensor]) -> None:
        """Give each replica the mean of all replicas' tensors, such as their averages over the steps (all ranks)."""
        flat = torch.cat([one.flatten() for one in tensors.values()])
        dist.all_reduce(flat, group=self.mesh.get_group())
        for one, mean in zip(tensors.values(), split(flat / self.mesh.size(), [*tensors.values()]), strict=True):
            one.copy_(mean)

    def fill(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy these into the model."""
        for name, one in weights.items():
            self.weights[name].copy_(one)

    def to_checkpoint(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of a checkpoint (all ranks): for any recipe the mean weights and the first replica's optimizer.

        Beside them, the tensors that only the same number of replicas can resume from: each one's own, stacked, dim 0
        being the replica; and the state of the outer step. It shares memory with this object, so that a load fills it.
        """
        self.end_step()
        for i in [*self.on_the_way]:
            self.outer_step(i)
        own = {name: one for name, one in tensors.items() if name in self.weights or name.startswith(keymap.OPTIMIZER)}
        found = {name: one for name, one in tensors.items() if name not in own} | self.mean_weights()
        if self.mesh.get_local_rank() == 0:  # in copies: a file may have no memory twice
            found |= {name: one.clone() for name, one in own.items() if name.startswith(keymap.OPTIMIZER)}
        each = own | {f"{name}.error": error for name, error in self.errors.items()}
        more: dict[str, torch.Tensor] = {
            f"replicas.{name}": DTensor.from_local(one[None], self.mesh, [Shard(0)]) for name, one in each.items()
        }
        more |= {f"before.{name}": one for name, one in self.before.items()}
        more |= {f"momentum.{name}": one for name, one in self.momentum.items()}
        more["steps"] = torch.tensor(self.steps)
        return found | {keymap.STRATEGY + name: one for name, one in more.items()}

    def from_checkpoint(self, tensors: dict[str, torch.Tensor]) -> None:
        """After a load into the tensors of `to_checkpoint`."""
        self.steps = int(tensors[f"{keymap.STRATEGY}steps"])

    def send_codes(self, names: list[str], differences: list[torch.Tensor]) -> Arrive:
        """Begin to send these differences as integers from -127 to 127, with a scale for each tensor (all ranks).

        The next difference makes up for the error of rounding (Seide et al. 2014,
        https://doi.org/10.21437/Interspeech.2014-274).
        """
        group = self.mesh.get_group()
        wanted = [one + self.errors[name] for name, one in zip(names, differences, strict=True)]
        scales = torch.stack([one.abs().max() for one in wanted]) / 127  # (tensors,)
        scales.clamp_(min=torch.finfo(scales.dtype).tiny)
        codes = [(one / scale).round() for one, scale in zip(wanted, scales, strict=True)]
        for name, one, code, scale in zip(names, wanted, codes, scales, strict=True):
            self.errors[name].copy_(one - code * scale)
        mine = torch.cat([code.flatten() for code in codes]).to(torch.int8)
        every = mine.new_empty(group.size() * len(mine))
        every_scale = scales.new_empty(group.size() * len(scales))
        works: Any = [dist.all_gather_into_tensor(every, mine, group=group, async_op=True)]
        works.append(dist.all_gather_into_tensor(every_scale, scales, group=group, async_op=True))

        def arrive() -> list[torch.Tensor]:
            for work in works:
                work.wait()
            lengths = torch.tensor([code.numel() for code in codes], device=scales.device)
            spread = every_scale.view(group.size(), -1).repeat_interleave(lengths, dim=1)
            return split((every.view(group.size(), -1) * spread).mean(0), differences)  # over (replicas, elements)

        return arrive


def forward_backward(args: Args, model: Any, batches: Iterator[data.Batch], scale: Any) -> metrics.Sums:
    """Forward and backward passes of a step's micro-batches; the last backward pass sends gradients in the replica."""
    model.strategy.begin_step()
    sums: metrics.Sums = {}
    for batch in batches:
        with contextlib.nullcontext() if batch.last else model.no_sync():
            batch_sums = forward(args, model, batch)
            # The mean over the replica's samples: DDP's mean over its ranks leaves the number of replicas of dp_size in
            # `scale`. If parts are unequal, a replica counts by its samples.
            (batch_sums["loss"] * (scale / batch.step_samples)).backward()
        sums = metrics.add(sums, batch_sums)
    return sums


def forward_only(args: Args, model: Any, batches: Iterator[data.Batch]) -> metrics.Sums:
    """Forward passes of an evaluation, of the mean of all replicas."""
    sums: metrics.Sums = {}
    with model.strategy.averaged():
        for batch in batches:
            sums = metrics.add(sums, forward(args, model, batch))
    return sums


def clip_gradients(args: Args, model: Any) -> torch.Tensor:
    """Clip to the norm of the replica's gradient, (), and return it; every rank holds all of it."""
    if args.max_grad_norm:
        return nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def fragment_of(args: Args, name: str) -> int:
    """Which of --fragments a parameter is in: each has some blocks, the first the embedding, the last the rest."""
    parts = name.split(".")
    block = int(parts[1]) if parts[0] == "blocks" else 0 if parts[0] == "embed" else args.num_layers - 1
    return block * args.fragments // args.num_layers


def split(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat` in these shapes."""
    parts = flat.split([one.numel() for one in like])
    return [part.view_as(one) for part, one in zip(parts, like, strict=True)]


def check_flags(args: Args, world: World) -> None:
    """Refuse flags that do not fit together, before the data is read."""
    cli.check_divides("--replicas", args.replicas or world.size, {"the number of ranks": world.size})
    if args.fragments > args.num_layers:
        raise UserError(f"--fragments {args.fragments} is more than --num-layers {args.num_layers}: lower it")
    if args.delay >= args.inner_steps:
        raise UserError(f"--delay {args.delay} must be below --inner-steps {args.inner_steps}: lower it")


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
