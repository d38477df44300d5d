"""Dataclass to command line and config.json; one clear error, from rank 0 only."""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import tyro
from torch.distributed.elastic.multiprocessing.errors import record

from common import UserError, watch, world

Args = TypeVar("Args")

USAGE_ERROR = 2  # exit code of every refusal
# Numbers of any flag are not negative; these flags have other bounds.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("epochs", "log_every", "keep", "global_batch_size", "lr_reference_batch", "seq_len"), (1, math.inf)
    ),
    **dict.fromkeys(
        ("num_layers", "num_heads", "width", "dp_replicate", "tp", "pp", "num_microbatches"), (1, math.inf)
    ),
    **dict.fromkeys(("num_envs", "rollout_steps", "update_epochs", "eval_episodes"), (1, math.inf)),
    **dict.fromkeys(("momentum", "label_smoothing", "gamma", "gae_lambda"), (0, 1)),
    "hang_timeout": (1, math.inf),
    "seed": (0, 2**64 - 1),  # what common/seed.py mixes
}
OF_ONE_RUN = ("name", "stop_after", "deadline")
# Time for rank 0 to print a refusal that all ranks have reached. torchrun ends everyone as soon as one rank
# has left, so the one that speaks must be the first.
GRACE_S = 5.0
JOIN_S = 2.0  # for the others to find the same as rank 0, which they find together but for what joining a group takes
REFUSED = "cli/refused"
HELD_BACK = (signal.SIGTERM, signal.SIGUSR1)


def parse(args_type: type[Args], argv: list[str] | None = None) -> Args:
    """Build the dataclass from the command line; every field is a flag (`global_batch_size`: --global-batch-size).

    `--config PATH` takes the values of a run's config.json; flags beside it win.

    Args:
        args_type: a flat frozen dataclass whose fields all have defaults.
        argv: the command line without the program's name; default: this process's.

    Raises:
        SystemExit: 2 after an error message from rank 0, 0 after --help.
        UserError: a number out of range, two lengths of the training, or a --config that is none.
    """
    told = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            if world.rank() != 0:
                stack.enter_context(contextlib.redirect_stdout(told))
                stack.enter_context(contextlib.redirect_stderr(told))
            args = _parse(args_type, argv)
    except SystemExit as refusal:
        if refusal.code and world.rank() != 0:
            _let_rank_0_speak()
            print(told.getvalue(), file=sys.stderr, flush=True)  # rank 0 had nothing to refuse
        raise
    for name, value in vars(args).items():
        least, most = RANGES.get(name, (0, math.inf))
        if isinstance(value, int | float) and not least <= value <= most:
            limit = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise UserError(f"--{name.replace('_', '-')} {value:g} is out of range: it must be {limit}")
    return args


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


def _read_config(args_type: type, path: Path) -> list[str]:
    """The flags that a config.json stands for, but those of one run only."""
    try:
        # A run's own, not of what it trains: the name would continue that very run, the others end this one early.
        values = {k: v for k, v in json.loads(path.read_text())["args"].items() if k not in OF_ONE_RUN}
        unknown = values.keys() - {field.name for field in dataclasses.fields(args_type)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--config {path} is not the config.json of a run: {error!r}") from error
    if unknown:
        raise UserError(f"--config {path} has flags that this recipe lacks: {', '.join(sorted(unknown))}")
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def _let_rank_0_speak() -> None:
    """Wait to be ended by the launcher."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    if dist.is_initialized():
        dist.distributed_c10d._get_default_store().add(REFUSED, 1)
    time.sleep(GRACE_S)


def _let_others_join() -> None:
    """Wait until the others have found the same: one that still joins a group would print what torch says of it."""
    store, end = dist.distributed_c10d._get_default_store(), time.monotonic() + JOIN_S
    while store.add(REFUSED, 0) < dist.get_world_size() - 1 and time.monotonic() < end:
        time.sleep(0.01)


def entry(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a recipe's main: a refusal is told once and exits with 2, a crash reaches torchrun's summary."""

    @functools.wraps(main)
    def wrapped() -> None:
        # Held back until `stop.Stop` listens: asked to leave while it still starts, a run does so in its own way.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            main()
        except SystemExit:
            raise
        except BaseException as error:
            if isinstance(error, UserError) and world.rank() == 0:
                # First of all: once another rank has left, the launcher ends this one.
                print(f"error: {error}", file=sys.stderr)
                sys.stdout.flush()
                sys.stderr.flush()
            if watch.Watch.active:  # since the training began
                watch.Watch.active.report(error)
            if not isinstance(error, UserError):
                raise
            if world.rank() != 0:
                # Nearly always rank 0 has found the same and has printed it; if not, this rank must speak.
                _let_rank_0_speak()
                raise
            if dist.is_initialized() and not watch.Watch.active:
                _let_others_join()
            # Peers may sit in a collective, where an orderly exit would wait for them: go without a goodbye.
            os._exit(USAGE_ERROR)

    return record(wrapped)
