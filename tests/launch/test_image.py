"""launch/Dockerfile without Docker: what it pins, what it copies, and a training as its user with nothing but that."""

import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import runner
from tests.launch.test_k8s import pod_template
from tests.launch.test_launch import TWO_STEPS, shell

TEXT = (runner.ROOT / "launch" / "Dockerfile").read_text().replace("\\\n", "")
STEPS = [
    (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in TEXT.splitlines()) if word.isupper()
]
PROJECT = tomllib.loads((runner.ROOT / "pyproject.toml").read_text())


def given(word: str) -> list[str]:
    return [rest for step, rest in STEPS if step == word]


COPIED = [name for step in given("COPY") for name in step.split()[:-1]]
(ENTRY,) = map(json.loads, given("ENTRYPOINT"))


def test_copies_what_there_is() -> None:
    assert all((runner.ROOT / name).exists() for name in COPIED)
    packages = {path.parent.name for path in runner.ROOT.glob("*/*.py")} | {"recipes"}
    assert packages - {*COPIED} == {"tests", "benchmarks"}
    assert (runner.ROOT / ENTRY[1]).exists()


def test_versions_are_exact() -> None:
    """Of Python, of the system, of uv, and of each package that the project names."""
    (base,) = given("ARG")
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+", base)
    assert [tool for step in given("RUN") for tool in re.findall(r"pip install .*", step)] == [
        next(step for step in given("RUN") if re.fullmatch(r"pip install --no-cache-dir uv==\d+\.\d+\.\d+", step))
    ]
    extras = [name for step in given("RUN") for name in re.findall(r"--extra (\w+)", step)]
    project = PROJECT["project"]
    asked = project["dependencies"] + [one for name in extras for one in project["optional-dependencies"][name]]
    pinned = {one.partition("==")[0] for one in PROJECT["tool"]["uv"]["constraint-dependencies"] if "==" in one}
    assert {re.match("[a-z-]+", one)[0] for one in asked} <= pinned  # type: ignore[index]


def test_what_is_installed_first_has_what_it_needs() -> None:
    """The version is read from a file, which must be there before the code is."""
    first = TEXT[: TEXT.index("--no-install-project")]
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", first, re.MULTILINE) for name in line.split()}
    project = PROJECT["project"]
    assert copied == {"pyproject.toml", project["readme"], "LICENSE", PROJECT["tool"]["hatch"]["version"]["path"]}


def test_user_is_that_of_the_pods() -> None:
    """By number, as Kubernetes cannot tell whether a name is root's; code and packages are not the user's."""
    context = pod_template()["securityContext"]
    assert given("USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    words = [word for word, _ in STEPS]
    assert not {"COPY", "RUN"} & {*words[words.index("USER") :]}
    assert "--chown" not in TEXT


# Makes Python and its packages readable for every user, in mounts of this process alone, before it becomes the user.
BECOME = r"""
set -e
user=$1 folder=$2 && shift 2
for prefix in "$BASE" "$VIRTUAL_ENV"; do
  mkdir -p "$folder/kept$prefix"
  mount --bind "$prefix" "$folder/kept$prefix"
done
for prefix in "$BASE" "$VIRTUAL_ENV"; do
  top=/$(cut -d/ -f2 <<<"$prefix")
  mountpoint -q "$folder/kept$top" || setpriv --reuid="$user" --regid="$user" --clear-groups test -x "$prefix/bin" || {
    [[ -e $folder/kept$top.hidden ]] || mount -t tmpfs -o mode=755 none "$top"
    touch "$folder/kept$top.hidden"
    mkdir -p "$prefix" && mount --bind "$folder/kept$prefix" "$prefix"
  }
done
exec setpriv --reuid="$user" --regid="$user" --clear-groups --no-new-privs "$@"
"""


@pytest.fixture
def workspace() -> Iterator[Path]:
    """The image's folder, which is root's, and in it runs/."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place = Path(folder) / "workspace"
        place.mkdir()
        for name in COPIED:
            source = runner.ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, place / name, ignore=ignored, dirs_exist_ok=True)
            else:
                (place / name).parent.mkdir(exist_ok=True)
                shutil.copy(source, place / name)
        (place / "runs").mkdir()
        yield place


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("user", [1000, 54321], ids=["of the image", "docker run --user"])
def test_trains_as_its_user(user: int, workspace: Path) -> None:
    """Nothing is written but the run."""
    os.chown(workspace / "runs", user, user)
    home = workspace.parent / "home"
    home.mkdir()
    os.chown(home, user, user)
    before = {path for path in workspace.rglob("*") if not path.is_relative_to(workspace / "runs")}
    environ = {"HOME": str(home), "TMPDIR": "/tmp", "BASE": sys.base_prefix, "VIRTUAL_ENV": sys.prefix}
    environ |= {"PYTHON": "", "PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "NPROC_PER_NODE": "2"}
    become = ["unshare", "--mount", "bash", "-c", BECOME, "become", str(user), str(workspace.parent)]
    result = shell([*become, *ENTRY, "recipes/ddp_resnet", *TWO_STEPS, "--name", "run"], workspace, **environ)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "done     step 2 of 2" in result.stdout
    run = workspace / "runs" / "ddp_resnet" / "run"
    assert {path.stat().st_uid for path in run.rglob("*")} == {user}
    assert {path for path in workspace.rglob("*") if not path.is_relative_to(workspace / "runs")} == before
