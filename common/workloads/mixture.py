"""The order of a mixture: which source each sample is from, and which of its samples, for any position alone.

Sources are dealt by counting, not drawn: after n samples, each has its share of n, give or take one or two. So every
batch is mixed as asked, and how many samples of a source lie before a position is a formula, which needs neither a
memory of what was read nor a loop over it. Within a source, samples come in whole epochs, each in an order of its own.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from common import UserError, ranks, seed
from common.train import sampler

MOST_PARTS = 2**31  # into which weights divide a sample: its square is an int64


class Source(NamedTuple):
    """One of the sets that are mixed."""

    name: str
    size: int  # samples
    weight: Fraction  # its share, as part of the sum of all; 0 to read none of it


class Stage(NamedTuple):
    """What is mixed from a position on."""

    start: int  # the position
    weights: dict[str, Fraction]
    read: dict[str, int]  # samples of each source that lie before it


@dataclass(frozen=True)
class Mixture:
    """The order of the samples of several sets, of which one lies behind the other.

    Attributes:
        sources: in the order in which they lie.
        run_seed: decides the order, with the weights.
        stages: one for each change of the weights; at least one.
    """

    sources: Sequence[Source]
    run_seed: int
    stages: Sequence[Stage]

    def samples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epoch of the source, and index in the sets that lie one behind the other, of these positions, all (b,)."""
        epochs, indices = np.zeros((2, len(positions)), np.int64)
        firsts = np.cumsum([0, *(source.size for source in self.sources)])
        for i, stage in enumerate(self.stages):
            end = self.stages[i + 1].start if i + 1 < len(self.stages) else np.inf
            within = np.flatnonzero((positions >= stage.start) & (positions < end))
            names, shares = _shares(stage.weights)
            chosen, before = deal(shares, self.run_seed, positions[within] - stage.start)
            for j, source in enumerate(self.sources):
                if source.name not in names:
                    continue
                own = chosen == names.index(source.name)
                epoch, offsets = np.divmod(stage.read.get(source.name, 0) + before[own], source.size)
                for one in np.unique(epoch):
                    key = seed.mix(self.run_seed, seed.MIXTURE, _key(source.name), int(one))
                    same = epoch == one
                    offsets[same] = sampler.permuted(source.size, key, offsets[same])
                epochs[within[own]] = epoch
                indices[within[own]] = firsts[j] + offsets
        return epochs, indices

    def read(self, position: int) -> dict[str, int]:
        """How many samples of each source lie before a position; also of sources that are no longer mixed."""
        stage = [stage for stage in self.stages if stage.start <= position][-1]
        names, shares = _shares(stage.weights)
        return stage.read | {
            name: stage.read.get(name, 0) + number
            for name, number in zip(names, count(shares, self.run_seed, position - stage.start), strict=True)
        }

    def logged(self, position: int) -> dict[str, float]:
        """The epochs of each source that have been read, by TensorBoard tag."""
        read = self.read(position)
        return {f"train/epochs/{one.name}": read.get(one.name, 0) / one.size for one in self.sources}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps: the stages, as JSON values."""
        return {
            "mixture": [
                [start, {name: float(weight) for name, weight in weights.items()}, read]
                for start, weights, read in self.stages
            ]
        }


def continued(sources: Sequence[Source], run_seed: int, progress: Mapping[str, Any]) -> Mixture:
    """The mixture from a checkpoint on: other weights than before count from there, and each source goes on.

    Args:
        sources: that are mixed now.
        run_seed: decides the order.
        progress: the checkpoint's manifest; empty for a new run.

    Raises:
        UserError: the weights have too many digits.
    """
    weights = {source.name: source.weight for source in sources}
    _shares(weights)
    stages = []
    for start, before, read in progress.get("mixture", ()):
        stages.append(Stage(start, {name: Fraction(str(weight)) for name, weight in before.items()}, read))
    start = progress.get("samples", 0)
    if stages and _parts(stages[-1].weights) == _parts(weights):
        return Mixture(sources, run_seed, tuple(stages))
    read = Mixture(sources, run_seed, stages).read(start) if stages else {}
    if stages:
        ranks.print0(f"data     mixed from sample {start:,} on: {shown(weights)}; before: {shown(stages[-1].weights)}")
    kept = [stage for stage in stages if stage.start < start]
    return Mixture(sources, run_seed, (*kept, Stage(start, weights, read)))


def shown(weights: Mapping[str, Fraction]) -> str:
    """The sources and their shares, for the terminal."""
    total = sum(weights.values())
    return ", ".join(f"{name} {float(weight / total):.4g}" for name, weight in weights.items())


def _parts(weights: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """The shares, whose sum is 1, of the sources that have one."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items() if weight}


def _shares(weights: Mapping[str, Fraction]) -> tuple[list[str], list[int]]:
    """Names and shares, as integers, the largest first: then what is left to deal, and its rounding, shrinks fastest.

    Raises:
        UserError: the weights have too many digits.
    """
    parts = _parts(weights)
    names = sorted(parts, key=lambda name: (-parts[name], name))
    whole = lcm(*(part.denominator for part in parts.values()))
    if whole >= MOST_PARTS:
        raise UserError(f"--data: the weights {shown(weights)} have too many digits: round them to 6 or so")
    return names, [int(parts[name] * whole) for name in names]


def _key(name: str) -> int:
    """A number for a name, so that neither the order of the sources nor other ones change what is read of one."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def deal(shares: Sequence[int], run_seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The source of these positions, and how many positions before each have the same source, both (b,).

    The first source takes its share of all positions, evenly (a Beatty sequence, whose phase the seed decides), the
    second its share of those that are left, and so on.

    Args:
        shares: of each source, a positive integer; the sum is below `MOST_PARTS`.
        run_seed: decides the phases.
        positions: integers, (b,).
    """
    chosen = np.full(len(positions), -1)
    before = np.zeros(len(positions), np.int64)
    left = np.asarray(positions, np.int64)
    for i in range(len(shares)):
        mine = _taken(shares, i, run_seed, left)
        takes = (chosen < 0) & (_taken(shares, i, run_seed, left + 1) > mine)
        chosen[takes] = i
        before[takes] = mine[takes]
        left = left - mine
    return chosen, before


def count(shares: Sequence[int], run_seed: int, num_samples: int) -> list[int]:
    """How many of the first samples each source has."""
    found = []
    left = num_samples
    for i in range(len(shares)):
        found.append(int(_taken(shares, i, run_seed, np.int64(left))))
        left -= found[-1]
    return found


def _taken(shares: Sequence[int], i: int, run_seed: int, left: Any) -> Any:
    """How many of so many positions, which the sources before it have left, source i takes: exact in 64 bits."""
    total = sum(shares[i:])
    phase = seed.mix_ints(run_seed, seed.MIXTURE, i) % total
    wholes, rest = np.divmod(left, total)
    return wholes * shares[i] + (rest * shares[i] + phase) // total
