"""Run a script as often as its judges need, and put their findings together."""

import argparse
import os
import signal
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.ports import free_port
from tools.judge import folders, judge_data, judge_files, judge_group, judge_model, judge_step, launch, port_seen
from tools.judge.child import Place
from tools.judge.findings import Finding
from tools.judge.kind import ERROR, NOTE, WARNING
from tools.judge.launch import Run
from tools.judge.seen import Seen

JUDGES = (judge_group, judge_model, judge_step, judge_data, judge_files)
LAST_LINES = 8  # of what a script printed before it ended
ORDER = {ERROR: 0, WARNING: 1, NOTE: 2}
# A finding of the first kind says what causes those of the others.
EXPLAINS = {
    "uneven batches": ("not all ranks come",),
    "never wrapped": ("replicas differ", "different initial weights", "rate not scaled", "buffers not synchronised"),
    "environments with one seed": ("same samples on all ranks", "same dropout"),
    "zero_grad before the step": ("zero_grad is missing",),
    "optimizer of other parameters": (
        "parameters without optimizer",
        "parameters without gradient",
        "zero_grad is missing",
    ),
    "no backward": ("parameters without gradient",),
    "same samples on all ranks": ("same dropout", "same augmentation", "samples twice", "rate not scaled"),
    "nothing is sent": ("sent in each micro-batch",),
    "no such device": ("all on GPU 0", "rank as device"),
    "around the wrapper": ("clip of local gradients",),
    "accumulation not divided": ("mean of means",),
    "resume without optimizer state": ("checkpoint lacks the optimizer",),
    "resume at another rate": ("checkpoint lacks the schedule",),
}


@dataclass(frozen=True)
class Asked:
    """What to judge, and how."""

    script: Path
    flags: tuple[str, ...] = ()
    steps: int = 12
    timeout_s: float = 60.0
    memory_gib: float = 8.0
    gpu: bool = True
    once: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Asked":
        """From the command line."""
        flags = tuple(args.flags)
        return cls(args.script, flags, args.steps, args.timeout, args.memory, not args.no_gpu, args.once)


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        script: as it was asked for.
        findings: errors first.
        failed: why the script could not run to a step, or "".
        notes: how it was run, and what was not looked at.
        losses: of the first steps, on one and on two processes.
        seconds: that all runs took.
        peak_gib: the most that the processes of one run held.
        traits: what its strategy is, with lines, for `--port`.
    """

    script: Path
    findings: list[Finding]
    failed: str
    notes: list[str]
    losses: dict[str, list[float]]
    seconds: float
    peak_gib: float
    traits: dict[str, str] = field(default_factory=dict)

    @property
    def code(self) -> int:
        """The exit code: 0, 1 for errors and warnings, 2 for a script that could not run."""
        if any(one.about.level != NOTE for one in self.findings):
            return 1
        return 2 if self.failed else 0


def judge(asked: Asked) -> Verdict:
    """Run the script in a temporary folder, and judge what it did."""
    with tempfile.TemporaryDirectory(prefix="judge-") as folder:
        try:
            return _judge(asked, Path(folder).resolve())
        finally:
            for path, names, _ in os.walk(folder):  # what a script has closed
                for name in names:
                    os.chmod(os.path.join(path, name), 0o700) if not os.path.islink(os.path.join(path, name)) else None


def _judge(asked: Asked, folder: Path) -> Verdict:
    runs: list[Run] = []
    names: dict[str, str] = {}

    def run(name: str, size: int, machines: int = 1, gpu: bool = asked.gpu, keep: str = "", steps: int = 0) -> Run:
        """Start the script in a fresh copy, or in that of an earlier run."""
        own = folder / name
        own.mkdir()
        where = folder / keep if keep else own
        place, cwd, back = folders.prepare(asked.script, Path.cwd(), where) if not keep else kept[keep]
        kept[name] = (place, cwd, back)
        names.update(back)
        roots = (*back,)
        port = free_port()
        places = [
            Place(rank, size, machines, port, place, cwd, own, where, roots, gpu, steps or asked.steps)
            for rank in range(size)
        ]
        found = launch.start(places, list(asked.flags), asked.timeout_s, asked.memory_gib)
        runs.append(found)
        return found

    kept: dict[str, tuple[Path, Path, dict[str, str]]] = {}
    notes = []
    gpu = asked.gpu
    two = run("two", 2)
    negative = any(one["index"] < 0 for one in two.of("device"))  # which is why it fails
    if gpu and two.errors and not two.of("stepped") and not negative:
        plain = run("plain", 2, gpu=False)
        if plain.of("stepped") or not plain.errors:
            notes.append(
                "it fails where torch.cuda.is_available() is answered with True; judged as on a machine without GPUs"
            )
            two = plain
            gpu = False
    seen = Seen(two)
    if not asked.once and two.of("init"):
        seen = replace(seen, one=run("one", 1, gpu=gpu, steps=2))
        if any(one["index"] == 1 for one in two.of("device", 1)):
            seen = replace(seen, apart=run("apart", 2, machines=2, gpu=gpu, steps=1))
        if two.of("save") and (two.of("load") or "torch.load" in asked.script.read_text()) and two.ended[0] == "end":
            seen = replace(seen, again=run("again", 2, gpu=gpu, keep="plain" if "plain" in kept else "two", steps=4))
    found = explained([one for judges in JUDGES for one in judges.judge(seen)])
    found = [replace(one, at=mapped(one.at, names), evidence=mapped(one.evidence, names)) for one in found]
    found.sort(key=lambda one: (ORDER[one.about.level], line(one.at)))
    losses = {f"{len(one.ranks)}": curve(one) for one in (two, seen.one) if one is not None}
    seconds, peak = sum(one.seconds for one in runs), max(one.peak_gib for one in runs)
    failed, shown = mapped(failure(two), names), {key: mapped(at, names) for key, at in port_seen.traits(two).items()}
    notes += [mapped(one, names) for one in unseen(two)]
    return Verdict(asked.script, found, failed, notes, losses, seconds, peak, shown)


def explained(found: list[Finding]) -> list[Finding]:
    """Without what another finding is the cause of, and each kind once per line."""
    hidden = {kind for one in found for kind in EXPLAINS.get(one.kind, ())}
    unique = {(one.kind, one.at): one for one in reversed(found) if one.kind not in hidden}
    return list(unique.values())


def mapped(text: str, names: dict[str, str]) -> str:
    """A text with the user's own paths, relative to where they are."""
    for copy, real in names.items():
        text = text.replace(copy + os.sep, os.path.relpath(real) + os.sep if real != os.getcwd() else "")
    return text


def line(at: str) -> int:
    """The number of a line."""
    number = at.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def curve(run: Run) -> list[float]:
    """The mean over the ranks of the loss that each backward pass began at."""
    values = [
        [one["value"] for one in run.of("backward", rank) if one["value"] is not None] for rank in range(len(run.ranks))
    ]
    return [sum(one) / len(one) for one in zip(*values, strict=False)][:12]


def failure(run: Run) -> str:
    """Why there is no verdict on a training, or ""."""
    if run.codes:
        code = next(iter(run.codes.values()))
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"a process ended with {how}; it printed:{said(run)}"
    if run.errors:
        first = min(run.errors, key=judge_group.is_of_group)
        if first["error"] == "SystemExit":
            return f"it ended with exit code {first['code']}; it printed:{said(run)}"
        return (
            f"{first['at']}: {first['error']}: {first['text'].strip().splitlines()[0] if first['text'].strip() else ''}"
        )
    if run.limit:
        return f"it met its limit of {run.limit}" if not run.of("step") else ""
    if not run.of("step"):
        return "no optimizer made a step" if not run.hang else f"it hangs before its first step; it printed:{said(run)}"
    if run.hang and "ended" not in run.hang:
        return f"nothing was computed for {launch.IDLE_S:.0f} s: {', '.join(map(judge_group.place, run.hang))}"
    return ""


def said(run: Run) -> str:
    """The last lines of the first rank that has printed any, each on a line of its own."""
    lines = next((one for tail in run.tails if (one := [line for line in tail.splitlines() if line.strip()])), [])
    return "".join(f"\n    {line}" for line in lines[-LAST_LINES:]) or " nothing"


def unseen(run: Run) -> list[str]:
    """What this run did not come to, so that nobody looked at it."""
    checks: list[tuple[bool, str]] = [
        (run.ended[0] != "end", f"its end: it was stopped after {len(run.of('step'))} steps"),
        (not any(one["e"] == "epoch" for one in run.ranks[0]), "orders of samples: no DataLoader was read"),
        (not run.of("save"), "checkpoints: torch.save was not called"),
        (not run.of("load"), "a resume: torch.load was not called"),
    ]
    lines = [f"not looked at: {text}" for is_so, text in checks if is_so]
    for one in run.of("replayed"):
        if one["why"]:
            lines.append(f"not looked at: one batch of both ranks' samples on one process: {one['why']}")
        else:
            found = f"other results, first of {one['op']} at {one['at']}" if one.get("op") else "the same results"
            lines.append(f"one batch of both ranks' samples on one process: {found}")
    return lines
