"""What GitHub, citation managers and the package index read: right by their schemas, and one version everywhere."""

import importlib.resources
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import common
import jsonschema
import pytest
from ruamel.yaml import YAML

from tests.harness import runner

ROOT = runner.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FORMS = sorted(path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.name != "config.yml")
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
SCHEMAS = {  # of check-jsonschema, which takes them from the JSON Schema Store
    **dict.fromkeys(WORKFLOWS, "github-workflows"),
    **dict.fromkeys(FORMS, "github-issue-forms"),
    ROOT / ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    ROOT / "CITATION.cff": "citation-file-format",
}


def read(path: Path) -> Any:
    """As YAML 1.2, in which the key "on" is a word."""
    return YAML(typ="safe").load(path.read_text())


def check(content: Any, schema: str) -> None:
    text = (importlib.resources.files("check_jsonschema.builtin_schemas.vendor") / f"{schema}.json").read_text()
    rules = json.loads(text)
    jsonschema.validators.validator_for(rules)(rules).validate(content)


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_schema(path: Path) -> None:
    check(read(path), SCHEMAS[path])


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (WORKFLOWS[0], "runs-on: ", "runs_on: "),
        (FORMS[0], "required: true", "required: perhaps"),
        (FORMS[0], "type: input", "type: inputs"),
        (ROOT / ".github/ISSUE_TEMPLATE/config.yml", "false", "0.5"),
        (ROOT / "CITATION.cff", "authors:", "author:"),
        (ROOT / "CITATION.cff", "license: Apache-2.0", "license: Apache-3"),
    ],
)
def test_mutants(path: Path, before: str, after: str, tmp_path: Path) -> None:
    assert before in path.read_text()
    (tmp_path / "mutant").write_text(path.read_text().replace(before, after))
    with pytest.raises(jsonschema.ValidationError):
        check(read(tmp_path / "mutant"), SCHEMAS[path])


def test_workflow_runs_what_a_landing_runs() -> None:
    """With no more rights than to read, and with no action that its owner could exchange for another."""
    assert len(WORKFLOWS) == 1
    flow = read(WORKFLOWS[0])
    (job,) = flow["jobs"].values()
    given, ran = [step["run"] for step in job["steps"] if "run" in step]
    assert given.startswith("chown -R root:root .")
    assert ran == "bash .ci/run ${{ matrix.part }}"
    landing, *parts = job["strategy"]["matrix"]["part"]
    assert landing == ""
    assert parts == [f"{k}/{len(parts)}" for k in range(1, len(parts) + 1)], "all of -m rest"
    assert flow["permissions"] == {"contents": "read"}
    assert "permissions" not in job
    uses = re.findall(r"uses: (.*)", WORKFLOWS[0].read_text())
    assert uses
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", one) for one in uses)
    assert job["timeout-minutes"] > 90


def test_forms_ask_for_what_answers_need() -> None:
    asked = {path.stem: {one.get("id") for one in read(path)["body"]} for path in FORMS}
    assert len(asked) == 3
    assert {"version", "command", "logs", "doctor"} <= asked["1-bug"]
    assert {"version", "runs", "curves", "config", "doctor"} <= asked["2-numbers"]
    for path in FORMS[:2]:
        (doctor,) = (one for one in read(path)["body"] if one.get("id") == "doctor")
        assert "python -m tools.doctor --json" in doctor["attributes"]["description"]
        assert doctor["validations"]["required"]


def test_files_that_forms_name_exist() -> None:
    texts = [path.read_text() for path in (*FORMS, ROOT / ".github/pull_request_template.md")]
    for text in texts:
        for name in re.findall(r"\b(?:docs/[\w.]+|[A-Z_]+\.md)", text):
            assert (ROOT / name.rstrip(".")).exists(), name
        for module in re.findall(r"python -m ((?:tools|tests)\.\w+)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_no_address_is_invented() -> None:
    """The project has none yet."""
    names = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CITATION.cff", "pyproject.toml")
    for path in [*ROOT.glob(".github/**/*.*"), *(ROOT / name for name in names)]:
        assert "://" not in path.read_text(), path


def test_one_version() -> None:
    """pyproject.toml reads that of common/, which a copy has as well; the others must say the same."""
    assert PROJECT["project"]["dynamic"] == ["version"]
    place = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert place == Path(common.__file__)
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"', place.read_text(), re.MULTILINE) == [common.__version__]
    cited = read(ROOT / "CITATION.cff")
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited["version"] == common.__version__
    assert heads[0] == f"{common.__version__} ({cited['date-released']})"
    assert cited["license"] == PROJECT["project"]["license"]
