"""docs/beliefs.md: what is often said of data parallel training, and what torch does when one looks.

Each row of the page names a test here or elsewhere. The tests of ranks read what one pair of real ranks has found, in
`found`: each of its functions also tries the other way, so that an assertion could fail.
"""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel, _functions
from torch.utils.data import DistributedSampler

from tests.harness import runner

PAGE = runner.ROOT / "docs" / "beliefs.md"
SIZE = 2
BATCH = 4  # samples of a rank
Found = dict[str, Any]


# --- one pair of ranks ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers and a buffer; it notes how many samples it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.samples: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.samples.append(len(x))
        return self.layers(x)


def wrapped(model: nn.Module, **more: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **more)


def held(model: nn.Module) -> list[int]:
    """Numbers that this rank holds after a step of Adam: of parameters, of gradients and of Adam's state."""
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(BATCH, 4)).sum().backward()
    optimizer.step()
    local = [getattr(one, "_local_tensor", one) for one in model.parameters()]
    gradients = [getattr(one.grad, "_local_tensor", one.grad) for one in model.parameters()]
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    state = [getattr(one, "_local_tensor", one) for one in states]
    return [sum(tensor.numel() for tensor in tensors) for tensors in (local, gradients, state)]


def gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def different(model: nn.Module) -> bool:
    """Whether the ranks' parameters differ."""
    return len(set(gathered(nn.utils.parameters_to_vector(model.parameters()).tolist().__repr__()))) > 1


def buffers(**more: Any) -> list[float]:
    """Each rank's buffer after a forward pass, to which it came as the rank's number."""
    model = wrapped(Net(), **more)
    model.module.seen.fill_(dist.get_rank())
    model(torch.ones(BATCH, 4))
    return gathered(model.module.seen.item())


def sends_in_backward(sync: bool) -> list[int]:
    """How many buckets were sent before the backward pass, and how many after it, of a wrapped model."""
    model = wrapped(Net())
    sent = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    if sync:
        loss = model(torch.ones(BATCH, 4)).sum()
    else:
        with model.no_sync():
            loss = model(torch.ones(BATCH, 4)).sum()
    before = len(sent)
    loss.backward()
    return [before, len(sent)]


def alone(wrap: bool) -> bool:
    """Whether the ranks' weights differ after a step, each on its own samples."""
    torch.manual_seed(0)
    model = wrapped(Net()) if wrap else Net()
    x = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return different(model)


def look(file: str) -> None:
    """On each rank: all that the tests below ask; rank 0 writes it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: Found = {}
    found["held"] = {"one process": held(Net()), "ddp": held(wrapped(Net()))}
    found["held"]["fsdp"] = held(fully_shard(Net()))
    model = wrapped(Net())
    model(torch.ones(BATCH, 4))
    found["samples"] = gathered(model.module.samples)
    found["buffers"] = {"as it is": buffers(), "not sent": buffers(broadcast_buffers=False)}
    torch.manual_seed(rank)
    plain = Net()
    found["other seeds"] = {"before": different(plain), "after": different(wrapped(plain))}
    found["sends"] = {"wrapped": sends_in_backward(True), "no_sync": sends_in_backward(False)}
    found["apart"] = {"wrapped": alone(True), "never wrapped": alone(False)}
    mine = torch.tensor([1.0, 3.0])[rank]
    summed, on_rank_0 = mine.clone(), mine.clone()
    dist.all_reduce(summed)
    dist.reduce(on_rank_0, dst=0)
    found["losses"] = {"own": gathered(mine.item()), "all_reduce": gathered(summed.item())}
    found["losses"]["reduce"] = gathered(on_rank_0.item())
    if rank == 0:
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What two ranks have found."""
    file = tmp_path_factory.mktemp("beliefs") / "found.json"
    result = runner.rerun(look, [(str(file),)] * SIZE)
    assert result.ok, str(result)
    return json.loads(file.read_text())


def test_ddp_holds_the_whole_model_on_each_rank(found: Found) -> None:
    """Parameters, gradients and state as in one process; under FSDP, a rank holds fewer of each."""
    whole = found["held"]["one process"]
    assert whole[1:] == [whole[0], 2 * whole[0]]
    assert found["held"]["ddp"] == whole
    assert all(part < all_of_it for part, all_of_it in zip(found["held"]["fsdp"], whole, strict=True))


def test_ddp_does_not_split_the_batch(found: Found) -> None:
    assert found["samples"] == [[BATCH]] * SIZE


def test_ddp_sends_buffers_too(found: Found) -> None:
    assert found["buffers"] == {"as it is": [0.0] * SIZE, "not sent": [float(rank) for rank in range(SIZE)]}


def test_ddp_makes_weights_of_other_seeds_equal(found: Found) -> None:
    assert found["other seeds"] == {"before": True, "after": False}


def test_backward_of_a_wrapped_model_sends(found: Found) -> None:
    """So a time around `loss.backward()` has the sending in it; below no_sync it has none."""
    before, after = found["sends"]["wrapped"]
    assert before == 0 < after
    assert found["sends"]["no_sync"] == [0, 0]


def test_torchrun_alone_does_not_make_a_training_distributed(found: Found) -> None:
    assert found["apart"] == {"wrapped": False, "never wrapped": True}


def test_reduce_is_for_one_rank_and_all_reduce_for_all(found: Found) -> None:
    losses = found["losses"]
    assert losses["own"] == [1.0, 3.0], "rank 0's loss is not the mean"
    assert losses["all_reduce"] == [4.0, 4.0]
    assert losses["reduce"][0] == 4.0
    assert losses["reduce"][1] != 4.0, "torch promises nothing of it; gloo leaves the rank's own"


# --- nn.DataParallel, whose own forward runs here on parts of the CPU ------------------------------------------------


class OnCpu(nn.DataParallel):
    """nn.DataParallel with two "devices" that are the CPU: what copies, divides and gathers is written here.

    Attributes:
        order: what `nn.DataParallel.forward`, which is torch's, has called.
        replicas: of the last forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device_ids, self.output_device, self.src_device_obj = [0, 1], 0, torch.device("cpu")
        self.order: list[str] = []
        self.replicas: Sequence[nn.Module] = []

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.order.append("scatter")
        return [(part,) for part in inputs[0].chunk(len(device_ids))], [{}] * len(device_ids)

    def replicate(self, module: Any, device_ids: Any) -> Any:
        self.order.append("replicate")
        self.replicas = [copy.deepcopy(module) for _ in device_ids]
        for replica in self.replicas:
            for (name, _), parameter in zip([*replica.named_parameters()], module.parameters(), strict=True):
                owner = replica.get_submodule(name.rpartition(".")[0])
                del owner._parameters[name.rpartition(".")[2]]
                # A copy that autograd knows: its gradient travels to the module's own parameter.
                setattr(owner, name.rpartition(".")[2], parameter.clone())
        return self.replicas

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        self.order.append("parallel_apply")
        return [replica(*given) for replica, given in zip(replicas, inputs, strict=True)]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        self.order.append("gather")
        return torch.cat(outputs)


def weights_of(replica: Any) -> Any:
    return replica.layers[0].weight


def test_dataparallel_copies_parameters_in_each_forward_pass() -> None:
    """And sends no gradient back to a replica: the replicas of a pass are gone with it, and hold no parameter."""
    torch.manual_seed(0)
    model = OnCpu(Net())
    x = torch.randn(2 * BATCH, 4)
    for _ in range(2):
        model(x)
    assert model.order == 2 * ["scatter", "replicate", "parallel_apply", "gather"]
    assert [one.samples[-1] for one in model.replicas] == [BATCH, BATCH], "unlike DDP, it divides the batch"
    assert not any([*replica.parameters()] for replica in model.replicas)


def test_each_replica_of_dataparallel_goes_back_by_itself() -> None:
    """The gradient of each replica is of its part alone; the sum of both is that of the whole batch, on the module."""
    torch.manual_seed(0)
    model, x = OnCpu(Net()), torch.randn(2 * BATCH, 4)
    out = model(x)
    parts = [weights_of(replica) for replica in model.replicas]
    for part in parts:
        part.retain_grad()
    out.square().sum().backward()
    plain = Net()
    plain.load_state_dict(model.module.state_dict())
    for part, samples in zip(parts, x.chunk(2), strict=True):
        plain.zero_grad()
        plain(samples).square().sum().backward()
        torch.testing.assert_close(part.grad, weights_of(plain).grad)
    torch.testing.assert_close(weights_of(model.module).grad, parts[0].grad + parts[1].grad)
    assert not torch.equal(parts[0].grad, parts[1].grad)


def test_what_torch_sends_back_in_dataparallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs' gradients go from the first GPU to those of the replicas; the parameters' to the first, as sums."""
    calls: list[tuple[str, Any]] = []

    class Context:
        input_gpus, input_sizes, dim, unsqueezed_scalar = (0, 1), (BATCH, BATCH), 0, False
        input_device, num_inputs = 0, 1

    def noted(name: str) -> Any:
        return lambda *args: (calls.append((name, args[0])), args[2:])[1]

    monkeypatch.setattr(_functions.Scatter, "apply", noted("scatter"))
    monkeypatch.setattr(_functions.ReduceAddCoalesced, "apply", noted("reduce_add"))
    _functions.Gather.backward(Context(), torch.ones(2 * BATCH))
    _functions.Broadcast.backward(Context(), torch.ones(1), torch.ones(1))
    assert calls == [("scatter", (0, 1)), ("reduce_add", 0)]


# --- DistributedSampler -----------------------------------------------------------------------------------------


def shares(samples: int, ranks: int = 4, epoch: int = 0, **more: Any) -> list[list[int]]:
    """What each rank reads, without any process group: nothing is sent."""
    assert not dist.is_initialized()
    made = [DistributedSampler(range(samples), ranks, rank, **more) for rank in range(ranks)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return [[*sampler] for sampler in made]


def repeated(parts: Sequence[Sequence[int]]) -> int:
    every = [index for part in parts for index in part]
    return len(every) - len({*every})


def test_distributed_sampler_gives_each_rank_a_part_of_its_own() -> None:
    """10,000 samples over 4 ranks: 2,500 each, none twice, and all of them."""
    parts = shares(10_000)
    assert [len(part) for part in parts] == [2500] * 4
    assert repeated(parts) == 0
    assert sorted(index for part in parts for index in part) == [*range(10_000)]


def test_distributed_sampler_repeats_samples_where_they_do_not_divide() -> None:
    """10,001 over 4: 2,501 each, so three samples come twice; drop_last leaves one out instead."""
    parts = shares(10_001)
    assert [len(part) for part in parts] == [2501] * 4
    assert repeated(parts) == 3
    dropped = shares(10_001, drop_last=True)
    assert [len(part) for part in dropped] == [2500] * 4
    assert repeated(dropped) == 0
    assert len({*range(10_001)} - {index for part in dropped for index in part}) == 1


def test_distributed_sampler_draws_an_order_for_each_epoch() -> None:
    """From the seed and the epoch, the same on all ranks: not at random in each step."""
    assert shares(100, epoch=1) == shares(100, epoch=1)
    assert shares(100, epoch=1) != shares(100, epoch=2)
    with_own_seeds = [[*DistributedSampler(range(100), 4, rank, seed=rank)] for rank in range(4)]
    assert repeated(with_own_seeds), "a seed of its own for each rank: parts that overlap"


# --- noise of a gradient ---------------------------------------------------------------------------------------------


def variance(values: torch.Tensor) -> float:
    """Of all values (n, P) alike, summed over the parameters."""
    return float(values.var(0, correction=0).sum())


def test_variance_of_the_mean_gradient_falls_as_one_over_n() -> None:
    """Over all ways to draw N of five samples; so a step at N times the rate has the noise of N steps."""
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(3, dtype=torch.float64)
    each = 2 * (x @ weight - 1)[:, None] * x  # gradients of (x w - 1)^2
    for size in (2, 4):
        draws = torch.cartesian_prod(*[torch.arange(5)] * size)  # (5^N, N)
        means = each[draws].mean(1)
        assert variance(means) == pytest.approx(variance(each) / size)
        torch.testing.assert_close(means.mean(0), each.mean(0))
        of_n_steps, of_one = size * variance(each), variance(size * means)
        assert of_one == pytest.approx(of_n_steps)
        assert variance(means) < of_n_steps / 2, "at the rate of one rank, it moves less and is quieter"


# --- the page -----------------------------------------------------------------------------------------------------


def rows(page: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each belief, and the tests in its last column."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "it is said":
            yield cells[0], re.findall(r"`(?:(\S+)::)?(test_\w+)`", cells[-1])


def test_each_belief_names_its_tests() -> None:
    named = [*rows(PAGE.read_text())]
    assert len(named) >= 15
    for belief, tests in named:
        assert tests, belief
        for file, test in tests:
            assert f"\ndef {test}(" in (runner.ROOT / (file or "tests/docs/test_beliefs.py")).read_text(), belief


def test_each_test_refutes_a_belief() -> None:
    named = {test for _, tests in rows(PAGE.read_text()) for _, test in tests}
    here = {name for name in globals() if name.startswith("test_")} - {
        "test_each_belief_names_its_tests",
        "test_each_test_refutes_a_belief",
        "test_row_without_a_test_is_found",
    }
    assert here <= named


def test_row_without_a_test_is_found() -> None:
    head = "| it is said | in truth | shown by |\n|---|---|---|\n"
    page = f"{head}| a | b | c |\n| d | e | `test_f`, `tests/g.py::test_h` |\n"
    assert [*rows(page)] == [("a", []), ("d", [("", "test_f"), ("tests/g.py", "test_h")])]
