"""A run's checkpoints in a store: committed without a rename, by one job at a time, whatever is refused or cut."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common import UserError, manifest
from common.run.process import Process
from common.state import checkpoint, saver, start, state_check
from common.store import disk
from common.store.objects import keeper as keeping
from common.store.objects import paths, uploads
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import states
from tests.store.server import BUCKET, UNANSWERED, Server

pytestmark = pytest.mark.usefixtures("group")
OUT = f"s3://{BUCKET}/runs"


@contextlib.contextmanager
def run(folder: Path, keep: int = 9, claims: bool = True, name: str = "run") -> Iterator[saver.Saver]:
    """A job that saves in the run, whose working folder is `folder`."""
    process = Process(recipe=str(states.RECIPE))
    keeper = keeping.Keeper(paths.parse("--out", OUT) / name, folder)
    try:
        if claims:
            keeper.claim(process)
    except UserError:
        for file in process.locks:
            file.close()
        raise
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    check = state_check.StateCheck(torch.nn.Module(), compare=True)
    found = start.Found(keeper, {"seed": 3}, None, {}, 0)
    with process.background, contextlib.ExitStack() as locks:
        for file in process.locks:
            locks.callback(file.close)
        yield saver.Saver(found, mesh, check, process, keep, False)


def save(one: saver.Saver, step: int) -> None:
    one.save(step, states.make_state(step), 10 * step, last=True)


def newest() -> int:
    """The step that a resumed run gets; its numbers are right, bit for bit."""
    path, facts = checkpoint.choose(paths.parse("--resume", f"{OUT}/run"))
    wanted = states.make_state(facts["step"])
    states.check_equal(states.loaded(path, wanted), wanted)
    return int(facts["step"])


def steps(s3: Server) -> list[int]:
    return [int(key.split("/")[-2][5:]) for key in s3.objects() if key.endswith(manifest.NAME)]


def test_what_is_saved_is_loaded(s3: Server, tmp_path: Path) -> None:
    with run(tmp_path) as job:
        save(job, 1)
        save(job, 2)
    assert newest() == 2
    named = [key.rpartition("/")[2] for key in s3.objects("runs/run/checkpoints/step_00000002/")]
    assert named[0] == manifest.NAME
    assert named[1].startswith("shard-00001-model-00001-of-00001-"), "a name that no other save has"


def test_copied_by_any_tool_it_is_a_checkpoint_in_a_folder(s3: Server, tmp_path: Path) -> None:
    with run(tmp_path / "work") as job:
        save(job, 1)
    copy = tmp_path / "step_00000001"
    copy.mkdir()
    for key in s3.objects("runs/run/checkpoints/step_00000001/"):
        s3.client().download_file(BUCKET, key, str(copy / key.rpartition("/")[2]))
    wanted = states.make_state(1)
    states.check_equal(states.loaded(checkpoint.choose(copy)[0], wanted), wanted)


def test_older_ones_are_deleted(s3: Server, tmp_path: Path) -> None:
    with run(tmp_path, keep=2) as job:
        for step in (1, 2, 3, 4):
            save(job, step)
    assert steps(s3) == [3, 4]
    assert not [key for key in s3.objects() if "step_00000001" in key or "step_00000002" in key]
    assert s3.client().get_object(Bucket=BUCKET, Key="runs/run/checkpoints/latest")["Body"].read() == b"step_00000004"


def test_after_a_cut_at_each_request_the_old_or_the_new_one_is_there(s3: Server, tmp_path: Path) -> None:
    """As a kill there would leave it: from that request on, nothing arrives, and nobody cleans up."""
    with run(tmp_path / "first") as job:
        save(job, 1)
    outcomes = []
    for number in itertools.count(1):
        count = itertools.count(1)
        lock = threading.Lock()

        def cut(environ: dict[str, Any]) -> tuple[int, str] | None:
            if "/lock" in environ["PATH_INFO"] or environ["REQUEST_METHOD"] in ("GET", "HEAD"):
                return None  # what writes decides, and its number does not grow with what is there
            with lock:  # noqa: B023
                return (403, "AccessDenied") if next(count) >= number else None  # noqa: B023

        with run(tmp_path / "work") as job:
            before = steps(s3)
            s3.faults.append(cut)
            with contextlib.suppress(saver.SaveError):
                save(job, 10 + number)
            s3.faults.clear()
        found = newest()
        assert found in (max(before), 10 + number)
        outcomes.append(found == 10 + number)
        if next(count) < number:  # the save has made fewer requests
            break
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert len(outcomes) > 4
    with run(tmp_path / "work") as job:
        save(job, 100)
    named = {
        f"{key.rpartition('/')[0]}/{name}"
        for key in s3.objects()
        if key.endswith(manifest.NAME)
        for name in json.loads(s3.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())["files"]
    }
    assert {key for key in s3.objects() if key.endswith(".safetensors")} == named, "what was cut off is gone"
    assert s3.uploads() == []


def test_what_no_manifest_names_is_no_checkpoint(s3: Server, tmp_path: Path) -> None:
    with run(tmp_path) as job:
        save(job, 1)
    for name in ("step_00000002/shard-1-x.safetensors", "step_00000001/shard-1-x.safetensors", "step_00000003"):
        s3.client().put_object(Bucket=BUCKET, Key=f"runs/run/checkpoints/{name}", Body=b"half")
    found = paths.parse("--resume", f"{OUT}/run")
    assert [path.name for path in checkpoint.committed(found)] == ["step_00000001"]
    assert newest() == 1


def test_unfinished_uploads_in_parts_are_found_and_removed(s3: Server, tmp_path: Path) -> None:
    def begin(key: str) -> Any:
        return s3.client().create_multipart_upload(Bucket=BUCKET, Key=f"runs/{key}")

    begin("run/metrics.jsonl")  # of a job that was killed
    other = begin("other/checkpoints/step_00000001/shard")
    with run(tmp_path) as job:
        assert s3.uploads() == [other["Key"]]
        begin("run/checkpoints/step_00000001/shard-1-x.bin")  # of a save that has failed
        save(job, 2)
    assert s3.uploads() == [other["Key"]], "of another run"
    s3.client().abort_multipart_upload(Bucket=BUCKET, Key=other["Key"], UploadId=other["UploadId"])


def test_all_pages_of_unfinished_uploads_are_read() -> None:
    """A page has 1,000; moto gives all at once, so the pages are made here."""
    asked: list[dict[str, str]] = []
    dropped = []

    class Pages:
        def split_path(self, _: str) -> tuple[str, str, None]:
            return BUCKET, "runs/run/checkpoints/", None

        def call_s3(self, name: str, **more: Any) -> dict[str, Any]:
            if name == "abort_multipart_upload":
                dropped.append(more["UploadId"])
                if more["UploadId"] == "1":
                    raise FileNotFoundError  # somebody else did
                return {}
            asked.append(more)
            number = len(asked)
            one = {"Key": f"runs/run/checkpoints/{number}", "UploadId": str(number)}
            return {"Uploads": [one], "IsTruncated": number < 3, "NextKeyMarker": one["Key"], "NextUploadIdMarker": "x"}

    uploads.abort_unfinished("s3://bucket/runs/run/checkpoints", Pages())
    assert dropped == ["1", "2", "3"]
    assert [one.get("KeyMarker") for one in asked] == [None, "runs/run/checkpoints/1", "runs/run/checkpoints/2"]


def test_large_files_travel_in_parts(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 5 * 2**20)  # the least that S3 takes
    monkeypatch.setenv("STORE_RETRY_S", "5")
    refused = s3.refuse("PUT", "partNumber=2", 1)
    state = {"a": torch.arange(3 * 2**20, dtype=torch.float32).view(-1, 4), "b": torch.ones(3)}
    noted: list[Any] = []
    monkeypatch.setattr(uploads.manifest, "looks_at", noted.append)
    with run(tmp_path) as job:
        job.save(1, state, 10, last=True)
    assert len(refused) == 1
    assert {one[-8:] for one in map(str, noted)} >= {", part 1", ", part 2", ", part 3"}, "`watch` sees that it goes on"
    parts = {line.rpartition("partNumber=")[2].partition("&")[0] for line in s3.requests if "partNumber" in line}
    assert parts == {"1", "2", "3"}
    path, _ = checkpoint.choose(paths.parse("--resume", f"{OUT}/run"))
    states.check_equal(states.loaded(path, state), state)


def test_few_parts_of_an_upload_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is, and slow the store: those that are on their way, and the one that is being filled."""
    num_bytes = 100
    taken = 0
    held: list[int] = []
    change = threading.Condition()

    class Slow:
        """A store that answers once the writer has given as much as it may."""

        def split_path(self, _: str) -> tuple[str, str, None]:
            return "bucket", "key", None

        def call_s3(self, name: str, PartNumber: int = 0, **_: Any) -> dict[str, Any]:  # noqa: N803 (its own name)
            if name == "upload_part":
                with change:
                    assert change.wait_for(lambda: taken >= min(PartNumber + uploads.PARTS, num_bytes), timeout=900)
                    held.append(taken - PartNumber + 1)
            return {"UploadId": "1", "ETag": "", "ContentLength": num_bytes}

    monkeypatch.setattr(uploads, "PART_BYTES", 1)
    with uploads.Upload("s3://bucket/key", Slow()) as upload:
        for _ in range(num_bytes):
            with change:
                taken += 1
                change.notify_all()
            upload.write(b"x")
    assert max(held) == uploads.PARTS + 1


def test_busy_store_is_asked_again(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_RETRY_S", "20")
    with run(tmp_path) as job:
        refused = s3.refuse("PUT", "checkpoints", 3)
        failing = s3.refuse("GET", "", 2, 500, "InternalError")
        save(job, 1)
    assert (len(refused), len(failing)) == (3, 2)
    assert newest() == 1


def test_store_that_stays_away_fails_the_save_with_words(s3: Server, tmp_path: Path) -> None:
    with run(tmp_path) as job:
        save(job, 1)
        s3.refuse("PUT", "checkpoints", 10**6)
        with pytest.raises(
            saver.SaveError, match=r"written for \d+ s: .*SlowDown.*newest checkpoint there is of step 1"
        ) as error:
            save(job, 2)
        s3.faults.clear()
    with run(tmp_path) as job:
        save(job, 3)
    assert newest() == 3
    # The last one was kept on this machine instead, and the error says where and how to continue from it.
    spare = tmp_path / "checkpoints" / "step_00000002"
    assert f"It was saved to {spare} instead: continue with --resume {spare} and another --name" in str(error.value)
    wanted = states.make_state(2)
    states.check_equal(states.loaded(checkpoint.choose(spare)[0], wanted), wanted)


def test_last_save_that_fails_here_as_well_says_both(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    with run(tmp_path) as job:
        s3.refuse("PUT", "checkpoints", 10**6)
        monkeypatch.setattr(disk.Disk, "make", full)
        with pytest.raises(saver.SaveError, match=r"(?s)SlowDown.*not saved to .*step_00000001 either: .*disk full"):
            save(job, 1)


def test_job_that_lost_its_run_ends_at_the_next_save(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at its last one, hours later; and it keeps no copy here, as another job goes on from what is there."""
    monkeypatch.setattr(keeping.Keeper, "_again", lambda *_: None)
    with run(tmp_path / "one") as first:
        save(first, 1)
        with run(tmp_path / "two") as second:
            save(second, 2)
            with pytest.raises(saver.SaveError, match=r"^the next checkpoint was not saved: .* was taken over by"):
                first.save(3, states.make_state(3), 30, last=False)
    assert steps(s3) == [1, 2]
    assert not (tmp_path / "one" / "checkpoints").exists()


def test_job_that_loses_its_run_while_it_commits_takes_its_manifest_back(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still between its last look at the lease and its manifest, for longer than the lease."""
    monkeypatch.setattr(keeping.Keeper, "_again", lambda *_: None)
    real = keeping.Keeper._look_at
    with run(tmp_path / "one") as first, contextlib.ExitStack() as others:
        save(first, 1)
        seconds: list[saver.Saver] = []

        def stand_still(keeper: keeping.Keeper, *args: Any) -> None:
            real(keeper, *args)
            if not seconds:
                seconds.append(others.enter_context(run(tmp_path / "two")))

        monkeypatch.setattr(keeping.Keeper, "_look_at", stand_still)
        with pytest.raises(saver.SaveError, match="was taken over by process"):
            save(first, 3)
        assert steps(s3) == [1]
        save(seconds[0], 3)
    assert steps(s3) == [1, 3]
    assert newest() == 3


def test_object_that_vanishes_before_the_commit_is_noticed(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = keeping.Keeper._look_at

    def vanish(keeper: keeping.Keeper, final: Any, files: dict[str, Any]) -> None:
        for key in s3.objects("runs/run/checkpoints/step_00000002/"):
            s3.client().delete_object(Bucket=BUCKET, Key=key)
        real(keeper, final, files)

    with run(tmp_path) as job:
        save(job, 1)
        monkeypatch.setattr(keeping.Keeper, "_look_at", vanish)
        with pytest.raises(saver.SaveError, match=r"step_00000002/shard\S+ was written, and has no bytes now"):
            save(job, 2)
    assert newest() == 1


def test_expired_credentials_are_no_reason_to_wait(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_RETRY_S", "1000")
    with run(tmp_path) as job:
        s3.refuse("PUT", "checkpoints", 10**6, 400, "ExpiredToken")
        with pytest.raises(saver.SaveError, match=r"could not be written: PermissionError: .*ExpiredToken") as refusal:
            save(job, 1)
    assert s3.env["AWS_SECRET_ACCESS_KEY"] not in str(refusal.value)


def test_without_the_right_to_delete_it_is_saved(s3: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    s3.refuse("DELETE", "checkpoints", 10**6, 403, "AccessDenied")
    with run(tmp_path, keep=1) as job:
        save(job, 1)
        save(job, 2)
    assert "is saved, but an older checkpoint could not be deleted: " in capfd.readouterr().out
    assert newest() == 2


def test_damaged_object_is_found_and_an_older_checkpoint_taken(s3: Server, tmp_path: Path) -> None:
    with run(tmp_path) as job:
        save(job, 1)
        save(job, 2)
    (key,) = [key for key in s3.objects("runs/run/checkpoints/step_00000002") if key.endswith(".safetensors")]
    content = bytearray(s3.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())
    content[-1] ^= 1
    s3.client().put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    assert newest() == 1
    with run(tmp_path) as job:
        save(job, 2)  # again, over the damaged one
    assert newest() == 2


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"[" * 10_000])
def test_damaged_manifest_of_an_older_checkpoint_takes_nothing_from_others(
    content: bytes, s3: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows which files it has named: they stay, and the next ones are saved as ever."""
    with run(tmp_path) as job:
        save(job, 1)
        of_first = s3.objects("runs/run/checkpoints/step_00000001/")
        s3.client().put_object(Bucket=BUCKET, Key=of_first[0], Body=content)
        save(job, 2)
        save(job, 3)
    assert newest() == 3
    assert [key for key in s3.objects() if "step_00000001" in key] == of_first
    assert "could not be deleted" not in capfd.readouterr().out


def test_what_fails_after_the_commit_drops_nothing_of_it(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("of a defect")

    with run(tmp_path) as job:
        save(job, 1)
        monkeypatch.setattr(keeping.Keeper, "tidy", fail)
        with pytest.raises(saver.SaveError, match="of a defect"):
            save(job, 2)
    assert newest() == 2


def test_note_to_the_launcher_stays_on_its_machine(s3: Server, tmp_path: Path) -> None:
    """The next start removes it here, and would not there."""
    with run(tmp_path) as job:
        (tmp_path / "stopped.json").write_text("{}")
        (tmp_path / "metrics.jsonl").write_text("")
        save(job, 1)
    assert "runs/run/metrics.jsonl" in s3.objects()
    assert "runs/run/stopped.json" not in s3.objects()


def test_vanished_object_is_found(s3: Server, tmp_path: Path) -> None:
    with run(tmp_path) as job:
        save(job, 1)
        save(job, 2)
    (key,) = [key for key in s3.objects("runs/run/checkpoints/step_00000002") if key.endswith(".safetensors")]
    s3.client().delete_object(Bucket=BUCKET, Key=key)
    assert newest() == 1


# --- One owner --------------------------------------------------------------------------------------------


def test_second_job_is_refused_while_the_first_lives(s3: Server, tmp_path: Path) -> None:
    with run(tmp_path / "one") as job:
        with pytest.raises(UserError, match=r"--name run: .* is in use by process \d+ on "), run(tmp_path / "two"):
            pass
        save(job, 1)
    with run(tmp_path / "two") as job:  # the first has ended, and said so
        save(job, 2)
    assert newest() == 2


def test_silent_job_loses_its_run_and_cannot_save(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping.Keeper, "_again", lambda *_: None)
    with run(tmp_path / "one") as first:
        save(first, 1)
        with run(tmp_path / "two") as second:
            save(second, 2)
            with pytest.raises(saver.SaveError, match="was taken over by process"):
                save(first, 3)
            save(second, 4)
    assert steps(s3) == [1, 2, 4]
    assert newest() == 4


def forget_conditions(environ: dict[str, Any]) -> tuple[int, str] | None:
    """What some servers that speak S3's language do; they may not list unfinished uploads either."""
    environ.pop("HTTP_IF_NONE_MATCH", None)
    environ.pop("HTTP_IF_MATCH", None)
    return (501, "NotImplemented") if environ["QUERY_STRING"].startswith("uploads") else None


def refuse_conditions(environ: dict[str, Any]) -> tuple[int, str] | None:
    """What others do."""
    asked = {"HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"} & {*environ} or environ["QUERY_STRING"].startswith("uploads")
    return (501, "NotImplemented") if asked else None


def forget_tags(environ: dict[str, Any]) -> tuple[int, str] | None:
    """What S3 itself did until November 2024."""
    environ.pop("HTTP_IF_MATCH", None)
    return (501, "NotImplemented") if environ["QUERY_STRING"].startswith("uploads") else None


@pytest.mark.parametrize("lacks", [forget_conditions, refuse_conditions, forget_tags])
def test_store_without_conditions_keeps_jobs_apart_and_says_what_it_lacks(
    lacks: Any, s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what two jobs do at the same moment is not told apart: each looks before it writes."""
    s3.faults.append(lacks)
    with run(tmp_path / "one") as first:
        printed = capsys.readouterr().out
        assert "has no conditional writes (If-None-Match, If-Match)" in printed
        assert "cannot be listed: what killed saves leave" in printed
        with pytest.raises(UserError, match=r"--name run: .* is in use by process \d+ on "), run(tmp_path / "two"):
            pass
        save(first, 1)
    monkeypatch.setattr(keeping.Keeper, "_again", lambda *_: None)
    with run(tmp_path / "one") as first, run(tmp_path / "two") as second:
        save(second, 2)
        with pytest.raises(saver.SaveError, match="was taken over by process"):
            save(first, 3)
        save(second, 4)
    assert steps(s3) == [1, 2, 4]


def test_store_with_conditions_is_said_nothing_of(
    s3: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run(tmp_path):
        assert "note: " not in capsys.readouterr().out


def test_hub_holds_no_run() -> None:
    """Each small object would be a commit; it is read from, though."""
    with pytest.raises(UserError, match=r"^--out hf://a/b: .* commit each time; train into a folder or s3://"):
        paths.parse("--out", "hf://a/b")
    assert str(paths.parse("--init", "hf://a/b")) == "hf://a/b"


@pytest.mark.parametrize("text", ["no JSON", "[]"])
def test_lock_that_is_no_lock_ends_the_job_at_its_next_save(text: str, s3: Server, tmp_path: Path) -> None:
    """Somebody has written over it, or has emptied it: nobody can say any more who has the run."""
    with run(tmp_path) as job:
        save(job, 1)
        s3.client().put_object(Bucket=BUCKET, Key="runs/run/lock", Body=text.encode())
        with pytest.raises(saver.SaveError, match="was taken over by another"):
            save(job, 2)
    with run(tmp_path) as job:
        save(job, 3)


def test_slow_copy_of_a_log_does_not_cost_the_run(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is written all the while that the store takes for a large file."""
    monkeypatch.setenv("STORE_LEASE_S", "0.5")
    beats: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def fault(environ: dict[str, Any]) -> None:
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith("metrics.jsonl"):
            begun.set()
            ended.wait()
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith("lock") and begun.is_set():
            beats.append("")
            if len(beats) == 3:
                ended.set()

    with run(tmp_path):
        s3.faults.append(fault)
        (tmp_path / "metrics.jsonl").write_text("{}")
        in_time = ended.wait(10)
        ended.set()
    assert in_time


def test_job_whose_sign_of_life_was_not_answered_keeps_its_run(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has it, and went away before it said so: what lies there is this job's own."""
    monkeypatch.setattr(keeping.Keeper, "_again", lambda *_: None)
    with run(tmp_path) as job:
        s3.faults.append(lambda environ: UNANSWERED if environ["REQUEST_METHOD"] == "PUT" else None)
        with pytest.raises(OSError, match="lock could not be written for"):
            job._place._lease.hold()
        s3.faults.clear()
        save(job, 1)
    assert newest() == 1


def test_job_that_was_killed_here_is_followed_at_once(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping.Keeper, "_again", lambda *_: None)
    monkeypatch.setattr(keeping.Keeper, "close", lambda *_: None)
    monkeypatch.setenv("STORE_LEASE_S", "1000")
    with run(tmp_path) as job:
        save(job, 1)
    with run(tmp_path) as job:
        save(job, 2)
    assert newest() == 2


def test_step_that_another_job_has_saved_is_not_replaced(s3: Server, tmp_path: Path) -> None:
    """Even if both think that they have the run: the commit itself has the condition."""
    with run(tmp_path) as job:
        save(job, 1)
        before = s3.objects()
        job._place._known.clear()
        with pytest.raises(saver.SaveError, match=r"another job has saved .*step_00000001 meanwhile"):
            save(job, 1)
        assert s3.objects() == before


@pytest.mark.parametrize("there", [False, True])
def test_conditional_put(there: bool, s3: Server) -> None:
    """Another job writes between the look and the write."""
    url, files = f"{OUT}/a", paths.filesystem("s3")
    if there:
        uploads.put(url, files, "one", "")
    tag = uploads.read_tagged(url, files)[1]

    def come_between(_: object) -> None:
        if s3.requests[-1].startswith("PUT"):
            s3.faults.clear()
            s3.client().put_object(Bucket=BUCKET, Key="runs/a", Body=b"other")

    s3.faults.append(come_between)
    with pytest.raises(FileExistsError):
        uploads.put(url, files, "two", tag)
    text, tag = uploads.read_tagged(url, files)
    assert text == "other"
    uploads.put(url, files, "two", tag)
    assert uploads.read_tagged(url, files)[0] == "two"


def test_records_follow_to_another_machine(s3: Server, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with run(one) as job:
        (one / "metrics.jsonl").write_text('{"step": 1}\n')
        (one / "logs").mkdir()
        (one / "logs" / "rank_00000.log").write_text("mine")
        (one / "logs" / "rank_00001.log").write_text("of another rank")
        save(job, 1)
        (one / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
        (one / "tracker.json").write_text('{"wandb": {"id": "17"}}')
    assert "runs/run/logs/rank_00000.log" in s3.objects()
    assert "runs/run/logs/rank_00001.log" not in s3.objects()
    with run(two):
        assert (two / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
        assert (two / "tracker.json").read_text() == '{"wandb": {"id": "17"}}', "the run there is the same one"
