"""launch/torchrun.sh between machines without Slurm: `uv run pytest -m machines` (root, iproute2)."""

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from common.train import flops
from tools.profile import table, traces

from tests.conftest import write_text
from tests.harness import inject, mutants, runner, short_resnet, stranger  # noqa: F401 (--model resnet6)
from tests.harness.fault_case import checkpoints
from tests.harness.machines import Machine, joined
from tests.harness.states import same_tensors

pytestmark = pytest.mark.machines

LAUNCHER = runner.ROOT / "launch" / "torchrun.sh"
RECIPE = "multinode_resnet"
SAMPLES, BATCH, STEPS = 1433, 120, 12  # an epoch of the digits: 11 whole steps, and one of 113 samples
SAVE_EVERY = 2
HANG_S = 5.0
OUTAGE_S = 1.0  # after that it takes TCP as long again to notice that the link is back
FLAGS = (
    *("--epochs", "1", "--max-steps", "0", "--global-batch-size", str(BATCH), "--warmup-steps", "2"),
    *("--dtype", "float64", "--log-every", "1", "--eval-every", "1000"),
    *("--save-every", str(SAVE_EVERY), "--keep", "9"),
)
# The same sums on any number of ranks: one micro-batch a step, and norms over all of it.
EXACT = ("--micro-batch-size", "0", "--sync-bn")
ANY_NUMBER = ("--micro-batch-size", "40")
CURVES = ("train/loss", "train/grad_norm", "val/loss")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        assert "CI" not in os.environ, "CI runs this as root, and installs iproute2"
        pytest.skip("machines need root and iproute2")
    with joined(tmp_path, 3) as them:
        yield them


# --- a job on them ----------------------------------------------------------------------------------------


def train(recipe: str, folder: str, argv: Sequence[str], mutant: str = "") -> None:
    """Run a recipe as one rank: note what it is asked to read, and wait after a step for as long as a test holds it."""
    from common.protect import peers
    from common.run import stop
    from common.train import data, sampler

    flops.count_sample = lambda *_: flops.Sample()  # measuring takes longer than the training
    if mutant:
        inject.MUTANTS[mutant]()
    after, is_silent = stop.Stop.after, peers.Peers.next_is_silent
    group = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"  # each start of the ranks has another

    def note(**what: Any) -> None:
        with Path(folder, "notes.jsonl").open("a") as file:
            file.write(json.dumps({"rank": int(os.environ["RANK"]), "group": group, "time": time.time()} | what) + "\n")

    def noted_requests(plan: sampler.Plan, dp_rank: int) -> Iterator[sampler.Request]:
        step = plan.first_step + 1
        for request in sampler.training_requests(plan, dp_rank):
            note(event="read", step=step, indices=request.indices.tolist())
            yield request
            step += request.last

    def noted_training(train: Any, plan: sampler.Plan, dp_rank: int, *args: Any) -> data.Loader:
        return data.Loader(train, noted_requests(plan, dp_rank), *args)

    def held_after(self: stop.Stop, step: int) -> bool:
        note(event="done", step=step, size=int(os.environ["WORLD_SIZE"]), pid=os.getpid())
        while Path(folder, f"hold{step}").exists() and not self.reason:
            data.Loader.batches_read += 1  # progress: who is held, for however long, does not hang
            time.sleep(0.02)
        return after(self, step)

    def noted_silent(self: peers.Peers) -> bool:
        found = is_silent(self)
        if found:
            note(event="silent")
        return found

    data.training, stop.Stop.after = noted_training, held_after
    peers.Peers.next_is_silent = noted_silent  # type: ignore[method-assign]
    sys.argv = [recipe, *argv]
    runpy.run_path(recipe, run_name="__main__")


def notes_in(folder: Path, event: str) -> list[dict[str, Any]]:
    """What the ranks have noted so far; without a line that is being written."""
    file = folder / "notes.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    notes = [json.loads(line) for line in lines if line.endswith("\n")]
    return [note for note in notes if note["event"] == event]


class Job:
    """One command, started on some machines, with a folder that all of them see."""

    def __init__(
        self, folder: Path, machines: Sequence[Machine], *flags: str, recipe: str = RECIPE, **environ: str
    ) -> None:
        self.folder, self.machines = folder, [*machines]
        self.run = folder / "out" / "run"
        self.started: list[subprocess.Popen[bytes]] = []
        self.flags = (*FLAGS, *runner.small(recipe), *flags, "--out", str(folder / "out"), "--name", "run")
        self.environ = {"NNODES": str(len(machines)), "NPROC_PER_NODE": "1", "MASTER_ADDR": machines[0].address}
        self.environ |= {"RUN_KEY": 32 * "0a"}
        self.environ |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environ
        self.recipe = folder / recipe
        self.recipe.mkdir()
        path = runner.ROOT / "recipes" / recipe / "train.py"
        call = f"test_machines.train({str(path)!r}, {str(folder)!r}, sys.argv[1:])"
        self.recipe.joinpath("train.py").write_text(f"import sys\nfrom tests.launch import test_machines\n\n{call}\n")

    def start(self, machine: Machine, *options: str, **environ: str) -> subprocess.Popen[bytes]:
        command = ["bash", LAUNCHER, *options, self.recipe, *self.flags]
        variables = {"NODE_RANK": str(machine.number)} | self.environ | environ
        self.started.append(machine.popen(command, self.folder / f"output{machine.number}", os.environ | variables))
        return self.started[-1]

    def output(self, machine: Machine) -> str:
        return (self.folder / f"output{machine.number}").read_text()

    def notes(self, event: str) -> list[dict[str, Any]]:
        return notes_in(self.folder, event)

    def hold(self, *steps: int) -> None:
        """Let the ranks wait at the end of these steps."""
        for step in steps:
            (self.folder / f"hold{step}").touch()

    def release(self, step: int) -> None:
        (self.folder / f"hold{step}").unlink()

    def wait(self, condition: Callable[[], object]) -> None:
        runner.wait_for(condition, self)

    def wait_done(self, step: int, size: int) -> None:
        """Wait until a world of `size` ranks has done a step."""

        def done() -> bool:
            notes = [note for note in self.notes("done") if note["step"] == step]
            found = len([note for note in notes if note["size"] == size]) >= size
            assert found or not self.started or any(one.poll() is None for one in self.started), f"ended\n{self}"
            return found

        self.wait(done)

    def wait_ended(self, *processes: subprocess.Popen[bytes]) -> list[int]:
        self.wait(lambda: all(process.poll() is not None for process in processes))
        return [process.returncode for process in processes]

    def __str__(self) -> str:
        outputs = [
            f"[{one.name}]\n{self.output(one)}"
            for one in self.machines
            if (self.folder / f"output{one.number}").exists()
        ]
        logs = [f"[{path.name}]\n{path.read_text()}" for path in sorted(self.run.glob("logs/*.log"))]
        return "\n".join([*outputs, *logs])


def reads(notes: Sequence[dict[str, Any]]) -> dict[int, list[list[int]]]:
    """What each step of the surviving history has read: of each step, all micro-batches of its last attempt."""
    last = {note["step"]: note["group"] for note in notes}
    found: dict[int, list[list[int]]] = {step: [] for step in sorted(last)}
    for note in notes:
        if note["group"] == last[note["step"]]:
            found[note["step"]].append(note["indices"])
    return found


def check_each_once(notes: Sequence[dict[str, Any]], readers: int = 1) -> None:
    """Every sample of the epoch was consumed once, whoever came and went; by as many ranks as read the same."""
    found = [index for step in reads(notes).values() for indices in step for index in indices]
    assert sorted(found) == sorted([*range(SAMPLES)] * readers)


def check_curve(run: Path, wanted: Path, rel: float = 0.0) -> None:
    """Each step's metrics are there once, and they are those of another run."""
    for tag in CURVES:
        found, expected = runner.records(run, tag), runner.records(wanted, tag)
        assert found == pytest.approx(expected, rel=rel, abs=0), tag
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [*range(1, STEPS + 1)]


def reference(folder: Path, size: int, *flags: str, recipe: str = RECIPE) -> Path:
    """The same training on one machine."""
    argv = (*FLAGS, *runner.small(recipe), *flags)
    result = runner.run_recipe(recipe, size, *argv, "--out", str(folder), "--name", f"reference{size}")
    assert result.ok, str(result)
    return folder / f"reference{size}"


# --- together ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", runner.ends())
def test_the_curve_is_that_of_one_process(recipe: str, machines: list[Machine], tmp_path: Path) -> None:
    exact = EXACT
    layout = runner.layout(recipe, 2)
    if runner.workload(recipe) == "gpt":
        micro_batch_size = "40" if "--pp" in layout.flags else "0"  # a pipeline needs several
        exact = ("--micro-batch-size", micro_batch_size, "--data", str(write_text(tmp_path / "text", SAMPLES, 30)))
    job = Job(tmp_path, machines[:2], *exact, *layout.strategy, recipe=recipe)
    processes = [job.start(machine) for machine in job.machines]
    wanted = reference(tmp_path, 1, *exact, *runner.layout(recipe, 1).strategy, recipe=recipe)
    assert job.wait_ended(*processes) == [0, 0], str(job)
    assert "2 processes on 2 hosts (first: machine0)" in job.output(machines[0])
    assert not job.output(machines[1]), "only rank 0 prints"
    check_curve(job.run, wanted, rel=1e-9)
    check_each_once(job.notes("read"), readers=layout.size // layout.dp_size)


# --- the link ---------------------------------------------------------------------------------------------


def test_profile_of_a_slow_link(machines: list[Machine], tmp_path: Path) -> None:
    """The time that the link needs for the bytes is among what is sent; benchmarks/profiling.py compares it exactly."""
    text = write_text(tmp_path / "text", SAMPLES, 30)
    model = ("--num-layers", "2", "--width", "192", "--mlp-width", "512", "--seq-len", "64", "--dtype", "float32")
    steps = ("--profile", "6", "--save-every", "1000", "--check-every", "0", "--global-batch-size", "24")
    job = Job(tmp_path, machines[:2], *EXACT[:2], "--data", str(text), *steps, *model, recipe="ddp_gpt")
    for machine in job.machines:
        machine.shape("50mbit")
    assert job.wait_ended(*(job.start(machine) for machine in job.machines)) == [0, 0], str(job)
    ranks, _ = traces.read(traces.find(job.run, 0), 0)
    found = table.judge(ranks)
    (megabytes,) = (one.megabytes for one in found.sent if one.name == "all_reduce")
    sends = found.mean["exposed"] + found.mean["slower"] + found.mean["hidden"]
    assert sends > 0.85 * megabytes * 8 / 50  # of two ranks, each sends all bytes once
    assert found.mean["exposed"] > found.mean["hidden"], "a small model hides little"
    said = table.said(ranks[0].facts, found)
    assert "of the step only sends: a larger --global-batch-size, or a faster network" in said


def test_link_down(machines: list[Machine], tmp_path: Path) -> None:
    """For a moment: the run continues. For good: both sides report it and exit; the same commands continue the run."""
    job = Job(tmp_path, machines[:2], *EXACT, "--hang-timeout", str(HANG_S))
    job.hold(4, 7)
    processes = [job.start(machine) for machine in job.machines]
    wanted = reference(tmp_path, 2, *EXACT)
    job.wait_done(4, 2)
    machines[1].link("down")
    job.release(4)
    time.sleep(OUTAGE_S)
    assert max(note["step"] for note in job.notes("done")) == 4
    machines[1].link("up")
    job.wait_done(7, 2)
    assert len(job.notes("done")) == 2 * 7, "nothing was done again"

    machines[1].link("down")
    job.release(7)
    codes = job.wait_ended(*processes)
    assert codes == [1, 1], str(job)
    assert "dead or frozen; last heartbeat of rank 1 (host machine1, " in job.output(machines[0])
    cut_off = (
        "machine 0, which hosts the rendezvous 10.29.4.9:29400, has ended or is cut off; to resume, start the same"
    )
    assert cut_off in job.output(machines[1])
    log = (job.run / "logs" / "rank_00001.log").read_text()
    assert re.search(r"rank 1 \(host machine1, pid \d+, step \d+\) gets no answer from the store: its host", log)
    assert not any(machine.pids() for machine in machines)

    machines[1].link("up")
    assert job.wait_ended(*[job.start(machine) for machine in job.machines]) == [0, 0], str(job)
    assert "resuming from step 6 of" in job.output(machines[0])
    check_curve(job.run, wanted)
    assert same_tensors(checkpoints(job.run)[STEPS], checkpoints(wanted)[STEPS])
    check_each_once(job.notes("read"))


@pytest.mark.parametrize("inner_steps", [6, 1])
def test_replicas_that_a_link_parts(inner_steps: int, machines: list[Machine], tmp_path: Path) -> None:
    """diloco_gpt: a machine that is cut off continues to the outer step, and is averaged in when it is back."""
    text = ("--data", str(write_text(tmp_path / "text", SAMPLES, 30)), "--micro-batch-size", "0")
    flags = (*text, "--inner-steps", str(inner_steps), "--log-every", "6", "--save-every", "6", "--check-every", "0")
    job = Job(tmp_path, machines[:2], *flags, recipe="diloco_gpt")
    job.hold(1)
    processes = [job.start(machine) for machine in job.machines]
    wanted = reference(tmp_path, 2, *flags, recipe="diloco_gpt")
    job.wait_done(1, 2)
    machines[1].link("down")
    job.release(1)
    if inner_steps == 6:
        job.wait(lambda: sum(note["step"] == 5 for note in job.notes("done")) == 2)
    else:
        time.sleep(OUTAGE_S)
        assert max(note["step"] for note in job.notes("done")) < 5, "with one inner step, it waits"
    machines[1].link("up")
    assert job.wait_ended(*processes) == [0, 0], str(job)
    assert runner.records(job.run, "train/loss") == runner.records(wanted, "train/loss")
    assert same_tensors(checkpoints(job.run)[STEPS], checkpoints(wanted)[STEPS])
    check_each_once(job.notes("read"))


def test_link_down_and_restarts(machines: list[Machine], tmp_path: Path) -> None:
    """The side that has the rendezvous continues alone, with more micro-batches a step; the other one exits."""
    flags = (*ANY_NUMBER, "--hang-timeout", str(HANG_S))
    job = Job(tmp_path, machines[:2], *flags, NNODES="1:2", MAX_RESTARTS="1")
    job.hold(4)
    stays, goes = (job.start(machine) for machine in job.machines)
    wanted = reference(tmp_path, 1, *flags)
    job.wait_done(4, 2)
    machines[1].link("down")
    job.release(4)
    assert job.wait_ended(goes) == [1], str(job)
    assert "machine 0, which hosts the rendezvous 10.29.4.9:29400, has ended or is cut off" in job.output(machines[1])
    assert job.wait_ended(stays) == [0], str(job)
    assert "dead or frozen; last heartbeat of rank 1 (host machine1, " in job.output(machines[0])
    check_each_once(job.notes("read"))
    numbers = {step: len(indices) for step, indices in reads(job.notes("read")).items()}
    assert [numbers[step] for step in (1, STEPS - 1)] == [2 * 2, 3], "2 on each of two ranks, and 3 on one"
    assert runner.records(job.run, "train/lr") == runner.records(wanted, "train/lr")


def test_killed_without_a_word(machines: list[Machine], tmp_path: Path) -> None:
    """A process of another machine, while this one waits for nobody: no collective fails, and its limit is far."""
    job = Job(tmp_path, machines[:2], *EXACT, "--hang-timeout", "100")
    job.hold(4)
    processes = [job.start(machine) for machine in job.machines]
    job.wait_done(4, 2)
    pid = next(note["pid"] for note in job.notes("done") if note["rank"] == 1)
    os.kill(pid, signal.SIGKILL)
    job.wait(lambda: "dead or frozen; last heartbeat of rank 1 (host machine1, " in job.output(machines[0]))
    assert all(job.wait_ended(*processes)), str(job)
    assert not job.notes("silent"), f"its connection has told, and not 10 s without a heartbeat\n{job}"


# --- a machine lost ---------------------------------------------------------------------------------------


def test_two_one_two(machines: list[Machine], tmp_path: Path) -> None:
    """A machine dies, the other one continues alone, it comes back: as if nothing had happened."""
    job = Job(tmp_path, machines[:2], *EXACT, NNODES="1:2", MAX_RESTARTS="1")
    job.hold(4, 7)
    first, _ = (job.start(machine) for machine in job.machines)
    wanted = reference(tmp_path, 1, *EXACT)
    job.wait_done(4, 2)
    machines[1].die()
    job.release(4)
    job.wait_done(7, 1)
    assert "dead or frozen; last heartbeat of rank 1 (host machine1, " in job.output(machines[0])
    assert "1 process on machine0" in job.output(machines[0])
    back = job.start(machines[1])
    job.wait_done(8, 2)
    assert job.wait_ended(first, back) == [0, 0], str(job)
    sizes = {note["step"]: note["size"] for note in job.notes("done")}
    assert [*sizes.values()] == [2, 2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2], "the machine that came back cost no step"
    check_curve(job.run, wanted, rel=1e-9)
    check_each_once(job.notes("read"))


def test_machines_die(machines: list[Machine], tmp_path: Path) -> None:
    """Of three, one: two do not divide the batch, and continue. Then the one where they meet: that is the end."""
    flags = ("--global-batch-size", "123", "--micro-batch-size", "41")
    job = Job(tmp_path, machines, *flags, NNODES="2:3", MAX_RESTARTS="3")
    job.hold(4, 7)
    processes = [job.start(machine) for machine in machines]
    wanted = reference(tmp_path, 1, *flags)
    job.wait_done(4, 3)
    machines[2].die()
    job.release(4)
    job.wait_done(7, 2)
    assert "dead or frozen; last heartbeat of rank 2 (host machine2, " in job.output(machines[0])
    assert "2 processes on 2 hosts" in job.output(machines[0])
    steps = reads(job.notes("read"))
    assert [len(steps[step]) for step in range(1, 8)] == [3, 3, *[4] * 5], "one on each of 3, two on each of 2"
    for step in range(1, 8):
        assert len({index for indices in steps[step] for index in indices}) == 123
    lr = runner.records(job.run, "train/lr")
    assert lr == {step: one for step, one in runner.records(wanted, "train/lr").items() if step in lr}
    assert {*range(1, 7)} <= {*lr}

    machines[0].die()
    assert job.wait_ended(processes[1]) == [1], str(job)
    assert "machine 0, which hosts the rendezvous 10.29.4.9:29400, has ended or is cut off" in job.output(machines[1])
    assert "Traceback" not in job.output(machines[1])


SAME_RANK = {"dp_coordinates": {"mesh.get_local_rank('dp')": "0"}}
SHIFTED = "the position is that of the step before"  # of inject.MUTANTS


@pytest.mark.parametrize("mutant", ["", "every rank has dp rank 0", SHIFTED])
def test_mutants_that_each_once_must_notice(mutant: str, tmp_path: Path) -> None:
    """The same bookkeeping on one machine: 2 ranks to step 5, then 1, with a defect."""
    path = mutants.mutate(RECIPE, tmp_path, SAME_RANK if mutant == "every rank has dp rank 0" else {})
    patch = mutant if mutant == SHIFTED else ""
    argv = [*FLAGS, *runner.small(RECIPE), *EXACT, "--out", str(tmp_path / "out"), "--name", "run"]
    for size, more in ((2, ["--stop-after", "5"]), (1, [])):
        result = runner.spawn(train, [(str(path), str(tmp_path), argv + more, patch)] * size)
        assert result.ok, str(result)
    notes = notes_in(tmp_path, "read")
    with pytest.raises(AssertionError) if mutant else contextlib.nullcontext():
        check_each_once(notes)


# --- a stranger -------------------------------------------------------------------------------------------

UNSEALED = """from common import seal
real_close, real_unseal = seal.close, seal.unseal
bare = lambda name: name.startswith({names!r})
encoded = lambda value: value.encode() if isinstance(value, str) else value
seal.close = lambda key, name, value: encoded(value) if bare(name) else real_close(key, name, value)
seal.unseal = lambda key, name, sealed: sealed if bare(name) else real_unseal(key, name, sealed)
"""
LAUNCHERS, RANKS = ("torch.rendezvous",), ("stop/", "watch/")  # names in their stores
KEEP_ALIVE_S = 5.0  # each launcher reads torch's rendezvous as often


# One mutant for each store: either ends the training before anybody reads the other.
@pytest.mark.parametrize("mutant", [(), LAUNCHERS, RANKS], ids=["sealed", "mutant of the launchers", "mutant of ranks"])
def test_stranger(mutant: tuple[str, ...], machines: list[Machine], tmp_path: Path) -> None:
    """A third machine, at every port of the other two: nothing of its own runs, counts or shows."""
    here, there, outside = machines
    path = tmp_path / "mutant"
    path.mkdir()
    if mutant:
        (path / "sitecustomize.py").write_text(UNSEALED.format(names=mutant))
    job = Job(tmp_path, [here, there], *EXACT, PYTHONPATH=str(path))
    job.hold(4)
    processes = [job.start(machine) for machine in job.machines]
    wanted = reference(tmp_path, 2, *EXACT)
    job.wait_done(4, 2)
    places = []
    for machine in job.machines:
        found = stranger.listening(machine.pids(), "ip", "netns", "exec", machine.space)
        assert {address for address, _ in found} == {machine.address}, "not on all interfaces"
        places += found
    assert (here.address, 29400) in places
    print(f"they listen at {places}")
    ran, output = tmp_path / "ran", tmp_path / "stranger"
    words = [f"{address}:{port}" for address, port in places]
    outside.popen([sys.executable, "-m", "tests.harness.stranger", str(ran), *words], output, {**os.environ})
    if mutant == LAUNCHERS:
        job.wait(ran.exists)
        return
    if mutant:  # whichever rank 0 reads first
        job.wait(lambda: re.search("(a finding of|SIGTERM on) a stranger", job.output(here)))
        return
    job.wait(lambda: "pesters" in output.read_text())
    seen = [json.loads(line)["names"] for line in output.read_text().splitlines() if line.startswith("{")]
    assert len([names for names in seen if "watch/0" in names]) == 1, "it has found the ranks' store"
    assert len([names for names in seen if "torch.rendezvous.brigade" in names]) == 1, "and the launchers'"
    time.sleep(KEEP_ALIVE_S + 2)
    job.release(4)
    assert job.wait_ended(*processes) == [0, 0], str(job)
    assert not ran.exists()
    assert "evil" not in str(job)
    assert "\x1b" not in str(job)
    ignored = "warning: a stranger writes to the rendezvous 10.29.4.9:29400: ignored\n"
    warned = [job.output(machine).count(ignored) for machine in job.machines]
    assert sorted(warned) in ([0, 1], [1, 1]), f"who notices puts its own state back, before others look\n{job}"
    check_curve(job.run, wanted)
    assert same_tensors(checkpoints(job.run)[STEPS], checkpoints(wanted)[STEPS])


# --- refusals ---------------------------------------------------------------------------------------------

QUICK = "--rdzv-conf=is_host=0,last_call_timeout=5,read_timeout=3"  # else a minute


def refused(job: Job, machine: Machine, process: subprocess.Popen[bytes], message: str) -> None:
    """With one line and nothing else."""
    assert job.wait_ended(process) == [2], str(job)
    assert job.output(machine) == f"error: {message}\n"


def test_port_in_use(machines: list[Machine], tmp_path: Path) -> None:
    """By a program that takes connections and says nothing."""
    job = Job(tmp_path, machines[:2])
    program = "import socket, time; s = socket.create_server(('', 29400)); print('there', flush=True); time.sleep(600)"
    machines[0].popen([sys.executable, "-c", program], tmp_path / "other", {**os.environ})
    job.wait(lambda: "there" in (tmp_path / "other").read_text())
    first, second = job.start(machines[0]), job.start(machines[1], QUICK)
    where = "10.29.4.9:29400"
    taken = f"another program on this machine uses the port of {where}: set another MASTER_PORT on all machines"
    refused(job, machines[0], first, taken)
    refused(job, machines[1], second, NOBODY.format(where))


NOBODY = (
    "no rendezvous answers at {}: check that the command runs on machine 0 (NODE_RANK=0), that MASTER_ADDR is its "
    "address, and that its firewall opens MASTER_PORT"
)


def test_nobody_there(machines: list[Machine], tmp_path: Path) -> None:
    """At an address where nothing listens, at one that nobody has, at a name that nobody knows."""
    job = Job(tmp_path, machines)
    where = dict(zip((machines[0].address, "10.29.4.99", "nobody.invalid"), machines, strict=True))
    processes = [job.start(one, QUICK, MASTER_ADDR=address, NODE_RANK="1") for address, one in where.items()]
    *others, unknown = zip(processes, where.items(), strict=True)
    for process, (address, machine) in others:
        refused(job, machine, process, NOBODY.format(f"{address}:29400"))
    process, (_, machine) = unknown
    assert job.wait_ended(process) == [2], str(job)
    wanted = r"^error: MASTER_ADDR=nobody\.invalid does not resolve on this machine \(.*\): use machine 0's address$"
    assert re.search(wanted, job.output(machine), re.MULTILINE), str(job)


# Machine 0 has the store for some seconds before it says whose it is.
LATE = """import time
from torch import distributed
make = distributed.TCPStore
distributed.TCPStore = lambda *args, **more: (make(*args, **more), time.sleep(3))[0]
"""


def test_another_key(machines: list[Machine], tmp_path: Path) -> None:
    """A machine that does not know the job's key is refused, and the job's own do not notice."""
    job = Job(tmp_path, machines[:2])
    first = job.start(machines[0])
    second = job.start(machines[1], RUN_KEY=32 * "0b")
    where = "10.29.4.9:29400"
    refused(
        job,
        machines[1],
        second,
        f"{where} has another RUN_KEY: set the same on all machines, or another MASTER_PORT for another job",
    )
    assert first.poll() is None
    assert not job.output(machines[0])


def test_two_jobs_at_one_port(machines: list[Machine], tmp_path: Path) -> None:
    """Machine 0's waits for its own, the other is refused on every machine, also where it was the first to come."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    job = Job(tmp_path, machines[:2])
    other = job.start(machines[1], RDZV_ID="other")
    waiting = job.start(machines[0], PYTHONPATH=str(tmp_path))
    message = "10.29.4.9:29400 is in use by job brigade, and this is job other: set another MASTER_PORT"
    refused(job, machines[1], other, message)
    assert waiting.poll() is None
    assert not job.output(machines[0])
