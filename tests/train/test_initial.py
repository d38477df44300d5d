"""Initial weights are a function of (seed, name): whoever holds whatever part has the same numbers."""

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from common import UserError, keymap
from common.train import initial
from common.workloads import gpt
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.harness import runner

CPU = torch.device("cpu")
SHAPE = gpt.Shape(13, num_layers=3, num_heads=2, width=12, mlp_width=14)  # sizes that divide by few numbers


def make(shape: gpt.Shape = SHAPE) -> gpt.GPT:
    with torch.device("meta"):
        return gpt.GPT(shape)


def placed(run_seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return initial.materialize(make(), run_seed, CPU, dtype).state_dict()


def check_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def test_any_part_has_the_weights_of_the_whole() -> None:
    whole = placed()
    for kept in (["0"], ["2"], ["1", "2"], []):
        part = make()
        part.blocks = nn.ModuleDict({i: part.blocks[i] for i in kept})
        if "0" not in kept:
            part.embed = None
        if "2" not in kept:
            part.norm = part.head = None
        found = initial.materialize(part, 0, CPU, torch.float64).state_dict()
        assert len(found) == 9 * len(kept) + ("0" in kept) + 2 * ("2" in kept)
        check_same(found, whole)


def test_wrapped_blocks_have_the_weights_of_the_plain_ones() -> None:
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, gpt.Block))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    check_same(keymap.model_tensors(initial.materialize(model, 0, CPU, torch.float64)), placed())


def test_what_was_drawn_before_does_not_matter() -> None:
    torch.manual_seed(5)
    first, state = placed(), torch.get_rng_state()
    torch.manual_seed(6)
    check_same(placed(), first)
    torch.manual_seed(5)
    placed()
    assert torch.equal(torch.get_rng_state(), state), "nor is anything drawn from the generator of all"


def test_seeds_and_names_decide() -> None:
    one, other = placed(0), placed(1)
    drawn = [name for name in one if not name.endswith("norm.weight")]
    assert len(drawn) == 2 + 3 * 7
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    shape = one["blocks.0.mlp.gate.weight"].shape
    alike = [one[name] for name in drawn if one[name].shape == shape]
    assert len(alike) == 6
    assert len({tensor.sum().item() for tensor in alike}) == 6, "no two tensors of a shape are the same"
    # As it is today: a run that is begun again on another machine is the same run.
    assert one["embed.weight"][0, :2].tolist() == pytest.approx([0.01431732252240181, 0.009195934049785137], rel=1e-6)


def test_types_round_the_same_numbers() -> None:
    wide, narrow = placed(), placed(dtype=torch.float32)
    for name, tensor in narrow.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.double(), wide[name]), "drawn in float32, on the CPU, whatever they are stored in"


def test_widths_are_as_documented() -> None:
    """0.02, and 0.02 / sqrt(2 x layers) where a layer adds to the stream, as in GPT-2; norms start at 1."""
    shape = gpt.Shape(256, num_layers=8, num_heads=2, width=128, mlp_width=256)
    state = initial.materialize(make(shape), 0, CPU, torch.float32).state_dict()
    for name, tensor in state.items():
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all())
            continue
        adds = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = 0.02 / 4 if adds else 0.02
        spread = std / math.sqrt(2 * tensor.numel())  # standard deviation of a standard deviation
        assert abs(tensor.std().item() - std) < 5 * spread, name
        assert abs(tensor.mean().item()) < 5 * std / math.sqrt(tensor.numel()), name
        assert tensor.abs().max() > 3 * std, "normal, not uniform"


def test_a_model_with_weights_is_moved() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = copy.deepcopy(model.state_dict())
    found = initial.materialize(model, 0, CPU, torch.float64)
    assert found is model
    assert found[0].weight.dtype == found[1].running_mean.dtype == torch.float64
    assert found[1].num_batches_tracked.dtype == torch.int64
    check_same(found.state_dict(), {name: t.double() if t.is_floating_point() else t for name, t in before.items()})


def test_a_model_on_meta_must_draw_its_weights() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(UserError, match=r"needs a method initial\(name, size, generator\).*or build it without meta"):
        initial.materialize(model, 0, CPU, torch.float32)
    assert model.weight.is_meta, "refused before any memory is taken"


def test_what_a_checkpoint_fills_is_not_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor in a copy, as a stage of a pipeline is one; and what no checkpoint filled would show: NaN."""
    model = make()
    monkeypatch.setattr(gpt.GPT, "initial", lambda *_: pytest.fail("initialised"))
    initial.leave(model)
    for one in (copy.deepcopy(model), model):
        for name, tensor in initial.materialize(one, 0, CPU, torch.float32).state_dict().items():
            assert bool(tensor.isnan().all()), name
            assert tensor.is_contiguous(), name


def test_tied_weights_stay_tied() -> None:
    tied = gpt.Shape(13, num_layers=1, num_heads=2, width=12, mlp_width=14, tied=True)
    state = initial.materialize(make(tied), 0, CPU, torch.float64).state_dict()
    assert "head.weight" not in state
    assert torch.equal(state["embed.weight"], placed()["embed.weight"])


class TwoNames(nn.Module):
    """One module that has a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3))
        self.same = self.weight

    def initial(self, name: str, size: torch.Size, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(size, generator=generator)


def test_weight_of_two_names_in_one_module_stays_one() -> None:
    with torch.device("meta"):
        model = TwoNames()
    initial.materialize(model, 0, CPU, torch.float64)
    assert model.same is model.weight
    assert model.weight.device == CPU


# --- split over ranks ---


def slices(mesh_sizes: tuple[int, ...]) -> None:
    """Each rank holds its part of the numbers of the whole: under FSDP, sliced by hand, both, and under DDP."""
    dist.init_process_group("gloo")
    names = ("dp", "tp")[: len(mesh_sizes)]
    mesh = init_device_mesh("cpu", mesh_sizes, mesh_dim_names=names)
    whole = placed()

    model = make().to(torch.float64)
    if "tp" in names:
        for name, placement in (("query", Shard(0)), ("output", Shard(1))):
            linear = getattr(model.blocks["0"].attention, name)

            def cut(_: str, module: nn.Module, tp: object, placement: Shard = placement) -> None:
                module.weight = nn.Parameter(distribute_tensor(module.weight, tp, [placement]))

            distribute_module(linear, mesh["tp"], cut)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    initial.materialize(model, 0, CPU, torch.float64)
    for name, parameter in model.named_parameters():
        placements, wanted = parameter.placements, whole[name]
        assert torch.equal(parameter.full_tensor(), wanted), name
        mine = distribute_tensor(wanted, parameter.device_mesh, placements, src_data_rank=None)
        assert torch.equal(parameter.to_local(), mine.to_local()), name
    sharded = sum(p.to_local().numel() for p in model.parameters())
    assert sharded < sum(tensor.numel() for tensor in whole.values()), "it holds a part"

    replica = DistributedDataParallel(initial.materialize(make(), 0, CPU, torch.float64))
    check_same(keymap.model_tensors(replica), whole)
    dist.destroy_process_group()


@pytest.mark.parametrize("mesh_sizes", [(2,), (1, 2), (3,)], ids=str)
def test_ranks_hold_slices_of_the_whole(mesh_sizes: tuple[int, ...]) -> None:
    result = runner.spawn(slices, [(mesh_sizes,)] * math.prod(mesh_sizes))
    assert result.ok, str(result)


def test_mutant_that_draws_parts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the number of the layer here, not its name, were mixed in, a part would not have the whole's weights."""
    whole = placed()
    part = make()
    part.blocks = nn.ModuleDict({"2": part.blocks["2"]})
    monkeypatch.setattr(keymap, "canonical", lambda name: name.replace("blocks.2", "blocks.0"))
    found = initial.materialize(part, 0, CPU, torch.float64).state_dict()
    with pytest.raises(AssertionError, match=r"blocks\.2\.attention\.query\.weight"):
        check_same(found, whole)


class Own(nn.Module):
    """An adopter's model: tied weights, and a buffer and a parameter that are not on meta."""

    def __init__(self, table_device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0, device=table_device), persistent=False)
        self.scale = nn.Parameter(torch.full((4,), 3.0, device="cpu"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))

    def initial(self, name: str, size: torch.Size, generator: torch.Generator) -> torch.Tensor:
        assert name == "embed.weight", "what has a value keeps it"
        return torch.randn(size, generator=generator)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("sharded", [False, True])
def test_what_is_not_on_meta_keeps_its_values(sharded: bool) -> None:
    with torch.device("meta"):
        model: nn.Module = Own()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    found = initial.materialize(model, 0, CPU, torch.float64)
    assert isinstance(found, Own)
    assert found.head.weight is found.embed.weight
    assert found.table.tolist() == [0, 1, 2, 3]
    tensors = {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in found.named_parameters()}
    assert sorted(tensors) == ["embed.weight", "scale"]
    assert tensors["scale"].tolist() == [3.0] * 4
    assert torch.equal(found(torch.arange(5)), tensors["embed.weight"] @ tensors["embed.weight"].T)


def test_buffer_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = Own("meta")
    with pytest.raises(UserError, match=r"nothing would fill its buffer table: .*accelerate\.init_empty_weights\(\)"):
        initial.materialize(model, 0, CPU, torch.float64)
