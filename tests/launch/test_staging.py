"""STAGE_DIR of launch/torchrun.sh: data that is copied once to each machine's own disk."""

import os
import shutil
from pathlib import Path

import pytest
from common.workloads import splits

from tests.conftest import write_parquet
from tests.launch.test_launch import LAUNCHER, launch, popen, wait


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "shared" / "my set"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "a b.bin").write_bytes(b"abc")
    (folder / "link.bin").symlink_to("train/a b.bin")
    return folder


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Instead of torchrun: says what it would have read."""
    script = tmp_path / "python"
    script.write_text('#!/bin/bash\necho "read ${STAGED_DATA-nothing staged}"\n')
    script.chmod(0o755)
    return str(script)


def test_copied_once_and_again_when_it_changes(data: Path, python: str, tmp_path: Path) -> None:
    local = tmp_path / "local" / "disk"
    variables = {"PYTHON": python, "STAGE_DIR": str(local)}

    def read(flag: str) -> tuple[Path, bool]:
        result = launch("recipes/ddp_resnet", *flag.split("|"), **variables)
        assert result.returncode == 0, result.stderr
        return Path(result.stdout.strip().removeprefix("read ")), f"copying {data} to" in result.stderr

    staged, copied = read(f"--epochs|1|--data|{data}")
    assert copied
    assert staged.parent == local
    assert (staged / "train" / "a b.bin").read_bytes() == b"abc"
    assert not (staged / "link.bin").is_symlink(), "what it points to would not be on this disk"
    assert read(f"--data={data}") == (staged, False)
    for part in ("@test", ":one", ":one@test"):  # the recipe takes it from the flag
        assert read(f"--data={data}{part}") == (staged, False)
    (data / "train" / "a b.bin").write_bytes(b"abcd")
    again, copied = read(f"--data={data}")
    assert copied
    assert again != staged
    assert (again / "train" / "a b.bin").read_bytes() == b"abcd"
    shutil.rmtree(again)
    (again.parent / f"{again.name}.partial").mkdir()  # as a launch leaves it that was killed
    assert read(f"--data={data}") == (again, True)
    assert not list(local.glob("*.partial*"))


def test_two_launches_copy_once(data: Path, python: str, tmp_path: Path) -> None:
    (data / "large.bin").write_bytes(os.urandom(50_000_000))
    variables = {"PYTHON": python, "STAGE_DIR": str(tmp_path / "local")}
    command = ["bash", LAUNCHER, "recipes/ddp_resnet", "--data", data]
    results = [wait(one) for one in [popen(command, tmp_path, variables) for _ in range(3)]]
    assert [result.returncode for result in results] == [0, 0, 0]
    assert len({result.stdout for result in results}) == 1
    assert sum("copying" in result.stderr for result in results) == 1


def test_without(data: Path, python: str) -> None:
    """Nothing is left over from an outer launch."""
    result = launch("recipes/ddp_resnet", "--data", data, PYTHON=python, STAGED_DATA="/elsewhere")
    assert result.stdout == "read nothing staged\n"


@pytest.mark.parametrize("flags", [[], ["--data", "digits"], ["--data", "./nowhere"], ["--data"]])
def test_no_folder(flags: list[str], python: str, tmp_path: Path) -> None:
    result = launch("recipes/ddp_resnet", *flags, PYTHON=python, STAGE_DIR=str(tmp_path / "local"))
    assert result.returncode == 2
    assert f"--data {flags[-1] if len(flags) > 1 else 'digits'} is not a folder: unset STAGE_DIR" in result.stderr


def test_disk_that_cannot_be_written(data: Path, python: str) -> None:
    result = launch("recipes/ddp_resnet", "--data", data, PYTHON=python, STAGE_DIR="/dev/null/local")
    assert result.returncode == 2
    assert "STAGE_DIR=/dev/null/local cannot be created" in result.stderr


def test_read_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_parquet(tmp_path / "local", 20, 5)
    monkeypatch.setenv("STAGED_DATA", str(folder))
    train, validation = splits.load(str(tmp_path / "shared"))
    assert (len(train), len(validation)) == (20, 5)
