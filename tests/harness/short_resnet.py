"""`--model resnet6`: the first two stages of resnet18, one block each, as float64 on a CPU is slow.

What a strategy can get wrong is all there: a block with an identity as its shortcut and one with a convolution,
norms, and gradients that fill more than one of DDP's buckets.
"""

from typing import Any

from torch import nn
from torchvision.models._api import register_model
from torchvision.models.resnet import BasicBlock, ResNet


def block(channels_in: int, channels: int, *args: Any, **kwargs: Any) -> nn.Module:
    """None in the last two stages: to draw their weights takes as long as a step of the others."""
    return BasicBlock(channels_in, channels, *args, **kwargs) if channels <= LAST else nn.Identity()


block.expansion = 1
LAST = 128  # channels


def resnet6(weights: None = None, *, num_classes: int, **kwargs: Any) -> ResNet:
    model = ResNet(block, [1, 1, 1, 1], **kwargs)
    model.fc = nn.Linear(LAST, num_classes)
    return model


resnet6.__module__ = "torchvision.models.resnet"  # where common/workloads/resnet.py looks for names
register_model()(resnet6)
