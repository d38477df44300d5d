"""What the doctor found: one line each, with what it causes and what to do. Imports no torch, which takes seconds."""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HEALTHY, SICK = 0, 2
# A finding that breaks ends the job or keeps it from its first step; one that cripples makes it slow or unsafe.
SEVERITIES = ("breaks", "cripples", "advice")
WAIT_S = 60.0  # until all machines have come; a launcher imports torch first


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        check: the check that found it, one word.
        host: the machine that has it.
        rank: the rank that has it; None where no rank has begun yet.
        severity: one of `SEVERITIES`.
        found: what is wrong, with the value.
        causes: what it will cause.
        do: what to change.
    """

    check: str
    host: str
    rank: int | None
    severity: str
    found: str
    causes: str
    do: str

    def __str__(self) -> str:
        """The line that people read."""
        where = self.host if self.rank is None else f"{self.host}, rank {self.rank}"
        return f"{self.severity}: {self.check} on {where}: {self.found}: {self.causes}; {self.do}"


@dataclass(frozen=True)
class Asked:
    """The flags, and what the launcher says of this machine and of its ranks.

    Attributes:
        out: where runs go, as in a recipe's --out.
        name: a run's name, as in a recipe's --name.
        workers: loader processes per rank, as in a recipe's --workers.
        as_json: print the findings as JSON.
        wait_s: seconds until all machines must have come.
        machine: number of this machine, from 0.
        machines: how many there are.
        processes: ranks on this machine.
        threads: threads of each rank.
        master: machine 0's name or address, and the port there; "" and 0 on a machine alone.
        port: see `master`.
        gpus: of this machine, as the launcher counts them.
    """

    out: str = "runs"
    name: str = ""
    workers: int = 0
    as_json: bool = False
    wait_s: float = WAIT_S
    machine: int = 0
    machines: int = 1
    processes: int = 1
    threads: int = 1
    master: str = ""
    port: int = 0
    gpus: int = 0


def parse(argv: Sequence[str], processes: int = 1) -> Asked:
    """The command line and the launcher's environment.

    Args:
        argv: the flags.
        processes: ranks on this machine.

    Raises:
        SystemExit: 2 for a flag that there is not, 0 after --help.
    """
    parser = argparse.ArgumentParser(
        prog="tools/doctor",
        allow_abbrev=False,
        description="Look for what would break or slow down a job on these machines. Exit code: 0 healthy, 2 not.",
    )
    parser.add_argument("--out", default="runs", help="the folder of the runs, as a recipe's --out (default: runs)")
    parser.add_argument("--name", default="", help="the run in --out that the job would continue, as a recipe's --name")
    parser.add_argument("--workers", type=int, default=0, help="loader processes per rank, as a recipe's --workers")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--wait", type=float, default=WAIT_S, help="seconds until all machines must have come (60)")
    parser.add_argument(
        "--flags-of-recipe",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="FLAG",
        help="the flags of a recipe follow: --out, --name and --workers are taken from them",
    )
    asked = parser.parse_args(argv)
    # What a recipe has besides these three is not the doctor's.
    of_recipe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    of_recipe.add_argument("--out", default=asked.out)
    of_recipe.add_argument("--name", default=asked.name)
    of_recipe.add_argument("--workers", type=int, default=asked.workers)
    found, _ = of_recipe.parse_known_args(asked.flags_of_recipe)
    several = os.environ.get("NNODES", "1") != "1"
    return Asked(
        out=found.out,
        name=found.name,
        workers=found.workers,
        as_json=asked.json,
        wait_s=asked.wait,
        machine=int(os.environ.get("NODE_RANK", "0")) if several else 0,
        machines=int(os.environ["NNODES"].rpartition(":")[2]) if several else 1,
        processes=processes,
        threads=_number("OMP_NUM_THREADS", 1),
        master=os.environ.get("MASTER_ADDR", "") if several else "",
        port=_number("MASTER_PORT", 29400) if several else 0,
        gpus=_number("GPUS_ON_NODE", 0),
    )


def _number(name: str, default: int) -> int:
    """A variable of the environment that launch/torchrun.sh has checked or set."""
    with contextlib.suppress(ValueError):
        return int(os.environ.get(name, ""))
    return default


def status(found: Sequence[Finding]) -> int:
    """The exit code."""
    return SICK if any(one.severity != "advice" for one in found) else HEALTHY


def merged(found: Sequence[Finding]) -> Iterator[Finding]:
    """Findings that differ in the machine only, as one."""
    alike = collections.defaultdict(list)
    for one in found:
        alike[dataclasses.replace(one, host="", rank=None)].append(one)
    for same in alike.values():
        hosts = list(dict.fromkeys(one.host for one in same))
        if len(same) == 1:
            yield same[0]
        else:
            more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
            shown = ", ".join(hosts[:3]) + more
            yield dataclasses.replace(same[0], host=shown, rank=None)


def report(found: Sequence[Finding], as_json: bool, healthy: str) -> str:
    """All that is printed.

    Args:
        found: the findings.
        as_json: as a list of objects.
        healthy: the line for machines that nothing breaks or cripples; "" if nobody knows whether they are.
    """
    if as_json:
        return json.dumps([dataclasses.asdict(one) for one in found], indent=1)
    lines = [str(one) for one in merged(found)]
    return "\n".join([*lines, healthy] if healthy and status(found) == HEALTHY else lines)


def write(file: Path, found: Sequence[Finding]) -> None:
    """Hand findings to another process of this machine."""
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps([dataclasses.asdict(one) for one in found]))
    partial.replace(file)  # whole, or not there


def read(text: str) -> list[Finding]:
    """What `write` or `report` has written."""
    return [Finding(**one) for one in json.loads(text)]
