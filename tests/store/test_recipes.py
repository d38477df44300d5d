"""Recipes whose runs lie in a store: as a run in a folder, on any number of ranks, bit for bit where that is."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import write_text
from tests.harness import runner, states
from tests.harness.once import Once
from tests.store.server import BUCKET, Server

STEPS = 6
OUT = f"s3://{BUCKET}/runs"
FLAGS = (
    *("--max-steps", str(STEPS), "--global-batch-size", "40", "--warmup-steps", "2", "--log-every", "1"),
    *("--eval-every", "1000", "--save-every", "2", "--dtype", "float64"),
)
RECIPES = [
    "fsdp_gpt",
    pytest.param("tensor_gpt", marks=pytest.mark.rest),
    pytest.param("pipeline_gpt", marks=pytest.mark.rest),
]


def train(path: str, argv: list[str], folder: str, env: dict[str, str], without: str) -> None:
    """Run a train.py in a folder of its own, with the environment that leads to the store, without a package."""
    if without:
        sys.modules[without] = None  # type: ignore[assignment]
    with contextlib.chdir(folder):
        os.environ |= env
        runner.run_unmeasured(path, argv)


@pytest.fixture
def data(once: Once) -> Path:
    return once.folder(lambda folder: write_text(folder, 101, 12), "tiny text")


def run(s3: Server, recipe: str, size: int, data: Path, folder: Path, *flags: str, without: str = "") -> runner.Result:
    """Train on ranks, on a machine whose disk is `folder`."""
    folder.mkdir(exist_ok=True)
    layout = runner.layout(recipe, size)
    depth = ("--num-layers", "5") if "--pp" in layout.flags else ()
    how = (*runner.small(recipe), *layout.flags, *depth, *layout.micro_batches(20), "--data", str(data))
    path = str(runner.ROOT / "recipes" / recipe / "train.py")
    argv = [path, *FLAGS, *how, "--name", "run", *flags]
    env = {**s3.env, "STORE_RETRY_S": "20", "STORE_LEASE_S": "4"}
    start = runner.spawn if without else runner.rerun
    return start(train, size * [(path, argv, str(folder), env, without)])


def tool(s3: Server, folder: Path, name: str, *args: str) -> str:
    """What a tool prints."""
    result = subprocess.run(
        [sys.executable, "-m", f"tools.{name}", *args],
        cwd=runner.ROOT,
        env={**os.environ, **s3.env, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=runner.HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def curve(text: str, tag: str = "train/loss") -> dict[int, float]:
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["step"]: line[tag] for line in lines if tag in line}


def kept(s3: Server, name: str) -> str:
    return str(s3.client().get_object(Bucket=BUCKET, Key=f"runs/run/{name}")["Body"].read().decode())


def check(s3: Server, results: Sequence[runner.Result]) -> None:
    """All went well, every rank has written its part, and nobody has printed a secret."""
    for result in results:
        assert result.ok, str(result)
        assert s3.env["AWS_SECRET_ACCESS_KEY"] not in str(result)
        assert s3.env["AWS_ACCESS_KEY_ID"] not in str(result)
    for key in s3.objects():
        content = s3.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        assert s3.env["AWS_SECRET_ACCESS_KEY"].encode() not in content, key
        assert s3.env["AWS_ACCESS_KEY_ID"].encode() not in content, key
    assert not [key for key in s3.objects() if "tmp" in key]
    assert s3.uploads() == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_ranks_and_other_machines(recipe: str, s3: Server, data: Path, tmp_path: Path) -> None:
    """Two ranks, then one on a machine that has nothing, then two again: the training of a run in a folder."""
    local = run(s3, recipe, 2, data, tmp_path / "a", "--out", str(tmp_path / "runs"))
    assert local.ok, str(local)
    assert s3.objects() == []
    wanted = curve((tmp_path / "runs" / "run" / "metrics.jsonl").read_text())
    parts = [run(s3, recipe, 2, data, tmp_path / "a", "--out", OUT, "--stop-after", "2")]
    assert curve(kept(s3, "metrics.jsonl")) == {step: wanted[step] for step in (1, 2)}, "the same bits on as many ranks"
    files = json.loads(kept(s3, "checkpoints/step_00000002/MANIFEST.json"))["files"]
    assert len(files) == 2, "each rank has written a part"
    parts.append(run(s3, recipe, 1, data, tmp_path / "b", "--out", OUT, "--stop-after", "4"))
    parts.append(run(s3, recipe, 2, data, tmp_path / "a", "--out", OUT, "--async-save"))
    check(s3, parts)
    for step, result in zip((2, 4), parts[1:], strict=True):
        assert f"resuming from step {step} of {OUT}/run/checkpoints/step_0000000{step}" in result.outputs[0]
    found = curve(kept(s3, "metrics.jsonl"))
    assert found == curve((tmp_path / "a" / "runs" / "s3" / BUCKET / "runs" / "run" / "metrics.jsonl").read_text())
    assert found == pytest.approx(wanted, rel=1e-9)
    assert list(found) == [*range(1, STEPS + 1)]
    assert not [*tmp_path.glob("*/s3:*")], "no folder is called so"


def test_same_ranks_bitwise(s3: Server, data: Path, tmp_path: Path) -> None:
    """Two ranks stop and resume: the same bits as a run in a folder, however often it stops."""
    local = run(s3, "ddp_gpt", 2, data, tmp_path / "a", "--out", str(tmp_path / "runs"))
    parts = [run(s3, "ddp_gpt", 2, data, tmp_path / "a", "--out", OUT, *more) for more in (("--stop-after", "4"), ())]
    check(s3, [local, *parts])
    wanted = curve((tmp_path / "runs" / "run" / "metrics.jsonl").read_text())
    assert list(wanted) == [*range(1, STEPS + 1)]
    assert curve(kept(s3, "metrics.jsonl")) == wanted
    assert "runs/run/logs/rank_00001.log" in s3.objects(), "each rank copies its own"


def test_other_runs_and_tools_read_from_there(s3: Server, data: Path, tmp_path: Path) -> None:
    """--resume, --init and the tools read from a store what they read from a folder."""
    folder = tmp_path / "runs" / "run"
    there = f"{OUT}/run/checkpoints/step_00000004"
    local = run(s3, "ddp_gpt", 2, data, tmp_path / "a", "--out", str(folder.parent))
    whole = run(s3, "ddp_gpt", 2, data, tmp_path / "a", "--out", OUT)
    resumed = run(s3, "ddp_gpt", 2, data, tmp_path / "b", "--out", str(tmp_path / "others"), "--resume", there)
    begun = [
        run(s3, "ddp_gpt", 1, data, tmp_path / "c", "--out", str(tmp_path / name), "--init", init)
        for name, init in (("from_store", f"{OUT}/run"), ("from_folder", str(folder)))
    ]
    check(s3, [local, whole, resumed, *begun])
    wanted = curve((folder / "metrics.jsonl").read_text())
    assert curve((tmp_path / "others" / "run" / "metrics.jsonl").read_text()) == {s: wanted[s] for s in (5, 6)}
    curves = [curve((tmp_path / f"from_{one}" / "run" / "metrics.jsonl").read_text()) for one in ("store", "folder")]
    assert curves[0] == curves[1] != wanted

    wanted_lines, found_lines = (tool(s3, tmp_path, "evaluate", run) for run in (str(folder), f"{OUT}/run"))
    assert "val/loss" in found_lines
    assert found_lines.replace(f"{OUT}/run", str(folder)) == wanted_lines
    assert f"step 4 of {there}: " in tool(s3, tmp_path, "evaluate", f"{OUT}/run", "--checkpoint", "4")
    assert "optimizer.blocks.0" in tool(s3, tmp_path, "checkpoint", "inspect", there)
    listed = tool(s3, tmp_path, "checkpoint", "verify", f"{OUT}/run").splitlines()
    assert listed == [f"OK      {OUT}/run/checkpoints/step_0000000{step}" for step in (6, 4)]
    tool(s3, tmp_path, "checkpoint", "export", f"{OUT}/run", "--out", str(tmp_path / "there.safetensors"))
    tool(s3, tmp_path, "checkpoint", "export", str(folder), "--out", str(tmp_path / "here.safetensors"))
    states.check_equal(*(load_file(tmp_path / f"{where}.safetensors") for where in ("there", "here")))


def test_two_jobs_of_one_name(s3: Server, data: Path, tmp_path: Path) -> None:
    """Begun at once on two machines: one trains, the other one is refused, and the run is the one of a folder."""
    found: dict[str, runner.Result] = {}

    def begin(name: str) -> None:
        found[name] = run(s3, "ddp_gpt", 1, data, tmp_path / name, "--out", OUT)

    threads = [threading.Thread(target=begin, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = [str(result) for result in found.values()]
    assert sorted(result.ok for result in found.values()) == [False, True], texts
    (refused,) = [result for result in found.values() if not result.ok]
    assert "is in use by process" in str(refused), str(refused)
    assert list(curve(kept(s3, "metrics.jsonl"))) == [*range(1, STEPS + 1)]


def test_last_save_that_fails_names_the_copy_on_this_machine(s3: Server, data: Path, tmp_path: Path) -> None:
    """Two ranks; the store takes no more from step 3 on."""
    whole = run(s3, "ddp_gpt", 2, data, tmp_path / "a", "--out", str(tmp_path / "runs"))
    wanted = curve((tmp_path / "runs" / "run" / "metrics.jsonl").read_text())
    first = run(s3, "ddp_gpt", 2, data, tmp_path / "a", "--out", OUT, "--stop-after", "2")
    s3.refuse("PUT", r"checkpoints/step", 10**6, 403, "AccessDenied")
    second = run(s3, "ddp_gpt", 2, data, tmp_path / "a", "--out", OUT, "--stop-after", "4")
    s3.faults.clear()
    copy = tmp_path / "a" / "runs" / "s3" / BUCKET / "runs" / "run" / "checkpoints" / "step_00000004"
    assert whole.ok
    assert first.ok
    assert not second.ok
    assert f"It was saved to {copy} instead: continue with --resume {copy} and another --name" in str(second)
    third = run(s3, "ddp_gpt", 2, data, tmp_path / "a", "--out", f"s3://{BUCKET}/other", "--resume", str(copy))
    assert third.ok, str(third)
    text = s3.client().get_object(Bucket=BUCKET, Key="other/run/metrics.jsonl")["Body"].read().decode()
    assert curve(text) == {step: wanted[step] for step in (5, 6)}


def test_missing_package_trains_nowhere(s3: Server, data: Path, tmp_path: Path) -> None:
    """The line that installs it, and no folder called s3: on this machine."""
    result = run(s3, "ddp_gpt", 1, data, tmp_path / "a", "--out", OUT, without="s3fs")
    assert not result.ok
    assert f"--out {OUT} needs the package s3fs: pip install s3fs" in str(result)
    assert not list((tmp_path / "a").iterdir())
    assert s3.objects() == []
