"""Whole documents in rows: each token is predicted once, from its own document, and little space is lost."""

import numpy as np
import pytest
from common.workloads import document_rows
from common.workloads.document_rows import IGNORED, PROMPT, START, DocumentRows, best_fit

VOCABULARY = 50


def slow_best_fit(lengths: list[int], size: int) -> list[int]:
    """Space that is left in each row, piece by piece."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fullest = min((space, i) for i, space in enumerate([*spaces, size]) if space >= length)[1]
        spaces += [size] * (fullest == len(spaces))
        spaces[fullest] -= length
    return sorted(spaces)


def test_best_fit() -> None:
    generator = np.random.default_rng(0)
    for _ in range(100):
        size = int(generator.integers(1, 40))
        lengths = generator.integers(1, size + 1, generator.integers(0, 200))
        rows = best_fit(lengths, size)
        taken = np.bincount(rows, weights=lengths) if len(rows) else np.zeros(0)
        assert sorted(size - taken.astype(int)) == slow_best_fit(lengths.tolist(), size)


def test_many_documents() -> None:
    lengths = np.minimum(2048, 1 + np.random.default_rng(0).geometric(1 / 300, 500_000))
    rows = best_fit(lengths, 2048)
    assert np.bincount(rows, weights=lengths).max() <= 2048
    assert lengths.sum() / 2048 / (rows.max() + 1) > 0.999


def write(documents: list[list[int]], prompts: list[list[bool]]) -> np.ndarray:
    """Tokens with their marks, as they are kept."""
    marks = [
        START * (i == 0) + PROMPT * prompts[number][i]
        for number, document in enumerate(documents)
        for i in range(len(document))
    ]
    return np.array([token for one in documents for token in one], np.uint16) + np.uint16(VOCABULARY) * np.array(
        marks, np.uint16
    )


@pytest.mark.parametrize("scanned", [7, 2**24])
@pytest.mark.parametrize("answers", [False, True])
def test_each_token_is_predicted_once(scanned: int, answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_rows, "SCANNED", scanned)
    generator = np.random.default_rng(1)
    seq_len = 10
    # A token's number tells its document and its place in it.
    documents = [list(range(n)) for n in generator.integers(1, 33, 60)]
    prompts = [[bool(answers and generator.random() < 0.7) for _ in one] for one in documents]
    read: list[tuple[np.ndarray, int]] = []
    rows = DocumentRows(write(documents, prompts), VOCABULARY, seq_len, lambda starts, n: read.append((starts, n)))
    found = []
    inputs, targets = rows.read(np.arange(len(rows)))
    assert inputs.shape == (len(rows), 2, seq_len)
    for (tokens, positions), following in zip(inputs, targets, strict=True):
        for part in np.split(np.arange(seq_len), np.flatnonzero(positions == 0)[1:]):
            assert positions[part].tolist() == list(range(len(part))), "they restart with each document"
            if (following[part] == IGNORED).all():
                assert not tokens[part].any(), "padding: a piece without a target lies in no row"
                continue
            assert tokens[part].tolist() == list(range(tokens[part[0]], tokens[part[0]] + len(part))), "in its order"
            assert tokens[part[0]] % seq_len == 0, "a document, or a piece that begins a whole number of rows behind it"
            counts = following[part] != IGNORED
            assert (following[part] == tokens[part] + 1)[counts].all()
            found += following[part][counts].tolist()
    wanted = [i for one, asked in zip(documents, prompts, strict=True) for i in one if i and not asked[i]]
    assert sorted(found) == sorted(wanted)
    assert rows.num_targets == len(wanted)
    assert rows.num_cut <= sum(len(one) > seq_len + 1 for one in documents)
    if not answers:  # else a piece has targets that do not count
        assert rows.padding == pytest.approx((targets == IGNORED).mean())
    total = sum(map(len, documents))
    assert all(starts.min() >= 0 and starts.max() + n <= total for starts, n in read)


def test_nothing_to_predict() -> None:
    assert len(DocumentRows(write([[1], [2]], [[False]] * 2), VOCABULARY, 4)) == 0
    assert len(DocumentRows(write([], []), VOCABULARY, 4)) == 0
