"""Pages of docs/: people write the prose, a command writes the figures between two comments.

    <!-- begin held -->
    | recipe | MB |
    <!-- end held -->

So a sentence can be mended without a measurement, and no figure is ever typed.
"""

import re
from pathlib import Path

MARK = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)


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


def folded(title: str, content: str) -> str:
    """Hide what few people need behind its title."""
    return f"<details>\n<summary>{title}</summary>\n\n{content.strip()}\n\n</details>"
