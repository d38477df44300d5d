"""Every field is a flag with its bounds beside it, and a run's config.json gives the flags back."""

import dataclasses
import inspect
import json
import math
import os
import re
import sys
import typing
from pathlib import Path
from typing import Annotated, Any

import pytest
from common import UserError, bounds, seed, session
from common.run import cli, exits

from tests.harness import module, runner


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

    seed: bounds.Seed = 0  # of 64 bits


def test_seed_is_of_64_bits() -> None:
    largest = 2**64 - 1
    assert cli.parse(Seeded, ["--seed", str(largest)]).seed == largest
    seed.mix(largest, 1)
    with pytest.raises(
        UserError, match=r"^--seed 18446744073709551616 is out of range: it must be between 0 and 18446744073709551615$"
    ):
        cli.parse(Seeded, ["--seed", str(largest + 1)])


# --- bounds ---


@dataclasses.dataclass(frozen=True)
class Adopted:
    """Train with a user's own flags."""

    offset: float = -0.5  # without bounds
    shift: int = -3  # the same, whole
    positive: bounds.PositiveInt = 2  # from 1 on
    count: bounds.NonNegativeInt = 2  # from 0 on
    amount: bounds.NonNegativeFloat = 2.5  # at least 0
    share: bounds.Fraction = 0.5  # from 0 to 1
    patience: bounds.Timeout = 2.5  # seconds, at least 1
    depth: Annotated[int, bounds.Bounds(most=8)] = 4  # the adopter's own bounds
    ratio: Annotated[float, bounds.Bounds(-1, 1)] = 0.0  # on both sides
    top_p: bounds.Fraction | None = None  # with a value for "none given"
    betas: tuple[bounds.Fraction, bounds.Fraction] = (0.9, 0.999)  # several numbers


TAKEN = [
    *(("offset", "-0.25"), ("offset", "-1e9"), ("offset", "nan"), ("shift", "-4"), ("shift", "0")),
    *(("positive", "1"), ("count", "0"), ("amount", "0"), ("amount", "1e300"), ("share", "0"), ("share", "1")),
    *(("patience", "1"), ("depth", "8"), ("depth", "-99"), ("ratio", "-1"), ("ratio", "1")),
]
REFUSED = [
    *(("positive", "0", "between 1 and 2147483647"), ("positive", "-1", "between 1 and 2147483647")),
    *(("count", "-1", "between 0 and 2147483647"), ("count", "2147483648", "between 0 and 2147483647")),
    *(("amount", "-0.1", "at least 0"), ("amount", "nan", "at least 0")),
    *(("share", "-0.1", "between 0 and 1"), ("share", "1.1", "between 0 and 1"), ("share", "nan", "between 0 and 1")),
    *(("patience", "0.9", "at least 1"), ("depth", "9", "at most 8")),
    *(("top-p", "1.5", "between 0 and 1"),),
    *(("ratio", "-1.1", "between -1 and 1"), ("ratio", "1.1", "between -1 and 1")),
    *(("amount", "inf", "a finite number at least 0"), ("patience", "inf", "a finite number at least 1")),
]
# What cannot be shown as it was given.
ABSURD = [
    *(("positive", "9" * 400, "9999999999... (400 digits)"), ("count", "-" + "9" * 400, "-999999999... (401 digits)")),
    *(("seed", "9" * 400, "9999999999... (400 digits)"), ("amount", "1e400", "inf"), ("amount", "-1e400", "-inf")),
    *(("patience", "1" + "0" * 400, "inf"), ("depth", "1" + "0" * 30, "1000000000... (31 digits)")),
]


@pytest.mark.parametrize(("name", "value", "shown"), ABSURD, ids=lambda value: str(value)[:12])
def test_absurd_numbers_are_refused_in_a_sentence(name: str, value: str, shown: str) -> None:
    with pytest.raises(UserError, match=rf"^--{name} {re.escape(shown)} is out of range: it must be "):
        cli.parse(Seeded if name == "seed" else Adopted, [f"--{name}={value}"])


def test_what_has_no_bounds_may_be_any_number() -> None:
    assert cli.parse(Adopted, ["--offset", "inf"]).offset == math.inf
    assert cli.parse(Adopted, ["--shift", "9" * 400]).shift == int("9" * 400)


def test_each_of_several_numbers_has_the_bounds() -> None:
    assert cli.parse(Adopted, ["--betas", "0.8", "0.99"]).betas == (0.8, 0.99)
    with pytest.raises(UserError, match=r"^--betas 1.5 is out of range: it must be between 0 and 1$"):
        cli.parse(Adopted, ["--betas", "0.8", "1.5"])


def test_numbers_without_bounds_are_the_adopter_s_own() -> None:
    """Negative ones as well: what a number means is said beside its field, and nowhere else."""
    assert cli.parse(Adopted, []) == Adopted()
    for name, value in TAKEN:
        for argv in ([f"--{name}", value], [f"--{name}={value}"]):
            found = getattr(cli.parse(Adopted, argv), name)
            assert found == float(value) or (math.isnan(found) and value == "nan"), argv


@pytest.mark.parametrize(("name", "value", "said"), REFUSED)
def test_numbers_out_of_their_bounds_are_refused(name: str, value: str, said: str) -> None:
    told = f"--{name} {value} is out of range: it must be {said}"
    with pytest.raises(UserError, match=f"^{re.escape(told)}$"):
        cli.parse(Adopted, [f"--{name}", value])


# Numbers of recipes are not negative; these have other bounds.
AT_LEAST_1 = (
    *("epochs", "log_every", "keep", "global_batch_size", "lr_reference_batch", "seq_len", "hang_timeout"),
    *("num_layers", "num_heads", "width", "dp_replicate", "tp", "pp"),
    *("num_envs", "rollout_steps", "update_epochs", "eval_episodes"),
)
FRACTIONS = ("momentum", "label_smoothing", "gamma", "gae_lambda")


def out_of_bounds(args_type: type) -> list[str]:
    """Names of a recipe's numeric flags that would take a value which makes no sense."""
    found = []
    annotated = dict(cli._annotated(args_type, bounds.Bounds))
    for name, hint in typing.get_type_hints(args_type).items():  # int and float, whatever is annotated
        if hint in (int, float):
            least = 1 if name in AT_LEAST_1 else 0
            most = 1 if name in FRACTIONS else 2**64 - 1 if name == "seed" else math.inf
            has = annotated.get(name, bounds.Bounds())
            found += [name] * (has.least < least or has.most > most)
    return found


@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_every_number_of_a_recipe_has_its_bounds(recipe: str) -> None:
    args_type = module.load(recipe).Args
    assert out_of_bounds(args_type) == []
    assert len(dict(cli._annotated(args_type, bounds.Bounds))) > 15, "they were found"
    assert cli.parse(args_type, []) == args_type(), "the defaults are within them"


def test_mutant_without_a_bound_is_found() -> None:
    assert out_of_bounds(Adopted) == ["offset", "shift", "depth", "ratio"]


def test_check_divides() -> None:
    cli.check_divides("--tp", 2, {"--num-heads": 4, "--seq-len": 16, "nothing": 0})
    with pytest.raises(UserError, match=r"^--tp 3 must divide --seq-len \(16\)$"):
        cli.check_divides("--tp", 3, {"--num-heads": 6, "--seq-len": 16, "--width": 41})


# --- config.json ---


OLD = [  # what an earlier version has written, and what is told of it
    ("pipeline_gpt", {"num_microbatches": 8}, "does not have: num_microbatches (did you mean --micro-batch-size?)"),
    *(
        (
            "pipeline_gpt",
            {"schedule": name},
            f"invalid choice '{name}' for argument '--schedule'. Expected one of ('1F1B',",
        )
        for name in ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
    ),
]


@pytest.mark.parametrize(("recipe", "values", "told"), OLD, ids=lambda value: str(value)[:30])
def test_flags_of_an_earlier_version(
    recipe: str, values: dict[str, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is refused with the name that has taken its place, or with what may be chosen; nothing is dropped."""
    path = write_config(tmp_path, {"epochs": 1} | values)
    with pytest.raises((UserError, SystemExit)) as refusal:
        cli.parse(module.load(recipe).Args, ["--config", path])
    said = f"{refusal.value} {capsys.readouterr().err}"
    said = re.sub(r"[\s│]+", " ", said)  # tyro puts a message into a box
    assert told in said
    assert path in said
    if isinstance(refusal.value, SystemExit):
        assert refusal.value.code == exits.USAGE_ERROR
        assert all(f"'{name}'" in said for name in runner.choices(recipe, "--schedule"))


def test_config_names_the_flag_that_is_close(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"global_batchsize": 2, "zzz": 1})
    with pytest.raises(UserError, match=r"global_batchsize \(did you mean --global-batch-size\?\), zzz$"):
        cli.parse(Args, ["--config", path])


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


@pytest.mark.parametrize("content", ["[" * 100_000, '{"args": ' + "[" * 100_000, "pipe", "device", "link", "\0"])
def test_config_that_is_a_trap_is_refused(content: str, tmp_path: Path) -> None:
    """Deep JSON, and what would be read for ever."""
    path = tmp_path / "config.json"
    if content == "pipe":
        os.mkfifo(path)
    elif content in ("device", "link"):
        path.symlink_to("/dev/zero" if content == "device" else path)
    else:
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


# --- groups of --help ---


@dataclasses.dataclass(frozen=True)
class Below:
    """Flags of every test."""

    # every test
    out: str = "runs"  # where to
    seed: bounds.Seed = 0  # where from
    depth: int = 3  # how deep


@dataclasses.dataclass(frozen=True)
class Above(Below):
    """Train a test in groups."""

    # run
    out: str = "runs/above"  # another place
    epochs: bounds.PositiveInt = 1  # how long
    # 2 rates
    lr: bounds.NonNegativeFloat = 0.1  # first rate, of two
    betas: tuple[float, float] = dataclasses.field(default_factory=lambda: (0.5, 0.75))  # the others
    # class
    classes: int = 10  # how many
    # run!
    flip: bool = False  # a name that is another one's but for a sign


def groups(args_type: type) -> dict[str, dict[str, tuple[Any, str]]]:
    """Of each group, in order: its flags, with their defaults and help."""
    found = {}
    for group in dataclasses.fields(cli.grouped(args_type)):
        make: Any = group.default_factory
        values = make()
        hints = typing.get_type_hints(type(values), include_extras=True)
        helps = {name: hint.__metadata__[-1].help for name, hint in hints.items()}
        found[group.name] = {name: (getattr(values, name), text) for name, text in helps.items()}
    return found


def test_groups_are_under_their_comments() -> None:
    """The class's own first; what it has again from below stands there alone; two like names are one group."""
    assert groups(Above) == {
        "run": {"out": ("runs/above", "another place"), "epochs": (1, "how long"), "flip": (False, SIGN)},
        "_2_rates": {"lr": (0.1, "first rate, of two"), "betas": ((0.5, 0.75), "the others")},
        "_class": {"classes": (10, "how many")},
        "every_test": {"seed": (0, "where from"), "depth": (3, "how deep")},
    }
    assert list(groups(Args)) == ["Train_a_test"], "without a comment, what the class says of itself"


SIGN = "a name that is another one's but for a sign"


def options(text: str) -> list[str]:
    """The flags that a --help lists, in order; on or off is one."""
    return re.findall(r"^[ |│]{1,3}--([a-z][a-z0-9-]*)", text, re.MULTILINE)


@pytest.fixture
def one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is not wide enough for two groups beside each other."""
    monkeypatch.setenv("COLUMNS", "120")


def help_of(args_type: type, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as refusal:
        cli.parse(args_type, ["--help"])
    assert refusal.value.code == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("one_column")
@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_help_has_each_flag_of_a_recipe_once(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With its meaning and its default; the recipe's own come before those of every run."""
    args_type = module.load(recipe).Args
    fields = {field.name: field.default for field in dataclasses.fields(args_type)}
    found = groups(args_type)
    assert len(found) > 3
    names = [name for group in found.values() for name in group]
    assert sorted(names) == sorted(fields)
    own = inspect.get_annotations(args_type)
    assert set(names[: len(own)]) == own.keys()
    assert list(found)[-1] == "every_run"
    for group in found.values():
        for name, (default, text) in group.items():
            assert default == fields[name]
            assert text, f"--{name} has no meaning"
    printed = help_of(args_type, capsys)
    assert options(printed) == [name.replace("_", "-") for name in names]
    told = re.sub(r"[\s|│]+", " ", printed)
    for group in found.values():
        for _, text in group.values():
            assert text in told


@pytest.mark.usefixtures("one_column")
@pytest.mark.parametrize("args_type", [Args, Above, Adopted, Lengths], ids=lambda one: one.__name__)
def test_help_of_a_user_s_own_class(args_type: type, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(options(help_of(args_type, capsys))) == sorted(
        field.name.replace("_", "-") for field in dataclasses.fields(args_type)
    )


NOTEBOOK = """
import dataclasses
from common.run import cli

@dataclasses.dataclass(frozen=True)
class Args:
    # a group
    lr: float = 0.1
    seed: int = 3

@dataclasses.dataclass(frozen=True)
class More({base}):
    # another
    width: int = 8
"""


@pytest.mark.usefixtures("one_column")
@pytest.mark.parametrize("base", ["Args", "Below"])
def test_help_without_a_source_has_no_groups(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a class in a notebook: all flags, in one list, also where the source of a class below it can be read."""
    found: dict[str, Any] = {"__name__": __name__, "Below": Below}
    exec(NOTEBOOK.format(base=base), found)
    args_type = found["More"]
    assert cli.grouped(args_type) is args_type
    printed = help_of(args_type, capsys)
    assert options(printed) == [field.name for field in dataclasses.fields(args_type)]
    assert "group" not in printed
    assert cli.parse(args_type, ["--width", "9"]).width == 9


# --- what another value of a flag would save ---


@dataclasses.dataclass(frozen=True)
class Noted:
    """Train a test that has flags to advise."""

    recompute: Annotated[str, bounds.Saves("memory", "full")] = "none"  # what is computed twice
    lr: float = 0.1  # rate
    compress: Annotated[str, bounds.Saves("exposed", "bf16")] = "none"  # what is sent
    micro_batch_size: bounds.Smaller = 0  # samples
    keep: Annotated[float, bounds.Fraction, bounds.Saves("memory", "0.5")] | None = None  # inside another type


def test_flags_that_free_memory_in_their_order() -> None:
    """And none that frees it already."""

    def advised(*flags: str) -> list[str]:
        return [flag for part, flag in cli.savings(cli.parse(Noted, list(flags))) if part == "memory"]

    smaller = "--micro-batch-size smaller, where 0 is the largest (now {})"
    assert advised() == ["--recompute full (now none)", smaller.format(0), "--keep 0.5 (now None)"]
    assert advised("--recompute", "full", "--micro-batch-size", "4") == [smaller.format(4), "--keep 0.5 (now None)"]


def test_flags_that_shorten_a_part() -> None:
    others = [one for one in cli.savings(Noted()) if one[0] != "memory"]
    assert others == [("exposed", "--compress bf16 (now none)")]
    assert {part for part, _ in cli.savings(Noted(compress="bf16"))} == {"memory"}


# --- config.json of before the flags of every run stood once ---

# What each recipe wrote into its config.json when it had all of its flags itself, and no option was given.
BEFORE = json.loads(Path(__file__).with_name("flags_before.json").read_text())
# Defaults that have changed since; CHANGELOG.md names them. A config.json still gives the old ones.
CHANGED = {"resnet": {"model": "auto", "epochs": 20, "lr": 0.4}}
SET = {  # another value of each flag of every run
    **{"out": "elsewhere", "resume": "runs/old", "seed": 7, "backend": "gloo", "log_every": 3, "eval_every": 4},
    **{"save_every": 5, "keep": 6, "async_save": True, "check_every": 0, "on_bad_state": "rewind", "profile": 2},
    **{"matmul_precision": "high", "deterministic": True, "hang_timeout": 20.5, "init": "weights", "keep_best": "loss"},
    **{
        "patience": 8,
        "max_skips": 9,
        "dtype": "float64",
        "compile": True,
        "inexact": True,
        "ema": 0.5,
        "tracker": "mlflow",
    },
}


@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_flags_and_defaults_of_before(recipe: str, tmp_path: Path) -> None:
    """An old config.json gives the run of then: no flag is missing, and no other default has changed."""
    args_type = module.load(recipe).Args
    before, changed = BEFORE[recipe], CHANGED.get(runner.workload(recipe), {})
    of_every_run = {field.name for field in dataclasses.fields(session.TrainArgs)}
    assert SET.keys() == of_every_run - {*cli.OF_ONE_RUN}
    now = dataclasses.asdict(args_type())
    assert {name: now.get(name) for name in before} == before | changed
    old = args_type(**{name: before[name] for name in changed})
    assert cli.parse(args_type, ["--config", write_config(tmp_path, before)]) == old
    others = {name: value for name, value in SET.items() if name in before}
    assert len(others) >= 15
    path = write_config(tmp_path, before | others)
    assert cli.parse(args_type, ["--config", path]) == dataclasses.replace(old, **others)
