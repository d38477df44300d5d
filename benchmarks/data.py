"""Images per second beside torchvision's; each command prints a Markdown table.

    uv run python benchmarks/data.py                # whole batches of 32x32 in memory, against per-sample PIL
    uv run python benchmarks/data.py files 100000   # many small files: start-up, memory, rate, against ImageFolder

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

import numpy as np
import torch
from common import data, sampler
from common.workloads import image_folder, images
from PIL import Image

ROUNDS, BATCH, SAMPLES = 7, 128, 4096


FILES_ROUNDS, FILES_SAMPLES, SIDE, CLASSES = 5, 4096, 64, 100


def main() -> None:
    """Measure what the command line asks for."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["files"]:
        measure_files(int(sys.argv[2]))
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


if __name__ == "__main__":
    main()
