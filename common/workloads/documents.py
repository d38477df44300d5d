"""Rows of a table as tokens: the texts of its columns, or its chats, as bytes or by a tokenizer."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from common import UserError, manifest, places
from common.workloads import chats, document_rows, packed, table_columns

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer

# Names of the token that ends a document, where no tokenizer_config.json beside the tokenizer tells it.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
MOST_TOKENS = 2**31
BETWEEN = "\n"  # columns of a row, and rows of bytes or lines


class Vocabulary(NamedTuple):
    """A tokenizer."""

    path: str
    model: "Tokenizer"
    size: int  # every token is below it
    digest: str
    facts: dict[str, Any]  # of the files of Hugging Face beside it


def load_tokenizer(path: str) -> Vocabulary:
    """Read a Hugging Face tokenizer.json, and what lies beside it.

    Raises:
        UserError: it cannot be read.
    """
    file = places.local("--tokenizer", path)
    try:
        from tokenizers import Tokenizer

        content = manifest.read_bytes(file)
        with _panics():
            model = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises no more specific type
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"--tokenizer {path} cannot be read ({reason}): it must be a tokenizer.json, and needs pip install "
            "tokenizers"
        ) from error
    model.no_truncation()  # the file's own settings are meant for single sentences
    model.no_padding()
    # Otherwise each forked worker warns of threads, which are idle by then.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    size = max(model.get_vocab().values(), default=-1) + 1  # ids may have gaps
    if size > MOST_TOKENS:
        raise UserError(f"--tokenizer {path} has a token of number {size - 1}: it must be below {MOST_TOKENS}")
    return Vocabulary(path, model, size, hashlib.sha256(content).hexdigest(), _facts(Path(path).expanduser()))


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """Make an error of a panic in Rust, which is none to Python: `except Exception` would not catch it."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(str(error)) from error
        raise


class Encoder:
    """Makes tokens of rows.

    Attributes:
        columns: the columns that are read, in this order.
        vocab_size: every token is below it.
        dtype: the type that tokens are stored in.
        end: the token that ends each row; "" for none.
        digest: hash of all that decides the tokens of a row.
    """

    def __init__(
        self,
        name: str,
        rows: "Dataset",
        vocabulary: Vocabulary | None,
        columns: str,
        attend: str = "row",
        loss_on: str = "all",
    ) -> None:
        """Choose the columns of a set.

        Args:
            name: the set, for errors.
            rows: its training split.
            vocabulary: of a tokenizer; None makes each byte of UTF-8 a token.
            columns: names of the columns to read, with commas between; "" for the column of strings with the most text.
            attend: "documents" marks where each row begins, "row" does not.
            loss_on: "answers" marks what the assistant did not write, "all" does not.

        Raises:
            UserError: there is no such column, or none of strings, or none of chats for answers; or chats have no
                template.
        """
        self._model = vocabulary.model if vocabulary else None
        self._template: Any = None
        self.vocab_size = vocabulary.size if vocabulary else 256
        self.end = ""
        self.columns = table_columns.choose(name, rows, columns, loss_on)
        self._answers = loss_on == "answers"
        about = [*self.columns]
        if vocabulary:
            if rows.info.builder_name != "text":  # whose rows are lines, not documents
                self.end = end_token(vocabulary)
            about += [vocabulary.digest, self.end]
        if chats := [column for column in self.columns if table_columns.is_chat(rows, column)]:
            self._template = _chat_template(name, chats[0], vocabulary)
            facts = vocabulary.facts if vocabulary else {}
            about += [facts["chat_template"], repr(_special(facts))]
        self._apart = attend == "documents"
        if self._apart:
            about += [attend, loss_on]
        # A token and its marks are one number.
        num_marks = (document_rows.START | self._answers * document_rows.PROMPT) + 1 if self._apart else 1
        self.dtype = packed.token_type(self.vocab_size * num_marks)
        self.digest = hashlib.sha256(repr(about).encode()).hexdigest()

    def encode(self, batch: Mapping[str, Sequence[Any]]) -> tuple[np.ndarray, int]:
        """Tokens of some rows, one after the other, (n,), and the bytes of their texts.

        Where documents are kept apart, each is a token plus `vocab_size` times its marks: see `document_rows`.
        """
        rows = zip(*(batch[column] for column in self.columns), strict=True)
        ending = "" if self.end else BETWEEN
        written = [one for one in map(self._text, rows) if one is not None]
        texts = [text + ending for text, _ in written]
        encoded = [text.encode() for text in texts]
        num_bytes = sum(map(len, encoded))
        if self._model is None:
            tokens = np.frombuffer(b"".join(encoded), np.uint8)
            return self._marked(tokens, [*map(len, encoded)]) if self._apart else tokens, num_bytes
        end = [self._model.token_to_id(self.end)] if self.end else []
        encode = self._model.encode_batch if self._answers else self._model.encode_batch_fast  # which has no offsets
        # Each row separately, so that tokens do not depend on how rows are grouped.
        try:
            with _panics():
                found = encode(texts, add_special_tokens=False)
        except Exception as error:
            raise UserError(f"--tokenizer fails on a text of --data: {error}") from error
        ids = [one.ids if one.ids[-1:] == end else one.ids + end for one in found]
        tokens = np.fromiter((token for one in ids for token in one), self.dtype)
        if not self._apart:
            return tokens, num_bytes
        tokens = self._marked(tokens, [*map(len, ids)])
        if self._answers:
            counts = [self._counts(*one) for one in zip(found, ids, (spans for _, spans in written), strict=True)]
            prompts = ~np.fromiter((count for one in counts for count in one), bool)
            tokens += (document_rows.PROMPT * self.vocab_size * prompts).astype(self.dtype)
        return tokens, num_bytes

    def _marked(self, tokens: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """Tokens of documents of these lengths, with a mark on the first of each."""
        tokens = tokens.astype(self.dtype)
        sizes = np.array([length for length in lengths if length], int)
        tokens[np.cumsum(sizes) - sizes] += document_rows.START * self.vocab_size
        return tokens

    def _counts(self, found: Any, ids: Sequence[Any], spans: chats.Spans) -> list[bool]:
        """Whether each token of a row counts; a token that ends it counts if the one before does."""
        counts = self._template.counted(found.offsets, spans)
        return counts + counts[-1:] if 0 < len(counts) < len(ids) else counts or [False] * len(ids)

    def _text(self, row: Sequence[Any]) -> tuple[str, chats.Spans] | None:
        """The text of a row, and what of it the assistant wrote, if that is asked; None where all of it is missing."""
        text = ""
        spans: chats.Spans = []
        parts = [one for one in row if one is not None]
        for i, part in enumerate(parts):
            text += BETWEEN if i else ""
            if isinstance(part, str):
                text += part
            elif self._answers:
                more, answers = self._template.answers(part)
                spans += [(len(text) + first, len(text) + last) for first, last in answers]
                text += more
            else:
                text += self._template.text(part)
        return (text, spans) if parts else None


def _facts(tokenizer: Path) -> dict[str, Any]:
    """What the files of Hugging Face beside a tokenizer say of it."""
    file = tokenizer.parent / "tokenizer_config.json"
    template = tokenizer.parent / "chat_template.jinja"
    try:
        facts = manifest.read_json(file) if os.path.lexists(file) else {}
        return facts | ({"chat_template": manifest.read_bytes(template).decode()} if os.path.lexists(template) else {})
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"--tokenizer {tokenizer}: a file beside it cannot be read: {error}; correct or remove it"
        ) from error


def end_token(vocabulary: Vocabulary) -> str:
    """The token that ends a document; "" where the tokenizer has none.

    Raises:
        UserError: tokenizer_config.json names a token that the tokenizer does not have.
    """
    if named := _special(vocabulary.facts)["eos_token"]:
        if vocabulary.model.token_to_id(named) is None:
            raise UserError(
                f"--tokenizer {vocabulary.path} has no token {named!r}, which tokenizer_config.json beside it names "
                "as eos_token: correct it there"
            )
        return named
    added = {token.content for token in vocabulary.model.get_added_tokens_decoder().values()}
    return next((name for name in END_TOKENS if name in added), "")


def _chat_template(name: str, column: str, vocabulary: Vocabulary | None) -> chats.Template:
    """What writes the chats of a column as texts."""
    source = vocabulary.facts.get("chat_template") if vocabulary else None
    if isinstance(source, list):  # several by name, of which transformers takes this one too
        source = {one["name"]: one["template"] for one in source}.get("default")
    if not vocabulary or not isinstance(source, str):
        raise UserError(
            f"--text-columns {column}: the chats of --data {name} need the template of a tokenizer: give --tokenizer a "
            f"tokenizer.json with a chat_template.jinja, or a tokenizer_config.json, beside it"
            + (f"; {vocabulary.path} has neither" if vocabulary else "")
        )
    return chats.Template(source, _special(vocabulary.facts), name, column, vocabulary.path)


def _special(facts: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a chat template may write."""
    tokens = {key: facts.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return {
        key: str(token.get("content", "") if isinstance(token, Mapping) else token or "")
        for key, token in tokens.items()
    }
