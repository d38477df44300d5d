"""A folder of images in subfolders of classes, listed once per machine.

`datasets` resolves dozens of patterns over all files at every start: half an hour for a million of them. Here one
process lists them, and the others, and every later start, read its list.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from common import UserError, manifest, ranks
from common.workloads import parsing

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

# Names of subfolders, as `datasets` has them.
SPLITS = {
    "train": "train",
    "training": "train",
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
IGNORED = {"Thumbs.db"}  # beside hidden files
_ABOUT = re.compile(r".*/(Thumbs\.db|metadata\.(csv|jsonl|parquet)|(README|LICENSE)[^/]*)$")  # which hold no sample
SETTLED_S = 2.0  # a folder that changed so shortly ago may change again without a new time
WAIT_S = 600.0


def load(root: Path) -> dict[str, "Dataset"] | None:
    """The splits of a folder `<split>/<class>/<image>`: columns "image" and "label", as `datasets` would read them.

    Returns:
        None for a folder that has anything else in it, which is for `datasets`.

    Raises:
        UserError: another process has been listing the folder for too long.
    """
    root = root.resolve()  # the list holds whole paths, and is read from any working directory
    found = _folders(root)
    if found is None:
        return None
    listed = _listed(root, found)
    if listed:
        classes = {path.name for folders in found.values() for path in folders}
        empty = classes - {name for rows in listed.values() for name in rows.features["label"].names}
        _note(root, [str(path) for folders in found.values() for path in folders if path.name in empty])
    return listed


def _listed(root: Path, found: dict[str, list[Path]]) -> dict[str, "Dataset"] | None:
    """The splits of a folder with these folders of classes, from the list that an earlier start has made."""
    import datasets

    times = [(str(path), path.stat().st_mtime_ns) for paths in ([root], *found.values()) for path in paths]
    key = hashlib.sha256(repr(times).encode()).hexdigest()[:16]
    settled = max(changed for _, changed in times) / 1e9 < time.time() - SETTLED_S
    if not settled:
        listed = _list(found)
        return listed and {split: datasets.Dataset(table) for split, table in listed.items()}
    place = datasets.config.HF_DATASETS_CACHE / "listed" / hashlib.sha256(str(root).encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(place / "lock", timeout=WAIT_S)  # the system releases it if its holder dies
    try:
        with lock:
            done = place / f"{key}.done"
            if not _is_whole(done):
                for old in place.glob("*.*"):  # lists of the folder as it was
                    old.unlink()
                listed = _list(found)
                if listed is None:
                    return None
                for split, table in listed.items():
                    _write(table, place / f"{key}.{split}.arrow")
                manifest.sync(place)
                manifest.replace(done, json.dumps({path.name: manifest.seal(path) for path in place.glob("*.arrow")}))
            # Opened under the lock: another start deletes them once the folder has changed.
            files = place.glob(f"{key}.*.arrow")
            return {path.name.split(".")[1]: datasets.Dataset.from_file(str(path)) for path in files}
    except filelock.Timeout as error:
        raise UserError(
            f"--data {root}: another process has held {error.lock_file} for {WAIT_S:.0f} s while listing the images: "
            "stop it, or wait"
        ) from error


def note_left_out(root: Path, found: Mapping[str, "Dataset"]) -> None:
    """Print what lies in a folder of images and is in no split: `datasets` drops other files, FIFOs and dangling links.

    Args:
        root: the folder.
        found: its splits; nothing is printed of other sets than files of images.
    """
    import datasets
    import pyarrow.compute as pc

    if ranks.rank() != 0:
        return
    read: set[str] = set()
    for rows in found.values():
        column = next((key for key, kind in rows.features.items() if isinstance(kind, datasets.Image)), "")
        paths = pc.struct_field(rows.data.column(column), "path").to_pylist() if column else []
        if not paths or not str(paths[0]).startswith(f"{root.resolve()}{os.sep}"):  # a table, or an archive
            return
        read.update(paths)
    left = []
    for place, folders, files in os.walk(root.resolve()):
        folders[:] = [name for name in folders if not name.startswith(".")]
        left += [path for path in (os.path.join(place, name) for name in files) if path not in read]
        left += [] if folders or files else [place]
    _note(root, [path for path in left if not (os.path.basename(path).startswith(".") or _ABOUT.match(path))])


def _note(root: Path, left: Sequence[str]) -> None:
    if left:
        names = [repr(os.path.relpath(path, root.resolve()))[1:-1] for path in sorted(left)]
        ranks.print0(
            f"note: --data {root}: {len(left):,} files or folders hold no image that is read: {ranks.listed(names)}"
        )


def _is_whole(done: Path) -> bool:
    """Whether a list is there, and as it was written: `done` has the digests of its files."""
    try:
        files = manifest.read_json(done)
        found = {path.name: manifest.seal(path) for path in done.parent.glob("*.arrow") if manifest.size(path)}
    except (OSError, ValueError):
        return False
    return bool(files) and files == found


def with_images(rows: "Dataset", root: Path) -> "Dataset":
    """The rows with the images that a column of paths names, such as that of a CSV; as they are if none does.

    Args:
        rows: a table.
        root: the folder to which the paths are relative, unless they are absolute.
    """
    import datasets

    for key, kind in rows.features.items():
        if str(getattr(kind, "dtype", "")).endswith("string"):
            paths = parsing.column(rows, key)
            first = next((path for path in paths if path), "")
            if Path(first).suffix.lower() in SUFFIXES and (root / first).is_file():
                whole = [path and str(root / path) for path in paths]
                return rows.remove_columns(key).add_column(key, whole).cast_column(key, datasets.Image())
    return rows


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    manifest.looks_at(folder)
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith(".") and entry.name not in IGNORED)


def _folders(root: Path) -> dict[str, list[Path]] | None:
    """The folders of the classes of each split; None if there is anything else, or no training split."""
    found: dict[str, list[Path]] = {}
    for split in _entries(root):
        if not split.is_dir() or SPLITS.get(split.name) is None or SPLITS[split.name] in found:
            return None
        classes = []
        for entry in _entries(Path(split.path)):
            if not entry.is_dir():
                return None
            classes.append(Path(entry.path))
        found[SPLITS[split.name]] = sorted(classes)
    return found if found.get("train") else None


def _list(folders: dict[str, list[Path]]) -> dict[str, "pa.Table"] | None:
    """A table of the images of each split; None if a file is not an image, or a split has none."""
    import datasets
    import pyarrow as pa

    images: dict[str, list[str]] = {}
    for split, classes in folders.items():
        entries = [entry for folder in classes for entry in _entries(folder)]
        if not entries or any(
            Path(entry.name).suffix.lower() not in SUFFIXES or not entry.is_file() for entry in entries
        ):
            return None
        # As whole paths, as `datasets` sorts them: the order of the samples depends on it.
        images[split] = sorted(entry.path for entry in entries)
    classes_of = {split: [os.path.basename(os.path.dirname(path)) for path in paths] for split, paths in images.items()}
    names = sorted(set().union(*classes_of.values()))
    numbers = {name: i for i, name in enumerate(names)}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    found = {}
    for split, paths in images.items():
        labels = pa.array([numbers[name] for name in classes_of[split]], pa.int64())
        cells = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), pa.array(paths)], ["bytes", "path"])
        found[split] = pa.table([cells, labels], schema=features.arrow_schema)
    return found


def _write(table: "pa.Table", path: Path) -> None:
    import pyarrow as pa

    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    manifest.sync(path)
