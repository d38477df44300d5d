"""A verdict for people, and as JSON."""

import json
import textwrap

from tools.judge.findings import KINDS
from tools.judge.kind import ERROR, NOTE, WARNING
from tools.judge.verdict import Verdict

WIDTH = 110


def as_text(verdict: Verdict) -> str:
    """Findings with line, evidence, effect and change; and what was not looked at."""
    lines = []
    for one in verdict.findings:
        lines.append(f"{one.at}: {one.about.level}: {one.kind}: {one.evidence}")
        for words in (one.about.does, f"Change: {one.about.change} See {one.about.recipe}."):
            lines += textwrap.wrap(words, WIDTH, initial_indent="    ", subsequent_indent="    ")
    counts = {level: sum(one.about.level == level for one in verdict.findings) for level in (ERROR, WARNING, NOTE)}
    if verdict.failed:
        lines.append(f"could not run to its end: {verdict.failed}")
    lines += verdict.notes
    for size, losses in sorted(verdict.losses.items()):
        if losses:
            lines.append(
                f"loss on {size} process{'es' if size != '1' else ''}: {' '.join(f'{one:.4f}' for one in losses[:8])}"
            )
    words = ", ".join(f"{count} {level}{'s' if count != 1 else ''}" for level, count in counts.items() if count)
    lines.append(
        f"{verdict.script}: {words or 'nothing found'} ({verdict.seconds:.0f} s, {verdict.peak_gib:.1f} GiB; "
        f"{len(KINDS)} kinds of mistakes are known)"
    )
    return "\n".join(lines)


def as_json(verdict: Verdict) -> str:
    """The same for programs."""
    findings = [
        {
            "kind": one.kind,
            "level": one.about.level,
            "at": one.at,
            "evidence": one.evidence,
            "sizes": one.sizes,
            "does": one.about.does,
            "change": one.about.change,
            "recipe": one.about.recipe,
        }
        for one in verdict.findings
    ]
    rest = {"script": str(verdict.script), "code": verdict.code, "failed": verdict.failed, "notes": verdict.notes}
    rest |= {"losses": verdict.losses, "seconds": round(verdict.seconds, 1), "peak_gib": round(verdict.peak_gib, 2)}
    return json.dumps(rest | {"findings": findings}, indent=1)
