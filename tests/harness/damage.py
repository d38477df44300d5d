"""Ways to damage a checkpoint, each with what `manifest.verify` must report of it.

A file is replaced, never written to: in a copy that is made of hard links, the original stays as it is.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import manifest


def overwrite(file: Path, content: bytes) -> None:
    """Replace a file, and not the other names that it has."""
    file.unlink()
    file.write_bytes(content)


def flip_bit(file: Path, bit: int) -> None:
    """Change one bit of a file; done twice, nothing has changed."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    overwrite(file, bytes(content))


def flip_random_bit(file: Path, choose: random.Random) -> int:
    """Change a random bit of a file; returns which one."""
    bit = choose.randrange(8 * file.stat().st_size)
    flip_bit(file, bit)
    return bit


def truncate(file: Path, size: int) -> None:
    """Keep only the first `size` bytes of a file."""
    overwrite(file, file.read_bytes()[:size])


def data_file(checkpoint: Path) -> Path:
    """One of the files that hold tensors."""
    return max(checkpoint.glob("*.safetensors"))


def flip_data(checkpoint: Path) -> str:
    """Change a bit of a number, not of the header."""
    file = data_file(checkpoint)
    flip_bit(file, 8 * file.stat().st_size - 3)
    return f"{file.name} has changed since it was written"


def flip_manifest(checkpoint: Path) -> str:
    """Change a bit of the position in the data: the number stays a number."""
    file = checkpoint / manifest.NAME
    flip_bit(file, 8 * (file.read_text().index('"samples": ') + len('"samples": ')))
    return f"{manifest.NAME} has changed since it was written"


def truncate_data(checkpoint: Path) -> str:
    """Cut the last byte off."""
    file = data_file(checkpoint)
    size = file.stat().st_size
    truncate(file, size - 1)
    return f"{file.name} has {size - 1} bytes instead of {size}"


def delete_data(checkpoint: Path) -> str:
    """Delete a file of tensors."""
    file = data_file(checkpoint)
    file.unlink()
    return f"{file.name} is missing"


def delete_manifest(checkpoint: Path) -> str:
    """Delete the manifest."""
    (checkpoint / manifest.NAME).unlink()
    return f"{manifest.NAME} cannot be read"


def empty_manifest(checkpoint: Path) -> str:
    """Keep nothing of the manifest."""
    truncate(checkpoint / manifest.NAME, 0)
    return f"{manifest.NAME} cannot be read"


def cut_manifest(checkpoint: Path) -> str:
    """Keep the beginning of the manifest."""
    truncate(checkpoint / manifest.NAME, 100)
    return f"{manifest.NAME} cannot be read"


def replace_manifest(checkpoint: Path) -> str:
    """JSON, and no manifest."""
    overwrite(checkpoint / manifest.NAME, b"[]")
    return f"{manifest.NAME} cannot be read"


def add_tensors(checkpoint: Path) -> str:
    """Put a file beside the others, as a sync tool does: its name comes last, and its numbers differ."""
    file = data_file(checkpoint)
    copy = checkpoint / f"zz-{file.stem} (conflicted copy).safetensors"
    shutil.copy(file, copy)
    flip_bit(copy, 8 * copy.stat().st_size - 3)
    return f"{copy.name} is not in {manifest.NAME}"


def renumber(checkpoint: Path) -> str:
    """Put an older checkpoint in the place of this one."""
    older = min(checkpoint.parent.glob("step_*"))
    shutil.rmtree(checkpoint)
    shutil.copytree(older, checkpoint)
    return f"it is of step {int(older.name[5:])}, and the folder's number is {int(checkpoint.name[5:])}"


def rewrite_manifest(checkpoint: Path, **changes: Any) -> None:
    """Change entries of the manifest and seal it again, as only a program can; None removes an entry."""
    facts = json.loads((checkpoint / manifest.NAME).read_text()) | changes
    facts = {key: value for key, value in facts.items() if value is not None and key not in ("sha256", "format")}
    (checkpoint / manifest.NAME).unlink()
    manifest.write(checkpoint, facts, facts.pop("files"))


def name_no_files(checkpoint: Path) -> str:
    """A manifest whose digest is right, and that vouches for nothing."""
    rewrite_manifest(checkpoint, files={})
    return f"{manifest.NAME} names no files"


def forget_samples(checkpoint: Path) -> str:
    """A manifest whose digest is right, without the position in the data."""
    rewrite_manifest(checkpoint, samples=None)
    return f"{manifest.NAME} has samples None instead of a number"


def nest_manifest(checkpoint: Path) -> str:
    """JSON that is too deep to read."""
    overwrite(checkpoint / manifest.NAME, b"[" * 100_000)
    return f"{manifest.NAME} cannot be read"


def pipe_manifest(checkpoint: Path) -> str:
    """A pipe, which could be read for ever."""
    (checkpoint / manifest.NAME).unlink()
    os.mkfifo(checkpoint / manifest.NAME)
    return f"{manifest.NAME} cannot be read"


def pipe_data(checkpoint: Path) -> str:
    """A pipe in the place of a file of tensors."""
    file = data_file(checkpoint)
    file.unlink()
    os.mkfifo(file)
    return f"{file.name} cannot be read (not a regular file)"


def link_to_itself(checkpoint: Path) -> str:
    """A folder that is a link to itself."""
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to(checkpoint.name)
    return f"{manifest.NAME} cannot be read"


DAMAGES: dict[str, Callable[[Path], str]] = {
    "a bit of a data file": flip_data,
    "a bit of the manifest": flip_manifest,
    "a file cut short": truncate_data,
    "a missing file": delete_data,
    "a missing manifest": delete_manifest,
    "a manifest that is none": replace_manifest,
    "a manifest cut short": cut_manifest,
    "an empty manifest": empty_manifest,
    "a file of tensors that the manifest does not name": add_tensors,
    "another checkpoint under its number": renumber,
    "a manifest that names no files": name_no_files,
    "a manifest without the position": forget_samples,
    "a manifest of 100,000 brackets": nest_manifest,
    "a pipe as the manifest": pipe_manifest,
    "a pipe as a file of tensors": pipe_data,
    "a link to itself": link_to_itself,
}
