"""Which of many hashes differ between the ranks that hold them: by one all-reduce, whatever each rank holds.

To gather all names and hashes would send each rank as much as all ranks have: 264 MB for 300 tensors on 16,384 ranks.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

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
