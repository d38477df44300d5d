"""gymnasium environments whose episodes can be replayed, on any number of ranks.

An episode is a function of (seed, stream, environment, episode) and of its actions, because each reset seeds the
environment's generators. So a checkpoint holds the number of the episode and the actions since it began, and a resumed
run replays them; this works for every kind of environment.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import record_function

from common import UserError, marks, seed

MOST_ENVS = 1_000_000  # each is an object of Python's
Act = Callable[[np.ndarray], np.ndarray]  # observations (n, ...) to actions (n,) or (n, num_outputs)


def make(name: str, **how: Any) -> Any:
    """Make one environment; Atari games get the preprocessing of Machado et al. 2018 (arxiv.org/abs/1709.06009).

    Raises:
        UserError: gymnasium does not know it, a package is missing, or its spaces are not supported.
    """
    atari = name.startswith("ALE/")
    try:
        import gymnasium
        from gymnasium import spaces, wrappers

        if atari:
            import ale_py
            import cv2  # noqa: F401 (AtariPreprocessing needs it)

            gymnasium.register_envs(ale_py)
            how |= {"frameskip": 1, "max_episode_steps": 108_000}  # half an hour; the wrapper skips frames
    except ModuleNotFoundError as error:
        extra = "'gymnasium[atari]' opencv-python-headless" if atari else "'gymnasium>=1.2'"
        raise UserError(f"--env {name} needs pip install {extra} ({error})") from error
    try:
        env = gymnasium.make(name, disable_env_checker=True, **how)
        if "render_mode" in how:  # rendering may need another package
            _ = env.reset(), env.render()
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(f"--env {name}: {error}") from error
    if atari:
        env = wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env), 4)
    observations = env.observation_space
    actions = env.action_space
    numbered = isinstance(actions, spaces.Discrete) and actions.start == 0
    vectors = isinstance(actions, spaces.Box) and len(actions.shape) == 1
    if not (isinstance(observations, spaces.Box) and (atari or len(observations.shape) == 1) and (numbered or vectors)):
        raise UserError(
            f"--env {name} has observations {observations} and actions {actions}: use an environment whose "
            "observations are vectors or Atari images, and whose actions are vectors or numbered from 0"
        )
    if env.spec is None or env.spec.max_episode_steps is None:
        raise UserError(
            f"--env {name} has no limit on an episode's steps, which checkpoints need: use one with max_episode_steps"
        )
    return env


def share(num_envs: int, rollout_steps: int, batch: int, dp_rank: int, dp_size: int) -> tuple[np.ndarray, int]:
    """Numbers of this dp rank's environments (consecutive), and the samples of a rollout (whole batches).

    Raises:
        UserError: the numbers do not divide, or there are too many environments.
    """
    if num_envs > MOST_ENVS:
        raise UserError(f"--num-envs {num_envs} must be at most {MOST_ENVS}")
    samples = num_envs * rollout_steps
    if num_envs % dp_size:
        better = -(-num_envs // dp_size) * dp_size
        raise UserError(f"--num-envs {num_envs} does not divide by {dp_size} ranks: use {better}")
    if batch % num_envs or samples % batch:
        raise UserError(
            f"--global-batch-size {batch} must be a multiple of --num-envs {num_envs} and divide the {samples} samples "
            f"of a rollout (--num-envs x --rollout-steps {rollout_steps}): {samples} does both"
        )
    return np.arange(num_envs).reshape(dp_size, -1)[dp_rank], samples


class Environments:
    """Some environments, stepped together.

    Attributes:
        index: (n,) number of each environment among those of all ranks.
        observations: (n, ...) latest observations, on which the next actions depend.
        continuous: whether actions are vectors (n, num_outputs), not numbers (n,) below num_outputs.
        ended: sums over the episodes that have ended since the last `take_ended`.
        wait_s: seconds spent in the environments.
    """

    def __init__(self, name: str, index: np.ndarray, *keys: int) -> None:
        """Make the environments with these numbers; `keys` and its number seed each one's episodes."""
        made = [make(name) for _ in index]  # raises UserError if gymnasium is missing
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        # Reset by hand: an automatic reset would take the place of a step, which would belong to no episode.
        self._vector = SyncVectorEnv([iter(made).__next__] * len(made), autoreset_mode=AutoresetMode.DISABLED)
        self._space = made[0].action_space
        num = len(index)
        self.index = index
        self._keys = keys
        self.continuous = bool(self._space.shape)
        self.num_outputs = int(self._space.shape[0] if self.continuous else self._space.n)
        self._episodes = np.zeros(num, int)
        self._lengths = np.zeros(num, int)
        self._returns = np.zeros(num)
        limit = made[0].spec.max_episode_steps
        # Since the episodes began, exact: another action of the same float32 would begin another episode.
        dtype = np.result_type(self._space.dtype, np.float32) if self.continuous else np.float32
        self._actions = np.zeros((num, limit, *self._space.shape), dtype)
        self.ended = np.zeros(3)
        self.wait_s = 0.0
        self._begin(np.ones(num, bool))

    def _begin(self, which: np.ndarray) -> None:
        seeds = seed.mix(*self._keys, self.index, self._episodes) % np.uint64(2**31)
        self.observations, _ = self._vector.reset(seed=seeds.tolist(), options={"reset_mask": which})
        self._lengths[which] = 0
        self._returns[which] = 0

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step each environment, and begin a new episode where one has ended.

        Args:
            actions: (n,), or (n, num_outputs) if continuous; these are clipped to the action space.

        Returns:
            Rewards, whether the episode ended, and whether it terminated rather than reached the step limit, all (n,);
            and the observations after the step, before any reset, (n, ...).
        """
        began = time.perf_counter()
        if self.continuous:
            actions = actions.clip(self._space.low, self._space.high).astype(self._space.dtype)
        self._actions[np.arange(len(actions)), self._lengths] = actions
        with record_function(marks.READS):
            next_observations, rewards, terminated, truncated, _ = self._vector.step(actions)
        self.observations = next_observations
        done = terminated | truncated
        self._returns += rewards
        self._lengths += 1
        if done.any():
            self.ended += [self._returns[done].sum(), self._lengths[done].sum(), done.sum()]
            self._episodes[done] += 1
            self._begin(done)
        self.wait_s += time.perf_counter() - began
        return rewards, done, terminated, next_observations

    def take_ended(self) -> dict[str, float]:
        """Mean return and length of the episodes of all ranks that have ended since the last call (all ranks)."""
        sums = torch.from_numpy(self.ended)
        self.ended = np.zeros(3)
        dist.all_reduce(sums)
        return {"rl/return": float(sums[0] / sums[2]), "rl/length": float(sums[1] / sums[2])} if sums[2] else {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """State of all ranks' environments, ordered by their number, for a checkpoint (all ranks)."""
        found = {}
        mine = {"episodes": self._episodes, "lengths": self._lengths, "actions": self._actions}
        for name, array in (mine | {"observations": self.observations}).items():
            local = torch.from_numpy(array)
            gathered = local.new_empty(dist.get_world_size() * len(local), *local.shape[1:])
            dist.all_gather_into_tensor(gathered, local)
            found[f"rollout.{name}"] = gathered
        return found

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replay the current episodes up to the state in `tensors` (all ranks).

        Raises:
            UserError: a replay does not give the same observations.
        """
        parts = {name: value.numpy()[self.index] for name, value in tensors.items() if name.startswith("rollout.")}
        self._episodes = parts["rollout.episodes"]
        self._begin(np.ones(len(self.index), bool))
        self._lengths = parts["rollout.lengths"]
        self._actions = parts["rollout.actions"]
        for i, env in enumerate(self._vector.envs):
            for action in self._actions[i, : self._lengths[i]].astype(self._space.dtype):
                self.observations[i], reward, *_ = env.step(action)
                self._returns[i] += reward
        same = torch.tensor(np.array_equal(self.observations, parts["rollout.observations"])).long()
        dist.all_reduce(same, dist.ReduceOp.MIN)
        if not same:
            raise UserError(
                "replaying the checkpoint's episodes gave other observations: --env has another version than at the "
                "save, or is not deterministic. To start over, use another --name"
            )


def play_once(name: str, index: np.ndarray, act: Act, *keys: int) -> dict[str, torch.Tensor]:
    """Sums of returns and lengths of the first episode in each of these environments, and their count."""
    envs: Any = Environments(name, index, *keys) if len(index) else None
    playing = np.ones(len(index), bool)
    returns = 0.0
    lengths = 0
    while playing.any():
        rewards, done, *_ = envs.step(act(envs.observations))
        returns += rewards[playing].sum()
        lengths += playing.sum()
        playing &= ~done
    return {"return": torch.tensor(returns), "length": torch.tensor(lengths), "count": torch.tensor(len(index))}


def film(env: Any, act: Act, key: int) -> np.ndarray:
    """Render environment 0 of an evaluation with this seed: up to 32 frames, (N, H, W, 3); `env` has a render mode."""
    frames: list[Any] = []
    every = 1  # steps between frames
    time_step = 0
    ends = [False]  # terminated, truncated
    observation, _ = env.reset(seed=int(seed.mix(key, seed.HOLD_OUT, 0, 0) % np.uint64(2**31)))
    while not any(ends):
        frames += [] if time_step % every else [env.render()]
        if len(frames) > 32:
            frames = frames[::2]
            every *= 2
        observation, _, *ends, _ = env.step(act(np.asarray(observation)[None])[0])
        time_step += 1
    return np.stack(frames)
