"""Batches come out as they were requested, whoever reads them, and waiting for them is counted."""

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from common import data, sampler
from common.workloads import images

DEVICES = [torch.device("cpu")] + [torch.device("cuda", 0)] * torch.cuda.is_available()


def requests(num_samples: int) -> Iterator[sampler.Request]:
    """Two micro-batches a step on each of two ranks, and an uneven last step."""
    plan = sampler.make_plan(sampler.Division(512, 256, 2), num_samples, run_seed=0, epochs=1, max_steps=0, progress={})
    return sampler.training_requests(plan, 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_same_batches_with_and_without_workers(workers: int, device: torch.device) -> None:
    train, _ = images.load("digits", run_seed=5, flip=True)
    found = list(data.Loader(train, requests(len(train)), workers, device))
    wanted = list(requests(len(train)))
    assert len(found) == len(wanted) == 6
    assert [batch.last for batch in found] == [False, True] * 3
    assert [batch.step_samples for batch in found] == [512, 512, 512, 512, 409, 409]
    for batch, request in zip(found, wanted, strict=True):
        pixels, labels = train.read(request.epochs, request.indices)
        assert batch.inputs.device == batch.targets.device == device
        assert batch.inputs.dtype == torch.uint8
        assert torch.equal(batch.inputs.cpu(), pixels)
        assert torch.equal(batch.targets.cpu(), labels)


class SlowReader:
    """Takes 20 ms for a batch of its indices."""

    def __len__(self) -> int:
        return 1

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.02)
        return torch.from_numpy(epochs), torch.from_numpy(indices)


def endless() -> Iterator[sampler.Request]:
    for i in itertools.count():
        yield sampler.Request(np.array([i]), np.array([i + 1]), 1, True)


@pytest.mark.parametrize("workers", [0, 2])
def test_reads_no_further_ahead_than_it_must(workers: int) -> None:
    """A list of all requests of a long training would take minutes and gigabytes, and this one never ends."""
    batches = data.Loader(SlowReader(), endless(), workers, torch.device("cpu"))
    assert [int(next(batches).targets) for _ in range(3)] == [1, 2, 3]


def test_wait_is_the_time_in_next_alone() -> None:
    batches = data.Loader(SlowReader(), itertools.islice(endless(), 5), 0, torch.device("cpu"))
    assert batches.wait_s == 0
    start, computed_s, waits = time.perf_counter(), 0.0, []
    for _ in batches:
        waits.append(batches.wait_s)
        before = time.perf_counter()
        time.sleep(0.03)
        computed_s += time.perf_counter() - before
    total_s = time.perf_counter() - start
    assert all(after - before >= 0.02 for before, after in itertools.pairwise([0.0, *waits]))
    assert batches.wait_s <= total_s - computed_s


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generator_is_left_to_the_model(workers: int) -> None:
    """A run that resumes makes a new loader; what its first step draws for dropout must not depend on that."""
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    next(data.Loader(SlowReader(), endless(), workers, torch.device("cpu")))
    assert torch.equal(torch.rand(4), wanted)


def test_mutant_loader_draws_from_the_global_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    monkeypatch.setattr(torch, "Generator", lambda: None)
    next(data.Loader(SlowReader(), endless(), 0, torch.device("cpu")))
    assert not torch.equal(torch.rand(4), wanted)
