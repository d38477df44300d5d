"""Words that the project has given up, and turns of phrase that a reader has to decode, stay away."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("recipes", "common", "launch", "tools", "docs", "benchmarks")
SUFFIXES = {".py", ".sh", ".md", ".yaml", ".env"}
# Old name or turn of phrase -> what to write.
BANNED = {
    r"goes on|go on with|to go on|went on": "continue, resume",
    r"(is|are|was|were) told|tells of": "is reported, gets the signal; or name the actor and an active verb",
    r"(ranks?|run|process|they|it|all) leaves?\b(?! (a|an|the|no|nothing)\b)": "exit, stop",
    r"leaves?, saved|, saved,": "save and stop",
    r"is nobody's|would be nobody's": "match no rank",
    r"for want of|but for": "without, except",
    r"what it is\b|of which what": "a noun",
    r"starts? anew|made anew": "start fresh, create again",
    r"is no (recipe|number|cluster|machine)": "is not a",
    r"mend(s|ed|ing)\b|(can|to) mend\b|mend or\b": "fix",
    r"drawn anew|as (it was )?drawn\b|has drawn it|draws? its initial": "initialised, keeps its random values",
    r"(rounds?|learns?) otherwise": "differently",
    r"(could|to) be had|at hand\b": "there is none",
    r"[Ww]hat (has another|does not (verify|answer)|follows the)": "a value that, arguments after",
    r"does not give still": "that cannot be read",
    r"is its difference from": "so",
    r"as much more\b": "additional, of the size of",
    r"dealt out": "divided",
    r"num_shards|data_shard|pass_size|gradient_sync": "dp_size, dp_rank, global_micro_batch_size, forward_backward",
    r"log\.say|world\.say": "ranks.print0",
    r"num[-_]microbatches|microbatch(es)?\b": "micro-batch",
    r"--schedule (naive|gpipe|1f1b|interleaved|zero-bubble)\b": "torch's names of schedules",
    r"launch[./](checkpoint|llama)\b": "tools.checkpoint, tools.llama",
    r"common[./]world\b": "common/run/process_group.py, common/ranks.py",
}


def files() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted([*found, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def findings(text: str) -> list[tuple[int, str]]:
    """Line and banned words, also where a line break is between them."""
    found = []
    for words in BANNED:
        pattern = rf"(?<![\w-])(?:{words})".replace(" ", r"\s+(?:#\s+)?")
        found += [(text[: match.start()].count("\n") + 1, match[0]) for match in re.finditer(pattern, text)]
    return sorted(found)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_banned_words(path: Path) -> None:
    assert findings(path.read_text()) == []


def test_mutants() -> None:
    """Each is found, also across a line break in a comment."""
    assert findings("the training goes\n    # on, and\nevery rank is told") == [(1, "goes\n    # on"), (3, "is told")]
    assert findings("the rank leaves; num_shards") == [(1, "num_shards"), (1, "rank leaves")]
    assert findings("a kill leaves the old file; microbatching") == []
    assert findings("the race is mended; the head stays as drawn") == [(1, "as drawn"), (1, "mended")]
    assert findings("a picture is drawn as a curve; an amendment; what follows is in the log") == []
