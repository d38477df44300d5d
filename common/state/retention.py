"""Which checkpoints of a run stay: the newest undamaged ones, and the best."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common import UserError, manifest, ranks
from common.state import checkpoint

BEST = "best"  # the file that names the best checkpoint, if a run keeps it


class Retention:
    """Deletes the older checkpoints of one run after each commit."""

    def __init__(self, keep: int, together: Callable[[Callable[[], Any]], list[Any]]) -> None:
        """Know of no checkpoint yet.

        Args:
            keep: undamaged checkpoints to keep.
            together: lets every rank do its part; returns all results, or raises a UserError on every rank.
        """
        self._keep = keep
        self._together = together
        self._whole: dict[str, list[tuple[Any, ...]]] = {}  # see `_look`

    def tidy(self, place: Any, final: Path, best_step: int) -> None:
        """Point `latest` to the newest checkpoint, and delete the oldest ones (all ranks).

        Args:
            place: where it lies: a `Disk`, or what has its methods.
            final: the checkpoint that was just committed.
            best_step: a step whose checkpoint is kept beside the newest ones; -1 for none.
        """
        try:
            older, best, whole = self._together(lambda: self._look(place, final, best_step))[0]
            kept = 1
            while older and kept < self._keep:
                name = older.pop(0)
                kept += name in whole or self._is_whole(place, final.with_name(name))
            if dist.get_rank() == 0:
                pointers = {"latest": final.name, BEST: best}  # the first is for people; `find` does not read it
                place.tidy(final, {name: text for name, text in pointers.items() if text}, map(final.with_name, older))
        except (UserError, OSError) as error:
            ranks.print0(f"warning: {final} is saved, but an older checkpoint could not be deleted: {error}")

    def _look(self, place: Any, final: Path, best_step: int) -> tuple[list[str], str, list[str]]:
        """Names of the older checkpoints, of the best one, and of those that this process knows to be whole (rank 0).

        The best one is that of before if its save has failed. What was written or read here once is not read again at
        each save, as long as no program has changed it; a bit that flips on the disk meanwhile is found when the
        checkpoint is loaded.
        """
        self._whole[final.name] = place.stamps(final)
        found = checkpoint.committed(final.parents[1])
        now = {path.name: place.stamps(path) for path in found if path.name in self._whole}
        self._whole = {name: stamps for name, stamps in now.items() if stamps == self._whole[name]}
        best = checkpoint.folder(final.parents[1], best_step).name
        if best not in (path.name for path in found):
            pointer = final.with_name(BEST)
            best = manifest.read_bytes(pointer).decode(errors="replace") if pointer.is_file() else ""
        # Newer ones must be damaged, otherwise this run would have resumed from them: they do not count as kept.
        older = [path.name for path in found if checkpoint.step_of(path) < checkpoint.step_of(final)]
        return [name for name in older if name != best], best, [*self._whole]

    def _is_whole(self, place: Any, path: Path) -> bool:
        """Read an older checkpoint, each rank a part of it (all ranks); remember that it is whole."""
        faults = self._together(lambda: manifest.verify(path, dist.get_rank(), dist.get_world_size())[1])
        if not any(faults):
            self._whole[path.name] = place.stamps(path)
        return not any(faults)
