"""A policy and its value function: two perceptrons, or two heads on one convolutional network for images."""

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal


class ActorCritic(nn.Module):
    """Maps observations to the parameters of a distribution over actions, and to the value of the state.

    Weights start orthogonal, biases at 0, and the policy's last layer small, so that all actions start about equally
    likely (Huang et al. 2022, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/, 2).
    """

    def __init__(self, shape: tuple[int, ...], num_outputs: int, continuous: bool, width: int, batch_norm: bool):
        """Build the networks with random weights.

        Args:
            shape: shape of an observation: (num_features,), or (channels, side, side) for an image.
            num_outputs: number of actions to choose from; if continuous, length of an action vector.
            continuous: whether actions are vectors; their standard deviations are parameters, the same in every state.
            width: units of a hidden layer.
            batch_norm: whether a BatchNorm follows each hidden layer.
        """
        super().__init__()
        images = len(shape) == 3
        self.trunk = convolutions(shape, width, batch_norm) if images else nn.Identity()
        own = [] if images else [perceptron(shape[0], width, batch_norm) for _ in range(2)]
        self.actor = nn.Sequential(*own[:1], nn.Linear(width, num_outputs))
        self.critic = nn.Sequential(*own[1:], nn.Linear(width, 1))
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if continuous else None
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                gain = {self.actor[-1]: 0.01, self.critic[-1]: 1.0}.get(module, math.sqrt(2))
                nn.init.orthogonal_(module.weight, gain)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map observations (B, ...) to the outputs that `distribution` takes, and to values (B,)."""
        features = self.trunk(observations)
        return self._policy(features), self.critic(features).squeeze(-1)

    def _policy(self, features: torch.Tensor) -> torch.Tensor:
        outputs = self.actor(features)
        return outputs if self.log_std is None else torch.cat([outputs, self.log_std.expand_as(outputs)], dim=-1)

    def inputs(self, observations: np.ndarray) -> torch.Tensor:
        """Convert observations to the model's type and device; bytes are scaled to [0, 1]."""
        like = next(self.parameters())
        return torch.from_numpy(observations).to(like) / (255 if observations.dtype == np.uint8 else 1)

    @torch.no_grad()
    def act(self, observations: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Draw actions from uniform noise (B, num_outputs); without noise, take the most likely ones."""
        outputs = self._policy(self.trunk(self.inputs(observations))).cpu()
        mean, log_std = outputs.chunk(2, dim=-1) if self.log_std is not None else (outputs, None)
        if noise is None:
            return (mean.argmax(-1) if log_std is None else mean).numpy()
        uniform = torch.from_numpy(noise)
        if log_std is not None:  # in float64 and above 0: noise of 0, or rounded to 1, would give an infinite action
            normal = torch.special.ndtri(uniform.clamp(min=2.0**-54))
            return (mean + log_std.exp() * normal.to(mean)).numpy()
        return (mean - uniform.to(mean).log().neg().log()).argmax(-1).numpy()  # Gumbel's noise: a draw from the softmax


def normalised(layer: nn.Module, size: int, batch_norm: Any, activation: nn.Module) -> list[nn.Module]:
    """A layer, optionally a BatchNorm (its running statistics are means over all batches), and an activation."""
    return [layer, *([batch_norm(size, momentum=None)] if batch_norm else []), activation]


def perceptron(num_features: int, width: int, batch_norm: bool) -> nn.Sequential:
    """A network of two hidden layers."""
    norm = nn.BatchNorm1d if batch_norm else None
    first, second = (nn.Linear(size, width, bias=not batch_norm) for size in (num_features, width))
    return nn.Sequential(*normalised(first, width, norm, nn.Tanh()), *normalised(second, width, norm, nn.Tanh()))


def convolutions(shape: tuple[int, ...], width: int, batch_norm: bool) -> nn.Sequential:
    """The network of Mnih et al. 2015 (https://doi.org/10.1038/nature14236)."""
    layers: list[nn.Module] = []
    channels, side, _ = shape
    for size, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layer = nn.Conv2d(channels, size, kernel, stride, bias=not batch_norm)
        layers += normalised(layer, size, nn.BatchNorm2d if batch_norm else None, nn.ReLU())
        channels = size
        side = (side - kernel) // stride + 1
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, width), nn.ReLU())


def distribution(outputs: torch.Tensor, continuous: bool) -> Categorical | Independent:
    """Distribution of actions from logits (B, A); if continuous, from means and log standard deviations (B, 2 * A)."""
    if not continuous:
        return Categorical(logits=outputs, validate_args=False)
    mean, log_std = outputs.chunk(2, dim=-1)
    return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)
