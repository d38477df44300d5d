"""Types of flags: the range of a number, and what another value of a flag would save."""

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Bounds:
    """Range that a flag's number must be in: `rate: Annotated[float, Bounds(0, 1)] = 0.5`."""

    least: float = -math.inf
    most: float = math.inf

    def __str__(self) -> str:
        """The range in words, for a message."""
        if self.most == math.inf:
            return f"at least {self.least}"
        return f"at most {self.most}" if self.least == -math.inf else f"between {self.least} and {self.most}"


@dataclass(frozen=True)
class Saves:
    """The value of a flag that makes something less: for the message without memory, and the verdict on a profile.

    Attributes:
        part: "memory", or of a step: "exposed" (it sends, and computes nothing), "slower" (it waits for another rank)
            or "idle" (of a GPU).
        value: of the flag.
    """

    part: str
    value: str


MOST = 2**31 - 1  # of steps, samples and sizes: a product of two of them still has 64 bits
PositiveInt = Annotated[int, Bounds(1, MOST)]
NonNegativeInt = Annotated[int, Bounds(0, MOST)]
NonNegativeFloat = Annotated[float, Bounds(0)]
Smaller = Annotated[int, Bounds(0, MOST), Saves("memory", "smaller, where 0 is the largest")]
Fraction = Annotated[float, Bounds(0, 1)]
Timeout = Annotated[float, Bounds(1)]  # seconds
Seed = Annotated[int, Bounds(0, 2**64 - 1)]  # the bits that common/seed.py mixes
