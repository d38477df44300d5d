"""What is not whole is found, named and not used; what is left is enough, or the run says how to start over."""

import random
import shutil

import pytest
from common import manifest

from tests.harness.damage import DAMAGES, add_tensors, flip_bit, flip_data, flip_random_bit
from tests.harness.fault_case import FaultCase, checkpoints


@pytest.mark.fault("damage: {what}, in the newest checkpoint")
@pytest.mark.parametrize("what", DAMAGES)
def test_damaged(what: str, case: FaultCase) -> None:
    """The one before is used, and the training is the same."""
    case.copy_reference(until=4)
    newest = checkpoints(case.run_dir)[4]
    fault = DAMAGES[what](newest)
    result = case.resume_and_check()
    case.row.steps_lost = 2  # the run had been interrupted after step 4
    case.record_message(result.outputs[0], f"warning: skipped damaged checkpoints: {newest.name}: ")
    assert fault in case.row.message
    assert "resuming from step 2 of" in result.outputs[0]
    assert not manifest.verify(checkpoints(case.run_dir)[4])[1], "it was written again"


@pytest.mark.fault("damage: every checkpoint")
def test_all_damaged(case: FaultCase) -> None:
    case.copy_reference(until=4)
    for path in checkpoints(case.run_dir).values():
        flip_data(path)
    result = case.start()
    case.check_refused(result, "every checkpoint is damaged .* To start over on purpose, use another --name")
    assert all(path.name in case.row.message for path in checkpoints(case.run_dir).values())
    assert not case.steps_done()


@pytest.mark.fault("damage: 200 random bits, one at a time")
def test_random_bits(case: FaultCase) -> None:
    choose = random.Random(3)
    copy = shutil.copytree(checkpoints(case.reference())[6], case.folder / "copy")
    files = sorted(copy.iterdir())
    assert not manifest.verify(copy)[1]
    case.row.runs, case.row.passes = 200, 0
    for i in range(case.row.runs):
        file = files[i % len(files)]
        bit = flip_random_bit(file, choose)
        fault = manifest.verify(copy)[1]
        case.row.passes += bool(fault)
        flip_bit(file, bit)
    case.row.message = fault
    assert case.row.passes == case.row.runs
    assert not manifest.verify(copy)[1]


@pytest.mark.fault("damage: mutant, nothing is verified")
def test_mutant_without_verification(case: FaultCase) -> None:
    case.skip_unless_it_trains()  # else the number that changes is of a drop that is still to come
    case.copy_reference(until=4)
    flip_data(checkpoints(case.run_dir)[4])
    result = case.start(mutant="nothing is verified")
    case.record_message(result.outputs[0], "resuming from step 4 of")
    with pytest.raises((AssertionError, KeyError)):  # or no last checkpoint, if the number makes no sense at all
        case.check_same_as_reference()


@pytest.mark.fault("damage: mutant, files that the manifest does not name are read")
def test_mutant_that_reads_strangers(case: FaultCase) -> None:
    case.skip_unless_it_trains()  # else the number that changes is of a drop that is still to come
    case.copy_reference(until=4)
    add_tensors(checkpoints(case.run_dir)[4])
    result = case.start(mutant="names are not compared")
    case.record_message(result.outputs[0], "resuming from step 4 of")
    with pytest.raises((AssertionError, KeyError)):
        case.check_same_as_reference()
