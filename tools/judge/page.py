"""The table of docs/judge.md: what each kind of mistake means."""

from tools.judge.findings import KINDS


def table() -> str:
    """A row for each kind: level, effect, change."""
    rows = ["| kind | level | what it does to training | change |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        rows.append(f"| {name} | {kind.level} | {kind.does} | {kind.change} [Right](../{kind.recipe}) |")
    return "\n".join(rows)
