"""Training and validation splits of any set that `datasets.load_dataset` reads: a local folder, or a set of the hub."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common import UserError, seed

if TYPE_CHECKING:
    from datasets import Dataset

HOLD_OUT = 0.1  # share of a set without a validation split that is held out as one
HUB_TIMEOUT_S = 3.0


def load(name: str) -> tuple["Dataset", "Dataset"]:
    """Training and validation rows of a folder or a hub id.

    From a set without a validation split, the same rows are held out every time, whatever the run's seed.

    Raises:
        UserError: there is no such folder or set, or it cannot be read.
    """
    import datasets  # 3 s of import, which the built-in sets do not need
    import huggingface_hub

    # launch/torchrun.sh has copied the folder to this machine's own disk.
    path = Path(os.environ.get("STAGED_DATA") or name).expanduser()
    folder = path.is_dir()
    if not folder and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise UserError(f"--data {name}: there is no such folder")
    if not folder and not _hub_answers(name):
        # Without this, the hub's retries take half a minute or more. Offline mode still reads the local cache.
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(str(path) if folder else name)
    except Exception as error:
        problem = "no file in this folder can be read" if folder else "no such folder, and not found on the hub"
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise UserError(f"--data {name}: {problem} ({type(error).__name__}: {reason})") from error
    if "train" not in found:
        raise UserError(f"--data {name} has no split named train, only {', '.join(found)}")
    train = found["train"]
    for key in ("validation", "val", "test"):
        if key in found:
            return train, found[key]
    order = np.argsort(seed.mix(seed.HOLD_OUT, np.arange(len(train))), kind="stable")
    held_out = max(1, round(HOLD_OUT * len(train)))
    return train.select(np.sort(order[held_out:])), train.select(np.sort(order[:held_out]))


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
