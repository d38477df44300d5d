"""Somebody outside the run who reaches every port of its ranks, without the key: no code runs, no rank obeys."""

import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from common.run import exits

from tests.harness import runner, stranger
from tests.harness.fault_case import UNHURRIED, FaultCase, events_in, wait_for_beats
from tests.harness.runner import wait_for

LOOKS = 8  # of every rank into the store
Meddle = Callable[[Sequence[stranger.Place], Callable[[], None]], object]  # gets what waits until all have looked


def disturbed(case: FaultCase, meddle: Meddle, mutant: str = "") -> runner.Result:
    """Run while a stranger meddles with each port of the ranks, at the end of a step."""
    done = case.folder / "done"
    trouble: list[BaseException] = []

    def meanwhile(file: Path) -> None:
        try:
            wait_for(lambda: any(event["event"] == "fault" for event in events_in(file)))
            places = stranger.listening({event["pid"] for event in events_in(file)})
            assert len(places) > case.size, "the store, and a socket of gloo for each rank"
            meddle(places, lambda: wait_for_beats(file, LOOKS, range(case.size)))
        except BaseException as error:
            trouble.append(error)
        finally:
            done.touch()

    result = case.start(
        *UNHURRIED, faults=[("end of a step", "wait for", 0, 3, str(done))], meanwhile=meanwhile, mutant=mutant
    )
    assert not trouble, f"{trouble[0]!r}\n{result}"
    return result


def attack(case: FaultCase, places: Sequence[stranger.Place], let_look: Callable[[], None]) -> None:
    """Forge all that is read from a store, while the ranks read."""
    names: list[list[str]] = []

    def meddle(place: stranger.Place) -> None:
        names.append(stranger.attack(place, case.folder / "ran"))

    threads = [threading.Thread(target=meddle, args=(place,), daemon=True) for place in places]
    for one in threads:
        one.start()
    for one in threads:
        one.join(runner.HANG_S)
    assert sum("watch/0" in found for found in names) <= 1, "one store"
    let_look()


def foreign(case: FaultCase, result: runner.Result) -> str:
    """What the ranks have shown of the stranger's."""
    text = "".join(case.output(result, rank) for rank in range(case.size))
    return " ".join(word for word in ("a finding of a stranger", "evil", "\x1b[31m", "\x1b[2J") if word in text)


@pytest.mark.fault("network: a stranger forges all that is in the store", least=2)
def test_forged(case: FaultCase) -> None:
    result = disturbed(case, lambda *where: attack(case, *where))
    assert result.ok, str(result)
    assert not foreign(case, result), str(result)
    assert not (case.folder / "ran").exists()
    case.record_message(result.outputs[0], r"warning: a stranger writes to this run's store \(.*\): ignored")
    case.check_same_as_reference()


@pytest.mark.fault("network: a run of the launcher listens on its own machine alone")
def test_launcher(case: FaultCase) -> None:
    """The launcher itself has no port at all."""
    done = case.folder / "done"
    found: dict[str, list[stranger.Place]] = {}

    def look(launcher: subprocess.Popen[str], file: Path) -> None:
        try:
            wait_for(lambda: any(event["event"] == "fault" for event in events_in(file)))
            found["launcher"] = stranger.listening([launcher.pid])
            found["ranks"] = stranger.listening({event["pid"] for event in events_in(file)})
        finally:
            done.touch()

    fault = ("end of a step", "wait for", 0, 2, str(done))
    code, text = case.launch(*UNHURRIED, faults=[fault], meanwhile=look)
    assert code == 0, text
    assert found["launcher"] == []
    assert {address for address, _ in found["ranks"]} == {"127.0.0.1"}


@pytest.mark.fault("network: garbage and 150 half-open connections at every port", least=2)
def test_garbage(case: FaultCase) -> None:
    def pester(places: Sequence[stranger.Place], let_look: Callable[[], None]) -> None:
        with stranger.pestered(places):
            let_look()

    result = disturbed(case, pester)
    assert result.ok, str(result)
    case.check_same_as_reference()


@pytest.mark.fault("network: mutant, nothing is sealed", least=2)
def test_mutant_obeys(case: FaultCase) -> None:
    result = disturbed(case, lambda *where: attack(case, *where), mutant="nothing is sealed")
    assert exits.PEER_FAILED in result.codes, str(result)
    assert "a finding of a stranger" in foreign(case, result), str(result)
    case.record_message(result.outputs[0], "a finding of a stranger")
