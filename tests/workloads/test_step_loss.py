"""A forward that does not return sums is refused, before the training; and what it keeps, needs and draws is named."""

import contextlib
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import UserError
from common.run import process_group
from common.train import data, metrics, sampler
from common.workloads import dataset, step_loss
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.harness import runner

CPU = torch.device("cpu")


class Squares(torch.utils.data.Dataset):
    """Four numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return (index + 3) ** 2


def sums_of(loss: float, count: float = 1, **more: float) -> metrics.Sums:
    return {"loss": torch.tensor(loss), "count": torch.tensor(count)} | {k: torch.tensor(v) for k, v in more.items()}


TWINS = {  # sums of a sample, of the same sample twice, and the message
    "a mean": (sums_of(2.3), sums_of(2.3, 2), "forward returns a mean loss"),
    "a mean in bfloat16": (sums_of(2.3), sums_of(2.31, 2), "forward returns a mean loss"),
    "a mean beside a weight": (sums_of(2.3, weight=7), sums_of(2.3, 2, weight=14), "forward returns a mean loss"),
    "no count": ({"loss": torch.tensor(2.3)}, {"loss": torch.tensor(4.6)}, 'forward returns no "count"'),
    "no loss": ({"count": torch.tensor(1)}, {"count": torch.tensor(2)}, 'forward returns no "loss"'),
    "a constant count": (sums_of(2.3), sums_of(4.6), '"count" is 1 for one sample and 1 for 2 of the same'),
    "a constant weight": (
        sums_of(2.3, weight=7),
        sums_of(4.6, 2, weight=7),
        '"weight" is 7 for one sample and 7 for 2',
    ),
    "7 tokens as count": (sums_of(2.3, 7), sums_of(4.6, 14), '"count" is 7 for one sample: .* return .* as "weight"'),
    "half a sample": (sums_of(2.3, 0.5), sums_of(4.6, 1), '"count" is 0.5 for one sample'),
    "sums": (sums_of(2.3), sums_of(4.6, 2), ""),
    "sums over 7 tokens a sample": (sums_of(2.3, weight=7), sums_of(4.6, 2, weight=14), ""),
    "negative sums": (sums_of(-2.3), sums_of(-4.6, 2), ""),
    "a masked sample": (sums_of(0.0, 0), sums_of(0.0, 0), ""),
    "a sample without tokens": (sums_of(0.0, weight=0), sums_of(0.0, 2, weight=0), ""),
    "a loss that is not finite": (sums_of(math.inf), sums_of(math.inf, 2), ""),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("case", TWINS)
def test_twins(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    once, twice, message = TWINS[case]
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        step_loss.check_counts(once)
        step_loss.check_sums(once, twice)
    assert capsys.readouterr().out == ""


class Model(nn.Module):
    """One number, a statistic, and what forward keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.register_buffer("queue", torch.zeros(3))
        self.hidden: Any = None
        self.last: Any = torch.ones(2)
        self.mean: Any = 0
        self.sum = torch.zeros(2)
        self.mine = [self.layer.weight, [self.sum]]


def check(
    loss: Callable[[Model, torch.Tensor], torch.Tensor],
    samples: int = 8,
    micro: int = 8,
    held_out: int = 4,
    inexact: bool = False,
    train: Any = None,
) -> Model:
    """The look at a forward with this loss, in this process."""
    model = Model()
    division = sampler.divide_batch(samples, micro, dist.get_world_size())
    plan = sampler.make_plan(division, 4, run_seed=0, epochs=2, max_steps=0, progress={})
    reader = train or dataset.MapStyle(Squares(), 0)
    validation = dataset.MapStyle(torch.utils.data.Subset(Squares(), range(held_out)), 0)

    def evaluate(args: Any, model: Model, batches: data.Loader) -> metrics.Sums:
        sums: metrics.Sums = {}
        for batch in batches:
            values = batch.inputs.double()
            sums = metrics.add(sums, {"loss": loss(model, values), "count": torch.tensor(len(values))})
        return sums

    args = types.SimpleNamespace(inexact=inexact)
    step_loss.check(args, model, evaluate, reader, validation, plan, dist.get_rank(), CPU)
    return model


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("micro", [1, 8])
def test_what_is_read(micro: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The first sample, alone and three times; only alone where a micro-batch has one sample of each rank."""
    read: list[list[int]] = []

    def loss(_: Model, values: torch.Tensor) -> torch.Tensor:
        read.append(values.tolist())
        return values.sum()

    check(loss, micro=micro)
    assert [one for one in read if one != [9]] == [[9, 9, 9]] * (micro > 1)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("empty", [0.0, math.nan])
def test_sample_without_a_loss_hides_no_mean(empty: float) -> None:
    """As one that is all padding: the next one is looked at."""

    def loss(_: Model, values: torch.Tensor) -> torch.Tensor:
        return torch.where(values == 9, empty, values).mean()

    with pytest.raises(UserError, match="mean loss: 3 copies of a sample have the loss of one"):
        check(loss)


@pytest.mark.usefixtures("group")
def test_nothing_is_left_in_the_model() -> None:
    """A queue in a buffer, a hidden state, a list and a dict: step 1 begins with what make_model has made."""

    def loss(model: Any, values: torch.Tensor) -> torch.Tensor:
        model.queue.add_(values.sum())
        assert model.hidden is None or model.hidden.shape == values.shape, "also between two looks"
        model.hidden = values
        model.last = None
        model.mean = values.mean()
        model.sum.add_(1)
        model.features = [values]
        model.by_name = {"h": values}
        return values.sum() * (1 + model.queue.sum() / model.queue.sum())

    model = check(loss)
    assert model.mine[0] is model.layer.weight, "what has not changed is the same object"
    assert model.mine[1][0] is model.sum
    assert not model.sum.any()
    assert not model.queue.any()
    assert model.hidden is None
    assert model.mean == 0
    assert torch.equal(model.last, torch.ones(2))
    assert not {"features", "by_name"} & vars(model).keys()


@pytest.mark.usefixtures("group")
def test_what_is_kept_elsewhere_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """A global, or a generator of its own; what torch's generators draw is none."""
    kept: list[torch.Tensor] = []
    own = torch.Generator()

    def with_state(_: Model, values: torch.Tensor) -> torch.Tensor:
        kept.append(values.sum())
        return values.sum() + torch.stack(kept).sum() * len(values)

    def with_own_noise(_: Model, values: torch.Tensor) -> torch.Tensor:
        return (values + torch.randn(len(values), generator=own)).sum()

    def with_noise(_: Model, values: torch.Tensor) -> torch.Tensor:
        return (values + torch.randn(len(values))).sum()

    noted = "forward computes another loss when it gets the same sample again"
    for loss in (with_state, with_own_noise):
        with pytest.raises(UserError, match=f"^{noted}.*; --inexact accepts that a resumed run is another one"):
            check(loss)
        check(loss, inexact=True)
        assert f"note: {noted}" in capsys.readouterr().out
    check(with_noise)
    assert capsys.readouterr().out == ""


class Noisy(Squares):
    """With noise of torch, or of a generator of its own, as numpy.random.default_rng() is one."""

    def __init__(self, own: bool) -> None:
        self.own = np.random.default_rng() if own else None

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        return super().__getitem__(index) + (self.own.random() if self.own else np.random.random())


@pytest.mark.usefixtures("group")
def test_sample_that_is_another_one_each_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(_: Model, values: torch.Tensor) -> torch.Tensor:
        return values.sum()

    check(loss, train=dataset.MapStyle(Noisy(own=False), 0))
    noisy = dataset.MapStyle(Noisy(own=True), 0)
    with pytest.raises(
        UserError, match=r"^the training set gives another sample 0 each time, by a generator of its own"
    ):
        check(loss, train=noisy)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("group")
def test_mean_is_found_below_noise() -> None:
    def loss(_: Model, values: torch.Tensor) -> torch.Tensor:
        return (values + 2 * torch.randn(len(values))).mean()

    with pytest.raises(UserError, match="returns a mean loss"):
        check(loss)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("micro", [4, 8], ids=["two micro-batches", "one"])
def test_loss_over_pairs_is_noted_where_it_matters(micro: int, capsys: pytest.CaptureFixture[str]) -> None:
    """That of one sample alone is 0, as InfoNCE's is. In one process and one micro-batch, all pairs are there."""

    def loss(_: Model, values: torch.Tensor) -> torch.Tensor:
        logits = values[:, None] * values / 1e4
        return F.cross_entropy(logits, torch.arange(len(values)), reduction="sum")

    check(loss, micro=micro)
    noted = (
        "note: 3 copies of a sample have inf times the loss of one: the loss is no sum over samples, so the training"
    )
    out = capsys.readouterr().out
    assert (noted in out) == (micro == 4), out
    assert ("depends on --micro-batch-size; docs/losses.md" in out) == (micro == 4), "of one rank"


def look_at_pairs() -> None:
    """In two ranks: pairs of a rank alone, and of all."""
    world = process_group.start()

    def info_nce(features: torch.Tensor, every: torch.Tensor, first: int) -> torch.Tensor:
        logits = features[:, None] * every / 1e4
        return F.cross_entropy(logits, first + torch.arange(len(features)), reduction="sum")

    def of_all(_: Model, values: torch.Tensor) -> torch.Tensor:
        every, first = step_loss.gather(values)
        return info_nce(values, every, first)

    for name, loss in (("alone", lambda _, values: info_nce(values, values, 0)), ("all", of_all)):
        for micro in (0, 2):
            print(f"{name} {micro}:", flush=True)
            check(loss, micro=micro)
    # With two ranks, the mean of log(2) over a copy, and of log(4) over two: as a sum's.
    with pytest.raises(UserError, match="mean loss: two samples on one rank have half"):
        check(lambda _, values: of_all(_, values) / max(1, len(values)))
    process_group.finish(world.process)


def test_note_names_the_ranks_only_where_they_matter() -> None:
    result = runner.spawn(look_at_pairs, [()] * 2)
    assert result.ok, str(result)
    parts = (
        result.outputs[0]
        .partition("alone 0:")[2]
        .replace("alone 2:", "|")
        .replace("all 0:", "|")
        .replace("all 2:", "|")
    )
    found = [
        "ranks" if "number of ranks" in part else "micro" if "no sum over samples" in part else ""
        for part in parts.split("|")
    ]
    assert found == ["ranks", "ranks", "", "micro"], result.outputs[0]


@pytest.mark.usefixtures("group")
def test_batch_of_none_is_tried_where_a_rank_gets_one() -> None:
    def loss(_: Model, values: torch.Tensor) -> torch.Tensor:
        if not len(values):
            raise RuntimeError("Cannot pack empty tensors.\nmore")
        return values.sum()

    check(loss)
    plan = sampler.make_plan(sampler.divide_batch(4, 1, 2), 4, run_seed=0, epochs=1, max_steps=0, progress={})
    read: list[int] = []

    def look(*indices: int) -> metrics.Sums:
        read.append(len(indices))
        return {"loss": loss(Model(), torch.tensor(indices))}

    step_loss.check_none(look, 50, plan)
    step_loss.check_none(look, 0, plan)  # a stream
    assert not read
    with pytest.raises(
        UserError, match=r"without samples \(RuntimeError: Cannot pack empty tensors\.\).* evaluation, of 51"
    ):
        step_loss.check_none(look, 51, plan)
    assert read == [0]
    last = sampler.make_plan(sampler.divide_batch(4, 1, 2), 5, run_seed=0, epochs=1, max_steps=0, progress={})
    with pytest.raises(UserError, match="gets one in the last step, divided into micro-batches over 2 ranks"):
        step_loss.check_none(look, 50, last)


class Student(nn.Module):
    """Beside a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Dropout())


def test_modes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    step_loss.name_modes(nn.Linear(2, 2))
    assert capsys.readouterr().out == ""
    model = Student()
    step_loss.name_modes(model)
    assert "note: teacher: in eval mode, as make_model has left it" in capsys.readouterr().out
    assert not model.teacher[1].training
    assert model.head.training
    step_loss.name_modes(model.eval())
    out = capsys.readouterr().out
    assert "make_model returns a model in eval mode, as from_pretrained does" in out
    assert all(module.training for module in model.modules())


def gather_unequal(sizes: list[int]) -> None:
    """On each rank, other numbers of rows; the gradient is that of one process with all."""
    world = process_group.start()
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs = torch.randn(sum(sizes), 5, dtype=torch.float64)
    layer = nn.Linear(5, 3, dtype=torch.float64)
    plain = nn.Linear(5, 3, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())

    def info_nce(features: torch.Tensor, every: torch.Tensor, first: int) -> torch.Tensor:
        return F.cross_entropy(features @ every.T, first + torch.arange(len(features)), reduction="sum")

    whole = plain(inputs)
    wanted = info_nce(whole, whole, 0)
    wanted.backward()
    model = DistributedDataParallel(layer)
    first = sum(sizes[:rank])
    features = model(inputs[first : first + sizes[rank]])
    every, found_first = step_loss.gather(features)
    assert found_first == first
    assert torch.allclose(every, whole.detach(), rtol=1e-12)
    loss = info_nce(features, every, first)
    (loss * world.size).backward()
    for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12)
    dist.all_reduce(total := loss.detach().clone())
    assert torch.allclose(total, wanted, rtol=1e-12)
    # A loss of the whole batch at once: each rank's share is by its samples.
    plain.zero_grad()
    layer.zero_grad()
    whole = plain(inputs)
    (whole.T @ whole).square().sum().backward()
    features = model(inputs[first : first + sizes[rank]])
    every, _ = step_loss.gather(features)
    ((every.T @ every).square().sum() * len(features) * world.size / len(every)).backward()
    for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12)
    process_group.finish(world.process)


@pytest.mark.parametrize("sizes", [[3, 2], [0, 4]])
def test_gather(sizes: list[int]) -> None:
    result = runner.spawn(gather_unequal, [(sizes,)] * len(sizes))
    assert result.ok, str(result)


def test_gather_in_one_process_and_where_flops_are_counted() -> None:
    rows = torch.randn(2, 3, requires_grad=True)
    every, first = step_loss.gather(rows)
    assert torch.equal(every, rows)
    assert first == 0
    assert step_loss.gather(rows.to("meta"))[1] == 0
