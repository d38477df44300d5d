"""Who am I, what can I use, and do all ranks mean the same training."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common import UserError, process_group, ranks
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


def test_rank_and_size_are_known_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ranks.rank(), ranks.size()) == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "5")
    assert (ranks.rank(), ranks.size()) == (2, 5)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (ranks.rank(), ranks.size()) == (3, 4)


def test_without_a_launcher_there_is_a_group_of_one() -> None:
    world = process_group.start()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert (world.device, world.backend) == (CPU, "gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 1
    process_group.finish()
    assert not dist.is_initialized()


def test_what_runs_beside_the_training_ends_before_the_group() -> None:
    ended: list[bool] = []
    process_group.start()
    process_group.background.callback(lambda: ended.append(dist.is_initialized()))
    process_group.finish()
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
    with pytest.raises(UserError, match=r"^4 ranks, no torchrun: launch/slurm.sh"):
        process_group.start("gloo")
    monkeypatch.setenv(name, "1")
    assert process_group.start("gloo").size == 1


def start_on_two() -> None:
    world = process_group.start()
    assert (world.rank, world.size) == (ranks.rank(), 2)
    assert world.rank == world.local_rank == dist.get_rank()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    process_group.finish()


def test_start_joins_the_group_of_the_launcher() -> None:
    result = runner.spawn(start_on_two, [(), ()])
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("size", "local_size", "text"),
    [
        (1, 1, "1 process on host: CPU, gloo, "),
        (2, 2, "2 processes on host: "),
        (8, 4, "8 processes on 2 hosts, the first host: "),
    ],
)
def test_world_in_words(size: int, local_size: int, text: str) -> None:
    world = process_group.World(0, size, 0, local_size, "host", CPU, "gloo")
    assert str(world).startswith(text)
    assert torch.__version__ in str(world)


# --- device, backend ---


@pytest.mark.parametrize(("gpus", "told"), [(1, "which has 1 GPU:"), (2, "which has 2 GPUs:")])
def test_more_processes_than_gpus(gpus: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with pytest.raises(UserError, match=f"^3 processes were started on .*{told}.* NPROC_PER_NODE={gpus} "):
        process_group._pick_device(0, 3)
    assert process_group._pick_device(gpus - 1, gpus) == torch.device("cuda", gpus - 1)
    assert chosen == [torch.device("cuda", gpus - 1)]


def test_pick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)
    assert process_group._pick_backend("auto", CPU) == "gloo"
    assert process_group._pick_backend("auto", GPU) == "cpu:gloo,cuda:nccl"
    assert process_group._pick_backend("nccl", GPU) == "cpu:gloo,cuda:nccl"
    assert process_group._pick_backend("gloo", GPU) == "gloo"
    assert process_group._pick_backend("mpi", CPU) == "mpi"
    with pytest.raises(UserError, match=r"--backend nccl .* this machine has none: --backend gloo"):
        process_group._pick_backend("nccl", CPU)
    with pytest.raises(UserError, match=r"--backend ucc is not known: auto, gloo, nccl or mpi"):
        process_group._pick_backend("ucc", CPU)


def test_backends_that_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    with pytest.raises(UserError) as refusal:
        process_group.start("mpi")
    assert str(refusal.value) == (
        f"--backend mpi: torch {torch.__version__} was built without it; MPI needs a torch built from source "
        "beside an MPI library. This torch has gloo"
    )
    with pytest.raises(UserError, match=r"--backend nccl: torch \S+ was built without it\. This torch has gloo$"):
        process_group._pick_backend("nccl", GPU)


# --- agreement ---


@dataclasses.dataclass
class Picky:
    """Picklable, and not a number or text."""

    path: Path


def ask_rank_0() -> None:
    dist.init_process_group("gloo")
    rank, asked = dist.get_rank(), []

    def answer() -> Picky:
        asked.append(rank)
        return Picky(Path("from") / str(rank))

    def refusal() -> Picky:
        asked.append(rank)
        raise UserError(f"rank {rank} does not like it")

    assert ranks.from_rank0(answer) == Picky(Path("from/0"))
    assert ranks.from_rank0(lambda: None) is None
    with pytest.raises(UserError, match="rank 0 does not like it"):
        ranks.from_rank0(refusal)
    assert asked == ([0, 0] if rank == 0 else [])
    assert ranks.from_rank0(answer) == Picky(Path("from/0")), "the group goes on after a refusal"
    dist.destroy_process_group()


def test_from_rank0_hands_on_answers_and_refusals() -> None:
    result = runner.spawn(ask_rank_0, [(), ()])
    assert result.ok, str(result)


FLAGS: dict[str, object] = {"lr": 0.1, "name": "", "sync_bn": False}


DIFFERENCES: list[tuple[dict[str, object], str]] = [  # flags of rank 1, and what is told
    (FLAGS, ""),
    (FLAGS | {"lr": 0.2}, "rank 1 was started with flags lr 0.2, rank 0 with 0.1: "),
    (FLAGS | {"name": "x"}, "rank 1 was started with flags name 'x', rank 0 with '': "),
    ({"lr": 0.1, "name": ""}, "rank 1 was started with flags sync_bn None, rank 0 with False: "),
    (FLAGS | {"momentum": 0.9}, "rank 1 was started with flags momentum 0.9, rank 0 with None: "),
]


def compare(cases: list[tuple[dict[str, object], str]]) -> None:
    """On each rank: the same refusal, or none."""
    dist.init_process_group("gloo")
    found = []
    for flags, _ in cases:
        try:
            ranks.check_same(flags=flags, data={"seed": 0})
            found.append("")
        except UserError as error:
            found.append(str(error))
    for text, (_, told) in zip(found, cases, strict=True):
        assert text.startswith(told), f"{text!r} is not {told!r}"
        assert bool(text) == bool(told), f"{text!r} is not {told!r}"
    dist.destroy_process_group()


def test_check_same_names_rank_and_entry_on_both_ranks() -> None:
    result = runner.spawn(compare, [([(FLAGS, told) for _, told in DIFFERENCES],), (DIFFERENCES,)])
    assert result.ok, str(result)


def test_check_same_names_the_odd_rank() -> None:
    told = "rank 2 was started with flags lr 0.2, rank 0 with 0.1"
    result = runner.spawn(compare, [([(FLAGS | {"lr": 0.2 if rank == 2 else 0.1}, told)],) for rank in range(3)])
    assert result.ok, str(result)


def test_code_digests_have_every_file(tmp_path: Path) -> None:
    recipe = tmp_path / "train.py"
    recipe.write_text("a = 1\n")
    before = process_group.code_digests(str(recipe))
    files = [recipe, *(runner.ROOT / "common").rglob("*.py")]
    twice = [name for name, count in Counter(path.name for path in files).items() if count > 1]
    assert len(before) == len(files), f"of files with the same name only one is compared: {twice}"
    recipe.write_text("a = 2\n")
    after = process_group.code_digests(str(recipe))
    assert [name for name in before if before[name] != after[name]] == ["train.py"]
