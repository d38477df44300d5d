"""What a person can get wrong ends the run, with one message, and leaves nothing behind and nothing lost.

No rank waits for another one until process_group.TIMEOUT_S: runner.HANG_S is shorter, and would end it by a signal.
"""

import json
import multiprocessing
import os
import re
import runpy
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import UserError
from common.run import cli, exits
from common.train import initial
from common.workloads import resnet
from PIL import Image

from tests.conftest import write_image_folder, write_parquet
from tests.harness import module, runner
from tests.harness.damage import flip_data

DDP = "ddp_resnet"
TWO_STEPS = ("--max-steps", "2", "--global-batch-size", "8", "--log-every", "1", *runner.small(DDP))


@dataclass(frozen=True)
class Where:
    """What is special about the place where one rank runs."""

    folder: str = ""
    gpus: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


def start(recipe: str, argv: Sequence[str], where: Where) -> None:
    """Run a recipe in this process, as runner.run_recipe does."""
    if where.gpus is not None:
        # A mock, only because no machine of the test run has a GPU: what is tested is what people read who
        # start more processes than they have GPUs.
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: where.gpus
    multiprocessing.set_start_method("fork", force=True)  # as outside of a fork server, for loader processes
    os.environ |= where.environ
    os.chdir(where.folder or Path.cwd())
    sys.argv = [recipe, *argv]
    runpy.run_path(recipe, run_name="__main__")


def run_where(places: Sequence[Where], *flags: str, paths: Sequence[Path] = ()) -> runner.Result:
    path = runner.ROOT / "recipes" / DDP / "train.py"
    args = [(str(paths[rank] if paths else path), flags, where) for rank, where in enumerate(places)]
    return runner.spawn(start, args)


def processes(recipe: str) -> int:
    return min(2, runner.world_sizes(recipe)[-1])


def assert_refused(result: runner.Result, *messages: str) -> None:
    """Every rank fails, and one of them, rank 0, says why, once, in words of ours."""
    everything = "".join(result.outputs)
    assert all(result.codes), str(result)
    assert result.codes[0] == 2, str(result)
    for message in messages:
        assert message in result.outputs[0], str(result)
    assert everything.count(messages[0]) == 1, str(result)
    assert "Traceback" not in everything, str(result)
    assert len(everything.splitlines()) < 12, str(result)


def nothing() -> None:
    """Start the fork server, whose first start imports torch."""


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> Iterator[None]:
    assert runner.spawn(nothing, [()]).ok
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "GRACE_S", 0.2)  # enough for a second rank that refuses, as none should
        yield


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Where the runs of a test would go: still not there at its end."""
    path = tmp_path / "out"
    yield path
    assert not path.exists(), f"left behind: {sorted(path.rglob('*'))}"


def refused(recipe: str | Path, out: Path, flags: Sequence[str], *messages: str, size: int | None = None) -> None:
    result = runner.run_recipe(recipe, size or processes(recipe), "--out", str(out), "--name", "run", *flags)
    assert_refused(result, *messages)


# --- flags ------------------------------------------------------------------------------------------------

BEFORE_RANKS_MEET = {
    "unknown flag": (["--batchsize", "8"], ["--batchsize"]),
    "not a number": (["--log-every", "many"], ["Error parsing --log-every", "many"]),
    "no batch": (["--global-batch-size", "0"], ["--global-batch-size 0"]),
    "no config": (["--config", "nowhere.json"], ["--config nowhere.json"]),
    "config without a path": (["--config"], ["argument --config: expected one argument"]),
}
BAD_FLAGS = {
    "unknown flag": BEFORE_RANKS_MEET["unknown flag"],
    "dtype": (["--dtype", "float8"], ["--dtype", "float8", "float64"]),
    "backend": (["--backend", "smoke"], ["--backend smoke", "gloo"]),
    "no GPU": (["--backend", "nccl"], ["--backend nccl", "--backend gloo"]),
    "no data folder": (["--data", "./nowhere"], ["--data ./nowhere: there is no such folder"]),
    "nothing to resume": (["--resume", "runs/nowhere"], ["--resume runs/nowhere: no checkpoint there"]),
}
# Sections 4 and 5 are the same text in a family, which test_skeleton.py checks: one recipe stands for all that share
# its main. Accelerate starts its ranks in its own way, before it.
MAINS = (DDP, "accelerate_gpt", "syncbn_ppo", "cellfree_mimo")


def told_by_parse(recipe: str, flags: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed for flags that are refused before there is a process group."""
    with pytest.raises((UserError, SystemExit)) as refusal:
        cli.parse(module.load(recipe).Args, list(flags))
    if isinstance(refusal.value, UserError):
        return str(refusal.value)
    assert refusal.value.code == exits.USAGE_ERROR
    return re.sub(r"[\s│]+", " ", capsys.readouterr().err)  # tyro puts a message into a box


@pytest.mark.parametrize("recipe", runner.RECIPES)
@pytest.mark.parametrize("case", BEFORE_RANKS_MEET)
def test_flag_is_refused_before_the_ranks_meet(recipe: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, messages = BEFORE_RANKS_MEET[case]
    told = told_by_parse(recipe, flags, capsys)
    for message in messages:
        assert message in told
    cli.parse(module.load(recipe).Args, [])


def test_one_recipe_of_each_main_is_run() -> None:
    """A recipe with a main of its own has to be asked as well."""
    mains = {recipe: runner.sections(runner.source(recipe))[5] for recipe in runner.RECIPES}
    assert {mains[recipe] for recipe in MAINS} == set(mains.values())


@pytest.mark.parametrize("recipe", MAINS)
@pytest.mark.parametrize("case", BAD_FLAGS)
def test_flag(recipe: str, case: str, out: Path) -> None:
    flags, messages = BAD_FLAGS[case]
    if flags[0] == "--data" and recipe not in runner.SUPERVISED:
        messages = ["--data"]
    refused(recipe, out, flags, *messages)


OUT_OF_RANGE = {
    "log_every": "0",
    "keep": "0",
    "epochs": "0",
    "max_steps": "-1",
    "workers": "-1",
    "label_smoothing": "2",
    "momentum": "-1",
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_value_out_of_range(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No ZeroDivisionError of a loop, no error of torch's own, and no run of no steps that says it is done."""
    flag = f"--{name.replace('_', '-')}"
    assert f"{flag} {OUT_OF_RANGE[name]} is out of range" in told_by_parse(DDP, [flag, OUT_OF_RANGE[name]], capsys)


def test_batch_does_not_divide_by_ranks(out: Path) -> None:
    refused(DDP, out, ["--global-batch-size", "9"], "--global-batch-size 9 does not divide by 2 data-parallel ranks")


@pytest.mark.parametrize("recipe", runner.SUPERVISED)
def test_last_batch_too_small(recipe: str, out: Path, small_data: dict[str, Path]) -> None:
    """One sample over several ranks; in one process, BatchNorm's variance of it."""
    layouts = runner.layouts(recipe)
    layout = next((one for one in layouts if one.dp_size > 1), layouts[-1])
    flags = ["--data", str(small_data[runner.workload(recipe)]), *runner.small(recipe), *layout.flags]
    flags += ["--epochs", "1", "--max-steps", "0", "--global-batch-size", "36"]  # 469 = 13 * 36 + 1
    flags += layout.micro_batches(36)
    refused(recipe, out, flags, "has 1 of 469 samples", "use --max-steps 13 to drop that step", size=layout.size)


@pytest.mark.parametrize("micro", [[], ["--micro-batch-size", "1"]])
def test_one_sample_per_micro_batch(micro: list[str], out: Path, small_digits: Path) -> None:
    """BatchNorm cannot train on one sample, whichever flag asks for that."""
    batch = "4" if micro else "2"
    flags = ["--data", str(small_digits), "--max-steps", "2", "--global-batch-size", batch, *micro]
    refused(DDP, out, flags, f"--global-batch-size {batch} gives a rank only 1 of the 2 samples")


def test_one_sample_in_a_micro_batch_of_the_last_step(out: Path, tmp_path: Path) -> None:
    """13 = 8 + 5, and 5 samples in micro-batches of 4 over 2 ranks are 2 + 1 and 1 + 1."""
    data = write_parquet(tmp_path / "data", 13, 4)
    flags = ["--data", str(data), "--epochs", "1", "--global-batch-size", "8", "--micro-batch-size", "2"]
    refused(DDP, out, flags, "has 5 of 13 samples")


# --- sizes ------------------------------------------------------------------------------------------------

GPT = [recipe for recipe in runner.RECIPES if runner.workload(recipe) == "gpt"]
# Of a family, whose models are the same text: ranks, flags, and what is told of them by its first recipe.
BAD_SIZES_OF_A_FAMILY = {
    "model": (2, ["--model", "resnet17"], ["--model resnet17", "resnet18"]),
    "width": (2, ["--width", "52", "--num-heads", "8"], ["--width 52 must be an even multiple of --num-heads 8"]),
    "odd heads": (2, ["--width", "12", "--num-heads", "4"], ["--width 12 must be an even multiple of --num-heads 4"]),
    "kv heads": (
        2,
        ["--num-kv-heads", "4", "--num-heads", "6"],
        ["--num-heads 6 must be a multiple of --num-kv-heads 4"],
    ),
}
# Of a strategy: every recipe that has the flags is asked.
BAD_SIZES = {
    "tp and ranks": (4, ["--tp", "3"], ["--tp 3 must divide the number of ranks (4)"]),
    "tp and heads": (2, ["--tp", "2", "--num-heads", "3"], ["--tp 2 must divide --num-heads (3)"]),
    "tp and kv heads": (2, ["--tp", "2", "--num-kv-heads", "1"], ["--tp 2 must divide --num-kv-heads (1)"]),
    "tp and mlp": (2, ["--tp", "2", "--mlp-width", "45"], ["--tp 2 must divide --mlp-width (45)"]),
    "tp and default mlp": (
        3,
        ["--tp", "3", "--num-heads", "3", "--width", "48", "--seq-len", "48"],
        ["--tp 3 must divide --mlp-width (128)"],
    ),
    "tp and sequence": (2, ["--tp", "2", "--seq-len", "15"], ["--tp 2 must divide --seq-len (15)"]),
    "cp and ranks": (4, ["--cp", "3"], ["--cp 3 must divide the number of ranks (4)"]),
    "cp and sequence": (
        2,
        ["--cp", "2", "--seq-len", "18"],
        ["--seq-len 18 must be a multiple of 4", "the --cp 2 ranks"],
    ),
    "ulysses and heads": (
        3,
        ["--cp", "3", "--cp-kind", "ulysses", "--seq-len", "24"],
        ["--cp-kind ulysses: --cp 3 must divide --num-heads (4)"],
    ),
    "ulysses and kv heads": (
        2,
        ["--cp", "2", "--cp-kind", "ulysses", "--num-kv-heads", "1"],
        ["--cp-kind ulysses: --cp 2 must divide --num-kv-heads (1)"],
    ),
    "dp_replicate": (4, ["--dp-replicate", "3"], ["--dp-replicate 3 must divide the number of ranks (4)"]),
    "pp and ranks": (4, ["--pp", "3"], ["--pp 3 must divide the number of ranks (4)"]),
    "pp and batch": (4, ["--pp", "2", "--global-batch-size", "1"], ["--global-batch-size 1 does not divide by 2"]),
    "fewer micro-batches than stages": (
        2,
        ["--pp", "2", "--micro-batch-size", "0"],
        ["--micro-batch-size 0 makes 1 a step, and --schedule 1F1B needs 2 or more"],
    ),
    "micro-batches and ranks": (
        2,
        ["--pp", "2", "--global-batch-size", "12", "--schedule", "Interleaved1F1B"],
        ["--micro-batch-size 4 makes 3 a step, and --schedule Interleaved1F1B needs a multiple of --pp 2"],
    ),
    "micro-batches in both directions": (
        2,
        ["--pp", "2", "--micro-batch-size", "16", "--schedule", "DualPipeV"],
        ["--micro-batch-size 16 makes 2 a step, and --schedule DualPipeV needs 4 or more"],
    ),
    "two backward passes, and products kept for one": (
        2,
        ["--pp", "2", "--schedule", "ZBVZeroBubble", "--recompute", "selective"],
        ["--schedule ZBVZeroBubble goes back through a stage twice: use --recompute full or none"],
    ),
    "one rank, two stages": (
        1,
        ["--pp", "1", "--schedule", "InterleavedZeroBubble"],
        ["--schedule InterleavedZeroBubble needs --pp 2 or more, and", "not --pp 1 and --num-layers 4"],
    ),
    **{
        f"layers, {name}": (
            2,
            ["--schedule", name, "--pp", "2", "--num-layers", str(2 * stages - 1)],
            [f"--schedule {name} needs", f"({stages} a rank), not --pp 2 and --num-layers {2 * stages - 1}"],
        )
        for name, stages in {
            **{"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2},
            **{"ZBVZeroBubble": 2, "DualPipeV": 2},
        }.items()
    },
}


def without_weights(path: str, argv: list[str]) -> None:
    """Run a recipe that fails where it would make the model's weights."""

    def must_not_be_called(*_: Any) -> None:
        raise AssertionError("weights are made here")

    initial.materialize = must_not_be_called
    runner.run_path(path, argv)


def refused_before_weights(recipe: str, out: Path, flags: Sequence[str], *messages: str, size: int = 2) -> None:
    path = str(runner.ROOT / "recipes" / recipe / "train.py")
    argv = [path, "--out", str(out), "--name", "run", *flags]
    result = runner.spawn(without_weights, [(path, argv)] * min(size, runner.world_sizes(recipe)[-1]))
    assert_refused(result, *messages)


def recipes_with(flags: Sequence[str]) -> list[str]:
    return [recipe for recipe in runner.RECIPES if all(runner.has_flag(recipe, flag) for flag in flags[::2])]


@pytest.mark.parametrize("case", BAD_SIZES_OF_A_FAMILY)
def test_sizes_of_a_family(case: str, out: Path) -> None:
    """Before there are weights, which take long to make if they are many."""
    size, flags, messages = BAD_SIZES_OF_A_FAMILY[case]
    recipe = next(recipe for recipe in ("ddp_resnet", "ddp_gpt") if recipe in recipes_with(flags))
    refused_before_weights(recipe, out, flags, *messages, size=size)


@pytest.mark.parametrize(
    ("case", "recipe"), [(case, recipe) for case, (_, flags, _) in BAD_SIZES.items() for recipe in recipes_with(flags)]
)
def test_sizes(case: str, recipe: str, out: Path) -> None:
    size, flags, messages = BAD_SIZES[case]
    refused_before_weights(recipe, out, flags, *messages, size=size)


def test_every_schedule_is_asked_for_layers() -> None:
    """The list above has all of them."""
    asked = {case.removeprefix("layers, ") for case in BAD_SIZES if case.startswith("layers, ")}
    assert asked == set(runner.choices("pipeline_gpt", "--schedule"))


@pytest.mark.parametrize("recipe", GPT)
def test_weights_are_made_where_the_tests_above_think(recipe: str, small_text: Path, tmp_path: Path) -> None:
    path = str(runner.ROOT / "recipes" / recipe / "train.py")
    argv = [path, "--data", str(small_text), "--out", str(tmp_path / "out"), *runner.small(recipe)]
    result = runner.spawn(without_weights, [(path, argv)] * processes(recipe))
    assert "weights are made here" in str(result), str(result)


# --- data -------------------------------------------------------------------------------------------------


def empty_folder(folder: Path) -> str:
    folder.mkdir()
    return f"--data {folder}"


def no_images(folder: Path) -> str:
    folder.mkdir()
    (folder / "train.csv").write_text("height,width\n1,2\n3,4\n")
    return f"--data {folder}"


def no_pictures_in_classes(folder: Path) -> str:
    for name in ("cat", "dog"):
        (folder / "train" / name).mkdir(parents=True)
        (folder / "train" / name / "notes.txt").write_text("no picture")
    return f"--data {folder}"


def one_class_table(folder: Path) -> str:
    import datasets

    write_parquet(folder, 100, 10)
    rows = datasets.Dataset.from_parquet(str(folder / "train.parquet"))
    rows.filter(lambda row: row["digit"] == 3).to_parquet(folder / "train.parquet")
    return "only one class (3)"


def one_class_folder(folder: Path) -> str:
    write_image_folder(folder, 40, 10)
    for path in (folder / "train").iterdir():
        if path.name != "3":
            shutil.rmtree(path)
    return "one class"


def unreadable_image(folder: Path) -> str:
    write_image_folder(folder, 40, 10)
    path = sorted((folder / "train").rglob("*.png"))[7]
    path.write_bytes(path.read_bytes()[:40])
    return f"{path.name} is not a readable image"


def unreadable_first_image(folder: Path) -> str:
    write_image_folder(folder, 40, 10)
    path = min((folder / "train").rglob("*.png"))
    path.write_bytes(b"not an image")
    return f"{path.name} is not a readable image"


BAD_DATA = [
    empty_folder,
    no_images,
    no_pictures_in_classes,
    one_class_table,
    one_class_folder,
    unreadable_image,
    unreadable_first_image,
]


@pytest.mark.parametrize("make", BAD_DATA, ids=lambda make: make.__name__)
def test_data(make: Callable[[Path], str], out: Path, tmp_path: Path) -> None:
    message = make(tmp_path / "data")
    refused(DDP, out, ["--data", str(tmp_path / "data")], message)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_unreadable_large_image(workers: str, tmp_path: Path) -> None:
    """Large images are decoded when their turn comes: then the file is named."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 60), ("validation", 4)):
        for i in range(count):
            path = tmp_path / "data" / split / ("cat", "dog")[2 * i // count] / f"{i:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 255, (80, 80, 3), dtype=np.uint8)).save(path)
    path = tmp_path / "data" / "train" / "dog" / "33.png"  # not one of those that are looked at before the start
    path.write_bytes(path.read_bytes()[:5000])
    where = ("--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--name", "run")
    epochs = ("--epochs", "1", "--global-batch-size", "6", "--workers", workers)
    result = run_where([Where()], *where, *epochs)
    assert result.codes == [2], str(result)
    assert result.outputs[0].count("error: ") == 1, str(result)
    assert result.outputs[0].count("33.png is not a readable image") == 1, str(result)
    assert "Traceback" not in result.outputs[0], str(result)


@pytest.mark.parametrize("network", ["refused", "silent"])
def test_hub_without_a_network(network: str, out: Path) -> None:
    """A machine without a way out: connections are turned down, or nothing ever answers."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        if network == "silent":
            nobody.listen(64)
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        place = Where(environ={"HTTPS_PROXY": proxy, "https_proxy": proxy, "NO_PROXY": "", "no_proxy": ""})
        result = run_where([place] * 2, "--data", "ylecun/mnist", "--out", str(out))
    assert_refused(result, "--data ylecun/mnist: no such folder, and not found on the hub")


# --- ranks ------------------------------------------------------------------------------------------------


def test_more_processes_than_gpus(out: Path) -> None:
    result = run_where([Where(gpus=2)] * 3, "--out", str(out))
    assert_refused(result, "3 processes were started", "2 GPUs, and", "NPROC_PER_NODE=2")


def test_dp_resnet_in_two_processes(out: Path) -> None:
    refused("dp_resnet", out, [], "needs 1 process, not 2", "recipes/ddp_resnet", "NPROC_PER_NODE=1", size=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--lr", "0.3"], "flag lr 0.3, rank 0 with 0.4"), (["--flip"], "flag flip True, rank 0 with False")],
)
def test_ranks_with_different_flags(flags: list[str], message: str, out: Path) -> None:
    result = runner.run_recipe(DDP, 3, "--out", str(out), "--global-batch-size", "12", rank_flags={2: flags})
    assert_refused(result, "rank 2 was started with", message)


def test_one_rank_with_an_unknown_flag(out: Path) -> None:
    """Only this rank can tell; rank 0 waits for it, until it gives up and says why."""
    result = runner.run_recipe(DDP, 2, "--out", str(out), rank_flags={1: ["--batchsize", "8"]})
    assert all(result.codes), str(result)
    assert "".join(result.outputs).count("--batchsize") == 1, str(result)


def test_ranks_with_different_data(out: Path, tmp_path: Path) -> None:
    """The same --data, and another folder behind it on the second machine."""
    for i, count in enumerate((40, 41)):
        write_parquet(tmp_path / f"machine{i}" / "data", count, 10)
    places = [Where(folder=str(tmp_path / f"machine{i}")) for i in range(2)]
    result = run_where(places, "--data", "./data", "--out", str(out))
    assert_refused(result, "rank 1 was started with data '", "the same flags, code, data and versions")


def test_ranks_with_different_pixels(out: Path, tmp_path: Path) -> None:
    """The same names, sizes and labels, as of a copy with other colours."""
    for i in range(2):
        for number, name in enumerate(("train/cat", "train/dog", "validation/cat", "validation/dog")):
            folder = tmp_path / f"machine{i}" / "data" / name
            folder.mkdir(parents=True)
            for shade in range(4):
                Image.new("RGB", (80, 80), (40 * shade, 50 * number, i)).save(folder / f"{shade}.bmp")
    places = [Where(folder=str(tmp_path / f"machine{i}")) for i in range(2)]
    result = run_where(places, "--data", "./data", "--global-batch-size", "8", "--out", str(out))
    assert_refused(result, "rank 1 was started with data '", "the same flags, code, data and versions")


def test_ranks_with_different_code(out: Path, tmp_path: Path) -> None:
    other = tmp_path / DDP / "train.py"
    other.parent.mkdir()
    other.write_text(runner.source(DDP) + "# of last week\n")
    paths = [runner.ROOT / "recipes" / DDP / "train.py", other]
    result = run_where([Where()] * 2, "--out", str(out), paths=paths)
    assert_refused(result, "rank 1 was started with code train.py")


def with_a_forgotten_layer(path: str, argv: list[str]) -> None:
    """Run a recipe whose model has a layer that its forward pass does not use."""
    real = resnet.make_resnet

    def make_resnet(*sizes: Any) -> torch.nn.Module:
        model = real(*sizes)
        model.forgotten = torch.nn.Linear(1, 1)
        return model

    resnet.make_resnet = make_resnet
    runner.run_path(path, argv)


def test_unused_parameter(tmp_path: Path, small_digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP would wait for its gradient: the second step dies, and says which one it is."""
    monkeypatch.setattr(runner, "GRACE_S", runner.PATIENT_S)  # whichever rank dies first, rank 0 is to say it
    where = ("--data", str(small_digits), "--out", str(tmp_path / "out"), "--name", "run")
    path = str(runner.ROOT / "recipes" / DDP / "train.py")
    result = runner.spawn(with_a_forgotten_layer, [(path, [path, *where, *TWO_STEPS])] * 2)
    assert all(result.codes), str(result)
    assert "forgotten.weight" in result.outputs[0], str(result)
    assert list(runner.records(tmp_path / "out" / "run", "train/loss")) == [1]


# --- folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", MAINS)
@pytest.mark.parametrize("parent", ["file", "proc"])
def test_out_not_writable(recipe: str, parent: str, tmp_path: Path) -> None:
    """Root may write anywhere but below a file, and in /proc."""
    (tmp_path / "file").write_text("a file")
    path = tmp_path / "file" / "runs" if parent == "file" else Path("/proc/runs")
    refused(recipe, path, [], f"--out {path}", "cannot be written to")
    assert (tmp_path / "file").read_text() == "a file"


def test_config_with_unknown_flags(out: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"args": {"epochs": 1, "tensor_parallel": 2}}))
    refused(DDP, out, ["--config", str(path)], f"--config {path}", "tensor_parallel")


@pytest.mark.parametrize("text", ["{", "[]", '{"args": 3}', '{"args": {"epochs": "many"}}'])
def test_config_that_is_none(text: str, out: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    refused(DDP, out, ["--config", str(path)], f"--config {path}")


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small_digits: Path) -> Path:
    """A run of two ranks that has saved after each of its two steps."""
    out = tmp_path_factory.mktemp("trained")
    where = ("--data", str(small_digits), "--out", str(out), "--name", "run")
    result = runner.run_recipe(DDP, 2, *where, *TWO_STEPS, "--save-every", "1")
    assert result.ok, str(result)
    return out / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run to damage; its files are links until `damage.overwrite` replaces one."""
    return shutil.copytree(trained, tmp_path / "out" / "run", copy_function=os.link)


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file below a folder: which one it is, its size and when it was last written."""
    facts = {path: path.stat() for path in sorted(folder.rglob("*"))}
    return {str(path): (fact.st_ino, fact.st_size, fact.st_mtime_ns) for path, fact in facts.items()}


def again(run: Path, data: Path, *flags: str, size: int = 1) -> runner.Result:
    where = ("--data", str(data), "--out", str(run.parent), "--name", run.name)
    return runner.run_recipe(DDP, size, *where, *TWO_STEPS, *flags)


def test_every_checkpoint_damaged(run: Path, small_digits: Path) -> None:
    faults = [flip_data(run / "checkpoints" / f"step_0000000{step}") for step in (1, 2)]
    before = listing(run)
    assert_refused(
        again(run, small_digits, size=2), "every checkpoint is damaged", *faults, "step_00000001", "step_00000002"
    )
    assert listing(run) == before


def test_resume_from_a_damaged_checkpoint(run: Path, out: Path, small_digits: Path) -> None:
    """One that was named by its path: no other is taken in its place."""
    fault = flip_data(run / "checkpoints" / "step_00000002")
    before = listing(run)
    flags = ("--name", "new", "--resume", str(run / "checkpoints" / "step_00000002"))
    assert_refused(again(run, small_digits, *flags), fault)
    assert listing(run) == before
    assert not (run.parent / "new").exists()
    shutil.move(run.parent, run.parent.with_name("old"))


def test_damaged_checkpoint_takes_no_place(run: Path, small_digits: Path) -> None:
    """With --keep 1 the one that stays is the whole one that was just written, not a newer damaged one."""
    (run / "checkpoints" / "step_00000002").rename(run / "checkpoints" / "step_00000009")
    flip_data(run / "checkpoints" / "step_00000009")
    flags = ("--max-steps", "9", "--stop-after", "2", "--keep", "1", "--save-every", "1")
    result = again(run, small_digits, *flags)
    assert result.ok, str(result)
    assert (run / "checkpoints" / "step_00000002" / "MANIFEST.json").exists(), sorted((run / "checkpoints").iterdir())
    assert (run / "checkpoints" / "step_00000009").exists(), "what is damaged is for people to delete"


@pytest.mark.parametrize("how", ["--resume", "--name"])
def test_checkpoint_of_another_model(how: str, run: Path, small_digits: Path) -> None:
    """The first names that differ are listed, and the old run is as it was."""
    before = listing(run.parent)
    flags = ("--name", "new", "--resume", str(run)) if how == "--resume" else ()
    result = again(run, small_digits, "--model", "resnet18", *flags, size=2)
    everything = "".join(result.outputs)
    messages = ("layer1.1.conv1.weight: only in the model", "more", "changed: --model is resnet18, was resnet6\n")
    assert_refused(result, "does not fit this model", *messages)
    assert everything.count("layer1.1.conv1.weight: only in the model") == 1, str(result)
    assert listing(run.parent) == before


@pytest.fixture(scope="module")
def trained_gpt(tmp_path_factory: pytest.TempPathFactory, small_text: Path) -> Path:
    """A run that has saved after its second step."""
    out = tmp_path_factory.mktemp("trained")
    where = ("--data", str(small_text), "--out", str(out), "--name", "run")
    result = runner.run_recipe(
        "ddp_gpt", 1, *where, "--max-steps", "2", "--global-batch-size", "8", *runner.small("ddp_gpt")
    )
    assert result.ok, str(result)
    return out / "run"


def test_checkpoint_of_another_optimizer(trained_gpt: Path, small_text: Path) -> None:
    """The flag is named beside the names of its state."""
    before = listing(trained_gpt)
    flags = ("--data", str(small_text), "--out", str(trained_gpt.parent), "--name", trained_gpt.name)
    steps = ("--max-steps", "2", "--global-batch-size", "8", *runner.small("ddp_gpt"))
    result = runner.run_recipe("ddp_gpt", 2, *flags, *steps, "--optimizer", "muon")
    fault = "blocks.0.attention.key.weight.momentum_buffer: only in the model"
    assert_refused(result, "does not fit this model or optimizer", fault, "changed: --optimizer is muon, was adamw\n")
    assert listing(trained_gpt) == before


OTHER_SIZES = {  # and the first differences
    "wider": (
        ["--mlp-width", "48"],
        ["blocks.0.mlp.gate.weight: (44, 40) in the checkpoint, (48, 40) in the model", "and 4 more"],
    ),
    "deeper": (["--num-layers", "5"], ["blocks.3.attention_norm.weight: only in the model", "and 13 more"]),
    "shallower": (["--num-layers", "2"], ["blocks.2.attention_norm.weight: only in the checkpoint", "and 4 more"]),
    "untied": (["--tied"], ["head.weight: only in the checkpoint"]),
}


@pytest.mark.parametrize("recipe", ["ddp_gpt", "accelerate_gpt"])
@pytest.mark.parametrize("case", OTHER_SIZES)
def test_checkpoint_of_another_size(case: str, recipe: str, trained_gpt: Path, out: Path, small_text: Path) -> None:
    """Names and shapes are compared before this model has weights."""
    more, messages = OTHER_SIZES[case]
    before = listing(trained_gpt)
    flags = ["--data", str(small_text), "--resume", str(trained_gpt), *runner.small(recipe), *more]
    start = f"checkpoint {trained_gpt}"
    refused_before_weights(recipe, out, flags, start, "does not fit this model", *messages)
    assert listing(trained_gpt) == before
