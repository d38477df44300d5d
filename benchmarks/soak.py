"""Training under fire: `uv run python -m benchmarks.soak --minutes 10` writes docs/measured/soak.md.

One run without faults, then the same training with a random fault about every 20 s: a rank killed or frozen, the
launcher asked to stop, killed alone, or killed with its ranks (a power cut), a bit flipped in the newest checkpoint.
Whatever ends is started again with the same command. At the end both runs must have the same parameters, bit
for bit. Goodput is the time that the steps take without faults over the time that the faulted run took.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.harness import pages
from tests.harness.damage import flip_random_bit
from tests.harness.runner import ROOT
from tests.harness.states import same_tensors

RECIPE, RANKS = "recipes/ddp_resnet", 2
PAUSE_S = 20.0
FLAGS = ["--global-batch-size", "64", "--dtype", "float32", "--save-every", "5", "--async-save", "--log-every", "1"]
FLAGS += ["--eval-every", "1000000", "--hang-timeout", "5", "--keep", "3", "--warmup-steps", "10", "--lr", "0.05"]
FLAGS += ["--model", "resnet18"]


def start(out: Path, name: str, steps: int) -> subprocess.Popen[bytes]:
    """The launcher, in a session of its own."""
    command = ["bash", str(ROOT / "launch/torchrun.sh"), RECIPE, *FLAGS, "--max-steps", str(steps)]
    environ = os.environ | {"NPROC_PER_NODE": str(RANKS), "MAX_RESTARTS": "100", "OMP_NUM_THREADS": "1"}
    with (out / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--out", str(out), "--name", name],
            env=environ | {"PYTHON": sys.executable},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def rank_pids(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the ranks: children of the launcher, but not the one that they were forked from."""
    command = ["pgrep", "-P", str(launcher.pid), "-f", "python.* -u .*/train.py"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def newest_step(run: Path) -> int:
    """Newest step that metrics.jsonl has."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines[-3:]), default=0)
    except (OSError, ValueError):
        return 0  # not there yet, or just being rewritten


def inject(fault: str, launcher: subprocess.Popen[bytes], run: Path, chance: random.Random) -> None:
    """Do it to a random rank, or to all."""
    pids = rank_pids(launcher)
    victim = chance.choice(pids)
    if fault == "SIGKILL to a rank":
        os.kill(victim, signal.SIGKILL)
    elif fault == "SIGSTOP to a rank":
        os.kill(victim, signal.SIGSTOP)
        time.sleep(10)  # longer than --hang-timeout; the launcher waits for a frozen process for 30 s
        os.kill(victim, signal.SIGCONT)
    elif fault == "SIGTERM to the launcher":
        launcher.terminate()
        launcher.wait(60)
    elif fault == "SIGKILL to the launcher":
        launcher.kill()
        for pid in pids:  # they save and stop; until then they hold the run's folder
            wait_for_end(pid)
    else:
        for pid in [launcher.pid, *pids]:
            os.kill(pid, signal.SIGKILL)
        if fault == "power cut and a bit flipped":
            flip_random_bit(max(run.glob("checkpoints/step_????????/*.safetensors")), chance)


FAULTS = [
    "SIGKILL to a rank",
    "SIGSTOP to a rank",
    "SIGTERM to the launcher",
    "SIGKILL to the launcher",
    "power cut",
    "power cut and a bit flipped",
]


def wait_for_end(pid: int) -> None:
    """Until a process that need not be a child of this one has ended."""
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < until:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)


# From a fault to the next step: what ends each part.
PARTS = (
    "until all ranks of before had ended",
    "until the launcher had started new ones",
    "until these had imported, joined and loaded",
    "until a step beyond the one that the fault hit",
)


class Recovery:
    """When each of PARTS ended, from a fault on.

    Attributes:
        marks: seconds on the clock: the fault, and the ends of the parts so far.
    """

    def __init__(self, launcher: subprocess.Popen[bytes], log: Path) -> None:
        """Begin just before the fault."""
        self._log = log
        self._before = {*rank_pids(launcher)}
        self._size = log.stat().st_size
        self.marks = [time.monotonic()]

    def look(self, launcher: subprocess.Popen[bytes], progress: bool) -> bool:
        """Note which parts have ended by now; returns whether all have."""
        pids = {*rank_pids(launcher)} if launcher.poll() is None else set()
        news = self._log.read_bytes()[self._size :]
        ended = (not pids & self._before, len(pids - self._before) == RANKS, b"\nsteps " in news, progress)
        count = max((i + 1 for i, one in enumerate(ended) if one), default=0)  # a short part may have gone unseen
        self.marks += [time.monotonic()] * (1 + count - len(self.marks))
        return progress

    def seconds(self) -> list[float]:
        """How long each part took."""
        return [end - begin for begin, end in itertools.pairwise(self.marks)]


def main() -> None:
    """Measure a step, train without faults, train with them, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the faults go on, about")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    flags = parser.parse_args()
    chance = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        assert start(out, "pace", 40).wait() == 0, (out / "pace.log").read_text()
        rates = [json.loads(line) for line in (out / "pace" / "metrics.jsonl").read_text().splitlines()]
        step_s = 64 / statistics.median(line["perf/samples_per_s"] for line in rates if "perf/samples_per_s" in line)
        steps = int(0.6 * 60 * flags.minutes / step_s)  # what is left of the time, about
        began = time.monotonic()
        assert start(out, "calm", steps).wait() == 0, (out / "calm.log").read_text()
        calm_s = time.monotonic() - began

        run, began = out / "soak", time.monotonic()
        launcher, starts, recoveries, done = start(out, "soak", steps), 1, [], Counter[str]()
        parts: list[list[float]] = []
        next_fault = began + PAUSE_S
        while launcher.poll() is None or newest_step(run) < steps:
            if launcher.poll() is not None:
                launcher, starts = start(out, "soak", steps), starts + 1
            if time.monotonic() > next_fault and len(rank_pids(launcher)) == RANKS and newest_step(run) > 5:
                fault, recovery = chance.choice(FAULTS), Recovery(launcher, out / "soak.log")
                inject(fault, launcher, run, chance)
                before = newest_step(run)
                done[fault] += 1
                while not recovery.look(launcher, newest_step(run) > before) and newest_step(run) < steps:
                    if launcher.poll() is not None:
                        launcher, starts = start(out, "soak", steps), starts + 1
                    time.sleep(0.05)
                recovery.look(launcher, progress=True)  # also where the training ended meanwhile
                parts.append(recovery.seconds())
                recoveries.append(sum(parts[-1]))
                print(
                    f"{time.monotonic() - began:6.1f} s  {fault:24} at step {before}: {recoveries[-1]:.1f} s",
                    flush=True,
                )
                next_fault = time.monotonic() + chance.uniform(0.5, 1.5) * (PAUSE_S - recoveries[-1] / 2)
            time.sleep(0.1)
        wall_s = time.monotonic() - began
        assert launcher.returncode == 0, (out / "soak.log").read_text()
        last = f"checkpoints/step_{steps:08d}"
        equal = same_tensors(out / "calm" / last, run / last)
    counts = ", ".join(f"{count} x {fault}" for fault, count in sorted(done.items()))
    verdict = "equal to the fault-free run's, bit for bit" if equal else "DIFFERENT from the fault-free run's"
    rows = {
        "faults": f"{sum(done.values())} in {wall_s / 60:.1f} min: {counts}",
        "final parameters and optimizer state": verdict,
        "a step without faults": f"{step_s * 1e3:.0f} ms",
        "goodput: step time over wall time": f"{100 * steps * step_s / wall_s:.1f} %",
        "the same of the fault-free run, with its start": f"{100 * steps * step_s / calm_s:.1f} %",
        "from a fault to a step beyond the one it hit": f"median {statistics.median(recoveries):.1f} s, "
        f"longest {max(recoveries):.1f} s",
        **{f"- {part}": f"median {statistics.median(one[i] for one in parts):.1f} s" for i, part in enumerate(PARTS)},
        "starts of the launcher": str(starts),
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())])
    print(table)
    command = f"uv run python -m benchmarks.soak --minutes {flags.minutes:g}"
    where = pages.measured(command, RECIPE, f"{RANKS} processes", f"{steps} steps", "a checkpoint every 5 steps")
    pages.write(ROOT / "docs" / "measured" / "soak.md", measured=where, result=table)
    sys.exit(not equal)


if __name__ == "__main__":
    main()
