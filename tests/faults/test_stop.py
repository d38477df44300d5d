"""Asked to stop, a run finishes its step on all ranks, saves, exits with 0, and continues later as if undisturbed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from common.run import process_group, stop

from tests.harness import runner
from tests.harness.fault_case import STEPS, FaultCase, checkpoints, events_in
from tests.harness.inject import EPOCH_STEPS
from tests.harness.runner import wait_for


def check_stopped(case: FaultCase, output: str, reason: str) -> int:
    """All ranks stopped after one step, which is saved and the last one that was done; returns it."""
    marker = json.loads((case.run_dir / "stopped.json").read_text())
    assert marker["reason"].startswith(reason)
    assert max(checkpoints(case.run_dir)) == marker["step"] == max(runner.records(case.run_dir, case.curve))
    case.record_message(output, rf"stopped  checkpoint saved \({reason}")
    return marker["step"]


def stop_and_continue(case: FaultCase, fault: tuple, *flags: str, reason: str = "SIGTERM") -> int:
    """0 steps are lost; returns after which step the run had stopped."""
    result = case.start(*flags, faults=[fault])
    assert result.ok, str(result)
    step = check_stopped(case, result.outputs[0], reason)
    case.row.notice_s = max(case.times("exited")) - case.fault_time()
    case.resume_and_check(*flags, exact=False)
    assert not (case.run_dir / "stopped.json").exists()
    assert case.row.steps_lost == 0
    return step


@pytest.mark.fault("stop: SIGTERM to one rank", core=True)
def test_clean_stop(case: FaultCase) -> None:
    assert stop_and_continue(case, ("end of a step", "signal and hear", -1, 2, "SIGTERM")) in (2, 3)
    case.check_same_as_reference()


@pytest.mark.fault("stop: twice inside an epoch, and at its edge")
def test_stop_after(case: FaultCase) -> None:
    assert EPOCH_STEPS == 3
    for step in (1, 2, 3):
        assert case.start("--stop-after", str(step)).ok
        assert max(checkpoints(case.run_dir)) == step
    result = case.resume_and_check(exact=False)
    case.record_message(result.outputs[0], "resuming from step 3 of")
    case.check_same_curves(case.curve, "train/grad_norm")  # each part was evaluated at its end
    case.check_same_checkpoints(STEPS)


@pytest.mark.fault("stop: mutant, the position saved is that of the step before")
def test_mutant_shifted_position(case: FaultCase) -> None:
    case.skip_without("--data")  # else nothing depends on the position
    assert case.start("--stop-after", "2", mutant="the position is that of the step before").ok
    with pytest.raises(AssertionError):
        case.resume_and_check()
    losses, wanted = (runner.records(run, case.curve) for run in (case.run_dir, case.reference()))
    assert losses[2] == wanted[2]
    assert losses[3] != wanted[3]
    case.row.message = f"losses of step 3: {losses[3]:.4f} and {wanted[3]:.4f}"


@pytest.mark.fault("stop: {name} to one rank")
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT", "SIGHUP"])
def test_other_signals(name: str, case: FaultCase) -> None:
    result = case.start(faults=[("end of a step", "signal and hear", -1, 2, name)])
    assert result.ok, str(result)
    assert check_stopped(case, result.outputs[0], name) in (2, 3)
    case.row.steps_lost = 0


@pytest.mark.fault("stop: SIGTERM with 2 loader workers")
def test_loader_workers(case: FaultCase) -> None:
    """The signal hits them too, as torchrun sends it to whole process groups."""
    case.skip_without("--workers")
    flags = ("--workers", "2")
    assert stop_and_continue(case, ("end of a step", "signal the process group", -1, 2, "SIGTERM"), *flags) < STEPS
    case.check_same_as_reference()


@pytest.mark.fault("stop: SIGTERM {point}")
@pytest.mark.parametrize("point", ["before the first step", pytest.param("at the start", marks=pytest.mark.whole)])
def test_before_the_first_step(point: str, case: FaultCase) -> None:
    """Also before the ranks have joined each other: it is kept until they listen."""
    assert stop_and_continue(case, (point, "signal", -1, 0, "SIGTERM")) <= 2
    case.check_same_as_reference()


@pytest.mark.fault("stop: SIGTERM in an evaluation")
def test_in_evaluation(case: FaultCase) -> None:
    flags = ("--eval-every", "2")
    fault = ("evaluation", "signal and hear", -1, 2, "SIGTERM")
    assert stop_and_continue(case, fault, *flags) == 3, "the step after the evaluation is still done"
    case.check_same_curves(case.curve, "train/grad_norm")
    case.check_same_checkpoints(STEPS)


@pytest.mark.fault("stop: SIGTERM in a save, {how}")
@pytest.mark.parametrize("how", ["synchronous", "asynchronous"])
def test_in_a_save(how: str, case: FaultCase) -> None:
    flags = ("--async-save",) if how == "asynchronous" else ()
    assert stop_and_continue(case, ("before the digests", "signal and hear", 0, 2, "SIGTERM"), *flags) < STEPS
    case.check_same_as_reference()


@pytest.mark.fault("stop: --deadline")
def test_deadline(case: FaultCase) -> None:
    """A tenth of a second, and the first step takes longer."""
    result = case.start("--deadline", "0.002", faults=[("end of a step", "hear", -1, 1)])
    assert result.ok, str(result)
    assert check_stopped(case, result.outputs[0], "--deadline") < STEPS
    case.resume_and_check()
    assert case.row.steps_lost == 0


@pytest.mark.fault("stop: a second SIGTERM quits at once")
def test_second_signal_quits_at_once(case: FaultCase) -> None:
    """In the first save, which nothing but the end of the process interrupts: it stands still until then."""
    save = "before the data"
    faults = [(save, "signal and hear", 0, 2, "SIGTERM"), (save, "signal until it ends", 0, 2, "SIGTERM")]
    result = case.start(faults=faults)
    assert result.codes[0] == 128 + signal.SIGTERM, str(result)
    ours = [event for event in case.events if event["rank"] == 0 and event["event"] != "beat"]
    assert [event["event"] for event in ours][-3:] == ["fault", "fault", "exited"], "nothing was done in between"
    assert not checkpoints(case.run_dir)
    case.record_message(result.outputs[0], "send it again to quit now without saving")
    case.resume_and_check()


@pytest.mark.fault("stop: SIGTERM to ranks that spin in an evaluation, all of them")
def test_stop_of_ranks_that_spin(case: FaultCase) -> None:
    """Nobody waits for anybody, so nothing but the request to stop makes a hang of it."""
    spins = [("evaluation", "spin", rank, 4) for rank in range(case.size)]
    result = case.start(faults=[*spins, ("evaluation", "signal", 0, 3, "SIGTERM")])
    assert not result.ok
    case.record_message(result.outputs[0], r"no progress for \d[\d.]* s, though it moves \(.*: evaluation")
    assert "SIGTERM on rank 0: saving and stopping after step" in result.outputs[0]
    case.resume_and_check()


def signal_launcher(case: FaultCase, number: signal.Signals, *flags: str) -> tuple[int, str]:
    """Run by the launcher, which gets a signal at the end of step 2; returns its exit code and all output."""

    def meanwhile(process: subprocess.Popen[str], events: Path) -> None:
        wait_for(lambda: events.exists() and '"fault"' in events.read_text())
        process.send_signal(number)

    return case.launch(*flags, faults=[("end of a step", "hear", 0, 2)], meanwhile=meanwhile)


@pytest.mark.whole
@pytest.mark.fault("stop: SIGUSR1 to the launcher, with 2 loader workers")
def test_launcher(case: FaultCase) -> None:
    """The real thing: torchrun signals its whole process group, loader workers included."""
    case.skip_without("--workers")
    code, out = signal_launcher(case, signal.SIGUSR1, "--workers", "2")
    assert code == 128 + signal.SIGUSR1, out
    assert "Traceback" not in out
    assert check_stopped(case, out, "SIGUSR1") < STEPS
    case.resume_and_check()
    assert case.row.steps_lost == 0


@pytest.mark.fault("stop: SIGHUP under nohup is ignored")
def test_nohup(case: FaultCase) -> None:
    faults = [("at the start", "ignore", rank, 0, "SIGHUP") for rank in range(case.size)]
    result = case.start(faults=[*faults, ("end of a step", "signal", -1, 2, "SIGHUP", 0.5)])  # time enough for a mutant
    assert result.ok, str(result)
    case.record_message(result.outputs[0], "done     step 6 of 6")
    case.check_same_as_reference()


def kill_launcher(case: FaultCase, mutant: str = "") -> str:
    """SIGKILL to the launcher alone, after step 2 of the ranks; returns what they print."""
    killed = case.folder / "killed"

    def meanwhile(process: subprocess.Popen[str], events: Path) -> None:
        wait_for(lambda: sum(event["event"] == "fault" for event in events_in(events)) == case.size)
        process.kill()
        process.wait()
        if mutant:  # which hears of nothing
            time.sleep(3 * stop.POLL_S)
            killed.touch()
        pids = {event["pid"] for event in events_in(events)}
        wait_for(lambda: not any(_runs(pid) for pid in pids))

    faults = [("end of a step", "hear", rank, 2, str(killed)) for rank in range(case.size)]
    return case.launch(faults=faults, meanwhile=meanwhile, mutant=mutant)[1]


def _runs(pid: int) -> bool:
    """Whether the process is there, and not only its exit code."""
    file = Path(f"/proc/{pid}/cmdline")
    return file.exists() and bool(file.read_bytes())


@pytest.mark.fault("stop: SIGKILL to the launcher alone")
def test_launcher_dies(case: FaultCase) -> None:
    """Its ranks do not train on without anybody who would start them again: they save and stop."""
    out = kill_launcher(case)
    assert check_stopped(case, out, "the launcher") < STEPS
    assert "Traceback" not in out, out
    case.resume_and_check()
    assert case.row.steps_lost == 0


@pytest.mark.whole
@pytest.mark.fault("stop: mutant, ranks do not see that the launcher has died")
def test_mutant_launcher_dies(case: FaultCase) -> None:
    out = kill_launcher(case, mutant="the launcher may die")
    case.record_message(out, "done     step 6 of 6")
    assert not (case.run_dir / "stopped.json").exists()


@pytest.mark.whole
@pytest.mark.fault("stop: SIGHUP to the launcher")
def test_hang_up(case: FaultCase) -> None:
    """The terminal closes."""
    code, out = signal_launcher(case, signal.SIGHUP)
    assert code == 128 + signal.SIGHUP, out
    assert check_stopped(case, out, "SIGHUP") < STEPS
    case.resume_and_check()
    assert case.row.steps_lost == 0


# --- parts of it ------------------------------------------------------------------------------------------


def outlive_a_child() -> None:
    world = process_group.start()
    signal.signal(signal.SIGCHLD, lambda *_: None)  # as DataLoader does
    stop.SAME_SIGNAL_S = 0.3
    stopping = stop.Stop(world, deadline_min=0, first_step=0, last_step=10_000)
    assert not stopping.after(0)
    subprocess.run(["true"], check=True)
    time.sleep(3 * stop.POLL_S)
    assert not stopping.after(1)
    os.kill(os.getpid(), signal.SIGTERM)
    runner.wait_for(lambda: stopping.reason)
    time.sleep(stop.SAME_SIGNAL_S + 2 * stop.POLL_S)
    subprocess.run(["true"], check=True)
    time.sleep(3 * stop.POLL_S)
    assert stopping.after(2)


def test_end_of_a_loader_worker_is_no_request() -> None:
    result = runner.spawn(outlive_a_child, [()])
    assert result.ok, str(result)


def stop_at_own_pace(pace_s: float, folder: str, agree: bool) -> None:
    """Steps without collectives, so that ranks are far apart when one of them gets the signal."""
    world = process_group.start()
    stopping = stop.Stop(world, deadline_min=0, first_step=0, last_step=10_000)
    if not agree:  # a mutant: every rank stops after its own next step
        stop.max = lambda *_: stopping._done
    step, rank = 0, world.rank
    while not stopping.after(step):
        step += 1
        time.sleep(pace_s)
        if rank == 1 and step == 30:
            os.kill(os.getpid(), signal.SIGTERM)
    Path(folder, str(rank)).write_text(str(step))
    process_group.finish(world.process)  # else the other rank finds that this one has died


@pytest.mark.parametrize("agree", [True, False], ids=["all stop after one step", "mutant without agreement"])
def test_ranks_far_apart(agree: bool, tmp_path: Path) -> None:
    result = runner.spawn(stop_at_own_pace, [(0.02, str(tmp_path), agree), (0.008, str(tmp_path), agree)])
    assert result.ok, str(result)
    stopped = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert (stopped[0] == stopped[1]) == agree, stopped
    assert stopped[1] >= 30
