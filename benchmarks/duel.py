"""Each recipe's loop beside its bare twin: `uv run python -m benchmarks.duel`.

It writes docs/measured/performance.md. Arms take turns in one run of a recipe, 10 steps each: its own loop, the same
loop without a model, and twice the step of its bare.py on a second model. So all have the same process, caches and
neighbours. The second of the twin's is the noise floor: it differs from the first by chance alone. The loop without a
model reads its batches, judges a gradient norm and logs: it does all that the recipe does beside the training. A twin
averages its loss over the ranks in each step, a recipe where it logs: what that takes is measured as well. The models
are tiny, because the loop costs the same beside the training of any model. Names of recipes as arguments: measure these
alone; the rows of the others stay.
"""

import dataclasses
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from benchmarks import plots, twins
from common import ranks, session
from common.train import metrics
from tests.harness import pages, runner, short_resnet  # noqa: F401 (--model resnet6)
from tests.harness.runner import ROOT

ROUNDS = 24
ARMS = ("recipe", "twin", "twin again")
MEANS = "means of losses"
ALONE = "loop without a model"
JSON = ROOT / "docs" / "measured" / "performance.json"
HEAD = """\
| recipe | twin, ms a step | mean loss | loop adds, ms | loop alone, ms | loop adds | twin against itself | steps/s, twin | loop | less |
|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


# --- One rank ---------------------------------------------------------------------------------------------


def measure(recipe: str, path: str, argv: list[str], out: str) -> None:
    """Run a recipe, whose loop pauses after each segment for one of each other arm; writes what this rank took."""
    real_steps, real_init = session.Session.steps, session.Session.__init__
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in (*ARMS, ALONE, MEANS)}
    meshes: list[Any] = []

    def clock() -> tuple[float, float]:
        dist.barrier()
        return time.process_time(), time.perf_counter()

    def note(arm: str, began: tuple[float, float]) -> None:
        here = time.process_time(), time.perf_counter()  # before it waits for the other rank
        found[arm].append((here[0] - began[0], here[1] - began[1]))

    def remember(run: Any, args: Any, world: Any, mesh: Any, *more: Any) -> None:
        meshes.append(mesh)
        real_init(run, args, world, mesh, *more)

    def steps(run: session.Session, dp_rank: int) -> Iterator[int]:
        recipe_file = sys._getframe(1).f_globals  # whose main loop calls its train_step
        train_step = recipe_file["train_step"]
        last: list[tuple[metrics.Sums, Any]] = []

        def train(*args: Any) -> tuple[metrics.Sums, Any]:
            last[:] = [train_step(*args)]
            return last[0]

        def train_nothing(_args: Any, _model: Any, _optimizer: Any, finite: Any, batches: Any, _size: int) -> Any:
            for _ in batches.step():
                pass
            sums, norm = last[0]
            finite.unscale_gradients(sums)
            finite.skip_if_not_finite(norm)
            return sums, norm

        twin = twins.loop(recipe, runpy.run_path(path, run_name="twin"), run._args, meshes[0])
        arm = "recipe"
        recipe_file["train_step"] = train
        began = clock()
        for number, step in enumerate(real_steps(run, dp_rank)):
            if number % twins.SEGMENT == 0 and number:
                note(arm, began)
                arm = ALONE if arm == "recipe" else "recipe"
                recipe_file["train_step"] = train_nothing if arm == ALONE else train
                if arm == "recipe":
                    # In turn first, so that neither has always the other's warm caches.
                    for other in ARMS[1:] if number // twins.SEGMENT % 4 else ARMS[:0:-1]:
                        began = clock()
                        twin.segment()
                        note(other, began)
                    began = clock()
                    twin.means()
                    note(MEANS, began)
                began = clock()
            yield step

    session.Session.__init__ = remember  # type: ignore[method-assign,assignment]
    session.Session.steps = steps  # type: ignore[method-assign,assignment]
    runner.run_unmeasured(path, argv)
    Path(out, str(ranks.rank())).write_text(json.dumps({arm: times[1:] for arm, times in found.items()}))


# --- All of them ------------------------------------------------------------------------------------------


def duel(recipe: str, folder: Path) -> dict[str, Any]:
    """Seconds a step of each arm and round: of processors, all ranks together; and by the clock."""
    path = str(ROOT / "recipes" / recipe / "train.py")
    steps = 2 * (ROUNDS + 1) * twins.SEGMENT + 1
    argv = twins.argv(path, recipe, folder / "runs", steps, *runner.small(recipe))
    result = runner.spawn(measure, [(recipe, path, argv, str(folder))] * twins.SIZE, timeout_s=900.0)
    assert result.ok, str(result)
    each = [json.loads((folder / str(rank)).read_text()) for rank in range(twins.SIZE)]
    found = {}
    for arm in (*ARMS, ALONE, MEANS):
        rounds = [*zip(*(one[arm] for one in each), strict=True)]  # of all ranks
        found[arm] = {
            "cpu_s": [sum(cpu_s for cpu_s, _ in one) / twins.SEGMENT for one in rounds],
            "wall_s": [max(wall_s for _, wall_s in one) / twins.SEGMENT for one in rounds],
        }
    return found


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a loop adds to its twin's, round by round; and the twin to itself, which is the noise."""

    twin_ms: list[float]
    mean_ms: list[float]
    added_ms: list[float]
    alone_ms: list[float]
    added: list[float]  # in percent
    noise: list[float]
    noise_ms: list[float]
    twin_rate: list[float]  # steps per second, by the clock
    rate: list[float]

    @classmethod
    def of(cls, found: dict[str, Any]) -> "Cost":
        """From the seconds of each arm."""
        own, one, two = (found[arm]["cpu_s"] for arm in ARMS)
        plain = [statistics.mean(both) for both in zip(one, two, strict=True)]
        return cls(
            [1e3 * s for s in plain],
            [1e3 * s for s in found[MEANS]["cpu_s"]],
            [1e3 * (mine - theirs) for mine, theirs in zip(own, plain, strict=True)],
            [1e3 * s for s in found[ALONE]["cpu_s"]],
            [100 * (mine / theirs - 1) for mine, theirs in zip(own, plain, strict=True)],
            [100 * (b / a - 1) for a, b in zip(one, two, strict=True)],
            [1e3 * (b - a) for a, b in zip(one, two, strict=True)],
            [1 / s for s in found["twin"]["wall_s"]],
            [1 / s for s in found["recipe"]["wall_s"]],
        )


def middle_half(values: list[float]) -> plots.Range:
    """The quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def spread(values: list[float], form: str) -> str:
    """Median, and the range of the middle half."""
    low, middle, high = middle_half(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def row(recipe: str, cost: Cost) -> str:
    """A line of the table."""
    cells = [
        recipe,
        spread(cost.twin_ms, ".2f"),
        f"{statistics.median(cost.mean_ms):.2f}",
        spread(cost.added_ms, "+.2f"),
        spread(cost.alone_ms, ".2f"),
    ]
    cells += [f"{spread(one, '+.1f')} %" for one in (cost.added, cost.noise)]
    rates = [statistics.median(one) for one in (cost.twin_rate, cost.rate)]
    cells += [*(f"{rate:.1f}" for rate in rates), f"{100 * (1 - rates[1] / rates[0]):.0f} %"]
    return f"| {' | '.join(cells)} |"


def write(known: dict[str, Any]) -> None:
    """Fill the page with what is known, and draw it."""
    costs = {recipe: Cost.of(known[recipe]["seconds a step"]) for recipe in twins.RECIPES if recipe in known}
    pages.write(
        ROOT / "docs" / "measured" / "performance.md",
        measured="\n\n".join(dict.fromkeys(known[recipe]["measured"] for recipe in costs)),
        loop="\n".join([HEAD, *(row(recipe, cost) for recipe, cost in costs.items())]),
    )
    panels = {
        "what Brigade's loop adds": {recipe: middle_half(cost.added_ms) for recipe, cost in costs.items()},
        "noise: twin against itself": {recipe: middle_half(cost.noise_ms) for recipe, cost in costs.items()},
    }
    unit = "processor time of a step, ms, both ranks together: median and middle half of the rounds"
    plot = ROOT / "docs" / "measured" / "performance.png"
    plots.dots(plot, panels, unit, reference=0.0, form="+.1f", own="what Brigade")


def main() -> None:
    """Measure recipes one after the other; each is written at once, and rows of the others stay."""
    for recipe in sys.argv[1:] or twins.RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            arms = duel(recipe, Path(folder))
        print(row(recipe, Cost.of(arms)), flush=True)
        conditions = f"{twins.SIZE} ranks of one thread on gloo, {ROUNDS} rounds of {twins.SEGMENT} steps"
        measured = pages.measured(" ".join(["uv run python -m benchmarks.duel", *sys.argv[1:]]), conditions)
        known = json.loads(JSON.read_text()) if JSON.exists() else {}
        known[recipe] = {"measured": measured, "seconds a step": arms}
        JSON.write_text(json.dumps(known) + "\n")
        write(known)


if __name__ == "__main__":
    main()
