"""Encoded images of a table to pixels: read, decoded, turned and converted, or replaced where they cannot be."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from common import UserError, manifest, ranks
from common.workloads import parsing
from common.workloads.unreadable import Cell, Unreadable, UnreadableImageError, image_name

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL import Image

# What Pillow may open a file as, whatever its name: of its others, EPS starts a program.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
MOST_BYTES = 2**30  # of an encoded image
MOST_PIXELS = 178_956_970  # of a decoded one, half a GB in colour: as many as Pillow takes
_noted: list[str] = []  # the image of 16 bits that the note has named


def cells(rows: "Dataset", indices: np.ndarray) -> list[Cell]:
    """Encoded images of one column, read together: one by one would take `datasets` a quarter of the time."""
    return parsing.cells(rows, indices.tolist())[rows.column_names[0]]


def decode_or_next(
    rows: "Dataset",
    index: int,
    unreadable: Unreadable | None,
    channels: int = 0,
    size: tuple[int, int] | None = None,
    cell: Cell = None,
    least_side: int = 0,
) -> tuple[torch.Tensor, int]:
    """An image and its index: that at `index`, or the next one after those that cannot be decoded and may be skipped.

    Raises:
        UserError: the image cannot be read, or too many if some may be skipped.
    """
    while True:
        if unreadable is None or index not in unreadable:
            try:
                return decode(rows, index, channels, size, cell, least_side), index
            except UnreadableImageError as error:
                if unreadable is None:
                    raise UserError(f"{error} (with --skip-unreadable, the next image takes its place)") from error
                unreadable.add(index, error)
        index = (index + 1) % len(rows)
        cell = None


def decode(
    rows: "Dataset",
    index: int,
    channels: int = 0,
    size: tuple[int, int] | None = None,
    cell: Cell = None,
    least_side: int = 0,
) -> torch.Tensor:
    """Decode one image to uint8 (C, H, W): its first frame, turned as its EXIF orientation says.

    Args:
        rows: one column of encoded images.
        index: number of the row.
        channels: 1 for grey, 3 for colour, 0 to keep the image's own.
        size: height and width to resize to.
        cell: the row, if it has been read.
        least_side: decode a JPEG at 1/2, 1/4 or 1/8 of its size if its short side then has this many pixels, which is
            faster; 0 for its own size.

    Raises:
        UnreadableImageError: the row is empty, or what is in it or in its file is not a readable image; names it.
        UserError: the file cannot be read, or its pixels have no known range; names it.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    cell = cell or cells(rows, np.array([index]))[0]
    if cell is None:
        raise UnreadableImageError(f"--data: row {index} has no image: remove the row")
    name = image_name(cell, index)
    content = cell["bytes"] or b""
    try:
        if not content and cell["path"]:
            content = manifest.read_bytes(Path(cell["path"]), MOST_BYTES)
    except OSError as error:
        raise UserError(f"--data: {name} is not a readable image: {error}") from error
    try:
        # By its name, Pillow would map a TIFF file into memory, and scramble one whose orientation is 5 to 8.
        with _of_any_size(), Image.open(io.BytesIO(content), formats=FORMATS) as file:
            whole = file.size
            if least_side:
                file.draft(None, (least_side, least_side))  # nothing, for other formats
            if file.width * file.height > MOST_PIXELS:
                raise UnreadableImageError(
                    f"--data: {name} has {file.width:,} x {file.height:,} pixels, more than {MOST_PIXELS:,}: save it "
                    "smaller, or as a JPEG, which is decoded at 1/2, 1/4 or 1/8 of its size where that is enough"
                )
            if file.size == whole and size in (None, whole[::-1]):
                pixels = _plain_jpeg(file, content, channels)
                if pixels is not None:
                    return pixels
            file.load()  # of several frames or pages, the first
            with contextlib.suppress(Exception):  # a damaged EXIF block: the pixels are whole
                ImageOps.exif_transpose(file, in_place=True)
            image = _to_8_bits(file, name)
            grey = channels == 1 or (channels == 0 and image.mode in ("1", "L"))
            mode = "L" if grey else "RGB"
            image = image if image.mode == mode else image.convert(mode)  # which copies even if there is nothing to do
            if size and image.size != size[::-1]:
                image = image.resize(size[::-1])
    except UserError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImageError(
            f"--data: {name} is not a readable image: it is none of {', '.join(FORMATS)}"
        ) from error
    except Exception as error:  # of many types, by format and by what is damaged
        raise UnreadableImageError(f"--data: {name} is not a readable image: {error}") from error
    return torch.from_numpy(np.atleast_3d(np.array(image))).permute(2, 0, 1)


@contextlib.contextmanager
def _of_any_size() -> Iterator[None]:
    """Let Pillow open what is decoded smaller: it judges an image by its whole size."""
    from PIL import Image

    most = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = most


def _plain_jpeg(file: "Image.Image", content: bytes, channels: int) -> torch.Tensor | None:
    """The same pixels as Pillow's, (C, H, W), in less time (docs/measured/data.md); None if Pillow shall read the file.

    It does for any other format, a file to be turned or changed in its colours, and one with an error, which it names.
    It has opened the file: so it has refused one that would take too much memory.

    torchvision's decoder is deprecated since 0.29. What shall replace it, torchcodec, has a wheel for Linux (0.17) that
    only loads beside CUDA's libraries.

    Args:
        file: opened, and not read yet.
        content: what is in it.
        channels: as for `decode`.
    """
    from PIL import ExifTags
    from torchvision import io as torchvision_io

    if file.format != "JPEG" or file.mode not in ("L", "RGB") or (channels == 1 and file.mode == "RGB"):
        return None
    with contextlib.suppress(Exception):  # a damaged EXIF block, as in `decode`
        if file.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return None
    try:
        pixels = torchvision_io.decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    # There is no decoder any more, or only one built without libjpeg; warnings are errors; the file is damaged.
    except (AttributeError, DeprecationWarning, RuntimeError):
        return None
    if pixels.shape != (len(file.mode), file.height, file.width):
        return None
    return pixels.expand(channels or len(pixels), -1, -1)


def _to_8_bits(image: "Image.Image", name: str) -> "Image.Image":
    """Scale 16 bits to 8. Refuse what has no range to scale from: `Image.convert` would clip it to 0..255."""
    from PIL import Image

    # Also 16 bits: grey PNG files in older versions of Pillow, and PPM files, which Pillow scales to 0..65535.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.uint32)
        if not _noted:
            _noted.append(name)
            ranks.print0(
                f"note: images of 16 bits are scaled to 8 bits, 65535 to 255; the largest value of {name} is "
                f"{values.max()}: scale the files yourself if their range is much smaller"
            )
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError(
            f"--data: {name} has pixels of mode {image.mode} ({'integers' if image.mode == 'I' else 'floats'} of 32 "
            "bits), whose range is unknown: save the images with 8 or 16 bits, scaled as your data needs"
        )
    return image


def content(cell: Cell, only_size: bool) -> bytes:
    """An encoded image, or its size; b"" if there is none or it cannot be read, which `decode` reports in its turn."""
    cell = cell or {"bytes": b"", "path": None}
    if cell["bytes"] or not cell["path"]:
        return str(len(cell["bytes"])).encode() if only_size and cell["bytes"] else cell["bytes"] or b""
    path = Path(cell["path"])
    try:
        return str(manifest.size(path)).encode() if only_size else manifest.read_bytes(path, MOST_BYTES)
    except OSError:
        return b""
