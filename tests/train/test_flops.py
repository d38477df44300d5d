"""FLOPs of a sample and of a device, and what a training shows where they cannot be counted."""

import tomllib
import types
from typing import ClassVar

import numpy as np
import pytest
import torch
from common import UserError
from common.train import data, flops
from common.workloads import gpt, text
from torch import nn

from tests.harness.runner import ROOT


class Rows:
    """A data set of rows of three features, four of them in a sample."""

    sample_units: ClassVar = {"rows": 4}

    def __len__(self) -> int:
        return 1

    def digest(self) -> str:
        return "of nothing"

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        return means

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(epochs) == len(indices)
        return torch.zeros(len(indices), 4, 3), torch.zeros(len(indices), 4, dtype=torch.int64)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_count_of_linear_layers(device: str) -> None:
    """Of one sample; the first layer wants no gradient of its input. The model stays as it is."""
    with torch.device(device):
        model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(4), nn.Linear(5, 7, bias=False))

    def loss(model: nn.Module, batch: data.Batch) -> torch.Tensor:
        assert batch.inputs.device.type == batch.targets.device.type == "meta"
        return nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())

    first, second = 2 * 4 * 3 * 5, 2 * 4 * 5 * 7  # a multiplication and an addition for each weight and row
    assert flops.count_sample(loss, model, Rows()) == flops.Sample(2 * first + 3 * second, {"rows": 4})
    assert all(p.device.type == device and p.grad is None for p in model.parameters())
    assert model.training
    assert device == "meta" or int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize("head_width", [16, 24])
def test_count_of_a_gpt(head_width: int) -> None:
    """6 for each weight of a matrix and token, and 12 for each pair of positions, layer and channel of the heads."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.Shape(256, num_layers=2, num_heads=2, width=32, mlp_width=48, head_width=head_width))
    train = text.Text(np.zeros(99, np.uint16), 16, 256, 1.0)
    found = flops.count_sample(lambda model, batch: model(batch.inputs, batch.targets).sum(), model, train)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and name != "embed.weight")
    pairs = 12 * 2 * 16 * 16 * 2 * head_width  # all of them: a mask saves none in this count
    assert found.flops == pytest.approx(6 * 16 * matrices + pairs, rel=1e-12)
    assert found.units == {"tokens": 16}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
    ],
)
def test_peak_flops_of_a_known_gpu(name: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert flops.peak_flops(torch.device("cuda", 0), torch.bfloat16) == (peak, "by its data sheet")


def test_peaks_of_the_planner_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = tomllib.loads((ROOT / "tools" / "plan" / "hardware.toml").read_text()).values()
    for machine in [one for one in machines if one.get("bfloat16", True)]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=machine["gpu"]: name)
        assert flops.peak_on_paper(torch.device("cuda", 0), torch.bfloat16) == machine["peak_16bit"], machine["gpu"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16),
        ("AMD Instinct MI300X", torch.bfloat16),
        ("NVIDIA H100 80GB HBM3", torch.float32),
    ],
)
def test_peak_flops_that_no_data_sheet_has(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a GPU, or a slower one of the same name, is measured."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert flops.peak_on_paper(torch.device("cuda", 0), dtype) == 0


class ReadsAValue(nn.Linear):
    """Decides by a number of its input, which the meta device does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


def test_model_that_cannot_be_counted_trains_without_the_figure(capsys: pytest.CaptureFixture[str]) -> None:
    found = flops.count_sample(lambda model, batch: model(batch.inputs).sum(), ReadsAValue(3, 5), Rows())
    assert found == flops.Sample(0.0, {"rows": 4}), "rates in its own unit are shown all the same"
    said = capsys.readouterr().out
    assert said.startswith("note: MFU is not shown: counting the FLOPs failed (RuntimeError: Tensor.item() cannot ")
    assert said.count("\n") == 1


class Broken(Rows):
    """As a data set with an unreadable image."""

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        raise UserError("0.png is not a readable image")


def test_refusal_of_the_data_set_is_no_failure_to_count(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^0\.png is not a readable image$"):
        flops.count_sample(lambda model, batch: model(batch.inputs).sum(), nn.Linear(3, 5), Broken())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("durations", "peak"),
    [
        pytest.param([[9.0, 2.0, 0.5, 1.0]], 2 * 256**3 / 0.5, id="slow: no larger product"),
        pytest.param([[1e-3] * 4, [1e-3] * 4, [9.0, 0.4, 0.5, 1.0]], 2 * 1024**3 / 0.4, id="fast: the largest product"),
    ],
)
def test_peak_flops_is_that_of_the_best_measurement(
    durations: list[list[float]], peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = iter(durations)
    monkeypatch.setattr(flops, "timeit", types.SimpleNamespace(repeat=lambda _, number, repeat: next(each)))
    assert flops.peak_flops(torch.device("cpu"), torch.float32) == (
        pytest.approx(peak),
        "reached by a large matmul (no data sheet)",
    )
