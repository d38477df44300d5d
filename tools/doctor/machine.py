"""What one machine has for its ranks: processors, memory, files, processes, GPUs. Imports no torch."""

import contextlib
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.doctor.findings import Asked, Finding

GIB = 2**30
RANK_BYTES = GIB  # what a process with torch, a small model and a group takes, without CUDA
WORKER_BYTES = GIB // 4  # a loader process: a fork that shares what its rank has read
SHM = "/dev/shm"  # noqa: S108 (not for a file of ours)
SHM_BYTES = GIB // 4  # batches of loader processes, and NCCL's buffers between GPUs of a machine
FILES = 1024  # what Linux gives a process, if nobody has changed it
THREADS = 64  # of one process: torch's, gloo's and this repository's
TMP_BYTES = 2**26
ASK_S = 10.0  # nvidia-smi takes 2 s on a machine with eight GPUs


def check(asked: Asked, host: str) -> Iterator[Finding]:
    """All that one machine can be asked about its limits."""
    yield from cpus(asked, host)
    yield from memory(asked, host)
    yield from shared_memory(asked, host)
    yield from files(host)
    yield from tasks(asked, host)
    yield from temporary(host)
    yield from gpus(asked, host)


# --- control groups: the limits of a container, a Slurm job or a systemd unit ------------------------------------


def limits(controller: str, file: str, v1_file: str, root: Path = Path("/")) -> Iterator[tuple[Path, str]]:
    """The values of a limit in this process's control group and in all groups around it.

    Args:
        controller: such as "cpu".
        file: the limit's name in version 2.
        v1_file: its name in version 1.
        root: the file system; a test has one of its own.
    """
    groups = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = groups / controller if controllers else groups
            group = top / path.lstrip("/")
            while group == top or top in group.parents:  # a container may see another path than its own: then the top
                limit = group / (v1_file if controllers else file)
                with contextlib.suppress(OSError):
                    yield group, limit.read_text().strip()
                group = group.parent


def cpu_quota(root: Path = Path("/")) -> float:
    """The processors' time that the control groups allow, in processors; infinity without a limit."""
    least = float("inf")
    for group, value in limits("cpu", "cpu.max", "cpu.cfs_quota_us", root):
        quota, _, period = value.partition(" ")  # version 2 has both in one file
        period = period or (group / "cpu.cfs_period_us").read_text()
        if quota not in ("max", "-1"):
            least = min(least, int(quota) / int(period))
    return least


def memory_limit(root: Path = Path("/")) -> float:
    """Bytes that the control groups allow; infinity without a limit."""
    found = [value for _, value in limits("memory", "memory.max", "memory.limit_in_bytes", root)]
    numbers = [int(value) for value in found if value != "max"]
    return min([number for number in numbers if number < 2**60], default=float("inf"))  # version 1 has no "max"


def tasks_limit(root: Path = Path("/")) -> float:
    """Processes and threads that the control groups allow; infinity without a limit."""
    found = [value for _, value in limits("pids", "pids.max", "pids.max", root)]
    return min([int(value) for value in found if value != "max"], default=float("inf"))


# --- checks -------------------------------------------------------------------------------------------------------


def cpus(asked: Asked, host: str, root: Path = Path("/")) -> Iterator[Finding]:
    """The processors against ranks, threads and loader processes."""
    quota, allowed = cpu_quota(root), len(os.sched_getaffinity(0))
    available = min(quota, allowed)
    source = "the CPU quota of the control group" if quota < allowed else "the processors that this job may use"
    shown = f"{source}: {available:g}"
    threads = asked.processes * asked.threads
    if available < asked.processes:
        yield Finding(
            *("cpu", host, None, "cripples", f"{shown} for {asked.processes} processes"),
            "they take turns, so a step takes many times as long, and ranks that wait may be taken for dead",
            "ask for more (Slurm: --cpus-per-task, Kubernetes: resources.limits.cpu, Docker: --cpus)",
        )
    elif threads > available:
        yield Finding(
            *("threads", host, None, "cripples", f"{shown} for {asked.processes} x OMP_NUM_THREADS={asked.threads}"),
            "threads of a rank wait for each other, which is slower than fewer threads",
            f"set OMP_NUM_THREADS={max(1, int(available // asked.processes))}",
        )
    elif asked.workers and threads + asked.processes * asked.workers > available:
        yield Finding(
            *("workers", host, None, "advice", f"{shown} for {threads} threads and --workers {asked.workers} a rank"),
            "loader processes and ranks take turns",
            f"ask for {asked.processes * (asked.threads + asked.workers)} processors, or lower --workers",
        )


def memory(asked: Asked, host: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Memory against ranks and loader processes."""
    limit, free = memory_limit(root), float("inf")
    with contextlib.suppress(OSError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    needed = asked.processes * (RANK_BYTES + asked.workers * WORKER_BYTES)
    if min(limit, free) < needed:
        what = "the memory limit of the control group is" if limit <= free else "free memory is"
        yield Finding(
            *("memory", host, None, "breaks"),
            f"{what} {min(limit, free) / GIB:.2f} GiB for {asked.processes} processes and --workers {asked.workers}",
            "the kernel kills a rank (exit code 137), before the first step or in it",
            f"ask for {needed / GIB:.1f} GiB plus what model and data take (Slurm: --mem, Docker: --memory)",
        )


def shared_memory(asked: Asked, host: str) -> Iterator[Finding]:
    """The size of /dev/shm, which is 64 MB in a container unless somebody asked for more."""
    try:
        place = os.statvfs(SHM)
        free = place.f_bavail * place.f_frsize
    except OSError:
        free = 0
    if free < SHM_BYTES:
        yield Finding(
            *("shm", host, None, "breaks" if asked.workers or asked.gpus > 1 else "advice"),
            f"{SHM} has {free / 2**20:.0f} MiB free",
            "loader processes (--workers) end with a bus error, and NCCL cannot connect the GPUs of a machine",
            "start the container with --ipc=host or --shm-size=8g (Kubernetes: an emptyDir with medium: Memory)",
        )


def files(host: str) -> Iterator[Finding]:
    """How many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        yield Finding(
            *("files", host, None, "breaks", f"a process may open {soft} files (ulimit -n)"),
            "'Too many open files' in connections to other ranks and in loader processes",
            f"run ulimit -n {FILES if hard < FILES else hard} before"
            + (", for which the hard limit must be raised as well (limits.conf)" if hard < FILES else ""),
        )


def tasks(asked: Asked, host: str, root: Path = Path("/")) -> Iterator[Finding]:
    """How many processes and threads there may be."""
    most = tasks_limit(root)
    needed = asked.processes * (THREADS + asked.threads + asked.workers)
    if most < needed:
        yield Finding(
            *("tasks", host, None, "breaks", f"the control group allows {most:g} processes and threads"),
            "'can't start new thread' or 'Resource temporarily unavailable'",
            f"allow at least {needed} (Docker: --pids-limit, systemd: TasksMax, Kubernetes: podPidsLimit)",
        )


def temporary(host: str) -> Iterator[Finding]:
    """The folder of temporary files, in which the launcher keeps the ranks' errors."""
    try:
        place = tempfile.gettempdir()
        with tempfile.TemporaryFile() as file:
            file.write(bytes(4096))
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        found = f"{place} has {free / 2**20:.0f} MiB free" if free < TMP_BYTES else ""
    except OSError as error:
        found = f"no temporary file can be written: {error.strerror}"
    if found:
        yield Finding(
            *("tmp", host, None, "breaks", found),
            "the launcher cannot start ranks",
            "make room there, or set TMPDIR to another folder",
        )


def gpus(asked: Asked, host: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Whether the driver answers, and has a GPU for each process."""
    do = "ask the administrator to look at dmesg and to restart the machine or load the driver again"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    if not asked.gpus and not (root / "dev/nvidiactl").exists() and not (root / "proc/driver/nvidia").exists():
        return
    ask = ["nvidia-smi", "--query-gpu=index,driver_version", "--format=csv,noheader"]
    try:
        asking = subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
    except OSError:
        return  # a container may have GPUs without nvidia-smi: the ranks look
    try:
        said, _ = asking.communicate(timeout=ASK_S)
    except subprocess.TimeoutExpired:
        asking.kill()  # and not waited for: it may be inside the driver for ever
        yield Finding(
            *("driver", host, None, "breaks", f"nvidia-smi has not answered for {ASK_S:g} s"),
            "the first call of CUDA hangs",
            do,
        )
        return
    if asking.returncode:
        yield Finding(
            *("driver", host, None, "breaks", f"nvidia-smi says: {' '.join(said.split())[:200]}"),
            "torch finds no GPU",
            do,
        )
        return
    listed = [line for line in said.splitlines() if "," in line]
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    number = min(len(listed), len(visible)) if visible else len(listed)
    if 1 < number < asked.processes:
        yield Finding(
            *("gpus", host, None, "breaks", f"{number} GPUs for {asked.processes} processes"),
            "each process needs its own, so the run is refused",
            f"set NPROC_PER_NODE={number}",
        )
