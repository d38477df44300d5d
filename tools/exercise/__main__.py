"""Exercises of docs/course: `python -m tools.exercise 3a --start` writes one, `python -m tools.exercise 3a` checks it.

Each is a recipe's bare.py with one planted fault. The check runs your file and the right one, in float64, on a small
model and small data, on one process and on several, and compares their losses and gradient norms within 1e-9.
"""

import argparse
import os
import sys
from pathlib import Path

from common import UserError
from tools import command
from tools.exercise import exercises


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="python -m tools.exercise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("exercise", nargs="?", default="", help="its chapter and letter, such as 3a; none lists them all")
    made.add_argument("--start", action="store_true", help="write the file to fix, exercise_3a.py, into this folder")
    made.add_argument("--hint", action="store_true", help="print where to look")
    made.add_argument("--file", type=Path, help="check this file; exercise_3a.py if nothing is said")
    made.add_argument(
        "--timeout", type=float, default=60.0, help="seconds without a step; longer counts as hanging (60)"
    )
    return made


def main(words: list[str]) -> int:
    """Do what is asked; returns the exit code: 1 if the file is not right yet."""
    args = parser().parse_args(words)
    if not args.exercise:
        for one in exercises.EXERCISES:
            print(f"{one.key:<4} {one.recipe:<17} {one.title}")
        return 0
    exercise = exercises.find(args.exercise)
    path = args.file or Path(f"exercise_{exercise.key}.py")
    if not args.timeout > 0:
        raise UserError(f"--timeout {args.timeout} must be above 0 s")
    if args.start:
        start(exercise, path)
        return 0
    if args.hint:
        print(exercise.hint)
        return 0
    if not path.is_file():
        raise UserError(f"there is no {path}: python -m tools.exercise {exercise.key} --start writes it")
    return checked(exercise, path, args.timeout)


def start(exercise: exercises.Exercise, path: Path) -> None:
    """Write the faulty file, unless one is there that somebody has edited."""
    text = exercise.file()
    if path.exists() and path.read_text() != text:
        raise UserError(f"{path} is there, and has been edited: move or delete it, and then run this again")
    path.write_text(text)
    print(f"{exercise.key}: {exercise.title}\n{exercise.task}\n")
    print(f"Wrote {path}: recipes/{exercise.recipe}/bare.py with one fault. Fix it, then run")
    print(f"    python -m tools.exercise {exercise.key}")


def checked(exercise: exercises.Exercise, path: Path, timeout_s: float) -> int:
    """Print whether the file is right."""
    small = ", ".join(f"{name} = {value}" for name, value in exercise.constants().items())
    print(f"{exercise.key}: {path} beside its twin, in float64, with a small model and {small}", flush=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the comparison is one of float64 on CPUs
    from tools.exercise import check

    difference = check.check(exercise, path, lambda words: print(words, end="", flush=True), timeout_s)
    if difference:
        print(f"  {difference}\nnot yet. For a hint: python -m tools.exercise {exercise.key} --hint")
        return 1
    print("passed: losses, gradient norms, and what each process reads, sends, keeps and prints are the twin's")
    return 0


if __name__ == "__main__":
    with command.one_process():
        try:
            code = main(sys.argv[1:])
        except UserError as error:
            command.refuse(error)
        sys.stdout.flush()
        os._exit(code)  # nothing is left to do, and Python takes seconds to take torch apart
