"""Means over all samples of all ranks, from one collective."""

import math
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from common import data, flops, metrics
from common.workloads import gpt, text
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


class Rows:
    """A data set of rows of three features, four of them in a sample."""

    def __len__(self) -> int:
        return 1

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return means

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(epochs) == len(indices)
        return torch.zeros(len(indices), 4, 3), torch.zeros(len(indices), 4, dtype=torch.int64)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_count_flops_of_linear_layers(device: str) -> None:
    """Of one sample; the first layer wants no gradient of its input. The model stays as it is."""
    with torch.device(device):
        model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(4), nn.Linear(5, 7, bias=False))

    def loss(model: nn.Module, batch: data.Batch) -> torch.Tensor:
        assert batch.inputs.device.type == batch.targets.device.type == "meta"
        return nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())

    first, second = 2 * 4 * 3 * 5, 2 * 4 * 5 * 7  # a multiplication and an addition for each weight and row
    assert flops.count_flops(loss, model, Rows()) == 2 * first + 3 * second
    assert all(p.device.type == device and p.grad is None for p in model.parameters())
    assert model.training
    assert device == "meta" or int(model[1].num_batches_tracked) == 0


def test_count_flops_of_a_gpt() -> None:
    """6 for each weight of a matrix and token, and 12 for each pair of positions, layer and channel."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.Shape(256, num_layers=2, num_heads=2, width=32, mlp_width=48))
    train = text.Text(np.zeros(99, np.uint16), 16, 256, 1.0)
    found = flops.count_flops(lambda model, batch: model(batch.inputs, batch.targets).sum(), model, train)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and name != "embed.weight")
    pairs = 12 * 2 * 16 * 16 * 32  # all of them: a mask saves none in this count
    assert found == pytest.approx(6 * 16 * matrices + pairs, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-40GB", 312e12)],
)
def test_peak_flops_of_a_known_gpu(name: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert flops.peak_flops(torch.device("cuda", 0), torch.bfloat16) == peak


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


def ticks(*durations: float) -> Callable[[], float]:
    """A clock that shows a start and an end for each duration."""

    def times() -> Iterator[float]:
        for i, duration in enumerate(durations):
            yield 1000.0 * i
            yield 1000.0 * i + duration

    iterator = times()
    return lambda: next(iterator)


def test_peak_flops_is_that_of_the_best_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "time", types.SimpleNamespace(perf_counter=ticks(9.0, 2.0, 0.5, 1.0)))
    found = flops.peak_flops(torch.device("cpu"), torch.float32)
    assert found == 2 * 1024**3 / 0.5
