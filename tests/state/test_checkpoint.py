"""A checkpoint comes back bit by bit on any number of ranks; what is not whole is found, named and not used."""

import errno
import json
import os
import random
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import xxhash
from common import UserError, manifest
from common.state import checkpoint, start
from common.store import disk
from common.train import initial

from tests.harness import runner, states
from tests.harness.damage import flip_bit, rewrite_manifest
from tests.harness.states import (
    bits,
    blank,
    check_equal,
    damage,
    find_step,
    loaded,
    make_saver,
    make_state,
    save,
    steps,
)

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of step 4, to be read only."""
    return save(tmp_path_factory.mktemp("run"), 4)


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints" / saved.name))


# --- load ---


def test_round_trip(saved: Path) -> None:
    wanted = make_state(4)
    found = blank(wanted)
    places = {name: tensor.data_ptr() for name, tensor in found.items()}
    checkpoint.load(saved, found)
    check_equal(found, wanted)
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == places, "filled in place"
    facts, fault = manifest.verify(saved)
    assert fault == ""
    assert (facts["step"], facts["samples"], facts["seed"]) == (4, 40, 3)
    assert saved.name == "step_00000004"


def load_and_save(first: str, second: str) -> None:
    """All ranks read what one wrote, and write it again."""
    dist.init_process_group("gloo")
    found = blank(make_state(4))
    checkpoint.load(Path(first), found)
    check_equal(found, make_state(4))
    make_saver(Path(second)).save(5, found, 50, last=True)
    check_equal(loaded(checkpoint.folder(Path(second), 5), found), found)
    dist.destroy_process_group()


def test_from_one_rank_to_two_to_one(saved: Path, tmp_path: Path) -> None:
    result = runner.spawn(load_and_save, [(str(saved), str(tmp_path))] * 2)
    assert result.ok, str(result)
    found = states.find(tmp_path, "")
    assert found.path is not None
    names = {file.name for file in found.path.iterdir()} - {manifest.NAME}
    assert names == found.progress["files"].keys(), "the manifest vouches for every file"
    check_equal(loaded(found.path, make_state(4)), make_state(4))


def test_manifest_covers_every_file(saved: Path) -> None:
    facts, _ = manifest.verify(saved)
    files = {path.name: path.stat().st_size for path in saved.iterdir() if path.name != manifest.NAME}
    assert files == {name: entry["bytes"] for name, entry in facts["files"].items()}
    assert files


def test_other_models_are_refused_before_their_weights_are_made(saved: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(1, 6, 3, bias=False)})
    with pytest.raises(UserError) as refusal:
        checkpoint.check_fits(saved, model)
    assert str(refusal.value).splitlines() == [
        f"checkpoint {saved} does not fit this model (use its flags: --config {saved.parent.parent}/config.json; "
        f"or begin anew: --init {saved} --name NEW):",
        "  conv.weight: (6, 3, 3, 3) in the checkpoint, (6, 1, 3, 3) in the model",
        *(f"  {name}: only in the checkpoint" for name in checkpoint.tensors_in(saved) if name in LISTED),
        "  and 3 more",
    ]


LISTED = ("half.weight", "ids", "linear.weight", "norm.num_batches_tracked")  # the first four


def test_a_part_of_another_shape_is_refused_before_anything_is_filled(saved: Path) -> None:
    """A rank may ask for some of the names; what it asks for must be there."""
    state = blank(make_state(4))
    del state["odd"]
    checkpoint.load(saved, state)
    assert bits(state["wide.weight"]) == bits(make_state(4)["wide.weight"])
    state = blank(make_state(4))
    state["conv.weight"] = torch.zeros(6, 1, 3, 3)
    state["optimizer.more"] = torch.zeros(2)
    with pytest.raises(UserError) as refusal:
        checkpoint.load(saved, state)
    assert str(refusal.value).splitlines() == [
        f"checkpoint {saved} does not fit this model or optimizer (use its flags: --config "
        f"{saved.parent.parent}/config.json; or begin anew: --init {saved} --name NEW):",
        "  conv.weight: (6, 3, 3, 3) in the checkpoint, (6, 1, 3, 3) in the model",
        "  optimizer.more: only in the model",
    ]
    assert bool((state["wide.weight"] == 77).all())


# --- damage ---


def test_any_flipped_bit_of_the_tensors_is_found(copied: Path) -> None:
    choose = random.Random(0)
    files = sorted(path for path in copied.iterdir() if path.name != manifest.NAME)
    for i in range(50):
        file = files[i % len(files)]
        bit = choose.randrange(8 * file.stat().st_size)
        flip_bit(file, bit)
        assert manifest.verify(copied) == ({}, f"{file.name} has changed since it was written"), bit
        flip_bit(file, bit)
    assert manifest.verify(copied)[1] == ""


def test_any_flipped_bit_of_the_manifest_is_found(copied: Path) -> None:
    """It holds the position in the data, the step and the seed: a bit of each of its bytes is tried."""
    file = copied / manifest.NAME
    content = file.read_bytes()
    unnoticed = []
    for bit in (8 * byte + byte % 8 for byte in range(len(content))):
        flip_bit(file, bit)
        if not manifest.verify(copied)[1]:
            now = file.read_bytes()
            line = content[: bit // 8].count(b"\n")
            unnoticed.append(f"{content.splitlines()[line]!r} became {now.splitlines()[line]!r}")
        file.write_bytes(content)
    assert not unnoticed, f"{len(unnoticed)} bits, such as {unnoticed[-1]}"


def test_verify_says_what_is_wrong(copied: Path) -> None:
    listing = copied / manifest.NAME
    file = max(copied.iterdir(), key=lambda path: path.stat().st_size)
    text, content = listing.read_text(), file.read_bytes()
    file.write_bytes(content[:-1])
    wanted = f"{file.name} has {len(content) - 1} bytes instead of {len(content)}"
    assert manifest.verify(copied) == ({}, wanted)
    file.write_bytes(content + b"\0")
    assert manifest.verify(copied) == ({}, f"{file.name} has {len(content) + 1} bytes instead of {len(content)}")
    file.unlink()
    assert manifest.verify(copied) == ({}, f"{file.name} is missing")
    file.write_bytes(content)
    assert manifest.verify(copied)[1] == ""
    listing.unlink()
    assert manifest.verify(copied) == ({}, "MANIFEST.json cannot be read (FileNotFoundError)")
    listing.write_text(text[: len(text) // 2])
    assert manifest.verify(copied) == ({}, "MANIFEST.json cannot be read (JSONDecodeError)")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b"null", b"{}", b'{"format": 1, "files": 3}', b'{"files": {"a": {}}}']
)
def test_broken_manifests(content: bytes, copied: Path) -> None:
    (copied / manifest.NAME).write_bytes(content)
    facts, fault = manifest.verify(copied)
    assert facts == {}
    assert fault.startswith("MANIFEST.json cannot be read (")


SEALED = {  # of entries that only a program can have written, and what is wrong with them
    "no step": ({"step": None}, "MANIFEST.json has step None instead of a number"),
    "a step in words": ({"step": "four"}, "MANIFEST.json has step 'four' instead of a number"),
    "half a step": ({"step": 4.5}, "MANIFEST.json has step 4.5 instead of a number"),
    "true": ({"samples": True}, "MANIFEST.json has samples True instead of a number"),
    "minus one": ({"samples": -1}, "MANIFEST.json has samples -1 instead of a number"),
    "beyond 64 bits": ({"samples": 2**63}, "MANIFEST.json has samples 9223372036854775808 instead of a number"),
    "samples that no step takes": ({"samples": 0}, "MANIFEST.json has samples 0 instead of a number that 4 steps can"),
    "more samples than 4 steps take": ({"samples": 2**62}, "instead of a number that 4 steps can take"),
    "more steps than a training has": ({"step": 2**62}, f"MANIFEST.json has step {2**62} instead of a number"),
    "infinitely many bytes": (
        {"files": {"shard-00001-model-00001-of-00001.safetensors": {"bytes": float("inf"), "xxh3_128": []}}},
        "MANIFEST.json cannot be read",
    ),
    "a loss scale in words": ({"loss_scale": ["much", 1.0]}, "MANIFEST.json has loss_scale"),
    "another step": ({"step": 5}, "it is of step 5, and the folder's number is 4"),
    "no files": ({"files": {}}, "MANIFEST.json names no files"),
    "a device": ({"files": {"/dev/zero": {"bytes": 0, "sha256": ""}}}, "MANIFEST.json names '/dev/zero', which is not"),
    "a parent": ({"files": {"../x": {"bytes": 0, "sha256": ""}}}, "MANIFEST.json names '../x', which is not in"),
    "a folder": ({"files": {"..": {"bytes": 0, "sha256": ""}}}, "is not in MANIFEST.json"),
}


@pytest.mark.parametrize("case", SEALED)
def test_sealed_nonsense_is_damage(case: str, copied: Path) -> None:
    changes, wanted = SEALED[case]
    rewrite_manifest(copied, **changes)
    facts, fault = manifest.verify(copied)
    assert facts == {}
    assert wanted in fault


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_names_that_no_file_can_have(name: str, copied: Path) -> None:
    files = json.loads((copied / manifest.NAME).read_text())["files"]
    rewrite_manifest(copied, files=files | {name: {"bytes": 0, "sha256": ""}})
    fault = manifest.verify(copied)[1]
    assert "cannot be read" in fault
    assert fault.isprintable()


def test_only_files_of_the_manifest_are_read(copied: Path) -> None:
    """torch.distributed.checkpoint takes tensors from every safetensors file of the folder, but from no other file."""
    (copied / "notes.txt").write_text("mine")
    assert manifest.verify(copied)[1] == ""
    file = next(copied.glob("*.safetensors"))
    for name in (f"zz {file.name}", f".{file.name}", "caf\udce9.safetensors"):
        shutil.copy(file, copied / name)
        assert "is not in MANIFEST.json: move it out of the folder" in manifest.verify(copied)[1]
        assert manifest.verify(copied)[1].isprintable()
        (copied / name).unlink()
    assert manifest.verify(copied)[1] == ""


# --- find ---


def test_steps_of_many_digits_sort_as_numbers(tmp_path: Path) -> None:
    """Also where the oldest ones are deleted."""
    for step in (99_999_998, 99_999_999, 100_000_000, 2_000_000_000):
        save(tmp_path, step, keep=2)
        assert find_step(tmp_path) == step
    assert [checkpoint.step_of(path) for path in checkpoint.committed(tmp_path)] == [2_000_000_000, 100_000_000]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_2000000000"


@pytest.mark.parametrize("what", ["a link to itself", "a link to nowhere", "a pipe", "a file", "an empty folder"])
def test_what_is_not_a_checkpoint_takes_no_place(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run continues from the one before, writes over it, and deletes it like any old one."""
    save(tmp_path, 4)
    strange = [checkpoint.folder(tmp_path, step) for step in (3, 6)]
    for path in strange:
        if what.startswith("a link"):
            path.symlink_to(path.name if what == "a link to itself" else "nowhere")
        elif what == "a pipe":
            os.mkfifo(path)
        elif what == "a file":
            path.touch()
        else:
            path.mkdir()
    assert find_step(tmp_path) == 4
    assert "warning: skipped damaged checkpoints: step_00000006: MANIFEST.json cannot be" in capsys.readouterr().out
    save(tmp_path, 6, keep=1)
    assert find_step(tmp_path) == 6
    assert steps(tmp_path) == [6]
    assert "could not be deleted" not in capsys.readouterr().out


def test_copy_under_another_number_is_not_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(save(tmp_path, 2), tmp_path / "checkpoints" / "step_00000999")
    save(tmp_path, 4)
    assert find_step(tmp_path) == 4
    assert "step_00000999: it is of step 2, and the folder's number is 999" in capsys.readouterr().out
    copy = shutil.copytree(checkpoint.folder(tmp_path, 2), tmp_path / "best")
    assert states.find(tmp_path / "new", str(copy)).progress["step"] == 2, "a name without a number is free"


def test_find_takes_the_newest_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert states.find(tmp_path, "", seed=3) == start.Found(disk.Disk(tmp_path), {"seed": 3}, None, {})
    for step in (9, 100, 20):
        save(tmp_path, step)
    assert find_step(tmp_path) == 100
    assert "damaged" not in capsys.readouterr().out
    damage(tmp_path, 100)
    assert find_step(tmp_path) == 20
    said = capsys.readouterr().out
    assert re.search(r"warning: skipped damaged checkpoints: step_00000100: \S+ has changed since it was written", said)
    assert f"resuming from step 20 of {tmp_path}/checkpoints/step_00000020" in said
    (tmp_path / "checkpoints" / "step_00000020" / manifest.NAME).unlink()
    assert find_step(tmp_path) == 9
    damage(tmp_path, 9)
    with pytest.raises(UserError, match="every checkpoint is damaged") as refusal:
        states.find(tmp_path, "")
    assert all(f"step_{step:08d}: " in str(refusal.value) for step in (9, 20, 100))
    assert "another --name" in str(refusal.value)


def test_what_cannot_be_read_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad sector in the newest one does not keep the run from going on with the one before."""
    for step in (9, 10):
        save(tmp_path, step)
    shard = next(checkpoint.folder(tmp_path, 10).glob("*.safetensors"))
    real = Path.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *a, **kw: bad_sector() if self == shard else real(self, *a, **kw))
        assert manifest.verify(shard.parent) == ({}, f"{shard.name} cannot be read (Input/output error)")
        assert find_step(tmp_path) == 9
    assert find_step(tmp_path) == 10


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 64)
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 24)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", [0, 1, 23, 63, 64, 65, 128, 300])
def test_digests_of_chunks(size: int, tmp_path: Path) -> None:
    """Those of what is written, in whatever pieces, are those of the file."""
    content = memoryview(random.Random(size).randbytes(size))
    wanted = [xxhash.xxh3_128_hexdigest(content[start : start + 64]) for start in range(0, size, 64)]
    for piece in (1, 7, 64, 1000):
        with (tmp_path / "file").open("wb") as file:
            pieces = [content[start : start + piece] for start in range(0, size, piece)]
            assert manifest.write_blocks(file, pieces) == wanted
        assert (tmp_path / "file").read_bytes() == content
        assert manifest.seal(tmp_path / "file") == {"bytes": size, "xxh3_128": wanted}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("damaged", [0, 3, None])
def test_verification_ends_at_the_first_fault(
    damaged: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of a terabyte with false digests is not read to its end."""
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    file = folder / "large.safetensors"
    content = bytearray(64 * 500)
    file.write_bytes(content)
    manifest.write(folder, {"step": 1, "samples": 1}, {file.name: manifest.seal(file)})
    if damaged is not None:
        content[64 * damaged] = 1
        file.write_bytes(content)
    read: list[int] = []
    real = manifest._fault
    ended = threading.Event()

    def fault(path: Path, file_bytes: int, start: int, *more: Any) -> str:
        read.append(start // 64)
        if damaged is not None and start > 64 * damaged:
            assert ended.wait(runner.HANG_S)
        return real(path, file_bytes, start, *more)

    class Pool(ThreadPoolExecutor):
        """Whose threads read nothing behind the fault until somebody ends it."""

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            ended.set()
            super().shutdown(wait)

    monkeypatch.setattr(manifest, "_fault", fault)
    monkeypatch.setattr(manifest, "ThreadPoolExecutor", Pool)
    assert bool(manifest.verify(folder)[1]) == (damaged is not None)
    if damaged is None:
        assert sorted(read) == list(range(500))
    else:
        assert len(read) <= damaged + 1 + manifest.READERS


def test_replaced_files_are_flushed_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut could leave an empty file under it."""
    events: list[tuple[str, str]] = []
    flush, rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).read_text()))
        flush(descriptor)

    def replace(path: Path, target: Path) -> Path:
        events.append(("replace", target.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    manifest.replace(tmp_path / "latest", "step_00000004")
    assert events[:2] == [("fsync", "step_00000004"), ("replace", "latest")]


@pytest.mark.usefixtures("small_chunks")
def test_readers_share_the_chunks_of_a_file(tmp_path: Path) -> None:
    """Each flipped bit is found by one of them, and whatever else is wrong by at least one."""
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    files = {"large": folder / "large.safetensors", "empty": folder / "empty.safetensors"}
    files["large"].write_bytes(random.Random(0).randbytes(300))
    files["empty"].touch()
    manifest.write(folder, {"step": 1, "samples": 1}, {file.name: manifest.seal(file) for file in files.values()})

    def finders() -> list[int]:
        return [part for part in range(3) if manifest.verify(folder, part, 3)[1]]

    assert finders() == []
    for byte in range(0, 300, 7):
        flip_bit(files["large"], 8 * byte + byte % 8)
        assert finders() == [byte // 64 % 3]
        flip_bit(files["large"], 8 * byte + byte % 8)
    for file in files.values():
        content = file.read_bytes()
        for other in (content + b"x", content[:-1]) if content else (b"x",):
            file.write_bytes(other)
            assert finders()
        file.unlink()
        assert finders()
        file.write_bytes(content)
    assert finders() == []


def find_in_parts(run_dir: str) -> None:
    """Three ranks, each with a file in each checkpoint; of the newer ones another rank's is damaged each time."""
    dist.init_process_group("gloo")
    run, rank, read = Path(run_dir), dist.get_rank(), list[Path]()
    saving = make_saver(run)
    for step in (1, 2, 3, 4):
        saving.save(step, {f"own.{rank}": torch.full((2,), float(step))}, 10 * step, last=False)
    if rank == 0:
        for step in (2, 3, 4):
            file = sorted(checkpoint.folder(run, step).glob("*.safetensors"))[step - 2]
            flip_bit(file, 8 * file.stat().st_size - 1)
    dist.barrier()
    digest = manifest._digest
    manifest._digest = lambda path, *part: (read.append(path), digest(path, *part))[1]  # type: ignore[func-returns-value]
    assert find_step(run) == 1, "all hear of what one has found"
    assert len(read) == 4, "one of the three files of each"
    dist.barrier()
    make_saver(run, keep=2).save(5, {f"own.{rank}": torch.zeros(2)}, 0, last=True)
    assert [path.name[-1] for path in checkpoint.committed(run)] == ["5", "4", "3", "2", "1"], "one is whole beside it"
    dist.destroy_process_group()


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    """One alone would need longer for a large model than the others wait."""
    result = runner.spawn(find_in_parts, [(str(tmp_path),)] * 3)
    assert result.ok, str(result)


def bad_sector() -> NoReturn:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("resume", ["~nobody-here/x", "a" * 300])
def test_resume_from_what_cannot_be_a_folder(resume: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^--resume {resume}: (Could not determine home|File name too long)"):
        states.find(tmp_path, resume)


def test_leftovers_are_never_chosen(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    shutil.copytree(path, path.with_name("step_00000007.tmp-0123abcd"))
    shutil.copytree(path, path.with_name("step_00000008.tmp-12345678"))
    assert find_step(tmp_path) == 5
    assert find_step(tmp_path / "new", resume=str(tmp_path)) == 5
    shutil.rmtree(path)
    assert states.find(tmp_path, "").path is None
    with pytest.raises(UserError, match="no checkpoint there"):
        states.find(tmp_path / "new", str(tmp_path))


def test_resume_names_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for step in (5, 6):
        save(other, step)
    assert find_step(own, resume=str(other)) == 6
    assert find_step(own, resume=str(other / "checkpoints" / "step_00000005")) == 5
    with pytest.raises(UserError, match=r"--resume \S+/missing: no checkpoint there"):
        states.find(own, str(tmp_path / "missing"))
    damage(other, 6)
    assert find_step(own, resume=str(other)) == 5
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        states.find(own, str(other / "checkpoints" / "step_00000006"))
    save(own, 2)
    assert find_step(own, resume=str(other)) == 2, "a run that has checkpoints continues from its own"


def test_folders_that_everybody_can_write_are_not_trusted(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    for place in (path, path.parent):
        mode = place.stat().st_mode
        place.chmod(mode | 0o002)
        for run_dir, resume in ((tmp_path, ""), (tmp_path / "new", str(tmp_path)), (tmp_path / "new", str(path))):
            with pytest.raises(UserError, match=re.escape(f"chmod o-w {place};")):
                states.find(run_dir, resume)
        place.chmod(mode)
        assert find_step(tmp_path) == 5
    path.parent.chmod(0o1777)
    assert find_step(tmp_path) == 5, "in a folder like /tmp, others cannot replace what is ours"


def test_weights_alone_are_loaded_and_the_optimizer_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = make_state(5)
    weights = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer.")}
    make_saver(tmp_path).save(5, weights, 50, last=True)
    found = loaded(checkpoint.folder(tmp_path, 5), state)
    check_equal({name: found[name] for name in weights}, weights)
    assert all(bool((found[name] == 77).all()) for name in found.keys() - weights.keys()), "left as it was"
    assert "has weights but no optimizer state: the optimizer starts fresh" in capsys.readouterr().out
    make_saver(tmp_path).save(6, state, 60, last=True)
    check_equal(loaded(checkpoint.folder(tmp_path, 6), state), state)
    assert "weights only" not in capsys.readouterr().out
    check_equal(loaded(checkpoint.folder(tmp_path, 5), weights), weights)
    assert "weights only" not in capsys.readouterr().out, "this optimizer has no state to begin with"
    with pytest.raises(UserError, match=r"odder: only in the model"):
        checkpoint.load(checkpoint.folder(tmp_path, 5), state | {"optimizer.x": torch.ones(1), "odder": torch.ones(1)})


def test_another_fingerprint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 5)
    states.find(tmp_path, "", seed=3)
    assert "note:" not in capsys.readouterr().out
    found = states.find(tmp_path, "", seed=4, data="abc")
    assert found.fingerprint == {"seed": 4, "data": "abc"}, "this run's, for the checkpoints that it will write"
    said = capsys.readouterr().out
    assert "note: the checkpoint was written with seed 3, this run has seed 4" in said
    assert said.count("note:") == 1, "what the checkpoint does not know is no difference"


def test_job_that_saves_meanwhile_is_noticed(tmp_path: Path) -> None:
    """Between the look for a checkpoint and the claim of the folder; also a first one."""
    for step in (5, 10):
        found = states.find(tmp_path)
        start.check_newest(found)
        save(tmp_path, step)
        with pytest.raises(UserError, match=f"another job has saved step {step} in .*: start this one again"):
            start.check_newest(found)


def test_find_refuses_another_model(tmp_path: Path) -> None:
    """Whether the run's own checkpoint or --resume led to it; a model on meta is enough to know."""
    save(tmp_path, 5)
    with torch.device("meta"):
        model = torch.nn.Linear(2, 3)
    for run_dir, resume in ((tmp_path, ""), (tmp_path / "new", str(tmp_path))):
        with pytest.raises(UserError, match=r"step_00000005 does not fit this model .*:\n  weight: only in the model"):
            states.find(run_dir, resume, model)
    assert states.find(tmp_path / "new", "", model).path is None


@pytest.mark.parametrize("in_run", [True, False])
def test_model_that_a_checkpoint_fills_is_not_initialised(in_run: bool, tmp_path: Path, group: None) -> None:
    """It has the checkpoint's weights in the end, and any other that it had before would have cost time."""
    wanted = torch.nn.Linear(2, 3)
    states.make_saver(tmp_path / "run", 9).save(5, dict(wanted.state_dict()), 50, last=True)
    with torch.device("meta"):
        model = torch.nn.Linear(2, 3)  # it has no method `initial`: nothing else could fill it
    found = (
        states.find(tmp_path / "run", model=model) if in_run else states.find(tmp_path, str(tmp_path / "run"), model)
    )
    model = initial.materialize(model, 0, torch.device("cpu"), torch.float32)
    assert all(bool(tensor.isnan().all()) for tensor in model.state_dict().values()), "seen by all if it stays so"
    start.restore(found.path, "", model, torch.optim.SGD(model.parameters()))
    assert all(map(torch.equal, model.state_dict().values(), wanted.state_dict().values()))


def find_on_each(run_dir: str, wanted: Any) -> None:
    """Rank 1 looks at a folder of its own, as if a file system had not caught up, and still goes with rank 0."""
    dist.init_process_group("gloo")
    own = Path(run_dir) if dist.get_rank() == 0 else Path(run_dir) / "elsewhere"
    if wanted is None:
        with pytest.raises(UserError, match="every checkpoint is damaged"):
            states.find(own, "")
    else:
        found = states.find(own, "")
        assert found.path == Path(run_dir) / "checkpoints" / f"step_{wanted:08d}"
        assert found.progress["step"] == wanted
    dist.destroy_process_group()


def test_all_ranks_go_with_rank_0(copied: Path) -> None:
    run_dir = copied.parent.parent
    result = runner.spawn(find_on_each, [(str(run_dir), 4)] * 2)
    assert result.ok, str(result)
    damage(run_dir, 4)
    result = runner.spawn(find_on_each, [(str(run_dir), None)] * 2)
    assert result.ok, str(result)
