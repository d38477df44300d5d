"""FLOPs of a training sample and peak FLOP/s of a device, from which model FLOPs utilization (MFU) follows."""

import copy
import re
import timeit
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from common import UserError, ranks
from common.train.data import Batch, BatchReader, map_tensors

PEAK_FLOPS = tomllib.loads(Path(__file__).with_name("peak_flops.toml").read_text())  # by a word or two of a GPU's name
# Parts of a GPU, and slower ones of the same name: these are measured.
OTHERS = re.compile(r"\b(MIG|Laptop|Max-Q|Ti|D|GRID|vGPU)\b")


@dataclass(frozen=True)
class Sample:
    """FLOPs and units of one training sample, for rates.

    Attributes:
        flops: of its forward and backward pass; 0 if they are not counted.
        units: such as `{"tokens": 128}`.
    """

    flops: float = 0.0
    units: Mapping[str, int] = field(default_factory=dict)


def count_sample(loss: Callable[[nn.Module, Batch], torch.Tensor], model: nn.Module, train: BatchReader) -> Sample:
    """Count the FLOPs of one training sample from the operators' shapes, on the meta device, on rank 0.

    If the model cannot run there, as one that calls `.item()` cannot, FLOPs are not counted and rank 0 prints a note.

    Args:
        loss: function of a model and a batch.
        model: the plain model, with or without weights.
        train: the training set.
    """
    if ranks.rank() != 0:  # only rank 0 shows the figure
        return Sample(0.0, train.sample_units)
    from torch.utils.flop_counter import FlopCounterMode

    first = np.zeros(2, np.int64)  # the same sample twice: BatchNorm needs two
    try:
        inputs, targets = map_tensors(lambda tensor: tensor.to("meta"), train.read(first, first))
        with FlopCounterMode(display=False) as counter:
            loss(copy.deepcopy(model).to("meta"), Batch(inputs, targets, len(first), True)).backward()
        counted = counter.get_total_flops() / len(first)
    except UserError:
        raise
    except Exception as error:  # not every model runs there
        reason = str(error).strip().partition("\n")[0]
        ranks.print0(f"note: MFU is not shown: counting the FLOPs failed ({type(error).__name__}: {reason})")
        counted = 0.0
    return Sample(counted, train.sample_units)


def peak_on_paper(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of a GPU by its data sheet; 0 for a device or type that peak_flops.toml does not list."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and dtype == torch.bfloat16 else ""
    peaks = [peak for chip, peak in PEAK_FLOPS.items() if re.search(rf"\b{chip}\b", name)]
    return peaks[0] if peaks and not OTHERS.search(name) else 0.0


LONG_S = 0.02  # of a product that shows what a processor can do


def product_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Seconds of the fastest of four products of two square matrices, (size, size)."""
    a = torch.randn(size, size, device=device, dtype=dtype, generator=torch.Generator(device))  # not the training's
    return min(timeit.repeat(lambda: float((a @ a)[0, 0]), number=1, repeat=4))  # the first one warms up


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Peak FLOP/s of one device, and whence: by its data sheet, else what a large matmul reaches, which is less."""
    if peak := peak_on_paper(device, dtype):
        return peak, "by its data sheet"
    # The larger the faster; but a processor without instructions for a type takes 2.5 s for what others do in 0.05.
    for size in (8192,) if device.type == "cuda" else (256, 512, 1024):
        if (best_s := product_s(device, dtype, size)) > LONG_S:
            break
    return 2 * size**3 / best_s, "reached by a large matmul (no data sheet)"
