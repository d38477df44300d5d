"""Which rank works longest: what counts as work, and from when a difference is worth a line."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import ranks
from common.measure import pace
from common.train import flops

from tests.harness import runner

CPU = torch.device("cpu")


def spin(seconds: float) -> None:
    """Work by the clock, with or without a processor."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def share_of_work(folder: str) -> None:
    """Two of these share one processor, once both are there: each works all the time, and has half of it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    Path(folder, os.environ["RANK"]).touch()
    runner.wait_for(lambda: len(os.listdir(folder)) == 2)
    one = pace.Pace(CPU, "this rank")
    began = time.thread_time()
    one.begin()
    spin(1.0)
    one.end()
    print(one.worked_s / one.took_s, (time.thread_time() - began) / one.took_s)


def test_waiting_for_a_processor_is_work(tmp_path: Path) -> None:
    result = runner.spawn(share_of_work, [(str(tmp_path),)] * 2)
    assert result.ok, str(result)
    for output in result.outputs:
        worked, had = map(float, output.split())
        assert worked > 0.85
        assert had < 0.8, "else they were not beside each other, and this shows nothing"


def test_waiting_for_a_thread_is_no_work() -> None:
    """Beside what that thread works itself, by its own count of processor time."""
    other: list[float] = []

    def work() -> None:
        while time.thread_time() < 0.5:
            sum(range(1000))
        other.append(time.thread_time())

    one, thread = pace.Pace(CPU, "this rank"), threading.Thread(target=work)
    one.begin()
    thread.start()
    thread.join()
    one.end()
    assert one.took_s >= other[0], "the clock passes meanwhile"
    assert one.worked_s < other[0] / 2


def look_at_products(products_s: list[float], took_s: float) -> None:
    """A rank whose GPU, which is not there, takes so long for a product, or has no memory for it if that is no time."""
    dist.init_process_group("gloo")

    def product_s(*_: Any) -> float:
        if not (mine := products_s[ranks.rank()]):
            raise torch.OutOfMemoryError
        return mine

    flops.product_s = product_s
    one = pace.Pace(torch.device("cuda", ranks.rank()), f"rank {ranks.rank()} on n1")
    one.worked_s = float(ranks.rank())  # of its thread, which starts kernels and shows nothing
    one.took_s = took_s
    for _ in range(2):  # said once
        one.begin_save()
    share, slow = one.slow
    print((round(share, 6), slow))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("products_s", "took_s", "wanted", "note"),
    [
        ([2e-4, 2.5e-4, 2e-4], 100.0, (0.2, "rank 1 on n1 (cuda:1)"), "they wait for it in 20% of the training\n"),
        ([2e-4, 2.1e-4, 2e-4], 100.0, (0.0, ""), ""),
        ([2e-4, 9e-4, 2e-4], 10.0, (0.0, ""), ""),  # a few seconds show nothing
        ([2e-4, 0.0, 9e-4], 100.0, (0.0, ""), ""),  # a rank without memory is not named, and nothing ends
    ],
    ids=["slow", "little", "soon", "full"],
)
def test_gpus_are_compared_by_a_product(
    products_s: list[float], took_s: float, wanted: tuple[float, str], note: str
) -> None:
    """A rank that waits keeps its GPU as busy as the others, and its thread has nothing to do."""
    result = runner.spawn(look_at_products, [(products_s, took_s)] * 3)
    assert result.ok, str(result)
    assert [one.splitlines()[-1] for one in result.outputs] == [str(wanted)] * 3
    assert result.outputs[0].count("note: ") == bool(note)
    assert note in result.outputs[0]


def test_product_leaves_the_generator_of_the_training_alone() -> None:
    before = torch.random.get_rng_state()
    assert flops.product_s(CPU, torch.float32, 64) > 0
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("worked", "wanted"),
    [
        ([8.0, 8.2, 9.9, 8.1], (0.18, "rank 2")),  # of ten parts of the time, the others wait for 1.8
        ([8.0, 8.5, 8.9, 8.2], (0.0, "")),  # little
        ([5.0, 9.0], (0.4, "rank 1")),
        ([9.0], (0.0, "")),  # alone
        ([0.0, 0.0], (0.0, "")),
    ],
    ids=str,
)
def test_slow_rank(worked: list[float], wanted: tuple[float, str]) -> None:
    share, name = pace.slow_rank([(10 * one, 100.0, f"rank {i}") for i, one in enumerate(worked)])
    assert (share, name) == (pytest.approx(wanted[0]), wanted[1])


def test_no_time() -> None:
    """A run that is resumed at its end has no step."""
    assert pace.slow_rank([(0.0, 0.0, "rank 0"), (0.0, 0.0, "rank 1")]) == (0.0, "")
