"""Sums and counts in, global means out, with one collective per call; the best values of a run."""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

Sums = dict[str, torch.Tensor]


def add(total: Sums, sums: Sums) -> Sums:
    """Add sums on the device, without waiting for it, and detached from autograd's graph."""
    return {key: total.get(key, 0) + value.detach() for key, value in sums.items()}


def means(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Global means of local sums: one all-reduce, then one division (all ranks take part).

    A rank with the same data as another adds it to the sums and to the count alike, and a rank without a result adds
    nothing to either, so the means are right under every strategy.

    Args:
        sums: scalar tensors of this rank; "count" is the number of items.

    Returns:
        The mean of each sum except "count".
    """
    values = torch.stack([value.double() for value in sums.values()])
    dist.all_reduce(values)
    totals = dict(zip(sums, values.tolist(), strict=True))
    count = totals.pop("count")
    return {key: total / count for key, total in totals.items()}


def best(records: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    """Best value and its step of each metric under val/: the lowest loss or bits per byte, else the highest."""
    found: dict[str, tuple[float, int]] = {}
    for line in records:
        for tag, value in line.items():
            if not tag.startswith("val/") or not math.isfinite(value):
                continue
            sign = -1 if tag.endswith(("loss", "bits_per_byte")) else 1
            if tag not in found or sign * value > sign * found[tag][0]:
                found[tag] = (value, int(line["step"]))
    return found
