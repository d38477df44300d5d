"""What the planner advises where a layout does not fit: it fits, and nothing that fits is faster."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tools.plan import advice, answer, hardware, sweep
from tools.plan.count import Case
from tools.plan.hardware import Hardware
from tools.plan.predict import Prediction

from tests.harness import runner
from tools import about

H100 = hardware.table()["h100-ib"]
LLAMA_8B = "--num-layers 32 --width 4096 --num-heads 32 --num-kv-heads 8 --mlp-width 14336 --vocab-size 128256"
SMALL = "--num-layers 2 --width 256 --num-heads 4 --seq-len 256 --global-batch-size 16"
# Recipe, ranks, flags: each too large for 80 GiB.
CASES = (
    ("fsdp_gpt", 8, f"{LLAMA_8B} --seq-len 8192 --global-batch-size 16 --micro-batch-size 1"),
    ("fsdp_gpt", 16, f"{LLAMA_8B} --seq-len 8192 --global-batch-size 64 --micro-batch-size 4"),
    ("ddp_gpt", 8, f"{LLAMA_8B} --seq-len 2048 --global-batch-size 64 --micro-batch-size 1"),
    ("tensor_gpt", 64, "--num-layers 80 --width 8192 --num-heads 64 --seq-len 4096 --global-batch-size 64 --tp 8"),
    ("ddp_gpt", 1, f"{LLAMA_8B} --seq-len 2048 --global-batch-size 8 --micro-batch-size 1"),
)


def case_of(recipe: str, size: int, flags: str) -> Case:
    return Case(about.ROOT / "recipes" / recipe, size, tuple(flags.split()))


def samples(case: Case) -> int:
    return sweep.value(case.flags, sweep.BATCH, 0)


def guessed(cases: Sequence[Case], machine: Hardware) -> Iterator[sweep.Row]:
    """As the formulas say, in place of counts, which take minutes for these models."""
    return (sweep.Row(case, advice.guess(case, machine), samples(case)) for case in cases)


def fits(found: Prediction) -> bool:
    return answer.fits(found, H100)


@pytest.mark.parametrize(("recipe", "size", "flags"), CASES)
def test_nothing_that_fits_is_faster(recipe: str, size: int, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "rows", guessed)
    case = case_of(recipe, size, flags)
    asked = advice.guess(case, H100)
    assert not fits(asked)
    found = advice.advise(case, asked, samples(case), H100)
    assert found
    assert found.peak_bytes <= H100.memory_bytes
    at = dataclasses.replace(case, size=found.size)
    rows = [row for one in sweep.sizes(at) if one.size == found.size for row in guessed_layouts(one)]
    best = max((row for row in rows if row.found and fits(row.found)), key=lambda row: row.rate)
    assert found.command == sweep.command(best.case, H100)
    assert found.longer == pytest.approx(samples(case) / asked.step_s / best.rate - 1)
    smaller = [one for one in sweep.sizes(case) if size <= one.size < found.size]
    assert not [row for one in smaller for row in guessed_layouts(one) if row.found and fits(row.found)]
    text = advice.as_text(found, case)
    assert found.command in text
    assert ("this fits" in text) == (found.size == size)


def guessed_layouts(case: Case) -> list[sweep.Row]:
    return list(guessed(list(sweep.layouts(case, every=True)), H100))


def test_what_is_counted_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas' first choices need more than they say: the first of the others is advised."""
    counted: list[Case] = []

    def rows(cases: Sequence[Case], machine: Hardware) -> Iterator[sweep.Row]:
        for row in guessed(cases, machine):
            counted.append(row.case)
            assert row.found
            more = 1000.0 if len(counted) <= advice.AT_ONCE else 1.0
            yield dataclasses.replace(
                row, found=dataclasses.replace(row.found, peak_bytes=more * min(row.found.peak_bytes, 70 * 2**30))
            )

    monkeypatch.setattr(sweep, "rows", rows)
    case = case_of(*CASES[0])
    found = advice.advise(case, advice.guess(case, H100), 16, H100)
    assert found
    assert len(counted) == 2 * advice.AT_ONCE
    assert found.command in {sweep.command(one, H100) for one in counted[advice.AT_ONCE :]}


def test_no_layout_at_all() -> None:
    tiny = dataclasses.replace(H100, memory_gib=1e-4)
    case = case_of("ddp_gpt", 2, SMALL)
    assert advice.advise(case, advice.guess(case, tiny), 16, tiny) is None
    assert "no layout" in advice.as_text(None, case)


def test_copy_has_no_other_layouts(tmp_path: Path) -> None:
    case = Case(tmp_path / "ddp_gpt", 2)
    assert advice.advise(case, advice.guess(case_of("ddp_gpt", 2, SMALL), H100), 16, H100) is None


def test_command(tmp_path: Path) -> None:
    """A small model on a machine with less memory, counted: the advice fits by its own count."""
    case = case_of("ddp_gpt", 2, SMALL)
    needs = advice.guess(case, H100).peak_bytes
    file = tmp_path / "small.toml"
    small = dataclasses.replace(H100, name="small", memory_gib=round(0.75 * needs / 2**30, 4))
    hardware.save(small, file, "a test's")
    words = ["ddp_gpt", "--world-size", "2", "--hardware", str(file), *SMALL.split(), "--json"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.plan", *words],
        cwd=about.ROOT,
        capture_output=True,
        text=True,
        timeout=runner.HANG_S,
        check=True,
    )
    found = json.loads(done.stdout)
    assert not found["fits"]
    assert "trying other layouts" in done.stderr
    assert found["advice"]["peak_bytes"] <= small.memory_bytes < found["prediction"]["peak_bytes"]
    assert "NPROC_PER_NODE=2 bash launch/torchrun.sh recipes/" in found["advice"]["command"]
