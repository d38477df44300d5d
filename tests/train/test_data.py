"""Batches come out as they were requested, whoever reads them, and waiting for them is counted."""

import collections
import contextlib
import gc
import itertools
import multiprocessing
import os
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
from common.train import data, sampler
from common.workloads import images

from tests.harness import runner
from tests.harness.clock import Clock
from tests.harness.runner import ROOT

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]


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


def test_step_has_all_of_its_micro_batches() -> None:
    train, _ = images.load("digits", run_seed=5, flip=True)
    loader = data.Loader(train, requests(len(train)), 0, torch.device("cpu"))
    wanted = [request.indices.size for request in requests(len(train))]
    found = [[len(batch.targets) for batch in loader.step()] for _ in range(3)]
    assert found == [wanted[:2], wanted[2:4], wanted[4:]]
    assert [*loader.step()] == []


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


def test_wait_is_the_time_in_next_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(data, "time", clock)
    monkeypatch.setattr(sys.modules[__name__], "time", clock)  # the reader's
    batches = data.Loader(SlowReader(), itertools.islice(endless(), 5), 0, torch.device("cpu"))
    assert batches.wait_s == 0
    waits = []
    for _ in batches:
        waits.append(batches.wait_s)
        clock.sleep(0.03)  # computes
    assert waits == pytest.approx([0.02 * number for number in range(1, 6)])
    assert batches.wait_s == waits[-1]


@pytest.mark.parametrize("computes", [True, False])
def test_wait_counts_when_a_gpu_has_nothing_to_do(computes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process runs ahead of its GPU, so it may wait for data though the GPU does not. (Mocked: no GPU is here.)"""
    batches = data.Loader(SlowReader(), itertools.islice(endless(), 3), 0, torch.device("cpu"))
    stream = types.SimpleNamespace(query=lambda: not computes)  # whether all that was asked for is done
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    batches._device = torch.device("cuda", 0)
    assert len([*batches]) == 3
    assert batches.wait_s == 0 if computes else batches.wait_s >= 3 * 0.02


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
    script = "from tests.train import test_data\nreader = test_data.PidReader()\nprint(*test_data.evaluation(reader))"
    ended = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=ROOT, capture_output=True, text=True, timeout=runner.HANG_S
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


# --- trees of tensors ---


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


def test_set_smaller_than_a_step() -> None:
    plan = sampler.make_plan(sampler.Division(6, 6, 1), 5, run_seed=0, epochs=6, max_steps=0, progress={})
    assert str(plan).endswith("; 5 training samples, fewer than a step reads: it reads some of them several times")


class Unpicklable:
    """A set that only a forked worker can read."""

    sample_units: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.values = lambda index: torch.tensor([index])

    def __len__(self) -> int:
        return 4

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values(int(indices[0])), torch.zeros(1)

    digest = metrics = None


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant: Python's own choice"])
def test_workers_share_the_memory_of_the_set(mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forked, also where Python 3.14 would start them otherwise, and pickle the whole set for each of them."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)  # as from 3.14 on
    real = data.DataLoader
    if mutant:
        monkeypatch.setattr(
            data, "DataLoader", lambda *args, **kw: real(*args, **kw | {"multiprocessing_context": None})
        )
    try:
        index = np.arange(1)
        batches = data.Loader(Unpicklable(), [sampler.Request(index, index + 3, 1, True)], 1, torch.device("cpu"))
        with pytest.raises((AttributeError, UserWarning), match="pickle") if mutant else contextlib.nullcontext():
            assert next(batches).inputs.item() == 3
    finally:
        multiprocessing.set_start_method(before, force=True)
