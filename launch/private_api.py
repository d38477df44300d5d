"""The private part of Accelerate's launcher that launch/ calls, and those of torch's that it replaces.

Any release may rename them; tests/test_private_api.py looks at each. Of torch, launch/supervisor.py takes
`run.parse_args` and `run.run`, which are torchrun itself, replaces `PContext.start`, and launch/rendezvous.py reads
`SubprocessContext.subprocess_handlers` and their `proc`: torchrun cannot be told in public to hand signals on to the
ranks, nor how long to wait for machine 0. Nothing here imports torch before it is called.
"""

import ctypes
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
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


def start_ranks_by(start: Callable[[tuple[str, ...], Mapping[str, str], int, int], Any]) -> None:
    """Let torchrun ask for each rank's process here, before it starts one itself.

    Replaces `SubprocessHandler._popen`. Without it, torchrun starts all ranks itself: slower, and nothing else.

    Args:
        start: function of a command, its environment, and the descriptors of its output and errors, that returns what
            torchrun uses of a `subprocess.Popen`; None for a process that torchrun is to start.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    ordinary = getattr(SubprocessHandler, "_popen", None)
    if ordinary is None:
        return

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        files = (getattr(handler, "_stdout", None), getattr(handler, "_stderr", None))
        out, err = (file.fileno() if file else number for number, file in enumerate(files, start=1))
        return start(tuple(args), env, out, err) or ordinary(handler, args, env)

    SubprocessHandler._popen = popen  # type: ignore[assignment, method-assign]


LOG_LEVELS = ("INFO", "WARNING", "ERROR", "FATAL")  # of TORCH_CPP_LOG_LEVEL, by their numbers


def set_log_level(name: str) -> None:
    """Set the level of torch's C++ log, which torch reads from TORCH_CPP_LOG_LEVEL only when it is imported.

    Sets `FLAGS_caffe2_log_level` of libc10.so; leaves it as it is for a name that is none.
    """
    level = _log_level()
    if level is not None and name in LOG_LEVELS:
        level.value = LOG_LEVELS.index(name)


def can_set_log_level() -> bool:
    """Whether this torch has what `set_log_level` sets."""
    return _log_level() is not None


def _log_level() -> ctypes.c_int | None:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
