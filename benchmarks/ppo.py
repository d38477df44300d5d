"""Return and speed of recipes/syncbn_ppo: `uv run python -m benchmarks.ppo` writes docs/ppo.png and docs/ppo.md.

First what people get: the recipe's own command, with ten seeds, by the clock. Then a picture: greedy return against
environment steps on CartPole-v1, with SyncBatchNorm, with a plain BatchNorm on each rank (the recipe with that defect
put in), and without BatchNorm. Last, environment steps per second of the whole training, beside one file for one
process, in the style of the single-file implementations of CleanRL (Huang et al. 2022,
https://www.jmlr.org/papers/v23/21-1342.html), written for this comparison, with the same settings.
"""

import argparse
import datetime
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import gymnasium
import matplotlib as mpl

mpl.use("Agg")
import numpy as np
import torch
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
    flags = ["--max-steps", str(updates), "--eval-every", "4", "--eval-episodes", "40", "--save-every", str(updates)]
    flags += ["--seed", str(seed), "--out", str(folder), "--name", name, *more]
    result = runner.run_recipe(recipe, SIZE, *flags, timeout_s=900)
    assert result.ok, str(result)
    returns = {step * ENVS * STEPS: value for step, value in runner.records(folder / name, "val/return").items()}
    print(f"{how:24} seed {seed}  last return {list(returns.values())[-1]:.0f}", flush=True)
    return returns


def recipe_rate(size: int, updates: int, folder: Path, more: tuple[str, ...] = ()) -> float:
    """Environment steps per second of the recipe's training, without its evaluations and saves."""
    name = f"rate-{size}-{time.monotonic_ns()}"
    flags = ["--max-steps", str(updates), "--log-every", str(updates), "--eval-every", str(updates), "--eval-episodes"]
    flags += ["4", "--save-every", str(updates), "--target-kl", "0", "--out", str(folder), "--name", name, *more]
    result = runner.run_recipe(PPO, size, *flags, timeout_s=900)
    assert result.ok, str(result)
    (rate,) = runner.records(folder / name, "perf/samples_per_s").values()
    return rate


# --- one file, one process --------------------------------------------------------------------------------


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


def single_file(updates: int, result: str) -> None:
    """Train, and write the environment steps per second of it to a file."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    generator = np.random.default_rng(1)
    actor, critic = perceptron(2, 0.01), perceptron(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LR, eps=1e-5)
    factories = [lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(ENV))] * ENVS
    envs = gymnasium.vector.SyncVectorEnv(factories)
    began = time.perf_counter()
    observation = torch.from_numpy(envs.reset(seed=1)[0])
    over = torch.zeros(ENVS)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = LR * (1 - update / updates)
        observations = torch.zeros(STEPS, ENVS, 4)
        actions, log_probs, rewards, values, dones = torch.zeros(5, STEPS, ENVS).unbind()
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
        advantages, last = torch.zeros_like(rewards), torch.zeros(ENVS)
        for t in reversed(range(STEPS)):
            error = rewards[t] + 0.99 * following * (1 - following_over) - values[t]
            last = error + 0.99 * 0.95 * (1 - following_over) * last
            advantages[t], following, following_over = last, values[t], dones[t]
        returns = advantages + values
        flat = [one.flatten(0, 1) for one in (observations, actions, log_probs, advantages, returns)]
        for _ in range(EPOCHS):
            for rows in np.split(generator.permutation(ENVS * STEPS), ENVS * STEPS // BATCH):
                seen_, chosen, old, advantage, target = (one[rows] for one in flat)
                policy = Categorical(logits=actor(seen_))
                log_ratio = policy.log_prob(chosen) - old
                ratio = log_ratio.exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
                value_loss = 0.5 * (critic(seen_).flatten() - target).square().mean()
                loss = policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
    Path(result).write_text(str(updates * ENVS * STEPS / (time.perf_counter() - began)))


def single_file_rate(updates: int, folder: Path) -> float:
    """Environment steps per second of the single file, in a process as the recipe's."""
    result = folder / "single"
    ended = runner.spawn(single_file, [(updates, str(result))], timeout_s=900)
    assert ended.ok, str(ended)
    return float(result.read_text())


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
    figure.savefig(ROOT / "docs/ppo.png", dpi=150)


def main() -> None:
    """Measure, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = [command(seed, folder) for seed in range(COMMAND_SEEDS)]
        curves = {how: [curve(how, seed, args.updates, folder) for seed in range(args.seeds)] for how in HOW}
        rates: dict[str, list[float]] = {}
        for _ in range(args.repeats):  # in turn, so that a busy moment hits all of them
            for what, rate in (
                ("a single file, no BatchNorm", single_file_rate(args.updates // 2, folder)),
                ("recipe, 1 process, no BatchNorm", recipe_rate(1, args.updates // 2, folder, ("--no-batch-norm",))),
                ("recipe, 1 process", recipe_rate(1, args.updates // 2, folder)),
                ("recipe, 2 processes", recipe_rate(2, args.updates // 2, folder)),
            ):
                rates.setdefault(what, []).append(rate)
                print(f"{what:34} {rate:8,.0f} steps/s", flush=True)
    versions = f"gymnasium {gymnasium.__version__}, torch {torch.__version__}"
    where = f"{cpu_name()}, {os.cpu_count()} cores, {versions}, {datetime.date.today()}"
    what = f"{ENV}, {SIZE} ranks with {ENVS // SIZE} environments each, {args.seeds} seeds, 40 episodes"
    draw(curves, f"{what}; mean, lowest and highest\n{where}")
    reached = {how: [max(one.values()) >= GOAL for one in several] for how, several in curves.items()}
    last = {how: [list(one.values())[-1] for one in several] for how, several in curves.items()}
    returns = [f"| | last return, mean | lowest | seeds that reached {GOAL} |", "|---|---|---|---|"]
    returns += [
        f"| {how} | {statistics.mean(last[how]):.0f} | {min(last[how]):.0f} | {sum(reached[how])} of {args.seeds} |"
        for how in HOW
    ]
    speed = ["| | median | range |", "|---|---|---|"]
    speed += [
        f"| {what} | {statistics.median(values):,.0f} | {min(values):,.0f} to {max(values):,.0f} |"
        for what, values in rates.items()
    ]
    good = [took_s for last_return, took_s in commands if last_return >= GOAL]
    solved = f"{len(good)} of {COMMAND_SEEDS} seeds end with {GOAL} or more"
    solved += f", {min(good):.0f} to {max(good):.0f} s after the command" if good else ""
    words = f"--seeds {args.seeds} --updates {args.updates} --repeats {args.repeats}"
    pages.write(
        ROOT / "docs/ppo.md",
        measured=pages.measured(f"uv run python -m benchmarks.ppo {words}", f"gymnasium {gymnasium.__version__}"),
        solved=f"**{solved}.**",
        setting=f"{what}; {args.updates} updates.",
        returns="\n".join(returns),
        speed="\n".join(speed),
    )


if __name__ == "__main__":
    main()
