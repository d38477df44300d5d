"""Batches come out as they were requested, whoever reads them, and waiting for them is counted."""

import collections
import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from common import UserError, seed
from common.train import data, sampler
from common.workloads import images

from tests.harness.runner import ROOT

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


@pytest.mark.parametrize("computes", [True, False])
def test_wait_counts_when_a_gpu_has_nothing_to_do(computes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process runs ahead of its GPU, so it may wait for data though the GPU does not. (Mocked: no GPU is here.)"""
    batches = data.Loader(SlowReader(), itertools.islice(endless(), 3), 0, torch.device("cpu"))
    stream = types.SimpleNamespace(query=lambda: not computes)  # whether all that was asked for is done
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    waited = data._Waited()
    assert len(list(data._timed(batches, torch.device("cuda", 0), waited))) == 3
    assert waited.s == 0 if computes else waited.s >= 3 * 0.02


def knowing(loader: data.Loader, batches: Iterator[data.Batch]) -> Iterator[data.Batch]:
    for batch in batches:
        assert loader
        yield batch


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant: a generator that knows its loader"])
def test_workers_end_with_their_loader(mutant: bool) -> None:
    """Not when the garbage collector next runs: at exit it does not, and Python waits for the workers for ever."""
    before = set(multiprocessing.active_children())  # another test's, which this process of tests has not ended yet
    batches = data.Loader(SlowReader(), endless(), 1, torch.device("cpu"))
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 1
    if mutant:
        batches._batches = knowing(batches, batches._batches)
    freed = weakref.ref(batches)
    gc.disable()
    try:
        del batches
        assert (freed() is None) != mutant
        assert all(worker.is_alive() == mutant for worker in workers)
    finally:
        gc.enable()
        gc.collect()


class PidReader:
    """Gives the process that has read each sample."""

    def __len__(self) -> int:
        return 12

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full(indices.shape, os.getpid()), torch.from_numpy(indices)


class PidReaderWithSlots:
    """Nothing can tell when it ends."""

    __slots__ = ()
    __len__ = PidReader.__len__
    read = PidReader.read


def evaluation(reader: PidReader, workers: int = 2) -> set[int]:
    """Read each sample once; returns the processes that did."""
    found = [*data.Loader(reader, requests(len(reader)), workers, torch.device("cpu"))]
    assert torch.cat([batch.targets for batch in found]).tolist() == [
        *itertools.chain(*(request.indices for request in requests(len(reader))))
    ]
    return set(torch.cat([batch.inputs for batch in found]).tolist())


def running(pid: int) -> bool:
    return any(child.pid == pid for child in multiprocessing.active_children())


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant: workers for each evaluation"])
def test_evaluations_share_their_workers(mutant: bool) -> None:
    """Which end with their reader, and are not mixed up with another's or with those of another number."""
    reader, other = PidReader(), PidReader()
    first = evaluation(reader)
    assert os.getpid() not in first
    if mutant:
        data._idle.clear()
    assert (evaluation(reader) == first) != mutant
    assert not evaluation(other) & first
    assert not evaluation(reader, workers=1) & first
    assert evaluation(reader, workers=0) == {os.getpid()}
    again = evaluation(reader)
    assert all(map(running, again))
    gc.disable()
    try:
        del reader
        assert not any(map(running, again))
    finally:
        gc.enable()


def test_loaders_of_one_reader_at_once() -> None:
    """Workers that still read are nobody else's, and those of a loader that is given up end with it."""
    reader = PidReader()
    forever = (one for _ in itertools.count() for one in requests(len(reader)))
    one = data.Loader(reader, forever, 1, torch.device("cpu"))
    busy = set(next(one).inputs.tolist())
    assert not evaluation(reader, workers=1) & busy
    assert set(next(one).inputs.tolist()) == busy
    del one
    assert not any(map(running, busy))
    assert not evaluation(reader, workers=1) & busy


def test_workers_of_a_reader_with_slots_end_with_their_loader() -> None:
    reader: Any = PidReaderWithSlots()
    first = evaluation(reader)
    assert not any(map(running, first))
    assert not evaluation(reader) & first


def test_killed_worker_is_named_by_the_next_evaluation() -> None:
    reader = PidReader()
    killed = evaluation(reader, workers=1).pop()
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid(\(s\))? {killed}\)"):  # noqa: PT012
        os.kill(killed, signal.SIGKILL)  # of which Python may tell at once
        evaluation(reader, workers=1)
    assert killed not in evaluation(reader, workers=1)


def test_idle_workers_do_not_keep_python_from_its_end() -> None:
    """Of a reader that lives as long as Python does."""
    script = "from tests import test_data\nreader = test_data.PidReader()\nprint(*test_data.evaluation(reader))"
    ended = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not any(Path(f"/proc/{pid}").exists() for pid in ended.stdout.split())


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
    next(data.Loader(SlowReader(), endless(), 1, torch.device("cpu")))
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


def test_set_without_samples_or_length() -> None:
    with pytest.raises(UserError, match=r"data\.MapStyle got a TensorDataset without samples: check where make_data"):
        data.MapStyle(torch.utils.data.TensorDataset(torch.zeros(0, 3)), 0)
    with pytest.raises(UserError, match=r"data\.MapStyle got a Stream without a length: use data.IterableStyle"):
        data.MapStyle(Stream(), 0)


# --- a stream ---


class Stream(torch.utils.data.IterableDataset):
    """Eleven numbers, in an order that each epoch draws, with a drawn number each; some are filtered out."""

    size = 12

    def __iter__(self) -> Iterator[dict[str, float]]:
        for number in torch.randperm(self.size).tolist():
            draw = random.random()
            if number != 5:
                yield {"number": number, "draw": draw}


def add_draw(sample: dict[str, float]) -> dict[str, Any]:
    sample["changed"] = sample.pop("draw") + np.random.rand()  # in place: it must not come twice
    return sample


def stream_of(dp_size: int, first_step: int = 0, run_seed: int = 5, steps: int = 6) -> list[tuple[int, float]]:
    """The samples of steps of six, in their order, over all ranks, which read like recipes before they train."""
    progress = {"step": first_step, "samples": 6 * first_step} if first_step else {}
    division = sampler.Division(6, 6, dp_size)
    plan = sampler.make_plan(division, 0, run_seed=run_seed, epochs=1, max_steps=steps, progress=progress)
    per_rank = []
    for rank in range(dp_size):
        reader = data.IterableStyle(Stream(), run_seed, add_draw)
        assert len(reader) == 0
        reader.digest()
        for twin in data.twins(reader, plan, DEVICES[0]):
            assert len({*next(twin).inputs["number"].tolist()}) == 1
        per_rank.append([*data.Loader(reader, sampler.training_requests(plan, rank), 0, DEVICES[0])])
    return [
        sample
        for parts in zip(*per_rank, strict=True)
        for batch in parts
        for sample in zip(batch.inputs["number"].tolist(), batch.inputs["changed"].tolist(), strict=True)
    ]


def test_stream_is_the_same_on_any_number_of_ranks_and_after_a_resume() -> None:
    torch.manual_seed(1)
    wanted = stream_of(1)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == after, "the process's own generators are not touched"
    assert stream_of(2) == stream_of(3) == wanted
    assert stream_of(4) == wanted, "parts of unequal size"
    for step in (1, 2, 5):
        assert stream_of(2, first_step=step) == wanted[6 * step :]
    assert stream_of(1, run_seed=6) != wanted
    epochs = [[number for number, _ in wanted[start : start + 11]] for start in (0, 11, 22)]
    assert [sorted(epoch) for epoch in epochs] == 3 * [[i for i in range(12) if i != 5]]
    assert epochs[0] != epochs[1] != epochs[2]


def test_mutant_stream_without_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = stream_of(1)
    monkeypatch.setattr(seed, "for_sample", lambda *_: None)
    assert stream_of(1) != wanted


def test_stream_of_datasets_shuffles_each_epoch_anew() -> None:
    """Through set_epoch: its own buffer and generator, not those that are seeded by position."""
    import datasets

    stream = datasets.Dataset.from_dict({"x": [*range(20)]}).to_iterable_dataset().shuffle(seed=1, buffer_size=8)
    reader = data.IterableStyle(stream, 0)
    found = [reader.read(np.zeros(20, int), np.arange(start, start + 20))[0]["x"].tolist() for start in (0, 20, 0, 20)]
    assert sorted(found[0]) == sorted(found[1]) == [*range(20)]
    assert found[0] == found[2] != found[1] == found[3]


def test_empty_part_of_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    reader = data.IterableStyle(Stream(), 0)
    reader.read(np.zeros(3, int), np.arange(4, 7))
    inputs, targets = reader.read(np.zeros(0, int), np.zeros(0, int))
    assert inputs["number"].shape == (0,)
    assert targets is None
    reader.read(np.zeros(1, int), np.array([20_000]))
    out = capsys.readouterr().out
    assert out.count("data     the stream has ended after 11 samples, and begins again") == 1
    assert "data     reading 19,993 samples of the stream to skip them" in out


def test_what_no_stream_can_be() -> None:
    with pytest.raises(UserError, match=r"data\.IterableStyle got a generator, which can be read only once"):
        data.IterableStyle((i for i in range(9)), 0)
    with pytest.raises(UserError, match=r"data\.IterableStyle got a list without samples"):
        data.IterableStyle([], 0)
    reader = data.IterableStyle(Stream(), 0)
    with pytest.raises(UserError, match="--workers 2: a stream is read in its order, by the rank itself: use --wor"):
        data.Loader(reader, [], 2, DEVICES[0])
    division = sampler.Division(6, 6, 1)
    with pytest.raises(UserError, match="nobody knows how long a stream is: set --max-steps"):
        sampler.make_plan(division, len(reader), run_seed=0, epochs=2, max_steps=0, progress={})
    plan = sampler.make_plan(division, len(reader), run_seed=0, epochs=2, max_steps=3, progress={})
    with pytest.raises(UserError, match="make_data gives a stream to validate on, which may never end"):
        next(sampler.evaluation_requests(plan, len(reader), 0))
    assert str(plan).endswith("x 6 samples)")


def test_set_smaller_than_a_step() -> None:
    plan = sampler.make_plan(sampler.Division(6, 6, 1), 5, run_seed=0, epochs=6, max_steps=0, progress={})
    assert str(plan).endswith("; 5 training samples, fewer than a step reads: it reads some of them several times")
