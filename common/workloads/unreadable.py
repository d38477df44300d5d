"""Images that cannot be decoded, and those that take their places: what --skip-unreadable does."""

import sys
from typing import TYPE_CHECKING, Any

import torch

from common import UserError, printable, ranks
from common.workloads import parsing

if TYPE_CHECKING:
    from datasets import Dataset

Cell = dict[str, Any] | None  # an encoded image as `datasets` has it, "bytes" and "path"
MOST = 0.05  # share of a split; if more cannot be decoded, the set is damaged
NAMED = 3  # images that each rank names when it finds them, and rank 0 when it counts them


class UnreadableImageError(UserError):
    """The content of one image is damaged. A file that the disk does not give is not: it may in the next minute."""


class Unreadable:
    """The images of one split that cannot be decoded, as far as they have been tried.

    The next image of the split that can be decoded takes the place of each, with its own label. So an index gives the
    same image and label to any rank, worker and run that resumes, and neither the number of samples nor the order of
    the others changes. In a set that is sorted by class, as a folder is, the next one is mostly of the same class.

    Loader workers share the marks with the process that has forked them, which counts them. None tries an image again.

    Attributes:
        all_ranks_read: whether all ranks read the same images, as at the start; then only rank 0 names them.
    """

    def __init__(self, rows: "Dataset", name: str, split: str) -> None:
        """Begin without any.

        Args:
            rows: the split, one column of encoded images.
            name: the flag --data, for messages.
            split: "training" or "validation", for messages.
        """
        self.all_ranks_read = True
        self._rows = rows
        self._name = name
        self._split = split
        self._marks = torch.zeros(len(rows), dtype=torch.bool).share_memory_()
        self._reported = 0

    def __contains__(self, index: int) -> bool:
        return bool(self._marks[index])

    def add(self, index: int, error: UnreadableImageError) -> None:
        """Mark an image that cannot be decoded, and name the first few.

        Raises:
            UserError: there are more than `MOST` of the split.
        """
        self._marks[index] = True
        number = int(self._marks.sum())
        self._check(number)
        note = f"note: --skip-unreadable: {error}; the next {self._split} image takes its place"
        if number <= NAMED and self.all_ranks_read:
            ranks.print0(note)
        elif number <= NAMED:
            sys.stderr.write(f"{printable(note)}\n")
            sys.stderr.flush()

    def report(self) -> None:
        """Print how many images all ranks have found so far, if there are new ones (all ranks).

        Raises:
            UserError: there are more than `MOST` of the split.
        """
        found = sorted(set().union(*ranks.gather(self._marks.nonzero().flatten().tolist())))
        if len(found) > self._reported:
            self._reported = len(found)
            cells = parsing.cells(self._rows, found[:NAMED])[self._rows.column_names[0]]
            names = ", ".join(image_name(cell, index) for cell, index in zip(cells, found, strict=False))
            ranks.print0(
                f"note: --skip-unreadable: {len(found):,} of the {len(self._marks):,} {self._split} images could not "
                f"be decoded so far, and others took their places: {names}{', ...' * (len(found) > NAMED)}"
            )
        self._check(len(found))

    def _check(self, number: int) -> None:
        count = len(self._marks)
        if number > max(1, MOST * count) or number == count:
            raise UserError(
                f"--skip-unreadable: {number:,} of the {count:,} {self._split} images of --data {self._name} cannot be "
                f"decoded, and at most {MOST:.0%} may be skipped: repair or remove them"
            )


def image_name(cell: Cell, index: int) -> str:
    """The path of an encoded image, or the number of its row."""
    return (cell and cell["path"]) or f"row {index}"
