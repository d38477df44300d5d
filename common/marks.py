"""Names that a profile finds parts of a step by. Without a profiler, a mark takes a few microseconds."""

import torch

READS = "brigade: reads"
BESIDE = "brigade: beside the training"
EVALUATES = "brigade: an evaluation is due"
EVALUATED = "brigade: evaluated"

mark = torch.profiler.record_function  # marks what happens inside, for a profiler that runs
