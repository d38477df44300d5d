"""Training and validation splits of any set that `datasets` reads: a local folder, or a set of the hub."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from common import UserError, manifest, places, ranks, seed
from common.workloads import image_folder, parsing, private_api

if TYPE_CHECKING:
    from datasets import Dataset

Split = TypeVar("Split")

HOLD_OUT = 0.1  # share of a set without a validation split that is held out as one
HUB_TIMEOUT_S = 3.0
MOST_CARD_BYTES = 2**22  # of a README.md
SAVED = ("dataset_dict.json", "state.json")  # files that save_to_disk writes: a DatasetDict's, and a Dataset's


class Source(NamedTuple):
    """What --data names: PLACE, and perhaps the name of a configuration and of a split, `PLACE:CONFIG@SPLIT`.

    Attributes:
        place: a folder, an id of the hub, or a built-in set.
        config: which of a set's configurations to read; "" for its only one.
        validates: which split to validate on; "" for the validation split.
    """

    place: str
    config: str = ""
    validates: str = ""

    @property
    def without_split(self) -> str:
        """The set, as after --data."""
        return f"{self.place}:{self.config}" if self.config else self.place

    def validating_on(self, split: str) -> str:
        """The same set with another split to validate on, as after --data."""
        return f"{self.without_split}@{split}"


def parse(name: str) -> Source:
    """What --data names. A path that exists is a place, whatever characters it has.

    Raises:
        UserError: it names nothing, which would be the working directory.
    """
    if not name.partition(":")[0]:
        raise UserError(f"--data '{name}' names no data set: give a folder, or a data set of the hub")
    if places.local("--data", name).exists():
        return Source(name)
    if named := re.fullmatch(r"(.+)@([\w.]+)", name):
        return parse(named[1])._replace(validates=named[2])
    place, _, config = name.partition(":")
    return Source(place, config)


def load(name: str) -> tuple["Dataset", "Dataset | None"]:
    """Training and validation rows of a folder or a hub id; None for a set without a validation split.

    A folder may be one that save_to_disk has written. A test split validates where there is no validation split.
    After a colon, either may have the name of one of its configurations: "Salesforce/wikitext:wikitext-2-v1". After an
    @, it may have the name of the split to validate on: "Salesforce/wikitext:wikitext-2-v1@test".

    Raises:
        UserError: there is no such folder, set or split, or it cannot be read.
    """
    import datasets  # 3 s of import, which the built-in sets do not need
    import huggingface_hub

    place, config, _ = parse(name)
    path = folder_of(name)
    folder = path.is_dir()
    if not folder and (path.is_absolute() or place.startswith((".", "~")) or place.count("/") > 1):
        raise UserError(f"--data {name}: there is no such folder")
    if not folder and not _hub_answers(place):
        # Without this, the hub's retries take half a minute or more. Offline mode still reads the local cache.
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    try:
        if folder and not config and any((path / file).is_file() for file in SAVED):
            _refuse_special(name, path)
            _check_saved(name, path)
            saved: Any = datasets.load_from_disk(path)
            found: Mapping[str, Any] = saved if isinstance(saved, dict) else {"train": saved}
        else:
            listed = image_folder.load(path) if folder and not config else None
            found = listed or _load(name, path, str(path) if folder else place, config)
            if folder and not listed:
                image_folder.note_left_out(path, found)
    except UserError:
        raise
    except Exception as error:
        problem = "this folder cannot be read" if folder else "no such folder, and not found on the hub"
        raise UserError(f"--data {name}: {problem} ({_reason(error, path)})") from error
    return choose(name, found)


def _load(name: str, path: Path, place: str, config: str) -> Mapping[str, "Dataset"]:
    """As `datasets.load_dataset`, but files of other kinds are refused, and another process parses the others."""
    import datasets

    folder = path.is_dir()
    if folder:
        _refuse_special(name, path)
        _note_links(name, path)
        _check_card(name, path)
        manifest.looks_at(path)
    builder = datasets.load_dataset_builder(place, config or None)
    parsed = Path(builder.cache_dir).exists()  # by an earlier start
    reason = "" if parsed else parsing.prepare(builder, path if folder else None, lambda error: _reason(error, path))
    if reason:
        raise UserError(f"--data {name}: this {'folder' if folder else 'set'} cannot be read ({reason})")
    builder.download_and_prepare()
    return builder.as_dataset()


def _refuse_special(name: str, folder: Path) -> None:
    """Refuse a folder with anything that is neither a file nor a folder: `datasets` would drop it, or wait for it."""
    for place, _, files in os.walk(folder):
        for file in files:
            path = Path(place, file)
            manifest.looks_at(path)
            if not file.startswith((".", "__")) and not path.is_file():
                raise UserError(
                    f"--data {name}: {path} is not a regular file, but a pipe, a device or a link to nowhere: remove it"
                )


def _note_links(name: str, folder: Path) -> None:
    """Name links to other folders: `datasets` reads none of what is there, and says nothing."""
    linked = []
    for place, folders, _ in os.walk(folder):
        paths = [Path(place, one) for one in folders if not one.startswith((".", "__"))]
        linked += [str(path) for path in paths if path.is_symlink()]
    if linked:
        ranks.print0(
            f"note: --data {name}: links to folders are not followed, and what is there is read only if a table names "
            f"it: {ranks.listed(linked)}"
        )


def _check_card(name: str, folder: Path) -> None:
    """Refuse what the YAML beside a set, which `datasets` follows, must not do: grow to gigabytes, or name other files.

    Raises:
        UserError: it does.
    """
    import yaml  # which datasets brings

    for file in (folder / "README.md", folder / ".huggingface.yaml"):
        head = manifest.read_bytes(file, MOST_CARD_BYTES).decode(errors="replace") if file.exists() else ""
        if file.suffix == ".md":  # the part between the first two lines of ---
            head = head.removeprefix("---").partition("\n---")[0] if head.startswith("---") else ""
        try:
            if "*" in head and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(head)):
                raise UserError(f"--data {name}: {file} has YAML with aliases (*name): write out what they stand for")
            asked = yaml.safe_load(head) if "configs" in head else {}
        except (yaml.YAMLError, RecursionError):
            continue  # `datasets` says what is wrong
        if isinstance(asked, Mapping):
            _refuse_elsewhere(name, file, asked.get("configs"))


def _check_saved(name: str, folder: Path) -> None:
    """Refuse a set of save_to_disk whose lists name files or splits that are not in its folder.

    Raises:
        UserError: one does.
        ValueError: a list is no JSON.
    """
    for file in (folder / SAVED[0], *folder.glob(f"**/{SAVED[1]}")):
        facts = manifest.read_json(file) if file.exists() else {}
        if isinstance(facts, Mapping):
            _refuse_elsewhere(name, file, [facts.get("splits"), facts.get("_data_files")])


def _refuse_elsewhere(name: str, file: Path, asked: Any) -> None:
    for text in _texts(asked):
        path = PurePosixPath(text)
        if "://" in text or path.is_absolute() or ".." in path.parts:
            raise UserError(
                f"--data {name}: {file} asks for {text}, which is not in the folder: copy it there, and name it so"
            )


def _texts(value: Any) -> Iterator[str]:
    """All strings in lists and dicts."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(part)


def choose(name: str, found: Mapping[str, Split]) -> tuple[Split, Split | None]:
    """The training and the validation split of those that were found; None for a set without a validation split.

    Args:
        name: as after --data; it may name the split to validate on.
        found: the splits of the set, by their names.

    Raises:
        UserError: there is no split named train, or none of the name to validate on.
    """
    source = parse(name)
    missing = [split for split in ("train", source.validates) if split and split not in found]
    if missing:
        there = ", ".join(sorted(found))
        raise UserError(f"--data {source.without_split} has no split named {missing[0]}, only {there}")
    if source.validates:
        return found["train"], found[source.validates]
    keys = [key for key in ("validation", "val", "test") if key in found]
    if keys == ["test"]:
        ranks.print0(f"data     {name}: no validation split, so its test split is used as one")
    if others := [key for key in found if key not in ("train", *keys[:1], "test")]:
        ranks.print0(
            f"data     {name}: not read: {ranks.listed(others)}, which are neither for training nor for validation"
        )
    return found["train"], found[keys[0]] if keys else None


def folder_of(name: str) -> Path:
    """Where --data is, if it is a folder: launch/torchrun.sh may have copied it to this machine's own disk."""
    return Path(os.environ.get("STAGED_DATA") or parse(name).place).expanduser()


def hold_out(name: str, train: "Dataset") -> tuple["Dataset", "Dataset"]:
    """Hold out a tenth of the rows for validation: the same ones every time, whatever the run's seed.

    Raises:
        UserError: there are fewer than two rows.
    """
    if len(train) < 2:
        raise UserError(f"--data {name} has {len(train)} row(s) and no validation split: it needs at least 2 rows")
    order = np.argsort(seed.mix(seed.HOLD_OUT, np.arange(len(train))), kind="stable")
    held_out = max(1, round(HOLD_OUT * len(train)))
    return train.select(np.sort(order[held_out:])), train.select(np.sort(order[:held_out]))


def _reason(error: BaseException, folder: Path) -> str:
    """Why `datasets` could not read a folder: its error's first cause, and the file that it was reading."""
    file = private_api.file_in(error)
    while error.__cause__:
        error = error.__cause__
    if isinstance(error, UnicodeDecodeError):
        return f"{file or 'a file'} is not UTF-8: {error.reason} at byte {error.start}; convert it, as with iconv"
    if isinstance(error, UnicodeEncodeError):
        return f"the name {os.fsencode(error.object)!r} is not UTF-8: rename the file"
    if type(error).__name__ == "SchemaInferenceError" or "corresponds to no data" in str(error):
        empty = [str(path) for path in sorted(folder.rglob("[!.]*")) if path.is_file() and not path.stat().st_size]
        return f"{empty[0] if empty else 'a split'} is empty"
    if isinstance(error, OSError) and error.filename and folder not in Path(error.filename).parents:
        return f"{error}; the cache of datasets is there: set HF_HOME to a folder that can be written to"
    if isinstance(error, ValueError) and "onfig" in str(error):  # its name is missing, or unknown
        return " ".join(str(error).split()) + "; write --data NAME:CONFIG"
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {reason}" + (f", in {file}" if file and file not in reason else "")


def _hub_answers(name: str) -> bool:
    """Whether the hub answers within seconds; a refusal counts as an answer."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError):
        return True
    except Exception:
        return False
    return True
