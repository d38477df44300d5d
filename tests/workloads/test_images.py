"""The same pixels from every source and in every grouping, and augmentation that depends on the sample alone."""

import dataclasses
import io
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from common import UserError
from common.workloads import augment, image_decode, images
from PIL import Image

from tests import conftest

NEARLY_ONE = 1 - 2.0**-53  # the largest draw there is
SIZES = [(8, 8), (5, 9), (9, 5), (16, 24), (33, 20), (64, 64)]


def random_images(count: int, channels: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count + height)
    return torch.randint(1, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


# --- augment ---


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_crop_padded_is_the_slow_loop(height: int, width: int, channels: int) -> None:
    before = random_images(40, channels, height, width)
    draws = np.random.default_rng(0).random((40, 2))
    draws[:4] = [[0, 0], [0, NEARLY_ONE], [NEARLY_ONE, 0], [NEARLY_ONE, NEARLY_ONE]]
    found = augment.crop_padded(before, draws)
    assert found.shape == before.shape
    assert found.dtype == torch.uint8
    pad = max(1, height // 8)
    offsets = set()
    for image, (top, left), result in zip(before.numpy(), draws, found.numpy(), strict=True):
        canvas = np.zeros((channels, height + 2 * pad, width + 2 * pad), np.uint8)
        canvas[:, pad : pad + height, pad : pad + width] = image
        y, x = int(top * (2 * pad + 1)), int(left * (2 * pad + 1))
        offsets.add((y, x))
        np.testing.assert_array_equal(result, canvas[:, y : y + height, x : x + width])
    assert len(offsets) >= 9


@pytest.mark.parametrize(("height", "width"), [(100, 100), (80, 100), (300, 41), (10, 200), (1, 1)])
def test_crop_resized_takes_boxes_inside_the_image(height: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.transforms.v2 import functional as tv

    boxes: list[tuple[int, int, int, int]] = []

    def record(image: torch.Tensor, *args: int | list[int], antialias: bool) -> torch.Tensor:
        boxes.append(args[:4])
        assert args[4] == [7, 7]
        assert antialias
        return image

    monkeypatch.setattr(tv, "resized_crop", record)
    image = random_images(1, 3, height, width)[0]
    for draws in itertools.product((0.0, 0.3, NEARLY_ONE), repeat=4):
        augment.crop_resized(image, 7, np.array(draws))
    for draws in np.random.default_rng(0).random((500, 4)):
        augment.crop_resized(image, 7, draws)
    tops, lefts, heights, widths = np.array(boxes).T
    assert min(heights.min(), widths.min()) >= 1
    assert min(tops.min(), lefts.min()) == 0
    assert (tops + heights).max() == height, "the bottom edge is reached and not passed"
    assert (lefts + widths).max() == width
    assert heights.max() <= height
    assert widths.max() <= width
    if height == width == 100:
        areas = heights * widths / 100**2
        assert 0.07 < areas.min() < 0.1
        assert 0.85 < areas.max() <= 1
        aspects = widths / heights
        assert 0.7 < aspects.min() < 0.78
        assert 1.28 < aspects.max() < 1.4
        assert abs(np.log(aspects[81:]).mean()) < 0.05, "as often upright as lying"


def test_crop_resized_shows_the_box_it_chose() -> None:
    """A ramp from left to right: the right half of it is bright, the left half dark."""
    ramp = torch.arange(200, dtype=torch.uint8).repeat(3, 100, 1)  # (3, 100, 200)
    small_area, wide = 0.0, 0.5
    left = augment.crop_resized(ramp, 20, np.array([small_area, wide, 0.5, 0.0]))
    right = augment.crop_resized(ramp, 20, np.array([small_area, wide, 0.5, NEARLY_ONE]))
    assert left.shape == right.shape == (3, 20, 20)
    assert left.dtype == torch.uint8
    side = (0.08 * 100 * 200) ** 0.5  # 40 pixels
    assert float(left.float().mean()) == pytest.approx((side - 1) / 2, abs=1)
    assert float(right.float().mean()) == pytest.approx(199 - (side - 1) / 2, abs=1)
    assert bool((left[0, 0].int().diff() >= 0).all()), "not mirrored"


def test_crop_center_takes_the_centre() -> None:
    image = random_images(1, 3, 80, 100)[0]
    # 8/7 of 70 is 80: nothing to resize.
    assert torch.equal(augment.crop_center(image, 70), image[:, 5:75, 15:85])
    assert augment.crop_center(image, 21).shape == (3, 21, 21)
    assert augment.crop_center(random_images(1, 1, 300, 90)[0], 224).shape == (1, 224, 224)


def test_mirror_turns_the_lower_half_of_draws() -> None:
    before = random_images(4, 3, 5, 6)
    found = augment.mirror(before.clone(), np.array([0.0, 0.499999, 0.5, NEARLY_ONE]))
    assert torch.equal(found[:2], before[:2].flip(-1))
    assert torch.equal(found[2:], before[2:])


# --- the built-in set ---


@pytest.fixture(scope="module")
def digits() -> tuple[images.Images, images.Images]:
    return images.load("digits", run_seed=0, flip=False)


def fingerprints(split: images.Images) -> list[bytes]:
    assert split.pixels is not None
    return [pixels.numpy().tobytes() for pixels in split.pixels]


def test_digits(digits: tuple[images.Images, images.Images]) -> None:
    train, validation = digits
    assert (len(train), len(validation)) == (1433, 364)
    for split in digits:
        assert split.pixels is not None
        assert split.pixels.shape == (len(split), 1, 8, 8)
        assert split.pixels.dtype == torch.uint8
        assert split.pixels.max() > 200, "the whole range of a byte is used"
        assert split.labels.dtype == torch.int64
        assert split.labels.bincount(minlength=10).min() > len(split) / 15, "each class has its share"
        assert split.class_names == [str(i) for i in range(10)]
        assert (split.channels, split.size) == (1, 8)
        assert split.sample_units == {}, "an image is a sample, and counts as nothing else"
    assert not set(fingerprints(train)) & set(fingerprints(validation))
    assert train.train
    assert not validation.train


def test_labels_fit_the_pixels(digits: tuple[images.Images, images.Images]) -> None:
    """The nearest training image has the same label for nearly every validation image."""
    train, validation = digits
    assert train.pixels is not None
    assert validation.pixels is not None
    distances = torch.cdist(validation.pixels.flatten(1).float(), train.pixels.flatten(1).float())
    right = train.labels[distances.argmin(1)] == validation.labels
    assert right.float().mean() > 0.9


# --- reading ---


# Of 200 samples. Another choice would let runs that resume validate on what they have trained on.
HELD_OUT = [7, 13, 18, 42, 53, 65, 69, 80, 83, 119, 133, 144, 145, 156, 161, 168, 173, 178, 186, 190]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of RGB images of 80 x 100 pixels: 8 to train on, 4 to validate."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("photos")
    for split, each in (("train", 4), ("validation", 2)):
        for label, name in enumerate(("cat", "dog")):
            for i, pixels in enumerate(random_images(each, 3, 80, 100).permute(0, 2, 3, 1)):
                path = folder / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.numpy() // (label + 1)).save(path)
    return folder


def both(source: str, photos: Path, run_seed: int, flip: bool) -> tuple[images.Images, images.Images]:
    return images.load("digits" if source == "digits" else str(photos), run_seed, flip)


@pytest.mark.parametrize("source", ["digits", "photos"])
def test_augmentation_depends_on_seed_epoch_and_index_alone(source: str, photos: Path) -> None:
    train, _ = both(source, photos, run_seed=1, flip=True)
    epochs, indices = np.repeat([0, 3], 8), np.tile(np.arange(8), 2)
    together, labels = train.read(epochs, indices)
    order = np.random.default_rng(0).permutation(16)
    shuffled, shuffled_labels = train.read(epochs[order], indices[order])
    assert torch.equal(shuffled, together[order])
    assert torch.equal(shuffled_labels, labels[order])
    assert torch.equal(labels, train.labels[:8].repeat(2))
    for i in range(16):
        alone, label = train.read(epochs[i : i + 1], indices[i : i + 1])
        assert torch.equal(alone, together[i : i + 1])
        assert label.item() == labels[i]
    other_seed, _ = both(source, photos, run_seed=2, flip=True)
    changed = other_seed.read(epochs, indices)[0]
    for one, other in ((together, changed), (together[:8], together[8:])):  # other seed, other epoch
        assert sum(torch.equal(a, b) for a, b in zip(one, other, strict=True)) < len(one) / 2


@pytest.mark.parametrize("source", ["digits", "photos"])
def test_samples_of_one_batch_differ_in_their_place(source: str, photos: Path) -> None:
    """Not one draw for the whole batch: the same image under many indices looks different."""
    train, _ = both(source, photos, run_seed=1, flip=False)
    epochs = np.arange(30)
    pixels, _ = train.read(epochs, np.zeros(30, np.int64))
    assert len({image.numpy().tobytes() for image in pixels}) > (5 if source == "digits" else 25)  # 9 places


@pytest.mark.parametrize("source", ["digits", "photos"])
def test_validation_is_not_augmented(source: str, photos: Path) -> None:
    _, validation = both(source, photos, run_seed=1, flip=True)
    indices = np.arange(4)
    first, labels = validation.read(np.zeros(4, np.int64), indices)
    later, _ = validation.read(np.full(4, 7), indices)
    assert torch.equal(first, later)
    assert torch.equal(labels, validation.labels[:4])
    for epoch in range(3):
        assert torch.equal(first, dataclasses.replace(validation, flip=True).read(np.full(4, epoch), indices)[0])
    if validation.pixels is not None:
        assert torch.equal(first, validation.pixels[:4])
    else:
        whole = [image_decode.decode(validation.rows, i) for i in range(4)]
        assert torch.equal(first, torch.stack([augment.crop_center(image, 80) for image in whole]))


def test_flip_mirrors_half_and_moves_nothing_else() -> None:
    plain, _ = images.load("digits", run_seed=1, flip=False)
    mirrored, _ = images.load("digits", run_seed=1, flip=True)
    epochs, indices = np.zeros(1000, np.int64), np.arange(1000)
    before, after = plain.read(epochs, indices)[0], mirrored.read(epochs, indices)[0]
    turned = (after != before).flatten(1).any(1)
    assert torch.equal(after[turned], before[turned].flip(-1))
    assert 400 < int(turned.sum()) < 600


def test_places_and_mirroring_are_independent() -> None:
    """All 3 x 3 places, each mirrored as often as not: no draw decides two things."""
    pixels = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    pixels[0, 0, 3, 3:5] = torch.tensor([100, 200])
    labels = torch.zeros(1, dtype=torch.int64)
    one = images.Images(labels, ["a"], channels=1, size=8, pixels=pixels, train=True, flip=True)
    seen, _ = one.read(np.arange(3600), np.zeros(3600, np.int64))
    places = np.stack(np.nonzero(seen[:, 0].numpy() == 200)[1:], 1)  # (3600, 2) row and column of the brighter one
    left = seen[np.arange(3600), 0, places[:, 0], (places[:, 1] + 1) % 8].numpy() == 100  # and the other beside it
    columns = np.where(left, 7 - places[:, 1], places[:, 1])
    kinds, counts = np.unique(np.stack([places[:, 0], columns, left], 1), axis=0, return_counts=True)
    assert len(kinds) == 18
    assert np.abs(counts - 200).max() < 70  # 5 standard deviations


@pytest.mark.parametrize("source", ["digits", "photos"])
def test_shards_may_be_empty(source: str, photos: Path) -> None:
    none = np.zeros(0, np.int64)
    for split in both(source, photos, run_seed=1, flip=True):
        pixels, labels = split.read(none, none)
        assert pixels.shape == (0, split.channels, split.size, split.size)
        assert pixels.dtype == torch.uint8
        assert labels.shape == (0,)


def test_reading_leaves_the_set_as_it_was(digits: tuple[images.Images, images.Images]) -> None:
    for split in (dataclasses.replace(digits[0], flip=True), digits[1]):
        before = split.digest()
        pixels, labels = split.read(np.zeros(50, np.int64), np.arange(50))
        pixels.zero_()
        labels.zero_()
        assert split.digest() == before


# --- another size ---


@pytest.mark.parametrize("source", ["digits", "photos"])
@pytest.mark.parametrize("size", [6, 20, 96])
def test_image_size(source: str, size: int, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Smaller and larger than the images, in memory and not; each sample alone and in a batch."""
    name = "digits" if source == "digits" else str(photos)
    plain = images.load(name, 1, flip=True)
    capsys.readouterr()
    sized = images.load(name, 1, flip=True, image_size=size)
    said = capsys.readouterr().out
    for split, other in zip(sized, plain, strict=True):
        assert split.size == size
        assert split.digest() != other.digest(), "a resume with another size is noted"
        epochs, indices = np.arange(4), np.arange(4)
        together, labels = split.read(epochs, indices)
        assert together.shape == (4, split.channels, size, size)
        assert torch.equal(labels, split.labels[:4])
        for i in range(4):
            assert torch.equal(split.read(epochs[i : i + 1], indices[i : i + 1])[0][0], together[i])
    if source == "digits":
        assert f"data     digits: 1 x 8 x 8, resized to {size} x {size}\n" in said
        assert torch.equal(together, augment.resize(plain[1].pixels[:4], size))
    else:
        enlarged = " (16 of 16 were smaller: enlarged)" if size == 96 else ""
        assert f"3 x {size} x {size}, cropped{enlarged}, 2 classes" in said
        assert torch.equal(together[0], augment.crop_center(image_decode.decode(split.rows, 0), size))


def test_image_size_of_small_images(small_digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They stay in memory as they are; a size of 0 and their own give the same images."""
    train, _ = images.load(str(small_digits), 0, False, image_size=8)
    assert "1 x 8 x 8, resized to 8 x 8, 10 classes" in capsys.readouterr().out
    plain, _ = images.load(str(small_digits), 0, False)
    assert torch.equal(train.read(np.zeros(9, int), np.arange(9))[0], plain.read(np.zeros(9, int), np.arange(9))[0])


# --- other sets ---


def test_parquet_gives_the_built_in_pixels(digits: tuple[images.Images, images.Images], small_digits: Path) -> None:
    for split, wanted, count in zip(images.load(str(small_digits), 0, False), digits, (469, 30), strict=True):
        assert len(split) == count
        assert split.pixels is not None
        assert wanted.pixels is not None
        assert torch.equal(split.pixels, wanted.pixels[:count])
        assert torch.equal(split.labels, wanted.labels[:count])
        assert (split.class_names, split.channels, split.size, split.train) == (
            wanted.class_names,
            wanted.channels,
            wanted.size,
            wanted.train,
        )


def test_image_folder_gives_the_built_in_pixels(digits: tuple[images.Images, images.Images], tmp_path: Path) -> None:
    folder = conftest.write_image_folder(tmp_path, 60, 40)
    for split, wanted, count in zip(images.load(str(folder), 0, False), digits, (60, 40), strict=True):
        order = torch.argsort(wanted.labels[:count], stable=True)  # as the folders are listed
        assert split.pixels is not None
        assert wanted.pixels is not None
        assert torch.equal(split.pixels, wanted.pixels[order])
        assert torch.equal(split.labels, wanted.labels[order])
        assert split.class_names == wanted.class_names


def test_holds_out_the_same_tenth_every_time(digits: tuple[images.Images, images.Images], tmp_path: Path) -> None:
    folder = conftest.write_parquet(tmp_path, 200, 10)
    (folder / "validation.parquet").unlink()
    place = {pixels: i for i, pixels in enumerate(fingerprints(digits[0])[:200])}
    for run_seed in (0, 1):
        train, validation = images.load(str(folder), run_seed, False)
        kept, held_out = ([place[pixels] for pixels in fingerprints(split)] for split in (train, validation))
        assert held_out == HELD_OUT
        assert kept == [i for i in range(200) if i not in HELD_OUT]
        assert torch.equal(validation.labels, digits[0].labels[HELD_OUT])


def test_larger_images_are_read_when_needed(photos: Path) -> None:
    train, validation = images.load(str(photos), run_seed=0, flip=False)
    for split, count in ((train, 8), (validation, 4)):
        assert len(split) == count
        assert split.pixels is None
        assert split.labels.tolist() == [0] * (count // 2) + [1] * (count // 2)
        assert split.class_names == ["cat", "dog"]
        assert (split.channels, split.size) == (3, 80)
        pixels, labels = split.read(np.zeros(3, np.int64), np.array([2, 0, count - 1]))
        assert pixels.shape == (3, 3, 80, 80)
        assert pixels.dtype == torch.uint8
        assert labels.tolist() == [int(count == 4), 0, 1]
    # The second class is half as bright: pixels and labels belong together.
    pixels, _ = train.read(np.zeros(8, np.int64), np.arange(8))
    assert all(float(image.float().mean()) > 100 for image in pixels[:4])
    assert all(float(image.float().mean()) < 90 for image in pixels[4:])


def photo(width: int, height: int, orientation: int = 1) -> bytes:
    """A JPEG with structure from the size of the whole down to single pixels."""
    draw = np.random.default_rng(0)
    total = np.zeros((height, width, 3))
    for k in range(9):
        coarse = Image.fromarray(draw.integers(0, 256, (2**k + 1, 2**k + 1, 3), dtype=np.uint8))
        total += np.asarray(coarse.resize((width, height)), float) * 0.8**k
    pixels = (255 * (total - total.min()) / np.ptp(total)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize(
    ("sides", "least_side", "decoded"),
    [
        ((640, 480), 240, (240, 320)),
        ((640, 480), 241, (480, 640)),
        ((645, 480), 60, (60, 81)),
        ((640, 480), 1, (60, 80)),
    ],
)
def test_jpegs_are_decoded_smaller(sides: tuple[int, int], least_side: int, decoded: tuple[int, int]) -> None:
    """At 1/2, 1/4 or 1/8, never below the least side; other formats as they are, and turned photos the right way."""
    rows: Any = None  # the cells are given
    assert (
        image_decode.decode(rows, 0, cell={"bytes": photo(*sides), "path": None}, least_side=least_side).shape[1:]
        == decoded
    )
    turned = {"bytes": photo(*sides, orientation=6), "path": None}
    assert image_decode.decode(rows, 0, cell=turned, least_side=least_side).shape[1:] == decoded[::-1]
    png = io.BytesIO()
    Image.new("RGB", sides).save(png, "PNG")
    as_it_is = image_decode.decode(rows, 0, cell={"bytes": png.getvalue(), "path": None}, least_side=least_side)
    assert as_it_is.shape[1:] == sides[::-1]


def read_photos(content: bytes, train: bool) -> torch.Tensor:
    """The same photo many times, in 32 x 32 pixels, (40, 3, 32, 32)."""
    column = datasets.Features({"image": datasets.Image(decode=False)})
    rows = datasets.Dataset.from_dict({"image": [{"bytes": content, "path": None}]}, features=column)
    split = images.Images(torch.zeros(1, dtype=torch.int64), ["one"], 3, 32, rows=rows, train=train)
    epochs = np.arange(40)  # as many random crops
    return split.read(epochs, np.zeros_like(epochs))[0].float()


@pytest.mark.parametrize("train", [True, False])
def test_smaller_decoding_keeps_what_is_seen(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 4 of 255 levels of a whole decoding in the mean of each sample. The mutant makes photos too small."""
    content = photo(300, 225)
    found = read_photos(content, train)
    least_side = augment.least_side
    monkeypatch.setattr(augment, "least_side", lambda *_: 0)
    whole = read_photos(content, train)
    apart = (found - whole).abs().mean((1, 2, 3))
    assert 0 < apart.max() < 4, "it was decoded smaller"
    monkeypatch.setattr(augment, "least_side", lambda size, draws: least_side(size, draws) // 4)
    assert (read_photos(content, train) - whole).abs().mean((1, 2, 3)).max() > 4


def test_photos_as_small_as_those_of_imagenet_are_decoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    content = photo(500, 375)
    column = datasets.Features({"image": datasets.Image(decode=False)})
    rows = datasets.Dataset.from_dict({"image": [{"bytes": content, "path": None}]}, features=column)
    found = [
        images.Images(torch.zeros(1, dtype=torch.int64), ["one"], 3, 224, rows=rows, train=train)
        for train in (True, False)
    ]
    before = [split.read(np.arange(4), np.zeros(4, int))[0] for split in found]
    monkeypatch.setattr(augment, "least_side", lambda *_: 0)
    for split, pixels in zip(found, before, strict=True):
        assert torch.equal(split.read(np.arange(4), np.zeros(4, int))[0], pixels)


# --- JPEG: torchvision's decoder where it does what Pillow does, Pillow otherwise ---

LEVELS = 2  # of 255, by which another build of libjpeg may round otherwise; here none do


def jpeg(mode: str = "RGB", orientation: int = 1, **how: Any) -> bytes:
    """A photo of odd sides in another mode or of another kind of JPEG."""
    from PIL import Image

    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
    file = io.BytesIO()
    with Image.open(io.BytesIO(photo(97, 75))) as picture:
        picture.convert(mode).save(file, "JPEG", quality=90, exif=exif, **how)
    return file.getvalue()


def decoded(content: bytes, channels: int = 0, **more: Any) -> torch.Tensor:
    return image_decode.decode(None, 0, channels, cell={"bytes": content, "path": "a.jpg"}, **more)


@pytest.fixture
def by_torchvision(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each file that torchvision has decoded."""
    from torchvision import io as torchvision_io

    seen: list[int] = []
    real = torchvision_io.decode_jpeg

    def decode(content: torch.Tensor) -> torch.Tensor:
        pixels = real(content)
        seen.append(len(content))
        return pixels

    monkeypatch.setattr(torchvision_io, "decode_jpeg", decode)
    return seen


KINDS = [{"subsampling": sub, "progressive": progressive} for sub in (0, 1, 2) for progressive in (False, True)]
KINDS += [{"restart_marker_blocks": 3}, {"keep_rgb": True}]


@pytest.mark.parametrize("how", KINDS, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_have_the_pixels_of_pillow(mode: str, how: dict[str, Any], by_torchvision: list[int]) -> None:
    """Colour and grey, as they are and as the other; inks, which Pillow converts, too."""
    from PIL import Image

    content = jpeg(mode, **how)
    with Image.open(io.BytesIO(content)) as file:
        assert file.mode == mode
        wanted = {0: np.array(file if mode == "L" else file.convert("RGB")), 1: np.array(file.convert("L"))}
        wanted[3] = np.array(file.convert("RGB"))
    for channels, values in wanted.items():
        found = decoded(content, channels)
        assert found.dtype == torch.uint8
        pixels = torch.from_numpy(np.atleast_3d(values)).permute(2, 0, 1)
        assert found.shape == pixels.shape
        assert (found.int() - pixels.int()).abs().max() <= LEVELS
    assert len(by_torchvision) == {"RGB": 2, "L": 3, "CMYK": 0}[mode], "colour to grey is Pillow's"


def test_pillow_reads_what_is_to_be_turned_or_resized(by_torchvision: list[int]) -> None:
    assert decoded(jpeg(orientation=6)).shape == (3, 97, 75)
    assert decoded(jpeg(), size=(20, 30)).shape == (3, 20, 30)
    assert decoded(jpeg(), least_side=37).shape == (3, 38, 49)
    assert not by_torchvision
    assert decoded(jpeg(), size=(75, 97), least_side=70).shape == (3, 75, 97)
    assert len(by_torchvision) == 1


def test_damaged_exif_of_a_jpeg_does_not_matter(by_torchvision: list[int]) -> None:
    content = jpeg(orientation=6)
    at = content.index(b"Exif\0\0") + 6
    damaged = content[:at] + b"XX" + content[at + 2 :]
    assert decoded(damaged).shape == (3, 75, 97), "it is not turned"
    assert len(by_torchvision) == 1


def outcome(content: bytes) -> tuple[bytes, str]:
    try:
        return decoded(content).numpy().tobytes(), ""
    except UserError as error:
        return b"", str(error).split(" object at ")[0]


def damaged(content: bytes, draw: np.random.Generator) -> bytes:
    """Cut off, changed, shortened or lengthened somewhere."""
    at, some = int(draw.integers(1, len(content))), draw.integers(0, 256, int(draw.integers(1, 40)), np.uint8).tobytes()
    few = len(content) - int(draw.integers(1, 12))
    after = (content[:at], content[:few], *(content[:at] + more for more in (some + content[at + len(some) :],)))
    after += (content[:at] + content[at + len(some) :], content[:at] + some + content[at:])
    return after[int(draw.integers(len(after)))]


def test_damage_is_found_and_named_as_by_pillow(monkeypatch: pytest.MonkeyPatch, by_torchvision: list[int]) -> None:
    """Of 600 damaged files: the same pixels, or the same words. The mutant lets torchvision name what is wrong."""
    from torchvision import io as torchvision_io

    draw = np.random.default_rng(0)
    whole = [jpeg(mode, progressive=progressive) for mode in ("RGB", "L") for progressive in (False, True)]
    contents = [damaged(whole[i % len(whole)], draw) for i in range(600)]
    found = [outcome(content) for content in contents]
    assert len(by_torchvision) > 100, "damage that leaves an image"
    words = [error for _, error in found if error]
    assert len(words) > 100
    assert all(error.startswith("--data: a.jpg is not a readable image: ") for error in words)
    real = torchvision_io.decode_jpeg

    def fails(content: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("as if it could not")

    monkeypatch.setattr(torchvision_io, "decode_jpeg", fails)
    assert found == [outcome(content) for content in contents]

    def names(content: torch.Tensor) -> torch.Tensor:
        try:
            return real(content)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    monkeypatch.setattr(torchvision_io, "decode_jpeg", names)
    assert found != [outcome(content) for content in contents]


def test_image_that_would_take_too_much_memory(monkeypatch: pytest.MonkeyPatch, by_torchvision: list[int]) -> None:
    """What is decoded counts: 97 x 75 is more than this limit, and 49 x 38 is not."""
    from PIL import Image

    content = jpeg()
    monkeypatch.setattr(image_decode, "MOST_PIXELS", 97 * 75 - 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(
        UserError, match=r"--data: a\.jpg has 97 x 75 pixels, more than 7,274: save it smaller, or as a"
    ):
        decoded(content)
    assert not by_torchvision
    assert decoded(content, least_side=30).shape[1:] == (38, 49)
    assert Image.MAX_IMAGE_PIXELS == 10, "others' pictures are Pillow's to judge"


@pytest.mark.parametrize(
    "why", [RuntimeError("built without libjpeg"), DeprecationWarning("an error, by -W error"), None]
)
def test_torchvision_without_a_decoder(why: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is deprecated: Pillow reads everything."""
    from torchvision import io as torchvision_io

    def fails(content: torch.Tensor) -> torch.Tensor:
        assert why
        raise why

    before = decoded(jpeg())
    if why:
        monkeypatch.setattr(torchvision_io, "decode_jpeg", fails)
    else:
        monkeypatch.delattr(torchvision_io, "decode_jpeg")
    assert (decoded(jpeg()).int() - before.int()).abs().max() <= LEVELS


def test_broken_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a", "b"):
        for split in ("train", "validation"):
            path = tmp_path / split / name / "0.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (100, 100)).save(path)
    train, _ = images.load(str(tmp_path), run_seed=0, flip=False)
    broken = tmp_path / "train" / "b" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    train.read(np.array([0]), np.array([0]))
    with pytest.raises(UserError, match=r"train/b/0\.png is not a readable image"):
        train.read(np.array([0]), np.array([1]))


def test_odd_sizes_and_modes_in_a_small_set(tmp_path: Path) -> None:
    """The largest sides decide, in colour if any is; the others are resized and converted."""
    from PIL import Image

    for split in ("train", "validation"):
        for name, mode, size in (("a", "RGB", (12, 10)), ("b", "L", (20, 16)), ("c", "RGBA", (9, 30))):
            path = tmp_path / split / name / "0.png"
            path.parent.mkdir(parents=True)
            Image.new(mode, size, {"RGB": (200, 100, 50), "L": 70, "RGBA": (10, 20, 30, 255)}[mode]).save(path)
    train, _ = images.load(str(tmp_path), run_seed=0, flip=False)
    assert train.pixels is not None
    assert train.pixels.shape == (3, 3, 30, 20)  # (N, C, H, W): 30 high as c, 20 wide as b
    assert train.pixels[:, :, 5, 5].tolist() == [[200, 100, 50], [70, 70, 70], [10, 20, 30]]


def write_rows(folder: Path, features: dict, rows: dict) -> None:
    import datasets

    for split in ("train", "validation"):
        datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(folder / f"{split}.parquet")


def test_finest_of_two_label_columns(tmp_path: Path) -> None:
    """CIFAR-100 has 20 coarse and 100 fine labels."""
    import datasets
    from PIL import Image

    names = ["ash", "oak", "pike", "trout"]
    pixels = [Image.fromarray(image[0].numpy()) for image in random_images(4, 1, 8, 8)]
    for columns in (("coarse", "fine"), ("fine", "coarse")):  # also the other way round
        folder = tmp_path / columns[0]
        folder.mkdir()
        kinds = {"coarse": datasets.ClassLabel(names=["tree", "fish"]), "fine": datasets.ClassLabel(names=names)}
        values = {"coarse": [0, 1, 0, 1], "fine": [1, 3, 0, 2]}
        features = {"img": datasets.Image()} | {column: kinds[column] for column in columns}
        write_rows(folder, features, {"img": pixels} | {column: values[column] for column in columns})
        for split in images.load(str(folder), run_seed=0, flip=False):
            assert split.class_names == names
            assert split.labels.tolist() == [1, 3, 0, 2]


PLAIN = {  # other columns, the column of labels, the names of the classes and the labels of its rows
    "numbers": ({}, ("y", "int64", [10, 9, 10, 2]), ["2", "9", "10"], [2, 1, 2, 0]),
    "names beside numbers": (
        {"id": ("int32", [0, 1, 2, 3])},
        ("Label", "string", ["b", "a", "b", "b"]),
        ["a", "b"],
        [1, 0, 1, 1],
    ),
}


@pytest.mark.parametrize("case", PLAIN)
def test_plain_labels(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a CSV of Kaggle, or a web dataset: numbers keep their order, and the validation split the same classes."""
    import datasets
    from PIL import Image

    more, (key, kind, labels), names, wanted = PLAIN[case]
    features = {"image": datasets.Image(), key: datasets.Value(kind)}
    features |= {name: datasets.Value(other) for name, (other, _) in more.items()}
    pixels = [Image.fromarray(image[0].numpy()) for image in random_images(4, 1, 8, 8)]
    write_rows(
        tmp_path, features, {"image": pixels, key: labels} | {name: values for name, (_, values) in more.items()}
    )
    for split in images.load(str(tmp_path), 0, False):
        assert split.class_names == names
        assert split.labels.tolist() == wanted
    line = f"4 training and 4 validation images, 1 x 8 x 8, {len(names)} classes; columns 'image' and {key!r}"
    assert line in capsys.readouterr().out


def test_metadata_csv(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        rows = [("0.png", "cat"), ("1.png", "dog"), ("2.png", "cat")]
        for name, _ in rows:
            Image.fromarray(random_images(1, 1, 8, 8)[0, 0].numpy()).save(tmp_path / split / name)
        text = "\n".join(",".join(row) for row in [("file_name", "label"), *rows])
        (tmp_path / split / "metadata.csv").write_text(text + "\n")
    train, validation = images.load(str(tmp_path), 0, False)
    assert train.class_names == validation.class_names == ["cat", "dog"]
    assert train.labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize("where", ["metadata.csv", "path column"])
def test_csv_with_paths_and_numbers(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kaggle's way: one folder of images, and a table for each split, with integers for classes."""
    from PIL import Image

    pixels = random_images(6, 1, 8, 8)[:, 0].numpy()
    labels = [7, 3, 7, 9, 3, 3]
    for split, own in (("train", range(4)), ("validation", range(4, 6))):
        folder, place = (tmp_path / split, "") if where == "metadata.csv" else (tmp_path / "images", "images/")
        folder.mkdir(exist_ok=True)
        for i in own:
            Image.fromarray(pixels[i]).save(folder / f"{i}.png")
        table = folder / "metadata.csv" if where == "metadata.csv" else tmp_path / f"{split}.csv"
        first = "file_name" if where == "metadata.csv" else "picture"
        table.write_text(f"{first},label\n" + "".join(f"{place}{i}.png,{labels[i]}\n" for i in own))
    for split, own in zip(images.load(str(tmp_path), 0, False), (range(4), range(4, 6)), strict=True):
        assert split.class_names == ["3", "7", "9"]
        assert split.labels.tolist() == [["3", "7", "9"].index(str(labels[i])) for i in own]
        assert split.pixels is not None
        np.testing.assert_array_equal(split.pixels[:, 0].numpy(), pixels[list(own)])
    column = "image" if where == "metadata.csv" else "picture"
    assert f"3 classes; columns {column!r} and 'label'" in capsys.readouterr().out


def test_path_that_leads_nowhere(tmp_path: Path) -> None:
    """The first one decides whether a column holds paths; another one is named when its turn comes."""
    from PIL import Image

    Image.fromarray(random_images(1, 1, 8, 8)[0, 0].numpy()).save(tmp_path / "0.png")
    rows = ["0.png,1", "0.png,2", "gone.png,1"]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text("\n".join(["file,label", *rows]) + "\n")
    with pytest.raises(UserError, match=r"gone\.png is not a readable image: .*No such file"):
        images.load(str(tmp_path), 0, False)
    (tmp_path / "0.png").unlink()
    with pytest.raises(
        UserError, match=r"has no column of images.* file \(.*string\).* or their paths within the folder"
    ):
        images.load(str(tmp_path), 0, False)


@pytest.mark.parametrize("kind", ["Dataset", "DatasetDict"])
def test_saved_to_disk(kind: str, small_digits: Path, tmp_path: Path) -> None:
    import datasets

    rows = datasets.load_dataset(str(small_digits))
    (rows["train"] if kind == "Dataset" else rows).save_to_disk(tmp_path / "saved")
    found, wanted = images.load(str(tmp_path / "saved"), 0, False), images.load(str(small_digits), 0, False)
    if kind == "Dataset":
        assert [len(split) for split in found] == [469 - 47, 47], "a tenth is held out"
        assert set(fingerprints(found[0])) | set(fingerprints(found[1])) == set(fingerprints(wanted[0]))
    else:
        assert [split.digest() for split in found] == [split.digest() for split in wanted]


def test_test_split_validates_and_is_named(
    small_digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "no validation split, so its test split is used as one"
    for name in ("train", "validation"):
        shutil.copy(small_digits / f"{name}.parquet", tmp_path / f"{name.replace('validation', 'test')}.parquet")
    _, validation = images.load(str(tmp_path), 0, False)
    assert len(validation) == 30
    assert f"data     {tmp_path}: {line}\n" in capsys.readouterr().out
    shutil.copy(small_digits / "validation.parquet", tmp_path)
    images.load(str(tmp_path), 0, False)
    assert line not in capsys.readouterr().out


def test_refusals(tmp_path: Path) -> None:
    import datasets
    from PIL import Image

    pixels = [Image.fromarray(image[0].numpy()) for image in random_images(3, 1, 8, 8)]
    label = datasets.ClassLabel(names=["a", "b"])
    for name in ("one", "none", "empty", "other"):
        (tmp_path / name).mkdir()
    write_rows(tmp_path / "one", {"image": datasets.Image(), "y": label}, {"image": pixels, "y": [1, 1, 1]})
    with pytest.raises(UserError, match=r"only one class \(b\)"):
        images.load(str(tmp_path / "one"), 0, False)
    write_rows(
        tmp_path / "none",
        {"image": datasets.Image(), "y": datasets.Value("float64")},
        {"image": pixels, "y": [0, 1, 1]},
    )
    with pytest.raises(UserError, match=r"none of class labels: .* y \(float64\).* call the column of labels 'label'"):
        images.load(str(tmp_path / "none"), 0, False)
    with pytest.raises(UserError, match=r"this folder cannot be read \(EmptyDatasetError"):
        images.load(str(tmp_path / "empty"), 0, False)
    with pytest.raises(UserError, match="there is no such folder"):
        images.load(str(tmp_path / "missing"), 0, False)
    write_rows(tmp_path / "other", {"image": datasets.Image(), "y": label}, {"image": pixels, "y": [0, 1, 1]})
    (tmp_path / "other" / "train.parquet").unlink()
    with pytest.raises(UserError, match="has no split named train, only validation"):
        images.load(str(tmp_path / "other"), 0, False)


def test_digest(digits: tuple[images.Images, images.Images]) -> None:
    train, validation = digits
    assert images.load("digits", run_seed=9, flip=True)[0].digest() == train.digest()
    assert train.digest() != validation.digest()
    assert train.pixels is not None
    pixels = train.pixels.clone()
    pixels[700, 0, 3, 4] ^= 1
    labels = train.labels.clone()
    labels[-1] = (labels[-1] + 1) % 10
    changed = [
        dataclasses.replace(train, pixels=pixels),
        dataclasses.replace(train, labels=labels),
        dataclasses.replace(train, class_names=[*train.class_names[:9], "ten"]),
        dataclasses.replace(train, pixels=None),
    ]
    assert len({split.digest() for split in [train, *changed]}) == 5


# --- pixels are not bent ---


def write_classes(folder: Path, save: Callable[[Path, int], None], suffix: str, each: int = 3) -> Path:
    """Two classes of images that `save` writes to a path, with the number of the image."""
    for split in ("train", "validation"):
        for label, name in enumerate(("a", "b")):
            (folder / split / name).mkdir(parents=True)
            for i in range(each):
                save(folder / split / name / f"{i}.{suffix}", label * each + i)
    return folder


def noise_16(number: int, side: int = 20) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 2**16, (side, side + 4), dtype=np.uint16)


def as_big_endian(path: Path, number: int) -> None:
    from PIL import Image

    values = noise_16(number)
    image = Image.frombytes("I;16B", values.shape[::-1], values.astype(">u2").tobytes())
    image.save(path)


def as_16_bits(path: Path, number: int) -> None:
    from PIL import Image

    Image.fromarray(noise_16(number)).save(path)


@pytest.mark.parametrize(
    ("save", "suffix"), [(as_16_bits, "png"), (as_16_bits, "tif"), (as_16_bits, "pgm"), (as_big_endian, "tif")]
)
def test_16_bits_are_scaled(
    save: Callable[[Path, int], None],
    suffix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every value is the nearest of 256, and one note says so, for all images together."""
    monkeypatch.setattr(image_decode, "_noted", [])
    train, _ = images.load(str(write_classes(tmp_path, save, suffix)), 0, False)
    assert train.pixels is not None
    for number, found in enumerate(train.pixels):
        wanted = np.rint(noise_16(number) / 257).astype(np.uint8)
        assert train.channels == 1
        np.testing.assert_array_equal(found[0].numpy(), wanted)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: images of 16 bits")]
    assert len(notes) == 1
    assert f"{tmp_path}/train/a/0.{suffix} is {noise_16(0).max()}" in notes[0]


def test_mutant_that_clips_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `convert` alone does: nearly all pixels are white."""
    monkeypatch.setattr(image_decode, "_to_8_bits", lambda image, name: image)
    train, _ = images.load(str(write_classes(tmp_path, as_16_bits, "png")), 0, False)
    assert train.pixels is not None
    assert (train.pixels == 255).float().mean() > 0.95


def test_16_bit_images_that_are_large(tmp_path: Path) -> None:
    def save(path: Path, number: int) -> None:
        from PIL import Image

        Image.fromarray(noise_16(number, 90)).save(path)

    _, validation = images.load(str(write_classes(tmp_path, save, "png")), 0, False)
    assert validation.rows is not None
    decoded = image_decode.decode(validation.rows, 4)
    np.testing.assert_array_equal(decoded[0].numpy(), np.rint(noise_16(4, 90) / 257).astype(np.uint8))


@pytest.mark.parametrize("kind", [np.int32, np.float32], ids=["I", "F"])
def test_pixels_without_a_range_are_refused(kind: type, tmp_path: Path) -> None:
    def save(path: Path, number: int) -> None:
        from PIL import Image

        Image.fromarray(noise_16(number).astype(kind)).save(path)

    mode = "I" if kind == np.int32 else "F"
    with pytest.raises(UserError, match=rf"train/a/0\.tif has pixels of mode {mode} .* whose range is unknown: save "):
        images.load(str(write_classes(tmp_path, save, "tif")), 0, False)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int, suffix: str, tmp_path: Path) -> None:
    """A photo lies as the camera was held, in each of EXIF's eight ways."""

    def save(path: Path, number: int) -> None:
        from PIL import Image

        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(upright).save(path, exif=exif, **({"quality": 100} if suffix == "jpg" else {}))

    upright = np.kron(np.array([[0, 60, 120], [180, 240, 30]], np.uint8), np.ones((8, 8), np.uint8))
    train, _ = images.load(str(write_classes(tmp_path, save, suffix)), 0, False)
    turns = {  # what EXIF 2.3 says of rows and columns
        **{1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1]},
        **{5: upright.T, 6: upright.T[:, ::-1], 7: upright.T[::-1, ::-1], 8: upright.T[::-1]},
    }
    assert train.pixels is not None
    assert np.abs(train.pixels[0, 0].numpy().astype(int) - turns[orientation].astype(int)).max() < 6


def test_damaged_exif_does_not_matter(tmp_path: Path) -> None:
    def save(path: Path, number: int) -> None:
        from PIL import Image

        Image.fromarray(noise_16(number).astype(np.uint8)).save(path, exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\1\x12junk")

    train, _ = images.load(str(write_classes(tmp_path, save, "png")), 0, False)
    assert train.pixels is not None
    np.testing.assert_array_equal(train.pixels[0, 0].numpy(), noise_16(0).astype(np.uint8))


def test_first_frame_of_several(tmp_path: Path) -> None:
    def save(path: Path, number: int) -> None:
        from PIL import Image

        frames = [Image.new("L", (9, 9), shade) for shade in (50, 100, 200)]
        frames[0].save(path, save_all=True, append_images=frames[1:])

    train, _ = images.load(str(write_classes(tmp_path, save, "tif")), 0, False)
    assert train.pixels is not None
    assert train.pixels.unique().tolist() == [50]


def test_row_without_an_image(tmp_path: Path) -> None:
    import datasets
    from PIL import Image

    features = {"image": datasets.Image(), "y": datasets.ClassLabel(names=["a", "b"])}
    pixels: list[Any] = [Image.new("L", (8, 8), 9 * i) for i in range(6)]
    write_rows(tmp_path, features, {"image": [*pixels[:4], None, pixels[5]], "y": [0, 1] * 3})
    with pytest.raises(UserError, match=r"--data: row 4 has no image: remove the row"):
        images.load(str(tmp_path), 0, False)


def test_label_without_a_class(tmp_path: Path) -> None:
    """Of a table whose numbers and names do not belong together; on a GPU, the loss would end with an assertion."""
    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "PNG")
    cells = pa.array(
        [{"bytes": buffer.getvalue(), "path": None}] * 3, pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    table = pa.table([cells, pa.array([0, 1, 2], pa.int64())], names=["image", "y"])
    features = {"image": {"_type": "Image"}, "y": {"names": ["a", "b"], "_type": "ClassLabel"}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for split in ("train", "validation"):
        parquet.write_table(table, tmp_path / f"{split}.parquet")
    with pytest.raises(UserError, match="the training split has label 2, and its column of labels has only 2 classes"):
        images.load(str(tmp_path), 0, False)


def test_one_row_cannot_be_split(tmp_path: Path) -> None:
    import datasets
    from PIL import Image

    features = {"image": datasets.Image(), "y": datasets.ClassLabel(names=["a", "b"])}
    write_rows(tmp_path, features, {"image": [Image.new("L", (8, 8))], "y": [0]})
    (tmp_path / "validation.parquet").unlink()
    with pytest.raises(UserError, match=r"has 1 row\(s\) and no validation split: it needs at least 2 rows"):
        images.load(str(tmp_path), 0, False)


def test_name_that_is_not_utf8(tmp_path: Path) -> None:
    folder = write_classes(tmp_path, as_16_bits, "png")
    (folder / "train" / "a" / "0.png").rename(os.fsdecode(os.fsencode(folder / "train" / "a") + b"/caf\xe9.png"))
    with pytest.raises(
        UserError, match=r"this folder cannot be read \(the name b'.*/caf\\xe9\.png' is not UTF-8: rename"
    ):
        images.load(str(folder), 0, False)


def digest_of(folder: Path) -> str:
    return images.load(str(folder), 0, False)[0].digest()


@pytest.mark.parametrize("kind", ["files", "table"])
def test_digest_samples_the_contents_of_large_images(kind: str, tmp_path: Path) -> None:
    """Another copy has the same digest; other pixels behind the same names, sizes and labels have another."""
    import datasets

    def save(path: Path, number: int) -> None:
        from PIL import Image

        Image.fromarray(noise_16(number, 90).astype(np.uint8)).save(path)

    one = write_classes(tmp_path / "one", save, "bmp", each=20)
    two = Path(shutil.copytree(one, tmp_path / "two"))
    for file in two.rglob("*.bmp"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    three = Path(shutil.copytree(one, tmp_path / "three"))
    if kind == "table":
        for folder in (one, two, three):
            features = datasets.Features({"image": datasets.Image(), "y": datasets.ClassLabel(names=["a", "b"])})
            for split in ("train", "validation"):
                files = sorted((folder / split).rglob("*.bmp"))
                cells = [{"bytes": file.read_bytes(), "path": None} for file in files]
                rows = {"image": cells, "y": [int(file.parent.name == "b") for file in files]}
                datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")
                shutil.rmtree(folder / split)
    assert digest_of(one) == digest_of(three)
    assert digest_of(one) != digest_of(two)


def test_mutant_digest_of_labels_alone(photos: Path, tmp_path: Path) -> None:
    """What the digest was before: brighter photos look the same to it."""
    other = Path(shutil.copytree(photos, tmp_path / "other"))
    for file in other.rglob("*.png"):
        from PIL import Image

        Image.open(file).point(lambda value: 255 - value).save(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_decode, "content", lambda *_, **__: b"")
        assert digest_of(photos) == digest_of(other)
    assert digest_of(photos) != digest_of(other)
