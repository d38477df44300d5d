"""Kills at random moments of an upload, and requests that are refused or cut at random: nothing is lost or half."""

import collections
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moto.s3.models
import pytest
import torch
from common import manifest
from common.run.process import Process
from common.state import checkpoint, saver, start, state_check
from common.store.objects import keeper as keeping
from common.store.objects import paths, uploads
from torch.distributed.device_mesh import init_device_mesh

from tests.conftest import write_text
from tests.harness import runner, states
from tests.harness.once import Once
from tests.launch.test_forkserver import alive
from tests.store import server, stored, test_recipes
from tests.store.server import BUCKET, Server
from tests.store.test_keeper import OUT, run, steps

STEPS = 6
FAULTS = int(os.environ.get("SOAK_FAULTS", "60"))  # of requests
RANK_KILLS = int(os.environ.get("SOAK_KILLS", "6"))  # of jobs of two ranks
PART = 5 * 2**20  # the least that S3 takes: each save has two of them


def state(step: int) -> dict[str, torch.Tensor]:
    """6 MB whose numbers tell the step."""
    return {"a": torch.full((3 * 2**19,), float(step)), "b": torch.arange(7.0) + step}


def named(s3: Server) -> list[str]:
    """The files that a manifest names."""
    return [
        f"{key.rpartition('/')[0]}/{name}"
        for key in s3.objects()
        if key.endswith(manifest.NAME)
        for name in json.loads(s3.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())["files"]
    ]


def save_on(folder: str, env: dict[str, str], url: str) -> None:
    """A job that resumes, and saves each step up to the last one."""
    os.environ |= env
    uploads.PART_BYTES = PART
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    process = Process(recipe=str(states.RECIPE))
    keeper = keeping.Keeper(paths.parse("--out", url) / "run", Path(folder))
    keeper.claim(process)
    step = checkpoint.newest(keeper.path)
    if step >= 0:
        path, facts = checkpoint.choose(keeper.path)
        assert facts["step"] == step, "none is damaged"
        found = {name: torch.zeros_like(one) for name, one in state(0).items()}
        checkpoint.load(path, found)
        states.check_equal(found, state(step))
    found_start = start.Found(keeper, {"seed": 3}, None, {}, step)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    check = state_check.StateCheck(torch.nn.Module(), compare=True)
    with process.background:
        one = saver.Saver(found_start, mesh, check, process, 2, False)
        for number in range(max(step, 0) + 1, STEPS + 1):
            one.save(number, state(number), 10 * number, last=number == STEPS)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kills", [1, 60])
def test_killed_at_random_moments(kills: int, s3: Server, tmp_path: Path) -> None:
    """The same command continues from the newest step whose manifest is there, and the end is as if nothing was."""
    chance = random.Random(kills)
    env = {**s3.env, "STORE_RETRY_S": "20", "STORE_LEASE_S": "2"}
    newest = 0
    for number in range(kills):
        if newest == STEPS:  # begin anew
            for key in s3.objects():
                s3.client().delete_object(Bucket=BUCKET, Key=key)
            newest = 0
        wanted = chance.randrange(1, 16)  # requests that write, until the kill

        def kill(pids: list[int], wanted: int = wanted) -> None:
            begun = len(s3.requests)

            def written() -> int:
                return sum(line.startswith(("PUT", "POST")) for line in s3.requests[begun:])

            while written() < wanted:
                time.sleep(0.002)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGKILL)

        result = runner.spawn(save_on, [(str(tmp_path / "work"), env, OUT)], meddle=kill)
        assert result.ok or result.codes == [-signal.SIGKILL], str(result)
        found = steps(s3)
        assert max(found, default=0) >= newest, f"kill {number}"
        newest = max(found, default=0)
        if newest:
            path, facts = checkpoint.choose(paths.parse("--resume", f"{OUT}/run"))
            assert facts["step"] == newest, f"kill {number}: every manifest that is there is of a whole checkpoint"
            states.check_equal(states.loaded(path, state(newest)), state(newest))
    result = runner.spawn(save_on, [(str(tmp_path / "work"), env, OUT)])
    assert result.ok, str(result)
    assert {key for key in s3.objects() if key.endswith(".safetensors")} == {*named(s3)}, "nothing is left over"
    assert s3.uploads() == []
    assert max(steps(s3)) == STEPS


@pytest.mark.usefixtures("group")
def test_random_refusals_and_cuts(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request in five is refused as busy, or its connection is cut: before it arrives, or before the answer.

    Until so many were, each save is committed, and read under the same faults; and the two that are kept are whole.
    """
    monkeypatch.setattr(uploads, "PART_BYTES", PART)
    monkeypatch.setenv("STORE_RETRY_S", "600")  # one after the other, eight in a row are no reason to give up
    monkeypatch.setenv("STORE_LEASE_S", "60")
    chance = random.Random(1)
    hits: collections.Counter[tuple[int, str]] = collections.Counter()

    def fault(_: dict[str, Any]) -> tuple[int, str] | None:
        if chance.random() > 0.2:
            return None
        drawn = chance.choice([(503, "SlowDown"), (500, "InternalError"), server.UNHEARD, server.UNANSWERED])
        hits[drawn] += 1
        return drawn

    s3.faults.append(fault)
    step = 0
    with run(tmp_path, keep=2) as job:
        while hits.total() < FAULTS or step < 2:
            step += 1
            job.save(step, state(step), 10 * step, last=True)
            path, facts = checkpoint.choose(paths.parse("--resume", f"{OUT}/run"))
            assert facts["step"] == step
            states.check_equal(states.loaded(path, state(step)), state(step))
    s3.faults.clear()
    print(f"{step} saves, {hits.total()} of {len(s3.requests)} requests failed: {dict(hits)}")
    assert steps(s3) == [step - 1, step]
    for one in (step - 1, step):
        path = paths.parse("--resume", f"{OUT}/run/checkpoints/step_{one:08d}")
        states.check_equal(states.loaded(checkpoint.choose(path)[0], state(one)), state(one))
    assert {key for key in s3.objects() if key.endswith(".safetensors")} == {*named(s3)}, "nothing is left over"
    assert s3.uploads() == []


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("victims", ["all ranks", "rank 1"])
def test_ranks_killed_in_an_upload(
    victims: str, s3: Server, once: Once, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, each of which sends a file in parts: the same command continues, with the same bits as in a folder."""
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    chance = random.Random(victims)
    data = once.folder(lambda folder: write_text(folder, 101, 12), "tiny text")
    path = str(runner.ROOT / "recipes" / "fsdp_gpt" / "train.py")
    flags = (*test_recipes.FLAGS, *runner.small("fsdp_gpt"), "--micro-batch-size", "20", "--data", str(data))
    argv = [path, *flags, "--save-every", "1", "--keep", "2", "--name", "run"]
    env = {**s3.env, "STORE_RETRY_S": "20", "STORE_LEASE_S": "10"}

    def train(out: str, meddle: Callable[[list[int]], None] | None = None) -> runner.Result:
        machine = tmp_path / "machine"
        machine.mkdir(exist_ok=True)
        args = (str(machine), env, runner.run_unmeasured, path, [*argv, "--out", out])
        return runner.spawn(stored.run, 2 * [args], runner.HANG_S, meddle)

    local = train(str(tmp_path / "runs"))
    assert local.ok, str(local)
    wanted = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()

    def parts() -> int:
        return sum("partNumber" in line and "/checkpoints/" in line for line in s3.requests)

    newest = 0
    for number in range(RANK_KILLS):
        if newest >= STEPS - 1:  # begin anew
            for key in s3.objects():
                s3.client().delete_object(Bucket=BUCKET, Key=key)
            newest = 0
        until = parts() + chance.randrange(1, 120)

        def kill(pids: list[int], until: int = until) -> None:
            while parts() < until and alive(pids[0]):  # it may end before so many were sent
                time.sleep(0.002)
            for pid in pids if victims == "all ranks" else pids[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        result = train(OUT, kill)
        assert result.codes[1] in (-signal.SIGKILL, 0), str(result)
        found = max(steps(s3), default=0)
        assert found >= newest, f"kill {number}"
        newest = found
        if newest:
            _, facts = checkpoint.choose(paths.parse("--resume", f"{OUT}/run"))
            assert facts["step"] == newest, f"kill {number}: every manifest that is there is of a whole checkpoint"
    result = train(OUT)
    test_recipes.check(s3, [result])
    assert not newest or f"resuming from step {newest} of" in result.outputs[0]
    assert test_recipes.curve(test_recipes.kept(s3, "metrics.jsonl")) == test_recipes.curve(wanted)
    assert {key for key in s3.objects() if key.endswith(".safetensors")} == {*named(s3)}, "nothing is left over"
