"""What a rank writes down while a script runs: one line of JSON for each event, with the script's line behind it."""

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

TORCH = str(Path(torch.__file__).parent)
CHECKPOINT = f"{TORCH}/distributed/checkpoint/"
MOST_ELEMENTS = 4096  # of a tensor or a row that are hashed
MOST_ROWS = 256  # of a batch


@dataclass
class Recorder:
    """The log of one rank, and what its seams must remember of each other.

    Attributes:
        file: events are appended to it.
        roots: folders of the user's code; a frame below one of them is the user's.
        steps: optimizer steps after which epochs are cut short.
        stop: is called when the run has seen enough.
        busy: set while a seam works, so that what it calls is not recorded.
    """

    file: Path
    roots: tuple[str, ...]
    steps: int
    stop: Callable[[], None]
    busy: threading.local = field(default_factory=threading.local)
    optimizers: list[Any] = field(default_factory=list)
    modules: dict[int, nn.Module] = field(default_factory=dict)  # roots of training forwards
    called: set[int] = field(default_factory=set)  # of these, since the last step
    inner: dict[int, nn.Module] = field(default_factory=dict)  # what a DDP holds, to the DDP
    backwards: int = 0
    done: int = 0  # optimizer steps
    number: int = 0
    rest: Callable[[], None] = lambda: None  # what is left to do where the script ends
    flat: bool = False  # FSDP of the first generation: a rank holds a part of all parameters, as one tensor
    local: set[str] = field(default_factory=set)  # fingerprints of gradients after the last backward pass
    summed: bool = False  # a sum is what the optimizer gets
    sums: set[str] = field(default_factory=set)  # and of what became of them in a sum over the ranks
    shown: set[float] = field(default_factory=set)  # losses since the last step
    replays: Any = None  # what is to be computed once more: see tools.judge.replay
    kept: bool = False  # whether that has been looked for
    inside: bool = False  # a module's forward

    def log(self, event: str, at: str = "", **fields: Any) -> None:
        """Append an event, at the user's line unless another is given."""
        self.number += 1
        line = {"e": event, "at": at or self.where(), "n": self.number, "step": self.done} | fields
        with self.file.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def where(self) -> str:
        """The user's line that this call comes from, as "path:line"; "" if there is none."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.roots) and "site-packages" not in name:
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def saving(self) -> bool:
        """Whether torch's checkpoints call: they make steps of an optimizer, for it to have a state."""
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(CHECKPOINT):
            frame = frame.f_back
        return frame is not None

    def direct(self, depth: int = 2) -> bool:
        """Whether the caller of a seam is the user's own code."""
        return sys._getframe(depth).f_code.co_filename.startswith(self.roots)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """A short hash of some elements of each tensor."""
    digest = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        flat = local(tensor.detach()).reshape(-1)
        if flat.numel() and flat.device.type != "meta":
            digest.update(flat[:: 1 + flat.numel() // MOST_ELEMENTS].double().cpu().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def row_hashes(inputs: Any) -> list[str]:
    """A hash of each row of the first tensor in a forward's arguments: the identity of its samples."""
    tensor = first_tensor(inputs)
    if tensor is None or tensor.ndim == 0 or tensor.device.type == "meta" or not tensor.numel():
        return []
    rows = local(tensor.detach())[:MOST_ROWS]
    rows = rows.reshape(len(rows), -1)[:, :MOST_ELEMENTS]
    rows = rows.double() if rows.is_floating_point() else rows.long()
    return [hashlib.blake2b(row.contiguous().numpy().tobytes(), digest_size=5).hexdigest() for row in rows.cpu()]


def first_tensor(inputs: Any) -> torch.Tensor | None:
    """The first tensor in a tree of arguments."""
    if isinstance(inputs, torch.Tensor):
        return inputs
    parts = inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, list | tuple) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def num(tensor: Any) -> float | None:
    """The value of a tensor of one element."""
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1 or tensor.device.type == "meta":
        return None
    return float(local(tensor.detach()).double().item())


def samples(inputs: Any) -> int:
    """The length of the first dimension of the first tensor in a forward's arguments."""
    tensor = first_tensor(inputs)
    return len(tensor) if tensor is not None and tensor.ndim else 0
