"""What tools.profile shows, and what --profile costs: `uv run python benchmarks/profiling.py` (root).

It writes docs/profiling.md. The link is between two machines, network namespaces on a switch, with one process each.
"""

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.harness import machines, pages
from tools import about
from tools.profile import table, timeline, traces

PAGE = about.ROOT / "docs" / "profiling.md"
ROUNDS, LAST = 5, 40
COLUMNS = ("data", "forward", "backward", "optimizer", "exposed", "slower", "beside")
FLAGS = ("--max-steps", "12", "--profile", "5", "--eval-every", "1000", "--name", "run")


def run(recipe: str, folder: str, *flags: str) -> Path:
    """Run a recipe on two ranks, or one; returns the run's folder."""
    command = ["bash", "launch/torchrun.sh", f"recipes/{recipe}", "--out", folder, *flags]
    environ = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, cwd=about.ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return Path(folder, flags[flags.index("--name") + 1])


def profiled(path: Path) -> tuple[list[traces.Trace], table.Found]:
    """The traces of a run, and what they show."""
    ranks, _ = traces.read(traces.find(path, 0), 0)
    return ranks, table.judge(ranks)


def row(recipe: str, strategy: tuple[str, ...], path: Path) -> str:
    """One line of the table."""
    ranks, found = profiled(path)
    parts = found.mean
    shares = [f"{parts[part] / parts['step']:.0%}" for part in COLUMNS]
    total = sum(parts[part] for part in timeline.PARTS) / parts["step"]
    name = " ".join([recipe, *strategy])
    longer = parts["step"] / ranks[0].facts["before_s"]
    cells = [name, f"{parts['step'] * 1e3:,.0f} ms", *shares, f"{total:.1%}", f"{longer:.2f}"]
    return f"| {' | '.join(cells)} |"


def printed(path: Path) -> str:
    """What the command prints of a run."""
    command = [sys.executable, "-m", "tools.profile", str(path)]
    return subprocess.run(command, cwd=about.ROOT, capture_output=True, text=True, check=True).stdout


def cost(folder: str) -> str:
    """Steps after a profile against those of a run without one, by turns."""
    seconds: dict[str, list[float]] = {"0": [], "5": []}
    for number in range(ROUNDS):
        for steps, found in seconds.items():
            name = f"{steps}-{number}"
            flags = ("--max-steps", str(LAST), "--profile", steps, "--eval-every", "1000", "--name", name)
            lines = (run("ddp_gpt", folder, *flags) / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            rates = [
                line["perf/samples_per_s"] for line in records if line["step"] > 20 and "perf/samples_per_s" in line
            ]
            found.append(1 / statistics.fmean(rates))
    ratios = [with_it / without for without, with_it in zip(seconds["0"], seconds["5"], strict=True)]
    low, high = min(ratios), max(ratios)
    return (
        f"Steps 21 to {LAST} of `ddp_gpt` took {statistics.median(ratios):.3f} times as long with `--profile 5` before "
        f"them as without (median of {ROUNDS} pairs by turns; {low:.3f} to {high:.3f})."
    )


def over_link(rate: str, folder: Path) -> tuple[float, float]:
    """Seconds of a step between two machines, and of it, of sending and waiting with nothing to compute.

    Args:
        rate: that each sends at most, as for tc; "" for all that there is.
        folder: an empty one.
    """
    with machines.joined(folder, 2) as both:
        flags = ["--max-steps", "12", "--profile", "6", "--save-every", "1000", "--check-every", "0", "--eval-every"]
        flags += ["1000", "--global-batch-size", "24", "--num-layers", "2", "--width", "192", "--mlp-width", "512"]
        flags += ["--dtype", "float32", "--out", str(folder / "runs"), "--name", "run"]
        command = ["bash", str(about.ROOT / "launch/torchrun.sh"), str(about.ROOT / "recipes/ddp_gpt"), *flags]
        environ = os.environ | {"NNODES": "2", "MASTER_ADDR": both[0].address, "RUN_KEY": secrets.token_hex(32)}
        environ |= {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
        processes = []
        for one in both:
            if rate:
                one.shape(rate)
            processes.append(one.popen(command, folder / "output", environ | {"NODE_RANK": str(one.number)}))
        if any(process.wait(300) for process in processes):
            sys.exit((folder / "output").read_text())
    parts = profiled(folder / "runs/run")[1].mean
    return parts["step"], parts["exposed"] + parts["slower"]


def link(folder: Path) -> str:
    """What a slow link adds to a step, and to what the profile says of it, by turns."""
    rows = ["| | step free, ms | step at 100 Mbit/s, ms | longer by | sends longer by, in the profile | ratio |"]
    rows.append("|---|--:|--:|--:|--:|--:|")
    for number in range(ROUNDS):
        found = []
        for rate in ("", "100mbit"):
            place = folder / f"{number}-{rate}"
            place.mkdir(parents=True)
            found.append(over_link(rate, place))
        (free_s, free_sends_s), (slow_s, slow_sends_s) = found
        longer, sends = slow_s - free_s, slow_sends_s - free_sends_s
        shown = [f"{1e3 * value:.0f}" for value in (free_s, slow_s, longer, sends)]
        rows.append(f"| pair {number + 1} | {' | '.join(shown)} | {sends / longer:.2f} |")
    return "\n".join(rows)


def main() -> None:
    """Profile each recipe, then measure the link and the cost."""
    began = time.monotonic()
    head = ["recipe", "step", *(table.LINES[part] for part in COLUMNS), "sum", "of a step before"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    example = ""
    with tempfile.TemporaryDirectory() as folder:
        for recipe in about.RECIPES:
            flag = next((flag for flag in ("--pp", "--tp", "--cp") if about.has_flag(recipe, flag)), "")
            strategy = (flag, "2") if flag else ()
            path = run(recipe, str(Path(folder, recipe)), *FLAGS, *strategy)
            rows.append(row(recipe, strategy, path))
            if recipe == "fsdp_gpt":
                example = f"```\n{printed(path).replace(folder, 'runs')}```"
        links = link(Path(folder, "link"))
        costs = cost(str(Path(folder, "cost")))
    facts = pages.measured("uv run python benchmarks/profiling.py", "2 ranks on 2 cores", "gloo", began=began)
    pages.write(PAGE, example=f"{facts}\n\n{example}", recipes=f"{facts}\n\n" + "\n".join(rows), link=links, cost=costs)


if __name__ == "__main__":
    main()
