"""Sums and counts in, global means out, one collective per call; the best of them; throughput and MFU."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from common.data import Batch, BatchReader

Sums = dict[str, torch.Tensor]

# Dense bfloat16 peak of one GPU in FLOP/s without sparsity, from NVIDIA's data sheets; the first that is in its name.
PEAK_FLOPS = {
    **{"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12},
    **{"H200 NVL": 835e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12},
}


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


def count_flops(loss: Callable[[nn.Module, Batch], torch.Tensor], model: nn.Module, train: BatchReader) -> float:
    """FLOPs of one training sample, forward and backward, from the shapes of the operators: on the meta device.

    Args:
        loss: of the model on a batch.
        model: the plain one, with or without weights.
        train: where a sample is to be had.
    """
    from torch.utils.flop_counter import FlopCounterMode

    first = np.zeros(2, np.int64)  # twice the same: BatchNorm wants two
    inputs, targets = (tensor.to("meta") for tensor in train.read(first, first))
    with FlopCounterMode(display=False) as counter:
        loss(copy.deepcopy(model).to("meta"), Batch(inputs, targets, len(first), True)).backward()
    return counter.get_total_flops() / len(first)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that one rank could reach at best: the data sheet's for a known GPU, else a measured large matmul."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for chip, peak in PEAK_FLOPS.items():
            if chip in name:
                return peak
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
