"""The pages as the generator reads them: the repository's own, with links that lead to pages of the site.

The pages are written for a plain git host, where a link leads to a folder or a source file. Here each of these becomes
a page. Nothing in the repository is changed. The order of the pages is that of docs/index.md, of the table of recipes
in README.md, and of the chain of recipes for the lessons.
"""

import functools
import json
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools import about
from tools.about import ROOT
from tools.lesson import diff

CONTEXT = 3  # unchanged lines around each change of a lesson
LANGUAGES = {".py": "py", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}  # of source files, which become pages
OUTSIDE = re.compile(r"[a-z]+:")  # a link to another host, or to a mail address
HREF = re.compile(r'(?<=href=")[^":#]+(?=")')
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"  # source text would hide the pages that explain it
Nav = list[dict[str, Any]]


# --- Which pages there are --------------------------------------------------------------------------------------


def written() -> list[Path]:
    """The repository's pages, from its root."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/README.md")]
    files += ROOT.glob("common/workloads/*.LICENSE.md")
    return sorted(path.relative_to(ROOT) for path in files)


def linked_files() -> list[Path]:
    """Source files that a page links to, and those of each recipe, which become pages."""
    found = {path.relative_to(ROOT) for path in ROOT.glob("recipes/*/*.py")}
    for page in written():
        for target in links((ROOT / page).read_text()):
            file = (ROOT / page.parent / target.partition("#")[0]).resolve()
            if file.suffix in LANGUAGES and file.is_file():
                found.add(file.relative_to(ROOT))
    for page in ROOT.glob("docs/**/*.html"):
        files = ((page.parent / target).resolve() for target in HREF.findall(page.read_text()))
        found |= {file.relative_to(ROOT) for file in files if file.suffix in LANGUAGES and file.is_file()}
    return sorted(found)


def staged(path: Path) -> str:
    """Where a file of the repository stands among the generator's pages."""
    if path.suffix == ".md":
        return str(path.parent / "index.md" if path.name == "README.md" else path)
    return f"{path}.md" if path in functools.cache(linked_files)() else str(path)


def bases() -> list[tuple[str, str]]:
    """Each recipe with a base, behind it: the steps of the chain."""
    found = ((re.findall(r"^Base: recipes/(\w+)\.", about.source(name), re.MULTILINE), name) for name in order())
    return [(base[0], name) for base, name in found if base]


def order() -> list[str]:
    """The recipes, as README.md's table names them.

    Raises:
        ValueError: it does not name each once.
    """
    names = re.findall(r"^\| .* \| \[\w+\]\(recipes/(\w+)\) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    if sorted(names) != about.RECIPES:
        raise ValueError(f"README.md's table has the recipes {names}, and recipes/ has {about.RECIPES}")
    return names


# --- What they say ----------------------------------------------------------------------------------------------


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """A page with its parts outside of fenced code changed."""
    parts = re.split(r"^([ ]*(?P<fence>`{3,}|~{3,}).*?^[ ]*(?P=fence)[`~]*[ ]*$)", text, flags=re.MULTILINE | re.DOTALL)
    # Text, fenced code, its fence, text, ...
    return "".join(change(part) if i % 3 == 0 else part for i, part in enumerate(parts) if i % 3 < 2)


def links(text: str) -> list[str]:
    """Targets of a page's links and pictures inside the repository."""
    found: list[str] = []

    def look(part: str) -> str:
        found.extend(re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", part)))
        return part

    outside_of_code(text, look)
    return [target for target in found if not OUTSIDE.match(target) and not target.startswith("#")]


def relinked(page: Path, text: str) -> str:
    """A page with its links as those of the site.

    Raises:
        ValueError: a link leads to no file, or to one that is not on the site.
    """
    here = posixpath.dirname(staged(page))

    def one(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if OUTSIDE.match(match[1]) or not target:
            return match[0]
        file = (ROOT / page.parent / target).resolve()
        if file.is_dir():
            file = file / "README.md"
        if not file.is_file() or not file.is_relative_to(ROOT):
            raise ValueError(f"{page}: the link {match[1]} leads to no page of the site")
        found = posixpath.relpath(staged(file.relative_to(ROOT)), here or ".")
        return f"]({found}{'#' * bool(anchor)}{anchor})"

    return outside_of_code(text, lambda part: re.sub(r"\]\(([^)\s]+)\)", one, part))


def relinked_html(page: Path) -> str:
    """A page that is HTML already, likewise; a folder without a page becomes the first page of the site."""

    def one(match: re.Match[str]) -> str:
        file = (ROOT / page.parent / match[0]).resolve()
        file = file / "README.md" if (file / "README.md").is_file() else file
        name = "index.md" if file.is_dir() else staged(file.relative_to(ROOT))
        return posixpath.relpath(re.sub(r"\.md$", ".html", name), posixpath.dirname(str(page)))

    return HREF.sub(one, (ROOT / page).read_text())


def adapted(text: str) -> str:
    """What GitHub's Markdown takes and Python's does not: folded parts, nested lists, and bars in a table's code."""

    def change(part: str) -> str:
        part = part.replace("<details>", '<details markdown="1">')
        lines: list[str] = []
        in_list = False
        for line in part.splitlines(keepends=True):
            if re.match(r"([-*]|\d+\.) ", line):
                in_list = True
            elif line.strip() and not line.startswith("  "):
                in_list = in_list and bool(lines) and bool(lines[-1].strip())  # a lazy line of an entry
            if in_list and re.match(r" {2,3}\S", line):
                lines.append(f"    {line.lstrip()}")
            elif line.startswith("|"):
                lines.append(re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line))
            else:
                lines.append(line)
        return "".join(lines)

    return outside_of_code(text, change)


def source_page(path: Path) -> str:
    """A source file as a page."""
    code = (ROOT / path).read_text().rstrip("\n")
    return f'{HIDDEN}# {path}\n\n````` {{ .{LANGUAGES[path.suffix]} linenums="1" }}\n{code}\n`````\n'


def lesson_name(base: str, name: str) -> str:
    """Page of a lesson."""
    return f"lessons/{base}-to-{name}.md"


def lesson_page(base: str, name: str) -> str:
    """What changes from one twin to the next, by function."""
    found = diff.lesson(base, name, "bare.py")
    parts = [
        f"# From {base} to {name}",
        f"What changes in `bare.py`, function by function and without docstrings: {found.count()}. "
        f"`python -m tools.lesson {base} {name}` prints the same. Whole files: "
        + " and ".join(f"[{one}](../recipes/{one}/bare.py.md)" for one in (base, name))
        + f". What they do: [{base}](../recipes/{base}/index.md), [{name}](../recipes/{name}/index.md).",
    ]
    for section in found.changed:
        code = "\n".join(section.lines(CONTEXT))
        parts += [f"## {section.name}", f"````` diff\n{code}\n`````"]
    if found.same:
        parts.append(f"The same in both: {', '.join(f'`{one}`' for one in found.same)}.")
    return HIDDEN + "\n\n".join(parts) + "\n"


def lessons_page() -> str:
    """The lessons, in the order of the chain."""
    rows = [
        f"| [{base} to {name}]({posixpath.basename(lesson_name(base, name))}) "
        f"| {diff.lesson(base, name, 'bare.py').count()} |"
        for base, name in bases()
    ]
    head = (
        "# Lessons\n\nEach recipe has a base, and differs from it by its strategy. A lesson is the difference of the "
        "two twins, the strategy alone on one page.\n\n| from, to | size |\n|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def files_of(name: str) -> str:
    """What a recipe's page shows at its end: its files, and the lesson that leads to it."""
    files = sorted(path.name for path in (ROOT / "recipes" / name).glob("*.py"))
    said = f"\n\n## Read it here\n\n{', '.join(f'[{one}]({one}.md)' for one in reversed(files))}"
    pairs = [pair for pair in bases() if name in pair]
    lessons = [f"[from {base} to {other}](../../{lesson_name(base, other)})" for base, other in pairs]
    return said + (f". Lessons: {', '.join(lessons)}" if lessons else "") + ".\n"


# --- The order of the pages -------------------------------------------------------------------------------------


def entries(index: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Title of each section of a page of pages, and what its numbered lists link to: title and staged file."""
    for part in re.split(r"^## ", (ROOT / index).read_text(), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\d+\. \[([^]]+)\]\(([^)#]+)\)", part, re.MULTILINE)
        yield (
            part.partition("\n")[0],
            [(title, posixpath.normpath(f"{index.parent}/{target}")) for title, target in rows],
        )


def nav() -> Nav:
    """All pages but source files, in their order.

    Raises:
        ValueError: a page is in none of the lists.
    """
    recipes: Nav = [{name: staged(Path("recipes", name, "README.md"))} for name in order()]
    lessons: Nav = [{"All lessons": "lessons/index.md"}]
    lessons += [{f"{base} to {name}": lesson_name(base, name)} for base, name in bases()]
    found: Nav = [{"Brigade": "index.md"}, {"All pages": "docs/index.md"}]
    found += [{"Recipes": recipes}, {"Lessons": lessons}]
    if course := sorted(path for path in written() if path.parts[:2] == ("docs", "course")):
        first = sorted(course, key=lambda path: (path.stem not in ("README", "index"), path))
        found.append({"Course": [{heading(path): staged(path)} for path in first]})
    for title, rows in entries(Path("docs/index.md")):
        inside = [{name: target} for name, target in rows if not target.startswith("docs/course/")]
        if inside:
            found.append({title: inside})
    known = {"README.md": "index.md", "docs/index.md": ""}
    others = [path for path in written() if path.parts[0] not in ("docs", "recipes") and str(path) not in known]
    found.append({"Project": [{heading(path): str(path)} for path in others]})
    listed = set(re.findall(r'"([^"]+\.md)"', json.dumps(found)))
    if missing := {staged(path) for path in written()} - listed:
        raise ValueError(f"docs/index.md does not name {', '.join(sorted(missing))}")
    return found


def heading(path: Path) -> str:
    """A page's title."""
    return re.sub(r"[`*]", "", re.findall(r"^# (.*)", (ROOT / path).read_text(), re.MULTILINE)[0])


def stage(folder: Path) -> None:
    """Write all that the generator reads into an empty folder."""
    pages = {staged(path): adapted(relinked(path, (ROOT / path).read_text())) for path in written()}
    for name in order():
        pages[f"recipes/{name}/index.md"] = pages[f"recipes/{name}/index.md"].rstrip() + files_of(name)
    pages |= {staged(path): source_page(path) for path in linked_files()}
    pages |= {lesson_name(base, name): lesson_page(base, name) for base, name in bases()}
    pages["lessons/index.md"] = lessons_page()
    for name, text in pages.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    # What pages show or link to beside pages; and train.py as it is, to which the explorer links.
    kinds = (".png", ".svg", ".csv", ".json", ".ipynb")
    plain = [path for path in ROOT.glob("docs/**/*") if path.suffix in kinds]
    for path in [*plain, *ROOT.glob("recipes/*/train.py")]:
        file = folder / path.relative_to(ROOT)
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, file)
    for path in ROOT.glob("docs/**/*.html"):
        (folder / path.relative_to(ROOT)).write_text(relinked_html(path.relative_to(ROOT)))
