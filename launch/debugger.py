"""What breakpoint() calls in a rank, which has no terminal: the debugger would end at once, without a word why."""

import sys

from common import UserError


def explain() -> None:
    """Say where a breakpoint works.

    Raises:
        UserError: always.
    """
    raise UserError(
        "breakpoint() reads from a terminal, and a rank of the launcher has none: run one process, "
        f"python {sys.argv[0]} with the same flags, or set PYTHONBREAKPOINT to a debugger that waits for a connection"
    )
