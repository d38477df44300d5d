"""The loss of a whole step: a look at forward before the training, and the features of all ranks for one over pairs.

docs/losses.md says which losses are exact, and how.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from common import UserError, keymap, ranks
from common.train import metrics, sampler
from common.train.data import BatchReader, Loader, map_tensors
from common.workloads import kept

TOLERANCE = 0.05  # of a ratio of losses, which bfloat16 has rounded
SAME = 1e-3  # of a loss that is computed twice, which a GPU may add up in another order
COPIES = 3  # of a sample: on two ranks, two copies have twice the mean InfoNCE of one, as a sum would
MANY = 8  # copies that show it through random numbers
FIRST = 4  # samples of which the first with a loss is looked at
MEAN = (
    'forward returns a mean loss: {}. Return the sum over the samples, as by reduction="sum"; Brigade divides by the '
    'samples of the whole step, or by what "weight" adds up to'
)
Look = Callable[..., metrics.Sums]


def check(
    args: Any,
    model: nn.Module,
    evaluate: Callable[[Any, Any, Loader], metrics.Sums],
    train: BatchReader,
    validation: BatchReader,
    plan: sampler.Plan,
    dp_rank: int,
    device: torch.device,
) -> None:
    """Refuse a forward that does not return sums: a mean would train at another learning rate (all ranks).

    It also names parts in eval mode. What forward keeps in the model is put back; random numbers that no resume could
    repeat, and what forward keeps elsewhere, are refused unless the flags accept them.

    Args:
        args: the recipe's flags.
        model: under its strategy.
        evaluate: the recipe's own: this rank's sums over batches.
        train: the training set.
        validation: the set that is evaluated.
        plan: the steps of the training.
        dp_rank: index of the part of each batch that this rank reads.
        device: of this rank.

    Raises:
        UserError: "loss" or "count" is missing, the loss is a mean, the count does not count samples, forward fails
            on a batch of none, which a rank would get, or a sample or its loss is another one each time.
    """
    name_modes(model)
    for split, reader in (("training", train), ("validation", validation)):
        if _read(reader) != _read(reader):
            _refuse_inexact(args, f"the {split} set gives another sample 0 each time, by", "MapStyle")

    def look(*indices: int, seed: int = 0) -> metrics.Sums:
        """This rank's sums over these samples."""
        with kept.generators(), kept.model(model):
            torch.manual_seed(seed)
            index = np.array(indices, int)
            request = sampler.Request(np.zeros_like(index), index, max(1, len(index)), True)
            return evaluate(args, model, Loader(train, [request], 0, device))

    for first in range(min(FIRST, len(train)) or 1):  # one may be all padding; a stream has no length
        once = look(first)
        check_counts(once)
        loss = metrics.totals(once)["loss"]
        if loss and math.isfinite(loss):
            break
    if not _same(metrics.totals(look(first))["loss"], loss):
        _refuse_inexact(
            args,
            "forward computes another loss when it gets the same sample again: it keeps something outside of the model "
            "(keep it in a buffer or an attribute, which the start's looks put back), or draws from",
            "each step",
        )
    check_none(look, len(validation), plan)
    division = plan.division
    if division.micro_batch_size < 2:
        return  # a mean over one sample is its sum
    draws = not _same(metrics.totals(look(first, seed=1))["loss"], loss)
    copies = min(MANY, division.micro_batch_size) if draws else COPIES
    ratio = check_sums(once, look(*[first] * copies), copies, draws)
    if draws or not ratio or abs(ratio - copies) <= TOLERANCE:
        return
    splits = division.dp_size > 1 and _depends_on_ranks(look, dp_rank)
    if splits or division.num_micro_batches > 1:
        on = "--micro-batch-size and the number of ranks" if splits else "--micro-batch-size"
        ranks.print0(
            f"note: {copies} copies of a sample have {ratio:.3g} times the loss of one: the loss is no sum over "
            f"samples, so the training depends on {on}; docs/losses.md says how it need not"
        )


def _read(reader: BatchReader) -> bytes:
    """The numbers of its first sample."""
    found: list[bytes] = []

    def take(tensor: torch.Tensor) -> None:
        found.append(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    map_tensors(take, reader.read(np.zeros(1, int), np.zeros(1, int)))
    return b"|".join(found)


def _refuse_inexact(args: Any, what: str, seeds: str) -> None:
    """Refuse what a resume could not repeat, unless the flags accept it."""
    said = f"{what} a generator of its own: draw from torch, numpy.random or random, which {seeds} seeds"
    if not args.inexact:
        raise UserError(f"{said}; --inexact accepts that a resumed run is another one")
    ranks.print0(f"note: {said}; a resumed run is another one (--inexact)")


def check_counts(once: metrics.Sums) -> None:
    """Check the sums of one sample (all ranks).

    Raises:
        UserError: "loss" or "count" is missing, or the count is another number.
    """
    if missing := {"loss", "count"} - once.keys():
        raise UserError(f'forward returns no "{min(missing)}": it must return "loss", a sum, and "count", its samples')
    counts = ranks.gather(once["count"].item())  # 0 where another rank counts
    if wrong := next((count for count in counts if count not in (0, 1)), None):
        raise UserError(
            f'forward\'s "count" is {wrong:g} for one sample: it must be the number of samples. For a mean over '
            'tokens, pixels or boxes of the whole step, return their number as "weight" beside it'
        )


def check_sums(once: metrics.Sums, many: metrics.Sums, copies: int = 2, draws: bool = False) -> float:
    """Compare the sums of one sample with those of so many copies of it in one micro-batch (all ranks).

    Returns:
        How often the loss of one the loss of all is; 0 where nobody can tell.

    Raises:
        UserError: the loss is a mean, or "count" or "weight" does not count.
    """
    few, all_of_them = map(metrics.totals, (once, many))
    for key in few.keys() & {"count", "weight"}:
        if few[key] and not math.isclose(all_of_them[key], copies * few[key]):
            counted = f"{few[key]:g} for one sample and {all_of_them[key]:g} for {copies} of the same"
            what = "samples" if key == "count" else "what the loss is a sum over, such as tokens"
            raise UserError(f'forward\'s "{key}" is {counted}: it must be the number of {what}')
    loss = few["loss"]
    losses = all_of_them["loss"]
    if not all(map(math.isfinite, (loss, losses))) or not losses:
        return 0.0
    ratio = losses / loss if loss else math.inf
    # Random numbers differ between copies: their mean is still nearer to one loss than to the sum of many.
    if ratio < math.sqrt(copies) and copies >= MANY if draws else abs(ratio - 1) < TOLERANCE:
        raise UserError(MEAN.format(f"{copies} copies of a sample have the loss of one"))
    return ratio


def check_none(look: Look, num_validation: int, plan: sampler.Plan) -> None:
    """Let forward compute a batch of none, if a rank gets one (all ranks).

    Raises:
        UserError: it fails.
    """
    sizes = {
        f"each evaluation, of {num_validation} samples": num_validation,
        "each step": plan.division.global_batch_size,
        "the last step": (plan.end - plan.start) % plan.division.global_batch_size,
    }
    where = next((name for name, size in sizes.items() if size and not sampler.fewest(size, plan.division)), "")
    if not where:
        return
    if error := _error_of_none(look):
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"forward fails on a batch without samples ({type(error).__name__}: {reason}), and a rank gets one in "
            f"{where}, divided into micro-batches over {plan.division.dp_size} ranks: let forward return sums of 0 "
            "there, raise --micro-batch-size or --global-batch-size, or use fewer ranks"
        ) from error


def _error_of_none(look: Look) -> Exception | None:
    """What forward raises where no rank has a sample; None if it takes that (all ranks)."""
    try:
        look()
    except Exception as error:
        return error
    return None


def _depends_on_ranks(look: Look, dp_rank: int) -> bool:
    """Whether two samples have another loss on one rank than on two, while the others have none (all ranks).

    Raises:
        UserError: they have half of it, as a mean has.
    """
    if _error_of_none(look):  # all ranks, before some of them alone would wait for the others
        return True
    losses = []
    for parts in ([(0, 1)], [(0,), (1,)]):
        losses.append(metrics.totals(look(*(parts[dp_rank] if dp_rank < len(parts) else ())))["loss"])
    if losses[0] and math.isclose(2 * losses[0], losses[1], rel_tol=SAME):
        raise UserError(MEAN.format("two samples on one rank have half of the loss of one on each of two"))
    return not _same(*losses)


def _same(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=SAME) or not (math.isfinite(one) and math.isfinite(two))


def name_modes(model: nn.Module) -> None:
    """Say which parts make_model has put into eval mode, where they stay (all ranks).

    A whole model, of all ranks together, is put into training mode.
    """
    leaves = [module for module in model.modules() if not any(module.children())]
    if not any(ranks.gather(any(module.training for module in leaves))):
        ranks.print0(
            "note: make_model returns a model in eval mode, as from_pretrained does: it is put into training mode. A "
            "part that make_model alone puts into eval mode stays there"
        )
        model.train()
    names = {name for name, module in model.named_modules() if not module.training}
    tops = [keymap.canonical(name) for name in sorted(names) if name.rpartition(".")[0] not in names]
    if tops:
        ranks.print0(
            f"note: {ranks.listed(tops)}: in eval mode, as make_model has left it: without dropout, and with the "
            "statistics that it has"
        )


class _Gather(torch.autograd.Function):
    """All ranks' rows, one rank's after another's."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
        ctx.group = group
        ctx.first = sum(sizes[: dist.get_rank(group)])
        ctx.count = len(mine)
        # Parts of one size, because gloo aborts where they differ, and NCCL sends anything.
        padded = mine.new_zeros(max(sizes), *mine.shape[1:])
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)  # each rank's loss has a gradient for each row
        return grad[ctx.first : ctx.first + ctx.count], None, None


def gather(features: torch.Tensor, group: Any = None) -> tuple[torch.Tensor, int]:
    """The features of all ranks' samples, with their gradient (all ranks of the group).

    The loss of this rank's samples against all, summed over this rank's, is then the same on any number of ranks. A
    rank may have any number of samples, or none.

    Args:
        features: of this rank's samples, (b, ...).
        group: ranks that read different samples; None for all.

    Returns:
        Those of all ranks, (B, ...), and the place of this rank's first among them.
    """
    if features.is_meta or not dist.is_initialized():  # as where FLOPs are counted
        return features, 0
    counts = ranks.gather(len(features), group)
    return _Gather.apply(features, group, counts), sum(counts[: dist.get_rank(group)])
