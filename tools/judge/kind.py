"""What is said of a kind of mistake, and the files that do it right."""

from dataclasses import dataclass

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True)
class Kind:
    """One kind of mistake."""

    level: str
    does: str
    change: str
    recipe: str


DDP = "recipes/ddp_resnet/bare.py"
ACCUMULATE = "recipes/multinode_resnet/bare.py"
BY_HAND = "recipes/allreduce_resnet/bare.py"
FSDP = "recipes/fsdp_gpt/bare.py"
TRAIN = "recipes/ddp_resnet/train.py"
