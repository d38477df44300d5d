"""Which columns of a table are read as text."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common import UserError
from common.workloads import parsing

if TYPE_CHECKING:
    from datasets import Dataset


def choose(name: str, rows: "Dataset", wanted: str, loss_on: str) -> list[str]:
    """The columns to read: those that --text-columns names, else the one of strings with the most text.

    For answers alone, it is the column of chats, if there is one.
    """
    kinds = {key: getattr(kind, "dtype", type(kind).__name__) for key, kind in rows.features.items()}
    strings = [key for key, kind in kinds.items() if kind in ("string", "large_string")]
    chats = [key for key in rows.features if is_chat(rows, key)]
    if loss_on == "answers":
        if not wanted and len(chats) == 1:
            return chats
        if not {column.strip() for column in wanted.split(",")} & {*chats}:
            found = f"--text-columns {wanted} of --data {name} are" if wanted else f"--data {name} has"
            has = f"name one of {', '.join(map(repr, chats))}" if chats else "without chats, drop --loss-on answers"
            what = '{"role": ..., "content": ...}'
            raise UserError(f"--loss-on answers: {found} no column of chats, which are lists of {what}: {has}")
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
    # `datasets` adds columns such as __url__ to those of a WebDataset: no text, unless somebody names one.
    plain = [key for key in strings if not key.startswith("__")]
    if not plain:
        chat = f"; its chats are read with --text-columns {chats[0]}" if chats else ""
        own = {key: kind for key, kind in kinds.items() if not key.startswith("__")}
        raise UserError(
            f"--data {name} has no column of strings: {own}{chat}. In a folder, use .txt, .jsonl or .parquet files"
        )
    some = parsing.cells(
        rows.select_columns(plain), slice(None, None, max(1, len(rows) // 16))
    )  # rows from all over the set
    return [max(plain, key=lambda key: sum(len(text or "") for text in some[key]))]


def is_chat(rows: "Dataset", column: str) -> bool:
    """Whether a column holds lists of messages, {"role": ..., "content": ...}, and perhaps more."""
    kind: Any = rows.features[column]
    message = getattr(kind, "feature", kind[0] if isinstance(kind, list) and kind else None)
    if "Json" in (type(kind).__name__, type(message).__name__) and len(rows):  # messages with different keys
        first = parsing.cells(rows.select_columns(column), 0)[column]
        message = first[0] if isinstance(first, list) and first else None
    return isinstance(message, Mapping) and {"role", "content"} <= message.keys()
