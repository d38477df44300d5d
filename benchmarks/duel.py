"""Each recipe's loop beside the same strategy bare: `uv run python -m benchmarks.duel` writes docs/performance.md.

Three arms take turns in one run of a recipe, 10 steps each: its own loop, and twice a short loop of plain torch over a
second model under the same strategy. So all have the same process, caches and neighbours. The second bare arm is the
noise floor: it differs from the first by chance alone. The models are tiny, because what the loop costs beside the
training is the same for each model. Names of recipes as arguments: measure these alone; the rows of
the others stay.
"""

import dataclasses
import json
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks import plots
from common import data, guard, keymap, ranks, session
from tests.harness import pages, runner, short_resnet  # noqa: F401 (--model resnet6)
from tests.harness.runner import ROOT
from torch import nn

# One has one process; the step of the others is more than forward, backward and update (docs/ppo.md has syncbn_ppo's).
OTHERS = ("dp_resnet", "diloco_gpt", "syncbn_ppo", "cellfree_mimo")
RECIPES = tuple(recipe for recipe in runner.RECIPES if recipe not in OTHERS)
PLAIN = (
    "ddp_resnet",
    "multinode_resnet",
    "ddp_gpt",
    "fsdp_gpt",
)  # whose backward pass and clipping are torch's; else those of section 3
SIZE, BATCH, SEGMENT, ROUNDS, LOG_EVERY = 2, 16, 10, 40, 10
NEVER = 10**6
ARMS = ("recipe", "bare", "bare again")
JSON = ROOT / "docs" / "performance.json"
HEAD = """\
| recipe | bare, ms a step | the loop adds, ms | that is | bare against itself | steps/s, bare | with the loop |
|---|---|---|---|---|---|---|"""


# --- One rank ---------------------------------------------------------------------------------------------


def bare_loop(recipe: str, path: str, run: session.Session, mesh: Any) -> Callable[[], None]:
    """A loop over a second model under the recipe's strategy, which does what every training loop does, and no more."""
    part = runpy.run_path(path, run_name="bare")
    args = run._args
    train, _ = part["make_data"](args)
    device = torch.device("cpu")
    model = part["parallelize"](args, part["make_model"](args, train), mesh, device)
    if recipe == "pipeline_gpt":
        model.division = run._model.division
    optimizer = part["make_optimizer"](args, model)
    dp_rank, dp_size = part["dp_coordinates"](mesh)
    count = BATCH // dp_size
    # A set in memory, which a step takes some of.
    indices = np.arange(dp_rank, 64 * BATCH, dp_size) % len(train)
    inputs, targets = train.read(np.zeros_like(indices), indices)
    generator = torch.Generator().manual_seed(dp_rank)

    def step(number: int) -> None:
        taken = torch.randint(len(inputs), (count,), generator=generator)
        batch = data.Batch(inputs[taken], targets[taken], BATCH, True)
        if recipe in PLAIN:
            loss = part["forward"](args, model, batch)["loss"] / count
            loss.backward()
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        else:
            loss = part["forward_backward"](args, model, iter([batch]), dp_size)["loss"]
            part["clip_gradients"](args, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % LOG_EVERY == 0:
            loss.item()

    def segment() -> None:
        for number in range(SEGMENT):
            step(number)

    segment()  # warms up; and a bare loop that did not average its gradients would be faster for it
    guard.StateCheck(model, compare=True).compare(keymap.model_tensors(model), SEGMENT)
    return segment


def measure(recipe: str, path: str, argv: list[str], out: str) -> None:
    """Run a recipe, whose loop pauses after each segment for one of each bare arm; writes what this rank took."""
    real_steps, real_init = session.Session.steps, session.Session.__init__
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    meshes: list[Any] = []

    def clock() -> tuple[float, float]:
        dist.barrier()
        return time.process_time(), time.perf_counter()

    def note(arm: str, began: tuple[float, float]) -> None:
        here = time.process_time(), time.perf_counter()  # before it waits for the other rank
        found[arm].append((here[0] - began[0], here[1] - began[1]))

    def remember(run: Any, args: Any, file: str, world: Any, mesh: Any, **more: Any) -> None:
        meshes.append(mesh)
        real_init(run, args, file, world, mesh, **more)

    def steps(run: session.Session, dp_rank: int) -> Iterator[int]:
        segment = bare_loop(recipe, path, run, meshes[0])
        began = clock()
        for number, step in enumerate(real_steps(run, dp_rank)):
            if number % SEGMENT == 0 and number:
                note("recipe", began)
                # In turn first, so that neither has always the other's warm caches.
                for arm in ARMS[1:] if number // SEGMENT % 2 else ARMS[:0:-1]:
                    began = clock()
                    segment()
                    note(arm, began)
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
    flags = {"out": folder / "runs", "name": "one", "dtype": "float32", "global-batch-size": BATCH}
    flags |= {"max-steps": (ROUNDS + 1) * SEGMENT + 1, "log-every": LOG_EVERY, "eval-every": NEVER, "save-every": NEVER}
    argv = [path, *(f"--{name}={value}" for name, value in flags.items())]
    argv += [*runner.layout(recipe, SIZE).flags, *runner.small(recipe)]
    result = runner.spawn(measure, [(recipe, path, argv, str(folder))] * SIZE, timeout_s=900.0)
    assert result.ok, str(result)
    each = [json.loads((folder / str(rank)).read_text()) for rank in range(SIZE)]
    found = {}
    for arm in ARMS:
        rounds = [*zip(*(one[arm] for one in each), strict=True)]  # of all ranks
        found[arm] = {
            "cpu_s": [sum(cpu_s for cpu_s, _ in one) / SEGMENT for one in rounds],
            "wall_s": [max(wall_s for _, wall_s in one) / SEGMENT for one in rounds],
        }
    return found


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a loop adds to a bare one, round by round; and the bare one to itself, which is the noise."""

    bare_ms: list[float]
    added_ms: list[float]
    added: list[float]  # in percent
    noise: list[float]
    bare_rate: list[float]  # steps per second, by the clock
    rate: list[float]

    @classmethod
    def of(cls, found: dict[str, Any]) -> "Cost":
        """From the seconds of each arm."""
        own, one, two = (found[arm]["cpu_s"] for arm in ARMS)
        bare = [statistics.mean(both) for both in zip(one, two, strict=True)]
        return cls(
            [1e3 * s for s in bare],
            [1e3 * (mine - theirs) for mine, theirs in zip(own, bare, strict=True)],
            [100 * (mine / theirs - 1) for mine, theirs in zip(own, bare, strict=True)],
            [100 * (b / a - 1) for a, b in zip(one, two, strict=True)],
            [1 / s for s in found["bare"]["wall_s"]],
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
    cells = [recipe, spread(cost.bare_ms, ".2f"), spread(cost.added_ms, "+.2f")]
    cells += [f"{spread(one, '+.1f')} %" for one in (cost.added, cost.noise)]
    cells += [f"{statistics.median(one):.1f}" for one in (cost.bare_rate, cost.rate)]
    return f"| {' | '.join(cells)} |"


def write(known: dict[str, Any]) -> None:
    """Fill the page with what is known, and draw it."""
    costs = {recipe: Cost.of(known[recipe]["seconds a step"]) for recipe in RECIPES if recipe in known}
    pages.write(
        ROOT / "docs" / "performance.md",
        measured="\n\n".join(known[recipe]["measured"] for recipe in costs),
        loop="\n".join([HEAD, *(row(recipe, cost) for recipe, cost in costs.items())]),
    )
    panels = {
        "the recipe's loop": {recipe: middle_half(cost.added) for recipe, cost in costs.items()},
        "the bare loop again": {recipe: middle_half(cost.noise) for recipe, cost in costs.items()},
    }
    unit = "processor time of a step beside a bare loop of the same strategy, % (median and middle half of the rounds)"
    plots.dots(ROOT / "docs" / "performance.png", panels, unit, reference=0.0, form="+.1f", own="the recipe")


def main() -> None:
    """Measure recipes one after the other; each is written at once, and rows of the others stay."""
    for recipe in sys.argv[1:] or RECIPES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            arms = duel(recipe, Path(folder))
        print(row(recipe, Cost.of(arms)), flush=True)
        conditions = f"{SIZE} ranks of one thread on gloo"
        measured = pages.measured(f"uv run python -m benchmarks.duel {recipe}", conditions, began=began)
        known = json.loads(JSON.read_text()) if JSON.exists() else {}
        known[recipe] = {"measured": measured, "seconds a step": arms}
        JSON.write_text(json.dumps(known) + "\n")
        write(known)


if __name__ == "__main__":
    main()
