"""A mixture as --data names it, and as one set: what is read, what is refused, and what is shown."""

import math
from fractions import Fraction
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from common import UserError
from common.train import data, metrics, sampler
from common.workloads import mixed, text

from tests.conftest import write_text

CPU = torch.device("cpu")


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Two folders of text, and a table of documents."""
    places = {name: tmp_path / name for name in ("web", "code", "table")}
    for name, number in (("web", 40), ("code", 9)):
        places[name].mkdir()
        write_text(places[name], number, 5)
    places["table"].mkdir()
    for split in ("train", "validation"):
        rows = datasets.Dataset.from_dict({"body": [f"document {i}: é" for i in range(12)]})
        rows.to_parquet(places["table"] / f"{split}.parquet")
    return {name: str(place) for name, place in places.items()}


def load(folders: dict[str, str], *names: str, how: str = "row") -> tuple[mixed.Mixed, mixed.Mixed]:
    train, validation = text.load(",".join(f"{folders[name]}=1" for name in names), 16, attend=how)
    return train, validation


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a=0.7,b=0.3", [("a", "a", "0.7"), ("b", "b", "0.3")]),
        ("b=3,a=.5", [("a", "a", "0.5"), ("b", "b", "3")]),
        ("code=stdlib=0.25,web=/no/such/folder=1", [("code", "stdlib", "0.25"), ("web", "/no/such/folder", "1")]),
        ("/no/such/folder/=1,stdlib=0", [("folder", "/no/such/folder/", "1"), ("stdlib", "stdlib", "0")]),
        (
            "Org/Set:config@test=2,stdlib@train=1",
            [("Set", "Org/Set:config@test", "2"), ("stdlib", "stdlib@train", "1")],
        ),
        ("x=/a=b/c=1", [("x", "/a=b/c", "1")]),
        ("/a=b/c=1", [("c", "/a=b/c", "1")]),
        ("same:one=1,b=same:two=1", [("b", "same:two", "1"), ("same", "same:one", "1")]),
        ("stdlib", []),
        ("/a=b/c", []),
    ],
)
def test_names(given: str, wanted: list[tuple[str, str, str]]) -> None:
    assert mixed.parse(given) == [(name, place, Fraction(weight)) for name, place, weight in wanted]


def test_a_path_that_exists_is_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a=0.7,b=0.3", "c=1", "d=e"):
        (tmp_path / name).mkdir()
    assert mixed.parse("a=0.7,b=0.3") == mixed.parse("c=1") == []
    assert mixed.parse("x=d=e=1") == [("x", "d=e", 1)]
    (tmp_path / "f,g").mkdir()
    assert mixed.parse("f,g") == mixed.parse("f,g:own@test") == []
    with pytest.raises(UserError, match="'d=e' gives no name for the log: write NAME=d=e=1"):
        mixed.parse("d=e=1")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("a,b", "'a' does not end with a weight: give a number that is not negative, as in a=0.7,b=0.3"),
        ("/x/a,b@test", "'/x/a' does not end with a weight"),
        ("a=0.7,b", "a mixture is PLACE=WEIGHT.*'b' does not end with a weight"),
        ("a=0.7,b=", "'b=' does not end with a weight"),
        ("a=0.7,b=much", "'b=much' does not end with a weight"),
        ("a=0.7,b=-0.3", "'b=-0.3' does not end with a weight: give a number that is not negative"),
        ("a=nan,b=1", "'a=nan' does not end"),
        ("a=inf,b=1", "'a=inf' does not end"),
        ("a=1e3,b=1", "'a=1e3' does not end"),
        ("a=1,,b=1", "'' does not end"),
        ("=1,b=1", "'=1' does not end"),
        ("a=0,b=0.0", "all weights are 0"),
        ("x/a=1,y/a=1", "two sources are called 'a': write NAME=y/a=1, with another name"),
        ("a=x=1,a=y=1", "two sources are called 'a'"),
        ("a=x=1,b=x=1", "a and b are the same set: give it once"),
        ("a=x=1,b=./x/=1", "a and b are the same set"),
        ("a=x=1,b=x@test=1", "a and b are the same set"),
        ("a b=1,c=1", "'a b' gives no name for the log: write NAME=a b=1"),
    ],
)
def test_what_is_refused(given: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        mixed.parse(given)


def test_vocabularies_of_different_sizes(folders: dict[str, str], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    for split in ("train", "val"):
        np.arange(900, dtype=np.uint16).tofile(tokens / f"{split}.bin")
    with pytest.raises(UserError, match=r"different sizes \(tokens 900, web 256\): give all one --tokenizer"):
        text.load(f"{tokens}=1,{folders['web']}=1", 16)


def test_each_set_has_its_own_errors(folders: dict[str, str]) -> None:
    with pytest.raises(UserError, match="--data /no/such/place: there is no such folder"):
        text.load(f"{folders['web']}=1,/no/such/place=1", 16)
    with pytest.raises(UserError, match="--attend documents needs a table"):
        text.load(f"{folders['table']}=1,stdlib=1", 16, attend="documents")


def test_reads_one_set_behind_the_other(folders: dict[str, str]) -> None:
    train, validation = load(folders, "web", "code")
    parts = [text.load(folders[name], 16)[0] for name in ("code", "web")]  # by name
    assert len(train) == sum(map(len, parts))
    assert len(validation) == sum(len(text.load(folders[name], 16)[1]) for name in ("code", "web"))
    order = np.random.default_rng(0).permutation(len(train))
    inputs, targets = train.read(np.zeros_like(order), order)
    whole = [
        torch.cat(both) for both in zip(*(p.read(np.zeros(len(p)), np.arange(len(p))) for p in parts), strict=True)
    ]
    assert torch.equal(inputs, whole[0][order])
    assert torch.equal(targets, whole[1][order])
    sources = train.sources(order)
    assert sources["code"].tolist() == (order < len(parts[0])).tolist()
    assert torch.equal(sources["web"], ~sources["code"])
    none = np.zeros(0, int)
    assert train.read(none, none)[0].shape == (0, 16)
    assert [len(one) for one in train.sources(none).values()] == [0, 0]


def test_rows_beside_documents_are_one_document_each(folders: dict[str, str]) -> None:
    train, _ = load(folders, "table", "web", how="auto")
    first = len(train.parts["table"])
    order = np.array([first, 0, first + 1])
    inputs, targets = train.read(np.zeros_like(order), order)
    assert inputs.shape == (3, 2, 16)
    alone, wanted = train.parts["web"].read(np.zeros(2), np.arange(2))
    assert torch.equal(inputs[[0, 2], 0], alone)
    assert torch.equal(targets[[0, 2]], wanted)
    assert (inputs[[0, 2], 1] == torch.arange(16)).all()
    assert torch.equal(inputs[1], train.parts["table"].read(np.zeros(1), np.zeros(1, int))[0][0])
    assert train.read(order[:0], order[:0])[0].shape == (0, 2, 16)


def test_digest(folders: dict[str, str], tmp_path: Path) -> None:
    """Of the sets and their names, whatever their order and weights."""
    one = load(folders, "web", "code")[0].digest()
    assert load(folders, "code", "web")[0].digest() == one
    assert text.load(f"{folders['web']}=5,{folders['code']}=0.1", 16)[0].digest() == one
    assert text.load(f"other={folders['web']}=1,{folders['code']}=1", 16)[0].digest() != one
    write_text(Path(folders["web"]), 41, 5)
    assert load(folders, "web", "code")[0].digest() != one


@pytest.mark.parametrize("how", ["row", "auto"])
def test_sums_and_metrics_of_each_source(how: str, folders: dict[str, str], group: None) -> None:
    _, validation = load(folders, "web", "code", "table", how=how)
    losses = torch.rand(len(validation), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums: metrics.Sums = {}
    for some in np.array_split(np.arange(len(validation)), 4):
        inputs, targets = validation.read(np.zeros_like(some), some)
        batch = data.Batch(inputs, targets, len(some), True, validation.sources(some))
        counts = (targets != -100).double().mean(1)
        more = text.sums(batch, losses[some] * counts)
        sums = metrics.add(sums, {"loss": (losses[some] * counts).sum(), "count": torch.tensor(len(some)), **more})
    means = validation.metrics(metrics.means(sums))
    first, total, bits, num_bytes = 0, 0.0, 0.0, 0.0
    for name, part in validation.parts.items():
        _, targets = part.read(np.zeros(len(part)), np.arange(len(part)))
        number = (targets != -100).sum(1)
        assert number.sum() == part.num_targets
        loss = (losses[first : first + len(part)] * number).sum() / number.sum()
        assert means[f"loss/{name}"] == pytest.approx(loss.item(), rel=1e-12)
        assert means[f"bits_per_byte/{name}"] == pytest.approx(loss.item() / math.log(2) * part.tokens_per_byte)
        first += len(part)
        total += number.sum().item()
        bits += loss.item() * number.sum().item() / math.log(2)
        num_bytes += number.sum().item() / part.tokens_per_byte
    assert means["loss"] * total / math.log(2) == pytest.approx(bits)
    assert means["bits_per_byte"] == pytest.approx(bits / num_bytes)
    assert {key for key in means if "weight" in key or "count" in key} == set()


def test_a_source_without_a_sample_is_not_shown(group: None) -> None:
    sums = {"loss": 6.0, "count": 3.0, "loss/a": 6.0, "count/a": 3.0, "loss/b": 0.0, "count/b": 0.0}
    assert metrics.means({key: torch.tensor(value) for key, value in sums.items()}) == {"loss": 2.0, "loss/a": 2.0}
    assert metrics.best([{"step": 1, "val/loss/a": 2.0}, {"step": 2, "val/loss/a": 1.0}]) == {"val/loss/a": (1.0, 2)}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_batches_with_workers(workers: int, folders: dict[str, str]) -> None:
    train, _ = load(folders, "web", "code")
    plan = sampler.make_plan(sampler.divide_batch(6, 3, 2), train, run_seed=1, max_steps=4, progress={})
    found = list(data.training(train, plan, 1, workers, CPU))
    wanted = list(sampler.training_requests(plan, 1))
    assert len(found) == len(wanted)
    for batch, request in zip(found, wanted, strict=True):
        assert torch.equal(batch.inputs, train.read(request.epochs, request.indices)[0])
        assert all(torch.equal(batch.sources[name], one) for name, one in train.sources(request.indices).items())


def test_a_plan_without_the_order_is_refused(folders: dict[str, str]) -> None:
    train, _ = load(folders, "web", "code")
    plan = sampler.make_plan(sampler.divide_batch(6, 3, 2), len(train), run_seed=1, max_steps=4, progress={})
    with pytest.raises(UserError, match=r"give sampler\.make_plan `train`, not `len\(train\)`"):
        data.training(train, plan, 1, 0, CPU)


def test_a_weight_of_0_validates_only(folders: dict[str, str]) -> None:
    train, validation = text.load(f"{folders['web']}=1,{folders['code']}=0", 16)
    plan = sampler.make_plan(sampler.divide_batch(6, 0, 1), train, run_seed=1, max_steps=20, progress={})
    assert not train.sources(plan.samples(0, 120)[1])["code"].any()
    assert plan.order.logged(120) == {"train/epochs/code": 0, "train/epochs/web": 120 / len(train.parts["web"])}
    assert "code" in validation.sources(np.zeros(1, int))
