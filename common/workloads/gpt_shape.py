"""The sizes of a GPT, and the flags that ask for them."""

import dataclasses
import math
from typing import Annotated, Any

from common import UserError, bounds

MOST_LAYERS = 10_000  # which take 10 s to create, before any weights
MOST_ELEMENTS = 2**40  # of a matrix: 4 TB
SCALINGS = '"linear:FACTOR" or "llama3:FACTOR:LOW:HIGH:CONTEXT"'


@dataclasses.dataclass(frozen=True)
class ShapeArgs:
    """Flags that other people's models need; a recipe's own are `num_layers`, `num_heads` and `width`."""

    # shapes of other people's models
    num_kv_heads: bounds.NonNegativeInt = 0  # key and value heads; 0 for num_heads
    mlp_width: bounds.NonNegativeInt = 0  # hidden units of each MLP; 0 for 8/3 of width, rounded up to a multiple of 64
    tied: bool = False  # share the embedding's weights with the output layer
    rope_base: Annotated[float, bounds.Bounds(1)] = 10_000.0  # base of the rotary positions' wavelengths
    norm_eps: bounds.NonNegativeFloat = 1e-5  # added to the variance in each norm
    vocab_size: bounds.NonNegativeInt = 0  # rows of the embedding; 0 for as many as the tokenizer has tokens
    head_width: bounds.NonNegativeInt = 0  # width of each head; 0 for width / num_heads
    qkv_bias: bool = False  # add a bias to queries, keys and values
    qk_norm: bool = False  # pass each head's query and key through a norm
    rope_scaling: str = ""  # stretched positions: "linear:FACTOR" or "llama3:FACTOR:LOW:HIGH:CONTEXT"; "" for none


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model, and constants of its layers."""

    vocab_size: int
    num_layers: int
    num_heads: int  # query heads
    width: int  # of the residual stream
    _: dataclasses.KW_ONLY
    num_kv_heads: int = 0  # key and value heads; 0 for num_heads
    mlp_width: int = 0  # hidden units of each MLP; 0 for 8/3 of `width`, rounded up to a multiple of 64
    tied: bool = False  # whether the output layer shares the embedding's weights
    rope_base: float = 10_000.0  # longest wavelength of the rotary positions, as a multiple of 2 pi tokens
    norm_eps: float = 1e-5
    head_width: int = 0  # of each head's query, key and value; 0 for width / num_heads
    qkv_bias: bool = False  # whether queries, keys and values have a bias
    qk_norm: bool = False  # whether each head's query and key pass a norm
    rope_scaling: str = ""  # how rotary positions are stretched: see `gpt.scale_frequencies`

    @staticmethod
    def of(args: Any, vocab_size: int) -> "Shape":
        """The shape that a recipe's flags, which have the names of our fields, ask for.

        Args:
            args: with `vocab_size` 0 for that of the data.
            vocab_size: of the data.

        Raises:
            UserError: the data have tokens that the model would not have.
        """
        if 0 < args.vocab_size < vocab_size:
            raise UserError(f"--vocab-size {args.vocab_size} must be at least {vocab_size}, as the data's is, or 0")
        flags = {field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)}
        return Shape(**flags | {"vocab_size": args.vocab_size or vocab_size})

    def __post_init__(self) -> None:
        """Fill in the default sizes, and refuse sizes that do not divide."""
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "mlp_width", self.mlp_width or -(-8 * self.width // (3 * 64)) * 64)
        if not self.head_width and self.width % (2 * self.num_heads):
            raise UserError(
                f"--width {self.width} must be an even multiple of --num-heads {self.num_heads}, or --head-width given"
            )
        object.__setattr__(self, "head_width", self.head_width or self.width // self.num_heads)
        if self.head_width % 2:
            raise UserError(f"--head-width {self.head_width} must be even: rotary positions turn pairs")
        numbers = parse_scaling(self.rope_scaling)
        kind = self.rope_scaling.partition(":")[0]
        object.__setattr__(self, "rope_scaling", ":".join([kind, *map(str, numbers)]))  # one spelling for one scaling
        if self.num_layers > MOST_LAYERS:
            raise UserError(f"--num-layers {self.num_layers} must be at most {MOST_LAYERS}")
        if self.width * max(self.num_heads * self.head_width, self.mlp_width, self.vocab_size) > MOST_ELEMENTS:
            raise UserError(
                f"--width {self.width} with --mlp-width {self.mlp_width}, --num-heads {self.num_heads} and a "
                f"vocabulary of {self.vocab_size} makes a matrix of more than {MOST_ELEMENTS} elements: "
                "lower one of them"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"--num-heads {self.num_heads} must be a multiple of --num-kv-heads {self.num_kv_heads}")


def parse_scaling(text: str) -> list[float]:
    """The numbers of a `Shape.rope_scaling`: [] for none, [factor], or [factor, low, high, context].

    Raises:
        UserError: it is not one that we know, or its numbers are not possible.
    """
    kind, *parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise UserError(f'--rope-scaling {text!r} must be {SCALINGS}, with numbers, or ""') from None
    if len(numbers) != {"": 0, "linear": 1, "llama3": 4}.get(kind):
        raise UserError(f'--rope-scaling {text!r} must be {SCALINGS}, or ""')
    if not all(0 < number < math.inf for number in numbers):
        raise UserError(f"--rope-scaling {text!r} must have numbers above 0")
    if len(numbers) == 4 and numbers[1] >= numbers[2]:
        raise UserError(f"--rope-scaling {text!r} must have LOW {numbers[1]:g} below HIGH {numbers[2]:g}")
    return numbers
