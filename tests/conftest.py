"""Fixtures, the tests that a run takes, and what a failing one prints.

torch and all that imports it is imported where it is used: the process that only deals out tests to workers, before
which none of these begins, needs none of it.
"""

import atexit
import contextlib
import gc
import itertools
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests import rest
from tests.harness import forks
from tests.harness.once import Once


def each_recipe(recipes: Sequence[str] = ()) -> list[Any]:
    """Parameters for what a plain `pytest` runs for one recipe of each workload, and CI for all, or all of these."""
    from tests.harness import runner

    return [
        pytest.param(recipe, marks=() if runner.stands_for_workload(recipe) else pytest.mark.rest)
        for recipe in recipes or runner.RECIPES
    ]


def write_parquet(folder: Path, train: int, validation: int) -> Path:
    """Part of the digits as parquet files that name their columns in their own way."""
    import datasets
    from common.workloads import images
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
    from common.workloads import images
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
    from common.workloads import text

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
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """What is made once for the workers of pytest-xdist, whose folders lie beside each other."""
    base = tmp_path_factory.getbasetemp()
    return Once((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once")


@pytest.fixture(scope="session")
def small_digits(once: Once) -> Path:
    """469 training and 30 validation images: a size that divides by nothing."""
    return once.folder(lambda folder: write_parquet(folder, 469, 30), "small_digits")


@pytest.fixture(scope="session")
def small_text(once: Once) -> Path:
    """469 training and 30 validation sequences of 16 bytes, as a folder of text."""
    return once.folder(lambda folder: write_text(folder, 469, 30), "small_text")


@pytest.fixture(scope="session")
def small_data(small_digits: Path, small_text: Path) -> dict[str, Path]:
    """A small set for each workload."""
    return {"resnet": small_digits, "gpt": small_text}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A gloo group of one, in this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpus", action="store_true", help="let the tests see the GPUs; run those that need one")
    parser.addoption("--begin", default=0, type=int, metavar="N", help="the first test, modulo their number")
    parser.addoption("--part", default="1/1", metavar="K/N", help="of each N tests the K-th, from the first on")
    parser.addoption("--until", default=math.inf, type=float, metavar="TIME", help="skip what begins later (Unix time)")


def part(config: pytest.Config) -> tuple[int, int]:
    """The first test that --part takes, and from each one to the next."""
    asked = config.getoption("part")
    numbers = re.fullmatch(r"(\d+)/(\d+)", asked)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise pytest.UsageError(f"--part {asked} is not K/N, such as 2/8, with K from 1 to N")
    return int(numbers[1]) - 1, int(numbers[2])


@pytest.hookimpl(wrapper=True)  # around the others, which look at `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what tests/rest.txt lists; without --gpus, skip what needs one; take --part; begin where --begin says."""
    listed = rest.patterns()
    if config.args == config.getini("testpaths") and (stale := rest.unmatched(listed, [one.nodeid for one in items])):
        raise pytest.UsageError(f"{rest.FILE}: no test begins with {', '.join(stale)}")
    is_listed = rest.joined(listed).match
    for item in items:
        if is_listed(item.nodeid):
            item.add_marker(pytest.mark.rest)
        if item.get_closest_marker("gpu") and not config.getoption("gpus"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: pytest --gpus"))
    yield
    first, step = part(config)
    config.hook.pytest_deselected(items=[one for i, one in enumerate(items) if i % step != first])
    items[:] = items[first::step]
    begin = config.getoption("begin") % max(1, len(items))
    items[:] = items[begin:] + items[:begin]
    if hasattr(config, "workerinput") and config.getoption("until") == math.inf:
        items[:] = dealt(items, config.workerinput["workercount"])


def dealt(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Trainings first on each worker, so that none of them is what all others wait for in the end.

    Each worker begins with its share of the list, all of one length, and who has done so takes from the ends of others.
    A file that trains has imported `runner`; its tests stay together, as they share what its fixtures make.
    """
    trainings: dict[Any, list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in items:
        module = item.getparent(pytest.Module)
        (trainings.setdefault(module, []) if hasattr(module.obj, "runner") else others).append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for tests in trainings.values():
        min(shares, key=len).extend(tests)
    short = iter(others)
    for share in shares:
        share.extend(itertools.islice(short, max(0, len(items) // workers - len(share))))
    return [*itertools.chain(*shares), *short]


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, and keep the data sets' cache of this run apart.

    Both hold for pytest's workers and for ranks too: every process that one of these starts inherits the environment.
    The marks are those of the fault matrix, tests/faults, whose rows tests/store has as well.
    """
    part(config)  # if it is wrong, no worker begins
    config.addinivalue_line("markers", "fault(name, core=False, least=1, recipes=None): a row; `least` ranks it needs")
    config.addinivalue_line("markers", "waits(fault, flag='', meanwhile=None): begun beside others, as it mostly waits")
    config.addinivalue_line("markers", "whole: a row that only the whole matrix has")
    if not config.getoption("gpus"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(config, "workerinput"):
        return
    cache = tempfile.TemporaryDirectory(prefix="brigade-hf-")
    os.environ["HF_HOME"] = cache.name
    config.add_cleanup(cache.cleanup)


def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Let the workers, and the fork server of each, begin as forks of one process that has imported."""
    ends = contextlib.ExitStack()
    config.add_cleanup(ends.close)
    try:
        python = ends.enter_context(forks.server(config.rootpath))
    except ImportError as error:
        raise pytest.UsageError(str(error)) from None
    for spec in specs:
        spec.python = python


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the fork server, if it does not run yet, beside the collection of the tests: it has much to import."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses"):  # it runs the tests
        gc.disable()  # imports only add: the collector takes a quarter of their time
        # A loader's worker is a fork of this process. Were it to collect a process group that a test has left here, it
        # would wait for ever for the group's threads, which a fork has not.
        os.register_at_fork(after_in_child=gc.freeze)
        import torch

        from tests.harness import runner  # noqa: F401 (it says what the server imports)

        forkserver.ensure_running()
        # The ranks need the other cores, and threads that wait for each other are slow beside them.
        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Let the collector look at what the tests make only."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Collect what the tests have left, whose warnings are errors; pytest does so ten times, with all that stays."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries take for leaked what they find there at the very end


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """From here on, trainings are this test's; none begins when the time is over."""
    if time.time() > item.config.getoption("until"):
        pytest.skip("NOT RUN: the time is over")
    from tests.harness import runner

    runner.results.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Print the trainings of a test that fails: how to repeat them, and what the ranks of those that failed said."""
    report = yield
    from tests.harness import again, runner

    if report.failed and runner.results:
        report.sections.append(("trainings of this test", again.report(runner.results, item.nodeid)))
    return report
