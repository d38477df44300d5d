"""When to leave, without a launcher; tests/faults/test_stop.py interrupts whole trainings."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from common import ranks
from common.run import process_group, stop
from common.run.process import Process

from tests.harness import fake_ranks, runner
from tests.harness.clock import Clock


def wait_for_the_clock(slurm_s: float, deadline_s: float, due_s: float) -> None:
    world = process_group.start()
    stop.time = clock = Clock()  # type: ignore[assignment]
    os.environ["SLURM_JOB_END_TIME"] = str(clock.time() + slurm_s)
    stopping = stop.Stop(world, deadline_s / 60, first_step=7, last_step=10_000)
    assert stopping._deadline == pytest.approx(clock.now + due_s)
    assert not stopping.after(8)
    clock.now += due_s - 0.01
    looks = clock.looks
    runner.wait_for(lambda: clock.looks >= looks + 2)
    assert not stopping.reason, "not before the time"
    assert not stopping.after(8)
    clock.now += 0.02
    runner.wait_for(lambda: stopping.reason)
    assert stopping.reason == "--deadline, or Slurm's time limit, on rank 0"
    assert stopping.after(9), "the first step that nobody can have passed"
    assert any(thread.name == "stop" for thread in threading.enumerate())
    process_group.finish(world.process)
    assert not any(thread.name == "stop" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("slurm_s", "deadline_s", "due_s"),
    [(1, 0, 0.9), (1, 3600, 0.9), (7200, 0.9, 0.9), (7200, 0, 7200 - stop.END_MARGIN_S)],
    ids=["a tenth before a short job ends", "before --deadline", "after --deadline", "both are far"],
)
def test_leaves_in_time_for_the_end_of_the_job(slurm_s: float, deadline_s: float, due_s: float) -> None:
    result = runner.spawn(wait_for_the_clock, [(slurm_s, deadline_s, due_s)])
    assert result.ok, str(result)


def stop_in_the_last_save() -> None:
    stopping = stop.Stop(process_group.start(), 0, first_step=0, last_step=8)
    assert not stopping.after(8)
    os.kill(os.getpid(), signal.SIGTERM)
    runner.wait_for(lambda: stopping.reason)
    assert stopping.after(8), "and there is no step 9 to wait for"


def test_signal_after_the_last_step() -> None:
    result = runner.spawn(stop_in_the_last_save, [()])
    assert result.ok, str(result)
    assert "SIGTERM on rank 0: saving and stopping after step 8;" in result.outputs[0]


def hear_late(saved: str) -> None:
    """Rank 0 is told at once, rank 1 when its machine's turn comes, and both are still saving."""
    world = process_group.start()
    stop.time = clock = Clock()  # type: ignore[assignment]
    stopping = stop.Stop(world, 0, 0, 10_000)
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    step = 1
    while not stopping.after(step):
        step += 1
        time.sleep(0.1)
    clock.now += stop.SAME_SIGNAL_S + 1
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    runner.wait_for(lambda: stopping._signalled_at < float("inf"), "no rank has heard its signal")
    Path(f"{saved}-{world.rank}").touch()
    process_group.finish(world.process)


def test_first_signal_of_a_rank_is_not_its_second(tmp_path: Path) -> None:
    """The machines of a job are drained some seconds apart: what is being saved is not thrown away."""
    result = runner.spawn(hear_late, [(str(tmp_path / "saved"),)] * 2)
    assert result.ok, str(result)
    assert len(list(tmp_path.iterdir())) == 2


def lose_the_launcher(when: str) -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "x", "LAUNCHER_PID": str(os.getppid())}
    if when == "before the start":
        os.environ["LAUNCHER_PID"] = "2"  # which is nobody's parent here
    world = process_group.start()
    assert "LAUNCHER_PID" not in os.environ, "nothing that this rank starts is the launcher's"
    stopping = stop.Stop(world, 0, first_step=4, last_step=10_000)
    if when == "after a step":
        assert not stopping.after(5)
    os.getppid = lambda: 1
    runner.wait_for(lambda: stopping.reason)
    assert stopping.after(6)
    stopping._closing.set()
    stopping._thread.join(runner.HANG_S)  # it says why only once all ranks may stop


@pytest.mark.parametrize("when", ["before the start", "in the first step", "after a step"])
def test_launcher_dies(when: str) -> None:
    """A rank that has nothing to save does not wait for the end of its first step, which may compile for minutes."""
    result = runner.spawn(lose_the_launcher, [(when,)])
    assert result.codes == [0 if when == "after a step" else 1], str(result)
    told = "has died, on rank 0"
    told += ": saving and stopping after step 6\n" if when == "after a step" else ", before its first step: it exits\n"
    assert told in result.outputs[0]


def lose_the_launcher_late() -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "x", "LAUNCHER_PID": str(os.getppid())}
    world = process_group.start()
    stop.Stop(world, 0, first_step=0, last_step=10_000)
    looks_s = time.monotonic() + (0 if world.rank else 2 * stop.POLL_S)
    while True:
        dist.barrier()  # fails once the other rank is gone
        if time.monotonic() > looks_s:
            os.getppid = lambda: 1


def test_rank_0_says_it_though_it_looks_last() -> None:
    """It waits in a collective for a rank that has seen before it that the launcher is gone."""
    result = runner.spawn(lose_the_launcher_late, [()] * 2)
    assert 0 not in result.codes, str(result)
    assert "before its first step: it exits\n" in result.outputs[0], str(result)


def close_twice() -> None:
    world = process_group.start()
    stopping = stop.Stop(world, 0, 0, 10_000)
    join, waited = stopping._thread.join, []

    def join_to_the_end(timeout: float | None = None) -> None:
        waited.append(timeout)
        join(runner.HANG_S)  # on a machine that is busy, the thread may need longer than `close` waits

    stopping._thread.join = join_to_the_end  # type: ignore[method-assign]
    stopping.close()
    assert waited == [5 * stop.POLL_S], "it waits for the thread, and not for ever"
    assert not stopping._thread.is_alive()
    stopping.close()
    assert not stopping.after(1)
    process_group.finish(world.process)


def test_close_ends_the_thread() -> None:
    """A thread that still asks the store for news ends badly when the interpreter shuts down."""
    result = runner.spawn(close_twice, [()])
    assert result.ok, str(result)


def agree_with_the_dead() -> None:
    """Rank 1 never answers; rank 0 stops waiting for it once somebody has been blamed."""
    world = process_group.start()
    stopping = stop.Stop(world, 0, 0, 10_000)
    if world.rank == 1:
        stopping.close()
    ranks.gather("closed")
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        runner.wait_for(lambda: stopping.reason)
        time.sleep(2 * stop.POLL_S)
        stopping._closing.set()
        stopping._thread.join(2 * stop.POLL_S)
        assert stopping._thread.is_alive(), "it waits for rank 1's answer"
        world.store.set(process_group.FINDING, "rank 1 is dead")
        stopping._thread.join(runner.HANG_S)
        assert not stopping._thread.is_alive()
    ranks.gather("done")
    os._exit(0)


def test_a_dead_rank_is_not_waited_for() -> None:
    result = runner.spawn(agree_with_the_dead, [()] * 2)
    assert result.ok, str(result)


def go_back(signalled: bool, again: bool) -> None:
    """A run that goes back and begins again in its process, with the same store."""
    here = Process()
    first = stop.Stop(process_group.start(process=here), 60, 0, 10_000)
    if signalled:
        os.kill(os.getpid(), signal.SIGTERM)
        runner.wait_for(lambda: first.reason)
    process_group.finish(here, begins_again=True)
    second = stop.Stop(process_group.start(process=here), 60, 4, 10_000)
    assert second._deadline == first._deadline, "which is not so many minutes from now"
    if signalled:
        runner.wait_for(lambda: second.reason)
    time.sleep(0 if signalled else 2 * stop.POLL_S)
    assert second.reason == first.reason == ("SIGTERM on rank 0" if signalled else "")
    assert second.after(5) == signalled, "the first step that nobody can have passed"
    if again:
        time.sleep(max(first._signalled_at + stop.SAME_SIGNAL_S + 0.2 - time.monotonic(), 0) if signalled else 0)
        os.kill(os.getpid(), signal.SIGTERM)
        while not second.reason or signalled:
            time.sleep(0.01)
        assert second.after(6)
    process_group.finish(here)


@pytest.mark.parametrize(
    ("signalled", "again", "code"),
    [(False, False, 0), (False, True, 0), (True, False, 0), (True, True, 128 + signal.SIGTERM)],
    ids=["none", "after", "before", "both"],
)
def test_request_outlives_a_rewind(signalled: bool, again: bool, code: int) -> None:
    """What came before is not forgotten, and counts as the first of two that end the process at once."""
    result = runner.spawn(go_back, [(signalled, again)])
    assert result.codes == [code], str(result)


@pytest.mark.parametrize("at_once", [512, 1], ids=["", "mutant: one by one"])
def test_reads_of_a_rank_do_not_grow_with_their_number(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that ends in 30 s has no time for a million questions to one store."""
    monkeypatch.setattr(stop, "AT_ONCE", at_once)
    most = {}
    for size in (8, 24):
        found, _ = fake_ranks.agree(size)
        assert {one._target for one in found} == {107}, "the first step that no rank can have passed"
        assert all(one._agreed.is_set() for one in found)
        assert [one.counted.values for one in found] == [size, *[1] * (size - 1)]
        most[size] = max(one.counted.requests["multi_get"] for one in found)
    assert (most[24] == most[8] == 1) == (at_once == 512)


def test_number_of_ranks_sets_the_pace() -> None:
    """The store of 16,384 ranks answers no more questions a second than that of 2,000."""
    assert stop.poll_s(16) == stop.POLL_S
    assert 16_384 / stop.poll_s(16_384) == pytest.approx(2_000 / stop.POLL_S)
