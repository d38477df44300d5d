"""Faults, put into one rank by patching what every recipe calls, before its train.py runs.

A fault is (point, action, rank, step) and what the action needs: when `rank` comes to `point` for the first time
in `step` or later, it does `action`. Rank -1 is the last one. Points and actions are named in POINTS and ACTIONS.
A fault that is given twice comes again after the run has gone back (--on-bad-state rewind).

Who renames one of these renames it here as well; a patch of a name that is not there fails every fault test:

    patched                                          what for
    common.run.process_group.start                   point "at the start"
    common.run.process_group.finish                  faults that come again
    common.run.run_dir.claim                         point "before the claim"
    common.protect.watch.Watch.begin                 point "before the first step"
    common.protect.watch.Watch.step                  the step that this rank is in
    common.train.data.Loader(reader, ...)            point "reading": a reader around the reader
    common.run.stop.Stop.after                       point "end of a step"; note "done"
    common.manifest.seal, write                      points "before the digests", "before the manifest"
    common.train.guard.FiniteGuard(model, ...)       what the actions "drift" and "damage state" may change
    common.state.state_check.StateCheck(model, ...)  the same, of a recipe that does not train and has no FiniteGuard
    common.session.Session.log_train                 its point "update"; log_validation, point "evaluation"
    common.protect.watch.Watch._exit                 note "named": this rank prints the finding about another one
    common.protect.watch.Watch._let_others_read      note "named": this rank has printed its own error
    common.train.flops.count_sample, peak_flops      no measurement
    common.train.sampler.make_plan                   short epochs
    common.workloads.resnet.make_resnet              a small network
    common.workloads.stdlib.read_documents           a small text
    nn.Module.eval                                   point "evaluation"
    torch.autograd.backward                          point "backward"; the action "spoil"
    dcp.save                                         point "before the data"
    common.state.shards.ShardWriter.write_data       points "between the files", "in a file"
    Path.rename                                      points "before the rename", "after the rename"
    shutil.rmtree                                    point "during retention"
    common.run.stop.Stop                             what the action "hear" waits for
    common.protect.peers.Peers.publish               note "beat"
    os._exit                                         note "exited"

MUTANTS patch what a proof must notice, each next to its name.
"""

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import functools
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import BadStateError, keymap, manifest, ranks, seal, session, trust
from common.protect import health, heartbeat, peers, watch
from common.run import output, process_group, run_dir, stop
from common.state import replicas, saver, shards, start, state_check
from common.state.private_api import files_of_rank
from common.train import data, flops, guard, sampler, sync_batchnorm
from common.workloads import resnet, stdlib
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.harness import damage, runner

Fault = tuple[Any, ...]
POINTS = (
    *(
        "at the start",
        "before the claim",
        "before the first step",
        "reading",
        "backward",
        "update",
        "end of a step",
        "evaluation",
    ),
    *("before the data", "between the files", "in a file", "before the digests", "before the manifest"),
    *("before the rename", "after the rename", "during retention"),
)
EPOCH_STEPS = 3  # every epoch ends with the last sample of a step, so that a run can be stopped at the very edge
WAIT_S = runner.HANG_S  # at most, for a test


class _Self:
    """What this rank is doing, and what is still to happen to it."""

    pid = rank = step = 0
    first_attempt = True
    events = Path(os.devnull)
    due: list[Fault] = []  # noqa: RUF012
    later: list[Fault] = []  # noqa: RUF012
    watching: watch.Watch
    stopping: stop.Stop
    model: nn.Module
    optimizer: torch.optim.Optimizer
    shared: list[nn.Parameter] = []  # noqa: RUF012
    spoilt = False


def run(path: str, argv: Sequence[str], faults: Sequence[Fault], events: str, mutant: str = "") -> None:
    """Run a recipe in this process with these faults; what happens when is appended to the file `events`."""
    _Self.pid, _Self.rank = os.getpid(), int(os.environ.get("RANK", "0"))
    _Self.events = Path(events)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    # A fault does not come again in the processes that torchrun starts in the place of those that died of it.
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    _Self.due = [one for one in faults if one[2] % size == _Self.rank and (not again or one[1] == "raise")]
    _Self.later = [one for i, one in enumerate(_Self.due) if one in _Self.due[:i]]
    _Self.due = [*dict.fromkeys(_Self.due)]
    assert all(point in POINTS and action in ACTIONS for point, action, *_ in faults)
    note("start")
    _shrink()
    _patch(drifts=any(action in ("drift", "damage state", "grow") for _, action, *_ in faults))
    if "optimizer=None" in Path(path).read_text():  # what comes before a result is recorded
        _before(session.Session, "log_train", _reaches("update"))
        _before(session.Session, "log_validation", _reaches("evaluation"))
    if mutant:
        MUTANTS[mutant]()
    sys.argv = [path, *argv]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing, which runs the ranks of a test, exits without them


def note(event: str, **more: str) -> None:
    """Write down what happens here and now; a line so short is appended whole."""
    line = {"event": event, "rank": _Self.rank, "pid": _Self.pid, "step": _Self.step, "time": time.time()} | more
    with _Self.events.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _reach(point: str) -> None:
    if os.getpid() != _Self.pid:  # a loader worker
        return
    for fault in [one for one in _Self.due if one[0] == point and one[3] <= _Self.step]:
        _Self.due.remove(fault)
        note("fault", action=fault[1])
        ACTIONS[fault[1]](*fault[4:])


# --- points -----------------------------------------------------------------------------------------------


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
    assert callable(getattr(owner, name))
    setattr(owner, name, by)


def _before(owner: Any, name: str, then: Callable[..., object]) -> None:
    """Call `then` with the same arguments first."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def patched(*args: Any, **kwargs: Any) -> Any:
        then(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, patched)


def _after(owner: Any, name: str, then: Callable[..., object]) -> None:
    """Call `then` with the same arguments afterwards."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def patched(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        then(*args, **kwargs)
        return result

    setattr(owner, name, patched)


def _reaches(point: str) -> Callable[..., None]:
    return lambda *_, **__: _reach(point)


def _notes(event: str) -> Callable[..., None]:
    return lambda *_, **__: note(event)


class _Reader:
    """A data set whose reading is a point."""

    def __init__(self, reader: data.BatchReader) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, *request: Any) -> Any:
        _reach("reading")
        return self.reader.read(*request)


def _is_checkpoint(path: Any) -> bool:
    return re.fullmatch(r"step_\d{8}", Path(path).name) is not None


def _patch(drifts: bool) -> None:
    def keep_watch(made: watch.Watch, *_: Any) -> None:
        _Self.watching = made

    def keep_stop(made: stop.Stop, *_: Any) -> None:
        _Self.stopping = made

    def note_beat(_: peers.Peers) -> None:
        if threading.current_thread().name == "_watch":  # other threads renew the heartbeat while they compare
            note("beat")

    def begin_step(_: watch.Watch, step: int) -> None:
        _Self.step = step

    def keep_optimizer(_: guard.FiniteGuard, __: nn.Module, optimizer: torch.optim.Optimizer, *___: Any) -> None:
        _Self.optimizer = optimizer

    def keep_state(_: state_check.StateCheck, model: nn.Module, **__: Any) -> None:
        _Self.model, _Self.shared = model, _shared(model)

    def reach_if_checkpoint(point: str) -> Callable[..., None]:
        """Of the last argument: what is renamed to it, or removed."""
        return lambda *args, **_: _reach(point) if _is_checkpoint(args[-1]) else None

    _after(process_group, "finish", lambda *_, **__: _Self.due.extend(_Self.later))
    _after(watch.Watch, "__init__", keep_watch)
    _after(watch.Watch, "step", begin_step)
    _after(stop.Stop, "__init__", keep_stop)
    _after(peers.Peers, "publish", note_beat)
    if drifts:
        _after(guard.FiniteGuard, "__init__", keep_optimizer)
        _after(state_check.StateCheck, "__init__", keep_state)
    _before(process_group, "start", _reaches("at the start"))
    _before(run_dir, "claim", _reaches("before the claim"))
    _before(watch.Watch, "begin", _reaches("before the first step"))
    _patch_reading()
    _patch_backward()
    _before(nn.Module, "eval", _reaches("evaluation"))
    _before(stop.Stop, "after", _reaches("end of a step"))
    _after(stop.Stop, "after", _notes("done"))
    register_optimizer_step_pre_hook(_reaches("update"))
    _before(dcp, "save", _reaches("before the data"))
    _before(shards.ShardWriter, "write_data", _reaches("between the files"))
    _after(shards.ShardWriter, "write_data", _reaches("in a file"))
    _before(manifest, "seal", _reaches("before the digests"))
    _before(manifest, "write", _reaches("before the manifest"))
    _before(Path, "rename", reach_if_checkpoint("before the rename"))
    _after(Path, "rename", reach_if_checkpoint("after the rename"))
    _before(shutil, "rmtree", reach_if_checkpoint("during retention"))
    _before(watch.Watch, "_exit", _notes("named"))
    _before(watch.Watch, "_let_others_read", _notes("named"))  # which comes after a rank has printed its own error
    _before(os, "_exit", lambda _: note("exited") if os.getpid() == _Self.pid else None)  # and no loader worker


def _patch_reading() -> None:
    real = data.Loader.__init__

    def init(self: data.Loader, reader: data.BatchReader, *args: Any, **kwargs: Any) -> None:
        real(self, _Reader(reader), *args, **kwargs)  # type: ignore[arg-type]

    data.Loader.__init__ = init  # type: ignore[method-assign]


def _patch_backward() -> None:
    real = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        _reach("backward")
        if _Self.spoilt:
            _Self.spoilt = False
            several = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            grad_tensors = [torch.full_like(tensor, float("nan")) for tensor in several]
        real(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward


# --- actions ----------------------------------------------------------------------------------------------


def _pretend_version(package: str) -> None:
    """As if this machine had another version of a package."""
    sys.modules[package].__version__ = "1.2.3"  # type: ignore[attr-defined]


def _pretend_bfloat16(native: bool) -> None:
    """As if this machine's processor could compute in bfloat16, or could not."""
    torch.cpu.get_capabilities = lambda: {"bf16": native}


def _send(name: str, pause_s: float = 0.0) -> None:
    os.kill(os.getpid(), signal.Signals[name])
    time.sleep(pause_s)


def _send_and_hear(name: str) -> None:
    _send(name)
    _hear()


def _hear(unless: str = os.devnull) -> None:
    """Wait until all ranks have heard of a reason to stop, and this one knows after which step."""
    end = time.monotonic() + WAIT_S
    while (
        not _Self.stopping._agreed.is_set()
        and (unless == os.devnull or not Path(unless).exists())
        and time.monotonic() < end
    ):
        time.sleep(0.02)


def _let_save_end() -> None:
    for one in threading.enumerate():
        if one.name == "save":
            one.join(WAIT_S)


def _send_until_it_ends(name: str) -> None:
    """Again and again: whoever comes too early is not counted."""
    while True:
        _send(name, stop.SAME_SIGNAL_S + 0.1)


def _send_later(name: str) -> None:
    """After heartbeats that tell the others where this rank is: counted, for on a busy machine they come late."""
    sent = _Self.watching._peers.num_beats
    while _Self.watching._peers.num_beats < sent + 3:
        time.sleep(watch.BEAT_S / 4)
    _send(name)


def _send_group(name: str) -> None:
    """As torchrun does, to the loader workers as well."""
    os.setpgrp()
    os.killpg(0, signal.Signals[name])


def _trickle(run: str, seconds: float) -> None:
    """As a slow disk: bytes come in, while this thread waits in one call."""
    partial = next(Path(run, "checkpoints").glob("step_*.tmp-*"))
    file = files_of_rank(partial, _Self.rank) or [partial / f"shard-{_Self.rank + 1:05d}-slow.safetensors"]
    script = f'for i in $(seq {5 * seconds:.0f}); do printf x >>"$0"; sleep 0.2; done; rm "$0"'
    subprocess.run(["sh", "-c", script, str(file[0])], check=True, timeout=WAIT_S)


def _lock() -> None:
    """A function of C that does not give the interpreter's lock back."""
    ctypes.PyDLL(None).sleep(1000)


def _no_memory() -> None:
    raise MemoryError


def _miscompute() -> None:
    real = health.multiply

    def multiply(rows: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        found = real(rows, device, dtype)
        found[-1, -1] += dtype.is_floating_point
        return found

    health.multiply = multiply


def _find_late(seconds: float) -> None:
    """This rank needs longer than the others to see that its state is bad."""
    _before(BadStateError, "__init__", lambda *_: time.sleep(seconds))


def _forget() -> None:
    real = torch.full

    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = real(*args, **kwargs)
        if found.numel() == health.MEMORY_BYTES // 4:
            found[-1] ^= 4
        return found

    torch.full = full


def _raise() -> None:
    raise ArithmeticError("a fault that was put in")


def _mix_collectives() -> None:
    dist.barrier()


def _spoil() -> None:
    _Self.spoilt = True


def _shared(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of which another rank holds the same part as this one (all ranks)."""

    def part(name: str, parameter: nn.Parameter) -> tuple:
        size, offset = parameter.shape, ()
        if isinstance(parameter, DTensor):
            where = (parameter.device_mesh, parameter.placements)
            size, offset = compute_local_shape_and_global_offset(parameter.shape, *where)
        return keymap.canonical(name), tuple(size), tuple(offset)

    mine = {part(*named): named[1] for named in model.named_parameters()}
    everyone: list[list[tuple]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, list(mine))
    return [one for key, one in mine.items() if math.prod(key[1]) and sum(key in other for other in everyone) > 1]


def _drift() -> None:
    """The smallest change of one number of one parameter that should be the same elsewhere."""
    if not _Self.shared:
        note("nothing shared")
        return
    parameter = _Self.shared[0].data
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    first = (0,) * local.ndim
    local[first] = torch.nextafter(local[first], torch.tensor(float("inf"), dtype=local.dtype))


def _damage_state(kind: str, how: str, seed: int) -> None:
    """Put a NaN, or a flipped bit of what another rank also holds, into a random element of one kind of state."""
    drawn = random.Random(seed)
    if kind == "buffer":
        modules = [one for one in _Self.model.modules() if how == "nan" or sync_batchnorm.is_synchronized(one)]
        found = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    else:
        parameters = _Self.shared if how == "bit" else [*_Self.model.parameters()]
        found = [parameter.data for parameter in parameters]
        if kind == "moment":
            found = [value for one in parameters for value in _Self.optimizer.state[one].values() if value.ndim]
    tensors = [one.to_local() if isinstance(one, DTensor) else one for one in found]
    tensors = [one for one in tensors if one.is_floating_point() and one.numel()]
    if not tensors:
        note("nothing shared")
        return
    tensor = drawn.choice(tensors)
    place = tuple(drawn.randrange(size) for size in tensor.shape)
    changed = tensor[place].detach().reshape(1).clone()
    if how == "nan":
        changed[0] = float("nan")
    else:
        number = changed.view(torch.uint8)
        number[drawn.randrange(len(number))] ^= 1 << drawn.randrange(8)
    tensor[place] = changed[0]


def _grow() -> None:
    """All parameters."""
    with torch.no_grad():
        for parameter in _Self.model.parameters():
            parameter.mul_(100)


def _spin() -> None:
    """Move without an end, as a loop that misses its exit does, in another line at each look of the watch."""
    while True:
        time.sleep(0.05)
        time.sleep(0.05)
        time.sleep(0.05)
        time.sleep(0.05)
        time.sleep(0.05)
        time.sleep(0.05)
        time.sleep(0.05)


def _wait_for(path: str) -> None:
    end = time.monotonic() + WAIT_S
    while not Path(path).exists() and time.monotonic() < end:
        time.sleep(0.02)


def _fill(folder: str) -> None:
    """Take all room of a small disk."""
    with Path(folder, "ballast").open("wb", buffering=0) as file, _until_full():
        while True:
            file.write(bytes(4096))


def _fill_entries(folder: str) -> None:
    """Take all inodes of a small disk."""
    Path(folder, "ballast").mkdir()
    with _until_full():
        for i in itertools.count():
            Path(folder, "ballast", str(i)).touch()


@contextlib.contextmanager
def _until_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _free(folder: str) -> None:
    ballast = Path(folder, "ballast")
    shutil.rmtree(ballast) if ballast.is_dir() else ballast.unlink()


def _print_to(path: str) -> None:
    """As if standard output and error had been a file there, or a pipe to a reader who has left."""
    if path:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    else:
        reader, target = os.pipe()
        os.close(reader)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)


def _lose_server(what: str, folder: str) -> None:
    """As on NFS, when the server no longer knows a folder."""
    real = getattr(Path, what)

    def lost(self: Path, *args: Any, **kwargs: Any) -> Any:
        if Path(folder) in (self, *self.parents):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))
        return real(self, *args, **kwargs)

    _replace(Path, what, lost)


def _btrfs(folder: str, *command: str) -> None:
    subprocess.run(["btrfs", *command, folder], check=True, timeout=WAIT_S)


def _remount(folder: str, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True, timeout=WAIT_S)


def _die_in_a_file(run: str) -> None:
    """As if the process died while it writes."""
    for file in Path(run, "checkpoints").glob("step_*.tmp-*/*.safetensors"):
        damage.truncate(file, file.stat().st_size // 2)
    _send("SIGKILL")


def _die_in_a_deletion(run: str) -> None:
    """Half of the oldest checkpoint is gone."""
    next(min(Path(run, "checkpoints").glob("step_*")).glob("*.safetensors")).unlink()
    _send("SIGKILL")


ACTIONS: dict[str, Callable[..., None]] = {
    "signal": _send,
    "other version": _pretend_version,
    "bfloat16": _pretend_bfloat16,
    "signal later": _send_later,
    "signal and hear": _send_and_hear,
    "signal until it ends": _send_until_it_ends,
    "hear": _hear,
    "signal the process group": _send_group,
    "patience": lambda seconds: setattr(process_group, "TIMEOUT_S", seconds),
    "trickle": _trickle,
    "lock": _lock,
    "no memory": _no_memory,
    "computes wrongly": _miscompute,
    "forgets": _forget,
    "finds late": _find_late,
    "ignore": lambda name: signal.signal(signal.Signals[name], signal.SIG_IGN),
    "raise": _raise,
    "sleep": lambda: time.sleep(1000),
    "spin": _spin,
    "let the save end": _let_save_end,
    "sleep a little": lambda: time.sleep(0.5),
    "exit": lambda: sys.exit(0),
    "barrier": _mix_collectives,
    "spoil": _spoil,
    "drift": _drift,
    "damage state": _damage_state,
    "grow": _grow,
    "wait for": _wait_for,
    "fill": _fill,
    "fill entries": _fill_entries,
    "free": _free,
    "remount": _remount,
    "btrfs": _btrfs,
    "print to": _print_to,
    "lose the server": _lose_server,
    "umask": os.umask,
    "set": lambda name, value: os.environ.update({name: value}),
    "remove": shutil.rmtree,
    "die in a file": _die_in_a_file,
    "die in a deletion": _die_in_a_deletion,
}


# --- small and fast ---------------------------------------------------------------------------------------


def _tiny_resnet(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    convolution = nn.Conv2d(in_channels, 8, 3, padding=1, bias=False)
    head = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
    return nn.Sequential(convolution, nn.BatchNorm2d(8), *head)


def _few_documents() -> dict[str, bytes]:
    return {name: text.encode() for name, text in sorted(topics.topics.items())[:20]}


def _shrink() -> None:
    """A small model, a small text and epochs of three steps: the faults are the same, the waiting is not."""
    _replace(resnet, "make_resnet", _tiny_resnet)  # a language model's size is a matter of flags
    _replace(stdlib, "read_documents", _few_documents)
    # Measuring them takes longer than the training.
    _replace(flops, "peak_flops", lambda *_: (1e12, ""))
    _replace(flops, "count_sample", lambda loss, model, train: flops.Sample(1e12, train.sample_units))
    real = sampler.make_plan

    def make_plan(division: sampler.Division, train: Any, **kwargs: Any) -> sampler.Plan:
        num_samples = train if isinstance(train, int) else len(train)
        return real(division, min(num_samples, EPOCH_STEPS * division.global_batch_size), **kwargs)

    _replace(sampler, "make_plan", make_plan)


# --- mutants: what a proof must notice --------------------------------------------------------------------


def _trust_everything() -> None:
    _replace(manifest, "verify", lambda path, *_: (json.loads((path / manifest.NAME).read_text()), ""))


def _take_any_name() -> None:
    _replace(manifest, "_check", lambda *_: "")


def _keep_parent() -> None:
    parent = os.getppid()
    _replace(os, "getppid", lambda: parent)


def _take_any_rank() -> None:
    _replace(ranks, "check_same", lambda **_: None)


def _compare_nothing() -> None:
    _replace(replicas, "hashes_of", lambda _: {})


def _look_at_nothing() -> None:
    _replace(state_check.StateCheck, "judge", lambda *_: None)


def _watch_nothing() -> None:
    for name in ("_watch", "_tick", "_feel_next", "report"):
        _replace(watch.Watch, name, lambda *_: None)


def _shift_position() -> None:
    real = saver.Saver.save
    _replace(
        saver.Saver,
        "save",
        lambda self, step, tensors, samples, *more: real(self, step, tensors, samples - samples // step, *more),
    )


def _skip_nothing() -> None:
    def make_update(self: guard.FiniteGuard, grad_norm: torch.Tensor) -> None:
        self._optimizer.found_inf = torch.zeros(())

    _replace(guard.FiniteGuard, "skip_if_not_finite", make_update)


def _seal_nothing() -> None:
    _replace(seal, "close", lambda key, name, value: value.encode() if isinstance(value, str) else value)
    _replace(seal, "unseal", lambda key, name, sealed: sealed)


def _print_directly() -> None:
    _replace(output, "protect", output.Output)


def _trust_open_folders() -> None:
    _replace(trust, "refuse_open", lambda *_: None)


def _look_once() -> None:
    _replace(start, "check_newest", lambda found, *_: found)


def _keep_events() -> None:
    """TensorBoard's writer stays the same one, whatever happens to it."""

    class Kept:
        def __get__(self, records: run_dir.Records, _: type) -> Any:
            return records.__dict__["_events"]

        def __set__(self, records: run_dir.Records, events: Any) -> None:
            records.__dict__["_events"] = events or records.__dict__.get("_events")

    run_dir.Records._events = Kept()  # type: ignore[assignment]


def _read_whole_records() -> None:
    real = run_dir._parse

    def parse(file: Path) -> Iterator[tuple[int, dict[str, float], int]]:
        for number, record, end in real(file):
            assert record, f"line {number} is damaged"
            yield number, record, end

    run_dir._parse = parse


def _need_room() -> None:
    """Nothing catches an error of what a start writes."""
    real = run_dir.write_config

    def write_config(*args: Any) -> list[str]:
        try:
            return real(*args)
        except OSError as error:
            raise AssertionError from error

    run_dir.write_config = write_config


def _feel_nothing() -> None:
    _replace(watch.Watch, "_feel_next", lambda _: None)
    _replace(peers.Peers, "next_is_silent", lambda _: False)


MUTANTS = {
    "TensorBoard's writer is kept": _keep_events,
    "damaged records are not left out": _read_whole_records,
    "a start needs room on the disk": _need_room,
    "the bytes of a save do not count": lambda: _replace(heartbeat.Heartbeat, "_bytes_written", lambda _: 0),
    "who fails alone in a save stays in its group": lambda: _replace(saver.Saver, "_leave", lambda _: None),
    "nobody notices that it was frozen": lambda: _replace(heartbeat.Heartbeat, "own_freeze", lambda _: ""),
    "no connection ends": lambda: _replace(watch.Watch, "_feel_next", lambda _: None),
    "no rank feels the end of the next one": _feel_nothing,
    "no thread of C watches the interpreter": lambda: _replace(
        faulthandler, "dump_traceback_later", lambda *_, **__: None
    ),
    "no device is tried": lambda: _replace(health, "find_fault", lambda _: ""),
    "the launcher may die": _keep_parent,
    "output is not protected": _print_directly,
    "open folders are trusted": _trust_open_folders,
    "the folder is looked at once": _look_once,
    "nothing is sealed": _seal_nothing,
    "nothing is verified": _trust_everything,
    "names are not compared": _take_any_name,
    "ranks are not compared": _take_any_rank,
    "replicas are not compared": _compare_nothing,
    "state is not looked at": _look_at_nothing,
    "nobody watches": _watch_nothing,
    "the position is that of the step before": _shift_position,
    "updates that are not finite are made": _skip_nothing,
}
