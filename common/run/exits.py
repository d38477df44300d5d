"""How a process ends: rank 0 prints a refusal once and exits with 2; a crash reaches the other ranks and torchrun."""

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from common import UserError, printable, ranks
from common.run import output, process_group, run_dir
from common.run.process import Process, Rewind, World

USAGE_ERROR = 2  # exit code of every refusal
PEER_FAILED = 3  # exit code of a rank that stops because another one failed
# torchrun kills every rank as soon as one has exited, so the others give rank 0 this long to print the refusal.
GRACE_S = 10.0
JOIN_S = 2.0  # time for the other ranks to reach the same error; they differ only by how long joining the group took
REFUSED = "exits/refused"
# Blocked until `stop.Stop` handles them, so that a run that is still starting also saves before it stops.
HELD_BACK = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def entry(main: Callable[[Process], None]) -> Callable[[], None]:
    """Decorate a recipe's main: a refusal is printed once and exits with 2; a crash reaches torchrun's summary.

    Main gets this process, and is called again where all ranks begin again.
    """

    @functools.wraps(main)
    def wrapped() -> None:
        process = Process(output=output.protect())
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            while True:
                with contextlib.suppress(Rewind):
                    return main(process)
                process_group.finish(process, begins_again=True)
                gc.collect()  # now that no traceback holds it: two models may not fit
                torch.cuda.empty_cache()  # without a GPU, nothing
        except SystemExit:
            raise
        except BaseException as error:
            process.explain(error)
            if isinstance(error, UserError) and _is_rank0():
                # Printed before anything else: once another rank has exited, the launcher kills this one.
                print(f"error: {error}", *_changed(error, process), sep="\n  ", file=sys.stderr, flush=True)
                sys.stdout.flush()
            if process.watch:
                process.watch.report(error)
            _end_workers()
            if not isinstance(error, UserError):
                raise
            if not _is_rank0():
                # Rank 0 has nearly always printed the same error, and this rank is killed while it waits.
                let_rank0_exit(process.world)
                raise
            if process.world:
                _let_others_arrive(process.world)
            # An orderly exit would wait for ranks that may be stuck in a collective.
            os._exit(USAGE_ERROR)

    return record(wrapped)


def _changed(error: UserError, process: Process) -> list[str]:
    """Of what does not fit the run of a config.json, the flags that are others now: one of them is why."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # a checkpoint may lie alone
        lines = run_dir.changed(Path(error.config), process.flags) if error.config else []
        return [printable("; ".join(lines))] if lines else []
    return []


def _is_rank0() -> bool:
    try:
        return ranks.rank() == 0
    except UserError:  # RANK itself is wrong, on every rank
        return True


def _end_workers() -> None:
    """Kill this process's loader workers: Python would wait for them, as they hold back the SIGTERM that it sends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for worker in multiprocessing.active_children():
        worker.kill()


def let_rank0_exit(world: World | None = None) -> None:
    """Wait for the launcher to kill this rank, as it does once rank 0 has printed the refusal and exited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    if world:
        with contextlib.suppress(dist.DistError):  # rank 0, which may host the store, has exited already
            world.store.add(REFUSED, 1)
    time.sleep(GRACE_S)


def _let_others_arrive(world: World) -> None:
    """Wait until the other ranks have found the same error: one still joining a group would print torch's own."""
    end = time.monotonic() + JOIN_S
    while world.store.add(REFUSED, 0) < dist.get_world_size() - 1 and time.monotonic() < end:
        time.sleep(0.01)


def outlook(path: Path, world_size: int) -> str:
    """What happens after a failure: torchrun starts the ranks again, or the user has to."""
    restarts = ranks.env_int("TORCHELASTIC_RESTART_COUNT", default=0)
    most = ranks.env_int("TORCHELASTIC_MAX_RESTARTS", default=0)
    if restarts < most:
        return f"torchrun starts all ranks again, from the newest checkpoint (restart {restarts + 1} of {most})"
    return f"to continue from the newest checkpoint, run: {run_dir.resume_command(path, world_size)}"
