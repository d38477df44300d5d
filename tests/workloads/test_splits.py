"""What --data names: a place, a configuration of it, and the split to validate on."""

from pathlib import Path

import pytest
from common import UserError
from common.workloads import images, splits, text

from tests.conftest import write_image_folder, write_text


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("digits", ("digits", "", "")),
        ("digits@test", ("digits", "", "test")),
        ("Salesforce/wikitext:wikitext-2-v1", ("Salesforce/wikitext", "wikitext-2-v1", "")),
        ("Salesforce/wikitext:wikitext-2-v1@test", ("Salesforce/wikitext", "wikitext-2-v1", "test")),
        ("/home/me@work/images", ("/home/me@work/images", "", "")),
        ("/home/me@work/images@test", ("/home/me@work/images", "", "test")),
    ],
)
def test_parts_of_a_name(name: str, source: tuple[str, str, str]) -> None:
    found = splits.parse(name)
    assert found == source
    assert splits.parse(found.validating_on("dev")) == (*source[:2], "dev")


def test_path_that_exists_is_a_place(tmp_path: Path) -> None:
    odd = tmp_path / "a:b@c"
    odd.mkdir()
    assert splits.parse(str(odd)) == (str(odd), "", "")
    assert splits.parse(f"{odd}@test") == (str(odd), "", "test")


def test_split_to_validate_on(tmp_path: Path) -> None:
    folder = write_image_folder(tmp_path / "images", 24, 11)
    assert [len(part) for part in images.load(str(folder), 0, False)] == [24, 11]
    assert [len(part) for part in images.load(f"{folder}@train", 0, False)] == [24, 24]
    with pytest.raises(UserError, match=f"--data {folder} has no split named test, only train, validation"):
        images.load(f"{folder}@test", 0, False)
    words = str(write_text(tmp_path / "text", 24, 11))
    train, validation = text.load(words, 8)
    assert train.digest() != validation.digest()
    assert [part.digest() for part in text.load(f"{words}@train", 8)] == [train.digest()] * 2
    with pytest.raises(UserError, match=f"--data {words} has no split named test, only train, validation"):
        text.load(f"{words}@test", 8)
    with pytest.raises(UserError, match=f"--data {tmp_path}/none@test: there is no such folder"):
        text.load(f"{tmp_path}/none@test", 8)


def test_splits_of_the_built_in_sets() -> None:
    for split in ("", "@validation"):
        assert len(images.load(f"digits{split}", 0, False)[1]) < len(images.load("digits@train", 0, False)[1])
        assert len(text.load(f"stdlib{split}", 64)[1]) < len(text.load("stdlib@train", 64)[1])
    with pytest.raises(UserError, match="--data digits has no split named test, only train, validation"):
        images.load("digits@test", 0, False)
    with pytest.raises(UserError, match="--data stdlib has no split named test, only train, validation"):
        text.load("stdlib@test", 64)
    with pytest.raises(UserError, match="--text-columns a cannot be used with --data stdlib"):
        text.load("stdlib@train", 64, columns="a")


def test_splits_that_are_not_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A test split is kept for later; any other one may be data that the user means to train on."""
    for others, named in ((["test"], ""), (["extra", "val", "test"], "extra"), (["validation", "val"], "val")):
        found = {split: split for split in ("train", *others)}
        splits.choose("set", found)
        printed = capsys.readouterr().out
        assert (f"set: not read: {named}, which are neither" in printed) == bool(named), printed


@pytest.mark.parametrize("name", ["", ":", ":config", ":@test"])
def test_a_name_of_nothing(name: str) -> None:
    """It would be the working directory, with all that lies below it."""
    with pytest.raises(UserError, match=rf"^--data '{name}' names no data set"):
        splits.load(name)
