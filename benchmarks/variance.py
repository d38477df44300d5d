"""Variance of the mean gradient by the number of ranks: `uv run python -m benchmarks.variance` fills large_batch.md.

One process computes what N ranks would: the gradients of N parts of 16 samples each, of the ddp_resnet model, every
part with its own BatchNorm statistics, as DistributedDataParallel has it; their mean is what the all-reduce gives. The
weights are held, and only the samples change from draw to draw.
"""

import argparse
import time

import numpy as np
import torch
from common.workloads import images, resnet
from tests.harness import pages
from tools.about import ROOT
from torch import nn
from torch.nn import functional as F

PART = 16  # samples of a rank
RANKS = (1, 2, 4, 8)
LR = 0.05  # of the steps between the two places where it is measured
WARM_STEPS = 33  # three epochs of 128 samples


def gradient(model: nn.Module, train: images.Images, chosen: np.ndarray) -> torch.Tensor:
    """The gradient (P,) of the mean loss of these samples."""
    pixels, targets = train.read(np.zeros_like(chosen), chosen)
    loss = F.cross_entropy(model(pixels.float().div(127.5).sub(1)), targets)
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, [*model.parameters()]))


def square(vector: torch.Tensor) -> float:
    """Its square norm."""
    return float(vector.dot(vector))


class Sums:
    """Of the mean gradient of N ranks over draws: its mean, and the mean of its square norm."""

    def __init__(self, num_parameters: int) -> None:
        self.mean = {size: torch.zeros(num_parameters) for size in RANKS}
        self.square = dict.fromkeys(RANKS, 0.0)
        self.draws = 0

    def add(self, parts: torch.Tensor) -> None:
        """Take one draw: the gradients (8, P) of parts that do not overlap."""
        self.draws += 1
        for size in RANKS:
            mean = parts[:size].mean(0)
            self.mean[size].lerp_(mean, 1 / self.draws)
            self.square[size] += (square(mean) - self.square[size]) / self.draws

    def variance(self, size: int) -> float:
        """Variance of the mean gradient of so many ranks, summed over the parameters."""
        lost = self.draws / (self.draws - 1)  # the mean of the same draws takes one degree of freedom
        return lost * (self.square[size] - square(self.mean[size]))

    def gradient(self) -> float:
        """Square norm of the gradient without noise: of the mean of all draws, less the noise that it has left."""
        size = RANKS[-1]
        return square(self.mean[size]) - self.variance(size) / self.draws


def measure(model: nn.Module, train: images.Images, generator: np.random.Generator, draws: int) -> Sums:
    """Gradients of so many draws at the weights that the model has."""
    found = Sums(sum(parameter.numel() for parameter in model.parameters()))
    for _ in range(draws):
        parts = np.split(generator.permutation(len(train))[: PART * RANKS[-1]], RANKS[-1])
        found.add(torch.stack([gradient(model, train, part) for part in parts]))
    return found


def expected(size: int, samples: int) -> float:
    """Variance with N ranks over that with one, where no sample is drawn twice: (1 / N) (M - N b) / (M - b)."""
    return (samples - size * PART) / (samples - PART) / size


def rows(place: str, found: Sums, samples: int) -> list[str]:
    """Rows of the table at one place."""
    lines = []
    for size in RANKS:
        ratio = found.variance(size) / found.variance(1)
        # One step at N times the rate moves by N times the noise of a mean; N steps add up N variances of one rank.
        noise = size**2 * ratio / size
        lines.append(
            f"| {place} | {size} | {size * PART} | {ratio:.3f} | {1 / size:.3f} | {expected(size, samples):.3f} "
            f"| {noise:.2f} | {found.variance(size) / found.gradient():.2f} |"
        )
    return lines


def main() -> None:
    """Measure at the initial weights and after some steps, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=32)
    draws = parser.parse_args().draws
    began, busy = time.monotonic(), time.process_time()
    torch.set_num_threads(1)
    train = images.load("digits", run_seed=0, flip=False)[0]
    torch.manual_seed(0)
    model = resnet.make_resnet("resnet18", train.channels, len(train.class_names), train.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    generator = np.random.default_rng(0)
    lines = [
        "| weights | ranks N | samples | variance / that of one rank | 1 / N | and without repetition "
        "| noise of one step at N times the rate / of N steps | noise / gradient |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for place in ("initial", f"after {WARM_STEPS} steps"):
        if place != "initial":
            for _ in range(WARM_STEPS):
                pieces = generator.permutation(len(train))[: PART * RANKS[-1]]
                pixels, targets = train.read(np.zeros_like(pieces), pieces)
                F.cross_entropy(model(pixels.float().div(127.5).sub(1)), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        lines += rows(place, measure(model, train, generator, draws), len(train))
    seconds = f"{time.process_time() - busy:.0f} s of the processor"
    what = f"ResNet-18 on the digits, {PART} samples a rank, {draws} draws, one process, {seconds}"
    pages.write(
        ROOT / "docs/measured/large_batch.md",
        variance=pages.measured("uv run python -m benchmarks.variance", what, began=began) + "\n\n" + "\n".join(lines),
    )


if __name__ == "__main__":
    main()
