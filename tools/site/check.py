"""What a built site links to, and what it loads: every page and anchor must be there, nothing is from outside."""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes by which a page loads something when it is opened, by element; `a` and `form` only lead elsewhere.
LOADS = {
    **dict.fromkeys(("audio", "embed", "iframe", "img", "script", "source", "track", "video"), ("src", "srcset")),
    "link": ("href",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
LEADS_ONLY = {"canonical", "next", "prev", "alternate", "license", "help"}  # of <link rel=...>: never fetched
ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
IN_STYLES = re.compile(r"(?:@import\s+(?:url\()?|url\()\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


@dataclasses.dataclass
class Report:
    """What was found.

    Attributes:
        pages: number of pages.
        links: number of links to pages, files and anchors of the site.
        dead: those that lead nowhere, with their page.
        outside: what is loaded from another host, with its page or file.
    """

    pages: int = 0
    links: int = 0
    dead: list[str] = dataclasses.field(default_factory=list)
    outside: list[str] = dataclasses.field(default_factory=list)


class Parsed(HTMLParser):
    """A page's anchors, links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element names, links to and loads."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        rel = set(found.get("rel", "").split())
        for name in LOADS.get(tag, ()):
            if name in found and not (tag == "link" and rel & LEADS_ONLY):
                self.loads += [one.split()[0] for one in found[name].split(",") if one.split()]
        if tag in ("a", "area") and "href" in found:
            self.links.append(found["href"])
        self.loads += IN_STYLES.findall(found.get("style", ""))


def look(site: Path) -> Report:
    """Look at all pages and styles of a site."""
    report = Report()
    pages = {path.resolve(): Parsed(path.read_text()) for path in sorted(site.rglob("*.html"))}
    report.pages = len(pages)
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for target in [*page.links, *page.loads]:
            if ELSEWHERE.match(target) or urlsplit(target).scheme:
                if target in page.loads and not target.startswith("data:"):
                    report.outside.append(f"{name} loads {target}")
                continue
            report.links += 1
            if not leads_somewhere(path, target, pages, site.resolve()):
                report.dead.append(f"{name}: {target}")
    for path in sorted([*site.rglob("*.css"), *site.rglob("*.svg"), *site.rglob("*.html")]):
        report.outside += [f"{path.relative_to(site)} loads {one}" for one in IN_STYLES.findall(path.read_text())]
    return report


def leads_somewhere(page: Path, target: str, pages: dict[Path, Parsed], site: Path) -> bool:
    """Whether a link of a page leads to a file of the site, and to an anchor if it names one."""
    parts = urlsplit(target)
    file = page
    if parts.path:
        start = site if parts.path.startswith("/") else page.parent
        file = (start / unquote(parts.path).lstrip("/")).resolve()
    if file.is_dir():
        return False  # a browser without a server shows a list of files
    if not file.is_file():
        return False
    anchor = unquote(parts.fragment)
    return not anchor or file not in pages or anchor in pages[file].anchors
