"""Residual networks from torchvision, with a stem for small images."""

import torch
from torch import nn

from common import UserError, precision

SMALL_IMAGE = 64


def make_resnet(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Build a randomly initialised residual network from torchvision.

    The last norm of each residual block starts at zero, so each block starts as the identity (Goyal et al. 2017,
    section 5.1). For images up to 64 pixels, the stem is a 3x3 convolution of stride 1 without max-pooling, as in He
    et al. for CIFAR-10 (2015, section 4.2, https://arxiv.org/abs/1512.03385), which keeps their resolution.

    Args:
        name: a residual network of torchvision, such as resnet18, resnet50 or wide_resnet50_2.
        in_channels: 1 for grey images, 3 for colour.
        num_classes: length of the logits.
        image_size: side of the square input, in pixels.

    Returns:
        A module that maps images (B, in_channels, H, W) to logits (B, num_classes).

    Raises:
        UserError: torchvision has no residual network of that name.
    """
    from torchvision import models  # 2 s of import, which only image recipes pay

    known = [model for model in models.list_models(module=models) if "resne" in model]
    if name not in known:
        raise UserError(f"--model {name} is not a residual network of torchvision: use {', '.join(known)}")
    model = models.get_model(name, weights=None, num_classes=num_classes, zero_init_residual=True)
    small = image_size <= SMALL_IMAGE
    if small or in_channels != 3:
        kernel, stride = (3, 1) if small else (7, 2)
        model.conv1 = nn.Conv2d(in_channels, 64, kernel, stride, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    if small:
        model.maxpool = nn.Identity()
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
