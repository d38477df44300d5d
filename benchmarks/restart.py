"""From SIGKILL to the next step: `uv run python -m benchmarks.restart` fills a part of docs/measured/survival.md.

The launcher trains with MAX_RESTARTS=1 on two ranks and saves every five steps. A rank is killed after step 12; the
others find out, all ranks are started again, and the run resumes at the newest checkpoint. By turns, the process that
ranks are forked from is stopped when the rank is killed.
"""

import os
import re
import signal
import statistics
import subprocess
import tempfile
import time

from tests.harness import pages
from tests.harness.runner import ROOT

TIMES, KILL_AFTER, SAVE_EVERY = 5, 12, 5
FLAGS = {"max-steps": 20, "log-every": 1, "save-every": SAVE_EVERY, "eval-every": 1000, "name": "run"}
FLAGS |= {"model": "resnet18"}
MARKS = {
    "a survivor names the dead rank": r"dead or frozen",
    "the ranks that have been started again say which checkpoint they resume": r"resuming",
    "the end of the first step after that checkpoint": rf"step +{KILL_AFTER // SAVE_EVERY * SAVE_EVERY + 1}/",
}


def once(stopped: bool) -> dict[str, float]:
    """Seconds from the command to the first step, and from the kill to each of MARKS."""
    with tempfile.TemporaryDirectory() as out:
        flags = [f"--{name}={value}" for name, value in FLAGS.items()]
        command = ["bash", "launch/torchrun.sh", "recipes/ddp_resnet", f"--out={out}", *flags]
        env = os.environ | {"MAX_RESTARTS": "1", "NPROC_PER_NODE": "2"}
        began = time.monotonic()
        found: dict[str, float] = {}
        killed = 0.0
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as launcher:
            assert launcher.stdout is not None
            for line in launcher.stdout:
                now = time.monotonic()
                if re.match(r"step +1/", line):
                    found["from the command to the end of the first step"] = now - began
                if not killed and re.match(rf"step +{KILL_AFTER}/", line):
                    rank = child(launcher.pid, "python.* -u .*train.py")
                    if stopped:
                        os.kill(child(launcher.pid, "launch/agent.py"), signal.SIGSTOP)
                    killed = time.monotonic()
                    os.kill(rank, signal.SIGKILL)
                for name, pattern in MARKS.items():
                    if killed and name not in found and re.search(pattern, line):
                        found[name] = now - killed
        if launcher.returncode or len(found) <= len(MARKS):
            raise RuntimeError(f"the run ended with exit code {launcher.returncode} and said only {found}")
        print(found, flush=True)
        return found


def child(launcher: int, pattern: str) -> int:
    """The youngest process that the launcher has started with such a command."""
    who = ["pgrep", "-P", str(launcher), "-f", pattern]
    return int(subprocess.run(who, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """Measure, and write."""
    began = time.monotonic()
    pairs = [(once(stopped=False), once(stopped=True)) for _ in range(TIMES)]
    rows = ["| seconds: median, and range | | that process stopped |", "|---|---|---|"]
    for name in pairs[0][0]:
        cells = []
        for runs in zip(*pairs, strict=True):
            values = [run[name] for run in runs]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    pages.write(
        ROOT / "docs" / "measured" / "survival.md",
        restart_measured=pages.measured(
            "uv run python -m benchmarks.restart", f"2 ranks on gloo, {TIMES} runs", began=began
        ),
        restart="\n".join(rows),
    )


if __name__ == "__main__":
    main()
