"""What tools.judge finds: `uv run python benchmarks/judge.py` writes docs/judge.md. --faults N plants N mistakes."""

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.harness import pages, planted, shapes
from tools.judge import page, report, verdict

PAGE = Path(__file__).resolve().parents[1] / "docs" / "judge.md"


def judge(text: str) -> verdict.Verdict:
    """What is said of a script, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("train.py").write_text(text)
        return verdict.judge(verdict.Asked(Path("train.py")))


def kinds(found: verdict.Verdict, level: str = "") -> list[tuple[str, int]]:
    """Kind and line of what was found."""
    return [(one.kind, verdict.line(one.at)) for one in found.findings if level in ("", one.about.level)]


def shown(found: Iterable[str]) -> str:
    """Kinds, and how often each."""
    return ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in Counter(found).items()) or "nothing"


def main() -> None:
    """Judge right scripts, then scripts with a mistake each, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began = time.monotonic()
    rows = ["| shape of | alarms | notes | seconds | GiB |", "|---|---|---|---|---|"]
    alarms, seconds, memory = 0, [], []
    for name, text in shapes.ALL.items():
        found = judge(text)
        notes = [kind for kind, _ in kinds(found, "note")]
        loud = [kind for kind, _ in kinds(found) if kind not in notes] + [found.failed] * bool(found.failed)
        alarms += bool(loud)
        seconds.append(found.seconds)
        memory.append(found.peak_gib)
        row = f"| {name} | {shown(loud)} | {shown(notes)} | {found.seconds:.0f} | {found.peak_gib:.1f} |"
        print(row, flush=True)
        rows.append(row)
    chosen, missed = planted.choose(asked.faults, asked.seed), []
    for one in chosen:
        found = judge(one.text)
        if not one.is_found(kinds(found)):
            missed.append(f"{one.kinds[0]} in {one.shape}")
            print("missed:", missed[-1], kinds(found), found.failed, flush=True)
        seconds.append(found.seconds)
        memory.append(found.peak_gib)
    hit = len(chosen) - len(missed)
    several = len({one.kinds for one in chosen})
    text = (
        f"**{hit} of {len(chosen)}** planted mistakes ({100 * hit / len(chosen):.0f}%), of {several} kinds, were found "
        f"by kind and line; **{alarms} of {len(shapes.ALL)}** right scripts had an alarm, or could not run. "
        f"A script took {pages.spread(seconds, '.0f')} seconds and at most {max(memory):.1f} GiB.\n\n"
        f"Missed: {'; '.join(missed) or 'none'}."
    )
    facts = pages.measured(" ".join(["uv run python benchmarks/judge.py", *sys.argv[1:]]), began=began)
    script = pages.parts(PAGE.read_text())["script"].strip().strip("`").partition("\n")[2]
    pages.write(
        PAGE,
        kinds=page.table(),
        found=f"{facts}\n\n{text}",
        shapes=pages.folded("The right scripts", "\n".join(rows)),
        script=f"```python\n{script.strip()}\n```",
        verdict=f"```\n{report.as_text(judge(script))}\n```",
    )


if __name__ == "__main__":
    main()
