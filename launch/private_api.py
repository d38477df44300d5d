"""Private parts of torch's and Accelerate's launchers that launch/ replaces or calls: all of them are here.

Any release may rename them. launch/agent.py asks `missing` before it starts a rank, and tests/test_private_api.py looks
at each part.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

CHECKED = {"torch": "2.11.0 and 2.15.0", "accelerate": "1.10.0 and 1.15.0"}
# Functions, and their arguments. `parse_args` and `run` are torchrun itself, which cannot be told in public to hand
# signals on to the ranks, nor how long to wait for machine 0.
FUNCTIONS: dict[tuple[Any, str], list[str]] = {
    (run, "parse_args"): ["args"],
    (run, "run"): ["args"],
    (PContext, "start"): ["self"],
}
# Attributes that a class's __init__ sets.
ATTRIBUTES: list[tuple[Any, str]] = [
    (SubprocessContext, "subprocess_handlers"),  # the ranks of this machine, by number
    (SubprocessHandler, "proc"),
]


def missing() -> str:
    """Which part this torch does not have, or has with other arguments, in a sentence; "" if all are there."""
    parts = {
        f"{owner.__name__}.{name}({', '.join(wanted)})": _has(owner, name, wanted)
        for (owner, name), wanted in FUNCTIONS.items()
    }
    parts |= {
        f"{owner.__name__}.{name}": name in inspect.unwrap(owner.__init__).__code__.co_names
        for owner, name in ATTRIBUTES
    }
    lacking = [part for part, there in parts.items() if not there]
    if not lacking:
        return ""
    return (
        f"torch {torch.__version__} has no {lacking[0]}, which launch/ needs to stop ranks together and to explain "
        f"failures: install a torch it was checked with ({CHECKED['torch']}), or start the recipe with torchrun"
    )


def _has(owner: Any, name: str, wanted: list[str]) -> bool:
    function = getattr(owner, name, None)
    return function is not None and list(inspect.signature(function).parameters) == wanted


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
