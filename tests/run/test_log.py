"""Rank 0 speaks and records, in float64; another rank leaves nothing but its log."""

import dataclasses
import io
import json
import math
import os
import re
import sys
import types
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import ranks
from common.run import log, process, process_group, run_dir
from common.train import flops, metrics, sampler
from PIL import Image

from tests.harness import runner


@dataclasses.dataclass(frozen=True)
class Args:
    """Flags."""

    lr: float = 0.1  # rate
    max_steps: int = 20  # length of the training


@pytest.fixture(autouse=True)
def one_teraflop(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reaches as much at best, in a group of one."""
    monkeypatch.setattr(flops, "peak_flops", lambda *_: (1e12, "as this test says"))


def make_world(rank: int, size: int) -> process.World:
    return process.World(
        rank, size, size, "host", torch.device("cpu"), "gloo", dist.HashStore(), process.Process(recipe=__file__)
    )


def make_run(
    path: Path,
    first_step: int = 0,
    max_steps: int = 20,
    lr: float = 0.1,
    rank: int = 0,
    sample: flops.Sample = flops.Sample(1e9, {"tokens": 3}),  # noqa: B008 (it is frozen)
    num_devices: int = 1,
    args: Args | None = None,
) -> log.Run:
    path.mkdir(exist_ok=True)
    division = sampler.Division(8, 8, 4)
    plan = sampler.Plan(99, 0, first_step, max_steps, first_step * 8, max_steps * 8, division)
    devices = [torch.device("cpu")] * num_devices
    return log.Run(path, args or Args(lr), make_world(rank, 4), plan, torch.float32, sample, devices)


def means(loss: float) -> dict[str, float]:
    return {"loss": loss, "top1": 1 - loss}


def record(run: log.Run, step: int, loss: float, **more: float) -> None:
    """Two steps of eight samples each, of these means, as far as this rank has them."""
    for share in (0.25, 0.75):
        sums = {key: torch.tensor(16 * share * value, dtype=torch.float64) for key, value in means(loss).items()}
        run.add({**sums, "count": torch.tensor(8)})
    run.log_train(step, **({"data_wait_s": 0.0} | more))


PERF = ("samples_per_s", "tokens_per_s", "mfu", "memory_gib", "data_wait_s")


def test_records_are_exact_under_the_tags_of_the_design(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record(run, 10, 1 / 3, data_wait_s=0.25, lr=0.1 + 0.2, grad_norm=1e-30)
    run.log_validation(10, means(2 / 3))
    run.finish()
    train, perf, validation = run_dir.records(tmp_path)
    assert train == {
        "step": 10,
        "train/loss": 1 / 3,
        "train/top1": 1 - 1 / 3,
        "train/lr": 0.1 + 0.2,
        "train/grad_norm": 1e-30,
    }
    assert perf.keys() == {"step"} | {f"perf/{name}" for name in PERF}
    assert validation == {"step": 10, "val/loss": 2 / 3, "val/top1": 1 - 2 / 3}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path)).Reload()
    assert set(board.Tags()["scalars"]) == (train | perf | validation).keys() - {"step"}
    assert [(event.step, event.value) for event in board.Scalars("val/loss")] == [(10, pytest.approx(2 / 3))]


def test_parts_of_a_value_stand_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses of a mixture's sources are recorded in the group of the loss, and shown; one of many is recorded."""
    run = make_run(tmp_path)
    run.add({key: torch.tensor(value) for key, value in {"loss": 9.0, "count": 3.0}.items()})
    run.add({key: torch.tensor(value) for key, value in {"loss/web": 4.0, "count/web": 2.0, "loss/code": 5.0}.items()})
    run.add({key: torch.tensor(value) for key, value in {"count/code": 1.0, "load/blocks.0/1": 6.0}.items()})
    run.log_train(10, 0.0)
    run.log_validation(10, {"loss": 2.0, "loss/web": 1.0, "rl/return": 4.0})
    run.close()
    train, _, validation = run_dir.records(tmp_path)
    assert train == {"step": 10, "train/loss": 3, "train/loss/web": 2, "train/loss/code": 5, "load/blocks.0/1": 2}
    assert validation == {"step": 10, "val/loss": 2, "val/loss/web": 1, "rl/return": 4}
    shown = capsys.readouterr().out
    assert "loss 3  loss/web 2  loss/code 5  " in shown
    assert "val/loss 2  val/loss/web 1  rl/return 4" in shown
    assert "load" not in shown


def test_values_with_a_row_and_a_column_are_a_heat_map(tmp_path: Path) -> None:
    """One picture in TensorBoard for each record, rows and columns in the order of the values; black is 0."""
    run = make_run(tmp_path)
    loads = [[0.0, 1.0, 3.0], [2.0, 2.0, 0.25]]
    for step in (10, 20):
        named = {f"load/{i}/{j}": torch.tensor(8 * one) for i, row in enumerate(loads) for j, one in enumerate(row)}
        run.add({"loss": torch.tensor(8.0), "loss/web": torch.tensor(8.0), "count/web": torch.tensor(8), **named})
        run.add({"count": torch.tensor(8)})
        run.log_train(step, data_wait_s=0.0)
    run.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert board.Tags()["images"] == ["load"], "a source's loss is a part of the loss"
    assert [event.step for event in board.Images("load")] == [10, 20]
    picture = np.asarray(Image.open(io.BytesIO(board.Images("load")[-1].encoded_image_string)).convert("L"))
    assert picture.shape == (32, 48)
    wanted = [[int(one * 255 / 3) for one in row] for row in loads]
    assert [[picture[16 * i : 16 * i + 16, 16 * j : 16 * j + 16].tolist() for j in range(3)] for i in range(2)] == [
        [[[one] * 16] * 16 for one in row] for row in wanted
    ]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    """JSON has no word for them, and other programs refuse Python's; here they are read as NaN."""

    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is not JSON")

    run = make_run(tmp_path)
    record(run, 10, float("nan"), grad_norm=float("inf"))
    run.log_validation(10, means(float("nan")))
    run.log_validation(15, means(0.5))
    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["train/loss"] is lines[0]["train/grad_norm"] is None
    assert math.isnan(run_dir.records(tmp_path)[0]["train/loss"])
    assert math.isnan(runner.records(tmp_path, "train/grad_norm")[10])
    assert metrics.best(run_dir.records(tmp_path))["val/loss"] == (0.5, 15)
    run.finish()
    run_dir.Records(tmp_path, 10, 0).open().close()
    again = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert again == [line for line in lines if line["step"] <= 10]


def test_rate_counts_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(log, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    run = make_run(tmp_path)
    run.unpause()
    now[0] += 2
    run.pause(False)
    now[0] += 5
    run.unpause()
    run.pause(False)
    now[0] += 1
    run.unpause()
    now[0] += 2
    record(run, 10, 0.5, data_wait_s=0.5)
    run.pause(False)
    now[0] += 3
    run.log_validation(12, means(0.5))
    run.unpause()
    now[0] += 1
    record(run, 20, 0.5, data_wait_s=0.75)
    run.pause(False)
    now[0] += 9
    run.finish()
    first, second = (record for record in run_dir.records(tmp_path) if "perf/mfu" in record)
    assert first["perf/samples_per_s"] == 20, "ten steps of 8 in 4 s"
    assert first["perf/tokens_per_s"] == 60, "3 in a sample"
    assert first["perf/data_wait_s"] == 0.5
    # 20 samples a second over 4 ranks, each of which could do 1,000.
    assert first["perf/mfu"] == pytest.approx(0.005, rel=1e-12)
    assert second["perf/samples_per_s"] == 80
    assert second["perf/data_wait_s"] == 0.25, "since the last line"
    assert "23.0 s, of which 5.0 s training at 32 samples/s" in capsys.readouterr().out, "160 samples in all"


@pytest.mark.parametrize("due", [True, False])
def test_steps_that_a_gpu_has_not_done_are_no_pause(due: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes next would wait for them. A mock: the queue of two GPUs, which takes 4 s."""
    now = [100.0]
    waited: list[object] = []

    def synchronize(device: torch.device) -> None:
        waited.append(device.index)
        now[0] += 2

    monkeypatch.setattr(log, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    run = make_run(tmp_path)
    run._devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(log, "memory_gib", lambda device: 2.0**device.index)
    run.unpause()
    now[0] += 4  # to queue them
    run.pause(due)
    assert waited == [0, 1] * due
    now[0] += 100 if due else 0  # the evaluation
    run.unpause()
    record(run, 10, 0.5)
    run.finish()
    (perf,) = (line for line in run_dir.records(tmp_path) if "perf/mfu" in line)
    assert perf["perf/samples_per_s"] == (10 if due else 20), "ten steps of 8"
    assert perf["perf/memory_gib"] == 3, "of both"


def test_mfu_is_of_all_devices_of_a_process(tmp_path: Path) -> None:
    for number in (1, 8):
        run = make_run(tmp_path / str(number), num_devices=number)
        record(run, 10, 0.5)
        run.finish()
        (perf,) = (line for line in run_dir.records(tmp_path / str(number)) if "perf/mfu" in line)
        wanted = perf["perf/samples_per_s"] * 1e9 / (1e12 * 4 * number)
        assert perf["perf/mfu"] == pytest.approx(wanted, rel=1e-9)
    config = json.loads((tmp_path / "8" / "config.json").read_text())
    assert config["mfu_is_of"] == "1 TFLOP/s a device, as this test says"


def test_rates_are_those_that_the_samples_have(tmp_path: Path) -> None:
    """Images have no tokens; a model that was not counted has no MFU."""
    for i, (sample, shown) in enumerate(
        [
            (flops.Sample(), {"samples_per_s"}),
            (flops.Sample(1e9), {"samples_per_s", "mfu"}),
            (flops.Sample(units={"tokens": 128, "frames": 2}), {"samples_per_s", "tokens_per_s", "frames_per_s"}),
        ]
    ):
        run = make_run(tmp_path / str(i), sample=sample)
        record(run, 10, 0.5)
        run.finish()
        (perf,) = (line for line in run_dir.records(tmp_path / str(i)) if "perf/samples_per_s" in line)
        assert perf.keys() == {"step"} | {f"perf/{name}" for name in shown | {"memory_gib", "data_wait_s"}}
        for name, number in sample.units.items():
            assert perf[f"perf/{name}_per_s"] == pytest.approx(number * perf["perf/samples_per_s"])


def test_continues_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed after step 16, resumed from step 10: each step is recorded once, in the later run's numbers."""
    run = make_run(tmp_path)
    for step in (5, 10, 15):
        record(run, step, step / 100)
    run.log_validation(16, means(0.01))
    run.finish()
    assert "continuing" not in capsys.readouterr().out
    run = make_run(tmp_path, first_step=10, lr=0.2)
    assert "changed: --lr is 0.2, was 0.1" in capsys.readouterr().out
    for step in (15, 20):
        record(run, step, step / 1000)
    run.finish()
    losses = {5: 0.05, 10: 0.1, 15: 0.015, 20: 0.02}
    assert runner.records(tmp_path, "train/loss") == losses
    assert runner.records(tmp_path, "val/loss") == {}
    assert list(runner.records(tmp_path, "perf/mfu")) == [5, 10, 15, 20]
    assert (tmp_path / "train.py").read_text() == Path(__file__).read_text()


def test_start_that_records_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumed at its end, from before what was recorded: that is no result of this run."""
    run = make_run(tmp_path)
    run.log_validation(10, means(0.5))
    run.log_validation(15, means(0.25))
    run.finish()
    capsys.readouterr()
    make_run(tmp_path, first_step=10).finish()
    assert runner.records(tmp_path, "val/loss") == {10: 0.5}
    assert "best     val/loss 0.5000 at step 10" in capsys.readouterr().out
    make_run(tmp_path / "new").finish()
    assert (tmp_path / "new" / "metrics.jsonl").read_text() == ""


def test_finish_says_the_best_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    path = tmp_path / "my run"
    run = make_run(path)
    for step, loss in ((5, 0.75), (10, 0.25), (12, 0.5)):
        run.log_validation(step, means(loss))
    run.finish()
    said = capsys.readouterr().out
    assert re.search(r"^step 10/20  val/loss 0\.25  val/top1 0\.75$", said, re.MULTILINE)
    assert re.search(r"^best +val/loss 0\.2500 at step 10$", said, re.MULTILINE)
    assert re.search(r"^best +val/top1 0\.7500 at step 10$", said, re.MULTILINE)
    assert re.search(r"^reached +step 12 of 20 in ", said, re.MULTILINE)
    assert said.endswith("\nresume   torchrun --nproc-per-node=4 train.py --lr 1 --name 'my run'\n")
    run = make_run(path, first_step=12)
    record(run, 20, 0.5)
    run.log_validation(20, means(0.4))
    run.finish()
    said = capsys.readouterr().out
    assert re.search(r"^best +val/loss 0\.2500 at step 10$", said, re.MULTILINE), "of the whole run"
    assert re.search(r"^done +step 20 of 20 in ", said, re.MULTILINE)
    assert "--name 'my run'  (training is complete; raise --max-steps to train longer)\n" in said, "it is done"


def use_all(path: str) -> None:
    process_group.start()
    rank = ranks.rank()
    os.write(1, b"before\n")
    run = make_run(Path(path, str(rank)), rank=rank)
    sys.stdout.write("printed\n")
    os.write(2, b"from C\n")
    record(run, 5, 0.5, lr=0.1)
    run.log_validation(5, means(0.5))
    run.finish()
    ranks.print0("said")


def test_other_ranks_write_nothing_but_their_log(tmp_path: Path) -> None:
    result = runner.spawn(use_all, [(str(tmp_path),)] * 2)
    assert result.ok, str(result)
    assert result.outputs[1] == "before\n"
    path = tmp_path / "1"
    assert [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()] == ["logs/rank_00001.log"]
    header, *lines = (path / "logs" / "rank_00001.log").read_text().splitlines()
    assert re.match(r"--- \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d ", header)
    assert sorted(lines) == ["from C", "printed"]


def test_full_disk_ends_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What could not be recorded is told, and what comes once there is room is recorded."""
    run = make_run(tmp_path)
    record(run, 5, 0.5)
    records = run.records
    with records._lines as good, Path("/dev/full").open("a") as full:
        records._lines = full
        capsys.readouterr()
        record(run, 10, 0.25)
        warned = re.findall(r"^warning: .*$", capsys.readouterr().out, re.MULTILINE)
        assert warned == [f"warning: step 10 was not recorded in {tmp_path}: [Errno 28] No space left on device"] * 2
        records._lines = good
        record(run, 15, 0.125)
        assert runner.records(tmp_path, "train/loss") == {5: 0.5, 15: 0.125}
        records._lines = full
        record(run, 20, 0.1)
        run.finish()
    assert "done     step 20 of 20" in capsys.readouterr().out


def test_start_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of the start before is lost, and what can be opened later is."""
    run = make_run(tmp_path)
    for step in (5, 10, 15):
        record(run, step, 0.5)
    run.finish()
    before = (tmp_path / "config.json").read_bytes()
    (tmp_path / "config.tmp").mkdir()  # no file can be made there
    capsys.readouterr()
    run = make_run(tmp_path, first_step=10, lr=0.2)
    assert f"warning: not all files of this start were written to {tmp_path}: " in capsys.readouterr().out
    record(run, 20, 0.25)
    run.finish("SIGTERM on rank 0")
    assert (tmp_path / "config.json").read_bytes() == before
    assert runner.records(tmp_path, "train/loss") == {5: 0.5, 10: 0.5, 20: 0.25}
    assert json.loads((tmp_path / "stopped.json").read_text())["step"] == 20


def test_stop_without_room_for_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    record(run, 5, 0.5)
    (tmp_path / "stopped.tmp").mkdir()
    run.finish("SIGTERM on rank 0")
    assert "warning: without stopped.json, launch/slurm.sh does not requeue the job: " in capsys.readouterr().out
    assert not (tmp_path / "stopped.json").exists()


def test_early_stop_is_not_queued_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if a signal came in the same step."""
    run = make_run(tmp_path)
    record(run, 5, 0.5)
    run.finish("SIGTERM on rank 0", "no better val/loss")
    assert "stopped  checkpoint saved (no better val/loss)" in capsys.readouterr().out
    assert not (tmp_path / "stopped.json").exists()


def test_memory_is_in_gib() -> None:
    """A process that has loaded torch holds 0.1 GiB at least, and less than a large machine has."""
    assert 0.1 < log.memory_gib(torch.device("cpu")) < 100


@pytest.mark.parametrize(
    ("waits", "share"), [((8.0, 11.0), 0.3), ((8.0, 8.9), 0.09), ((8.0,), 0.0), ((), 0.0)], ids=str
)
def test_time_that_was_spent(
    waits: tuple[float, ...], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds of training before each line, of which some were spent waiting; the first line does not count."""
    now = [0.0]
    monkeypatch.setattr(log, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    run = make_run(tmp_path)
    for step, wait_s in enumerate(waits, start=1):
        now[0] += 10
        record(run, 10 * step, 0.5, data_wait_s=wait_s)
    assert run.spent() == log.Spent(10.0 * len(waits), 10.0 * len(waits), pytest.approx(share))
    run.finish()


@pytest.mark.parametrize("verdict", ["verdict  30% of the step waits for data", ""])
def test_verdict_is_a_line_of_the_end(verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    record(run, 20, 0.5)
    run.finish(verdict=verdict)
    printed = capsys.readouterr().out
    assert printed.count("\nverdict") == bool(verdict)
    assert re.search(rf"^done .*\n{verdict}\n?files ", printed, re.MULTILINE), printed
