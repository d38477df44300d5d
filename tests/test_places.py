"""Which folder a run may have, and what is no path."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from common import UserError, places
from common.state import checkpoint, start
from common.workloads import documents, splits
from torch import nn


@pytest.mark.usefixtures("group")
def test_choose_names_a_folder_and_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert places.choose(str(tmp_path / "a" / "b"), "run") == tmp_path / "a" / "b" / "run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert places.choose("here", "run") == tmp_path / "here" / "run", "absolute, whatever the folder of later"
    assert places.choose("~/there", "run") == tmp_path / "home" / "there" / "run"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("group")
def test_choose_refuses_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"--out \S+/file: \S+/file cannot be written to \(Not a directory\)"):
        places.choose(str(tmp_path / "file"), "run")


@pytest.mark.usefixtures("group")
def test_choose_refuses_a_home_that_nobody_has() -> None:
    with pytest.raises(UserError, match=r"^--out ~nobody-here/x, --name run: .*home directory"):
        places.choose("~nobody-here/x", "run")


@pytest.mark.usefixtures("group")
def test_choose_refuses_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"^--out \S+/loop, --name run: .*(Symlink loop|symbolic links)"):
        places.choose(str(tmp_path / "loop"), "run")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("number", [*places.FULL, errno.EROFS], ids=errno.errorcode.get)
def test_full_disk_ends_no_run_that_is_there(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts again, and saves once there is room; a new one could never save. A mock: nothing can be written."""

    def refuse(**_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    (tmp_path / "old").mkdir()
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=rf"^--out \S+: {tmp_path} cannot be written to \({os.strerror(number)}\)$"):
        places.choose(str(tmp_path), "new")
    if number in places.FULL:
        assert places.choose(str(tmp_path), "old") == tmp_path / "old"
    else:
        with pytest.raises(UserError, match=rf"^--out \S+: {tmp_path}/old cannot be written to "):
            places.choose(str(tmp_path), "old")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o777, True), (0o702, True), (0o1777, False), (0o775, False), (0o755, False)], ids=oct
)
def test_folder_that_every_user_can_write_to(
    mode: int, is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless each can only remove his own files there, as in /tmp; or the user trusts all who can."""
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.delenv("TRUST_OPEN_FOLDERS", raising=False)
    if is_open:
        told = rf"^{folder} is writable by every user, .*: chmod o-w {folder}; .* set TRUST_OPEN_FOLDERS=1$"
        with pytest.raises(UserError, match=told):
            places.refuse_open(folder)
        with pytest.raises(UserError, match=told):
            places.choose(str(tmp_path), "run")
        monkeypatch.setenv("TRUST_OPEN_FOLDERS", "yes")
        with pytest.raises(UserError, match=told):
            places.refuse_open(folder)
        monkeypatch.setenv("TRUST_OPEN_FOLDERS", "1")
    places.refuse_open(folder)
    assert places.choose(str(tmp_path), "run") == folder


def test_what_is_no_folder_is_not_open(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o666)
    for place in (file, file / "below", tmp_path / "missing"):
        places.refuse_open(place)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        places.refuse_open(tmp_path / "loop")


URLS = (
    "s3://bucket/runs",
    "gs://bucket",
    "https://host/x.bin",
    "file:///tmp/x",
    "hf://datasets/a/b",
    "S3:/x",
    "abfss://a@b/c",
)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("url", URLS)
def test_url_is_no_path(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path would be made of it: a folder "s3:" on this machine. Each flag that names a path refuses it."""
    monkeypatch.chdir(tmp_path)
    flags: dict[str, Callable[[], object]] = {
        "--out": lambda: places.choose(url, "run"),
        "--resume": lambda: checkpoint.find("runs", "run", url),
        "--init": lambda: start.begin_with(url, nn.Linear(1, 1)),
        "--data": lambda: splits.load(url),
        "--tokenizer": lambda: documents.load_tokenizer(url),
    }
    for flag, use in flags.items():
        with pytest.raises(UserError, match=f"^{flag} {url} is a URL, and only files of this machine are read and"):
            use()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("group")
def test_what_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("torchvision:resnet18", "Salesforce/wikitext:wikitext-2-v1", "C:/runs", "a:b", "s3", "./s3:/x"):
        assert places.local("--init", name) == Path(name)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["../y", "a/../../y", "..", "/elsewhere", ".", "./"])
def test_name_stays_in_out(name: str, tmp_path: Path) -> None:
    """Otherwise a run would lie beside --out, or be all of it."""
    with pytest.raises(UserError, match=r"^--name \S+ would be no folder in --out "):
        places.choose(str(tmp_path / "runs"), name)
    for inside in ("a/b", "..y", "~", " x"):
        assert places.choose(str(tmp_path / "runs"), inside) == tmp_path / "runs" / inside
