"""tests/rest.txt: which tests the default run leaves out."""

import pytest

from tests import rest

TEXT = r"""
# a comment
tests/test_some.py::test_one\[(?!first)
tests/test_gone.py
"""
NAMES = ["tests/test_some.py::test_one[first]", "tests/test_some.py::test_one[second]", "tests/test_other.py::test"]


def test_what_is_listed() -> None:
    listed = rest.patterns(TEXT)
    assert [name for name in NAMES if rest.lists(listed, name)] == [NAMES[1]]


def test_what_no_test_is_called() -> None:
    assert rest.unmatched(rest.patterns(TEXT), NAMES) == ["tests/test_gone.py"]


def test_file_can_be_read() -> None:
    assert len(rest.patterns()) > 10


def test_each_test_is_in_one_part() -> None:
    names = [f"tests/test_some.py::test[{i}]" for i in range(300)]
    parts = [rest.of_part(names, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(len(part) > 80 for part in parts)
    assert rest.of_part(names, "1/1") == {*names}


@pytest.mark.parametrize("part", ["0/3", "4/3"])
def test_no_such_part(part: str) -> None:
    with pytest.raises(AssertionError, match="--part is I/N"):
        rest.of_part(["tests/test_some.py::test"], part)
