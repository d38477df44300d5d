"""Fixtures of several proofs of recipes."""

from pathlib import Path

import pytest

from tests.conftest import write_parquet, write_text
from tests.harness.once import Once

SAMPLES = 109  # of an epoch, whose last step of 24 has 13


@pytest.fixture(scope="session")
def epoch_text(once: Once) -> Path:
    """An epoch of tests/recipes/test_equivalence.py: SAMPLES sequences of 16 bytes, and 30 to validate on."""
    return once.folder(lambda folder: write_text(folder, SAMPLES, 30), "epoch of text")


@pytest.fixture(scope="session")
def epochs(once: Once, epoch_text: Path) -> dict[str, Path]:
    """The same for each workload."""
    images = once.folder(lambda folder: write_parquet(folder, SAMPLES, 30), "epoch of images")
    return {"resnet": images, "gpt": epoch_text}
