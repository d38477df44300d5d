"""An update that is not finite leaves no trace, and a replica that drifts is named."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import BadStateError, UserError, keymap, ranks
from common.state import replicas, state_check
from common.train import guard, sampler, sync_batchnorm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.harness import runner
from tests.harness.states import bits

NUM_SAMPLES, SEED, BATCH = 37, 5, 6


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Several threads wait for each other where others compute too, longer than this takes on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
NAN, INF = float("nan"), float("inf")
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True),
}


def make_plan(first_step: int = 0) -> sampler.Plan:
    division = sampler.Division(BATCH, BATCH, 1)
    return sampler.Plan(NUM_SAMPLES, SEED, first_step, 40, first_step * BATCH, 40 * BATCH, division)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return keymap.tensors(model, optimizer)


def run(make_optimizer: Optimizer, steps: Sequence[int], bad: dict[int, float]) -> dict[str, torch.Tensor]:
    """Train over `steps`, two micro-batches each; those in `bad` meet such a number and change nothing."""
    model = make_model()
    optimizer = make_optimizer(model)
    finite = guard.FiniteGuard(model, optimizer, make_plan(), most=3)
    for step in steps:
        before = {name: bits(tensor) for name, tensor in state(model, optimizer).items()}
        generator = torch.Generator().manual_seed(step)
        for i in range(2):
            x = torch.randn(6, 4, generator=generator)
            x[2, 3] = bad.get(step, x[2, 3]) if i == 0 else x[2, 3]
            model(x).square().sum().backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert grad_norm.isfinite() == (step not in bad)
        finite.skip_if_not_finite(grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step in bad:
            assert any(not tensor.isfinite().all() for tensor in model.buffers()), "the check has something to undo"
        finite.restore_if_skipped(step)
        after = {name: bits(tensor) for name, tensor in state(model, optimizer).items()}
        changed = {name for name in after if after[name] != before.get(name)}
        assert changed == (set() if step in bad else set(after)), f"step {step}"
    finite.report()
    return state(model, optimizer)


BADS = [{4: NAN}, {1: INF}, {1: NAN, 2: -INF}, {3: NAN, 4: NAN, 5: INF, 7: NAN}]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", BADS, ids=str)
def test_left_out_update_is_as_if_the_step_were_absent(
    name: str, bad: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit: parameters, momentum, the optimizer's counts of steps, and BatchNorm's statistics."""
    found = run(OPTIMIZERS[name], range(1, 9), bad)
    said = capsys.readouterr().out
    assert said == f"warning: skipped {len(bad)} update{'s' * (len(bad) > 1)} because the gradient was not finite\n"
    wanted = run(OPTIMIZERS[name], [step for step in range(1, 9) if step not in bad], {})
    assert capsys.readouterr().out == ""
    assert {key: bits(tensor) for key, tensor in found.items()} == {key: bits(t) for key, t in wanted.items()}
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert found["1.num_batches_tracked"] == 2 * (8 - len(bad))
    if name == "AdamW":
        assert found["optimizer.0.weight.step"] == 8 - len(bad)


OTHERS: dict[str, Optimizer] = {
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.5),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("bad", [{4: NAN}, {1: INF}], ids=str)
def test_optimizer_that_is_not_fused_skips_as_well(
    name: str, bad: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(OTHERS[name], range(1, 9), bad)
    assert "is not fused: each step waits for the gradient norm" in capsys.readouterr().out
    wanted = run(OTHERS[name], [step for step in range(1, 9) if step not in bad], {})
    assert {key: bits(tensor) for key, tensor in found.items()} == {key: bits(t) for key, t in wanted.items()}


@pytest.mark.parametrize("bad", [0, 1])
def test_one_of_two_updates_in_turn_is_counted(bad: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a critic and a generator: it alone is left out, and --max-skips counts its step."""
    model = make_model()
    optimizer = OPTIMIZERS["SGD"](model)
    finite = guard.FiniteGuard(model, optimizer, make_plan(), most=1)
    for step in (1, 2):
        for turn in range(2):
            before = bits(model[0].weight)
            model(torch.ones(2, 4)).sum().backward()
            finite.skip_if_not_finite(torch.tensor(NAN if turn == bad else 1.0))
            optimizer.step()
            optimizer.zero_grad()
            assert (bits(model[0].weight) == before) == (turn == bad)
        finite.restore_if_skipped(step)
    with pytest.raises(BadStateError, match="not finite in steps 1 to 2, more than --max-skips 1"):
        finite.report()


def test_parameters_that_no_loss_reaches_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(4, 3), "frozen": nn.Linear(4, 3)})
    model["frozen"].requires_grad_(False)
    finite = guard.FiniteGuard(model, OPTIMIZERS["SGD"](model), make_plan(), 3)
    for _ in range(2):
        model["used"](torch.ones(2, 4)).sum().backward()
        finite.skip_if_not_finite(torch.tensor(1.0))
    printed = capsys.readouterr().out
    assert printed.count("the loss of the first step does not reach spare.bias, spare.weight: use them in") == 1
    assert "find_unused_parameters=True" in printed


def skip_nothing(finite: guard.FiniteGuard, grad_norm: torch.Tensor) -> None:
    finite._optimizer.found_inf = torch.zeros_like(grad_norm)


def restore_nothing(finite: guard.FiniteGuard, step: int) -> None:
    pass


MUTANTS = [
    (guard.FiniteGuard, "skip_if_not_finite", skip_nothing),
    (guard.FiniteGuard, "restore_if_skipped", restore_nothing),
    (
        guard,
        "keymap",
        types.SimpleNamespace(create_state=lambda *_: None, canonical=keymap.canonical),
    ),  # creates no state beforehand
]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("owner", "part", "mutant"), MUTANTS)
def test_mutants_are_found(name: str, owner: Any, part: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, part, mutant)
    with pytest.raises(AssertionError, match=r"^step 1\b"):
        run(OPTIMIZERS[name], range(1, 9), {1: INF})


# --- too many ---


def go_through(finite: guard.FiniteGuard, finite_steps: str, first_step: int) -> None:
    """One letter per step after `first_step`: x is a bad one."""
    for step, letter in enumerate(finite_steps, start=first_step + 1):
        finite.skip_if_not_finite(torch.tensor(NAN if letter == "x" else 1.0))
        finite.restore_if_skipped(step)


def make_guard(first_step: int = 0, most: int = 3) -> guard.FiniteGuard:
    model = make_model()
    return guard.FiniteGuard(model, OPTIMIZERS["SGD"](model), make_plan(first_step), most)


@pytest.mark.parametrize("after", ["", "x", "x.x", ".....", ".xxxx"], ids=repr)
def test_too_many_in_a_row_end_the_training(after: str) -> None:
    """Also when they are noticed late: the first ones that were too many are named, and what they read."""
    finite = make_guard(first_step=2)
    go_through(finite, "..x.xxxx" + after, first_step=2)  # steps 7 to 10
    with pytest.raises(UserError) as refusal:
        finite.report()
    told = str(refusal.value)
    reason = "the gradient was not finite in steps 7 to 10, more than --max-skips 3 allows"
    assert told.startswith(f"{reason}: lower --lr, set --max-grad-norm, or check the samples ")
    order = [int(i) for epoch in range(2) for i in sampler.permutation(NUM_SAMPLES, SEED, epoch)]
    samples = [order[(step - 1) * BATCH : step * BATCH] for step in (7, 8, 9, 10)]
    assert told.endswith(": " + "; ".join(map(str, samples)))


def test_samples_without_numbers_are_not_named() -> None:
    """As those of an environment, which are new in each step."""
    model = make_model()
    plan = dataclasses.replace(make_plan(), num_samples=0)
    finite = guard.FiniteGuard(model, OPTIMIZERS["SGD"](model), plan, most=1)
    go_through(finite, "..xx", first_step=0)
    with pytest.raises(
        UserError, match=r"in steps 3 to 4, more than --max-skips 1 allows: lower --lr, set --max-grad-norm$"
    ):
        finite.report()


@pytest.mark.parametrize("steps", ["xxx", "xxx.xxx", "x.x.x.x.x.x", ".xx.xxx.x"])
def test_fewer_in_a_row_are_told_and_survived(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    finite = make_guard()
    go_through(finite, steps, first_step=0)
    finite.report()
    assert f"skipped {steps.count('x')} update" in capsys.readouterr().out
    finite.report()
    assert capsys.readouterr().out == "", "told once"
    go_through(finite, ".x", first_step=len(steps))
    finite.report()
    assert "skipped 1 update " in capsys.readouterr().out


def test_row_goes_on_from_one_check_to_the_next() -> None:
    finite = make_guard(most=1)
    go_through(finite, ".x", first_step=0)
    finite.report()
    go_through(finite, "x", first_step=2)
    with pytest.raises(UserError, match=r"in steps 2 to 3, more than --max-skips 1 allows"):
        finite.report()
    finite = make_guard(most=0)
    go_through(finite, "..x", first_step=0)
    with pytest.raises(UserError, match=r"in steps 3 to 3, more than --max-skips 0 allows"):
        finite.report()


def skip_in_turn() -> None:
    dist.init_process_group("gloo")
    finite = make_guard()
    for step, bad_rank in ((1, 1), (2, 0)):
        go_through(finite, "x" if dist.get_rank() == bad_rank else ".", first_step=step - 1)
        assert finite.report() == step, "all ranks know of it"
    assert finite.report() == 0
    dist.destroy_process_group()


def test_update_that_one_rank_skips_is_reported_by_all() -> None:
    result = runner.spawn(skip_in_turn, [()] * 2)
    assert result.ok, str(result)


# --- what a checkpoint must not keep ---


def change(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """A changed copy; of each kind, an XOR of the bits would miss all but the first."""
    found = tensor.clone()
    flat = found.reshape(-1) if found.is_contiguous() else found.permute(0, 2, 3, 1).reshape(-1)
    if how == "one unit in the last place":
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(INF, dtype=flat.dtype))
    elif how == "two elements change places":
        flat[[0, -1]] = flat[[-1, 0]]
    elif how == "two signs":
        flat[[1, -2]] *= -1
    elif how == "all signs":
        flat *= -1
    elif how == "a constant":
        flat[:] = 0.25
    return found if found.is_contiguous() else flat.view(found.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)


CHANGES = ("one unit in the last place", "two elements change places", "two signs", "all signs", "a constant")
FACTORS = 2**16  # of the sum, so that its places come to the first one again
LARGE = FACTORS + 6


@pytest.fixture(params=["a CPU", "a GPU"])
def hashed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """The hash of a tensor, by XXH3 or by the sum that GPUs compute."""
    if request.param == "a GPU":
        factors = replicas._factors(torch.device("cpu"))[:FACTORS]
        monkeypatch.setattr(replicas, "_factors", lambda _: factors)
        monkeypatch.setattr(replicas, "xxh3", replicas.weighted_sum)
    return replicas.position_hash


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6,), (LARGE,), (2, 4, 3, 3)])
def test_hash_sees_what_an_xor_does_not(
    shape: tuple[int, ...], dtype: torch.dtype, how: str, hashed: Callable[[Any], Any]
) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(shape).to(dtype)
    if len(shape) == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    assert hashed(tensor) == hashed(tensor.clone())
    assert hashed(tensor) != hashed(change(tensor, how))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_hash_of_other_types(dtype: torch.dtype, hashed: Callable[[Any], Any]) -> None:
    tensor = (torch.arange(8) % 2).to(torch.uint8).to(dtype)
    swapped = torch.arange(1, 9).remainder(2).to(torch.uint8).to(dtype)
    assert hashed(tensor) != hashed(swapped)
    assert hashed(torch.zeros(64).to(dtype)) != hashed(torch.ones(64).to(dtype))
    assert hashed(tensor[0]) == hashed(tensor[2])
    assert hashed(tensor[:0]) == hashed(tensor[1:1])


def look(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    """What one rank alone finds in these tensors."""
    check = state_check.StateCheck(model, compare=True)
    try:
        check.judge([check.summarize(tensors)], 7)
    except BadStateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "optimizer.2.bias.momentum_buffer"])
def test_number_that_is_not_finite_is_found(name: str, bad: float) -> None:
    model = make_model()
    optimizer = OPTIMIZERS["SGD"](model)
    keymap.create_state(optimizer)
    tensors = keymap.tensors(model, optimizer)
    check = state_check.StateCheck(model, compare=True)
    check.judge([check.summarize(tensors)], 7)
    tensors[name].view(-1)[-1] = bad
    with pytest.raises(BadStateError, match=f"^not finite at step 7: {name} on rank 0. An update may have"):
        check.judge([check.summarize(tensors)], 7)


def test_what_is_infinite_on_purpose_is_kept() -> None:
    """A mask with -inf, and numbers of the recipe's own, such as an environment's observations."""
    model = make_model()
    model.register_buffer("mask", torch.full((3,), -INF))
    model.register_buffer("count", torch.zeros(2, dtype=torch.long))
    model.register_parameter("frozen", nn.Parameter(torch.full((2,), -INF), requires_grad=False))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_parameter("coarse", nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False))
    assert look(model, keymap.model_tensors(model) | {"rollout.observations": torch.tensor([INF])}) == ""


def test_complex_numbers_are_looked_at() -> None:
    model = make_model()
    model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    assert look(model, keymap.model_tensors(model)) == ""
    model.phase.data[1] = complex(0, float("nan"))
    assert look(model, keymap.model_tensors(model)).startswith("not finite at step 7: phase on rank 0.")


def compare_all_kinds() -> None:
    """Parameters, moments and the statistics of SyncBatchNorm are compared; those of BatchNorm are each rank's own."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for synced in (False, True):
        model = make_model()
        if synced:
            model = sync_batchnorm.convert(model, dist.group.WORLD)
        optimizer = OPTIMIZERS["AdamW"](model)
        keymap.create_state(optimizer)
        tensors = keymap.tensors(model, optimizer)
        compare(model, tensors)
        own = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        for name, tensor in tensors.items():
            before = tensor.clone()
            tensor.view(-1)[-1] += rank
            if name in own and not synced:
                compare(model, tensors)
            else:
                with pytest.raises(BadStateError, match=f"differ at step 12: {name} on rank 1 differs from rank"):
                    compare(model, tensors)
            tensor.copy_(before)
    dist.destroy_process_group()


def test_all_kinds_of_state_are_compared() -> None:
    result = runner.spawn(compare_all_kinds, [()] * 2)
    assert result.ok, str(result)


# --- replicas ---

Drift = tuple[int, str]  # rank and parameter


def last_number(model: nn.Module, name: str) -> torch.Tensor:
    """Of what this rank holds of a parameter; shares memory with it."""
    parameter = dict(model.named_parameters())[name].detach()
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).view(-1)[-1:]


def compare(model: nn.Module, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """As a session does, and as a save does: both must tell the same."""
    check = state_check.StateCheck(model, compare=True)
    tensors = tensors or keymap.model_tensors(model)
    told = []
    for look_at in (
        lambda: check.compare(tensors, 12),
        lambda: check.judge(ranks.gather(check.summarize(tensors)), 12),
    ):
        try:
            look_at()
            told.append("")
        except BadStateError as error:
            told.append(str(error))
    assert told[0] == told[1]
    if told[0]:
        raise BadStateError(told[0], 12)


def check_after(model: nn.Module, drifts: Sequence[Drift]) -> str:
    """What a comparison tells this rank once some ranks have drifted by one unit in the last place."""
    numbers = [last_number(model, name) for rank, name in drifts if rank == dist.get_rank()]
    before = [number.clone() for number in numbers]
    for number in numbers:
        number.copy_(torch.nextafter(number, torch.tensor(INF)))
    try:
        compare(model)
    except UserError as error:
        return str(error)
    finally:
        for number, value in zip(numbers, before, strict=True):
            number.copy_(value)
    return ""


def compare_replicas(cases: Sequence[tuple[Sequence[Drift], str]]) -> None:
    dist.init_process_group("gloo")
    model = nn.Module()
    model.module = make_model()  # as DistributedDataParallel names it
    for drifts, told in cases:
        found = check_after(model, drifts)
        assert found.startswith(f"replicas differ at step 12: {told}" if told else ""), (drifts, found)
        assert bool(found) == bool(told), (drifts, found)
    dist.destroy_process_group()


CASES_OF_2: list[tuple[list[Drift], str]] = [
    ([], ""),
    ([(1, "module.2.weight")], "2.weight on rank 1 differs from rank 0."),
    ([(0, "module.0.bias")], "0.bias on rank 1 differs from rank 0."),
    ([(1, "module.2.bias"), (1, "module.0.weight")], "0.weight on rank 1 differs from rank 0."),
    ([(0, "module.0.weight"), (1, "module.0.weight")], ""),
]
CASES_OF_3: list[tuple[list[Drift], str]] = [
    ([], ""),
    ([(0, "module.1.weight")], "1.weight on rank 0 differs from 2 of its 3 ranks."),
    ([(1, "module.2.bias"), (0, "module.2.weight")], "2.weight on rank 0 differs from 2 of its 3 ranks."),
    ([(2, "module.2.bias"), (1, "module.2.bias")], "2.bias on rank 0 differs from 2 of its 3 ranks."),
]


@pytest.mark.parametrize("cases", [CASES_OF_2, CASES_OF_3], ids=["2 ranks", "3 ranks"])
def test_one_unit_in_the_last_place_is_found_and_named(cases: list[tuple[list[Drift], str]]) -> None:
    result = runner.spawn(compare_replicas, [(cases,)] * (2 if cases is CASES_OF_2 else 3))
    assert result.ok, str(result)


def shard(shape: tuple[int, ...]) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = make_model()
    before = model[0].weight.clone()
    fully_shard(model, mesh=mesh)
    local = model[0].weight.to_local()
    assert torch.equal(local, before.chunk(2)[mesh.get_local_rank("shard")]), "the parts differ"
    return model


def compare_parts() -> None:
    dist.init_process_group("gloo")
    model = shard((2,))
    for drifts in ([], [(0, "0.weight")], [(1, "2.bias")]):
        assert check_after(model, drifts) == "", drifts
    dist.destroy_process_group()


def test_parts_are_not_compared_with_each_other() -> None:
    result = runner.spawn(compare_parts, [()] * 2)
    assert result.ok, str(result)


def compare_replicated_parts() -> None:
    """Ranks 0 and 2 hold one half, 1 and 3 the other."""
    dist.init_process_group("gloo")
    model = shard((2, 2))
    assert not (told := check_after(model, [])), told
    assert check_after(model, [(1, "0.weight"), (3, "0.weight")]) == ""
    for drifted, told in ((3, "0.weight [(2, 1)] on rank 3 differs from rank 1."), (0, "rank 2 differs from rank 0")):
        assert told in check_after(model, [(drifted, "0.weight")])
    dist.destroy_process_group()


def test_drift_of_a_replicated_part_is_named() -> None:
    result = runner.spawn(compare_replicated_parts, [()] * 4)
    assert result.ok, str(result)


def compare_parts_of_parts() -> None:
    """Tensor parallel over ranks 0 and 1, and over 2 and 3; each part split again over 0 and 2, and over 1 and 3."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = make_model()
    model[1] = nn.Identity()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    assert not (told := check_after(model, [])), told
    dist.destroy_process_group()


def test_parts_of_parts_are_not_compared_with_each_other() -> None:
    result = runner.spawn(compare_parts_of_parts, [()] * 4)
    assert result.ok, str(result)


def compare_small_parts() -> None:
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    assert (model.bias.to_local().numel() == 0) == (dist.get_rank() == 1)
    compare(model)
    dist.destroy_process_group()


def test_rank_can_hold_nothing_of_a_small_parameter() -> None:
    result = runner.spawn(compare_small_parts, [()] * 2)
    assert result.ok, str(result)
