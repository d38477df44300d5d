"""When to leave, without a launcher; tests/faults/test_stop.py interrupts whole trainings."""

import os
import threading
import time

import pytest
import torch.distributed as dist

from common import stop, world
from tests import ranks


def wait_for_the_clock(slurm_s: float, deadline_s: float, due_s: float) -> None:
    dist.init_process_group("gloo")
    began = time.monotonic()
    os.environ["SLURM_JOB_END_TIME"] = str(time.time() + slurm_s)
    stopping = stop.Stop(deadline_s / 60, first_step=7)
    assert stopping._deadline == pytest.approx(began + due_s, abs=0.1)
    leaves = due_s < 60
    assert not stopping.after(8)
    while not stopping.reason and time.monotonic() < began + (10 if leaves else 2 * stop.POLL_S):
        time.sleep(0.01)
    assert stopping.reason == ("--deadline, or Slurm's time limit, on rank 0" if leaves else "")
    assert stopping.after(9) == leaves, "the first step that nobody can have passed"
    if leaves:
        assert time.monotonic() > began + due_s - 0.1, "not before the time"
    assert any(thread.name == "stop" for thread in threading.enumerate())
    world.finish()
    assert not any(thread.name == "stop" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("slurm_s", "deadline_s", "due_s"),
    [(1, 0, 0.9), (1, 3600, 0.9), (7200, 0.9, 0.9), (7200, 0, 7200 - stop.END_MARGIN_S)],
    ids=["a tenth before a short job ends", "before --deadline", "after --deadline", "both are far"],
)
def test_leaves_in_time_for_the_end_of_the_job(slurm_s: float, deadline_s: float, due_s: float) -> None:
    result = ranks.spawn(wait_for_the_clock, [(slurm_s, deadline_s, due_s)], timeout_s=30)
    assert result.ok, str(result)


def close_twice() -> None:
    dist.init_process_group("gloo")
    stopping = stop.Stop(0, 0)
    before = time.monotonic()
    stopping.close()
    assert not stopping._thread.is_alive()
    assert time.monotonic() < before + 5 * stop.POLL_S
    stopping.close()
    assert not stopping.after(1)
    dist.destroy_process_group()


def test_close_ends_the_thread() -> None:
    """A thread that still asks the store for news ends badly when the interpreter shuts down."""
    result = ranks.spawn(close_twice, [()], timeout_s=30)
    assert result.ok, str(result)
