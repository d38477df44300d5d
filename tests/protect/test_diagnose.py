"""From a stack to the phase of training, from torch's records to the collective, from heartbeats to the culprit."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import manifest, private_api
from common.protect import diagnose
from common.run import process_group
from common.train import data, sampler

from tests.harness import runner
from tests.harness.states import make_saver, make_state

CPU = torch.device("cpu")

# --- phases ---


class Probe:
    """Looks at the stack that it is called on, as the watching thread does."""

    def __init__(self, noted: str = "") -> None:
        self.noted = noted
        self.found: list[tuple[str, str]] = []

    def __call__(self, *_: object) -> None:
        stack = list(traceback.walk_stack(sys._getframe()))
        self.found.append(diagnose.phase_and_stack(reversed(stack), self.noted))

    def __reduce__(self) -> Any:
        """Being pickled is being called."""
        self()
        return str, ()


def forward(probe: Probe) -> None:
    torch.nn.Sequential(Calling(probe))(torch.ones(1))


class Calling(torch.nn.Module):
    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe = probe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.probe()
        return x


class Reader:
    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def __len__(self) -> int:
        return 1

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        self.probe()
        return torch.zeros(1), torch.zeros(1)


def wait_for_data(probe: Probe) -> None:
    plan = sampler.make_plan(sampler.Division(1, 1, 1), 1, run_seed=0, epochs=0, max_steps=1, progress={})
    next(data.Loader(Reader(probe), sampler.evaluation_requests(plan, 1, 0), 0, CPU))


def go_back(probe: Probe) -> None:
    weight = torch.ones(1, requires_grad=True)
    (2 * weight).register_hook(probe)
    doubled = 2 * weight
    doubled.register_hook(probe)
    doubled.sum().backward()


def update(probe: Probe) -> None:
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step(lambda: probe() or 0.0)


def gather(probe: Probe) -> None:
    dist.all_gather_object([None], probe)


def save(probe: Probe) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "write", probe)
        make_saver(Path("saved")).save(1, make_state(1), 10, last=False)


PHASES: dict[str, Callable[[Probe], None]] = {
    "data": wait_for_data,
    "forward": forward,
    "backward": go_back,
    "collective": gather,
    "optimizer": update,
    "save": save,
    "the main loop": lambda probe: probe(),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("phase", PHASES)
def test_phase_is_what_the_main_thread_is_in(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    probe = Probe()
    PHASES[phase](probe)
    assert [found for found, _ in probe.found] == [phase]
    lines = probe.found[0][1].splitlines()
    assert any("in __call__" in line for line in lines[-3:]), "the innermost frame comes last"
    assert sum(line.startswith("  File ") for line in lines) <= 5, "and no more than a reader needs"
    assert "site-packages" not in probe.found[0][1]


@pytest.mark.usefixtures("group")
def test_noted_phase_counts_and_not_what_it_waits_in() -> None:
    """An evaluation that computes, waits for data, or sums up, is an evaluation."""
    probe = Probe("evaluation")
    for inner in (forward, wait_for_data, gather):
        inner(probe)
    assert [found for found, _ in probe.found] == ["evaluation"] * 3


def test_no_function_of_a_recipe_is_known_by_name() -> None:
    """A user may call his own as he likes: a phase is told by files of common/ and of torch."""
    assert {file.partition("/")[0] for _, file, _ in diagnose.PHASES} == {"common", "torch"}


def test_heartbeats_do_not_look_at_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks would ask a shared file system for 20,000 states of files a second."""
    probe = Probe()
    forward(probe)  # reads the lines that it shows
    looked: list[str] = []
    stat, mine = os.stat, threading.get_ident()

    def look(path: Any, **more: Any) -> os.stat_result:  # other threads, such as those of xdist, look as they like
        if threading.get_ident() == mine:
            looked.append(str(path))
        return stat(path, **more)

    monkeypatch.setattr("os.stat", look)
    forward(probe)
    assert not looked
    traceback.StackSummary.extract(traceback.walk_stack(sys._getframe()))
    assert looked, "else this could not fail"
    (_, first), (_, second) = probe.found
    monkeypatch.undo()
    frames = [*traceback.walk_stack(sys._getframe())][::-1]
    wanted = traceback.StackSummary.extract(frames)
    ours = [one for one in wanted[:-1] if "site-packages" not in one.filename]
    assert diagnose.phase_and_stack(frames)[1] == "".join(traceback.format_list([*ours[-4:], wanted[-1]]))
    assert first.splitlines()[-1] == second.splitlines()[-1]


def test_phases_of_a_traceback_are_reported_too() -> None:
    def fail() -> None:
        raise ValueError("oh")

    with pytest.raises(ValueError, match="oh") as failure:
        forward(fail)
    phase, shown = diagnose.phase_and_stack(traceback.walk_tb(failure.tb))
    assert phase == "forward"
    assert "in fail" in shown.splitlines()[-2]


# --- collectives ---


def record(retired: bool, number: int, group: str = "default_pg") -> dict[str, Any]:
    return {
        "retired": retired,
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "process_group": ["0", group],
        "input_sizes": [[2, number]],
    }


def test_waits_in_the_oldest_collective_that_has_not_ended() -> None:
    assert diagnose.waits_in({}, "", "") == "", "a torch that records nothing"
    stack = '  File "schedules.py", line 503, in _wait_batch_p2p\n'
    assert diagnose.waits_in({}, stack, "") == "a message between two ranks"
    line = '  File "train.py", line 271, in exchange\n    work.wait()\n'
    assert diagnose.waits_in({}, line, "") == "a message between two ranks"
    assert diagnose.waits_in({}, f'{line}  File "other.py", line 3, in wait\n    time.sleep(9)\n', "") == ""
    assert diagnose.waits_in({"entries": [record(False, 2)]}, stack, "").startswith("gloo:")
    assert diagnose.waits_in({"entries": [record(True, 1)]}, "", "") == ""
    entries = [record(True, 1), record(False, 2), record(False, 3)]
    assert diagnose.waits_in({"entries": entries}, "", "") == "gloo:all_reduce [[2, 2]], number 2 of group default_pg"
    saving = record(False, 1, process_group.SAVING)
    assert diagnose.waits_in({"entries": [saving]}, "", "data") == "", "it is written beside the training"
    assert diagnose.waits_in({"entries": [saving]}, "", "save").endswith(f"of group {process_group.SAVING}")
    assert diagnose.waits_in({"entries": [saving, *entries]}, "", "").endswith("number 2 of group default_pg")


def wait_for_rank_1() -> None:
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=runner.HANG_S))
    axis = dist.new_group(group_desc="mesh_dp")
    saving = dist.new_group(group_desc=process_group.SAVING)

    def look_for(wanted: str) -> None:
        """A collective is done a moment before its record says so."""
        runner.wait_for(lambda: all(found == wanted for found in look()), f"this does not become {wanted!r}")

    def look() -> list[str]:
        return [
            diagnose.waits_in(private_api.flight_recorder(CPU, only_active), "", "") for only_active in (True, False)
        ]

    dist.all_reduce(torch.ones(7), group=axis)
    look_for("")
    if dist.get_rank() == 1:
        store.get("looked")  # rank 0 is alone until then
    written = dist.all_reduce(torch.ones(3), group=saving, async_op=True)
    if dist.get_rank() == 0:
        assert look() == ["", ""]
    summed = dist.all_reduce(torch.ones(4, 5), group=axis, async_op=True)
    if dist.get_rank() == 0:
        look_for("gloo:all_reduce [[4, 5]], number 2 of group mesh_dp")
        store.set("looked", "")
    written.wait()
    summed.wait()
    look_for("")
    dist.barrier()
    dist.destroy_process_group()


def test_torch_records_what_a_rank_waits_in() -> None:
    result = runner.spawn(wait_for_rank_1, [()] * 2)
    assert result.ok, str(result)


# --- culprits ---


def beat(
    rank: int, waits_in: str = "", stalled_s: float = 30.0, phase: str = "collective", limit_s: float = 20.0
) -> diagnose.Beat:
    name = f"rank {rank} (host h, pid {100 + rank}, step 7)"
    return {"rank": rank, "name": name, "phase": phase, "stack": f"  stack of {rank}\n", "waits_in": waits_in} | {
        "stalled_s": stalled_s,
        "spun_s": stalled_s,
        "spins_s": 2 * limit_s,
        "limit_s": limit_s,
    }


SUM, MAX = "all_reduce [[3]], number 9 of group default_pg", "broadcast [[3]], number 9 of group default_pg"


def test_gone_ranks_are_named_as_they_were_last_seen() -> None:
    beats = [beat(0, SUM), beat(1, phase="backward"), beat(2, SUM), beat(3, MAX)]
    assert diagnose.accuse_dead(beats, set()) == ""
    assert diagnose.accuse_dead(beats, {1, 3}) == (
        "dead or frozen; last heartbeat of rank 1 (host h, pid 101, step 7): backward\n  stack of 1\n"
        "dead or frozen; last heartbeat of rank 3 (host h, pid 103, step 7): collective, waiting in "
        f"{MAX}\n  stack of 3\n"
    )


def test_rank_that_waits_for_nobody_is_the_one_that_hangs() -> None:
    beats = [beat(0, SUM), beat(1, phase="data"), beat(2, SUM)]
    assert diagnose.accuse_stalled(beats) == (
        "no progress for 20 s: rank 1 (host h, pid 101, step 7): data\n  stack of 1\nranks [0, 2] are waiting for it\n"
    )
    alone = diagnose.accuse_stalled([beat(0, phase="forward", limit_s=0.5)])
    assert alone == "no progress for 0.5 s: rank 0 (host h, pid 100, step 7): forward\n  stack of 0\n"
    both = diagnose.accuse_stalled([beat(0, phase="data"), beat(1, SUM), beat(2, phase="save")])
    assert both.count("no progress") == 2
    assert "rank 1 (" not in both


@pytest.mark.parametrize("stalled_s", [0.0, 9.9])
def test_rank_that_makes_progress_accuses_nobody(stalled_s: float) -> None:
    """It is slow, and the others wait for it with reason; a rank that waits makes no progress by definition."""
    assert diagnose.accuse_stalled([beat(0, SUM), beat(1, stalled_s=stalled_s), beat(2, phase="data")]) == ""
    assert diagnose.accuse_stalled([beat(0, SUM), beat(1, SUM, stalled_s), beat(2, phase="data")])


@pytest.mark.parametrize("spun_s", [30.0, 39.9, 40.0, 600.0])
def test_rank_that_moves_without_end_is_accused_at_twice_its_limit(spun_s: float) -> None:
    spins = beat(1, phase="evaluation", stalled_s=0.25) | {"spun_s": spun_s}
    found = diagnose.accuse_stalled([beat(0, SUM), spins])
    assert bool(found) == (spun_s >= 40)
    if found:
        assert found.startswith(
            f"no progress for {spun_s:g} s, though it moves (raise --hang-timeout if it needs longer): rank 1 ("
        )
        assert found.endswith("ranks [0] are waiting for it\n")
    assert not diagnose.accuse_stalled([beat(0, SUM), spins, beat(2, phase="data", stalled_s=1.0)]), "2 gets on"


def test_stop_has_a_limit_also_before_the_training() -> None:
    """Which has none otherwise."""
    start = beat(0, stalled_s=0.0, limit_s=float("inf"))
    assert not diagnose.has_spun(start | {"spun_s": 1e9})
    assert [diagnose.has_spun(start | {"spun_s": spun_s}, 600.0) for spun_s in (599.0, 600.0)] == [False, True]


def test_save_has_its_own_limit() -> None:
    """Whoever waits for it, also in the training: what is slow does not hang."""
    slow = beat(1, phase="save", limit_s=600.0)
    assert diagnose.accuse_stalled([beat(0, SUM), slow]) == ""
    assert diagnose.accuse_stalled([beat(0, SUM, limit_s=600.0), beat(1, SUM, limit_s=600.0)]) == ""
    assert "no progress for 600 s: rank 1 (" in diagnose.accuse_stalled([beat(0, SUM), slow | {"stalled_s": 601.0}])


def test_ranks_in_different_collectives_are_all_shown() -> None:
    found = diagnose.accuse_stalled([beat(0, SUM), beat(1, MAX)])
    assert found.startswith("no progress for 20 s: all ranks are waiting for each other:\nrank 0 (")
    for rank, waits_in in ((0, SUM), (1, MAX)):
        assert f"rank {rank} (host h, pid {100 + rank}, step 7): collective, waiting in {waits_in}\n" in found


def test_first_collective_of_gpus_that_never_ends() -> None:
    """Then it is the way between them, not a rank: the advice comes with it, and with no other collective."""
    first = "nccl:all_reduce [[3]], number 1 of group mesh_dp"
    assert "NCCL_P2P_DISABLE=1" in diagnose.accuse_stalled([beat(0, first), beat(1, first)])
    for other in (first.replace("nccl", "gloo"), first.replace("number 1", "number 10")):
        assert "NCCL_" not in diagnose.accuse_stalled([beat(0, first), beat(1, other)])
