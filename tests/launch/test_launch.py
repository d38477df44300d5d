"""The launcher and real torchrun: slow starts, so each run here proves several things."""

import getpass
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from common.run import stop
from torch.distributed.run import parse_args

from tests.harness import mutants, runner

LAUNCHER = runner.ROOT / "launch" / "torchrun.sh"
TORCHRUN = Path(sys.executable).with_name("torchrun")
DDP = "recipes/ddp_resnet"
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
HERE = ("--rdzv-backend=brigade", "--rdzv-endpoint=here")  # the rendezvous of one machine
KEY = 32 * "0a"
TWO_STEPS = ("--max-steps", "2", "--global-batch-size", "8", "--log-every", "1")
OF_TRAINING = {"train/loss", "train/lr", "train/grad_norm"}
TAGS = {
    *("perf/samples_per_s", "perf/memory_gib", "perf/data_wait_s"),
}
EVAL_METRIC = {"resnet": "val/top1", "gpt": "val/bits_per_byte", "ppo": "val/return", "mimo": "se_median/l4_mmse"}
LAUNCH_VARIABLES = {
    *("NPROC_PER_NODE", "MAX_RESTARTS", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RDZV_ID"),
    *("PYTHONPATH", "LAUNCHED_AS", "STAGE_DIR", "STAGED_DATA", "ACCELERATE_CONFIG", "RUN_KEY"),
    *("TORCHINDUCTOR_CACHE_DIR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("NUMA_BINDING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"),
}
OF_GLIBC = ["MALLOC_TRIM_THRESHOLD_=1073741824", "MALLOC_MMAP_THRESHOLD_=33554432"]  # bytes; without GPUs


def environ(changes: Mapping[str, str]) -> dict[str, str]:
    """This environment without what would steer a launch; on the CPU, one thread each: the same sums everywhere."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCH_VARIABLES}
    return kept | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | changes


def popen(command: Sequence[str | Path], cwd: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start in a session of its own, so that `wait` can end torchrun and its ranks together."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=environ(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait(process: subprocess.Popen[str], timeout_s: float = runner.HANG_S) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def shell(command: Sequence[str | Path], cwd: Path = runner.ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return wait(popen(command, cwd, variables))


def launch(*args: str | Path, cwd: Path = runner.ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return shell(["bash", LAUNCHER, *args], cwd, **variables)


def planned(*args: str | Path, cwd: Path = runner.ROOT, **variables: str) -> list[str]:
    """What --dry-run prints, taken apart as a shell would."""
    result = launch("--dry-run", *args, cwd=cwd, **variables)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert result.stdout.count("\n") == 1
    return shlex.split(result.stdout)


def training_flags(data: Path, out: Path, name: str) -> list[str]:
    return [*TWO_STEPS, "--data", str(data), "--out", str(out), "--name", name]


def assert_trained(run: Path, world_size: int, curve: str = "train/loss") -> None:
    assert list(runner.records(run, curve)) == [1, 2]
    assert json.loads((run / "config.json").read_text())["world_size"] == world_size


# One of each workload, and those with more files than the others. tests/tools/test_copy.py trains a copy of each.
COPIED = [
    one
    for one in runner.RECIPES
    if runner.stands_for_workload(one) or (runner.ROOT / "recipes" / one / "configs").exists()
]


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.rest] * (f"recipes/{name}" != DDP)) for name in COPIED]
)
def test_copied_recipe(recipe: str, small_data: dict[str, Path], tmp_path: Path) -> None:
    """`cp -r recipes/X my_project; cp -r common my_project/` is a project of its own, launched from anywhere."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    copy = shutil.copytree(runner.ROOT / "recipes" / recipe, tmp_path / "my project")
    shutil.copytree(runner.ROOT / "common", copy / "common")
    with (copy / "common" / "__init__.py").open("a") as file:
        file.write('\n\nimport os\n\nos.write(1, f"imported {__file__}\\n".encode())\n')  # whole: ranks share a pipe
    (tmp_path / "elsewhere").mkdir()
    workload = runner.workload(recipe)
    supervised, trains = recipe in runner.SUPERVISED, recipe in runner.TRAINING
    curve = runner.curve(recipe)
    flags = ["--max-steps", "2", "--log-every", "1", *runner.small(recipe), "--out", "our runs", "--name", "first"]
    if supervised:
        flags = training_flags(small_data[workload], Path("our runs"), "first")
    result = launch("../my project", *flags, cwd=tmp_path / "elsewhere")
    assert result.returncode == 0, result.stdout + result.stderr
    world_size = min(2, runner.world_sizes(recipe)[-1])
    imported = re.findall("^imported (.*)$", result.stdout, re.MULTILINE)
    assert imported == [str(copy / "common" / "__init__.py")] * world_size

    run = tmp_path / "elsewhere" / "our runs" / "first"
    assert_trained(run, world_size, curve)
    for line in (
        "done     step 2 of 2 in ",
        f"best     {EVAL_METRIC[workload]} " if trains else f"step 2/2  {EVAL_METRIC[workload]} ",
        f"files    {run}\n",
        "plot     tensorboard ",
    ):
        assert result.stdout.count(line) == 1, result.stdout
    go_on = re.findall(r"^resume   (.*)  \(training is complete", result.stdout, re.MULTILINE)
    assert [shlex.split(line) for line in go_on] == [
        ["OMP_NUM_THREADS=1", "bash", str(LAUNCHER), "../my project", *flags]
    ]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step_00000002", "latest"}
    assert (run / "checkpoints" / "step_00000002" / "MANIFEST.json").is_file()
    events = EventAccumulator(str(run))
    events.Reload()
    more = {"val/loss", "perf/mfu"} if supervised else {"rl/return", "rl/length"}
    wanted = TAGS | {curve, EVAL_METRIC[workload]} | ((OF_TRAINING | more) if trains else set())
    assert set(events.Tags()["scalars"]) >= wanted
    assert [event.step for event in events.Scalars(curve)] == [1, 2]
    logs = [path.name for path in sorted(run.glob("logs/*"))]
    assert logs == [f"rank_{rank:05d}.log" for rank in range(1, world_size)]
    assert (run / "train.py").read_text() == runner.source(recipe)
    config = ("--config", str(run / "config.json"), "--out", str(tmp_path / "again"), "--name", "second")
    repeated = runner.run_recipe(recipe, world_size, *config)
    assert repeated.ok, str(repeated)
    for tag in (curve, "train/grad_norm", EVAL_METRIC[workload]):
        assert runner.records(tmp_path / "again" / "second", tag) == runner.records(run, tag), tag

    digest = hashlib.sha256((copy / "common" / "__init__.py").read_bytes()).hexdigest()
    assert digest[:16] in json.loads((run / "config.json").read_text())["code"].values(), "the copy's code is recorded"


def test_plain_python(small_digits: Path, tmp_path: Path) -> None:
    result = shell([sys.executable, f"{DDP}/train.py", *training_flags(small_digits, tmp_path, "run")])
    assert result.returncode == 0, result.stderr
    assert_trained(tmp_path / "run", 1)


@pytest.mark.parametrize(
    ("what", "world_size"),
    [
        pytest.param([f"{DDP}/train.py"], 2, id="file"),
        pytest.param(["-m", "recipes.ddp_resnet.train"], 1, id="module"),
    ],
)
def test_torchrun(what: list[str], world_size: int, small_digits: Path, tmp_path: Path) -> None:
    flags = training_flags(small_digits, tmp_path, "run")
    result = shell([TORCHRUN, "--standalone", "--nproc-per-node", str(world_size), *what, *flags])
    assert result.returncode == 0, result.stderr
    assert_trained(tmp_path / "run", world_size)
    assert (tmp_path / "run" / "train.py").read_text() == runner.source("ddp_resnet")


@pytest.mark.rest
def test_two_machines(small_digits: Path, tmp_path: Path) -> None:
    """Two launchers on one host, one process each, that see the same folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["bash", LAUNCHER, DDP, *training_flags(small_digits, tmp_path, "run")]
    machines = [
        popen(
            command,
            runner.ROOT,
            {
                "NNODES": "2",
                "NODE_RANK": str(i),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NPROC_PER_NODE": "1",
                "RUN_KEY": KEY,
            },
        )
        for i in range(2)
    ]
    results = [wait(machine) for machine in machines]
    assert [result.returncode for result in results] == [0, 0], [result.stderr for result in results]
    assert_trained(tmp_path / "run", 2)
    assert "2 processes on 2 hosts" in results[0].stdout
    assert results[0].stdout.count("done     step 2 of 2") == 1
    assert not results[1].stdout, "rank 0 speaks for all"
    printed = "".join(result.stdout + result.stderr for result in results)
    written = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert KEY not in printed
    assert not any(KEY.encode() in content for content in written), "the key stays in the environment"


def test_rank_that_raises(small_digits: Path, tmp_path: Path) -> None:
    """The launcher's last words: which rank, and its traceback."""
    saves = "run.save(step)"
    broken = 'if step == 2 and world.rank == 1: raise ArithmeticError("this one breaks")'
    path = mutants.mutate("ddp_resnet", tmp_path, {"main": {saves: f"{saves}\n{broken}"}})
    flags = training_flags(small_digits, tmp_path / "out", "run")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    result = launch(path.parent, *flags, NPROC_PER_NODE="2", TMPDIR=str(temporary))
    everything = result.stdout + result.stderr
    assert result.returncode == 1, everything
    told = r"^rank 1 \(host \S+, pid (\d+), step 2\) failed in the main loop: ArithmeticError: this one breaks$"
    named = re.findall(told, everything, re.MULTILINE)
    assert len(named) == 1, f"rank 0 knows why it leaves\n{everything}"
    assert everything.count(f"\nrank 1 (pid {named[0]}) failed first\n") == 1, everything
    assert everything.count("ArithmeticError: this one breaks") == 2, everything
    tail = result.stderr.partition(") failed first")[2]
    assert "Traceback (most recent call last)" in tail, everything
    assert tail.rstrip().endswith("ArithmeticError: this one breaks"), everything
    assert "this one breaks" in (tmp_path / "out" / "run" / "logs" / "rank_00001.log").read_text()
    assert [path.name for path in temporary.iterdir() if "torchelastic" in path.name] == [], "torchrun leaves a folder"


def test_refusal(tmp_path: Path) -> None:
    """What rank 0 has explained, the launcher passes on, and says no more."""
    result = launch(DDP, "--out", str(tmp_path / "out"), "--global-batch-size", "9")
    assert result.returncode == 2
    assert result.stderr.count("error: ") == 1, result.stderr
    assert "--global-batch-size 9 does not divide by 2 data-parallel ranks" in result.stderr
    assert len((result.stdout + result.stderr).splitlines()) == 1, result.stdout + result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("flags", "code"), [(("--help",), 0), (("--lrr", "3"), 2)], ids=["help", "wrong flag"])
def test_one_process_answers(flags: tuple[str, ...], code: int, tmp_path: Path) -> None:
    """In its own words, without torchrun or a server to fork ranks from; also inside a job of which it is a rank."""
    python = noting(tmp_path, f'exec {shlex.quote(sys.executable)} "$@"')
    result = launch(DDP, *flags, PYTHON=str(python), RANK="1", WORLD_SIZE="2")
    alone = shell([sys.executable, f"{DDP}/train.py", *flags], PYTHONPATH=str(runner.ROOT))
    assert (result.returncode, alone.returncode) == (code, code), result.stderr
    assert (result.stdout, result.stderr) == (alone.stdout, alone.stderr)
    assert ["samples per optimizer step" in result.stdout, "--lrr" in result.stderr] == [code == 0, code == 2]
    assert started(tmp_path) == ["train.py"]


# --- without starting Python ------------------------------------------------------------------------------


def noting(folder: Path, then: str) -> Path:
    """A command in Python's place, which notes the script that it is to run before it does something else."""
    command = folder / "python"
    command.write_text(f'#!/bin/sh\necho "${{1##*/}}" >>{shlex.quote(str(folder / "started"))}\n{then}\n')
    command.chmod(0o755)
    return command


def started(folder: Path) -> list[str]:
    """What it has noted."""
    return (folder / "started").read_text().split()


PARSES = "from common.run import cli\n\n\nclass Args:\n    width: int = 3\n\n\ncli.parse(Args)\n"


@pytest.mark.parametrize(
    ("source", "words", "code", "scripts"),
    [
        (PARSES, ["--width", "4", "--no-width", "--config", "c.json", "--width=-1"], 0, ["agent.py"]),
        (PARSES, ["--of-a-module", "4"], 0, ["agent.py"]),
        (PARSES, ["--widht", "4"], 2, ["train.py"]),
        (PARSES, ["--widht", "4"], 0, ["train.py", "agent.py"]),  # the recipe has it, wherever it was declared
        (PARSES, ["--widht", "4"], 1, ["train.py", "agent.py"]),
        (PARSES, ["--widht", "4", "-h"], 0, ["train.py"]),
        ("train()\n", ["--widht", "4"], 0, ["agent.py"]),  # it would train
    ],
    ids=["known", "of a module", "refused", "known to the recipe", "crash", "help", "of another kind"],
)
def test_only_a_flag_in_doubt_is_asked_about(
    source: str, words: list[str], code: int, scripts: list[str], tmp_path: Path
) -> None:
    (copy := tmp_path / "my project").mkdir()
    (copy / "train.py").write_text(source)
    (copy / "shape.py").write_text("class Shape:\n    of_a_module: int = 3\n")
    python = noting(tmp_path, f"echo refused >&2; test $1 != {shlex.quote(str(copy / 'train.py'))} || exit {code}")
    for variables in ({}, {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "host", "RUN_KEY": KEY}):
        result = launch(copy, *words, PYTHON=str(python), **variables)
        several = bool(variables) and "-h" not in words
        assert started(tmp_path) == (["agent.py"] if several else scripts)
        assert result.returncode == (code if scripts == ["train.py"] and not several else 0)
        assert result.stderr.count("refused") == 1
        (tmp_path / "started").unlink()


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(flag: str) -> None:
    result = launch(flag)
    assert result.returncode == 0
    for word in ("usage: bash launch/torchrun.sh", "NPROC_PER_NODE", "MAX_RESTARTS", "MASTER_PORT", "--dry-run"):
        assert word in result.stdout


def test_dry_run(tmp_path: Path) -> None:
    """From any folder, the words of the command are those that were given."""
    words = ["--data", "my photos", "--name", 'it\'s "new" & $HOME; *', "--resume", ""]
    command = planned("--max-restarts=2", DDP, *words, cwd=tmp_path, OMP_NUM_THREADS="3")
    assert command[:2] == ["OMP_NUM_THREADS=3", f"PYTHONPATH={runner.ROOT}"]
    assert command[2:6] == [*OF_GLIBC, sys.executable, str(runner.ROOT / "launch" / "agent.py")]
    assert command[6:] == [
        *(*HERE, "--nproc-per-node=2", "--max-restarts=0", SIGNALS, "--max-restarts=2"),
        *(str(runner.ROOT / DDP / "train.py"), *words),
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "variables", "processes"),
    [
        (DDP, {}, 2),
        (DDP, {"NPROC_PER_NODE": "4"}, 4),
        (DDP, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        (DDP, {"CUDA_VISIBLE_DEVICES": "GPU-3a,GPU-7,"}, 2),
        (DDP, {"CUDA_VISIBLE_DEVICES": "5"}, 1),
        (DDP, {"CUDA_VISIBLE_DEVICES": "-1"}, 2),
        (DDP, {"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, 2),  # CUDA stops at the first that is none
        (DDP, {"CUDA_VISIBLE_DEVICES": "0, 1,x,2"}, 2),
        (DDP, {"CUDA_VISIBLE_DEVICES": "0,1,2", "NPROC_PER_NODE": "1"}, 1),
        ("recipes/dp_resnet", {}, 1),
        ("recipes/dp_resnet/", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 1),
        ("recipes/dp_resnet/train.py", {"NPROC_PER_NODE": "2"}, 2),
    ],
)
def test_number_of_processes(recipe: str, variables: dict[str, str], processes: int, tmp_path: Path) -> None:
    assert f"--nproc-per-node={processes}" in planned(recipe, cwd=tmp_path, **variables)


NONE = "gives CUDA no GPU: it begins with no device, or has one twice"


@pytest.mark.parametrize(
    ("listed", "processes", "note"),
    [
        ("MIG-3a,MIG-7", 1, "note: of several parts of GPUs (MIG), one is used"),
        ("MIG-3a", 1, ""),
        ("0,1,0", 2, f"note: CUDA_VISIBLE_DEVICES=0,1,0 {NONE}"),  # two on the CPU
        ("-1,0,1,2", 2, f"note: CUDA_VISIBLE_DEVICES=-1,0,1,2 {NONE}"),
        ("-1", 2, ""),
        ("", 2, ""),
    ],
)
def test_devices_that_are_left_out_are_named(listed: str, processes: int, note: str) -> None:
    """On stderr, so that the planned command can be read."""
    result = launch("--dry-run", DDP, CUDA_VISIBLE_DEVICES=listed)
    assert result.stderr.strip() == note
    assert f"--nproc-per-node={processes} " in result.stdout


def test_line_of_launch_env_that_sets_nothing_is_refused(tmp_path: Path) -> None:
    """A default that is misspelt would not hold, without a word."""
    for line, refused in (("# NPROC_PER_NODE=3", False), ("", False), ("nproc=3", True), ("NPROC_PER_NODE 3", True)):
        (tmp_path / "train.py").touch()
        (tmp_path / "launch.env").write_text(f"OMP_NUM_THREADS=1 # why\n{line}\n")
        command = ["bash", str(LAUNCHER), "--dry-run", str(tmp_path)]
        done = subprocess.run(command, env=environ({}), capture_output=True, text=True, check=False)
        assert (done.returncode == 2) == refused, done.stderr
        assert (f"launch.env: '{line.partition('=')[0]}' is no line of NAME=value" in done.stderr) == refused


NVIDIA = "GPU 0: NVIDIA A100 (UUID: GPU-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)"
PARTS = NVIDIA.replace(
    "\n", "\n  MIG 3g.40gb     Device  0: (UUID: MIG-1)\n  MIG 3g.40gb     Device  1: (UUID: MIG-2)\n"
)
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


@pytest.mark.parametrize(
    ("listed", "variables", "processes"),
    [
        (NVIDIA, {}, 2),
        (NVIDIA + "\nGPU 2: NVIDIA A100 (UUID: GPU-3)", {}, 3),
        (PARTS, {}, 1),
        (NO_DRIVER, {}, 2),
        (NO_DRIVER, {"HIP_VISIBLE_DEVICES": "0,1,2"}, 3),
        (NO_DRIVER, {"ROCR_VISIBLE_DEVICES": "5"}, 1),
    ],
    ids=["two", "three", "parts of GPUs", "no driver", "HIP", "ROCr"],
)
def test_number_of_gpus(listed: str, variables: dict[str, str], processes: int, tmp_path: Path) -> None:
    """As the driver's tool lists them; none of them is here."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
    tool.chmod(0o755)
    found = environ(variables) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    del found["CUDA_VISIBLE_DEVICES"]
    command = ["bash", str(LAUNCHER), "--dry-run", DDP]
    planned = subprocess.run(command, env=found, capture_output=True, text=True, check=True)
    assert f"--nproc-per-node={processes} " in planned.stdout


def test_number_of_amd_gpus(tmp_path: Path) -> None:
    """As Linux lists them: processors have no SIMD units, and GPUs of other containers cannot be read."""
    if os.getuid():
        pytest.skip("needs root, to put another folder in the place of /sys/class")
    nodes = tmp_path / "kfd/kfd/topology/nodes"
    for node, units in enumerate((0, 256, 256, 256, None)):
        (nodes / str(node)).mkdir(parents=True)
        if units is not None:
            (nodes / str(node) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\n")
    script = 'mount --bind "$1" /sys/class && unset CUDA_VISIBLE_DEVICES && exec bash "$2" --dry-run "$3"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), str(LAUNCHER), DDP]
    planned = subprocess.run(command, env=environ({}), capture_output=True, text=True, check=True)
    assert "--nproc-per-node=3 " in planned.stdout


def test_threads_share_the_cores(tmp_path: Path) -> None:
    for processes in (1, 2, 4096):
        command = planned(DDP, cwd=tmp_path, OMP_NUM_THREADS="", NPROC_PER_NODE=str(processes))
        assert command[0] == f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // processes)}"


NODES = {"numa_nodes": "2", "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(
    ("changes", "binding"),
    [
        ({}, "node"),
        ({"NUMA_BINDING": "socket"}, "socket"),
        ({"NUMA_BINDING": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ""),  # no other rank to be apart from
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"NPROC_PER_NODE": "1"}, ""),  # it may use both GPUs, as dp_resnet does
        ({"numa_nodes": "1"}, ""),
        ({"devices": "hidden"}, ""),
        ({"node of GPU 1": "-1"}, ""),  # a virtual machine: torch would take node 0
        ({"numactl": ""}, ""),
        ({"online": "0-999"}, ""),  # of which this job may use some: perhaps none beside this GPU
    ],
    ids=str,
)
def test_ranks_run_beside_their_gpus(changes: dict[str, str], binding: str, tmp_path: Path) -> None:
    allowed = re.findall(r"^Cpus_allowed_list:\s*(.*)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    given = NODES | {"node of GPU 1": "1", "numactl": "there", "online": allowed[0]} | changes
    for number in range(int(given.pop("numa_nodes"))):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
    (tmp_path / "devices/system/cpu").mkdir()
    (tmp_path / "devices/system/cpu/online").write_text(f"{given.pop('online')}\n")
    hidden = given.pop("devices", "")
    # A network card may be anywhere.
    for number, (vendor, node) in enumerate(
        [("0x10de", "0"), ("0x10de", given.pop("node of GPU 1")), ("0x15b3", "-1")]
    ):
        device = tmp_path / hidden / f"bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "numa_node").write_text(f"{node}\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "tr", "grep", "cat", "id", "nproc"):  # and no numactl but ours
        (programs / name).symlink_to(shutil.which(name) or name)
    if given.pop("numactl"):
        write_program(programs / "numactl", "")
    command = planned(DDP, cwd=tmp_path, SYSFS=str(tmp_path), PATH=str(programs), **given)
    found = [word.partition("=")[2] for word in command if word.startswith("--numa-binding")]
    assert found == [binding] * bool(binding)


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_numa_binding_is_an_option_of_torchrun() -> None:
    """Of the oldest torch, too, with which CI runs this test."""
    assert parse_args(["--numa-binding=node", "train.py"]).numa_binding == "node"


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, "expandable_segments:True"),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
    ids=str,
)
def test_memory_of_gpus_can_grow(variables: dict[str, str], wanted: str | None, tmp_path: Path) -> None:
    """What --dry-run shows is what the ranks get."""
    shown = [word for word in planned(DDP, cwd=tmp_path, **variables) if word.startswith("PYTORCH_ALLOC_CONF=")]
    assert shown == [f"PYTORCH_ALLOC_CONF={wanted}"] * (wanted is not None)
    write_program(tmp_path / "python", 'echo "${PYTORCH_ALLOC_CONF-unset}"')
    assert launch(DDP, PYTHON=str(tmp_path / "python"), **variables).stdout.strip() == (wanted or "unset")


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, OF_GLIBC),
        ({"CUDA_VISIBLE_DEVICES": "0"}, []),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, ["MALLOC_TRIM_THRESHOLD_=131072"]),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, []),
    ],
    ids=str,
)
def test_memory_of_a_step_is_kept_for_the_next(variables: dict[str, str], wanted: list[str], tmp_path: Path) -> None:
    """On CPUs, unless the user has set how glibc takes memory."""
    write_program(tmp_path / "python", "env | grep ^MALLOC_ || true")
    assert sorted(launch(DDP, PYTHON=str(tmp_path / "python"), **variables).stdout.split()) == sorted(wanted)


def test_several_machines(tmp_path: Path) -> None:
    place = {"NNODES": "10", "NODE_RANK": "09", "MASTER_ADDR": "host0", "RUN_KEY": KEY}
    command = planned(DDP, cwd=tmp_path, **place)
    for option in ("--nnodes=10", "--rdzv-backend=brigade", "--rdzv-endpoint=host0:29400", "--rdzv-id=brigade"):
        assert option in command
    assert "--rdzv-conf=is_host=0,last_call_timeout=5" in command
    assert KEY not in " ".join(command), "other users see commands"
    place |= {"NNODES": "2:4", "NODE_RANK": "0", "MASTER_PORT": "5", "RDZV_ID": "job"}
    command = planned(DDP, cwd=tmp_path, **place)
    for option in ("--nnodes=2:4", "--rdzv-endpoint=host0:5", "--rdzv-id=job"):
        assert option in command
    assert "--rdzv-conf=is_host=1,last_call_timeout=5" in command, "machine 0 keeps the rendezvous"


TWO = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "host0"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "host0"}, "NNODES=2 needs NODE_RANK, this machine's number from 0 to 1"),
        ({"NNODES": "2", "MASTER_ADDR": "host0", "NODE_RANK": "2"}, "NODE_RANK=2 must be below NNODES=2"),
        (
            {"NNODES": "1:2", "MASTER_ADDR": "host0", "NODE_RANK": "2"},
            "NODE_RANK=2 must be below NNODES=1:2",
        ),
        (TWO, "NNODES=2 needs RUN_KEY, a secret of this job that is the same on each machine: make one with 'export"),
        (TWO | {"RUN_KEY": "secret"}, "NNODES=2 needs RUN_KEY"),
        (TWO | {"MASTER_PORT": "http"}, "MASTER_PORT=http must be a port, such as 29400"),
        ({"NNODES": "two"}, "NNODES=two must be a number of machines, such as 2, or MIN:MAX"),
        ({"NNODES": "0:2"}, "NNODES=0:2 must be a number of machines, such as 2, or MIN:MAX"),
        ({"NPROC_PER_NODE": "all"}, "NPROC_PER_NODE=all must be a number of processes, such as 2"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0 must be a number of processes, such as 2"),
    ],
)
def test_bad_variables(variables: dict[str, str], message: str) -> None:
    result = launch("--dry-run", DDP, **variables)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_launch_env(tmp_path: Path) -> None:
    """Values, not code; what the environment has, wins; a last line without an end counts."""
    (tmp_path / "train.py").touch()
    lines = ["# a comment", "NCCL_P2P_DISABLE=1  # why", f"X=$(touch {tmp_path}/ran)", "", "MAX_RESTARTS=3", "NNODES=1"]
    (tmp_path / "launch.env").write_text("\n".join([*lines, "NPROC_PER_NODE=5"]))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$NCCL_P2P_DISABLE $*"\n')
    python.chmod(0o755)
    words = launch(tmp_path, PYTHON=str(python), MAX_RESTARTS="1").stdout.split()
    assert words[0] == "1"
    assert words[2:] == [*HERE, "--nproc-per-node=5", "--max-restarts=1", SIGNALS, str(tmp_path / "train.py")]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, ".venv/bin/python"),
        ({"VIRTUAL_ENV": "/active"}, "python"),
        ({"CONDA_PREFIX": "/active"}, "python"),
        ({"PYTHON": "/named/python"}, "/named/python"),
    ],
    ids=["none", "venv", "conda", "named"],
)
def test_interpreter(variables: dict[str, str], wanted: str, tmp_path: Path) -> None:
    """Where no environment is active, that of the repository: the commands that a run prints work as they are."""
    launcher, python = tmp_path / "launch" / "torchrun.sh", tmp_path / ".venv" / "bin" / "python"
    for file in (launcher, python, tmp_path / "my project" / "train.py"):
        file.parent.mkdir(parents=True)
        file.touch()
    shutil.copy(LAUNCHER, launcher)
    python.chmod(0o755)
    inactive = {"PYTHON": "", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
    words = shlex.split(shell(["bash", launcher, "--dry-run", "my project"], tmp_path, **inactive | variables).stdout)
    assert words[4] == (str(python) if wanted == ".venv/bin/python" else wanted)


def test_cd_that_speaks() -> None:
    """With CDPATH exported, as some people have it, cd prints the folder that it finds there."""
    command = ["bash", "launch/torchrun.sh", "--dry-run", DDP]
    assert shell(command, CDPATH=".:/tmp").stdout == shell(command).stdout


def test_only_a_cluster_is_taken_down(tmp_path: Path) -> None:
    """The command ends in rm -rf, as root."""
    (tmp_path / "precious").touch()
    script = runner.ROOT / "launch" / "local_slurm.sh"
    result = shell(["bash", script, "down"], LOCAL_SLURM_DIR=str(tmp_path))
    assert result.returncode == 2
    assert f"{tmp_path} is not a cluster that this script started, so nothing was removed" in result.stderr
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("there", ["nothing", "ours", "everybody's", "a link", "another user's", "chosen"])
def test_cache_of_the_compiler_is_ours(there: str, tmp_path: Path) -> None:
    """It holds pickles, and its usual name is one that another user can take first."""
    (tmp_path / "train.py").touch()
    python, usual, wanted = tmp_path / "python", tmp_path / f"torchinductor_{getpass.getuser()}", ""
    python.write_text('#!/bin/sh\necho "$TORCHINDUCTOR_CACHE_DIR"\n')
    python.chmod(0o755)
    if there == "a link":
        (tmp_path / "elsewhere").mkdir()
        usual.symlink_to(tmp_path / "elsewhere")
    elif there not in ("nothing", "chosen"):
        usual.mkdir(mode=0o755)
        usual.chmod(0o777 if there == "everybody's" else 0o755)
    if there == "another user's":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(usual, 12345, -1)
    if there == "chosen":
        wanted = str(tmp_path / "chosen")
    found = launch(tmp_path, PYTHON=str(python), TMPDIR=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=wanted).stdout.strip()
    if there in ("nothing", "ours"):
        wanted = str(usual)
    if wanted:
        assert found == wanted
    else:
        assert Path(found).parent == tmp_path
        assert found != str(usual)
        again = launch(tmp_path, PYTHON=str(python), TMPDIR=str(tmp_path)).stdout.strip()
        assert again == found, "each launch would leave a folder behind"
    if there != "chosen":
        assert Path(found).stat().st_mode & 0o777 == (0o755 if there == "ours" else 0o700)
        assert Path(found).owner() == getpass.getuser()


def test_gpu_that_torch_does_not_see(tmp_path: Path) -> None:
    """As with a driver that is too old for this torch: no training on the CPU that nobody asked for."""
    if torch.cuda.is_available():
        pytest.skip("torch sees one")
    result = launch(DDP, "--out", tmp_path / "runs", CUDA_VISIBLE_DEVICES="0")
    assert result.returncode == 2, result.stderr
    assert result.stderr.count(" has 1 GPU for this job, but torch sees none: ") == 1, result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("recipe", ["recipes/nothing", "/nowhere", "common"])
def test_unknown_recipe(recipe: str) -> None:
    result = launch(recipe, "--epochs", "1")
    assert result.returncode == 2
    assert "has no train.py" in result.stderr
    assert all(f"recipes/{name}" in result.stderr for name in runner.RECIPES)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [[], ["--dry-run"], ["--max-restarts=1"]])
def test_no_recipe(args: list[str]) -> None:
    result = launch(*args)
    assert result.returncode == 2
    assert "usage: bash launch/torchrun.sh" in result.stderr
    assert result.stderr.endswith("error: name a recipe, such as recipes/ddp_resnet\n")


SCONTROL = """#!/bin/bash
case "$*" in
  "show hostnames "*) echo n1 ;;
  "show node "*) echo "NodeName=n1 NodeAddr=127.0.0.1" ;;
  "show job "*) echo "JobId=7 JobState=RUNNING EndTime=Unknown" ;;
  "requeue 7") touch requeued ;;
esac
"""
SRUN = """#!/bin/bash
echo '{"step": 3, "of": 9}' >stopped.json
pwd >"$RUN_DIR_FILE"
"""


@pytest.mark.parametrize("log", ["/dev/full", "/dev/null"])
def test_job_with_a_log_on_a_full_disk_is_requeued(log: str, tmp_path: Path) -> None:
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    with Path(log).open("w") as file:
        result = subprocess.run(
            ["bash", runner.ROOT / "launch" / "slurm.sh", DDP],
            cwd=tmp_path,
            env=environ({**job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}),
            stdout=file,
            stderr=file,
            timeout=runner.HANG_S,
            check=False,
        )
    assert result.returncode == 0
    assert (tmp_path / "requeued").exists()
    assert (tmp_path / ".slurm-7.starts").read_text() == "3\n"


ARRAYS = [["--array=0-2"], ["--array", "0-2"], ["-a", "0-2"], ["-a0-2"]]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_task_of_an_array_continues_alone(array: list[str], tmp_path: Path) -> None:
    """Three jobs would continue in its folder; the other options stay, in their order."""
    (tmp_path / "sbatch").write_text('#!/bin/bash\nprintf %s "$LAUNCHED_AS"\n')
    (tmp_path / "sbatch").chmod(0o755)
    script = runner.ROOT / "launch" / "slurm.sh"
    command = ["bash", script, "-N", "2", *array, "--account=lab", "-A", "x", DDP]
    result = shell(command, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    assert shlex.split(result.stdout) == [
        "bash",
        str(script),
        "-N",
        "2",
        "--account=lab",
        "-A",
        "x",
        str(runner.ROOT / DDP),
    ]


DEAF = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
time.sleep(3)  # until the launcher forwards signals
print("deaf", flush=True)
time.sleep(1000)
"""


def test_rank_that_does_not_answer_is_killed_by_the_second_request(tmp_path: Path) -> None:
    """Frozen, locked in a function of C, or still starting: a user's last word counts, whatever a rank does."""
    (tmp_path / "train.py").write_text(DEAF)
    variables = {"NPROC_PER_NODE": "1", "MAX_RESTARTS": "3"}  # which are for failures
    process = popen(["bash", "launch/torchrun.sh", tmp_path], runner.ROOT, variables)
    assert process.stdout
    assert "deaf" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5 * stop.SAME_SIGNAL_S)  # what comes sooner is the same request
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    result = wait(process)
    assert result.returncode == 128 + signal.SIGTERM
    assert "did not answer SIGTERM, sent twice: killed" in result.stderr
    assert "deaf" not in result.stdout, "it was started again"


def test_breakpoint_says_where_it_works(tmp_path: Path) -> None:
    """Not in a rank, which has no terminal."""
    text = "from common.run import exits\n\n@exits.entry\ndef main(process):\n    breakpoint()\n\nmain()\n"
    (tmp_path / "train.py").write_text(text)
    result = launch(tmp_path, NPROC_PER_NODE="2")
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error: breakpoint() reads from a terminal") == 1, result.stderr
    assert f"python {tmp_path}/train.py with the same flags" in result.stderr
    assert "Traceback" not in result.stderr
