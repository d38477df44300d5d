"""Where a run's checkpoints lie: what --out, --resume and --init may name, and a project without object stores."""

import ast
import shutil
from pathlib import Path

import pytest
from common import UserError
from common.store import disk, place
from common.store.objects import keeper, paths

from tests import floors
from tests.harness import runner
from tests.store.server import BUCKET, Server
from tests.test_deletions import copy, run_copy

OBJECTS = "common.store.objects"


@pytest.mark.usefixtures("group")
def test_a_folder_or_a_store(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert place.choose("runs", "a") == disk.Disk(tmp_path / "runs" / "a")
    found = place.choose(f"s3://{BUCKET}/x", "a")
    assert isinstance(found, keeper.Keeper)
    assert (str(found.path), found.run_dir) == (f"s3://{BUCKET}/x/a", tmp_path / "runs" / "s3" / BUCKET / "x" / "a")
    assert place.at("--init", "a/b") == Path("a/b")
    assert place.at("--init", f"s3://{BUCKET}/b") == paths.parse("--init", f"s3://{BUCKET}/b")
    assert not list(tmp_path.iterdir()), "and neither has made anything"
    assert s3.objects() == []


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("url", ["s3:/bucket/x", "https://host/x", "S3://bucket/x", "file:///tmp/x", "s4://bucket/x"])
def test_other_urls_are_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path would be made of it: a folder "s3:" on this machine. The refusal names what would be right."""
    monkeypatch.chdir(tmp_path)
    for flag, use in {"--out": lambda: place.choose(url, "run"), "--resume": lambda: place.at("--resume", url)}.items():
        with pytest.raises(UserError, match=f"^{flag} {url} is a URL, and .*s3://bucket/folder"):
            use()
    assert not list(tmp_path.iterdir())


# --- A project without them -------------------------------------------------------------------------------


def test_only_the_place_imports_them() -> None:
    """So that one may delete them: docs/adapt.md."""
    outside = [one for one in floors.imports(runner.ROOT) if one.target.startswith(OBJECTS)]
    assert {one.module for one in outside if not one.module.startswith(OBJECTS)} == {"common.store.place"}
    tree = ast.parse((runner.ROOT / "common" / "store" / "place.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.Try)]
    assert ast.unparse(guarded.body[0]).startswith(f"from {OBJECTS} import")


def test_page_says_how_to_delete_them() -> None:
    assert "\nrm -r common/store/objects\n" in (runner.ROOT / "docs" / "adapt.md").read_text()


def test_project_without_them_trains_and_says_so(small_data: dict[str, Path], tmp_path: Path) -> None:
    train = copy("ddp_gpt", tmp_path)
    shutil.rmtree(tmp_path / "common" / "store" / "objects")
    flags = [*runner.small("ddp_gpt"), "--data", str(small_data["gpt"]), "--max-steps", "2", "--global-batch-size", "4"]

    def run(out: str) -> runner.Result:
        return runner.spawn(run_copy, [(str(train), [str(train), *flags, "--name", "run", "--out", out])])

    result = run(str(tmp_path / "runs"))
    assert result.ok, str(result)
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_00000002").is_dir()
    result = run("s3://bucket/runs")
    assert not result.ok
    assert "--out s3://bucket/runs needs common/store/objects, which this project does not have" in str(result)
