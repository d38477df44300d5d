"""A hash that differs between any ranks that hold it is found, whatever else they hold."""

import pytest
import torch
import torch.distributed as dist
from common.state import replicas

from tests.harness import runner

KEYS = 120


def held(rank: int, drifts: dict[str, int]) -> dict[str, int]:
    """Of some keys all ranks have a hash, of some two ranks have, of some one: large, small and negative ones."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randint(-(2**63), 2**63 - 1, (KEYS,), generator=generator).tolist()
    values[:4] = [2**63 - 1, -(2**63), 0, -1]
    found = {f"blocks.{i}.weight": value for i, value in enumerate(values) if rank in (i % 3, (i + i // 40) % 3)}
    found |= {f"norm.{i}": value for i, value in enumerate(values)}
    return {key: value + (drifts.get(key) == rank) for key, value in found.items()}


def look(slots: int, sends: bool) -> None:
    dist.init_process_group("gloo")
    replicas.SLOTS = slots
    rank = dist.get_rank()
    real = dist.all_reduce
    dist.all_reduce = real if sends else lambda *_: None
    for drifts in ({}, {"norm.1": 0}, {"norm.2": 1, "blocks.47.weight": 2, "norm.119": 2}):
        mine = held(rank, drifts)
        found = replicas.suspects(mine)
        assert {*drifts} & {*mine} <= {*found}, "all that differ"
        if slots > KEYS:
            assert {*found} <= {*drifts}, "and nothing else"
        assert all(mine[key] == value for key, value in found.items())
    assert replicas.suspects({}) == {}
    dist.destroy_process_group()


@pytest.mark.parametrize("slots", [replicas.SLOTS, 4], ids=["", "keys share slots"])
def test_finds_what_differs(slots: int) -> None:
    result = runner.spawn(look, [(slots, True)] * 3)
    assert result.ok, str(result)


def test_mutant_sends_nothing() -> None:
    result = runner.spawn(look, [(replicas.SLOTS, False)] * 3)
    assert "all that differ" in str(result)
