"""One rank of one run of a recipe: the same train.py, with notes of what it holds, and signals at a chosen step."""

import contextlib
import hashlib
import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm


def run(
    path: str, argv: list[str], env: dict[str, str], log: str, notes: str, signal_at: tuple[int, int], rates: bool
) -> None:
    """Run a train.py in this process, which then ends.

    Args:
        path: the train.py.
        argv: its flags.
        env: the whole environment.
        log: file for what it prints.
        notes: folder for the digests of what this rank holds; "" for none.
        signal_at: the step before which this rank signals itself, and the signal; (0, 0) for never.
        rates: count FLOPs and compute as fast as the recipe does; otherwise as exactly as the type allows.
    """
    from common.train import flops

    with Path(log).open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    if env.get("ACCELERATE_CONFIG"):
        from launch.strategy import environment

        os.environ.update(environment(os.environ.pop("ACCELERATE_CONFIG")))
    # A rank that is killed would leave tqdm's usual lock, one between processes, to multiprocessing, which then warns.
    tqdm.set_lock(threading.RLock())
    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).parent))
    if not rates:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        none: Any = lambda _loss, _model, train: flops.Sample(0.0, train.sample_units)  # noqa: E731
        flops.count_sample = none  # it takes a second
    with noted(Path(notes), int(env["RANK"])) if notes else contextlib.nullcontext(), _signalled(notes, *signal_at):
        runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()


@contextlib.contextmanager
def noted(notes: Path, rank: int) -> Iterator[None]:
    """Note all that this rank holds of model and optimizer, before the first step and whenever the run saves."""
    from common.state import saver
    from common.train import guard

    begin = guard.FiniteGuard.__init__
    save = saver.Saver.save
    holds: list[Any] = []

    def noting_begin(self: Any, model: Any, optimizer: Any, *more: Any) -> None:
        begin(self, model, optimizer, *more)
        holds[:] = model, optimizer
        device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "CPU"
        (notes / f"device-{rank}").write_text(device)
        _note(notes / f"begin-{rank}.json", *holds)

    def noting_save(self: saver.Saver, *what: Any) -> None:
        _note(notes / f"end-{rank}.json", *holds)
        save(self, *what)

    guard.FiniteGuard.__init__ = noting_begin  # type: ignore[method-assign, assignment]
    saver.Saver.save = noting_save  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        guard.FiniteGuard.__init__ = begin  # type: ignore[method-assign]
        saver.Saver.save = save  # type: ignore[method-assign]


def _note(file: Path, model: Any, optimizer: Any) -> None:
    """Write a digest of each tensor, put together from the parts of all ranks that share it (all of them take part)."""
    from common import keymap

    digests = {}
    for name, tensor in keymap.tensors(model, optimizer).items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        content = whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        digests[name] = f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(content).hexdigest()}"
    file.write_text(json.dumps(digests))


def held(notes: Path, when: str) -> dict[str, set[str]]:
    """Name of each tensor held at the "begin" or the "end" of a run, to its digests: one, if all ranks agree."""
    found: dict[str, set[str]] = {}
    files = sorted(notes.glob(f"{when}-*.json"))
    assert files, f"no rank has noted what it held at the {when}"
    for file in files:
        for name, digest in json.loads(file.read_text()).items():
            found.setdefault(name, set()).add(digest)
    return found


@contextlib.contextmanager
def _signalled(notes: str, at_step: int, number: int) -> Iterator[None]:
    """Signal this process before a step, and write down when."""
    from common.protect import watch

    step_begins = watch.Watch.step

    def step(self: watch.Watch, step: int) -> None:
        step_begins(self, step)
        if step == at_step:
            Path(notes, "signalled").write_text(str(time.time()))
            os.kill(os.getpid(), number)

    watch.Watch.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        watch.Watch.step = step_begins  # type: ignore[method-assign]
