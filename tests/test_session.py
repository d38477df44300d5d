"""A session makes its parts in an order that matters, says when each thing is due, and ends when it should."""

import contextlib
import dataclasses
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from common import UserError, keymap, seed, session
from common.protect import watch
from common.run import log, process_group, run_dir, stop
from common.run.process import Process, Rewind
from common.state import checkpoint, replicas, start, state_check
from common.store import disk
from common.train import guard, sampler
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import runner


@dataclasses.dataclass(frozen=True)
class Args(session.TrainArgs):
    """Flags of a training that has none of its own but its length."""

    max_steps: int = 0
    seed: int = 3
    log_every: int = 5
    keep: int = 9
    check_every: int = 4
    name: str = "run"
    dtype: str = "float64"


def begin(
    folder: str,
    here: Process | None = None,
    *,
    num_samples: int = 64,
    max_steps: int = 0,
    first_step: int = 0,
    **flags: Any,
) -> tuple[session.Session, nn.Module, torch.optim.Optimizer]:
    """A session over two epochs of eight steps of eight samples, unless something else is said."""
    args = Args(max_steps=max_steps, **flags)
    world = session.join(args, __file__, here or Process())
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    plan = sampler.make_plan(
        sampler.Division(8, 8, world.size),
        num_samples,
        run_seed=3,
        epochs=2,
        max_steps=max_steps,
        progress={"step": first_step, "samples": 8 * first_step} if first_step else {},
    )
    saved = [*map(checkpoint.step_of, checkpoint.committed(Path(folder)))]
    found = start.Found(disk.Disk(Path(folder)), {"seed": 3}, None, {}, max(saved, default=-1))
    run = session.Session(args, world, mesh, found=found, plan=plan, model=model, optimizer=optimizer)
    return run, model, optimizer


def train(
    run: session.Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    bad: tuple[int, ...] = (),
    logged: bool = True,
    after: Callable[[int], object] = lambda step: None,
) -> dict[str, list[int]]:
    """The loop of a recipe; returns the steps that were done, and those after which something was due."""
    events: dict[str, list[int]] = {name: [] for name in ("steps", "logs", "evaluates", "saves")}
    for step in run.steps(dp_rank=0):
        events["steps"].append(step)
        x = torch.randn(8, 4, dtype=torch.float64)
        loss = model(x * float("inf") if step in bad else x).square().sum()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.finite.skip_if_not_finite(grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if logged:
            sums = {"loss": loss, "count": torch.tensor(8)}
            run.log_train(step, sums, grad_norm=grad_norm, data_wait_s=0.0)
        after(step)
        for name in ("logs", "evaluates", "saves"):
            if getattr(run, name)(step):
                events[name].append(step)
        run.save(step)
    run.finish()
    return events


def in_one_process(target: Callable[..., None], *args: Any) -> runner.Result:
    result = runner.spawn(target, [args])
    assert result.ok, str(result)
    return result


# --- how the ranks come together ---


def join_differently(flags: dict[str, Any], recipe: str, version: str, told: str) -> None:
    here = Process()
    numpy.__version__ = version
    with pytest.raises(UserError, match=told) if told else contextlib.nullcontext():
        session.join(Args(**flags), recipe, here)
    assert isinstance(here.watch, watch.Watch) == (not told)
    process_group.finish(here)


SAME = ({"seed": 1}, __file__, "1")
DIFFERENCES: list[tuple[tuple[dict[str, Any], str, str], str]] = [  # what rank 1 has, and what both ranks say
    (SAME, ""),
    (({"seed": 2}, *SAME[1:]), "^rank 1 was started with flag seed 2, rank 0 with 1: start every rank with the same "),
    (({"seed": 1, "name": "x"}, *SAME[1:]), "^rank 1 was started with flag name 'x', rank 0 with 'run'"),
    ((SAME[0], log.__file__, "1"), r"^rank 1 was started with code train\.py '[0-9a-f]{16}', rank 0 with "),
    ((*SAME[:2], "2"), "^rank 1 was started with version numpy '2', rank 0 with '1'"),
]


@pytest.mark.parametrize(("other", "told"), DIFFERENCES, ids=["same", "flag", "name", "code", "version"])
def test_join_compares_what_must_be_the_same(other: tuple[dict[str, Any], str, str], told: str) -> None:
    """Nobody watches before that; each rank refuses."""
    result = runner.spawn(join_differently, [(*SAME, told), (*other, told)])
    assert result.ok, str(result)


def join_twice() -> None:
    """What a process keeps of its flags; without a name, one for all runs of this process."""
    here = Process()
    began = here.name
    assert re.fullmatch(r"\d{8}-\d{6}", began)
    process_group.finish(session.join(Args(name=""), __file__, here).process, begins_again=True)
    world = session.join(Args(name=""), __file__, here)
    assert world.process is here
    assert here.world is world
    assert (here.name, here.starts) == (began, 1)
    process_group.finish(here)
    assert here.world is here.watch is None
    other = session.join(Args(name="mine"), __file__, Process())
    assert other.process.name == "mine"
    process_group.finish(other.process)


def test_process_keeps_its_name() -> None:
    in_one_process(join_twice)


# --- how it begins ---

PARTS = {
    "claim": (run_dir, "claim"),
    "Stop": (stop, "Stop"),
    "Watch": (watch.Watch, "begin"),
    "FiniteGuard": (guard, "FiniteGuard"),
    "Saver": (session.saver, "Saver"),
    "Run": (log, "Run"),
}


def note_order(folder: str) -> None:
    made: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return real(*args, **kwargs)

        return make

    for name, (owner, attribute) in PARTS.items():
        setattr(owner, attribute, noted(name, getattr(owner, attribute)))
    run, *_ = begin(folder)
    assert made == list(PARTS), made
    run.finish()


def test_parts_are_made_in_their_order(tmp_path: Path) -> None:
    """The folder is claimed before anything is written, and the log speaks when nothing can be refused any more."""
    in_one_process(note_order, str(tmp_path / "run"))


def refuse(folder: str) -> None:
    with pytest.raises(UserError, match="only 1 of the 2 samples"):
        begin_with_one_sample(folder)
    assert not Path(folder).exists(), "what is too small is refused before the folder is claimed"


def begin_with_one_sample(folder: str) -> None:
    real = sampler.Division
    sampler.Division = lambda *_: real(1, 1, 1)  # type: ignore[assignment,misc]
    try:
        begin(folder)
    finally:
        sampler.Division = real  # type: ignore[misc]
        torch.distributed.destroy_process_group()


def test_refusal_leaves_no_run_behind(tmp_path: Path) -> None:
    in_one_process(refuse, str(tmp_path / "run"))


# --- when each thing is due ---


def every(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


DUE: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "once an epoch, and at the end": (
        {},
        {"steps": every(1, 16), "logs": [5, 10, 15, 16], "evaluates": [8, 16], "saves": [8, 16]},
    ),
    "every few steps": (
        {"eval_every": 6, "save_every": 7, "max_steps": 13},
        {"steps": every(1, 13), "logs": [5, 10, 13], "evaluates": [6, 12, 13], "saves": [7, 13]},
    ),
    "until --stop-after": (
        {"stop_after": 11},
        {"steps": every(1, 11), "logs": [5, 10, 11], "evaluates": [8], "saves": [8, 11]},
    ),
    "--stop-after beyond the end": (
        {"stop_after": 99, "max_steps": 6},
        {"steps": every(1, 6), "logs": [5, 6], "evaluates": [6], "saves": [6]},
    ),
    "from where it was": (
        {"first_step": 9},
        {"steps": every(10, 16), "logs": [10, 15, 16], "evaluates": [16], "saves": [16]},
    ),
    "nothing is left": ({"first_step": 16}, {"steps": [], "logs": [], "evaluates": [], "saves": []}),
    "no set of samples, as in PPO: no epochs, so at the end": (
        {"num_samples": 0, "max_steps": 12},
        {"steps": every(1, 12), "logs": [5, 10, 12], "evaluates": [12], "saves": [12]},
    ),
}


def go_through(folder: str, how: dict[str, Any], wanted: dict[str, list[int]]) -> None:
    checked: list[int] = []
    for look in ("judge", "compare"):  # of a save, and beside it
        setattr(state_check.StateCheck, look, lambda self, what, step: checked.append(step))
    events = train(*begin(folder, **how))
    assert events == wanted, events
    assert checked == sorted([*(step for step in wanted["steps"] if step % 4 == 0), *wanted["saves"]]), checked


@pytest.mark.parametrize("case", DUE)
def test_due(case: str, tmp_path: Path) -> None:
    """Each answer is the same however often it is asked for, and what is due is written."""
    how, wanted = DUE[case]
    result = in_one_process(go_through, str(tmp_path), how, wanted)
    saved = [int(path.name.removeprefix("step_")) for path in checkpoint.committed(tmp_path)]
    assert sorted(saved) == wanted["saves"]
    assert list(runner.records(tmp_path, "train/loss")) == wanted["logs"]
    assert not (tmp_path / log.STOPPED).exists(), result.outputs[0]


def never_check_replicas(folder: str, check_every: int) -> None:
    replicas.position_hash = None  # type: ignore[assignment]
    train(*begin(folder, check_every=check_every, max_steps=4))


def test_replicas_need_not_be_compared(tmp_path: Path) -> None:
    in_one_process(never_check_replicas, str(tmp_path), 0)
    result = runner.spawn(never_check_replicas, [(str(tmp_path / "mutant"), 4)])
    assert "'NoneType' object is not callable" in result.outputs[0], str(result)


# --- losses that jump ---


def see_losses(folder: str) -> None:
    """The loss of step 9 jumps; it is computed again from the checkpoint of step 5 on, and jumps again."""
    losses = (2, 1, 0.5, 0.3, 0.2, 0.01, 0.2, 0.3, 25, 0.4)
    here = Process()

    def log_all(first_step: int) -> None:
        how: dict[str, Any] = {"log_every": 1, "save_every": 5, "check_every": 0}
        run, *_ = begin(folder, here, first_step=first_step, on_bad_state="rewind", max_steps=10, **how)
        for step in run.steps(dp_rank=0):
            sums = {"loss": torch.tensor(8.0 * losses[step - 1]), "count": torch.tensor(8)}
            run.finite.skip_if_not_finite(torch.ones(()))
            run.log_train(step, sums, grad_norm=torch.ones(()), data_wait_s=0.0)
            run.save(step)
        run.finish()

    with pytest.raises(Rewind):
        log_all(0)
    process_group.finish(here, begins_again=True)
    log_all(5)


def test_losses_are_compared_with_those_before_a_rewind(tmp_path: Path) -> None:
    """A healthy step after the checkpoint is no spike, and a lasting one is said to be one."""
    said = in_one_process(see_losses, str(tmp_path)).outputs[0]
    warned = "warning: the loss was over 10 times the largest before in step 9; going back to the newest checkpoint"
    assert said.count(warned) == said.count("going back") == 1, said
    assert said.count("in step 9 again: this is no passing fault") == said.count("again: this is") == 1, said
    assert "without the fault" not in said
    assert {*runner.records(tmp_path, "train/loss")} == {*every(1, 10)}


# --- how it ends ---


def stop_on_request(folder: str) -> None:
    def after(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            runner.wait_for(lambda: made[0].reason)

    made: list[stop.Stop] = []
    begins = stop.Stop.__init__

    def keep(self: stop.Stop, *args: Any) -> None:
        begins(self, *args)
        made.append(self)

    stop.Stop.__init__ = keep  # type: ignore[method-assign]
    events = train(*begin(folder, log_every=100, max_steps=60), after=after)
    last = events["steps"][-1]
    assert 3 < last < 60, last
    assert events == {
        "steps": every(1, last),
        "logs": [last],  # not one step is lost to the log,
        "evaluates": [step for step in every(1, last) if step % 8 == 0],  # nobody waits for an evaluation more,
        "saves": [step for step in every(1, last) if step % 8 == 0 or step == last],  # and what was done is kept
    }, events


def test_request_ends_the_steps_saved(tmp_path: Path) -> None:
    in_one_process(stop_on_request, str(tmp_path))
    stopped = json.loads((tmp_path / log.STOPPED).read_text())
    assert stopped["reason"] == "SIGTERM on rank 0"
    newest = checkpoint.committed(tmp_path)[0]
    assert newest.name == f"step_{stopped['step']:08d}"


def ignore_requests(folder: str) -> None:
    """A mutant: nobody asks whether to stop."""
    stop.Stop.after = lambda self, step: False  # type: ignore[method-assign]
    stop_on_request(folder)


def test_mutant_that_does_not_stop(tmp_path: Path) -> None:
    result = runner.spawn(ignore_requests, [(str(tmp_path),)])
    assert result.outputs[0].endswith("AssertionError: 60\n"), str(result)


# --- what a step leaves ---


def numbers(folder: str, logged: bool) -> None:
    """Step 4 meets an infinity; the checkpoint after it is as if the step had not been."""
    run, model, optimizer = begin(folder, max_steps=4, save_every=1)
    train(run, model, optimizer, bad=(4,), logged=logged)
    saved = [{name: tensor.clone() for name, tensor in keymap.tensors(model, optimizer).items()} for _ in range(2)]
    world = process_group.start()
    for step, tensors in zip((3, 4), saved, strict=True):
        checkpoint.load(checkpoint.folder(Path(folder), step), tensors)
    for name, tensor in saved[1].items():
        assert tensor.isfinite().all(), f"{name} is spoilt"
        assert torch.equal(tensor, saved[0][name]), name
    process_group.finish(world.process)


@pytest.mark.parametrize("logged", [True, False])
def test_skipped_step_is_undone_before_it_is_saved(logged: bool, tmp_path: Path) -> None:
    """Whether the loop logs first, as recipes do, or an adopter has deleted that."""
    in_one_process(numbers, str(tmp_path), logged)


def restore_nothing(folder: str) -> None:
    guard.FiniteGuard.restore_if_skipped = lambda self, step: None  # type: ignore[method-assign]
    numbers(folder, True)


def test_mutant_that_restores_nothing(tmp_path: Path) -> None:
    result = runner.spawn(restore_nothing, [(str(tmp_path),)])
    assert "not finite at step 4: 1.running_mean on rank 0" in result.outputs[0], str(result)


def draw(folder: str) -> None:
    """Random numbers of a step depend on (seed, step, dp rank) alone, not on what was drawn before."""
    drawn = {}
    for first_step in (0, 2):
        run, *_ = begin(f"{folder}/{first_step}", max_steps=4, first_step=first_step)
        for step in run.steps(dp_rank=5):
            drawn[first_step, step] = torch.rand(2).tolist()
            torch.rand(first_step + 1)
            run.finite.skip_if_not_finite(torch.ones(()))
            run.log_train(step, {"count": torch.ones(())}, grad_norm=torch.ones(()), data_wait_s=0.0)
        run.finish()
    for step in (3, 4):
        assert drawn[0, step] == drawn[2, step]
        seed.everything(3, seed.STEP, step, 5)
        assert drawn[0, step] == torch.rand(2).tolist()
    assert len({tuple(values) for values in drawn.values()}) == 4


def test_each_step_is_seeded_anew(tmp_path: Path) -> None:
    in_one_process(draw, str(tmp_path))


# --- the clock ---


def note_pauses(folder: str) -> None:
    paused: dict[int, list[bool]] = {step: [] for step in every(1, 8)}
    pause = log.Run.pause

    def note(self: log.Run, due: bool) -> None:
        paused[step].append(due)
        pause(self, due)

    log.Run.pause = note  # type: ignore[method-assign]
    run, *_ = begin(folder, max_steps=8, log_every=5, check_every=4, eval_every=3, save_every=6)
    for step in run.steps(dp_rank=0):
        run.finite.skip_if_not_finite(torch.ones(()))
        run.log_train(step, {"count": torch.ones(())}, grad_norm=torch.ones(()), data_wait_s=0.0)
        run.evaluates(step)
    assert [step for step, due in paused.items() if due[-1]] == [3, 4, 6, 8], paused
    run.finish()


def test_a_pause_knows_what_comes_next(tmp_path: Path) -> None:
    """An evaluation every 3 steps, a comparison every 4, a save every 6; the queue of a GPU is waited for then only."""
    in_one_process(note_pauses, str(tmp_path))


def deal_over_gpus(folder: str, number: int) -> None:
    """As a model under nn.DataParallel."""
    nn.Sequential.device_ids = (*range(number),)  # type: ignore[attr-defined]
    if number > 4:
        here = Process()
        with pytest.raises(UserError, match=r"--global-batch-size 8 gives one of 8 GPUs only 1 of the 2 samples"):
            begin(folder, here)
        process_group.finish(here)
    else:
        run, *_ = begin(folder)
        assert len(run._log._devices) == number
        run.finish()


@pytest.mark.parametrize("number", [4, 8])
def test_each_gpu_of_a_process_gets_enough_samples(number: int, tmp_path: Path) -> None:
    in_one_process(deal_over_gpus, str(tmp_path), number)


def tell_the_time(folder: str, mutant: bool) -> None:
    """A step takes 1 s; what comes after its log, such as an evaluation and a save, takes 100 s."""
    now = [1000.0]
    log.time = SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[assignment]
    if mutant:
        log.Run.unpause = lambda self: None  # type: ignore[method-assign]
    run, *_ = begin(folder, max_steps=4, log_every=2, check_every=0)
    steps: Iterator[int] = run.steps(dp_rank=0)
    for step in steps:
        now[0] += 1
        run.finite.skip_if_not_finite(torch.ones(()))
        run.log_train(step, {"loss": torch.ones(()), "count": torch.ones(())}, grad_norm=torch.ones(()), data_wait_s=0)
        now[0] += 100
        if run.evaluates(step):
            run.log_validation(step, {"loss": torch.tensor(8.0), "count": torch.tensor(8)})
        run.save(step)
    run.finish()


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant that never goes on"])
def test_paused_time_is_not_in_the_rate(mutant: bool, tmp_path: Path) -> None:
    result = in_one_process(tell_the_time, str(tmp_path), mutant)
    rates = runner.records(tmp_path, "perf/samples_per_s")
    if mutant:
        assert rates[4] < 1
    else:
        assert rates == {2: 8.0, 4: 8.0}, "8 samples a step"
        assert "in 404.0 s, of which 4.0 s training at 8 samples/s" in result.outputs[0], result.outputs[0]
