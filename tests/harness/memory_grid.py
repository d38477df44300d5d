"""Layouts of GPTs whose memory was counted: `python -m tests.harness.memory_grid` writes memory_grid.json.

The recipes' own code ran on tensors without data for each (`tools.plan.count`), which takes minutes for all: layouts
that the file has are not counted again, so delete it to count all. The test counts a few again, and compares the
formula with every one.
"""

import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.workloads import gpt
from tools.plan import hardware, transformer
from tools.plan.count import Case, NotCountedError, each
from tools.plan.transformer import Layout, Shape

from tools import about

FILE = Path(__file__).with_suffix(".json")
SEED = 1
OF_EACH = 8  # layouts drawn for each way to split
MACHINE = hardware.table()["h100-ib"]
# Width, layers, heads, key-value heads, hidden units of an MLP, tokens, and sequences of a micro-batch that are usual.
SHAPES = (
    (768, 6, 12, 12, 0, 1024, (4, 16)),
    (2048, 4, 16, 16, 0, 2048, (1, 4)),
    (4096, 4, 32, 8, 14336, 8192, (1, 2)),
    (4096, 4, 32, 32, 0, 512, (1, 8)),
)
VOCABULARIES = (256, 32_000, 128_256)
# A recipe, its flag for the ranks that split a model, how many they are, all ranks, and a file of Accelerate's.
WAYS = (
    ("ddp_gpt", "", 1, 8, ""),
    ("fsdp_gpt", "", 1, 8, ""),
    ("fsdp_gpt", "", 1, 64, ""),
    ("tensor_gpt", "--tp", 2, 8, ""),
    ("tensor_gpt", "--tp", 8, 32, ""),
    ("pipeline_gpt", "--pp", 4, 8, ""),
    ("pipeline_gpt", "--pp", 2, 2, ""),
    ("context_gpt", "--cp", 2, 16, ""),
    ("diloco_gpt", "", 1, 8, ""),
    ("accelerate_gpt", "", 1, 8, "ddp"),
    ("accelerate_gpt", "", 1, 8, "fsdp2"),
)


@dataclass(frozen=True)
class Point:
    """A layout: one of `WAYS`, and what is trained on it."""

    recipe: str
    flag: str
    parts: int
    size: int
    config: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    seq_len: int
    micro_batch: int
    micro_batches: int
    vocab: int
    tied: bool
    recompute: str

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.micro_batch * self.micro_batches * self.size // self.parts

    @property
    def case(self) -> Case:
        """What is counted."""
        flags = {
            "--width": self.width,
            "--num-layers": self.layers,
            "--num-heads": self.heads,
            "--num-kv-heads": self.kv_heads,
            "--mlp-width": self.mlp_width,
            "--seq-len": self.seq_len,
            "--vocab-size": self.vocab,
            "--micro-batch-size": self.micro_batch,
            "--global-batch-size": self.global_batch,
            "--recompute": self.recompute,
            **({self.flag: self.parts} if self.flag else {}),
        }
        words = tuple(str(word) for pair in flags.items() for word in pair) + (("--tied",) if self.tied else ())
        folder = about.ROOT / "recipes" / self.recipe
        return Case(folder, self.size, words, str(folder / "configs" / f"{self.config}.yaml") if self.config else "")

    @property
    def formula_bytes(self) -> float:
        """By tools/plan/transformer.py."""
        return transformer.work(self.shape, self.layout).peak_bytes

    @property
    def shape(self) -> Shape:
        """For the formula."""
        sizes = (self.vocab, self.layers, self.heads, self.width)
        own = gpt.Shape(*sizes, num_kv_heads=self.kv_heads, mlp_width=self.mlp_width, tied=self.tied)
        return Shape(
            self.width, self.layers, self.heads, self.kv_heads, own.mlp_width, True, self.vocab, self.seq_len, self.tied
        )

    @property
    def layout(self) -> Layout:
        """For the formula."""
        more: dict[str, int | str] = {"micro_batch": self.micro_batch, "global_batch": self.global_batch}
        more |= {"zero": 3} if self.config == "fsdp2" else {}
        return transformer.of_recipe(self.recipe, self.size, self.parts, recompute=self.recompute, **more)


def points() -> list[Point]:
    """Of each way to split, some models and batches that a seed has drawn: half of them with several micro-batches."""
    draw = random.Random(SEED)
    found = []
    for recipe, flag, parts, size, config in WAYS:
        for i in range(OF_EACH):
            *shape, micro_batches = draw.choice(SHAPES)
            several = 2 * parts if flag == "--pp" else 3
            few = parts if flag == "--pp" else 1  # fewer, a pipeline refuses
            found.append(
                Point(  # type: ignore[call-arg]
                    *(recipe, flag, parts, size, config, *shape),  # type: ignore[arg-type]
                    draw.choice(micro_batches),
                    several if i % 2 else few,
                    draw.choice(VOCABULARIES),
                    draw.random() < 0.5,
                    draw.choice(("none", "full", "selective")),
                )
            )
    return found


def counted(some: list[Point]) -> Iterator[int]:
    """Bytes at the peak of each, by what the recipes' code holds.

    Raises:
        NotCountedError: a recipe refuses a layout.
    """
    for works in each([point.case for point in some], MACHINE):
        if isinstance(works, NotCountedError):
            raise works
        yield int(max(work.peak_bytes for work in works))


def read() -> dict[Point, int]:
    """What was written."""
    return {Point(**line["point"]): line["bytes"] for line in json.loads(FILE.read_text())} if FILE.exists() else {}


def write(found: dict[Point, int]) -> None:
    """Those of them that are `points`, in their order."""
    lines = [
        json.dumps({"bytes": found[point], "point": dataclasses.asdict(point)})
        for point in dict.fromkeys(points())
        if point in found
    ]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main() -> None:
    """Count what is not there."""
    found = read()
    missing = [point for point in dict.fromkeys(points()) if point not in found]
    for point, size in zip(missing, counted(missing), strict=True):
        write(found := {**found, point: size})
    print(f"counted {len(missing)} layouts for {FILE}")


if __name__ == "__main__":
    main()
