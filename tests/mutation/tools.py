"""Faults of tools/plan (formulas of memory and time, what they are compared with, the advice) and of tools/judge."""

from tests.mutation.fault import Fault

MEMORY = "tests/tools/test_plan_memory.py"
NEAR = f"{MEMORY}::test_formula_is_near_the_count"
ADVICE = "tests/tools/test_plan_advice.py"
PLAN = "tests/tools/test_plan.py"
AGAIN = f"{MEMORY}::test_counts_are_those_of_the_code"


def of(module: str, name: str, old: str, new: str, *tests: str) -> Fault:
    """A fault of a module of tools/plan."""
    return Fault(f"plan/{module}: {name}", f"tools/plan/{module}.py", old, new, tests)


def judge(module: str, name: str, old: str, new: str, test: str) -> Fault:
    """A fault of a module of tools/judge: it has lost a condition."""
    tests = (f"tests/tools/test_judge.py::test_{test}",)
    return Fault(f"judge/{module}: {name}", f"tools/judge/{module}.py", old, new, tests)


FAULTS = (
    of(
        "transformer",
        "FSDP keeps no whole gradients between micro-batches",
        "* layout.grad_bytes if sharded and several else 0.0",
        "* layout.grad_bytes / shards if sharded and several else 0.0",
        NEAR,
    ),
    of(
        "transformer",
        "DDP has one copy of the gradients after micro-batches that send nothing",
        '{"gradients": 2 if several else 1}',
        '{"gradients": 1}',
        NEAR,
    ),
    of("transformer", "a logit takes 10 bytes", "logit_bytes: int = 12", "logit_bytes: int = 10", NEAR),
    of(
        "transformer",
        "the loss computes with all logits at once",
        "Layout(loss_logits=FLOAT_LOGITS, **more)",
        "Layout(**more)",
        NEAR,
    ),
    of(
        "transformer",
        "a tied head has parameters of its own",
        "tables = first + (last and not (first and tied))",
        "tables = first + last",
        NEAR,
    ),
    of(
        "transformer",
        "autocast keeps no copies of a matrix's input",
        "(10 if autocast else layout.norms)",
        "layout.norms",
        NEAR,
    ),
    of(
        "transformer",
        "full recomputation keeps what it computes again",
        '"products": products, "full": stream}',
        '"products": products, "full": products}',
        NEAR,
    ),
    of(
        "transformer",
        "the first stage of a pipeline has one micro-batch on its way",
        "ways = min(layout.pp, m) if first else 1",
        "ways = 1",
        NEAR,
    ),
    of(
        "transformer",
        "the reduce-scatter of a layer takes no memory",
        "(layer * FLOAT if done else 0.0)",
        "0.0",
        NEAR,
    ),
    of("counter", "whole tensors of DTensor's shapes are held", "counter.aside = True", "counter.aside = False", AGAIN),
    of(
        "predict",
        "attention's kernels reach what products do",
        "(products + exponentials) / machine.reach.attention",
        "(products + exponentials) / machine.reach.products",
        f"{PLAN}::test_rows_that_no_fit_has_seen",
    ),
    of(
        "predict",
        "what is sent during computation slows nothing",
        "slowed = machine.reach.contention * (sum(sends) - out)",
        "slowed = 0.0 * (sum(sends) - out)",
        f"{PLAN}::test_fsdp_is_slowed_by_what_it_sends_meanwhile",
    ),
    of(
        "transformer",
        "narrow heads take no more exponentials",
        "exponentials=scores * (2",
        "exponentials=scores / shape.heads * (2",
        f"{PLAN}::test_attention_has_an_efficiency_of_its_own",
    ),
    of(
        "known",
        "a row is near a question of any length",
        'SCALES = {"ranks": 3.0, "tokens": 1.5,',
        'SCALES = {"ranks": 3.0, "tokens": 1.5e9,',
        f"{PLAN}::test_range_covers_nine_of_ten_rows_near_a_question",
    ),
    of(
        "known",
        "a row is near a question of any number of tensor-parallel ranks",
        '"tp": 2.0',
        '"tp": 2.0e9',
        f"{PLAN}::test_range_covers_nine_of_ten_rows_near_a_question",
    ),
    of(
        "own_runs",
        "the warm-up counts",
        "rate=statistics.median(rates[1:])",
        "rate=statistics.median(rates)",
        f"{PLAN}::test_runs_of_this_machine_bring_predictions_closer",
    ),
    of(
        "own_runs",
        "a page's rates are those of its whole world",
        'ranks = 1 if one["layout"].endswith(" in one process") else size',
        "ranks = size",
        f"{PLAN}::test_page_of_proofs_is_read",
    ),
    of(
        "own_runs",
        "a run has a part in the fit that it is predicted by",
        "fit.fit([*known[:i], *known[i + 1 :]], machine.reach)",
        "fit.fit(known, machine.reach)",
        f"{PLAN}::test_own_runs_are_fitted",
    ),
    of(
        "known",
        "the question itself does not count",
        "needed = NEAR * (1 + sum(",
        "needed = NEAR * (0 + sum(",
        f"{PLAN}::test_range_covers_nine_of_ten_rows_near_a_question",
    ),
    of(
        "published",
        "rows that are held out are fitted",
        "if not held_out(row)),",
        "if held_out(row) or not held_out(row)),",
        f"{PLAN}::test_rows_that_no_fit_has_seen",
    ),
    of(
        "advice",
        "what the formula likes is advised, whether it fits or not",
        "if row.found and answer.fits(row.found, machine)]:",
        "if row.found]:",
        f"{ADVICE}::test_what_is_counted_decides",
    ),
    of(
        "advice",
        "the slowest of what fits is advised",
        "return max(fitting, key=lambda row: row.rate)",
        "return min(fitting, key=lambda row: row.rate)",
        f"{ADVICE}::test_nothing_that_fits_is_faster",
    ),
    of(
        "advice",
        "a larger number of ranks is never tried",
        "for one in itertools.chain([case], more):",
        "for one in [case]:",
        f"{ADVICE}::test_nothing_that_fits_is_faster",
    ),
    judge(
        "judge_data",
        "no two epochs have one order",
        'if last and last.begin["order"] == begin["order"]',
        'if last and last.begin["order"] == begin["at"]',
        "one_of_each",
    ),
    judge(
        "judge_model",
        "a sum of gradients is a mean",
        "if sent and len(summed) > 1:",
        "if sent and len(summed) > 999:",
        "one_of_each",
    ),
    judge(
        "judge_group",
        "ranks that wait are never seen",
        "or not (run.hang or broken or aborted) or",
        "or run.hang or not (broken or aborted) or",
        "one_of_each",
    ),
    judge(
        "judge_step",
        "gradients of earlier steps may stay",
        "if len(stale) > 1 and",
        "if len(stale) > 999 and",
        "own_processes",
    ),
    judge(
        "replay",
        "a batch of all samples is that of one rank",
        "return torch.cat([a, b]) if both else a",
        "return a",
        "mistake_is_named[tokens]",
    ),
    judge(
        "judge_model",
        "running statistics always come together",
        'ours[-1]["statistics"] == theirs[-1]["statistics"]',
        'ours[0]["statistics"] == theirs[0]["statistics"]',
        "mistake_is_named[by hand]",
    ),
    judge(
        "judge_model",
        "replicas that meet drift apart",
        "meet = True in differ and not all(differ[differ.index(True) :])",
        "meet = False",
        "mistake_is_named[local]",
    ),
    judge(
        "judge_data",
        "environments of other ranks are not compared",
        "if rollouts[0] and ours == theirs and",
        "if rollouts[0] and ours != theirs and",
        "mistake_is_named[rollouts]",
    ),
    judge(
        "judge_files",
        "what comes after a save is not read",
        'if one["n"] > last["n"]]',
        'if one["n"] < last["n"]]',
        "mistake_is_named[local]",
    ),
    judge(
        "spawn",
        "a rank does the part of the first",
        "[self] * (count[0] == mine)",
        "[self] * (count[0] == 0)",
        "own_processes",
    ),
    judge(
        "guard",
        "a script may write anywhere",
        'if event == "open" and writes(args):',
        'if event == "open" and not args:',
        "nothing_outside",
    ),
    judge(
        "guard", "a script may reach other machines", "and not is_near(args[1]):", "and not args:", "nothing_outside"
    ),
    judge(
        "page", "the table does not say what a kind does", "{kind.does} |", "{kind.level} |", "pages_have_the_tables"
    ),
)
