"""What tools.judge sees of libraries: `uv run --group bench python -m benchmarks.judge_libraries` writes its page."""

import contextlib
import importlib.metadata
import sys
import tempfile
import time
from pathlib import Path

from tests.harness import libraries, pages
from tools.judge import verdict

PAGE = Path(__file__).resolve().parents[1] / "docs" / "judge.md"


def judge(text: str, once: bool = False) -> verdict.Verdict:
    """What is said of a script, in a folder of its own, by all runs or by that on two processes alone."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("train.py").write_text(text)
        return verdict.judge(verdict.Asked(Path("train.py"), timeout_s=120.0, once=once))


def loud(found: verdict.Verdict) -> list[str]:
    """Errors and warnings, or why it could not run."""
    kinds = [one.kind for one in found.findings if one.about.level != "note"]
    return kinds or [found.failed] * bool(found.failed)


def main() -> None:
    """Judge each library's right script, and those with a mistake, and write the table."""
    began = time.monotonic()
    asked = sys.argv[1:] or list(libraries.SCRIPTS)
    rows = ["| library | planted | found | missed | alarms that are wrong |", "|---|---|---|---|---|"]
    for library in asked:
        right = judge(libraries.SCRIPTS[library])
        wrong = [f"{one} in the right script" for one in loud(right)]
        hits: list[str] = []
        missed: list[str] = []
        own = [one for one in libraries.MISTAKES if one.framework == library]
        for one in own:
            said = loud(judge(one.text(), once=True))
            print(f"{library}: {one.what}: {said}", flush=True)
            if not one.kind:
                wrong += [f"{kind} in {one.what}" for kind in said]
            else:
                (hits if one.kind in said else missed).append(one.what)
        version = importlib.metadata.version(libraries.PACKAGES[library])
        planted = sum(bool(one.kind) for one in own)
        rows.append(
            f"| {library} {version} | {planted} | {len(hits)}: {'; '.join(hits)} | {'; '.join(missed) or 'none'} "
            f"| {'; '.join(wrong) or 'none'} |"
        )
        print(rows[-1], flush=True)
    if asked == list(libraries.SCRIPTS):
        command = "uv run --group bench python -m benchmarks.judge_libraries"
        pages.write(PAGE, libraries=f"{pages.measured(command, began=began)}\n\n" + "\n".join(rows))


if __name__ == "__main__":
    main()
