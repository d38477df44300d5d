"""How a tool reads its command line, and refuses it in one sentence.

Each tool is a folder. Its `__main__.py` reads the flags, and nothing that it imports needs torch, which takes seconds.
The module that does the work is imported when the flags are right: tests/tools/test_commands.py looks at every tool.
"""

import contextlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import tyro
from safetensors import SafetensorError

from common import UserError, printable

USAGE_ERROR = 2  # as in common/run/exits.py, which needs torch
Source = Annotated[Path, tyro.conf.Positional]
Kept = Annotated[str, tyro.conf.Positional]  # a path, or the URL of an object store, of which a Path takes a slash


def run(commands: Mapping[str, Callable[..., None]], module: str, about: str | None) -> None:
    """Parse and run one of the commands of a module."""
    with one_process():
        tyro.extras.subcommand_cli_from_dict(dict(commands), prog=f"python -m {module}", description=about)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Where a tool computes without other ranks: an error is one sentence, and `tool | head` ends."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    except (UserError, OSError, SafetensorError) as error:  # the last two: a full disk
        sys.exit(f"error: {printable(str(error))}")


def refuse(error: UserError) -> NoReturn:
    """Print what is wrong, and exit with the code of a refusal."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(USAGE_ERROR)
