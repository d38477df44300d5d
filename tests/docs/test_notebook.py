"""The notebook of the course: it runs from top to bottom, and it is committed without what it prints."""

from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.harness import runner

FOLDER = runner.ROOT / "docs" / "course"


def read() -> Any:
    return nbformat.read(FOLDER / "notebook.ipynb", as_version=4)


def run(notebook: Any) -> str:
    """Execute it in its folder; returns what its cells print."""
    client = NotebookClient(
        notebook, timeout=2 * runner.HANG_S, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def test_committed_without_outputs() -> None:
    notebook = read()
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert all(len(line) <= 120 for cell in notebook.cells for line in cell.source.splitlines())


@pytest.mark.rest
def test_kills_a_training_and_continues_it() -> None:
    said = run(read())
    assert "exit code -9" in said
    assert "all 30 losses are the same" in said


MUTANT = (  # what continues is a training of another seed, from its beginning
    ("return [*words.split(), ", 'return [*words.split(), *["--seed", "7"] * (name == "other"), '),
    ('continued = start("killed")', 'continued = start("other")'),
    ('curve("whole"), curve("killed")', 'curve("whole"), curve("other")'),
)


@pytest.mark.rest
def test_mutant_fails() -> None:
    notebook = read()
    for old, new in MUTANT:
        (cell,) = [cell for cell in notebook.cells if old in cell.source]
        cell.source = cell.source.replace(old, new)
    with pytest.raises(CellExecutionError, match="assert one == other"):
        run(notebook)
