"""A mixture trains as one process does that reads it sample by sample, in every GPT recipe and across a resume."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from common import manifest
from common.train import initial
from common.workloads import gpt, text

from tests.harness import runner, segments
from tests.harness.once import Once
from tests.recipes.test_documents_apart import write_table
from tests.recipes.test_equivalence import BATCH, DECAY, EVAL_EVERY, FLAGS, MICRO_BATCH, RATES, clip_and_step, mean_loss

GPT = [recipe for recipe in runner.SUPERVISED if runner.workload(recipe) == "gpt"]
STEPS = 5
FIRST = {"lines": "0.7", "table": "0.3"}  # lines are one row; documents of the table are kept apart
OTHER = {"lines": "0.25", "table": "0.75"}
CHANGE = 2  # the steps after this one have the other weights


class Curve(NamedTuple):
    """What a training leaves behind: values of each step, and some of some steps."""

    every: dict[str, list[float]]
    held_out: dict[str, dict[int, float]]


def data_flag(folders: dict[str, Path], weights: dict[str, str]) -> str:
    return ",".join(f"{name}={folders[name]}={weight}" for name, weight in weights.items())


def plain_loop(folders: dict[str, Path], stages: dict[int, dict[str, str]], sizes: dict[str, Any]) -> Curve:
    """The training, as one would write it for one process: each set is read on its own, and documents one by one."""
    shape = {"num_layers": 3, "num_heads": 4, "width": 40, "mlp_width": 44} | sizes
    sets = {name: text.load(str(folder), 16, attend="auto") for name, folder in folders.items()}
    with torch.device("meta"):
        model = gpt.GPT(gpt.Shape(256, **shape))
    initial.materialize(model, 0, torch.device("cpu"), torch.float64)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    tags = [tag for name in folders for tag in (f"train/loss/{name}", f"train/epochs/{name}")]
    every: dict[str, list[float]] = {tag: [] for tag in ("train/loss", "train/grad_norm", *tags)}
    held_out: dict[str, dict[int, float]] = {f"val/loss{part}": {} for part in ("", *(f"/{name}" for name in folders))}
    progress: dict[str, Any] = {}
    read = dict.fromkeys(folders, 0)

    def losses(reads: dict[str, tuple]) -> dict[str, tuple[torch.Tensor, float]]:
        """The sum over the tokens that count of each set, and their number."""
        found = {}
        for name, (inputs, targets) in reads.items():
            counts = (targets != -100).sum().item()
            found[name] = (
                mean_loss(model, inputs, targets) * counts if counts else torch.zeros((), dtype=torch.float64),
                counts,
            )
        return found

    for step in range(STEPS):
        if step in stages:
            mixed, _ = text.load(data_flag(folders, stages[step]), 16, attend="auto")
            order = mixed.make_order(0, progress | {"samples": step * BATCH})
            progress = order.facts()
        _, indices = order.samples(np.arange(step * BATCH, (step + 1) * BATCH))
        reads = {}
        first = 0
        for name in sorted(folders):
            own = indices[(indices >= first) & (indices < first + len(sets[name][0]))] - first
            reads[name] = sets[name][0].read(np.zeros_like(own), own)
            read[name] += len(own)
            first += len(sets[name][0])
        sums = losses(reads)
        loss = mean_of(sums)
        optimizer.zero_grad()
        loss.backward()
        every["train/grad_norm"].append(clip_and_step(model, optimizer, step, STEPS, RATES["gpt"]))
        every["train/loss"].append(loss.item())
        for name, (one, number) in sums.items():
            every[f"train/loss/{name}"].append(one.item() / number)
            every[f"train/epochs/{name}"].append(read[name] / len(sets[name][0]))
        if (step + 1) % EVAL_EVERY == 0 or step + 1 == STEPS:
            with torch.no_grad():
                all_of = {
                    name: part.read(np.zeros(len(part)), np.arange(len(part))) for name, (_, part) in sets.items()
                }
                sums = losses(all_of)
            held_out["val/loss"][step + 1] = mean_of(sums).item()
            for name, (one, number) in sums.items():
                held_out[f"val/loss/{name}"][step + 1] = one.item() / number
    return Curve(every, held_out)


def mean_of(sums: dict[str, tuple[torch.Tensor, float]]) -> torch.Tensor:
    return torch.stack([one for one, _ in sums.values()]).sum() / sum(number for _, number in sums.values())


@pytest.fixture(scope="module")
def folders(once: Once, small_text: Path) -> dict[str, Path]:
    return {"lines": small_text, "table": once.folder(write_table, "documents apart")}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path], once: Once) -> Callable[..., Curve]:
    def get(stages: dict[int, dict[str, str]], sizes: tuple = ()) -> Curve:
        sizes = tuple(size for size in sizes if size[0] != "seq_len")
        return once.value(lambda: plain_loop(folders, stages, dict(sizes)), "mixture", json.dumps(stages), sizes)

    return get


def compare(found: Path, wanted: Curve, first: int = 0, last: int = STEPS) -> None:
    for tag, values in wanted.every.items():
        curve = runner.records(found, tag)
        assert list(curve) == list(range(first + 1, last + 1)), tag
        for step, value in curve.items():
            assert math.isclose(value, values[step - 1], rel_tol=1e-9), (tag, step)
    for tag, some in wanted.held_out.items():
        assert runner.records(found, tag) == pytest.approx(
            {step: value for step, value in some.items() if first < step <= last}, rel=1e-9
        )
    assert runner.records(found, "val/bits_per_byte/lines"), "bits per byte of each source, too"


def flags(weights: dict[str, str], folders: dict[str, Path]) -> tuple[str, ...]:
    rate = str(2 * RATES["gpt"])
    return ("--max-steps", str(STEPS), "--dtype", "float64", "--lr", rate, "--data", data_flag(folders, weights))


def ways() -> Iterator[Any]:
    """Each recipe on two ranks, and all schedules of a pipeline, whose losses come in the schedule's order."""
    for recipe in GPT:
        layouts = [layout for layout in runner.layouts(recipe) if layout.size == 2]
        for layout in layouts if runner.has_flag(recipe, "--pp") else layouts[:1]:
            marks = () if recipe == "ddp_gpt" else pytest.mark.rest
            yield pytest.param(layout, id=str(layout), marks=marks)


@pytest.mark.parametrize("layout", list(ways()))
def test_float64(layout: runner.Layout, plain: Callable, folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = layout.recipe
    more = (*runner.small(recipe), *layout.flags, *layout.micro_batches(MICRO_BATCH), "--out", str(tmp_path))
    result = runner.run_recipe(recipe, layout.size, *FLAGS[4:], *more, "--name", "run", *flags(FIRST, folders))
    assert result.ok, str(result)
    compare(tmp_path / "run", plain({0: FIRST}, layout.sizes))


def test_other_weights_and_another_recipe_after_a_stop(
    plain: Callable, folders: dict[str, Path], tmp_path: Path
) -> None:
    """On two ranks, then with other weights by another recipe on three: what it read is that of one process."""
    way = []
    for i, (layout, weights, last) in enumerate(
        [(runner.layout("ddp_gpt", 2), FIRST, CHANGE), (runner.Layout("fsdp_gpt", 3, (), 3), OTHER, STEPS)]
    ):
        where = ("--out", str(tmp_path / str(i)), "--name", "run", "--stop-after", str(last), "--workers", str(i))
        before = ("--resume", str(tmp_path / str(i - 1) / "run")) if i else ()
        more = (*runner.SMALL["gpt"], *layout.flags, *layout.micro_batches(BATCH), *where, *before)
        recipe = runner.ROOT / "recipes" / layout.recipe / "train.py"
        way.append(
            segments.Segment(recipe, layout, (*FLAGS[4:], *more, *flags(weights, folders)), tmp_path / str(i) / "notes")
        )
    result = segments.run(way)
    assert result.ok, str(result)
    wanted = plain({0: FIRST, CHANGE: OTHER})
    for tag, values in wanted.every.items():
        curve = runner.records(tmp_path / "0" / "run", tag) | runner.records(tmp_path / "1" / "run", tag)
        assert list(curve) == list(range(1, STEPS + 1)), tag
        assert all(math.isclose(curve[step], values[step - 1], rel_tol=1e-9) for step in curve), tag
    for tag, some in wanted.held_out.items():
        assert runner.records(tmp_path / "1" / "run", tag) == pytest.approx(some, rel=1e-9)
    kept = json.loads((tmp_path / "1/run/checkpoints" / f"step_{STEPS:08d}" / manifest.NAME).read_text())
    written = [[start, weights] for start, weights, _ in kept["mixture"]]
    as_numbers = [{name: float(weight) for name, weight in weights.items()} for weights in (FIRST, OTHER)]
    assert written == [[0, as_numbers[0]], [CHANGE * BATCH, as_numbers[1]]]
