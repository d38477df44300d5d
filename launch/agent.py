"""torchrun, with a failure told in the order a reader needs: which rank, where, its traceback, and no more.

Takes torchrun's own options. A refusal (exit code 2) has been explained by rank 0 already, and is passed on
as it is. A request to leave is passed on to the ranks, and they take the time they need; torchrun would kill
them after 30 s, and keep the launchers of other machines waiting for its own for five minutes.
"""

import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from launch import private_api, rendezvous

LEFT = 3  # common/watch.py: this rank left because of another one
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # common/stop.py: what makes the ranks save and leave
asked: list[int] = []
started: list[SubprocessContext] = []  # the ranks of this machine, at each start


def main() -> None:
    """Run the recipe; exit with the code of the rank that failed first."""
    if missing := private_api.missing():
        print(f"error: {missing}", file=sys.stderr)
        sys.exit(rendezvous.USAGE_ERROR)
    # The agent's own log repeats, around its stack trace, what is said below in three lines.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    start = PContext.start

    def start_and_listen(ranks: SubprocessContext) -> None:
        started.append(ranks)
        start(ranks)  # sets handlers of its own
        for number in REQUESTS:
            signal.signal(number, lambda number, frame: pass_on(ranks, number, frame))

    PContext.start = start_and_listen  # type: ignore[assignment, method-assign]
    if os.environ.get("TORCH_CPP_LOG_LEVEL") == "FATAL":  # the ranks tell more; warnings are of a store that closes
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    args = parse_args(sys.argv[1:])
    if args.rdzv_endpoint and args.rdzv_backend == "c10d":  # several machines; --standalone has no endpoint yet
        rendezvous.choose_interface(args)
        rendezvous.watch(args, started)
    try:
        run(args)
        if asked:
            sys.exit(128 + asked[0])
    except SignalException as stopped:  # there were no ranks to ask
        sys.exit(128 + stopped.sigval)
    except (RendezvousError, DistError) as error:
        sys.exit(rendezvous.explain(error, args))
    except ChildFailedError as error:
        left = {rank: failure for rank, failure in error.failures.items() if failure.exitcode == LEFT}
        rank0 = error.failures.get(0)
        if left and not (rank0 and traceback_of(rank0.error_file)):  # else rank 0 has printed what they found
            print(traceback_of(min(left.items())[1].error_file), file=sys.stderr)
        causes = {rank: failure for rank, failure in error.failures.items() if rank not in left}
        if not causes:
            sys.exit(1)
        rank, failure = min(causes.items(), key=lambda item: item[1].timestamp)
        traceback = traceback_of(failure.error_file)
        if traceback:  # however it ended: others that left at once may have had it ended, too
            print(f"\nrank {rank} (pid {failure.pid}) failed first\n{traceback}", file=sys.stderr)
            sys.exit(1)
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        if code != rendezvous.USAGE_ERROR:
            how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {code}"
            print(f"\nrank {rank} (pid {failure.pid}) ended {how}, and left no traceback", file=sys.stderr)
            print("see logs/ in the run's folder, and the kernel's log if it was killed", file=sys.stderr)
        sys.exit(code)


def pass_on(ranks: PContext, number: int, _frame: FrameType | None) -> None:
    """Pass a request to leave on to this machine's ranks.

    Raises:
        SignalException: none of them is there.
    """
    told = 0
    for pid in ranks.pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            told += 1
    if not told:
        raise SignalException(f"asked to leave by {signal.Signals(number).name}", signal.Signals(number))
    asked.append(number)


def traceback_of(error_file: str) -> str:
    """What @record kept of the exception; "" if there was none."""
    try:
        details = json.loads(Path(error_file).read_text())["message"]["extraInfo"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return details["py_callstack"].rstrip()


if __name__ == "__main__":
    main()
