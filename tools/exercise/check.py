"""Whether a file trains as its twin does: both run on the same ranks, and what they have done is compared."""

import math
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.ports import free_port
from tools.exercise import preload, rank  # noqa: F401 (the ranks are forks of this process)
from tools.exercise.compare import Record, differs
from tools.exercise.exercises import Exercise

TIMEOUT_S = 60.0  # without a step of any rank: what a step takes in fractions of a second does not end
AGAIN = "continued"
GRACE_S = 3.0  # for the others, when one rank has failed
RESNET = ("--epochs", "1", "2", "3")
GPT = ("--steps", "3", "6", "9")
_CONTEXT = multiprocessing.get_context("fork")

Leg = tuple[str, list[str], bool]  # what has happened before a comma, the flags, and whether it crashes in its save


def legs(exercise: Exercise, folder: Path) -> list[Leg]:
    """The consecutive starts of a training that the check compares."""
    flag, first, second, third = RESNET if exercise.recipe.endswith("resnet") else GPT
    found: list[Leg] = [("", [flag, second], False)]
    if exercise.resumes:
        path = ["--checkpoint", str(folder / "saved")]
        found += [
            ("stopped early", [flag, first, *path], False),
            ("continued", [flag, second, *path], False),
            ("continued until a crash in its next save", [flag, third, *path], True),
            ("continued after that crash", [flag, third, *path], False),
        ]
    return found


def check(exercise: Exercise, path: Path, say: Callable[[str], None], timeout_s: float = TIMEOUT_S) -> str:
    """Compare a file with the twin of an exercise.

    Args:
        exercise: whose twin, sizes and legs.
        path: the file.
        say: gets half a line before each training, and the other half behind it.
        timeout_s: without a step, until the ranks count as hanging.

    Returns:
        What is different, or "".

    Raises:
        UserError: this machine is so busy that the twin counts as hanging.
    """
    for size in exercise.sizes:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            pairs = zip(legs(exercise, Path(one)), legs(exercise, Path(other)), strict=True)
            for (name, argv, crash), (_, our_argv, _) in pairs:
                where = f"{processes(size)}{f', {name}' if name else ''}"
                say(f"  {where} ... ")
                wanted = run(exercise.twin, argv, size, crash, timeout_s)
                found = run(path, our_argv, size, crash, timeout_s)
                since = f" after it {AGAIN}" if AGAIN in name else ""
                difference = differs(found, wanted, timeout_s, rank_0_logs=exercise.rank_0_logs, since=since)
                say("not as the twin\n" if difference else "as the twin\n")
                if difference:
                    return f"{where}: {difference}"
    return ""


def processes(size: int) -> str:
    """How many, in words."""
    return f"on {size} process{'es' if size > 1 else ''}"


def run(path: Path, argv: list[str], size: int, crash: bool, timeout_s: float) -> list[Record]:
    """Run a file's main in one process for each rank; one that does not end has the steps it has reported."""
    port = free_port()
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        _CONTEXT.Process(target=rank.serve, args=(end, i, size, port, str(path.resolve()), argv, crash), daemon=True)
        for i, (_, end) in enumerate(pipes)
    ]
    records: dict[int, Record] = {}
    steps = [0] * size
    try:
        for one in ranks:
            one.start()
        for _, end in pipes:
            end.close()
        listen(dict(enumerate(pipe for pipe, _ in pipes)), records, steps, timeout_s)
    finally:
        for one in ranks:
            if one.pid:
                one.kill()
                one.join()
        for pipe, _ in pipes:
            pipe.close()
    return [records.get(i) or Record(losses=[math.nan] * steps[i], hangs=not failed(records)) for i in range(size)]


def listen(open_ones: dict[int, Any], records: dict[int, Record], steps: list[int], timeout_s: float) -> None:
    """Note the steps and the end of each rank, until all have ended or nothing happens any more."""
    deadline = time.monotonic() + timeout_s
    while open_ones and time.monotonic() < deadline:
        ready = multiprocessing.connection.wait([*open_ones.values()], max(0.0, deadline - time.monotonic()))
        for i in [i for i, pipe in open_ones.items() if pipe in ready]:
            try:
                kind, value = open_ones[i].recv()
            except EOFError:
                kind, value = "end", Record(error="the process ended without an error of Python's")
            if kind == "step":
                steps[i] = value
                deadline = deadline if failed(records) else time.monotonic() + timeout_s
                continue
            records[i] = value
            del open_ones[i]
            if failed(records):
                deadline = min(deadline, time.monotonic() + GRACE_S)


def failed(records: dict[int, Record]) -> bool:
    """Whether a rank has failed, or crashed as it was asked to: the others cannot continue."""
    return any(record.error or record.crashed for record in records.values())
