"""An evaluation: what `python -m tools.evaluate` does.

It calls make_data, make_model and forward of the recipe's section 2, and nothing else of the recipe.
"""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from common import UserError, devices, keymap, manifest, precision, ranks
from common.run import cli, process_group, run_dir
from common.state import checkpoint, retention
from common.store import place
from common.train import data, initial, metrics, sampler
from common.workloads import splits
from tools import about
from tools.checkpoint.files import averages_in, beside
from tools.evaluate.flags import Args

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CALLED = ("Args", "make_data", "make_model", "forward")  # of a train.py
NO_SPLIT = "no_such_split"  # which no set has
CLOSE = 1e-3  # of a metric in bfloat16, added up over other batches
Rows = list[dict[str, float]]


def load_recipe(args: Args, files: Path, name: object) -> Any:
    """Import a train.py as a module.

    Never the copy in the run's folder unless the user names it: a run may be somebody else's, and its code would run.

    Args:
        args: the flags.
        files: the run's folder, or a copy of its small files.
        name: the recipe that config.json names.

    Raises:
        UserError: there is no such file, or it lacks a part of section 2.
    """
    copy = files / "train.py"
    if not args.recipe and (not isinstance(name, str) or name != Path(name).name):
        raise UserError(f"{files / 'config.json'} names the recipe {name!r:.80}, which is not a folder of recipes/")
    path = Path(args.recipe).expanduser() if args.recipe else RECIPES / str(name) / "train.py"
    if not path.is_file():
        raise UserError(
            f"there is no {path}: name the train.py that trained this run with --recipe; {copy} is a copy, but read it "
            "before you let it run"
        )
    if copy.is_file() and manifest.read_bytes(copy) != path.read_bytes():
        ranks.print0(f"note: {path} is not what trained this run; {copy} is a copy of that")
    module = about.load(path)
    if missing := [part for part in CALLED if not hasattr(module, part)]:
        raise UserError(f"{path} has no {missing[0]}, which an evaluation calls: {', '.join(CALLED)}")
    return module


def choose(args: Args, kept: Any) -> tuple[Any, dict[str, Any]]:
    """The checkpoint to evaluate, verified, and its manifest; `kept` is the run's folder, here or in a store.

    Raises:
        UserError: there is none, it is damaged, or --checkpoint names none.
    """
    if not args.checkpoint:
        return checkpoint.choose(kept)
    steps = [checkpoint.step_of(path) for path in checkpoint.committed(kept)]
    name = args.checkpoint
    if name == "best":
        pointer = kept / "checkpoints" / retention.BEST
        if not pointer.is_file():
            raise UserError(
                f"--checkpoint best: {args.run} has no best checkpoint: that needs --keep-best METRIC and an evaluation"
            )
        name = manifest.read_bytes(pointer).decode(errors="replace").removeprefix("step_")
    if not name.isdecimal() or int(name) not in steps:
        kept = ", ".join(map(str, sorted(steps))) or "none"
        raise UserError(f'--checkpoint {args.checkpoint}: use "best" or one of the steps that {args.run} has: {kept}')
    return checkpoint.choose(checkpoint.folder(kept, int(name)))


def read_data(args: Args, recipe: Any, flags: Any) -> tuple[data.BatchReader, data.BatchReader]:
    """The training split, which the model's sizes depend on, and the split to evaluate.

    Raises:
        UserError: there is no such split.
    """
    if args.split == "validation":
        return recipe.make_data(flags)
    source = splits.parse(vars(flags).get("data", ""))
    chooses = "data" in vars(flags) and _refuses(recipe, flags, source.validating_on(NO_SPLIT))
    if not chooses:  # it would give its validation split, whatever split was asked for
        raise UserError(
            f"--split {args.split}: make_data of {recipe.__file__} ignores the split that --data names: let it read "
            "--data by images.load, text.load or splits.load"
        )
    return recipe.make_data(dataclasses.replace(flags, data=source.validating_on(args.split)))


def _refuses(recipe: Any, flags: Any, name: str) -> bool:
    """Whether make_data refuses this --data."""
    try:
        recipe.make_data(dataclasses.replace(flags, data=name))
    except UserError:
        return True
    return False


def scores(outputs: list[Any], targets: Any) -> dict[str, float]:
    """Label, prediction and its probability of one sample, if the model's output is a score for each class."""
    output = outputs[-1] if outputs else None
    if not isinstance(output, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return {}
    if output.ndim != 2 or output.shape[1] < 2 or targets.shape != (1,) or targets.is_floating_point():
        return {}
    probability, prediction = output.double().softmax(1).max(1)
    return {"label": targets.item(), "prediction": prediction.item(), "probability": probability.item()}


@torch.no_grad()
def evaluate(recipe: Any, flags: Any, model: torch.nn.Module, batches: data.Loader, rows: Rows | None) -> metrics.Sums:
    """Sums over a split.

    Args:
        recipe: its module.
        flags: its Args.
        model: the plain model.
        batches: of the split; of one sample each, if `rows` are wanted.
        rows: gets a row for each sample; None for no rows.
    """
    model.eval()
    outputs: list[Any] = []
    if rows is not None:
        model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    sums: metrics.Sums = {}
    for index, batch in enumerate(batches):
        batch_sums = recipe.forward(flags, model, batch)
        sums = metrics.add(sums, batch_sums)
        if rows is not None:
            means = metrics.means(batch_sums) if batch_sums["count"] else {}
            rows.append({"index": index} | scores(outputs, batch.targets) | means)
            outputs.clear()
    return sums


def small_files(kept: Any, stack: contextlib.ExitStack) -> Path:
    """The folder with a run's config.json, train.py and records: its own, or a copy of what a store has."""
    if isinstance(kept, Path):
        return kept
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name in ("config.json", "train.py", "metrics.jsonl"):
        if (kept / name).is_file():
            (copy / name).write_bytes(manifest.read_bytes(kept / name))
    return copy


def run(args: Args, rows: Rows | None) -> None:
    """Evaluate, print the metrics as the training does, and fill `rows`."""
    kept = place.at("RUN", args.run)
    with contextlib.ExitStack() as stack:
        _run(args, kept, small_files(kept, stack), rows)


def _run(args: Args, kept: Any, files: Path, rows: Rows | None) -> None:
    config = files / "config.json"
    try:
        facts = manifest.read_json(config)
        name = facts["recipe"]
        world_size = int(facts["world_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{args.run} is not a run's folder: {config} cannot be read ({error!r})") from error
    folder, progress = choose(args, kept)
    recipe = load_recipe(args, files, name)
    flags = cli.parse(recipe.Args, ["--config", str(config), *(["--data", args.data] if args.data else [])])
    devices.configure(vars(flags).get("matmul_precision", "highest"), False)
    world = process_group.start("auto", flags.dtype)
    if world.size > 1:
        raise UserError(f"tools.evaluate is one process, not {world.size}: start it with python, without torchrun")
    train, held_out = read_data(args, recipe, flags)
    if not len(held_out):
        raise UserError("make_data gives no samples to evaluate, or a stream, whose length is not known")
    digest = train.digest()
    if progress.get("data", digest) != digest:
        ranks.print0(
            f"note: the run was trained on data {progress['data']}, and this is data {digest}: a label or a token "
            "must mean the same in both"
        )
    model = recipe.make_model(flags, train)
    checkpoint.check_fits(folder, model)
    initial.leave(model)
    dtype = precision.compute_dtype(flags.dtype, world.device)
    model = initial.materialize(model, flags.seed, world.device, precision.param_dtype(dtype))
    tensors = keymap.model_tensors(model)
    named = averages_in(folder, tensors) if args.ema else {name: name for name in tensors}
    checkpoint.load(folder, {named[name]: one for name, one in tensors.items()})
    if getattr(flags, "ema", 0) and not args.ema:
        ranks.print0("note: the run evaluated the average of its weights, which --ema evaluates here")
    # As many samples a forward pass as a rank of the training had, in one micro-batch, at most.
    size = flags.micro_batch_size or sampler.ceil_div(flags.global_batch_size, world_size)
    division = sampler.divide_batch(flags.global_batch_size, size if rows is None else 1, 1)
    plan = sampler.make_plan(division, len(held_out), run_seed=flags.seed, epochs=1, max_steps=0, progress={})
    batches = data.Loader(held_out, sampler.evaluation_requests(plan, len(held_out), 0), flags.workers, world.device)
    print(
        f"step {progress['step']} of {folder}: {len(held_out):,} {args.split} samples on {world.device.type}, "
        f"{str(dtype).removeprefix('torch.')}"
    )
    found = held_out.metrics(metrics.means(evaluate(recipe, flags, model, batches, rows)))
    for metric, value in found.items():
        print(f"{'test' if args.split == 'test' else 'val'}/{metric} {value:.12g}")
    if args.split == "validation" and not args.data and args.ema == bool(getattr(flags, "ema", 0)):
        compare(found, run_dir.records(files), progress["step"], world_size)
    process_group.finish(world.process)


def compare(found: Mapping[str, float], records: list[dict[str, float]], step: int, world_size: int) -> None:
    """Say where the run's own evaluation of this step had other values, and why it may have."""
    own = {key: value for record in records if record["step"] == step for key, value in record.items()}
    for metric, value in found.items():
        ran = own.get(f"val/{metric}", value)
        if not math.isclose(value, ran, rel_tol=CLOSE, abs_tol=CLOSE):
            ranks.print0(
                f"note: the run's own val/{metric} at step {step} was {ran:.12g}: it evaluated on {world_size} "
                f"rank{'s' * (world_size > 1)}. A loss over pairs of a batch, random numbers, or changed code or "
                "data give another value here"
            )


def write(rows: Rows, path: Path) -> None:
    """Write the rows as parquet; a sample without a value has null."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = list(dict.fromkeys(key for row in rows for key in row))
    parquet.write_table(pa.table({key: [row.get(key) for row in rows] for key in columns}), path)


def evaluate_run(args: Args) -> None:
    """Evaluate, and write the rows where --out asks for them."""
    if not args.out:
        run(args, None)
        return
    rows: Rows = []
    with beside(Path(args.out).expanduser()) as partial:
        run(args, rows)
        write(rows, partial)
    print(f"{args.out}: {len(rows):,} rows of {', '.join(rows[0])}")
