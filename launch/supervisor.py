"""Run torchrun, but report a failure briefly: which rank failed first, where, and its traceback.

Takes torchrun's own options. After a refusal (exit code 2), which rank 0 has explained, it exits with 2 and prints
nothing. It forwards a request to stop to the ranks and gives them the time they need; torchrun would kill them after
30 s, and would make the launchers of other machines wait five minutes.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from common.run import output
from common.run.exits import PEER_FAILED, USAGE_ERROR
from common.run.stop import SAME_SIGNAL_S, taken_over
from launch import forkserver, private_api, rendezvous

BEFORE = " before the training began: there was nothing to save"
KILL_S = 5.0  # for a rank to end after a repeated request
requests: list[int] = []  # signals that were forwarded
asked: list[float] = []  # when
killed: list[int] = []  # ranks that did not answer
started: list[SubprocessContext] = []  # this machine's ranks, one entry for each start


def main() -> None:
    """Run the recipe; exit with the code of the rank that failed first."""
    output.protect()
    # torchrun's own log wraps its stack trace around the three lines that are printed below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    start = PContext.start
    signals = taken_over()

    def start_and_forward(ranks: SubprocessContext) -> None:
        if requests:  # ranks that were asked to stop, and failed, are not started again
            raise SignalException(f"stopped by {signal.Signals(requests[0]).name}", signal.Signals(requests[0]))
        if server := forkserver.server:
            server.wait_until_ready()
        started.append(ranks)
        start(ranks)  # sets signal handlers of its own
        if server and not args.max_restarts:  # it takes memory
            server.close()
        for number in signals:
            signal.signal(number, lambda number, frame: forward(ranks, number, frame))
        signal.signal(signal.SIGTSTP, lambda *_: suspend(ranks))

    PContext.start = start_and_forward  # type: ignore[assignment, method-assign]
    if os.environ.get("TORCH_CPP_LOG_LEVEL") == "FATAL":  # the ranks report more; warnings are about a closing store
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["LAUNCHER_PID"] = str(os.getpid())  # for the ranks, which stop when it is no longer their parent
    args = parse_args(sys.argv[1:])
    if signal.SIGHUP not in signals:  # nohup: torch would handle it nevertheless, and so would the ranks
        args.signals_to_handle = ",".join({*args.signals_to_handle.split(",")} - {"SIGHUP"})
    if args.rdzv_backend == rendezvous.NAME:  # launch/torchrun.sh chooses it, unless its user has chosen another
        rendezvous.prepare(args, started)
    if callable(signal.getsignal(signal.SIGINT)):  # not where a script has it ignored
        signal.signal(signal.SIGINT, leave)
    if forkserver.server:
        private_api.start_ranks_by(forkserver.server.start)
    with tempfile.TemporaryDirectory(prefix="torchelastic_", ignore_cleanup_errors=True) as folder:
        args.log_dir = args.log_dir or folder  # torchrun would leave a folder of its own behind at each launch
        sys.exit(supervise(args))


def supervise(args: argparse.Namespace) -> int:
    """Run the ranks to their end; returns the exit code."""
    try:
        run(args)
        return 128 + requests[0] if requests else 0
    except SignalException as stopped:  # there was no rank to forward it to, or it came while they were started
        for ranks in started:
            end(ranks)
        return 128 + stopped.sigval
    except (RendezvousError, DistError) as error:
        return rendezvous.explain(error, args)
    except ChildFailedError as error:
        return explain(error)


def explain(error: ChildFailedError) -> int:
    """Print which rank failed first, where no rank has done so; returns the exit code."""
    peers = {rank: failure for rank, failure in error.failures.items() if failure.exitcode == PEER_FAILED}
    rank0 = error.failures.get(0)
    if peers and not (rank0 and traceback_of(rank0.error_file)):  # else rank 0 has printed their finding
        print(traceback_of(min(peers.items())[1].error_file), file=sys.stderr)
    if killed:  # who has said so
        return 128 + requests[0]
    causes = {rank: failure for rank, failure in error.failures.items() if rank not in peers}
    if not causes:
        return 1
    rank, failure = min(causes.items(), key=lambda item: item[1].timestamp)
    traceback = traceback_of(failure.error_file)
    if requests and (failure.exitcode == -requests[0] or "KeyboardInterrupt" in traceback):
        name = signal.Signals(requests[0]).name
        print(f"\nstopped by {name}{BEFORE}", file=sys.stderr)
        return 128 + requests[0]
    if traceback:  # it raised, even if torchrun then killed it because another rank exited first
        print(f"\nrank {rank} (pid {failure.pid}) failed first\n{traceback}", file=sys.stderr)
        return 1
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    if code != USAGE_ERROR:
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with code {code}"
        print(f"\nrank {rank} (pid {failure.pid}) {how}, without a traceback", file=sys.stderr)
        if code == 1:  # as faulthandler ends a process, see common/protect/watch.py
            print(
                "if its output ends with 'Timeout' and a stack, Python was locked or suspended there", file=sys.stderr
            )
        print("see logs/ in the run's folder, and the kernel's log (dmesg) if memory ran out", file=sys.stderr)
    return code


def leave(number: int, _frame: FrameType | None) -> None:
    """End before there are ranks.

    Raises:
        SignalException: always; torchrun's own code lets it pass.
    """
    print(f"\nstopped by {signal.Signals(number).name}{BEFORE}", file=sys.stderr)
    raise SignalException(f"stopped by {signal.Signals(number).name}", signal.Signals(number))


def forward(ranks: PContext, number: int, _frame: FrameType | None) -> None:
    """Forward a request to stop to this machine's ranks.

    Raises:
        SignalException: no rank is running.
    """
    reached = 0
    for pid in ranks.pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    if not reached:
        raise SignalException(f"stopped by {signal.Signals(number).name}", signal.Signals(number))
    if requests and time.monotonic() - asked[0] > SAME_SIGNAL_S:  # which ends a rank at once, if it can answer
        killer = threading.Timer(KILL_S, kill, [ranks, number])
        killer.daemon = True
        killer.start()
    requests.append(number)
    asked.append(time.monotonic())


def kill(ranks: PContext, number: int) -> None:
    """Kill this machine's ranks that a repeated request has not ended: frozen, or locked inside a function of C."""
    for rank, pid in end(ranks).items():
        killed.append(rank)
        name = signal.Signals(number).name
        print(f"\nrank {rank} (pid {pid}) did not answer {name}, sent twice: killed", file=sys.stderr)


def end(ranks: PContext) -> dict[int, int]:
    """Kill this machine's ranks that still run, with their loader workers; returns them, with their process ids."""
    found = {}
    for rank, pid in ranks.pids().items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
            found[rank] = pid
    return found


def suspend(ranks: PContext) -> None:
    """Stop this machine's ranks and this process, as Ctrl-Z asks, until the shell continues it (`fg`, `bg`)."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in ranks.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)  # with its loader workers: each rank leads a session
        if number == signal.SIGSTOP:
            os.kill(os.getpid(), number)  # returns after SIGCONT


def traceback_of(error_file: str) -> str:
    """The traceback that @record wrote; "" if there is none."""
    try:
        details = json.loads(Path(error_file).read_text())["message"]["extraInfo"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return details["py_callstack"].rstrip()
