"""Return and speed of recipes/syncbn_ppo: `uv run python -m benchmarks.ppo`.

It fills docs/measured/ppo.md and draws its plot.

`command`: what people get, the recipe's own command, with ten seeds, by the clock. `returns`: a picture, greedy return
against environment steps on CartPole-v1, with SyncBatchNorm, with a plain BatchNorm on each rank (the recipe with that
defect put in), and without BatchNorm. `speed`: environment steps per second of the whole training, the time to the
goal, and memory, beside one file in the style of the single-file implementations of CleanRL (Huang et al. 2022,
https://www.jmlr.org/papers/v23/21-1342.html), written for this comparison, with the same settings.
"""

import argparse
import dataclasses
import datetime
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import matplotlib as mpl

mpl.use("Agg")
import numpy as np
import torch
import torch.distributed as dist
from benchmarks.curves import ROOT, cpu_name
from matplotlib import pyplot as plt
from tests.harness import mutants, pages, runner
from torch import nn
from torch.distributions import Categorical

PPO, ENV = "syncbn_ppo", "CartPole-v1"
ENVS, STEPS, EPOCHS, BATCH, LR = 8, 128, 8, 256, 1e-3  # the recipe's defaults
SIZE = 4  # ranks of the picture: two environments each, of which a plain BatchNorm sees few samples
PLAIN = {"parallelize": {'sync_batchnorm.convert(model, mesh.get_group("dp"))': "model"}}
HOW = ("SyncBatchNorm", "BatchNorm on each rank", "no BatchNorm")
GOAL, COMMAND_SEEDS = 475, 10  # what gymnasium calls solved
JUDGE_EVERY, EPISODES = 4, 40  # updates; greedy episodes each time


def command(seed: int, folder: Path) -> tuple[float, float]:
    """Greedy return at the end of the recipe's own command, and the seconds that it took."""
    words = ["bash", "launch/torchrun.sh", f"recipes/{PPO}", "--seed", str(seed), "--out", str(folder)]
    began = time.perf_counter()
    subprocess.run([*words, "--name", f"command-{seed}"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    took_s = time.perf_counter() - began
    last = list(runner.records(folder / f"command-{seed}", "val/return").values())[-1]
    print(f"seed {seed}: {last:.0f} after {took_s:.0f} s", flush=True)
    return last, took_s


def curve(how: str, seed: int, updates: int, folder: Path) -> dict[int, float]:
    """Environment steps to greedy return, as the ranks' policies have it on average."""
    name = f"{HOW.index(how)}-{seed}"
    recipe = mutants.mutate(PPO, folder / name, PLAIN) if how == HOW[1] else PPO
    more = ["--no-batch-norm"] if how == HOW[2] else []
    flags = ["--max-steps", str(updates), "--eval-every", str(JUDGE_EVERY)]
    flags += ["--eval-episodes", str(EPISODES), "--save-every", str(updates)]
    flags += ["--seed", str(seed), "--out", str(folder), "--name", name, *more]
    result = runner.run_recipe(recipe, SIZE, *flags, timeout_s=900)
    assert result.ok, str(result)
    returns = {step * ENVS * STEPS: value for step, value in runner.records(folder / name, "val/return").items()}
    print(f"{how:24} seed {seed}  last return {list(returns.values())[-1]:.0f}", flush=True)
    return returns


@dataclasses.dataclass(frozen=True)
class Ran:
    """One training: environment steps per second, and when it reached the goal (None: never), in updates and seconds.

    Neither evaluations nor saves count. The peak is the memory of the larger rank, in MiB.
    """

    rate: float
    goal: int | None
    goal_s: float | None
    peak_mib: float


def peak_mib() -> float:
    """Of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclasses.dataclass(frozen=True)
class Setting:
    """One training; judge: evaluate while it runs, outside of its clock."""

    size: int
    seed: int
    updates: int
    judge: bool
    folder: Path


def recipe_rank(argv: list[str], result: str) -> None:
    """One rank of the recipe, in a process of its own."""
    runner.run_path(argv[0], argv)
    Path(result, f"peak{os.environ['RANK']}").write_text(str(peak_mib()))


def recipe(how: Setting, *more: str) -> Ran:
    """Train the recipe: by default each update ends early, if it has moved the policy far enough."""
    name = f"speed-{how.size}-{time.monotonic_ns()}"
    every = JUDGE_EVERY if how.judge else how.updates
    argv = [str(ROOT / "recipes" / PPO / "train.py"), "--max-steps", str(how.updates), "--log-every", str(every)]
    argv += ["--eval-every", str(every), "--eval-episodes", str(EPISODES), "--save-every", str(how.updates)]
    argv += ["--seed", str(how.seed), "--out", str(how.folder), "--name", name, *more]
    ended = runner.spawn(recipe_rank, [(argv, str(how.folder))] * how.size, timeout_s=900)
    assert ended.ok, str(ended)
    rates = runner.records(how.folder / name, "perf/samples_per_s")
    returns = runner.records(how.folder / name, "val/return")
    seconds, at = 0.0, {}
    for update, rate in rates.items():
        seconds += every * ENVS * STEPS / rate
        at[update] = seconds
    goal = next((update for update, value in returns.items() if value >= GOAL), None)
    peak = max(float((how.folder / f"peak{rank}").read_text()) for rank in range(how.size))
    return Ran(how.updates * ENVS * STEPS / seconds, goal, at[goal] if goal else None, peak)


# --- one file --------------------------------------------------------------------------------------------


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def perceptron(outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64."""
    root = 2**0.5
    return nn.Sequential(layer(4, 64, root), nn.Tanh(), layer(64, 64, root), nn.Tanh(), layer(64, outputs, gain))


@torch.no_grad()
def greedy(actor: nn.Module) -> float:
    """Mean return of the policy without its noise."""
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(ENV)] * EPISODES)
    observation, _ = envs.reset(seed=0)
    going, total = np.ones(EPISODES, bool), 0.0
    while going.any():
        observation, reward, terminated, truncated, _ = envs.step(
            actor(torch.from_numpy(observation)).argmax(1).numpy()
        )
        total += float(reward[going].sum())
        going &= ~(terminated | truncated)
    return total / EPISODES


def learn(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, loss: torch.Tensor, size: int) -> None:
    """One step on a minibatch."""
    optimizer.zero_grad()
    loss.backward()
    if size > 1:
        gradients = [one.grad for one in parameters if one.grad is not None]
        together = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(together)
        for one, mean in zip(gradients, together.split([one.numel() for one in gradients]), strict=True):
            one.copy_(mean.view_as(one) / size)
    nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()


def single_file(seed: int, updates: int, judge: bool, result: str) -> None:  # noqa: PLR0915
    """One rank: train, and write what it took to a file. With several, they average a flat vector of gradients."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    generator = np.random.default_rng([seed, rank])
    actor, critic = perceptron(2, 0.01), perceptron(1, 1.0)
    torch.manual_seed(seed * size + rank)
    count = ENVS // size
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LR, eps=1e-5)
    goal, goal_s = None, None
    factories = [lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(ENV))] * count
    envs = gymnasium.vector.SyncVectorEnv(factories)
    began = time.perf_counter()
    observation = torch.from_numpy(envs.reset(seed=ENVS * seed + count * rank)[0])
    over = torch.zeros(count)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = LR * (1 - update / updates)
        observations = torch.zeros(STEPS, count, 4)
        actions, log_probs, rewards, values, dones = torch.zeros(5, STEPS, count).unbind()
        for t in range(STEPS):
            observations[t], dones[t] = observation, over
            with torch.no_grad():
                policy = Categorical(logits=actor(observation))
                action = policy.sample()
                actions[t], log_probs[t] = action, policy.log_prob(action)
                values[t] = critic(observation).flatten()
            seen, reward, terminated, truncated, _ = envs.step(action.numpy())
            rewards[t] = torch.from_numpy(reward)
            observation, over = torch.from_numpy(seen), torch.from_numpy(terminated | truncated).float()
        with torch.no_grad():
            following, following_over = critic(observation).flatten(), over
        advantages, last = torch.zeros_like(rewards), torch.zeros(count)
        for t in reversed(range(STEPS)):
            error = rewards[t] + 0.99 * following * (1 - following_over) - values[t]
            last = error + 0.99 * 0.95 * (1 - following_over) * last
            advantages[t], following, following_over = last, values[t], dones[t]
        returns = advantages + values
        flat = [one.flatten(0, 1) for one in (observations, actions, log_probs, advantages, returns)]
        for _ in range(EPOCHS):
            for rows in np.split(generator.permutation(count * STEPS), ENVS * STEPS // BATCH):
                seen_, chosen, old, advantage, target = (one[rows] for one in flat)
                policy = Categorical(logits=actor(seen_))
                log_ratio = policy.log_prob(chosen) - old
                ratio = log_ratio.exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
                value_loss = 0.5 * (critic(seen_).flatten() - target).square().mean()
                loss = policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()
                learn(parameters, optimizer, loss, size)
        if judge and rank == 0 and goal is None and (update + 1) % JUDGE_EVERY == 0:
            paused = time.perf_counter()
            if greedy(actor) >= GOAL:
                goal, goal_s = update + 1, paused - began
            began += time.perf_counter() - paused
    rate = updates * ENVS * STEPS / (time.perf_counter() - began)
    Path(result, str(rank)).write_text(json.dumps([rate, goal, goal_s, peak_mib()]))
    if size > 1:
        dist.destroy_process_group()


def single(how: Setting) -> Ran:
    """Train the single file, in processes as the recipe's."""
    args = [(how.seed, how.updates, how.judge, str(how.folder))] * how.size
    ended = runner.spawn(single_file, args, timeout_s=900)
    assert ended.ok, str(ended)
    ranks = [json.loads((how.folder / str(rank)).read_text()) for rank in range(how.size)]
    rate, goal, goal_s, _ = ranks[0]
    return Ran(rate, goal, goal_s, max(peak for *_, peak in ranks))


# --- the picture and the table ----------------------------------------------------------------------------


def draw(curves: dict[str, list[dict[int, float]]], what: str) -> None:
    """The mean over the seeds, and a band from the lowest to the highest."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for i, (how, several) in enumerate(curves.items()):
        steps = list(several[0])
        rows = np.array([list(one.values()) for one in several])
        axes.plot(steps, rows.mean(0), color=f"C{i}", label=how)
        axes.fill_between(steps, rows.min(0), rows.max(0), color=f"C{i}", alpha=0.15, linewidth=0)
    axes.axhline(GOAL, color="grey", linewidth=0.8, linestyle=":")
    axes.set_ylabel("greedy return")
    axes.set_xlabel(f"environment steps\n{what}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(ROOT / "docs/measured/ppo.png", dpi=150)


def command_text(_: argparse.Namespace, folder: Path) -> str:
    """How many seeds of the recipe's own command end with the goal, and when."""
    commands = [command(seed, folder) for seed in range(COMMAND_SEEDS)]
    good = [took_s for last_return, took_s in commands if last_return >= GOAL]
    solved = f"{len(good)} of {COMMAND_SEEDS} seeds end with {GOAL} or more"
    solved += f", {min(good):.0f} to {max(good):.0f} s after the command" if good else ""
    return f"**{solved}.**"


def returns_text(args: argparse.Namespace, folder: Path) -> str:
    """The picture, and what it shows."""
    curves = {how: [curve(how, seed, args.updates, folder) for seed in range(args.seeds)] for how in HOW}
    versions = f"gymnasium {gymnasium.__version__}, torch {torch.__version__}"
    where = f"{cpu_name()}, {os.cpu_count()} cores, {versions}, {datetime.date.today()}"
    what = f"{ENV}, {SIZE} ranks with {ENVS // SIZE} environments each, {args.seeds} seeds, {EPISODES} episodes"
    draw(curves, f"{what}; mean, lowest and highest\n{where}")
    reached = {how: [max(one.values()) >= GOAL for one in several] for how, several in curves.items()}
    last = {how: [list(one.values())[-1] for one in several] for how, several in curves.items()}
    rows = [f"| | last return, mean | lowest | seeds that reached {GOAL} at any time |", "|---|---|---|---|"]
    rows += [
        f"| {how} | {statistics.mean(last[how]):.0f} | {min(last[how]):.0f} | {sum(reached[how])} of {args.seeds} |"
        for how in HOW
    ]
    return "\n".join([f"{what}; {args.updates} updates.", "", *rows])


def spread(values: Sequence[float | None], form: str) -> str:
    """Median and range; how many have none."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} never"
    return pages.spread(known, form)


def speed_text(args: argparse.Namespace, folder: Path) -> str:
    """All work of each update, for the rate; then the defaults, for the time to the goal. Both in turn."""
    arms: dict[str, tuple[int, Sequence[str] | None]] = {  # processes, and flags of the recipe
        "a single file, 1 process, no BatchNorm": (1, None),
        "a single file, 2 processes, no BatchNorm": (2, None),
        "recipe, 1 process, no BatchNorm": (1, ("--no-batch-norm",)),
        "recipe, 2 processes, no BatchNorm": (2, ("--no-batch-norm",)),
        "recipe, 1 process": (1, ()),
        "recipe, 2 processes": (2, ()),
    }
    rated: dict[str, list[Ran]] = {what: [] for what in arms}
    raced: dict[str, list[Ran]] = {what: [] for what in arms}
    for seed in range(args.seeds):  # in turn, so that a busy moment hits all of them
        for what, (size, flags) in arms.items():
            short, whole = (
                Setting(size, seed, n, n == args.updates, folder) for n in (args.updates // 2, args.updates)
            )
            rated[what].append(single(short) if flags is None else recipe(short, "--target-kl", "0", *flags))
            raced[what].append(single(whole) if flags is None else recipe(whole, *flags))
            print(f"{what:40} {rated[what][-1]}\n{'':40} {raced[what][-1]}", flush=True)
    rows = [
        "| | environment steps/s | updates until 475 | seconds of training until then | peak of a rank, MiB |",
        "|---|---|---|---|---|",
    ]
    for what in arms:
        cells = [spread([ran.rate for ran in rated[what]], ",.0f"), spread([ran.goal for ran in raced[what]], ".0f")]
        cells += [spread([ran.goal_s for ran in raced[what]], ".1f"), spread([r.peak_mib for r in rated[what]], ".0f")]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(rows)


PARTS = {"command": command_text, "returns": returns_text, "speed": speed_text}


def main() -> None:
    """Measure, and write each part when it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--seeds", type=int, default=5, help=f"command has {COMMAND_SEEDS}")
    parser.add_argument("--updates", type=int, default=120)
    args = parser.parse_args()
    page = ROOT / "docs/measured/ppo.md"
    for part in args.parts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            text = PARTS[part](args, Path(folder))
        flags = "" if part == "command" else f" --seeds {args.seeds} --updates {args.updates}"
        words = f"uv run python -m benchmarks.ppo {part}{flags}"
        text = f"{pages.measured(words, f'gymnasium {gymnasium.__version__}', began=began)}\n\n{text}"
        known = pages.parts(page.read_text()) | {part: text}
        pages.write(page, command=known["command"], returns=known["returns"], speed=known["speed"])


if __name__ == "__main__":
    main()
