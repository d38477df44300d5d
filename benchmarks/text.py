"""A large text file: start-up, memory and rate, beside batches as nanoGPT reads them; prints a Markdown table.

    uv run python benchmarks/text.py 2    # GB of text, which need five times as much disk

The rounds alternate, so that a busy machine slows both, and each side computes in one thread. "train.bin" is the same
text as tokens that another program has packed, which both sides map into memory.
"""

import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common.workloads import stdlib, text

ROUNDS, BATCHES, BATCH, SEQ_LEN = 5, 100, 32, 1024

Read = Callable[[np.random.Generator], tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    """Write the files, open each in processes of their own, and read them by turns."""
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = f"{folder}/cache"
        root = Path(folder)
        write_files(root, round(float(sys.argv[1]) * 1e9))
        sides: dict[str, Callable[[Path], Read]] = {
            "Brigade, .txt": open_lines,
            "Brigade, train.bin": open_tokens,
            "as nanoGPT, train.bin": open_memmap,
        }
        starts: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(2):
            for name, side in sides.items():
                with spawn.Pool(1) as process:
                    starts[name].append(process.apply(start, (side, root)))
        reads = {name: side(root) for name, side in sides.items()}
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(ROUNDS):
            for name, read in reads.items():
                generator = np.random.default_rng(turn)
                began = time.perf_counter()
                for _ in range(BATCHES):
                    inputs, _ = read(generator)
                    assert inputs.shape == (BATCH, SEQ_LEN)
                rates[name].append(BATCHES * BATCH * SEQ_LEN / (time.perf_counter() - began) / 1e6)
    print(f"| {sys.argv[1]} GB of text | start | start again | memory | million tokens/s (median) | range |")
    print("|---|---|---|---|---|---|")
    for name, values in rates.items():
        (first_s, _), (again_s, mib) = starts[name]
        rate = f"{statistics.median(values):,.0f} | {min(values):,.0f} to {max(values):,.0f}"
        print(f"| {name} | {first_s:.1f} s | {again_s:.1f} s | {mib:,.0f} MiB | {rate} |")


def write_files(root: Path, size: int) -> None:
    """Python's own text, over and over, as lines and as 16-bit tokens."""
    documents = list(stdlib.read_documents().values())
    train = b"\n".join(documents[20:])
    validation = b"\n".join(documents[:20])
    train = train.replace(b"\r", b"").decode("ascii", "replace").replace("\ufffd", "?").encode()
    for folder in ("lines", "tokens"):
        (root / folder).mkdir()
    with (root / "lines" / "train.txt").open("wb") as lines, (root / "tokens" / "train.bin").open("wb") as tokens:
        for _ in range(-(-size // len(train))):
            lines.write(train)
            tokens.write(np.frombuffer(train, np.uint8).astype(np.uint16).data)
    (root / "lines" / "validation.txt").write_bytes(validation.decode("ascii", "replace").encode())
    np.frombuffer(validation, np.uint8).astype(np.uint16).tofile(root / "tokens" / "val.bin")


def start(side: Callable[[Path], Read], root: Path) -> tuple[float, float]:
    """Seconds until the first batch, and memory in MiB, both with the imports that it needs besides torch."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    side(root)(np.random.default_rng(0))
    took_s = time.perf_counter() - began
    return took_s, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def open_lines(root: Path) -> Read:
    """Of lines, which the first start packs."""
    return reader(root / "lines")


def open_tokens(root: Path) -> Read:
    """Of packed tokens."""
    return reader(root / "tokens")


def reader(folder: Path) -> Read:
    """Random sequences of a folder."""
    train, _ = text.load(str(folder), SEQ_LEN)
    return lambda generator: train.read(np.zeros(BATCH), generator.integers(0, len(train), BATCH))


def open_memmap(root: Path) -> Read:
    """Random places of a memory map, cut out and copied one by one."""
    tokens = np.memmap(root / "tokens" / "train.bin", np.uint16, "r")

    def read(generator: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        places = generator.integers(0, len(tokens) - SEQ_LEN - 1, BATCH)
        rows = [tokens[place : place + SEQ_LEN + 1].astype(np.int64) for place in places]
        inputs = torch.stack([torch.from_numpy(row[:-1]) for row in rows])
        return inputs, torch.stack([torch.from_numpy(row[1:]) for row in rows])

    return read


if __name__ == "__main__":
    main()
