"""SyncBatchNorm over any division of a batch gives BatchNorm over the whole batch, to 1e-12 in float64."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import sync_batchnorm
from torch import nn

from tests.harness import runner

STEPS = 3
SHAPES: list[tuple[int, ...]] = [(), (5,), (3, 2), (1, 1)]  # what follows the channels


def make_batch(size: int, step: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = 5 + 3 * torch.randn(size, 4, *shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(size, 4, *shape, generator=generator, dtype=torch.float64)  # of each output in the loss
    return x, weight


class TwoBranches(nn.Module):
    """Two norms that get the same gradient, as at the end of a residual block."""

    def __init__(self, shape: tuple[int, ...], momentum: float | None) -> None:
        super().__init__()
        kind = nn.BatchNorm2d if len(shape) == 2 else nn.BatchNorm1d
        self.main, self.shortcut = kind(4, momentum=momentum), nn.Sequential(kind(4, momentum=momentum))
        with torch.no_grad():
            self.main.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
            self.main.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0]))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.main(x) + self.shortcut(x.square())


def run_layer(layer: nn.Module, parts: slice, size: int, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Outputs, gradients and running statistics of a few accumulated passes over this part of each batch."""
    seen = {}
    for step in range(STEPS):
        x, weight = make_batch(size, step, shape)
        mine = x[parts].clone().requires_grad_()
        out = layer(mine)
        (out * weight[parts]).sum().backward()
        seen |= {f"{step} out": out.detach(), f"{step} grad_x": mine.grad}
        seen |= {f"{step} grad of {name}": p.grad.clone() for name, p in layer.named_parameters()}
        seen |= {f"{step} {name}": buffer.clone() for name, buffer in layer.named_buffers()}
    layer.eval()
    return seen | {"eval out": layer(make_batch(size, 9, shape)[0][parts]).detach()}


def compare_all(sizes: list[int]) -> None:
    """Every shape of input and both kinds of momentum, in one group of ranks."""
    dist.init_process_group("gloo")
    for shape in SHAPES:
        for momentum in (0.1, None):
            compare(sizes, shape, momentum)
    dist.destroy_process_group()


def compare(sizes: list[int], shape: tuple[int, ...], momentum: float | None) -> None:
    """On each rank: this rank's part through SyncBatchNorm, against all of it through BatchNorm."""
    rank, total = dist.get_rank(), sum(sizes)
    first = sum(sizes[:rank])
    part = slice(first, first + sizes[rank])
    layer = sync_batchnorm.convert(TwoBranches(shape, momentum), dist.group.WORLD)
    assert isinstance(layer.main, sync_batchnorm.SyncBatchNorm)
    assert isinstance(layer.shortcut[0], sync_batchnorm.SyncBatchNorm)
    found = run_layer(layer, part, total, shape)
    wanted = run_layer(TwoBranches(shape, momentum), slice(0, total), total, shape)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        expected = wanted[name][part] if name.endswith(("out", "grad_x")) else wanted[name]
        if "grad of" in name:  # each rank holds the sum over its own samples
            dist.all_reduce(value)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("sizes", [[4, 4], [5, 2], [6, 1], [3, 0], [2, 5, 4], [1, 1, 2], [0, 3, 1]], ids=str)
def test_equals_batchnorm_over_the_whole_batch(sizes: list[int]) -> None:
    result = runner.spawn(compare_all, [(sizes,)] * len(sizes))
    assert result.ok, str(result)


def without_the_count(sizes: list[int]) -> None:
    """A mutant: every rank's statistics weigh the same, however many samples it has."""
    reduce = dist.all_reduce

    def mean_of_means(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        if tensor.ndim == 1 and len(tensor) == 5:  # sums of 4 channels, and the count
            tensor[:-1] /= tensor[-1].clamp(min=1)
            tensor[-1] = 1
        reduce(tensor, group=group)

    sync_batchnorm.dist.all_reduce = mean_of_means
    compare_all(sizes)


def test_mutant_fails() -> None:
    result = runner.spawn(without_the_count, [([6, 1],)] * 2)
    assert "Tensor-likes are not close" in result.outputs[0], str(result)


def test_bfloat16_keeps_statistics_in_float32(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = 100 + torch.randn(64, 4, 3, 3)
        layer = sync_batchnorm.convert(nn.BatchNorm2d(4), dist.group.WORLD)
        out = layer(x.bfloat16())
        wanted = nn.BatchNorm2d(4)(x.bfloat16().float())
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)
    finally:
        dist.destroy_process_group()
