"""`python -m tools.evaluate`: each recipe's last evaluation comes out again, in one process without its strategy."""

import dataclasses
import json
import re
import runpy
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from common import UserError
from common.workloads import images
from pyarrow import parquet
from tools.evaluate import evaluation
from tools.evaluate.flags import Args

from tests.conftest import write_image_folder, write_text
from tests.harness import runner
from tests.harness.damage import flip_bit

COMMON = ("--dtype", "float64", "--max-steps", "2", "--eval-every", "1", "--save-every", "1", "--name", "run")
BATCH = ("--global-batch-size", "8", "--lr", "0.01", "--keep-best", "loss")
IMAGES = 11  # in the validation split: no multiple of a batch


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sets")
    images = write_image_folder(folder / "images", 24, IMAGES)
    shutil.copytree(images / "train", images / "test")
    return {"resnet": images, "gpt": write_text(folder / "text", 24, IMAGES)}


def evaluate(*commands: list[str]) -> None:
    """Run each as `python -m tools.evaluate` would; an error is printed and the next one follows."""
    for argv in commands:
        sys.argv = ["tools.evaluate", *argv]
        try:
            runpy.run_module("tools.evaluate", run_name="__main__", alter_sys=True)
        except SystemExit as error:
            print(error)


def said(*commands: list[str]) -> str:
    result = runner.spawn(evaluate, [commands])
    assert result.ok, str(result)
    assert "Traceback" not in result.outputs[0]
    return result.outputs[0]


def values(text: str) -> dict[str, float]:
    """The metrics among the lines of an evaluation."""
    return {tag: float(value) for tag, value in re.findall(r"^((?:val|test)/\w+) (\S+)$", text, re.MULTILINE)}


def run_with_neighbours(path: str, argv: list[str]) -> None:
    """Run a train.py as `python train.py` does, which finds the modules beside it."""
    sys.path.insert(0, str(Path(path).parent))
    runner.run_unmeasured(path, argv)


def train(recipe: str | Path, out: Path, data: Path) -> Path:
    name = recipe if isinstance(recipe, str) else recipe.parent.name
    size = min(2, runner.world_sizes(name)[-1]) if isinstance(recipe, str) else 1
    flags = ("--data", str(data), "--out", str(out), *runner.SMALL[runner.workload(name)], *COMMON, *BATCH)
    result = runner.run_recipe(recipe, size, *flags, target=run_with_neighbours)
    assert result.ok, str(result)
    return out / "run"


@pytest.mark.parametrize("recipe", runner.SUPERVISED)
def test_the_last_evaluation_comes_out_again(recipe: str, sets: dict[str, Path], tmp_path: Path) -> None:
    run = train(recipe, tmp_path, sets[runner.workload(recipe)])
    rows = tmp_path / "rows.parquet"
    logged = {
        tag: value
        for line in (run / "metrics.jsonl").read_text().splitlines()
        for tag, value in json.loads(line).items()
        if tag.startswith("val/")
    }
    text = said([str(run), "--out", str(rows)])
    assert values(text) == pytest.approx(logged, rel=1e-9)
    assert "the run's own" not in text
    table = parquet.read_table(rows).to_pydict()
    assert sum(table["loss"]) / len(table["loss"]) == pytest.approx(logged["val/loss"], rel=1e-9)
    assert table["index"] == list(range(len(table["loss"])))
    if "top1" in table:
        right = [one == other for one, other in zip(table["label"], table["prediction"], strict=True)]
        assert right == table["top1"]
        assert all(0.1 <= probability <= 1 for probability in table["probability"])
    else:
        assert "label" not in table


@pytest.fixture(scope="module")
def own(sets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copied and edited recipe outside recipes/ with a module beside it, and its run."""
    folder = tmp_path_factory.mktemp("own") / "mine_resnet"
    folder.mkdir()
    (folder / "half.py").write_text("FACTOR = 0.5\n")
    source = runner.source("ddp_resnet").replace("import torch\n", "import half\nimport torch\n", 1)
    edited = source.replace('"loss": F.cross', '"loss": half.FACTOR * F.cross')
    assert edited.count("half.FACTOR") == 1
    path = folder / "train.py"
    path.write_text(edited)
    return path, train(path, folder.parent, sets["resnet"])


def test_own_recipe(own: tuple[Path, Path], sets: dict[str, Path]) -> None:
    path, run = own
    logged = runner.records(run, "val/loss")
    best = min(logged, key=logged.get)
    given = [str(run), "--recipe", str(path)]
    flags = [[], ["--checkpoint", "1"], ["--checkpoint", "best"]]
    for step, flag in zip((2, 1, best), flags, strict=True):
        text = said([*given, *flag])
        assert f"step {step} of {run}" in text
        assert values(text)["val/loss"] == pytest.approx(logged[step], rel=1e-9)
    text = said([str(run)], [*given, "--split", "test"])
    assert "recipes/mine_resnet/train.py: name the train.py that trained this run with --recipe" in text
    assert "24 test samples on cpu, float64" in text
    assert "test/loss" in text


def test_another_value_than_the_run_had_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Only of the same step, and where it is more than rounding."""
    records = [{"step": 9, "val/loss": 7.0}, {"step": 10, "train/loss": 7.0}, {"step": 10, "val/loss": 2.6404}]
    evaluation.compare({"loss": 2.6405, "top1": 0.5}, records, 10, 2)
    evaluation.compare({"loss": 1.9947}, records, 11, 2)
    assert capsys.readouterr().out == ""
    evaluation.compare({"loss": 1.9947}, records, 10, 2)
    said = "note: the run's own val/loss at step 10 was 2.6404: it evaluated on 2 ranks. A loss over pairs"
    assert capsys.readouterr().out.startswith(said)


def test_bad_input(own: tuple[Path, Path], sets: dict[str, Path], tmp_path: Path) -> None:
    path, run = own
    given = ["--recipe", str(path)]
    empty, damaged, other, strange = (tmp_path / name for name in ("empty", "damaged", "other", "strange"))
    shutil.copytree(run, empty, ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(run, damaged)
    for file in damaged.glob("checkpoints/step_*/*.safetensors"):
        flip_bit(file, 8000)
    shutil.copytree(run, strange)
    config = json.loads((run / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"recipe": "../../elsewhere"}))
    write_image_folder(other, 24, IMAGES)
    shutil.rmtree(other / "train" / "9")
    shutil.rmtree(other / "validation" / "9")
    text = said(
        [str(empty), *given],
        [str(damaged), *given],
        [str(strange)],
        [str(tmp_path / "none")],
        [str(run), *given, "--checkpoint", "7"],
        [str(run), "--recipe", str(runner.ROOT / "recipes" / "syncbn_ppo" / "train.py")],
        [str(run), *given, "--out", str(tmp_path / "none" / "rows.parquet")],
        [str(run), *given, "--data", str(tmp_path / "none")],
    )
    for message in (
        f"{empty}: no checkpoint there",
        f"{damaged}: every checkpoint is damaged",
        f"{strange}/config.json names the recipe '../../elsewhere', which is not a folder of recipes/",
        f"{tmp_path}/none is not a run's folder",
        f'--checkpoint 7: use "best" or one of the steps that {run} has: 1, 2',
        "train.py has no make_data, which an evaluation calls",
        f"there is no folder {tmp_path}/none",
        f"--data {tmp_path}/none: there is no such folder",
    ):
        assert message in text, text
    assert text.count("error: ") == 8
    text = said([str(run), *given, "--data", str(other)])
    assert "note: the run was trained on data " in text
    assert "does not fit this model" in text
    assert "fc.weight: (10, 128) in the checkpoint, (9, 128) in the model" in text
    text = said([str(run), *given, "--data", str(other), "--split", "test"])
    assert f"error: --data {other} has no split named test, only train, validation" in text
    text = said([str(run), *given, "--data", "digits", "--split", "test"])
    assert "error: --data digits has no split named test, only train, validation" in text


@dataclasses.dataclass(frozen=True)
class Flags:
    data: str = "digits"


@pytest.mark.parametrize(
    ("make_data", "message"),
    [
        (lambda _: images.load("digits", 0, False), "--split test: make_data of mine.py ignores the split"),
        (lambda flags: images.load(flags.data, 0, False), "--data digits has no split named test, only train, val"),
    ],
)
def test_split_that_make_data_ignores(make_data: Any, message: str) -> None:
    """Otherwise the validation split would be evaluated under another name."""
    recipe = types.SimpleNamespace(make_data=make_data, __file__="mine.py")
    with pytest.raises(UserError, match=message):
        evaluation.read_data(Args("run", split="test"), recipe, Flags())
