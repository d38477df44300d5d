"""tools/doctor finds each planted fault by its name, in time, and says nothing of healthy machines.

The faults are real where this machine lets a test make them: namespaces, mounts, control groups, links, limits. The
rest says in its docstring what stands in for it.
"""

import contextlib
import dataclasses
import errno
import fcntl
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import seal
from tools.doctor import around, findings, folder, group, machine, train
from tools.doctor.findings import Asked, Finding

from tests.harness import disks, runner
from tests.harness.clock import Clock
from tests.harness.machines import Machine, joined

LAUNCHER = runner.ROOT / "launch" / "torchrun.sh"
# What a launcher or a shell may have set here.
OURS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RUN_KEY", "RANK", "WORLD_SIZE", "GPUS_ON_NODE")
# A machine without its ranks: `python -c LOOK PROCESSES [flags]` prints what one machine can find, as JSON.
LOOK = (
    "import socket, sys\nfrom tools.doctor import around, findings\n"
    "asked = findings.parse(sys.argv[2:], int(sys.argv[1]))\n"
    "print(findings.report(around.look(asked, socket.gethostname()), True, ''))\n"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to plant it needs root")
# That these tests may use, by affinity or a quota: fewer than two cripple two processes, as the doctor says then.
PROCESSORS = min(machine.cpu_quota(), len(os.sched_getaffinity(0)))


def environment(given: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in OURS and not name.endswith("_IFNAME")}
    return kept | {"PYTHONPATH": str(runner.ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **given}


def look(tmp_path: Path, *flags: str, processes: int = 1, within: Sequence[str] = (), **given: str) -> list[Finding]:
    """What one machine finds.

    Args:
        tmp_path: for --out.
        flags: of the doctor.
        processes: ranks that it is to have.
        within: a command that plants the fault, and ends with what starts another command.
        given: variables of the environment.
    """
    flags = flags if "--out" in flags else ("--out", str(tmp_path / "out"), *flags)
    command = [*within, sys.executable, "-c", LOOK, str(processes), *flags]
    done = subprocess.run(
        command,
        env=environment(given),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=runner.HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return findings.read(done.stdout)


def named(found: Sequence[Finding]) -> list[tuple[str, str]]:
    """The check and the severity of each finding."""
    return [(one.check, one.severity) for one in found]


def doctor(tmp_path: Path, *flags: str, **given: str) -> tuple[int, str]:
    """Exit code and output of `python -m tools.doctor`."""
    command = [sys.executable, "-m", "tools.doctor", "--out", str(tmp_path / "out"), *flags]
    done = subprocess.run(
        command,
        env=environment(given),
        cwd=runner.ROOT,
        capture_output=True,
        text=True,
        timeout=runner.HANG_S,
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout


# --- one machine, healthy -----------------------------------------------------------------------------------------


def test_healthy(tmp_path: Path) -> None:
    """One line, and nothing stays behind."""
    code, printed = doctor(tmp_path)
    assert code == 0
    assert printed.startswith("healthy: 1 rank on ")
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert named(look(tmp_path, processes=2)) == ([("cpu", "cripples")] if PROCESSORS < 2 else [])


def test_flags(tmp_path: Path) -> None:
    """Of a recipe, those that matter are taken."""
    asked = findings.parse(["--out", "a", "--flags-of-recipe", "--epochs", "3", "--workers=4", "--name", "b"])
    assert (asked.out, asked.name, asked.workers) == ("a", "b", 4)
    done = subprocess.run(
        [sys.executable, "-m", "tools.doctor", "--epochs", "3"],
        env=environment({}),
        cwd=runner.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "unrecognized arguments: --epochs 3" in done.stderr


# --- one machine, with a fault ------------------------------------------------------------------------------------


def mounting(options: str, place: str, then: str = "") -> tuple[str, ...]:
    """A command that runs another one where a file system in memory is mounted."""
    script = f'mount -t tmpfs -o {options} doctor-test {shlex.quote(place)} && {then or "true"} && exec "$@"'
    return ("unshare", "--mount", "bash", "-c", script, "planted")


@needs_root
@pytest.mark.parametrize(("workers", "severity"), [("2", "breaks"), ("0", "advice")])
def test_small_shared_memory(workers: str, severity: str, tmp_path: Path) -> None:
    found = look(tmp_path, "--workers", workers, within=mounting("size=64m", "/dev/shm"))
    (shm,) = [one for one in found if one.check == "shm"]
    assert (shm.severity, shm.found) == (severity, "/dev/shm has 64 MiB free")
    assert "--shm-size" in shm.do


def test_few_files(tmp_path: Path) -> None:
    (found,) = look(tmp_path, within=("bash", "-c", 'ulimit -n 64 && exec "$@"', "planted"))
    assert named([found]) == [("files", "breaks")]
    assert "64 files" in found.found


@contextlib.contextmanager
def control_group(controller: str, **limits: str) -> Iterator[tuple[str, ...]]:
    """A control group of version 1 with limits: a command that runs another one in it."""
    group = Path("/sys/fs/cgroup", controller, f"doctor-test-{os.getpid()}")
    try:
        group.mkdir()
        for name, value in limits.items():
            (group / f"{controller}.{name}").write_text(value)
    except OSError as error:
        pytest.skip(f"this machine has no control groups of version 1 to write to: {error}")
    try:
        yield ("bash", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "planted")
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@needs_root
def test_half_a_processor(tmp_path: Path) -> None:
    with control_group("cpu", cfs_quota_us="50000") as within:
        (found,) = look(tmp_path, within=within)
    assert named([found]) == [("cpu", "cripples")]
    assert found.found == "the CPU quota of the control group: 0.5 for 1 processes"


@needs_root
def test_little_memory(tmp_path: Path) -> None:
    with control_group("memory", limit_in_bytes="1g") as within:
        assert look(tmp_path, within=within) == [], "enough for one"
        (found,) = [one for one in look(tmp_path, processes=2, within=within) if one.check != "cpu"]
    assert named([found]) == [("memory", "breaks")]
    assert found.found.startswith("the memory limit of the control group is 1.00 GiB for 2 processes")


@needs_root
def test_few_tasks(tmp_path: Path) -> None:
    with control_group("pids", max="40") as within:
        (found,) = look(tmp_path, within=within)
    assert named([found]) == [("tasks", "breaks")]


@pytest.mark.parametrize(
    ("files", "cpus", "memory", "tasks"),
    [
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5, None, None),
        ({"a/b/memory.max": "max", "a/memory.max": "1073741824", "a/b/pids.max": "77"}, None, 2**30, 77),
        ({}, None, None, None),
    ],
    ids=["the job's quota", "the job's memory", "no limits"],
)
def test_control_groups_of_version_2(
    files: dict[str, str], cpus: float | None, memory: int | None, tasks: int | None, tmp_path: Path
) -> None:
    """A tree of files stands in: this machine's own controllers may be of version 1."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    for name, value in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    without = float("inf")
    assert machine.cpu_quota(tmp_path) == (cpus or without)
    assert machine.memory_limit(tmp_path) == (memory or without)
    assert machine.tasks_limit(tmp_path) == (tasks or without)
    found = [*machine.cpus(Asked(processes=2), "h", tmp_path), *machine.memory(Asked(processes=2), "h", tmp_path)]
    assert named(found) == [("cpu", "cripples")] * bool(cpus) + [("memory", "breaks")] * bool(memory)


def test_more_threads_than_processors(tmp_path: Path) -> None:
    (found,) = look(tmp_path, OMP_NUM_THREADS="512")
    assert named([found]) == [("threads", "cripples")]
    assert "OMP_NUM_THREADS=512" in found.found
    assert f"OMP_NUM_THREADS={max(1, int(PROCESSORS))}" in found.do


def test_more_workers_than_processors(tmp_path: Path) -> None:
    workers = len(os.sched_getaffinity(0))
    assert named(look(tmp_path, "--workers", str(workers))) == [("workers", "advice")]


@needs_root
def test_no_room_for_temporary_files(tmp_path: Path) -> None:
    within = mounting("size=64k", str(tmp_path), "head -c 64K /dev/zero > full")
    found = look(tmp_path, "--out", str(tmp_path.with_name("room")), within=within, TMPDIR=str(tmp_path))
    assert ("tmp", "breaks") in named(found)


@pytest.mark.parametrize(
    ("script", "check", "text"),
    [
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "driver", "version mismatch"),
        pytest.param("exec sleep 60", "driver", "has not answered for 10 s", marks=pytest.mark.rest),
        ("printf '0, 580.1\\n1, 580.1\\n'", "gpus", "2 GPUs for 4 processes"),
    ],
    ids=["driver", "hanging driver", "too few GPUs"],
)
def test_gpus(script: str, check: str, text: str, tmp_path: Path) -> None:
    """An nvidia-smi of the test stands in for a driver."""
    stub = tmp_path / "bin" / "nvidia-smi"
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/bash\n{script}\n")
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    found = look(tmp_path, processes=4, PATH=path, GPUS_ON_NODE="2", CUDA_VISIBLE_DEVICES="0,1")
    (gpus,) = [one for one in found if one.check in ("driver", "gpus")]
    assert (gpus.check, gpus.severity) == (check, "breaks")
    assert text in gpus.found


def test_torch_sees_no_gpu(tmp_path: Path) -> None:
    """Of two that the launcher has counted."""
    if torch.cuda.is_available():
        pytest.skip("torch sees GPUs here")
    code, printed = doctor(tmp_path, "--json", GPUS_ON_NODE="2", CUDA_VISIBLE_DEVICES="0,1")
    (found,) = [one for one in findings.read(printed) if one.check == "gpu"]
    assert code == 2
    assert (found.severity, found.rank, found.found) == ("breaks", 0, "the machine has 2 GPUs, and torch sees none")


# --- its network ----------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    """One that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_port_is_taken(port: int, tmp_path: Path) -> None:
    given = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    (found,) = [one for one in look(tmp_path, **given, MASTER_PORT=str(port)) if one.check == "port"]
    assert found.severity == "breaks"
    assert f"MASTER_PORT={port} at 127.0.0.1 cannot be used (Address already in use, process {os.getpid()}, " in (
        found.found
    )
    # Below the ports that the kernel hands out, because the tests beside this one take those.
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    free = look(tmp_path, **given, MASTER_PORT=str(lowest - 1))
    assert "port" not in [one.check for one in free]


@needs_root
def test_unknown_host_name(tmp_path: Path) -> None:
    within = ("unshare", "--uts", "bash", "-c", 'hostname nobody-knows-me.invalid && exec "$@"', "planted")
    (found,) = look(tmp_path, within=within)
    assert named([found]) == [("name", "advice")]
    assert found.host == "nobody-knows-me.invalid"


@pytest.mark.parametrize(
    ("rank", "address", "text"),
    [
        ("1", "nobody-knows-me.invalid", "does not resolve"),
        ("1", "127.0.0.1", "a loopback address, not of machine 0"),
        ("0", "192.0.2.7", "which this machine lacks"),
    ],
    ids=["unknown", "itself", "another machine's"],
)
def test_master_address(rank: str, address: str, text: str, tmp_path: Path) -> None:
    found = look(tmp_path, NNODES="2", NODE_RANK=rank, MASTER_ADDR=address)
    (master,) = [one for one in found if one.check == "master"]
    assert master.severity == "breaks"
    assert f"MASTER_ADDR={address}" in master.found
    assert text in master.found


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth77"}, "no interface of that name is up"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "no interface of that name is up"),
        ({"NCCL_SOCKET_IFNAME": "l"}, "leads to this machine only"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "leads to this machine only"),
    ],
    ids=["no such", "not the whole name", "NCCL's loopback", "gloo's loopback"],
)
def test_interface(variables: dict[str, str], text: str, tmp_path: Path) -> None:
    found = look(tmp_path, NNODES="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29977", **variables)
    (interface,) = [one for one in found if one.check == "interface"]
    assert interface.severity == "breaks"
    assert text in interface.found


# --- its folder -----------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    (found,) = look(tmp_path, "--out", "/dev/null/out")
    assert named([found]) == [("folder", "breaks")]
    assert "Not a directory" in found.found


@needs_root
def test_read_only_folder(tmp_path: Path) -> None:
    (found,) = look(tmp_path, "--out", f"{tmp_path}/ro", within=("unshare", "--mount", "bash", "-c", (
        f'mkdir {tmp_path}/ro && mount -t tmpfs -o ro doctor-test {tmp_path}/ro && exec "$@"'), "planted"))  # fmt: skip
    assert named([found]) == [("folder", "breaks")]
    assert "Read-only file system" in found.found


def test_folder_of_everybody(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o777)
    (tmp_path / "out").chmod(0o777)
    (found,) = look(tmp_path)
    assert named([found]) == [("folder", "breaks")]
    assert "writable by every user" in found.found
    assert look(tmp_path, TRUST_OPEN_FOLDERS="1") == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (disks.SMALL, [("room", "cripples"), ("folder", "breaks")]),
        ("size=200m", [("room", "cripples")]),
        ("size=2g,nr_inodes=64", [("room", "cripples")]),
    ],
    ids=["full", "little room", "few files"],
)
def test_disk(options: str, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "disk", options) as disk:
        disk.chmod(0o755)
        assert named(look(tmp_path, "--out", str(disk))) == expected


def test_run_in_use(tmp_path: Path) -> None:
    run = tmp_path / "out" / "mine"
    run.mkdir(parents=True)
    with (run / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        lock.write("process 7 on host9")
        lock.flush()
        (found,) = look(tmp_path, "--name", "mine")
        assert named([found]) == [("folder", "breaks")]
        assert "is in use by process 7 on host9" in found.found
    assert look(tmp_path, "--name", "mine") == []


@pytest.mark.rest
@needs_root
def test_folder_that_does_not_answer(tmp_path: Path) -> None:
    """A frozen file system, as of a server that is gone, keeps a process for ever; the doctor ends, and says so."""
    image, place = tmp_path / "image", tmp_path / "frozen"
    place.mkdir()
    image.touch()
    os.truncate(image, 2**26)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, place], ["fsfreeze", "-f", place]):
        if not shutil.which(command[0]) or subprocess.run(command, check=False, capture_output=True).returncode:
            subprocess.run(["umount", place], check=False, capture_output=True)
            pytest.skip(f"not run: {command[0]} does not work here")
    try:
        (found,) = look(tmp_path, "--out", str(place))
        assert named([found]) == [("folder", "breaks")]
        assert "has not answered for 20 s" in found.found
    finally:
        subprocess.run(["fsfreeze", "-u", place], check=True)
        subprocess.run(["umount", "-l", place], check=True)


def test_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lockf stands in for a file system without locks, such as Lustre without -o flock: here all have them."""

    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert named([*folder.alone(str(tmp_path), "", "host")]) == [("locks", "advice")]


def test_slow_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow fsync stands in for a slow disk; one that is slow once is not accused."""
    monkeypatch.setattr(folder, "TRIAL_BYTES", 2**20)
    monkeypatch.setattr(folder, "SLOW_BYTES_PER_S", 2e6)
    sleeps = [1.0, 0.0]
    monkeypatch.setattr(os, "fsync", lambda _: time.sleep(sleeps.pop(0)))
    assert [*folder.alone(str(tmp_path), "", "host")] == []
    sleeps = [1.0, 1.0, 1.0]
    (found,) = folder.alone(str(tmp_path), "", "host")
    assert named([found]) == [("speed", "cripples")]
    assert not list(tmp_path.iterdir())


# --- its page -----------------------------------------------------------------------------------------------------

PAGE = (runner.ROOT / "docs" / "doctor.md").read_text()


def test_page_shows_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    within = ("bash", "-c", 'ulimit -n 64 && exec "$@"', "planted")
    given = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host0.invalid"}
    found = [one for one in look(tmp_path, "--out", "shared", within=within, **given) if one.check != "name"]
    printed = findings.report([dataclasses.replace(one, host="node7") for one in found], False, "")
    printed = printed.replace(str(tmp_path.resolve()), "/scratch")
    shown = PAGE.partition("## What it prints")[2].partition("```\n$ ")[2].partition("\n```")[0].partition("\n")[2]
    assert shown == printed


def test_page_lists_every_check() -> None:
    """And none that is not there."""
    sources = [path.read_text() for path in (runner.ROOT / "tools" / "doctor").glob("*.py")]
    called = r"Finding\(\s*\*?\(?\"([\w-]+)\""
    checks = {check for source in sources for check in re.findall(called, source)} | {"processes", "driver", "gpu"}
    listed = re.findall(r"^\| ([a-z-]+) \|", PAGE, re.MULTILINE)
    assert sorted(check for check in listed if check not in ("flag", "check")) == sorted(checks)


# --- what is compared, and counted -------------------------------------------------------------------------------


def test_each_pair_is_measured_once() -> None:
    for count in range(2, 12):
        schedule = [*group.rounds(count)]
        pairs = [pair for one in schedule for pair in one]
        assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
        for one in schedule:
            busy = [player for pair in one for player in pair]
            assert len(busy) == len(set(busy))


def test_slow_links_are_named() -> None:
    """A pair; and where one end is slow with all others, that machine, once for each direction."""
    hosts = ["a", "b", "c", "d"]
    even = {(i, j): 1e9 for i in range(4) for j in range(4) if i != j}
    assert [*group.slow_links(even, hosts, "gloo")] == []
    assert [*group.slow_links(even | {(1, 2): 0.6e9}, hosts, "gloo")] == [], "above half of the median"
    (pair,) = group.slow_links(even | {(1, 2): 1e8}, hosts, "gloo")
    assert (pair.host, pair.severity) == ("b", "cripples")
    assert pair.found.startswith("100 MB/s to c, rank 2, by gloo, median of all pairs 1,000")
    (sends,) = group.slow_links(even | {(1, j): 1e8 for j in (0, 2, 3)}, hosts, "gloo")
    assert (sends.host, sends.found.partition(" by")[0]) == ("b", "100 MB/s to all others")


def test_clocks() -> None:
    """A message that was late is no clock that is."""
    machines = [{"host": f"h{rank}", "rank": rank} for rank in range(4)]
    assert [*group.compare_clocks(machines, {1: (-9.0, 0.1), 2: (-0.1, 9.0), 3: (-1.9, -1.8)})] == []
    late, early = group.compare_clocks(machines, {1: (-7.1, -6.9), 2: (6.9, 7.1)})
    assert (late.host, late.found) == ("h1", "its clock is 6.9 s behind rank 0's, or more")
    assert (early.host, early.found) == ("h2", "its clock is 6.9 s ahead of rank 0's, or more")


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits no longer than its limit, and names them."""
    store = seal.SealedStore(dist.HashStore(), b"key")
    store.set("facts/2", json.dumps("here"))
    clock = Clock(now=0.0)
    monkeypatch.setattr(group, "time", clock)
    came = group.collect(store, "facts", "mine", 0, 4, 0.5)
    assert clock.now == pytest.approx(0.5, abs=group.POLL_S)
    assert {rank: value for rank, (value, _) in came.items()} == {0: "mine", 2: "here"}
    found = train.absent([1, 3], {"host": "h", "rank": 0, "processes": 2}, 0.5)
    assert found.found == "ranks 1, 3 (of machines 0, 1) have not come in 0.5 s"


HANGS = (
    "import sys, time\nfrom pathlib import Path\nfrom tools.doctor import findings, train\n"
    "exam = train.Exam(Path(sys.argv[1]), 0, 0)\n"
    "with exam.limit(0.5, findings.Finding('nccl', 'h', 0, 'breaks', 'it hangs', 'so', 'do')):\n    time.sleep(1000)\n"
)


def test_call_that_does_not_return(tmp_path: Path) -> None:
    """It ends the rank, which reports it."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, tmp_path], env=environment({}), timeout=runner.HANG_S, check=False
    )
    assert done.returncode == 2
    assert named(findings.read((tmp_path / "report.json").read_text())) == [("nccl", "breaks")]
    assert (tmp_path / "done").read_text() == "2"


def test_drivers_and_gpus_that_differ() -> None:
    """Facts stand in for machines of two kinds."""
    same = {"host": "a", "rank": 0, "machine": 0, "versions": {}, "code": {}, "mtus": {}, "processes": 8}
    one = same | {"driver": "580", "gpu": "H100"}
    two = same | {"host": "b", "rank": 8, "machine": 1, "driver": "570", "gpu": "H200", "processes": 4}
    assert [*group.compare([one, one | {"rank": 1}])] == []
    found = [*group.compare([one, two])]
    assert named(found) == [("driver", "advice"), ("gpu", "advice"), ("processes", "cripples")]
    assert {item.host for item in found} == {"b"}


@pytest.mark.usefixtures("group")
def test_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce that adds one to one element stands in for a broken network card."""
    cpu = torch.device("cpu")
    assert [*group.all_reduce(cpu, "gloo", "host")] == []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor[3:4].add_(1))
    (found,) = group.all_reduce(cpu, "gloo", "host")
    assert named([found]) == [("all-reduce", "breaks")]
    assert found.found == "1 of 262144 sums by gloo are wrong"


def test_findings_of_many_machines_are_one_line() -> None:
    them = [Finding("shm", f"h{i}", i, "breaks", "64 MiB", "bus error", "ask for more") for i in range(9)]
    printed = findings.report(them, False, "healthy")
    assert printed == "breaks: shm on h0, h1, h2 and 6 more: 64 MiB: bus error; ask for more"
    assert len(json.loads(findings.report(them, True, ""))) == 9
    assert findings.status(them) == 2
    assert findings.status([]) == 0


# --- several machines ---------------------------------------------------------------------------------------------


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        assert "CI" not in os.environ, "CI runs this as root, and installs iproute2"
        pytest.skip("machines need root and iproute2")
    with joined(tmp_path, 3) as them:
        for one in them:  # as an administrator should set it up
            one.hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{m.address} {m.name}\n" for m in them))
        yield them


PATIENT = f"{runner.HANG_S / 2:.0f}"  # seconds that a machine waits for those that come


class Visit:
    """The doctor on some machines."""

    def __init__(self, tmp_path: Path, them: Sequence[Machine], *flags: str, number: int = 0) -> None:
        self.folder, self.them, self.number = tmp_path, them, number or len(them)
        self.flags = ("--out", str(tmp_path / "out"), *flags)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, one: Machine, plant: str = "true", root: Path = runner.ROOT, **given: str) -> None:
        """Start it on a machine, after a command of the shell that plants a fault there."""
        here = {"NNODES": str(self.number), "NODE_RANK": str(one.number), "MASTER_ADDR": self.them[0].address}
        here |= {"NPROC_PER_NODE": "1", "RUN_KEY": 32 * "0a", "PYTHON": sys.executable, "PYTHONPATH": ""}
        command = ["bash", root / "launch/torchrun.sh", root / "tools/doctor", *self.flags]
        planted = ["bash", "-c", f'{plant} && exec "$@"', "planted", *command]
        output = self.folder / f"printed{one.number}"
        output.unlink(missing_ok=True)
        self.processes.append(one.popen(planted, output, environment(here | given)))

    def end(self) -> list[int]:
        runner.wait_for(lambda: all(process.poll() is not None for process in self.processes), self)
        return [process.returncode for process in self.processes]

    def printed(self, one: Machine) -> str:
        return (self.folder / f"printed{one.number}").read_text()

    def found(self, one: Machine) -> list[Finding]:
        return findings.read(self.printed(one))

    def __str__(self) -> str:
        return "\n".join(f"[{one.name}]\n{self.printed(one)}" for one in self.them)


@pytest.mark.machines
def test_healthy_machines(machines: list[Machine], tmp_path: Path) -> None:
    """Nothing but one line of machine 0: each finding of the tests below is of its fault."""
    visit = Visit(tmp_path, machines[:2], "--wait", PATIENT)
    for one in visit.them:
        visit.start(one)
    assert visit.end() == [0, 0], str(visit)
    assert visit.printed(machines[0]).startswith("healthy: 2 ranks on 2 machines, CPU, torch ")
    assert "gloo over eth0 at " in visit.printed(machines[0])
    assert visit.printed(machines[0]).count("\n") == 1
    assert visit.printed(machines[1]) == ""


# For a machine's Python, before anything else: its clock is late.
LATE_CLOCK = "import time\n_time = time.time\ntime.time = lambda: _time() - 7\n"


@pytest.mark.machines
def test_machines_that_differ(machines: list[Machine], tmp_path: Path) -> None:
    """Six faults at once: none hides another one. They are real, but for time.time, which stands in for a clock."""
    visit = Visit(tmp_path, machines[:2], "--json", "--workers", "1", "--wait", PATIENT)
    ours = tmp_path / "site"
    (ours / "numpy-0.0.7.dist-info").mkdir(parents=True)
    (ours / "numpy-0.0.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.7\n")
    (ours / "sitecustomize.py").write_text(LATE_CLOCK)
    changed = tmp_path / "changed"
    for part in ("common", "launch", "tools"):
        shutil.copytree(runner.ROOT / part, changed / part, ignore=shutil.ignore_patterns("__pycache__"))
    with (changed / "common" / "train" / "flops.py").open("a") as file:
        file.write("# another commit\n")
    (tmp_path / "out").mkdir()
    visit.start(machines[0])
    private = f"mount -t tmpfs -o mode=755 doctor-test {tmp_path}/out && ip link set eth0 mtu 1400"
    shm = "mount -t tmpfs -o size=64m doctor-test /dev/shm"
    visit.start(machines[1], f"{private} && {shm}", root=changed, PYTHONPATH=str(ours))
    assert visit.end() == [2, 2], str(visit)
    found = visit.found(machines[0])
    assert sorted((one.check, one.host, one.rank) for one in found if one.severity != "advice") == [
        (check, "machine1", 1) for check in ("clock", "code", "mtu", "shared", "shm", "versions")
    ], str(visit)
    texts = {one.check: one.found for one in found}
    assert texts["versions"].startswith("numpy 0.0.7 (rank 0: ")
    assert texts["clock"].startswith(("its clock is 7.", "its clock is 6."))
    assert texts["code"].startswith("common/train/flops.py differ")
    assert texts["mtu"].startswith("eth0 sends packets of 1400 bytes, other machines of 1500")


@pytest.mark.machines
def test_slow_machine(machines: list[Machine], tmp_path: Path) -> None:
    """It sends at 100 Mbit/s, as through a bad cable."""
    machines[2].shape("100mbit")
    visit = Visit(tmp_path, machines, "--json", "--wait", PATIENT)
    for one in machines:
        visit.start(one)
    assert visit.end() == [2, 2, 2], str(visit)
    found = [one for one in visit.found(machines[0]) if one.severity != "advice"]
    assert {one.check for one in found} == {"bandwidth"}, str(visit)
    assert "machine2" in {one.host for one in found}
    (slow,) = [one for one in found if one.host == "machine2"]
    assert " MB/s to all others by gloo" in slow.found


@pytest.mark.machines
def test_wrong_interface(machines: list[Machine], tmp_path: Path) -> None:
    """gloo takes one that leads nowhere, as a bridge of containers does; the ranks have met by the other one.

    Of two, the one with the higher address connects, so a lower address than machine 0's has to be reached.
    """
    visit = Visit(tmp_path, machines[:2], "--json", "--wait", PATIENT)
    nowhere = "ip link add docker0 type bridge && ip address add 10.1.1.1/24 dev docker0 && ip link set docker0 up"
    visit.start(machines[0])
    visit.start(machines[1], nowhere, GLOO_SOCKET_IFNAME="docker0")
    assert visit.end() == [2, 2], str(visit)
    found = visit.found(machines[0])
    assert "gloo" in {one.check for one in found}, str(visit)


@pytest.mark.machines
def test_machine_that_does_not_come(machines: list[Machine], tmp_path: Path) -> None:
    """What machine 0 has wrong is printed all the same, and before."""
    visit = Visit(tmp_path, machines[:1], "--json", "--wait", "12", "--workers", "1", number=2)
    visit.start(machines[0], "mount -t tmpfs -o size=64m doctor-test /dev/shm")
    assert visit.end() == [2], str(visit)
    found = [one for one in visit.found(machines[0]) if one.severity != "advice"]
    assert [one.check for one in found] == ["shm", "meet"], str(visit)
    assert found[-1].found.startswith("2 machines have not met in 12 s")


@pytest.mark.machines
def test_machines_that_cannot_meet(machines: list[Machine], tmp_path: Path) -> None:
    """A taken port, and another secret: each machine says what it knows."""
    taken = machines[0].popen(
        [sys.executable, "-c", f"import socket, time\nserver = socket.create_server(('{machines[0].address}', 29400))\n"
         "print('taken', flush=True)\ntime.sleep(2000)"], tmp_path / "taken", dict(os.environ))  # fmt: skip
    runner.wait_for(lambda: "taken" in (tmp_path / "taken").read_text())
    visit = Visit(tmp_path, machines[:2], "--json", "--wait", "15")
    for one in visit.them:
        visit.start(one)
    assert visit.end() == [2, 2], str(visit)
    taken.kill()
    first = visit.found(machines[0])
    assert [one.check for one in first if one.severity != "advice"] == ["port", "meet"], str(visit)
    assert f"process {taken.pid}" in first[0].found
    again = Visit(tmp_path, machines[:2], "--json", "--wait", PATIENT)
    again.start(machines[0], RUN_KEY=32 * "0b")
    again.start(machines[1])
    assert again.end() == [2, 2], str(again)
    assert [one.check for one in again.found(machines[1])] == ["meet"]
    assert "has another RUN_KEY" in again.found(machines[1])[0].found


def test_signal_while_the_launcher_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until the launcher is known: an exit before that would leave the launcher behind."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: Any, **given: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **given))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    before = {number: signal.signal(number, around._exit) for number in around.ENDS}
    monkeypatch.setattr(around.subprocess, "Popen", start)
    try:
        with pytest.raises(SystemExit) as ended, around._started(["sleep", "1000"], tmp_path, subprocess.DEVNULL):
            raise AssertionError("the signal came before")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == 128 + signal.SIGTERM
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.machines
def test_nothing_stays_behind(machines: list[Machine], tmp_path: Path) -> None:
    """Also if the doctor is stopped while it waits."""
    visit = Visit(tmp_path, machines[:1], "--wait", PATIENT, number=2)
    (tmp_path / "tmp").mkdir()
    visit.start(machines[0], TMPDIR=str(tmp_path / "tmp"))
    (process,) = visit.processes
    runner.wait_for(lambda: [*(tmp_path / "tmp").glob("doctor-*/said")], visit)  # it has started the launcher
    process.send_signal(signal.SIGTERM)
    assert process.wait(runner.HANG_S) == 128 + signal.SIGTERM
    runner.wait_for(lambda: not machines[0].pids(), "processes of the doctor stay")
    assert not [*(tmp_path / "tmp").glob("doctor-*")]
