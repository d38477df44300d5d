"""Sums and counts in, global means out, one collective per call; the best of them."""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

Sums = dict[str, torch.Tensor]


def add(total: Sums, sums: Sums) -> Sums:
    """Add up sums on the device, without waiting for it, and without the graph that led to them."""
    return {key: total.get(key, 0) + value.detach() for key, value in sums.items()}


def means(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Global means of local sums: one all-reduce, then one division (all ranks take part).

    A rank that duplicates another's data adds it to the sums and to the count alike, and a rank without
    a result adds nothing to both, so the means hold for every strategy.

    Args:
        sums: scalar tensors of this rank, with the number of items under "count".

    Returns:
        The mean of each sum but "count".
    """
    values = torch.stack([value.double() for value in sums.values()])
    dist.all_reduce(values)
    totals = dict(zip(sums, values.tolist(), strict=True))
    count = totals.pop("count")
    return {key: total / count for key, total in totals.items()}


def best(records: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    """Best value and its step of each figure under val/: the lowest of a loss or of bits, else the highest."""
    found: dict[str, tuple[float, int]] = {}
    for line in records:
        for tag, value in line.items():
            if not tag.startswith("val/") or not math.isfinite(value):
                continue
            sign = -1 if tag.endswith(("loss", "bits_per_byte")) else 1
            if tag not in found or sign * value > sign * found[tag][0]:
                found[tag] = (value, int(line["step"]))
    return found
