"""The traces that the ranks of a run have written: each one's steps, and all of them as one trace."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import UserError, manifest
from common.marks import FACTS
from tools.profile import timeline

MERGED = "merged.json.gz"
MOST_BYTES = 2**30  # of a rank's trace, unpacked


@dataclass(frozen=True)
class Trace:
    """What one rank has written.

    Attributes:
        facts: what the run has added to it: `Profile._facts` in common/measure/profile.py.
        window: its steps.
        shift_us: from its clock to that of the first rank.
    """

    facts: Mapping[str, Any]
    window: timeline.Window
    shift_us: float


def find(path: Path, step: int) -> Path:
    """The folder of a profile.

    Args:
        path: that folder, or the run's.
        step: which one, by its first step; 0 for the last one.

    Raises:
        UserError: there is none.
    """
    folders = [path, *sorted(path.glob("step_*")), *sorted(path.glob("profile/step_*"))]
    found = [folder for folder in folders if any(folder.glob("rank_*.json.gz"))]
    chosen = [folder for folder in found if not step or folder.name == f"step_{step:08d}"]
    if not chosen and found:
        raise UserError(f"--step {step}: {path} has no such profile, but {', '.join(one.name for one in found)}")
    if not chosen:
        raise UserError(f"{path} has no profile: train with --profile 5, and give the folder of that run")
    return chosen[-1]


def read(folder: Path, merge_ranks: int) -> tuple[list[Trace], dict[str, Any]]:
    """The traces of a profile by rank, and the first of them as one trace.

    Args:
        folder: of the profile.
        merge_ranks: how many ranks at most become one trace.

    Raises:
        UserError: a file is damaged, or something else than a run has written it.
    """
    found: list[Trace] = []
    merged: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    clock_us = 0.0
    for file in sorted(folder.glob("rank_*.json.gz")):
        trace = _load(file)
        facts = trace.pop(FACTS)
        if found and facts["rank"] >= found[0].facts["size"]:
            break  # an earlier start with more ranks has written it
        here_us = facts["clock_s"] * 1e6 + trace.get("baseTimeNanoseconds", 0) / 1e3
        clock_us = clock_us if found else here_us
        try:
            found.append(Trace(facts, timeline.window(trace, facts["recorded"]), here_us - clock_us))
        except ValueError as error:
            raise UserError(f"{file}: {error}") from None
        if len(found) <= merge_ranks:
            events += _as_process(trace, facts, here_us - clock_us)
            merged = merged or trace | {"traceEvents": events}
    return found, merged


def _load(file: Path) -> dict[str, Any]:
    try:
        manifest.size(file)  # a pipe would be waited for
        with gzip.open(file) as content:
            text = content.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        trace = json.loads(text)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UserError(
            f"{file} cannot be read ({error}): delete it, and the table will be of the other ranks"
        ) from None
    if not isinstance(trace, dict) or FACTS not in trace:
        raise UserError(f"{file} is not a trace that a run of this version has written with --profile")
    return trace


def _as_process(trace: Mapping[str, Any], facts: Mapping[str, Any], shift_us: float) -> Iterator[dict[str, Any]]:
    """The events of a rank, which becomes a process of its own, on the first rank's clock."""
    rank = facts["rank"]
    for name, args in {"process_name": {"name": f"rank {rank}"}, "process_sort_index": {"sort_index": rank}}.items():
        yield {"ph": "M", "name": name, "pid": rank, "args": args}
    for one in trace["traceEvents"]:
        # Others are no process's, or give it another name.
        if isinstance(one.get("pid"), int) and not one["name"].startswith("process_"):
            event = one | {"pid": rank, "ts": one.get("ts", 0) + shift_us}
            if "id" in event:  # of an arrow, which must not lead to another rank
                event["id"] = one["id"] * facts["size"] + rank
            yield event


def write(folder: Path, merged: Mapping[str, Any]) -> str:
    """Write one trace beside those of the ranks; returns a line on it, also if there is no room for it."""
    try:
        with gzip.open(folder / MERGED, "wt") as content:
            json.dump(merged, content)
    except OSError as error:
        return f"warning: the ranks' traces were not merged: {error}"
    return f"         {folder / MERGED} shows each operator: open it at https://ui.perfetto.dev"
