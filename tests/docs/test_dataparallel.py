"""docs/dataparallel.html, in a browser: its figures are those of the formulas in docs/dataparallel.md."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import browser, runner

FILE = runner.ROOT / "docs" / "dataparallel.html"
ARROW_RIGHT = ("ArrowRight", 39)


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Page]:
    if not shutil.which(browser.CHROMIUM):
        pytest.skip("needs chromium: apt install chromium")
    with browser.page() as opened:
        yield opened


def wanted(gpus: int, millions: int, link: int) -> dict[str, float]:
    """By hand: the first GPU sends the parameters to N - 1 others and gets as many gradients; a ring of N for DDP."""
    size = 4 * millions * 10**6
    sent = {"dp": (gpus - 1) * size + (gpus - 1) * size, "ddp": size * (2 - 2 / gpus)}
    found = {f"{name}_bytes": value for name, value in sent.items()}
    found |= {f"{name}_s": value / (link * 10**9) for name, value in sent.items()}
    # Parameters, gradients and Adam's two numbers; nn.DataParallel updates on its first GPU alone.
    return found | {"first_bytes": size * 4, "other_bytes": size * 2, "ddp_held_bytes": size * 4}


def different(page: browser.Page) -> list[tuple[int, int, int]]:
    """Random choices for which the page has other figures."""
    draw = random.Random(5)
    asked = [(draw.randint(2, 16), draw.randint(1, 2000), draw.randint(1, 450)) for _ in range(40)]
    found = page.evaluate(f"{[[*one] for one in asked]}.map((one) => compare(...one))")
    return [one for one, mine in zip(asked, found, strict=True) if mine != pytest.approx(wanted(*one), rel=1e-12)]


def test_equal_to_the_formulas(page: browser.Page) -> None:
    page.open(FILE)
    assert different(page) == []


def test_changed_formula_is_found(page: browser.Page, tmp_path: Path) -> None:
    text = FILE.read_text()
    ring = "2 * (gpus - 1) / gpus * p"
    assert text.count(ring) == 1
    (tmp_path / "mutant.html").write_text(text.replace(ring, "(gpus - 1) / gpus * p"))
    page.open(tmp_path / "mutant.html")
    assert len(different(page)) == 40


def test_sliders_move_the_figures_and_ask_nobody(page: browser.Page) -> None:
    page.open(FILE)
    for slider in ("gpus", "millions", "link"):
        before = page.evaluate("document.getElementById('rows').textContent")
        page.evaluate(f"document.getElementById('{slider}').focus()")
        page.press(*ARROW_RIGHT)
        assert page.evaluate("document.getElementById('rows').textContent") != before, slider
    assert page.evaluate("document.getElementById('gpus_is').textContent") == "9"
    assert all(address.startswith("file:") for address in page.requested())
