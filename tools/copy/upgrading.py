"""Upgrade a copy: plan it in memory, write it so that a kill at any moment loses nothing, and say what was done.

What is written stands first in .brigade/upgrade/, with the files as they were. The new record is what ends an upgrade:
until it has its place, the next call puts back the files that were written, and begins again.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common import UserError
from tools.copy import copying, merging, records, trees
from tools.copy.merging import Change
from tools.copy.records import Record
from tools.copy.trees import Tree

# Kind of a change -> what is printed before its files, in this order.
KINDS = {
    "conflict": "conflict",  # path:line for each
    "binary": "conflict",
    "kept": "kept",
    "absent": "stays deleted",
    "left out": "left out",
    "merged": "merged",
    "added": "added",
    "removed": "removed",
    "replaced": "replaced",
}
OWN = ("conflict", "binary", "kept", "left out", "merged")  # each file on a line of its own
JOURNAL, PARTIAL, PLAN, BACKUP = "upgrade", "upgrade.partial", "plan.json", "before.tar.gz"


@dataclass(frozen=True)
class Done:
    """What an upgrade has done: what to print, and how many conflicts wait."""

    text: str
    conflicts: int


def upgrade(root: Path, folder: Path, origin: str = "", recipe: str = "", dry_run: bool = False) -> Done:
    """Merge the checkout in `root` into a copy.

    Args:
        root: the new checkout.
        folder: the copy.
        origin: what it was made from: a checkout's folder, or a commit; "" for what its record says.
        recipe: the recipe to upgrade to; "" for the one that it was made from.
        dry_run: write nothing.

    Raises:
        UserError: it is not a copy, or it is in a state that cannot be merged; nothing was written.
        OSError: it cannot be read or written to; what was written has been put back.
    """
    if not (folder / "train.py").is_file() or not (folder / "common").is_dir():
        raise UserError(f"{folder} is not a copy of a recipe: it has no train.py with a folder common/ beside it")
    with _alone(folder):
        lines = _recover(folder, dry_run)
        checkout = trees.of_checkout(root)
        base = _base(root, folder, origin, recipe)
        wanted = Path(recipe or base.recipe).name
        if wanted not in trees.recipes(checkout):
            known = ", ".join(trees.recipes(checkout))
            raise UserError(f"{root} has no recipes/{wanted}: take its successor by --recipe, one of {known}")
        theirs = trees.upgraded(trees.copied(checkout, wanted, keep=base.files))
        new = Record(trees.version(theirs), wanted, theirs)
        mine = trees.of_copy(folder, {*base.files, *theirs})
        changes = merging.plan(base.files, mine, theirs, new.version)
        backup = "" if dry_run else _write(folder, mine, changes, new)
    lines += report(folder, base, new, changes, backup, dry_run)
    return Done("\n".join(lines), sum(change.kind in ("conflict", "binary") for change in changes))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second upgrade of the same copy out until this one ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another upgrade of {folder} is running: wait until it ends") from None
        yield
    finally:
        os.close(handle)


def _base(root: Path, folder: Path, origin: str, recipe: str) -> Record:
    """What the copy was made from: by its record, or by what the user names."""
    if not origin:
        record = records.read(folder)
        if record is None:
            raise UserError(
                f"{folder} has no record of its origin ({records.FOLDER}/{records.NAME}): give --from an older "
                "checkout, or a commit or tag of this repository"
            )
        return record
    checkout = trees.of_checkout(Path(origin)) if Path(origin).is_dir() else trees.of_commit(root, origin)
    known = trees.recipes(checkout)
    name = Path(recipe).name if Path(recipe).name in known else _most_like(checkout, folder)
    files = trees.upgraded(trees.copied(checkout, name, keep=checkout))  # as `cp -r` makes it
    return Record(trees.version(files), name, files)


def _most_like(checkout: Tree, folder: Path) -> str:
    """The recipe whose train.py has the most lines in common with that of a copy, as a share of both."""
    mine = Counter((folder / "train.py").read_bytes().splitlines())

    def share(name: str) -> float:
        lines = Counter((checkout[f"recipes/{name}/train.py"].content or b"").splitlines())
        return (lines & mine).total() / (lines.total() + mine.total())

    return max(trees.recipes(checkout), key=share)


# --- What is written ---------------------------------------------------------------------------------------


def _write(folder: Path, mine: Tree, changes: Sequence[Change], new: Record) -> str:
    """Write all changes and the new record; returns the name of the backup, "" if no file has changed."""
    own = folder / records.FOLDER
    writes = [change for change in changes if change.writes]
    record = own / records.NAME
    if not writes and record.is_file() and record.read_bytes() == records.pack(new):
        return ""
    own.mkdir(exist_ok=True)
    before = {change.path: mine[change.path] for change in writes if change.path in mine}
    try:
        shutil.rmtree(own / PARTIAL, ignore_errors=True)
        _stage(folder, before, writes, new)
        (own / PARTIAL).rename(own / JOURNAL)
    except OSError:
        shutil.rmtree(own / PARTIAL, ignore_errors=True)
        raise
    try:
        _apply(folder, before, writes)
        (own / JOURNAL / records.NAME).replace(record)  # from here on, the upgrade is done
    except (OSError, UserError):
        _put_back(folder)
        raise
    gone = {parent for change in writes if not change.after for parent in PurePosixPath(change.path).parents}
    for parent in sorted(map(str, gone - {PurePosixPath()}), key=len, reverse=True):
        with contextlib.suppress(OSError):  # something else is in it
            (folder / parent).rmdir()
    return _tidy(folder)


def _stage(folder: Path, before: Tree, writes: Sequence[Change], new: Record) -> None:
    """Write everything beside: each file as it is and as it will be, their digests, the backup and the new record."""
    partial = folder / records.FOLDER / PARTIAL
    after = {change.path: change.after for change in writes if change.after}
    for part, tree in (("old", before), ("new", after)):
        for path, one in tree.items():
            copying.write(partial / part / path, one, synced=True)
            if path in before:
                (partial / part / path).chmod(_mode(folder / path, one.executable))
    digests = {change.path: [_digest(before.get(change.path)), _digest(change.after)] for change in writes}
    staged = {PLAN: json.dumps(digests, indent=1).encode(), **copying.record_files(new)}
    if before:
        record = folder / records.FOLDER / records.NAME
        kept = {f"{records.FOLDER}/{records.NAME}": trees.file(record.read_bytes())} if record.is_file() else {}
        staged[BACKUP] = records.archive(before | kept)
    for name, content in staged.items():
        copying.write(partial / name, trees.file(content), synced=True)


def _apply(folder: Path, before: Tree, writes: Sequence[Change]) -> None:
    """Move the staged files to their places, and flush the folders."""
    journal = folder / records.FOLDER / JOURNAL
    for change in writes:
        now = trees.of_copy(folder, {change.path}).get(change.path)
        if _digest(now) != _digest(before.get(change.path)):
            raise UserError(f"{folder / change.path} was edited while the upgrade ran: run it again")
        if change.after:
            (folder / change.path).parent.mkdir(parents=True, exist_ok=True)
            (journal / "new" / change.path).replace(folder / change.path)
        else:
            (folder / change.path).unlink(missing_ok=True)
    (journal / "README.md").replace(folder / records.FOLDER / "README.md")
    _sync(folder, [change.path for change in writes])


def _digest(one: trees.File | None) -> str:
    return one.digest if one else ""


def _mode(path: Path, executable: bool) -> int:
    """The mode of a file, in which who may read it may also run it, or nobody may."""
    mode = path.stat().st_mode & 0o7777
    if bool(mode & 0o100) == executable:
        return mode
    return mode | (mode & 0o444) >> 2 if executable else mode & ~0o111


def _sync(folder: Path, paths: Sequence[str]) -> None:
    """Flush the entries of the folders that have changed."""
    for place in {folder, *((folder / path).parent for path in paths)}:
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _tidy(folder: Path) -> str:
    """Keep the backup of an upgrade that is done, and remove the rest of what it needed; returns the backup's name."""
    own = folder / records.FOLDER
    kept = ""
    if (own / JOURNAL / BACKUP).is_file():
        taken = {path.name for path in own.iterdir()}
        numbers = (f"before-{number}.tar.gz" for number in range(1, len(taken) + 2))
        kept = next(name for name in numbers if name not in taken)
        (own / JOURNAL / BACKUP).replace(own / kept)
    (own / JOURNAL).replace(own / PARTIAL)
    shutil.rmtree(own / PARTIAL)
    return kept


def _put_back(folder: Path) -> int:
    """Undo an upgrade that has not come to its end; returns the number of files that are as they were again.

    A file that somebody has edited since then stays: the next merge takes it as it is.
    """
    own = folder / records.FOLDER
    journal = own / JOURNAL
    try:
        plan = {
            path: (str(before), str(after))
            for path, (before, after) in json.loads((journal / PLAN).read_text()).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{journal / PLAN} is damaged: compare the files with those in {journal}, then remove it"
        ) from error
    if strange := [path for path in plan if not trees.is_safe(path)]:
        raise UserError(f"{journal / PLAN} names {strange[0]!r:.300}, which no copy has: remove {journal}")
    back = 0
    for path, (before, after) in plan.items():
        now = _digest(trees.of_copy(folder, {path}).get(path))
        if now == after and before != after:
            if before:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (journal / "old" / path).replace(folder / path)
            else:
                (folder / path).unlink()
            back += 1
    journal.replace(own / PARTIAL)
    shutil.rmtree(own / PARTIAL)
    return back


def _recover(folder: Path, dry_run: bool) -> list[str]:
    """Bring a copy whose last upgrade was killed into one state; returns what to print."""
    own = folder / records.FOLDER
    if own.is_symlink():
        raise UserError(f"{own} is a link: put the folder there that it leads to")
    if not (own / JOURNAL).is_dir():
        return []
    if dry_run:
        raise UserError(f"the last upgrade of {folder} was interrupted: without --dry-run, it is put right first")
    if not (own / JOURNAL / records.NAME).exists():
        _tidy(folder)
        return []
    return [f"the last upgrade was interrupted: {_put_back(folder)} files are as they were before it"]


# --- What is printed ---------------------------------------------------------------------------------------


def report(folder: Path, base: Record, new: Record, changes: Sequence[Change], backup: str, dry_run: bool) -> list[str]:
    """What has become of the files, or would."""
    kind = "would be upgraded" if dry_run else "upgraded"
    moved = f", now {new.recipe}" if new.recipe != base.recipe else ""
    lines = [f"{folder}: {base.recipe}{moved}, {kind} from Brigade {base.version} to {new.version}"]
    for one, word in KINDS.items():
        of_kind = [change for change in changes if change.kind == one]
        if one == "absent":
            lines += [f"  {word:<13} {text}" for text in _by_folder(of_kind)]
        elif one in OWN:
            lines += [f"  {word:<13} {text}" for change in of_kind for text in _lines_of(change)]
        elif of_kind:
            lines.append(f"  {word:<13} {_listed(of_kind)}")
    if not changes:
        lines.append("  nothing to do: it has all of this version, and your changes")
    if backup:
        place = folder / records.FOLDER / backup
        lines.append(f"  as it was     {place}   (tar -xzf, in {folder}, puts it back)")
    if found := [change for change in changes if change.kind == "conflict"]:
        num = sum(len(change.lines) for change in found)
        lines.append(
            f"conflicts: {num}. In each, keep what you need of the lines between <<<<<<< {merging.YOURS} and >>>>>>>, "
            "and delete the three markers"
        )
    return lines


def _lines_of(change: Change) -> list[str]:
    """A file of which each conflict, or the file, is a line."""
    note = f"   ({change.note})" if change.note else ""
    return [f"{change.path}:{line}{note}" for line in change.lines] or [f"{change.path}{note}"]


def _listed(changes: Sequence[Change]) -> str:
    """Few paths as they are, many by number and folder."""
    if len(changes) <= 5:
        return ", ".join(change.path for change in changes)
    tops = sorted({change.path.split("/")[0] for change in changes})
    return f"{len(changes)} files, in {', '.join(tops)}"


def _by_folder(absent: Sequence[Change]) -> list[str]:
    """Files that the user has deleted, a whole folder in one line."""
    counts = Counter(change.path for change in absent)
    folders = [f"{path}   ({counts[path]} files)" for path in counts if path.endswith("/")]
    return [*folders, *(_lines_of(change)[0] for change in absent if not change.path.endswith("/"))]
