"""Sums and counts in, global means out, with one collective per call; the best values of a run."""

import math
import re
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from common import UserError

Sums = dict[str, torch.Tensor]
MetricsOf = Callable[[dict[str, float]], Mapping[str, float]]  # makes the metrics to show of means
# Metrics of which the lowest is best, by the end of their names; behind it may be the name of a source.
LOWER = re.compile(r"[/_](loss|bits_per_byte|perplexity|error|mae|mse|rmse|wer|cer|fid)(/[\w.-]+)?$")


def add(total: Sums, sums: Sums) -> Sums:
    """Add sums on the device, without waiting for it, and detached from autograd's graph.

    Raises:
        UserError: `sums` is not a dict of tensors without dimensions.
    """
    if not isinstance(sums, Mapping):
        raise UserError(f'forward returned a {type(sums).__name__}, not a dict of sums, such as "loss" and "count"')
    if wrong := {key: value for key, value in sums.items() if not isinstance(value, torch.Tensor) or value.ndim}:
        raise UserError(
            f"forward must return tensors without dimensions, such as loss.sum(): {next(iter(wrong))!r} is none"
        )
    return total | {key: total.get(key, 0) + value.detach() for key, value in sums.items()}


def means(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Global means of local sums: one all-reduce, then one division (all ranks take part).

    A rank with the same data as another adds it to the sums and to the count alike, and a rank without a result adds
    nothing to either, so the means are right under every strategy.

    Args:
        sums: scalar tensors of this rank; "count" is the number of samples; "weight", where it is there, is that of
            the tokens, pixels or boxes that all other sums are over. "count/NAME" and "weight/NAME" are those of a
            part of the samples, such as a source of a mixture, for sums such as "loss/NAME".

    Returns:
        The mean of each sum except counts and weights; NaN if there is no sample, and nothing of a part without one. A
        weight of 0 counts as 1.
    """
    found = totals(sums)
    shown = {}
    for key in found:
        name, slash, part = key.partition("/")
        of_part = slash + part if f"count{slash}{part}" in found else ""
        count = found[f"count{of_part}"]
        divisor = (found.get(f"weight{of_part}", count) or 1.0) if count else 0.0
        if name not in ("count", "weight") and (count or not of_part):
            shown[key] = found[key] / divisor if divisor else math.nan
    return shown


def weight_per_sample(sums: Sums) -> torch.Tensor:
    """Mean "weight" of the samples of a step, (), over all ranks, which take part; a sum of 0 counts as 1."""
    both = torch.stack([sums["weight"].double(), sums["count"].double()])
    dist.all_reduce(both)
    return torch.where(both[0] == 0, 1.0, both[0]) / both[1]


def totals(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Sums over all ranks, with one all-reduce."""
    values = torch.stack([value.double() for value in sums.values()])
    dist.all_reduce(values)
    return dict(zip(sums, values.tolist(), strict=True))


def best(records: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    """Best value and its step of each metric under val/: the lowest of those that LOWER matches, else the highest."""
    found: dict[str, tuple[float, int]] = {}
    for line in records:
        for tag, value in line.items():
            sign = -1 if LOWER.search(tag) else 1
            before, _ = found.get(tag, (-sign * math.inf, 0))
            if tag.startswith("val/") and math.isfinite(value) and sign * value > sign * before:
                found[tag] = (value, int(line["step"]))
    return found
