"""What a test that fails prints of its trainings, and a command that repeats one: `python -m tests.harness.again ...`.

TARGET is a function, as package.module:name. ARGS are those of each rank, as Python writes them: a list of tuples.
"""

import argparse
import ast
import importlib
import itertools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness import runner
from tests.harness.runner import ROOT, Result

LINES = 60  # of each rank, the last ones
PLAIN = ("run_path", "run_unmeasured")  # of runner: a recipe as it is


def report(results: list[Result], test: str) -> str:
    """The commands that repeat a test and each of its trainings; and what the ranks of those that failed have said."""
    parts = [f"the test again: python -m pytest -n 0 -m '' {shlex.quote(test)}"]
    for number, result in enumerate(results, 1):
        how = f"training {number} of {len(results)}: exit codes {result.codes}"
        parts += [f"\n{how}", *commands(result)]
        if not result.ok:
            parts += [f"[rank {rank}] {tail(text)}" for rank, text in enumerate(result.outputs)]
            parts += [f"[{path}] {tail(path.read_text(errors='replace'))}" for path in logs(result)]
    return "\n".join(parts)


def tail(text: str) -> str:
    """The last lines."""
    lines = text.strip().splitlines()
    left_out = [f"... ({len(lines) - LINES} lines more)"] if len(lines) > LINES else []
    return "\n".join(["", *left_out, *lines[-LINES:]]) if lines else "(nothing)"


def commands(result: Result) -> list[str]:
    """Shell commands, to be run in the repository; none for a training whose arguments no shell can give."""
    found = []
    if by_hand := launched(result):
        found.append(f"by hand: {by_hand}")
    if word := importable(result.target):
        args = encode([tuple(one) for one in result.args])
        if decode(ast.literal_eval(repr(args)) if is_literal(args) else None) == [tuple(one) for one in result.args]:
            found.append(f"as here: python -m tests.harness.again {word} {shlex.quote(repr(args))}")
    return found or ["only the test repeats it"]


def launched(result: Result) -> str:
    """How the launcher starts the same recipe with the same flags; "" for what is not a recipe as it is."""
    path, argv = recipe_of(result)
    same = all(recipe_of(Result([], [], result.target, [one])) == (path, argv) for one in result.args)
    plain = getattr(result.target, "__module__", "") == runner.__name__ and result.target.__name__ in PLAIN
    if not (path and same and plain and path.name == "train.py") or "resnet6" in argv:  # a network of the tests alone
        return ""
    folder = path.parent.relative_to(ROOT) if path.is_relative_to(ROOT) else path.parent
    variables = f"NPROC_PER_NODE={len(result.args)} OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="
    return f"{variables} bash launch/torchrun.sh {shlex.join([str(folder), *argv])}"


def recipe_of(result: Result) -> tuple[Path | None, list[str]]:
    """The file of a recipe and its flags, where the first rank has them as its first arguments."""
    match result.args and result.args[0]:
        case (str(path), [*argv], *_) if path.endswith(".py"):
            return Path(path), [str(one) for one in (argv[1:] if argv and argv[0] == path else argv)]
    return None, []


def logs(result: Result) -> list[Path]:
    """Logs of the ranks in the folder of the training's run, or of all runs there if it has no --name."""
    _, argv = recipe_of(result)
    given = dict(itertools.pairwise(argv))
    if not given.get("--out"):
        return []
    return sorted(Path(given["--out"]).glob(f"{given.get('--name') or '*'}/logs/*.log"))


def importable(target: Callable[..., None] | None) -> str:
    """The name that `main` takes; "" for a function that no import gives."""
    name = getattr(target, "__qualname__", "<none>")
    return "" if "<" in name else f"{target.__module__}:{name}"


def encode(value: Any) -> Any:
    """Paths, which are no literals, as `{"path": ...}`."""
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, list | tuple):
        return type(value)(map(encode, value))
    return {name: encode(one) for name, one in value.items()} if isinstance(value, dict) else value


def decode(value: Any) -> Any:
    """The contrary of `encode`."""
    if isinstance(value, list | tuple):
        return type(value)(map(decode, value))
    if isinstance(value, dict):
        return Path(value["path"]) if [*value] == ["path"] else {name: decode(one) for name, one in value.items()}
    return value


def is_literal(value: Any) -> bool:
    """Whether Python reads what it writes of it."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def main() -> None:
    """Repeat a training on as many ranks as there are arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("args", metavar="ARGS")
    given = parser.parse_args()
    module, _, name = given.target.partition(":")
    target = getattr(importlib.import_module(module), name)
    result = runner.spawn(target, decode(ast.literal_eval(given.args)))
    print(result)
    sys.exit(not result.ok)


if __name__ == "__main__":
    main()
