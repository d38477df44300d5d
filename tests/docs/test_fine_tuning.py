"""What docs/fine_tuning.md shows runs as it stands there."""

from pathlib import Path

import pytest

from tests.harness import walkthrough


@pytest.mark.rest
def test_walk(tmp_path: Path) -> None:
    """With few steps, so the answers are no words yet."""
    told = walkthrough.walk(tmp_path, "--max-steps", "2")
    assert len(told) == 7, [*told]
    started = next(text for command, text in told.items() if "--loss-on" in command)
    assert "»" in started
    assert "init     39 of 39 tensors from runs/pages" in started
    assert told["before"].count("Spell ") == told["after"].count("Spell ") == 3


def test_page_shows_what_was_learned() -> None:
    before, after = walkthrough.PAGE.read_text().split("<!-- begin answers -->")[1].split("after:\n")
    assert "'c-h-e-s-s'" in after.split("<!-- end answers -->")[0]
    assert "c-h-e-s-s" not in before
