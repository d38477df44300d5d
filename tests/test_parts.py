"""`--part I/N` of tests/conftest.py: what CI takes turns in."""

import types
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems


def kept(part: str, names: list[str]) -> tuple[list[str], list[str]]:
    """The tests that a part runs, and those that it reports as deselected."""
    gone: list[Any] = []

    def note(items: list[Any]) -> None:
        gone.extend(items)

    hook = types.SimpleNamespace(pytest_deselected=note)
    config: Any = types.SimpleNamespace(getoption=lambda _: part, hook=hook)
    items: Any = [types.SimpleNamespace(nodeid=name) for name in names]
    pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items], [item.nodeid for item in gone]


def test_each_test_is_in_one_part() -> None:
    names = [f"tests/test_some.py::test[{i}]" for i in range(300)]
    parts = [kept(f"{i}/3", names) for i in (1, 2, 3)]
    assert sorted(name for mine, _ in parts for name in mine) == sorted(names)
    assert all(sorted(mine + others) == sorted(names) for mine, others in parts)
    assert all(len(mine) > 80 for mine, _ in parts)
    assert kept("1/1", names) == (names, [])
    assert kept("2/3", names[::-1])[0] == parts[1][0][::-1], "wherever it stands among others"


@pytest.mark.parametrize("part", ["0/3", "4/3"])
def test_no_such_part(part: str) -> None:
    with pytest.raises(AssertionError, match="--part is I/N"):
        kept(part, ["tests/test_some.py::test"])
