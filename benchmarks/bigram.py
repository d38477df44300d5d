"""Loss of a bigram model, which a language model has to beat: `uv run python -m benchmarks.bigram --data stdlib`.

It counts which token follows which in the training split, and is evaluated on the inputs and targets of the
validation split that a recipe evaluates on. Prints nats a token, and bits a byte of the text.
"""

import argparse
import math

import numpy as np

from common.workloads import text
from common.workloads.text import Text

ALPHA = 0.1  # added to each count, so that no pair is impossible
BLOCK = 1024  # sequences that are read at a time


def bigram_loss(train: Text, validation: Text) -> float:
    """Mean cross-entropy of the validation split's targets given the token before, in nats a token."""
    size = train.vocab_size
    firsts = np.bincount(train.tokens[:-1], minlength=size)
    pairs, counts = np.unique(train.tokens[:-1].astype(np.int64) * size + train.tokens[1:], return_counts=True)
    total = 0.0
    for start in range(0, len(validation), BLOCK):
        indices = np.arange(start, min(start + BLOCK, len(validation)))
        inputs, targets = (tokens.numpy().ravel() for tokens in validation.read(np.zeros_like(indices), indices))
        wanted = inputs * size + targets
        places = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        seen = np.where(pairs[places] == wanted, counts[places], 0)
        total -= np.log((seen + ALPHA) / (firsts[inputs] + ALPHA * size)).sum()
    return total / (len(validation) * validation.seq_len)


def main() -> None:
    """Count, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--tokenizer", default="")
    args = parser.parse_args()
    train, validation = text.load(args.data, args.seq_len, args.tokenizer)
    loss = bigram_loss(train, validation)
    bits = loss / math.log(2) * validation.tokens_per_byte
    print(f"bigram on {args.data}: {loss:.4f} nats/token, {bits:.4f} bits/byte, of {len(validation)} sequences")


if __name__ == "__main__":
    main()
