"""Where a run's checkpoints lie is chosen here, once: what the rest of common/ calls is the same for all places."""

import re
from pathlib import Path
from typing import Any

from common import UserError, places, ranks
from common.store import disk

try:
    from common.store.objects import keeper, paths
except ModuleNotFoundError:  # deleted, see docs/adapt.md: then a run lies in a folder
    keeper = paths = None  # type: ignore[assignment]

STORES = re.compile("(s3|gs|az|hf)://")


def at(flag: str, value: str | Path) -> Any:
    """What a flag names: a path of this machine, or one in an object store, with the same methods.

    Raises:
        UserError: as `places.local` and `paths.parse`; or common/store/objects was deleted.
    """
    value = str(value)
    if not STORES.match(value):
        return places.local(flag, value)
    if not paths:
        raise UserError(f"{flag} {value} needs common/store/objects, which this project does not have: copy it again")
    return paths.parse(flag, value)


def choose(out: str, name: str) -> Any:
    """The run `name` in --out: a `Disk`, or a `Keeper` with the same methods (all ranks).

    Raises:
        UserError: it cannot be used.
    """
    if not STORES.match(out):
        return disk.Disk(Path(ranks.from_rank0(lambda: str(places.choose(out, name)))))
    place = at("--out", out)
    # What does not go there, such as the log, is written in a folder of this machine.
    working = Path("runs", *(part.rstrip(":") for part in place.parts))
    return keeper.Keeper(place / name, Path(ranks.from_rank0(lambda: str(places.choose(str(working), name)))))
