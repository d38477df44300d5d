"""What a process keeps where its ranks begin again, and what it must let go of."""

import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common.run import exits, process_group, run_dir
from common.run.process import Process, Rewind

from tests.harness import runner
from tests.test_session import begin

# What would keep a model alive; the first is the run as it is.
KEEPS: dict[str, Callable[[Process, Any], object]] = {
    "": lambda process, model: None,
    "mutant: owners that own": lambda process, model: setattr(process, "owners", (lambda: model, lambda: None)),
    "mutant: kept beside the locks": lambda process, model: process.locks.append(model),
}


def go_back(folder: str, keeps: str, flags: dict[str, Any]) -> None:
    """A whole run, whose loss jumps in step 3; what is left of it when its main is called again."""
    of_first: list[Any] = []
    processes: list[Process] = []

    @exits.entry
    def main(process: Process) -> None:
        processes.append(process)
        if of_first:
            left = [type(one()).__name__ for one in of_first if one() is not None]
            print(f"left: {left}")
            return
        run, model, optimizer = begin(folder, process, on_bad_state="rewind", max_steps=6, log_every=1, **flags)
        KEEPS[keeps](process, model)
        of_first.extend(map(weakref.ref, (model, optimizer, run, run.finite, next(model.parameters()))))
        for step in run.steps(dp_rank=0):
            loss = model(torch.randn(8, 4, dtype=torch.float64)).square().sum()
            loss.backward()
            run.finite.skip_if_not_finite(torch.ones(()))
            optimizer.step()
            sums = {"loss": loss.detach() * (1000 if step == 3 else 1), "count": torch.tensor(8)}
            run.log_train(step, sums, grad_norm=torch.ones(()), data_wait_s=0.0)
            run.save(step)

    main()
    first, second = processes
    assert first is second, "one process, whatever begins again in it"
    assert (second.starts, second.name) == (1, "run")
    assert second.world is second.watch is None
    assert not dist.is_initialized()
    assert not second.stop._thread.is_alive()
    assert keeps or [file.closed for file in second.locks] == [False]


@pytest.mark.parametrize(
    ("keeps", "flags"),
    [
        ("", {}),
        ("", {"save_every": 1, "async_save": True}),
        ("", {"save_every": 2, "check_every": 1, "keep_best": "loss"}),
        *((keeps, {}) for keeps in KEEPS if keeps),
    ],
    ids=str,
)
def test_nothing_keeps_a_model_where_the_run_begins_again(keeps: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """Two models may not fit into the memory of a device."""
    result = runner.spawn(go_back, [(str(tmp_path / "run"), keeps, flags)])
    assert result.ok, str(result)
    said = result.outputs[0]
    assert "in step 3; going back to the newest checkpoint" in said, said
    left = str(["Sequential", "Parameter"] if keeps else [])
    assert re.findall(r"^left: (\[.*?\])", said, re.MULTILINE) == [left], said


def begin_again(folder: str) -> None:
    """Two ranks that go back meet in the same store, and read nothing of what they have written there before."""
    stores = []
    keys = []

    @exits.entry
    def main(process: Process) -> None:
        world = process_group.start(process=process)
        assert process.world is world
        stores.append(process.met[0] if process.met else None)
        keys.append(world.store._key)
        assert world.store.peek("from before") == ""
        dist.barrier()
        world.store.set("from before", "a finding")
        run_dir.claim(Path(folder), process)
        process.background.callback(print, f"ends start {process.starts}", flush=True)
        if process.starts < 2:
            process.doubts = process.starts
            raise Rewind
        assert process.doubts == 1, "what the last one has left"
        process_group.finish(process)

    main()
    assert len({*map(id, stores)}) == 1
    assert len({*keys}) == 3, "a key of its own for each start"


def test_ranks_that_begin_again_meet_without_what_was_before(tmp_path: Path) -> None:
    result = runner.spawn(begin_again, [(str(tmp_path),)] * 2)
    assert result.ok, str(result)
    assert result.outputs == ["ends start 0\nends start 1\nends start 2\n"] * 2


def hold(path: str, mutant: bool) -> None:
    """The folder is this process's also while its ranks begin again; the mutant's lock ends with its run."""
    process = Process()
    process_group.start(process=process)
    run_dir.claim(Path(path), Process() if mutant else process)
    gc.collect()
    process_group.finish(process, begins_again=True)
    script = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", script, f"{path}/lock"], check=False, capture_output=True, text=True)
    assert ("BlockingIOError" in other.stderr) == (not mutant), other.stderr
    process_group.start(process=process)
    run_dir.claim(Path(path), process)
    process_group.finish(process)


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant"])
def test_folder_stays_claimed_where_the_run_begins_again(mutant: bool, tmp_path: Path) -> None:
    result = runner.spawn(hold, [(str(tmp_path / "run"), mutant)])
    assert result.ok, str(result)


def test_error_without_memory_is_explained() -> None:
    """With the flags and the owners of this process, and of no other one."""
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters())
    mine = Process(frees=["--keep 1 (now 2)"], owners=(weakref.ref(model), weakref.ref(optimizer)))
    for process, told in (
        (mine, r"parameters 0\.00, .*in this order: (more devices.*; )?--keep 1 \(now 2\)"),
        (Process(), r"out of memory\. It takes less with, in this order: more devices"),
    ):
        error = MemoryError()
        process.explain(error)
        (note,) = error.__notes__
        assert re.search(told, note), note
