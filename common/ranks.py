"""Rank and size, printing from rank 0, asking rank 0, comparing values over ranks. Imports nothing of common.

Values travel as JSON. torch's own collectives of objects unpickle what comes, and a pickle can run any code.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from common import UserError, __version__, printable

Answer = TypeVar("Answer")
# Packages whose versions decide numbers and data, where they are used.
PACKAGES = ("torch", "torchvision", "numpy", "PIL", "datasets", "pyarrow", "tokenizers", "gymnasium", "accelerate")
MOST_PRINTED = 10_000  # characters at once: the command that continues a run may be long


def env_int(*names: str, default: int) -> int:
    """The first of these environment variables that is set, as a number.

    Raises:
        UserError: it is not a whole number.
    """
    name = next((name for name in names if name in os.environ), "")
    try:
        return int(os.environ[name]) if name else default
    except ValueError:
        raise UserError(f"{name}={os.environ[name]} in the environment must be a whole number") from None


def rank() -> int:
    """Rank of this process; works before there is a process group."""
    return env_int("RANK", default=0)


def size() -> int:
    """Number of processes of this run; works before there is a process group."""
    return env_int("WORLD_SIZE", default=1)


def versions() -> dict[str, str]:
    """Versions of Brigade, of Python, and of the `PACKAGES` that this process has imported so far."""
    found = {name: str(sys.modules[name].__version__) for name in PACKAGES if sys.modules.get(name)}
    return {"brigade": __version__, "python": platform.python_version()} | found


def code_digests(recipe: str) -> dict[str, str]:
    """SHA-256 of train.py and of each file of common/, to compare between ranks and to record with the run."""
    top = Path(__file__).parents[1]
    files = {str(one.relative_to(top)): one for one in sorted(top.glob("common/**/*.py"))} | {"train.py": Path(recipe)}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items()}


def print0(message: str) -> None:
    """Print a line from rank 0 only, above the progress bar if there is one."""
    if rank() == 0:
        tqdm.write(printable(message, MOST_PRINTED), file=sys.stdout)
        sys.stdout.flush()


def listed(names: list[str], most: int = 5) -> str:
    """The first names for a line, and how many more there are: "a, b and 3 more"."""
    shown = ", ".join(printable(name, 300) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def gather(value: Any, group: Any = None) -> list[Any]:
    """This value of each rank, by rank (all ranks of the group take part); JSON values, so that tuples become lists.

    Without a process group, of this process alone.
    """
    if not dist.is_initialized():
        return [json.loads(json.dumps(value))]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([mine.numel()]), group=group)
    sizes = [int(count) for count in counts]
    texts = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel())), group=group)
    return [json.loads(bytes(text[:size].numpy())) for text, size in zip(texts, sizes, strict=True)]


def from_rank0(answer: Callable[[], Answer], place: object = "a file") -> Answer:
    """Call `answer` on rank 0; every rank returns its result or raises a UserError (all ranks take part).

    Without a process group, of this process alone.

    Args:
        answer: returns a JSON value; a tuple becomes a list.
        place: what it reads, to name a disk or server that does not answer.
    """
    mine: dict[str, Any] = {}
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            mine = {"answer": answer()}
        except UserError as error:
            mine = {"refusal": str(error)}
        except (OSError, RuntimeError) as error:
            mine = {"refusal": f"{place} cannot be read: {error}"}
    found = gather(mine)[0]
    if "refusal" in found:
        raise UserError(found["refusal"])
    return found["answer"]


def check_same(**groups: Mapping[str, Any]) -> None:
    """Compare small dictionaries over all ranks, which must not train together if they differ.

    Args:
        **groups: this rank's entries by kind, such as `flag={"lr": 0.1}`. What JSON does not know is compared as text.
            Of the kind "version", only what both ranks have is compared.

    Raises:
        UserError: on every rank; names the first rank that differs from rank 0, the entry and both values.
    """
    # The kind and the name, which are one word for the data's digest.
    mine = {" ".join({group: 0, key: 0}): value for group, entries in groups.items() for key, value in entries.items()}
    everyone = gather(json.loads(json.dumps(mine, default=repr)))
    for other, theirs in enumerate(everyone):
        for key in everyone[0] | theirs:
            if key.startswith("version ") and not (key in everyone[0] and key in theirs):
                continue  # a package that only one of the two has imported so far
            if everyone[0].get(key) != theirs.get(key):
                raise UserError(
                    f"rank {other} was started with {key} {theirs.get(key)!r}, rank 0 with {everyone[0].get(key)!r}: "
                    "start every rank with the same flags, code, data and versions"
                )
