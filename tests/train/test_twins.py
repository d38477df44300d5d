"""A forward that does not return sums is refused."""

import contextlib
import math

import pytest
import torch
from common import UserError
from common.train import data, metrics, sampler, twins
from common.workloads import dataset


class Squares(torch.utils.data.Dataset):
    """Four numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return (index + 3) ** 2


def sums_of(loss: float, count: float = 1) -> metrics.Sums:
    return {"loss": torch.tensor(loss), "count": torch.tensor(count)}


TWINS = {  # sums of a sample, of the same sample twice, and the message
    "a mean": (sums_of(2.3), sums_of(2.3, 2), "forward returns a mean loss"),
    "a mean in bfloat16": (sums_of(2.3), sums_of(2.31, 2), "forward returns a mean loss"),
    "no count": ({"loss": torch.tensor(2.3)}, {"loss": torch.tensor(4.6)}, 'forward returns no "count"'),
    "no loss": ({"count": torch.tensor(1)}, {"count": torch.tensor(2)}, 'forward returns no "loss"'),
    "a constant count": (sums_of(2.3), sums_of(4.6), '"count" is 1 for one sample and 1 for two'),
    "sums": (sums_of(2.3), sums_of(4.6, 2), ""),
    "sums of 7 tokens a sample": (sums_of(2.3, 7), sums_of(4.6, 14), ""),
    "negative sums": (sums_of(-2.3), sums_of(-4.6, 2), ""),
    "a masked sample": (sums_of(0.0, 0), sums_of(0.0, 0), ""),
    "a loss that is not finite": (sums_of(math.inf), sums_of(math.inf, 2), ""),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("case", TWINS)
def test_twins(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    once, twice, message = TWINS[case]
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        twins.compare(once, twice)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("group")
def test_loss_over_pairs_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """As contrastive losses are: that is for the adopter to know."""
    twins.compare(sums_of(2.0), sums_of(7.0, 2))
    assert "note: the same sample twice has 3.5 times the loss of one" in capsys.readouterr().out


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("samples", [1, 2], ids=["nothing to compare", "both are read"])
def test_reads_the_first_sample_once_and_twice(samples: int) -> None:
    """Nothing is asked where a micro-batch has one sample of each rank, as BatchNorm may need two."""
    division = sampler.Division(samples, samples, 1)
    plan = sampler.make_plan(division, 4, run_seed=0, epochs=1, max_steps=0, progress={})
    reader = dataset.MapStyle(Squares(), 0)
    read: list[list[int]] = []

    def evaluate(batches: data.Loader) -> metrics.Sums:
        read.extend(batch.inputs.tolist() for batch in batches)
        return sums_of(2.0 * len(read[-1]), len(read[-1]))

    twins.check_sums(evaluate, reader, plan, torch.device("cpu"))
    assert read == [[9], [9, 9]] * (samples - 1)
