"""Names for torch's `record_function`, by which a profile finds parts of a step."""

READS = "brigade: reads"
BESIDE = "brigade: beside the training"
EVALUATES = "brigade: an evaluation is due"
EVALUATED = "brigade: evaluated"
