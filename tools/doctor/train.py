"""One rank of the doctor: meets the others, tries with them what a job needs, and lets rank 0 write what all found.

Started by launch/torchrun.sh tools/doctor, launch/slurm.sh tools/doctor, or python -m tools.doctor. See docs/doctor.md.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common import __version__, ranks, seal
from common.protect import diagnose, health
from tools.doctor import findings, group, network
from tools.doctor.around import ALL_WELL, BEGUN, DONE, FOLDER, LOCAL, MET, REPORT
from tools.doctor.findings import Asked, Finding

FOLDER_S = 60.0
DEVICE_S = 30.0  # the first call of CUDA takes some seconds
GLOO_S = 20.0
BANDWIDTH_S = 30.0
NCCL_S = 60.0
LATER_S = 3.0  # by how much the others outlast rank 0, which writes the report


class Exam:
    """What this rank has found so far, and a limit for what it does now.

    Attributes:
        found: the findings; on rank 0 in the end those of all ranks.
        place: where the report goes.
    """

    def __init__(self, place: Path, rank: int, local_rank: int) -> None:
        self.found: list[Finding] = []
        self.place = place
        self._rank, self._local_rank = rank, local_rank
        self._late: Finding | None = None
        self._end = 0.0
        self._parent = os.getppid()
        threading.Thread(target=self._watch, name="limits", daemon=True).start()

    @contextlib.contextmanager
    def limit(self, seconds: float, late: Finding) -> Iterator[None]:
        """End this process after so long, with a finding: a call of a driver or a network may never return."""
        self._end = time.monotonic() + seconds + (LATER_S if self._rank else 0.0)
        self._late = late
        try:
            yield
        finally:
            self._late = None

    def _watch(self) -> None:
        while os.getppid() == self._parent:  # else the launcher is gone, and nobody waits for this rank
            time.sleep(0.1)
            late = self._late
            if late and time.monotonic() > self._end:
                self.found.append(late)
                self.end()
        os._exit(findings.SICK)

    def report(self, healthy: str = "") -> None:
        """Write the findings for this machine's launcher (rank 0)."""
        (self.place / ALL_WELL).write_text(healthy)
        findings.write(self.place / REPORT, self.found)

    def done(self) -> None:
        """Let this machine's launcher end, which need not wait for other machines (one rank of each machine)."""
        if self._local_rank == 0:
            partial = self.place / "done.tmp"
            partial.write_text(str(findings.status(self.found)))
            partial.replace(self.place / DONE)  # with its content, or not there

    def end(self) -> None:
        """End this process, rank 0 with a report; an orderly end could wait for others (never returns)."""
        if self._rank == 0 and not (self.place / REPORT).exists():
            self.report()
        self.done()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(findings.status(self.found))


def main() -> None:
    """Meet, compare, try."""
    if os.environ.get("ONLY_CHECK_FLAGS"):  # launch/slurm.sh, before it submits a job
        findings.parse(sys.argv[1:])
        return
    if FOLDER not in os.environ:
        print("error: start the doctor by launch/torchrun.sh tools/doctor, or python -m tools.doctor", file=sys.stderr)
        sys.exit(findings.SICK)
    place = Path(os.environ[FOLDER])
    local_rank, local_size = ranks.env_int("LOCAL_RANK", default=0), ranks.env_int("LOCAL_WORLD_SIZE", default=1)
    asked = findings.parse(sys.argv[1:], local_size)
    rank, size, host = ranks.rank(), ranks.size(), socket.gethostname()
    exam = Exam(place, rank, local_rank)
    (place / BEGUN).touch()
    if local_rank == 0:
        known = findings.read((place / LOCAL).read_text())
        # The machines have met, so MASTER_ADDR leads to machine 0, also where several of them are one computer.
        exam.found += [dataclasses.replace(one, rank=rank) for one in known if one.check != "master"]
    device = try_device(exam, asked, host, local_rank)
    store, plain = join(exam, asked, host, rank, size)
    mine = facts(exam, asked, host, device, local_rank)
    everyone = meet(exam, asked, store, mine, size)
    if asked.machines > 1:
        late = Finding(
            *("shared", host, rank, "breaks", f"--out {asked.out} was not compared in {FOLDER_S:g} s"),
            "ranks that read or write there hang",
            "look at the file system on the machines that are slow",
        )
        with exam.limit(FOLDER_S, late):
            exam.found += group.shared_folder(asked, store, mine, size)
    rates = try_network(exam, plain, device, mine, everyone)
    late = Finding(
        *("ranks", host, rank, "breaks", f"not all ranks have come to the end in {GLOO_S:g} s"),
        "a job hangs",
        "look at the machines that have printed nothing",
    )
    with exam.limit(GLOO_S, late):
        exam.found[:] = [Finding(**one) for part in ranks.gather([vars(one) for one in exam.found]) for one in part]
        if rank == 0:
            exam.report(healthy_line(asked, everyone, rates))
        dist.barrier()  # the launcher ends all of its ranks as soon as one has ended
    exam.end()


def try_device(exam: Exam, asked: Asked, host: str, local_rank: int) -> torch.device:
    """This rank's device, which computes rightly."""
    rank = ranks.rank()
    late = Finding(
        *("gpu", host, rank, "breaks", f"CUDA has not answered for {DEVICE_S:g} s"),
        "the first step hangs",
        "ask the administrator to look at dmesg (Xid) and to restart the machine",
    )
    cpu = torch.device("cpu")
    with exam.limit(DEVICE_S, late):
        try:
            there = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if not there:
                if asked.gpus and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
                    exam.found.append(
                        Finding(
                            *("gpu", host, rank, "breaks", f"the machine has {asked.gpus} GPUs, and torch sees none"),
                            "the run is refused",
                            "check the driver (nvidia-smi) and whether torch is a CUDA build (torch.version.cuda)",
                        )
                    )
                return cpu
            device = torch.device("cuda", local_rank % there)
            torch.cuda.set_device(device)
            fault = health.find_fault(device)
        except RuntimeError as error:  # of CUDA
            device, fault = cpu, f"fails: {str(error).splitlines()[0]}"
    if fault:
        exam.found.append(
            Finding(
                *("gpu", host, rank, "breaks", f"{device} {fault}"),
                "the run is refused",
                "exclude that machine, or that device by CUDA_VISIBLE_DEVICES",
            )
        )
    return device


def join(exam: Exam, asked: Asked, host: str, rank: int, size: int) -> tuple[seal.SealedStore, dist.Store]:
    """The ranks' store, sealed and plain."""
    if "RANK" not in os.environ:
        plain: dist.Store = dist.HashStore()
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        late = Finding(
            *("meet", host, rank, "breaks", f"no connection to rank 0 at {address}:{port} in {asked.wait_s:g} s"),
            "a job waits as long as that, and then ends",
            "let the firewalls open all ports between the machines",
        )
        with exam.limit(asked.wait_s, late):
            plain = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=timedelta(seconds=asked.wait_s),
                                  wait_for_workers=False)  # fmt: skip
    return seal.SealedStore(plain, seal.derive(os.environ.get("RUN_KEY", ""), "doctor")), plain


def facts(exam: Exam, asked: Asked, host: str, device: torch.device, local_rank: int) -> group.Facts:
    """What this rank knows of itself."""
    packages = [{"PIL": "pillow"}.get(name, name) for name in ranks.PACKAGES]
    versions = {"brigade": __version__, "python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions["torch"] = str(torch.__version__)
    if dist.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = Path("/proc/driver/nvidia/version")
    with_gpu = device.type == "cuda"
    return {
        "rank": ranks.rank(),
        "host": host,
        "machine": asked.machine,
        "local_rank": local_rank,
        "processes": asked.processes,
        "versions": versions,
        "code": ranks.code_digests(__file__),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "",
        "gpu": torch.cuda.get_device_name(device) if with_gpu else "",
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "mtus": network.mtus() if asked.machines > 1 else {},
        "found": [vars(one) for one in exam.found],
        "clock": time.time(),
    }


def meet(exam: Exam, asked: Asked, store: seal.SealedStore, mine: group.Facts, size: int) -> list[group.Facts]:
    """Compare what the ranks know of themselves and their clocks (all ranks); returns the facts of all, on rank 0."""
    rank, host = mine["rank"], mine["host"]
    late = Finding(
        *("meet", host, rank, "breaks", f"rank 0 has not answered for {asked.wait_s:g} s"),
        "a job hangs before its first step",
        "look at rank 0's machine and at the link to it",
    )
    with exam.limit(asked.wait_s + LATER_S, late):
        came = group.collect(store, "facts", mine, rank, size, asked.wait_s)
        if rank == 0:
            exam.found += [Finding(**one) for other in sorted(came) if other for one in came[other][0]["found"]]
        else:
            exam.found.clear()  # rank 0 reports them, even if the ranks come no further together
        if rank == 0 and len(came) < size:
            exam.found += [absent(sorted(set(range(size)) - came.keys()), mine, asked.wait_s)]
            exam.end()
        if rank == 0:
            store.set("clock", repr(time.time()))
        of_rank0 = float(group.wait_for(store, "clock", asked.wait_s))
        most = time.time() - of_rank0  # and not less than what the message took
        (exam.place / MET).touch()  # rank 0 has all that this machine has found
        skews = group.collect(store, "clocks", most, rank, size, asked.wait_s)
    everyone = [came[other][0] for other in range(size)] if rank == 0 else []
    if rank == 0:
        ahead = {other: (came[other][0]["clock"] - came[other][1], skews[other][0]) for other in skews}
        exam.found += group.compare(everyone)
        exam.found += group.compare_clocks(group.first_of_each_machine(everyone), ahead)
    return everyone


def absent(missing: list[int], mine: group.Facts, waited_s: float) -> Finding:
    """That ranks have not come."""
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    machines = sorted({rank // mine["processes"] for rank in missing})
    return Finding(
        *("meet", mine["host"], mine["rank"], "breaks"),
        f"ranks {shown} (of machines {', '.join(map(str, machines[:8]))}) have not come in {waited_s:g} s",
        "a job hangs before its first step",
        "look at what those machines have printed; the firewall must open all ports between the machines",
    )


def try_network(
    exam: Exam, plain: dist.Store, device: torch.device, mine: group.Facts, everyone: list[group.Facts]
) -> group.Rates:
    """Sums over all ranks, and the bandwidth of each pair of machines by gloo, which it returns (all ranks)."""
    rank, host = mine["rank"], mine["host"]
    shown = f"gloo over {mine['interface'] or 'the interface of the host name'}"

    def late(seconds: float, what: str) -> Finding:
        return Finding(
            *("gloo", host, rank, "breaks", f"{what} by {shown} has not ended after {seconds:g} s"),
            "a job hangs before its first step",
            "open all ports between the machines, or set GLOO_SOCKET_IFNAME to the interface that joins them",
        )

    try:
        with exam.limit(2 * GLOO_S, late(2 * GLOO_S, "the first all-reduce")):
            dist.init_process_group("gloo", store=dist.PrefixStore("gloo", plain), rank=rank,
                                    world_size=ranks.size(), timeout=timedelta(seconds=GLOO_S))  # fmt: skip
            exam.found += group.all_reduce(torch.device("cpu"), "gloo", host)
            places = ranks.gather([mine["machine"], host, device.type])
        members = [i for i, place in enumerate(places) if place[0] not in {one[0] for one in places[:i]}]
        hosts = [place[1] for place in places]
        with exam.limit(BANDWIDTH_S, late(BANDWIDTH_S, "measuring the bandwidth")):
            rates = group.bandwidths(members, torch.device("cpu")) if len(members) > 1 else {}
        if rank == 0:
            exam.found += group.slow_links(rates, hosts, "gloo")
        if {place[2] for place in places} == {"cuda"}:
            try_nccl(exam, device, mine, hosts)
    except RuntimeError as error:  # of gloo, or of NCCL
        exam.found.append(dataclasses.replace(late(0, ""), found=f"{shown}: {str(error).splitlines()[0][:200]}"))
        if rank:
            exam.done()
            time.sleep(LATER_S)  # rank 0 writes the report before a launcher ends it
        exam.end()
    return rates


def try_nccl(exam: Exam, device: torch.device, mine: group.Facts, hosts: list[str]) -> None:
    """The same by NCCL, between all GPUs (all ranks)."""
    shown = f"NCCL_SOCKET_IFNAME={os.environ.get('NCCL_SOCKET_IFNAME', '')}"
    late = Finding(
        *("nccl", mine["host"], mine["rank"], "breaks", f"the first sends by NCCL have not ended after {NCCL_S:g} s"),
        "a job hangs before its first step",
        f"start with NCCL_DEBUG=INFO ({shown}); " + diagnose.NCCL_ADVICE.strip().removeprefix("if it never ends, "),
    )
    with exam.limit(NCCL_S, late):
        nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=2 * NCCL_S), device_id=device)
        exam.found += group.all_reduce(device, "NCCL", mine["host"], nccl)
        rates = group.bandwidths(range(len(hosts)), device, nccl)
    if mine["rank"] == 0:
        exam.found += group.slow_links(rates, hosts, "NCCL")


def healthy_line(asked: Asked, everyone: list[group.Facts], rates: group.Rates) -> str:
    """What is well, in one line."""
    machines, first = group.first_of_each_machine(everyone), everyone[0]
    name = first["gpu"] or "CPU"
    where = f"{len(machines)} machines" if len(machines) > 1 else first["host"]
    number = f"{len(everyone)} rank{'s' * (len(everyone) > 1)}"
    links = ""
    if rates:
        links = f", gloo over {first['interface']} at {min(rates.values()) / 1e6:,.0f} MB/s or more between machines"
    return f"healthy: {number} on {where}, {name}, torch {torch.__version__}{links}, --out {asked.out}"


if __name__ == "__main__":
    main()
