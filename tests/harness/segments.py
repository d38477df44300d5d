"""Several runs of recipes in a row, each from what the one before has saved, and notes of what their ranks held."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.harness import runner


@dataclass(frozen=True)
class Segment:
    """One run.

    Attributes:
        recipe: whose train.py.
        layout: on which ranks.
        flags: all of them.
        notes: a folder for notes of what ranks held; of a run in a store, its working folder is there, too.
        env: what its ranks have in their environment, beside what this process has.
    """

    recipe: Path
    layout: runner.Layout
    flags: tuple[str, ...]
    notes: Path
    env: Mapping[str, str] = field(default_factory=dict)


def run(segments: Sequence[Segment], ends: bool = True) -> runner.Result:
    """Run all of them, one after the other, until one fails; returns how the last one ended.

    Args:
        segments: the runs.
        ends: note also what ranks hold whenever a run saves, which takes as long as the save.
    """
    assert segments
    for segment in segments:
        segment.notes.mkdir(parents=True)
        argv = [str(segment.recipe), *segment.flags]
        how = (str(segment.recipe), argv, segment.notes, {**segment.env})
        args = [(*how, rank, ends) for rank in range(segment.layout.size)]
        result = runner.rerun(_run_noted, args)
        if not result.ok:
            break
    return result


def _run_noted(path: str, argv: list[str], notes: Path, env: dict[str, str], rank: int, ends: bool) -> None:
    os.environ |= env
    with contextlib.chdir(notes) if env else contextlib.nullcontext(), _noted(notes, rank, ends):
        runner.run_unmeasured(path, argv)


@contextlib.contextmanager
def _noted(notes: Path, rank: int, ends: bool) -> Iterator[None]:
    """Note all that this rank holds of model and optimizer, before the first step and, if asked, at each save."""
    from common.state import saver
    from common.train import guard
    from common.workloads import step_loss

    begin = guard.FiniteGuard.__init__
    save = saver.Saver.save
    look = step_loss.check
    holds: list[Any] = []

    def noting_begin(self: guard.FiniteGuard, model: Any, optimizer: Any, *more: Any) -> None:
        begin(self, model, optimizer, *more)
        holds[:] = model, optimizer
        _note(notes / f"begin-{rank}.json", *holds)

    def noting_save(self: saver.Saver, *what: Any) -> None:
        if ends:
            _note(notes / f"end-{rank}.json", *holds)
        save(self, *what)

    guard.FiniteGuard.__init__ = noting_begin
    saver.Saver.save = noting_save
    step_loss.check = lambda *_: None  # type: ignore[assignment] # four looks, which cost more than two steps
    try:
        yield
    finally:
        guard.FiniteGuard.__init__ = begin
        saver.Saver.save = save
        step_loss.check = look


def _note(file: Path, model: Any, optimizer: Any) -> None:
    """Write a digest of each tensor, put together from the parts of all ranks that share it (all of them take part)."""
    from common import keymap

    digests = {}
    for name, tensor in keymap.tensors(model, optimizer).items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        content = whole.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        digests[name] = f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(content).hexdigest()}"
    file.write_text(json.dumps(digests))


def held(notes: Path, when: str) -> dict[str, set[str]]:
    """Name of each tensor held at the "begin" or the "end" of a segment, to its digests: one, if all ranks agree."""
    found: dict[str, set[str]] = {}
    files = sorted(notes.glob(f"{when}-*.json"))
    assert files, f"no rank has noted what it held at the {when}"
    for file in files:
        for name, digest in json.loads(file.read_text()).items():
            found.setdefault(name, set()).add(digest)
    return found
