"""Reading: the first command fills docs/measured/data.md, each of the others prints a Markdown table.

    uv run python -m benchmarks.data photos         # JPEGs beside torchvision, evaluations, what models consume
    uv run python -m benchmarks.data                # whole batches of 32x32 in memory, against per-sample PIL
    uv run python -m benchmarks.data files 100000   # many small files: start-up, memory, rate, against ImageFolder

The rounds alternate, so that a busy machine slows both, and each side computes in one thread.
"""

import io
import itertools
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import PIL
import torch
from common import seed
from common.train import data, initial, sampler
from common.workloads import augment, image_decode, image_folder, images
from PIL import Image
from tests.harness import module, pages
from tests.harness.runner import ROOT

ROUNDS, BATCH, SAMPLES = 7, 128, 4096


FILES_ROUNDS, FILES_SAMPLES, SIDE, CLASSES = 5, 4096, 64, 100

PHOTO_ROUNDS, PHOTOS, CONTENTS, PHOTO_BATCH = 9, 256, 64, 32
WORKERS = (0, 1, 2)
EVALUATIONS = 15  # rounds
FEED_ROUNDS, FEED_S = 5, 1.0
CPU = torch.device("cpu")
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure what the command line asks for."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["files"]:
        measure_files(int(sys.argv[2]))
    elif sys.argv[1:2] == ["photos"]:
        measure_photos()
    else:
        measure_batches()


def measure_batches() -> None:
    """Augmented images in memory: pad by 4 pixels, crop back at random and mirror half of them."""
    from torchvision import transforms

    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.zeros(SAMPLES, dtype=torch.int64)
    brigade = images.Images(labels, ["a", "b"], channels=3, size=32, pixels=pixels, train=True, flip=True)
    pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels]
    per_sample = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    )

    def read_batches() -> None:
        for start in range(0, SAMPLES, BATCH):
            indices = np.arange(start, start + BATCH)
            batch, _ = brigade.read(np.zeros_like(indices), indices)
            batch.to(torch.float32).div_(127.5).sub_(1)

    def read_samples() -> None:
        for start in range(0, SAMPLES, BATCH):
            batch = torch.stack([per_sample(picture) for picture in pictures[start : start + BATCH]])
            batch.to(torch.float32).div_(127.5).sub_(1)

    rates: dict[str, list[float]] = {"whole batches (common/workloads/images)": [], "per-sample PIL (torchvision)": []}
    for _ in range(ROUNDS):
        for name, read in zip(rates, (read_batches, read_samples), strict=True):
            start = time.perf_counter()
            read()
            rates[name].append(SAMPLES / (time.perf_counter() - start))
    print("| augmented 32x32 images in one process | images/s (median) | range |\n|---|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):,.0f} | {min(values):,.0f} to {max(values):,.0f} |")


def measure_files(count: int) -> None:
    """A folder of small JPEG files: both sides crop and resize at random to 64x64, and mirror half of them."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = f"{folder}/cache"
        root = Path(folder) / "photos"
        write_files(root, count)
        time.sleep(2 * image_folder.SETTLED_S)
        sides = {"Brigade": open_brigade, "torchvision's ImageFolder": open_image_folder}
        starts: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(2):
            for name, side in sides.items():
                with spawn.Pool(1) as process:  # each start in a process of its own
                    starts[name].append(process.apply(start, (side, root)))
        batches = {name: side(root) for name, side in sides.items()}
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(FILES_ROUNDS):
            for name, found in batches.items():
                began = time.perf_counter()
                for _ in range(FILES_SAMPLES // BATCH):
                    assert len(next(found)) == BATCH
                rates[name].append(FILES_SAMPLES / (time.perf_counter() - began))
        print(f"| {count:,} JPEG files of {SIDE}x{SIDE} | start | start again | memory | images/s (median) | range |")
        print("|---|---|---|---|---|---|")
        for name, values in rates.items():
            (first_s, _), (again_s, mib) = starts[name]
            rate = f"{statistics.median(values):,.0f} | {min(values):,.0f} to {max(values):,.0f}"
            print(f"| {name} | {first_s:.1f} s | {again_s:.1f} s | {mib:,.0f} MiB | {rate} |")


def write_files(root: Path, count: int) -> None:
    """As many files in a hundred classes, a tenth of them to validate; 500 of them differ."""
    noise = np.random.default_rng(0)
    contents = []
    for _ in range(500):
        coarse = Image.fromarray(noise.integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        contents.append(buffer.getvalue())
    for i in range(count):
        split = "train" if i % 10 else "validation"
        path = root / split / f"class_{i // 10 % CLASSES:03d}" / f"{i:07d}.jpg"
        if i < 10 * CLASSES:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[i % len(contents)])


def start(side: Callable[[Path], Iterator[Any]], root: Path) -> tuple[float, float]:
    """Seconds until a data set is open, and memory in MiB, both with the imports that it needs besides torch."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    side(root)
    took_s = time.perf_counter() - began
    return took_s, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def open_brigade(root: Path) -> Iterator[torch.Tensor]:
    """Batches of one process, as a recipe reads them."""
    train, _ = images.load(str(root), 0, flip=True)
    division = sampler.divide_batch(BATCH, 0, 1)
    plan = sampler.make_plan(division, len(train), run_seed=0, epochs=0, max_steps=10**6, progress={})
    loader = data.Loader(train, sampler.training_requests(plan, 0), 0, torch.device("cpu"))
    return (batch.inputs for batch in loader)


def open_image_folder(root: Path) -> Iterator[torch.Tensor]:
    """The same of torchvision's data set and transforms, and torch's loader."""
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    augment = transforms.Compose(
        [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    )
    train = datasets.ImageFolder(root / "train", augment)
    datasets.ImageFolder(root / "validation", augment)
    loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
    return (batch for _ in itertools.count() for batch, _ in loader)


# --- photos ---


def measure_photos() -> None:
    """Fill docs/measured/data.md."""
    import torchvision

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = f"{folder}/cache"
        root = Path(folder) / "photos"
        mean_bytes = write_photos(root)
        time.sleep(2 * image_folder.SETTLED_S)
        train, validation = images.load(str(root), 0, flip=True)
        digits = images.load("digits", 0, flip=False)[1]
        versions = f"torchvision {torchvision.__version__}, Pillow {PIL.__version__}"
        photos = against_torchvision(train, root)
        parts = parts_of_reading(root)
        evaluated = evaluations({"digits, in memory": digits, f"{len(validation)} photos": validation})
    fed = feeding()
    pages.write(
        ROOT / "docs" / "measured" / "data.md",
        measured=pages.measured("uv run python -m benchmarks.data photos", versions, began=began),
        photos=photos + f"\n\n{mean_bytes / 1000:.0f} kB a file.",
        parts=parts,
        evaluations=evaluated,
        feeding=fed,
    )
    print("\n\n".join((photos, parts, evaluated, fed)))


def write_photos(root: Path) -> float:
    """JPEGs of 500x375 with structure at all scales, four fifths of them to train on; returns their mean bytes."""
    noise = np.random.default_rng(0)
    contents = []
    for _ in range(CONTENTS):
        pixels = np.zeros((375, 500, 3))
        for step in (128, 64, 32, 16, 8, 4, 2, 1):
            coarse = noise.standard_normal((375 // step + 2, 500 // step + 2, 1 if step < 8 else 3)).astype(np.float32)
            planes = [
                Image.fromarray(plane).resize((500, 375), Image.Resampling.BICUBIC)
                for plane in np.moveaxis(coarse, 2, 0)
            ]
            pixels += np.stack([np.asarray(plane) for plane in planes], 2) * step**0.4
        pixels = 120 + 50 * (pixels - pixels.mean()) / pixels.std()
        buffer = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=95)
        contents.append(buffer.getvalue())
    for i in range(PHOTOS * 5 // 4):
        path = root / ("validation" if i % 5 == 4 else "train") / f"class_{i % 2}" / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[i % CONTENTS])
    return statistics.mean(map(len, contents))


def cpu_s() -> float:
    """Processor time of this process and of the ones that it has started and that run."""
    ticks = 0
    for child in multiprocessing.active_children():
        # After the name, which may hold spaces: user and system time are the 14th and 15th value, proc(5).
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / TICKS


def requests(count: int, epoch: int = 0) -> list[sampler.Request]:
    """All of the first `count` samples once."""
    starts = range(0, count, PHOTO_BATCH)
    parts = [np.arange(start, min(start + PHOTO_BATCH, count)) for start in starts]
    return [sampler.Request(np.full_like(part, epoch), part, len(part), True) for part in parts]


def image_folder_arm(root: Path, version: int, workers: int) -> Callable[[int], int]:
    """An epoch of torchvision's ImageFolder with the same augmentation, in torch's loader, whose workers stay."""
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms
    from torchvision.transforms import v2

    if version == 1:
        steps: list[Any] = [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
        augmented: Any = transforms.Compose(steps)
    else:
        augmented = v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()])
    train = datasets.ImageFolder(root / "train", augmented)
    loader = DataLoader(train, PHOTO_BATCH, num_workers=workers, persistent_workers=workers > 0)
    return lambda epoch: sum(len(inputs) for inputs, _ in loader)


def against_torchvision(train: images.Images, root: Path) -> str:
    """A table: images per second of processor time and of time, by turns."""

    def brigade(workers: int) -> Callable[[int], int]:
        return lambda epoch: sum(
            len(batch.inputs) for batch in data.Loader(train, requests(PHOTOS, epoch), workers, CPU)
        )

    def nothing(*_: Any) -> None:
        return None

    def pillow_alone(epoch: int) -> int:
        with mock.patch.object(image_decode, "_plain_jpeg", nothing):
            return brigade(0)(epoch)

    arms: dict[str, Callable[[int], int]] = {}
    for workers in WORKERS:
        arms[f"Brigade | {workers}"] = brigade(workers)
        if not workers:
            arms["Brigade with Pillow alone | 0"] = pillow_alone
        arms[f"ImageFolder, transforms | {workers}"] = image_folder_arm(root, 1, workers)
        arms[f"ImageFolder, transforms.v2 | {workers}"] = image_folder_arm(root, 2, workers)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for turn in range(PHOTO_ROUNDS + 1):
        for name, read in arms.items() if turn % 2 else reversed(arms.items()):
            before = cpu_s(), time.perf_counter()
            assert read(turn) == PHOTOS
            after = cpu_s(), time.perf_counter()
            if turn:  # the first one starts workers
                found[name].append((PHOTOS / (after[0] - before[0]), PHOTOS / (after[1] - before[1])))
    head = "| reader | workers | images/s of processor time | range | images/s by the clock |"
    lines = [head, "|---|---|---|---|---|"]
    for name, rates in found.items():
        of_cpu, of_time = zip(*rates, strict=True)
        span = f"{min(of_cpu):,.0f} to {max(of_cpu):,.0f}"
        lines.append(f"| {name} | {statistics.median(of_cpu):,.0f} | {span} | {statistics.median(of_time):,.0f} |")
    return "\n".join(lines)


def parts_of_reading(root: Path) -> str:
    """A table: images per second of processor time of each part alone."""
    from torchvision import io as torchvision_io

    contents = [path.read_bytes() for path in sorted(root.rglob("*.jpg"))[:CONTENTS]]
    draws = seed.uniform(0, seed.AUGMENT, 0, np.arange(CONTENTS)[:, None], np.arange(5))

    def pillow(content: bytes, draft: bool = False) -> Image.Image:
        file = Image.open(io.BytesIO(content))
        if draft:
            file.draft(None, (187, 187))
        file.load()
        return file

    def by_torchvision(content: bytes) -> torch.Tensor:
        return torchvision_io.decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def tensor(picture: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    pictures = [pillow(content) for content in contents]
    tensors = [by_torchvision(content) for content in contents]
    differ = sum(not torch.equal(tensor(a), b) for a, b in zip(pictures, tensors, strict=True))
    parts: dict[str, Callable[[int], Any]] = {
        "decode, Pillow": lambda i: pillow(contents[i]),
        "decode at half the size, Pillow": lambda i: pillow(contents[i], draft=True),
        "decode, torchvision": lambda i: by_torchvision(contents[i]),
        "Pillow's image to a tensor": lambda i: tensor(pictures[i]),
        "random crop, resized": lambda i: augment.crop_resized(tensors[i], 224, draws[i]),
        "decode and crop, torchvision": lambda i: augment.crop_resized(by_torchvision(contents[i]), 224, draws[i]),
    }
    found: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(PHOTO_ROUNDS + 1):
        for name, do in parts.items():
            before = time.process_time()
            for i in range(CONTENTS):
                do(i)
            if turn:
                found[name].append(CONTENTS / (time.process_time() - before))
    lines = ["| part | images/s of processor time | range |", "|---|---|---|"]
    for name, rates in found.items():
        lines.append(f"| {name} | {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} |")
    return "\n".join([*lines, "", f"Of {CONTENTS} images, {differ} have other pixels by torchvision than by Pillow."])


# --- evaluations, and what a model consumes ---


def evaluations(splits: dict[str, images.Images]) -> str:
    """A table: time to read a split with 2 workers, those of the evaluation before and new ones, by turns."""
    lines = ["| what is evaluated | new workers, ms | kept workers, ms |", "|---|---|---|"]
    for name, split in splits.items():
        kept: list[float] = []
        new: list[float] = []
        for turn in range(2 * EVALUATIONS + 2):
            if turn % 2:
                data._idle.clear()  # as if none had been kept
            began = time.perf_counter()
            for _ in data.Loader(split, requests(len(split)), 2, CPU):
                pass
            if turn > 1:
                (new if turn % 2 else kept).append(1000 * (time.perf_counter() - began))
        spans = [pages.spread(one, ",.0f") for one in (new, kept)]
        lines.append(f"| {name} | {spans[0]} | {spans[1]} |")
    data._idle.clear()
    return "\n".join(lines)


def feeding() -> str:
    """A table: samples per second of processor time that one process reads and trains on, with a recipe's defaults."""
    lines = ["| recipe, its data | read, samples/s | trained on, samples/s | read / trained on |", "|---|---|---|---|"]
    for recipe in ("ddp_resnet", "ddp_gpt"):
        name, (reads, trains) = fed(recipe)
        lines.append(f"| {recipe}, {name} | {reads:,.0f} | {trains:,.0f} | {reads / trains:,.0f} |")
    return "\n".join(lines)


def fed(recipe: str) -> tuple[str, list[float]]:
    """The recipe's default data, and the samples per second that are read and that are trained on."""
    part = vars(module.load(recipe))
    args = part["Args"]()
    train, _ = part["make_data"](args)
    model = part["make_model"](args, train)
    if any(parameter.is_meta for parameter in model.parameters()):
        model = initial.materialize(model, args.seed, CPU, torch.float32)
    optimizer = part["make_optimizer"](args, model)
    batch_size = args.global_batch_size // 2  # of each of two ranks
    division = sampler.divide_batch(batch_size, 0, 1)
    plan = sampler.make_plan(division, len(train), run_seed=0, epochs=0, max_steps=10**6, progress={})
    loader = data.Loader(train, sampler.training_requests(plan, 0), 0, CPU)
    batch = next(loader)

    def read() -> None:
        next(loader)

    def step() -> None:
        (part["forward"](args, model, batch)["loss"] / batch_size).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    arms: tuple[Callable[[], None], ...] = (read, step)
    rates: tuple[list[float], ...] = ([], [])
    for _ in range(FEED_ROUNDS):
        for do, found in zip(arms, rates, strict=True):
            began, count = time.process_time(), 0
            while time.process_time() - began < FEED_S:
                do()
                count += batch_size
            found.append(count / (time.process_time() - began))
    return args.data, [statistics.median(found) for found in rates]


if __name__ == "__main__":
    main()
