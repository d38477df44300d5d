"""Parts of a step from traces: arithmetic on intervals against a raster, made-up traces of CPUs and GPUs, and waits."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tools.profile import timeline
from tools.profile.timeline import Interval, Message

LENGTH = 40


def random_intervals(draw: random.Random) -> list[Interval]:
    """Some intervals with whole numbers, which may overlap, touch or be empty."""
    begins = [draw.randrange(LENGTH) for _ in range(draw.randrange(6))]
    return [(begin, draw.randrange(begin, LENGTH)) for begin in begins]


def raster(intervals: Sequence[Interval]) -> set[int]:
    """The unit cells that they cover."""
    return {cell for begin, end in intervals for cell in range(int(begin), int(end))}


@pytest.mark.parametrize("seed", range(200))
def test_arithmetic(seed: int) -> None:
    """What is inside and what is left cover the cells that those of sets have, in order and without overlaps."""
    draw = random.Random(seed)
    one, two = random_intervals(draw), random_intervals(draw)
    cells = range(-1, LENGTH + 1)
    assert {cell for cell, is_in in zip(cells, timeline.inside(cells, one), strict=True) if is_in} == raster(one)
    for found, wanted in (
        (timeline.without([*one, *two], []), raster(one) | raster(two)),
        (timeline.without(one, two), raster(one) - raster(two)),
    ):
        assert raster(found) == wanted
        assert all(begin < end for begin, end in found)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))


@pytest.mark.parametrize("seed", range(50))
def test_parts_of_claims(seed: int) -> None:
    """Each instant belongs to the first part that claims it, and a wait only to what is being sent."""
    draw = random.Random(seed)
    claims = {part: random_intervals(draw) for part in timeline.PARTS if part not in ("slower", "idle")}
    slower = random_intervals(draw)
    found = timeline.parts(timeline.Window((2, 30), 2, claims, []), slower)
    left = set(range(2, 30))
    sends = raster(claims["exposed"]) & left
    cells = {part: raster(intervals) for part, intervals in claims.items()}
    cells |= {"slower": raster(slower) & sends, "idle": left}
    for part in timeline.PARTS:
        assert found[part] * 2e6 == pytest.approx(len(cells[part] & left)), part
        left = left - cells[part]
    assert found["hidden"] == pytest.approx(len(sends) / 2e6 - found["exposed"] - found["slower"], abs=1e-12)
    assert sum(found[part] for part in timeline.PARTS) == pytest.approx(14e-6)


@pytest.mark.parametrize("seed", range(50))
def test_waited_for(seed: int) -> None:
    """What a rank waited for another one is what "slower" would be if it had waited for that one alone."""
    draw = random.Random(seed)
    claims = {part: random_intervals(draw) for part in timeline.PARTS if part not in ("slower", "idle")}
    window = timeline.Window((2, 30), 2, claims, [])
    slower = {rank: random_intervals(draw) for rank in range(3)}
    found = timeline.waited_for(window, slower)
    assert found.keys() == slower.keys()
    for rank, intervals in slower.items():
        assert found[rank] == pytest.approx(timeline.parts(window, intervals)["slower"], abs=1e-12)


def event(
    name: str, begin: float, end: float, category: str = "cpu_op", thread: int = 1, **args: Any
) -> dict[str, Any]:
    """One event of a trace."""
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": begin, "dur": end - begin, "args": args}


def mark(name: str, begin: float, end: float) -> dict[str, Any]:
    """A mark of the main thread."""
    return event(name, begin, end, "user_annotation")


def sent(name: str, begin: float, end: float, count: int = 1000, thread: int = 2) -> dict[str, Any]:
    """What gloo reports of a collective of float32."""
    dims = {"Input Dims": [[count]], "Input type": ["float"]}
    return event(f"gloo:{name}", begin, end, "user_annotation", thread, **dims)


STEP = [
    mark("ProfilerStep#6", 0, 1000),
    mark("enumerate(DataLoader)#_Single", 10, 110),
    event("aten::stack", 20, 60),  # reading, not computing
    event("aten::mm", 110, 300),
    event("aten::add", 310, 400),  # the 10 before it are Python's, for the same forward pass
    event("autograd::engine::evaluate_function: MmBackward0", 400, 700),
    event("aten::mm", 400, 600),  # then a hook waits for what was sent
    event("c10d::allreduce_", 600, 605),
    sent("all_reduce", 500, 680),
    event("aten::linalg_vector_norm", 700, 720),
    mark("Optimizer.step#SGD.step", 720, 800),
    event("aten::_fused_sgd_", 720, 800),
    mark(timeline.BESIDE, 800, 850),
    sent("all_reduce", 810, 840, 2),  # of metrics
    mark(timeline.EVALUATES, 850, 850.5),
    event("aten::mm", 860, 940),
    mark(timeline.EVALUATED, 950, 960),
    mark(timeline.BESIDE, 960, 1000),
]


def test_cpu_step() -> None:
    """Each part of a made-up step, in microseconds; they add up to it."""
    window = timeline.window({"traceEvents": STEP})
    parts = {part: round(seconds * 1e6, 3) for part, seconds in timeline.parts(window).items()}
    wanted = {"data": 100, "forward": 300, "backward": 220, "exposed": 80, "optimizer": 100, "evaluation": 110}
    assert parts == wanted | {"slower": 0, "beside": 90, "idle": 0, "hidden": 100}
    assert sum(seconds for part, seconds in parts.items() if part != "hidden") == 1000
    (message,) = window.messages
    assert (message.name, message.num_bytes) == ("all_reduce", 4000)
    late = timeline.parts(window, [(500, 640)])  # the other rank began to send at 640
    assert (late["slower"], late["exposed"]) == (pytest.approx(40e-6), pytest.approx(40e-6))


def test_gpu_step() -> None:
    """Kernels count for the part that launched them, NCCL's are sending, and the rest is idle. Not a trace of a GPU."""
    events = [
        mark("ProfilerStep#6", 0, 1000),
        mark("enumerate(DataLoader)#_Multi", 0, 100),
        event("cudaLaunchKernel", 110, 115, "cuda_runtime", 1, correlation=1),
        event("autograd::engine::evaluate_function: MmBackward0", 120, 200, thread=3),
        event("cudaLaunchKernel", 130, 135, "cuda_runtime", 3, correlation=2),
        mark("Optimizer.step#SGD.step", 200, 260),
        event("cudaLaunchKernel", 210, 215, "cuda_runtime", 1, correlation=3),
        event("gemm", 115, 400, "kernel", 7, correlation=1),
        event("gemm", 400, 700, "kernel", 7, correlation=2),
        event(
            "ncclDevKernel_AllReduce_Sum_f32",
            *(600, 850, "kernel", 20),
            **{"correlation": 4, "Collective name": "allreduce", "In msg nelems": 10, "dtype": "BFloat16"},
            **{"Process Group Name": "2"},
        ),
        event("multi_tensor_apply", 850, 950, "kernel", 7, correlation=3),
    ]
    about = {"rank": 1, "pg_config": [{"pg_name": "2", "ranks": [1, 9]}]}
    window = timeline.window({"traceEvents": events, "distributedInfo": about})
    parts = {part: round(seconds * 1e6, 3) for part, seconds in timeline.parts(window).items()}
    wanted = {"data": 100, "forward": 285, "backward": 300, "exposed": 150, "optimizer": 100, "idle": 65, "hidden": 100}
    assert parts == {"slower": 0, "evaluation": 0, "beside": 0} | wanted
    assert [(one.name, one.num_bytes, one.group, one.number) for one in window.messages] == [
        ("allreduce", 20, (1, 9), 1)
    ]


def test_what_follows_the_last_step() -> None:
    """The run writes facts into the trace before the profiler ends: no part of the step."""
    events = [
        *STEP[1:],
        mark("ProfilerStep#6", 0, 1300),
        mark(timeline.ENDS, 1000, 1001),
        event("aten::mm", 1010, 1200),
    ]
    window = timeline.window({"traceEvents": events})
    assert window.frame == (0, 1000)
    assert timeline.parts(window) == timeline.parts(timeline.window({"traceEvents": STEP}))


def test_without_steps() -> None:
    """A trace without a step is refused."""
    with pytest.raises(ValueError, match="no step"):
        timeline.window({"traceEvents": [event("aten::mm", 0, 1)]})


def test_recorded_groups() -> None:
    """The flight recorder's n-th entry of a size belongs to the n-th event of that size; another count to none."""
    events = [*STEP, sent("all_reduce", 300, 320, 7), sent("all_reduce", 320, 330, 7)]
    about = {"rank": 1, "pg_config": [{"pg_name": "3", "ranks": [1, 5]}]}
    entries = [
        {"profiling_name": "gloo:all_reduce", "input_sizes": [[7]], "process_group": ["3", ""], "collective_seq_id": n}
        | {"time_created_ns": 2e6 + 3e5}
        for n in (8, 9)
    ]
    trace = {"traceEvents": events, "distributedInfo": about, "baseTimeNanoseconds": 2e6}
    before = entries[0] | {"time_created_ns": 2e6 - 1}  # and so it is none of these steps
    known = [(one.group, one.number) for one in timeline.window(trace, [before, *entries]).messages]
    assert known == [((1, 5), 8), ((1, 5), 9), ((), -1)]
    assert {one.group for one in timeline.window(trace, entries[:1]).messages} == {()}


def test_places_of_messages() -> None:
    """What one rank receives may come from the rank at that place in each group that both are in."""
    about = {"rank": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1, 2, 3]}, {"pg_name": "4", "ranks": [2, 3]}]}
    inputs = {"Concrete Inputs": ["", "", "1", "0"]}
    events = [*STEP, event("c10d::recv_", 300, 301, **inputs), sent("recv", 300.5, 400)]
    messages = timeline.window({"traceEvents": events, "distributedInfo": about}).messages
    assert [one.peers for one in messages if one.name == "recv"] == [(1, 3)]


def both(change: Callable[[list[Message]], list[Message]] = list) -> list[list[Message]]:
    """Two all-reduces of ranks 0 to 2; rank 2 begins last, and `change` changes what it does."""
    every = (0, 1, 2)
    early = [Message("all_reduce", 10, 50, 4, every, 1), Message("all_reduce", 60, 70, 4, every, 2)]
    late = [Message("all_reduce", 40, 50, 4, every, 1), Message("all_reduce", 60, 70, 4, every, 2)]
    return [early, early, change(late)]


def test_waits_for_the_last() -> None:
    """Those who had begun wait until the last one begins, and know which it is; nobody waits for an equal one."""
    first, second, third = timeline.waits(both())
    assert first == second == [timeline.Wait(30, 2), None]
    assert third == [None, None]
    alone = timeline.waits(both(lambda late: [Message("all_reduce", 40, 50, 4, (2,), 1), late[1]]))
    assert alone == [[None, None]] * 3, "another group"


def test_waits_for_a_sender() -> None:
    """Who receives waits until the other one sends; the n-th of a size answers the n-th."""
    received = [Message("recv", 0, 30, 8, peers=(1, 2)), Message("recv", 40, 60, 8, peers=(1, 2))]
    answers = [Message("send", 25, 29, 8, peers=(0,)), Message("send", 35, 50, 8, peers=(0,))]
    found = timeline.waits([received, [], answers])
    assert found == [[timeline.Wait(25, 2), None], [], [None, None]]
    assert timeline.waits([received, [], answers[:1]])[0] == [None, None], "nobody has sent both"
