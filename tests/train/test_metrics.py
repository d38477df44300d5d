"""Means over all samples of all ranks, from one collective."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import UserError
from common.train import metrics

from tests.harness import runner

# Unequal counts, none on one rank, and a count that float32 cannot hold. The mean of means would differ in each.
PARTS = [
    [{"loss": 1.0, "top1": 1, "count": 1}, {"loss": 30.0, "top1": 0, "count": 3}],
    [{"loss": 6.0, "top1": 2, "count": 4}, {"loss": 0.0, "top1": 0, "count": 0}],
    [{"loss": 0.0, "top1": 2**24, "count": 2**24}, {"loss": 2.0**24 + 1, "top1": 0, "count": 1}],
]
MEANS = [
    {"loss": 31 / 4, "top1": 1 / 4},
    {"loss": 6 / 4, "top1": 2 / 4},
    {"loss": 1.0, "top1": 2**24 / (2**24 + 1)},
]


def means_of_two_ranks() -> None:
    dist.init_process_group("gloo")
    calls = []
    reduce = dist.all_reduce

    def count(tensor: torch.Tensor) -> None:
        calls.append(tensor.dtype)
        reduce(tensor)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("another collective")

    dist.all_reduce = count
    dist.all_gather = dist.all_gather_object = dist.broadcast = dist.reduce = dist.all_gather_into_tensor = refuse
    for parts, wanted in zip(PARTS, MEANS, strict=True):
        mine = parts[dist.get_rank()]
        sums = {"loss": torch.tensor(mine["loss"], dtype=torch.float64)}
        sums |= {key: torch.tensor(int(mine[key])) for key in ("top1", "count")}
        assert metrics.means(sums) == wanted
    assert calls == [torch.float64] * len(PARTS)


def test_means_are_global() -> None:
    result = runner.spawn(means_of_two_ranks, [(), ()])
    assert result.ok, str(result)


def test_add_takes_in_new_keys_and_changes_nothing() -> None:
    first = {"loss": torch.tensor(1.5), "count": torch.tensor(2)}
    total = metrics.add({}, first)
    total = metrics.add(total, {"loss": torch.tensor(2.5), "count": torch.tensor(3)})
    assert {key: value.item() for key, value in total.items()} == {"loss": 4.0, "count": 5}
    assert {key: value.item() for key, value in first.items()} == {"loss": 1.5, "count": 2}
    total = metrics.add(total, {"count": torch.tensor(1)})
    assert {key: value.item() for key, value in total.items()} == {"loss": 4.0, "count": 6}, "no key is lost"


@pytest.mark.usefixtures("group")
def test_weight_of_nothing_counts_as_one() -> None:
    """As max(number of boxes, 1): the gradient of the sum stays, and the log shows that sum."""
    sums = {"loss": torch.tensor(6.0), "count": torch.tensor(3), "weight": torch.tensor(0.0)}
    assert metrics.weight_per_sample(sums).item() == pytest.approx(1 / 3)  # gradients are divided by the samples
    assert metrics.means(sums) == {"loss": 6.0}
    assert metrics.weight_per_sample(sums | {"weight": torch.tensor(0.5)}).item() == pytest.approx(0.5 / 3)
    nothing = {"loss": torch.tensor(0.0), "count": torch.tensor(0), "weight": torch.tensor(0.0)}
    assert math.isnan(metrics.means(nothing)["loss"])


@pytest.mark.parametrize("sums", [torch.tensor(1.0), {"loss": torch.ones(2)}, {"loss": 1.0}], ids=repr)
def test_what_are_no_sums_are_refused(sums: Any) -> None:
    with pytest.raises(UserError, match=r"forward (returned a Tensor, not|must return tensors without dimensions)"):
        metrics.add({}, sums)


RECORDS = [
    {"step": 10, "train/loss": 1 / 3},
    {"step": 20, "val/loss": 0.7, "val/top1": 0.6},
    {"step": 30, "val/loss": 0.5, "val/top1": 0.8},
    {"step": 40, "val/loss": 0.6, "val/top1": 0.8},
]


def test_best_is_the_lowest_loss_and_the_highest_of_others() -> None:
    assert metrics.best(RECORDS) == {"val/loss": (0.5, 30), "val/top1": (0.8, 30)}  # the first of equals
    assert metrics.best(RECORDS[:1]) == {}


@pytest.mark.parametrize("losses", [[math.nan, 0.5], [0.5, math.nan]], ids=str)
def test_best_is_a_number_if_there_is_one(losses: list[float]) -> None:
    """An evaluation that overflowed is not the best for ever."""
    found = metrics.best({"step": i, "val/loss": loss} for i, loss in enumerate(losses))
    assert found == {"val/loss": (0.5, losses.index(0.5))}
