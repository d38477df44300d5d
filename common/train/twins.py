"""Refuse a forward that does not return sums, by a look at one sample alone and at the same sample twice."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from common import UserError, ranks
from common.train import metrics
from common.train.data import BatchReader, Loader
from common.train.sampler import Plan, Request

TOLERANCE = 0.05  # of a ratio of losses, which bfloat16 has rounded


def check_sums(
    evaluate: Callable[[Loader], metrics.Sums], train: BatchReader, plan: Plan, device: torch.device
) -> None:
    """Refuse a forward that does not return sums (all ranks): a mean would train at another learning rate.

    Nothing is checked if a micro-batch has only one sample of each rank.

    Args:
        evaluate: returns this rank's sums over batches.
        train: the training set.
        plan: the steps of the training.
        device: of this rank.

    Raises:
        UserError: "loss" or "count" is missing, the loss is a mean, or the count does not count.
    """
    if plan.division.global_micro_batch_size >= 2 * plan.division.dp_size:
        indices = [np.zeros(count, int) for count in (1, 2)]
        requests = [Request(index, index, len(index), True) for index in indices]
        compare(*(evaluate(Loader(train, [one], 0, device)) for one in requests))


def compare(sums_of_one: Mapping[str, torch.Tensor], sums_of_two: Mapping[str, torch.Tensor]) -> None:
    """Compare the sums of one sample with those of the same sample twice in one micro-batch (all ranks).

    Raises:
        UserError: as `check_sums`.
    """
    if missing := {"loss", "count"} - sums_of_one.keys():
        raise UserError(f'forward returns no "{min(missing)}": it must return "loss", a sum, and "count", its samples')
    once, twice = map(metrics.totals, (sums_of_one, sums_of_two))
    if once["count"] and not math.isclose(twice["count"], 2 * once["count"]):
        counted = f"{once['count']:g} for one sample and {twice['count']:g} for two"
        raise UserError(f'forward\'s "count" is {counted}: it must be the number of samples')
    if not once["loss"] or not all(map(math.isfinite, (once["loss"], twice["loss"]))):
        return
    ratio = twice["loss"] / once["loss"]
    if abs(ratio - 1) < TOLERANCE:
        raise UserError(
            "forward returns a mean loss: the same sample twice has the loss of one. Return the sum over the samples, "
            'as by reduction="sum"; Brigade divides by the samples of the whole step'
        )
    if abs(ratio - 2) > TOLERANCE:
        ranks.print0(
            f"note: the same sample twice has {ratio:.3g} times the loss of one: the loss is no sum over samples, so "
            "the training depends on --micro-batch-size and the number of ranks"
        )
