"""Rank and size, printing from rank 0, asking rank 0, comparing values over ranks. Imports nothing of common."""

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm import tqdm

from common import UserError

Answer = TypeVar("Answer")
# Packages whose versions decide numbers and data, where they are used.
PACKAGES = ("torch", "torchvision", "numpy", "PIL", "datasets", "pyarrow", "tokenizers", "gymnasium", "accelerate")


def env_int(*names: str, default: int) -> int:
    """The first of these environment variables that is set, as a number."""
    return int(next((os.environ[name] for name in names if name in os.environ), default))


def rank() -> int:
    """Rank of this process; works before there is a process group."""
    return env_int("RANK", "OMPI_COMM_WORLD_RANK", default=0)


def size() -> int:
    """Number of processes of this run; works before there is a process group."""
    return env_int("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", default=1)


def versions() -> dict[str, str]:
    """Versions of Python and of the `PACKAGES` that this process has imported so far."""
    found = {name: str(sys.modules[name].__version__) for name in PACKAGES if sys.modules.get(name)}
    return {"python": platform.python_version()} | found


def code_digests(recipe: str) -> dict[str, str]:
    """SHA-256 of train.py and of each file of common/, to compare between ranks and to record with the run."""
    common = Path(__file__).parent
    files = {str(path.relative_to(common.parent)): path for path in sorted(common.rglob("*.py"))}
    files |= {"train.py": Path(recipe)}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items()}


def print0(message: str) -> None:
    """Print a line from rank 0 only, above the progress bar if there is one."""
    if rank() == 0:
        tqdm.write(message, file=sys.stdout)
        sys.stdout.flush()


def from_rank0(answer: Callable[[], Answer]) -> Answer:
    """Call `answer` on rank 0; every rank returns its result or raises its UserError (all ranks take part)."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [answer()]
        except UserError as error:
            box = [error]
    dist.broadcast_object_list(box)
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]


def check_same(**groups: Mapping[str, Any]) -> None:
    """Compare small dictionaries over all ranks, which must not train together if they differ.

    Args:
        **groups: this rank's entries by kind, such as `flag={"lr": 0.1}`; picklable and comparable. Of the kind
            "version", only what both ranks have is compared.

    Raises:
        UserError: on every rank; names the first rank that differs from rank 0, the entry and both values.
    """
    mine = {f"{group} {key}": value for group, entries in groups.items() for key, value in entries.items()}
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for other, theirs in enumerate(everyone):
        for key in everyone[0] | theirs:
            if key.startswith("version ") and not (key in everyone[0] and key in theirs):
                continue  # a package that only one of the two has imported so far
            if everyone[0].get(key) != theirs.get(key):
                raise UserError(
                    f"rank {other} was started with {key} {theirs.get(key)!r}, rank 0 with {everyone[0].get(key)!r}: "
                    "start every rank with the same flags, code, data and versions"
                )
