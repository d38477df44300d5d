"""Hashes of the parts of tensors that ranks hold, and which of them differ between ranks, by one all-reduce.

To gather all names and hashes would send each rank as much as all ranks have: 264 MB for 300 tensors on 16,384 ranks.
"""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

TABLES = 3
SLOTS = 2**13
LARGEST = 2**63 - 1


def suspects(hashes: Mapping[str, int]) -> dict[str, int]:
    """Of this rank's hashes by key, those that may differ from another rank's of the same key (all ranks).

    A key has a slot in each table, by its text. Where the smallest and the largest hash of a slot over all ranks are
    equal, no hash of the slot differs. Two keys may share a slot, so a key is returned if its slots show a difference
    in all tables. So one that differs always is. One that does not is with a probability of about (n / SLOTS)^TABLES,
    where n keys are held by anybody; the caller compares what is returned by name.

    Args:
        hashes: int64 values; the ranks may hold different keys, or none.
    """
    values = torch.tensor([*hashes.values()], dtype=torch.int64)
    digests = b"".join(hashlib.blake2b(key.encode(), digest_size=4 * TABLES).digest() for key in hashes)
    places = torch.from_numpy(np.frombuffer(digests, np.uint32).reshape(-1, TABLES).astype(np.int64) % SLOTS)
    places = places + SLOTS * torch.arange(TABLES)  # (n, TABLES)
    # The smallest hash of each slot, and the smallest complement, which is that of the largest hash.
    found = torch.full((2, TABLES * SLOTS), LARGEST)
    for row, numbers in zip(found, (values, ~values), strict=True):
        row.scatter_reduce_(0, places.flatten(), numbers.repeat_interleave(TABLES), "amin")
    dist.all_reduce(found, dist.ReduceOp.MIN)
    differs = (found[0, places] != ~found[1, places]).all(1)
    return {key: value for (key, value), one in zip(hashes.items(), differs.tolist(), strict=True) if one}


def hashes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A hash of each tensor, by its name and, if it is split, the part of it that this rank holds."""
    return read({name + part(tensor): position_hash(local(tensor)) for name, tensor in tensors.items()})


def part(tensor: Any) -> str:
    """Which part of a tensor this rank holds: the same text on all ranks that hold the same; "" if it is not split."""
    if not hasattr(tensor, "placements"):
        return ""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or ()
    split = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return f" {[(mesh.size(i), coordinate[i]) for i in split]}"


def position_hash(tensor: torch.Tensor) -> torch.Tensor:
    """A number, () int64, that depends on every bit of a tensor and on its place in memory."""
    # In its order in memory, which is another one with channels_last: what lies there in one piece is not copied.
    elements = tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).reshape(-1)
    # A processor computes XXH3 five times as fast as the sum, which every device can.
    return xxh3(elements) if tensor.device.type == "cpu" else weighted_sum(elements)


def xxh3(elements: torch.Tensor) -> torch.Tensor:
    """XXH3 of the bytes of a tensor on the CPU, (n,) of any type, as () int64."""
    return torch.tensor(xxhash.xxh3_64_intdigest(elements.view(torch.uint8).numpy().data) - 2**63)


def weighted_sum(elements: torch.Tensor) -> torch.Tensor:
    """The sum, modulo 2^64, of each element's bits times a random odd number of its place, () int64.

    Unlike an XOR, it also changes if elements change places or if the same bit flips in two of them. Two different
    tensors have the same sum with a probability of about 2^-32 at most.

    Args:
        elements: (n,) of any type.
    """
    # Halves of 8-byte elements: their highest bit times an odd number would be the same in each place.
    whole = {1: torch.uint8, 2: torch.int16}.get(elements.element_size(), torch.int32)
    factors = _factors(elements.device)
    total = torch.zeros((), dtype=torch.int64, device=elements.device)
    for i, block in enumerate(elements.view(whole).split(len(factors))):
        total += (block * factors[: len(block)]).sum() * (2 * i + 1)
    return total


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Random odd numbers, int64: as many as keep a GPU busy."""
    return (torch.randint(-(2**63), 2**63 - 1, (2**22,), generator=torch.Generator().manual_seed(0)) | 1).to(device)


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def read(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """These small tensors as Python's numbers, with one wait for the device; optimizers keep counters on the CPU."""
    if not values:
        return {}
    device = next(iter(values.values())).device
    together = torch.stack([value.to(device) for value in values.values()])
    return dict(zip(values, together.tolist(), strict=True))
