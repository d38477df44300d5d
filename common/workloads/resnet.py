"""Residual networks: torchvision's, with a stem for small images, and the thin ones of He et al. for CIFAR-10."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from common import UserError, precision

SMALL_IMAGE = 64  # pixels of a side
TINY_IMAGE = 16
# Blocks of a stage (He et al. 2015, section 4.2, https://arxiv.org/abs/1512.03385): 6 n + 2 layers.
THIN = {"resnet20": 3, "resnet32": 5, "resnet44": 7, "resnet56": 9, "resnet110": 18}
WIDTHS = (16, 32, 64)  # channels of its stages


def make_resnet(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Build a randomly initialised residual network.

    The last norm of each residual block starts at zero, so each block starts as the identity (Goyal et al. 2017,
    section 5.1). For images up to 64 pixels, the stem of torchvision's is a 3x3 convolution of stride 1 without
    max-pooling, as He et al. have it for CIFAR-10, which keeps their resolution.

    Args:
        name: a residual network of torchvision, such as resnet18, resnet50 or wide_resnet50_2; one of THIN; or auto:
            resnet20 for images up to 16 pixels, which has a fourteenth of resnet18's operations, else resnet18.
        in_channels: 1 for grey images, 3 for colour.
        num_classes: length of the logits.
        image_size: side of the square input, in pixels.

    Returns:
        A module that maps images (B, in_channels, H, W) to logits (B, num_classes).

    Raises:
        UserError: there is no residual network of that name.
    """
    from torchvision import models  # 2 s of import, which only image recipes pay

    if name == "auto":
        name = "resnet20" if image_size <= TINY_IMAGE else "resnet18"
    if name in THIN:
        return _thin(THIN[name], in_channels, num_classes)
    known = [model for model in models.list_models(module=models) if "resne" in model]
    if name not in known:
        raise UserError(f"--model {name} is not a residual network: use auto, {', '.join([*THIN, *known])}")
    model = models.get_model(name, weights=None, num_classes=num_classes, zero_init_residual=True)
    small = image_size <= SMALL_IMAGE
    if small or in_channels != 3:
        kernel, stride = (3, 1) if small else (7, 2)
        model.conv1 = nn.Conv2d(in_channels, 64, kernel, stride, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    if small:
        model.maxpool = nn.Identity()
    return model


def _thin(num_blocks: int, in_channels: int, num_classes: int) -> nn.Module:
    """The network of three stages, of torchvision's blocks: a shortcut to another width is a convolution."""
    from torchvision.models import resnet

    stages: dict[str, nn.Module] = {}
    width = WIDTHS[0]
    for i, wider in enumerate(WIDTHS):
        blocks: list[Any] = []
        for stride in (1 if i == 0 else 2, *[1] * (num_blocks - 1)):
            changes = stride > 1
            shortcut = nn.Sequential(resnet.conv1x1(width, wider, stride), nn.BatchNorm2d(wider)) if changes else None
            blocks.append(resnet.BasicBlock(width, wider, stride, shortcut))
            width = wider
        stages[f"layer{i + 1}"] = nn.Sequential(*blocks)
    stem = {"conv1": resnet.conv3x3(in_channels, WIDTHS[0]), "bn1": nn.BatchNorm2d(WIDTHS[0]), "relu": nn.ReLU()}
    head = {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(width, num_classes)}
    model = nn.Sequential(OrderedDict({**stem, **stages, **head}))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, resnet.BasicBlock):
            nn.init.zeros_(module.bn2.weight)
    return model


def memory_format(dtype: str) -> torch.memory_format:
    """The order in memory in which convolutions are fastest: channels last, but not in float32 or float64 on a CPU.

    There they gain nothing by it, and the fused SGD copies what is not contiguous.

    Args:
        dtype: as `--dtype`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = precision.compute_dtype(dtype, device) in precision.HALVES
    return torch.channels_last if half or device.type == "cuda" else torch.contiguous_format
