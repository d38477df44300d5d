"""What documents that are kept apart cost, and what packing gains: `uv run python -m benchmarks.documents`.

It writes docs/measured/documents.md. The model and its loss are those of ddp_gpt at its default size, on one thread;
the documents are the paragraphs of Python's manual, as bytes. Arms take turns, a few batches each, so that all have the
same process, caches and neighbours; times are the processor's. Each arm's memory is that of a process of its own.
`--short` measures one round of little, and writes nothing.
"""

import contextlib
import io
import json
import re
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from benchmarks import memory
from common import precision
from common.run import cli
from common.train import data, initial
from common.workloads import document_rows
from tests.harness import pages, runner
from tests.harness.runner import ROOT

SHORT = "--short" in sys.argv
ROUNDS = 1 if SHORT else 15
BATCHES = 2 if SHORT else 4  # of an arm in a round
TOKENS = 10**6 if SHORT else 10**8  # that a start lays out
SEQUENCES = 16  # of a batch: a rank's of two, by default
SIZES = [("bfloat16", 128), ("float32", 128), ("bfloat16", 512), ("float32", 512)]  # type, tokens of a row
APART, ROW, AGAIN = "documents apart", "one row", "one row again"
PACKED, PADDED, ALONE = "packed", "padded to the longest of a batch", "one document in a row"
PAGE = ROOT / "docs" / "measured" / "documents.md"
COST = (
    "| type | row | one row, ms | documents apart | one row against itself | MiB, one row | apart |\n"
    "|---|--:|--:|--:|--:|--:|--:|"
)
GAIN = (
    "| documents | rows of 512 | share of padding | tokens that count per processor second | packing has | MiB |\n"
    "|---|--:|--:|--:|--:|--:|"
)
START = "| tokens of a document | documents | rows of 2,048 | processor seconds | MiB more |\n|--:|--:|--:|--:|--:|"
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def write_paragraphs(folder: Path) -> None:
    """A table of documents: most of a few hundred bytes."""
    found = [one for topic in sorted(topics) for one in re.split(r"\n\s*\n", topics[topic]) if len(one) > 1]
    for split, some in (("train", found[40:]), ("validation", found[:40])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in some))


def load(folder: str, dtype: str, seq_len: int) -> tuple[Callable[..., Any], Any, int]:
    """The forward and backward pass of ddp_gpt over a batch, its training set, and the length of a row."""
    torch.set_num_threads(1)
    part = runpy.run_path(str(ROOT / "recipes" / "ddp_gpt" / "train.py"), run_name="documents")
    args = cli.parse(part["Args"], ["--data", folder, "--dtype", dtype, "--seq-len", str(seq_len)])
    with contextlib.redirect_stdout(io.StringIO()):
        train, _ = part["make_data"](args)
    cpu = torch.device("cpu")
    kind = precision.param_dtype(precision.compute_dtype(dtype, cpu))
    model = initial.materialize(part["make_model"](args, train), args.seed, cpu, kind)

    def both_passes(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        part["forward"](args, model, data.Batch(inputs, targets, len(inputs), True))["loss"].backward()
        model.zero_grad()

    return both_passes, train, seq_len


def rows_of(train: Any) -> Batches:
    """Batches of rows, in a random order: the longest documents lie in the first rows."""
    indices = np.random.default_rng(0).permutation(len(train))[: BATCHES * SEQUENCES].reshape(BATCHES, -1)
    return [train.read(np.zeros_like(one), one) for one in indices]


def attention_arms(train: Any) -> dict[str, Batches]:
    """The same tokens, with their documents apart or not."""
    apart = rows_of(train)
    row = [(inputs[:, 0].contiguous(), targets) for inputs, targets in apart]
    return {ROW: row, APART: apart, AGAIN: row}


def packing_arms(train: Any, seq_len: int) -> dict[str, Batches]:
    """Documents that share rows; and the same ones alone, which need no mask."""
    packed = rows_of(train)
    documents = []
    for inputs, targets in packed:
        for (tokens, positions), following in zip(inputs.numpy(), targets.numpy(), strict=True):
            for place in np.split(np.arange(seq_len), np.flatnonzero(positions == 0)[1:]):
                if (following[place] != document_rows.IGNORED).any():  # else padding
                    documents.append((torch.from_numpy(tokens[place]), torch.from_numpy(following[place])))
    order = np.random.default_rng(0).permutation(len(documents)).tolist()
    arms: dict[str, Batches] = {PACKED: packed, PADDED: [], ALONE: []}
    for first in range(0, len(order), SEQUENCES):
        some = [documents[i] for i in order[first : first + SEQUENCES]]
        for arm, length in ((PADDED, max(len(tokens) for tokens, _ in some)), (ALONE, seq_len)):
            inputs = torch.zeros(len(some), length, dtype=torch.int64)
            targets = torch.full((len(some), length), document_rows.IGNORED)
            for i, (tokens, following) in enumerate(some):
                inputs[i, : len(tokens)], targets[i, : len(tokens)] = tokens, following
            arms[arm].append((inputs, targets))
    return arms


def by_turns(both_passes: Callable[..., Any], arms: dict[str, Batches]) -> dict[str, list[float]]:
    """Processor seconds of each arm's batches, round by round; the first round warms up."""
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(ROUNDS + 1):
        for arm in list(arms)[:: -1 if number % 2 else 1]:
            began = time.process_time()
            for batch in arms[arm]:
                both_passes(*batch)
            found[arm].append(time.process_time() - began)
    return {arm: times[1:] for arm, times in found.items()}


def take_memory(make: str, arm: str, out: str, *how: Any) -> None:
    """A process that computes one arm's batches, and writes its peak."""
    both_passes, train, seq_len = load(*how)
    batches = (attention_arms(train) if make == "attention" else packing_arms(train, seq_len))[arm]
    del train
    for batch in batches:
        both_passes(*batch)
    Path(out).write_text(str(memory.peak_mib()))


def peak(make: str, arm: str, *how: Any) -> str:
    """MiB of an arm in a process of its own."""
    with tempfile.NamedTemporaryFile("r") as file:
        result = runner.spawn(take_memory, [(make, arm, file.name, *how)], timeout_s=600.0)
        assert result.ok, str(result)
        return f"{float(file.read()):,.0f}"


def more(some: list[float], than: list[float]) -> str:
    """By how much the times of a round are longer than those of another arm: median, and the middle half."""
    percents = [100 * (one / other - 1) for one, other in zip(some, than, strict=True)]
    low, middle, high = statistics.quantiles(percents, n=4) if len(percents) > 1 else percents * 3
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def cost(folder: str, dtype: str, seq_len: int) -> str:
    """A line of what the mask costs."""
    both_passes, train, _ = load(folder, dtype, seq_len)
    found = by_turns(both_passes, attention_arms(train))
    cells = [f"{1e3 * statistics.median(found[ROW]) / BATCHES:.0f}", more(found[APART], found[ROW])]
    cells += [more(found[AGAIN], found[ROW]), *(peak("attention", arm, folder, dtype, seq_len) for arm in (ROW, APART))]
    return f"| {' | '.join([dtype, str(seq_len), *cells])} |"


def gain(folder: str, dtype: str, seq_len: int) -> list[str]:
    """The lines of what packing gains."""
    both_passes, train, _ = load(folder, dtype, seq_len)
    arms = packing_arms(train, seq_len)
    found = by_turns(both_passes, arms)
    lines = []
    for arm, batches in arms.items():
        counted = sum(int((targets != document_rows.IGNORED).sum()) for _, targets in batches)
        places = sum(targets.numel() for _, targets in batches)
        rows = sum(len(targets) for _, targets in batches)
        times = [one / other for one, other in zip(found[arm], found[PACKED], strict=True)]
        cells = [arm, f"{rows}", f"{1 - counted / places:.0%}", f"{counted / statistics.median(found[arm]):,.0f}"]
        cells += [f"{statistics.median(times):.2f} times as many", peak("packing", arm, folder, dtype, seq_len)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def lay_out(length: int, out: str) -> None:
    """A process that does what each rank's start does with the marks of TOKENS tokens, and writes a line."""
    vocab_size, seq_len = 2**15, 2048
    generator = np.random.default_rng(0)
    with tempfile.NamedTemporaryFile() as file:
        tokens = np.memmap(file.name, np.uint16, "w+", shape=(TOKENS,))
        begins = np.cumsum(generator.integers(1, 2 * length, TOKENS // length))
        tokens[0] = vocab_size
        tokens[begins[begins < TOKENS]] = vocab_size
        before = memory.peak_mib()
        began = time.process_time()
        rows = document_rows.DocumentRows(tokens, vocab_size, seq_len)
        took_s = time.process_time() - began
        cells = [f"{length}", f"{rows.num_documents:,}", f"{len(rows):,}", f"{took_s:.1f}"]
        Path(out).write_text(f"| {' | '.join([*cells, f'{memory.peak_mib() - before:,.0f}'])} |")


def start(length: int) -> str:
    """A line of what a start takes."""
    with tempfile.NamedTemporaryFile("r") as file:
        result = runner.spawn(lay_out, [(length, file.name)], timeout_s=600.0)
        assert result.ok, str(result)
        return file.read()


def main() -> None:
    """Measure, and write the page."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_paragraphs(Path(folder))
        costs = [cost(folder, *size) for size in (SIZES[:1] if SHORT else SIZES)]
        gains = gain(folder, "bfloat16", 512)
    starts = [start(length) for length in (400, 40)]
    tables = ["\n".join([head, *lines]) for head, lines in ((COST, costs), (GAIN, gains), (START, starts))]
    print("\n\n".join(tables))
    how = f"one thread, {ROUNDS} rounds of {BATCHES} batches of {SEQUENCES} sequences"
    measured = pages.measured("uv run python -m benchmarks.documents", how, began=began)
    if not SHORT:
        pages.write(PAGE, measured=measured, cost=tables[0], gain=tables[1], start=tables[2])


if __name__ == "__main__":
    main()
