"""Rows of a table as tokens: the texts of its columns, or its chats, as bytes or by a tokenizer."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from common import UserError, manifest, places, printable
from common.workloads import packed, parsing

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from tokenizers import Tokenizer

# Names of the token that ends a document, where no tokenizer_config.json beside the tokenizer tells it.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
MOST_TOKENS = 2**31
MOST_SAID = 300  # characters of what a template says
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

    def __init__(self, name: str, rows: "Dataset", vocabulary: Vocabulary | None, columns: str) -> None:
        """Choose the columns of a set.

        Args:
            name: the set, for errors.
            rows: its training split.
            vocabulary: of a tokenizer; None makes each byte of UTF-8 a token.
            columns: names of the columns to read, with commas between; "" for the column of strings with the most text.

        Raises:
            UserError: there is no such column, or none of strings; or chats have no template.
        """
        self._model = vocabulary.model if vocabulary else None
        self._render: Callable[[Any], str] = str
        self.vocab_size = vocabulary.size if vocabulary else 256
        self.end = ""
        self.columns = _choose(name, rows, columns)
        about = [*self.columns]
        if vocabulary:
            if rows.info.builder_name != "text":  # whose rows are lines, not documents
                self.end = end_token(vocabulary)
            about += [vocabulary.digest, self.end]
        if chats := [column for column in self.columns if _is_chat(rows.features[column])]:
            self._render = _chat_template(name, chats[0], vocabulary)
            facts = vocabulary.facts if vocabulary else {}
            about += [facts["chat_template"], repr(_special(facts))]
        self.dtype = packed.token_type(self.vocab_size)
        self.digest = hashlib.sha256(repr(about).encode()).hexdigest()

    def encode(self, batch: Mapping[str, Sequence[Any]]) -> tuple[np.ndarray, int]:
        """Tokens of some rows, one after the other, (n,), and the bytes of their texts."""
        rows = zip(*(batch[column] for column in self.columns), strict=True)
        ending = "" if self.end else BETWEEN
        texts = [text + ending for text in map(self._text, rows) if text is not None]
        encoded = [text.encode() for text in texts]
        num_bytes = sum(map(len, encoded))
        if self._model is None:
            return np.frombuffer(b"".join(encoded), np.uint8), num_bytes
        end = [self._model.token_to_id(self.end)] if self.end else []
        # Each row separately, so that tokens do not depend on how rows are grouped.
        try:
            with _panics():
                found = self._model.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            raise UserError(f"--tokenizer fails on a text of --data: {error}") from error
        tokens = (token for one in found for token in (one.ids if one.ids[-1:] == end else one.ids + end))
        return np.fromiter(tokens, self.dtype), num_bytes

    def _text(self, row: Sequence[Any]) -> str | None:
        """The text of a row; None where all of it is missing."""
        parts = [one if isinstance(one, str) else self._render(one) for one in row if one is not None]
        return BETWEEN.join(parts) if parts else None


def _choose(name: str, rows: "Dataset", wanted: str) -> list[str]:
    """The columns to read: those that --text-columns names, else the one of strings with the most text."""
    kinds = {key: getattr(kind, "dtype", type(kind).__name__) for key, kind in rows.features.items()}
    strings = [key for key, kind in kinds.items() if kind in ("string", "large_string")]
    chats = [key for key, kind in rows.features.items() if _is_chat(kind)]
    if wanted:
        columns = [column.strip() for column in wanted.split(",")]
        if wrong := [column for column in columns if column not in strings + chats]:
            raise UserError(
                f"--text-columns {wanted}: {wrong[0]!r} is no column of strings or chats of --data {name}, which has "
                f"{', '.join(map(repr, strings + chats)) or 'none'}"
            )
        if twice := [column for column in columns if columns.count(column) > 1]:
            raise UserError(f"--text-columns {wanted} has {twice[0]!r} twice: name each column once")
        return columns
    if not strings:
        chat = f"; its chats are read with --text-columns {chats[0]}" if chats else ""
        raise UserError(
            f"--data {name} has no column of strings: {kinds}{chat}. In a folder, use .txt, .jsonl or .parquet files"
        )
    some = parsing.cells(
        rows.select_columns(strings), slice(None, None, max(1, len(rows) // 16))
    )  # rows from all over the set
    return [max(strings, key=lambda key: sum(len(text or "") for text in some[key]))]


def _is_chat(kind: "Features | Any") -> bool:
    """Whether a column holds lists of messages, {"role": ..., "content": ...}."""
    message = getattr(kind, "feature", kind[0] if isinstance(kind, list) and kind else None)
    return isinstance(message, Mapping) and {"role", "content"} <= message.keys()


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


def _chat_template(name: str, column: str, vocabulary: Vocabulary | None) -> Callable[[Any], str]:
    """The function that writes a chat as text, as transformers' apply_chat_template does."""
    source = vocabulary.facts.get("chat_template") if vocabulary else None
    if isinstance(source, list):  # several by name, of which transformers takes this one too
        source = {one["name"]: one["template"] for one in source}.get("default")
    if not vocabulary or not isinstance(source, str):
        raise UserError(
            f"--text-columns {column}: the chats of --data {name} need the template of a tokenizer: give --tokenizer a "
            f"tokenizer.json with a chat_template.jinja, or a tokenizer_config.json, beside it"
            + (f"; {vocabulary.path} has neither" if vocabulary else "")
        )
    import jinja2.sandbox  # which torch brings

    # Sandboxed, because a template is a stranger's code.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        reason = printable(str(message), MOST_SAID)
        raise UserError(f"--text-columns {column}: the chat template refuses a chat of --data {name}: {reason}")

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.globals.update(_special(vocabulary.facts), raise_exception=raise_exception, add_generation_prompt=False)
    environment.filters["tojson"] = tojson  # jinja's own one is for HTML: it escapes <, > and &
    try:
        template = environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise UserError(f"--tokenizer {vocabulary.path}: its chat template cannot be read: {error}") from error

    def render(messages: Any) -> str:
        try:
            return template.render(messages=messages)
        except UserError:
            raise
        except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise UserError(
                f"--text-columns {column}: the chat template fails on a chat of --data {name}: {error}"
            ) from error

    return render


def _special(facts: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a chat template may write."""
    tokens = {key: facts.get(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return {
        key: str(token.get("content", "") if isinstance(token, Mapping) else token or "")
        for key, token in tokens.items()
    }
