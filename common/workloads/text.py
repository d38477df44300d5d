"""Text as tokens in a row: the standard library's own, or whatever `datasets.load_dataset` reads, packed once."""

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

from common import UserError, manifest, seed
from common.workloads import splits

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer

EXCERPT = 2048  # bytes of each held-out document that the built-in validation split reads
# Of the standard library: tables, and what distributions leave out.
SKIPPED = {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv"}
BATCH_ROWS = 256  # that are packed at a time
WAIT_S = 3600.0  # for a process that packs: with a tokenizer, a large set takes a while


@dataclass(frozen=True)
class Text:
    """One split: tokens in a row, cut into sequences.

    Attributes:
        tokens: (num_tokens,) uint16, in memory or a memory map.
        seq_len: tokens of a sequence.
        vocab_size: tokens are below it.
        tokens_per_byte: of this split in UTF-8, 1.0 for bytes; bits per byte = loss in nats / ln 2 * tokens_per_byte.
        packed_digest: of a file's tokens, taken while they were written: to read GBs again would take minutes.
    """

    tokens: np.ndarray
    seq_len: int
    vocab_size: int
    tokens_per_byte: float
    packed_digest: str = ""

    def __len__(self) -> int:
        """Sequences in the split; what is left over at its end is not read."""
        return (len(self.tokens) - 1) // self.seq_len

    @property
    def sample_units(self) -> dict[str, int]:
        """What a sample counts as, for rates."""
        return {"tokens": self.seq_len}

    def digest(self) -> str:
        """Hash of the tokens and how they are cut: ranks compare it before they train together."""
        tokens = self.packed_digest or hashlib.sha256(self.tokens.data).hexdigest()
        about = (tokens, self.seq_len, self.vocab_size, self.tokens_per_byte)
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """What an evaluation shows: the loss in nats a token, and what a byte of the text costs in bits."""
        return means | {"bits_per_byte": means["loss"] / math.log(2) * self.tokens_per_byte}

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (b, seq_len) int64 of the sequences at `indices`: a token's target is the one after it."""
        rows = self.tokens[indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)]
        # Converted one by one, or the two would share their memory.
        return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def load(name: str, seq_len: int, tokenizer: str = "") -> tuple[Text, Text]:
    """Read a training and a validation split.

    Args:
        name: "stdlib" (built in), or a folder of .txt or .parquet files or a hub id for `datasets.load_dataset`;
            the column of texts is found by its type. A row of a .txt file is a line.
        seq_len: tokens of a sequence.
        tokenizer: path of a Hugging Face tokenizer.json; without one, tokens are the bytes of the text in UTF-8.

    Raises:
        UserError: there is no text or too little, or the tokenizer cannot be used.
    """
    if name == "stdlib" and tokenizer:
        raise UserError(f"--tokenizer {tokenizer}: --data stdlib is read as bytes, leave the tokenizer out")
    train, validation = _load_stdlib(seq_len) if name == "stdlib" else _load_rows(name, seq_len, tokenizer)
    for split, found in (("training", len(train.tokens)), ("validation", len(validation.tokens))):
        if found <= seq_len:
            raise UserError(f"--data {name}: the {split} split has {found} tokens, --seq-len {seq_len} needs more")
    return train, validation


def _load_stdlib(seq_len: int) -> tuple[Text, Text]:
    """A tenth of the documents, chosen by name, is held out; an excerpt of each is enough for a quick evaluation."""
    train = []
    validation = []
    for name, text in stdlib_documents().items():
        if seed.uniform(seed.HOLD_OUT, zlib.crc32(name.encode())) < splits.HOLD_OUT:
            middle = max(0, len(text) - EXCERPT) // 2  # files begin alike, with licences and imports
            validation.append(text[middle : middle + EXCERPT])
        else:
            train.append(text)
    first, second = (Text(_encode([b"\n".join(part)]), seq_len, 256, 1.0) for part in (train, validation))
    return first, second


def stdlib_documents() -> dict[str, bytes]:
    """Python's own sources and the prose of its manual, sorted by name: the same for all of one version of Python."""
    root, documents = Path(os.__file__).parent, {}
    for name in sys.stdlib_module_names - SKIPPED:  # which are neither installed nor generated by the build
        for path in (root / f"{name}.py", *(root / name).rglob("*.py")):
            key = path.relative_to(root)
            if path.is_file() and not {"test", "tests"} & {*key.parts}:
                documents[key.as_posix()] = path.read_bytes()
    # One document, because its topics repeat each other; the source has it escaped.
    documents["pydoc_data/topics.py"] = "\n".join(topics.topics[key] for key in sorted(topics.topics)).encode()
    return dict(sorted(documents.items()))


def _load_tokenizer(path: str) -> tuple["Tokenizer", int, str]:
    try:
        from tokenizers import Tokenizer

        content = Path(path).expanduser().read_bytes()
        model = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises nothing more exact
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"--tokenizer {path}: needs pip install tokenizers, and a tokenizer.json ({why})") from error
    vocab_size = max(model.get_vocab().values(), default=-1) + 1  # ids may have gaps
    if vocab_size > 2**16:
        raise UserError(f"--tokenizer {path} has a vocabulary of {vocab_size}: tokens are kept in 16 bits, {2**16}")
    model.no_truncation()  # what the file asks for is meant for single sentences
    model.no_padding()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # or each forked worker warns of threads, idle by then
    return model, vocab_size, hashlib.sha256(content).hexdigest()


def _encode(texts: list[bytes], model: "Tokenizer | None" = None) -> np.ndarray:
    if model is None:
        return np.frombuffer(b"".join(texts), np.uint8).astype(np.uint16)
    found = model.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
    return np.fromiter((token for one in found for token in one.ids), np.uint16)


def _load_rows(name: str, seq_len: int, tokenizer: str) -> tuple[Text, Text]:
    model, vocab_size, digest = _load_tokenizer(tokenizer) if tokenizer else (None, 256, "")
    train, validation = splits.load(name)
    kinds = {key: getattr(kind, "dtype", type(kind).__name__) for key, kind in train.features.items()}
    columns = [key for key, kind in kinds.items() if kind in ("string", "large_string")]
    if not columns:
        raise UserError(f"--data {name} needs a column of strings, it has: {kinds}. A folder wants .txt or .parquet")
    some = train.select_columns(columns)[:: max(1, len(train) // 16)]  # from everywhere
    column = max(columns, key=lambda key: sum(len(text or "") for text in some[key]))  # of several, the longest
    loaded = []
    for path in [_pack(rows.select_columns(column), model, digest) for rows in (train, validation)]:
        tokens = np.memmap(path, np.uint16, "r") if path.stat().st_size else np.zeros(0, np.uint16)  # no empty map
        _, num_bytes, packed_digest, _ = path.name.split(".")
        loaded.append(Text(tokens, seq_len, vocab_size, len(tokens) / max(1, int(num_bytes)), packed_digest))
    return loaded[0], loaded[1]


def _pack(rows: "Dataset", model: "Tokenizer | None", digest: str) -> Path:
    """The packed file of a column, once one of the processes that ask for it has written it."""
    import datasets

    about = repr((rows._fingerprint, rows.column_names, digest))
    stem = datasets.config.HF_DATASETS_CACHE / "packed" / hashlib.sha256(about.encode()).hexdigest()[:16]
    stem.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(stem.with_suffix(".lock"), timeout=WAIT_S)  # which the system frees if its holder dies
    try:
        with lock:
            return next(stem.parent.glob(f"{stem.name}.*.tokens"), None) or _write(stem, rows, model)
    except filelock.Timeout as error:
        raise UserError(f"--data is being packed for {WAIT_S:.0f} s by who holds {error.lock_file}: end it") from error


def _write(stem: Path, rows: "Dataset", model: "Tokenizer | None") -> Path:
    """Write under a temporary name; the final one says what is known of the tokens, so that one rename tells all."""
    # Where the lock does not reach other machines, each writes the same file, and one stays.
    partial = stem.with_suffix(f".{os.uname().nodename}.partial")
    sha256 = hashlib.sha256()
    num_bytes = 0
    with partial.open("wb") as file:
        for batch in rows.iter(BATCH_ROWS):
            # As in a text file; each by itself, or its tokens would depend on how rows are grouped.
            texts = [f"{text}\n".encode() for text in batch[rows.column_names[0]] if text is not None]
            tokens = _encode(texts, model)
            file.write(tokens.data)
            sha256.update(tokens.data)
            num_bytes += sum(map(len, texts))
    manifest.sync(partial)
    return partial.replace(stem.with_suffix(f".{num_bytes}.{sha256.hexdigest()[:16]}.tokens"))
