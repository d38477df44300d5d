"""A lesson for people: as text for a terminal, or as a page for a browser."""

import html
import os
import sys

from tools.lesson.diff import Lesson

COLOURS = {"-": "\033[31m", "+": "\033[32m", "@": "\033[36m", "=": "\033[1m"}
OFF = "\033[0m"
KINDS = {"-": "old", "+": "new", "@": "gap"}
# Colours by the reader's own choice of light or dark; long lines break, so that a phone needs no second way to scroll.
STYLE = """\
.lesson { color-scheme: light dark; --old: #ffebe9; --new: #dafbe1; --edge: #d0d7de; --dim: #57606a; }
.lesson pre { border: 1px solid var(--edge); border-radius: 6px; margin: 0 0 1em; padding: .4em 0; overflow: hidden;
  font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; background: transparent; }
.lesson pre span { display: block; padding: 0 .6em 0 1.8em; text-indent: -1.2em; min-height: 1.45em;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.lesson .old { background: var(--old); }
.lesson .new { background: var(--new); }
.lesson .gap, .lesson .same { color: var(--dim); }
@media (prefers-color-scheme: dark) {
  .lesson { --old: #5a1e1e; --new: #163f26; --edge: #444c56; --dim: #9aa4ae; }
}
"""
BODY = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 0 auto; padding: 1em; color: #1f2328;
  background: #fff; }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117; } }
h1 { font-size: 1.4em; overflow-wrap: anywhere; }
h2 { font-size: 1em; margin: 1.2em 0 .4em; overflow-wrap: anywhere; }
"""


def has_colours() -> bool:
    """Whether standard output shows colours: a terminal, and nobody has set NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def text(lesson: Lesson, context: int, colours: bool) -> str:
    """The lesson as lines for a terminal."""

    def painted(line: str) -> str:
        return f"{COLOURS[line[0]]}{line}{OFF}" if colours and line[:1] in COLOURS else line

    found = [painted(f"--- {lesson.before}"), painted(f"+++ {lesson.after}")]
    for section in lesson.changed:
        found += ["", painted(f"== {section.name} =="), *map(painted, section.lines(context))]
    found += ["", lesson.count()]
    return "\n".join([*found, *([f"the same in both: {', '.join(lesson.same)}"] if lesson.same else [])])


def fragment(lesson: Lesson, context: int) -> str:
    """The lesson as HTML for another page, which needs STYLE as well."""
    found = ['<div class="lesson">', f"<p>{html.escape(lesson.count())}.</p>"]
    for section in lesson.changed:
        rows = [
            f'<span class="{KINDS.get(line[0], "both")}">{html.escape(line if line != "@@" else "...")}</span>'
            for line in section.lines(context)
        ]
        found += [f"<h2>{html.escape(section.name)}</h2>", f"<pre>{''.join(rows)}</pre>"]
    if lesson.same:
        found.append(f'<p class="same">The same in both: {html.escape(", ".join(lesson.same))}.</p>')
    return "\n".join([*found, "</div>"])


def page(lesson: Lesson, context: int) -> str:
    """The lesson as a whole page, which asks no other host for anything."""
    title = html.escape(f"{lesson.before} → {lesson.after}")
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{BODY}{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{fragment(lesson, context)}
</body>
</html>
"""
