"""Names that a profile finds parts of a step by. Without a profiler, a mark takes a few microseconds."""

from contextlib import AbstractContextManager
from typing import Any

import torch

READS = "brigade: reads"
BESIDE = "brigade: beside the training"
EVALUATES = "brigade: an evaluation is due"
EVALUATED = "brigade: evaluated"


def mark(name: str) -> AbstractContextManager[Any]:
    """Mark what happens inside, for a profiler that runs."""
    return torch.profiler.record_function(name)
