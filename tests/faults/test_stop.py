"""Asked to leave, a run finishes its step on all ranks, saves, exits with 0, and goes on later as if undisturbed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from common import stop

from tests.harness import runner
from tests.harness.fault_case import STEPS, Cell, checkpoints, same_tensors, wait_for
from tests.harness.inject import EPOCH_STEPS


def check_left(cell: Cell, output: str, reason: str) -> int:
    """All ranks left after one step, which is saved and the last one that was done."""
    marker = json.loads((cell.run / "stopped.json").read_text())
    assert marker["reason"].startswith(reason)
    assert max(checkpoints(cell.run)) == marker["step"] == max(runner.records(cell.run, "train/loss"))
    cell.say(output, f"stopped  checkpoint saved .{reason}")
    return marker["step"]


def leave_and_go_on(cell: Cell, fault: tuple, *flags: str, reason: str = "SIGTERM") -> int:
    """0 steps are lost; returns after which step the run had left."""
    result = cell.start(*flags, faults=[fault])
    assert result.ok, str(result)
    left_after = check_left(cell, result.outputs[0], reason)
    left = [event["time"] for event in cell.events if event["event"] == "left"]
    cell.notice_s = max(left) - cell.fault_time()
    cell.resume(*flags, exact=False)
    assert not (cell.run / "stopped.json").exists()
    assert cell.steps_lost == 0
    return left_after


@pytest.mark.fault("stop: SIGTERM to one rank", core=True)
def test_clean_stop(cell: Cell) -> None:
    assert leave_and_go_on(cell, ("end of a step", "signal", -1, 2, "SIGTERM", 0.5)) in (2, 3)
    cell.check_exact()


@pytest.mark.fault("stop: twice inside an epoch, and at its edge")
def test_stop_after(cell: Cell) -> None:
    assert EPOCH_STEPS == 3
    for step in (1, 2, 3):
        assert cell.start("--stop-after", str(step)).ok
        assert max(checkpoints(cell.run)) == step
    result = cell.resume(exact=False)
    cell.say(result.outputs[0], "resuming from step 3 of")
    whole = cell.whole()
    for tag in ("train/loss", "train/grad_norm"):  # each part was evaluated at its end
        assert runner.records(cell.run, tag) == runner.records(whole, tag)
    assert same_tensors(checkpoints(cell.run)[STEPS], checkpoints(whole)[STEPS])


@pytest.mark.fault("stop: mutant, the position saved is that of the step before")
def test_mutant_shifted_position(cell: Cell) -> None:
    cell.needs("--data")  # else nothing depends on the position
    assert cell.start("--stop-after", "2", mutant="the position is that of the step before").ok
    with pytest.raises(AssertionError):
        cell.resume()
    losses, wanted = (runner.records(run, "train/loss") for run in (cell.run, cell.whole()))
    assert losses[2] == wanted[2]
    assert losses[3] != wanted[3]
    cell.message = f"losses of step 3: {losses[3]:.4f} and {wanted[3]:.4f}"


@pytest.mark.fault("stop: {name} to one rank")
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT"])
def test_other_signals(name: str, cell: Cell) -> None:
    result = cell.start(faults=[("end of a step", "signal", -1, 2, name, 0.5)])
    assert result.ok, str(result)
    assert check_left(cell, result.outputs[0], name) in (2, 3)
    cell.steps_lost = 0


@pytest.mark.fault("stop: SIGTERM with 2 loader workers")
def test_loader_workers(cell: Cell) -> None:
    """The signal hits them too, as torchrun sends it to whole process groups."""
    cell.needs("--workers")
    flags = ("--workers", "2")
    assert leave_and_go_on(cell, ("end of a step", "signal the process group", -1, 2, "SIGTERM"), *flags) < STEPS
    cell.check_exact()


@pytest.mark.fault("stop: SIGTERM {point}")
@pytest.mark.parametrize("point", ["before the first step", pytest.param("at the start", marks=pytest.mark.rest)])
def test_before_the_first_step(point: str, cell: Cell) -> None:
    """Also before the ranks have joined each other: it is kept until they listen."""
    assert leave_and_go_on(cell, (point, "signal", -1, 0, "SIGTERM", 0.5)) <= 2
    cell.check_exact()


@pytest.mark.fault("stop: SIGTERM in an evaluation")
def test_in_evaluation(cell: Cell) -> None:
    flags = ("--eval-every", "2")
    fault = ("evaluation", "signal", -1, 2, "SIGTERM", 0.5)
    assert leave_and_go_on(cell, fault, *flags) == 3, "the step after the evaluation is still done"
    whole = cell.whole()
    for tag in ("train/loss", "train/grad_norm"):
        assert runner.records(cell.run, tag) == runner.records(whole, tag)
    assert same_tensors(checkpoints(cell.run)[STEPS], checkpoints(whole)[STEPS])


@pytest.mark.fault("stop: SIGTERM in a save, {how}")
@pytest.mark.parametrize("how", ["synchronous", "asynchronous"])
def test_in_a_save(how: str, cell: Cell) -> None:
    flags = ("--async-save",) if how == "asynchronous" else ()
    assert leave_and_go_on(cell, ("before the digests", "signal", 0, 2, "SIGTERM", 0.5), *flags) < STEPS
    cell.check_exact()


@pytest.mark.fault("stop: --deadline")
def test_deadline(cell: Cell) -> None:
    """A tenth of a second, and the first step takes half of one."""
    result = cell.start("--deadline", "0.002", faults=[("end of a step", "sleep a little", -1, 1)])
    assert result.ok, str(result)
    assert check_left(cell, result.outputs[0], "--deadline") < STEPS
    cell.resume()
    assert cell.steps_lost == 0


@pytest.mark.fault("stop: a second SIGTERM quits at once")
def test_second_signal_quits_at_once(cell: Cell) -> None:
    again = stop.SAME_SIGNAL_S + 0.5
    points = [("before the data", "signal", 0, 2, "SIGTERM", again), ("before the data", "signal", 0, 2, "SIGTERM", 20)]
    began = time.monotonic()
    result = cell.start(faults=points)
    assert result.codes[0] == 128 + signal.SIGTERM, str(result)
    assert time.monotonic() - began < 15
    cell.say(result.outputs[0], "send it again to quit now without saving")
    cell.resume()


@pytest.mark.rest
@pytest.mark.fault("stop: SIGUSR1 to the launcher, with 2 loader workers")
def test_launcher(cell: Cell) -> None:
    """The real thing: torchrun signals its whole process group, loader workers included."""
    cell.needs("--workers")
    told = cell.folder / "told"

    def meanwhile(process: subprocess.Popen[str], events: Path) -> None:
        wait_for(lambda: events.exists() and '"fault"' in events.read_text())
        process.send_signal(signal.SIGUSR1)
        time.sleep(2 * stop.POLL_S)
        told.touch()

    fault = ("end of a step", "wait for", 0, 2, str(told))
    code, out = cell.launch("--workers", "2", faults=[fault], meanwhile=meanwhile)
    assert code == 128 + signal.SIGUSR1, out
    assert "Traceback" not in out
    assert check_left(cell, out, "SIGUSR1") < STEPS
    cell.resume()
    assert cell.steps_lost == 0


# --- parts of it ------------------------------------------------------------------------------------------


def outlive_a_child() -> None:
    dist.init_process_group("gloo")
    signal.signal(signal.SIGCHLD, lambda *_: None)  # as DataLoader does
    stop.SAME_SIGNAL_S = 0.3
    stopping = stop.Stop(0, 0)
    assert not stopping.after(0)
    subprocess.run(["true"], check=True)
    time.sleep(3 * stop.POLL_S)
    assert not stopping.after(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(stop.SAME_SIGNAL_S + 2 * stop.POLL_S)
    subprocess.run(["true"], check=True)
    time.sleep(3 * stop.POLL_S)
    assert stopping.after(2)


def test_end_of_a_loader_worker_is_no_request() -> None:
    result = runner.spawn(outlive_a_child, [()], timeout_s=30.0)
    assert result.ok, str(result)


def leave_at_own_pace(pace_s: float, folder: str, agree: bool) -> None:
    """Steps without collectives, so that ranks are far apart when one of them is told."""
    dist.init_process_group("gloo")
    stopping = stop.Stop(0, 0)
    if not agree:  # a mutant: every rank leaves after its own next step
        stop.max = lambda _: stopping._done
    step, rank = 0, dist.get_rank()
    while not stopping.after(step):
        step += 1
        time.sleep(pace_s)
        if rank == 1 and step == 30:
            os.kill(os.getpid(), signal.SIGTERM)
    Path(folder, str(rank)).write_text(str(step))
    time.sleep(0.5)  # rank 0 holds the store


@pytest.mark.parametrize("agree", [True, False], ids=["all leave after one step", "mutant without agreement"])
def test_ranks_far_apart(agree: bool, tmp_path: Path) -> None:
    result = runner.spawn(leave_at_own_pace, [(0.02, str(tmp_path), agree), (0.008, str(tmp_path), agree)], 30.0)
    assert result.ok, str(result)
    left = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert (left[0] == left[1]) == agree, left
    assert left[1] >= 30
