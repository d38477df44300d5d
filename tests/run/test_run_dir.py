"""What a run leaves in its folder, and what of it a run that continues keeps."""

import ctypes
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import UserError, places, ranks
from common.run import cli, process, run_dir

from tests.harness import runner

RECIPE = "recipes/some_recipe/train.py"
WORLD = process.World(0, 2, 2, "host", torch.device("cpu"), "gloo", dist.HashStore())


@dataclasses.dataclass(frozen=True)
class Args:
    """Flags."""

    name: str = ""  # what it is called
    warmup_steps: int = 5  # steps
    lr: float = 0.1  # rate


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / RECIPE
    path.parent.mkdir(parents=True)
    path.write_text("print('trained')\n")
    return str(path)


@pytest.mark.usefixtures("group")
def test_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """By `choose`, or by `claim` on a Python whose Path.exists hides the error."""
    with pytest.raises(UserError, match="too long"):
        run_dir.claim(places.choose(str(tmp_path), "a" * 300), process.Process())


@pytest.fixture
def here(group: None) -> Iterator[process.Process]:
    """Locks are held until a process ends, and this one runs other tests."""
    found = process.Process()
    yield found
    for file in found.locks:
        file.close()


def claim_and_die(path: str, claimed: str) -> None:
    """With a child, such as a loader worker, that goes on."""
    os.environ["SLURM_JOB_ID"] = "1234"
    dist.init_process_group("gloo")
    mine = process.Process()
    run_dir.claim(Path(path), mine)
    assert len(mine.locks) == 1
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(2 * runner.HANG_S)
    Path(claimed).write_text(str(child))
    time.sleep(2 * runner.HANG_S)


def test_claim_that_cannot_be_told_is_refused(
    here: process.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose folder cannot be written to could not be queued again."""
    monkeypatch.setenv("RUN_DIR_FILE", "/nowhere/.slurm-1.run")
    with pytest.raises(
        UserError, match=r"^/nowhere/\.slurm-1\.run cannot be written to \(No such file or directory\)$"
    ):
        run_dir.claim(tmp_path / "run", here)


def test_folder_is_one_process_s_alone_until_it_ends(
    here: process.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    path, claimed = tmp_path / "new" / "run", tmp_path / "claimed"
    refusals: list[str] = []
    pids: list[int] = []

    def come_second(started: list[int]) -> None:
        runner.wait_for(lambda: claimed.exists() and claimed.read_text())
        pids.extend(started)
        for _ in range(2):  # the first refusal leaves the lock where it is
            try:
                run_dir.claim(path, here)
                refusals.append("")
            except UserError as error:
                refusals.append(str(error))
        os.kill(started[0], signal.SIGKILL)

    result = runner.spawn(claim_and_die, [(str(path), str(claimed))], meddle=come_second)
    assert result.codes == [-signal.SIGKILL], str(result)
    owner = f"process {pids[0]} on {socket.gethostname()}, Slurm job 1234"
    told = f"--name run: {path} is in use by {owner}; wait until it ends, or use another --name"
    assert refusals == [told, told]
    child = int(claimed.read_text())
    os.kill(child, 0)  # it lives
    try:
        run_dir.claim(path, here)
    finally:
        os.kill(child, signal.SIGKILL)
    assert (path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def refuse_all(path: str, owner: str) -> None:
    dist.init_process_group("gloo")
    with pytest.raises(UserError, match=re.escape(f"is in use by {owner};")):
        run_dir.claim(Path(path), process.Process())
    dist.destroy_process_group()


def test_refused_claim_is_every_rank_s(here: process.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run_dir.claim(tmp_path, here)
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    result = runner.spawn(refuse_all, [(str(tmp_path), owner)] * 2)
    assert result.ok, str(result)


def claim_on_own_disk(path: str, own: str, refused: bool) -> None:
    """As a machine on which `own` is no shared file system."""
    if own:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWNS: mounts of its own
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", own], check=True)
    run_dir.SHARED_S = 1.0
    dist.init_process_group("gloo")
    if not refused:
        run_dir.claim(Path(path), process.Process())
    else:
        told = f"{socket.gethostname()} cannot see the files that {socket.gethostname()} writes there: use a folder on"
        with pytest.raises(UserError, match=re.escape(told)):
            run_dir.claim(Path(path), process.Process())
    dist.destroy_process_group()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_disk_of_one_machine_is_refused(tmp_path: Path) -> None:
    """Checkpoints that each machine writes for itself would be found by none of the others."""
    runs = tmp_path / "runs"
    runs.mkdir()
    own = [("", str(runs)), ("", "")]
    for first, second in own:
        args = [(str(runs / "run"), place, bool(second)) for place in (first, second)]
        result = runner.spawn(claim_on_own_disk, args)
        assert result.ok, str(result)


def test_config_has_what_it_takes_to_run_again(recipe: str, tmp_path: Path) -> None:
    args = Args(name="x", warmup_steps=7, lr=1 / 3)
    path = tmp_path / "x" / "config.json"
    path.parent.mkdir()
    assert run_dir.write_config(path.parent, recipe, args, WORLD) == []
    assert cli.parse(Args, ["--config", str(path)]) == dataclasses.replace(args, name="")
    config = json.loads(path.read_text())
    assert config["recipe"] == "some_recipe"
    assert (config["world_size"], config["device"], config["backend"]) == (2, "cpu", "gloo")
    assert config["versions"]["torch"] == torch.__version__
    assert config["code"] == ranks.code_digests(recipe)
    assert (path.parent / "train.py").read_text() == Path(recipe).read_text()
    assert sorted(file.name for file in path.parent.iterdir()) == ["config.json", "train.py"]


def test_code_digests_have_every_file(tmp_path: Path) -> None:
    recipe = tmp_path / "train.py"
    recipe.write_text("a = 1\n")
    before = ranks.code_digests(str(recipe))
    files = [recipe, *(runner.ROOT / "common").rglob("*.py")]
    twice = [name for name, count in Counter(path.name for path in files).items() if count > 1]
    assert len(before) == len(files), f"of files with the same name only one is compared: {twice}"
    recipe.write_text("a = 2\n")
    after = ranks.code_digests(str(recipe))
    assert [name for name in before if before[name] != after[name]] == ["train.py"]


def test_changed_flags_are_announced(recipe: str, tmp_path: Path) -> None:
    run_dir.write_config(tmp_path, recipe, Args(), WORLD)
    assert run_dir.write_config(tmp_path, recipe, Args(), WORLD) == []
    assert run_dir.write_config(tmp_path, recipe, Args(warmup_steps=9, lr=0.2), WORLD) == [
        "changed: --warmup-steps is 9, was 5",
        "changed: --lr is 0.2, was 0.1",
    ]
    assert run_dir.write_config(tmp_path, recipe, Args(warmup_steps=9, lr=0.2), WORLD) == [], "told once"


LINES = [
    {"step": 10, "train/loss": 1 / 3},
    {"step": 10, "perf/mfu": 0.5},
    {"step": 20, "val/loss": 0.7, "val/top1": 0.6},
    {"step": 30, "val/loss": 0.5, "val/top1": 0.8},
    {"step": 40, "val/loss": 0.6, "val/top1": 0.8},
]


def write_lines(path: Path, tail: str = "") -> None:
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES) + tail)


@pytest.mark.parametrize(("first_step", "kept"), [(0, 0), (9, 0), (10, 2), (29, 3), (30, 4), (40, 5), (99, 5)])
def test_records_of_steps_done_again_are_dropped(first_step: int, kept: int, tmp_path: Path) -> None:
    write_lines(tmp_path)
    with run_dir.Records(tmp_path, first_step, 0).open() as file:
        file.write('{"step": 50, "train/loss": 0.25}\n')
    assert run_dir.records(tmp_path) == [*LINES[:kept], {"step": 50, "train/loss": 0.25}]


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "loop"])
def test_records_that_are_no_file(what: str, tmp_path: Path) -> None:
    """A pipe would be waited for, and a device read for ever."""
    path = tmp_path / "metrics.jsonl"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(path.name)
    else:
        path.mkdir()
    with pytest.raises(UserError, match=rf"^{path} is not a regular file: move it away, or use another --name$"):
        run_dir.records(tmp_path)


@pytest.mark.parametrize("tail", ["{", '{"step": 5', '{"step": 50, "train/loss": 0.25}'])
def test_line_that_a_kill_has_cut_off_is_dropped(tail: str, tmp_path: Path) -> None:
    write_lines(tmp_path, tail)
    assert run_dir.records(tmp_path) == LINES
    with run_dir.Records(tmp_path, 60, 0).open() as file:
        file.write('{"step": 61}\n')
    assert run_dir.records(tmp_path) == [*LINES, {"step": 61}]


def test_new_runs_start_with_no_records(tmp_path: Path) -> None:
    run_dir.Records(tmp_path, 0, 0).open().close()
    assert run_dir.records(tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], ["--name", "my run"]),
        (["--lr", "1", "--name", "my run", "--seed=3"], ["--lr", "1", "--name", "my run", "--seed=3"]),
        (["--name=my run", "--stop-after", "5", "--lr", "1"], ["--name=my run", "--lr", "1"]),
        (["--stop-after=5", "--lr", "1", "--stop_after", "6"], ["--lr", "1", "--name", "my run"]),
        (["--stop_after=5"], ["--name", "my run"]),
        (["--data", "a b; c"], ["--data", "a b; c", "--name", "my run"]),
    ],
    ids=str,
)
def test_command_to_go_on(flags: list[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be pasted into a shell, and continues this run beyond the step it was stopped after."""
    monkeypatch.delenv("LAUNCHED_AS", raising=False)
    monkeypatch.setattr(sys, "argv", ["my recipes/train.py", *flags])
    path = Path("/runs/my run")
    assert shlex.split(run_dir.resume_command(path, 1)) == ["python", "my recipes/train.py", *wanted]
    launched = ["torchrun", "--nproc-per-node=4", "my recipes/train.py", *wanted]
    assert shlex.split(run_dir.resume_command(path, 4)) == launched
    monkeypatch.setenv("LAUNCHED_AS", "NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/x")
    assert run_dir.resume_command(path, 4) == f"NPROC_PER_NODE=4 bash launch/torchrun.sh recipes/x {shlex.join(wanted)}"


LAUNCHERS = {  # what the launcher has set, and what starts as many processes
    "torchrun on two machines": (
        {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"},
        "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --nproc-per-node=2",
    ),
    "torchrun": ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}, "torchrun --nproc-per-node=4"),
    "srun": (
        {"LOCAL_WORLD_SIZE": "1"},
        "torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --nproc-per-node=1",
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_command_names_as_many_machines(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of somebody else's launcher the ranks know how many they are, and on how many machines."""
    environ, wanted = LAUNCHERS[launcher]
    for name in ("LAUNCHED_AS", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert run_dir.resume_command(Path("/runs/x"), 4) == f"{wanted} train.py --name x"


@pytest.mark.parametrize("content", ["[" * 100_000, "pipe", "device"])
def test_config_that_is_a_trap_is_replaced(content: str, tmp_path: Path) -> None:
    if content == "pipe":
        os.mkfifo(tmp_path / "config.json")
    elif content == "device":
        (tmp_path / "config.json").symlink_to("/dev/zero")
    else:
        (tmp_path / "config.json").write_text(content)
    recipe = str(runner.ROOT / "recipes" / "ddp_resnet" / "train.py")
    (line,) = run_dir.write_config(tmp_path, recipe, Args(), WORLD)
    assert line.startswith(f"warning: {tmp_path}/config.json of an earlier start could not be read and is replaced: ")
    assert json.loads((tmp_path / "config.json").read_text())["args"]
