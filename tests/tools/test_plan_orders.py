"""How long the ranks of a pipeline wait."""

import pytest
from tools.plan import orders
from torch.distributed.pipelining import schedules


class ScheduleGPipe: ...


class Schedule1F1B: ...


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize(("size", "micro_batches"), [(2, 2), (4, 4), (4, 32), (8, 11)])
def test_bubble_of_one_stage_a_rank(kind: type, size: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1): https://arxiv.org/abs/1811.06965."""
    share = orders.idle_share(orders.of_schedule(kind(), size, micro_batches))
    assert share == pytest.approx((size - 1) / (micro_batches + size - 1), rel=1e-12)


def test_orders_that_wait_for_ever() -> None:
    with pytest.raises(ValueError, match="after 1 actions, each rank of the pipeline waits"):
        orders.idle_share([[(0, "F", 0), (0, "B", 0)], [(1, "B", 0), (1, "F", 0)]])


def test_actions_are_read_as_torch_writes_them() -> None:
    action = schedules._Action(3, schedules._ComputationType.FORWARD, 12)
    assert orders.ACTION.findall(str(action)) == [("3", "F", "12")]
