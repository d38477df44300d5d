"""Make a copy of a recipe, with the record that an upgrade needs."""

import os
import shlex
import shutil
import tempfile
from pathlib import Path

from common import UserError
from tools.copy import records, trees
from tools.copy.trees import File


def copy(root: Path, recipe: str, folder: Path) -> str:
    """Copy a recipe of the checkout in `root` to a new folder, in one rename; returns what to print.

    Raises:
        UserError: there is no such recipe, or the folder holds something.
    """
    checkout = trees.of_checkout(root)
    name = Path(recipe).name
    if name not in trees.recipes(checkout) or Path(recipe).parts[-2:-1] not in ((), ("recipes",)):
        raise UserError(f"{recipe} is not one of the recipes: {', '.join(trees.recipes(checkout))}")
    if Path(recipe).exists() and Path(recipe).resolve() != (root / "recipes" / name).resolve():
        raise UserError(f"{recipe} is not of {root}, the checkout of this tool: run the tool that lies beside it")
    if os.path.lexists(folder) and not (folder.is_dir() and not folder.is_symlink() and not [*folder.iterdir()]):
        raise UserError(f"{folder} is there already: name a folder that is not, or use --upgrade {folder}")
    files = trees.copied(checkout, name)
    version = trees.version(files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for path, one in files.items():
            write(staged / path, one)
        for path, content in record_files(records.Record(version, name, trees.upgraded(files))).items():
            write(staged / records.FOLDER / path, trees.file(content))
        staged.chmod(0o777 & ~umask())  # mkdtemp lets nobody else in
        staged.replace(folder)  # also over an empty folder
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return (
        f"{folder}: {len(files)} files of recipes/{name}, {', '.join(trees.PARTS)}, without what only other recipes "
        f"import; Brigade {version}\n"
        f"start    cd {shlex.quote(str(folder))} && bash launch/torchrun.sh .\n"
        f"upgrade  python -m tools.copy --upgrade {shlex.quote(str(folder))}   (in a newer checkout; needs .brigade/)"
    )


def record_files(record: records.Record) -> dict[str, bytes]:
    """The files of the folder .brigade/."""
    return {records.NAME: records.pack(record), "README.md": records.README.encode()}


def write(path: Path, one: File, synced: bool = False) -> None:
    """Write a new file, and the folders that it lies in; `synced` also flushes it to the disk."""
    assert one.content is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as opened:
        opened.write(one.content)
        if synced:
            opened.flush()
            os.fsync(opened.fileno())
    if one.executable:
        path.chmod(path.stat().st_mode | (0o111 & ~umask()))


def umask() -> int:
    """The bits that new files lack."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
