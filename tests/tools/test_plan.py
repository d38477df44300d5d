"""The planner: what it counts, says and refuses. Its figures against real ranks are in benchmarks/plan.py."""

import ctypes
import dataclasses
import json
import math
import mmap
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from common import UserError
from tools.plan import answer as answer_
from tools.plan import fake_device, fit, hardware, known, own_runs, predict, published, repeat, sweep, transformer
from tools.plan.__main__ import main
from tools.plan.count import Case, NotCountedError, count, refusal, to_work
from tools.plan.work import Traffic, Work

from tests.harness import mutants, runner
from tools import about

H100 = hardware.table()["h100-ib"]
GPT = ("--num-layers", "2", "--width", "64", "--num-heads", "4", "--seq-len", "64")


def plan(*words: str) -> tuple[int, str, str]:
    """Exit code and output of the command."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.plan", *words],
        cwd=about.ROOT,
        capture_output=True,
        text=True,
        timeout=runner.HANG_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def in_order(step: dict[str, Any]) -> dict[str, Any]:
    """What `repeat` knows of a step, in an order of its own."""
    kept = {name: step[name] for name in ("elementwise_bytes", "exponentials", "kernels")}
    traffic = sorted([sorted(one.items()) for one in step["traffic"]])
    return kept | {"traffic": traffic, "products": sorted(map(list, step["products"]))}


def answered(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is counted for each case. The counter forks, which a process with threads, as this one is, must not do."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.harness.fake_cuda"]
    asked = json.dumps([{"mutant": ""} | case for case in cases])
    done = subprocess.run([*command, asked], cwd=about.ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


STEPS = [
    ("fsdp_gpt", 4, "--micro-batch-size 1 --global-batch-size 20"),
    ("pipeline_gpt", 4, "--pp 2 --micro-batch-size 1 --global-batch-size 32"),
    ("tensor_gpt", 4, "--tp 2 --micro-batch-size 1 --global-batch-size 10 --recompute full"),
]


@pytest.mark.parametrize(("recipe", "size", "flags"), STEPS, ids=[one[0] for one in STEPS])
def test_many_micro_batches_are_known_from_few(recipe: str, size: int, flags: str) -> None:
    case = {"folder": f"recipes/{recipe}", "size": size, "flags": [*GPT, *flags.split()], "only_step": True}
    whole, first, second = answered([case, case | {"few": 0}, case | {"few": 1}])
    assert not [one["error"] for one in (whole, first, second) if "error" in one]
    assert first["counted"] < second["counted"] < whole["counted"] == whole["micro_batches"]
    more = repeat.more(first, second)
    assert in_order(more["step"]) == in_order(whole["step"])
    assert more["idle"] == pytest.approx(whole["idle"], abs=1e-12)
    assert more["samples"] == whole["samples"]
    for kind, size_bytes in whole["memory"].items():
        assert more["memory"][kind] == pytest.approx(size_bytes, rel=0.02), kind
    one_less = repeat.more(first, second | {"counted": second["counted"] + 1})  # a mutant
    assert in_order(one_less["step"]) != in_order(whole["step"])


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    code, out, err = plan("recipes/fsdp_gpt", "--world-size", "1024", *GPT, "--global-batch-size", "1024", "--json")
    assert not code, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_answer_as_json(answer: dict[str, Any]) -> None:
    found = answer["prediction"]
    parts = ("products_s", "memory_s", "launch_s", "bubble_s", "exposed_s")
    assert sum(found[part] for part in parts) == pytest.approx(found["step_s"])
    (rank,) = answer["ranks"]
    gathers = [one for one in rank["traffic"] if one["kind"] == "all-gather"]
    assert [(one["axis"], one["ranks"], one["machines"]) for one in gathers] == [("dp_shard", 1024, 128)]
    assert rank["memory"]["optimizer"] == pytest.approx(2 * rank["memory"]["parameters"], rel=0.2)
    assert answer["fits"]
    assert "(gpt on h100: no row whose GPUs wait for launches)" in answer["error"]  # it is tiny


def test_answer_for_people() -> None:
    code, out, err = plan("ddp_gpt", "--world-size", "2", *GPT)
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert names == ["plan", "memory", "step", "sends", "rates", "saves", "error"]
    assert "it fits" in out
    assert "during the backward pass" in out


def test_budget() -> None:
    """A trillion tokens are so many steps, and they take so long: by hand."""
    one = work(samples=8, units={"tokens": 2048}, flops={"bfloat16": 1e15})
    found = predict.predict([one], H100)
    asked = answer_.budget(1e12, 2.5, [one], H100)
    days = 1e12 / (8 * 2048) * found.step_s / (1 - found.lost) / 86_400
    assert asked.days == pytest.approx(days)
    assert asked.gpu_hours == pytest.approx(days * 24 * 8)
    assert asked.cost == pytest.approx(2.5 * asked.gpu_hours)
    low, high = known.between("gpt", H100, answer_.step_of(one, found))
    assert asked.shortest_days / asked.days == pytest.approx(low / found.step_s)
    assert asked.longest_days / asked.days == pytest.approx(high / found.step_s)
    text = answer_.as_text(Case(Path("x"), 8), [one], H100, 1e12, 2.5)
    (line,) = [line for line in text.splitlines() if line.startswith("budget")]
    assert f"1T tokens take {known.span(asked.days * 86_400)}, between " in line
    assert f"{asked.gpu_hours:,.0f} GPU-hours" in line
    assert f"{asked.cost:,.0f} at 2.5 an hour" in line
    with pytest.raises(UserError, match="reads tokens"):
        answer_.budget(1e12, 2.5, [work()], H100)


@pytest.mark.parametrize(("text", "tokens"), [("1T", 1e12), ("300B", 3e11), ("1.5t", 1.5e12), ("2e9", 2e9), ("7", 7)])
def test_number_of_tokens(text: str, tokens: float) -> None:
    assert answer_.number_of_tokens(text) == pytest.approx(tokens)


def near_all(step: known.Step, *, error: float = 0.1, count: int = 20) -> known.Like:
    """Rows that are just like a question, one of ten of which is twice as far off."""
    rows = [known.Compared(str(i), "gpt", "h100", 8, error * (1 + (i % 10 == 0)), tokens=4096) for i in range(count)]
    return known.Like(rows, [], 8, 4096)


def test_range_covers_nine_of_ten_rows_near_a_question() -> None:
    step = known.Step(8, 1.0, tokens=4096)
    assert known.farthest(near_all(step), step) == pytest.approx(math.log(1.2))  # 93 % of 21 are 19.5 of 20
    assert known.farthest(near_all(step, count=40), step) == pytest.approx(math.log(1.2))
    assert known.farthest(near_all(step, count=8), step) == math.inf  # the question itself counts for one
    for changes in ({"tokens": 4096 * 64}, {"tp": 64}, {"pp": 64}):
        far = dataclasses.replace(step, **changes)
        assert known.farthest(near_all(far), far) == math.inf, f"no row has {changes}"
    low, high = known.between("gpt", H100, known.Step(8, 1.0))
    assert low == pytest.approx(1 / high)
    near, outside = (known.between("gpt", H100, known.Step(size, 1.0)) for size in (8, 10**6))
    assert outside[0] < near[0] < 1 < near[1] < outside[1]


def test_range_covers_sources_that_are_left_out() -> None:
    """Each row by a range from the rows of all other sources, as its error is of fractions without its own."""
    held = [row for row in published.foundry() if published.held_out(row)]
    group = {row.name: row.group for row in (*published.may_be_fitted(), *held)}
    rows = [one for one in known.compared() if one.name in group]
    inside: dict[str, list[bool]] = {}
    for row in rows:
        others = [one for one in rows if group[one.name] != group[row.name]]
        inside.setdefault(group[row.name], []).append(known.within(row, others) or known.is_outside(row, others))
        assert abs(row.error) < 0.35 or known.is_outside(row, others), row
    every = [one for some in inside.values() for one in some]
    assert len(rows) == len(group) == 170
    assert sum(every) / len(every) >= known.COVERED
    short = {name for name, some in inside.items() if sum(some) / len(some) < known.COVERED}
    assert not short


def test_rows_that_no_fit_has_seen() -> None:
    """The goal for the time of a step: 8 % in the mean, no trend over the length of sequences."""
    held = [row for row in published.foundry() if published.held_out(row)]
    assert not {row.name for row in held} & {row.name for row in published.may_be_fitted()}
    reaches = {name: hardware.Reach(**one) for name, one in json.loads(hardware.KNOWN.read_text())["reach"].items()}
    errors = {row.name: published.guess(row, reaches) / row.step_s - 1 for row in held}
    assert sum(map(abs, errors.values())) / len(errors) < 0.08
    assert max(map(abs, errors.values())) < 0.35
    for least, most in ((0, 2048), (2048, 8192), (8192, 2**17)):
        some = [errors[row.name] for row in held if least < row.shape.seq_len <= most]
        assert abs(sum(some) / len(some)) < 0.06, (least, most)


def test_attention_has_an_efficiency_of_its_own() -> None:
    """At the same FLOPs, long rows take longer, and so do narrow heads."""
    shapes = [transformer.Shape(2048, 8, heads, heads, 8192, False, 50_304, 32_768, True) for heads in (16, 32)]
    wide, narrow = (transformer.work(one, transformer.Layout()) for one in shapes)
    assert wide.attention == narrow.attention
    assert narrow.exponentials == 2 * wide.exponentials
    assert predict.attended(narrow, H100) > 1.05 * predict.attended(wide, H100)
    reach = dataclasses.replace(H100.reach, attention=H100.reach.products)
    plain = dataclasses.replace(H100, peak_exp=0.0, peak_attention=0.0, reach=reach)
    assert predict.attended(wide, H100) > 2 * predict.attended(wide, plain)


def test_fsdp_is_slowed_by_what_it_sends_meanwhile() -> None:
    one = work(traffic=(Traffic("all-gather", "dp", 8, 1, 64, 1e10, "step"),))
    none, half = (dataclasses.replace(H100, reach=dataclasses.replace(H100.reach, contention=c)) for c in (0.0, 0.5))
    before, after = (predict.of_rank(one, machine) for machine in (none, half))
    assert after["step_s"] - before["step_s"] == pytest.approx(0.5 * before["hidden_s"])
    assert after["hidden_s"] == pytest.approx(0.5 * before["hidden_s"])


@pytest.mark.rest
def test_sweep_of_layouts() -> None:
    code, out, err = plan("ddp_gpt", "--sweep", "--world-size", "2", *GPT, "--global-batch-size", "2")
    assert not code, err
    rows = [line for line in out.splitlines() if "launch/torchrun.sh" in line]
    assert {re.findall(r"recipes/(\w+)", row)[0] for row in rows} >= {"ddp_gpt", "fsdp_gpt", "tensor_gpt"}
    assert "fastest that fits" in out


def test_sweep_of_a_model_with_experts_is_its_own() -> None:
    """And that of another model does not offer it: it would be another training."""
    flags = ("--global-batch-size", "8")
    dense, moe = (list(sweep.layouts(Case(about.ROOT / "recipes" / one, 8, flags))) for one in ("fsdp_gpt", "moe_gpt"))
    assert {one.folder.name for one in dense} == {"ddp_gpt", "fsdp_gpt", "tensor_gpt", "pipeline_gpt", "context_gpt"}
    assert {one.folder.name for one in moe} == {"moe_gpt"}
    assert {one.flags[one.flags.index("--ep") + 1] for one in moe} == {"2", "4", "8"}
    assert {one.flags[one.flags.index(sweep.MICRO) + 1] for one in moe} == {"1"}, "each rank reads one sequence"


WRONG = {
    "no recipe": ([], "which recipe"),
    "no such recipe": (["recipes/none"], "recipes/none has no train.py"),
    "hardware": (["ddp_gpt", "--hardware", "h1000"], "h1000 is not known: use v100-ib, "),
    "hardware file": (["ddp_gpt", "--hardware", "none.toml"], "none.toml"),
    "ranks": (["ddp_gpt", "--world-size", "-3"], "--world-size -3 must be between"),
    "no ranks": (["ddp_gpt", "--world-size", "0"], "--world-size 0 must be between 1 and"),
    "flag without a recipe": (["--html", "--tp=2"], "--tp=2 is not a flag of tools.plan"),
    "tokens": (["ddp_gpt", "--tokens", "1Q"], "--tokens '1Q' must be a number above 0, such as 300B"),
    "no tokens": (["ddp_gpt", "--tokens", "0"], "--tokens '0' must be a number above 0"),
    "price": (["ddp_gpt", "--price", "2"], "--price 2 must be above 0, and is of the hours that --tokens takes"),
    "no price": (["ddp_gpt", "--tokens", "1T", "--price", "0"], "--price 0 must be above 0"),
    "runs": (["--calibrate", "none.csv"], "--calibrate none.csv: .*No such file"),
}
REFUSED = {
    "layout": ("tensor_gpt", 8, ["--tp", "3"], "tensor_gpt on 8 ranks: .*--tp"),
    "batch": ("ddp_gpt", 7, ["--global-batch-size", "16"], "does not divide by 7"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[name]
    with pytest.raises(UserError, match=message) as got:
        main(words)
    assert "\n" not in str(got.value)
    assert capsys.readouterr() == ("", "")


def test_what_a_recipe_refuses_is_one_sentence() -> None:
    cases = [Case(about.ROOT / "recipes" / recipe, size, (*flags,)) for recipe, size, flags, _ in REFUSED.values()]
    found = answered([{"folder": str(one.folder), "size": one.size, "flags": list(one.flags)} for one in cases])
    for (*_, message), case, answer in zip(REFUSED.values(), cases, found, strict=True):
        sentence = refusal(case, answer)
        assert re.search(message, sentence)
        assert "\n" not in sentence


def test_sequences_that_are_longer_than_the_built_in_text(tmp_path: Path) -> None:
    """A question about 128k tokens is about another text; a text of one's own that is too short is refused."""
    (tmp_path / "short.txt").write_text("short " * 1000)
    case = {"folder": "recipes/ddp_gpt", "size": 1, "own_data": True, "only_step": True}
    flags = [
        "--num-layers",
        "1",
        "--width",
        "32",
        "--num-heads",
        "2",
        "--seq-len",
        "131072",
        "--global-batch-size",
        "1",
    ]
    planned, refused = answered([case | {"flags": flags}, case | {"flags": [*flags, "--data", str(tmp_path)]}])
    assert planned["units"] == {"tokens": 131_072}
    assert "--seq-len 131072" in refused["error"]


def test_refusal_of_the_command() -> None:
    code, out, err = plan("ddp_gpt", "--world-size", "2", "--no-such-flag", "1")
    assert (code, out) == (2, "")
    assert re.fullmatch("error: ddp_gpt on 2 ranks: .*--no-such-flag.*\n", err), err


READS_VALUES = {"forward": {"losses.sum()": "losses.sum() * torch.tensor(losses.detach().numpy().sum())"}}


def test_model_that_cannot_be_traced(tmp_path: Path) -> None:
    path = mutants.mutate("ddp_gpt", tmp_path, READS_VALUES)
    with pytest.raises(NotCountedError, match=r"cannot be planned: on tensors without data, its step ends with") as got:
        count(Case(path.parent, 2, GPT), H100)
    assert "\n" not in str(got.value)


def test_copied_recipe_with_a_model_of_its_own(tmp_path: Path) -> None:
    """A mutant of the model has more work: what runs is counted, not what the recipe once was."""
    twice = {"forward": {"losses.sum()": "(losses + model(batch.inputs, batch.targets)).sum()"}}
    path = mutants.mutate("ddp_gpt", tmp_path, twice)
    flags = (*GPT, "--dtype", "bfloat16")
    (plain,), (double,) = (
        count(Case(folder, 2, flags), H100) for folder in (about.ROOT / "recipes/ddp_gpt", path.parent)
    )
    assert sum(double.flops.values()) == pytest.approx(2 * sum(plain.flops.values()), rel=0.01)
    assert double.traffic == plain.traffic


# --- formulas ----------------------------------------------------------------------------------------------------


def work(**changes: Any) -> Work:
    base = Work(8, 8, {"bfloat16": 1e12}, 1e9, 1e10, 1000, (), {"parameters": 1e9}, 1e9, 8e12)
    return dataclasses.replace(base, **changes)


def test_more_work_takes_longer() -> None:
    base = predict.predict([work()], H100).step_s
    sent = (Traffic("all-reduce", "dp", 8, 1, 10, 1e9),)
    for changes in ({"flops": {"bfloat16": 2e12}}, {"elementwise_bytes": 3e10}, {"traffic": sent}, {"idle": 0.2}):
        assert predict.predict([work(**changes)], H100).step_s > 1.01 * base, changes


def test_slower_network_is_felt_between_machines_only() -> None:
    slow = dataclasses.replace(H100, network_bandwidth=H100.network_bandwidth / 10)
    for machines, ratio in ((1, 1.0), (8, 10.0)):
        one = Traffic("all-gather", "dp", 8, machines, 1, 1e9)
        assert predict.seconds(one, slow) / predict.seconds(one, H100) == pytest.approx(ratio, rel=0.05)


def test_gloo_scatters_by_an_all_reduce() -> None:
    scattered, reduced = (Traffic(kind, "dp", 2, 1, 1, 1e9) for kind in ("reduce-scatter", "all-reduce"))
    cpu = dataclasses.replace(H100, name="cpu", gpu="", launch_s=1e-6)
    assert predict.seconds(scattered, cpu) == predict.seconds(reduced, cpu)
    assert predict.seconds(scattered, H100) < 0.6 * predict.seconds(reduced, H100)


def test_hidden_traffic_is_exposed_beyond_its_window() -> None:
    few, many = (work(traffic=(Traffic("all-gather", "dp", 8, 1, 64, size, "engine"),)) for size in (1e6, 1e12))
    assert predict.of_rank(few, H100)["exposed_s"] < 0.05 * predict.of_rank(few, H100)["step_s"]
    assert predict.of_rank(many, H100)["exposed_s"] > 0.9 * predict.of_rank(many, H100)["step_s"]


def test_interval_of_saves_loses_least() -> None:
    save, mtbf, recovery = 30.0, 3600.0, 60.0
    best = predict.best_interval(save, mtbf)
    least = predict.lost_share(save, best, recovery, mtbf)
    for other in (best / 2, best * 2):
        assert predict.lost_share(save, other, recovery, mtbf) > least


# --- measurements ------------------------------------------------------------------------------------------------


def test_every_published_row_is_predicted_or_refused_for_a_reason() -> None:
    rows = published.raw()
    predicted = {one.name for one in published.gpts()} | {one.name for one in published.resnets()}
    for line in rows:
        by_curve = line["metric"] == "efficiency"  # docs/plan.md, curves
        assert (line["name"] in predicted) + bool(line["refuse"]) + by_curve == 1, line["name"]
        assert line["source"], line["name"]


def test_a_fifth_of_the_steps_predicts_the_rest() -> None:
    """docs/plan.md has ten splits; a split whose fit is not used must err more."""
    formula, near = published.split(0)
    assert formula.count == near.count == 1440 - 1440 // 5
    assert formula.mean < 0.085
    assert near.mean < 0.06
    assert near.regret < 0.03
    steps = published.vtrain()
    blind = published.judged(steps, lambda one: fit.predicted_s(one.measured, hardware.Reach()))
    assert blind.mean > 2 * formula.mean


def test_fit_finds_what_made_the_steps() -> None:
    true = hardware.Reach(0.5, 0.4, 0.7, 0.6, 0.9, 2.0, 1.0)
    shapes = [transformer.Shape(w, n, 16, 16, 4 * w, False, 50_304, 1024, True) for w in (512, 2048) for n in (4, 24)]
    layouts = [transformer.Layout(dp=8, micro_batch=b, global_batch=8 * b) for b in (1, 8)]
    layouts += [transformer.Layout(dp=2, tp=4, micro_batch=b, global_batch=4 * b) for b in (1, 8)]
    works = [transformer.work(shape, layout) for shape in shapes for layout in layouts]
    some = [fit.Measured((one,), H100, 1.0) for one in works]
    some = [dataclasses.replace(one, step_s=fit.predicted_s(one, true)) for one in some]
    found = fit.fit(some, hardware.Reach(), prior=1e-6)
    for one in some:
        assert fit.predicted_s(one, found) == pytest.approx(one.step_s, rel=0.05)


def test_error_beyond_what_was_tested_is_a_range() -> None:
    like = r"rows like yours \(gpt on h100\): mean \d+%, worst \d+% of \d+; by nine of ten of those near it, a step"
    assert re.match(like, known.sentence("gpt", H100, known.Step(64, 1.0, 0.1, 8192)))
    rtx = hardware.table()["rtx4090-pcie"]
    for workload, machine, step, why in (
        ("gpt", H100, known.Step(64, 1.0, 0.9), "no row whose GPUs wait for launches"),
        ("gpt", H100, known.Step(10**6, 1.0), "at most 16,384 ranks"),
        ("gpt", H100, known.Step(64, 1.0, 0.1, 131_072), "at most 65,536 tokens"),
        ("gpt", H100, known.Step(16_384, 1.0, 0.1, 65_536, 128.0), "too few rows near it"),
        ("mlp", H100, known.Step(8, 1.0), "no such rows"),
        ("gpt", rtx, known.Step(8, 1.0), "no such rows"),
    ):
        said = known.sentence(workload, machine, step)
        assert re.match(rf"outside of what was tested \(.*: {why}\): a step between .* and .*, if it errs like", said)


BOX = dataclasses.replace(
    H100,
    name="box",
    gpu="",
    family="",
    local_size=2,
    peak_16bit=3e10,
    peak_float32=3e10,
    memory_bandwidth=5e9,
    launch_s=5e-6,
    reach=hardware.Reach(launch=1.0),
)
RUN = ("--num-layers", "1", "--num-heads", "2", "--seq-len", "32", "--max-steps", "6", "--log-every", "2")


def test_runs_of_this_machine_bring_predictions_closer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real trainings: their metrics.jsonl, read, fitted, and written as a machine."""
    files = []
    for width in ("32", "64"):
        flags = (*RUN, "--width", width, "--out", str(tmp_path), "--name", width)
        runner.run_recipe("ddp_gpt", 1, *flags)
        files.append(str(tmp_path / width / "metrics.jsonl"))
    (one,) = own_runs.read(Path(files[0]))
    rates = [record["perf/samples_per_s"] for record in map(json.loads, Path(files[0]).read_text().splitlines())
             if "perf/samples_per_s" in record]  # fmt: skip
    assert len(rates) == 3
    assert one.rate == pytest.approx(sum(rates[1:]) / 2)  # without the first one, which has the warm-up in it
    assert (one.case.size, one.device) == (1, "cpu")
    hardware.save(BOX, tmp_path / "box.toml", "a guess")
    main(["--calibrate", str(tmp_path / "mine.toml"), *files, "--hardware", str(tmp_path / "box.toml")])
    said = capsys.readouterr().out
    found = re.search(r"off by (\d+)% in the mean, and are by (\d+)%; each run by .*, (\d+)%", said)
    assert found, said
    assert int(found[2]) < int(found[1])
    mine = hardware.find(str(tmp_path / "mine.toml"))
    assert mine.reach != BOX.reach
    assert dataclasses.replace(mine, reach=BOX.reach, name="box") == BOX
    main(["--calibrate", files[0], "--hardware", str(tmp_path / "mine.toml")])
    said = capsys.readouterr().out
    assert "how far off another run will be, one run does not say" in said
    assert "[mine.reach]" in said
    with pytest.raises(UserError, match=r"ran on a CPU, and --hardware h100-ib is a GPU: give the"):
        main(["--calibrate", *files])


def prove_page(folder: Path, rates: list[dict[str, Any]], devices: str = "NVIDIA H100 80GB HBM3") -> Path:
    file = folder / "prove.json"
    where = {"ranks": "8 on 1 machine", "devices": devices}
    file.write_text(json.dumps({"machine": where, "figures": {"rates": rates}}))
    return file


def test_page_of_proofs_is_read(tmp_path: Path) -> None:
    """Each rate with its flags; a config of Accelerate, and games, are left out."""
    rate = {"perf/samples_per_s": 10.0}
    rates = [
        {"layout": "tensor_gpt --tp 8", "flags": "--tp 8 --width 1024", **rate},
        {"layout": "fsdp_gpt --dp-replicate 2", **rate},  # a page of an earlier version
        {"layout": "dp_resnet in one process", "flags": "", **rate},
        {"layout": "accelerate_gpt fsdp.yaml", "flags": "", **rate},
        {"layout": "syncbn_ppo", "flags": "", **rate},
    ]
    found = own_runs.read(prove_page(tmp_path, rates))
    cases = [(one.case.folder.name, one.case.size, one.case.flags, one.device, one.rate) for one in found]
    assert cases == [
        ("tensor_gpt", 8, ("--tp", "8", "--width", "1024"), "cuda", 10.0),
        ("fsdp_gpt", 8, ("--dp-replicate", "2"), "cuda", 10.0),
        ("dp_resnet", 1, (), "cuda", 10.0),
    ]
    assert own_runs.read(tmp_path) == found  # by its folder
    assert own_runs.read(tmp_path / "prove.md") == found


def test_files_without_a_timing_are_refused(tmp_path: Path) -> None:
    config = {"recipe": "ddp_gpt", "world_size": 1, "device": "cpu", "args": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    metrics = tmp_path / "metrics.jsonl"
    for text, message in (
        ('{"step": 2, "train/loss": 1.0}\n', r"metrics.jsonl has 0 records of perf/samples_per_s"),
        ('{"step": 2, "perf/samples_per_s": 3.0}\n', r"has 1 records .*: give a run of more steps"),
        ("[]}\n", "is not as a run writes it"),
    ):
        metrics.write_text(text)
        with pytest.raises(UserError, match=message):
            own_runs.read(metrics)
    for file, message in (
        (prove_page(tmp_path, []), r"prove.json has no rates"),
        (tmp_path / "none.csv", r"none.csv: No such file"),
        (tmp_path / "mine.txt", r"mine.txt: it is not known what that is: give a run's metrics.jsonl"),
    ):
        with pytest.raises(UserError, match=message):
            own_runs.read(file)
    (tmp_path / "prove.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not as tools.prove writes it"):
        own_runs.read(tmp_path / "prove.json")


def test_own_runs_are_fitted(tmp_path: Path) -> None:
    """One run takes three times as long as predicted, and one 1.2 times: all three errors are told apart."""
    lines = ["recipe,flags,world_size,step_s"]
    for width, factor in ((64, 3), (512, 1.2)):
        flags = (*GPT, "--width", str(width))
        took = factor * predict.predict(count(Case(about.ROOT / "recipes/ddp_gpt", 2, flags), H100), H100).step_s
        lines.append(f"ddp_gpt,{' '.join(flags)},2,{took}")
    file = tmp_path / "runs.csv"
    file.write_text("\n".join(lines))
    machine, text = own_runs.fitted(own_runs.read(file), H100)
    found = re.search(r"off by (\d+)% in the mean, and are by (\d+)%; each run by .* the others, (\d+)%", text)
    assert found
    before, fitted, others = map(int, found.groups())
    assert before == 90  # the root of 3 times 1.2 is 1.90
    assert fitted < before < others
    assert "these runs say nothing of each other" in text
    assert "launch = " in own_runs.as_toml(machine)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe,flags\nddp_gpt,\n", "line 2: 'world_size' is missing"),
        ("recipe,flags,world_size,step_s\nddp_gpt,,two,1\n", "line 2: .*two"),
        ("recipe,flags,world_size,step_s\nddp_gpt,,2,-1\n", "line 2: needs .*step_s above 0"),
        ("recipe,flags,world_size,step_s\n", "has no runs"),
    ],
)
def test_wrong_runs_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        own_runs.read(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("memory_gib", "memory_gb"), "does not know memory_gb"),
        (lambda text: text.replace("peak_16bit = ", "peak_16bit = -"), "peak_16bit = -.* must be a number above 0"),
        (lambda text: "x = 1\n" + text, "is outside of a machine"),
        (lambda text: text + "[", "give a file like"),
    ],
)
def test_wrong_hardware_names_the_field(change: Callable[[str], str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    hardware.save(dataclasses.replace(H100, name="mine"), file, "a machine")
    assert hardware.find(str(file)) == dataclasses.replace(H100, name="mine")
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError, match=message):
        hardware.find(str(file))


def test_sweep_grows_the_batch_with_the_ranks() -> None:
    sizes = list(sweep.sizes(Case(about.ROOT / "recipes/tensor_gpt", 8, ("--tp", "4", "--global-batch-size", "64"))))
    assert [one.size for one in sizes] == [2**i for i in range(17)]
    assert [sweep.value(one.flags, sweep.BATCH, 0) for one in sizes[-2:]] == [2**13, 2**14]


def test_traffic_of_a_message_is_counted_once() -> None:
    step = {"products": [], "elementwise_bytes": 1, "exponentials": 0, "kernels": 1, "traffic": []}
    one = {"kind": "send", "axis": "pp", "ranks": 2, "machines": 1, "calls": 1, "bytes": 8, "hidden": "no"}
    step["traffic"] = [one, one | {"kind": "receive"}]
    found = {"step": step, "samples": 1, "memory": {}, "state_bytes": 1, "sample_flops": 1, "micro_batches": 1}
    found |= {"idle": 0.0, "units": {}, "tf32": False, "parameters": 1, "active": 1}
    assert len(to_work(found, Case(Path("x"), 2), H100).traffic) == 1


# --- devices that are not there, on any processor and version ---


def test_false_in_the_words_of_each_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the manual of Arm: MOVZ W0, #0 and RET X30. The processor of this machine runs its own."""
    movz, ret = 0b0_10_100101 << 23, 0b1101011_0_0_10_11111_0000_0_0 << 10 | 30 << 5
    assert fake_device.RETURN_FALSE["aarch64"] == struct.pack("<II", movz, ret)
    written: list[bytes] = []
    monkeypatch.setattr(fake_device, "_has_primary_context", lambda *_: 0)
    monkeypatch.setattr(fake_device, "write_code", lambda _, code: written.append(code))
    for machine in fake_device.RETURN_FALSE:
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        fake_device.without_contexts()
    assert written == [*fake_device.RETURN_FALSE.values()]
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        UserError, match=r"and x86_64 or aarch64; this is torch \S+ on riscv64: plan on another machine"
    ):
        fake_device.without_contexts()


TRUE = {"x86_64": b"\xb8\x01\x00\x00\x00\xc3", "aarch64": struct.pack("<II", 0x52800020, 0xD65F03C0)}


@pytest.mark.parametrize("at", [0, mmap.PAGESIZE - 1, mmap.PAGESIZE + 64])
def test_function_that_is_written_over(at: int) -> None:
    """It returned true, and then returns false; also where it goes over the end of a page."""
    if platform.machine() not in TRUE:
        pytest.skip("no instructions for this processor")
    at -= at % 4 if platform.machine() == "aarch64" else 0
    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + at
    function = ctypes.CFUNCTYPE(ctypes.c_int)(address)
    for code, answer in ((TRUE, 1), (fake_device.RETURN_FALSE, 0)):
        fake_device.write_code(address, code[platform.machine()])
        assert function() == answer
