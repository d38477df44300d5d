"""Several sets of text as one, from which samples are read by weights: `--data web=/data/web=0.7,code=stdlib=0.3`.

`=` stands between the parts, because `@` and `:` choose a split and a configuration of each source (`splits.parse`).
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from common import UserError, places, ranks
from common.train import data
from common.workloads import mixture, splits

HOW = "a mixture is PLACE=WEIGHT,PLACE=WEIGHT, or NAME=PLACE=WEIGHT for each"


class Part(data.BatchReader, Protocol):
    """A split of one set, as `text.Text` is."""

    @property
    def vocab_size(self) -> int:
        """Every token is below it."""

    @property
    def tokens_per_byte(self) -> float:
        """Tokens per byte of text; 0 if that is not known."""

    @property
    def num_targets(self) -> int:
        """Tokens that count in an epoch."""

    @property
    def rows(self) -> Any:
        """How documents lie in rows; None where all tokens are one row."""


class Source(NamedTuple):
    """A set of a mixture, as --data names it."""

    name: str
    place: str  # as --data has it for one set
    weight: Fraction


def parse(name: str) -> list[Source]:
    """The sources of --data by name; none if it is a single set, such as a path that exists, whatever it is called.

    Raises:
        UserError: a source has no weight, a wrong one, or no name of its own, or all weights are 0.
    """
    pieces = name.split(",")
    weighted = any(re.fullmatch(r".+=[^/]*", piece) for piece in pieces)
    if not weighted and (len(pieces) == 1 or splits.folder_of(name).exists()):
        return []
    if places.local("--data", name).exists():
        return []
    found: dict[str, Source] = {}
    where: dict[str, str] = {}
    for piece in pieces:
        rest, _, weight = piece.rpartition("=")
        if not rest or not re.fullmatch(r"\d{1,12}(\.\d{1,12})?|\.\d{1,12}", weight, re.ASCII):
            raise UserError(
                f"--data {name}: {HOW}, and {piece!r} does not end with a weight: give a number that is not negative, "
                "as in a=0.7,b=0.3"
            )
        named = re.fullmatch(r"([\w.-]+)=(.+)", rest)
        place = named[2] if named and not places.local("--data", rest).exists() else rest
        own = named[1] if named and place != rest else splits.parse(rest).place.rstrip("/").rpartition("/")[2]
        if not re.fullmatch(r"[\w.-]+", own):
            raise UserError(f"--data {name}: {place!r} gives no name for the log: write NAME={piece}")
        if own in found:
            raise UserError(f"--data {name}: two sources are called {own!r}: write NAME={piece}, with another name")
        same = str(splits.folder_of(place).resolve()) + "".join(splits.parse(place)[1:2])
        if same in where:
            raise UserError(f"--data {name}: {where[same]} and {own} are the same set: give it once, with one weight")
        where[same] = own
        found[own] = Source(own, place, Fraction(weight))
    if not any(source.weight for source in found.values()):
        raise UserError(f"--data {name}: all weights are 0: give a source that is trained on a larger one")
    return [found[own] for own in sorted(found)]


@dataclass(frozen=True)
class Mixed:
    """One split of several sets, one behind the other; `make_order` says in which order they are trained on.

    Attributes:
        parts: by name.
        weights: by name; of 0 for a set that is only validated on.
        apart: whether a set keeps documents apart; then a sequence of another one is read as one document.
    """

    parts: Mapping[str, Part]
    weights: Mapping[str, Fraction]
    apart: bool

    def __len__(self) -> int:
        """Sequences of all sets: an epoch of a mixture is as many."""
        return sum(map(len, self.parts.values()))

    @property
    def vocab_size(self) -> int:
        """Every token is below it."""
        return next(iter(self.parts.values())).vocab_size

    @property
    def sample_units(self) -> dict[str, int]:
        """Units in a sample, for rates."""
        return next(iter(self.parts.values())).sample_units

    def digest(self) -> str:
        """Hash of all sets and their names; not of the weights, which may change."""
        about = [(name, part.digest()) for name, part in self.parts.items()]
        return hashlib.sha256(repr((about, self.apart)).encode()).hexdigest()[:16]

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The losses in nats per token, and bits per byte of all and of each set, if the bytes of all are known."""
        losses = {name: means.get(f"loss/{name}", math.nan) for name in self.parts}
        if not all(part.tokens_per_byte for part in self.parts.values()) or any(map(math.isnan, losses.values())):
            return means
        bits = sum(losses[name] * part.num_targets for name, part in self.parts.items()) / math.log(2)
        num_bytes = sum(part.num_targets / part.tokens_per_byte for part in self.parts.values())
        of_each = {
            f"bits_per_byte/{name}": part.metrics({"loss": losses[name]})["bits_per_byte"]
            for name, part in self.parts.items()
        }
        return means | {"bits_per_byte": bits / num_bytes} | of_each

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, as `Text.read`, of the sequences at `indices` of the sets, one behind the other."""
        found = []
        order = []
        for i, (part, own, own_indices) in enumerate(self._divided(indices)):
            if len(own) or not i:  # one shows the shapes of none
                inputs, targets = part.read(epochs[own], own_indices)
                if self.apart and inputs.ndim == 2:
                    inputs = torch.stack([inputs, torch.arange(inputs.shape[1]).expand(inputs.shape)], dim=1)
                found.append((inputs, targets))
                order.append(own)
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        inputs, targets = (torch.cat(parts)[back] for parts in zip(*found, strict=True))
        return inputs, targets

    def sources(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """For each set's name, whether a sample is of it, (b,)."""
        found = {}
        for name, (_, own, _) in zip(self.parts, self._divided(indices), strict=True):
            found[name] = torch.zeros(len(indices), dtype=torch.bool)
            found[name][torch.from_numpy(own)] = True
        return found

    def _divided(self, indices: np.ndarray) -> list[tuple[Part, np.ndarray, np.ndarray]]:
        """Each set, which of the indices are its own, and where they are in it."""
        divided = []
        first = 0
        for part in self.parts.values():
            own = np.flatnonzero((indices >= first) & (indices < first + len(part)))
            divided.append((part, own, indices[own] - first))
            first += len(part)
        return divided

    def make_order(self, run_seed: int, progress: Mapping[str, Any]) -> mixture.Mixture:
        """The order of the training, from a checkpoint's progress on; `sampler.make_plan` asks for it."""
        sources = [mixture.Source(name, len(part), self.weights[name]) for name, part in self.parts.items()]
        return mixture.continued(sources, run_seed, progress)


def mix(sources: Sequence[Source], loaded: Sequence[tuple[Part, Part]]) -> tuple[Mixed, Mixed]:
    """The training and the validation split of a mixture.

    Args:
        sources: what --data names.
        loaded: both splits of each.

    Raises:
        UserError: the vocabularies differ.
    """
    sizes = {source.name: train.vocab_size for source, (train, _) in zip(sources, loaded, strict=True)}
    if len({*sizes.values()}) > 1:
        listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise UserError(
            f"--data: the sources have vocabularies of different sizes ({listed}): give all one --tokenizer"
        )
    weights = {source.name: source.weight for source in sources}
    apart = any(part.rows is not None for both in loaded for part in both)
    train, validation = (
        Mixed({source.name: both[i] for source, both in zip(sources, loaded, strict=True)}, weights, apart)
        for i in range(2)
    )
    counts = ", ".join(f"{name} {len(part):,}" for name, part in train.parts.items())
    ranks.print0(
        f"data     a mixture, by shares of the samples: {mixture.shown(weights)}; sequences: {counts}; an epoch is "
        f"{len(train):,} samples"
    )
    return train, validation
