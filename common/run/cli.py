"""Dataclass to command line, and back from a run's config.json; an error is printed once, by rank 0."""

import argparse
import contextlib
import dataclasses
import difflib
import io
import itertools
import math
import os
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from common import UserError, devices, manifest, ranks
from common.measure import verdict
from common.run import exits

Args = TypeVar("Args")
Note = TypeVar("Note")


@dataclass(frozen=True)
class Bounds:
    """Range that a flag's number must be in: `rate: Annotated[float, Bounds(0, 1)] = 0.5`."""

    least: float = -math.inf
    most: float = math.inf

    def __str__(self) -> str:
        """The range in words, for a message."""
        if self.most == math.inf:
            return f"at least {self.least}"
        return f"at most {self.most}" if self.least == -math.inf else f"between {self.least} and {self.most}"


@dataclass(frozen=True)
class Frees:
    """The value of a flag that takes less memory, for the message when none is left."""

    value: str


@dataclass(frozen=True)
class Shortens:
    """The value of a flag that makes a part of the step shorter, for the verdict on a profile.

    Attributes:
        part: of `timeline.PARTS`.
        value: of the flag.
    """

    part: str
    value: str


MOST = 2**31 - 1  # of steps, samples and sizes: a product of two of them still has 64 bits
PositiveInt = Annotated[int, Bounds(1, MOST)]
NonNegativeInt = Annotated[int, Bounds(0, MOST)]
NonNegativeFloat = Annotated[float, Bounds(0)]
Smaller = Annotated[int, Bounds(0, MOST), Frees("smaller, where 0 is the largest")]
AtLeastOne = Annotated[float, Bounds(1)]
Fraction = Annotated[float, Bounds(0, 1)]
Timeout = Annotated[float, Bounds(1)]  # seconds
Seed = Annotated[int, Bounds(0, 2**64 - 1)]  # the bits that common/seed.py mixes
# These flags belong to one run, so --config does not copy them: the name would continue that other run, and the rest
# would stop this one early.
OF_ONE_RUN = ("name", "stop_after", "deadline")


def parse(args_type: type[Args], argv: list[str] | None = None) -> Args:
    """Build the dataclass from the command line; every field is a flag (`global_batch_size`: --global-batch-size).

    `--config PATH` takes the values of a run's config.json; flags on the command line override them.

    Args:
        args_type: a flat frozen dataclass whose fields all have defaults; `Bounds` are annotated on a field's type.
        argv: the command line without the program's name; default: this process's.

    Raises:
        SystemExit: 2 after an error message from rank 0, 0 after --help.
        UserError: a number is out of range, --epochs and --max-steps are both given, or --config is unusable.
    """
    printed = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            if ranks.rank() != 0:
                stack.enter_context(contextlib.redirect_stdout(printed))
                stack.enter_context(contextlib.redirect_stderr(printed))
            args = _parse(args_type, argv)
    except SystemExit as refusal:
        if refusal.code and ranks.rank() != 0:
            exits.let_rank0_exit()
            print(printed.getvalue(), file=sys.stderr, flush=True)  # only this rank's flags are wrong
        raise
    devices.frees = [
        f"--{name.replace('_', '-')} {frees.value} (now {getattr(args, name)})"
        for name, frees in _annotated(args_type, Frees)
        if getattr(args, name) != frees.value
    ]
    verdict.shortens = {}
    for name, shortens in _annotated(args_type, Shortens):
        if getattr(args, name) != shortens.value:
            flag = f"--{name.replace('_', '-')} {shortens.value} (now {getattr(args, name)})"
            verdict.shortens.setdefault(shortens.part, []).append(flag)
    for name, bounds in _annotated(args_type, Bounds):
        value = getattr(args, name)
        for number in value if isinstance(value, tuple | list) else (value,):
            if number is None or (bounds.least <= number <= bounds.most and abs(number) != math.inf):
                continue
            shown = f"{number:g}" if isinstance(number, float) else str(number)
            shown = shown if len(shown) <= 30 else f"{shown[:10]}... ({len(shown)} digits)"
            finite = " a finite number" if abs(number) == math.inf else ""
            raise UserError(f"--{name.replace('_', '-')} {shown} is out of range: it must be{finite} {bounds}")
    if os.environ.get("ONLY_CHECK_FLAGS"):  # launch/slurm.sh, before it submits a job
        print("ONLY_CHECK_FLAGS is set: the flags can be used, and nothing is trained")
        raise SystemExit(0)
    return args


def check_divides(flag: str, divisor: int, numbers: Mapping[str, int]) -> None:
    """Check that a flag's number divides other numbers.

    Args:
        flag: its name on the command line.
        divisor: its number.
        numbers: to be divided, by the names that a user knows, such as "--seq-len".

    Raises:
        UserError: names the first one that is not divisible, and both numbers.
    """
    for name, number in numbers.items():
        if number % divisor:
            raise UserError(f"{flag} {divisor} must divide {name} ({number})")


def _annotated(args_type: type, kind: type[Note]) -> Iterator[tuple[str, Note]]:
    """The flags with such an annotation, also those inside another type, such as `Fraction | None`."""
    for name, hint in typing.get_type_hints(args_type, include_extras=True).items():
        inside = [hint]
        while inside:
            part = inside.pop()
            inside += typing.get_args(part)
            if isinstance(part, kind):
                yield name, part


def _parse(args_type: type[Args], argv: list[str] | None) -> Args:
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config", type=Path)
    known, given = before.parse_known_args(argv)
    flags = [*_read_config(args_type, known.config), *given] if known.config else given
    for flag, after in itertools.pairwise([*flags, "--"]):
        choices = _choices(args_type, flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else ()
        if choices and after.startswith("--"):  # tyro would not tell which values there are
            raise UserError(f"{flag} needs a value: {', '.join(choices)}")
    description = f"{args_type.__doc__} --config PATH takes flags from a run's config.json; others override them."
    try:
        args = tyro.cli(args_type, args=flags, description=description, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as refusal:
        if refusal.code and known.config:
            print(f"The flags come from --config {known.config} and from the command line.", file=sys.stderr)
        raise
    max_steps = getattr(args, "max_steps", 0)
    if max_steps and any(flag.partition("=")[0] == "--epochs" for flag in given):
        raise UserError(
            f"--epochs has no effect because --max-steps is {max_steps}: add --max-steps 0 to train for --epochs"
        )
    return args


def _read_config(args_type: Any, path: Path) -> list[str]:
    """The flags in a config.json, without those in `OF_ONE_RUN`."""
    try:
        values = {k: v for k, v in manifest.read_json(path)["args"].items() if k not in OF_ONE_RUN}
        fields = [field.name for field in dataclasses.fields(args_type)]
        unknown = [_closest(name, fields) for name in sorted(values.keys() - set(fields))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--config {path} is not a run's config.json: {error!r}") from error
    if unknown:
        raise UserError(f"--config {path} has flags that this recipe does not have: {', '.join(unknown)}")
    flags = []
    for name, value in values.items():
        if isinstance(value, bool) and (choices := _choices(args_type, name)):  # it was on or off when that run began
            value = choices[-1 if value else 0]  # noqa: PLW2901
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def _choices(args_type: type, name: str) -> tuple[str, ...]:
    """What a flag may be whose type is a Literal; () for another one."""
    hint = typing.get_type_hints(args_type).get(name)
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _closest(name: str, fields: list[str]) -> str:
    """A name, with the recipe's most similar flag if there is one."""
    close = difflib.get_close_matches(name, fields, n=1)
    return f"{name} (did you mean --{close[0].replace('_', '-')}?)" if close else name
