"""Dataclass to command line, and back from a run's config.json; an error is printed once, by rank 0."""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import keyword
import math
import os
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from common import UserError, bounds, manifest, printable, ranks
from common.run import exits
from common.run.process import Process

Args = TypeVar("Args")
Note = TypeVar("Note")
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
    stdout, stderr = (sys.stdout, sys.stderr) if ranks.rank() == 0 else (printed, printed)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            args = _parse(args_type, argv)
    except SystemExit as refusal:
        if refusal.code and ranks.rank() != 0:
            exits.let_rank0_exit()
            print(printed.getvalue(), file=sys.stderr, flush=True)  # only this rank's flags are wrong
        raise
    for name, range_of in _annotated(args_type, bounds.Bounds):
        value = getattr(args, name)
        for number in value if isinstance(value, tuple | list) else (value,):
            if number is None or (range_of.least <= number <= range_of.most and abs(number) != math.inf):
                continue
            shown = f"{number:g}" if isinstance(number, float) else str(number)
            shown = shown if len(shown) <= 30 else f"{shown[:10]}... ({len(shown)} digits)"
            finite = " a finite number" if abs(number) == math.inf else ""
            raise UserError(f"--{name.replace('_', '-')} {shown} is out of range: it must be{finite} {range_of}")
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


def keep_for_errors(args: Any, process: Process) -> None:
    """Let a process that fails say which flags free memory, and which ones another run had."""
    of_one_run = (*OF_ONE_RUN, "out", "resume", "init")
    process.flags = {key: value for key, value in dataclasses.asdict(args).items() if key not in of_one_run}
    process.frees = [flag for part, flag in savings(args) if part == "memory"]


def savings(args: Any) -> Iterator[tuple[str, str]]:
    """What another value of a recipe's flag would make less, see `bounds.Saves`; and the flag, with its value now."""
    for name, note in _annotated(type(args), bounds.Saves):
        if getattr(args, name) != note.value:
            yield note.part, f"--{name.replace('_', '-')} {note.value} (now {getattr(args, name)})"


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
    if {"-h", "--help"} & {*flags}:
        args_type = grouped(args_type)
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


def grouped(args_type: Any) -> Any:
    """The same flags in groups, for --help: the recipe's own first, each group under the comment line above it.

    It returns the type itself if its source cannot be read, as that of a class in a notebook.
    """
    hints = typing.get_type_hints(args_type, include_extras=True)
    left = {field.name: field for field in dataclasses.fields(args_type)}
    groups: dict[str, list[Any]] = {}
    classes: list[Any] = [one for one in args_type.__mro__ if dataclasses.is_dataclass(one)]
    for kind in classes:
        title = (kind.__doc__ or kind.__name__).splitlines()[0].rstrip(".")
        with contextlib.suppress(OSError, TypeError, SyntaxError):
            for name, heading, text in _fields_in_source(kind):
                if field := left.pop(name, None):  # not one that a class above it has again
                    shown: Any = Annotated[hints[name], tyro.conf.arg(help=text)]
                    default = dataclasses.field(default=field.default, default_factory=field.default_factory)
                    key = re.sub(r"\W+", "_", heading or title).strip("_")
                    key = key if key.isidentifier() and not keyword.iskeyword(key) else f"_{key}"
                    groups.setdefault(key, []).append((name, shown, default))
    if left:
        return args_type
    made = {key: dataclasses.make_dataclass(key, fields, frozen=True) for key, fields in groups.items()}
    members = [(key, group, dataclasses.field(default_factory=group)) for key, group in made.items()]
    return dataclasses.make_dataclass(args_type.__name__, members)


def _fields_in_source(kind: type) -> Iterator[tuple[str, str, str]]:
    """Name, comment line above its group, and comment of each field that a dataclass has itself."""
    source = textwrap.dedent(inspect.getsource(kind))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    lines = source.splitlines()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign):
            above = [
                text
                for (row, column), text in comments.items()
                if row < node.lineno and not lines[row - 1][:column].strip()
            ]
            beside = [text for (row, _), text in comments.items() if node.lineno <= row <= (node.end_lineno or 0)]
            yield ast.unparse(node.target), above[-1] if above else "", " ".join(beside)


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
        if printable(str(value)) != str(value):  # which the parser would print as it is
            raise UserError(f"--config {path} has {name} {value!r:.60}, which is too long or has control characters")
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
