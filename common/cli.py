"""Dataclass to command line and config.json; one clear error, from rank 0 only."""

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro
from torch.distributed.elastic.multiprocessing.errors import record

from common import UserError, world

Args = TypeVar("Args")

USAGE_ERROR = 2  # exit code of every refusal
# Time for rank 0 to print a refusal that all ranks have reached. torchrun ends everyone as soon as one rank
# has left, so the one that speaks must be the first.
GRACE_S = 5.0


def parse(args_type: type[Args], argv: list[str] | None = None) -> Args:
    """Build the dataclass from the command line; every field is a flag (`global_batch_size`: --global-batch-size).

    `--config PATH` takes the values of a run's config.json; flags beside it win.

    Args:
        args_type: a flat frozen dataclass whose fields all have defaults.
        argv: the command line without the program's name; default: this process's.

    Raises:
        SystemExit: 2 after an error message from rank 0, 0 after --help.
    """
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config", type=Path)
    known, rest = before.parse_known_args(argv)
    default = args_type(**(_read_config(args_type, known.config) if known.config else {}))
    try:
        return tyro.cli(
            args_type,
            args=rest,
            default=default,
            description=f"{args_type.__doc__} --config PATH starts from a run's config.json.",
            console_outputs=world.rank() == 0,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except SystemExit as refusal:
        if refusal.code and world.rank() != 0:
            time.sleep(GRACE_S)
        raise


def _read_config(args_type: type, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())["args"]
        unknown = values.keys() - {field.name for field in dataclasses.fields(args_type)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--config {path} is not the config.json of a run: {error!r}") from error
    if unknown:
        raise UserError(f"--config {path} has flags that this recipe lacks: {', '.join(sorted(unknown))}")
    return values


def entry(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a recipe's main: a refusal is told once and exits with 2, a crash reaches torchrun's summary."""

    @functools.wraps(main)
    def wrapped() -> None:
        try:
            main()
        except UserError as error:
            if world.rank() != 0:
                # Nearly always rank 0 has found the same and is printing it; if not, this rank must speak.
                time.sleep(GRACE_S)
                raise
            print(f"error: {error}", file=sys.stderr)  # noqa: T201
            sys.stdout.flush()
            sys.stderr.flush()
            # Peers may sit in a collective, where an orderly exit would wait for them: go without a goodbye.
            os._exit(USAGE_ERROR)

    return record(wrapped)
