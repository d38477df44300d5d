"""Ways to damage a checkpoint, each with what `manifest.verify` must report of it.

A file is replaced, never written to: in a copy that is made of hard links, the original stays as it is.
"""

import random
from collections.abc import Callable
from pathlib import Path

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


DAMAGES: dict[str, Callable[[Path], str]] = {
    "a bit of a data file": flip_data,
    "a bit of the manifest": flip_manifest,
    "a file cut short": truncate_data,
    "a missing file": delete_data,
    "a missing manifest": delete_manifest,
    "a manifest that is none": replace_manifest,
    "a manifest cut short": cut_manifest,
    "an empty manifest": empty_manifest,
}
