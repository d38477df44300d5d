"""Text as one row of tokens: that of Python's standard library, or any set that `datasets.load_dataset` reads."""

import hashlib
import math
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common import UserError, ranks, seed
from common.workloads import documents, packed, parsing, splits, token_files

if TYPE_CHECKING:
    from datasets import Dataset

EXCERPT = 2048  # bytes of each held-out document that the built-in validation split reads
# Packages of the standard library that are not read: tables, and packages that some distributions lack.
SKIPPED = {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"}


@dataclass(frozen=True)
class Text:
    """One split: one row of tokens, cut into sequences.

    Attributes:
        tokens: (num_tokens,) of an unsigned type, in memory, a memory map, or several of them.
        seq_len: tokens of a sequence.
        vocab_size: every token is below it.
        tokens_per_byte: tokens per byte of UTF-8; bits per byte = loss in nats / ln 2 * tokens_per_byte. 0 if the bytes
            are not known.
        packed_digest: hash of a token file, computed while it was written: reading GBs again would take minutes.
        file: the token file, which compares its tokens with checksums before they are read for the first time.
    """

    tokens: np.ndarray | token_files.Tokens
    seq_len: int
    vocab_size: int
    tokens_per_byte: float
    packed_digest: str = ""
    file: packed.Packed | None = None

    def __len__(self) -> int:
        """Sequences in the split; the remainder at its end is not read."""
        return (len(self.tokens) - 1) // self.seq_len

    @property
    def sample_units(self) -> dict[str, int]:
        """Units in a sample, for rates."""
        return {"tokens": self.seq_len}

    def digest(self) -> str:
        """Hash of the tokens and of how they are cut: ranks compare it before they train together."""
        tokens = self.packed_digest or hashlib.sha256(np.asarray(self.tokens).data).hexdigest()
        about = (tokens, self.seq_len, self.vocab_size, self.tokens_per_byte)
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics of an evaluation to show: the loss in nats per token, and bits per byte of text, if that is known."""
        if not self.tokens_per_byte:
            return means
        return means | {"bits_per_byte": means["loss"] / math.log(2) * self.tokens_per_byte}

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (b, seq_len) int64 of the sequences at `indices`; a token's target is the next token.

        Raises:
            UserError: the token file has changed since it was written.
        """
        if self.file:
            self.file.check(indices * self.seq_len, self.seq_len + 1)
        rows = self.tokens[indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)]
        if rows.size and rows.max() >= self.vocab_size:  # on a GPU, the embedding would end with an assertion
            raise UserError(
                f"a token of --data is {rows.max()}, and the vocabulary has only {self.vocab_size} tokens: give the "
                "--tokenizer that packed them, or none"
            )
        # Converted separately, so that the two do not share memory.
        return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def load(name: str, seq_len: int, tokenizer: str = "", columns: str = "") -> tuple[Text, Text]:
    """Read a training and a validation split.

    Args:
        name: "stdlib" (built in), a folder of packed tokens (see `token_files`), or a folder of .txt, .jsonl or
            .parquet files or a hub id for `datasets.load_dataset`. A row of a .txt file is a line, any other row a
            document, which ends with the tokenizer's token for that.
        seq_len: tokens of a sequence.
        tokenizer: path of a Hugging Face tokenizer.json; "" makes each byte of UTF-8 a token.
        columns: names of the columns to read, with commas between; "" for the column of strings with the most text.

    Raises:
        UserError: there is no text, too little text, or the tokenizer or the columns cannot be used.
    """
    is_built_in = splits.parse(name).without_split == "stdlib"
    for flag, value in (("--tokenizer", tokenizer), ("--text-columns", columns)):
        if is_built_in and value:
            raise UserError(f"{flag} {value} cannot be used with --data stdlib, which is read as bytes: drop {flag}")
    train, validation = _load_stdlib(name, seq_len) if is_built_in else _load(name, seq_len, tokenizer, columns)
    for split, found in (("training", len(train.tokens)), ("validation", len(validation.tokens))):
        if found <= seq_len:
            raise UserError(
                f"--data {name}: the {split} split has {found} tokens, and --seq-len {seq_len} needs at least "
                f"{seq_len + 1}"
            )
    return train, validation


def _load_stdlib(name: str, seq_len: int) -> tuple[Text, Text]:
    """Hold out a tenth of the documents, chosen by name; only an excerpt of each is read, for a quick evaluation."""
    parts: dict[str, list[bytes]] = {"train": [], "validation": []}
    for path, text in stdlib_documents().items():
        if seed.uniform(seed.HOLD_OUT, zlib.crc32(path.encode())) < splits.HOLD_OUT:
            middle = max(0, len(text) - EXCERPT) // 2  # not the start: files begin alike, with licences and imports
            parts["validation"].append(text[middle : middle + EXCERPT])
        else:
            parts["train"].append(text)
    train, validation = (
        Text(np.frombuffer(b"\n".join(part or []), np.uint8).astype(np.uint16), seq_len, 256, 1.0)
        for part in splits.choose(name, parts)
    )
    return train, validation


def stdlib_documents() -> dict[str, bytes]:
    """Python's own sources and its manual, sorted by name; the same in every installation of one Python version."""
    root = Path(os.__file__).parent
    documents = {}
    for name in sys.stdlib_module_names - SKIPPED:  # not installed everywhere, or generated by the build
        for path in (root / f"{name}.py", *(root / name).rglob("*.py")):
            key = path.relative_to(root)
            if path.is_file() and not {"test", "tests"} & {*key.parts}:
                documents[key.as_posix()] = path.read_bytes()
    # One document, because its topics repeat each other; taken from the module, since the source is escaped.
    documents["pydoc_data/topics.py"] = "\n".join(topics.topics[key] for key in sorted(topics.topics)).encode()
    return dict(sorted(documents.items()))


def _load(name: str, seq_len: int, tokenizer: str, columns: str) -> tuple[Text, Text]:
    vocabulary = documents.load_tokenizer(tokenizer) if tokenizer else None
    found = token_files.load(splits.folder_of(name))
    if not found:
        return _load_rows(name, seq_len, vocabulary, columns)
    if columns:
        raise UserError(
            f"--text-columns {columns}: --data {name} has packed tokens, and no columns: drop --text-columns"
        )
    layout, files = found
    train, validation = splits.choose(name, files)
    held_out = ""
    if validation is None:
        held_out = "; no validation split, so the last tenth of the last file was held out"
        train, validation = train.cut(1 - splits.HOLD_OUT)
    parts = [train, validation]
    vocab_size = vocabulary.size if vocabulary else token_files.vocab_size(parts)
    # Not all tokens are looked at, but those of another tokenizer are found now rather than hours later.
    sampled = max(part.sampled for part in parts)
    if vocabulary and sampled >= vocab_size:
        raise UserError(
            f"--data {name} has token {sampled}, and --tokenizer {tokenizer} has only {vocab_size} tokens: give the "
            "tokenizer that packed them, or none"
        )
    _say(name, parts, "tokens", vocab_size, f"; {layout}'s files{held_out}")
    first, second = (Text(part, seq_len, vocab_size, 0.0, part.digest) for part in parts)
    return first, second


def _load_rows(name: str, seq_len: int, vocabulary: documents.Vocabulary | None, columns: str) -> tuple[Text, Text]:
    train, validation = splits.load(name)
    encoder = documents.Encoder(name, train, vocabulary, columns)
    held_out = ""
    if validation is None:
        # Of these columns alone: `datasets` would decode an image beside them, by any of Pillow's formats.
        only = (
            parsing.cells(train.select_columns(encoder.columns), 0) if len(train) == len(encoder.columns) == 1 else {}
        )
        content = only.get(encoder.columns[0])
        if isinstance(content, str):
            train, validation = _cut(encoder.columns[0], content)
        else:  # a chat and a row of several texts are not cut
            train, validation = splits.hold_out(name, train)
        held_out = "; no validation split, so a tenth was held out"
    for column in encoder.columns:
        if column not in validation.features:
            raise UserError(f"--data {name}: the validation split has no column {column!r}, which is read for training")
    loaded = []
    for path in [packed.pack(rows.select_columns(encoder.columns), encoder) for rows in (train, validation)]:
        _, num_bytes, num_tokens, packed_digest, _ = path.name.split(".")
        file = packed.Packed(path, int(num_tokens), encoder.dtype)
        rate = int(num_tokens) / max(1, int(num_bytes))
        loaded.append(Text(file.tokens, seq_len, encoder.vocab_size, rate, packed_digest, file))
    others = [repr(key) for key in train.features if key not in encoder.columns]
    columns = f"column{'s' * (len(encoder.columns) > 1)} {ranks.listed([repr(key) for key in encoder.columns])}"
    columns += f" (not {ranks.listed(others)})" if others else ""
    end = f"; each row ends with {encoder.end}" if encoder.end else ""
    if vocabulary and not encoder.end:
        lines = "; rows are lines, without an end"
        other = "; no token ends a document: name one as eos_token in a tokenizer_config.json beside --tokenizer"
        end = lines if train.info.builder_name == "text" else other
    kind = "tokens" if vocabulary else "bytes"
    _say(name, [part.tokens for part in loaded], kind, encoder.vocab_size, f"; {columns}{end}{held_out}")
    return loaded[0], loaded[1]


def _say(name: str, parts: Sequence[Any], kind: str, vocab_size: int, more: str) -> None:
    train, validation = (f"{len(part):,}" for part in parts)
    ranks.print0(
        f"data     {name}: {train} training and {validation} validation {kind}, vocabulary {vocab_size:,}{more}"
    )


def _cut(column: str, content: str) -> tuple["Dataset", "Dataset"]:
    """Hold out the last tenth of a set's only text, such as a text file without line ends."""
    import datasets

    middle = round((1 - splits.HOLD_OUT) * len(content))
    first, second = (datasets.Dataset.from_dict({column: [part]}) for part in (content[:middle], content[middle:]))
    return first, second
