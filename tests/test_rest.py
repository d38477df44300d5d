"""tests/rest.txt: which tests the default run leaves out."""

from tests import rest

TEXT = r"""
# a comment
tests/test_some.py::test_one\[(?!first)
tests/test_gone.py
"""
NAMES = ["tests/test_some.py::test_one[first]", "tests/test_some.py::test_one[second]", "tests/test_other.py::test"]


def test_what_is_listed() -> None:
    listed = rest.patterns(TEXT)
    assert [name for name in NAMES if rest.joined(listed).match(name)] == [NAMES[1]]


def test_what_no_test_is_called() -> None:
    assert rest.unmatched(rest.patterns(TEXT), NAMES) == ["tests/test_gone.py"]


def test_file_can_be_read() -> None:
    assert len(rest.patterns()) > 10
