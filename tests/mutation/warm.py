"""Runs of pytest without its start: this process has imported what is slow, and forks for each run.

`python -m tests.mutation.warm` reads a job from each line of its input, and answers in a line. A fork imports what is
of the repository itself, and so sees what has changed in its files; so do the ranks, whose fork server is a fork as
well.
"""

import contextlib
import importlib
import json
import multiprocessing.util
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

# What tests/harness/preload.py and the tests import, without what is of the repository.
SLOW = (
    *("accelerate", "datasets", "gymnasium", "numpy", "PIL.Image", "pyarrow.parquet", "pytest", "safetensors.torch"),
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor.debug", "torch.utils.flop_counter"),
    *("torch.utils.tensorboard", "torchvision.transforms.v2.functional", "tqdm", "tyro", "xxhash"),
)
OURS = ("common", "recipes", "tools", "tests.harness", "tests.conftest")


class Failure:
    """A plugin of pytest: keeps the first report of a failure."""

    def __init__(self) -> None:
        self.test = ""
        self.text = ""

    def pytest_sessionstart(self) -> None:
        """Without the figures of the house, which take longer than most tests."""
        importlib.import_module("tests.house").report = str  # type: ignore[attr-defined]

    def pytest_collectreport(self, report: Any) -> None:
        """Of a file that cannot be imported."""
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of a test."""
        if report.failed and not self.test:
            self.test = report.nodeid
            self.text = report.longreprtext


def main() -> None:
    """Import, and serve jobs until the input ends."""
    for name in SLOW:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.startswith(OURS)], "a fork must see what has changed"
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
    os._exit(0)  # to take all modules down takes seconds


def run(args: list[str], folder: str, limit_s: float) -> dict[str, Any]:
    """Run pytest in a fork.

    Args:
        args: of pytest.
        folder: for what it prints and its temporary files.
        limit_s: it is ended after so many seconds.

    Returns:
        Its exit code, -1 if it was ended; the seconds; the first test that failed and the end of its report.
    """
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        _test(args, Path(folder))
    handle = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([handle], [], [], limit_s)
    finally:
        os.close(handle)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and ranks that it has not ended
    _, status = os.waitpid(pid, 0)
    found = {"code": os.waitstatus_to_exitcode(status) if ended else -1, "seconds": time.monotonic() - began}
    report = Path(folder, "report.json")
    return {"test": "", "text": ""} | (json.loads(report.read_text()) if report.exists() else {}) | found


def _test(args: list[str], folder: Path) -> NoReturn:
    """Run pytest in this process, and end it."""
    code = 3  # of pytest, for its own errors
    try:
        os.setpgid(0, 0)
        with (folder / "output.txt").open("wb", buffering=0) as file:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        import pytest

        from tests.harness import forks

        multiprocessing.util.spawnv_passfds = forks.spawn_by_fork  # type: ignore[assignment]
        failure = Failure()
        code = int(pytest.main([*args, f"--basetemp={folder / 'temporary'}"], plugins=[failure]))
        _check_places()
        report = {"test": failure.test, "text": failure.text[-20_000:]}
        (folder / "report.json").write_text(json.dumps(report))
    except BaseException:
        traceback.print_exc()
        code = 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _check_places() -> None:
    """What is tested lies in this folder: `pip install -e` puts the repository itself on the path as well."""
    for name in OURS:
        file = getattr(sys.modules.get(name), "__file__", None)
        assert not file or Path(file).is_relative_to(Path.cwd()), file


if __name__ == "__main__":
    main()
