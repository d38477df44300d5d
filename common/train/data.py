"""From requests to batches: worker processes read them ahead, and they are copied to the device ahead of their use."""

import collections
import copy
import functools
import hashlib
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from common import UserError, ranks, seed
from common.measure import profile, timeline
from common.train.sampler import Plan, Request

MANY_SKIPPED = 10_000  # samples of a stream; reading so many may take a while, so it is said


class Batch(NamedTuple):
    """One micro-batch of one rank; its samples are tensors, or any tree of dicts, lists and tuples with tensors."""

    inputs: Any  # (b, ...)
    targets: Any  # (b, ...); None if they are among the inputs
    step_samples: int  # samples of the whole step, over all ranks and micro-batches
    last: bool  # whether this micro-batch ends the step


class BatchReader(Protocol):
    """A data set that reads whole batches."""

    def __len__(self) -> int:
        """Samples in the set; 0 for a stream, whose indices are positions from its beginning."""

    @property
    def sample_units(self) -> dict[str, int]:
        """Units in a sample, for rates, such as `{"tokens": 128}`."""

    def digest(self) -> str:
        """Hash of the set: ranks compare it before they train together."""

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics of an evaluation to show, from its means."""

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[Any, Any]:
        """Inputs (b, ...) and targets (b, ...) of the samples at `indices`, augmented as in `epochs`; see `Batch`."""


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same tree of mappings, lists and (named) tuples with each tensor changed; anything else stays."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    part = functools.partial(map_tensors, change)
    if isinstance(tree, Mapping):
        changed = {key: part(value) for key, value in tree.items()}
        try:
            return type(tree)(changed)  # type: ignore[call-arg]
        except TypeError:  # a mapping that is not made from another one, such as a defaultdict
            return changed
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(part, tree))
    return type(tree)(map(part, tree)) if isinstance(tree, list | tuple) else tree


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
            raise UserError(f"data.MapStyle got a {type(dataset).__name__} without a length: use data.IterableStyle")
        if not len(dataset):
            raise UserError(
                f"data.MapStyle got a {type(dataset).__name__} without samples: check where make_data looks"
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
        with seed.kept():
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
                f"data.IterableStyle got a {type(dataset).__name__}, which can be read only once: give it an object "
                "whose __iter__ begins the stream again"
            )
        self.dataset: Any = dataset
        self.sample_units: dict[str, int] = {}
        self._run_seed = run_seed
        self._transform = transform
        self._collate = collate_fn
        self._last_epoch = 0
        self._begin()
        with seed.kept():
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
        with seed.kept():
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
        raise UserError(f"data.IterableStyle got a {type(self.dataset).__name__} without samples: check where it looks")


def _collated(collate_fn: Callable[[list[Any]], Any], samples: list[Any], count: int) -> tuple[Any, Any]:
    """Inputs and targets of a batch; if the count is 0, of none, from one sample that shows its form."""
    batch = collate_fn(samples)
    if not count:
        batch = _without_samples(batch, collate_fn(samples * 2))
    return tuple(batch) if isinstance(batch, list | tuple) and len(batch) == 2 else (batch, None)


def _digest(reader: BatchReader, indices: np.ndarray) -> str:
    """Hash of the length of a set and of the tensors of some samples."""
    found = hashlib.sha256(str(len(reader)).encode())

    def take(tensor: torch.Tensor) -> None:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    for index in indices:
        map_tensors(take, reader.read(np.zeros(1, int), index[None]))
    return found.hexdigest()[:16]


class _Reads(torch.utils.data.Dataset):
    """Adapter: a torch Dataset whose index is a whole request."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader: BatchReader | None = reader

    def __getitem__(self, request: Request) -> Batch | UserError:
        assert self.reader is not None
        try:
            batch = Batch(*self.reader.read(request.epochs, request.indices), request.step_samples, request.last)
        except UserError as error:
            return error  # raised in a worker process, it would arrive inside a traceback
        if torch.utils.data.get_worker_info():
            # The queue would do it in a thread of its own, whose error nobody gets: the rank would wait for ever.
            map_tensors(torch.Tensor.share_memory_, batch)
        return batch


def _read_here(reads: _Reads, requests: Iterable[Request], device: torch.device) -> Iterator[Batch | UserError]:
    """What DataLoader does without workers, in a third of its time."""
    for request in requests:
        with profile.mark(timeline.READS):
            batch = default_convert(reads[request])
            if device.type == "cuda":
                batch = map_tensors(torch.Tensor.pin_memory, batch)
        yield batch


class _Requests:
    """What a DataLoader reads; when all is read, more may follow."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


# Loaders that have read all their requests, with their idle workers, by process, reader and kind of loader.
_idle: dict[tuple[int, int, int, bool], DataLoader[Any]] = {}


def _read_in_workers(
    reader: BatchReader, requests: Iterable[Request], workers: int, pin_memory: bool
) -> Iterator[Batch | UserError]:
    """Read ahead in processes, which wait for the next loader of the same reader once all requests are read.

    So an evaluation starts none but the first time. The workers end with their reader, or before Python exits.
    """
    key = (os.getpid(), id(reader), workers, pin_memory)  # a forked process has no part in its parent's workers
    kept = hasattr(reader, "__weakref__")  # else its end, of a class with __slots__, is not known
    loader = _idle.pop(key, None)
    if loader is not None:
        loader.sampler.requests = requests  # type: ignore[attr-defined]
        batches = iter(loader)
    else:
        reads = _Reads(reader)
        # batch_size=None: an index is a whole batch. One loader for the whole run: no epoch restarts its workers.
        loader = DataLoader(
            reads,
            sampler=_Requests(requests),
            batch_size=None,
            num_workers=workers,
            pin_memory=pin_memory,
            persistent_workers=kept,
            # torch draws the workers' seed from it: drawn from the global generator, it would shift what a model
            # draws in the first step after each start, and a resumed run would not be the same.
            generator=torch.Generator(),
        )
        batches = iter(loader)  # starts the workers, each with the reader
        reads.reader = None  # else an idle loader would keep the reader, whose end is its own
        if kept:
            weakref.finalize(reader, _idle.pop, key, None)
    yield from batches
    if kept:
        _idle[key] = loader


def _raise_here(batches: Iterable[Batch | UserError]) -> Iterator[Batch]:
    for batch in batches:
        if isinstance(batch, UserError):
            raise batch
        yield batch


class Loader:
    """Iterates over the batches of a stream of requests.

    Attributes:
        batches_read: batches read by all loaders of this process; `watch` takes a change as progress.
    """

    batches_read = 0

    def __init__(self, reader: BatchReader, requests: Iterable[Request], workers: int, device: torch.device) -> None:
        """Begin to read.

        Raises:
            UserError: several processes would read a stream, whose samples have an order.
        """
        if workers and isinstance(reader, IterableStyle):
            raise UserError(f"--workers {workers}: a stream is read in its order, by the rank itself: use --workers 0")
        self._waited = _Waited()
        if workers:
            loader = _read_in_workers(reader, requests, workers, device.type == "cuda")
        else:
            loader = _read_here(_Reads(reader), requests, device)
        batches = _timed(_raise_here(loader), device, self._waited)
        self._batches = _ahead(batches, device) if device.type == "cuda" else batches

    @property
    def wait_s(self) -> float:
        """Seconds that the device has waited for data so far; its copies from the host are not counted."""
        return self._waited.s

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        finally:
            Loader.batches_read += 1

    def step(self) -> Iterator[Batch]:
        """The micro-batches of the next step."""
        for batch in self:
            yield batch
            if batch.last:
                return


@dataclass
class _Waited:
    """Seconds that the device has waited for data so far."""

    s: float = 0.0


# The next two know no loader: one that holds a generator that holds it is freed late, and until then its workers live,
# for whose end Python waits at exit.


def _timed(batches: Iterator[Batch], device: torch.device, waited: _Waited) -> Iterator[Batch]:
    """Add up how long the device has waited. If it still computes when a batch comes, only this process has."""
    while True:
        start = time.perf_counter()
        batch = next(batches, None)
        if device.type != "cuda" or torch.cuda.current_stream(device).query():
            waited.s += time.perf_counter() - start
        if batch is None:
            return
        yield batch


def _ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Copy the next batch to the device on a CUDA stream of its own, while the current one is computed."""
    copies = torch.cuda.Stream(device)
    compute = torch.cuda.current_stream(device)
    waiting: collections.deque[tuple[Batch, torch.cuda.Event]] = collections.deque()
    for batch in itertools.chain(batches, [None]):
        if batch is not None:
            with torch.cuda.stream(copies):
                copied = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
                waiting.append((copied, copies.record_event()))
        if len(waiting) == 2 or (batch is None and waiting):
            ready, arrival = waiting.popleft()
            compute.wait_event(arrival)
            # Otherwise their memory is reused while the step still reads them.
            map_tensors(lambda tensor: tensor.record_stream(compute), ready)
            yield ready


def twins(train: BatchReader, plan: Plan, device: torch.device) -> Iterator[Loader]:
    """Batches of the first sample alone, and of it twice; nothing if a micro-batch has only one sample of each rank."""
    if plan.division.global_micro_batch_size >= 2 * plan.division.dp_size:
        for count in (1, 2):
            index = np.zeros(count, int)
            yield Loader(train, [Request(index, index, count, True)], 0, device)
