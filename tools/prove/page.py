"""The page: prove.md and prove.json."""

import dataclasses
import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common import ranks
from tools.about import cpu_name
from tools.prove.proofs import Row

UNITS = {"bytes_per_s": "GB/s"}


def machine(size: int, folder: Path) -> dict[str, str]:
    """Where this ran, and with what (all ranks).

    Args:
        size: number of ranks.
        folder: where the runs' ranks have noted their devices.
    """
    devices = sorted({file.read_text() for file in folder.glob("notes/*/device-*")})
    hosts = sorted(set(ranks.gather(socket.gethostname())))
    return {
        "ranks": f"{size} on {len(hosts)} machine{'s' * (len(hosts) > 1)}",
        "devices": " and ".join(devices),
        "processor": f"{cpu_name()}, {os.cpu_count()} CPUs",
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join(f"{name} {version}" for name, version in ranks.versions().items()),
        "CUDA of torch": str(torch.version.cuda),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def cells(*values: object) -> str:
    """A row of a table of Markdown."""
    return f"| {' | '.join(str(value).replace('|', chr(92) + '|') for value in values)} |"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A table of Markdown."""
    return [cells(*head), f"|{'---|' * len(head)}", *(cells(*row) for row in rows), ""]


def write(out: Path, rows: list[Row], figures: dict[str, list[dict[str, Any]]], where: dict[str, str]) -> str:
    """Write both files (rank 0); returns the last line for the terminal."""
    passed, failed = ([row for row in rows if row.verdict == verdict] for verdict in ("passed", "failed"))
    late = [row for row in rows if row.verdict == "not run" and not row.needs]
    needing = [row for row in rows if row.needs]
    verdict = f"{len(passed)} passed, {len(failed)} failed, {len(late)} not reached in time, {len(needing)} not run"
    lines = ["# Proofs of Brigade", "", f"**{verdict}**", "", *table(("", ""), list(where.items()))]
    lines += ["## Proofs", ""]
    order = [*failed, *late, *passed]
    lines += table(
        ("proof", "what", "found", "may be", "verdict"),
        [(row.proof, row.what, row.figure, row.tolerance, row.verdict) for row in order],
    )
    if needing:
        lines += ["## Not run here", ""]
        lines += [f"- {row.proof}: {row.what}: not run: needs {row.needs}" for row in needing] + [""]
    for name, found in figures.items():
        if found:
            lines += [f"## Figures: {name}", ""]
            keys = [*{key: None for one in found for key in one}]  # no tokens/s of images
            head = [UNITS.get(key, key.removeprefix("perf/")) for key in keys]
            lines += table(head, [[shown(key, one.get(key, "")) for key in keys] for one in found])
    out.mkdir(parents=True, exist_ok=True)
    content = {"machine": where, "proofs": [dataclasses.asdict(row) for row in rows], "figures": figures}
    (out / "prove.json").write_text(json.dumps(content, indent=1))
    (out / "prove.md").write_text("\n".join(lines))
    return f"{verdict}: {out / 'prove.md'}"


def shown(key: str, value: Any) -> str:
    """A figure as people read it."""
    if key == "bytes_per_s":
        return f"{value / 1e9:.3f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
