"""Parse a data set in a process of its own: some files make a parser crash, or keep it busy for ever."""

import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import UserError

if TYPE_CHECKING:
    from datasets import Dataset

LEAST_S = 600  # of processor time, for any folder
SLOWEST = 10**5  # bytes that a parser reads in a second, at the least: a fraction of what the slowest was seen to read


def prepare(builder: Any, folder: Path | None, reason: Callable[[BaseException], str]) -> str:
    """Let a builder of `datasets` fill its cache.

    Args:
        builder: of the set.
        folder: where its files are. None for a set of the hub, of which the size is not known: it has no limit.
        reason: the sentence for what `datasets` has raised.

    Returns:
        Why the set cannot be read; "" if its cache is filled.
    """
    import datasets

    limit = limit_s(folder) if folder else 0
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe(duplex=False)
    parent = os.getpid()

    def parse() -> None:
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would print names and contents as they are
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
        if limit:  # which the kernel keeps, whatever the parser does
            hardest = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (limit if hardest < 0 else min(limit, hardest), hardest))
        try:
            builder.download_and_prepare()
        except BaseException as error:
            theirs.send(reason(error))
        else:
            theirs.send("")

    process = forks.Process(target=parse, daemon=True)
    process.start()
    theirs.close()
    try:
        found = str(ours.recv())
    except EOFError:
        process.join()
        number = -(process.exitcode or 0)
        if number == signal.SIGXCPU:
            return f"the program that parses its files had not ended after {limit:,} s: one is made for that"
        how = signal.Signals(number).name if number > 0 else f"exit code {process.exitcode}"
        return f"the program that parses its files has crashed with {how}: one is damaged, or made for that"
    except BaseException:  # a signal has ended the start
        process.kill()
        raise
    process.join()
    return found


def _follow(parent: int) -> None:
    """End this process once its parent has gone: nobody waits for what it parses."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def cells(rows: "Dataset", which: slice | list[int] | int) -> Any:
    """`rows[which]`: the cells by column. A parser does not look at the strings of parquet and Arrow files; this does.

    Raises:
        UserError: one of them is not UTF-8.
    """
    try:
        return rows[which]
    except UnicodeDecodeError as error:
        of = ", ".join(map(repr, rows.column_names))
        raise UserError(
            f"--data: a text of the column {of} is not UTF-8 ({error.reason} at its byte {error.start}): write the "
            "table again with texts in UTF-8"
        ) from error


def column(rows: "Dataset", name: str) -> list[Any]:
    """All cells of one column, as `cells` reads them."""
    return cells(rows.select_columns(name), slice(None))[name]


def limit_s(folder: Path) -> int:
    """Processor time in which a folder is parsed, if not all of its bytes are made to keep a parser busy."""
    found = (os.path.join(place, file) for place, _, files in os.walk(folder) for file in files)
    return LEAST_S + sum(os.path.getsize(file) for file in found if os.path.isfile(file)) // SLOWEST
