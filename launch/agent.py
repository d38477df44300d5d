"""torchrun, with a failure told in the order a reader needs: which rank, where, its traceback, and no more.

Takes torchrun's own options. A refusal (exit code 2) has been explained by rank 0 already, and is passed on
as it is.
"""

import json
import logging
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

USAGE_ERROR = 2
LEFT = 3  # common/watch.py: this rank left because of another one


def main() -> None:
    """Run the recipe; exit with the code of the rank that failed first."""
    # The agent's own log repeats, around its stack trace, what is said below in three lines.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))
    except SignalException as stopped:  # passed on to the ranks, which have saved and left
        sys.exit(128 + stopped.sigval)
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
        if code != USAGE_ERROR:
            how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {code}"
            print(f"\nrank {rank} (pid {failure.pid}) ended {how}, and left no traceback", file=sys.stderr)
            print("see logs/ in the run's folder, and the kernel's log if it was killed", file=sys.stderr)
        sys.exit(code)


def traceback_of(error_file: str) -> str:
    """What @record kept of the exception; "" if there was none."""
    try:
        details = json.loads(Path(error_file).read_text())["message"]["extraInfo"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return details["py_callstack"].rstrip()


if __name__ == "__main__":
    main()
