"""Which device and backend this rank gets, and how the ranks come together and part."""

import contextlib
import os
import socket
import sys
import types
from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
from common import UserError, ranks
from common.run import process, process_group
from launch.ports import free_port

from tests.harness import runner

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_STEP_NUM_TASKS", "PMI_SIZE"),
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, no GPU, and no group left behind."""
    for name in [*LAUNCHERS, *(name for name in os.environ if name.startswith("OMPI_"))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# --- start ---


def test_without_a_launcher_there_is_a_group_of_one() -> None:
    world = process_group.start()
    assert (world.rank, world.size, world.local_size) == (0, 1, 1)
    assert (world.device, world.backend) == (CPU, "gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 1
    process_group.finish(world.process)
    assert not dist.is_initialized()


def test_what_runs_beside_the_training_ends_before_the_group() -> None:
    ended: list[bool] = []
    here = process.Process()
    assert process_group.start(process=here).process is here
    here.background.callback(lambda: ended.append(dist.is_initialized()))
    process_group.finish(here)
    assert ended == [True]


def test_processes_of_mpirun_do_not_each_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo there is no address to meet at: better refused than the same training twice in one folder."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError):
        process_group.start("gloo")


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "PMI_SIZE"])
def test_processes_of_srun_do_not_each_train_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `srun -n4 python train.py`: each would be rank 0 of a run of its own."""
    monkeypatch.setenv(name, "4")
    with pytest.raises(
        UserError, match=r"started 4 processes without torchrun, and each would train alone\. Use launch/slurm\.sh"
    ):
        process_group.start("gloo")
    monkeypatch.setenv(name, "1")
    assert process_group.start("gloo").size == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "first"}, r"RANK=first in the environment must be a whole number"),
        ({"WORLD_SIZE": "1.5"}, r"WORLD_SIZE=1.5 in the environment must be a whole number"),
        ({"RANK": "2"}, r"RANK=2 and WORLD_SIZE=2 in the environment do not fit: ranks count from 0"),
        ({"RANK": "-1"}, r"RANK=-1 and WORLD_SIZE=2 in the environment do not fit: ranks count from 0"),
        ({"WORLD_SIZE": "0"}, r"RANK=0 and WORLD_SIZE=0 in the environment do not fit: ranks count from 0"),
        ({"LOCAL_RANK": "x"}, r"LOCAL_RANK=x in the environment must be a whole number"),
        ({"MASTER_PORT": "http"}, r"MASTER_PORT=http in the environment must be a whole number"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT=70000 in the environment must be a port, from 1 to 65535"),
        ({"MASTER_PORT": "0"}, r"MASTER_PORT=0 in the environment must be a port, from 1 to 65535"),
        ({"MASTER_ADDR": "nobody.invalid"}, r"MASTER_ADDR=nobody.invalid does not resolve on \S+ \(.*--local-addr$"),
        ({"MASTER_ADDR": ""}, r"MASTER_ADDR= does not resolve on "),
    ],
)
def test_nonsense_in_the_environment(changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused in a sentence: torch raises, or waits for minutes without a word."""
    sound = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (sound | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{message}"):
        process_group.start()


@pytest.mark.parametrize(
    ("address", "wanted"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1"), ("192.0.2.1", ""), ("vm", "")],
)
def test_rank_0_listens_at_its_address_alone(address: str, wanted: str) -> None:
    """Not at a name's, which other machines may resolve to another one, nor at one that it does not have."""
    listening = process_group._listen(address, free_port())
    found = ""
    if listening is not None:
        with socket.socket(fileno=listening) as server:
            found = server.getsockname()[0]
    assert found == wanted


def start_on_other_machines(dtypes: list[str]) -> None:
    """As if this rank's machine computed in another type."""
    process_group.precision.compute_dtype = lambda *_: getattr(torch, dtypes[ranks.rank()])  # type: ignore[assignment]
    process_group.finish(process_group.start().process)


@pytest.mark.parametrize(
    ("dtypes", "told"),
    [
        (["float32", "bfloat16"], "rank 1 was started with picked --dtype 'bfloat16', rank 0 with 'float32'"),
        (["float32"] * 2, ""),
    ],
)
def test_machines_that_compute_differently_are_refused(dtypes: list[str], told: str) -> None:
    """What else has to be the same: tests/test_session.py."""
    result = runner.spawn(start_on_other_machines, [(dtypes,)] * 2)
    assert result.ok == (not told), str(result)
    assert told in str(result)


def test_versions_are_those_of_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks.versions()
    assert (found["torch"], found["numpy"]) == (torch.__version__, numpy.__version__)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert "gymnasium" not in ranks.versions()


def test_ranks_of_a_plain_torchrun_that_has_restarted_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would find the dead ones' keys in the store that torchrun keeps, and wait for ever."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UserError, match=r"use launch/torchrun\.sh, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1$"):
        process_group.start()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert process_group.start().size == 1
    dist.destroy_process_group()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert process_group.start().size == 1


def start_on_two() -> None:
    world = process_group.start()
    assert (world.rank, world.size) == (ranks.rank(), 2)
    assert world.rank == dist.get_rank()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    assert world.process.world is world
    world.store.set(f"from/{world.rank}", str(world.rank))
    dist.barrier()
    assert world.store.peek(f"from/{1 - world.rank}") == str(1 - world.rank), "one store for both"
    process_group.finish(world.process)
    assert world.process.world is None


def test_start_joins_the_group_of_the_launcher() -> None:
    result = runner.spawn(start_on_two, [(), ()])
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("size", "local_size", "text"),
    [
        (1, 1, "1 process on host: CPU, "),
        (2, 2, "2 processes on host: "),
        (8, 4, "8 processes on 2 hosts (first: host): "),
    ],
)
def test_world_in_words(size: int, local_size: int, text: str) -> None:
    world = process.World(0, size, local_size, "host", CPU, "gloo", dist.HashStore())
    assert str(world).startswith(text)
    assert torch.__version__ in str(world)


# --- device, backend ---


@pytest.mark.parametrize("kind", ["xpu", "mps", "npu"])
def test_accelerator_that_no_recipe_uses_is_named(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mock: torch sees one. Without one, and where the user hides GPUs, there is nothing to say."""
    assert process_group._pick_device(0, 1) == CPU
    assert capsys.readouterr().out == ""
    other = types.SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: other)
    assert process_group._pick_device(0, 1) == CPU
    note = f"note: no recipe uses the accelerator of this machine ({kind}): training on the CPU\n"
    assert capsys.readouterr().out == note


def see_gpus(number: int, patch: pytest.MonkeyPatch) -> list[torch.device]:
    """A mock: torch sees so many; returns those that are chosen."""
    chosen: list[torch.device] = []
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: number)
    patch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = see_gpus(2, monkeypatch)
    with pytest.raises(UserError, match=r"^3 processes were started on .* which has 2 GPUs, .* NPROC_PER_NODE=2 "):
        process_group._pick_device(0, 3)
    assert process_group._pick_device(1, 2) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]


@pytest.mark.parametrize("own", [True, False])
def test_processes_that_see_one_gpu_each(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a task of Slurm for each GPU: fine, unless it is the same GPU."""
    see_gpus(1, monkeypatch)
    store = dist.HashStore()
    store.set("gpu/0", f"{socket.gethostname()} GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid=f"GPU-{own:d}"))
    assert process_group._pick_device(1, 2) == GPU
    same = contextlib.nullcontext() if own else pytest.raises(UserError, match=r"which has 1 GPU, .* NPROC_PER_NODE=1 ")
    with same:
        process_group._check_only_gpu(store, 1, 2, 2, GPU)


def test_pick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)
    assert process_group._pick_backend("auto", CPU) == "gloo"
    assert process_group._pick_backend("auto", GPU) == "cpu:gloo,cuda:nccl"
    assert process_group._pick_backend("nccl", GPU) == "cpu:gloo,cuda:nccl"
    assert process_group._pick_backend("gloo", GPU) == "gloo"
    with pytest.raises(UserError, match=r"--backend nccl needs GPUs, .* on this machine: use --backend gloo"):
        process_group._pick_backend("nccl", CPU)
    with pytest.raises(UserError, match=r"--backend ucc is unknown: use auto, gloo or nccl"):
        process_group._pick_backend("ucc", CPU)


def test_backends_that_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    with pytest.raises(UserError, match=r"--backend nccl: torch \S+ was built without it$"):
        process_group._pick_backend("nccl", GPU)
