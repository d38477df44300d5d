"""What a step of each recipe launches, copies, casts, sends and holds on CUDA, without a GPU.

It is counted by tools/plan/counter.py. The figures are those of docs/measured/gpu-counts.md, so whoever changes one
makes the page again. Each count has a mutant, a mistake that it must show.
"""

import sys

import pytest
import torch

from tests import cuda_table
from tests.harness import pages, runner
from tests.harness.theory import P

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA")


GRADIENTS = {"ddp_gpt": "all-reduce dp", "fsdp_gpt": "reduce-scatter dp_shard"}  # what sends them


def test_every_recipe_is_counted_or_has_a_reason() -> None:
    assert {recipe for recipe in runner.RECIPES if not cuda_table.cases(recipe)} == {*cuda_table.NOT_RUN}


@pytest.mark.parametrize("recipe", [recipe for recipe in runner.RECIPES if cuda_table.cases(recipe)])
def test_counts_are_those_of_the_page(recipe: str) -> None:
    """On 64 ranks for one recipe of each workload: more ranks run the same lines."""
    few = not runner.stands_for_workload(recipe)
    cases = [one for one in cuda_table.cases(recipe) if not (few and one.size == 64)]
    page = pages.parts(cuda_table.PAGE.read_text())
    for case, counted in zip(cases, cuda_table.count(cases), strict=True):
        for part in ("step", "evaluate"):
            found = counted[part]
            waits = cuda_table.waits(case)
            assert sum(found["syncs"].values()) == waits, f"{case}: in {part}, the host waits for the GPU"
            assert not found["to_host"]
            assert not found["cpu_tensors"], f"{case}: in {part}, a kernel takes a tensor of the CPU"
        if kind := GRADIENTS.get(recipe):
            assert cuda_table.sent_by_kind(counted["step"])[kind][1] == P, f"{case}: 4 bytes for each parameter, once"
        waits = sum(counted["check"]["syncs"].values())
        assert waits <= 2, f"{case}: to compare replicas, the host waits {waits} times, not once for all tensors"
        if f"torch {torch.__version__}," in page["measured"]:  # other versions launch other kernels
            assert cuda_table.row(case, counted) in page["counts"], f"{case}: make the page again"


SHOWN_BY = {"item": "syncs", "cast": "casts", "cpu index": "cpu_tensors", "to host": "to_host"}


def test_mutants() -> None:
    mutants = ("", *SHOWN_BY, "lost collective", "held")
    counted = cuda_table.count([cuda_table.Case("ddp_gpt", 8)] * len(mutants), mutants=mutants)
    steps = {mutant: one["step"] for mutant, one in zip(mutants, counted, strict=True)}
    for mutant, key in SHOWN_BY.items():
        assert steps[mutant][key] != steps[""][key], f"{mutant} is not seen"
    lost, sent = (cuda_table.sent_by_kind(steps[mutant])["all-reduce dp"][1] for mutant in ("lost collective", ""))
    assert lost < sent
    assert steps["held"]["held_bytes"] > steps[""]["held_bytes"] + 2**22


def test_process_is_not_changed() -> None:
    """The harness runs in processes of its own."""
    assert "tests.harness.fake_cuda" not in sys.modules
    assert torch.cuda.is_available.__module__ == "torch.cuda"


def test_the_estimate_is_what_its_formulas_say() -> None:
    """By hand: a product that its FLOPs bound, one that its bytes bound, attention, and a collective."""
    flops, moved = 1e12, 1e9
    step = {
        "products": [[flops, 1, "bfloat16", "product", 2], [1, moved, "bfloat16", "product", 1]],
        "elementwise_bytes": 3 * moved,
        "kernels": 4,
        "traffic": [{"kind": "all-reduce", "axis": "dp", "calls": 1, "bytes": 8 * moved}],
    }
    found = cuda_table.estimate(step, bubble=0.0)
    product, read = flops / 989e12 / 0.65, moved / 3.35e12 / 0.8
    wanted = {"compute": 2 * product + read, "elementwise": 3 * read, "launches": 24e-6}
    wanted["sent"] = 2 * 7 / 8 * 8 * moved / 450e9 / 0.75
    wanted["best"] = max(2 * product + 4 * read, wanted["sent"])
    wanted["worst"] = 2 * product + 4 * read + wanted["sent"]
    for part, seconds in wanted.items():
        assert found[part] == pytest.approx(seconds), part
    attention = [[flops, 1, "bfloat16", "attention", 1]]
    reach = cuda_table.attention_reaches()
    assert 0 < reach < 0.65
    twice = cuda_table.Assumed(peak_bytes=3.35e12 / 2, again=0.5, elementwise=0.25)
    other = cuda_table.estimate(step | {"products": step["products"][:1] + attention}, bubble=0.0, assumed=twice)
    assert other["compute"] == pytest.approx(3 * product + flops / 989e12 / reach), "attention is not computed again"
    assert other["elementwise"] == pytest.approx(0.25 * 3 * 2 * read)
