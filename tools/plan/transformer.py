"""The work of a step of a GPT by formula, where nothing can be counted: published trainings, and docs/explorer.html.

b sequences of s tokens, width h, l layers, a heads, k key-value heads, m hidden units of an MLP, vocabulary v, t tensor
and p pipeline ranks. FLOPs of a layer and micro-batch, forward: 2 b s (2 h^2 + 2 h^2 k / a + g h m + s h), with g
matrices in an MLP and attention that looks back only, s h for half of 2 s h (https://arxiv.org/abs/2104.04473,
appendix, has the whole square); of the logits 2 b s h v. A backward pass is twice that.

Attention's time is apart: flash attention's backward pass computes the scores again, so 5 products for 2, and blocks on
the diagonal are computed whole (https://arxiv.org/abs/2307.08691, section 3). Programs before it wrote all scores to
memory, and computed the whole square.

A model with E experts has E MLPs in a layer and a router, and each token meets k of them. They lie on ep ranks, to
which tokens travel and from which results return, as in moe_gpt, with a load that is balanced.

Activations of a layer, in bytes of 16 bit: https://arxiv.org/abs/2205.05198, section 4, with flash attention, which
keeps no s x s scores.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tools.plan.work import Traffic, Work

HALF, FLOAT = 2, 4  # bytes
FLOAT_LOGITS = 2**29  # that a recipe's loss computes with at a time: common/workloads/gpt.py, which needs torch
OPERATORS = 98  # of a layer's forward and backward pass in eager mode: counted in ddp_gpt
MOVED = 29  # tensors of (b, s, h) that a layer's other operators read and write, forward: counted in ddp_gpt
MOVED_MLP = 13  # the same of (b, s, m)
ROUTED, OF_EXPERT = 121, 6  # operators more of a layer with experts, and of each that is here: counted in moe_gpt
ROWS_MOVED = 14  # tensors (b, s, k h) that the ways to experts and back read and write, forward: read off moe_gpt
CASTS = 27  # operators of a layer more, where autocast turns replicated float32 weights into 16 bit
DIAGONAL = 128  # tokens of the blocks in which attention's kernels compute
SCORES_MOVED = 6.5  # times that scores are read or written where no kernel joins it: 2 products, mask, softmax, dropout
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
    experts: int = 1
    top_k: int = 1

    @property
    def mlp_parameters(self) -> float:
        """Of one layer's MLP, or of one of its experts."""
        return (3 if self.gated else 2) * self.width * self.mlp_width

    @property
    def layer_parameters(self) -> float:
        """Of one layer."""
        return self.met(self.experts)

    def met(self, mlps: float) -> float:
        """Of one layer with so many of its MLPs: `top_k` are those that a token meets."""
        h = self.width
        router = h * self.experts if self.experts > 1 else 0
        return 2 * h * h * (1 + self.kv_heads / self.heads) + router + mlps * self.mlp_parameters

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
        return 2 * self.seq_len * self.met(self.top_k) + self.attention_flops

    @property
    def attention_flops(self) -> float:
        """Of them, attention, which looks back only."""
        return 2 * self.seq_len * self.seq_len * self.width

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
        recompute: none, selective (attention), ops (every second product, and all that is no product), products (all
            that is no product and no attention) or full.
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
        logit_bytes: of memory for each logit when its gradient is computed, in 32 bit: counted in ddp_gpt.
        loss_logits: that the loss computes with at a time.
        logit_moved: bytes that the loss reads and writes for each logit: counted in ddp_gpt.
        outputs_kept: whether the last stage keeps the logits of all micro-batches, as torch's schedules do.
        gradients: copies of all gradients at the peak; DDP has two after micro-batches that send nothing.
        extra: bytes of a parameter that a strategy keeps beside these.
        norms: tensors (b, s, h) of 16 bit that a layer keeps for its norms, and for what is added up between them.
        gathered_kept: tensors (b, s, h) of a layer that tensor-parallel ranks keep gathered for the backward pass.
        cp: ranks that share each sequence.
        ep: ranks that share the experts of a layer; they are among those of dp.
        every: steps from one exchange of the dp ranks to the next, which sends all that they differ in at once.
        flash: whether one kernel computes attention; without it, memory is not known.
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
    logit_bytes: int = 12
    loss_logits: float = math.inf
    logit_moved: int = 52
    outputs_kept: bool = False
    gradients: int = 1
    extra: int = 0
    norms: int = 5
    gathered_kept: int = 0
    cp: int = 1
    ep: int = 1
    every: int = 1
    flash: bool = True

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

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
    s, h = shape.seq_len / layout.cp, shape.width
    again = {"ops": 0.5, "full": 1.0}.get(layout.recompute, 0.0)
    moved_again = 1.0 if layout.recompute in ("ops", "products") else again
    # Selective recomputation repeats attention; "ops" and "products" all but that and, of "ops", half of the products.
    attention_again = {"selective": 1.0, "full": 1.0}.get(layout.recompute, 0.0)
    # The last stage has the logits, and then the most to do, unless it has fewer layers.
    layers = shape.layers / p if layout.balanced else math.ceil(shape.layers / p)
    share = p if layout.balanced else 1
    # The balance of a whole step is known after a forward pass of all its micro-batches.
    first = 1.0 if shape.experts > 1 and m > 1 else 0.0
    products = (3 + again + first) * (shape.layer_flops - shape.attention_flops)
    flops = m * b * (layers * products + (3 + first) * shape.head_flops / share)
    # Of all heads. A score takes 4 FLOPs of a head's width forward, and an exponential; backward 10, and another one.
    square = m * b * layers * shape.heads * shape.seq_len**2
    scores = square * (1 + min(1.0, DIAGONAL / shape.seq_len)) / 2
    attention = scores * 4 * h / shape.heads * (3.5 + attention_again + first)
    written = 0.0
    if not layout.flash:
        flops += 4 * square * h / shape.heads * (3 + attention_again)
        written = SCORES_MOVED * HALF * square / t * (3 + attention_again)
        scores = attention = 0.0
    split = t if layout.sequence else 1
    rows = ROWS_MOVED * shape.top_k * h if shape.experts > 1 else 0
    per_layer = (MOVED / split * h + MOVED_MLP / t * shape.mlp_width * shape.top_k + rows) * b * s * HALF
    joined = 0.5 if layout.compiled else 1.0
    head = m * b * s * shape.vocab / t * layout.logit_moved / share
    moved = (m * layers * per_layer * (3 + moved_again + first) + head) * joined
    own = (layers * shape.layer_parameters + shape.ends / (1 if p == 1 else 2)) / t
    update = UPDATE_BYTES * own / (layout.dp * layout.cp if layout.zero else 1)
    casts = CASTS if _autocast(layout) else 0
    routed = ROUTED + OF_EXPERT * shape.experts / layout.ep if shape.experts > 1 else 0
    each = OPERATORS + casts + routed
    operators = int(m * layers * each * (1 + (again + first) / 3) * (joined if layout.flash else 1))
    return Work(
        world_size=layout.size,
        samples=layout.global_batch,
        flops={"bfloat16": flops / (t * layout.cp)},
        attention={"bfloat16": attention / (t * layout.cp)},
        exponentials=scores * (2 + attention_again + first) / (t * layout.cp),
        product_bytes=m * layers * 3 * shape.met(shape.experts / layout.ep) / t * HALF,
        elementwise_bytes=moved + written + update,
        kernels=operators,
        traffic=tuple(traffic(shape, layout, layers, own)),
        memory=memory(shape, layout, layers),
        state_bytes=shape.parameters * (layout.storage + layout.optimizer),
        model_flops=shape.model_flops * layout.global_batch,
        micro_batches=m,
        idle=(p - 1) / (m * layout.virtual + p - 1),
        units={"tokens": shape.seq_len},
    )


def _autocast(layout: Layout) -> bool:
    return layout.zero != 3 and layout.storage == FLOAT


def traffic(shape: Shape, layout: Layout, layers: float, own: float) -> list[Traffic]:
    """What a rank sends in a step."""
    found = []
    t, p, dp, m = layout.tp, layout.pp, layout.dp * layout.cp, layout.micro_batches
    activation = layout.micro_batch * shape.seq_len / layout.cp * shape.width * HALF
    if t > 1:
        # Two sums of a layer forward and two backward; two more if the forward pass is repeated. With sequence
        # parallelism, a sum is a reduce-scatter and an all-gather, which move as much.
        sums = int(m * layers * (6 if layout.recompute == "full" else 4))
        over = machines(t, 1, layout.local_size)
        hidden = "engine" if layout.sums_hidden else "no"
        found.append(Traffic("all-reduce", "tp", t, over, sums, sums * activation, hidden))
    if layout.cp > 1:  # keys and values go round forward and backward, and so do their gradients in 32 bit
        calls = int(m * layers * (layout.cp - 1) * (4 if layout.recompute == "full" else 3))
        block = 2 * shape.kv_heads / shape.heads * activation
        over = machines(layout.cp, 1, layout.local_size)
        bytes_ = (calls + m * layers * (layout.cp - 1)) * block
        found.append(Traffic("send", "cp", layout.cp, over, calls, bytes_))
    if p > 1:
        calls = int(2 * m * layout.virtual)
        over = machines(p, t * dp, layout.local_size)
        # Each tensor-parallel rank sends its part, also of what all of them hold: section 4.1 of 2104.04473.
        found.append(Traffic("send", "pp", p, over, calls, calls * activation / t))
    again = m * (1 if shape.experts > 1 and m > 1 else 0)  # the forward passes before
    gathered = 2 * m + again
    if layout.ep > 1:  # rows and results forward, and their gradients backward
        calls = int(layers * (m * (6 if layout.recompute == "full" else 4) + 2 * again))
        over = machines(layout.ep, 1, layout.local_size)
        found.append(Traffic("all-to-all", "ep", layout.ep, over, calls, calls * activation * shape.top_k))
        own -= layers * shape.experts * shape.mlp_parameters
        experts, groups = layers * shape.experts * shape.mlp_parameters / layout.ep, dp // layout.ep
        if groups > 1:
            over = machines(groups, layout.ep, layout.local_size)
            calls, buckets = int(gathered * math.ceil(layers)), math.ceil(layers)
            found.append(Traffic("all-gather", "ep_dp", groups, over, calls, gathered * experts * HALF, "step"))
            sent = experts * layout.grad_bytes
            found.append(Traffic("reduce-scatter", "ep_dp", groups, over, buckets, sent, "step"))
    if dp > 1:
        over = machines(dp, t, layout.local_size)
        buckets = math.ceil(layers) + 1
        hidden = "backward" if layout.overlapped else "no"
        if layout.zero == 3:
            gathers = int(gathered * buckets)
            found.append(Traffic("all-gather", "dp", dp, over, gathers, gathered * own * HALF, "step"))
            found.append(Traffic("reduce-scatter", "dp", dp, over, buckets, own * layout.grad_bytes, "step"))
        elif layout.zero == 1:
            found.append(Traffic("reduce-scatter", "dp", dp, over, buckets, own * layout.grad_bytes, hidden))
            found.append(Traffic("all-gather", "dp", dp, over, buckets, own * HALF, hidden))
        elif layout.every > 1:  # after a step, so that nothing is computed meanwhile
            found.append(Traffic("all-reduce", "dp", dp, over, 1 / layout.every, own * FLOAT / layout.every))
        else:
            found.append(Traffic("all-reduce", "dp", dp, over, buckets, own * layout.grad_bytes, hidden))
    return found


def memory(shape: Shape, layout: Layout, layers: float) -> dict[str, float]:
    """Bytes at the peak of a step on the rank that needs most: of a pipeline the first, or the last with the logits."""
    fewest = layers if layout.balanced else shape.layers // layout.pp  # what the last stage has
    ends = [(layers, True, True)] if layout.pp == 1 else [(layers, True, False), (fewest, False, True)]
    return max((_held(shape, layout, *one) for one in ends), key=lambda kinds: sum(kinds.values()))


# One account, which is read from its top to its end.
def _held(  # noqa: PLR0912, PLR0915
    shape: Shape, layout: Layout, layers: float, first: bool, last: bool
) -> dict[str, float]:
    """Of a rank with this many layers, and the first or the last of all stages.

    The peak is the largest of some moments. What is there at each of them was read off the recipes' code: see
    tests/harness/memory_grid.py.
    """
    t, m, tied = layout.tp, layout.micro_batches, shape.tied
    length, h = shape.seq_len / layout.cp, shape.width
    tokens = layout.micro_batch * length
    shards = layout.dp * layout.cp if layout.zero == 3 else 1
    sharded, autocast, several = layout.zero == 3, _autocast(layout), m > 1
    layer, table = shape.layer_parameters / t, shape.vocab * h / t  # parameters; the embedding's are the head's as well
    tables = first + (last and not (first and tied))
    held = layers * layer + tables * table  # of which each rank has a share
    layer_held, layer = layer, shape.met(shape.experts / layout.ep) / t  # with the experts that a rank computes
    own = layers * layer + tables * table
    # Activations in 16 bit, (b, s, h) whole and as tensor-parallel ranks split it, and (b, s, m). Under autocast, what
    # layers add to is in 32 bit, and each matrix has its own copy of its input.
    wide, inner = tokens * h * HALF, tokens * shape.mlp_width * shape.top_k * HALF / t
    rows = shape.top_k * wide if shape.experts > 1 else 0.0  # of experts, in the order that they compute in
    indices = tokens * (40 * shape.top_k + 16 * shape.experts) if shape.experts > 1 else 0.0
    narrow = wide / (t if layout.sequence else 1)
    stream = narrow * (2 if autocast else 1)
    gathered_kept = layout.gathered_kept
    matrices = 2 if shape.gated else 1
    attention = (2 + 2 * shape.kv_heads / shape.heads) * wide / t + tokens * shape.heads * FLOAT / t
    whole = (
        ((10 if autocast else layout.norms) - gathered_kept) * narrow
        + gathered_kept * wide
        + attention
        + 2 * matrices * inner
        + 2 * rows
        + indices
    )
    products = attention + 2 * wide + matrices * inner + stream
    kept = {"ops": whole / 2, "products": products, "full": stream}.get(layout.recompute, whole)
    again = whole - kept
    inner_again = {"products": matrices, "full": 2 * matrices}.get(layout.recompute, 0) * inner
    # Of weights in 16 bit: under autocast all that no recomputation makes again; of FSDP the ends, and single layers.
    casts = layers * layer * HALF if autocast and not again else 0.0
    head = table * HALF if autocast else 0.0
    gathered = tables * table * HALF if sharded else 0.0
    ahead = layer * HALF if sharded else 0.0
    # Until the last micro-batch, FSDP sends no gradients and keeps them whole, DTensor the embedding's for all slices.
    sums = (own + (0 if tied else (t - 1) * table)) * layout.grad_bytes if sharded and several else 0.0
    gradients = own * layout.grad_bytes * layout.gradients if not sharded else 0.0
    scattered = layers * layer_held * FLOAT / shards
    logits = tokens * shape.vocab / t
    at_once = logits * min(1.0, max(1.0, layout.loss_logits // (length * shape.vocab)) / layout.micro_batch)
    outputs = m * (logits * HALF + stream) if layout.outputs_kept and last and not first else 0.0
    copies = 0.0 if outputs else logits * HALF
    loss = at_once * layout.logit_bytes + (copies + (logits - at_once) * HALF if at_once < logits else 0.0)
    base = layers * kept + gathered + sums + outputs
    moments = [outputs + m * logits * HALF if outputs else 0.0]  # torch joins them, at the end of a step
    if last:
        top = base + wide + stream + head + ahead
        moments.append(top + casts + loss)
        if autocast:  # the end of the forward pass, which has cast all weights
            moments.append(top + layers * layer * HALF + 2 * FLOAT * at_once + copies)
        # The gradient of the head, in 16 bit and, where gradients are added up or kept in 32 bit, cast.
        cast = table * FLOAT if autocast or several else 0.0
        moments.append(top - head + casts + table * HALF + max(logits * HALF + head, cast))
    # A layer's backward pass: of the MLP, or of what tensor-parallel ranks gather before it. The head's gradient waits
    # for those of the micro-batch, or of the embedding whose weights it has.
    matrix = shape.mlp_width * h / t * max(1.0, shape.experts / layout.ep)
    passing = narrow + stream + 2 * inner + 2 * rows + matrix * HALF
    if sharded and several:  # the gradient of a matrix is cast, added up, and gone
        passing = narrow + stream + inner + max(inner, matrix * (HALF + FLOAT))
    if gathered_kept:
        passing = max(passing, (4 if layout.recompute == "products" else 3) * wide + 2 * narrow - inner_again)
    if sharded:
        waits = table * HALF if tied or not several else 0.0
        for done in {0, 1, max(layers - 1, 1)}:  # layers before it
            sent = 0.0 if several else done * layer_held * FLOAT / shards + (layer * FLOAT if done else 0.0)
            moment = base - done * kept + 2 * ahead + sent + waits
            moments += [moment + again + passing, moment - kept + 3 * stream + (0.0 if several else ahead)]
        if several:
            moments += [base - kept + 2 * stream + 3 * ahead + waits, sums + 2 * gathered + ahead]
            moments.append(2 * FLOAT * tables * table + scattered)
            both = (table * 2 * FLOAT if t == 1 else t * table * (HALF + FLOAT)) if tied else 0.0
            moments.append(sums + gathered + (both or t * table * HALF + (table * FLOAT if t == 1 else 0.0)))
        else:
            moments.append(tables * table * (FLOAT + HALF) + scattered)
            more = 3 * table if tied and t == 1 else (t + tables) * table if t > 1 else 0.0
            moments.append(gathered + more * HALF + layer * FLOAT + scattered)
    else:
        waits = table * FLOAT if tied and first and last else 0.0
        own_output = stream if first and not last else 0.0
        # The first of p stages has p micro-batches on their way; with v stages a rank (1 + (p - 1) / (p v)) as many.
        ways = min(layout.pp, m) if first else 1
        ways *= 1 + (layout.pp - 1) / (layout.pp * layout.virtual) if layout.virtual > 1 else 1
        one = layers * kept + casts + own_output
        passing += again + own_output + outputs + waits + (layer * HALF if autocast and again else 0.0)
        if m > ways or layout.pp == 1:
            moments.append(ways * one + passing)
        else:  # when the first backward pass begins, there are no gradients; when it ends, less to go back through
            moments += [ways * one + passing - gradients, max(ways - 1, 1) * one + passing]
        if first and autocast:
            moments.append(2 * waits + table * FLOAT)
        if not layout.overlapped and layout.dp > 1:  # all of them in one buffer
            moments.append(own * layout.grad_bytes)
    return {
        "parameters": held * layout.storage / shards,
        "gradients": gradients + sums,
        "optimizer": held * layout.optimizer / (shards if sharded else layout.dp if layout.zero else 1),
        "rest": max(moments) - sums + held * layout.extra,
    }


# --- the strategies that recipes have ------------------------------------------------------------------------------

# Of docs/explorer.html.
STRATEGIES = ("ddp_gpt", "fsdp_gpt", "tensor_gpt", "pipeline_gpt", "context_gpt", "moe_gpt", "diloco_gpt")
INNER_STEPS = 20  # diloco_gpt's default: each rank is a replica, and sends after so many steps


def of_recipe(recipe: str, size: int, parts: int, **more: Any) -> Layout:
    """The layout of a language-model recipe.

    Args:
        recipe: that trains language models; accelerate_gpt under DDP, or with `zero` 3 under FSDP2.
        size: number of ranks.
        parts: --tp, --pp, --cp or --ep; 1 for the others.
        **more: other fields of `Layout`; `recompute` as the recipes have it.
    """
    base = Layout(loss_logits=FLOAT_LOGITS, **more)
    if base.recompute == "selective":
        base = dataclasses.replace(base, recompute="products")
    if recipe == "moe_gpt":  # whose ranks all read sequences
        return dataclasses.replace(base, dp=size, zero=3, ep=parts)
    several = base.global_batch * parts > base.micro_batch * size
    replicas = {"gradients": 2 if several else 1}
    own: dict[str, Any] = {
        "diloco_gpt": {**replicas, "extra": 8, "every": INNER_STEPS},
        # Its loss over sliced logits makes more copies: counted.
        "tensor_gpt": {"tp": parts, "zero": 3, "gathered_kept": 2, "logit_bytes": 16, "logit_moved": 150},
        "pipeline_gpt": {"pp": parts, "overlapped": False, "outputs_kept": True},
        "context_gpt": {"cp": parts, "zero": 3},
        "fsdp_gpt": {"zero": 3},
        # Accelerate computes under autocast there as well: norms in 32 bit, and a cast for each matrix.
        "accelerate_gpt": {"norms": 12} if base.zero == 3 else replicas,
    }.get(recipe, replicas)
    return dataclasses.replace(base, dp=size // parts, **own)
