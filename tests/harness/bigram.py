"""Loss of a bigram model, which a language model has to beat."""

import numpy as np
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
