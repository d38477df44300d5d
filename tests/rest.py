"""Which tests `uv run pytest` leaves to `uv run pytest -m rest`, beside those with the mark `rest`: see rest.txt."""

import re
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")


def patterns(text: str = "") -> list[re.Pattern[str]]:
    """The expressions of a text, or of the file: one for each line that is neither empty nor a comment."""
    lines = (line.strip() for line in (text or FILE.read_text()).splitlines())
    return [re.compile(line) for line in lines if line and not line.startswith("#")]


def joined(listed: list[re.Pattern[str]]) -> re.Pattern[str]:
    """One expression, which matches the beginning of a test's name if one of these does."""
    return re.compile("|".join(f"(?:{one.pattern})" for one in listed))


def unmatched(listed: list[re.Pattern[str]], names: list[str]) -> list[str]:
    """The expressions that match no test: they are of tests that have gone, or are wrong."""
    return [one.pattern for one in listed if not any(map(one.match, names))]
