"""All pages as a site with a search, for a browser without a network: `python -m tools.site`."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import tyro

from common import UserError
from tools import command
from tools.site import check, stage

TIMEOUT_S = 300
MARK = ".brigade-site"  # a folder with this file is replaced, another one never
STYLE = """\
/* Nothing of a page is wider than a phone: long words break, and tables and code scroll by themselves. */
.md-typeset { overflow-wrap: break-word; }
.md-typeset h1, .md-typeset h2, .md-typeset h3 { overflow-wrap: anywhere; }
.md-typeset :not(pre) > code { overflow-wrap: anywhere; white-space: normal; }
.md-typeset table:not([class]) code { white-space: nowrap; }
.md-typeset img { max-width: 100%; height: auto; }
.md-typeset img[src$=".png"] { background: #fff; }
"""


# The generator's pages load a script from another host, by which the search runs in a page that is a file. This one
# is ours: browsers start no worker from a file, but from text. %s is the text of the search's worker.
SHIM = "https://unpkg.com/iframe-worker/shim"
WORKER = """\
if (location.protocol === "file:") {
  const Plain = window.Worker, text = %s;
  window.Worker = function () { return new Plain(URL.createObjectURL(new Blob([text], {type: "text/javascript"}))); };
}
"""


def without_outside(site: Path) -> None:
    """Replace the script of another host by one of the site."""
    (search,) = site.glob("assets/javascripts/workers/search.*.js")
    (site / "worker.js").write_text(WORKER % json.dumps(search.read_text()))
    for page in site.rglob("*.html"):
        here = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(page.read_text().replace(SHIM, f"{here}worker.js"))


def configuration() -> str:
    """What the generator reads. JSON's strings, lists and numbers are those of TOML."""
    dark, light = '"slate"', '"default"'
    return f"""\
[project]
site_name = "Brigade"
site_description = "PyTorch recipes for distributed training: each is one file, to read, copy and edit."
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
extra_css = ["style.css"]
nav = {toml(stage.nav())}

[project.theme]
variant = "classic"
language = "en"
font = false
features = ["content.code.copy", "navigation.footer", "navigation.top", "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme)"
toggle.icon = "material/brightness-auto"
toggle.name = "Light colors"

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = {light}
toggle.icon = "material/weather-night"
toggle.name = "Dark colors"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = {dark}
toggle.icon = "material/weather-sunny"
toggle.name = "Colors as the system has them"

[project.plugins.search]
[project.plugins.offline]

[project.markdown_extensions.attr_list]
[project.markdown_extensions.md_in_html]
[project.markdown_extensions.tables]
[project.markdown_extensions.toc]
permalink = true
slugify = {{ object = "pymdownx.slugs.slugify", kwds = {{ case = "lower" }} }}
[project.markdown_extensions.pymdownx.highlight]
anchor_linenums = true
[project.markdown_extensions.pymdownx.inlinehilite]
[project.markdown_extensions.pymdownx.magiclink]
[project.markdown_extensions.pymdownx.superfences]
"""


def toml(value: object) -> str:
    """Lists, tables and strings, on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + " }"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value, ensure_ascii=False)


def build(out: Path) -> check.Report:
    """Write the site into a folder, and look at all that it links to and loads.

    Raises:
        UserError: the folder holds something else, the generator is missing or warns, or a link is dead.
    """
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise UserError(f"--out {out} holds other files: name a folder that is empty, or that an earlier call has made")
    with tempfile.TemporaryDirectory(prefix="brigade-site-") as folder:
        pages, made = Path(folder, "pages"), Path(folder, "site")
        pages.mkdir()
        stage.stage(pages)
        (pages / "style.css").write_text(STYLE)
        (Path(folder) / "zensical.toml").write_text(configuration())
        generator = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        ended = subprocess.run(  # noqa: S603
            generator,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if ended.returncode or not made.is_dir():
            said = re.sub(r"\x1b\[[\d;]*m", "", f"{ended.stdout}{ended.stderr}".partition("Traceback")[0])
            more = " (install it: uv sync --group site)" if "No module named zensical" in said else ""
            raise UserError(f"the generator has ended with code {ended.returncode}{more}:\n{said}")
        without_outside(made)
        shutil.rmtree(out, ignore_errors=True)
        (made / MARK).touch()
        shutil.copytree(made, out)
    report = check.look(out)
    if report.dead or report.outside:
        raise UserError("\n".join(["the site is not whole:", *report.dead, *report.outside]))
    return report


def main(out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("dist/site")) -> None:
    """Build the site, which a browser opens as a file, and check its links.

    Args:
        out: folder to write; index.html is its first page.
    """
    start = time.monotonic()
    report = build(out.resolve())
    print(
        f"wrote {out}/index.html: {report.pages} pages, {report.links:,} links inside, none dead; "
        f"nothing is loaded from another host; {time.monotonic() - start:.1f} s"
    )


if __name__ == "__main__":
    with command.one_process():
        try:
            tyro.cli(main, prog="python -m tools.site")
        except UserError as error:
            command.refuse(error)
