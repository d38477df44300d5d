"""SyncBatchNorm over any division of a batch gives BatchNorm over the whole batch, to 1e-12 in float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common.train import sync_batchnorm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class Waits(TorchDispatchMode):
    """Counts the operators whose result the host reads, for which it would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
        return func(*args, **kwargs or {})


def read_the_count(layer: Any, mean: torch.Tensor, var: torch.Tensor) -> None:
    """A mutant: the host reads how many batches there were."""
    layer.num_batches_tracked.add_(1)
    layer.running_mean.lerp_(mean, 1 / float(layer.num_batches_tracked))


def test_host_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = sync_batchnorm.convert(TwoBranches((3, 2), None), dist.group.WORLD)
        for mutant in (None, read_the_count):
            if mutant:
                monkeypatch.setattr(sync_batchnorm.SyncBatchNorm, "_track", mutant)
            with Waits() as waits:
                layer(make_batch(4, 0, (3, 2))[0]).sum().backward()
            assert waits.count == (2 if mutant else 0), mutant
    finally:
        dist.destroy_process_group()


def test_every_device_has_the_same() -> None:
    """No kernels of torch's own on any device, which meta stands for; and parameters, buffers and names stay."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.SyncBatchNorm(4)).to("meta")
        before = dict(model.state_dict(keep_vars=True))
        converted = sync_batchnorm.convert(model, dist.group.WORLD)
        assert {type(module) for module in converted} == {sync_batchnorm.SyncBatchNorm}
        after = converted.state_dict(keep_vars=True)
        assert [*after] == [*before]
        assert all(after[name] is value for name, value in before.items())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("affine", [True, False])
def test_without_running_statistics(affine: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = nn.BatchNorm1d(4, affine=affine, track_running_stats=False).double()
        layer = sync_batchnorm.convert(copy.deepcopy(plain), dist.group.WORLD)
        x, _ = make_batch(6, 0, ())
        torch.testing.assert_close(layer(x), plain(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer.eval()(x), plain.eval()(x), rtol=1e-12, atol=1e-12)
    finally:
        dist.destroy_process_group()
