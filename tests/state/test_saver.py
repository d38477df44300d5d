"""A checkpoint is whole or absent, whichever rank fails; written beside the training, it has the bits of before."""

import json
import os
import re
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import BadStateError, UserError, manifest, ranks
from common.run import process_group
from common.run.process import Process
from common.state import checkpoint, retention, saver, shards, start, state_check
from common.store import disk
from torch.distributed.checkpoint import staging
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.harness import runner
from tests.harness.states import RECIPE, check_equal, damage, find_step, loaded, make_saver, make_state, save, steps

pytestmark = pytest.mark.usefixtures("group")


def test_manifest_says_where_it_comes_from(tmp_path: Path) -> None:
    facts, fault = manifest.verify(save(tmp_path, 4))
    assert fault == ""
    assert facts.pop("files")
    assert facts == {
        "format": manifest.FORMAT,
        "recipe": "some_recipe",
        "mesh": {"dp": 1},
        "world": 1,
        "versions": ranks.versions(),
        "step": 4,
        "samples": 40,
        "seed": 3,
        "checked": ["finite", "replicas"],
    }


def save_own_and_common(run_dir: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {f"common.{i}": torch.full((3,), float(rank)) for i in range(8)}
    state[f"own.{rank}"] = torch.full((2,), 1.0 + rank)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "part"))
    for step, in_background in ((1, False), (2, True)):
        check = state_check.StateCheck(torch.nn.Module(), compare=True)
        found = start.Found(disk.Disk(Path(run_dir)), {}, None, {}, newest=0)
        saving = saver.Saver(found, mesh, check, Process(recipe=str(RECIPE)), 9, in_background)
        saving.save(step, state, samples=step, last=False)
        saving.drain()
    dist.destroy_process_group()


def test_common_names_come_from_rank_0_and_own_ones_from_each(tmp_path: Path) -> None:
    """BatchNorm's running statistics differ between ranks: a mixture would be nobody's."""
    result = runner.spawn(save_own_and_common, [(str(tmp_path),)] * 2)
    assert result.ok, str(result)
    assert steps(tmp_path) == [1, 2]
    like = {f"common.{i}": torch.zeros(3) for i in range(8)} | {f"own.{i}": torch.zeros(2) for i in range(2)}
    for step in (1, 2):
        facts, fault = manifest.verify(checkpoint.folder(tmp_path, step))
        assert not fault
        assert (facts["world"], facts["mesh"]) == (2, {"replica": 1, "part": 2})
        assert len(facts["files"]) == 2, "each rank wrote its own"
        found = loaded(checkpoint.folder(tmp_path, step), like)
        assert all(bool((found[f"common.{i}"] == 0).all()) for i in range(8))
        assert [found[f"own.{i}"].tolist() for i in range(2)] == [[1, 1], [2, 2]]


REPLICA = {f"optimizer.w{i}.exp_avg": torch.arange(1000.0 * (i + 1)) for i in range(4)}


def save_replicas(run_dir: str, compare: bool) -> None:
    dist.init_process_group("gloo")
    statistic = {"running_mean": torch.full((9,), float(dist.get_rank()))}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    check = state_check.StateCheck(torch.nn.Module(), compare=compare)
    found = start.Found(disk.Disk(Path(run_dir)), {}, None, {}, newest=0)
    saver.Saver(found, mesh, check, Process(recipe=str(RECIPE)), 9, False).save(1, REPLICA | statistic, 1, True)
    dist.destroy_process_group()


@pytest.mark.parametrize("compare", [True, False])
def test_ranks_share_the_writing_of_what_they_all_hold(compare: bool, tmp_path: Path) -> None:
    """And rank 0 writes what may differ, as BatchNorm's running statistics do, and all that is not compared."""
    result = runner.spawn(save_replicas, [(str(tmp_path), compare)] * 2)
    assert result.ok, str(result)
    folder = checkpoint.folder(tmp_path, 1)
    facts, fault = manifest.verify(folder)
    assert not fault
    sizes = [entry["bytes"] for _, entry in sorted(facts["files"].items())]
    assert (len(sizes) == 2 and min(sizes) > 0.4 * sum(sizes)) == compare
    zeros = {name: torch.zeros_like(tensor) for name, tensor in REPLICA.items()} | {"running_mean": torch.ones(9)}
    check_equal(loaded(folder, zeros), REPLICA | {"running_mean": torch.zeros(9)})


def save_own(word: str) -> None:
    """An adopter's tensors: equal ones, parts of one that is split, and names of a rank pass; others do not."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    split = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    mine = torch.full((3,), float(rank))
    state_check.check_own({"extra.same": torch.ones(3), "extra.split": split, f"extra.h.{rank}": mine})
    state_check.check_own({"extra.of_one": mine} if rank else {})
    with pytest.raises(UserError, match=word):
        state_check.check_own({"extra.same": torch.ones(3), "extra.h": mine})
    with pytest.raises(
        UserError, match=r"run\.save got 'average', which is no part of the model: call it 'extra\.average'"
    ):
        state_check.check_own({"average": mine})
    dist.destroy_process_group()


def test_own_state_that_differs_over_ranks_is_refused() -> None:
    """One rank's would be saved for all, and the resume would be another training."""
    word = r"run\.save got 'extra\.h' with other numbers on rank 1 than on rank 0.*f'extra\.h\.\{world\.rank\}'"
    result = runner.spawn(save_own, [(word,)] * 2)
    assert result.ok, str(result)


# --- what stays ---


def latest(run_dir: Path) -> str:
    return (run_dir / "checkpoints" / "latest").read_text()


def test_retention(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100):
        assert manifest.verify(save(tmp_path, step, keep=2))[1] == ""
        assert latest(tmp_path) == f"step_{step:08d}"
    assert steps(tmp_path) == [15, 100]
    save(tmp_path, 110, keep=1)
    assert steps(tmp_path) == [110]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    """Or the last one to fall back to is deleted for the sake of one that nobody can use."""
    for step in (10, 20, 30):
        save(tmp_path, step)
    damage(tmp_path, 30)
    save(tmp_path, 40, keep=2)
    assert steps(tmp_path) == [20, 30, 40]
    save(tmp_path, 50, keep=2)
    assert steps(tmp_path) == [40, 50]


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant that knows no stamps"])
def test_known_checkpoints_are_not_read_again(mutant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that this process has written or read counts as whole, until a program changes it."""
    save(tmp_path, 1)
    read: list[str] = []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path, *a: (read.append(path.parent.name[-1]), digest(path, *a))[1])
    if mutant:
        monkeypatch.setattr(manifest, "stamps", lambda _: [])
    saving = make_saver(tmp_path, keep=2)

    def write(step: int) -> list[int]:
        read.clear()
        saving.save(step, make_state(step), 10 * step, last=False)
        return steps(tmp_path)

    assert (write(2), read) == ([1, 2], ["1"]), "an earlier process has written it"
    assert (write(3), read) == ([2, 3], [])
    damage(tmp_path, 3)
    if mutant:
        assert (write(4), read) == ([3, 4], []), "2, the last whole one, is gone"
        return
    assert (write(4), read) == ([2, 3, 4], ["3"])
    rot(tmp_path, 4)
    assert (write(5), read) == ([4, 5], []), "nobody can see it without reading"
    shutil.rmtree(checkpoint.folder(tmp_path, 5))
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        find_step(tmp_path)


def rot(run_dir: Path, step: int) -> None:
    """Flip a bit as a bad disk does, which tells nobody the time."""
    files = [*checkpoint.folder(run_dir, step).glob("*.safetensors")]
    times = [(file.stat().st_atime_ns, file.stat().st_mtime_ns) for file in files]
    for file, ns in zip(files, times, strict=True):
        with file.open("r+b") as content:  # in place: a new file may have another inode
            content.seek(-3, os.SEEK_END)
            byte = content.read(1)
            content.seek(-3, os.SEEK_END)
            content.write(bytes([byte[0] ^ 4]))
        os.utime(file, ns=ns)


def test_what_was_just_committed_stays(tmp_path: Path) -> None:
    """A damaged newer one, left behind by a resume from an older one, does not count as kept."""
    for step in (10, 20):
        save(tmp_path, step)
    shutil.rmtree(checkpoint.folder(tmp_path, 20))
    checkpoint.folder(tmp_path, 20).mkdir()
    assert find_step(tmp_path) == 10
    save(tmp_path, 15, keep=1)
    assert find_step(tmp_path) == 15
    assert latest(tmp_path) == "step_00000015"


def test_same_step_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, 5)
    make_saver(tmp_path, keep=1).save(5, make_state(9), 50, last=True)
    check_equal(loaded(checkpoint.folder(tmp_path, 5), make_state(9)), make_state(9))
    assert steps(tmp_path) == [5]


def test_state_that_must_not_be_kept_is_not_committed(tmp_path: Path) -> None:
    save(tmp_path, 5)
    saving = make_saver(tmp_path)
    state = make_state(6) | {"optimizer.conv.weight.exp_avg": torch.full((6, 3, 3, 3), torch.nan)}
    with pytest.raises(BadStateError, match=r"not finite at step 6: optimizer\.conv\.weight\.exp_avg on rank 0"):
        saving.save(6, state, 60, last=True)
    assert steps(tmp_path) == [5]


@pytest.mark.parametrize("moment", ["save", "seal", "rename"])
def test_death_while_saving_leaves_the_older_ones(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    where = {"save": dcp, "seal": manifest, "rename": Path}[moment]
    with monkeypatch.context() as patch:
        patch.setattr(where, moment, die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 6, keep=1)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()} - {"latest", "step_00000005"}
    assert len(left) == 1
    assert re.fullmatch(r"step_00000006\.tmp-\w+", left.pop())
    assert find_step(tmp_path) == 5
    assert latest(tmp_path) == "step_00000005"
    save(tmp_path, 6, keep=1)
    assert steps(tmp_path) == [6], "what the death left is gone"


# --- beside the training ---


def committed(run_dir: Path) -> list[int]:
    """Steps that can be continued from, while others may be under way."""
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoint.committed(run_dir))


class Gate:
    """Holds back whatever calls it until it is opened, and counts how many are inside at once."""

    def __init__(self, then: Callable[..., Any]) -> None:
        self.then = then
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.inside = self.most = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        assert self.opened.wait(20)
        try:
            return self.then(*args, **kwargs)
        finally:
            self.inside -= 1


@pytest.mark.parametrize("copied", [True, False], ids=["", "mutant that copies nothing"])
def test_background_save_has_the_bits_of_when_it_was_called(
    copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(dcp.save)
    monkeypatch.setattr(dcp, "save", gate)
    saving = make_saver(tmp_path, in_background=True)
    if not copied:
        monkeypatch.setattr(staging.DefaultStager, "stage", lambda _, tensors: tensors)
    for step in (4, 5):  # a second time, for what a first one leaves in the stager
        gate.opened.clear()
        gate.entered.clear()
        state = make_state(step)
        saving.save(step, state, 10 * step, last=False)
        assert gate.entered.wait(20)
        for tensor in state.values():
            tensor.zero_()  # as the optimizer's next step does
        assert step not in committed(tmp_path), "it is still being written"
        gate.opened.set()
        saving.drain()
        found = loaded(checkpoint.folder(tmp_path, step), make_state(step))
        if copied:
            check_equal(found, make_state(step))
        else:
            with pytest.raises(AssertionError, match=r"conv\.weight"):
                check_equal(found, make_state(step))


def test_one_save_waits_for_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(manifest.write)
    monkeypatch.setattr(manifest, "write", gate)
    saving = make_saver(tmp_path, in_background=True)
    saving.save(1, make_state(1), 10, last=False)
    assert gate.entered.wait(20)
    assert committed(tmp_path) == []
    threading.Timer(0.2, gate.opened.set).start()
    saving.save(2, make_state(2), 20, last=False)
    assert committed(tmp_path)[:1] == [1], "the first one was waited for"
    saving.save(3, make_state(3), 30, last=True)
    assert steps(tmp_path) == [1, 2, 3], "the last one is waited for"
    assert gate.most == 1


# --- what fails ---


def test_failure_beside_the_training_is_told_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    for first, in_background in ((10, True), (20, False)):
        saving = make_saver(tmp_path, in_background=in_background)
        saving.save(first, make_state(1), 10, last=False)
        saving.drain()
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "seal", fail)
            saving.save(first + 1, make_state(2), 20, last=False)
            saving.drain()
        said = capsys.readouterr().out
        assert re.fullmatch(
            rf"warning: no checkpoint of step {first + 1}: rank 0 on \S+: OSError: \[Errno 5\] Input/output error "
            r"\([\d,.]+ MB and [\d,]+ files are free in \S+\); training continues\n",
            said,
        ), said
        saving.drain()
        assert capsys.readouterr().out == "", "told once"
        assert first + 1 not in steps(tmp_path), "nor is there anything half written"
        assert latest(tmp_path) == f"step_{first:08d}"
        saving.save(first + 2, make_state(3), 30, last=True)
        assert committed(tmp_path)[-1] == first + 2
        assert capsys.readouterr().out == ""


def test_disk_without_room_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weight": torch.zeros(500_000)}
    wanted = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(dcp, "save", lambda *_, **__: pytest.fail("it was written to"))
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: wanted._replace(free=1_999_999))
    with pytest.raises(saver.SaveError, match=r"it needs 2\.0 MB, the disk has 2\.0 MB free") as refusal:
        make_saver(tmp_path).save(7, state, 70, last=True)
    assert str(refusal.value).startswith("the last checkpoint was not saved: no checkpoint of step 7: ")
    assert not list((tmp_path / "checkpoints").iterdir())
    monkeypatch.undo()
    make_saver(tmp_path).save(7, state, 70, last=True)
    assert steps(tmp_path) == [7]


@pytest.mark.parametrize("in_background", [False, True])
def test_best_checkpoint_outlives_newer_ones(
    in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = make_saver(tmp_path, keep=1, in_background=in_background)
    pointer = tmp_path / "checkpoints" / retention.BEST

    def write(step: int, best: int) -> list[int]:
        saving.save(step, make_state(step), 10 * step, last=False, best=best)
        saving.drain()
        return steps(tmp_path)

    assert write(1, -1) == [1]
    assert not pointer.exists()
    assert write(2, 2) == [2]
    assert write(3, 2) == [2, 3]
    assert write(4, 2) == [2, 4]
    assert pointer.read_text() == "step_00000002"
    with monkeypatch.context() as broken:
        broken.setattr(dcp, "save", fail)
        assert write(5, 5) == [2, 4]
    assert write(6, 5) == [2, 6], "the save of a better one has failed: the one before is still the best"
    assert write(7, 7) == [7]
    assert pointer.read_text() == "step_00000007"


@pytest.mark.parametrize("in_background", [False, True])
def test_first_checkpoint_that_fails_ends_the_run(
    in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perhaps none can ever be written. Once there is one, a failure is a warning."""
    state = {"weight": torch.zeros(3)}
    saving = make_saver(tmp_path, in_background=in_background, has_one=False)
    with monkeypatch.context() as broken:
        broken.setattr(dcp, "save", fail)
        saving.save(7, state, 70, last=False) if in_background else None
        with pytest.raises(saver.SaveError, match="the first checkpoint was not saved: no checkpoint of step 7: "):
            saving.drain() if in_background else saving.save(7, state, 70, last=False)
    saving = make_saver(tmp_path, in_background=in_background, has_one=False)
    saving.save(8, state, 80, last=False)
    saving.drain()
    monkeypatch.setattr(dcp, "save", fail)
    saving.save(9, state, 90, last=False)
    saving.drain()
    assert "warning: no checkpoint of step 9" in capsys.readouterr().out
    assert steps(tmp_path) == [8]


def fail(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def break_one_rank(run_dir: Path, what: str, broken_rank: int, patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() != broken_rank:
        return
    if what == "limit":  # the real thing: the kernel refuses to write on
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        return
    owner, name = {
        "make": (Path, "mkdir"),
        "write": (shards.ShardWriter, "write_data"),
        "seal": (manifest, "seal"),
        "commit": (manifest, "write"),
        "rename": (Path, "rename"),
    }[what]
    patch.setattr(owner, name, fail)


CASES = [("make", 0), ("write", 0), ("write", 1), ("limit", 1), ("seal", 0), ("seal", 1), ("commit", 0), ("rename", 0)]


def fail_in_turn(run_dir: str, told: str) -> None:
    """Each way to fail, beside the training and in the last save, after a good checkpoint."""
    dist.init_process_group("gloo")
    run, rank = Path(run_dir), dist.get_rank()
    state = {"common": torch.ones(3), f"own.{rank}": torch.arange(10_000.0)}
    make_saver(run).save(1, state, 10, last=True)
    lines = []
    for what, broken_rank in CASES:
        for last in (False, True):
            saving = make_saver(run, in_background=not last)
            with pytest.MonkeyPatch.context() as patch:
                break_one_rank(run, what, broken_rank, patch)
                failure = ""
                try:
                    saving.save(2, state, 20, last)
                    assert saving._pending
                    saving._pending.join()
                    failure = str(saving._failure)
                    saving.drain()
                except saver.SaveError as error:
                    failure = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            lines.append(re.sub(r" \([^()]*\)$", "", failure))
            dist.barrier()
            if rank == 0:
                assert steps(run) == [1], (what, last, os.listdir(run / "checkpoints"))
                assert manifest.verify(checkpoint.folder(run, 1))[1] == "", (what, last)
    make_saver(run).save(2, state, 20, last=True)
    Path(told).write_text(json.dumps(lines))
    dist.destroy_process_group()


def test_rank_that_fails_fails_all_and_leaves_the_older_ones(tmp_path: Path) -> None:
    told = [tmp_path / f"told{rank}" for rank in range(2)]
    result = runner.spawn(fail_in_turn, [(str(tmp_path / "run"), str(file)) for file in told])
    assert result.ok, str(result)
    of_rank_0, of_rank_1 = (json.loads(file.read_text()) for file in told)
    assert of_rank_0 == of_rank_1, "all ranks know the same"
    for (what, broken_rank), *pair in zip(CASES, of_rank_0[::2], of_rank_0[1::2], strict=True):
        for text, head in zip(pair, ("no checkpoint of step 2: ", "the last checkpoint was not saved: "), strict=True):
            assert text.startswith(head), (what, text)
            assert ("File too large" if what == "limit" else "No space left") in text, (what, text)
            if what not in ("write", "limit"):
                assert f"rank {broken_rank} on " in text, (what, text)
    assert result.outputs[0].count("warning: no checkpoint of step 2: ") == len(CASES)
    assert steps(tmp_path / "run") == [1, 2]


def run_out_of_memory(run_dir: str, told: str) -> None:
    process_group.TIMEOUT_S = 3
    dist.init_process_group("gloo")

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    saving, state = make_saver(Path(run_dir)), {f"weight{dist.get_rank()}": torch.ones(3)}  # each writes its own
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(torch.Tensor, "contiguous", fail)
        with pytest.raises(saver.SaveError) as refusal:
            saving.save(1, state, 10, last=True)
    Path(told).write_text(str(refusal.value))


def test_rank_without_memory_fails_all_at_once(tmp_path: Path) -> None:
    """Before torch's part of the save, where the others would wait for it until the group's time is over."""
    told = [tmp_path / f"told{rank}" for rank in range(2)]
    result = runner.spawn(run_out_of_memory, [(str(tmp_path / "run"), str(file)) for file in told])
    assert result.ok, str(result)
    for file in told:
        wanted = r"rank 1 on \S+: MemoryError: rank 1 is out of memory\. .* \([\d,.]+ MB"
        assert re.search(wanted, file.read_text()), file.read_text()


def test_failure_without_a_word_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(dcp, "save", fail)
    make_saver(tmp_path).save(1, make_state(1), 10, last=False)
    wanted = r"warning: no checkpoint of step 1: rank 0 on \S+: MemoryError: rank 0 is out of memory\. .* \("
    assert re.search(wanted, capsys.readouterr().out)


@pytest.mark.parametrize("what", ["latest", "old one", "list"])
def test_what_fails_after_the_commit_is_no_failure(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is there, whole: a disk that is full to the last byte, or a folder that cannot be deleted."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    def fail_to_point(partial: Path, target: Path) -> Path:
        return rename(partial, target) if target.name != "latest" else fail()

    rename: Any = Path.replace
    save(tmp_path, 5)
    where = {"latest": (Path, "replace"), "old one": (disk.shutil, "rmtree"), "list": (saver.checkpoint, "committed")}
    with monkeypatch.context() as patch:
        patch.setattr(*where[what], fail_to_point if what == "latest" else fail)
        save(tmp_path, 6, keep=1)
    assert 6 in committed(tmp_path)


def test_writing_beside_the_training_stays_on_this_ranks_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, and each rank that asks anything of it takes memory there. A mock: no GPU is here."""
    calls: list[tuple[str, str]] = []

    def note(call: str) -> None:
        calls.append((threading.current_thread().name, call))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    saving = make_saver(tmp_path, in_background=True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: note(f"GPU {device}"))
    real = dcp.save
    monkeypatch.setattr(dcp, "save", lambda *args, **kwargs: (note("write"), real(*args, **kwargs)))
    saving.save(7, make_state(7), 70, last=False)
    saving.drain()
    assert calls == [("save", "GPU 3"), ("save", "write")]
