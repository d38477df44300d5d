"""launch/slurm.sh on a real Slurm of two nodes, on this machine: `uv run pytest -m slurm` (root, slurm-wlm, munge)."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.conftest import write_parquet

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

SLURM = ranks.ROOT / "launch" / "slurm.sh"
LOCAL = ranks.ROOT / "launch" / "local_slurm.sh"
DISTRIBUTED = [recipe for recipe in ranks.RECIPES if ranks.world_sizes(recipe)[-1] > 1]
STEPS = 60
FLAGS = [
    *("--max-steps", str(STEPS), "--global-batch-size", "40", "--warmup-steps", "2", "--dtype", "float64"),
    *("--log-every", "1", "--eval-every", "1000", "--save-every", "20"),
]


def run(*command: str | Path, cwd: Path | None = None, **environ: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not shutil.which("sbatch"):
        assert "CI" not in os.environ, "CI installs Slurm: apt install slurm-wlm munge"
        pytest.skip("no Slurm here: apt install slurm-wlm munge")
    folder = tmp_path_factory.mktemp("cluster") / "slurm"
    environ = {"LOCAL_SLURM_DIR": str(folder)}
    config = run("bash", LOCAL, "up", **environ).strip().removeprefix("export SLURM_CONF=")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", config)
        patch.setenv("PYTHON", sys.executable)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("NPROC_PER_NODE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    run("bash", LOCAL, "down", **environ)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("data") / "tiny", 101, 12)


class Job:
    """One submission, in a folder of its own."""

    def __init__(self, folder: Path, recipe: str, images: Path, *options: str, flags: tuple[str, ...] = ()) -> None:
        self.folder, self.run = folder, folder / "runs" / "run"
        out = run(
            *("bash", SLURM, "-N2", "--signal=B:USR1@60", *options, f"recipes/{recipe}", *FLAGS, *flags),
            *("--data", images, "--out", folder / "runs", "--name", "run"),
            cwd=folder,
        )
        self.id = re.fullmatch(r"Submitted batch job (\d+)\n", out)[1]

    def state(self) -> str:
        return re.search(r" JobState=(\w+)", run("scontrol", "show", "job", self.id, "--oneliner"))[1]

    def starts(self) -> int:
        return self.log().count(f" job {self.id}, start ")

    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("slurm-*.log"))

    def steps(self) -> int:
        file = self.run / "metrics.jsonl"
        return file.read_text().count("train/loss") if file.exists() else 0

    def wait(self, condition: Callable[[], bool], timeout_s: float = 150.0) -> None:
        """A job that is queued again begins in two minutes, of Slurm's own will; the wait asks for it now."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"{self.state()}\n{self.log()}"
            if self.state() == "PENDING" and self.starts():
                subprocess.run(["scontrol", "update", f"JobId={self.id}", "StartTime=now"], check=False)
            time.sleep(0.3)

    def completed(self) -> bool:
        state = self.state()
        assert state in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED", "PREEMPTED", "NODE_FAIL"), self.log()
        return state == "COMPLETED"

    def tensors(self) -> dict[str, torch.Tensor]:
        return final_tensors(self.run)


def final_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted((path / "checkpoints" / f"step_{STEPS:08d}").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert wanted
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def undisturbed(cluster: None, images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    job = Job(tmp_path_factory.mktemp("undisturbed"), DISTRIBUTED[0], images)
    job.wait(job.completed)
    return job.tensors()


@pytest.mark.parametrize("recipe", DISTRIBUTED)
def test_the_curve_is_that_of_one_process(recipe: str, cluster: None, images: Path, tmp_path: Path) -> None:
    flags = ("--sync-bn", "--max-steps", "20")
    job = Job(tmp_path, recipe, images, flags=flags)
    job.wait(job.completed)
    assert "2 processes on 2 hosts" in job.log()
    where = ("--data", str(images), "--out", str(tmp_path), "--name", "one")
    assert ranks.run_recipe(recipe, 1, *FLAGS, *flags, *where).ok
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        found, wanted = ranks.records(job.run, tag), ranks.records(tmp_path / "one", tag)
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-9), tag


def told_and_queued_again(job: Job, tell: Callable[[], None]) -> None:
    job.wait(lambda: job.steps() >= 5)
    tell()
    job.wait(lambda: job.starts() == 2)
    job.wait(job.completed)


def test_time_limit(cluster: None, images: Path, tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """The signal comes before the limit; saved, queued again, and no step is done twice."""
    job = Job(tmp_path, DISTRIBUTED[0], images, "--time=2", "--signal=B:USR1@105")
    job.wait(lambda: job.starts() == 2)
    job.wait(job.completed)
    assert "saved: queued again" in job.log()
    check_same(job.tensors(), undisturbed)


@pytest.mark.parametrize("batch", [False, True], ids=["to the steps", "to the batch script"])
def test_signal(batch: bool, cluster: None, images: Path, tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    job = Job(tmp_path, DISTRIBUTED[0], images)
    told_and_queued_again(job, lambda: run("scancel", "--signal=USR1", *["--batch"] * batch, job.id))
    left = int(re.search(r"left at step (\d+), saved: queued again", job.log())[1])
    assert f"continues from step {left} of" in job.log(), "no step is lost"
    check_same(job.tensors(), undisturbed)


def test_queued_again_by_the_operator(
    cluster: None, images: Path, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    job = Job(tmp_path, DISTRIBUTED[0], images)
    told_and_queued_again(job, lambda: run("scontrol", "requeue", job.id))
    check_same(job.tensors(), undisturbed)


def test_preemption(cluster: None, images: Path, tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    job = Job(tmp_path, DISTRIBUTED[0], images)

    def preempt() -> None:
        run("sbatch", "-N2", "--exclusive", "-p", "urgent", "--wrap", "sleep 1", cwd=tmp_path)

    told_and_queued_again(job, preempt)
    check_same(job.tensors(), undisturbed)


def test_cancelled_is_not_queued_again(cluster: None, images: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, DISTRIBUTED[0], images)
    job.wait(lambda: job.steps() >= 5)
    run("scancel", job.id)
    job.wait(lambda: job.state() == "CANCELLED")
    time.sleep(3)
    assert job.state() == "CANCELLED"
    assert job.starts() == 1


def test_a_rank_killed_ends_the_job(cluster: None, images: Path, tmp_path: Path) -> None:
    """No MAX_RESTARTS was asked for: an honest failure, on both nodes, at once; the operator's requeue goes on."""
    job = Job(tmp_path, DISTRIBUTED[0], images, flags=("--save-every", "5"))
    job.wait(lambda: job.steps() >= 12)
    pids = run("pgrep", "-f", f"train.py.*{tmp_path}/runs").split()
    victims = [pid for pid in pids if "agent.py" not in Path(f"/proc/{pid}/cmdline").read_text()]
    victims = [pid for pid in victims if "slurm" not in Path(f"/proc/{pid}/cmdline").read_text()]
    run("kill", "-9", victims[-1])
    job.wait(lambda: job.state() == "FAILED", timeout_s=30.0)
    assert "by SIGKILL" in job.log()
    assert (job.run / "checkpoints" / "step_00000010").exists()


def test_crash_loop_stops(cluster: None, images: Path, tmp_path: Path) -> None:
    """Asked to leave again and again without a step of progress in between."""
    job = Job(tmp_path, DISTRIBUTED[0], images, "--export=ALL,MAX_REQUEUES=2", flags=("--deadline", "0.0001"))
    job.wait(lambda: job.starts() == 2)
    (job.run / "requeued").write_text("2\n2\n")
    job.wait(lambda: job.state() == "FAILED")
    assert "starts in a row have ended at step" in job.log()


def test_submitted_by_sbatch(cluster: None, images: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--max-steps", "2", "--data", images, "--out", tmp_path / "runs"]
    run("sbatch", "--wait", "-N1", SLURM, "recipes/ddp_resnet", *flags, cwd=tmp_path)
    assert len(list(tmp_path.glob("runs/job-*/checkpoints/step_00000002"))) == 1
    assert not list(tmp_path.glob(".slurm-*"))


def test_inside_an_allocation(cluster: None, images: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--max-steps", "2", "--data", images, "--out", tmp_path / "runs", "--name", "run"]
    run("salloc", "-N2", "bash", SLURM, "recipes/ddp_resnet", *flags, cwd=tmp_path)
    assert (tmp_path / "runs/run/checkpoints/step_00000002").exists()
