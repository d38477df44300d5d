"""Samples of an adopter's own data set or stream are the same on any rank, in any worker and after a resume."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from common import UserError, seed
from common.train import data, sampler
from common.workloads import dataset

CPU = torch.device("cpu")


class Noisy(torch.utils.data.Dataset):
    """Draws from each of the generators that transforms draw from."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = torch.cat([torch.rand(2), torch.tensor([random.random(), np.random.rand()])])
        return {"index": index, "draws": draws, "mask": torch.arange(3) < index}


def batches_of(workers: int, first_step: int = 0, dp_size: int = 1, run_seed: int = 5) -> list[tuple[int, Any]]:
    """Index and draws of each sample in the order of the steps, over all ranks."""
    reader = dataset.MapStyle(Noisy(), run_seed)
    progress = {"step": first_step, "samples": 6 * first_step} if first_step else {}
    division = sampler.Division(6, 6, dp_size)
    plan = sampler.make_plan(division, len(reader), run_seed=run_seed, epochs=2, max_steps=0, progress=progress)
    found = []
    per_rank = [[*data.Loader(reader, sampler.training_requests(plan, rank), workers, CPU)] for rank in range(dp_size)]
    for parts in zip(*per_rank, strict=True):
        for batch in parts:
            assert batch.targets is None
            assert batch.inputs["mask"].shape == (len(batch.inputs["index"]), 3)
            found += zip(batch.inputs["index"].tolist(), batch.inputs["draws"].tolist(), strict=True)
    return found


def test_random_transforms_are_the_same_everywhere() -> None:
    """In workers, on other ranks, after a resume; and the process's own generators are not touched."""
    torch.manual_seed(1)
    wanted = batches_of(0)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == after
    assert batches_of(2) == wanted
    assert batches_of(0, first_step=3) == wanted[18:]
    assert batches_of(0, dp_size=2) == wanted
    assert batches_of(0, run_seed=6) != wanted
    first, second = (dict(wanted[:23]), dict(wanted[23:]))
    assert first.keys() == second.keys() == {*range(23)}
    assert all(first[index] != second[index] for index in first), "another epoch draws others"


def test_empty_part_has_no_rows() -> None:
    nothing = np.zeros(0, int)
    inputs, targets = dataset.MapStyle(Noisy(), 0).read(nothing, nothing)
    assert inputs["draws"].shape == (0, 4)
    assert targets is None


def test_pairs_are_inputs_and_targets_and_digests_differ() -> None:
    pairs = [torch.utils.data.TensorDataset(torch.arange(8.0) + more, torch.arange(8)) for more in (0, 0, 1)]
    readers = [dataset.MapStyle(one, 0) for one in pairs]
    inputs, targets = readers[0].read(np.zeros(2, int), np.array([3, 5]))
    assert (inputs.tolist(), targets.tolist()) == ([3, 5], [3, 5])
    digests = [reader.digest() for reader in readers]
    assert digests[0] == digests[1] != digests[2]


def test_set_without_samples_or_length() -> None:
    with pytest.raises(UserError, match=r"dataset\.MapStyle got a TensorDataset without samples: check where"):
        dataset.MapStyle(torch.utils.data.TensorDataset(torch.zeros(0, 3)), 0)
    with pytest.raises(UserError, match=r"dataset\.MapStyle got a Stream without a length: use dataset.IterableStyle"):
        dataset.MapStyle(Stream(), 0)


# --- a stream ---


class Stream(torch.utils.data.IterableDataset):
    """Eleven numbers, in an order that each epoch draws, with a drawn number each; some are filtered out."""

    size = 12

    def __iter__(self) -> Iterator[dict[str, float]]:
        for number in torch.randperm(self.size).tolist():
            draw = random.random()
            if number != 5:
                yield {"number": number, "draw": draw}


def add_draw(sample: dict[str, float]) -> dict[str, Any]:
    sample["changed"] = sample.pop("draw") + np.random.rand()  # in place: it must not come twice
    return sample


def stream_of(dp_size: int, first_step: int = 0, run_seed: int = 5, steps: int = 6) -> list[tuple[int, float]]:
    """The samples of steps of six, in their order, over all ranks, which read like recipes before they train."""
    progress = {"step": first_step, "samples": 6 * first_step} if first_step else {}
    division = sampler.Division(6, 6, dp_size)
    plan = sampler.make_plan(division, 0, run_seed=run_seed, epochs=1, max_steps=steps, progress=progress)
    per_rank = []
    for rank in range(dp_size):
        reader = dataset.IterableStyle(Stream(), run_seed, add_draw)
        assert len(reader) == 0
        reader.digest()
        for count in (1, 2):  # as common/workloads/step_loss.py does
            first = np.zeros(count, int)
            assert len({*reader.read(first, first)[0]["number"].tolist()}) == 1
        per_rank.append([*data.Loader(reader, sampler.training_requests(plan, rank), 0, CPU)])
    return [
        sample
        for parts in zip(*per_rank, strict=True)
        for batch in parts
        for sample in zip(batch.inputs["number"].tolist(), batch.inputs["changed"].tolist(), strict=True)
    ]


def test_stream_is_the_same_on_any_number_of_ranks_and_after_a_resume() -> None:
    torch.manual_seed(1)
    wanted = stream_of(1)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == after, "the process's own generators are not touched"
    assert stream_of(2) == stream_of(3) == wanted
    assert stream_of(4) == wanted, "parts of unequal size"
    for step in (1, 2, 5):
        assert stream_of(2, first_step=step) == wanted[6 * step :]
    assert stream_of(1, run_seed=6) != wanted
    epochs = [[number for number, _ in wanted[start : start + 11]] for start in (0, 11, 22)]
    assert [sorted(epoch) for epoch in epochs] == 3 * [[i for i in range(12) if i != 5]]
    assert epochs[0] != epochs[1] != epochs[2]


def test_mutant_stream_without_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = stream_of(1)
    monkeypatch.setattr(seed, "for_sample", lambda *_: None)
    assert stream_of(1) != wanted


def test_stream_of_datasets_shuffles_each_epoch_anew() -> None:
    """Through set_epoch: its own buffer and generator, not those that are seeded by position."""
    import datasets

    stream = datasets.Dataset.from_dict({"x": [*range(20)]}).to_iterable_dataset().shuffle(seed=1, buffer_size=8)
    reader = dataset.IterableStyle(stream, 0)
    found = [reader.read(np.zeros(20, int), np.arange(start, start + 20))[0]["x"].tolist() for start in (0, 20, 0, 20)]
    assert sorted(found[0]) == sorted(found[1]) == [*range(20)]
    assert found[0] == found[2] != found[1] == found[3]


def test_empty_part_of_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    reader = dataset.IterableStyle(Stream(), 0)
    reader.read(np.zeros(3, int), np.arange(4, 7))
    inputs, targets = reader.read(np.zeros(0, int), np.zeros(0, int))
    assert inputs["number"].shape == (0,)
    assert targets is None
    reader.read(np.zeros(1, int), np.array([20_000]))
    out = capsys.readouterr().out
    assert out.count("data     the stream has ended after 11 samples, and begins again") == 1
    assert "data     reading 19,993 samples of the stream to skip them" in out


def test_what_no_stream_can_be() -> None:
    with pytest.raises(UserError, match=r"dataset\.IterableStyle got a generator, which can be read only once"):
        dataset.IterableStyle((i for i in range(9)), 0)
    with pytest.raises(UserError, match=r"dataset\.IterableStyle got a list without samples"):
        dataset.IterableStyle([], 0)
    reader = dataset.IterableStyle(Stream(), 0)
    with pytest.raises(UserError, match="--workers 2: a stream is read in its order, by the rank itself: use --wor"):
        data.Loader(reader, [], 2, CPU)
    division = sampler.Division(6, 6, 1)
    with pytest.raises(UserError, match="nobody knows how long a stream is: set --max-steps"):
        sampler.make_plan(division, len(reader), run_seed=0, epochs=2, max_steps=0, progress={})
    plan = sampler.make_plan(division, len(reader), run_seed=0, epochs=2, max_steps=3, progress={})
    with pytest.raises(UserError, match="make_data gives a stream to validate on, which may never end"):
        next(sampler.evaluation_requests(plan, len(reader), 0))
    assert str(plan).endswith("x 6 samples)")
