"""A torch data set or stream of your own, as what the recipes read: the same samples on any number of ranks."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from common import UserError, ranks, seed
from common.train.data import BatchReader, map_tensors
from common.workloads import kept

MANY_SKIPPED = 10_000  # samples of a stream; reading so many may take a while, so it is said


class MapStyle:
    """A torch data set with `__getitem__` and `__len__`, as a `BatchReader`.

    Each sample is read with generators seeded from (seed, epoch, index). So random transforms, of torchvision, NumPy or
    Python's random, draw the same numbers in any worker, on any rank and after a resume.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset,
        run_seed: int,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """Wrap a data set.

        Args:
            dataset: its samples may be any tree of tensors, as may the batches.
            run_seed: the run's --seed.
            collate_fn: makes a batch of samples. A pair becomes `Batch.inputs` and `Batch.targets`; anything else
                becomes `inputs`, and `targets` is None.

        Raises:
            UserError: the data set is a stream, or has no samples.
        """
        if not hasattr(dataset, "__len__"):
            raise UserError(
                f"dataset.MapStyle got a {type(dataset).__name__} without a length: use dataset.IterableStyle"
            )
        if not len(dataset):
            raise UserError(
                f"dataset.MapStyle got a {type(dataset).__name__} without samples: check where make_data looks"
            )
        self.dataset: Any = dataset
        self.sample_units: dict[str, int] = {}
        self._run_seed = run_seed
        self._collate = collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The means as they are."""
        return means

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[Any, Any]:
        """Inputs and targets of the samples at `indices`, with random transforms drawn as in `epochs`.

        A rank's part of a micro-batch may be empty: then tensors have no rows, and lists of samples no entries.
        """
        samples = []
        with kept.generators():
            for epoch, index in zip(epochs.tolist(), indices.tolist(), strict=True) if len(indices) else [(0, 0)]:
                seed.for_sample(self._run_seed, seed.AUGMENT, epoch, index)
                samples.append(self.dataset[index])
        return _collated(self._collate, samples, len(indices))

    def digest(self) -> str:
        """Hash of the number of samples and of the tensors of 16 of them."""
        return _digest(self, np.linspace(0, len(self) - 1, 16).astype(int))


class IterableStyle:
    """A stream of training samples, such as a torch or Hugging Face IterableDataset, as a `BatchReader`.

    Its n-th sample is the n-th of the training: each rank reads the whole stream and keeps its own part of each global
    batch, so the number of ranks does not change the result. A run that resumes reads the stream again up to its
    position. This is exact if the stream gives the same samples whenever it begins. Random numbers may be drawn in the
    data set and in `transform`: their generators are seeded from the run's seed and the sample's position.

    A stream that ends begins again, after `set_epoch` with the next epoch if the data set has that.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        run_seed: int,
        transform: Callable[[Any], Any] = lambda sample: sample,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """Wrap a stream.

        Args:
            dataset: gives every rank the same samples, each time that it begins.
            run_seed: the run's --seed.
            transform: decodes or changes a sample. Ranks share this work: each does it for its own samples.
            collate_fn: makes a batch of samples, as for `MapStyle`.

        Raises:
            UserError: the data set can begin only once, or has no samples.
        """
        if iter(dataset) is dataset:
            raise UserError(
                f"dataset.IterableStyle got a {type(dataset).__name__}, which can be read only once: give it an object "
                "whose __iter__ begins the stream again"
            )
        self.dataset: Any = dataset
        self.sample_units: dict[str, int] = {}
        self._run_seed = run_seed
        self._transform = transform
        self._collate = collate_fn
        self._last_epoch = 0
        self._begin()
        with kept.generators():
            self._first = self._next()
        ranks.print0(
            "data     a stream: each rank reads all of it and keeps its part; as its epochs have no known length, the "
            "run is evaluated and saved at its end alone, unless --eval-every and --save-every say when"
        )

    def __len__(self) -> int:
        return 0

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The means as they are."""
        return means

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[Any, Any]:
        """Inputs and targets of the samples at the positions `indices` of the stream, which counts on over its epochs.

        A rank's part of a micro-batch may be empty: then tensors have no rows, and lists of samples no entries.
        """
        samples = []
        with kept.generators():
            for position in indices.tolist() or [0]:
                sample = self._sample(position)
                seed.for_sample(self._run_seed, seed.AUGMENT, position)
                samples.append(self._transform(sample))
        return _collated(self._collate, samples, len(indices))

    def digest(self) -> str:
        """Hash of the tensors of the first 16 samples."""
        return _digest(self, np.arange(16))

    def _sample(self, position: int) -> Any:
        if position == 0:  # before the training it is asked for many times; a transform may change what it gets
            return copy.deepcopy(self._first)
        if position < self._position:
            self._begin()
        if position - self._position >= MANY_SKIPPED:
            ranks.print0(f"data     reading {position - self._position:,} samples of the stream to skip them")
        while self._position < position:
            self._next()
        return self._next()

    def _begin(self) -> None:
        self._epoch = 0
        self._position = 0  # of the next sample
        self._samples = self._epoch_samples()

    def _epoch_samples(self) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        return iter(self.dataset)

    def _next(self) -> Any:
        """The next sample, of the next epoch if the stream has ended."""
        seed.for_sample(self._run_seed, seed.ORDER, self._position)
        for _ in range(2):
            for sample in self._samples:
                self._position += 1
                return sample
            self._epoch += 1
            if self._position and self._epoch > self._last_epoch:
                self._last_epoch = self._epoch
                ranks.print0(f"data     the stream has ended after {self._position:,} samples, and begins again")
            self._samples = self._epoch_samples()
        raise UserError(
            f"dataset.IterableStyle got a {type(self.dataset).__name__} without samples: check where it looks"
        )


def _collated(collate_fn: Callable[[list[Any]], Any], samples: list[Any], count: int) -> tuple[Any, Any]:
    """Inputs and targets of a batch; if the count is 0, of none, from one sample that shows its form."""
    batch = collate_fn(samples)
    if not count:
        batch = _without_samples(batch, collate_fn(samples * 2))
    return tuple(batch) if isinstance(batch, list | tuple) and len(batch) == 2 else (batch, None)


def _without_samples(one: Any, two: Any) -> Any:
    """A batch of no samples, from that of one sample and that of the same sample twice: what grows holds samples."""
    if isinstance(one, torch.Tensor):
        return one[:0] if one.shape != two.shape else one
    if isinstance(one, Mapping):
        return {key: _without_samples(one[key], two[key]) for key in one}
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            return type(one)()
        parts = [_without_samples(*both) for both in zip(one, two, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    return one


def _digest(reader: BatchReader, indices: np.ndarray) -> str:
    """Hash of the length of a set and of the tensors of some samples."""
    found = hashlib.sha256(str(len(reader)).encode())

    def take(tensor: torch.Tensor) -> None:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    for index in indices:
        map_tensors(take, reader.read(np.zeros(1, int), index[None]))
    return found.hexdigest()[:16]
