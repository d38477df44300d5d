"""Train a ResNet with DistributedDataParallel built by hand: one sees how the sum of the gradients travels.

Every rank holds the whole model, as in ddp_resnet, and computes the gradients of its own samples. Each rank needs the
mean of these gradients; --sync chooses the messages that bring it there, and their time.

    what               each rank
    parameters         all, a replica
    gradients          all, the mean over the ranks; and a copy for the messages
    optimizer state    all, a replica
    batch              an equal part

    --sync       a rank of N sends, for gradients of P bytes,                          when
    parameter    an all-reduce for each parameter                                      after the backward pass
    flat         one all-reduce of P                                                   after it
    bucket       an all-reduce for each --bucket-mb, as DistributedDataParallel does   while it still runs
    ring         2 (N - 1) messages of P / N to the next rank                          after it
    tree         2 log2 N messages, of P / 2, P / 4, ..., to ranks far and near        after it
    rank0        P to rank 0, which sends P to each rank: (N - 1) P over its link      after it

As in ddp_resnet, a broadcast brings BatchNorm's running statistics from rank 0 before each step.

    python recipes/allreduce_resnet/train.py                                        # one process
    bash launch/torchrun.sh recipes/allreduce_resnet                                # one per GPU, else 2 on the CPU
    NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/allreduce_resnet --sync ring   # four, in a ring

Measured: docs/measured/allreduce.md. Several GPUs and NCCL: not run.

Base: recipes/ddp_resnet. Open: 0 1 3
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import P2POp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.optim import Optimizer

from common import UserError, bounds, precision, seed, session
from common.run import cli, exits
from common.run.process import Process, World
from common.state import start
from common.train import data, flops, guard, initial, metrics, sampler, schedule, sync_batchnorm
from common.workloads import images, rates, resnet, step_loss

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args(session.TrainArgs):
    """Train a residual network on labelled images."""

    # run
    out: str = f"runs/{Path(__file__).parent.name}"  # folder that holds the runs
    epochs: bounds.PositiveInt = 20  # length of the training in epochs, if max_steps is 0
    max_steps: bounds.NonNegativeInt = 0  # length of the training in optimizer steps; 0 for epochs
    # data
    data: str = "digits"  # "digits" (built in), a folder, or a data set of the Hugging Face hub
    workers: bounds.NonNegativeInt = 0  # loader processes per rank; a data set in memory needs none
    flip: bool = False  # mirror half of the training images; for photographs, not for digits
    image_size: bounds.NonNegativeInt = (
        0  # side of the images in pixels; 0 for small ones as they are, others at most 224
    )
    skip_unreadable: bool = False  # let the next image take the place of one that cannot be decoded; up to 5 %
    # batch and rate
    global_batch_size: bounds.PositiveInt = 128  # samples per optimizer step, over all ranks
    micro_batch_size: bounds.Smaller = 0  # most samples of a rank's forward pass; 0 for one micro-batch per step
    lr: bounds.NonNegativeFloat = 0.4  # peak learning rate at lr_reference_batch samples per step, scaled linearly
    lr_reference_batch: bounds.PositiveInt = 256  # samples per step that lr was chosen for
    weight_decay: bounds.NonNegativeFloat = 5e-4  # weight decay of weights; none on norms and biases
    momentum: bounds.Fraction = 0.9  # momentum of SGD
    label_smoothing: bounds.Fraction = 0.1  # share of the target probability that is spread over all classes
    rates: str = ""  # factors on the rate of parts, 0 to freeze them: "all=0,PART=1"; "" for 1 everywhere
    warmup_steps: bounds.NonNegativeInt = 10  # steps of linear warm-up
    max_grad_norm: bounds.NonNegativeFloat = 0.0  # clip the global gradient norm to this; 0 for never
    # model
    model: str = "auto"  # a residual network such as resnet50; auto: resnet20 up to 16 pixels, else resnet18
    # strategy
    sync_bn: bool = False  # compute BatchNorm's statistics over the samples of all ranks
    sync: Literal["bucket", "flat", "parameter", "ring", "tree", "rank0"] = "bucket"  # the gradients' way, as above
    bucket_mb: bounds.NonNegativeFloat = 25.0  # most MB of gradients in a bucket; 0 for one for each parameter


# --- 2 Workload -------------------------------------------------------------------------------------------


def make_data(args: Args) -> tuple[images.Images, images.Images]:
    """The training and the validation split, the same on every rank."""
    return images.load(args.data, args.seed, args.flip, args.image_size, args.skip_unreadable)


def make_model(args: Args, train: images.Images) -> nn.Module:
    """The plain model, with the same initial weights on every rank."""
    seed.everything(args.seed, seed.INIT)
    model = resnet.make_resnet(args.model, train.channels, len(train.class_names), train.size)
    # The order in memory that the convolutions read fastest; they bring the pixels into it.
    return rates.freeze(model.to(memory_format=resnet.memory_format(args.dtype)), args.rates)


def make_optimizer(args: Args, model: nn.Module) -> Optimizer:
    """SGD with momentum; no weight decay on norms and biases (Jia et al. 2018, https://arxiv.org/abs/1807.11205)."""
    lr = schedule.linear_scaling(args.lr, args.global_batch_size, args.lr_reference_batch)
    groups = rates.groups(model, args.rates, lr, args.weight_decay)
    return torch.optim.SGD(groups, lr=lr, momentum=args.momentum, fused=True)


def lr_factor(args: Args, step: int, max_steps: int) -> float:
    """Factor on the peak rates in a step: linear warm-up, then half a cosine."""
    return schedule.warmup_cosine(step - 1, args.warmup_steps, max_steps)


def forward(args: Args, model: Any, batch: data.Batch) -> metrics.Sums:
    """Sums over one rank's micro-batch; the backward pass starts from "loss"."""
    dtype = precision.compute_dtype(args.dtype, batch.inputs.device)
    param_dtype = precision.param_dtype(dtype)
    pixels = batch.inputs.to(param_dtype).div_(127.5).sub_(1)  # (b, C, H, W), read and sent as bytes
    with precision.autocast(pixels.device, dtype):
        logits = model(pixels).to(param_dtype)  # (b, num_classes)
    return {
        "loss": F.cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=args.label_smoothing),
        "top1": (logits.argmax(1) == batch.targets).sum(),
        "count": torch.full((), len(logits), device=logits.device),
    }


# --- 3 Strategy -------------------------------------------------------------------------------------------


def ring(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add up `flat`, (n,), over the ranks: N chunks go round, and each rank sends to the next one only.

    Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002
    """
    size = group.size()
    after = (group.rank() + 1) % size
    before = (group.rank() - 1) % size
    chunks = flat.tensor_split(size)
    # Reduce-scatter: each rank on the way adds its own summand to a chunk, and the last one completes it.
    for hop in range(size - 1):
        summed = chunks[(group.rank() - hop) % size]
        mine = chunks[(group.rank() - hop - 1) % size]
        received = torch.empty_like(mine)
        exchange(P2POp(dist.irecv, received, before, group), P2POp(dist.isend, summed, after, group))
        mine += received
    # All-gather: the complete chunks go round.
    for hop in range(size - 1):
        complete = chunks[(group.rank() - hop + 1) % size]
        next_one = chunks[(group.rank() - hop) % size]
        exchange(P2POp(dist.irecv, next_one, before, group), P2POp(dist.isend, complete, after, group))


def exchange(*messages: P2POp) -> None:
    """Send and receive at the same time: two ranks that both sent first could wait for each other.

    The receive comes first. gloo announces it to the sender. Behind a large message the announcement would wait, and
    two ranks would send one after the other.
    """
    for work in dist.batch_isend_irecv(list(messages)):
        work.wait()


def sync_gradients(args: Args, model: Any) -> None:
    """Replace each rank's gradients by their mean over the ranks (all ranks)."""
    gradients = gradients_of(model.module)
    if args.sync == "bucket":
        model.receive_buckets()
    elif args.sync == "parameter":
        for gradient in gradients:
            dist.all_reduce(gradient, group=model.group)
    else:
        flat = flatten(gradients)
        ways: dict[str, Any] = {"flat": dist.all_reduce, "ring": ring, "tree": tree, "rank0": through_rank0}
        ways[args.sync](flat, group=model.group)
        unflatten(flat, gradients)
    for gradient in gradients:
        gradient.div_(model.group.size())


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
    if args.sync_bn:
        model = sync_batchnorm.convert(model, mesh.get_group("dp"))
    broadcast([parameter.detach() for parameter in model.parameters()], mesh.get_group("dp"))
    return Replica(args, model, mesh.get_group("dp"))


def forward_backward(args: Args, model: Any, batches: Iterator[data.Batch], scale: Any) -> metrics.Sums:
    """Forward and backward passes of a step's micro-batches; the gradients are sent once, after or in the last one."""
    sums: metrics.Sums = {}
    if not args.sync_bn:  # with it, running statistics are the same on all ranks already
        broadcast(model.buffers(), model.group)
    for batch in batches:
        model.is_last = batch.last
        batch_sums = forward(args, model, batch)
        # The mean over the samples of the whole step; dp_size in `scale` cancels the mean over the ranks.
        (batch_sums["loss"] * (scale / batch.step_samples)).backward()
        sums = metrics.add(sums, batch_sums)
    sync_gradients(args, model)
    return sums


def forward_only(args: Args, model: Any, batches: Iterator[data.Batch]) -> metrics.Sums:
    """Forward passes of an evaluation, with rank 0's running statistics."""
    sums: metrics.Sums = {}
    if not args.sync_bn:
        broadcast(model.buffers(), model.group)
    for batch in batches:
        sums = metrics.add(sums, forward(args, model, batch))
    return sums


def clip_gradients(args: Args, model: Any) -> torch.Tensor:
    """Clip to the global gradient norm, (), and return it; every rank holds all of the gradients."""
    if args.max_grad_norm:
        return nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


class Replica(nn.Module):
    """A rank's copy of the model. With --sync bucket, it sends gradients while the backward pass still runs.

    Attributes:
        group: all ranks.
        is_last: whether the next backward pass is the last one of its step. Earlier ones only add up gradients.
    """

    def __init__(self, args: Args, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Divide the parameters into buckets of at most --bucket-mb."""
        super().__init__()
        self.module = module
        self.group = group
        self.is_last = False
        self._buckets: list[list[Any]] = []
        self._arrived: set[nn.Parameter] = set()
        self._sent: list[tuple[torch.Tensor, Any]] = []
        # The backward pass reaches the last parameters first: their bucket is the first to be full, and sent.
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in reversed(trained if args.sync == "bucket" else []):
            used = sum(one.nbytes for one in self._buckets[-1]) if self._buckets else float("inf")
            if used + parameter.nbytes > args.bucket_mb * 1e6:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self._send_full_buckets)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the plain model."""
        return self.module(*inputs)

    def _send_full_buckets(self, parameter: nn.Parameter) -> None:
        """Send the buckets that the gradient of `parameter` completes; in the same order on all ranks."""
        if self.is_last:
            self._arrived.add(parameter)
            while len(self._sent) < len(self._buckets) and self._arrived.issuperset(self._buckets[len(self._sent)]):
                flat = flatten([one.grad for one in self._buckets[len(self._sent)]])
                self._sent.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))

    def receive_buckets(self) -> None:
        """Wait for the sums, and put them where the gradients were."""
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            unflatten(flat, [one.grad for one in bucket])
        self._sent.clear()
        self._arrived.clear()


def tree(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add up `flat`, (n,), over the ranks by recursive halving and doubling: few messages, where each starts slowly.

    Thakur, Rabenseifner and Gropp 2005, https://doi.org/10.1177/1094342005051521
    """
    rank = group.rank()
    levels = group.size().bit_length() - 1
    helper = rank + 2**levels  # ranks beyond a power of two send theirs to this one first, and get the sum last
    if rank >= 2**levels:
        dist.send(flat, rank - 2**levels, group)
        dist.recv(flat, rank - 2**levels, group)
        return
    if helper < group.size():
        flat += receive(flat, helper, group)
    mine = flat
    halves = []
    for level in reversed(range(levels)):  # reduce-scatter: half of the rest to each peer, the farthest one first
        peer = rank ^ 2**level
        first, second = mine.tensor_split(2)
        mine, out = (first, second) if rank < peer else (second, first)
        received = torch.empty_like(mine)
        exchange(P2POp(dist.irecv, received, peer, group), P2POp(dist.isend, out, peer, group))
        mine += received
        halves.append((peer, mine, out))
    for peer, complete, other in reversed(halves):  # all-gather: the same way back
        exchange(P2POp(dist.irecv, other, peer, group), P2POp(dist.isend, complete, peer, group))
    if helper < group.size():
        dist.send(flat, helper, group)


def through_rank0(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Add up `flat`, (n,), over the ranks at rank 0, whose link carries all bytes.

    nn.DataParallel and parameter servers send the updated parameters back, which have as many bytes.
    """
    if group.rank():
        dist.send(flat, 0, group)
        dist.recv(flat, 0, group)
        return
    for peer in range(1, group.size()):
        flat += receive(flat, peer, group)
    for peer in range(1, group.size()):
        dist.send(flat, peer, group)


def receive(like: torch.Tensor, peer: int, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor of another rank, of the same size."""
    received = torch.empty_like(like)
    dist.recv(received, peer, group)
    return received


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Copy rank 0's tensors to all ranks, in one message for each type."""
    for _, same in itertools.groupby(sorted(tensors, key=lambda one: str(one.dtype)), key=lambda one: one.dtype):
        ours = list(same)
        flat = flatten(ours)
        dist.broadcast(flat, 0, group)
        unflatten(flat, ours)


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all elements, (n,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements back."""
    for piece, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(piece.view_as(tensor))


def gradients_of(module: nn.Module) -> list[Any]:
    """The gradients of all trained parameters.

    Raises:
        UserError: a parameter has no gradient: the ranks could add up those of different parameters.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if unused := [name for name, parameter in trained.items() if parameter.grad is None]:
        raise UserError(f"the loss does not reach {unused[0]}: use it in forward, or freeze it (requires_grad_(False))")
    return [parameter.grad for parameter in trained.values()]


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
