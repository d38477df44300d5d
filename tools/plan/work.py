"""What a rank does in one training step: counted from a recipe by `count`, or written by a formula."""

from dataclasses import dataclass, field

KINDS = ("parameters", "gradients", "optimizer", "rest")  # of memory; rest: activations, gathered parameters, buffers
# Behind nothing, the last backward pass, or all that is computed: by kernels of NCCL beside it, or by copy engines.
HIDDEN = ("no", "backward", "step", "engine")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one group.

    Attributes:
        kind: all-reduce, all-gather, reduce-scatter, broadcast, all-to-all, send.
        axis: of the mesh, or of how many ranks.
        ranks: of the group.
        machines: that the group is spread over.
        calls: a step; below 1 where only some steps send.
        bytes: that the calls add up, gather or scatter, over the whole group; a message's for "send".
        hidden: what is computed meanwhile, see `HIDDEN`.
    """

    kind: str
    axis: str
    ranks: int
    machines: int
    calls: float
    bytes: float
    hidden: str = "no"


@dataclass(frozen=True)
class Work:
    """One training step of the rank with the most to do.

    Attributes:
        world_size: number of ranks.
        samples: of a step, over all ranks.
        flops: of matrix products, by the type they are computed in.
        attention: FLOPs of attention where one kernel computes all of it, by their type.
        exponentials: that these kernels compute.
        convolutions: FLOPs of convolutions, by their type.
        product_bytes: that products and convolutions read and write.
        elementwise_bytes: that all other operators read and write.
        kernels: operators that launch something.
        micro_batches: that a rank computes in a step, one after the other.
        idle: share of a step in which the rank waits for other stages of its pipeline.
        traffic: what it sends.
        memory: bytes at the peak of a step, by kind.
        state_bytes: of a checkpoint, over all ranks.
        model_flops: of a step over all ranks, without what the backward pass computes again.
        units: of a sample, such as {"tokens": 2048}.
        parameters: of the whole model; 0 if nobody has counted them.
        active: of these, those that a token meets; fewer with a mixture of experts.
    """

    world_size: int
    samples: int
    flops: dict[str, float]
    product_bytes: float
    elementwise_bytes: float
    kernels: int
    traffic: tuple[Traffic, ...]
    memory: dict[str, float]
    state_bytes: float
    model_flops: float
    convolutions: dict[str, float] = field(default_factory=dict)
    attention: dict[str, float] = field(default_factory=dict)
    exponentials: float = 0.0
    micro_batches: float = 1
    idle: float = 0.0
    units: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    active: int = 0

    @property
    def peak_bytes(self) -> float:
        """Of memory, on the rank that needs most."""
        return sum(self.memory.values())
