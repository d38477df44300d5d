"""Rows of whole documents, which are kept apart: each is put where it fits best, and the rest of a row is padding."""

from collections.abc import Callable
from typing import Any

import numpy as np

from common import printable, ranks

# Marks.
START = 1  # the first token of a document
PROMPT = 2  # a token that does not count
IGNORED = -100  # the target of a token that does not count
SCANNED = 2**24  # tokens that are looked at at a time
SHOWN = 400  # characters of a sample


class DocumentRows:
    """How documents lie in rows of `seq_len` tokens.

    A document of n tokens takes n - 1 places: each token but the last is read, each but the first is a target. A longer
    one than a row is cut into pieces, each of which predicts from its own tokens alone; no other is cut.

    Attributes:
        num_documents: with a target that counts.
        num_cut: of those, the ones that are longer than a row.
        num_dropped: documents, or pieces of one, without a target that counts: they lie in no row.
        num_targets: that count.
        padding: share of the places that no document takes.
    """

    def __init__(
        self, tokens: Any, vocab_size: int, seq_len: int, check: Callable[[np.ndarray, int], None] = lambda *_: None
    ) -> None:
        """Lay out all documents.

        Args:
            tokens: of all documents, one behind the other, (n,): each plus `vocab_size` times its marks.
            vocab_size: every token is below it.
            seq_len: places in a row.
            check: called with where tokens that are about to be read begin, and with how many they are at each place.
        """
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._seq_len = seq_len
        self._check = check
        self._cover = min(seq_len + 1, len(tokens))  # tokens of a piece and its last target
        found = []
        for begin in range(0, len(tokens), SCANNED):
            found.append(begin + np.flatnonzero(self._marks(begin) & START))
        begins = np.concatenate([*found, [len(tokens)]])
        places = np.maximum(np.diff(begins) - 1, 0)
        # Pieces of documents: number k of one begins k rows behind its beginning.
        counts = -(-places // seq_len)
        document = np.repeat(np.arange(len(places)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = begins[document] + number * seq_len
        lengths = np.minimum(seq_len, places[document] - number * seq_len)
        counted = self._count(starts + 1 + lengths) - self._count(starts + 1)
        keep = counted > 0
        self.num_documents = len(np.unique(document[keep]))
        self.num_cut = len(np.unique(document[keep & (counts[document] > 1)]))
        self.num_dropped = int(np.sum(~keep)) + int(np.sum(places == 0))
        self.num_targets = int(counted.sum())
        self._starts, self._lengths = starts[keep], lengths[keep]
        rows = best_fit(self._lengths, seq_len)
        self._order = np.argsort(rows, kind="stable")  # pieces, row after row
        self._first = np.searchsorted(rows[self._order], np.arange(rows.max(initial=-1) + 2))
        self.padding = 1 - float(self._lengths.sum()) / max(1, len(self) * seq_len)

    def __len__(self) -> int:
        return len(self._first) - 1

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of some rows.

        Returns:
            Inputs, (b, 2, seq_len) int64: tokens, and their positions in their documents. Padding is a document of
            zeros. Targets, (b, seq_len) int64: the next tokens, and IGNORED where they do not count.
        """
        inputs = np.zeros((len(indices), 2, self._seq_len), np.int64)
        targets = np.full((len(indices), self._seq_len), IGNORED)
        parts = [self._order[self._first[i] : self._first[i + 1]] for i in indices]
        pieces = np.concatenate([*parts, np.zeros(0, int)]).astype(int)
        if len(pieces):
            self._check(np.minimum(self._starts[pieces], len(self._tokens) - self._cover), self._cover)
        for i, part in enumerate(parts):
            lengths = self._lengths[part]
            ends = np.cumsum(lengths)
            used = ends[-1]
            positions = np.arange(used) - np.repeat(ends - lengths, lengths)
            places = np.repeat(self._starts[part], lengths) + positions
            marks, following = np.divmod(self._tokens[places + 1].astype(np.int64), self._vocab_size)
            inputs[i, 0, :used] = self._tokens[places] % self._vocab_size
            inputs[i, 1, :used] = positions
            inputs[i, 1, used:] = np.arange(self._seq_len - used)
            targets[i, :used] = np.where(marks & PROMPT, IGNORED, following)
        return inputs, targets

    def first(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of the first piece, (n,), and whether each of them counts."""
        start = self._starts[0]
        marks, tokens = np.divmod(self._tokens[start : start + self._lengths[0] + 1].astype(np.int64), self._vocab_size)
        return tokens, marks & PROMPT == 0

    def _marks(self, begin: int) -> np.ndarray:
        """The marks of SCANNED tokens."""
        some = self._tokens[begin : begin + SCANNED]
        self._check(np.array([begin]), len(some))
        return some // self._vocab_size

    def _count(self, places: np.ndarray) -> np.ndarray:
        """How many tokens that count lie before each of these places, which ascend."""
        counts = np.zeros(len(places), np.int64)
        before = 0
        for begin in range(0, len(self._tokens), SCANNED):
            sums = np.concatenate([[0], np.cumsum(self._marks(begin) & PROMPT == 0)])
            first, last = np.searchsorted(places, [begin, begin + len(sums)])
            counts[first:last] = before + sums[places[first:last] - begin]
            before += int(sums[-1])
        return counts


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """The row of each piece: the longest first, each into the fullest row that has space (best-fit decreasing).

    It is the packing of Ding et al. 2024 (https://arxiv.org/abs/2404.10830). Pieces of one length are placed together,
    so it takes as long as there are lengths, whatever the number of pieces.

    Args:
        lengths: of the pieces, (n,), from 1 to `size`.
        size: of a row.
    """
    rows = np.zeros(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    with_space: list[list[np.ndarray]] = [[] for _ in range(size + 1)]  # rows, by the space that they have left
    num_rows = 0
    for same in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        length = int(lengths[same[0]]) if len(same) else 0
        for space in range(length, size + 1):  # the fullest first
            while len(same) and with_space[space]:
                found = with_space[space].pop()
                fits = space // length  # of this length in each of them; full before the next
                taken = min(len(found), -(-len(same) // fits))
                _place(same, found[:taken], fits, space, length, rows, with_space)
                same = same[fits * taken :]  # noqa: PLW2901 (those that are left)
                if taken < len(found):
                    with_space[space].append(found[taken:])
        if len(same):
            fits = size // length
            new = num_rows + np.arange(-(-len(same) // fits))
            num_rows += len(new)
            _place(same, new, fits, size, length, rows, with_space)
    return rows


def _place(
    pieces: np.ndarray,
    into: np.ndarray,
    fits: int,
    space: int,
    length: int,
    rows: np.ndarray,
    with_space: list[list[np.ndarray]],
) -> None:
    """Place pieces of one length into rows, up to `fits` in each."""
    mine = pieces[: fits * len(into)]
    rows[mine] = np.repeat(into, fits)[: len(mine)]
    full, rest = divmod(len(mine), fits)
    with_space[space - fits * length].append(into[:full])
    if rest:
        with_space[space - rest * length].append(into[full:])


def say(rows: DocumentRows, seq_len: int, loss_on: str) -> None:
    """How the documents of the training split lie in rows."""
    cut = f", {rows.num_cut:,} longer than a row and cut" if rows.num_cut else ""
    dropped = ""
    if rows.num_dropped:
        why = "no token of an answer" if loss_on == "answers" else "fewer than two tokens"
        dropped = f"; {rows.num_dropped:,} documents or pieces left out, with {why}"
    # A model of somebody's own may take nothing else than tokens.
    row = "; inputs (b, T), in which each reads those before it, with --attend row"
    other = f"; inputs are (b, 2, T), tokens and their positions{row * (loss_on == 'all')}"
    ranks.print0(
        f"data     {rows.num_documents:,} document(s) kept apart in {len(rows):,} row(s) of {seq_len}, "
        f"{rows.padding:.1%} padding{cut}{dropped}{other}"
    )


def show_answers(rows: DocumentRows, tokenizer: Any) -> None:
    """One chat, with what counts between » and «, as people check it by eye."""
    tokens, counts = rows.first()
    bounds = np.flatnonzero(np.diff(counts)) + 1
    shown = ""
    for part, is_answer in zip(np.split(tokens, bounds), counts[[0, *bounds]], strict=True):
        written = tokenizer.decode(part.tolist(), skip_special_tokens=False)
        shown += f"»{written}«" if is_answer else written
    ranks.print0(f"data     what counts, between » and «: {printable(shown, SHOWN)}")
