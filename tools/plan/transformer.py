"""The work of a step of a GPT by formula, where nothing can be counted: published trainings, and docs/explorer.html.

b sequences of s tokens, width h, l layers, a heads, k key-value heads, m hidden units of an MLP, vocabulary v, t tensor
and p pipeline ranks. FLOPs of a layer and micro-batch, forward: 2 b s (2 h^2 + 2 h^2 k / a + g h m + s h), with g
matrices in an MLP and attention that looks back only, s h for half of 2 s h (https://arxiv.org/abs/2104.04473,
appendix, has the whole square); of the logits 2 b s h v. A backward pass is twice that.

Activations of a layer, in bytes of 16 bit: https://arxiv.org/abs/2205.05198, section 4, with flash attention, which
keeps no s x s scores.
"""

import dataclasses
import math
from dataclasses import dataclass

from tools.plan.work import Traffic, Work

HALF, FLOAT = 2, 4  # bytes
OPERATORS = 98  # of a layer's forward and backward pass in eager mode: counted in ddp_gpt
MOVED = 29  # tensors of (b, s, h) that a layer's other operators read and write, forward: counted in ddp_gpt
MOVED_MLP = 13  # the same of (b, s, m)
CASTS = 27  # operators of a layer more, where autocast turns replicated float32 weights into 16 bit
UPDATE_BYTES = 40  # for each parameter of clipping and AdamW in float32: 4 tensors read, 3 written, and the norm


@dataclass(frozen=True)
class Shape:
    """A GPT and its batch; the module's text names the letters."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    gated: bool
    vocab: int
    seq_len: int
    tied: bool

    @property
    def layer_parameters(self) -> float:
        """Of one layer."""
        h = self.width
        return 2 * h * h * (1 + self.kv_heads / self.heads) + (3 if self.gated else 2) * h * self.mlp_width

    @property
    def ends(self) -> float:
        """Parameters of embedding and output layer."""
        return self.vocab * self.width * (1 if self.tied else 2)

    @property
    def parameters(self) -> float:
        """Of the model."""
        return self.layers * self.layer_parameters + self.ends

    @property
    def layer_flops(self) -> float:
        """Of a layer's forward pass of one sequence."""
        return 2 * self.seq_len * (self.layer_parameters + self.seq_len * self.width)

    @property
    def head_flops(self) -> float:
        """Of the logits of one sequence, forward."""
        return 2 * self.seq_len * self.width * self.vocab

    @property
    def model_flops(self) -> float:
        """Of a sequence, forward and backward."""
        return 3 * (self.layers * self.layer_flops + self.head_flops)


@dataclass(frozen=True)
class Layout:
    """How a GPT is split over ranks.

    Attributes:
        dp: data-parallel ranks.
        tp: ranks that split every matrix.
        pp: stages.
        virtual: stages of each rank.
        micro_batch: sequences of a forward pass on a rank.
        global_batch: sequences of a step.
        recompute: none, selective (attention), ops (every second product, and all that is no product) or full.
        zero: 0 for replicas, 1 with the optimizer state split over dp ranks, 3 for FSDP.
        local_size: ranks on a machine.
        grad_bytes: of a gradient when it is sent.
        storage: bytes of a parameter where it is kept.
        optimizer: bytes of a parameter's optimizer state, with a master copy where there is one.
        sequence: whether tensor-parallel ranks split what lies between matrices by the sequence.
        overlapped: whether gradients are sent during the backward pass.
        compiled: whether a compiler has joined the small operators.
        balanced: whether the last stage has fewer layers, for the logits.
        sums_hidden: whether tensor-parallel sums travel while matrix products are computed.
        logit_bytes: of memory for each logit, in 16 and 32 bit and its gradient: counted in ddp_gpt.
        logit_moved: bytes that the loss reads and writes for each logit: counted in ddp_gpt.
        outputs_kept: whether the last stage keeps the logits of all micro-batches, as torch's schedules do.
        gradients: copies of all gradients at the peak; DDP has two after micro-batches that send nothing.
        gathered_kept: tensors (b, s, h) of a layer that tensor-parallel ranks keep gathered for the backward pass.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str = "none"
    zero: int = 0
    local_size: int = 8
    grad_bytes: int = FLOAT
    storage: int = FLOAT
    optimizer: int = 8
    sequence: bool = True
    overlapped: bool = True
    compiled: bool = False
    balanced: bool = False
    sums_hidden: bool = False
    logit_bytes: int = 10
    logit_moved: int = 52
    outputs_kept: bool = False
    gradients: int = 1
    gathered_kept: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    @property
    def micro_batches(self) -> float:
        """Of a rank in a step."""
        return self.global_batch / (self.dp * self.micro_batch)


def machines(ranks: int, stride: int, local_size: int) -> int:
    """How many machines a group is spread over whose ranks are `stride` apart."""
    return max(1, min(ranks, math.ceil(ranks * stride / local_size))) if ranks > 1 else 1


def work(shape: Shape, layout: Layout) -> Work:
    """What the slowest rank does in a step: a stage of ceil(l / p) layers, and the logits."""
    t, p, b, m = layout.tp, layout.pp, layout.micro_batch, layout.micro_batches
    s, h = shape.seq_len, shape.width
    again = {"none": 0.0, "selective": 0.0, "ops": 0.5, "full": 1.0}[layout.recompute]
    moved_again = 1.0 if layout.recompute == "ops" else again
    # Selective recomputation repeats the attention of two matrix products, and nothing else.
    selective = 2 * s * s * h if layout.recompute == "selective" else 0.0
    # The last stage has the logits, and then the most to do, unless it has fewer layers.
    layers = shape.layers / p if layout.balanced else math.ceil(shape.layers / p)
    share = p if layout.balanced else 1
    flops = m * b * (layers * ((3 + again) * shape.layer_flops + selective) + 3 * shape.head_flops / share) / t
    split = t if layout.sequence else 1
    per_layer = (MOVED / split * h + MOVED_MLP / t * shape.mlp_width) * b * s * HALF
    joined = 0.5 if layout.compiled else 1.0
    head = m * b * s * shape.vocab / t * layout.logit_moved / share
    moved = (m * layers * per_layer * (3 + moved_again) + head) * joined
    own = (layers * shape.layer_parameters + shape.ends / (1 if p == 1 else 2)) / t
    update = UPDATE_BYTES * own / (layout.dp if layout.zero else 1)
    casts = CASTS if _autocast(layout) else 0
    operators = int(m * layers * (OPERATORS + casts) * (1 + again / 3) * joined)
    return Work(
        world_size=layout.size,
        samples=layout.global_batch,
        flops={"bfloat16": flops},
        product_bytes=m * layers * 3 * shape.layer_parameters / t * HALF,
        elementwise_bytes=moved + update,
        kernels=operators,
        traffic=tuple(traffic(shape, layout, layers, own)),
        memory=memory(shape, layout, layers, own),
        state_bytes=shape.parameters * (layout.storage + layout.optimizer),
        model_flops=shape.model_flops * layout.global_batch,
        micro_batches=m,
        idle=(p - 1) / (m * layout.virtual + p - 1),
        units={"tokens": s},
    )


def _autocast(layout: Layout) -> bool:
    return layout.zero != 3 and layout.storage == FLOAT


def traffic(shape: Shape, layout: Layout, layers: float, own: float) -> list[Traffic]:
    """What a rank sends in a step."""
    found = []
    t, p, dp, m = layout.tp, layout.pp, layout.dp, layout.micro_batches
    activation = layout.micro_batch * shape.seq_len * shape.width * HALF
    if t > 1:
        # Two sums of a layer forward and two backward; two more if the forward pass is repeated. With sequence
        # parallelism, a sum is a reduce-scatter and an all-gather, which move as much.
        sums = int(m * layers * (6 if layout.recompute == "full" else 4))
        over = machines(t, 1, layout.local_size)
        hidden = "step" if layout.sums_hidden else "no"
        found.append(Traffic("all-reduce", "tp", t, over, sums, sums * activation, hidden))
    if p > 1:
        calls = int(2 * m * layout.virtual)
        over = machines(p, t * dp, layout.local_size)
        found.append(Traffic("send", "pp", p, over, calls, calls * activation / (t if layout.sequence else 1)))
    if dp > 1:
        over = machines(dp, t, layout.local_size)
        buckets = math.ceil(layers) + 1
        hidden = "backward" if layout.overlapped else "no"
        if layout.zero == 3:
            gathers = int(2 * m * buckets)
            found.append(Traffic("all-gather", "dp", dp, over, gathers, 2 * m * own * HALF, "step"))
            found.append(Traffic("reduce-scatter", "dp", dp, over, buckets, own * layout.grad_bytes, "step"))
        elif layout.zero == 1:
            found.append(Traffic("reduce-scatter", "dp", dp, over, buckets, own * layout.grad_bytes, hidden))
            found.append(Traffic("all-gather", "dp", dp, over, buckets, own * HALF, hidden))
        else:
            found.append(Traffic("all-reduce", "dp", dp, over, buckets, own * layout.grad_bytes, hidden))
    return found


def memory(shape: Shape, layout: Layout, layers: float, own: float) -> dict[str, float]:
    """Bytes at the peak of a step, on the first stage, which keeps most activations."""
    t, p, b = layout.tp, layout.pp, layout.micro_batch
    s, h = shape.seq_len, shape.width
    dp = layout.dp
    parts = {1: 1, 3: dp}.get(layout.zero, 1)
    split = t if layout.sequence else 1
    kv = shape.kv_heads / shape.heads
    # Of a layer: inputs and outputs of both norms and the sum between; query, key, value and output of attention; of
    # the MLP its products and what lies between them. Norms' outputs may be kept gathered.
    norms = (5 - layout.gathered_kept) / split + layout.gathered_kept
    whole = b * s * HALF * (norms * h + ((2 + 2 * kv) * h + (4 if shape.gated else 2) * shape.mlp_width) / t)
    kept = {"none": whole, "selective": whole, "ops": whole / 2, "full": b * s * h * HALF / split}[layout.recompute]
    # The first of p stages has p micro-batches on their way; with v stages a rank, (1 + (p - 1) / (p v)) times as many.
    under_way = min(p, layout.micro_batches) if p > 1 else 1
    under_way *= 1 + (p - 1) / (p * layout.virtual) if layout.virtual > 1 else 1
    again = whole if layout.recompute == "full" else 0.0
    logits = b * s * shape.vocab / t
    if p == 1:
        rest = layers * kept + again + logits * layout.logit_bytes
    else:  # the first stage, or the last one, which has one micro-batch on its way
        outputs = logits * HALF * (layout.micro_batches if layout.outputs_kept else 0)
        rest = again + max(layers * kept * under_way, layers * kept + logits * layout.logit_bytes + outputs)
    if _autocast(layout):  # which keeps the weights in 16 bit until the backward pass has ended
        rest += own * HALF
    if layout.zero == 3:  # two blocks and the ends, gathered, and gradients of a block and of the ends
        rest += (3 * shape.layer_parameters + 2 * shape.ends) / t * HALF
    return {
        "parameters": own * layout.storage / parts,
        "gradients": own * layout.grad_bytes * layout.gradients / parts,
        "optimizer": own * layout.optimizer / (dp if layout.zero else 1),
        "rest": rest,
    }


# --- the strategies that recipes have ------------------------------------------------------------------------------

STRATEGIES = ("ddp_gpt", "fsdp_gpt", "tensor_gpt", "pipeline_gpt")


def of_recipe(recipe: str, size: int, parts: int, **more: int | str) -> Layout:
    """The layout of a language-model recipe.

    Args:
        recipe: one of `STRATEGIES`.
        size: number of ranks.
        parts: --tp or --pp; 1 for the others.
        **more: other fields of `Layout`.
    """
    base = Layout(**more)  # type: ignore[arg-type]
    several = base.global_batch * parts > base.micro_batch * size
    if recipe == "tensor_gpt":  # its loss over sliced logits makes more copies: counted
        return dataclasses.replace(
            base, tp=parts, dp=size // parts, zero=3, gathered_kept=2, logit_bytes=40, logit_moved=150
        )
    if recipe == "pipeline_gpt":
        return dataclasses.replace(
            base, pp=parts, dp=size // parts, overlapped=False, outputs_kept=True, gradients=2 if size > parts else 1
        )
    if recipe == "fsdp_gpt":
        return dataclasses.replace(base, dp=size, zero=3)
    return dataclasses.replace(base, dp=size, gradients=2 if several else 1)
