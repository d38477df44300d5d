"""Data that a run would bend: pixels outside of 8 bits, a file of packed tokens that has changed."""

from pathlib import Path

import numpy as np
import pytest
from common.workloads import images

from tests.conftest import write_text
from tests.faults.conftest import of
from tests.harness import runner
from tests.harness.fault_case import BATCH, FaultCase

SAMPLES = 3 * BATCH


def write_digits(folder: Path, scale: float, kind: type, suffix: str) -> Path:
    """The built-in digits in files of another type, their values multiplied."""
    from PIL import Image

    for name, split in zip(("train", "validation"), images.load("digits", 0, False), strict=True):
        assert split.pixels is not None
        for i in range(SAMPLES if name == "train" else BATCH):
            path = folder / name / str(int(split.labels[i])) / f"{i:04d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((split.pixels[i, 0].numpy() * np.array(scale, kind)).astype(kind)).save(path)
    return folder


@pytest.mark.fault("damage: images of 16 bits, which must not be clipped", recipes=of("resnet"))
def test_16_bits(case: FaultCase) -> None:
    """The same pixels in 8 and in 16 bits are the same training."""
    curves = []
    for bits, scale, kind in ((8, 1, np.uint8), (16, 257, np.uint16)):
        folder = write_digits(case.folder / f"{bits}", scale, kind, "png")
        result = case.start("--data", str(folder), name=f"bits{bits}")
        assert result.ok, str(result)
        curves.append(runner.records(case.out / f"bits{bits}", "train/loss"))
    case.record_message(result.outputs[0], "note: images of 16 bits are scaled to 8 bits, 65535 to 255")
    assert curves[0]
    assert curves[0] == curves[1]


@pytest.mark.fault("refused: images of floats, whose range is not known", recipes=of("resnet"))
def test_floats(case: FaultCase) -> None:
    folder = write_digits(case.folder / "floats", 1 / 255, np.float32, "tif")
    result = case.start("--data", str(folder))
    case.check_refused(result, r"error: --data: \S+\.tif has pixels of mode F .* whose range is unknown: save")
    assert not case.steps_done()


@pytest.mark.fault("damage: packed tokens of a text have changed", recipes=of("gpt"))
def test_changed_tokens(case: FaultCase) -> None:
    """They are packed again, and the training is the same."""
    import datasets

    folder = write_text(case.folder / "text", 2 * SAMPLES, BATCH)
    packed = datasets.config.HF_DATASETS_CACHE / "packed"
    before = set(packed.glob("*.tokens"))
    curves = []
    for name in ("first", "again"):
        result = case.start("--data", str(folder), name=name)
        assert result.ok, str(result)
        curves.append(runner.records(case.out / name, "train/loss"))
        for file in set(packed.glob("*.tokens")) - before:
            with file.open("rb+") as content:
                content.seek(100)
                content.write(b"\xff" * 40)
    told = [output for output in result.outputs if "has changed since it was written" in output]
    case.record_message(told[0], "note: .* has changed since it was written .block 0 has another checksum")
    assert curves[0]
    assert curves[0] == curves[1]
