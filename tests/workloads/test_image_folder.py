"""A folder of images is listed as `datasets` lists it, once per machine, and again when it has changed."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from common import UserError
from common.workloads import image_folder, images
from PIL import Image

from tests.conftest import write_parquet

# Names that sort otherwise as whole paths, spaces, and what is to be left out.
CLASSES = ["b", "a", "a b", "a-b", "Z", "ö"]


def write(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)).save(path)


def settle(root: Path) -> None:
    """As if the last change had been a minute ago."""
    for path in (root, *(path for path in root.rglob("*") if path.is_dir())):
        os.utime(path, (time.time() - 60,) * 2)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    root = tmp_path / "photos"
    for split, per_class in (("train", 4), ("val", 2)):
        for i, name in enumerate(CLASSES):
            for j in range(per_class):
                write(root / split / name / f"{j} {'x' * j}.{('png', 'JPG', 'jpeg', 'bmp')[j]}", 100 * i + j)
    (root / ".DS_Store").touch()
    (root / "train" / "b" / "Thumbs.db").touch()
    settle(root)
    return root


def rows(found: datasets.Dataset) -> list[tuple[str, str]]:
    plain = found.cast_column("image", datasets.Image(decode=False))
    names = plain.features["label"].names
    return [(row["image"]["path"], names[row["label"]]) for row in plain]


def count_lists(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    real = image_folder._list

    def listed(*args: object) -> object:
        made.append(1)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(image_folder, "_list", listed)
    return made


@pytest.mark.parametrize("settled", [True, False])
def test_same_as_datasets(settled: bool, root: Path) -> None:
    if not settled:
        os.utime(root / "train")
    (root / "train" / "b" / "Thumbs.db").unlink()  # at which datasets stops
    wanted = datasets.load_dataset("imagefolder", data_dir=str(root))
    found = image_folder.load(root)
    assert found is not None
    assert found.keys() == wanted.keys() == {"train", "validation"}
    for split in wanted:
        assert found[split].features == wanted[split].features
        assert rows(found[split]) == rows(wanted[split])


def test_second_start_lists_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_lists(monkeypatch)
    first, second = (images.load(str(root), 0, False)[0] for _ in range(2))
    assert len(made) == 1
    assert first.digest() == second.digest()
    assert len(first) == 4 * len(CLASSES)


def test_ranks_list_together_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_lists(monkeypatch)
    threads = [threading.Thread(target=image_folder.load, args=(root,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


@pytest.mark.parametrize("change", ["a new image", "an image less", "a new class", "a folder renamed"])
def test_changed_folder_is_listed_again(change: str, root: Path) -> None:
    before = image_folder.load(root)
    assert before is not None
    if change == "a new image":
        write(root / "train" / "b" / "new.png", 1)
    elif change == "an image less":
        next((root / "train" / "b").glob("*.png")).unlink()
    elif change == "a new class":
        write(root / "train" / "new" / "0.png", 1)
    else:
        (root / "train" / "b").rename(root / "train" / "c")
    for settled in (False, True):
        if settled:
            settle(root)
            os.utime(root / "train", (time.time() - 50,) * 2)
            os.utime(root / "train" / "b", (time.time() - 50,) * 2) if (root / "train" / "b").exists() else None
        found = image_folder.load(root)
        assert found is not None
        assert rows(found["train"]) != rows(before["train"])
        for path, _ in rows(found["train"]):
            assert Path(path).exists()
    assert len([*(datasets.config.HF_DATASETS_CACHE / "listed").rglob("*.done")]) == 1, "old lists are deleted"


@pytest.mark.parametrize(
    "stranger", ["metadata.csv", "train/metadata.jsonl", "train/b/deep/0.png", "train/b/clip.mp4", "rest/b/0.png"]
)
def test_other_folders_are_for_datasets(stranger: str, root: Path) -> None:
    (root / stranger).parent.mkdir(parents=True, exist_ok=True)
    (root / stranger).write_bytes(b"")
    settle(root)
    assert image_folder.load(root) is None


@pytest.mark.parametrize("settled", [True, False])
def test_class_that_only_one_split_has(settled: bool, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root / "val" / "extra" / "0.png", 1)
    (root / "train" / "empty").mkdir()
    if settled:
        settle(root)
    train, _ = images.load(str(root), 0, False)
    assert train.class_names == sorted([*CLASSES, "extra"])
    assert "7 classes, of which 1 has no training image ('extra')" in capsys.readouterr().out


def test_split_without_images_is_for_datasets(root: Path) -> None:
    for path in (root / "val").rglob("*.*"):
        path.unlink()
    settle(root)
    assert image_folder.load(root) is None


def test_list_is_read_from_any_working_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_lists(monkeypatch)
    for place, name in ((root.parent, "photos"), (root, "../photos"), (root / "val", str(root))):
        monkeypatch.chdir(place)
        found = image_folder.load(Path(name))
        assert found is not None
        assert all(Path(path).is_absolute() and Path(path).exists() for path, _ in rows(found["train"]))
    assert len(made) == 1


def left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What is named at a start, and at the next one, which reads the list of the first."""
    said = []
    for _ in range(2):
        images.load(str(root), 0, False)
        lines = [line for line in capsys.readouterr().out.splitlines() if "hold no image that is read" in line]
        said.append(lines[0].partition("is read: ")[2] if lines else "")
    assert said[0] == said[1]
    return said[0].split(", ") if said[0] else []


@pytest.mark.parametrize(
    ("place", "make"),
    [
        ("train/b/photo.heic", Path.touch),
        ("train/b/notes.txt", Path.touch),
        ("train/b/none", Path.touch),
        ("train/b/folder.png", Path.mkdir),
        ("train/empty", Path.mkdir),
        ("train/with\x1b[2J.txt", Path.touch),
    ],
    ids=["other format", "text", "no suffix", "folder", "empty class", "control character"],
)
def test_what_no_split_has_is_named(
    place: str, make: Callable[[Path], None], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert left_out(root, capsys) == []
    make(root / place)
    settle(root)
    assert left_out(root, capsys) == [repr(place)[1:-1]]
    images_read = sum(len(part) for part in images.load(str(root), 0, False))
    assert images_read == 6 * len(CLASSES)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")], ids=["FIFO", "dangling link"])
def test_special_files_are_refused(make: Callable[[Path], None], root: Path) -> None:
    """`datasets` would drop them."""
    make(root / "train" / "b" / "odd.png")
    settle(root)
    with pytest.raises(UserError, match=r"odd\.png is not a regular file, but a pipe, a device or a link to nowhere"):
        images.load(str(root), 0, False)


def test_images_of_tables_are_not_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A parquet file holds its images itself."""
    assert left_out(write_parquet(tmp_path / "table", 24, 8), capsys) == []
