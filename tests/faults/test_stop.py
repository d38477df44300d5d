"""Asked to leave, a run finishes its step on all ranks, saves, exits with 0, and goes on later as if undisturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from common import stop
from tests import ranks
from tests.conftest import write_parquet

STEPS = 14
FLAGS = [
    *("--max-steps", str(STEPS), "--global-batch-size", "40", "--warmup-steps", "2", "--dtype", "float32"),
    *("--log-every", "1", "--eval-every", "1000", "--save-every", "1000"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("data") / "tiny", 101, 12)


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.01)


def signal_last_rank(number: int, condition: Callable[[], bool]) -> Callable[[list[int]], None]:
    def meddle(pids: list[int]) -> None:
        wait_for(condition)
        os.kill(pids[-1], number)

    return meddle


def steps_done(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("train/loss") if file.exists() else 0


def saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step_????????"))


def check_left(result: ranks.Result, run: Path, reason: str) -> int:
    """All ranks left with 0, after one step, which is saved and the last one that was done."""
    assert result.ok, str(result)
    marker = json.loads((run / "stopped.json").read_text())
    assert marker["reason"].startswith(reason)
    assert saved(run)[-1] == marker["step"] == max(ranks.records(run, "train/loss"))
    assert f"left   on request, saved: {reason}" in result.outputs[0]
    return marker["step"]


@pytest.mark.parametrize("recipe", ranks.RECIPES)
def test_signal_to_one_rank(recipe: str, images: Path, tmp_path: Path) -> None:
    world_size = ranks.world_sizes(recipe, most=2)[-1]
    where = ("--data", str(images), "--out", str(tmp_path))
    run = tmp_path / "run"
    told = signal_last_rank(signal.SIGTERM, lambda: steps_done(run) >= 3)
    result = ranks.run_recipe(recipe, world_size, *FLAGS, *where, "--name", "run", meddle=told)
    assert 3 <= check_left(result, run, "SIGTERM") < STEPS
    assert ranks.run_recipe(recipe, world_size, *FLAGS, *where, "--name", "run").ok
    assert not (run / "stopped.json").exists()
    assert ranks.run_recipe(recipe, world_size, *FLAGS, *where, "--name", "whole").ok
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        assert ranks.records(run, tag) == ranks.records(tmp_path / "whole", tag)


def run_ddp(images: Path, out: Path, meddle: Callable[[list[int]], None] | None, *flags: str) -> ranks.Result:
    where = ("--data", str(images), "--out", str(out), "--name", "run")
    return ranks.run_recipe("ddp_resnet", 2, *FLAGS, *where, *flags, meddle=meddle)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_other_signals(number: signal.Signals, images: Path, tmp_path: Path) -> None:
    told = signal_last_rank(number, lambda: steps_done(tmp_path / "run") >= 3)
    assert check_left(run_ddp(images, tmp_path, told), tmp_path / "run", number.name) < STEPS


def test_before_the_first_step(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    told = signal_last_rank(signal.SIGTERM, (run / "config.json").exists)
    assert check_left(run_ddp(images, tmp_path, told, "--workers", "1"), run, "SIGTERM") <= 2


def test_deadline(images: Path, tmp_path: Path) -> None:
    result = run_ddp(images, tmp_path, None, "--max-steps", "1000", "--deadline", "0.05")
    assert check_left(result, tmp_path / "run", "--deadline") < 1000


def test_in_evaluation(images: Path, tmp_path: Path) -> None:
    slow = '    model.eval()\n    Path(args.out, "evaluating").touch()\n    __import__("time").sleep(1)\n'
    path = ranks.mutate("ddp_resnet", tmp_path / "slow", {"    model.eval()\n": slow})
    told = signal_last_rank(signal.SIGTERM, (tmp_path / "evaluating").exists)
    where = ("--data", str(images), "--out", str(tmp_path), "--name", "run", "--eval-every", "3")
    result = ranks.run_recipe(path, 2, *FLAGS, *where, meddle=told)
    assert check_left(result, tmp_path / "run", "SIGTERM") == 4, "the step after the evaluation is still done"


def test_second_signal_quits_at_once(images: Path, tmp_path: Path) -> None:
    slow = {"checkpoint.save(path, step": '__import__("time").sleep(30); checkpoint.save(path, step'}
    path = ranks.mutate("ddp_resnet", tmp_path / "slow", slow)
    times: list[float] = []

    def meddle(pids: list[int]) -> None:
        for condition in (lambda: steps_done(tmp_path / "run") >= 2, lambda: True):
            wait_for(condition)
            times.append(time.monotonic())
            os.kill(pids[0], signal.SIGTERM)
            time.sleep(stop.SAME_SIGNAL_S + 1)

    where = ("--data", str(images), "--out", str(tmp_path), "--name", "run")
    result = ranks.run_recipe(path, 2, *FLAGS, *where, meddle=meddle)
    assert result.codes[0] == 128 + signal.SIGTERM, str(result)
    assert time.monotonic() - times[1] < 5


def test_launcher_with_loader_workers(images: Path, tmp_path: Path) -> None:
    """The real thing: torchrun signals its whole process group, loader workers included."""
    command = ["bash", str(ranks.ROOT / "launch/torchrun.sh"), "recipes/ddp_resnet", *FLAGS, "--max-steps", "500"]
    command += ["--workers", "2", "--data", str(images), "--out", str(tmp_path), "--name", "run"]
    environ = os.environ | {"PYTHON": sys.executable, "NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command, cwd=ranks.ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_for(lambda: steps_done(tmp_path / "run") >= 3)
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGUSR1, out
    assert "Traceback" not in out
    check_left(ranks.Result([0], [out]), tmp_path / "run", "SIGUSR1")


def outlive_a_child() -> None:
    dist.init_process_group("gloo")
    signal.signal(signal.SIGCHLD, lambda *_: None)  # as DataLoader does
    stopping = stop.Stop(0, 0)
    assert not stopping.after(0)
    subprocess.run(["true"], check=True)
    time.sleep(3 * stop.POLL_S)
    assert not stopping.after(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(stop.SAME_SIGNAL_S + 1)
    subprocess.run(["true"], check=True)
    time.sleep(3 * stop.POLL_S)
    assert stopping.after(2)


def test_end_of_a_loader_worker_is_no_request() -> None:
    result = ranks.spawn(outlive_a_child, [()], timeout_s=30.0)
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
    result = ranks.spawn(leave_at_own_pace, [(0.05, str(tmp_path), agree), (0.02, str(tmp_path), agree)], 30.0)
    assert result.ok, str(result)
    left = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert (left[0] == left[1]) == agree, left
    assert left[1] >= 30
