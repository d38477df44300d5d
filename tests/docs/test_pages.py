"""The parts of docs/ that commands write, and what every page promises: links that lead somewhere, flags that exist."""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import session
from common.workloads import gpt, moe, text
from tools.copy.__main__ import parser as copier
from tools.evaluate import flags as evaluate
from tools.exercise.__main__ import parser as exerciser
from tools.judge.__main__ import make_parser as judge
from tools.lesson.__main__ import main as lesson_flags
from tools.plan.__main__ import parser as planner
from tools.profile.__main__ import main as profile
from tools.prove import flags as prove

from tests.faults import table
from tests.harness import pages, runner
from tests.recipes import test_moe, test_porting

ROOT = runner.ROOT
DOCS = sorted(ROOT.glob("docs/**/*.md"))
COURSE = ROOT / "docs" / "course"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS, *ROOT.glob("recipes/*/README.md")])
README = (ROOT / "README.md").read_text()
# What pages name of other programs, and of cli.parse itself.
OTHER_FLAGS = {
    "help",
    "config",
    "dry-run",
    "option",
    "config_file",
    "cpus-per-gpu",
    "cpus-per-task",
    "array",
    "numa-binding",
    "doctor",
    "wait",
    "json",
    "gpus",
    "shm-size",
    "user",
    "build-arg",
    "since",
    "local-rank",
    "local_rank",
    *(
        word[2:]
        for made in (planner, copier, exerciser, judge)
        for one in made()._actions
        for word in one.option_strings
    ),
    *(name.replace("_", "-") for name in inspect.signature(profile).parameters),
    *(name.replace("_", "-") for name in inspect.signature(lesson_flags).parameters),
    *(field.name for field in dataclasses.fields(evaluate.Args)),
    *(field.name for field in dataclasses.fields(prove.Args)),
}  # of other programs as well
FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*)")

PAGE = "# Title\n\nProse.\n\n<!-- begin one -->\nold\n<!-- end one -->\n\nMore.\n<!-- begin two -->\n<!-- end two -->\n"


def test_parts_are_replaced_and_prose_stays() -> None:
    text = pages.fill(PAGE, one=r"| a \1 |")
    assert pages.parts(text) == {"one": r"| a \1 |", "two": ""}
    assert text.split() == PAGE.replace("old", r"| a \1 |").split()
    assert pages.fill(text, one=r"| a \1 |") == text


def test_each_row_of_the_security_page_names_its_tests() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    rows = page.partition("## Who can do what")[2].partition("\n## ")[0].split("\n|")[3:]
    assert len(rows) >= 7
    for row in rows:
        named = re.findall(r"`(tests/\S+)::(\w+)`", row.rsplit("|", 2)[1])
        assert named, row
        assert all(f"\ndef {test}(" in (ROOT / file).read_text() for file, test in named), row


def test_each_row_of_the_porting_page_names_its_tests() -> None:
    page = (ROOT / "docs" / "porting.md").read_text()
    rows = [line for line in page.partition("## Where it goes")[2].splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| in the script")]
    assert len(rows) >= 40
    for row in rows:
        named = re.findall(r"`(\S+)::(\w+)`(?: \(([\w, ]+)\))?", row.rsplit("|", 2)[1])
        assert named, row
        for file, test, examples in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text(), row
            ported = {name for name, _ in test_porting.PORTS}
            assert {one for one in examples.split(", ") if one} <= ported, row


def test_missing_part() -> None:
    """Or a command would measure for half an hour and write nothing."""
    with pytest.raises(KeyError, match="has 0 parts <!-- begin three -->"):
        pages.fill(PAGE, three="new")
    with pytest.raises(KeyError, match="has 2 parts"):
        pages.fill(PAGE + PAGE, one="new")


def row(fault: str, recipe: str, **more: str) -> table.Row:
    """One row of the fault matrix, that passed."""
    plain = {"ranks": "2", "runs": "1", "passes": "1", "steps_lost": "", "notice_s": "", "recover_s": ""}
    return {"fault": fault, "recipe": recipe, **plain, "message": f"as {recipe} says", **more}


def test_faults_page_shows_every_failure() -> None:
    first, second, third, *others = table.RECIPES
    rows = [
        row("disk: full", first, recover_s="0.9"),
        row("disk: full", second, recover_s="10.2", runs="3", passes="2", message="the worst | `of all`"),
        row("disk: full", third, runs="0", passes="0", message="not applicable: no --data"),
        row("rank: hangs", first, runs="4", passes="4", notice_s="2.0"),
    ]
    parts = table.render(rows, ["`command`, yesterday", "`other`, today", "`command`, today"])
    assert parts["measured"] == "`command`, today\n\n`other`, today"
    not_run = 2 * len(table.RECIPES) - 4
    assert parts["sum"].startswith("**2 of 3 pairs passed**: 2 faults")
    assert f"1 pairs do not apply; {not_run} were not run. The pairs took 8 runs, of which 0 only" in parts["sum"]
    assert "| disk | 1 | 2 | 1 |  |  | 10.2 |" in parts["families"].splitlines()
    assert "| rank | 1 | 1 | 1 |  | 2.0 |  |" in parts["families"].splitlines()
    assert f"- **failed**, full, {second}, 2 of 3 passed: `the worst | 'of all'`" in parts["disk"].splitlines()
    assert f"- not run, full: {', '.join(others)}" in parts["disk"].splitlines()
    assert f"- not run, hangs: {', '.join([second, third, *others])}" in parts["rank"].splitlines()
    assert "failed" not in parts["rank"]
    assert f"- hangs: `as {first} says`" in parts["rank"]


def test_runs_that_repeat_a_pair_are_not_counted_as_faults() -> None:
    """Nor are hundreds of flipped bits in one file: the sum counts pairs, and says how many runs they took."""
    rows = [row(table.BITS, table.RECIPES[0], runs="200", passes="200"), row("disk: full", table.RECIPES[0])]
    text = table.render(rows, ["`command`, today"])["sum"]
    assert "**2 of 2 pairs passed**" in text
    assert "took 201 runs, of which 200 only look\nfor one flipped bit" in text


def test_names_of_faults_that_begin_alike_are_one() -> None:
    names = ["raises, data", "raises, backward", "full", "mutant, nobody watches"]
    assert table.grouped(names) == ["raises (2 ways)", "full", "and as mutants: nobody watches"]


def test_rows_of_some_recipes_are_replaced(tmp_path: Path) -> None:
    """And those of the others stay, through the file, as they were measured."""
    one, other = table.RECIPES[:2]
    old = [row("disk: full", recipe, message='a, "b" | c') for recipe in (one, other, "a_recipe_that_is_gone")]
    table.save(old, tmp_path / "rows.csv")
    assert table.read(tmp_path / "rows.csv") == sorted(old, key=lambda each: each["recipe"])
    new = [row("disk: full", one, passes="0")]
    assert table.replace(table.read(tmp_path / "rows.csv"), new, [one]) == [old[1], *new]
    new = [row("rank: hangs", one), row("disk: full", other, passes="0")]
    assert table.replace(old, new, []) == [old[0], *new]


def test_same_fault_run_twice() -> None:
    """The larger figure, and the message of the run that failed, without what is of this machine."""
    folder = "/tmp/pytest-of-somebody/pytest-78/ddp_gpt1"
    measured = {"ranks": 2, "runs": 1, "passes": 1, "steps_lost": 1, "notice_s": None, "recover_s": 0.26}
    good = {"fault": "disk: full", "recipe": "ddp_gpt", "message": "well\nand more", **measured}
    bad = good | {
        "passes": 0,
        "recover_s": 0.1,
        "message": f"fails: process 7 on {table.platform.node()}, {folder}/out",
    }
    merged = table.merge([good, bad])
    assert merged == row("disk: full", "ddp_gpt") | {
        **{"runs": "2", "passes": "1", "steps_lost": "1", "recover_s": "0.3"},
        "message": "fails: process N on H, RUN/out",
    }


def test_page_stays_if_pytest_does_not_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle, it has recorded some rows, and the others would be lost."""
    row = {"fault": "disk: full", "recipe": "ddp_gpt", "ranks": 2, "message": ""}
    row |= {"runs": 1, "passes": 1, "steps_lost": None, "notice_s": None, "recover_s": None}

    def run(codes: list[int]) -> list[table.Row]:
        def ended(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
            with Path(env["FAULTS_RECORD"]).open("a") as file:
                file.write(json.dumps(row) + "\n")
            return subprocess.CompletedProcess([], codes.pop(0))

        monkeypatch.setattr(table.subprocess, "run", ended)
        return table.run(["ddp_gpt"], "", len(codes))

    assert [found["runs"] for found in run([0, 1])] == ["2"]
    with pytest.raises(SystemExit, match="pytest ended with code -9 before the last fault"):
        run([0, -9])


def test_only_the_recipes_that_are_named_run() -> None:
    assert table.selection([]) == ""
    assert table.selection(["dp_resnet", "ddp_gpt"]) == "(dp_resnet and not ddp_resnet) or (ddp_gpt)"


def test_page_of_faults_is_that_of_its_file() -> None:
    """The page was not edited where figures are, nor the file without the page."""
    page = table.PAGE.read_text()
    measured = pages.parts(page)["measured"].split("\n\n")
    assert pages.fill(page, **table.render(table.read(table.FILE), measured)) == page


# --- what every page promises ---------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Links of a page, to files of this repository and to headings, that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        file = page.parent / name if name else page
        if not file.exists():
            yield target
        elif anchor:
            content = text if file == page else (file / "README.md" if file.is_dir() else file).read_text()
            if anchor not in {slug(heading) for heading in re.findall(r"^#+ (.*)$", content, re.MULTILINE)}:
                yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    assert not [*broken_links(page, page.read_text())]


def test_broken_links_are_found() -> None:
    text = "# A `code` heading, here\n[a](docs/index.md) [b](#a-code-heading-here) [c](nowhere.md) [d](#none)"
    assert [*broken_links(ROOT / "README.md", text)] == ["nowhere.md", "#none"]


@functools.cache
def ragged_rows(text: str) -> list[str]:
    """Rows of tables that have more or fewer cells than the row above them: what they show stands under other heads."""
    found = []
    above = 0
    for line in re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if cells and above and cells != above:
            found.append(line)
        above = cells
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_have_as_many_cells_in_each_row(page: Path) -> None:
    assert ragged_rows(page.read_text()) == []


def test_ragged_rows_are_found() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 |\n\n| c |\n|---|\n| `x \\| y` |\n"
    assert ragged_rows(table) == ["| 3 |"]
    assert ragged_rows(f"```\n{table}```\n") == []


@functools.cache
def flags_of(recipe: str) -> set[str]:
    """The flags of a recipe and of its bases, without their dashes; those of a truth value also with no-."""
    (args,) = [
        node for node in ast.parse(runner.source(recipe)).body if isinstance(node, ast.ClassDef) and node.name == "Args"
    ]
    fields = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    kinds = {ast.unparse(node.target): ast.unparse(node.annotation) for node in fields}
    for module, name in (ast.unparse(base).split(".") for base in args.bases):
        inherited = dataclasses.fields(
            getattr({"session": session, "gpt": gpt, "moe": moe, "text": text}[module], name)
        )
        kinds = {field.name: "bool" if field.type is bool else "" for field in inherited} | kinds
    names = {name.replace("_", "-"): kind for name, kind in kinds.items()}
    return {*names, *(f"no-{name}" for name, kind in names.items() if kind == "bool")}


def unknown_flags(text: str) -> Iterator[str]:
    """Flags that no recipe has; and those in a command of one recipe that this recipe does not have."""
    every = set().union(*map(flags_of, runner.RECIPES), OTHER_FLAGS)
    for code in re.findall(r"`(--[^`\n]+)`", text):
        yield from (flag for flag in FLAG.findall(code) if flag not in every)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = line.split("#")[0].replace("`", " ").split()
        recipe = ""  # whose flags follow
        for word in words:
            name = word.removesuffix("/train.py").rpartition("recipes/")[2]
            recipe = name if name in runner.RECIPES else recipe
            found = FLAG.findall(word) if recipe else []
            yield from (f"{recipe} {flag}" for flag in found if flag not in flags_of(recipe) | OTHER_FLAGS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page: Path) -> None:
    """In commands of a recipe, and wherever a page names one."""
    if page.name == "accelerate-traps.md":
        pytest.skip("it is about the flags of another program")
    assert not [*unknown_flags(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    """Modules that a page runs, and scripts that it starts."""
    text = page.read_text()
    modules = re.findall(r"python -m ((?:benchmarks|common|launch|recipes|tests|tools)\.[\w.]*\w)", text)
    scripts = re.findall(r"\b((?:benchmarks|launch|tests|tools)/[\w./]*\w)", re.sub(r"https?://[^\s)]+", "", text))
    paths = [module.replace(".", "/") for module in modules]
    runs = [path for path in paths if (ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists()]
    missing = [name for name in scripts if not (ROOT / name).exists() and name != "launch/site.sh"]  # the user's own
    assert runs == paths
    assert not missing


def test_unknown_flags_are_found() -> None:
    text = "`--lr`, `--no-compile`, `--learn`\nbash launch/torchrun.sh recipes/ddp_gpt --tp 2 \\\n  --width 8  # --no"
    assert [*unknown_flags(text)] == ["learn", "ddp_gpt tp"]
    assert [*unknown_flags("from tensor_gpt --tp 2 to ddp_gpt --tp 2")] == ["ddp_gpt tp"]


# --- what the README shows --------------------------------------------------------------------------------------


def body(recipe: str, function: str) -> str:
    """The lines of a function of a recipe's bare twin, without its docstring, as they stand there."""
    source = (ROOT / "recipes" / recipe / "bare.py").read_text()
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function]
    first, last = found.body[1].lineno - 1, found.end_lineno
    return "\n".join(line.removeprefix("    ") for line in source.splitlines()[first:last])


def lesson(base: str, recipe: str, function: str) -> str:
    """What becomes of a function, as a diff."""
    before, after = (body(name, function).splitlines() for name in (base, recipe))
    lines = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
    return "\n".join(line for line in lines if not line.startswith("@@"))


def test_readme_shows_the_smallest_lesson() -> None:
    shown = "\n\n".join(lesson("dp_resnet", "ddp_resnet", name) for name in ("parallelize", "train_step", "main"))
    assert f"```diff\n{shown}\n```" in README, f"README.md: the code has changed, write\n{shown}"


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 110


def test_readme_shows_the_figures() -> None:
    """Those that the pages have, which commands have measured; and no other in bold."""
    layouts = sum(len(runner.layouts(recipe)) for recipe in runner.SUPERVISED) + len(test_moe.LAYOUTS)
    wanted = [f"**{layouts} layouts**"]
    for page in ("measured/faults", "checkpoints"):
        sums = pages.parts((ROOT / "docs" / f"{page}.md").read_text())["sum"]
        passed, of = re.findall(r"\*\*(\d+) of (\d+) \w+ passed", sums)[0]
        wanted.append(f"**{int(passed):,} of {int(of):,}**")
    calls = pages.parts((ROOT / "docs" / "measured" / "survival.md").read_text())["calls"]
    wanted.append(f"**{re.findall(r'= ([.0-9]+%)', calls)[0]}**")
    peers = pages.parts((ROOT / "docs" / "measured" / "peers.md").read_text())
    rows = r"^\| (\w+[^|]*) \| [^|]* \| ([.0-9]+) "
    each = [dict(re.findall(rows, table, re.MULTILINE)) for table in peers.values()]
    plain = sorted(found["Brigade, float32"] for found in each)
    wanted.append(f"**{plain[0]} to {plain[-1]}**")
    loop = pages.parts((ROOT / "docs" / "measured" / "performance.md").read_text())["loop"]
    added = [*map(float, re.findall(r"^\| \w+ \| [^|]+ \| [^|]+ \| ([-+][.0-9]+) ", loop, re.MULTILINE))]
    assert len(added) == len(loop.splitlines()) - 2
    wanted.append(f"**at most {max(added):.1f} ms**")
    bold = re.findall(r"\*\*([^*]+)\*\*", README)
    assert sorted(wanted) == sorted(f"**{text}**" for text in bold if re.search(r"\d", text))


def test_map_names_every_module() -> None:
    """And no other: the map of common/ in CONTRIBUTING.md, each module on its floor."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Map of common/\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    named, floor = [], ""
    for first, *cells in rows[2:]:  # after the head and the line below it
        if names := re.findall(r"\*\*`([\w/]+)/`\*\*|\*\*(ground|roof)\*\*", first):
            floor = "" if names[0][1] else names[0][0] + "/"
        else:
            named += [f"{floor}{name}" for name in re.findall(r"`(\w+)`", first)]
        assert cells, first
    modules = [path.relative_to(ROOT / "common") for path in (ROOT / "common").rglob("[!_]*.py")]
    assert sorted(named) == sorted(str(path.with_suffix("")) for path in modules if path.parts[0] != "workloads")


def test_index_names_every_page_once() -> None:
    """In lists that number from 1; the chapters of the course stand in an index of their own."""
    index = (ROOT / "docs" / "index.md").read_text()
    linked = re.findall(r"^\d+\. \[[^]]+\]\(([\w/-]+\.(?:md|html))\)", index, re.MULTILINE)
    there = [path for path in [*DOCS, *ROOT.glob("docs/*.html")] if path.name != "index.md" and path.parent != COURSE]
    assert sorted(linked) == sorted([*(str(path.relative_to(ROOT / "docs")) for path in there), "course/index.md"])
    lists = [re.findall(r"^(\d+)\. ", part, re.MULTILINE) for part in index.split("\n## ")[1:]]
    assert [len(numbers) > 0 for numbers in lists] == [True] * 3
    assert all(numbers == [str(i) for i in range(1, len(numbers) + 1)] for numbers in lists)
    chapters = re.findall(r"^(\d+)\. \[[^]]+\]\((\S+)\): ", (COURSE / "index.md").read_text(), re.MULTILINE)
    names = sorted(path.name for path in COURSE.glob("[0-9]*.md"))
    assert chapters == [(str(i), name) for i, name in enumerate(names, 1)]


def filled(path: Path) -> set[str]:
    """The parts that a command fills in."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    writes = [call for call in calls if ast.unparse(call.func) == "pages.write"]
    return {keyword.arg or "" for call in writes for keyword in call.keywords}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_page_has_the_parts_of_its_command(page: Path) -> None:
    """Else a command measures for minutes, and fails when it writes."""
    in_tests = {"checkpoints": "tests/layouts_table.py", "gpu-counts": "tests/cuda_table.py", "tests": "tests/timed.py"}
    in_tests["troubleshooting"] = "tests/symptoms_table.py"
    several: dict[str, tuple[str, ...]] = {"judge": ("judge", "judge_libraries")}
    several |= {"performance": ("duel", "memory", "stop_scale"), "survival": ("survival", "saves", "stores", "restart")}
    several["large_batch"] = ("large_batch", "variance")
    chapter = page.parent == COURSE and page.name != "index.md"
    names = [f"benchmarks/{name}.py" for name in ("course",) * chapter or several.get(page.stem, (page.stem,))]
    commands = [ROOT / name for name in (in_tests.get(page.stem, names[0]), *names[1:])]
    has = set(pages.parts(page.read_text()))
    if page.stem == "faults":
        assert has == {"sum", "measured", "families", *(row["fault"].split(": ")[0] for row in table.read(table.FILE))}
    else:
        assert has == set().union(*(filled(command) for command in commands if command.exists()))


def test_table_of_what_is_left_out_names_what_is_there() -> None:
    """Each row has a file of common/ or launch/ that prints or refuses, and a test file."""
    rows = re.findall(r"^\| .+ \| (`.+`) \| `(tests/.+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for sources, test in rows:
        assert (ROOT / test).is_file(), test
        for name in re.findall(r"`([\w/]+\.(?:py|sh))`", sources):
            (path,) = (one for one in (ROOT / name, ROOT / "common" / name) if one.is_file())
            said = path.read_text()
            assert any(word in said for word in ("print0", "UserError", "note: ")), name
