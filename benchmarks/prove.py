"""The proofs on several numbers of ranks of this machine: `uv run python benchmarks/prove.py` writes docs/prove.md."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.harness import pages

PAGE = Path(__file__).resolve().parents[1] / "docs" / "prove.md"
MINUTES = 30  # this machine may have fewer cores than ranks


def main() -> None:
    """Run them one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[1, 2, 4], help="numbers of ranks")
    sizes = parser.parse_args().sizes
    began = time.monotonic()
    rows = ["| ranks | passed | failed | need more ranks, or GPUs | minutes |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            command = [sys.executable, "-m", "tools.prove", "--out", folder, "--minutes", str(MINUTES)]
            before = time.monotonic()
            subprocess.run(command, env=os.environ | {"NPROC_PER_NODE": str(size)}, check=True)
            verdicts = [proof["verdict"] for proof in json.loads(Path(folder, "prove.json").read_text())["proofs"]]
            counts = (verdicts.count(verdict) for verdict in ("passed", "failed", "not run"))
            rows.append(f"| {size} | {' | '.join(map(str, counts))} | {(time.monotonic() - before) / 60:.1f} |")
        page = Path(folder, "prove.md").read_text()
    facts = pages.measured(" ".join(["uv run python benchmarks/prove.py", *sys.argv[1:]]), began=began)
    shown = page.replace("\n# ", "\n#### ").replace("\n## ", "\n#### ").removeprefix("# Proofs of Brigade\n")
    pages.write(PAGE, runs="\n".join([facts, "", *rows]), example=pages.folded("prove.md", shown))


if __name__ == "__main__":
    main()
