"""What a copy was made from: .brigade/base.tar.gz, which anybody may have written, and so is read with care.

Its first member says the format, Brigade's version, the recipe, and each file's digest; the others are the original
text files, at their places. `tar -xzf my_project/.brigade/base.tar.gz -C elsewhere` shows them.
"""

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common import UserError, printable
from tools.copy import trees
from tools.copy.trees import File, Tree

FOLDER = ".brigade"
NAME = "base.tar.gz"
MANIFEST = ".manifest.json"  # hidden, so no file of a copy is called so
FORMAT = 1
README = """# How this copy stays up to date

This project began as a copy of a recipe of Brigade. `base.tar.gz` holds the files as they were then. A newer checkout
of Brigade needs them to merge its changes with yours: `python -m tools.copy --upgrade PROJECT`, run there. Commit this
folder. `before-*.tar.gz` are your files before an upgrade: `tar -xzf` in the project puts them back.
"""


@dataclass(frozen=True)
class Record:
    """What a copy was made from.

    Attributes:
        version: of Brigade.
        recipe: its name.
        files: all of them; what is not text has no content.
    """

    version: str
    recipe: str
    files: Tree


def pack(record: Record) -> bytes:
    """The archive: of the same files, the same bytes."""
    files = {path: {"sha256": one.digest, "executable": one.executable} for path, one in sorted(record.files.items())}
    facts = {"format": FORMAT, "brigade": record.version, "recipe": record.recipe, "files": files}
    text = {path: one for path, one in record.files.items() if one.content is not None and trees.is_text(one.content)}
    return archive({MANIFEST: trees.file(json.dumps(facts, indent=1).encode())} | text)


def archive(files: Mapping[str, File]) -> bytes:
    """A .tar.gz of files in memory, without anything of this machine or this moment."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, one in sorted(files.items()):
            assert one.content is not None
            member = tarfile.TarInfo(path)
            member.size = len(one.content)
            member.mode = 0o755 if one.executable else 0o644
            tar.addfile(member, io.BytesIO(one.content))
    return gzip.compress(packed.getvalue(), mtime=0)


def unpack(content: bytes) -> Record:
    """Read an archive of `pack`, of which nothing is extracted.

    Raises:
        UserError: it is damaged, larger than any copy, or names a file outside of it.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            plain = stream.read(trees.MOST_BYTES + 1)
        if len(plain) > trees.MOST_BYTES:
            raise UserError(f"it holds more than {trees.MOST_BYTES:,} bytes")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            found = trees.read_tar(tar)
        facts = json.loads(found.pop(MANIFEST).content or b"")
        if facts["format"] != FORMAT:
            raise UserError(f"it has format {facts['format']!r:.40}, and this checkout reads format {FORMAT}")
        files = {}
        for path, entry in facts["files"].items():
            one = found.pop(path, None)
            files[path] = File(str(entry["sha256"]), one.content if one else None, bool(entry["executable"]))
            if one and one.digest != files[path].digest:
                raise UserError(f"it holds another {path!r:.300} than it says")
        if strange := [path for path in (*found, *files) if path in found or not trees.is_safe(path)]:
            raise UserError(f"it names {strange[0]!r:.300}, which no copy has")
        return Record(printable(str(facts["brigade"]), 40), printable(str(facts["recipe"]), 100), files)
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"it is damaged ({type(error).__name__})") from error
    except RecursionError as error:
        raise UserError("it is damaged (too many brackets)") from error


def read(folder: Path) -> Record | None:
    """The record of a copy; None if it has none.

    Raises:
        UserError: there is one that cannot be used.
    """
    path = folder / FOLDER / NAME
    if path.is_symlink() or (folder / FOLDER).is_symlink():
        raise UserError(f"{path} is a link, or lies behind one: put the folder there that it leads to")
    if not path.exists():
        return None
    try:
        if not path.is_file() or path.stat().st_size > trees.MOST_BYTES:
            raise UserError("it is not a file of the size of a record")
        return unpack(path.read_bytes())
    except UserError as error:
        raise UserError(
            f"{path} cannot be used: {error}. --from CHECKOUT upgrades without it: name what the copy was made from"
        ) from error
