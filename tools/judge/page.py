"""Tables for docs: what each kind of mistake means (judge.md), and by what one notices it (troubleshooting.md)."""

from tools.judge.findings import KINDS
from tools.judge.symptoms import SYMPTOMS


def table() -> str:
    """A row for each kind: level, effect, change."""
    rows = ["| kind | level | what it does to training | change |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        rows.append(f"| {name} | {kind.level} | {kind.does} | {kind.change} [Right](../{kind.recipe}) |")
    return "\n".join(rows)


def symptoms() -> str:
    """A row for each thing that one notices: the kinds that may be behind it, with what to change."""
    rows = ["| what you notice | what it may be, and the change |", "|---|---|"]
    for symptom, names in SYMPTOMS.items():
        found = (f"*{name}*: {KINDS[name].change}" for name in names)
        rows.append(f"| {symptom} | {'<br>'.join(found)} |")
    return "\n".join(rows)
