"""One name for each tensor, whatever wraps the model, and optimizer state that is there before the first step."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import UserError, keymap
from common.workloads import several
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel

from tests.harness import own

pytestmark = pytest.mark.usefixtures("group")


def make_model() -> nn.Module:
    """Has a child whose own name looks like a wrapper's, further down."""
    torch.manual_seed(0)
    inner = nn.Sequential()
    inner.add_module("module", nn.Linear(4, 3))
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), inner).double()


NAMES = [
    *("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"),
    *("2.module.weight", "2.module.bias"),
]
PARAMETERS = [name for name in NAMES if "running" not in name and "tracked" not in name]
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "DataParallel": nn.DataParallel,
    "DDP": DistributedDataParallel,
    "compile": torch.compile,
    "compile of DDP": lambda model: torch.compile(DistributedDataParallel(model)),
    "DDP of compile": lambda model: DistributedDataParallel(torch.compile(model)),
    "compile of DataParallel": lambda model: torch.compile(nn.DataParallel(model)),
    "DataParallel of compile": lambda model: nn.DataParallel(torch.compile(model)),
    "compile of DDP of compile": lambda model: torch.compile(DistributedDataParallel(torch.compile(model))),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_are_those_of_the_plain_model(wrap: str) -> None:
    model = make_model()
    wrapped = WRAPS[wrap](model)
    found = keymap.model_tensors(wrapped)
    assert sorted(found) == sorted(NAMES)
    for name, tensor in model.state_dict().items():
        assert found[name].data_ptr() == tensor.data_ptr(), f"{name}: a load must reach the model"
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    keymap.create_state(optimizer)
    state = keymap.optimizer_tensors(wrapped, optimizer)
    assert sorted(state) == sorted(f"optimizer.{name}.momentum_buffer" for name in PARAMETERS)
    for name, parameter in model.named_parameters():
        buffer = state[f"optimizer.{name}.momentum_buffer"]
        assert buffer.shape == parameter.shape
        assert buffer is optimizer.state[parameter]["momentum_buffer"], f"{name}: a load must reach the optimizer"


def test_wrappers_are_taken_off_the_front_alone() -> None:
    assert keymap.canonical("_orig_mod.module.conv1.weight") == "conv1.weight"
    assert keymap.canonical("blocks.0.module.weight") == "blocks.0.module.weight"
    assert keymap.canonical("module_list.weight") == "module_list.weight"
    assert keymap.canonical("stages.1.blocks.0.attention.query.weight") == "blocks.0.attention.query.weight"
    assert keymap.canonical("stages.12._orig_mod.norm.weight") == "norm.weight"
    assert keymap.canonical("blocks.stages.1.weight") == "blocks.stages.1.weight"
    assert keymap.canonical("stages.first.weight") == "stages.first.weight"
    assert keymap.canonical("stages.1.stages.2.weight") == "stages.2.weight", "a model's own stages stay"


def test_what_recomputes_activations_is_taken_out_of_the_middle() -> None:
    """Parameters are named through the wrapper, and the state dict is not: both must meet."""
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, nn.Linear))
    assert any("_checkpoint_wrapped_module" in str(name) for name, _ in model.named_modules())
    for wrapped in (model, torch.compile(model), DistributedDataParallel(model)):
        assert sorted(keymap.model_tensors(wrapped)) == sorted(NAMES)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        keymap.create_state(optimizer)
        state = keymap.optimizer_tensors(wrapped, optimizer)
        assert sorted(state) == sorted(f"optimizer.{name}.momentum_buffer" for name in PARAMETERS)


def test_stages_of_a_pipeline_are_the_whole() -> None:
    """Each part, also compiled, keeps the names of the plain model; together they have all of them."""
    plain = nn.ModuleDict({"blocks": nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(3)})})
    pipeline = nn.Module()
    pipeline.stages = nn.ModuleDict()
    for stage, blocks in {"1": ["0"], "4": ["1", "2"]}.items():
        part = nn.ModuleDict({"blocks": nn.ModuleDict({i: plain["blocks"][i] for i in blocks})})
        pipeline.stages[stage] = torch.compile(part) if stage == "4" else part
    assert keymap.model_tensors(pipeline).keys() == plain.state_dict().keys()
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    keymap.create_state(optimizer)
    state = keymap.optimizer_tensors(pipeline, optimizer)
    assert state.keys() == {f"optimizer.{name}.momentum_buffer" for name, _ in plain.named_parameters()}


Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, fused": lambda model: torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 0.3, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1]},
        ],
        lr=0.1,
        momentum=0.9,
        fused=True,
    ),
    "Nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True),
    "AdamW, amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 3])
def test_materialised_state_changes_nothing(name: str, steps: int) -> None:
    plain, other = make_model(), make_model()
    reference, optimizer = OPTIMIZERS[name](plain), OPTIMIZERS[name](other)
    before = copy.deepcopy(other.state_dict())
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    keymap.create_state(optimizer)
    state = keymap.optimizer_tensors(other, optimizer)
    assert state
    assert not any(tensor.any() for tensor in state.values()), "a fresh state is zero"
    assert all(torch.equal(tensor, before[key]) for key, tensor in other.state_dict().items())
    assert all(parameter.grad is None for parameter in other.parameters())
    now = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert now == groups, "the learning rates are back"
    train(plain, reference, steps)
    train(other, optimizer, steps)
    for key, tensor in plain.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key
        assert tensor.dtype == torch.int64 or not torch.equal(tensor, before[key]), f"{key} was to be trained"
    wanted, found = keymap.optimizer_tensors(plain, reference), keymap.optimizer_tensors(other, optimizer)
    assert wanted.keys() == found.keys() == state.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_state_of_a_trained_optimizer_is_left_alone() -> None:
    model = make_model()
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer, 2)
    state = keymap.optimizer_tensors(model, optimizer)
    assert state["optimizer.0.weight.step"] == 2
    assert state["optimizer.0.weight.exp_avg"].any()


def test_frozen_parameters_have_no_state_before_or_after() -> None:
    """Or a checkpoint of a trained model lacks what a fresh one asks for, and a resume is refused."""
    states = []
    for steps in (0, 2):
        model = make_model()
        model[0].requires_grad_(False)
        optimizer = OPTIMIZERS["SGD"](model)
        keymap.create_state(optimizer)
        train(model, optimizer, steps)
        states.append(keymap.optimizer_tensors(model, optimizer).keys())
    assert "optimizer.0.weight.momentum_buffer" not in states[1], "torch keeps no state of a frozen parameter"
    assert states[0] == states[1]


def test_optimizers_without_state() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    before = copy.deepcopy(model.state_dict())
    keymap.create_state(optimizer)
    assert keymap.optimizer_tensors(model, optimizer) == {}
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


# --- optimizers of others ---

OTHERS: dict[str, Optimizer] = {
    "with numbers": lambda model: own.OddOptimizer(model.parameters(), lr=0.1),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),  # a product that starts from 1
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.1),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.1),
}


def handed_over(saved: dict[str, torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What `start.restore` does with a fresh optimizer, without a file."""
    keymap.create_state(optimizer)
    tensors = keymap.tensors(model, optimizer)
    assert tensors.keys() == saved.keys()
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    keymap.set_numbers(model, optimizer, tensors)


@pytest.mark.parametrize("name", OTHERS)
def test_state_of_any_optimizer_is_handed_over(name: str) -> None:
    first, second = make_model(), make_model()
    before, after = OTHERS[name](first), OTHERS[name](second)
    train(first, before, 2)
    handed_over(copy.deepcopy(keymap.tensors(first, before)), second, after)
    for model, optimizer in ((first, before), (second, after)):
        train(model, optimizer, 3)
    wanted, found = keymap.tensors(first, before), keymap.tensors(second, after)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_numbers_of_groups() -> None:
    """Those that steps change are state; all others are flags."""
    model = make_model()
    optimizer = own.OddOptimizer(model.parameters(), lr=0.1)
    train(model, optimizer, 3)
    tensors = keymap.optimizer_tensors(model, optimizer)
    groups = {name: value.item() for name, value in tensors.items() if name.startswith("optimizer.groups.")}
    assert groups == {"optimizer.groups.0.count": 3, "optimizer.groups.0.weight": pytest.approx(3 * 0.1**0.5)}
    assert tensors["optimizer.0.weight.step"].item() == 3
    assert not any("nothing" in name for name in tensors)
    assert optimizer.param_groups[0]["count"] == 3, "trying it out does not touch the real one"
    assert type(optimizer.state[model[0].weight]["step"]) is int


def test_optimizer_that_cannot_be_tried_out(capsys: pytest.CaptureFixture[str]) -> None:
    """That ends no training."""

    class Large(own.OddOptimizer):
        def step(self, closure: object = None) -> None:
            if any(parameter.numel() == 4 for group in self.param_groups for parameter in group["params"]):
                raise ValueError("no small ones")
            super().step()

    model = make_model()
    optimizer = Large(model.parameters(), lr=0.1)
    keymap.optimizer_tensors(model, optimizer)
    assert capsys.readouterr().out == (
        "note: small matrices are not enough for Large (ValueError: no small ones), whose steps may "
        "change count, decay, weight, which no checkpoint holds: after a resume, what has changed is as at the start "
        "again; only the state of a parameter is sure to be saved\n"
    )


class Forgets(torch.optim.SGD):
    """Counts where no checkpoint looks: beside its groups, and in a state that is of no parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.calls = 0
        self.name = "forgets"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.state["mean"]["norm"] = 0.5  # type: ignore[index]
        super().step()


def test_numbers_that_no_checkpoint_holds_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, at the start; what is saved, and what no step changes, is not named."""
    for make in (Forgets, *OTHERS.values(), own.OddOptimizer):
        model = make_model()
        optimizer = make(model.parameters(), lr=0.1) if isinstance(make, type) else make(model)
        for _ in range(2):
            keymap.optimizer_tensors(model, optimizer)
        named = "note: a step of Forgets changes calls, state['mean'], which no checkpoint holds: after a resume, "
        printed = capsys.readouterr().out
        assert printed.startswith(named) == (make is Forgets), printed
        assert printed.count("\n") == (make is Forgets)
        assert vars(optimizer).get("calls", 0) == 0, "trying it out does not touch the real one"


def test_state_that_no_checkpoint_can_hold_is_refused() -> None:
    model = make_model()
    optimizer = own.OddOptimizer(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    optimizer.state[model[0].weight]["history"] = [1, 2]
    with pytest.raises(
        UserError, match=r"OddOptimizer keeps a list in optimizer\.0\.weight\.history, which no checkpoint"
    ):
        keymap.optimizer_tensors(model, optimizer)


class History(torch.optim.SGD):
    """Keeps a list, from its first step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("history", []).append(1.0)
        super().step()


def test_state_of_the_first_step_is_refused_before_it() -> None:
    model = make_model()
    with pytest.raises(UserError, match="History keeps a list in the state of a parameter, 'history'"):
        keymap.optimizer_tensors(model, History(model.parameters(), lr=0.1))


@pytest.mark.parametrize("both", [False, True], ids=["SparseAdam", "beside Adam"])
def test_sparse_gradients(both: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The state for a load to fill is made of gradients as the parameter has them."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        sparse = torch.optim.SparseAdam(model[0].parameters(), lr=0.1)
        if not both:
            model[1].requires_grad_(False)
            return model, sparse
        return model, several.Several(sparse, torch.optim.Adam(model[1].parameters(), lr=0.1))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for i in range(number):
            model(torch.tensor([i, 4])).square().sum().backward()
            optimizer.step()
            model.zero_grad()

    first, before = make()
    second, after = make()
    keymap.optimizer_tensors(first, before)
    assert capsys.readouterr().out == "", "it can be tried out"
    steps(first, before, 2)
    saved = {name: one.clone() for name, one in keymap.tensors(first, before).items()}
    keymap.create_state(after, keymap.sparse_parameters(second))
    tensors = keymap.tensors(second, after)
    assert tensors.keys() == saved.keys()
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    keymap.set_numbers(second, after, tensors)
    for model, optimizer in ((first, before), (second, after)):
        steps(model, optimizer, 3)
    wanted, found = keymap.tensors(first, before), keymap.tensors(second, after)
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_tied_weights_are_saved_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "norm": nn.LayerNorm(3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    model["again"] = model["norm"]
    found = keymap.model_tensors(model)
    assert sorted(found) == ["embed.weight", "norm.bias", "norm.weight"]
    found["embed.weight"].fill_(7)
    assert (model["head"].weight == 7).all()


def of_shapes(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_differences() -> None:
    model = of_shapes(a=(1,), b=(2, 3), c=())
    assert keymap.differences(model, of_shapes(c=(), b=(2, 3), a=(1,))) == []
    assert keymap.differences(model, of_shapes(b=(3, 2), c=(), z=(9,))) == [
        "a: only in the model",
        "b: (3, 2) in the checkpoint, (2, 3) in the model",
        "z: only in the checkpoint",
    ]


def test_differences_are_counted_when_there_are_many() -> None:
    model = of_shapes(**{f"layer{i}": (i,) for i in range(6)})
    assert keymap.differences(model, {}, most=6) == [f"layer{i}: only in the model" for i in range(6)]
    lines = keymap.differences(model, {})
    assert lines == [*(f"layer{i}: only in the model" for i in range(5)), "and 1 more"]
    assert keymap.differences({}, model, most=2)[2] == "and 4 more"
