"""Documents that share a row are trained on as if each were alone, and the mean is over what counts in the whole step.

In every layout, but for schedules that repeat, against a plain loop that computes the documents one by one; in most of
them with Muon as well.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from common import seed

from tests.harness import runner
from tests.harness.once import Once
from tests.recipes.test_equivalence import Curve, curves, plain_gpt_loop, worst
from tests.recipes.test_muon import MUON, plain_muon
from tests.workloads.test_documents import write_tokenizer

GPT = [recipe for recipe in runner.SUPERVISED if runner.workload(recipe) == "gpt"]
WORDS = ["ab", "cde", "f", "ghij", "klm", "é", "no", "pq"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def words(number: int, i: int) -> str:
    return " ".join(WORDS[seed.mix_ints(number, i, k) % len(WORDS)] for k in range(number))


def write_table(folder: Path) -> Path:
    """Documents of 2 to 30 bytes; and chats of other numbers of tokens, of which few are answers, or none."""
    for split, number in (("train", 160), ("validation", 40)):
        lengths = [1 + seed.mix_ints(5, i) % 6 for i in range(number)]
        bodies = [words(length, i) for i, length in enumerate(lengths)]
        chats = [
            [{"role": "user", "content": words(length, i)}, {"role": "assistant", "content": words(i % 3, i)}]
            for i, length in enumerate(lengths)
        ]
        chats[1] = chats[1][:1]
        datasets.Dataset.from_dict({"body": bodies, "chat": chats}).to_parquet(folder / f"{split}.parquet")
    write_tokenizer(folder / "tokenizer", ["</s>", "<|user|>", "<|assistant|>"], {"chat_template": TEMPLATE})
    return folder


READ: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "all": lambda folder: ("", "body", "documents", "all"),
    "answers": lambda folder: (str(folder / "tokenizer" / "tokenizer.json"), "chat", "documents", "answers"),
}


@pytest.fixture(scope="module")
def table(once: Once) -> Path:
    return once.folder(write_table, "documents apart")


@pytest.fixture(scope="module")
def plain(table: Path, once: Once) -> Callable[..., Curve]:
    def get(sizes: tuple, what: str, muon: bool) -> Curve:
        how: dict[str, Any] = {"moved": plain_muon} if muon else {}
        loop = lambda: plain_gpt_loop(str(table), torch.float64, sizes, read=READ[what](table), **how)  # noqa: E731
        return once.value(loop, "documents apart", sizes, what, muon)

    return get


def ways() -> Iterator[Any]:
    """One layout of each recipe counts the answers, or all tokens; every other one the answers, and has Muon.

    What is read does not depend on the optimizer, nor does Muon on what is read: a layout that has one of them wrong
    shows it. A plain `pytest` counts answers in slices of sequences.
    """
    for layout in runner.schedules_once(layout for recipe in GPT for layout in runner.layouts(recipe)):
        if layout == runner.layout(layout.recipe, 2):
            marks = () if layout.recipe == "context_gpt" else pytest.mark.rest
            yield pytest.param(layout, "answers", False, id=f"{layout}-answers", marks=marks)
            yield pytest.param(layout, "all", False, id=f"{layout}-all", marks=pytest.mark.rest)
        else:
            yield pytest.param(layout, "answers", True, id=f"{layout}-answers-muon", marks=pytest.mark.rest)


@pytest.mark.parametrize(("layout", "what", "muon"), list(ways()))
def test_float64(layout: runner.Layout, what: str, muon: bool, plain: Callable, table: Path, tmp_path: Path) -> None:
    wanted = plain(layout.sizes, what, muon)
    tokenizer, columns, _, loss_on = READ[what](table)
    how = ("--tokenizer", tokenizer, "--text-columns", columns, "--loss-on", loss_on, *(MUON if muon else ()))
    found = curves(layout, tmp_path, "--data", str(table), "--dtype", "float64", *how)
    assert worst(found[0], wanted.losses) < 1e-9
    assert worst(found[1], wanted.norms) < 1e-9
    assert found[2] == pytest.approx(wanted.held_out, rel=1e-9)
