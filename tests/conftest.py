"""Fixtures, and the line budgets that each test run prints."""

import ast
import io
import os
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common.workloads import images, text

from tests.harness import runner

torch.set_num_threads(1)  # the ranks need the other cores, and threads that wait for each other are slow beside them


def each_recipe(recipes: Sequence[str] = runner.RECIPES) -> list[Any]:
    """Parameters for what a plain `pytest` runs for one recipe of each workload, and CI for all of them."""
    return [
        pytest.param(recipe, marks=() if runner.stands_for_workload(recipe) else pytest.mark.all_recipes)
        for recipe in recipes
    ]


def write_parquet(folder: Path, train: int, validation: int) -> Path:
    """Part of the digits as parquet files that name their columns in their own way."""
    import datasets
    from PIL import Image

    features = datasets.Features(
        {"digit": datasets.ClassLabel(names=[str(i) for i in range(10)]), "picture": datasets.Image()}
    )
    splits = images.load("digits", run_seed=0, flip=False)
    for name, split, count in zip(("train", "validation"), splits, (train, validation), strict=True):
        rows = {
            "digit": split.labels[:count].tolist(),
            "picture": [Image.fromarray(pixels[0].numpy()) for pixels in split.pixels[:count]],
        }
        folder.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{name}.parquet")
    return folder


def write_image_folder(folder: Path, train: int, validation: int) -> Path:
    """Part of the digits as PNG files, one subfolder per class."""
    from PIL import Image

    splits = images.load("digits", run_seed=0, flip=False)
    for name, split, count in zip(("train", "validation"), splits, (train, validation), strict=True):
        for i, (label, pixels) in enumerate(zip(split.labels[:count], split.pixels[:count], strict=True)):
            path = folder / name / str(int(label)) / f"{i:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[0].numpy()).save(path)
    return folder


def write_text(folder: Path, train: int, validation: int, seq_len: int = 16) -> Path:
    """Part of the standard library's text, as many sequences of bytes, in one file for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, split, count in zip(
        ("train", "validation"), text.load("stdlib", seq_len), (train, validation), strict=True
    ):
        # The end of the file is read as a line's end, whose byte is the last target.
        content = bytes(split.tokens[: count * seq_len].astype("uint8"))
        (folder / f"{name}.txt").write_bytes(
            content.replace(b"\r", b" ").decode("ascii", "replace").replace("\ufffd", "?").encode()
        )
    return folder


@pytest.fixture(scope="session")
def small_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """469 training and 30 validation images: a size that divides by nothing."""
    return write_parquet(tmp_path_factory.mktemp("data") / "small", 469, 30)


@pytest.fixture(scope="session")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """469 training and 30 validation sequences of 16 bytes, as a folder of text."""
    return write_text(tmp_path_factory.mktemp("text") / "small", 469, 30)


@pytest.fixture(scope="session")
def small_data(small_digits: Path, small_text: Path) -> dict[str, Path]:
    """A small set for each workload."""
    return {"resnet": small_digits, "gpt": small_text}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A gloo group of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def docstrings(text: str) -> set[int]:
    """Numbers of the lines of all docstrings."""
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    bodies = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return {line for body in bodies for line in range(body.lineno, (body.end_lineno or 0) + 1)}


def code_lines(text: str) -> int:
    """Lines that hold code: no docstrings, comments or blank lines."""
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in silent]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings(text))


def pytest_configure(config: pytest.Config) -> None:
    """Keep the data sets' cache of this run apart; before the fork server starts, which hands it on to the ranks."""
    cache = tempfile.TemporaryDirectory(prefix="brigade-hf-")
    os.environ["HF_HOME"] = cache.name
    config.add_cleanup(cache.cleanup)


def pytest_sessionstart() -> None:
    """Start the fork server, which has much to import, beside the collection of the tests."""
    forkserver.ensure_running()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the budgets: 200 lines a module, 300 a recipe, 2,000 of code for common/ without its workloads."""
    texts = {path: path.read_text() for path in runner.ROOT.glob("common/**/*.py")}
    common = {path: len(text.splitlines()) for path, text in texts.items()}
    longest = max(common, key=lambda path: common[path])
    recipes = ", ".join(f"{name} {len(runner.source(name).splitlines())}" for name in runner.RECIPES)
    code = sum(code_lines(text) for path, text in texts.items() if path.parent.name == "common")
    workloads = sum(map(code_lines, texts.values())) - code
    terminalreporter.write_line(
        f"lines: common/ {code} of 2000 of code, its workloads {workloads}; "
        f"{longest.name} {common[longest]} of 200; {recipes} of 300"
    )
