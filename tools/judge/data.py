"""Seams of data: loaders give few batches of an epoch, in this process, and write down which samples they chose."""

import functools
import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from tools.judge.record import fingerprint

FIRST = 4  # batches of an epoch, and its last one
MOST_LISTED = 100_000  # batches
MOST_WRITTEN = 20_000  # indices
WATCHED = 3  # batches whose random numbers are looked at


def install(record: Any, place: Any) -> None:
    """Patch them."""
    loader: Any = DataLoader
    init = loader.__init__
    loaders: list[Any] = []

    @functools.wraps(init)
    def made(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        workers = kwargs.get("num_workers", args[4] if len(args) > 4 else 0)
        args = (*args[:4], 0, *args[5:]) if len(args) > 4 else args
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "timeout"):
            kwargs.pop(name, None)
        kwargs.pop("multiprocessing_context", None)
        init(self, dataset, *args, **kwargs)
        object.__setattr__(self, "judged", len(loaders))
        loaders.append(self)
        record.log(
            "loader", id=self.judged, sampler=type(self.sampler).__name__, workers=workers, samples=size(dataset)
        )

    loader.__init__ = made
    loader.__iter__ = lambda self: _batches(record, self)
    real_len = loader.__len__
    loader.__len__ = lambda self: min(real_len(self), real_len(self) if self.batch_sampler is None else FIRST + 1)
    _sampler(record)


def size(dataset: Any) -> int | None:
    """Samples of a data set, if it knows."""
    try:
        return len(dataset)
    except TypeError:
        return None


def _batches(record: Any, loader: Any) -> Iterator[Any]:
    """The first batches of an epoch and its last one; one batch alone after the run has seen enough steps."""
    at = record.where()
    few = record.done >= record.steps
    if isinstance(loader.dataset, IterableDataset):
        yield from _stream(record, loader, at, 1 if few else FIRST + 1)
        return
    chosen = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    batches = list(itertools.islice(iter(chosen), MOST_LISTED))
    whole = loader.batch_sampler is None  # what the sampler chooses is one request of the data set
    record.log("epoch", at=at, **_order(loader, [[one] if whole else list(one) for one in batches]))
    if whole:  # its loop has counted them, and would miss those that were left out
        for number, batch in enumerate(batches):
            yield _fetch(record, loader, batch, number, at)
        record.log("epoch end", at=at, loader=getattr(loader, "judged", -1))
        return
    kept = batches if len(batches) <= FIRST + 1 else [*batches[:FIRST], batches[-1]]
    for number, batch in enumerate(kept[:1] if few else kept):
        yield _fetch(record, loader, batch, number, at)
    record.log("epoch end", at=at, loader=getattr(loader, "judged", -1))


def _stream(record: Any, loader: Any, at: str, most: int) -> Iterator[Any]:
    record.log("epoch", at=at, loader=getattr(loader, "judged", -1), batches=None, stream=True)
    samples = iter(loader.dataset)
    for _ in range(most):
        batch = list(itertools.islice(samples, loader.batch_size or 1))
        if not batch:
            break
        yield loader.collate_fn(batch) if loader.batch_size else batch[0]
    record.log("epoch end", at=at, loader=getattr(loader, "judged", -1))


def _order(loader: Any, batches: list[Any]) -> dict[str, Any]:
    """What an epoch reads, by the indices of the data set below all subsets."""
    flat: list[Any] = [i for batch in batches for i in batch]
    plain = all(isinstance(i, int | np.integer) or (torch.is_tensor(i) and i.ndim == 0) for i in flat)
    flat = [int(i) if plain else str(i) for i in flat]  # a sampler may choose more than numbers
    dataset = loader.dataset
    base = flat if plain else []
    while isinstance(dataset, Subset):
        indices = dataset.indices
        base, dataset = [int(indices[i]) for i in base], dataset.dataset
    sampler = loader.sampler
    return {
        "loader": getattr(loader, "judged", -1),
        "batches": len(batches),
        "sizes": [len(one) for one in (batches[0], batches[-1])] if batches else [],
        "order": hashlib.blake2b(str(flat).encode(), digest_size=8).hexdigest(),
        "indices": base if plain and len(base) <= MOST_WRITTEN else None,
        "samples": size(dataset),
        "subset": subset(loader.dataset),
        "own_samples": size(loader.dataset),
        "sampler": type(sampler).__name__,
        "distributed": isinstance(sampler, DistributedSampler),
        "epoch": getattr(sampler, "epoch", None),
        "shuffle": getattr(sampler, "shuffle", None),
        "drop_last": bool(getattr(sampler, "drop_last", False)) or bool(loader.drop_last),
        "replicas": getattr(sampler, "num_replicas", None),
    }


def subset(dataset: Any) -> str:
    """Which part of another data set this is."""
    chosen = [int(i) for i in dataset.indices] if isinstance(dataset, Subset) else []
    return hashlib.blake2b(str(chosen).encode(), digest_size=8).hexdigest()


def _random() -> tuple[str, ...]:
    """Where each generator is that an augmentation may read: torch's, Python's and numpy's."""
    state: Any = np.random.get_state()
    others = (random.getstate(), (state[1].tolist(), state[2]))
    return fingerprint([torch.get_rng_state()]), *(
        hashlib.blake2b(str(one).encode(), digest_size=6).hexdigest() for one in others
    )


def _fetch(record: Any, loader: Any, batch: Any, number: int, at: str) -> Any:
    if loader.batch_sampler is None:
        return loader.collate_fn(loader.dataset[batch])
    batch = list(batch)
    before = _random() if number < WATCHED else ()
    many = getattr(loader.dataset, "__getitems__", None)
    samples = many(batch) if callable(many) else [loader.dataset[i] for i in batch]
    used = [one for one, now in zip(before, _random(), strict=True) if one != now] if before else []
    if used:
        record.log("augment", at=at, loader=getattr(loader, "judged", -1), random=used)
    return loader.collate_fn(samples)


def _sampler(record: Any) -> None:
    sampler: Any = DistributedSampler
    init, set_epoch = sampler.__init__, sampler.set_epoch

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        record.log("sampler", rank=self.rank, replicas=self.num_replicas, shuffle=self.shuffle)

    @functools.wraps(set_epoch)
    def epoch_set(self: Any, epoch: int) -> None:
        record.log("set_epoch", epoch=epoch)
        set_epoch(self, epoch)

    sampler.__init__, sampler.set_epoch = made, epoch_set
