"""The files of a checkout, of a commit and of a copy, as dicts from a path to its content."""

import ast
import functools
import hashlib
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common import UserError, printable

PARTS = ("common", "launch", "pyproject.toml")  # of a checkout, that a copy gets beside the files of its recipe
# What may lie in a checkout and is not of it, as .gitignore says; names that begin with a dot are left out as well.
LEFT_OUT = re.compile(r"__pycache__|runs|dist|uv\.lock|.*\.egg-info|slurm-.*\.log|\..*")
WORKLOADS = "common/workloads/"
SITE = "launch/site.sh"  # the user's own, which launch/slurm.sh reads: copied, and never upgraded
MOST_FILES = 5_000
MOST_BYTES = 2**26  # of all files together
GIT_S = 60.0  # a limit for hangs


@dataclass(frozen=True)
class File:
    """A file at one time.

    Attributes:
        digest: SHA-256 of the content.
        content: None for one that is not text, in a record.
        executable: whether its owner may run it.
    """

    digest: str
    content: bytes | None
    executable: bool = False


Tree = dict[str, File]  # by path, with "/" between folders


def file(content: bytes, executable: bool = False) -> File:
    """A file of this content."""
    return File(hashlib.sha256(content).hexdigest(), content, executable)


def is_text(content: bytes) -> bool:
    """Whether git would merge it: it looks for a zero byte, too."""
    return b"\0" not in content


def is_safe(path: str) -> bool:
    """Whether a path that a stranger may have written stays within a folder, and away from hidden ones such as .git."""
    parts = path.split("/")
    return (
        len(path) <= 300 and path.isprintable() and "\\" not in path and all(part and part[0] != "." for part in parts)
    )


def of_checkout(root: Path) -> Tree:
    """All files of a checkout that a copy of some recipe would get.

    Raises:
        UserError: it is not a checkout, or a link lies in it.
    """
    found: Tree = {}
    for top in ("recipes", *PARTS):
        for path in [root / top] if (root / top).is_file() else sorted((root / top).rglob("*")):
            inside = path.relative_to(root)
            if any(LEFT_OUT.fullmatch(part) for part in inside.parts):
                continue
            if path.is_symlink():
                raise UserError(f"{path} is a link: put the file or folder there that it leads to")
            if path.is_file():
                found[inside.as_posix()] = file(path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return _checked(found, str(root))


def of_commit(root: Path, ref: str) -> Tree:
    """The same of a commit of the repository in `root`.

    Raises:
        UserError: there is no such commit.
    """
    commit = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if commit.returncode:
        raise UserError(f"--from {ref} is neither a folder nor a commit of {root}: name an older checkout or a commit")
    archive = git(root, "archive", "--format=tar", commit.stdout.decode().strip())
    if archive.returncode:
        raise UserError(f"--from {ref}: git archive failed: {printable(archive.stderr.decode(errors='replace'))}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout), mode="r:") as tar:
        found = read_tar(tar, lambda path: path.split("/")[0] in ("recipes", *PARTS))
    return _checked({path: one for path, one in found.items() if is_safe(path)}, f"--from {ref}")


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder.

    Raises:
        UserError: git is not installed, or does not end.
    """
    try:
        return subprocess.run(  # noqa: S603
            ["git", "-C", str(folder), "-c", "merge.conflictStyle=merge", *words],  # noqa: S607 (git as users have it)
            capture_output=True,
            timeout=GIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise UserError("git is not installed, and an upgrade merges with it") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"git {words[0]} did not end within {GIT_S:.0f} s") from None


def read_tar(tar: tarfile.TarFile, wanted: Callable[[str], bool] = lambda path: True) -> Tree:
    """The regular files of an archive in memory; nothing is extracted, so no path of it can lead anywhere.

    Raises:
        UserError: it holds too much.
    """
    found: Tree = {}
    num_bytes = 0
    for number, member in enumerate(tar):
        if not member.isreg() or not wanted(member.name):
            continue
        num_bytes += max(member.size, 0)
        if number > MOST_FILES or num_bytes > MOST_BYTES:
            raise UserError(f"it holds more than {MOST_FILES:,} files or {MOST_BYTES:,} bytes")
        if opened := tar.extractfile(member):
            found[member.name] = file(opened.read(), bool(member.mode & 0o100))
    return found


def _checked(found: Tree, name: str) -> Tree:
    """A checkout's files, if it is one."""
    if not recipes(found) or "common/__init__.py" not in found:
        raise UserError(f"{name} is not a checkout of Brigade: it has no recipes/*/train.py with common/ beside")
    return found


def recipes(checkout: Mapping[str, File]) -> list[str]:
    """Names of the recipes of a checkout."""
    return sorted(path.split("/")[1] for path in checkout if re.fullmatch(r"recipes/[^/]+/train\.py", path))


def copied(checkout: Tree, recipe: str, keep: Collection[str] = ()) -> Tree:
    """The files of a copy of a recipe: the recipe's own are at its top, as `cp -r` puts them.

    Args:
        checkout: all files.
        recipe: its name.
        keep: workloads that come along although they are `foreign`.
    """
    own = f"recipes/{recipe}/"
    found = {path.removeprefix(own): one for path, one in checkout.items() if path.startswith(own)}
    left_out = foreign(checkout, recipe) - {*keep}
    shared = {path: one for path, one in checkout.items() if path.split("/")[0] in PARTS and path not in left_out}
    return shared | found


def foreign(checkout: Tree, recipe: str) -> set[str]:
    """Modules of common/workloads/ that other recipes import and this one does not, such as the GPT beside a ResNet.

    What no recipe imports stays, with what it imports: data sets of users begin there.
    """
    everything = {path for path in checkout if path.startswith(WORKLOADS) and path.endswith(".py")}
    programs = [path for path in checkout if path.endswith(".py") and path not in everything]
    shared = [path for path in programs if not path.startswith("recipes/")]
    own = [path for path in programs if path.startswith(f"recipes/{recipe}/")]
    try:
        for_users = everything - _imported(checkout, programs)
        return everything - for_users - _imported(checkout, [*own, *shared, *for_users])
    except (SyntaxError, ValueError):  # somebody is editing: rather too much than too little
        return set()


def _imported(checkout: Tree, programs: Iterable[str]) -> set[str]:
    """Modules of common/workloads/ that programs import, also through each other."""
    todo = [*programs]
    found: set[str] = set()
    while todo:
        for name in _imports(checkout[todo.pop()].content or b""):
            path = f"{name.replace('.', '/')}.py"
            if path.startswith(WORKLOADS) and path in checkout and path not in found:
                found.add(path)
                todo.append(path)
    return found


@functools.cache
def _imports(content: bytes) -> frozenset[str]:
    """Names that may be modules, of all imports of a program."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(found)


def upgraded(tree: Tree) -> Tree:
    """Those of these files that an upgrade may touch."""
    return {path: one for path, one in tree.items() if path != SITE}


def version(tree: Mapping[str, File]) -> str:
    """The version of Brigade that a checkout or a copy says it is; "unknown" if it says nothing."""
    for path, pattern in (("common/__init__.py", r'^__version__ = "(.+)"'), ("pyproject.toml", r'^version = "(.+)"')):
        one = tree.get(path)
        text = one.content.decode(errors="replace") if one and one.content else ""
        if found := re.search(pattern, text, re.MULTILINE):
            return printable(found[1], 40)
    return "unknown"


def of_copy(folder: Path, paths: set[str]) -> Tree:
    """Those of these files that a copy has.

    Raises:
        UserError: a link lies on the way to one of them: what is written there would change something else.
    """
    found: Tree = {}
    for path in sorted(paths):
        place = folder / path
        for part in [place, *(folder / above for above in PurePosixPath(path).parents)][:-1]:
            if part.is_symlink():
                raise UserError(f"{part} is a link: put the file or folder there that it leads to, then upgrade")
        if place.is_file():
            found[path] = file(place.read_bytes(), bool(place.stat().st_mode & 0o100))
        elif os.path.lexists(place):
            raise UserError(f"{place} is a folder or a special file, where Brigade has a file: move it away")
    return found
