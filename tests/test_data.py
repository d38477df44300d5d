"""Batches come out as they were requested, whoever reads them, and waiting for them is counted."""

import collections
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

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


# --- an adopter's own data set ---


class Pair(NamedTuple):
    """A batch of one's own."""

    image: torch.Tensor
    boxes: list[torch.Tensor]


def test_trees_of_tensors() -> None:
    tree = {"a": torch.ones(2), "b": [Pair(torch.zeros(1), [torch.ones(1), torch.ones(3)]), "text", None, 3]}
    found = data.map_tensors(lambda tensor: tensor + 1, tree)
    assert found["a"].tolist() == [2, 2]
    assert isinstance(found["b"][0], Pair)
    assert [len(boxes) for boxes in found["b"][0].boxes] == [1, 3]
    assert found["b"][1:] == ["text", None, 3]
    assert data.map_tensors(lambda tensor: tensor + 1, collections.defaultdict(list, a=torch.zeros(1)))["a"] == 1
    assert type(data.map_tensors(lambda tensor: tensor, collections.OrderedDict(a=1))) is collections.OrderedDict


class Noisy(torch.utils.data.Dataset):
    """Draws from each of the generators that transforms draw from."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = torch.cat([torch.rand(2), torch.tensor([random.random(), np.random.rand()])])
        return {"index": index, "draws": draws, "mask": torch.arange(3) < index}


def batches_of(workers: int, first_step: int = 0, dp_size: int = 1, run_seed: int = 5) -> list[tuple[int, Any]]:
    """Index and draws of each sample in the order of the steps, over all ranks."""
    reader = data.MapStyle(Noisy(), run_seed)
    progress = {"step": first_step, "samples": 6 * first_step} if first_step else {}
    division = sampler.Division(6, 6, dp_size)
    plan = sampler.make_plan(division, len(reader), run_seed=run_seed, epochs=2, max_steps=0, progress=progress)
    found = []
    per_rank = [
        [*data.Loader(reader, sampler.training_requests(plan, rank), workers, DEVICES[0])] for rank in range(dp_size)
    ]
    for parts in zip(*per_rank, strict=True):
        for batch in parts:
            assert batch.targets is None
            assert batch.inputs["mask"].shape == (len(batch.inputs["index"]), 3)
            found += zip(batch.inputs["index"].tolist(), batch.inputs["draws"].tolist(), strict=True)
    return found


def test_random_transforms_are_the_same_everywhere() -> None:
    """In workers, on other ranks, after a resume; and the process's own generators are not touched."""
    torch.manual_seed(1)
    wanted = batches_of(0)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == after
    assert batches_of(2) == wanted
    assert batches_of(0, first_step=3) == wanted[18:]
    assert batches_of(0, dp_size=2) == wanted
    assert batches_of(0, run_seed=6) != wanted
    first, second = (dict(wanted[:23]), dict(wanted[23:]))
    assert first.keys() == second.keys() == {*range(23)}
    assert all(first[index] != second[index] for index in first), "another epoch draws others"


def test_empty_part_has_no_rows() -> None:
    nothing = np.zeros(0, int)
    inputs, targets = data.MapStyle(Noisy(), 0).read(nothing, nothing)
    assert inputs["draws"].shape == (0, 4)
    assert targets is None


def test_pairs_are_inputs_and_targets_and_digests_differ() -> None:
    pairs = [torch.utils.data.TensorDataset(torch.arange(8.0) + more, torch.arange(8)) for more in (0, 0, 1)]
    readers = [data.MapStyle(one, 0) for one in pairs]
    inputs, targets = readers[0].read(np.zeros(2, int), np.array([3, 5]))
    assert (inputs.tolist(), targets.tolist()) == ([3, 5], [3, 5])
    digests = [reader.digest() for reader in readers]
    assert digests[0] == digests[1] != digests[2]
