"""What one rank tells the others, and what all hear alike."""

import contextlib
import os
from typing import NoReturn

import pytest
import torch.distributed as dist
from common import UserError, printable, ranks

from tests.harness import runner


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that nobody has given a rank."""
    for name in [*os.environ]:
        if name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_launcher")
def test_rank_and_size_are_known_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ranks.rank(), ranks.size()) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (ranks.rank(), ranks.size()) == (3, 4)


def test_print0_prints_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1", "3"):
        monkeypatch.setenv("RANK", rank)
        ranks.print0(f"from {rank}")
    assert capsys.readouterr().out == "from 0\n"


ANSWER = {"path": "\udcff/a b", "steps": [1, -(2**63)], "nothing": None, "share": 0.1, "so": True}


def lose_the_disk() -> NoReturn:
    raise OSError(5, "gone")


def ask_rank_0() -> None:
    dist.init_process_group("gloo")
    rank, asked = dist.get_rank(), []

    def answer() -> dict[str, object]:
        asked.append(rank)
        return ANSWER

    def refusal() -> str:
        asked.append(rank)
        raise UserError(f"rank {rank} does not like \x1b[31mit")

    assert ranks.from_rank0(answer) == ANSWER
    assert ranks.from_rank0(lambda: None) is None
    with pytest.raises(UserError, match=r"^rank 0 does not like \?\[31mit$"):
        ranks.from_rank0(refusal)
    assert asked == ([0, 0] if rank == 0 else [])
    with pytest.raises(UserError, match=r"^/runs cannot be read: \[Errno 5\] gone$"):
        ranks.from_rank0(lose_the_disk, "/runs")
    assert ranks.from_rank0(answer) == ANSWER, "the group goes on after a refusal"
    several = dist.new_group(backend="gloo")
    for group in (None, several):
        assert ranks.gather([rank, "x" * 1000 * rank], group) == [[0, ""], [1, "x" * 1000]]
    dist.destroy_process_group()


def test_from_rank0_hands_on_answers_and_refusals() -> None:
    result = runner.spawn(ask_rank_0, [(), ()])
    assert result.ok, str(result)


def test_from_rank0_without_a_group() -> None:
    """As the tools have none: the same answers and refusals."""
    assert ranks.from_rank0(lambda: (1, "a")) == [1, "a"]
    with pytest.raises(UserError, match=r"^/runs cannot be read: \[Errno 5\] gone$"):
        ranks.from_rank0(lose_the_disk, "/runs")


def test_control_characters_are_not_shown() -> None:
    """Escape sequences, carriage returns, and marks that turn the direction of writing."""
    assert printable("a\x1b[2J\rb\n\tc\u202ed\x9b\udcff é 字") == "a?[2J?b\n\tc?d?? é 字"


def test_lists_have_an_end() -> None:
    assert ranks.listed(["a", "b"]) == "a, b"
    assert ranks.listed(["a\x1b", "b", "c"], most=1) == "a? and 2 more"
    assert len(ranks.listed(["x" * 10**6] * 9)) < 2000


def test_numbers_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UserError, match=r"^RANK=first in the environment must be a whole number$"):
        ranks.rank()


class Odd:
    """What JSON does not know."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Odd({self.name})"


FLAGS: dict[str, object] = {"lr": 0.1, "name": "", "sync_bn": False}


DIFFERENCES: list[tuple[dict[str, object], str]] = [  # flags of rank 1, and what is told
    (FLAGS, ""),
    (FLAGS | {"lr": 0.2}, "rank 1 was started with flags lr 0.2, rank 0 with 0.1: "),
    (FLAGS | {"name": "x"}, "rank 1 was started with flags name 'x', rank 0 with '': "),
    ({"lr": 0.1, "name": ""}, "rank 1 was started with flags sync_bn None, rank 0 with False: "),
    (FLAGS | {"sync_bn": Odd("a")}, "rank 1 was started with flags sync_bn 'Odd(a)', rank 0 with False: "),
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
