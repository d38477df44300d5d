"""launch/slurm.sh on a real Slurm of two nodes, on this machine: `uv run pytest -m slurm` (root, slurm-wlm, munge)."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import write_parquet, write_text
from tests.harness import mutants, runner
from tests.harness.states import same_tensors

pytestmark = pytest.mark.slurm

SLURM = runner.ROOT / "launch" / "slurm.sh"
LOCAL = runner.ROOT / "launch" / "local_slurm.sh"
RECIPE = "ddp_resnet"  # for what Slurm does to a job, whatever it trains
STEPS, SAVE_EVERY = 24, 8
FLAGS = [
    *("--max-steps", str(STEPS), "--global-batch-size", "40", "--warmup-steps", "2", "--dtype", "float64"),
    *("--log-every", "1", "--eval-every", "1000", "--save-every", str(SAVE_EVERY)),
]


LONGEST_S = 850.0  # a command may wait for a whole training with default flags, on a busy machine


def call(*command: str | Path, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    env = os.environ | environ
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False)


def run(*command: str | Path, cwd: Path | None = None, **environ: str) -> str:
    done = call(*command, cwd=cwd, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its folder."""
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
        yield folder
    run("bash", LOCAL, "down", **environ)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("data") / "tiny", 101, 12)


def slow(recipe: str, folder: Path) -> Path:
    """A copy of a recipe with a small model, whose steps leave time to meddle: STEP_S seconds."""
    trains = "sums, grad_norm = train_step(args, model, optimizer, run.finite, batches, dp_size)"
    changes = {
        "": {"import contextlib": "import contextlib, os, time\nfrom tests.harness import short_resnet"},
        "main": {trains: f"time.sleep(float(os.environ.get('STEP_S', '0.2'))); {trains}"},
    }
    return mutants.mutate(recipe, folder, changes).parent


class Job:
    """One submission, in a folder of its own."""

    def __init__(self, folder: Path, images: Path, *options: str, flags: tuple[str, ...] = (), **environ: str) -> None:
        self.folder, self.run = folder, folder / "runs" / "run"
        recipe = slow(RECIPE, folder)
        out = run(
            *("bash", SLURM, "-N2", *options, recipe, *FLAGS, *runner.small(recipe.name), *flags),
            *("--data", images, "--out", folder / "runs", "--name", "run"),
            cwd=folder,
            **environ,
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

    def wait(self, condition: Callable[[], bool]) -> None:
        """A job that is queued again begins in two minutes, of Slurm's own will; the wait asks for it sooner.

        Not in the same second, in which Slurm takes its credential for the revoked one, nor while Slurm still has a
        message to deliver: the end of the first start, which a lost node was to hear, would end the second one.
        """
        pending = 0

        def came() -> bool:
            nonlocal pending
            if condition():
                return True
            pending = pending + 1 if self.state() == "PENDING" and self.starts() else 0
            if pending > 6 and re.search(r"Agent queue size:\s+0\n", run("sdiag")):
                call("scontrol", "update", f"JobId={self.id}", "StartTime=now")
            time.sleep(0.3)
            return False

        runner.wait_for(came, self)

    def __str__(self) -> str:
        return f"{self.state()}\n{self.log()}"

    def completed(self) -> bool:
        state = self.state()
        assert state in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED", "PREEMPTED", "NODE_FAIL"), self.log()
        return state == "COMPLETED"

    def disturb(self, meddle: Callable[[], object]) -> None:
        """Do something to the running job, and let it continue to its end."""
        self.wait(lambda: self.steps() >= 5)
        meddle()
        self.wait(lambda: self.starts() == 2)
        self.wait(self.completed)

    def check_nothing_lost(self) -> None:
        step = int(re.search(r"stopped at step (\d+), saved: requeued", self.log())[1])
        assert f"resuming from step {step} of" in self.log()

    def check_same(self, reference: Path) -> None:
        """The last checkpoint is that of another run, bit for bit."""
        last = f"checkpoints/step_{STEPS:08d}"
        assert same_tensors(self.run / last, reference / last), self.log()


@pytest.fixture(scope="module")
def reference(cluster: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same run, that nothing disturbs."""
    job = Job(tmp_path_factory.mktemp("reference"), images, STEP_S="0")
    job.wait(job.completed)
    assert job.starts() == 1
    return job.run


# Slurm and its launcher start all of them alike; tests/launch/test_machines.py has each on two machines.
@pytest.mark.parametrize("recipe", ["accelerate_gpt", "multinode_resnet", "tensor_gpt"])
def test_the_curve_is_that_of_one_process(recipe: str, cluster: Path, images: Path, tmp_path: Path) -> None:
    """With sbatch on the command line, and the recipe as it stands."""
    flags = [*FLAGS, "--max-steps", "8", "--out", tmp_path]
    if runner.workload(recipe) == "gpt":
        flags += ["--data", write_text(tmp_path / "text", 101, 12), *runner.small(recipe)]
    else:
        flags += ["--data", images, "--sync-bn"]
    ways = {
        size: [*runner.layout(recipe, size).strategy, *runner.layout(recipe, size).micro_batches(40)] for size in (1, 2)
    }
    run("sbatch", "--wait", "-N2", SLURM, f"recipes/{recipe}", *flags, *ways[2], "--name", "two", cwd=tmp_path)
    (log,) = tmp_path.glob("slurm-brigade-*.log")
    assert "2 processes on 2 hosts" in log.read_text()
    assert f"resume   bash {SLURM} -N2 {runner.ROOT}/recipes/{recipe} " in log.read_text()
    assert not list(tmp_path.glob(".slurm-*"))
    words = [str(flag) for flag in flags]
    assert runner.run_recipe(recipe, 1, *words, *ways[1], "--name", "one").ok
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        found, wanted = runner.records(tmp_path / "two", tag), runner.records(tmp_path / "one", tag)
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-9), tag


SEVERAL = [recipe for recipe in runner.RECIPES if len(runner.world_sizes(recipe)) > 1]
FIRST = {runner.workload(recipe): recipe for recipe in sorted(SEVERAL, key=runner.follows, reverse=True)}


@pytest.mark.parametrize("recipe", FIRST.values())
def test_no_flags(recipe: str, cluster: Path, tmp_path: Path) -> None:
    """What a newcomer does, with one recipe of each workload."""
    out = run("bash", SLURM, "-N2", "--wait", f"recipes/{recipe}", "--out", tmp_path / "runs", cwd=tmp_path)
    (folder,) = tmp_path.glob("runs/job-*")
    assert folder.name == f"job-{re.fullmatch(r'Submitted batch job (.*)', out.strip())[1]}"
    if runner.workload(recipe) == "gpt":  # 8 for knowing nothing, 4.5 for knowing how frequent each byte is
        assert min(runner.records(folder, "val/bits_per_byte").values()) <= 4.0
    elif runner.workload(recipe) == "ppo":
        assert max(runner.records(folder, "val/return").values()) >= 475
    elif runner.workload(recipe) == "mimo":
        assert 7 < runner.records(folder, "se_median/l4_mmse")[200] < 9
    else:
        assert max(runner.records(folder, "val/top1").values()) >= 0.98


def test_file_of_accelerate(cluster: Path, tmp_path: Path) -> None:
    """It reaches the ranks on every node, and the command that continues the run."""
    data = ("--data", write_text(tmp_path / "text", 101, 12), *runner.small("accelerate_gpt"))
    flags = (*FLAGS, "--max-steps", "2", *data, "--out", tmp_path, "--name", "run")
    words = ("bash", SLURM, "-N2", "--wait", "recipes/accelerate_gpt", *flags)
    run(*words, cwd=tmp_path, ACCELERATE_CONFIG="configs/cpu.yaml")
    (log,) = tmp_path.glob("slurm-*.log")
    assert "2 processes on 2 hosts" in log.read_text(), "as many as the file is for"
    assert "\nresume   ACCELERATE_CONFIG=configs/cpu.yaml bash " in log.read_text()


def test_prove(cluster: Path, tmp_path: Path) -> None:
    """The proofs on the nodes of a job, each rank of which starts one process after the other."""
    asked = ("--recipes", "ddp_gpt", "--proofs", "equal", "kill", "collectives", "--out", tmp_path)
    run("bash", SLURM, "-N2", "--wait", "tools/prove", *asked, cwd=tmp_path)
    (page,) = tmp_path.glob("job-*/prove.md")
    text = page.read_text()
    assert ", 0 failed, 0 not reached in time, " in text
    for proof in ("| equal | ddp_gpt float64 |", "| kill | ddp_gpt: rank 1 of 2 ", "| collectives | all "):
        assert proof in text


def test_time_limit(cluster: Path, images: Path, tmp_path: Path, reference: Path) -> None:
    """The signal comes before the limit; saved, queued again, and no step is done twice."""
    job = Job(tmp_path, images, "--time=10", "--signal=B:USR1@100", STEP_S="2")
    job.wait(lambda: job.steps() >= 2)
    run("scontrol", "update", f"JobId={job.id}", "TimeLimit=2")  # looked at every 30 s
    job.wait(lambda: "stopped at step" in job.log())
    run("scontrol", "update", f"JobId={job.id}", "TimeLimit=10")
    job.wait(job.completed)
    assert job.starts() == 2
    job.check_nothing_lost()
    job.check_same(reference)


@pytest.mark.parametrize("batch", [False, True], ids=["to the steps", "to the batch script"])
def test_signal(batch: bool, cluster: Path, images: Path, tmp_path: Path, reference: Path) -> None:
    job = Job(tmp_path, images)
    job.disturb(lambda: run("scancel", "--signal=USR1", *["--batch"] * batch, job.id))
    job.check_nothing_lost()
    job.check_same(reference)


def test_preemption(cluster: Path, images: Path, tmp_path: Path, reference: Path) -> None:
    """The partition's grace time begins with SIGTERM."""
    job = Job(tmp_path, images)
    job.disturb(lambda: run("sbatch", "-N2", "--exclusive", "-p", "urgent", "--wrap", "sleep 1", cwd=tmp_path))
    job.check_nothing_lost()
    job.check_same(reference)


def test_queued_again_by_the_operator(cluster: Path, images: Path, tmp_path: Path, reference: Path) -> None:
    """Slurm ends the job at once."""
    job = Job(tmp_path, images)
    job.disturb(lambda: run("scontrol", "requeue", job.id))
    job.check_same(reference)


def test_node_lost(cluster: Path, images: Path, tmp_path: Path, reference: Path) -> None:
    """Slurm queues the job again when a node's daemon no longer answers; here it comes back."""
    job = Job(tmp_path, images, STEP_S="2")

    def kill_daemon() -> None:
        os.kill(int((cluster / "slurmd-n2.pid").read_text()), signal.SIGKILL)
        job.wait(lambda: job.state() not in ("RUNNING", "COMPLETING"))
        # On a cluster, where a job begins again two minutes later, nothing of the first start is running by then.
        job.wait(lambda: call("pgrep", "-f", rf"slurmstepd: \[{job.id}\.").returncode == 1)
        run("slurmd", "-N", "n2")

    job.disturb(kill_daemon)
    job.check_same(reference)


def ranks_of(job: Job) -> list[int]:
    """Process ids of the ranks, not of those that started them."""
    found = call("pgrep", "-f", f"{job.folder}.*train.py").stdout.split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in found}
    return [
        pid
        for pid, file in commands.items()
        if file.exists() and not any(word in file.read_text() for word in ("agent.py", "slurm"))
    ]


def test_rank_killed(cluster: Path, images: Path, tmp_path: Path) -> None:
    """No MAX_RESTARTS was asked for: an honest failure, on both nodes, at once."""
    job = Job(tmp_path, images)
    job.wait(lambda: job.steps() >= SAVE_EVERY + 2)
    os.kill(ranks_of(job)[-1], signal.SIGKILL)
    job.wait(lambda: job.state() == "FAILED")
    assert "by SIGKILL" in job.log()
    assert (job.run / "checkpoints" / f"step_{SAVE_EVERY:08d}").exists()
    assert not ranks_of(job)
    assert job.starts() == 1


def test_rank_killed_and_started_again(cluster: Path, images: Path, tmp_path: Path, reference: Path) -> None:
    job = Job(tmp_path, images, MAX_RESTARTS="1")
    job.wait(lambda: job.steps() >= SAVE_EVERY + 2)
    os.kill(ranks_of(job)[-1], signal.SIGKILL)
    job.wait(job.completed)
    assert job.starts() == 1
    assert f"resuming from step {SAVE_EVERY} of" in job.log()
    job.check_same(reference)


def test_cancelled_is_not_queued_again(cluster: Path, images: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, images)
    job.wait(lambda: job.steps() >= 5)
    run("scancel", job.id)
    job.wait(lambda: job.state() == "CANCELLED")
    job.wait(lambda: not ranks_of(job))
    assert job.state() == "CANCELLED"
    assert job.starts() == 1


def test_crash_loop_stops(cluster: Path, images: Path, tmp_path: Path) -> None:
    """Asked to stop again and again, without a step of progress in between."""
    job = Job(tmp_path, images, flags=("--deadline", "0.0001"), MAX_REQUEUES="2")
    job.wait(lambda: job.starts() == 2)
    step = re.search(r"stopped at step (\d+), saved", job.log())[1]
    (tmp_path / f".slurm-{job.id}.starts").write_text(f"{step}\n{int(step) + 1}\n")  # the next gets to step + 1, too
    job.wait(lambda: job.state() == "FAILED")
    assert f"2 starts in a row have stopped at step {int(step) + 1}, so the job is not requeued" in job.log()
    assert job.starts() == 2


def test_done_although_asked_to_stop(cluster: Path, images: Path, tmp_path: Path) -> None:
    """In its last step: there is nothing to be queued again for."""
    job = Job(tmp_path, images, flags=("--deadline", "0.0001", "--max-steps", "1"))
    job.wait(job.completed)
    assert "stopped  checkpoint saved" in job.log()
    assert job.starts() == 1
    assert not list(tmp_path.glob(".slurm-*"))


def test_task_of_an_array(cluster: Path, images: Path, tmp_path: Path) -> None:
    """One of them has the array's number as its own; queued again, it takes no other with it."""
    flags = [*FLAGS, *runner.small(RECIPE), "--data", images, "--out", tmp_path / "runs"]
    out = run("bash", SLURM, "-N1", "--array=1-2", slow(RECIPE, tmp_path), *flags, cwd=tmp_path, STEP_S="0.5")
    array = re.fullmatch(r"Submitted batch job (\d+)\n", out)[1]

    def tasks() -> dict[str, tuple[str, str]]:
        """Number in the array, and state, by number of the job."""
        shown = call("scontrol", "show", "job", array, "--oneliner").stdout
        found = re.findall(r"^JobId=(\d+) ArrayJobId=\d+ ArrayTaskId=(\d+) .* JobState=(\w+)", shown, re.MULTILINE)
        return {job: (task, state) for job, task, state in found}

    def log(job: str) -> str:
        return "".join(path.read_text() for path in tmp_path.glob(f"slurm-*-{job}.log"))

    runner.wait_for(lambda: len(tasks()) == 2 and all("loss" in log(job) for job in tasks()))
    (other,) = tasks().keys() - {array}
    run("scancel", "--signal=USR1", f"{array}_{tasks()[array][0]}")
    runner.wait_for(lambda: "requeued" in log(array) and tasks()[array][1] == "PENDING")
    runner.wait_for(lambda: tasks()[other][1] == "COMPLETED")
    assert log(other).count(", start ") == 1
    assert "stopped at step" not in log(other)
    run("scancel", array)


def test_heterogeneous(cluster: Path, images: Path, tmp_path: Path) -> None:
    """Two parts that asked for different things make one world, and ranks 0 to 2 in it."""
    flags = [*FLAGS, *runner.small(RECIPE), "--max-steps", "2", "--data", images, "--out", tmp_path / "runs"]
    flags += ["--global-batch-size", "42"]  # of three ranks
    recipe = slow(RECIPE, tmp_path)
    site = "export NPROC_PER_NODE=$((2 - ${SLURM_PROCID:-0}))"
    where = site_copy(tmp_path / "my cluster", site)  # sbatch tells the job where its script lies, unquoted
    run("sbatch", "--wait", "-N1", "-c2", ":", "-N1", "-c1", where, recipe, *flags, cwd=tmp_path)
    (log,) = tmp_path.glob("slurm-*.log")
    assert "3 processes on 2 hosts" in log.read_text()


def site_copy(folder: Path, site: str) -> Path:
    """The launchers, and what they run, with a site.sh."""
    for part in ("launch", "recipes", "common", "tests"):
        shutil.copytree(runner.ROOT / part, folder / "copy" / part)
    (folder / "copy" / "launch" / "site.sh").write_text(site)
    return folder / "copy" / "launch" / "slurm.sh"


def test_site_file_inside_an_allocation(cluster: Path, images: Path, tmp_path: Path) -> None:
    """Its options reach srun, where a container would be named, and its exports reach the ranks."""
    flags = [*FLAGS, "--max-steps", "2", "--data", images, "--out", tmp_path / "runs", "--name", "run"]
    where = site_copy(tmp_path, "SRUN_OPTIONS=(--label)\nexport NPROC_PER_NODE=2\n")
    out = run("salloc", "-N1", "bash", where, "recipes/ddp_resnet", *flags, cwd=tmp_path)
    assert "\n0: 2 processes on " in out
    assert (tmp_path / "runs/run/checkpoints/step_00000002").exists()


def test_node_without_its_gpus(cluster: Path, images: Path, tmp_path: Path) -> None:
    """Slurm says that the node has two; torch sees none: no training on the CPU that nobody asked for."""
    flags = ("recipes/ddp_resnet", "--out", tmp_path / "runs")
    done = call("salloc", "-N1", "--gpus-per-node=2", "bash", SLURM, *flags, cwd=tmp_path, NPROC_PER_NODE="")
    assert "has 1 CPUs for 2 processes: ask for more" in done.stdout
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count(" has 2 GPUs for this job, but torch sees none: ") == 1
    assert not (tmp_path / "runs").exists()


def test_doctor(cluster: Path, images: Path, tmp_path: Path) -> None:
    """It looks at both nodes, and then the job begins."""
    flags = [*FLAGS, "--max-steps", "2", "--data", images, "--out", tmp_path / "runs", "--name", "run"]
    out = run("salloc", "-N2", "bash", SLURM, "--doctor", "recipes/ddp_resnet", *flags, "--sync-bn", cwd=tmp_path)
    healthy, done = out.find("\nhealthy: 2 ranks on 2 machines, CPU"), out.find("\ndone     step 2 of 2")
    assert -1 < healthy < done, out
    assert not re.search("^(breaks|cripples|advice): ", out, re.MULTILINE), out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("options", "variables", "found"),
    [
        (["-N2"], {"GLOO_SOCKET_IFNAME": "eth77"}, ["interface", "meet|gloo"]),
        (["-N1", "--gpus-per-node=2"], {"NPROC_PER_NODE": ""}, ["gpu"]),
        (["-N2"], {"OMP_NUM_THREADS": "512"}, ["threads"]),
    ],
    ids=["no such interface", "no GPUs", "too many threads"],
)
def test_doctor_finds(
    options: list[str], variables: dict[str, str], found: list[str], cluster: Path, images: Path, tmp_path: Path
) -> None:
    """And the job does not begin."""
    flags = [*FLAGS, "--max-steps", "2", "--data", images, "--out", tmp_path / "runs", "--name", "run"]
    command = ("salloc", *options, "bash", SLURM, "--doctor", "recipes/ddp_resnet", *flags)
    done = call(*command, cwd=tmp_path, **variables)
    assert done.returncode == 2, done.stdout + done.stderr
    checks = dict.fromkeys(re.findall("^(?:breaks|cripples): ([a-z-]+) on ", done.stdout, re.MULTILINE))
    checks.pop("cpu", None)  # right where a control group allows this machine less than two processors
    assert len(checks) == len(found), done.stdout
    assert all(re.fullmatch(want, check) for want, check in zip(found, checks, strict=True)), done.stdout
    assert "so it has not begun" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("command", "processes", "cpus"),
    [
        (["bash", SLURM, "--gpus-per-node=2"], "", "CpusPerTres=gres:gpu:4"),
        (["bash", SLURM, "--gpus-per-node=2", "--cpus-per-gpu=1"], "", "CpusPerTres=gres:gpu:1"),
        (["bash", SLURM, "--gres=gpu:2", "-c3"], "", "NumCPUs=3"),
        (["bash", SLURM], "", "NumCPUs=2"),
        (["bash", SLURM, "-N2"], "3", "NumCPUs=6"),
        (["bash", SLURM, "-N2", "--ntasks-per-node=1"], "3", "NumCPUs=2"),
        (["sbatch", "--gpus-per-node=2"], "", "NumCPUs=1"),
    ],
    ids=["GPUs", "GPUs and CPUs", "CPUs of a task", "no GPUs", "more processes", "tasks", "sbatch alone"],
)
def test_cpus_are_asked_for(command: list[str], processes: str, cpus: str, cluster: Path, tmp_path: Path) -> None:
    """Else a node gives one CPU to all its processes. The job is held, so it never starts."""
    script = [SLURM] if command[0] == "sbatch" else []
    out = run(*command, "--hold", *script, "recipes/ddp_resnet", cwd=tmp_path, NPROC_PER_NODE=processes)
    job = re.fullmatch(r"Submitted batch job (\d+)\n", out)[1]
    try:
        assert f" {cpus} " in run("scontrol", "show", "job", job, "--oneliner")
    finally:
        run("scancel", job)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus-per-node=9", "recipes/ddp_resnet"], "Requested node configuration is not available"),
        (["--nonsense", "recipes/ddp_resnet"], "unrecognized option '--nonsense'"),
        (["-N2", "recipes/none"], r"no recipe among the arguments \(recipes/none\)"),
        ([], r"no recipe among the arguments \(none\)"),
        (["recipes/ddp_resnet", "--epoch", "3"], r"--epochs[^$]*nothing was submitted"),
        (["recipes/ddp_resnet", "--lr", "-1"], r"--lr -1 is out of range[^$]*nothing was submitted"),
        (["recipes/ddp_resnet", "--gpus-per-node=8"], r"Options of sbatch go before the recipe"),
    ],
    ids=["no such GPUs", "bad option", "missing recipe", "nothing", "bad flag", "bad number", "sbatch's option"],
)
def test_refused(words: list[str], message: str, cluster: Path, tmp_path: Path) -> None:
    done = call("bash", SLURM, *words, cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(message, done.stderr), done.stderr
    assert not run("squeue", "-h", "-t", "PD,R")


def test_without_a_cluster(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "basename", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = call("bash", SLURM, "-N2", "recipes/ddp_resnet", cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 2
    assert "so it is not part of a Slurm cluster" in done.stderr
    assert "launch/torchrun.sh" in done.stderr


def test_dry_run(tmp_path: Path) -> None:
    """Says what would be submitted, also where there is no cluster."""
    out = run("bash", SLURM, "--dry-run", "-N2", "--time=4:00:00", "recipes/ddp_resnet", "--name", "a b", cwd=tmp_path)
    cpus = f"--cpus-per-task={os.environ.get('NPROC_PER_NODE', '2')}"
    options = f"--job-name=ddp_resnet {cpus} -N2 --time=4:00:00"
    expected = f"sbatch {options} {SLURM} {runner.ROOT}/recipes/ddp_resnet --name a\\ b"
    assert out.strip() == expected
    out = run("bash", SLURM, "--dry-run", "--doctor", "-N2", "recipes/ddp_resnet", cwd=tmp_path)
    assert out.strip().endswith(f" -N2 {SLURM} --doctor {runner.ROOT}/recipes/ddp_resnet")
