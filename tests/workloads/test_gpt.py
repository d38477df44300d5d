"""The GPT against slow loops in float64: what it may see, how positions enter, and that its parts are the whole."""

import copy
import dataclasses
import itertools
import math
import types

import pytest
import torch
from common import UserError
from common.train import initial
from common.workloads import gpt
from torch import nn
from torch.nn import functional as F

SHAPE = gpt.Shape(11, num_layers=3, num_heads=4, width=24, num_kv_heads=2, mlp_width=20)
BLOCK = ("attention_norm", "attention.query", "attention.key", "attention.value", "attention.output")
BLOCK += ("mlp_norm", "mlp.gate", "mlp.up", "mlp.down")


def make(shape: gpt.Shape = SHAPE) -> gpt.GPT:
    """With weights so large, and norms so unequal, that every term matters."""
    with torch.device("meta"):
        model = gpt.GPT(shape)
    initial.materialize(model, 0, torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64).mul(0.3))
            parameter.add_(float(parameter.ndim == 1))
    return model


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(2))


def stretched(shape: gpt.Shape, rate: float) -> float:
    """The rate of a pair, in radians a token, as Llama 3.1's own code has it."""
    kind, *numbers = shape.rope_scaling.split(":")
    if not kind:
        return rate
    if kind == "linear":
        return rate / float(numbers[0])
    factor, low, high, context = map(float, numbers)
    wavelength = 2 * math.pi / rate
    if wavelength < context / high:
        return rate
    if wavelength > context / low:
        return rate / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * rate / factor + smooth * rate


def slow_logits(model: gpt.GPT, row: torch.Tensor) -> torch.Tensor:
    """One sequence, one position and head at a time, straight from the papers."""
    weights, shape = model.state_dict(), model.shape
    size = shape.head_width

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean() + shape.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        """As complex numbers, each of which turns at a rate of its own."""
        number = torch.complex(x[: size // 2], x[size // 2 :])
        plain = [shape.rope_base ** (-2 * i / size) for i in range(size // 2)]
        rates = torch.tensor([stretched(shape, rate) for rate in plain], dtype=torch.float64)
        number = number * torch.polar(torch.ones_like(rates), position * rates)
        return torch.cat([number.real, number.imag])

    stream = [weights["embed.weight"][token] for token in row]
    for i in range(shape.num_layers):
        block = f"blocks.{i}"
        inputs = [norm(x, f"{block}.attention_norm") for x in stream]
        query, key, value = (
            [
                (
                    weights[f"{block}.attention.{name}.weight"] @ x + weights.get(f"{block}.attention.{name}.bias", 0)
                ).view(-1, size)
                for x in inputs
            ]
            for name in ("query", "key", "value")
        )
        if shape.qk_norm:
            query = [torch.stack([norm(head, f"{block}.attention.query_norm") for head in heads]) for heads in query]
            key = [torch.stack([norm(head, f"{block}.attention.key_norm") for head in heads]) for heads in key]
        for t in range(len(row)):
            heads = []
            for head in range(shape.num_heads):
                group = head // (shape.num_heads // shape.num_kv_heads)
                mine = turned(query[t][head], t)
                scores = [mine @ turned(key[s][group], s) / math.sqrt(size) for s in range(t + 1)]
                shares = torch.stack(scores).softmax(0)
                heads.append(sum(share * value[s][group] for s, share in enumerate(shares)))
            stream[t] = stream[t] + weights[f"{block}.attention.output.weight"] @ torch.cat(heads)
        for t, x in enumerate(stream):
            y = norm(x, f"{block}.mlp_norm")
            gate = weights[f"{block}.mlp.gate.weight"] @ y
            hidden = gate * torch.sigmoid(gate) * (weights[f"{block}.mlp.up.weight"] @ y)
            stream[t] = x + weights[f"{block}.mlp.down.weight"] @ hidden
    output = weights["embed.weight" if shape.tied else "head.weight"]
    return torch.stack([output @ norm(x, "norm") for x in stream])


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        gpt.Shape(11, num_layers=2, num_heads=3, width=12, tied=True),
        gpt.Shape(11, num_layers=1, num_heads=4, width=16, num_kv_heads=1, rope_base=100.0, norm_eps=0.5),
        gpt.Shape(11, num_layers=2, num_heads=3, width=10, head_width=6, qkv_bias=True, rope_scaling="linear:3"),
        gpt.Shape(
            *(11, 2, 4, 10), num_kv_heads=2, head_width=12, qk_norm=True, rope_base=100, rope_scaling="llama3:8:1:4:40"
        ),
    ],
    ids=["grouped", "tied", "one head of keys", "biases", "norms of heads"],
)
def test_logits_are_those_of_the_slow_loop(shape: gpt.Shape) -> None:
    model = make(shape)
    rows = tokens(2, 7)
    wanted = torch.stack([slow_logits(model, row) for row in rows])
    torch.testing.assert_close(model(rows), wanted, atol=1e-12, rtol=0)
    for change in ({"norm_eps": 0.1}, {"rope_base": 50.0}, {"rope_scaling": "linear:7"}):  # mutants
        other = gpt.GPT(dataclasses.replace(shape, **change)).double()
        other.load_state_dict(model.state_dict())
        assert (other(rows) - wanted).abs().max() > 1e-6


def test_no_logit_depends_on_a_later_token() -> None:
    model, rows = make(), tokens()
    before = model(rows)
    for t in range(rows.shape[1]):
        changed = rows.clone()
        changed[:, t] = (changed[:, t] + 1) % 11
        after = model(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-13, rtol=0)
        moved = (after - before).abs().amax((0, 2))
        assert bool((moved[t:] > 1e-6).all()), "and every later one does"


def test_sequences_of_a_batch_do_not_meet() -> None:
    model, rows = make(), tokens(3)
    torch.testing.assert_close(model(rows)[1:2], model(rows[1:2]), atol=1e-13, rtol=0)


def test_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    turns = gpt.rotations(20, gpt.Shape(11, 1, 1, 8, rope_base=100.0), query)
    turned = [gpt.rotate(x.expand(1, 1, 20, 8), turns)[0, 0] for x in (query, key)]
    scores = turned[0] @ turned[1].T
    for distance in range(-19, 20):
        same = scores.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), atol=1e-12, rtol=0)
    assert len({round(scores.diagonal(distance)[0].item(), 9) for distance in range(-19, 20)}) == 39
    torch.testing.assert_close(turned[0].norm(dim=1), query.norm().expand(20), atol=1e-12, rtol=0)
    assert torch.equal(turned[0][0], query), "position 0 is not turned"


def test_angles_are_exact_far_from_the_start_also_in_bfloat16() -> None:
    """Positions above 256 do not exist in bfloat16: they are counted in a wider type."""
    x = torch.ones(1, 1, 3000, 4, dtype=torch.bfloat16)
    shape = gpt.Shape(11, 1, 1, 4)
    exact = gpt.rotate(x.double(), gpt.rotations(3000, shape, x.double()))
    turned = gpt.rotate(x, gpt.rotations(3000, shape, x))
    assert turned.dtype == torch.bfloat16
    assert (turned.double() - exact).abs().max() < 0.02


def test_grouped_heads_are_repeated_ones() -> None:
    model, rows = make(), tokens()
    whole = make(gpt.Shape(11, num_layers=3, num_heads=4, width=24, mlp_width=20))
    state = copy.deepcopy(model.state_dict())
    for name, tensor in state.items():
        if name.endswith(("key.weight", "value.weight")):
            state[name] = tensor.unflatten(0, (2, 6)).repeat_interleave(2, 0).flatten(0, 1)
    whole.load_state_dict(state)
    torch.testing.assert_close(whole(rows), model(rows), atol=1e-12, rtol=0)
    for name, tensor in model.state_dict().items():
        if name.endswith(("key.weight", "value.weight")):  # mutant: as if heads took turns
            state[name] = tensor.unflatten(0, (2, 6)).repeat(2, 1, 1).flatten(0, 1)
    whole.load_state_dict(state)
    assert (whole(rows) - model(rows)).abs().max() > 1e-3


def test_a_part_of_the_heads_is_enough() -> None:
    """A rank that holds some of the heads, with their keys and values, computes its summand of the output."""
    attention = make().blocks["0"].attention
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    places = gpt.Places(gpt.rotations(5, make().shape, x))
    total = torch.zeros_like(x)
    for rank in range(2):
        part = copy.deepcopy(attention)
        for linear in (part.query, part.key, part.value):
            linear.weight = nn.Parameter(linear.weight.chunk(2)[rank])
        part.output.weight = nn.Parameter(part.output.weight.chunk(2, 1)[rank])
        total = total + part(x, places)
    torch.testing.assert_close(total, attention(x, places), atol=1e-12, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [[1], [0, 2], [1, 1, 3]], ids=str)
def test_chained_parts_are_the_whole(tied: bool, cuts: list[int]) -> None:
    """Also a first part without a block, and one in the middle without any."""
    shape = gpt.Shape(11, num_layers=3, num_heads=4, width=24, num_kv_heads=2, mlp_width=20, tied=tied)
    model, rows, targets = make(shape), tokens(), tokens().roll(1)
    bounds = [0, *cuts, 3]
    x, seen = rows, {}
    for i, (first, end) in enumerate(itertools.pairwise(bounds)):
        part, last = copy.deepcopy(model), end == 3 and i == len(bounds) - 2
        part.blocks = nn.ModuleDict({str(j): part.blocks[str(j)] for j in range(first, end)})
        if i > 0 and not (last and tied):
            part.embed = None
        if not last:
            part.norm = part.head = None
        seen |= {name: tensor.shape for name, tensor in part.state_dict().items()}
        x = part(x)
        assert last or x.shape == (*rows.shape, 24)
    assert torch.equal(x, model(rows))
    assert torch.equal(gpt.sequence_losses(x, targets), model(rows, targets))
    assert seen == {name: tensor.shape for name, tensor in model.state_dict().items()}, "names are those of the whole"


def test_part_adds_up_in_its_own_type() -> None:
    """What it gets may be rounded; what it adds to that is not."""
    part = make()
    part.embed = part.norm = part.head = None
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert torch.equal(part(x), part(x.double()))
    assert part(x).dtype == torch.float64


def test_sequence_losses() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (3, 5), generator=generator)
    targets[0, 1:3] = targets[2] = -100
    wanted = torch.zeros(3, dtype=torch.float64)
    for b in range(3):
        for t in range(5):
            if targets[b, t] != -100:
                wanted[b] -= logits[b, t].log_softmax(0)[targets[b, t]].detach() / 5
    found = gpt.sequence_losses(logits, targets)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    assert found[2] == 0
    found.sum().backward()
    assert logits.grad is not None
    assert not logits.grad[targets == -100].any()
    assert bool(logits.grad[targets != -100].any(1).all())


@pytest.mark.parametrize("again", [True, False], ids=["", "mutant: all is kept"])
def test_losses_in_parts(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as all at once, and the backward pass finds nothing in float32."""
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 7, 11).bfloat16(), torch.randint(11, (5, 7))
    targets[1, 2:4] = -100

    def compute(most: int) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        monkeypatch.setattr(gpt, "FLOAT_LOGITS", most)
        leaf = logits.clone().requires_grad_()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
            losses = gpt.sequence_losses(leaf, targets)
        (losses * torch.arange(5)).sum().backward()
        return losses, leaf.grad, sum(one.nbytes for one in kept if one.dtype == torch.float32 and one.ndim == 2)

    wanted, wanted_grad, at_once = compute(1000)
    if not again:
        monkeypatch.setattr(gpt.checkpoint, "checkpoint", lambda function, *args, **_: function(*args))
    for most in (1, 2 * 7 * 11):  # one sequence at a time; two, and one that is left
        losses, grad, kept = compute(most)
        assert torch.equal(losses, wanted)
        assert torch.equal(grad, wanted_grad)
        assert (kept == 0) == again
    assert at_once > 0


def test_loss_of_the_model_is_that_of_its_logits() -> None:
    model, rows, targets = make(), tokens(), tokens().roll(1)
    wanted = F.cross_entropy(model(rows).flatten(0, 1), targets.flatten(), reduction="none").view(2, 9).mean(1)
    torch.testing.assert_close(model(rows, targets), wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_names_are_what_checkpoints_rely_on(tied: bool) -> None:
    with torch.device("meta"):
        model = gpt.GPT(gpt.Shape(11, num_layers=2, num_heads=2, width=8, tied=tied))
    wanted = {"embed.weight", "norm.weight"} | {f"blocks.{i}.{name}.weight" for i in range(2) for name in BLOCK}
    assert set(model.state_dict()) == wanted | (set() if tied else {"head.weight"})
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}, "no buffers"


@pytest.mark.parametrize(("width", "wanted"), [(192, 512), (24, 64), (768, 2048), (4096, 10944), (64, 192)])
def test_default_sizes(width: int, wanted: int) -> None:
    shape = gpt.Shape(256, 1, num_heads=2, width=width)
    assert shape.mlp_width == wanted
    assert wanted >= 8 / 3 * width > wanted - 64
    assert shape.num_kv_heads == 2


def test_shape_of_flags() -> None:
    """A recipe's flags have the names of the fields; the vocabulary may be larger than the tokenizer's."""
    flags = dataclasses.asdict(dataclasses.replace(SHAPE, rope_scaling="linear:2")) | {"vocab_size": 0, "lr": 0.1}
    assert gpt.Shape.of(types.SimpleNamespace(**flags), 11) == dataclasses.replace(SHAPE, rope_scaling="linear:2.0")
    assert gpt.Shape.of(types.SimpleNamespace(**flags | {"vocab_size": 64}), 11).vocab_size == 64
    with pytest.raises(UserError, match="--vocab-size 10 must be at least 11, as the data's is, or 0"):
        gpt.Shape.of(types.SimpleNamespace(**flags | {"vocab_size": 10}), 11)


@pytest.mark.parametrize(
    ("sizes", "refusal"),
    [
        ({"num_heads": 4, "width": 42}, "--width 42 must be an even multiple of --num-heads 4"),
        ({"num_heads": 4, "width": 12}, "--width 12 must be an even multiple of --num-heads 4"),  # heads of 3
        ({"num_heads": 4, "width": 16, "num_kv_heads": 3}, "--num-heads 4 must be a multiple of --num-kv-heads 3"),
        ({"num_heads": 4, "width": 16, "num_kv_heads": 8}, "--num-heads 4 must be a multiple of --num-kv-heads 8"),
        ({"num_heads": 4, "width": 16, "head_width": 5}, "--head-width 5 must be even"),
        ({"num_heads": 4, "width": 16, "rope_scaling": "yarn:4"}, "--rope-scaling 'yarn:4' must be .linear:FACTOR. or"),
        (
            {"num_heads": 4, "width": 16, "rope_scaling": "linear:x"},
            "--rope-scaling 'linear:x' must be .* with numbers",
        ),
        (
            {"num_heads": 4, "width": 16, "rope_scaling": "llama3:8"},
            "--rope-scaling 'llama3:8' must be .linear:FACTOR.",
        ),
        ({"num_heads": 4, "width": 16, "rope_scaling": "linear:0"}, "must have numbers above 0"),
        ({"num_heads": 4, "width": 16, "rope_scaling": "llama3:8:4:4:64"}, "must have LOW 4 below HIGH 4"),
    ],
)
def test_refusals(sizes: dict[str, int], refusal: str) -> None:
    with pytest.raises(UserError, match=refusal):
        gpt.Shape(256, 1, **sizes)
