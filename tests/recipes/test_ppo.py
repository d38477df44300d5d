"""PPO over ranks is the PPO of one process, and its parts are what their formulas say."""

import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from common import UserError, seed
from common.workloads import actor_critic, environments
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import mutants, runner
from tests.harness.once import Once

PPO = "syncbn_ppo"
STEPS, TARGET_KL = 3, 0.005  # which some updates reach before their last epoch
ROLLOUT = 64  # steps of each of 8 environments, in four minibatches
FLAGS = (
    *("--target-kl", str(TARGET_KL), "--rollout-steps", str(ROLLOUT), "--global-batch-size", str(8 * ROLLOUT // 4)),
    *("--max-steps", str(STEPS), "--log-every", "1", "--eval-every", str(STEPS), "--eval-episodes", "3"),
)
CURVES = ("train/loss", "train/policy_loss", "train/value_loss", "train/kl", "train/grad_norm")
PLAYED = ("rl/return", "rl/length", "val/return")
CONTINUOUS = ("--env", "Pendulum-v1", "--num-envs", "4", "--rollout-steps", "120", "--global-batch-size", "80")


def train(
    recipe: str | Path, size: int, out: Path, *flags: str, target: Callable | None = None
) -> dict[str, dict[int, float]]:
    result = runner.run_recipe(recipe, size, *FLAGS, "--out", str(out), "--name", str(size), *flags, target=target)
    assert result.ok, str(result)
    return {tag: runner.records(out / str(size), tag) for tag in CURVES + PLAYED}


def worst(found: dict[int, float], wanted: dict[int, float]) -> float:
    """Largest relative difference of two curves."""
    assert found.keys() == wanted.keys()
    return max((abs(found[step] - value) / abs(value) for step, value in wanted.items()), default=0.0)


@pytest.fixture(scope="module")
def alone(once: Once) -> dict[str, dict[int, float]]:
    return once.value(train_alone, "ppo alone")


def train_alone() -> dict[str, dict[int, float]]:
    """The training as one would write it for one process: 8 environments, one after the other, a sample at a time."""
    seed.everything(0, seed.INIT)
    model = actor_critic.ActorCritic((4,), 2, False, 64, True).double().eval()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-5)
    envs = [gymnasium.make("CartPole-v1") for _ in range(8)]
    episodes, rewarded = [0] * 8, [0.0] * 8
    seen = [begin(env, 0, i, 0) for i, env in enumerate(envs)]
    curves: dict[str, dict[int, float]] = {tag: {} for tag in (*CURVES, *PLAYED)}
    for update in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * update / STEPS))
        samples: list[list[Any]] = [[] for _ in envs]
        ended = []
        for t in range(ROLLOUT * update, ROLLOUT * (update + 1)):
            for i, env in enumerate(envs):
                logits, value = predict(model, seen[i])
                uniform = torch.from_numpy(seed.uniform(0, seed.ACTION, t, i, np.arange(2)))
                action = int((logits - (-uniform.log()).log()).argmax())
                led_to, reward, terminated, truncated, _ = env.step(action)
                following = 0.0 if terminated else predict(model, led_to)[1]
                samples[i].append(
                    (seen[i], action, logits.log_softmax(0)[action], value, reward, following, terminated or truncated)
                )
                rewarded[i] += float(reward)
                seen[i] = led_to
                if terminated or truncated:
                    ended.append(rewarded[i])
                    episodes[i], rewarded[i] = episodes[i] + 1, 0.0
                    seen[i] = begin(env, 0, i, episodes[i])
        curves["rl/return"][update + 1] = curves["rl/length"][update + 1] = float(np.mean(ended))
        sums = learn(model, optimizer, samples, update)
        curves |= {tag: curves[tag] | {update + 1: sums[tag]} for tag in CURVES}
    returns = []
    for i in range(3):
        observation, done, total = begin(envs[0], 0, i, 0, seed.HOLD_OUT), False, 0.0
        while not done:
            action = int(predict(model, observation)[0].argmax())
            observation, reward, terminated, truncated, _ = envs[0].step(action)
            done, total = terminated or truncated, total + float(reward)
        returns.append(total)
    curves["val/return"] = {STEPS: float(np.mean(returns))}
    return curves


def begin(env: gymnasium.Env, run_seed: int, index: int, episode: int, stream: int = seed.EPISODE) -> np.ndarray:
    return env.reset(seed=int(seed.mix(run_seed, stream, index, episode)) % 2**31)[0]


@torch.no_grad()
def predict(model: nn.Module, observation: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    logits, values = model(torch.from_numpy(observation).double()[None])
    return logits[0], values[0]


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, samples: list[list[Any]], update: int
) -> dict[str, float]:
    """Eight epochs of four minibatches, less if the policy moves far; means over the minibatches."""
    advantages, targets = torch.zeros(2, 8, ROLLOUT, dtype=torch.float64)
    for i, steps in enumerate(samples):
        following = 0.0
        for t in reversed(range(ROLLOUT)):
            *_, value, reward, next_value, done = steps[t]
            following = reward + 0.99 * next_value - value + (0.0 if done else 0.99 * 0.95 * following)
            advantages[i, t], targets[i, t] = following, following + value
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    found: dict[str, list[float]] = {tag: [] for tag in CURVES}
    for epoch in range(8 * update, 8 * (update + 1)):
        keys = [[int(seed.mix(0, seed.ORDER, epoch, i, t)) for t in range(ROLLOUT)] for i in range(8)]
        orders = [sorted(range(ROLLOUT), key=row.__getitem__) for row in keys]
        for first in range(0, ROLLOUT, ROLLOUT // 4):
            places = [(i, t) for i in range(8) for t in orders[i][first : first + ROLLOUT // 4]]
            rows = [samples[i][t] for i, t in places]
            logits, values = model(torch.from_numpy(np.stack([row[0] for row in rows])).double())
            advantage, target = (torch.stack([one[i, t] for i, t in places]) for one in (advantages, targets))
            log_probs = logits.log_softmax(1)
            log_ratio = torch.stack([log_probs[k, row[1]] - row[2] for k, row in enumerate(rows)])
            ratio = log_ratio.exp()
            policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            value_loss = 0.5 * F.mse_loss(values, target)
            entropy = -(log_probs.exp() * log_probs).sum(1).mean()
            loss = policy_loss + 0.5 * value_loss - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
            for parameter in model.parameters():
                parameter.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))
            optimizer.step()
            kl = (ratio - 1 - log_ratio).mean()
            for tag, value in zip(CURVES, (loss, policy_loss, value_loss, kl, norm), strict=True):
                found[tag].append(value.item())
        if np.mean(found["train/kl"][-4:]) > TARGET_KL:
            break
    model.train()
    with torch.no_grad():
        model(torch.from_numpy(np.stack([row[0] for rows in samples for row in rows])).double())
    model.eval()
    return {tag: float(np.mean(values)) for tag, values in found.items()}


# --- any number of ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_float64(size: int, alone: dict[str, dict[int, float]], tmp_path: Path) -> None:
    found = train(PPO, size, tmp_path, "--dtype", "float64")
    for tag in CURVES + PLAYED:
        assert worst(found[tag], alone[tag]) < 1e-9, tag


def test_compiled(alone: dict[str, dict[int, float]], tmp_path: Path) -> None:
    """Traced, but not translated to C++, which would take half a minute."""
    found = train(PPO, 2, tmp_path, "--dtype", "float64", "--stop-after", "2", "--compile", target=runner.run_traced)
    for tag in CURVES:
        assert worst(found[tag], {step: alone[tag][step] for step in (1, 2)}) < 1e-9, tag


def test_continuous_actions(tmp_path: Path) -> None:
    """Whose episodes are cut off, after 200 steps, and do not end."""
    flags = (*CONTINUOUS, "--dtype", "float64", "--max-steps", "4", "--target-kl", "0.001", "--eval-every", "0")
    one, two = (train(PPO, size, tmp_path, *flags) for size in (1, 2))
    assert len(one["rl/return"]) == 2, "episodes end in two of the updates"
    for tag in CURVES + PLAYED:
        assert worst(two[tag], one[tag]) < 1e-9, tag


KL = 'metrics.means(epoch_sums)["kl"]'
KEYS = "args.seed, seed.ORDER, epoch, {}, np.arange(args.rollout_steps)[:, None]"
MUTANTS: dict[str, mutants.Changes] = {
    "every rank has the environments of rank 0": {"dp_coordinates": {'mesh.get_local_rank("dp")': "0"}},
    "advantages are normalised on each rank": {
        "normalise": {
            "dist.all_reduce(total := values.sum())": "total = values.sum() * 2",
            "dist.all_reduce(squares := centred.square().sum())": "squares = centred.square().sum() * 2",
        }
    },
    "BatchNorm sees the rank's own samples": {
        "parallelize": {'sync_batchnorm.convert(model, mesh.get_group("dp"))': "model"}
    },
    "the mean is taken over the rank's own samples": {"train_step": {"dist.get_world_size()": "1"}},
    "the same noise on every rank": {"play": {"envs.index[:, None]": "envs.index[:, None] % 4"}},
    "no update ends early": {"train_step": {f"if args.target_kl and {KL} > args.target_kl: ...": "pass"}},
    "running statistics are those of one minibatch": {
        "train_step": {"rollout.observations.flatten(0, 1)": "batch.observations"}
    },
    "minibatches are drawn on each rank": {
        "minibatches": {f"seed.mix({KEYS.format('index')})": f"seed.mix({KEYS.format('index % 4')})"}
    },
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant: str, alone: dict[str, dict[int, float]], tmp_path: Path) -> None:
    path = mutants.mutate(PPO, tmp_path, MUTANTS[mutant])
    found = train(path, 2, tmp_path, "--dtype", "float64", "--stop-after", "3", "--check-every", "0")
    assert max(worst(found[tag], {step: alone[tag][step] for step in found[tag]}) for tag in CURVES) > 1e-4


def test_mutant_whose_ranks_stop_by_themselves(alone: dict[str, dict[int, float]], tmp_path: Path) -> None:
    """One goes on to the next epoch, and the other does not: they wait for each other, or the numbers differ."""
    path = mutants.mutate(PPO, tmp_path, {"train_step": {KL: 'epoch_sums["kl"] / epoch_sums["count"]'}})
    flags = ("--dtype", "float64", "--hang-timeout", "2", "--out", str(tmp_path), "--name", "run")
    result = runner.run_recipe(path, 2, *FLAGS, *flags)
    found = runner.records(tmp_path / "run", "train/loss")
    assert not result.ok or worst(found, alone["train/loss"]) > 1e-4


# --- a run that is handed on ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [(), CONTINUOUS], ids=["CartPole", "Pendulum"])
def test_resume_is_bitwise(how: tuple[str, ...], tmp_path: Path) -> None:
    """Also where the environments are in mid-episode."""
    flags = (*how, "--max-steps", "4", "--save-every", "1", "--keep", "9")
    whole = train(PPO, 2, tmp_path / "whole", *flags)
    for stop in ("1", "0"):
        parts = train(PPO, 2, tmp_path / "parts", *flags, "--stop-after", stop)
    for tag in (*CURVES, "rl/return", "rl/length"):
        assert parts[tag] == whole[tag], tag
    assert parts["val/return"][4] == whole["val/return"][4]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_environment_of_float64_is_continued(dtype: str, tmp_path: Path) -> None:
    """In mid-episode, with actions that were clipped to a bound which no float32 is equal to."""
    flags = ("--env", "tests.harness.drift:Drift64-v0", "--dtype", dtype, "--rollout-steps", "16")
    flags += ("--global-batch-size", "128", "--max-steps", "4", "--save-every", "1", "--keep", "9")
    whole = train(PPO, 1, tmp_path / "whole", *flags)
    for stop in ("2", "0"):
        parts = train(PPO, 1, tmp_path / "parts", *flags, "--stop-after", stop)
    assert len(whole["train/loss"]) == 4
    for tag in CURVES:
        assert parts[tag] == whole[tag], tag


def test_mutant_that_keeps_actions_as_float32(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tests.harness.drift:Drift64-v0"
    for mutant in (False, True):
        one, other = (environments.Environments(name, np.arange(2), 0) for _ in range(2))
        if mutant:
            one._actions = one._actions.astype(np.float32)
        for _ in range(3):
            one.step(np.ones((2, 2), np.float32))
        if mutant:
            with pytest.raises(UserError, match="replaying the checkpoint's episodes gave other observations"):
                other.restore(one.tensors())
        else:
            other.restore(one.tensors())
            assert np.array_equal(other.observations, one.observations)


def test_mutant_that_forgets_where_it_was(tmp_path: Path) -> None:
    path = mutants.mutate(PPO, tmp_path, {"main": {"envs.restore(state)": "pass"}})
    flags = ("--max-steps", "3", "--save-every", "1")
    whole = train(PPO, 1, tmp_path / "whole", *flags)
    for stop in ("1", "0"):
        parts = train(path, 1, tmp_path / "parts", *flags, "--stop-after", stop)
    assert parts["train/loss"][1] == whole["train/loss"][1]
    assert parts["train/loss"][2] != whole["train/loss"][2]


class Forgetful(gymnasium.Wrapper):
    """An environment with a number that no seed sets."""

    made = 0

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        Forgetful.made += 1
        self.offset = np.float32(Forgetful.made)

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        seen, info = self.env.reset(**how)
        return seen + self.offset, info


def test_environment_that_cannot_be_played_again(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = environments.make
    monkeypatch.setattr(environments, "make", lambda name: Forgetful(real(name)))
    one, other = (environments.Environments("CartPole-v1", np.arange(2), 0) for _ in range(2))
    with pytest.raises(UserError, match="replaying the checkpoint's episodes gave other observations"):
        other.restore(one.tensors())


# --- its parts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe() -> SimpleNamespace:
    """What the recipe's file defines."""
    return SimpleNamespace(**runpy.run_path(str(runner.ROOT / "recipes" / PPO / "train.py")))


Step = tuple[float, bool, bool, np.ndarray, np.ndarray]


def episodes_by_hand(name: str, index: int, actions: np.ndarray) -> list[Step]:
    """Reward, done, terminated, what the step led to and what comes next, with one environment and no vector."""
    env = gymnasium.make(name)
    rows, episode = [], 0
    begin(env, 7, index, 0)
    for action in actions:
        led_to, reward, terminated, truncated, _ = env.step(action)
        following = led_to
        if terminated or truncated:
            episode += 1
            following = begin(env, 7, index, episode)
        rows.append((float(reward), terminated or truncated, terminated, led_to, following))
    return rows


@pytest.mark.parametrize(("name", "steps"), [("CartPole-v1", 80), ("Pendulum-v1", 401), ("MountainCar-v0", 202)])
def test_steps_are_those_of_a_hand_written_loop(name: str, steps: int, group: None) -> None:
    """No step is lost to a reset, and the step that ends an episode leads to where that one ended."""
    envs = environments.Environments(name, np.arange(3, 6), 7, seed.EPISODE)
    shape = (steps, 3, envs.num_outputs)
    noise = seed.uniform(np.arange(math.prod(shape)).reshape(shape))
    actions = (4 * noise - 2).astype(np.float32) if envs.continuous else noise.argmax(-1)
    by_hand = [episodes_by_hand(name, 3 + i, actions[:, i]) for i in range(3)]
    ended: list[tuple[float, int]] = []
    for t in range(steps):
        rewards, done, terminated, led_to = envs.step(actions[t])
        for i in range(3):
            wanted = by_hand[i][t]
            assert (rewards[i], done[i], terminated[i]) == wanted[:3]
            assert np.array_equal(led_to[i], wanted[3])
            assert np.array_equal(envs.observations[i], wanted[4])
    for rows in by_hand:
        ends = [t + 1 for t, row in enumerate(rows) if row[1]]
        for first, end in zip([0, *ends], ends, strict=False):
            ended.append((sum(row[0] for row in rows[first:end]), end - first))
    assert len(ended) >= 3
    means = envs.take_ended()
    assert means["rl/return"] == pytest.approx(np.mean([one[0] for one in ended]))
    assert means["rl/length"] == pytest.approx(np.mean([one[1] for one in ended]))
    assert envs.take_ended() == {}


def test_advantages_are_those_of_the_formula(recipe: SimpleNamespace) -> None:
    """Sums of discounted errors to the end of the episode, written out (equations 11 to 16 of Schulman et al. 2016)."""
    args = recipe.Args(gamma=0.9, gae_lambda=0.8)
    torch.manual_seed(0)
    rewards, values, next_values = torch.randn(3, 40, 5, dtype=torch.float64)
    done = torch.rand(40, 5) < 0.2
    terminated = done & (torch.rand(40, 5) < 0.5)
    assert (done & ~terminated).any()
    found = recipe.estimate_advantages(args, rewards, values, next_values, done, terminated)
    for i in range(5):
        for t in range(40):
            wanted, weight = 0.0, 1.0
            for later in range(t, 40):
                following = 0.0 if terminated[later, i] else next_values[later, i]
                wanted += weight * (rewards[later, i] + 0.9 * following - values[later, i])
                weight *= 0.9 * 0.8
                if done[later, i]:
                    break
            assert found[t, i].item() == pytest.approx(float(wanted), rel=1e-12)


def make(recipe: SimpleNamespace, **how: Any) -> tuple[Any, Any, environments.Environments]:
    args = recipe.Args(**{"rollout_steps": 64, "num_envs": 4, "global_batch_size": 64, "dtype": "float64"} | how)
    envs = environments.Environments(args.env, np.arange(args.num_envs), args.seed, seed.EPISODE)
    mesh = recipe.make_mesh(args, SimpleNamespace(device=torch.device("cpu"), size=1))
    model = recipe.parallelize(args, recipe.make_model(args, envs), mesh, torch.device("cpu"))
    return args, model, envs


class IndexDevices(TorchDispatchMode):
    """Notes on which devices the indices of tensors are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            self.found |= {index.device.type for index in args[1]}
        return func(*args, **(kwargs or {}))


ORDER = 'torch.from_numpy(keys.argsort(axis=0, kind="stable")).to(device)'


@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant: the order stays on the CPU"])
def test_indices_are_where_the_rollout_is(mutant: bool, tmp_path: Path) -> None:
    """Not on the CPU, from where a GPU has to fetch them for each tensor of each minibatch."""
    change = {"minibatches": {ORDER: ORDER.removesuffix(".to(device)")}} if mutant else {}
    train = runpy.run_path(str(mutants.mutate("syncbn_ppo", tmp_path, change)), run_name="recipe")
    args = SimpleNamespace(seed=0, rollout_steps=4, num_envs=2, global_batch_size=4)
    rollout = train["Samples"](*(torch.empty(4, 2, device="meta") for _ in range(5)))
    with IndexDevices() as devices:
        batches = list(train["minibatches"](args, rollout, np.arange(2), 1))
    assert len(batches) == 2
    assert (devices.found == {"meta"}) != mutant


class Unguarded:
    """In the place of FiniteGuard."""

    def skip_if_not_finite(self, _: torch.Tensor) -> None: ...


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_ratio_is_1_until_the_first_update(env: str, recipe: SimpleNamespace, group: None) -> None:
    """Also once the running statistics are those of data; with the statistics of a minibatch it would not be."""
    args, model, envs = make(recipe, env=env)
    optimizer = recipe.make_optimizer(args, model)
    for step in (1, 2):
        rollout = recipe.play(args, model, envs, step)
        assert rollout.advantages.mean().abs() < 1e-12
        assert rollout.advantages.square().mean() == pytest.approx(1.0)
        batches = list(recipe.minibatches(args, rollout, envs.index, step))
        assert sorted(batch.returns.sum().item() for batch in batches) != [batches[0].returns.sum().item()] * 4
        assert sum(batch.returns.sum() for batch in batches).item() == pytest.approx(rollout.returns.sum().item())
        for batch in batches:
            sums = recipe.forward(args, model, batch)
            assert sums["kl"].abs() < 1e-12
            assert sums["clip_fraction"] == 0
            assert sums["policy_loss"].item() == pytest.approx(-batch.advantages.sum().item(), abs=1e-9)
            assert sums["count"] == 64
        recipe.train_step(args, model, optimizer, Unguarded(), environments.Environments(env, envs.index, 1), step)
    model.train()
    assert recipe.forward(args, model, batches[0])["kl"] > 1e-5


def test_each_update_and_epoch_has_its_own_draws(recipe: SimpleNamespace, group: None) -> None:
    """The same observations lead to other actions in another update, and are read in another order in each epoch."""
    args, model, envs = make(recipe)
    first, again, second = (
        recipe.play(args, model, environments.Environments(args.env, envs.index, args.seed, seed.EPISODE), step)
        for step in (1, 1, 2)
    )
    assert torch.equal(first.actions, again.actions)
    assert torch.equal(first.observations[0], second.observations[0])
    assert not torch.equal(first.actions, second.actions)
    orders = [
        torch.cat([batch.returns for batch in recipe.minibatches(args, first, envs.index, epoch)])
        for epoch in (0, 0, 1, 2)
    ]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[2], orders[3])
    assert all(torch.equal(order.sort().values, orders[0].sort().values) for order in orders)


def test_running_statistics_are_those_of_the_rollouts(recipe: SimpleNamespace, group: None) -> None:
    """The mean over the updates, each of which counts once, after its last minibatch."""
    args, model, envs = make(recipe)
    optimizer = recipe.make_optimizer(args, model)
    layer = model.module.actor[0][0]
    means = []
    for step in (1, 2, 3):
        again = environments.Environments(args.env, envs.index, args.seed, seed.EPISODE)
        again.restore(envs.tensors())
        seen = recipe.play(args, model, again, step).observations
        recipe.train_step(args, model, optimizer, Unguarded(), envs, step)
        with torch.no_grad():
            means.append(layer(seen.flatten(0, 1)).mean(0))
        norm = model.module.actor[0][1]
        assert norm.num_batches_tracked == step
        assert not norm.training
        assert torch.allclose(norm.running_mean, torch.stack(means).mean(0), rtol=1e-9, atol=1e-12)


def test_actions_are_drawn_from_the_softmax_and_the_normal_distribution() -> None:
    """As often as they should, with noise that is uniform."""
    noise = seed.uniform(np.arange(20_000)[:, None], np.arange(3))
    model = actor_critic.ActorCritic((2,), 3, False, 8, False)
    nn.init.zeros_(model.actor[-1].weight)
    model.actor[-1].bias.data = torch.tensor([0.5, 0.3, 0.2]).log()
    seen = np.zeros((20_000, 2), np.float32)
    assert np.bincount(model.act(seen, noise)) / 20_000 == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    assert (model.act(seen) == 0).all()

    model = actor_critic.ActorCritic((2,), 3, True, 8, False)
    nn.init.zeros_(model.actor[-1].weight)
    model.actor[-1].bias.data = torch.tensor([0.5, 0.3, 0.2])
    model.log_std.data = torch.tensor([0.1, 0.2, 0.3]).log()
    drawn = model.act(seen, noise)
    assert drawn.mean(0) == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    assert drawn.std(0) == pytest.approx([0.1, 0.2, 0.3], rel=0.03)
    assert model.act(seen[:1])[0] == pytest.approx([0.5, 0.3, 0.2])
    assert np.isfinite(model.act(seen[:1], np.array([[0.0, 1 - 2.0**-53, 0.5]]))).all(), "the ends of what is drawn"


def test_images() -> None:
    """The network of Atari has two heads and the numbers of parameters of its paper."""
    model = actor_critic.ActorCritic((4, 84, 84), 6, False, 512, True)
    frames = np.random.default_rng(0).integers(0, 255, (3, 4, 84, 84), dtype=np.uint8)
    logits, values = model(model.inputs(frames))
    assert logits.shape == (3, 6)
    assert values.shape == (3,)
    assert model.inputs(frames).max() <= 1
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 3
    convolutions = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert convolutions == [32 * 4 * 64, 64 * 32 * 16, 64 * 64 * 9]


def test_film(tmp_path: Path) -> None:
    """Up to 32 frames of an episode, which TensorBoard has after an evaluation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    env = environments.make("CartPole-v1", render_mode="rgb_array")
    frames = environments.film(env, lambda seen: np.zeros(len(seen), int), 0)
    assert frames.dtype == np.uint8
    assert frames.shape[1:] == (400, 600, 3)
    assert 5 < len(frames) <= 32
    assert not (frames[0] == frames[-1]).all()
    upright = environments.film(env, lambda seen: (seen[:, 2] + seen[:, 3] > 0).astype(int), 0)
    assert 16 < len(upright) <= 32, "of several hundred"
    assert (upright[0] == frames[0]).all(), "the same episode once more"
    train(PPO, 2, tmp_path, *runner.small(PPO), "--max-steps", "1", "--film")
    events = EventAccumulator(str(tmp_path / "2"))
    events.Reload()
    assert [event.step for event in events.Images("val/film")] == [1] * len(events.Images("val/film"))


# --- bad input --------------------------------------------------------------------------------------------


def hide(path: str, argv: list[str], *names: str) -> None:
    """Run the recipe where these packages are not installed."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in names:
            del sys.modules[name]
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")


REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {  # flags, what is hidden, messages
    "unknown": (("--env", "CartPoole-v1"), (), ("--env CartPoole-v1", "doesn't exist")),
    "no such version": (("--env", "CartPole-v9"), (), ("--env CartPole-v9", "v1")),
    "no id": (("--env", "not an id!"), (), ("--env not an id!",)),
    "no such module": (("--env", "nowhere:Thing-v0"), (), ("--env nowhere:Thing-v0",)),
    "gymnasium": ((), ("gymnasium",), ("--env CartPole-v1 needs pip install 'gymnasium",)),
    "Atari": (("--env", "ALE/Pong-v5"), ("ale_py",), ("needs pip install 'gymnasium[atari]' opencv-python-headless",)),
    "Box2D": (("--env", "LunarLander-v3"), ("Box2D",), ("--env LunarLander-v3", 'pip install "gymnasium[box2d]"')),
    "film": (("--film",), ("pygame",), ("--env CartPole-v1", 'pip install "gymnasium[classic-control]"')),
    "table of states": (("--env", "FrozenLake-v1"), (), ("--env FrozenLake-v1 has observations Discrete(16)",)),
    "environments": (("--num-envs", "9"), (), ("--num-envs 9 does not divide by 2 ranks: use 10",)),
    "batch": (("--global-batch-size", "100"), (), ("--global-batch-size 100 must be a multiple of --num-envs 8",)),
    "batch and rollout": (
        ("--rollout-steps", "100"),
        (),
        ("256 must", "divide the 800 samples of a rollout"),
    ),
    "images": (("--env", "CarRacing-v3"), (), ("--env CarRacing-v3",)),
    "no episodes": (("--eval-episodes", "0"), (), ("--eval-episodes 0 is out of range",)),
    "discount": (("--gamma", "1.5"), (), ("--gamma 1.5 is out of range",)),
    "no steps": (("--max-steps", "0"), (), ("--max-steps 0",)),
    "dtype": (("--dtype", "bfloat16"), (), ("--dtype", "bfloat16")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0, in a message of ours, before anything is written."""
    monkeypatch.setattr(runner, "GRACE_S", 0.2)
    flags, hidden, messages = REFUSED[case]
    path = str(runner.ROOT / "recipes" / PPO / "train.py")
    argv = ["--out", str(tmp_path / "out"), *flags]
    result = runner.spawn(hide, [(path, argv, *hidden)] * 2)
    assert result.codes[0] == 2, str(result)
    assert all(result.codes), str(result)
    for message in messages:
        assert message in result.outputs[0], str(result)
    assert "Traceback" not in str(result), str(result)
    assert "".join(result.outputs).count(messages[-1]) == 1, str(result)
    assert not (tmp_path / "out").exists()
