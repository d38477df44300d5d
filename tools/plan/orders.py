"""How long ranks of a pipeline wait, from the orders in which torch's schedules run their micro-batches."""

import re
from typing import Any

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")  # as torch writes one: stage, what, micro-batch
SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # a backward pass is as long as two forward passes
Action = tuple[int, str, int]


def of_schedule(schedule: Any, size: int, num_micro_batches: int) -> list[list[Action]]:
    """The order of each of `size` ranks of a pipeline, of a schedule of torch.distributed.pipelining."""
    name = type(schedule).__name__
    if name == "ScheduleGPipe":
        return [_one_stage(rank, num_micro_batches, num_micro_batches) for rank in range(size)]
    if name == "Schedule1F1B":  # figure 4 of https://arxiv.org/abs/2104.04473; torch 2.15's own list lacks an action
        return [_one_stage(rank, num_micro_batches, min(size - rank, num_micro_batches)) for rank in range(size)]
    return [
        [(int(s), what, int(m)) for action in order for s, what, m in ACTION.findall(str(action or ""))]
        for _, order in sorted(schedule.pipeline_order.items())
    ]


def _one_stage(stage: int, count: int, ahead: int) -> list[Action]:
    """Forward passes of `ahead` micro-batches, then one backward, one forward, and so on."""
    order: list[Action] = [(stage, "F", i) for i in range(ahead)]
    for i in range(count):
        order.append((stage, "B", i))
        if ahead + i < count:
            order.append((stage, "F", ahead + i))
    return order


def idle_share(orders: list[list[Action]]) -> float:
    """Share of the step in which a rank computes nothing, if all stages take equally long and nothing to send.

    Raises:
        ValueError: the orders wait for each other for ever.
    """
    last = max(stage for order in orders for stage, *_ in order)
    done: dict[Action, int] = {}
    clocks, places = [0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = sum(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                stage, what, micro = action = order[places[rank]]
                needs = _needs(stage, what, micro, last, done)
                if needs is None:
                    break
                clocks[rank] = max(clocks[rank], needs) + SLOTS[what]
                done[action] = clocks[rank]
                places[rank] += 1
        if sum(places) == before:
            raise ValueError(f"after {before} actions, each rank of the pipeline waits for another one")
    busy = max(sum(SLOTS[what] for _, what, _ in order) for order in orders)
    return 1 - busy / max(clocks)


def _needs(stage: int, what: str, micro: int, last: int, done: dict[Action, int]) -> int | None:
    """When what an action needs is there; None if it is not yet."""
    if what == "F":
        return 0 if stage == 0 else done.get((stage - 1, "F", micro))
    if what == "W":
        return done.get((stage, "I", micro))
    if stage == last:
        return done.get((stage, "F", micro))
    found = [done[one] for one in ((stage + 1, "B", micro), (stage + 1, "I", micro)) if one in done]
    return found[0] if found and (stage, "F", micro) in done else None
