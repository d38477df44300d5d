"""Peak memory of recipes beside their bare twins: `uv run python -m benchmarks.memory`.

It writes a part of docs/measured/performance.md. Each arm is a run of its own, because memory that an allocator
keeps after one would hide the other. A rank's peak is the largest part of it that ever was in memory, program and
libraries included (proc(5), VmHWM). Arguments are recipes, with or without flags in the same argument: measure these
alone; the rows of the others stay.
"""

import json
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import twins
from common import devices, ranks, session
from common.run import cli, process_group
from tests.harness import pages, runner
from tests.harness.runner import ROOT

ROUNDS = 3
JSON = ROOT / "docs" / "measured" / "memory.json"
# Models whose parameters, gradients and optimizer state take more than the libraries do.
SIZES = {
    "resnet": ("--model", "resnet18", "--image-size", "32"),
    "gpt": ("--num-layers", "4", "--width", "768", "--num-heads", "12", "--seq-len", "128"),
}
NAMES = sorted([*twins.RECIPES, "allreduce_resnet --sync parameter"])  # without buckets, which copy the gradients
HEAD = """\
| recipe | twin, MiB | recipe, MiB | the recipe needs more, MiB | with evaluation and save, MiB |
|---|---|---|---|---|"""


def peak_mib() -> float:
    """The most of this process that was in memory so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def measure_twin(recipe: str, path: str, argv: list[str], out: str) -> None:
    """A rank of the twin, which writes its peak."""
    part = runpy.run_path(path, run_name="twin")
    sys.argv = argv
    args = cli.parse(part["Args"])
    devices.configure(args.matmul_precision, args.deterministic)
    world = process_group.start(args.backend, args.dtype)
    twins.loop(recipe, part, args, part["make_mesh"](args, world))
    Path(out, str(world.rank)).write_text(json.dumps([peak_mib()]))
    process_group.finish(world.process)


def measure_recipe(_recipe: str, path: str, argv: list[str], out: str) -> None:
    """A rank of the recipe, which writes its peak before the last step, and at the end, after evaluation and save."""
    real = session.Session.steps
    peaks: list[float] = []

    def steps(run: session.Session, dp_rank: int) -> Iterator[int]:
        for step in real(run, dp_rank):
            if step == twins.SEGMENT + 1:
                peaks.append(peak_mib())
            yield step

    session.Session.steps = steps  # type: ignore[method-assign,assignment]
    runner.run_path(path, argv)
    Path(out, str(ranks.rank())).write_text(json.dumps([*peaks, peak_mib()]))


def once(name: str, arm: Any) -> list[float]:
    """The peaks of the rank that needs most."""
    recipe, *flags = name.split()
    path = str(ROOT / "recipes" / recipe / "train.py")
    with tempfile.TemporaryDirectory() as folder:
        more = (*SIZES[runner.workload(recipe)], *flags)
        argv = twins.argv(path, recipe, f"{folder}/runs", twins.SEGMENT + 1, *more)
        result = runner.spawn(arm, [(recipe, path, argv, folder)] * twins.SIZE, timeout_s=600.0)
        assert result.ok, str(result)
        each = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(twins.SIZE)]
    return [max(peaks) for peaks in zip(*each, strict=True)]


def row(recipe: str, peaks: dict[str, list[list[float]]]) -> str:
    """A line of the table."""
    without = [peak for (peak,) in peaks["twin"]]
    trains, whole = zip(*peaks["recipe"], strict=True)
    more = [mine - theirs for mine, theirs in zip(trains, without, strict=True)]
    cells = [pages.spread(values, form) for values, form in ((without, ".0f"), (trains, ".0f"), (more, "+.0f"))]
    return f"| {' | '.join([recipe, *cells, pages.spread(whole, '.0f')])} |"


def main() -> None:
    """Measure recipes one after the other, the arms by turns; each is written at once."""
    for recipe in sys.argv[1:] or NAMES:
        arms = {"twin": measure_twin, "recipe": measure_recipe}
        peaks: dict[str, list[list[float]]] = {name: [] for name in arms}
        for _ in range(ROUNDS):
            for name, arm in arms.items():
                peaks[name].append(once(recipe, arm))
        print(row(recipe, peaks), flush=True)
        conditions = f"{twins.SIZE} ranks of one thread on gloo, {ROUNDS} rounds"
        measured = pages.measured(
            shlex.join(["uv", "run", "python", "-m", "benchmarks.memory", *sys.argv[1:]]), conditions
        )
        known: dict[str, Any] = json.loads(JSON.read_text()) if JSON.exists() else {}
        known[recipe] = {"measured": measured, "MiB": peaks}
        JSON.write_text(json.dumps(known) + "\n")
        found = {name: known[name] for name in NAMES if name in known}
        pages.write(
            ROOT / "docs" / "measured" / "performance.md",
            measured_memory="\n\n".join(dict.fromkeys(one["measured"] for one in found.values())),
            memory="\n".join([HEAD, *(row(name, one["MiB"]) for name, one in found.items())]),
        )


if __name__ == "__main__":
    main()
