"""A verdict as a page for a browser, which asks no other host for anything."""

import html
import math
from pathlib import Path

from tools.judge.findings import Finding
from tools.judge.verdict import Verdict
from tools.lesson.show import BODY

WIDTH, HEIGHT, EDGE = 560, 220, 44  # of the curves, in pixels
AROUND = 2  # lines of the script before and after the one that is named
STYLE = """\
pre { border: 1px solid #8884; border-radius: 6px; padding: .5em 0; overflow-x: auto;
  font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
pre span { display: block; padding: 0 .8em; }
pre .named { background: #f0883e33; }
.error { color: #d1242f; } .warning { color: #bc6c00; } .note { color: #57606a; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.one { stroke: #0969da; fill: none; stroke-width: 2; } .two { stroke: #d1242f; fill: none; stroke-width: 2; }
.axis { stroke: currentColor; opacity: .4; }
@media (prefers-color-scheme: dark) {
  .error { color: #ff7b72; } .warning { color: #e3b341; } .note { color: #9aa4ae; }
}
"""


def page(verdict: Verdict) -> str:
    """Curves, findings with their lines, and what was not looked at."""
    title = html.escape(f"Judged: {verdict.script}")
    found = [f"<h1>{title}</h1>", curves(verdict.losses)]
    if verdict.failed:
        found.append(f'<h2 class="error">It could not run to its end</h2><pre>{html.escape(verdict.failed)}</pre>')
    found += [finding(one) for one in verdict.findings] or ["<p>No mistake was found.</p>"]
    notes = "".join(f"<li>{html.escape(one)}</li>" for one in verdict.notes)
    found.append(f"<h2>How it was judged</h2><ul>{notes}</ul>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}'
    body = "\n".join(found)
    style = f"<style>\n{BODY}{STYLE}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</title>\n{style}</head>\n<body>\n{body}\n</body></html>\n'


def finding(one: Finding) -> str:
    """What was seen, what it does, and the change, beside the script's own lines."""
    about = one.about
    words = [one.evidence, about.does, f"Change: {about.change} See {about.recipe}."]
    paragraphs = "".join(f"<p>{html.escape(text)}</p>" for text in words)
    level = f'<span class="{about.level}">{about.level}</span>'
    return f"<h2>{level}: {html.escape(one.kind)}, {html.escape(one.at)}</h2>" + source(one.at) + paragraphs


def source(at: str) -> str:
    """The line "path:number" of a script with its neighbours; "" if there is none."""
    name, _, number = at.rpartition(":")
    if not number.isdigit() or not Path(name).is_file():
        return ""
    lines = Path(name).read_text(errors="replace").splitlines()
    first = max(0, int(number) - 1 - AROUND)
    rows = [
        f'<span class="{"named" if i == int(number) else "near"}">{i:4d}  {html.escape(text)}</span>'
        for i, text in enumerate(lines[first : int(number) + AROUND], first + 1)
    ]
    return f"<pre>{''.join(rows)}</pre>"


def curves(losses: dict[str, list[float]]) -> str:
    """The loss of the first steps on one and on two processes."""
    kept = {size: [one for one in values if math.isfinite(one)] for size, values in losses.items()}
    values = [one for each in kept.values() for one in each]
    most = max((len(one) for one in kept.values()), default=0)
    if most < 2:
        return ""
    low, high = min(values), max(values)
    span = high - low or 1.0

    def at(i: int, value: float) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * i / (most - 1)
        return f"{x:.1f},{HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (value - low) / span:.1f}"

    parts = [f'<path class="axis" d="M{EDGE} {EDGE}V{HEIGHT - EDGE}H{WIDTH - EDGE}" fill="none"/>']
    parts += [f'<text x="4" y="{y}">{value:.3g}</text>' for y, value in ((EDGE, high), (HEIGHT - EDGE, low))]
    parts.append(f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 18}" text-anchor="end">backward pass 1 to {most}</text>')
    for i, (size, line) in enumerate(sorted(kept.items())):
        name = "one" if size == "1" else "two"
        parts.append(f'<polyline class="{name}" points="{" ".join(at(k, value) for k, value in enumerate(line))}"/>')
        parts.append(f'<path class="{name}" d="M{EDGE + 160 * i} 20h24"/>')
        parts.append(
            f'<text x="{EDGE + 160 * i + 30}" y="24">loss on {size} process{"es" if size != "1" else ""}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="loss">{"".join(parts)}</svg>'
