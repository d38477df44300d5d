"""Augmented images per second in one process, at 32x32, against per-sample PIL: `uv run python benchmarks/data.py`.

Both pad by 4 pixels, crop back at random and mirror half of the images; the rounds alternate, so that a busy
machine slows both. Prints a Markdown table.
"""

import statistics
import time

import numpy as np
import torch
from common.workloads.images import Images
from PIL import Image
from torchvision import transforms

ROUNDS, BATCH, SAMPLES = 7, 128, 4096


def main() -> None:
    """Measure in alternation and print the medians."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.zeros(SAMPLES, dtype=torch.int64)
    brigade = Images(labels, ["a", "b"], channels=3, size=32, pixels=pixels, train=True, flip=True)
    pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels]
    per_sample = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    )

    def read_batches() -> None:
        for start in range(0, SAMPLES, BATCH):
            indices = np.arange(start, start + BATCH)
            images, _ = brigade.read(np.zeros_like(indices), indices)
            images.to(torch.float32).div_(127.5).sub_(1)

    def read_samples() -> None:
        for start in range(0, SAMPLES, BATCH):
            images = torch.stack([per_sample(picture) for picture in pictures[start : start + BATCH]])
            images.to(torch.float32).div_(127.5).sub_(1)

    rates: dict[str, list[float]] = {"whole batches (common/workloads/images)": [], "per-sample PIL (torchvision)": []}
    for _ in range(ROUNDS):
        for name, read in zip(rates, (read_batches, read_samples), strict=True):
            start = time.perf_counter()
            read()
            rates[name].append(SAMPLES / (time.perf_counter() - start))
    print("| augmented 32x32 images in one process | images/s (median) | range |\n|---|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):,.0f} | {min(values):,.0f} to {max(values):,.0f} |")


if __name__ == "__main__":
    main()
