"""From requests to batches: worker processes read them ahead, and they are copied to the device ahead of their use."""

import collections
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from common import UserError
from common.train import sampler
from common.train.sampler import Plan, Request


class Batch(NamedTuple):
    """One micro-batch of one rank; its samples are tensors, or any tree of dicts, lists and tuples with tensors."""

    inputs: Any  # (b, ...)
    targets: Any  # (b, ...); None if they are among the inputs
    step_samples: int  # samples of the whole step, over all ranks and micro-batches
    last: bool  # whether this micro-batch ends the step
    sources: Any = None  # of a mixture: for each source's name, (b,) bool, whether a sample is of it


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


class _Reads(torch.utils.data.Dataset):
    """Adapter: a torch Dataset whose index is a whole request."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader

    def __getitem__(self, request: Request) -> Batch | UserError:
        try:
            batch = Batch(*self.reader.read(request.epochs, request.indices), request.step_samples, request.last)
            if hasattr(self.reader, "sources"):
                batch = batch._replace(sources=self.reader.sources(request.indices))
        except UserError as error:
            return error  # raised in a worker process, it would arrive inside a traceback
        if torch.utils.data.get_worker_info():
            # The queue would do it in a thread of its own, whose error nobody gets: the rank would wait for ever.
            map_tensors(torch.Tensor.share_memory_, batch)
        return batch


class _Requests:
    """What a DataLoader reads; when all is read, more may follow."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


# Loaders that have read all their requests, with their idle workers, by process, reader and kind of loader.
_idle: dict[tuple[int, int, int, bool], DataLoader[Any]] = {}


def _read(
    reader: BatchReader, requests: Iterable[Request], workers: int, pin_memory: bool
) -> Iterator[Batch | UserError]:
    """Read here, or ahead in processes, which wait for the next loader of the same reader once all requests are read.

    So an evaluation starts none but the first time. The workers end with their reader, or before Python exits.
    """
    key = (os.getpid(), id(reader), workers, pin_memory)  # a forked process has no part in its parent's workers
    kept = workers > 0 and hasattr(reader, "__weakref__")  # else its end, of a class with __slots__, is not known
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
            # They share the data set's memory then. Python 3.14 would send each of them a copy, pickled.
            multiprocessing_context="fork" if workers and os.uname().sysname == "Linux" else None,
            # torch draws the workers' seed from it: drawn from the global generator, it would shift what a model
            # draws in the first step after each start, and a resumed run would not be the same.
            generator=torch.Generator(),
        )
        batches = iter(loader)  # starts the workers, each with the reader
        if kept:
            reads.reader = None  # type: ignore[assignment]  # an idle loader would keep it from its end
            weakref.finalize(reader, _idle.pop, key, None)
    yield from batches
    if kept:
        _idle[key] = loader


class Loader:
    """Iterates over the batches of a stream of requests.

    It is in no circle of objects: it would be freed late, and until then its workers live, for whose end Python waits
    at exit.

    Attributes:
        batches_read: batches read by all loaders of this process; `watch` takes a change as progress.
        wait_s: seconds that the device has waited for data so far; its copies from the host are not counted.
    """

    batches_read = 0

    def __init__(self, reader: BatchReader, requests: Iterable[Request], workers: int, device: torch.device) -> None:
        """Begin to read.

        Raises:
            UserError: several processes would read a stream, whose samples have an order.
        """
        if workers and not len(reader):
            raise UserError(f"--workers {workers}: a stream is read in its order, by the rank itself: use --workers 0")
        self.wait_s = 0.0
        self._device = device
        self._copied: collections.deque[tuple[Batch, torch.cuda.Event]] = collections.deque()
        self._batches = _read(reader, requests, workers, device.type == "cuda")
        self._copies: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._next_copied() if self._copies else self._next_read()
        if batch is None:
            raise StopIteration
        return batch

    def _next_read(self) -> Batch | None:
        """Wait for the next batch. If the device still computes when it comes, only this process has waited."""
        start = time.perf_counter()
        batch = next(self._batches, None)
        Loader.batches_read += 1
        if self._device.type != "cuda" or torch.cuda.current_stream(self._device).query():
            self.wait_s += time.perf_counter() - start
        if isinstance(batch, UserError):
            raise batch
        return batch

    def _next_copied(self) -> Batch | None:
        """The next batch on the GPU, to which a stream of its own copies the one after it, while this one computes."""
        while len(self._copied) < 2 and (batch := self._next_read()):
            with torch.cuda.stream(self._copies):
                copied = map_tensors(lambda tensor: tensor.to(self._device, non_blocking=True), batch)
                self._copied.append((copied, self._copies.record_event()))
        if not self._copied:
            return None
        ready, arrival = self._copied.popleft()
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(arrival)
        # Otherwise their memory is reused while the step still reads them.
        map_tensors(lambda tensor: tensor.record_stream(compute), ready)
        return ready

    def step(self) -> Iterator[Batch]:
        """The micro-batches of the next step."""
        for batch in self:
            yield batch
            if batch.last:
                return


def training(train: BatchReader, plan: Plan, dp_rank: int, workers: int, device: torch.device) -> Loader:
    """This rank's batches of all remaining steps.

    Raises:
        UserError: the plan lacks the set's own order.
    """
    if hasattr(train, "make_order") and plan.order is None:
        raise UserError("the training set has an order of its own: give sampler.make_plan `train`, not `len(train)`")
    return Loader(train, sampler.training_requests(plan, dp_rank), workers, device)


def evaluation(validation: BatchReader, plan: Plan, dp_rank: int, workers: int, device: torch.device) -> Loader:
    """This rank's batches of an evaluation, in the training's micro-batch size."""
    return Loader(validation, sampler.evaluation_requests(plan, len(validation), dp_rank), workers, device)
