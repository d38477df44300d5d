"""Which rank works longest: what counts as work, and from when a difference is worth a line."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from common.measure import pace

from tests.harness import runner

CPU = torch.device("cpu")


def spin(seconds: float) -> None:
    """Work by the clock, with or without a processor."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def share_of_work(folder: str) -> None:
    """Two of these share one processor, once both are there: each works all the time, and has half of it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    Path(folder, os.environ["RANK"]).touch()
    runner.wait_for(lambda: len(os.listdir(folder)) == 2)
    one = pace.Pace(CPU, "this rank")
    began = time.thread_time()
    one.begin()
    spin(1.0)
    one.end()
    print(one.worked_s / one.took_s, (time.thread_time() - began) / one.took_s)


def test_waiting_for_a_processor_is_work(tmp_path: Path) -> None:
    result = runner.spawn(share_of_work, [(str(tmp_path),)] * 2)
    assert result.ok, str(result)
    for output in result.outputs:
        worked, had = map(float, output.split())
        assert worked > 0.85
        assert had < 0.8, "else they were not beside each other, and this shows nothing"


def test_waiting_for_a_thread_is_no_work() -> None:
    """Beside what that thread works itself, by its own count of processor time."""
    other: list[float] = []

    def work() -> None:
        while time.thread_time() < 0.5:
            sum(range(1000))
        other.append(time.thread_time())

    one, thread = pace.Pace(CPU, "this rank"), threading.Thread(target=work)
    one.begin()
    thread.start()
    thread.join()
    one.end()
    assert one.took_s >= other[0], "the clock passes meanwhile"
    assert one.worked_s < other[0] / 2


def test_a_gpu_is_not_looked_at() -> None:
    one = pace.Pace(torch.device("cuda"), "this rank")
    one.begin()
    spin(0.01)
    one.end()
    assert one.worked_s == 0


@pytest.mark.parametrize(
    ("worked", "wanted"),
    [
        ([8.0, 8.2, 9.9, 8.1], (2, 0.18)),  # of ten parts of the time, the others wait for 1.8
        ([8.0, 8.5, 8.9, 8.2], (2, 0.0)),  # little
        ([5.0, 9.0], (1, 0.4)),
        ([9.0], (0, 0.0)),  # alone
        ([0.0, 0.0], (0, 0.0)),  # GPUs
    ],
    ids=str,
)
def test_slow_rank(worked: list[float], wanted: tuple[int, float]) -> None:
    rank, share = pace.slow_rank([(10 * one, 100.0) for one in worked])
    assert (rank, share) == (wanted[0], pytest.approx(wanted[1]))
    assert pace.slow_rank([(one, 10.0) for one in worked])[1] == 0, "a few seconds show nothing"


def test_no_time() -> None:
    """A run that is resumed at its end has no step."""
    assert pace.slow_rank([(0.0, 0.0), (0.0, 0.0)]) == (0, 0.0)
