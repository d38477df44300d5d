"""From requests to batches: worker processes read them ahead, and they are copied to the device ahead of their use."""

import collections
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from common import UserError
from common.sampler import Request


class Batch(NamedTuple):
    """One micro-batch of one rank."""

    inputs: torch.Tensor  # (b, ...)
    targets: torch.Tensor  # (b, ...)
    step_samples: int  # samples of the whole step, over all ranks and micro-batches
    last: bool  # whether this micro-batch ends the step


class BatchReader(Protocol):
    """A data set that reads whole batches."""

    def __len__(self) -> int:
        """Samples in the set."""

    @property
    def sample_units(self) -> dict[str, int]:
        """Units in a sample, for rates, such as `{"tokens": 128}`."""

    def digest(self) -> str:
        """Hash of the set: ranks compare it before they train together."""

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics of an evaluation to show, from its means."""

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (b, ...) and targets (b, ...) of the samples at `indices`, augmented as in `epochs`."""


class _Reads(torch.utils.data.Dataset):
    """Adapter: a torch Dataset whose index is a whole request."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader

    def __getitem__(self, request: Request) -> Batch | UserError:
        try:
            return Batch(*self.reader.read(request.epochs, request.indices), request.step_samples, request.last)
        except UserError as error:
            return error  # raised in a worker process, it would arrive inside a traceback


def _raise_here(batches: Iterable[Batch | UserError]) -> Iterator[Batch]:
    for batch in batches:
        if isinstance(batch, UserError):
            raise batch
        yield batch


class Loader:
    """Iterates over the batches of a stream of requests.

    Attributes:
        wait_s: seconds that the training loop has waited for data so far.
        batches_read: batches read by all loaders of this process; `watch` takes a change as progress.
    """

    batches_read = 0

    def __init__(self, reader: BatchReader, requests: Iterable[Request], workers: int, device: torch.device) -> None:
        self.wait_s = 0.0
        self._device = device
        # batch_size=None: an index is a whole batch. One loader serves the whole run, so no epoch restarts the workers.
        loader = DataLoader(
            _Reads(reader),
            sampler=requests,
            batch_size=None,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            # torch draws the workers' seed from it: drawn from the global generator, it would shift what a model draws
            # in the first step after each start, and a resumed run would not be the same.
            generator=torch.Generator(),
        )
        self._batches = self._ahead(_raise_here(loader)) if device.type == "cuda" else _raise_here(loader)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.wait_s += time.perf_counter() - start
            Loader.batches_read += 1

    def step(self) -> Iterator[Batch]:
        """The micro-batches of the next step."""
        for batch in self:
            yield batch
            if batch.last:
                return

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Copy the next batch to the device on a CUDA stream of its own, while the current one is computed."""
        copies = torch.cuda.Stream(self._device)
        compute = torch.cuda.current_stream(self._device)
        waiting: collections.deque[tuple[Batch, torch.cuda.Event]] = collections.deque()
        for batch in itertools.chain(batches, [None]):
            if batch is not None:
                with torch.cuda.stream(copies):
                    inputs = batch.inputs.to(self._device, non_blocking=True)
                    targets = batch.targets.to(self._device, non_blocking=True)
                    waiting.append((batch._replace(inputs=inputs, targets=targets), copies.record_event()))
            if len(waiting) == 2 or (batch is None and waiting):
                ready, copied = waiting.popleft()
                compute.wait_event(copied)
                for tensor in (ready.inputs, ready.targets):
                    tensor.record_stream(compute)  # otherwise its memory is reused while the step still reads it
                yield ready
