"""A policy and its value function: two perceptrons, or two heads on one convolutional network for images."""

import math

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

Shape = tuple[int, ...]
# Share of a rollout's statistics in the running ones: the newest rollout is the one that the next resembles most.
MOMENTUM = 0.3


class ActorCritic(nn.Module):
    """From observations to the parameters of a distribution over actions, and to the value of the state.

    Weights start orthogonal and biases at 0; the last layer of the policy starts small, so that all actions begin
    about as likely (Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, section 3).
    """

    def __init__(self, observation: Shape, num_outputs: int, continuous: bool, width: int, batch_norm: bool) -> None:
        """Build it with random weights.

        Args:
            observation: shape of one, (num_features,), or (channels, height, width) of bytes.
            num_outputs: actions to choose from; if continuous, numbers in one.
            continuous: whether actions are vectors of numbers; their logarithmic deviations do not depend on the state.
            width: of the hidden layers.
            batch_norm: whether a BatchNorm follows each hidden layer.
        """
        super().__init__()
        images = len(observation) == 3
        features = math.prod(observation)
        self.trunk = _convolutions(observation, width, batch_norm) if images else nn.Identity()
        own = [] if images else [_perceptron(features, width, batch_norm) for _ in range(2)]
        self.actor = nn.Sequential(*own[:1], nn.Linear(width, num_outputs))
        self.critic = nn.Sequential(*own[1:], nn.Linear(width, 1))
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if continuous else None
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.orthogonal_(self.actor[-1].weight, 0.01)
        nn.init.orthogonal_(self.critic[-1].weight, 1.0)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From observations (B, ...) to what `policy` gives and values (B,)."""
        features = self.trunk(observations)
        return self._distribution(features), self.critic(features).squeeze(-1)

    def policy(self, observations: torch.Tensor) -> torch.Tensor:
        """Logits (B, num_outputs); of continuous actions means and logarithmic deviations, (B, 2 * num_outputs)."""
        return self._distribution(self.trunk(observations))

    def _distribution(self, features: torch.Tensor) -> torch.Tensor:
        outputs = self.actor(features)
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], dim=-1)


def _perceptron(num_features: int, width: int, batch_norm: bool) -> nn.Sequential:
    """Two hidden layers."""
    layers: list[nn.Module] = []
    for size in (num_features, width):
        layers.append(nn.Linear(size, width, bias=not batch_norm))
        layers += [nn.BatchNorm1d(width, momentum=None)] * batch_norm
        layers.append(nn.Tanh())
    return nn.Sequential(*layers)


def _convolutions(observation: Shape, width: int, batch_norm: bool) -> nn.Sequential:
    """The network of Mnih et al. 2015 (https://doi.org/10.1038/nature14236) for stacked grey images of 84 x 84."""
    layers: list[nn.Module] = []
    channels, height, _ = observation
    for size, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers.append(nn.Conv2d(channels, size, kernel, stride, bias=not batch_norm))
        layers += [nn.BatchNorm2d(size, momentum=None)] * batch_norm
        layers.append(nn.ReLU())
        channels, height = size, (height - kernel) // stride + 1
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * height, width), nn.ReLU())


def distribution(outputs: torch.Tensor, continuous: bool) -> Distribution:
    """Of actions, from what `ActorCritic.policy` gives."""
    if not continuous:
        return Categorical(logits=outputs, validate_args=False)
    mean, log_std = outputs.chunk(2, dim=-1)
    return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)


def choose(outputs: torch.Tensor, continuous: bool, noise: np.ndarray | None = None) -> np.ndarray:
    """Draw actions by uniform noise (B, num_outputs), or take the likeliest ones without."""
    outputs = outputs.cpu()
    mean, log_std = outputs.chunk(2, dim=-1) if continuous else (outputs, outputs)
    if noise is None:
        return (mean if continuous else outputs.argmax(-1)).numpy()
    uniform = torch.from_numpy(noise).to(outputs)
    if continuous:
        return (mean + log_std.exp() * torch.special.ndtri(uniform)).numpy()
    return (outputs - uniform.log().neg().log()).argmax(-1).numpy()  # Gumbel's noise: a draw from the softmax
