"""Training and validation splits of any set that `datasets` reads: a local folder, or a set of the hub."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from common import UserError, places, ranks, seed
from common.workloads import image_folder, private_api

if TYPE_CHECKING:
    from datasets import Dataset

Split = TypeVar("Split")

HOLD_OUT = 0.1  # share of a set without a validation split that is held out as one
HUB_TIMEOUT_S = 3.0
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
    """What --data names. A path that exists is a place, whatever characters it has."""
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
            saved = datasets.load_from_disk(path)
            found = saved if isinstance(saved, dict) else {"train": saved}
        else:
            listed = image_folder.load(path) if folder and not config else None
            found = listed or datasets.load_dataset(str(path) if folder else place, config or None)
            if folder and not listed:
                image_folder.note_left_out(path, found)
    except UserError:
        raise
    except Exception as error:
        problem = "this folder cannot be read" if folder else "no such folder, and not found on the hub"
        raise UserError(f"--data {name}: {problem} ({_reason(error, path)})") from error
    return choose(name, found)


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
        raise UserError(f"--data {source.without_split} has no split named {missing[0]}, only {', '.join(found)}")
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
