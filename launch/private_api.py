"""The private part of Accelerate's launcher that launch/ calls, and those of torch's that it replaces.

Any release may rename them; tests/test_private_api.py looks at each. Of torch, launch/agent.py takes `run.parse_args`
and `run.run`, which are torchrun itself, replaces `PContext.start`, and launch/rendezvous.py reads
`SubprocessContext.subprocess_handlers` and their `proc`: torchrun cannot be told in public to hand signals on to the
ranks, nor how long to wait for machine 0.
"""

from collections.abc import Callable
from typing import Any

CHECKED = {"accelerate": "1.10.0 and 1.15.0"}


def config_reader() -> Callable[..., Any]:
    """The function by which `accelerate launch` adds a config file to its arguments.

    Needs `accelerate.commands.launch._validate_launch_command`; the public `launch_command` starts the ranks as well.

    Raises:
        ValueError: Accelerate has no such function.
    """
    import accelerate
    from accelerate.commands import launch

    reader: Callable[..., Any] | None = getattr(launch, "_validate_launch_command", None)
    if reader is None:
        raise ValueError(
            f"accelerate {accelerate.__version__} has no _validate_launch_command, which ACCELERATE_CONFIG needs: "
            f"install a version it was checked with ({CHECKED['accelerate']})"
        )
    return reader
