"""docs/explorer.html, in a browser: it predicts what tools.plan predicts, by keyboard and by touch, and asks nobody."""

import importlib.util
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from common.run import cli
from tools.plan import explorer, known, sweep, transformer
from tools.plan.count import Case

from tests.harness import browser
from tools import about

ARROW_RIGHT, ARROW_LEFT, ARROW_DOWN, TAB = ("ArrowRight", 39), ("ArrowLeft", 37), ("ArrowDown", 40), ("Tab", 9)
JAVASCRIPT_LINES = 570
# A constant, a formula and a rule of a layout, each changed a little: (what, into what)
MUTANTS = {
    "constant": ('"MOVED": 29', '"MOVED": 29.0001'),
    "formula": ("Math.log2(n) * (kind", "Math.log10(n) * (kind"),
    "layout": ("gradients[micro_batches > 1 ? 1 : 0]", "gradients[0]"),
    "memory": ("sharded && several ? (own", "sharded && several ? 0 * (own"),
    "hardware": ('"launch_s": 6e-06', '"launch_s": 6.001e-06'),
    "attention": ("(3.5 + again + first)", "(3 + again + first)"),
    "contention": ("machine.reach.contention * (sends - out)", "0"),
    "experts": ("calls * activation * shape.top_k", "calls * activation"),
    "replicas": ("1 / layout.every, own", "1, own"),
    "context": ("layout.micro_batch * shape.seq_len / cp", "layout.micro_batch * shape.seq_len"),
}
OUTSIDE = "http://127.0.0.1:9/"


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Page]:
    if not shutil.which(browser.CHROMIUM):
        assert "CI" not in os.environ, "CI installs chromium: apt install chromium"
        pytest.skip("needs chromium: apt install chromium")
    with browser.page() as opened:
        yield opened


@pytest.fixture
def fresh(page: browser.Page) -> browser.Page:
    """The page as it is committed, just opened."""
    page.resize(1280, 900)
    page.open(explorer.PAGE)
    return page


def choices(count: int) -> list[dict[str, Any]]:
    """Random choices of all controls, of layouts whose ranks divide."""
    draw = random.Random(21)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        one = {key: draw.choice(values) for key, values in explorer.values().items()}
        if not explorer.flag(one["strategy"]) or one["gpus"] % one["parts"] == 0:
            found.append(one)
    return found


def different(page: browser.Page, count: int) -> list[str]:
    """What the page predicts, beside Python: where it is not the same."""
    asked = choices(count)
    wrong = []
    for one, mine in zip(asked, page.evaluate(f"{asked}.map(plan)"), strict=True):
        right = explorer.predicted(one)
        assert right.keys() == mine.keys()
        for key, value in right.items():
            # Small differences of large times are as exact as those times.
            near = 1e-9 * right["step_s"] if key in ("launch_s", "exposed_s", "hidden_s") else 0.0
            if mine[key] != pytest.approx(value, rel=1e-9, abs=near):
                wrong.append(f"{key}: {mine[key]} for {value} of {one}")
    return wrong


def test_equal_to_python(fresh: browser.Page) -> None:
    assert not different(fresh, 200)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_changed_page_is_not_equal(page: browser.Page, tmp_path: Path, mutant: str) -> None:
    what, into = MUTANTS[mutant]
    text = explorer.PAGE.read_text()
    assert what in text
    (tmp_path / "mutant.html").write_text(text.replace(what, into))
    page.open(tmp_path / "mutant.html")
    assert different(page, 40)


def test_error_is_that_of_known(fresh: browser.Page) -> None:
    asked = choices(80)
    steps = [0.0313 * 1.31**i for i in range(40)]  # up to 20 minutes
    pairs = [[one, steps[i % 40]] for i, one in enumerate(asked)]
    said = fresh.evaluate(f"{pairs}.map(([input, step_s]) => sentence(input, step_s))")
    right = [
        (
            explorer.machine(one),
            known.Step(
                one["gpus"],
                step,
                tokens=one["seq_len"],
                local_tokens=one["sequences"] * one["seq_len"],
                tp=one["parts"] if one["strategy"] == "tensor_gpt" else 1,
                pp=one["parts"] if one["strategy"] == "pipeline_gpt" else 1,
            ),
        )
        for one, step in pairs
    ]
    assert said == [known.sentence("gpt", *one) for one in right]
    assert len({text[:20] for text in said}) == 2, "some rows are like these, and of others there are none"


def shown(page: browser.Page) -> str:
    """All figures of the summary."""
    return str(page.evaluate("['headline', 'summary', 'line'].map((id) => byId(id).textContent).join('\\n')"))


def test_each_slider_moves_by_keyboard(fresh: browser.Page) -> None:
    for key, values in explorer.values().items():
        recipe = "tensor_gpt" if key == "parts" else "fsdp_gpt"
        # On a network that is slower than the links.
        fresh.evaluate(f"choose({{...DATA.default, hardware: 'h100-eth', strategy: '{recipe}'}})")
        before = shown(fresh), fresh.evaluate(f"state.{key}")
        fresh.evaluate(f"byId('{key}').focus()")
        kind = fresh.evaluate(f"byId('{key}').type")
        at = values.index(before[1])
        there = -1 if at == len(values) - 1 else 1
        moves = (ARROW_LEFT, ARROW_RIGHT) if kind == "range" else (("ArrowUp", 38), ARROW_DOWN)
        fresh.press(*moves[there == 1])
        assert fresh.evaluate(f"state.{key}") == values[at + there], key
        assert shown(fresh) != before[0], f"{key} changes nothing"
        if kind == "range":
            assert fresh.evaluate(f"byId('{key}').ariaValueText") == fresh.evaluate(f"byId('{key}-says').textContent")


def test_what_the_keyboard_reaches_is_seen(fresh: browser.Page) -> None:
    fresh.evaluate("byId('hardware').focus()")
    reached = [("hardware", "none")]
    for _ in range(len(explorer.values()) + 2):
        fresh.press(*TAB)
        reached.append(
            fresh.evaluate("((a) => [a.id || a.tagName, getComputedStyle(a).outlineStyle])(document.activeElement)")
        )
    assert [one for one, _ in reached] == [*explorer.values(), "SUMMARY", "BUTTON", "BUTTON"]
    assert {outline for _, outline in reached[1:]} == {"solid"}


def args_of(recipe: str) -> type:
    """A recipe's Args, for its parser; nothing is trained."""
    path = about.ROOT / "recipes" / recipe / "train.py"
    spec = importlib.util.spec_from_file_location(f"explored_{recipe}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the types of a dataclass's fields are looked up
    spec.loader.exec_module(module)
    return module.Args  # type: ignore[no-any-return]


def check_command(command: str, one: dict[str, Any]) -> None:
    """It is what the planner would print, and the recipe takes its flags."""
    recipe, *flags = command.partition("recipes/")[2].split()
    assert recipe == one["strategy"]
    case = Case(about.ROOT / "recipes" / recipe, one["gpus"], tuple(flags))
    assert command == sweep.command(case, explorer.machine(one))
    args = cli.parse(args_of(recipe), flags)
    shape = explorer.shape(one["model"], one["seq_len"], recipe)
    flag = explorer.flag(recipe)
    expected = {
        "width": shape.width,
        "num_layers": shape.layers,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "mlp_width": shape.mlp_width,
        "tied": shape.tied,
        "vocab_size": shape.vocab,
        "seq_len": one["seq_len"],
        "global_batch_size": one["sequences"] * one["gpus"],
        "micro_batch_size": min(one["micro_batch"], one["sequences"] * explorer.sharing(one)),
        "recompute": one["recompute"],
        "dtype": "auto" if explorer.machine(one).bfloat16 else "float16",
        **({flag.lstrip("-"): one["parts"]} if flag else {}),
        **({"experts": shape.experts, "top_k": shape.top_k} if shape.experts > 1 else {}),
    }
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("strategy", explorer.STRATEGIES)
def test_command_is_taken_by_the_recipe(fresh: browser.Page, strategy: str) -> None:
    of_hardware = {one["hardware"]: one for one in choices(500) if one["strategy"] == strategy}
    some = [of_hardware[name] for name in ("v100-ib", "h100-ib")]
    for one, command in zip(some, fresh.evaluate(f"{some}.map(commandOf)"), strict=True):
        check_command(command, one)


def test_layouts(fresh: browser.Page) -> None:
    rows = fresh.evaluate("[...document.querySelectorAll('#layouts tr')].map((row) => row.textContent)")
    assert 4 < len(rows) <= 12
    before = fresh.evaluate("byId('line').textContent")
    at = 1 + next(i for i, row in enumerate(rows) if row.startswith("tensor_gpt --tp 2"))
    fresh.click(f"#layouts tr:nth-child({at}) button")
    state = fresh.evaluate("state")
    assert (state["strategy"], state["parts"]) == ("tensor_gpt", 2)
    command = fresh.evaluate("byId('line').textContent")
    assert command != before
    check_command(command, state)
    assert fresh.evaluate("byId('file').getAttribute('href')") == "../recipes/tensor_gpt/train.py"
    assert (explorer.PAGE.parent / "../recipes/tensor_gpt/train.py").exists()
    assert fresh.evaluate("document.activeElement.ariaPressed") == "true", "the keyboard is where it was"
    # What is listed first is the fastest of what fits.
    machine = explorer.machine(state)
    every = fresh.evaluate("DATA.layouts.map((one) => ({...state, ...one})).filter((one) => !refusal(one))")
    every = [one for one in every if one["strategy"] not in explorer.APART]
    found = [explorer.predicted(one) for one in every]
    best = max(one["tokens_s"] for one in found if one["peak_bytes"] <= machine.memory_bytes)
    fresh.click("#layouts tr:first-child button")
    assert explorer.predicted(fresh.evaluate("state"))["tokens_s"] == pytest.approx(best)


@pytest.mark.parametrize("strategy", ["moe_gpt", "diloco_gpt"])
def test_another_training_is_compared_with_itself(fresh: browser.Page, strategy: str) -> None:
    read = "[...document.querySelectorAll('#layouts button')].map((one) => one.textContent.split(' ')[0])"
    assert strategy not in fresh.evaluate(read)
    fresh.evaluate(f"choose({{strategy: '{strategy}'}})")
    assert {*fresh.evaluate(read)} == {strategy}


def test_replicas_send_as_often_as_by_default() -> None:
    assert sweep.default("diloco_gpt", "--inner-steps") == transformer.INNER_STEPS


def test_layout_that_cannot_be(fresh: browser.Page) -> None:
    fresh.evaluate("choose({strategy: 'tensor_gpt', parts: 16, gpus: 8})")
    assert shown(fresh).startswith("This layout cannot be: --tp 16 needs at least 16 GPUs.")
    assert fresh.evaluate("byId('line').textContent") == "--tp 16 needs at least 16 GPUs."


def test_experts_that_do_not_divide_cannot_be(fresh: browser.Page) -> None:
    fresh.evaluate("choose({strategy: 'moe_gpt', parts: 16, gpus: 64})")
    assert shown(fresh).startswith("This layout cannot be: --ep 16 must divide the 8 experts.")
    fresh.evaluate("choose({parts: 8})")
    assert " --ep 8" in fresh.evaluate("byId('line').textContent")


def test_no_request_leaves_the_page(fresh: browser.Page, tmp_path: Path) -> None:
    fresh.evaluate("choose({gpus: 1024})")
    fresh.click("#layouts tr:first-child button")
    assert fresh.requested() == [explorer.PAGE.resolve().as_uri()]
    # Nor could it: the same page with a picture from elsewhere asks for it only without its policy.
    text = explorer.PAGE.read_text().replace("</main>", f'<img src="{OUTSIDE}"></main>')
    for name, written in (("kept", text), ("lost", re.sub(r'<meta http-equiv="Content-Security-Policy".*', "", text))):
        file = tmp_path / f"{name}.html"
        file.write_text(written)
        fresh.open(file)
        blocked = [e for e in fresh.events if e["params"].get("blockedReason") == "csp"]
        assert (OUTSIDE in fresh.requested() and not blocked) == (name == "lost"), fresh.events


def test_readable_by_all(fresh: browser.Page) -> None:
    assert fresh.evaluate("[...byId('controls').elements].map((one) => one.labels.length)") == [1] * len(
        explorer.values()
    )
    assert fresh.evaluate("[...byId('controls').elements].every((one) => one.labels[0].textContent.length > 3)")
    # Each chart has a name, and what it shows in words.
    charts = fresh.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].map((one) => [one.parentElement.id, one.ariaLabel,"
        "byId(one.getAttribute('aria-describedby')).textContent])"
    )
    assert [one for one, _, _ in charts] == ["mfu", "rate", "shares", "memory"]
    assert all(name and "on 64 GPUs" in words for _, name, words in charts)
    # Lines differ without their colors.
    dashes = "Object.keys(DATA.strategies).map((one) => getComputedStyle(document.querySelector(`.curve.${one}`)))"
    assert len(set(fresh.evaluate(f"{dashes}.map((one) => one.strokeDasharray)"))) == len(explorer.STRATEGIES)


def test_question_travels_in_the_address(fresh: browser.Page) -> None:
    """What the address says is asked; what no control can be is left as it is."""
    llama = explorer.model_names().index("Llama 3 8B")
    fresh.evaluate(f"choose({{strategy: 'context_gpt', model: {llama}, seq_len: 32768, budget: 2e12}})")
    address, state, said = fresh.evaluate("location.href"), fresh.evaluate("state"), shown(fresh)
    assert "#" in address
    fresh.evaluate("choose(DATA.default)")
    assert shown(fresh) != said
    for query in (address.partition("#")[2], address.partition("#")[2] + "&gpus=7&nobody=1"):
        fresh.evaluate(f"location.hash = '{query}'")
        fresh.evaluate("ask(location.hash)")
        assert (fresh.evaluate("state"), shown(fresh)) == (state, said)
        fresh.evaluate("choose(DATA.default)")


def test_budget_is_that_of_the_planner(fresh: browser.Page) -> None:
    now = explorer.predicted(explorer.DEFAULT)
    assert known.span(now["days"] * 86_400) in fresh.evaluate("byId('training').textContent")


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(fresh: browser.Page, width: int) -> None:
    fresh.resize(width, 844)
    for state in ("{}", "{model: 10, hardware: 'rtx4090-pcie', gpus: 65536, strategy: 'pipeline_gpt'}"):
        fresh.evaluate(f"choose({state})")
        assert fresh.evaluate("document.documentElement.scrollWidth") == width


def test_committed_page_is_what_is_written() -> None:
    assert explorer.PAGE.read_text() == explorer.page(), "run python -m tools.plan --html"


def test_javascript_is_short() -> None:
    (script,) = re.findall(r"<script>\n(.*?)</script>", explorer.page(), re.DOTALL)
    assert len(script.splitlines()) <= JAVASCRIPT_LINES
    assert max(map(len, script.splitlines())) <= 120
