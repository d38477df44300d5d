"""Fit a machine's achieved fractions to one's own runs, and say how much closer that gets.

A run is a metrics.jsonl, with the config.json beside it; a rate on a page of tools.prove; or a line of a CSV with the
columns recipe, flags, world_size, step_s.
"""

import csv
import dataclasses
import json
import math
import re
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import UserError
from tools import about
from tools.plan import fit, sweep
from tools.plan.count import Case, NotCountedError, each
from tools.plan.hardware import Hardware
from tools.plan.known import span

COLUMNS = ("recipe", "flags", "world_size", "step_s")
RATE = "perf/samples_per_s"
FORMS = "a run's metrics.jsonl, a prove.json of tools.prove, or a CSV with " + ",".join(COLUMNS)


@dataclass(frozen=True)
class Run:
    """A step of one's own that was measured.

    Attributes:
        name: for people.
        case: what ran.
        device: cuda or cpu; "" where nobody has noted it.
        step_s: seconds of a step; 0 where `rate` is known.
        rate: samples a second; 0 where `step_s` is known.
    """

    name: str
    case: Case
    device: str = ""
    step_s: float = 0.0
    rate: float = 0.0


def read(file: Path) -> list[Run]:
    """The runs of a file.

    Raises:
        UserError: it is none of these, or holds no timing.
    """
    given = file
    if file.is_dir():  # of a run, or of tools.prove
        file = next((file / name for name in ("metrics.jsonl", "prove.json") if (file / name).exists()), file)
    elif file.name in ("prove.md", "config.json"):
        file = file.with_name({"prove.md": "prove.json", "config.json": "metrics.jsonl"}[file.name])
    kinds = {".jsonl": of_metrics, ".json": of_page, ".csv": of_table}
    if file.suffix not in kinds:
        raise UserError(f"--calibrate {given}: it is not known what that is: give {FORMS}")
    try:
        return list(kinds[file.suffix](file))
    except OSError as error:
        raise UserError(f"--calibrate {given}: {error.filename}: {error.strerror}: give {FORMS}") from error


def of_metrics(file: Path) -> Iterator[Run]:
    """The one of a run's folder: the median of its records without the first one, which has the warm-up in it."""
    config_file = file.with_name("config.json")
    try:
        records = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        config = json.loads(config_file.read_text())
        recipe, size, device = str(config["recipe"]), int(config["world_size"]), str(config["device"])
        rates = [float(one[RATE]) for one in records if one.get(RATE)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"--calibrate {file}: it, or {config_file}, is not as a run writes it: {error!r}") from error
    if len(rates) < 2:
        raise UserError(
            f"--calibrate {file} has {len(rates)} records of {RATE}, and the first one has the warm-up in it: give a "
            "run of more steps, or one with a smaller --log-every"
        )
    folder = about.ROOT / "recipes" / recipe
    if not (folder / "train.py").exists():  # a copy: each run keeps the train.py that it ran
        folder = file.parent
    case = Case(folder, size, ("--config", str(config_file.resolve())))
    yield Run(f"{recipe} in {file.parent}", case, device, rate=statistics.median(rates[1:]))


def of_page(file: Path) -> Iterator[Run]:
    """Each rate of tools.prove."""
    try:
        read: dict[str, Any] = json.loads(file.read_text())
        size = int(re.findall(r"^\d+", read["machine"]["ranks"])[0])
        device = "cpu" if read["machine"]["devices"] == "CPU" else "cuda"
        found = [one for one in read["figures"]["rates"] if one.get(RATE)]
        for one in found:
            words = one["layout"].removesuffix(" in one process").split()
            if any(word.endswith(".yaml") for word in words) or about.workload(words[0]) not in ("gpt", "resnet"):
                continue  # a config of Accelerate, whose strategy is not on the page; games, which are not planned
            ranks = 1 if one["layout"].endswith(" in one process") else size
            flags = (*shlex.split(one["flags"]),) if "flags" in one else (*words[1:],)
            case = Case(about.ROOT / "recipes" / words[0], ranks, flags)
            yield Run(f"{one['layout']} of {file.name}", case, device, rate=float(one[RATE]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"--calibrate {file}: it is not as tools.prove writes it: {error!r}") from error
    if not found:
        raise UserError(f"--calibrate {file} has no rates: tools.prove measures them without --proofs, or with rates")


def of_table(file: Path) -> Iterator[Run]:
    """Each line of a CSV; an error names the line."""
    lines = list(csv.DictReader(file.read_text().splitlines()))
    for number, line in enumerate(lines, 2):
        try:
            folder = sweep.folder_of(str(line["recipe"]))
            case = Case(folder, int(line["world_size"]), tuple(shlex.split(line["flags"] or "")))
            step = float(line["step_s"])
        except (KeyError, TypeError, ValueError) as error:
            wanted = ",".join(COLUMNS)
            raise UserError(
                f"--calibrate {file}, line {number}: {error} is missing or wrong: it needs {wanted}"
            ) from error
        if not step > 0 or case.size < 1 or not (folder / "train.py").exists():
            raise UserError(
                f"--calibrate {file}, line {number}: needs a recipe, and a world_size and step_s above 0: {line}"
            )
        yield Run(f"{folder.name} {' '.join(case.flags)} in line {number}", case, step_s=step)
    if not lines:
        raise UserError(f"--calibrate {file} has no runs: a line for each, with {','.join(COLUMNS)}")


def measured(runs: Sequence[Run], machine: Hardware) -> list[fit.Measured]:
    """Each run with its work.

    Raises:
        UserError: one of them cannot be counted, or ran on another kind of device.
    """
    for one in runs:
        if one.device and one.device != machine.device:
            ours, theirs = ("a CPU", "a GPU") if one.device == "cpu" else ("a GPU", "a CPU")
            raise UserError(
                f"{one.name} ran on {ours}, and --hardware {machine.name} is {theirs}: give the --hardware that it ran "
                "on; python -m tools.plan --calibrate mine.toml measures the one you are on"
            )
    found = []
    for one, works in zip(runs, each([run.case for run in runs], machine), strict=True):
        if isinstance(works, NotCountedError):
            raise works
        found.append(fit.Measured(tuple(works), machine, one.step_s or works[0].samples / one.rate))
    return found


def fitted(runs: Sequence[Run], machine: Hardware) -> tuple[Hardware, str]:
    """The machine with the fractions that fit these runs best; and how much closer its predictions are.

    Each run is also predicted by fractions that were fitted to all other runs: as far off will runs be that are like
    these.
    """
    known = measured(runs, machine)
    reach = fit.fit(known, machine.reach)
    rest = [fit.fit([*known[:i], *known[i + 1 :]], machine.reach) for i in range(len(known)) if len(known) > 1]
    columns = [[fit.predicted_s(one, machine.reach) for one in known], [fit.predicted_s(one, reach) for one in known]]
    if rest:
        columns.append([fit.predicted_s(one, other) for one, other in zip(known, rest, strict=True)])
    errors = [[step / one.step_s - 1 for step, one in zip(steps, known, strict=True)] for steps in columns]
    # As a factor, which the fit makes small: half as long and twice as long are equally far off.
    means = [math.expm1(statistics.fmean(abs(math.log1p(one)) for one in some)) for some in errors]
    far = f"its predictions were off by {means[0]:.0%} in the mean, and are by {means[1]:.0%}; "
    if rest:
        far += f"each run by fractions fitted to the others, {means[2]:.0%}"
        if means[2] >= means[0]:
            far += ": these runs say nothing of each other, and more of them are needed"
    else:
        far += "how far off another run will be, one run does not say"
    lines = [f"{len(runs)} run{'s' if len(runs) > 1 else ''} on {machine.name}: {far}"]
    names = ("before", "fitted", "by the others")
    for one, now, row in zip(runs, known, zip(*errors, strict=True), strict=True):
        said = ", ".join(f"{name} {error:+.0%}" for name, error in zip(names, row, strict=False))
        lines.append(f"  {one.name}: {span(now.step_s)} a step; {said}")
    return dataclasses.replace(machine, reach=reach), "\n".join(lines)


def as_toml(machine: Hardware) -> str:
    """The fractions, to put into a file of hardware."""
    values = dataclasses.asdict(machine.reach)
    return "\n".join([f"[{machine.name}.reach]", *(f"{name} = {value:.4g}" for name, value in values.items())])
