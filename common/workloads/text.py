"""Text as one row of tokens: that of Python's standard library, or any set that `datasets.load_dataset` reads."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from common import UserError, ranks
from common.train import data
from common.workloads import document_rows, documents, mixed, packed, parsing, splits, stdlib, token_files

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class TextArgs:
    """Flags of how a table becomes tokens."""

    # text of a table
    tokenizer: str = ""  # path of a Hugging Face tokenizer.json; "" makes each byte a token
    text_columns: str = ""  # columns to read, such as "title,body"; "" for the one with the most text
    attend: Literal["auto", "documents", "row"] = "auto"  # what a token reads before it; auto: documents of tables
    loss_on: Literal["all", "answers"] = "all"  # tokens that count; answers: what the assistant of a chat wrote


@dataclass(frozen=True)
class Text:
    """One split: one row of tokens, cut into sequences; or rows of whole documents, which are kept apart.

    Attributes:
        tokens: (num_tokens,) of an unsigned type, in memory, a memory map, or several of them.
        seq_len: tokens of a sequence.
        vocab_size: every token is below it.
        tokens_per_byte: tokens per byte of UTF-8; bits per byte = loss in nats / ln 2 * tokens_per_byte. 0 if the bytes
            are not known.
        packed_digest: hash of a token file, computed while it was written: reading GBs again would take minutes.
        file: the token file, which compares its tokens with checksums before they are read for the first time.
        rows: how its documents lie in rows; None where the row of tokens is cut.
    """

    tokens: np.ndarray | token_files.Tokens
    seq_len: int
    vocab_size: int
    tokens_per_byte: float
    packed_digest: str = ""
    file: packed.Packed | None = None
    rows: document_rows.DocumentRows | None = None

    def __len__(self) -> int:
        """Sequences in the split; the remainder at the end of a row that is cut is not read."""
        return len(self.rows) if self.rows is not None else (len(self.tokens) - 1) // self.seq_len

    @property
    def sample_units(self) -> dict[str, int]:
        """Units in a sample, for rates."""
        return {"tokens": self.seq_len}

    @property
    def num_targets(self) -> int:
        """Tokens that count in an epoch."""
        return self.rows.num_targets if self.rows is not None else len(self) * self.seq_len

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

        Where documents are kept apart, inputs are (b, 2, seq_len): tokens, and their positions in their documents.

        Raises:
            UserError: the token file has changed since it was written.
        """
        if self.rows is not None:
            inputs, targets = self.rows.read(indices)
            return torch.from_numpy(inputs), torch.from_numpy(targets)
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


def weight(inputs: torch.Tensor, targets: torch.Tensor, mine: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """What the mean loss of a step is over, if that is not its sequences: the share of each that counts, summed.

    Args:
        inputs: what `Text.read` returns. With documents that are kept apart, a row has padding, and perhaps prompts.
        targets: (b, T).
        mine: (b,) bool, the sequences to sum over; None for all.

    Returns:
        "weight", (); nothing where all tokens count.
    """
    if inputs.ndim == 2:
        return {}
    shares = (targets != document_rows.IGNORED).double().mean(1)
    return {"weight": (shares if mine is None else torch.where(mine, shares, 0)).sum()}


def sums(batch: data.Batch, losses: torch.Tensor) -> dict[str, torch.Tensor]:
    """What forward returns beside "loss" and "count": a weight, and the sums of each source of a mixture.

    Args:
        batch: what was read.
        losses: (b,), the mean over each sequence; (0,) if another rank has them.
    """
    targets = batch.targets[: len(losses)]
    found = weight(batch.inputs, targets)
    for name, whole in (batch.sources or {}).items():
        mine = whole[: len(losses)]
        found[f"loss/{name}"] = torch.where(mine, losses.detach(), 0).sum()
        found[f"count/{name}"] = mine.sum()
        found |= {f"{key}/{name}": one for key, one in weight(batch.inputs, targets, mine).items()}
    return found


def joined(batches: Sequence[data.Batch]) -> data.Batch:
    """Several micro-batches as one."""
    inputs = torch.cat([batch.inputs for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    names = batches[0].sources or {}
    sources = {name: torch.cat([batch.sources[name] for batch in batches]) for name in names}
    return batches[-1]._replace(inputs=inputs, targets=targets, sources=sources)


def load(
    name: str, seq_len: int, tokenizer: str = "", columns: str = "", attend: str = "row", loss_on: str = "all"
) -> tuple[Any, Any]:
    """Read a training and a validation split: of a set a `Text` each, of a mixture a `mixed.Mixed` each.

    Args:
        name: "stdlib" (built in), a folder of packed tokens (see `token_files`), or a folder of .txt, .jsonl or
            .parquet files or a hub id for `datasets.load_dataset`. A row of a .txt file is a line, any other row a
            document, which ends with the tokenizer's token for that. Or several of these, with weights; see `mixed`.
        seq_len: tokens of a sequence.
        tokenizer: path of a Hugging Face tokenizer.json; "" makes each byte of UTF-8 a token.
        columns: names of the columns to read, with commas between; "" for the column of strings with the most text.
        attend: "documents" keeps rows of a table apart, and cuts none that fits into `seq_len`; "row" cuts one row of
            all tokens; "auto" is "documents" for tables whose rows are documents.
        loss_on: "all" tokens count, or only "answers" of chats.

    Raises:
        UserError: there is no text, too little text, or the tokenizer or the columns cannot be used.
    """
    how = (seq_len, tokenizer, columns, attend, loss_on)
    if sources := mixed.parse(name):
        return mixed.mix(sources, [_load(source.place, *how) for source in sources])
    return _load(name, *how)


def _load(name: str, seq_len: int, tokenizer: str, columns: str, attend: str, loss_on: str) -> tuple[Text, Text]:
    """Both splits of one set."""
    is_built_in = splits.parse(name).without_split == "stdlib"
    for flag, value in (("--tokenizer", tokenizer), ("--text-columns", columns)):
        if is_built_in and value:
            raise UserError(f"{flag} {value} cannot be used with --data stdlib, which is read as bytes: drop {flag}")
    found_tokens = None if is_built_in else token_files.load(splits.folder_of(name))
    if is_built_in or found_tokens:
        what = "the built-in text is" if is_built_in else "packed tokens are"
        for flag, value, only in (("--attend", attend, "documents"), ("--loss-on", loss_on, "answers")):
            if value == only:
                raise UserError(f"{flag} {only} needs a table of documents, and {what} one row: drop {flag}")
    if loss_on == "answers" and attend == "row":
        raise UserError("--loss-on answers keeps chats apart: drop --attend row")
    if is_built_in:
        train, validation = (Text(tokens, seq_len, 256, 1.0) for tokens in stdlib.load(name))
    elif found_tokens:
        train, validation = _load_tokens(name, seq_len, tokenizer, columns, found_tokens)
    else:
        train, validation = _load_rows(name, seq_len, tokenizer, columns, attend, loss_on)
    for split, part in (("training", train), ("validation", validation)):
        found = len(part.tokens)
        if part.rows is not None and not len(part):
            what = "an answer" if loss_on == "answers" else "two tokens"
            raise UserError(f"--data {name}: no document of the {split} split has {what}: nothing can be predicted")
        if part.rows is None and found <= seq_len:
            raise UserError(
                f"--data {name}: the {split} split has {found} tokens, and --seq-len {seq_len} needs at least "
                f"{seq_len + 1}"
            )
    return train, validation


def _load_tokens(
    name: str,
    seq_len: int,
    tokenizer: str,
    columns: str,
    found: tuple[str, dict[str, token_files.Tokens]],
) -> tuple[Text, Text]:
    vocabulary = documents.load_tokenizer(tokenizer) if tokenizer else None
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


def _load_rows(name: str, seq_len: int, tokenizer: str, columns: str, attend: str, loss_on: str) -> tuple[Text, Text]:
    vocabulary = documents.load_tokenizer(tokenizer) if tokenizer else None
    train, validation = splits.load(name)
    if attend == "auto":  # a line of a text file is no document
        attend = "row" if train.info.builder_name == "text" and loss_on == "all" else "documents"
    encoder = documents.Encoder(name, train, vocabulary, columns, attend, loss_on)
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
        rows = None
        # Of answers, nobody knows the bytes.
        rate = int(num_tokens) / max(1, int(num_bytes)) if loss_on == "all" else 0.0
        if attend == "documents":
            rows = document_rows.DocumentRows(file.tokens, encoder.vocab_size, seq_len, file.check)
        loaded.append(Text(file.tokens, seq_len, encoder.vocab_size, rate, packed_digest, file, rows))
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
    if rows := loaded[0].rows:
        document_rows.say(rows, seq_len, loss_on)
        if vocabulary and loss_on == "answers" and len(rows):
            document_rows.show_answers(rows, vocabulary.model)
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
