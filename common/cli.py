"""Dataclass to command line, and back from a run's config.json; an error is printed once, by rank 0."""

import argparse
import contextlib
import dataclasses
import difflib
import io
import json
import math
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from common import UserError, exits, ranks

Args = TypeVar("Args")


@dataclass(frozen=True)
class Bounds:
    """Of a flag's number: `rate: Annotated[float, Bounds(0, 1)] = 0.5`."""

    least: float = -math.inf
    most: float = math.inf

    def __str__(self) -> str:
        """For a message."""
        return f"at least {self.least}" if self.most == math.inf else f"between {self.least} and {self.most}"


PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
NonNegativeFloat = Annotated[float, Bounds(0)]
Fraction = Annotated[float, Bounds(0, 1)]
Timeout = Annotated[float, Bounds(1)]  # seconds
Seed = Annotated[int, Bounds(0, 2**64 - 1)]  # the bits that common/seed.py mixes
# Of one run, not of its training: from another run's config.json, the name would continue that very run, and the
# others would end this one early.
OF_ONE_RUN = ("name", "stop_after", "deadline")


def parse(args_type: type[Args], argv: list[str] | None = None) -> Args:
    """Build the dataclass from the command line; every field is a flag (`global_batch_size`: --global-batch-size).

    `--config PATH` takes the values of a run's config.json; flags beside it win.

    Args:
        args_type: a flat frozen dataclass whose fields all have defaults; `Bounds` stand beside a field's type.
        argv: the command line without the program's name; default: this process's.

    Raises:
        SystemExit: 2 after an error message from rank 0, 0 after --help.
        UserError: a number out of range, two lengths of the training, or an unusable --config.
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
            print(printed.getvalue(), file=sys.stderr, flush=True)  # rank 0 had nothing to refuse
        raise
    for name, bounds in _bounds(args_type):
        value = getattr(args, name)
        if not bounds.least <= value <= bounds.most:
            raise UserError(f"--{name.replace('_', '-')} {value:g} is out of range: it must be {bounds}")
    return args


def check_divides(flag: str, divisor: int, numbers: Mapping[str, int]) -> None:
    """Check that a flag's number divides others.

    Args:
        flag: its name on the command line.
        divisor: its number.
        numbers: to divide, by what the user calls them, such as "--seq-len".

    Raises:
        UserError: names the first that is not divisible, and both numbers.
    """
    for name, number in numbers.items():
        if number % divisor:
            raise UserError(f"{flag} {divisor} does not divide {name}, {number}")


def _bounds(args_type: type) -> Iterator[tuple[str, Bounds]]:
    for name, hint in typing.get_type_hints(args_type, include_extras=True).items():
        for bounds in getattr(hint, "__metadata__", ()):
            if isinstance(bounds, Bounds):
                yield name, bounds


def _parse(args_type: type[Args], argv: list[str] | None) -> Args:
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config", type=Path)
    known, given = before.parse_known_args(argv)
    flags = [*_read_config(args_type, known.config), *given] if known.config else given
    description = f"{args_type.__doc__} --config PATH starts from a run's config.json."
    try:
        args = tyro.cli(args_type, args=flags, description=description, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as refusal:
        if refusal.code and known.config:
            print(f"The flags above are those of --config {known.config} and of the command line.", file=sys.stderr)
        raise
    max_steps = getattr(args, "max_steps", 0)
    if max_steps and any(flag.partition("=")[0] == "--epochs" for flag in given):
        raise UserError(f"--epochs has no effect beside --max-steps {max_steps}: --max-steps 0 trains for the epochs")
    return args


def _read_config(args_type: Any, path: Path) -> list[str]:
    """The flags that a config.json stands for, without those of one run only."""
    try:
        values = {k: v for k, v in json.loads(path.read_text())["args"].items() if k not in OF_ONE_RUN}
        fields = [field.name for field in dataclasses.fields(args_type)]
        unknown = [_closest(name, fields) for name in sorted(values.keys() - set(fields))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--config {path} is not the config.json of a run: {error!r}") from error
    if unknown:
        raise UserError(f"--config {path} has flags that this recipe lacks: {', '.join(unknown)}")
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def _closest(name: str, fields: list[str]) -> str:
    """A name and, where there is one, the flag that may have taken its place."""
    close = difflib.get_close_matches(name, fields, n=1)
    return f"{name} (see --{close[0].replace('_', '-')})" if close else name
