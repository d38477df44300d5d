"""Loss of a bigram model, which a language model has to beat: `uv run python -m benchmarks.bigram --data stdlib`.

It counts which token follows which in the training split, and is evaluated on the inputs and targets of the
validation split that a recipe evaluates on. Prints nats a token, and bits a byte of the text.
"""

import argparse
import math

from common.workloads import text
from tests.harness.bigram import bigram_loss


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
