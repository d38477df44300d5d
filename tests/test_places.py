"""Which folder a run may have: whose it is, and who else can change what lies in it; and what is no path."""

import errno
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from common import UserError, places, trust
from common.state import start
from common.store.place import STORES
from common.workloads import documents, splits
from torch import nn


def test_choose_names_a_folder_and_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert places.choose(str(tmp_path / "a" / "b"), "run") == tmp_path / "a" / "b" / "run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert places.choose("here", "run") == tmp_path / "here" / "run", "absolute, whatever the folder of later"
    assert places.choose("~/there", "run") == tmp_path / "home" / "there" / "run"
    assert list(tmp_path.iterdir()) == []


def test_choose_refuses_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"--out \S+/file: \S+/file cannot be written to \(Not a directory\)"):
        places.choose(str(tmp_path / "file"), "run")


def test_choose_refuses_a_home_that_nobody_has() -> None:
    with pytest.raises(UserError, match=r"^--out ~nobody-here/x: .*home directory"):
        places.choose("~nobody-here/x", "run")


def test_choose_refuses_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"^--out \S+/loop, --name run: .*(Symlink loop|symbolic links)"):
        places.choose(str(tmp_path / "loop"), "run")


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


def test_each_folder_on_the_way_is_looked_at(tmp_path: Path) -> None:
    """In one that others can write to, they could put another folder in the place of the one that it holds."""
    run = tmp_path / "a" / "b" / "run"
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "a", run.parent, run):
        folder.chmod(0o777)
        refusal = f"^{folder} is writable by every user, .*: chmod o-w {folder}; "
        with pytest.raises(UserError, match=refusal):
            places.choose(str(run.parent), "run")
        with pytest.raises(UserError, match=refusal):
            trust.refuse_replaceable(checkpoints, own=False)
        folder.chmod(0o755)
    assert places.choose(str(run.parent), "run") == run
    trust.refuse_replaceable(checkpoints)


# --- who can change it ------------------------------------------------------------------------------------

OTHER = 65534
ME = pwd.getpwuid(os.geteuid())
LAB = 54321  # a group of several users


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the system says of a folder, which only root could change in earnest."""
    found = {"st_uid": os.geteuid(), "st_gid": LAB, "st_mode": 0o755}
    result = Path.stat

    def stat_of(path: Path, **more: bool) -> os.stat_result:
        if path != tmp_path:
            return result(path, **more)
        return os.stat_result([stat.S_IFDIR | found["st_mode"], 1, 1, 1, found["st_uid"], found["st_gid"], 0, 0, 0, 0])

    monkeypatch.setattr(Path, "stat", stat_of)
    monkeypatch.setattr(os, "getgroups", lambda: [LAB])
    monkeypatch.delenv("TRUST_OPEN_FOLDERS", raising=False)
    return found


OURS, ROOTS, THEIRS = os.geteuid(), 0, OTHER
EVERY = "is writable by every user, so its checkpoints are not trusted: chmod o-w "
GROUP = f"is writable by group {LAB}: chmod g-w "
OWNER = f"belongs to another user .number {OTHER}., so its checkpoints are not trusted: use your own; "
CASES = [  # owner, mode, TRUST_OPEN_FOLDERS, refusal
    (OURS, 0o755, "", ""),
    (ROOTS, 0o755, "", ""),
    (THEIRS, 0o755, "", OWNER),
    (THEIRS, 0o1777, "", OWNER),  # the sticky bit binds all but the owner
    (ROOTS, 0o1777, "", ""),  # as /tmp
    (OURS, 0o777, "", EVERY),
    (OURS, 0o702, "", EVERY),
    (OURS, 0o777, "yes", EVERY),
    (OURS, 0o777, "group", EVERY),
    (OURS, 0o777, "1", ""),
    (THEIRS, 0o777, "1", ""),
    (OURS, 0o775, "", GROUP),
    (OURS, 0o2770, "", GROUP),
    (OURS, 0o775, "group", ""),
    (THEIRS, 0o2775, "group", ""),  # a colleague's, who has given it to the group
    (THEIRS, 0o755, "group", OWNER),
    (OURS, 0o775, "1", ""),
]


@pytest.mark.parametrize(("owner", "mode", "setting", "refusal"), CASES)
def test_folder(
    owner: int,
    mode: int,
    setting: str,
    refusal: str,
    found: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found |= {"st_uid": owner, "st_mode": mode}
    if setting:
        monkeypatch.setenv("TRUST_OPEN_FOLDERS", setting)
    if not refusal:
        return trust.refuse_open(tmp_path)
    with pytest.raises(UserError, match=f"^{tmp_path} {refusal}"):
        trust.refuse_open(tmp_path)
    return None


def test_group_of_somebody_else_is_not_trusted(
    found: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else anybody could have a folder trusted by giving it to a group of his own."""
    found |= {"st_uid": OTHER, "st_mode": 0o775, "st_gid": LAB + 1}
    monkeypatch.setenv("TRUST_OPEN_FOLDERS", "group")
    with pytest.raises(UserError, match="belongs to another user"):
        trust.refuse_open(tmp_path)


def test_folder_that_is_only_read(found: dict[str, int], tmp_path: Path) -> None:
    """Whoever names a folder to resume from trusts its owner, and nobody else."""
    found |= {"st_uid": OTHER}
    trust.refuse_open(tmp_path, own=False)
    for mode, refusal in ((0o1777, EVERY), (0o775, GROUP)):
        found["st_mode"] = mode
        with pytest.raises(UserError, match=refusal):
            trust.refuse_open(tmp_path, own=False)


@pytest.mark.parametrize(
    ("number", "name", "members", "is_own"),
    [
        (ME.pw_gid, ME.pw_name, [], True),
        (ME.pw_gid, ME.pw_name, [ME.pw_name], True),
        (ME.pw_gid, ME.pw_name, ["somebody"], False),
        (ME.pw_gid, "users", [], False),
        (LAB, ME.pw_name, [], False),
    ],
    ids=["alone", "named", "with another", "the group of all users", "not the first group"],
)
def test_umask_002(
    *, number: int, name: str, members: list[str], is_own: bool, monkeypatch: pytest.MonkeyPatch,
    found: dict[str, int], tmp_path: Path,
) -> None:  # fmt: skip
    """Where each user has a group of his own, a folder that it can write to is nobody else's."""
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group((name, "x", number, members)))
    assert trust.is_own_group(number) == is_own
    found |= {"st_gid": number, "st_mode": 0o775}
    if is_own:
        return trust.refuse_open(tmp_path)
    with pytest.raises(UserError, match="writable by group"):
        trust.refuse_open(tmp_path)
    return None


def test_group_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(grp, "getgrgid", unknown)
    assert not trust.is_own_group(ME.pw_gid)


def test_what_is_no_folder_is_not_open(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o666)
    for place in (file, file / "below", tmp_path / "missing"):
        trust.refuse_open(place)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        trust.refuse_open(tmp_path / "loop")


URLS = (
    "s3://bucket/runs",
    "gs://bucket",
    "https://host/x.bin",
    "file:///tmp/x",
    "hf://datasets/a/b",
    "S3:/x",
    "abfss://a@b/c",
)


def uses(name: str) -> dict[str, Callable[[], object]]:
    """What each flag that names a path does with it."""
    return {
        "--out": lambda: places.choose(name, "run"),
        "--resume": lambda: start.find("runs", "run", name),
        "--init": lambda: start.begin_with(name, nn.Linear(1, 1)),
        "--data": lambda: splits.load(name),
        "--tokenizer": lambda: documents.load_tokenizer(name),
    }


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("url", URLS)
def test_url_is_no_path(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path would be made of it: a folder "s3:" on this machine. Each flag that names a path refuses it."""
    monkeypatch.chdir(tmp_path)
    for flag, use in uses(url).items():
        if STORES.match(url) and flag in ("--resume", "--init"):  # tests/store has what they do with a store
            continue
        with pytest.raises(UserError, match=f"^{flag} {url} is a URL, and only files of this machine are read and"):
            use()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["a" * 5000, "/a" * 3000], ids=["a name", "a path"])
def test_what_no_file_can_be_called(name: str) -> None:
    for flag, use in uses(name).items():
        with pytest.raises(UserError, match=f"^{flag} {name[:300]}.*: File name too long$"):
            use()


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


@pytest.mark.parametrize(("users", "knows_owners"), [("0 0 4294967295", True), ("0 1000 1", False)])
def test_folders_of_others_on_the_way(
    *, users: str, knows_owners: bool, found: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with one user shows all folders of the machine as another user's, up to the root of its files."""
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: users if path.name == "uid_map" else read(path))
    run = tmp_path / "a" / "run"
    found |= {"st_uid": OTHER}
    if knows_owners:
        with pytest.raises(UserError, match=f"^{tmp_path} {OWNER}"):
            trust.refuse_replaceable(run)
    else:
        trust.refuse_replaceable(run)
    found |= {"st_mode": 0o777}
    with pytest.raises(UserError, match=f"^{tmp_path} "):
        trust.refuse_replaceable(run)
    found |= {"st_mode": 0o755}
    with pytest.raises(UserError, match=f"^{tmp_path} {OWNER}"):
        trust.refuse_replaceable(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_real_folder_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER, -1)
    tmp_path.chmod(0o1777)
    with pytest.raises(UserError, match=OWNER):
        trust.refuse_open(tmp_path)
