"""Text as one row of tokens: that of Python's standard library, or any set that `datasets.load_dataset` reads."""

import hashlib
import math
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING

import filelock
import numpy as np
import torch

from common import UserError, private_api, ranks, seed
from common.workloads import packed, splits

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer

EXCERPT = 2048  # bytes of each held-out document that the built-in validation split reads
# Packages of the standard library that are not read: tables, and packages that some distributions lack.
SKIPPED = {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"}
BATCH_ROWS = 256  # rows that are tokenized at a time
WAIT_S = 3600.0  # for another process that tokenizes the same set; a large one takes a while


@dataclass(frozen=True)
class Text:
    """One split: one row of tokens, cut into sequences.

    Attributes:
        tokens: (num_tokens,) uint16 or uint32, in memory or a memory map.
        seq_len: tokens of a sequence.
        vocab_size: every token is below it.
        tokens_per_byte: tokens per byte of UTF-8; bits per byte = loss in nats / ln 2 * tokens_per_byte.
        packed_digest: hash of a token file, computed while it was written: reading GBs again would take minutes.
        file: the token file, which compares its tokens with checksums before they are read for the first time.
    """

    tokens: np.ndarray
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
        tokens = self.packed_digest or hashlib.sha256(self.tokens.data).hexdigest()
        about = (tokens, self.seq_len, self.vocab_size, self.tokens_per_byte)
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics of an evaluation to show: the loss in nats per token, and bits per byte of text."""
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
            raise UserError(f"a token is {rows.max()}, and the vocabulary has only {self.vocab_size} tokens")
        # Converted separately, so that the two do not share memory.
        return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def load(name: str, seq_len: int, tokenizer: str = "") -> tuple[Text, Text]:
    """Read a training and a validation split.

    Args:
        name: "stdlib" (built in), or a folder of .txt or .parquet files or a hub id for `datasets.load_dataset`;
            the column of texts is found by type. A row of a .txt file is a line.
        seq_len: tokens of a sequence.
        tokenizer: path of a Hugging Face tokenizer.json; "" makes each byte of UTF-8 a token.

    Raises:
        UserError: there is no text, too little text, or the tokenizer cannot be used.
    """
    if name == "stdlib" and tokenizer:
        raise UserError(
            f"--tokenizer {tokenizer} cannot be used with --data stdlib, which is read as bytes: drop --tokenizer"
        )
    train, validation = _load_stdlib(seq_len) if name == "stdlib" else _load_rows(name, seq_len, tokenizer)
    for split, found in (("training", len(train.tokens)), ("validation", len(validation.tokens))):
        if found <= seq_len:
            raise UserError(
                f"--data {name}: the {split} split has {found} tokens, and --seq-len {seq_len} needs at least "
                f"{seq_len + 1}"
            )
    return train, validation


def _load_stdlib(seq_len: int) -> tuple[Text, Text]:
    """Hold out a tenth of the documents, chosen by name; only an excerpt of each is read, for a quick evaluation."""
    train = []
    validation = []
    for name, text in stdlib_documents().items():
        if seed.uniform(seed.HOLD_OUT, zlib.crc32(name.encode())) < splits.HOLD_OUT:
            middle = max(0, len(text) - EXCERPT) // 2  # not the start: files begin alike, with licences and imports
            validation.append(text[middle : middle + EXCERPT])
        else:
            train.append(text)
    first, second = (Text(_encode([b"\n".join(part)], np.uint16), seq_len, 256, 1.0) for part in (train, validation))
    return first, second


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


def _load_tokenizer(path: str) -> tuple["Tokenizer", int, str]:
    try:
        from tokenizers import Tokenizer

        content = Path(path).expanduser().read_bytes()
        model = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises no more specific type
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"--tokenizer {path} cannot be read ({reason}): it must be a tokenizer.json, and needs pip install "
            "tokenizers"
        ) from error
    vocab_size = max(model.get_vocab().values(), default=-1) + 1  # ids may have gaps
    model.no_truncation()  # the file's own settings are meant for single sentences
    model.no_padding()
    # Otherwise each forked worker warns of threads, which are idle by then.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    return model, vocab_size, hashlib.sha256(content).hexdigest()


def _encode(texts: list[bytes], dtype: type[np.unsignedinteger], model: "Tokenizer | None" = None) -> np.ndarray:
    if model is None:
        return np.frombuffer(b"".join(texts), np.uint8).astype(dtype)
    found = model.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
    return np.fromiter((token for one in found for token in one.ids), dtype)


def _load_rows(name: str, seq_len: int, tokenizer: str) -> tuple[Text, Text]:
    model, vocab_size, digest = _load_tokenizer(tokenizer) if tokenizer else (None, 256, "")
    train, validation = splits.load(name)
    kinds = {key: getattr(kind, "dtype", type(kind).__name__) for key, kind in train.features.items()}
    columns = [key for key, kind in kinds.items() if kind in ("string", "large_string")]
    if not columns:
        raise UserError(f"--data {name} has no column of strings: {kinds}. In a folder, use .txt or .parquet files")
    some = train.select_columns(columns)[:: max(1, len(train) // 16)]  # rows from all over the set
    # Of several columns, the one with the most text.
    column = max(columns, key=lambda key: sum(len(text or "") for text in some[key]))
    held_out = ""
    if validation is None:
        train, validation = _cut(train, column) if len(train) == 1 else splits.hold_out(name, train)
        held_out = "; no validation split, so a tenth was held out"
    loaded = []
    dtype = packed.token_type(vocab_size)
    for path in [_pack(rows.select_columns(column), dtype, model, digest) for rows in (train, validation)]:
        _, num_bytes, num_tokens, packed_digest, _ = path.name.split(".")
        file = packed.Packed(path, int(num_tokens), dtype)
        rate = int(num_tokens) / max(1, int(num_bytes))
        loaded.append(Text(file.tokens, seq_len, vocab_size, rate, packed_digest, file))
    sizes = [f"{len(part.tokens):,}" for part in loaded]
    others = f" (not {', '.join(repr(key) for key in columns if key != column)})" if len(columns) > 1 else ""
    ranks.print0(
        f"data     {name}: {sizes[0]} training and {sizes[1]} validation {'tokens' if model else 'bytes'}, vocabulary "
        f"{vocab_size:,}; column {column!r}{others}{held_out}"
    )
    return loaded[0], loaded[1]


def _cut(rows: "Dataset", column: str) -> tuple["Dataset", "Dataset"]:
    """Hold out the last tenth of a set's only row, such as a text file without line ends."""
    import datasets

    content = rows[0][column] or ""
    middle = round((1 - splits.HOLD_OUT) * len(content))
    first, second = (datasets.Dataset.from_dict({column: [part]}) for part in (content[:middle], content[middle:]))
    return first, second


def _pack(rows: "Dataset", dtype: type[np.unsignedinteger], model: "Tokenizer | None", digest: str) -> Path:
    """Token file of a column; the first process that needs it writes it, and the others wait."""
    import datasets

    about = repr((private_api.fingerprint(rows), rows.column_names, digest))
    stem = datasets.config.HF_DATASETS_CACHE / "packed" / hashlib.sha256(about.encode()).hexdigest()[:16]
    stem.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(stem.with_suffix(".lock"), timeout=WAIT_S)  # the system releases it if its holder dies
    try:
        with lock:
            # Older versions wrote files without checksums, and left one number out of their names.
            for path in stem.parent.glob(f"{stem.name}.*.*.*.tokens"):
                try:
                    packed.Packed(path, int(path.name.split(".")[2]), dtype)
                    return path
                except (UserError, OSError) as error:
                    sys.stderr.write(f"note: {error}\n")
            return _write(stem, rows, dtype, model)
    except filelock.Timeout as error:
        raise UserError(
            f"--data: another process has held {error.lock_file} for {WAIT_S:.0f} s while tokenizing: stop it, or wait"
        ) from error


def _write(stem: Path, rows: "Dataset", dtype: type[np.unsignedinteger], model: "Tokenizer | None") -> Path:
    """Write the tokens under a temporary name, then rename: the final name has the numbers of both, and the hash."""
    # If the lock does not work across machines, each writes the same file, and the last rename wins.
    partial = stem.with_suffix(f".{os.uname().nodename}.partial")
    sha256 = hashlib.sha256()
    num_bytes = 0
    num_tokens = 0
    with partial.open("wb") as file:
        for batch in rows.iter(BATCH_ROWS):
            # Each row as a line, tokenized separately, so that tokens do not depend on how rows are grouped.
            texts = [f"{text}\n".encode() for text in batch[rows.column_names[0]] if text is not None]
            tokens = _encode(texts, dtype, model)
            file.write(tokens.data)
            sha256.update(tokens.data)
            num_bytes += sum(map(len, texts))
            num_tokens += len(tokens)
    packed.seal(partial)
    return partial.replace(stem.with_suffix(f".{num_bytes}.{num_tokens}.{sha256.hexdigest()[:16]}.tokens"))
