"""The first samples of both ranks once more, as two batches and as one: what one process would compute from them.

Rank 0 does it with a copy of the model in float64, without dropout, and compares operation by operation.
"""

import copy
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import load, nn, save
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from tools.judge.record import first_tensor

ROWS = 2  # samples of each rank
MOST_PARAMETERS = 2**24
MOST_ELEMENTS = 2**25  # of all results of a forward pass
# Relative to the largest value: sums are added up in another order. A model may compute in fewer bits than it is given.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
COARSE = 0.05  # of bfloat16 and float16


class Operations(TorchDispatchMode):
    """Each operation of a forward pass: its name, the user's line, and its floating-point results."""

    def __init__(self, roots: tuple[str, ...], at: str) -> None:
        """`at` is the line of what is not in the folders `roots`."""
        super().__init__()
        self.roots = roots
        self.at = at
        self.found: list[tuple[str, str, list[torch.Tensor]]] = []
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns):
            return result  # a view computes nothing
        parts = [one for one in tree.tree_leaves(result) if torch.is_tensor(one) and one.is_floating_point()]
        self.elements += sum(one.numel() for one in parts)
        if self.elements > MOST_ELEMENTS:
            raise MemoryError("its results are too large")
        copies = [one.detach().clone() for one in parts]  # a later operation may write into them
        self.found.append((str(func.overloadpacket).removeprefix("aten."), self.where(), copies))
        return result

    def where(self) -> str:
        """The line of the user's model that calls an operation."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != __file__:
            if frame.f_code.co_filename.startswith(self.roots) and "site-packages" not in frame.f_code.co_filename:
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return self.at


def keep(record: Any, place: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Write this rank's first rows where rank 0 finds them; rank 0 keeps a copy of the model as it is now."""
    inner = getattr(module, "module", module)
    parameters = [*inner.parameters()]
    split = record.flat or any(isinstance(one, DTensor) for one in parameters)
    large = sum(one.numel() for one in parameters) > MOST_PARAMETERS
    if split or large:
        record.log("replayed", why="the model is split over the ranks" if split else "the model is large")
    if split or large or place.size != 2:
        return
    found = first_tensor([*args, kwargs])
    size = len(found) if found is not None and found.ndim else 0

    def row(one: torch.Tensor) -> torch.Tensor:
        one = one.detach()[:ROWS] if is_batch(one, size) else one.detach()
        return one.double() if one.is_floating_point() else one.clone()

    path = place.own / "rows.pt"
    try:
        rows = tree.tree_map_only(torch.Tensor, row, (args, kwargs))
        if place.rank == 0:
            record.replays = copy.deepcopy(inner).double(), rows, min(size, ROWS), record.where()
        else:
            save((rows, min(size, ROWS)), f"{path}.part")
            os.replace(f"{path}.part", path)
    except Exception as error:
        record.log("replayed", why=reason(error))


def reason(error: Exception) -> str:
    """Why a model was not computed once more: it need not be made for a copy in float64."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"


def is_batch(tensor: torch.Tensor, size: int) -> bool:
    """Whether the first dimension is that of the samples."""
    return tensor.ndim > 0 and len(tensor) == size > 0


def compare(record: Any, place: Any) -> None:
    """Replay as soon as the other rank's rows are there, and write down what came out."""
    path: Path = place.own / "rows.pt"
    if record.replays is None or not path.exists():
        return
    kept = record.replays
    record.replays = None
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    record.busy.alone = record.busy.loss = record.inside = True
    try:
        found = differences(record.roots, *kept, *load(path, weights_only=True))
    except Exception as error:
        found = {"why": reason(error)}
    finally:
        record.busy.alone = record.busy.loss = record.inside = False
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
    record.log("replayed", **({"at": kept[-1], "why": ""} | found))


def differences(
    roots: tuple[str, ...], module: nn.Module, ours: Any, size: int, at: str, theirs: Any, other: int
) -> dict[str, Any]:
    """The first operation by which one batch of all rows is not the two batches side by side; {} if there is none."""

    def run(rows: Any, seed: int = 0) -> list[tuple[str, str, list[torch.Tensor]]]:
        model = copy.deepcopy(module)
        for one in model.modules():
            if isinstance(one, nn.modules.dropout._DropoutNd | nn.SyncBatchNorm):
                one.eval()  # the first is random, the second as on one process
        torch.manual_seed(seed)
        with Operations(roots, at) as operations, torch.no_grad():
            model(*rows[0], **rows[1])
        return operations.found

    def joined(a: Any, b: Any) -> Any:
        both = torch.is_tensor(a) and torch.is_tensor(b) and is_batch(a, size) and is_batch(b, other)
        return torch.cat([a, b]) if both else a

    first, again, second = run(ours), run(ours, 1), run(theirs)
    whole = run(tree.tree_map(joined, ours, theirs))
    most = TOLERANCES[torch.float64]
    for a, same, b, c in zip(first, again, second, whole, strict=False):
        if len({a[0], b[0], c[0]}) > 1:
            return {"op": c[0], "at": c[1], "size": 1.0}
        for x, x_again, y, z in zip(a[2], same[2], b[2], c[2], strict=True):
            most = max(most, TOLERANCES.get(z.dtype, COARSE))
            if gap(x, x_again) > most:
                return {"why": f"the forward pass draws random numbers ({c[0]})"}
            if (far := distance(x, y, z)) > most:
                return {"op": c[0], "at": c[1], "size": far}
    return {}


def distance(x: torch.Tensor, y: torch.Tensor, whole: torch.Tensor) -> float:
    """How far one batch's result is from both beside each other, added up, or as a mean; 0 where it is of no batch."""
    for dim in range(whole.ndim if x.ndim == y.ndim == whole.ndim else 0):
        shapes = [(*one.shape[:dim], *one.shape[dim + 1 :]) for one in (x, y, whole)]
        if shapes[0] == shapes[1] == shapes[2] and x.shape[dim] + y.shape[dim] == whole.shape[dim]:
            return gap(torch.cat([x, y], dim), whole)
    if not x.shape == y.shape == whole.shape:
        return 1.0
    return min(gap(one, whole) for one in (x, x + y, (x + y) / 2))


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    if a.shape != b.shape:
        return 1.0
    if not a.numel():
        return 0.0
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))
