"""Pages of docs/: people write the prose, a command writes the figures between two comments.

    <!-- begin held -->
    | recipe | MB |
    <!-- end held -->

So a sentence can change without a measurement, and nobody types a figure.
"""

import datetime
import os
import platform
import re
import statistics
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tools.about import cpu_name

# On lines of their own: after a comment, Markdown takes the rest of the line for HTML.
MARK = re.compile(r"^<!-- begin (\w+) -->\n(.*?)^<!-- end \1 -->$", re.DOTALL | re.MULTILINE)


def parts(text: str) -> dict[str, str]:
    """What a page has between its marks, by name."""
    return {name: content.strip("\n") for name, content in MARK.findall(text)}


def fill(text: str, **contents: str) -> str:
    """The page with new contents between these marks; everything else stays.

    Raises:
        KeyError: a mark is missing, or stands twice: what was measured would be lost.
    """
    marks = [name for name, _ in MARK.findall(text)]
    for name in contents:
        if marks.count(name) != 1:
            raise KeyError(f"the page has {marks.count(name)} parts <!-- begin {name} -->, it needs one: {marks}")

    def new(mark: re.Match[str]) -> str:
        name = mark[1]
        if name not in contents:
            return mark[0]
        # A table needs an empty line before it, or it is part of the comment.
        return f"<!-- begin {name} -->\n\n{contents[name].strip()}\n\n<!-- end {name} -->"

    return MARK.sub(new, text)


def write(page: Path, **contents: str) -> None:
    """Fill the page that a command measures for."""
    page.write_text(fill(page.read_text(), **contents))


def spread(values: Sequence[float], form: str) -> str:
    """Median and range, in this form, such as ".2f"."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def folded(title: str, content: str) -> str:
    """Hide what few people need behind its title."""
    return f"<details>\n<summary>{title}</summary>\n\n{content.strip()}\n\n</details>"


def measured(command: str, *conditions: str, began: float | None = None) -> str:
    """What stands beside every figure: the command, the date, the machine, the versions, and the time it took.

    Args:
        command: what makes the figures again.
        conditions: what else they depend on, such as the backend.
        began: `time.monotonic()` at the start, where the time is worth a word.
    """
    facts = [str(datetime.date.today()), cpu_name(), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    text = ", ".join([*facts, f"torch {torch.__version__}", *conditions])
    text += "" if began is None else f"; {(time.monotonic() - began) / 60:.0f} minutes"
    return f"`{command}`,\n{textwrap.fill(text, 119, break_on_hyphens=False, break_long_words=False)}."
