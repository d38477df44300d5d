"""What launch/torchrun.sh runs: torchrun's own agent, and before it the process from which ranks are forked.

A rank that is forked here runs its recipe at the end of this file, as `python -u train.py` would.
"""

import os
import sys

SIGINT = 2  # signal.SIGINT, before that module is there
LAST_WORDS = b"\nstopped by SIGINT before the training began: there was nothing to save\n"


def leave(*_: object) -> None:
    """End a launcher that has nothing to tidy up. An exception would not do: torch's imports catch some."""
    os.write(2, LAST_WORDS)
    os._exit(128 + SIGINT)


# Ctrl-C ends in one line from here on, and until the supervisor forwards it to the ranks: the imports take seconds.
try:
    import signal

    if __name__ == "__main__" and signal.getsignal(SIGINT) is signal.default_int_handler:
        signal.signal(SIGINT, leave)
except KeyboardInterrupt:
    leave()

from launch import forkserver  # noqa: E402


def main() -> None:
    """Supervise the ranks; only now, because a rank imports its own `common`, which need not be this one."""
    from launch import supervisor

    supervisor.main()


if __name__ == "__main__":
    if program := forkserver.begin(sys.argv[1:]):
        # Not in a function, so that a rank's stack has one line more than that of an ordinary start.
        exec(program.code, program.namespace)  # noqa: S102 (the recipe)
    else:
        main()
