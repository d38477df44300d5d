"""Random crops and mirror images of whole batches. Callers pass each sample's random numbers; none are drawn here."""

import math

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.nn import functional as F


def crop_padded(images: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """Pad by an eighth with zeros and crop back to size, each sample at its own random place, in one gather.

    This is He et al.'s augmentation for CIFAR (2015, section 4.2, https://arxiv.org/abs/1512.03385):
    4 pixels around 32.

    Args:
        images: (b, C, H, W) uint8.
        draws: (b, 2) in [0, 1); position of the crop from the top and from the left.

    Returns:
        (b, C, H, W) uint8.
    """
    height, width = images.shape[-2:]
    pad = max(1, height // 8)
    top, left = (draws * (2 * pad + 1)).astype(np.int64).T
    # (b, C, 2 pad + 1, 2 pad + 1, H, W): a view of every possible crop; the gather copies one per sample.
    # NumPy copies whole rows where torch's indexing copies single bytes, which is four times as fast.
    crops = sliding_window_view(F.pad(images, [pad] * 4).numpy(), (height, width), axis=(2, 3))
    return torch.from_numpy(crops[np.arange(len(images)), :, top, left])


def crop_resized(image: torch.Tensor, size: int, draws: np.ndarray) -> torch.Tensor:
    """Crop 8 to 100 % of the area with an aspect of 3:4 to 4:3 at random, and resize.

    This is the augmentation for ImageNet of Szegedy et al. (2014, section 6, https://arxiv.org/abs/1409.4842).

    Args:
        image: (C, H, W) uint8.
        size: side of the result, in pixels.
        draws: (4,) in [0, 1): area, aspect, top, left.

    Returns:
        (C, size, size) uint8.
    """
    from torchvision.transforms.v2 import functional as tv  # 2 s of import, which other recipes do not need

    height, width = image.shape[-2:]
    part, aspect = _area_and_aspect(draws)
    area = part * height * width
    crop_height = min(height, max(1, round((area / aspect) ** 0.5)))
    crop_width = min(width, max(1, round((area * aspect) ** 0.5)))
    top, left = int(draws[2] * (height - crop_height + 1)), int(draws[3] * (width - crop_width + 1))
    return tv.resized_crop(image, top, left, crop_height, crop_width, [size, size], antialias=True)


def _area_and_aspect(draws: np.ndarray) -> tuple[float, float]:
    """Of a random crop: its part of the area, and its width divided by its height."""
    return 0.08 + 0.92 * draws[0], (3 / 4) ** (1 - 2 * draws[1])


def least_side(size: int, draws: np.ndarray | None) -> int:
    """Pixels that the short side of an image must have, so that it is not made smaller than it should be.

    Twice those of the result, as for `reducing_gap` in Pillow's `Image.thumbnail`: from there, resizing looks at
    several pixels for each of the result, and little can be seen of an earlier reduction.

    Args:
        size: side of the result of `crop_resized` or `crop_center`, in pixels.
        draws: of `crop_resized`; None for `crop_center`.
    """
    if draws is None:
        return 2 * round(size * 8 / 7)
    part, aspect = _area_and_aspect(draws)
    # The shorter side of the crop, in a square image; in any other one it is longer.
    return math.ceil(2 * size / (part * min(aspect, 1 / aspect)) ** 0.5)


def crop_center(image: torch.Tensor, size: int) -> torch.Tensor:
    """Resize the short side to 8/7 of `size` and take the centre: the usual margin of 256 around 224.

    Args:
        image: (C, H, W) uint8.
        size: side of the result, in pixels.
    """
    from torchvision.transforms.v2 import functional as tv

    return tv.center_crop(tv.resize(image, [round(size * 8 / 7)], antialias=True), [size, size])


def resize(images: torch.Tensor, size: int) -> torch.Tensor:
    """Resize whole images (b, C, H, W) uint8 to (b, C, size, size)."""
    from torchvision.transforms.v2 import functional as tv

    return tv.resize(images, [size, size], antialias=True)


def mirror(images: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """Mirror, in place, the images (b, C, H, W) whose draw (b,) in [0, 1) is below 0.5."""
    chosen = np.flatnonzero(draws < 0.5)
    pixels = images.numpy()  # NumPy picks out and puts back whole images, and torch mirrors: each is the faster at it
    pixels[chosen] = torch.from_numpy(pixels[chosen]).flip(-1).numpy()
    return images
