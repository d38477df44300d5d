"""A run that is handed on, to the same ranks, to others, or to another recipe, is the uninterrupted run.

Between the many layouts of a language model: tests/recipes/test_layouts.py.
"""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path

import common
import pytest
from common import manifest

from tests.conftest import each_recipe, write_parquet, write_text
from tests.harness import mutants, runner
from tests.harness.once import Once
from tests.harness.states import same_tensors

# 101 samples in batches of 40: epochs end within steps 3 and 6.
STEPS = 6
MICRO_BATCH = 20  # over all ranks
FLAGS = [
    *("--max-steps", str(STEPS), "--global-batch-size", "40", "--warmup-steps", "2"),
    *("--max-grad-norm", "1", "--log-every", "1", "--eval-every", "1000", "--save-every", "1000"),
]


Tiny = dict[str, Path]


@pytest.fixture(scope="session")
def tiny(once: Once) -> Tiny:
    """A set for each workload."""
    return {
        "resnet": once.folder(lambda folder: write_parquet(folder, 101, 12), "tiny images"),
        "gpt": once.folder(lambda folder: write_text(folder, 101, 12), "tiny text"),
    }


Curves = dict[str, dict[int, float]]
Reference = Callable[[str, int, str], tuple[Path, Curves]]


@pytest.fixture(scope="module")
def reference(tiny: Tiny, once: Once) -> Reference:
    """Uninterrupted runs by recipe, number of ranks and type, each made once: to be read only."""

    def get(recipe: str, world_size: int, dtype: str) -> tuple[Path, Curves]:
        flags = ("--dtype", dtype)
        how = (recipe, world_size, dtype)
        out = once.folder(lambda folder: run(recipe, world_size, folder / "run", tiny, *flags), "resume", *how) / "run"
        return out, curves_of(recipe, out)

    return get


def run(recipe: str | Path, world_size: int, out: Path, tiny: Tiny, *flags: str) -> Curves:
    """Run until it stops; returns the curves recorded so far."""
    name = recipe if isinstance(recipe, str) else recipe.parent.name
    # Over different ranks the numbers are the same only if BatchNorm sees the same samples.
    sync = ["--sync-bn"] if runner.has_flag(name, "--sync-bn") and "float64" in flags else []
    data = ("--data", str(tiny[runner.workload(name)])) if name in runner.SUPERVISED else ()
    where = (*data, "--out", str(out.parent), "--name", out.name)
    layout = runner.layout(name, world_size)
    depth = ("--num-layers", "5") if "--pp" in layout.flags else ()  # the same for any number of stages
    how = (*runner.small(name), *layout.flags, *depth, *layout.micro_batches(MICRO_BATCH))
    result = runner.run_recipe(recipe, world_size, *FLAGS, *how, *sync, *where, *flags)
    assert result.ok, str(result)
    return curves_of(name, out)


def curves_of(recipe: str, out: Path) -> Curves:
    """What a run has recorded."""
    return {tag: runner.records(out, tag) for tag in ("train/loss", "train/grad_norm", "train/lr", eval_metric(recipe))}


def eval_metric(recipe: str) -> str:
    """What an evaluation of a recipe gives."""
    return "val/loss" if recipe in runner.SUPERVISED else "val/return"


@pytest.mark.parametrize("recipe", each_recipe(runner.TRAINING))  # another one: tests/recipes/test_mimo.py
def test_same_ranks_bitwise(recipe: str, reference: Reference, tiny: Tiny, tmp_path: Path) -> None:
    world_size = runner.world_sizes(recipe, most=2)[-1]
    out, curves = reference(recipe, world_size, "float32")
    for stop in ("2", "4", "0"):
        parts = run(recipe, world_size, tmp_path / "parts", tiny, "--dtype", "float32", "--stop-after", stop)
    # The parts were evaluated at each stop, too; running statistics of BatchNorm are included.
    parts[eval_metric(recipe)] = {STEPS: parts[eval_metric(recipe)][STEPS]}
    assert parts == curves
    assert list(curves["train/loss"]) == list(range(1, STEPS + 1))
    last = f"checkpoints/step_{STEPS:08d}"
    assert same_tensors(tmp_path / "parts" / last, out / last)


@pytest.mark.parametrize("recipe", each_recipe([name for name in runner.TRAINING if len(runner.world_sizes(name)) > 1]))
def test_other_ranks(recipe: str, reference: Reference, tiny: Tiny, tmp_path: Path) -> None:
    flags = ("--dtype", "float64")
    _, curves = reference(recipe, 2, "float64")
    run(recipe, 2, tmp_path / "parts", tiny, *flags, "--stop-after", "3")
    run(recipe, 1, tmp_path / "parts", tiny, *flags, "--stop-after", "5")
    parts = run(recipe, 4, tmp_path / "parts", tiny, *flags)
    assert parts["train/loss"] == pytest.approx(curves["train/loss"], rel=1e-9)
    assert parts["train/grad_norm"] == pytest.approx(curves["train/grad_norm"], rel=1e-9)


def test_there_and_back(tiny: Tiny, tmp_path: Path) -> None:
    """One training through the image recipes, from each to each, by --resume: optimizer, schedule, position and all."""
    recipes = [name for name in runner.RECIPES if runner.workload(name) == "resnet"]
    # Of 0, 1 and 2: 0 1 0 2 1 2 0.
    path = [name for i, one in enumerate(recipes) for other in recipes[i + 1 :] for name in (one, other)] + recipes[:1]
    assert set(pairwise(path)) == set(permutations(recipes, 2))
    flags = ("--dtype", "float64", "--max-steps", str(len(path)))
    whole = run(path[0], 1, tmp_path / "whole", tiny, *flags)
    joined: Curves = {tag: {} for tag in whole}
    for step, recipe in enumerate(path, start=1):
        # From a run's folder, or from one of its checkpoints.
        before = (tmp_path / str(step - 1)) / ("" if step % 2 else f"checkpoints/step_{step - 1:08d}")
        resume = ("--resume", str(before)) if step > 1 else ()
        world_size = runner.world_sizes(recipe, most=2)[-1]
        part = run(recipe, world_size, tmp_path / str(step), tiny, *flags, *resume, "--stop-after", str(step))
        joined = {tag: joined[tag] | part[tag] for tag in joined}
    joined["val/loss"] = {len(path): joined["val/loss"][len(path)]}  # each part ends with an evaluation
    for tag, values in whole.items():
        assert joined[tag] == pytest.approx(values, rel=1e-9), tag


@pytest.mark.parametrize("version", ["0.1.0", None, "99.0"])
def test_run_of_another_version(version: str | None, reference: Reference, tiny: Tiny, tmp_path: Path) -> None:
    """Of an older one, of one that recorded none, and of a newer one: continues, and records who continued it."""
    _, curves = reference("ddp_resnet", 1, "float32")
    flags = ("--dtype", "float32")
    out = tmp_path / "parts"
    run("ddp_resnet", 1, out, tiny, *flags, "--stop-after", "2")
    for path in (out / "config.json", out / "checkpoints/step_00000002/MANIFEST.json"):
        facts = manifest.read_json(path)
        assert facts["versions"].pop("brigade") == common.__version__
        if version:
            facts["versions"]["brigade"] = version
        if path.name == manifest.NAME:
            files = facts.pop("files")
            del facts["sha256"], facts["format"]
            manifest.write(path.parent, facts, files)
        else:
            path.write_text(json.dumps(facts))
    parts = run("ddp_resnet", 1, out, tiny, *flags)
    assert parts["train/loss"] == curves["train/loss"]
    assert manifest.read_json(out / "config.json")["versions"]["brigade"] == common.__version__
    first, last = (manifest.read_json(out / f"checkpoints/step_{step:08d}/MANIFEST.json") for step in (2, STEPS))
    assert first["versions"].get("brigade") == version
    assert last["versions"]["brigade"] == common.__version__


def test_mutant_fails(reference: Reference, tiny: Tiny, tmp_path: Path) -> None:
    """Without the optimizer's state. tests/faults/test_stop.py has a position that is that of the step before."""
    load = "start.restore(found.path, args.init, model, optimizer)"
    forget = "[value.zero_() for state in optimizer.state.values() for value in state.values()]"
    path = mutants.mutate("ddp_resnet", tmp_path, {"main": {load: f"{load}; {forget}"}})
    _, curves = reference("ddp_resnet", 1, "float32")
    for stop in ("2", "4"):
        parts = run(path, 1, tmp_path / "parts", tiny, "--dtype", "float32", "--stop-after", stop)
    assert parts["train/loss"][2] == curves["train/loss"][2]
    assert parts["train/loss"][4] != pytest.approx(curves["train/loss"][4], rel=1e-5)


def test_finished_run_stays_as_it_is(reference: Reference, tiny: Tiny, tmp_path: Path) -> None:
    out, curves = reference("ddp_resnet", 1, "float32")
    shutil.copytree(out, tmp_path / "run")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/checkpoints/*/*")}
    assert run("ddp_resnet", 1, tmp_path / "run", tiny, "--dtype", "float32") == curves
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("run/checkpoints/*/*")} == files


def test_patience_counts_over_a_resume(tiny: Tiny, tmp_path: Path) -> None:
    """At rate 0 no evaluation is better than the first one, after step 2; the third after that is after step 8."""
    flags = ["--data", str(tiny["gpt"]), "--out", str(tmp_path), *runner.SMALL["gpt"], "--global-batch-size", "40"]
    flags += ["--max-steps", "20", "--save-every", "100", "--eval-every", "2", "--lr", "0", "--patience", "3"]
    for name, size, stops in (("whole", 1, (0,)), ("parts", 2, (4, 0))):
        for stop in stops:
            more = ["--name", name, "--stop-after", str(stop)]
            result = runner.run_recipe("ddp_gpt", size, *flags, *more)
            assert result.ok, str(result)
        best = runner.records(tmp_path / name, "val/loss")[2]
        reason = f"--patience 3: no better val/loss for 3 evaluations, best {best:.4g} at step 2"
        assert f"{reason}: saving and stopping after step 8" in str(result)
        assert f"stopped  checkpoint saved ({reason})" in str(result)
        assert "reached  step 8 of 20" in str(result)
        assert "; --warmup-steps 20 is not below the training's 20 steps" in str(result)
        assert (tmp_path / name / "checkpoints" / "step_00000008").is_dir()
        assert not (tmp_path / name / "stopped.json").exists()  # which lets Slurm start it again
        assert [*runner.records(tmp_path / name, "val/loss")] == [2, 4, 6, 8]


def test_best_is_kept_over_a_resume(tiny: Tiny, tmp_path: Path) -> None:
    """Also where the evaluation that found it was due without a save. At rate 0, the first one stays the best."""
    flags = ["--data", str(tiny["gpt"]), "--out", str(tmp_path), *runner.SMALL["gpt"], "--global-batch-size", "40"]
    flags += ["--max-steps", "6", "--save-every", "100", "--eval-every", "2", "--keep", "1", "--lr", "0"]
    for stop in (4, 6):
        more = ["--name", "run", "--keep-best", "bits_per_byte", "--stop-after", str(stop)]
        result = runner.run_recipe("ddp_gpt", 2, *flags, *more)
        assert result.ok, str(result)
        checkpoints = tmp_path / "run" / "checkpoints"
        assert (checkpoints / "best").read_text() == "step_00000002"
        assert {path.name for path in checkpoints.glob("step_*")} == {"step_00000002", f"step_{stop:08d}"}
    result = runner.run_recipe("ddp_gpt", 2, *flags, "--name", "other", "--keep-best", "top1")
    assert not result.ok
    assert "error: --keep-best top1: an evaluation gives loss, bits_per_byte; name one of them" in str(result)
