"""Decide what becomes of each file of a copy: from the original, the user's and the new one. It writes nothing."""

import difflib
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common import UserError, printable
from tools.copy import trees
from tools.copy.trees import File, Tree

YOURS = "yours"  # beside the marker of a conflict, where the user's lines begin
MOVED = 0.6  # of their lines that two files share, from which on one is the other, moved; git takes 0.5
MOST_CONFLICTS = 127  # from git's exit code


@dataclass(frozen=True)
class Change:
    """What becomes of one file.

    Attributes:
        kind: a key of `upgrading.KINDS`.
        path: within the copy.
        after: what is written; None for a file that goes, or that stays as it is.
        writes: whether anything is written or removed.
        lines: where conflicts begin.
        note: what else to say.
    """

    kind: str
    path: str
    after: File | None = None
    writes: bool = False
    lines: tuple[int, ...] = ()
    note: str = ""


def plan(base: Tree, mine: Tree, theirs: Tree, version: str) -> list[Change]:
    """All changes, by path.

    Args:
        base: the files that the copy was made from.
        mine: those of the copy now.
        theirs: those of the new checkout.
        version: of the new checkout, for the markers.

    Raises:
        UserError: a conflict of an earlier upgrade is still in a file, or git cannot merge.
    """
    for path, one in mine.items():
        if one.content and (lines := conflicts(one.content)):
            raise UserError(f"{path}:{lines[0]} still has the conflict of an earlier upgrade: edit it first")
    moves = _moves(base, mine, theirs)
    changes = []
    for path in sorted({*base, *theirs} - {*moves.values()}):
        if path in moves:
            to = moves[path]
            merged = _merged(to, base[path], mine[path], theirs[to], version)
            note = f"was {path}; upstream moved it, and your changes came along"
            changes.append(Change(merged.kind, to, merged.after, True, merged.lines, note))
            changes.append(Change("removed", path, None, True))
        else:
            changes += _of_file(path, base, mine, theirs, version)
    return changes


def _of_file(path: str, base: Tree, mine: Tree, theirs: Tree, version: str) -> Iterator[Change]:
    """What becomes of a file that has not moved: at most one change."""
    was, now, new = base.get(path), mine.get(path), theirs.get(path)
    if new is None:
        if now is None or was is None:
            return
        if _same(now, was):
            yield Change("removed", path, None, True)
        else:
            yield Change("kept", path, note="upstream deleted it, and you have changed it")
    elif now is None:
        if was is not None:
            above = _deleted_folder(path, base, mine)
            note = "" if _same(was, new) else "upstream has changed it"
            yield Change("absent", f"{above}/" if above else path, note=note)
        elif folder := _deleted_folder(path, base, mine):
            yield Change("left out", path, note=f"it is new, and you have deleted {folder}")
        else:
            yield Change("added", path, new, True)
    elif _same(now, new) or (was is not None and _same(was, new)):
        return
    elif was is not None and _same(now, was):
        yield Change("replaced", path, _with_bit(new.content, was, now, new), True)
    else:
        yield _merged(path, was, now, new, version)


def _same(one: File, other: File) -> bool:
    return one.digest == other.digest and one.executable == other.executable


def _with_bit(content: bytes | None, was: File | None, now: File, new: File) -> File:
    """New content that may be run if upstream says so now, unless the user has said otherwise."""
    assert content is not None
    return trees.file(content, new.executable if was is None or was.executable == now.executable else now.executable)


def _deleted_folder(path: str, base: Tree, mine: Tree) -> str:
    """The largest folder above a file that the user has deleted whole; "" if there is none."""
    for above in [str(folder) for folder in PurePosixPath(path).parents][-2::-1]:
        if any(one.startswith(f"{above}/") for one in base) and not any(one.startswith(f"{above}/") for one in mine):
            return above
    return ""


def _moves(base: Tree, mine: Tree, theirs: Tree) -> dict[str, str]:
    """Files that the user has changed and upstream has moved: from where to where."""
    found: dict[str, str] = {}
    fresh = [path for path in theirs if path not in base and path not in mine]
    for path in sorted({*base, *mine} - {*theirs}):
        was, now = base.get(path), mine.get(path)
        if was is None or was.content is None or now is None or _same(was, now):
            continue
        shares = {to: _share(was, theirs[to]) for to in fresh if to not in found.values()}
        to = max(shares, key=lambda one: shares[one], default="")
        if to and shares[to] >= MOVED:
            found[path] = to
    return found


def _share(one: File, other: File) -> float:
    """Share of their lines that two files have in common, in order."""
    if one.content is None or other.content is None:
        return 0.0
    matcher = difflib.SequenceMatcher(None, one.content.splitlines(), other.content.splitlines(), autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() >= MOVED else 0.0


def _merged(path: str, was: File | None, now: File, new: File, version: str) -> Change:
    """A file that both sides have changed, or made."""
    assert now.content is not None
    assert new.content is not None
    old = b"" if was is None else was.content
    if now.digest == new.digest or (was is not None and was.digest in (now.digest, new.digest)):
        # At least one side has changed no more than who may run it.
        content = new.content if was is not None and was.digest == now.digest else now.content
        return Change("merged", path, _with_bit(content, was, now, new), True)
    if old is None or not all(map(trees.is_text, (old, now.content, new.content))):
        return Change("binary", path, note="both sides have changed it, and it is not text: yours stays")
    content, lines = merge_text(old, now.content, new.content, version)
    if lost := Counter(now.content.splitlines()) - Counter(old.splitlines()) - Counter(content.splitlines()):
        line = printable(next(iter(lost)).decode(errors="replace"), 200)
        raise UserError(f"{path}: the merge would lose your line {line!r}, so nothing was written: merge it by hand")
    return Change("conflict" if lines else "merged", path, _with_bit(content, was, now, new), True, lines)


def merge_text(old: bytes, yours: bytes, new: bytes, version: str) -> tuple[bytes, tuple[int, ...]]:
    """Merge three ways by `git merge-file`; returns the text, and the lines in which conflicts begin."""
    with tempfile.TemporaryDirectory(prefix="brigade-merge-") as name:
        folder = Path(name)
        for part, content in (("yours", yours), ("old", old), ("new", new)):
            (folder / part).write_bytes(content)
        names = ("-L", YOURS, "-L", "before", "-L", f"Brigade {version}")
        done = trees.git(folder, "merge-file", "-p", *names, "yours", "old", "new")
    lines = conflicts(done.stdout)
    if not 0 <= done.returncode <= MOST_CONFLICTS or bool(done.returncode) != bool(lines):
        raise UserError(f"git merge-file failed: {printable(done.stderr.decode(errors='replace'))}")
    return done.stdout, lines


def conflicts(content: bytes) -> tuple[int, ...]:
    """Numbers of the lines that begin a conflict of an upgrade."""
    start = f"<<<<<<< {YOURS}".encode()
    return tuple(number for number, line in enumerate(content.splitlines(), 1) if line == start)
