"""Faults of tools/plan: of the formula of memory, of what it is compared with, and of the advice that stands on it."""

from tests.mutation.fault import Fault

MEMORY = "tests/tools/test_plan_memory.py"
NEAR = f"{MEMORY}::test_formula_is_near_the_count"
ADVICE = "tests/tools/test_plan_advice.py"
AGAIN = f"{MEMORY}::test_counts_are_those_of_the_code"


def of(module: str, name: str, old: str, new: str, *tests: str) -> Fault:
    """A fault of a module of tools/plan."""
    return Fault(f"plan/{module}: {name}", f"tools/plan/{module}.py", old, new, tests)


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
        '{"gradients": 2 if several else 1,',
        '{"gradients": 1,',
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
)
