"""An environment whose numbers are all float64, as other people's are: `--env tests.harness.drift:Drift64-v0`."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LIMIT = 0.7  # which no float32 is equal to


class Drift(gymnasium.Env[np.ndarray, np.ndarray]):
    """A point in the plane that is pushed, and drifts away from where it began; every bit of a push counts."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-LIMIT, LIMIT, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        return self.place.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert action.dtype == np.float64
        self.place = 1.1 * self.place + action
        return self.place.copy(), -float(np.abs(self.place).sum()), False, False, {}


gymnasium.register("Drift64-v0", entry_point=Drift, max_episode_steps=50)
