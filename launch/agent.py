"""What launch/torchrun.sh runs: torchrun's own agent, and before it the process from which ranks are forked.

A rank that is forked here runs its recipe at the end of this file, as `python -u train.py` would.
"""

import sys

from launch import forkserver


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
