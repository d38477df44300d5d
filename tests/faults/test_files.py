"""Rows of the files of others and of a run, each odd in each way, over three recipes: a sentence, or the training."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from common.workloads import gpt, gpt_names
from safetensors.torch import save_file

from tests.conftest import write_image_folder, write_parquet, write_text
from tests.harness import runner
from tests.harness.fault_case import BATCH, FaultCase

RECIPES = ("ddp_resnet", "fsdp_gpt", "pipeline_gpt")
SAMPLES = 3 * BATCH
SHAPE = gpt.Shape(256, 4, 4, 8, mlp_width=12)  # of fault_case.SMALLER
FLAGS = ("--stop-after", "1", "--eval-every", "1000")


def picture(folder: Path) -> tuple[Path, list[str]]:
    write_image_folder(folder, SAMPLES, BATCH)
    return sorted(folder.glob("train/*/*.png"))[0], ["--data", str(folder)]


def writes_text(folder: Path) -> tuple[Path, list[str]]:
    write_text(folder, SAMPLES, BATCH)
    return folder / "train.txt", ["--data", str(folder)]


def table(folder: Path) -> tuple[Path, list[str]]:
    write_parquet(folder, SAMPLES, BATCH)
    return folder / "train.parquet", ["--data", str(folder)]


def table_of_text(folder: Path) -> tuple[Path, list[str]]:
    import datasets

    text = write_text(folder / "text", SAMPLES, BATCH)
    for split in ("train", "validation"):
        rows = datasets.Dataset.from_dict({"text": (text / f"{split}.txt").read_text().splitlines()})
        rows.to_parquet(folder / f"{split}.parquet")
    shutil.rmtree(text)
    return folder / "train.parquet", ["--data", str(folder)]


def token_file(folder: Path) -> tuple[Path, list[str]]:
    folder.mkdir()
    for name, number in (("train", SAMPLES), ("val", BATCH)):
        header = torch.zeros(256, dtype=torch.int32)
        header[:3] = torch.tensor([20240520, 1, 16 * number + 1])
        tokens = (torch.arange(16 * number + 1) % 200).to(torch.int16)
        (folder / f"{name}.bin").write_bytes(header.numpy().tobytes() + tokens.numpy().tobytes())
    return folder / "train.bin", ["--data", str(folder)]


def weights(folder: Path) -> tuple[Path, list[str]]:
    folder.mkdir()
    path = folder / "w.safetensors"
    save_file({"0.weight": torch.zeros(8, 1, 3, 3), "norm.weight": torch.ones(8)}, path)  # of either small model
    return path, ["--init", str(path)]


def tokenizer(folder: Path) -> tuple[Path, list[str]]:
    write_text(folder, SAMPLES, BATCH)
    path = folder.with_name("tokenizer.json")
    vocab = {chr(i): i for i in range(256)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model}))
    return path, ["--data", str(folder), "--tokenizer", str(path)]


def configuration(folder: Path) -> tuple[Path, list[str]]:
    folder.mkdir()
    tensors = {"model.norm.weight": torch.ones(8)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(gpt_names.to_config(SHAPE)))
    return folder / "config.json", ["--init", str(folder)]


FILES: dict[str, dict[str, Callable[[Path], tuple[Path, list[str]]]]] = {  # by workload
    "a picture": {"resnet": picture},
    "a text": {"gpt": writes_text},
    "a table": {"resnet": table, "gpt": table_of_text},
    "a token file": {"gpt": token_file},
    "weights": {"resnet": weights, "gpt": weights},
    "a tokenizer": {"gpt": tokenizer},
    "a configuration": {"gpt": configuration},
}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def swap(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def swapped(path: Path) -> None:
        path.unlink()
        make(path)

    return swapped


def foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("not run: only root can give a file to another user")
    os.chown(path, 65534, 65534)


def lie(path: Path) -> None:
    """The first bytes say something else."""
    content = bytearray(path.read_bytes())
    content[:12] = b"\xff" * 12
    if path.name == "config.json":
        content = bytearray(path.read_bytes().replace(b'"num_hidden_layers": 4', b'"num_hidden_layers": -4'))
    path.write_bytes(content)


WAYS: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "a device": swap(lambda path: path.symlink_to("/dev/zero")),
    "a pipe": swap(os.mkfifo),
    "a directory": swap(lambda path: path.mkdir()),
    "a link to itself": swap(lambda path: path.symlink_to(path.name)),
    "another user's": foreign,
    "an EPS under its name": lambda path: path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%EOF\n"),
    "with a lie in its header": lie,
}
# What is trained on all the same: half a text, one whose content is no format's, and the other pictures, with a note.
LEFT_OUT = {("a picture", "a directory")}
TRAINS = {*LEFT_OUT, ("a text", "truncated"), ("a text", "an EPS under its name")}


def readers(row: Mapping[str, Any]) -> list[str]:
    """Those of RECIPES that read such a file."""
    return [recipe for recipe in RECIPES if runner.workload(recipe) in FILES[row["what"]]]


@pytest.mark.fault("refused: {what}, {way}", recipes=readers)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", FILES)
def test_odd_file(what: str, way: str, case: FaultCase) -> None:
    """A sentence that names the file or its folder, without a traceback, before any step; or the same training."""
    path, flags = FILES[what][runner.workload(case.recipe)](case.folder / "data")
    WAYS[way](path)
    result = case.start(*FLAGS, *flags)
    assert "Traceback" not in str(result), str(result)
    assert "\x1b" not in str(result), str(result)
    if result.ok:
        assert way == "another user's" or (what, way) in TRAINS, str(result)
        case.record_message(result.outputs[0], "note: .* hold no image" if (what, way) in LEFT_OUT else "reached ")
    else:
        assert way != "another user's", str(result)
        case.check_refused(result, r"error: .*(data|tokenizer|w\.safetensors)")
        assert not case.steps_done()


OF_A_RUN = ("metrics.jsonl", "config.json", "train.py", "lock", "logs/rank_00001.log", "checkpoints/best")


@pytest.mark.fault("refused: {file} of a run, {way}", recipes=lambda _: RECIPES)
@pytest.mark.parametrize("way", ["a device", "a pipe", "a directory", "a link to itself"])
@pytest.mark.parametrize("file", OF_A_RUN)
def test_odd_file_of_a_run(file: str, way: str, case: FaultCase) -> None:
    """The run continues exactly, or a sentence names the file; and nobody waits for it."""
    case.copy_reference(until=2)
    path = case.run_dir / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    WAYS[way](path)
    result = case.start()
    assert "Traceback" not in str(result), str(result)
    if result.ok:
        case.check_same_as_reference()
        case.record_message(result.outputs[0], f"{path.name}|resuming from step 2")
    else:
        case.check_refused(result, rf"error: .*{re.escape(path.name)}")
