"""What one rank tells the others, and what all hear alike."""

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from common import UserError, ranks

from tests.harness import runner


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that nobody has given a rank."""
    for name in [*os.environ]:
        if name in ("RANK", "WORLD_SIZE") or name.startswith("OMPI_"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_launcher")
def test_rank_and_size_are_known_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ranks.rank(), ranks.size()) == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "5")
    assert (ranks.rank(), ranks.size()) == (2, 5)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (ranks.rank(), ranks.size()) == (3, 4)


def test_print0_prints_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1", "3"):
        monkeypatch.setenv("RANK", rank)
        ranks.print0(f"from {rank}")
    assert capsys.readouterr().out == "from 0\n"


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


def compare_versions(versions: dict[str, str], told: str) -> None:
    dist.init_process_group("gloo")
    with pytest.raises(UserError, match=told) if told else contextlib.nullcontext():
        ranks.check_same(version=versions)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("other", "told"),
    [({"numpy": "1", "PIL": "2"}, ""), ({}, ""), ({"numpy": "2"}, "version numpy '2', rank 0 with '1'")],
)
def test_packages_that_one_rank_has_not_imported_are_no_difference(other: dict[str, str], told: str) -> None:
    result = runner.spawn(compare_versions, [({"numpy": "1"}, told), (other, told)])
    assert result.ok, str(result)
