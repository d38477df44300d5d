"""Loss, bytes and time of replicas that train apart: `uv run python -m benchmarks.diloco` (root).

It writes docs/measured/diloco.md and its plot. Losses are those of whole trainings with two processes and some seeds.
Bytes and times are measured between two machines, network namespaces on a switch, on links of 100 and 10 Mbit/s. Each
setting is kept in docs/measured/diloco.json as soon as it is measured; with --only, those of the others stay.
"""

import argparse
import dataclasses
import json
import math
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from tests.harness import machines, mutants, pages, runner
from tests.harness.runner import ROOT

JSON = ROOT / "docs" / "measured" / "diloco.json"
RATES = {"100 Mbit/s": "100mbit", "10 Mbit/s": "10mbit"}
SLOW = "10 Mbit/s"
BATCH = 32
MODEL = ("--num-layers", "2", "--width", "64", "--seq-len", "64", "--global-batch-size", str(BATCH))
EVERY = 100  # steps between evaluations, which all of --inner-steps divide: replicas are equal then
NEAR = 1.01  # of the loss of DistributedDataParallel
PLOT = "![Validation loss at the end against all bytes that a machine has sent, for each setting](diloco.png)"
DILOCO = "recipes/diloco_gpt"
NESTEROV = ("--outer-lr", "0.7", "--outer-momentum", "0.9")
# The communication hooks of multinode_resnet, in ddp_gpt.
WRAPPED = 'return DistributedDataParallel(model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)'
HOOKS = {
    "bf16": "model.register_comm_hook(mesh.get_group('dp'), default_hooks.bf16_compress_hook)",
    "powersgd": "power = powerSGD_hook.PowerSGDState(mesh.get_group('dp'), 4, max(2, args.warmup_steps), "
    "random_seed=args.seed); model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained: a recipe's folder or a hook in ddp_gpt, its flags, and the steps after which it repeats.

    It trains `longer` times as many steps as the others.
    """

    recipe: str
    flags: tuple[str, ...] = ()
    period: int = 1
    longer: int = 1


def apart(inner_steps: int, *flags: str, longer: int = 1) -> Setting:
    """diloco_gpt."""
    return Setting(DILOCO, ("--inner-steps", str(inner_steps), *flags), inner_steps, longer)


SETTINGS = {
    "ddp_gpt": Setting("recipes/ddp_gpt"),
    "ddp_gpt with the bf16 hook": Setting("bf16"),
    "ddp_gpt with PowerSGD, rank 4": Setting("powersgd"),
    **{f"local SGD, H = {h}": apart(h) for h in (1, 5, 20, 100)},
    "local SGD, H = 100, int8": apart(100, "--compress", "int8"),
    "local SGD, H = 100, int8, twice the steps": apart(100, "--compress", "int8", longer=2),
    **{f"DiLoCo, H = {h}": apart(h, *NESTEROV) for h in (5, 20, 100)},
    "DiLoCo, H = 20, bf16": apart(20, *NESTEROV, "--compress", "bf16"),
    "DiLoCo, H = 20, int8": apart(20, *NESTEROV, "--compress", "int8"),
    "DiLoCo, H = 100, int8": apart(100, *NESTEROV, "--compress", "int8"),
    "DiLoCo, H = 20, 2 fragments, 5 steps on the way": apart(20, *NESTEROV, "--fragments", "2", "--delay", "5"),
}
FIRST = next(iter(SETTINGS))


def folder_of(setting: Setting, folder: Path) -> Path:
    """Folder of its train.py."""
    if setting.recipe not in HOOKS:
        return ROOT / setting.recipe
    bucket = ", bucket_cap_mb=10_000" if setting.recipe == "powersgd" else ""  # one bucket, as multinode_resnet has it
    wrapped = f"{WRAPPED.removeprefix('return ').removesuffix(')')}{bucket})"
    made = f"model = {wrapped}; {HOOKS[setting.recipe]}; return model"
    hooks = "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook"
    changes = {"": {"import contextlib": f"import contextlib; {hooks}"}, "parallelize": {WRAPPED: made}}
    return mutants.mutate("ddp_gpt", folder, changes).parent


def losses(setting: Setting, seed: int, steps: int, folder: Path) -> dict[int, float]:
    """val/loss by step of a whole training with two processes."""
    folder.mkdir()
    flags = [*MODEL, "--max-steps", str(steps), "--eval-every", str(EVERY), "--save-every", str(steps)]
    flags += ["--check-every", "0", "--log-every", "100", "--seed", str(seed), *setting.flags]
    where = ("--out", str(folder), "--name", "run")
    train = folder_of(setting, folder) / "train.py"
    result = runner.run_recipe(train, 2, *flags, *where, target=runner.run_unmeasured, timeout_s=1800)
    assert result.ok, str(result)
    return runner.records(folder / "run", "val/loss")


def measure(setting: Setting, rate: str, folder: Path) -> tuple[float, float]:
    """MB that a machine sends in a step, and seconds of one, mean over whole rounds, on a shaped link."""
    folder.mkdir()
    run = folder / "runs" / "run"
    first = max(5, setting.period)  # with --warmup-steps 2, PowerSGD compresses from the third step on
    last = first + max(10, setting.period)
    with machines.joined(folder, 2) as both:
        for one in both:
            one.shape(rate)
        flags = [*MODEL, "--max-steps", str(last + 1), "--warmup-steps", "2", "--log-every", "1", "--check-every", "0"]
        flags += ["--eval-every", "100000", "--save-every", "100000", "--out", str(folder / "runs"), "--name", "run"]
        command = ["bash", str(ROOT / "launch/torchrun.sh"), str(folder_of(setting, folder)), *flags, *setting.flags]
        where = {"NNODES": "2", "MASTER_ADDR": both[0].address, "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        where |= {"RUN_KEY": secrets.token_hex(32), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
        environ = os.environ | where
        processes = [one.popen(command, folder / "output", environ | {"NODE_RANK": str(one.number)}) for one in both]
        sent: dict[int, int] = {}
        while None in [process.poll() for process in processes]:
            file = run / "metrics.jsonl"
            step = file.read_text().count("train/loss") if file.exists() else 0
            if step not in sent:
                sent[step] = both[0].bytes_sent()
            time.sleep(0.005)
        assert not any(process.returncode for process in processes), (folder / "output").read_text()
    rates = runner.records(run, "perf/samples_per_s")
    seconds = [BATCH / rates[step] for step in range(first + 1, last + 1)]
    begin = max(step for step in sent if step <= first)  # a fast step may have been missed
    end = max(step for step in sent if step <= last)
    return (sent[end] - sent[begin]) / (last - first) / 1e6, statistics.mean(seconds)


def steps_to(target: float, curves: list[dict[str, float]]) -> float:
    """Steps until the mean over the seeds is at most `target`; infinite if it never is."""
    means = {step: statistics.mean(curve[step] for curve in curves) for step in curves[0]}
    return next((float(step) for step, loss in means.items() if loss <= target), math.inf)


def draw(found: dict[str, list[float]], total_mb: dict[str, float], words: str, file: Path) -> None:
    """Draw the loss at the end against all that a machine has sent, a number for each setting, and their names."""
    figure, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
    # Each family has its numbers on another side: several points lie above each other.
    families = {"ddp_gpt": ("o", (0, -14)), "local SGD": ("s", (-12, -4)), "DiLoCo": ("^", (12, -4))}
    for number, (name, values) in enumerate(found.items(), 1):
        i = next(i for i, start in enumerate(families) if name.startswith(start))
        marker, side = [*families.values()][i]
        place = (total_mb[name], statistics.mean(values))
        axes.plot([total_mb[name]] * len(values), values, "_", color=f"C{i}")
        axes.plot(*place, marker, color=f"C{i}", label=f"{number}  {name}")
        axes.annotate(str(number), place, side, textcoords="offset points", fontsize=8, ha="center")
    near = NEAR * statistics.mean(found[FIRST])
    axes.axhline(near, color="grey", lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.set_xlabel(f"MB that a machine has sent\n{words}", fontsize=9)
    axes.set_ylabel("validation loss, nats a byte")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)


def steps(one: dict[str, Any]) -> int:
    """Of each of its trainings."""
    return max(map(int, one["curves"][0]))


def final(one: dict[str, Any]) -> list[float]:
    """The loss at the end, by seed."""
    return [curve[str(steps(one))] for curve in one["curves"]]


def rows(known: dict[str, dict[str, Any]]) -> list[str]:
    """A row for each setting."""
    first = known[FIRST]
    reference, all_mb = statistics.mean(final(first)), steps(first) * first["mb"]
    lines = []
    for name, one in known.items():
        values, sent = final(one), steps(one) * one["mb"]
        mean = statistics.mean(values)
        wanted = steps_to(NEAR * reference, one["curves"])
        reached = f"{wanted * one['ms'][SLOW] / 60e3:.1f} min ({wanted:,.0f} steps)" if wanted < math.inf else "not"
        cells = [name, f"{mean:.3f}", f"{min(values):.3f} to {max(values):.3f}", f"{100 * (mean / reference - 1):+.1f}"]
        cells += [f"{one['mb']:.4f}", f"{sent:,.1f}", f"1/{all_mb / sent:.1f}"]
        cells += [f"{one['ms'][rate]:,.0f}" for rate in RATES] + [reached]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(known: dict[str, dict[str, Any]]) -> None:
    """Write docs/measured/diloco.md and its plot."""
    words = f"GPT of 2 layers, width 64, {steps(known[FIRST]):,} steps of {BATCH} sequences of 64 bytes"
    words += f", {len(known[FIRST]['curves'])} seeds"
    head = "| | loss | over the seeds | off, % | MB a step | MB in all | of ddp_gpt's | "
    head += " | ".join(f"ms a step at {rate}" for rate in RATES) + f" | near ddp_gpt's loss at {SLOW} after |"
    table = "\n".join([head, f"|---|---|---|---|---|---|---|{'---|' * len(RATES)}---|", *rows(known)])
    sent = {name: steps(one) * one["mb"] for name, one in known.items()}
    draw({name: final(one) for name, one in known.items()}, sent, words, ROOT / "docs/measured/diloco.png")
    measured = dict.fromkeys(one["measured"] for one in known.values())
    pages.write(ROOT / "docs/measured/diloco.md", measured="\n\n".join(measured), table=f"{table}\n\n{PLOT}")


def main() -> None:
    """Train, measure, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help=f"of a training; a multiple of {EVERY}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="settings whose names begin so")
    args = parser.parse_args()
    settings = {name: one for name, one in SETTINGS.items() if name.startswith(args.only)}
    found: dict[str, dict[str, Any]] = {name: {"mb": 0.0, "ms": {}, "curves": []} for name in settings}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        for i, (name, setting) in enumerate(settings.items()):
            for rate, argument in RATES.items():  # bytes are the same on both; the later figure stays
                mb, seconds = measure(setting, argument, Path(place) / f"{i}-{argument}")
                found[name]["mb"], found[name]["ms"][rate] = round(mb, 4), round(1e3 * seconds)
                print(f"{name:32} {rate:10} {mb:8.4f} MB {1e3 * seconds:8.0f} ms", flush=True)
        for seed in range(args.seeds):  # by turns
            for i, (name, setting) in enumerate(settings.items()):
                curve = losses(setting, seed, setting.longer * args.steps, Path(place) / f"loss-{i}-{seed}")
                found[name]["curves"].append({str(step): loss for step, loss in curve.items()})
                print(f"{name:32} seed {seed}  {curve}", flush=True)
    command = f"uv run python -m benchmarks.diloco --steps {args.steps} --seeds {args.seeds}"
    command += f' --only "{args.only}"' if args.only else ""
    measured = pages.measured(command, "2 ranks, gloo, bfloat16 if the processor has it, else float32", began=began)
    for one in found.values():
        one["measured"] = measured
    known = (json.loads(JSON.read_text()) if JSON.exists() else {}) | found
    JSON.write_text(json.dumps({name: known[name] for name in SETTINGS if name in known}, indent=1) + "\n")
    page(json.loads(JSON.read_text()))


if __name__ == "__main__":
    main()
