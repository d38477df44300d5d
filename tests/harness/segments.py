"""Several runs of recipes in a row in the same processes, and a note of what their ranks held when.

A new process pays most of what it costs in its first steps. Each segment here joins a group of its own, on a port of its
own, runs the recipe's file anew as __main__, and leaves the group again; what one hands to the next is on the disk.
"""

import contextlib
import hashlib
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import flops
from tests.harness import runner

PATIENCE_S = 200.0  # for rank 0 to come to the next segment


@dataclass(frozen=True)
class Segment:
    """One run: of which train.py, on how many ranks, with which flags, and the folder for notes of what they held."""

    recipe: Path
    size: int
    flags: tuple[str, ...]
    notes: Path


def run(segments: Sequence[Segment], folder: Path, timeout_s: float) -> runner.Result:
    """Run all of them, one after the other; a rank that a segment does not need waits for the next."""
    for segment in segments:
        segment.notes.mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    args = [(rank, list(segments), folder) for rank in range(max(segment.size for segment in segments))]
    return runner.spawn(_walk, args, timeout_s)


def _walk(rank: int, segments: list[Segment], folder: Path) -> None:

    # Half of a short segment's time, for a figure that nobody reads here: once is enough.
    flops.count_flops, flops.peak_flops = _once(flops.count_flops), _once(flops.peak_flops)
    outputs = [os.dup(1), os.dup(2)]
    for number, segment in enumerate(segments):
        if rank >= segment.size:
            continue
        print(f"segment {number}: {segment.recipe.parent.name} on {segment.size}", flush=True)
        os.environ |= {
            "WORLD_SIZE": str(segment.size),
            "LOCAL_WORLD_SIZE": str(segment.size),
            "MASTER_PORT": _agree_on_port(rank, folder / f"port-{number}"),
        }
        sys.argv = [str(segment.recipe), *segment.flags]
        with _noted(segment.notes, rank):
            runpy.run_path(str(segment.recipe), run_name="__main__")
        _forget()
        for i, output in enumerate(outputs, start=1):  # ranks other than 0 write to the run's folder
            os.dup2(output, i)


def _forget() -> None:
    """Let Accelerate look at its environment anew: what it found there lives as long as the process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _once(measure: Callable[..., float]) -> Callable[..., float]:
    """A function that gives its first answer for ever."""
    answers: list[float] = []

    def answer(*args: Any) -> float:
        if not answers:
            answers.append(measure(*args))
        return answers[0]

    return answer


def _agree_on_port(rank: int, file: Path) -> str:
    """A port that is free now: rank 0 chooses it, the others wait for its file."""
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            file.with_suffix(".tmp").write_text(str(probe.getsockname()[1]))
        file.with_suffix(".tmp").rename(file)
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        assert time.monotonic() < deadline, f"rank 0 does not come to {file.name}"
        time.sleep(0.01)
    return file.read_text()


@contextlib.contextmanager
def _noted(notes: Path, rank: int) -> Iterator[None]:
    """Note all that this rank holds of model and optimizer, before the first step and whenever the run saves."""
    from common import guard, saver

    begin, save = guard.FiniteGuard.__init__, saver.Saver.save
    holds: list[Any] = []

    def noting_begin(self: guard.FiniteGuard, model: Any, optimizer: Any, *more: Any) -> None:
        begin(self, model, optimizer, *more)
        holds[:] = model, optimizer
        _note(notes / f"begin-{rank}.json", *holds)

    def noting_save(self: saver.Saver, *what: Any) -> None:
        _note(notes / f"end-{rank}.json", *holds)
        save(self, *what)

    guard.FiniteGuard.__init__, saver.Saver.save = noting_begin, noting_save
    try:
        yield
    finally:
        guard.FiniteGuard.__init__, saver.Saver.save = begin, save


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
    """Name of each tensor that a rank held at the "begin" or the "end" of a segment, to its digests: one, if all agree."""
    found: dict[str, set[str]] = {}
    files = sorted(notes.glob(f"{when}-*.json"))
    assert files, f"no rank has noted what it held at the {when}"
    for file in files:
        for name, digest in json.loads(file.read_text()).items():
            found.setdefault(name, set()).add(digest)
    return found
