"""What is not whole is found, named and not used; what is left is enough, or the run says how to start over."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from common import manifest

from tests.harness.fault_case import Cell, checkpoints


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def data_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.safetensors"))


def flip_data(checkpoint: Path) -> None:
    """Of a number, not of the header."""
    flip(data_file(checkpoint), 8 * data_file(checkpoint).stat().st_size - 3)


def flip_manifest(checkpoint: Path) -> None:
    """In the position: the number stays a number."""
    file = checkpoint / manifest.NAME
    flip(file, 8 * (file.read_text().index('"samples": ') + len('"samples": ')))


def truncate(checkpoint: Path) -> None:
    data_file(checkpoint).write_bytes(data_file(checkpoint).read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of a data file": flip_data,
    "a bit of the manifest": flip_manifest,
    "a file cut short": truncate,
    "a missing file": lambda checkpoint: data_file(checkpoint).unlink(),
    "a missing manifest": lambda checkpoint: (checkpoint / manifest.NAME).unlink(),
    "a manifest that is none": lambda checkpoint: (checkpoint / manifest.NAME).write_text("[]"),
    "an empty manifest": lambda checkpoint: (checkpoint / manifest.NAME).write_text(""),
}


@pytest.mark.fault("damage: a flipped bit in the newest checkpoint", core=True)
def test_flipped_bit(cell: Cell) -> None:
    check_older_is_used("a bit of a data file", cell)


@pytest.mark.fault("damage: {what}, in the newest checkpoint")
@pytest.mark.parametrize("what", [what for what in DAMAGES if what != "a bit of a data file"])
def test_damaged(what: str, cell: Cell) -> None:
    check_older_is_used(what, cell)


def check_older_is_used(what: str, cell: Cell) -> None:
    cell.begin(4)
    newest = checkpoints(cell.run)[4]
    DAMAGES[what](newest)
    fault = manifest.verify(newest)[1]
    assert fault
    result = cell.resume()
    cell.steps_lost = 2  # the run had been interrupted after step 4
    cell.say(result.outputs[0], f"warning: skipped damaged checkpoints: {newest.name}: ")
    assert fault in cell.message
    assert "resuming from step 2 of" in result.outputs[0]
    assert not manifest.verify(checkpoints(cell.run)[4])[1], "it was written again"


@pytest.mark.fault("damage: every checkpoint")
def test_all_damaged(cell: Cell) -> None:
    cell.begin(4)
    for path in checkpoints(cell.run).values():
        flip_data(path)
    result = cell.start()
    assert result.codes[0] == 2, str(result)
    assert "Traceback" not in str(result), str(result)
    cell.say(result.outputs[0], "every checkpoint is damaged .* To start over on purpose, use another --name")
    assert all(path.name in cell.message for path in checkpoints(cell.run).values())
    assert not cell.done()


@pytest.mark.fault("damage: 200 random bits, one at a time")
def test_random_bits(cell: Cell) -> None:
    choose = random.Random(3)
    copy = shutil.copytree(checkpoints(cell.whole())[6], cell.folder / "copy")
    files = sorted(copy.iterdir())
    assert not manifest.verify(copy)[1]
    cell.runs, cell.passes = 200, 0
    for i in range(cell.runs):
        file = files[i % len(files)]
        bit = choose.randrange(8 * file.stat().st_size)
        flip(file, bit)
        fault = manifest.verify(copy)[1]
        cell.passes += bool(fault)
        flip(file, bit)
    cell.message = fault
    assert cell.passes == cell.runs
    assert not manifest.verify(copy)[1]


@pytest.mark.fault("damage: mutant, nothing is verified")
def test_mutant_without_verification(cell: Cell) -> None:
    cell.begin(4)
    flip_data(checkpoints(cell.run)[4])
    result = cell.start(mutant="nothing is verified")
    assert "resuming from step 4 of" in result.outputs[0]
    with pytest.raises((AssertionError, KeyError)):  # or no last checkpoint, if the number makes no sense at all
        cell.check_exact()
    cell.say(result.outputs[0], "resuming from step 4 of")
