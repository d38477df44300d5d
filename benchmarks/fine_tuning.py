"""Fine-tuning as docs/fine_tuning.md shows it: `uv run python -m benchmarks.fine_tuning` fills that page."""

import tempfile
import time
from pathlib import Path

from tests.harness import pages, walkthrough


def main() -> None:
    """Run all of it, and write what it prints."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        told = walkthrough.walk(Path(folder))
    start = next(text for command, text in told.items() if "--loss-on" in command)
    lines = [line for line in start.splitlines() if line.startswith("data ")]
    pages.write(
        walkthrough.PAGE,
        start="\n".join(["```", *lines, "```"]),
        answers="\n".join(["```", *(f"{name}:\n{told[name].strip()}" for name in ("before", "after")), "```"]),
        measured=pages.measured("uv run python -m benchmarks.fine_tuning", "two processes", "gloo", began=began),
    )


if __name__ == "__main__":
    main()
