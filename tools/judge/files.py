"""Seams of what a script reads, writes and prints: checkpoints, seeds, the log."""

import builtins
import functools
import logging
import os
from typing import Any

import torch

from tools.judge import device as devices

MOST_PRINTED = 400  # characters of a line
MOST_LINES = 600


def install(record: Any, place: Any) -> None:
    """Patch them."""
    any_torch: Any = torch
    save, load, seed = torch.save, torch.load, torch.manual_seed
    inside = str(place.folder.resolve())

    @functools.wraps(save)
    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        name = os.path.abspath(os.fspath(f)) if isinstance(f, str | os.PathLike) else ""
        if name and not os.path.realpath(name).startswith(inside):
            raise PermissionError(f"the judge lets a script write nothing outside of its temporary folder: {name}")
        record.log("save", path=name, **contents(obj))
        save(obj, f, *args, **kwargs)

    @functools.wraps(load)
    def loaded(f: Any, *args: Any, **kwargs: Any) -> Any:
        name = os.path.abspath(os.fspath(f)) if isinstance(f, str | os.PathLike) else ""
        where = kwargs.get("map_location", args[0] if args else None)
        record.log("load", path=name, map_location=str(where), weights_only=kwargs.get("weights_only"))
        kwargs["map_location"], args = devices.CPU, args[1:]
        return load(f, *args, **kwargs)

    @functools.wraps(seed)
    def seeded(value: Any) -> Any:
        record.log("seed", value=int(value))
        return seed(value)

    any_torch.save, any_torch.load, any_torch.manual_seed = saved, loaded, seeded
    any_torch.random.manual_seed = seeded
    _prints(record)


def contents(obj: Any) -> dict[str, Any]:
    """What a checkpoint holds, by the shape of its parts."""
    found: dict[str, Any] = {"optimizer": False, "schedule": False, "scaler": False, "prefix": False, "counts": False}
    found["random"] = False

    def look(part: Any, depth: int) -> None:
        if not isinstance(part, dict) or depth > 3:
            return
        names = {str(name) for name in part}
        found["optimizer"] |= "param_groups" in names
        found["schedule"] |= "last_epoch" in names
        found["scaler"] |= "growth_interval" in names
        found["prefix"] |= any(name.startswith("module.") for name in names)
        found["counts"] |= bool(
            names & {"epoch", "step", "iter", "iter_num", "iteration", "global_step", "epochs_run"}
            | {one for one in names if one.upper() in ("EPOCHS_RUN", "EPOCH")}
        )
        found["random"] |= any("rng" in name.lower() or "random" in name.lower() for name in names)
        if not any(torch.is_tensor(one) for one in part.values()):
            for one in part.values():
                look(one, depth + 1)

    look(obj, 0)
    return found | {"keys": [str(one) for one in obj][:12] if isinstance(obj, dict) else [type(obj).__name__]}


def _prints(record: Any) -> None:
    real = builtins.print
    handle = logging.Logger.handle
    lines = [0]

    def note(text: str) -> None:
        lines[0] += 1
        if lines[0] <= MOST_LINES and any(letter.isdigit() for letter in text) and record.where():
            record.log("print", text=text[:MOST_PRINTED])

    @functools.wraps(real)
    def printed(*words: Any, **kwargs: Any) -> None:
        note(" ".join(map(str, words)))
        real(*words, **kwargs)

    @functools.wraps(handle)
    def handled(self: Any, line: logging.LogRecord) -> None:
        note(line.getMessage())
        handle(self, line)

    builtins.print = printed
    logger: Any = logging.Logger
    logger.handle = handled
