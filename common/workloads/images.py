"""Labelled images as whole augmented batches: the built-in digits, or any set that `datasets.load_dataset` reads."""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors.torch
import torch

from common import UserError, ranks, seed
from common.workloads import augment, image_decode, image_folder, parsing, splits
from common.workloads.unreadable import Unreadable

if TYPE_CHECKING:
    from datasets import Dataset, Features

DIGITS = Path(__file__).parent / "digits.safetensors"
SMALL = 64  # pixels; images up to this side are decoded once and kept in memory
MEMORY_BYTES = 2**30  # unless the set takes more memory than this
CROP = 224  # pixels; larger images are cropped to this side, unless --image-size says another
# Images that stand for a set which is not in memory, in its digest: their bytes are read, of more only the sizes.
SAMPLED_BYTES = 64
SAMPLED_SIZES = 1024
LABELS = ("label", "labels", "class", "cls", "target")  # names of columns of plain labels


@dataclass(frozen=True)
class Images:
    """One split: either `pixels` holds all images, or `rows` is decoded batch by batch.

    Attributes:
        labels: (N,) int64.
        class_names: name of each label.
        channels: 1 or 3.
        size: side of the images that `read` returns, in pixels.
        pixels: (N, C, H, W) uint8, or None.
        rows: one column of encoded images, or None.
        train: whether samples are augmented, differently in each epoch.
        flip: whether half of the training images are mirrored.
        run_seed: decides the augmentation, with the epoch and the index of a sample.
        resize: whether `read` resizes `pixels` to `size`.
        unreadable: the images of `rows` that others replace, with --skip-unreadable.
        reported: those of all splits, which an evaluation reports.
    """

    labels: torch.Tensor
    class_names: list[str]
    channels: int
    size: int
    pixels: torch.Tensor | None = None
    rows: "Dataset | None" = None
    train: bool = False
    flip: bool = False
    run_seed: int = 0
    resize: bool = False
    unreadable: Unreadable | None = None
    reported: tuple[Unreadable, ...] = ()

    def __len__(self) -> int:
        """Samples in the split."""
        return len(self.labels)

    @property
    def sample_units(self) -> dict[str, int]:
        """Units in a sample, for rates: none besides the sample."""
        return {}

    def digest(self) -> str:
        """Hash of labels and pixels, which ranks compare before they train together.

        A set that is not in memory is sampled: the bytes of `SAMPLED_BYTES` images, and the file sizes of more. Another
        size or format of all images is found, a change in one of very many may not be.
        """
        digest = hashlib.sha256(self.labels.numpy().data)
        digest.update(repr((self.class_names, self.channels, self.size)).encode())
        if self.pixels is not None:
            digest.update(self.pixels.numpy().data)
        elif self.rows is not None:
            draws = seed.mix(seed.HOLD_OUT, len(self), np.arange(SAMPLED_SIZES)) % np.uint64(len(self))
            for i, cell in enumerate(image_decode.cells(self.rows, draws)):
                digest.update(image_decode.content(cell, only_size=i >= SAMPLED_BYTES))
        return digest.hexdigest()[:16]

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics of an evaluation to show: its means. With --skip-unreadable, report what was skipped (all ranks)."""
        for one in self.reported:
            one.report()
        return means

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (b, C, H, W) uint8 and labels (b,) int64 of the samples at `indices`, augmented as in `epochs`.

        Raises:
            UserError: an image cannot be read, or too many if some may be skipped.
        """
        draws = seed.uniform(self.run_seed, seed.AUGMENT, epochs[:, None], indices[:, None], np.arange(5))
        if self.pixels is not None:
            images = self.pixels.index_select(0, torch.from_numpy(indices))
            images = augment.crop_padded(images, draws[:, :2]) if self.train else images
            images = augment.resize(images, self.size) if self.resize else images
        else:
            images = torch.empty(len(indices), self.channels, self.size, self.size, dtype=torch.uint8)
            cells = image_decode.cells(self.rows, indices)
            indices = indices.copy()
            for i, index in enumerate(indices.tolist()):
                least = augment.least_side(self.size, draws[i] if self.train else None)
                image, indices[i] = image_decode.decode_or_next(
                    self.rows, index, self.unreadable, self.channels, cell=cells[i], least_side=least
                )
                images[i] = (
                    augment.crop_resized(image, self.size, draws[i, :4])
                    if self.train
                    else augment.crop_center(image, self.size)
                )
        images = augment.mirror(images, draws[:, 4]) if self.train and self.flip else images
        return images, self.labels[indices]


def load(
    name: str, run_seed: int, flip: bool, image_size: int = 0, skip_unreadable: bool = False
) -> tuple[Images, Images]:
    """Read a training and a validation split.

    Args:
        name: "digits" (built in), or a folder or hub id for `datasets.load_dataset`, whose columns of images and labels
            are found by type.
        run_seed: seed of the augmentation.
        flip: mirror half of the training images.
        image_size: side of the images that `read` returns, in pixels: images in memory are resized to it, others are
            cropped and resized. 0 for small images as they are, and for the others `CROP`, or their side if it is less.
        skip_unreadable: let others take the places of images that cannot be decoded; see `Unreadable`.

    Raises:
        UserError: the set is missing, has no labelled images, or has an image that cannot be read.
    """
    if splits.parse(name).without_split == "digits":
        train, validation = _load_digits(name, image_size)
    else:
        train, validation = _load_rows(name, image_size, skip_unreadable)
    for split, rows in (("training", train), ("validation", validation)):
        if (rows.labels < 0).any():
            raise UserError(
                f"--data {name}: {int((rows.labels < 0).sum())} of the {len(rows)} images of the {split} split have no "
                "label, or one that no training image has"
            )
        if (most := int(rows.labels.max())) >= len(rows.class_names):
            raise UserError(
                f"--data {name}: the {split} split has label {most}, and its column of labels has only "
                f"{len(rows.class_names)} classes, from 0"
            )
    present = train.labels.unique()
    if len(present) < 2:
        only = ", ".join(train.class_names[label] for label in present)
        raise UserError(f"--data {name}: the training split has only one class ({only}), and a classifier needs two")
    return dataclasses.replace(train, train=True, flip=flip, run_seed=run_seed), validation


def _load_digits(name: str, image_size: int) -> tuple[Images, Images]:
    digits = safetensors.torch.load_file(DIGITS)
    pixels = digits["pixels"]
    labels = digits["label"].long()
    held_out = digits["validation"]
    chosen = splits.choose(name, {"train": ~held_out, "validation": held_out})
    names = [str(digit) for digit in range(10)]
    size = image_size or 8
    train, validation = (Images(labels[own], names, 1, size, pixels=pixels[own], resize=size != 8) for own in chosen)
    if train.resize:
        ranks.print0(f"data     digits: 1 x 8 x 8, resized to {size} x {size}")
    return train, validation


def _load_rows(name: str, image_size: int, skip_unreadable: bool) -> tuple[Images, Images]:
    import datasets  # 3 s of import, which the built-in set does not need

    train, validation = splits.load(name)
    held_out = ""
    if validation is None:
        train, validation = splits.hold_out(name, train)
        held_out = "; no validation split, so a tenth was held out"
    if not any(isinstance(kind, datasets.Image) for kind in train.features.values()):
        train, validation = (image_folder.with_images(split, splits.folder_of(name)) for split in (train, validation))
    columns = train.features
    image, label = _columns(name, columns)
    values = [parsing.column(split, label) for split in (train, validation)]
    class_names = getattr(columns[label], "names", None)
    if class_names is None:  # plain numbers or names; -1 is one that the training split lacks
        present = {value: i for i, value in enumerate(sorted({*values[0]} - {None}))}
        values = [[present.get(value, -1) for value in split] for split in values]
        class_names = [str(value) for value in present]
    rows = [
        split.select_columns(image).cast_column(image, datasets.Image(decode=False)) for split in (train, validation)
    ]
    skipped = [
        Unreadable(part, name, split) if skip_unreadable else None
        for part, split in zip(rows, ("training", "validation"), strict=True)
    ]
    # Decide by 16 images from all over the set: the first one may be unusual.
    looked_at = np.linspace(0, len(rows[0]) - 1, num=16)
    enough = max(SMALL, CROP, image_size) + 1  # for what their sides decide
    shapes = [image_decode.decode_or_next(rows[0], int(i), skipped[0], least_side=enough)[0].shape for i in looked_at]
    channels, height, width = (max(sides) for sides in zip(*shapes, strict=True))
    small = max(height, width) <= SMALL and sum(map(len, rows)) * channels * height * width <= MEMORY_BYTES
    if small:
        size = image_size or height
        kind = f"{height} x {width}" + f", resized to {size} x {size}" * bool(image_size)
    else:
        size = image_size or min(CROP, height, width)
        enlarged = sum(min(sides[1:]) < size for sides in shapes)
        kind = f"{size} x {size}, cropped" + f" ({enlarged} of {len(shapes)} were smaller: enlarged)" * bool(enlarged)
    loaded = []
    for split, part, unreadable in zip(values, rows, skipped, strict=True):
        numbers = torch.tensor([-1 if value is None else value for value in split])
        pixels = None
        if small:
            decoded = [
                image_decode.decode_or_next(part, i, unreadable, channels, (height, width)) for i in range(len(part))
            ]
            pixels = torch.stack([image for image, _ in decoded])
            numbers = numbers[[i for _, i in decoded]]
        if unreadable:
            unreadable.all_ranks_read = False
        loaded.append(
            Images(
                numbers,
                class_names,
                channels,
                size,
                pixels=pixels,
                rows=None if small else part,
                resize=small and bool(image_size),
                unreadable=unreadable,
            )
        )
    seen = set(loaded[0].labels.tolist())
    unseen = [repr(class_name) for i, class_name in enumerate(class_names) if i not in seen]
    without = ""
    if unseen:
        without = f", of which {len(unseen)} {'has' if len(unseen) == 1 else 'have'} no training image"
        without += f" ({ranks.listed(unseen)})"
    columns = f"{ranks.listed([repr(image)])} and {ranks.listed([repr(label)])}"
    ranks.print0(
        f"data     {name}: {len(train):,} training and {len(validation):,} validation images, {channels} x {kind}, "
        f"{len(class_names)} classes{without}; columns {columns}{held_out}"
    )
    return loaded[0], dataclasses.replace(loaded[1], reported=tuple(one for one in skipped if one))


def _columns(name: str, columns: "Features") -> tuple[str, str]:
    """The columns of images and of labels.

    Raises:
        UserError: one of them is missing.
    """
    import datasets

    images = [key for key, kind in columns.items() if isinstance(kind, datasets.Image)]
    labels = [key for key, kind in columns.items() if isinstance(kind, datasets.ClassLabel)] or _plain_labels(columns)
    if not images or not labels:
        found = ", ".join(
            f"{key} ({getattr(kind, 'dtype', '') or type(kind).__name__})" for key, kind in columns.items()
        )
        raise UserError(
            f"--data {name} has no column of images, or none of class labels: {found}. In a folder, put each class in "
            f"a subfolder, train/<class>/*.png; in a table, call the column of labels {LABELS[0]!r}; images may be in "
            "the table, or their paths within the folder"
        )
    # Of several columns of labels, the one with the most classes.
    return images[0], max(labels, key=lambda key: getattr(columns[key], "num_classes", 0))


def _plain_labels(columns: "Features") -> list[str]:
    """Columns of numbers or names that are class labels: by their name, or the only one there is."""
    kinds = {key: str(getattr(kind, "dtype", "")) for key, kind in columns.items()}
    plain = [key for key, kind in kinds.items() if "int" in kind or kind.endswith("string")]
    return [key for key in plain if key.lower() in LABELS] or (plain if len(plain) == 1 else [])
