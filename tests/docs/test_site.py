"""The site that tools.site builds: every page and link is there, the search finds errors, and a phone can read it."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.site import __main__ as program
from tools.site import check, stage

from tests.docs import test_troubleshooting
from tests.harness import browser, runner

PHONE = 360  # pixels
MOST_HITS = 3
WORDS = 4
NOWHERE = "xyzzyplugh"  # a word of no page
# Addresses of the search's hits, once there are some, or none; its parts stand in a shadow root.
HITS = """\
new Promise((resolve, reject) => {
  const until = Date.now() + %d;
  const look = () => {
    const root = [...document.querySelectorAll("*")].map((one) => one.shadowRoot).find(Boolean);
    const hits = root ? [...root.querySelectorAll("a[role=option]")].map((one) => one.href) : [];
    if (root && (hits.length > 0) === %s) resolve(hits);
    else if (Date.now() > until) reject(new Error("the search does not answer"));
    else setTimeout(look, 50);
  };
  look();
})"""
INPUT = '[...document.querySelectorAll("*")].map((one) => one.shadowRoot).find(Boolean)?.querySelector("input")'


# --- without the generator --------------------------------------------------------------------------------------


def test_order_names_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recipe and lesson as well; and a page that docs/index.md does not name is an error."""
    text = json.dumps(stage.nav())
    assert all(f'"recipes/{recipe}/index.md"' in text for recipe in runner.RECIPES)
    assert len(stage.bases()) == len(re.findall(r'"lessons/\w+-to-\w+\.md"', text)) == len(runner.TRAINING) - 2
    pages = [*stage.written(), Path("docs/forgotten.md")]
    monkeypatch.setattr(stage, "written", lambda: pages)
    with pytest.raises(ValueError, match=r"does not name docs/forgotten\.md"):
        stage.nav()


def test_links_become_those_of_the_site() -> None:
    page = Path("docs/adapt.md")
    for written, there in {
        "../recipes/ddp_gpt": "../recipes/ddp_gpt/index.md",
        "../recipes/ddp_gpt/train.py": "../recipes/ddp_gpt/train.py.md",
        "../README.md#launch": "../index.md#launch",
        "plan.md": "plan.md",
        "explorer.html": "explorer.html",
        "#here": "#here",
        "https://example.org/a": "https://example.org/a",
    }.items():
        assert stage.relinked(page, f"[a]({written})") == f"[a]({there})"
    assert stage.relinked(page, "```\n[a](nowhere)\n```\n") == "```\n[a](nowhere)\n```\n"
    for dead in ("nowhere.md", "../tests", "../.."):
        with pytest.raises(ValueError, match="leads to no page of the site"):
            stage.relinked(page, f"[a]({dead})")


def test_what_two_kinds_of_markdown_read_differently() -> None:
    text = "- one\n  - two\n    of it\n\nProse.\n  indented\n\n| `a \\| b` |\n\n<details>\n"
    there = '- one\n    - two\n    of it\n\nProse.\n  indented\n\n| `a | b` |\n\n<details markdown="1">\n'
    assert stage.adapted(text) == there
    assert stage.adapted(f"````\n{text}````\n") == f"````\n{text}````\n"


def test_dead_links_and_what_comes_from_outside_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="there">A</h1>')
    (tmp_path / "fine.css").write_text("a { background: url(data:image/png;base64,AA) }")
    fine = (
        '<a href="other.html#there">a</a><a href="https://example.org">b</a><link rel="canonical" href="https://x.y">'
    )
    (tmp_path / "index.html").write_text(fine)
    assert check.look(tmp_path) == check.Report(pages=2, links=1)
    for wrong in ('<a href="none.html">', '<a href="other.html#none">', '<img src="a.png">', '<a href="..">'):
        (tmp_path / "index.html").write_text(fine + wrong)
        report = check.look(tmp_path)
        assert (len(report.dead), report.outside) == (1, []), wrong
    for wrong in (
        '<script src="https://example.org/a.js"></script>',
        '<script src="//example.org/a.js"></script>',
        '<link rel="preconnect" href="https://example.org">',
        '<img srcset="https://example.org/a.png 2x">',
        '<p style="background: url(https://example.org/a.png)">',
        '<style>@import "https://example.org/a.css"</style>',
    ):
        (tmp_path / "index.html").write_text(fine + wrong)
        report = check.look(tmp_path)
        assert report.outside, wrong
        assert not report.dead, wrong
    (tmp_path / "index.html").write_text(fine)
    (tmp_path / "fine.css").write_text("@font-face { src: url('https://example.org/a.woff2') }")
    assert check.look(tmp_path).outside == ["fine.css loads https://example.org/a.woff2"]


# --- as it is built -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    report = program.build(folder)
    assert report.links > 1000
    return folder


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Page]:
    if not shutil.which(browser.CHROMIUM):
        assert "CI" not in os.environ, "CI installs chromium: apt install chromium"
        pytest.skip("needs chromium: apt install chromium")
    with browser.page() as opened:
        yield opened


def test_built_site_has_every_page(site: Path, tmp_path: Path) -> None:
    """And a page that is taken away is missed."""
    pages = [stage.staged(path) for path in [*stage.written(), *stage.linked_files()]]
    pages += [stage.lesson_name(*pair) for pair in stage.bases()]
    assert [page for page in pages if not (site / re.sub(r"\.md$", ".html", page)).is_file()] == []
    assert "explorer.html" in (site / "docs" / "index.html").read_text()
    copy = shutil.copytree(site, tmp_path / "copy")
    (copy / "docs" / "gpu.html").unlink()
    assert any("gpu.html" in line for line in check.look(copy).dead)


def test_warning_of_the_generator_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A link that only the generator can judge: the page is there, and its heading is not."""
    whole = stage.lessons_page()
    monkeypatch.setattr(stage, "lessons_page", lambda: f"{whole}\n[a](../docs/gpu.md#no-such-heading)\n")
    with pytest.raises(program.UserError, match=r"(?s)lessons/index\.md|no-such-heading"):
        program.build(tmp_path / "site")


def ask(tab: browser.Page, text: str, found: bool = True) -> list[str]:
    """Type a text into the search's field, and wait for hits, or for none."""
    tab.evaluate(f"{INPUT}.focus(), {INPUT}.select()")
    tab.send("Input.insertText", text=text)
    hits: list[str] = tab.evaluate(HITS % (1000 * runner.HANG_S / 2, "true" if found else "false"))
    return hits


def rank_of(tab: browser.Page, text: str, anchor: str) -> int:
    """Place among the search's hits, from 1, of a troubleshooting entry; 0 if it is not there."""
    ask(tab, NOWHERE, found=False)  # or the hits of the text before this one would be looked at
    wanted = re.compile(rf"docs/troubleshooting\.html(\?[^#]*)?#{re.escape(anchor)}$")
    return next((i for i, hit in enumerate(ask(tab, text), start=1) if wanted.search(hit)), 0)


def search_in(tab: browser.Page, site: Path) -> None:
    """Open the site and its search."""
    tab.resize(1280, 900)
    tab.open(site / "index.html")
    wait = "new Promise((done) => {{ const look = () => {} ? done() : setTimeout(look, 50); look(); }})"
    tab.evaluate(wait.format('document.querySelector(".md-search__button")'))
    tab.click(".md-search__button")
    tab.evaluate(wait.format(INPUT))


def first_words(heading: str) -> str:
    """The first words of an error, without those that vary."""
    return " ".join([word for word in heading.strip("`").split() if "..." not in word][:WORDS])


def test_search_finds_each_error(tab: browser.Page, site: Path, tmp_path: Path) -> None:
    errors = [heading for heading in test_troubleshooting.ENTRIES if heading.startswith("`")]
    assert len(errors) > 10
    page = check.Parsed((site / "docs" / "troubleshooting.html").read_text())
    search_in(tab, site)
    ranks = {}
    for heading in errors:
        anchor = anchor_of(heading)
        assert anchor in page.anchors, heading
        ranks[heading] = rank_of(tab, first_words(heading), anchor)
    print("\n".join(f"{rank} {first_words(heading)} | {heading}" for heading, rank in ranks.items()))
    assert {heading: rank for heading, rank in ranks.items() if not 1 <= rank <= MOST_HITS} == {}
    # The mutant: an index that leads to another page.
    copy = shutil.copytree(site, tmp_path / "copy")
    index = copy / "search.js"
    index.write_text(index.read_text().replace("docs/troubleshooting.html#", "docs/gpu.html#"))
    search_in(tab, copy)
    assert rank_of(tab, first_words(errors[0]), anchor_of(errors[0])) == 0


def anchor_of(heading: str) -> str:
    """The anchor that a plain git host, and so the site, makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def too_wide(tab: browser.Page, file: Path) -> str:
    """What is wrong with a page on a phone: it scrolls to the side, or asks another host."""
    tab.open(file)
    width = tab.evaluate("document.documentElement.scrollWidth")
    outside = [one for one in tab.requested() if not one.startswith(("file:", "data:", "blob:"))]
    return "".join([f"{file.name} is {width} pixels wide " * (width > PHONE), *outside])


def test_phone_reads_every_page(tab: browser.Page, site: Path) -> None:
    """Without scrolling to the side, and without a request to another host."""
    tab.resize(PHONE, 740)
    sources = {site / f"{path}.html" for path in stage.linked_files()[2:]}  # they have one layout
    pages = [file for file in sorted(site.rglob("*.html")) if file not in sources]
    assert [wrong for file in pages if (wrong := too_wide(tab, file))] == []
    last = pages[-1]
    last.write_text(last.read_text().replace("</body>", '<p style="width: 400px; height: 9px">wide</p></body>'))
    assert "pixels wide" in too_wide(tab, last)
    last.write_text(last.read_text().replace("</body>", '<img src="http://127.0.0.1:9/"></body>'))
    assert "http://127.0.0.1:9/" in too_wide(tab, last)


def test_dark_as_the_system_is(tab: browser.Page, site: Path) -> None:
    """Text and background change places with the system's choice, on a page of the generator."""
    brightness = "(color) => color.match(/[\\d.]+/g).slice(0, 3).reduce((sum, one) => sum + Number(one), 0)"
    shown = (
        f"[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color].map({brightness})"
    )
    for dark in (False, True):
        tab.resize(1280, 900, dark=dark)
        tab.open(site / "docs" / "glossary.html")
        background, text = tab.evaluate(shown)
        assert (background < text) == dark, (background, text)
