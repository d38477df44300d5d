"""PPO over processes that each play their own environments, and nothing else: what is averaged is that of all.

Every process holds the policy. DDP averages the gradients; the mean and the deviation of the advantages, and those of
BatchNorm, are averaged as well.

    torchrun --nproc-per-node 2 recipes/syncbn_ppo/bare.py
    torchrun --nproc-per-node 2 recipes/syncbn_ppo/bare.py --checkpoint ppo.pt  # again: continues, with new episodes

train.py has the same strategy, and adds a limit on how far an update moves the policy, evaluations and films;
environments that a resume continues exactly, on any number of processes; skipped updates, hangs named by rank,
TensorBoard, and checkpoints that are written while it plays on.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common.workloads import actor_critic, environments

ENVS = 8  # of all processes together
ROLLOUT = 128  # steps of each environment in an update
MINIBATCH = 256  # samples of all processes together
EPOCHS = 4  # of an update over its samples


class SyncBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the samples of all processes, without a gradient of the statistics; torch's own needs GPUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise (b, C); b is the same in all processes."""
        if not self.training:
            return super().forward(x)
        mean = average(x.mean(0))
        var = average((x - mean).square().mean(0))
        count = len(x) * dist.get_world_size()
        running: Any = self  # its statistics are the means of those of all batches
        running.num_batches_tracked += 1
        running.running_mean.lerp_(mean, 1 / running.num_batches_tracked)
        running.running_var.lerp_(var * count / (count - 1), 1 / running.num_batches_tracked)
        return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)


def average(x: torch.Tensor) -> torch.Tensor:
    """The mean of all processes' tensors."""
    dist.all_reduce(x)
    return x / dist.get_world_size()


def parallelize(model: Any, device: torch.device) -> Any:
    """Synchronise BatchNorm, and wrap the model: DDP sends the first process's weights to all, once."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.__class__ = SyncBatchNorm
    return DistributedDataParallel(model.to(device).eval(), broadcast_buffers=False)


@torch.no_grad()
def play(model: Any, envs: environments.Environments, noise: np.ndarray) -> list[torch.Tensor]:
    """Let the policy act by noise (T, n, outputs); returns what PPO learns from, each (T, n, ...)."""
    policy = model.module
    steps = []
    for some in noise:
        before = envs.observations
        actions = policy.act(before, some)
        steps.append((before, actions, *envs.step(actions)))
    columns = (policy.inputs(np.stack(column)) for column in zip(*steps, strict=True))
    observations, actions, rewards, done, terminated, after = columns
    outputs, values = (part.unflatten(0, rewards.shape) for part in policy(observations.flatten(0, 1)))
    next_values = policy(after.flatten(0, 1))[1].view_as(values)
    log_probs = actor_critic.distribution(outputs, envs.continuous).log_prob(actions)
    errors = rewards + 0.99 * next_values * (1 - terminated) - values
    advantages = torch.zeros_like(errors)
    last = torch.zeros_like(errors[0])
    for t in reversed(range(len(errors))):  # generalised advantages, Schulman et al. 2016
        advantages[t] = last = errors[t] + 0.99 * 0.95 * last * (1 - done[t])
    centred = advantages - average(advantages.mean())
    scaled = centred / (average(centred.square().mean()).sqrt() + 1e-8)
    return [observations, actions, log_probs, scaled, advantages + values]


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, envs: environments.Environments, noise: np.ndarray, orders: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Play, and learn from it in minibatches, in orders (epochs, T, n); returns the mean loss and gradient norm."""
    rollout = play(model, envs, noise)
    columns = torch.arange(orders.shape[2])
    losses = []
    norms = []
    for times in torch.from_numpy(orders).flatten(0, 1).split(MINIBATCH // ENVS):
        observations, actions, log_probs, advantages, returns = (one[times, columns].flatten(0, 1) for one in rollout)
        outputs, values = model(observations)
        policy = actor_critic.distribution(outputs, envs.continuous)
        ratio = (policy.log_prob(actions) - log_probs).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.01 * policy.entropy()
        loss = (0.25 * (values - returns).square() - gain).mean()
        loss.backward()  # the gradient is the mean over the processes; their parts of a minibatch are equal
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():  # the statistics change here alone: until now, the policy was the one that has acted
        model.train().module(rollout[0].flatten(0, 1))
        model.eval()
    return average(torch.stack(losses).mean()), torch.stack(norms).mean()


def save(path: Path, model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let one process write, first beside the old file: a crash in the middle leaves that one."""
    if dist.get_rank() == 0:
        # `module` is the model without the wrapper.
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
        torch.save(state, f"{path}.part")
        os.replace(f"{path}.part", path)


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Let every process read; returns the updates that are done."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["steps"]


def main() -> None:
    """Balance a pole."""
    parser = argparse.ArgumentParser(description="Balance a pole.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint", type=Path, help="written every 20 updates; if it is there, continue from it")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # with whom, torchrun has set
    rank, size = dist.get_rank(), dist.get_world_size()
    envs = environments.Environments("CartPole-v1", np.arange(ENVS)[rank::size], 0)  # for each its own
    torch.manual_seed(0)
    model = actor_critic.ActorCritic(envs.observations.shape[1:], envs.num_outputs, envs.continuous, 64, True)
    model = parallelize(model, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    done = load(args.checkpoint, model, optimizer) if args.checkpoint and args.checkpoint.exists() else 0
    for step in range(done + 1, args.steps + 1):
        draws = np.random.default_rng([step, rank])  # each process draws other actions
        shape = ROLLOUT, ENVS // size
        orders = draws.random((EPOCHS, *shape)).argsort(1)
        loss, grad_norm = train_step(model, optimizer, envs, draws.random((*shape, envs.num_outputs)), orders)
        episodes = envs.take_ended() if step % 5 == 0 else {}
        if rank == 0 and episodes:
            print(
                f"step {step}/{args.steps}  return {episodes['rl/return']:.1f}  loss {loss:.4f}  norm {grad_norm:.3f}"
            )
        if args.checkpoint and (step % 20 == 0 or step == args.steps):
            save(args.checkpoint, model, optimizer, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
