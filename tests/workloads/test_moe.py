"""The model with experts: transformers' Mixtral computes the same, and what single parts do."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from common import UserError
from common.train import initial
from common.workloads import gpt, moe, products
from torch import nn
from transformers.models.mixtral import modeling_mixtral

SHAPE = gpt.Shape(50, num_layers=2, num_heads=4, width=16, num_kv_heads=2, mlp_width=24)
ROUTING = moe.Routing(experts=5, top_k=2)


def make_model(routing: moe.Routing = ROUTING) -> Any:
    """A small model with large weights, whose router is sure of its choices."""
    with torch.device("meta"):
        model = moe.with_experts(gpt.GPT(SHAPE), routing)
    initial.materialize(model, 0, torch.device("cpu"), torch.float64)
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.ndim > 1 else 1)
    return model


def mixtral_of(model: Any) -> Any:
    """A Mixtral with the same weights."""
    values: dict[str, Any] = {
        "vocab_size": SHAPE.vocab_size,
        "hidden_size": SHAPE.width,
        "intermediate_size": SHAPE.mlp_width,
        "num_hidden_layers": SHAPE.num_layers,
        "num_attention_heads": SHAPE.num_heads,
        "num_key_value_heads": SHAPE.num_kv_heads,
        "rms_norm_eps": SHAPE.norm_eps,
        "num_local_experts": ROUTING.experts,
        "num_experts_per_tok": ROUTING.top_k,
        "rope_parameters": {"rope_type": "default", "rope_theta": SHAPE.rope_base},
        "attn_implementation": "eager",
        "experts_implementation": "eager",  # grouped products have no float64
    }
    config = transformers.MixtralConfig(**values)
    theirs = transformers.MixtralForCausalLM(config).double().eval()
    ours = model.state_dict()
    plain = {
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "head.weight",
    }
    for i in range(SHAPE.num_layers):
        for name, one in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")):
            plain[f"model.layers.{i}.{name}.weight"] = f"blocks.{i}.{one}.weight"
        for name, one in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            plain[f"model.layers.{i}.self_attn.{name}_proj.weight"] = f"blocks.{i}.attention.{one}.weight"
    state = {name: ours[one] for name, one in plain.items()}
    for name, wanted in theirs.state_dict().items():
        if name in state:
            continue
        i, experts = int(name.split(".")[2]), range(ROUTING.experts)
        mlp = f"blocks.{i}.mlp"
        if name.endswith("gate.weight"):
            state[name] = ours[f"{mlp}.router.weight"]
        elif name.endswith("gate_up_proj"):
            pairs = [[ours[f"{mlp}.experts.{e}.{part}.weight"] for part in ("gate", "up")] for e in experts]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        else:
            assert name.endswith("experts.down_proj"), name
            state[name] = torch.stack([ours[f"{mlp}.experts.{e}.down.weight"] for e in experts])
        assert state[name].shape == wanted.shape, name
    theirs.load_state_dict(state)
    return theirs


def test_logits_and_balance_loss_are_those_of_mixtral() -> None:
    model = make_model()
    theirs = mixtral_of(model)
    tokens = torch.randint(SHAPE.vocab_size, (3, 20), generator=torch.Generator().manual_seed(0))
    wanted = theirs(tokens, output_router_logits=True)
    assert torch.allclose(model(tokens), wanted.logits, rtol=1e-6, atol=1e-6)  # theirs rotates in float32
    here = moe.routed(model)
    assert here
    for i, logits in enumerate(wanted.router_logits):
        balance = modeling_mixtral.load_balancing_loss_func((logits,), ROUTING.experts, ROUTING.top_k)
        layer = moe.Routed(*(part[i : i + 1] for part in here))
        found = moe.losses(layer, layer.counts, tokens.numel())["balance_loss"]
        assert found.item() * ROUTING.top_k == pytest.approx(float(torch.as_tensor(balance).detach()), rel=1e-6)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_weights_of_a_token_add_up_to_one(router: str) -> None:
    model = make_model(moe.Routing(5, 3, router=router))
    for layer in moe.layers(model).values():
        chosen, weights, probabilities = layer.choose(torch.randn(2, 7, 5, dtype=torch.float64))
        assert torch.allclose(weights.sum(2), torch.ones(2, 7, dtype=torch.float64))
        assert torch.allclose(probabilities.sum(2), torch.ones(2, 7, dtype=torch.float64))
        assert all(len(set(one)) == 3 for one in chosen.flatten(0, 1).tolist())


def test_bias_decides_who_is_chosen_and_not_how_much_it_counts() -> None:
    (layer, *_) = moe.layers(make_model(moe.Routing(4, 1, router="sigmoid"))).values()
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]])
    layer.balance_bias[3] = 1.0
    chosen, weights, probabilities = layer.choose(logits)
    assert chosen.tolist() == [[[3]]]
    assert weights.tolist() == [[[1.0]]]
    assert probabilities.argmax().item() == 0


def test_capacity_takes_the_first_of_each_sequence() -> None:
    routing = moe.Routing(experts=2, top_k=1, capacity_factor=0.8)  # of 5 tokens: 2 to each expert
    assert math.ceil(0.8 * 5 / 2) == 2
    chosen = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 1, 0]])[..., None]
    taken = moe.within_capacity(chosen, routing)
    assert taken[..., 0].tolist() == [[0, 0, 1, 2, 2], [1, 1, 2, 2, 0]]


@pytest.mark.parametrize("empty", [False, True], ids=["all used", "one without rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_product_is_the_loop(dtype: torch.dtype, empty: bool) -> None:
    """torch's product runs on CPUs too, where it is no faster; bfloat16 is rounded at the same places."""
    experts = moe.Experts(gpt.Mlp(SHAPE) for _ in range(3)).to(dtype)
    counts = torch.tensor([5, 0 if empty else 3, 9])
    rows = torch.randn(int(counts.sum()), SHAPE.width, dtype=dtype, requires_grad=True)
    inputs = [rows, *experts.parameters()]
    found = []
    for sizes in (counts.tolist(), None):  # the loop, and the product that needs none
        results = experts(rows, counts, sizes)
        found.append([results, *torch.autograd.grad(results.float().square().sum(), inputs)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-6)
    with pytest.raises(AssertionError):
        assert torch.equal(experts(rows, counts.flip(0), None), found[0][0])


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_grouped_product_keeps_no_copies(frozen: bool) -> None:
    """FSDP frees an expert's matrices between the passes; a copy of them would stay, of each layer."""
    experts = moe.Experts(gpt.Mlp(SHAPE) for _ in range(3)).requires_grad_(not frozen)
    weights = {one.data_ptr() for one in experts.parameters()}
    counts = torch.tensor([5, 3, 9])
    rows = torch.randn(17, SHAPE.width, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        results = experts(rows, counts, None)
    matrices = [one for one in kept if one.shape[-2:] in ((16, 24), (24, 16))]
    assert len(matrices) == 9
    assert {one.data_ptr() for one in matrices} == weights
    (found,) = torch.autograd.grad(results.sum(), rows, retain_graph=True)
    assert torch.allclose(found, torch.autograd.grad(experts(rows, counts, [5, 3, 9]).sum(), rows)[0], atol=1e-6)
    if frozen:
        results.sum().backward()
        assert all(one.grad is None for one in experts.parameters())


def test_parameters_that_a_token_meets() -> None:
    total, active = moe.parameters(make_model())
    assert total == sum(one.numel() for one in make_model().parameters())
    assert total - active == 2 * 3 * 3 * 16 * 24, "of two layers, three of five experts"
    assert moe.parameters(gpt.GPT(SHAPE))[0] == moe.parameters(gpt.GPT(SHAPE))[1]


def test_rule_of_the_grouped_product(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = moe.Experts(gpt.Mlp(SHAPE) for _ in range(3))
    x = torch.zeros(2, SHAPE.width, dtype=torch.bfloat16)
    assert not experts.are_grouped(x), "on a CPU"
    monkeypatch.setattr(products, "is_fast", lambda x: x.dtype == torch.bfloat16)
    assert experts.are_grouped(x)
    assert not experts.are_grouped(x.float())
    assert not moe.Experts([gpt.Mlp(SHAPE)]).are_grouped(x), "one expert"
    assert not moe.Experts(nn.Linear(16, 16) for _ in range(3)).are_grouped(x), "no MLPs"
    narrow = gpt.Shape(50, num_layers=2, num_heads=4, width=16, mlp_width=20)
    assert not moe.Experts(gpt.Mlp(narrow) for _ in range(3)).are_grouped(x), "rows of 40 bytes"


@pytest.mark.parametrize(
    ("major", "dtype", "hip", "fast"),
    [
        (9, torch.bfloat16, None, True),  # H100
        (10, torch.bfloat16, None, True),  # B200
        (8, torch.bfloat16, None, False),  # A100, RTX 4090
        (12, torch.bfloat16, None, False),  # RTX 5090
        (7, torch.bfloat16, None, False),
        (9, torch.float16, None, False),
        (9, torch.float32, None, False),
        (9, torch.bfloat16, "7.0", False),  # an MI300 calls itself 9.4
    ],
)
def test_grouped_product_is_fast_on_some_generations(
    major: int, dtype: torch.dtype, hip: str | None, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    here = torch.device("cuda", 3)
    tensor: Any = SimpleNamespace(is_cuda=True, dtype=dtype, device=here)
    assert products.is_fast(tensor) == fast
    assert asked in ([], [here]), "of another device"
    assert not products.is_fast(torch.zeros(1, dtype=torch.bfloat16)), "on a CPU"


def test_host_needs_no_sizes_where_experts_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model().float()
    tokens = torch.randint(SHAPE.vocab_size, (3, 20))
    wanted = model(tokens)
    monkeypatch.setattr(products, "is_fast", lambda x: True)
    waits = []
    monkeypatch.setattr(moe, "to_host", lambda counts, rows: waits.append(rows) or counts.tolist())
    assert torch.allclose(model(tokens), wanted, rtol=1e-4, atol=1e-4)
    assert not waits
    dropping = make_model(moe.Routing(5, 2, capacity_factor=1.0)).float()
    dropping(tokens)
    assert len(waits) == SHAPE.num_layers


def test_one_expert_is_the_model_without_experts() -> None:
    with torch.device("meta"):
        names = [gpt.GPT(SHAPE), moe.with_experts(gpt.GPT(SHAPE), moe.Routing(1, 2))]
    assert [*names[0].state_dict()] == [*names[1].state_dict()]
    assert moe.routed(names[1]) is None


def test_more_choices_than_experts_are_refused() -> None:
    class Args:
        experts, top_k, shared_experts, router, capacity_factor = 3, 4, 0, "softmax", 0.0

    with pytest.raises(UserError, match="--top-k 4 must be at most --experts 3"):
        moe.Routing.of(Args)


def test_idle_experts_are_named_once(capsys: pytest.CaptureFixture) -> None:
    model = make_model()
    idle = moe.Idle(2)
    some = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for counts in (some, some, some.flip(1), some, some, some):
        idle.add(model, counts)
    warning = "warning: no token has chosen expert 1 of blocks.0 in the last 2 steps"
    assert capsys.readouterr().out.splitlines() == [warning, warning]
