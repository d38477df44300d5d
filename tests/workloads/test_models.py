"""The residual networks are torchvision's, but for a stem that suits the images, and the thin ones for CIFAR-10."""

import pytest
import torch
from common import UserError, seed
from common.workloads.resnet import THIN, make_resnet, memory_format
from torch import nn


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "stride", "body"),
    [(1, 8, 3, 1, 8), (3, 32, 3, 1, 32), (3, 64, 3, 1, 64), (3, 65, 7, 2, 17), (1, 96, 7, 2, 24), (3, 224, 7, 2, 56)],
)
def test_stem(channels: int, size: int, kernel: int, stride: int, body: int) -> None:
    """Small images keep their resolution, larger ones lose three quarters of each side, as in torchvision."""
    with torch.device("meta"):
        model = make_resnet("resnet18", channels, 5, size)
        sides: list[int] = []
        model.layer1.register_forward_pre_hook(lambda _, inputs: sides.append(inputs[0].shape[-1]))
        logits = model(torch.empty(2, channels, size, size))
    assert logits.shape == (2, 5)
    assert sides == [body]
    assert model.conv1.in_channels == channels
    assert (model.conv1.kernel_size, model.conv1.stride) == ((kernel, kernel), (stride, stride))
    assert model.conv1.bias is None
    assert isinstance(model.maxpool, nn.Identity) == (size <= 64)


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 224), (1, 224)])
def test_initial_weights(channels: int, size: int) -> None:
    """Every stem is initialised as torchvision's: He et al.'s normal distribution over the outgoing connections."""
    seed.everything(0, seed.INIT)
    model = make_resnet("resnet18", channels, 10, size)
    kernel = 3 if size == 8 else 7
    std = (2 / (64 * kernel**2)) ** 0.5
    assert model.conv1.weight.std().item() == pytest.approx(std, rel=0.15)
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    assert len(blocks) == 8
    assert all(not block.bn2.weight.any() for block in blocks), "each block starts as the identity"
    assert all(bool((block.bn1.weight == 1).all()) for block in blocks)
    seed.everything(0, seed.INIT)
    again = make_resnet("resnet18", channels, 10, size).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    seed.everything(1, seed.INIT)
    other = make_resnet("resnet18", channels, 10, size)
    assert not torch.equal(other.conv1.weight, model.conv1.weight)
    assert not torch.equal(other.fc.weight, model.fc.weight)


@pytest.mark.parametrize(("name", "blocks"), THIN.items())
def test_thin_networks(name: str, blocks: int) -> None:
    """He et al.'s table of section 4.2: the layers in a name, and about as many parameters as they count."""
    model = make_resnet(name, 3, 10, 32)
    weighty = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    shortcuts = [module for module in weighty if getattr(module, "kernel_size", None) == (1, 1)]
    assert len(weighty) - len(shortcuts) == int(name.removeprefix("resnet"))
    millions = {"resnet20": 0.27, "resnet32": 0.46, "resnet44": 0.66, "resnet56": 0.85, "resnet110": 1.7}[name]
    own = sum(one.numel() for one in model.parameters()) - sum(one.weight.numel() for one in shortcuts)
    assert own / 1e6 == pytest.approx(millions, rel=0.03)
    stages = [model.layer1, model.layer2, model.layer3]
    assert [len(stage) for stage in stages] == [blocks] * 3
    sides: list[int] = []
    for stage in stages:
        stage.register_forward_hook(lambda *args: sides.append(args[2].shape[-1]))
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sides == [32, 16, 8]
    assert all(not block.bn2.weight.any() for stage in stages for block in stage), "each block starts as the identity"
    assert model.conv1.weight.std().item() == pytest.approx((2 / (16 * 9)) ** 0.5, rel=0.15)


def test_auto_is_by_the_size_of_the_images() -> None:
    with torch.device("meta"):
        found = {size: len(make_resnet("auto", 1, 10, size).state_dict()) for size in (8, 16, 17, 32, 224)}
        thin, wide = (len(make_resnet(name, 1, 10, 32).state_dict()) for name in ("resnet20", "resnet18"))
    assert found == {8: thin, 16: thin, 17: wide, 32: wide, 224: wide}


@pytest.mark.parametrize("name", ["vgg16", "resnet", "ResNet18", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--model {name} is not a residual network"):
        make_resnet(name, 3, 10, 8)


def test_proposed_names_are_accepted() -> None:
    with pytest.raises(UserError) as refusal:
        make_resnet("none", 3, 10, 8)
    names = str(refusal.value).split("use ")[1].split(", ")
    assert {"auto", "resnet20", "resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d"} <= set(names)
    for name in names:
        with torch.device("meta"):
            model = make_resnet(name, 1, 3, 16)
        assert (model.conv1.in_channels, model.fc.out_features) == (1, 3), name


LAST, PLAIN = torch.channels_last, torch.contiguous_format


@pytest.mark.parametrize(
    ("dtype", "gpu", "wanted"),
    [
        ("float32", False, PLAIN),
        ("float64", False, PLAIN),
        ("bfloat16", False, LAST),
        ("float16", False, LAST),
        ("float32", True, LAST),
    ],
)
def test_memory_format(dtype: str, gpu: bool, wanted: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients lie as their weights do, though the pixels come in the plain order: else DDP warns, and copies them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert memory_format(dtype) == wanted
    monkeypatch.undo()
    model = make_resnet("resnet18", 3, 10, 32).to(memory_format=wanted)
    body: list[torch.Tensor] = []
    model.layer2.register_forward_hook(lambda _module, _inputs, output: body.append(output))
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert body[0].is_contiguous(memory_format=wanted)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
