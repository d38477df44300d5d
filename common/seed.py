"""Stateless seeding: every random number is a function of (seed, purpose), never of earlier draws.

So there is no generator state to save: a checkpoint needs the seed and the position, and a run that resumes on another
number of ranks or loader workers draws the same numbers.
"""

import random
from typing import Any

import numpy as np
import torch

# Purposes; each has its own stream, because its number is mixed in after the seed.
INIT, ORDER, AUGMENT, STEP, HOLD_OUT, EPISODE, ACTION, PLACE, SHADOW, FADING, MIXTURE = range(11)
MASK = 2**64 - 1  # of 64 bits


def mix(*keys: int | np.ndarray) -> np.ndarray:
    """Hash integers to 64 random bits, the same on every machine and with every version of NumPy and torch.

    Each key is folded in by the finaliser of SplitMix64 (Steele, Lea and Flood 2014,
    https://doi.org/10.1145/2660193.2660195; the constants are Stafford's variant 13).

    Args:
        *keys: non-negative integers or integer arrays that broadcast against each other.

    Returns:
        uint64 array of the broadcast shape.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        return _fold(np.zeros((), np.uint64), [np.asarray(key).astype(np.uint64) for key in keys])


def mix_ints(*keys: int) -> int:
    """`mix` of integers alone, in a tenth of NumPy's time: it is called for each step and each sample."""
    return _fold(0, [int(key) for key in keys])


def _fold(z: Any, keys: list[Any]) -> Any:
    """SplitMix64 of Python's integers, which the mask keeps to 64 bits, or of uint64 arrays, which have no more."""
    for key in keys:
        z = (z + key + 0x9E3779B97F4A7C15) & MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        z = z ^ (z >> 31)
    return z


def uniform(*keys: int | np.ndarray) -> np.ndarray:
    """Hash integers to float64 numbers in [0, 1), one for each element of the broadcast keys."""
    return (mix(*keys) >> np.uint64(11)) * 2.0**-53


def everything(*keys: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (of the CPU and of all GPUs) from the keys.

    As torch.manual_seed does, which formats the whole stack for each kind of device that is not in use: in each step,
    that took longer than all else around a small training.
    """
    bits = for_sample(*keys)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(bits)


def for_sample(*keys: int) -> int:
    """Seed the generators of the CPU alone: what reads a sample draws from these; returns the seed, 64 bits."""
    bits = mix_ints(*keys)
    random.seed(bits)
    np.random.seed(bits % 2**32)
    torch.default_generator.manual_seed(bits)
    return bits
