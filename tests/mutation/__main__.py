"""Plant faults, one at a time, and see whether the tests find them: `uv run python -m tests.mutation`.

Each fault is a wrong line in what computes, sends or keeps numbers: sections 3 and 4 of the recipes, common/train,
common/state and what these stand on, and the planner's memory. It is put into a copy of the repository, never into the
repository itself, and the tests that are named beside it run there. A fault is found if one of them fails. A fault that
no test finds shows what the tests do not look at: write a test for it.

First, all of these tests run without a fault: they have to pass.
"""

import argparse
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation import floors, recipes, store, tools, track
from tests.mutation.fault import Fault

ROOT = Path(__file__).parents[2]
FAULTS = (*recipes.FAULTS, *floors.FAULTS, *store.FAULTS, *tools.FAULTS, *track.FAULTS)
LIMIT_S = 240.0  # for the tests of a fault: runner.HANG_S and the limit of pytest are longer
CHECK_LIMIT_S = 900.0  # for all tests of a file
PYTEST = (
    *("-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--no-summary"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of plugins that are imported already
)
# A fault that Python does not run would be found by any test.
NOT_RUN = re.compile(r"\b(?:NameError|SyntaxError|IndentationError|ImportError|ModuleNotFoundError)\b")


@dataclass(frozen=True)
class Result:
    """What became of a fault: found, MISSED or broken; why, and after how many seconds."""

    verdict: str
    why: str
    seconds: float


@dataclass
class Workplace:
    """A copy of the repository, and a process that runs tests in it."""

    root: Path
    runs: int = 0
    process: Any = field(init=False)

    def __post_init__(self) -> None:
        """Copy what git knows or does not ignore, as it is now."""
        listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (self.root / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / "copy" / name)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.warm"],
            cwd=self.root / "copy",
            env=os.environ | {"PYTHONPATH": str(self.root / "copy"), "HF_HOME": str(self.root / "hf")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], mark: str, limit_s: float) -> dict[str, Any]:
        """Run tests in the copy; see `warm.run`."""
        while self.runs == 0 and self.process.stdout.readline() != '"ready"\n':
            assert self.process.poll() is None, "tests.mutation.warm has ended"
        self.runs += 1
        folder = self.root / str(self.runs)
        folder.mkdir()
        args = [*PYTEST, "-m", mark, *tests]
        job = {"args": args, "folder": str(folder), "limit_s": limit_s}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        found["output"] = (folder / "output.txt").read_text(errors="replace")
        shutil.rmtree(folder, ignore_errors=True)
        return found

    def check(self, tests: Sequence[str], mark: str) -> str:
        """Run tests without a fault; returns what is wrong, "" if all pass."""
        found = self.run(tests, mark, CHECK_LIMIT_S)
        return "" if found["code"] == 0 else f"{found['test'] or tests[0]} (exit code {found['code']})\n{said(found)}"

    def judge(self, number: int, fault: Fault) -> Result:
        """Plant a fault, run its tests, and take it out again."""
        path = self.root / "copy" / fault.file
        times = path.stat()
        before = fault.plant(self.root / "copy", number + 1)
        try:
            found = self.run(fault.tests, fault.mark, LIMIT_S)
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        seconds = found["seconds"]
        if found["code"] == 0:
            return Result("MISSED", f"all of {', '.join(fault.tests)} pass", seconds)
        if found["code"] == 1 and found["test"] and not NOT_RUN.search(found["text"]):
            return Result("found", found["test"], seconds)
        why = f"more than {LIMIT_S:g} s" if found["code"] < 0 else f"exit code {found['code']}"
        return Result("broken", f"{why}\n{said(found)}", seconds)

    def close(self) -> None:
        """End its process, which ends by itself once it has answered."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=CHECK_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def said(found: dict[str, Any]) -> str:
    """The end of what pytest has printed or reported."""
    return "\n".join((found["text"] or found["output"]).splitlines()[-40:])


def shown(fault: Fault, result: Result) -> str:
    """A line of the table."""
    return f"{result.verdict:6} {result.seconds:6.1f} s  {fault.file:34}  {fault.name:72}  {result.why}"


def run(faults: Sequence[Fault], jobs: int, check: bool, folder: Path) -> list[Result] | None:
    """Judge all faults, in `jobs` copies beside each other; None if a test fails without a fault."""
    places = [Workplace(folder / str(i)) for i in range(jobs)]
    idle: queue.SimpleQueue[Workplace] = queue.SimpleQueue()
    for place in places:
        idle.put(place)

    def alone(name: str, *args: Any) -> Any:
        place = idle.get()
        try:
            return getattr(place, name)(*args)
        finally:
            idle.put(place)

    def judge(number: int) -> Result:
        result: Result = alone("judge", number, faults[number])
        print(shown(faults[number], result), flush=True)
        return result

    try:
        with ThreadPoolExecutor(jobs) as pool:
            if check:
                tests = dict.fromkeys((test, fault.mark) for fault in faults for test in fault.tests)
                files: dict[tuple[str, str], list[str]] = {}
                for test, mark in tests:
                    files.setdefault((test.partition("::")[0], mark), []).append(test)
                checks = pool.map(lambda file: alone("check", files[file], file[1]), files)
                if wrong := [*filter(None, checks)]:
                    print(*(f"fails without a fault: {one}" for one in wrong), sep="\n")
                    return None
                print(f"{len(tests)} tests pass without a fault", flush=True)
            return [*pool.map(judge, range(len(faults)))]
    finally:
        for place in places:
            place.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Print each fault and what became of it; returns 0 if all are found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("-k", dest="word", default="", help="faults with this word in their name or file")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=None, help="which ones --sample takes; default: by the clock")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults that are tried beside each other")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    args = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if args.word in fault.name or args.word in fault.file]
    if args.sample:
        seed = int(time.time()) if args.seed is None else args.seed
        faults = random.Random(seed).sample(faults, min(args.sample, len(faults)))
        print(f"--sample {args.sample} --seed {seed}")
    if args.list:
        for fault in faults:
            print(f"{fault.file:34}  {fault.name:72}  {', '.join(fault.tests)}")
        return 0
    for fault in faults:
        fault.planted(ROOT)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="brigade-mutation-") as folder:
        results = run(faults, args.jobs, not args.no_check, Path(folder))
    if results is None:
        return 1
    wrong = [(fault, one) for fault, one in zip(faults, results, strict=True) if one.verdict != "found"]
    for fault, one in wrong:
        print(f"\n{one.verdict}: {fault.name} ({fault.file}): {one.why}")
    print(f"{len(faults) - len(wrong)} of {len(faults)} faults found in {time.monotonic() - began:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
