"""Names in a trace: for torch's `record_function`, by which a profile finds parts of a step; and of what it adds."""

READS = "brigade: reads"
BESIDE = "brigade: beside the training"
EVALUATES = "brigade: an evaluation is due"
EVALUATED = "brigade: evaluated"
ENDS = "brigade: the last step ends"
FACTS = "brigade"  # key of what torch does not write
