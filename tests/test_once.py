"""What tests share is made once, by whichever process asks for it first."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.once import Once


def test_one_makes_what_all_get(tmp_path: Path) -> None:
    """In threads, each with an Once of its own, as the processes of pytest-xdist have."""
    calls = []

    def make(folder: Path) -> None:
        calls.append(folder)
        others_ask.wait()
        (folder / "file").write_text("content")

    def ask(number: int) -> str:
        if number:
            others_ask.wait()
        return (Once(tmp_path).folder(make, "thing") / "file").read_text()

    others_ask = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(ask, range(3))] == ["content"] * 3
    assert len(calls) == 1


def test_what_failed_is_made_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Once(tmp_path).folder(fail, "thing", 1)
    folder = Once(tmp_path).folder(lambda folder: (folder / "whole").touch(), "thing", 1)
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_values_have_names(tmp_path: Path) -> None:
    once = Once(tmp_path)
    assert once.value(lambda: {1: 0.1}, "a", 1, (2.0, "b")) == {1: 0.1}
    assert once.value(lambda: "another", "a", 1, (2.0, "c")) == "another"
    assert Once(tmp_path).value(lambda: "not called", "a", 1, (2.0, "b")) == {1: 0.1}
