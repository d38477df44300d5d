"""gymnasium environments whose episodes can be told again, on any number of ranks.

An episode is a function of (seed, stream, environment, episode) and of its actions: the generators of an
environment are seeded at each reset, so no state of theirs has to be saved, or can be: a checkpoint holds the
number of the episode and the actions since it began, and a resumed run plays them again.
"""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from common import UserError, seed


def make(name: str, **how: Any) -> Any:
    """One environment; a game of Atari comes with the preprocessing of Machado et al. 2018 (arxiv.org/abs/1709.06009).

    Args:
        name: its id.
        **how: further arguments of gymnasium.make, such as render_mode.

    Raises:
        UserError: gymnasium, or what the environment needs beside it, is not installed; there is no such environment;
            or its observations, actions or length are not of a kind that can be used.
    """
    atari = name.startswith("ALE/")
    try:
        import gymnasium
        from gymnasium import spaces, wrappers

        if atari:
            import ale_py
            import cv2  # noqa: F401 (AtariPreprocessing needs it)

            gymnasium.register_envs(ale_py)
            how |= {"frameskip": 1}  # skipping is the wrapper's
    except ModuleNotFoundError as error:
        extra = "'gymnasium[atari]' opencv-python-headless" if atari else "'gymnasium>=1.2'"
        raise UserError(f"--env {name} needs pip install {extra} ({error})") from error
    try:
        env = gymnasium.make(name, disable_env_checker=True, **how)
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(f"--env {name}: {error}") from error
    if atari:
        env = wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env), 4)
    seen, done = env.observation_space, env.action_space
    choice = isinstance(done, spaces.Discrete) and done.start == 0
    vector = isinstance(done, spaces.Box) and len(done.shape) == 1
    if not (isinstance(seen, spaces.Box) and len(seen.shape) in (1, 3) and (choice or vector)):
        raise UserError(
            f"--env {name} has observations {seen} and actions {done}: known are vectors or images, "
            "and actions that are vectors or numbered from 0"
        )
    if env.spec is None or env.spec.max_episode_steps is None:
        raise UserError(f"--env {name} has no limit of steps, so what a checkpoint holds of an episode has none")
    return env


class Environments:
    """Some environments, stepped together.

    Attributes:
        index: (n,) number of each among those of all ranks.
        observations: (n, ...) what the next actions answer to.
        continuous: whether actions are vectors (n, num_outputs), not numbers (n,) below num_outputs.
        ended: sums over the episodes that have ended since `take_ended`.
        wait_s: seconds spent in the environments.
    """

    def __init__(self, name: str, index: np.ndarray, *keys: int) -> None:
        """Make the environments of these numbers; `keys` and the number seed the episodes of each."""
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        # Reset by hand: an automatic reset takes the next step, which is then of no episode and no sample.
        factories = [lambda: make(name)] * len(index)
        self._vector = SyncVectorEnv(factories, autoreset_mode=AutoresetMode.DISABLED)
        self._space, num = self._vector.single_action_space, len(index)
        self.index, self._keys = index, keys
        self.continuous = bool(self._space.shape)
        self.num_outputs = int(self._space.shape[0] if self.continuous else self._space.n)
        limit = self._vector.envs[0].spec.max_episode_steps
        self._episodes, self._lengths, self._returns = np.zeros(num, int), np.zeros(num, int), np.zeros(num)
        self._actions = np.zeros((num, limit, *self._space.shape), np.float32)  # since the episodes began
        self.ended = np.zeros(3)
        self.wait_s = 0.0
        self._begin(np.ones(num, bool))

    def _begin(self, which: np.ndarray) -> None:
        seeds = seed.mix(*self._keys, self.index, self._episodes) % np.uint64(2**31)
        self.observations, _ = self._vector.reset(seed=seeds.tolist(), options={"reset_mask": which})
        self._lengths[which], self._returns[which] = 0, 0

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Take a step in each, and begin a new episode where one has ended.

        Args:
            actions: (n,), or (n, num_outputs) if continuous, of which what is out of bounds is cut off.

        Returns:
            What the step led to, (n, ...), not the first of a new episode; rewards (n,); whether the episode ended, and
            whether it did so by its own rules, not by the limit of steps, both (n,).
        """
        began = time.perf_counter()
        if self.continuous:
            actions = actions.clip(self._space.low, self._space.high).astype(self._space.dtype)
        self._actions[np.arange(len(actions)), self._lengths] = actions
        led_to, rewards, terminated, truncated, _ = self._vector.step(actions)
        self.observations, done = led_to, terminated | truncated
        self._returns += rewards
        self._lengths += 1
        if done.any():
            self.ended += [self._returns[done].sum(), self._lengths[done].sum(), done.sum()]
            self._episodes[done] += 1
            self._begin(done)
        self.wait_s += time.perf_counter() - began
        return led_to, rewards, done, terminated

    def take_ended(self) -> dict[str, float]:
        """Mean return and length of the episodes of all ranks that have ended since the last call (all ranks)."""
        sums = torch.from_numpy(self.ended)
        self.ended = np.zeros(3)
        dist.all_reduce(sums)
        return {"rl/return": float(sums[0] / sums[2]), "rl/length": float(sums[1] / sums[2])} if sums[2] else {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Where the environments of all ranks are, by number: of no number of ranks (all ranks).

        Every rank has as many environments, and ranks have them in order.
        """
        mine = {"episodes": self._episodes, "lengths": self._lengths, "actions": self._actions}
        mine |= {"observations": self.observations}
        found = {}
        for name, array in mine.items():
            local = torch.from_numpy(array)
            whole = local.new_empty(dist.get_world_size() * len(local), *local.shape[1:])
            dist.all_gather_into_tensor(whole, local)
            found[f"rollout.{name}"] = whole
        return found

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Play the episodes again, from their beginning to where `tensors` has them.

        Raises:
            UserError: that does not lead to the same observations.
        """
        parts = {name: value.numpy()[self.index] for name, value in tensors.items() if name.startswith("rollout.")}
        self._episodes = parts["rollout.episodes"]
        self._begin(np.ones(len(self.index), bool))
        self._lengths, self._actions = parts["rollout.lengths"], parts["rollout.actions"]
        for i, env in enumerate(self._vector.envs):
            for action in self._actions[i, : self._lengths[i]].astype(self._space.dtype):
                self.observations[i], reward, *_ = env.step(action)
                self._returns[i] += reward
        if not np.array_equal(self.observations, parts["rollout.observations"]):
            raise UserError(
                "--resume: the environment does not play an episode again from its seed and actions as it was: "
                "it is of another version, or cannot be continued; give another --name to start over"
            )
