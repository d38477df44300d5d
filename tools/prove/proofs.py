"""The proofs: which runs they take, what is compared, and how far apart it may be."""

import json
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ranks
from common.run import run_dir
from tools import about
from tools.prove import collectives, layouts
from tools.prove.rank import held
from tools.prove.world import Job, Outcome

STEPS, STOP = 10, 5  # of a training, and the step after which another layout continues it
# Largest relative difference of a loss, and of a gradient norm, from those of one process. In float64 only the order of
# a sum differs, 1e-16 each time, and Adam and BatchNorm enlarge it: seen is 1e-11, and a defect is 1e-3 or more. In
# float32 a rounding is a billion times as large. In bfloat16, of 8 bits, only losses can be compared, with those in
# float32: this shows that the type's own code runs and trains alike, no more.
TOLERANCES = {"float64": (1e-9, 1e-9), "float32": (1e-3, 1e-2), "bfloat16": (0.02, float("inf"))}
DIES_AT, STOPS_AT = 4, 4
MOST_NOTICED_S = 60.0  # until all other ranks have ended
RATE_STEPS = 20
# A model and a batch that are not too small for a GPU.
GPU_SIZES = {"gpt": ("--num-layers", "12", "--num-heads", "16", "--width", "1024", "--seq-len", "1024")}
Run = Callable[[Job], Outcome | None]


@dataclass(frozen=True)
class Row:
    """One proof and what came of it; with `needs`, it was not run, because this world lacks that."""

    proof: str
    what: str
    verdict: str = "not run"  # or passed, failed
    figure: str = ""
    tolerance: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Asked:
    """Which of `flags.PROOFS`, of which recipes, on how many ranks, with GPUs or without, and in which folder."""

    recipes: tuple[str, ...]
    proofs: tuple[str, ...]
    size: int
    gpus: bool
    folder: Path

    def ways(self) -> list[layouts.Layout]:
        """All ways of these recipes, also those that cannot run here."""
        return [one for recipe in self.recipes for one in layouts.layouts(recipe, self.size, self.gpus)]

    def can_run(self) -> list[layouts.Layout]:
        """Those that this number of ranks and these devices allow."""
        return [layout for layout in self.ways() if not layout.needs]

    def job(self, name: str, layout: layouts.Layout, dtype: str, *flags: str, **how: Any) -> Job:
        """One short training."""
        flags = (*layouts.flags(layout, self.size, STEPS), "--dtype", dtype, *flags)
        if about.has_flag(layout.recipe, "--data") and layout.workload == "gpt":
            flags = (*flags, "--data", str(self.folder / "text"))
        return Job(name.replace(" ", "_").replace("/", "-"), layout, flags, self.folder, **how)


def all_of(asked: Asked, run: Run) -> tuple[list[Row], dict[str, list[dict[str, Any]]]]:
    """All rows of the page, and its figures (all ranks)."""
    ranks.from_rank0(lambda: write_text(asked.folder / "text"))
    rows = [*equal_and_moved(asked, run), *killed(asked, run), *stopped(asked, run)]
    figures = {"collectives": list(measured(asked, run, rows)), "rates": list(rates(asked, run, rows))}
    return rows, figures


def write_text(folder: Path) -> None:
    """A text that is the same everywhere: Python's own differs between its versions."""
    words = ("ranks", "send", "what", "they", "hold", "and", "wait", "for", "the", "others", "before", "a", "step")
    folder.mkdir(parents=True)
    state, lines = 1, []
    for _ in range(3000):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF  # a linear congruential generator
        lines.append(words[(state >> 16) % len(words)])
    (folder / "words.txt").write_text(" ".join(lines))


def equal_and_moved(asked: Asked, run: Run) -> Iterator[Row]:
    """Each layout trains like one process, and continues with a checkpoint of the layout before it."""
    if not {"equal", "moves"} & {*asked.proofs}:
        return
    for layout in asked.ways():
        if layout.needs:
            yield Row("equal", f"{layout}", needs=layout.needs)
    for kind in dict.fromkeys(layout.workload for layout in asked.can_run()):
        alone = layouts.reference(kind)
        supervised = about.has_flag(alone.recipe, "--data")
        here = [layout for layout in asked.can_run() if layout.workload == kind]
        wanted = {
            dtype: run(asked.job(f"{kind} {dtype} reference", alone, dtype))
            for dtype in (("float64", "float32") if supervised else ("float64",))
        }
        first: list[layouts.Layout] = []  # one layout of each recipe also computes in the coarser types
        for layout in here:
            first += [] if layout.recipe in [one.recipe for one in first] else [layout]
        done = []
        for layout in [alone, *here]:
            name = f"{layout} float64"
            outcome = run(asked.job(name, layout, "float64", "--stop-after", str(STOP)))
            done.append(outcome)
            if "equal" in asked.proofs and layout != alone:
                yield compared("equal", name, outcome, wanted["float64"], "float64", 1, STOP)
        for layout in first if supervised and "equal" in asked.proofs else []:
            for dtype in ("float32", "bfloat16"):
                name = f"{layout} {dtype}"
                outcome = run(asked.job(name, layout, dtype, "--stop-after", str(STOP)))
                yield compared("equal", name, outcome, wanted["float32"], dtype, 1, STOP)
        for layout, source in zip([alone, *here], done[-1:] + done[:-1], strict=True):
            if "moves" not in asked.proofs:
                break
            name = f"{source.job.layout if source else 'a run'} to {layout}"
            outcome = source and run(asked.job(name, layout, "float64", "--resume", str(source.job.run_dir)))
            yield moved(name, source, outcome)
            yield compared("moves", f"{name}: next losses", outcome, wanted["float64"], "float64", STOP + 1, STEPS)


def judge(proof: str, what: str, outcomes: Sequence[Outcome | None], look: Callable[[], tuple], tolerance: str) -> Row:
    """A row from what rank 0 sees in the files of these runs (all ranks).

    Args:
        proof: which of `flags.PROOFS`.
        what: what is proven.
        outcomes: runs that must have ended well; None for one that was not begun.
        look: returns whether it is as it should be, and the figure.
        tolerance: what the figure may be.
    """
    if None in outcomes:
        return Row(proof, what, "not run", "the time was over (--minutes)", tolerance)

    def see() -> tuple[bool, str]:
        failed = [outcome for outcome in outcomes if outcome and not outcome.ok]
        if failed:
            return False, failed[0].lines()
        try:
            passed, figure = look()
        except (OSError, AssertionError, KeyError, ValueError) as error:
            return False, f"{type(error).__name__}: {error}"
        return bool(passed), figure

    passed, figure = ranks.from_rank0(see)
    row = Row(proof, what, "passed" if passed else "failed", figure, tolerance)
    ranks.print0(f"        {row.verdict}: {what}: {figure}")
    return row


def curve(run: Path, tag: str, first: int, last: int) -> dict[int, float]:
    """Step to value, for these steps, each of which must be there once."""
    lines = [one for one in run_dir.records(run) if tag in one and first <= one["step"] <= last]
    assert [one["step"] for one in lines] == list(range(first, last + 1)), f"{run}: steps of {tag} are missing"
    return {int(one["step"]): one[tag] for one in lines}


def apart(found: Path, wanted: Path, tag: str, first: int, last: int) -> float:
    """Largest relative difference of two curves."""
    theirs = curve(wanted, tag, first, last)
    return max(abs(value - theirs[step]) / abs(theirs[step]) for step, value in curve(found, tag, first, last).items())


def compared(
    proof: str, what: str, found: Outcome | None, wanted: Outcome | None, dtype: str, first: int, last: int
) -> Row:
    """Losses and gradient norms of these steps against those of one process."""
    most_loss, most_norm = TOLERANCES[dtype]

    def look() -> tuple[bool, str]:
        assert found
        assert wanted
        loss, norm = (
            apart(found.job.run_dir, wanted.job.run_dir, tag, first, last) for tag in ("train/loss", "train/grad_norm")
        )
        return loss <= most_loss and norm <= most_norm, f"loss {loss:.1e}, norm {norm:.1e}"  # NaN fails

    bounds = f"loss {most_loss:g}" + (f", norm {most_norm:g}" if most_norm < 1 else "")
    return judge(proof, what, [found, wanted], look, bounds)


def moved(what: str, source: Outcome | None, target: Outcome | None) -> Row:
    """All tensors of model and optimizer: what the writer held, the reader holds, on every rank that holds it."""

    def look() -> tuple[bool, str]:
        assert source
        assert target
        before, after = held(source.job.notes, "end"), held(target.job.notes, "begin")
        names = sorted(before.keys() | after.keys())
        changed = [name for name in names if len(before.get(name, ())) != 1 or before[name] != after.get(name)]
        return not changed, f"{len(names) - len(changed)} of {len(names)} tensors" + "".join(
            f", not {name}" for name in changed[:2]
        )

    return judge("moves", what, [source, target], look, "all, bit for bit")


def one_of_all_ranks(asked: Asked) -> layouts.Layout | None:
    """A layout of all ranks to disturb, plain DistributedDataParallel if it may be; None if there is none."""
    found = [one for one in asked.can_run() if not one.alone and about.has_flag(one.recipe, "--data")]
    plain = [one for one in found if one.recipe == layouts.reference(one.workload).recipe]
    return next(iter([*plain, *found]), None)


def killed(asked: Asked, run: Run) -> Iterator[Row]:
    """The last rank is killed; the others must end by themselves, and say who it was."""
    if "kill" not in asked.proofs:
        return
    layout = one_of_all_ranks(asked)
    if asked.size == 1 or layout is None:
        yield Row("kill", "a rank is killed", needs="2 ranks, and a recipe that uses them")
        return
    last = asked.size - 1
    at = (DIES_AT, int(signal.SIGKILL))
    outcome = run(asked.job("a rank is killed", layout, "float32", signal_at=at))

    def look() -> tuple[bool, str]:
        assert outcome
        killed_at = float((outcome.job.notes / "signalled").read_text())
        noticed = max(outcome.ended) - killed_at
        lines = [line for n in range(last) for line in outcome.output(n).splitlines()]
        named = [line for line in lines if f"rank {last} (" in line and "dead" in line]
        others = [code for code in outcome.codes[:last] if code in (None, 0)]
        passed = bool(named) and not others and noticed <= MOST_NOTICED_S
        return passed, f"{noticed:.1f} s: {named[0] if named else 'nobody has named it'}"

    ended_well = Outcome(outcome.job, [], outcome.ended) if outcome else None  # they must not: see `look`
    row = judge("kill", f"{layout}: rank {last} of {asked.size} gets SIGKILL", [ended_well], look, "60 s")
    yield row


def stopped(asked: Asked, run: Run) -> Iterator[Row]:
    """A signal to one rank stops all of them; the same command continues, and the losses are as if nothing was."""
    layout = one_of_all_ranks(asked)
    if "stop" not in asked.proofs:
        return
    if layout is None:
        yield Row("stop", "a signal stops a run", needs="a recipe of all ranks")
        return
    whole = run(asked.job("undisturbed", layout, "float64"))
    # Some kernels of GPUs add up in another order each time. So does DDP in the first step after a start, which fills
    # other buckets than the later ones; the sum of two numbers is the same in both orders, that of more is not.
    most = 1e-9 if asked.gpus or asked.size > 2 else 0.0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        name = f"{number.name} at step {STOPS_AT}"
        first = run(asked.job(name, layout, "float64", signal_at=(STOPS_AT, int(number))))
        ended = first and Outcome(first.job, [code if code != 128 + number else 0 for code in first.codes], first.ended)

        def stops(first: Outcome | None = first) -> tuple[bool, str]:
            assert first
            step = json.loads((first.job.run_dir / "stopped.json").read_text())["step"]
            return STOPS_AT <= step < STEPS, f"after step {step}"

        yield judge("stop", f"{layout}: {name}", [ended], stops, f"before step {STEPS}")
        second = run(asked.job(f"{name} continued", layout, "float64", run=first.job.run_dir.name if first else ""))

        def continues(second: Outcome | None = second) -> tuple[bool, str]:
            assert second
            assert whole
            worst = max(
                apart(second.job.run_dir, whole.job.run_dir, tag, 1, STEPS) for tag in ("train/loss", "train/grad_norm")
            )
            return worst <= most, f"{worst:.1e} apart"

        yield judge("stop", f"{layout}: {name}, continued", [whole, ended, second], continues, f"{most:g}")


def rates(asked: Asked, run: Run, rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Steps, samples and tokens a second, MFU and memory of a short training at each recipe's own sizes."""
    seen: list[str] = []
    for layout in asked.can_run() if "rates" in asked.proofs else []:
        if layout.recipe in seen:
            continue
        seen.append(layout.recipe)
        own = (*layout.flags, *(GPU_SIZES.get(layout.workload, ()) if asked.gpus else ()))
        flags = ("--max-steps", str(RATE_STEPS), "--log-every", str(RATE_STEPS // 2), *own)
        name = f"rates of {layout}"
        outcome = run(Job(name.replace(" ", "_"), layout, flags, asked.folder, rates=True))
        found: dict[str, Any] = {}

        def look(outcome: Outcome | None = outcome, found: dict[str, Any] = found) -> tuple[bool, str]:
            assert outcome
            records = run_dir.records(outcome.job.run_dir)
            last = [one for one in records if "perf/samples_per_s" in one][-1]
            found.update({key: value for key, value in last.items() if key.startswith("perf/")})
            return True, ", ".join(f"{key.removeprefix('perf/')} {value:.4g}" for key, value in found.items())

        rows.append(judge("rates", name, [outcome], look, "it runs"))
        if found:
            yield {"layout": str(layout), "flags": shlex.join(own), **found}


def measured(asked: Asked, run: Run, rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Bytes a second of each collective, whose results are compared with what they should be."""
    if "collectives" not in asked.proofs:
        return
    if asked.size == 1:
        rows.append(Row("collectives", "all", needs="2 ranks"))
        return
    file = asked.folder / "collectives.json"
    most = 2**28 if asked.gpus else 2**24
    job = Job("collectives", layouts.Layout(""), (str(file), str(most)), asked.folder, target=collectives.run)
    outcome = run(job)
    found: list[dict[str, Any]] = []

    def look() -> tuple[bool, str]:
        found.extend(collectives.read(file))
        wrong = sorted({one["collective"] for one in found if not one["right"]})
        return bool(found) and not wrong, f"wrong: {', '.join(wrong)}" if wrong else f"{len(found)} measured"

    rows.append(judge("collectives", "all results are right", [outcome], look, "equal"))
    yield from found
