"""Every field is a flag with its bounds beside it, and a run's config.json gives the flags back."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from common import UserError, cli, exits, seed


@dataclasses.dataclass(frozen=True)
class Args:
    """Train a test."""

    name: str = ""  # what it is called
    global_batch_size: int = 128  # samples
    lr: float = 0.2  # rate
    sync_bn: bool = False  # whether
    flip: bool = True  # whether not


OTHER = Args(name="a b", global_batch_size=7, lr=1e-3, sync_bn=True, flip=False)
FLAGS = {
    "name": ["--name", "a b"],
    "global_batch_size": ["--global-batch-size", "7"],
    "lr": ["--lr", "1e-3"],
    "sync_bn": ["--sync-bn"],
    "flip": ["--no-flip"],
}


def test_defaults() -> None:
    assert cli.parse(Args, []) == Args()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Args)])
def test_every_field_is_a_flag(field: str) -> None:
    assert cli.parse(Args, FLAGS[field]) == dataclasses.replace(Args(), **{field: getattr(OTHER, field)})


def test_reads_the_command_line_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1e-3"])
    assert cli.parse(Args).lr == 1e-3


def write_config(folder: Path, values: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"args": values, "world_size": 2}))
    return str(path)


def test_config_gives_the_flags_back_and_flags_win(tmp_path: Path) -> None:
    path = write_config(tmp_path, dataclasses.asdict(OTHER))
    again = dataclasses.replace(OTHER, name="")  # or it would continue that run, in its folder
    assert cli.parse(Args, ["--config", path]) == again
    assert cli.parse(Args, [f"--config={path}"]) == again
    wanted = dataclasses.replace(again, lr=5.0, sync_bn=False)
    for argv in (["--lr", "5", "--no-sync-bn", "--config", path], ["--config", path, "--lr", "5", "--no-sync-bn"]):
        assert cli.parse(Args, argv) == wanted
    older = write_config(tmp_path, {"lr": 9.0})  # from before the recipe had the other flags
    assert cli.parse(Args, ["--config", older]) == Args(lr=9.0)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Train for so long."""

    epochs: int = 1  # if max_steps is 0
    max_steps: int = 200  # or so many


@pytest.mark.parametrize("epochs", [["--epochs", "1"], ["--epochs=3"]], ids=str)
def test_only_one_length_of_the_training(epochs: list[str], tmp_path: Path) -> None:
    """Asked for three epochs, nobody wants the 200 steps that are the default."""
    with pytest.raises(UserError, match=r"^--epochs has no effect because --max-steps is 200: add --max-steps 0 "):
        cli.parse(Lengths, epochs)
    assert cli.parse(Lengths, [*epochs, "--max-steps", "0"]).max_steps == 0
    path = write_config(tmp_path, {"epochs": 3, "max_steps": 0})
    assert cli.parse(Lengths, ["--config", path, "--max-steps", "5"]) == Lengths(3, 5), "of an earlier run, and now"


@dataclasses.dataclass(frozen=True)
class Seeded:
    """Train from a seed."""

    seed: cli.Seed = 0  # of 64 bits


def test_seed_is_of_64_bits() -> None:
    largest = 2**64 - 1
    assert cli.parse(Seeded, ["--seed", str(largest)]).seed == largest
    seed.mix(largest, 1)
    with pytest.raises(
        UserError, match=r"^--seed 1.84467e\+19 is out of range: it must be between 0 and 18446744073709551615$"
    ):
        cli.parse(Seeded, ["--seed", str(largest + 1)])


def test_config_with_unknown_flags_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, dataclasses.asdict(OTHER) | {"tp": 2, "momentum": 0.9})
    with pytest.raises(UserError, match=r"has flags that this recipe does not have: momentum, tp$"):
        cli.parse(Args, ["--config", path])


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"args": '], ids=repr)
def test_what_is_no_config_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"--config \S+ is not a run's config.json"):
        cli.parse(Args, ["--config", str(path)])


@pytest.mark.parametrize("content", ["[]", "3", "null", '"lr"'])
def test_config_whose_args_are_no_flags_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"args": {content}}}')
    with pytest.raises(UserError, match=r"--config \S+ is not a run's config.json"):
        cli.parse(Args, ["--config", str(path)])


BAD = [["--learning-rate", "1"], ["--global-batch-size", "many"], ["--lr"], ["--l", "1"], ["stray"], ["--confi", "x"]]


@pytest.mark.parametrize("argv", BAD, ids=str)
def test_bad_flags_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.parse(Args, argv)
    assert refusal.value.code == exits.USAGE_ERROR == 2
    assert argv[0] in capsys.readouterr().err


def test_other_ranks_say_nothing_and_leave_later(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[tuple[float, tuple[str, str]]] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(exits.time, "sleep", lambda seconds: slept.append((seconds, tuple(capsys.readouterr()))))
    with pytest.raises(SystemExit) as refusal:
        cli.parse(Args, BAD[0])
    assert refusal.value.code == 2
    assert slept == [(exits.GRACE_S, ("", ""))], "nothing is said while rank 0 may be speaking"
    assert "--learning-rate" in capsys.readouterr().err, "rank 0 had nothing to say"


def test_help_names_every_flag_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.parse(Args, ["--help"])
    assert refusal.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(Args):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "Train a test." in text
    assert "--config" in text
    assert "samples" in text, "the comment beside a field"
