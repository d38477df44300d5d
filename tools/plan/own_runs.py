"""Fit a machine's achieved fractions to one's own runs: a CSV with the columns recipe, flags, world_size, step_s."""

import csv
import dataclasses
import shlex
from pathlib import Path

from common import UserError
from tools.plan import fit, sweep
from tools.plan.count import Case, NotCountedError, each
from tools.plan.hardware import Hardware

COLUMNS = ("recipe", "flags", "world_size", "step_s")


def read(file: Path) -> list[tuple[Case, float]]:
    """The runs of a file, and the seconds of their steps.

    Raises:
        UserError: a column or a number is missing; names the line.
    """
    try:
        lines = list(csv.DictReader(file.read_text().splitlines()))
    except OSError as error:
        raise UserError(f"--fit {file}: {error.strerror}: give a CSV with the columns {','.join(COLUMNS)}") from error
    found = []
    for number, line in enumerate(lines, 2):
        try:
            folder = sweep.folder_of(str(line["recipe"]))
            case = Case(folder, int(line["world_size"]), tuple(shlex.split(line["flags"] or "")))
            step = float(line["step_s"])
        except (KeyError, TypeError, ValueError) as error:
            wanted = ",".join(COLUMNS)
            raise UserError(f"--fit {file}, line {number}: {error} is missing or wrong: it needs {wanted}") from error
        if not step > 0 or case.size < 1 or not (folder / "train.py").exists():
            raise UserError(f"--fit {file}, line {number}: needs a recipe, and a world_size and step_s above 0: {line}")
        found.append((case, step))
    if not found:
        raise UserError(f"--fit {file} has no runs: a line for each, with {','.join(COLUMNS)}")
    return found


def measured(runs: list[tuple[Case, float]], machine: Hardware) -> list[fit.Measured]:
    """Each run with its work.

    Raises:
        NotCountedError: one of them cannot be counted.
    """
    found = []
    for (_, step), works in zip(runs, each([case for case, _ in runs], machine), strict=True):
        if isinstance(works, NotCountedError):
            raise works
        found.append(fit.Measured(tuple(works), machine, step))
    return found


def fitted(file: Path, machine: Hardware) -> str:
    """What to put into a file of hardware, and how far the runs are from it."""
    runs = read(file)
    known = measured(runs, machine)
    reach = fit.fit(known, machine.reach)
    errors = [fit.predicted_s(one, reach) / one.step_s - 1 for one in known]
    sizes = [abs(error) for error in errors]
    far = f"mean {sum(sizes) / len(sizes):.0%}, worst {max(sizes):.0%}"
    lines = [
        f"[{machine.name}.reach]  # fitted to {len(runs)} runs of {file.name}: {far}",
        *(f"{name} = {value:.4g}" for name, value in dataclasses.asdict(reach).items()),
    ]
    for (case, step), error in zip(runs, errors, strict=True):
        lines.append(
            f"# {case.folder.name} {' '.join(case.flags)} on {case.size}: {step:.4g} s, predicted {error:+.0%}"
        )
    return "\n".join(lines)


def with_fit(machine: Hardware, runs: list[tuple[Case, float]]) -> Hardware:
    """The machine with the fractions that fit these runs."""
    return dataclasses.replace(machine, reach=fit.fit(measured(runs, machine), machine.reach))
