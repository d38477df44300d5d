"""Train a policy by PPO with DistributedDataParallel and SyncBatchNorm: each rank steps its own environments.

Every rank holds the whole policy and a part of the environments, and contributes their samples to each minibatch.
Gradients, normalised advantages and BatchNorm's statistics are computed over all ranks.

    what               each rank
    parameters         all, a replica; BatchNorm's running statistics as well
    gradients          all, the mean over the ranks
    optimizer state    all, a replica
    environments       an equal part, and their samples

One step, or update, sends: two all-reduces of one number for the mean and deviation of the advantages; one all-reduce
of the gradients in the backward pass of each minibatch; one of an epoch's sums, by which all ranks decide whether to
stop the update; two per BatchNorm layer, in one forward pass over the whole rollout at the end of the update.

    python recipes/syncbn_ppo/train.py                                        # one process
    bash launch/torchrun.sh recipes/syncbn_ppo                                # one per GPU, else 2 on the CPU
    bash launch/slurm.sh -N2 --gpus-per-node=4 recipes/syncbn_ppo --num-envs 64

Measured: a greedy return of 475 or more over 100 episodes of CartPole-v1 with 10 of 10 seeds, 22 to 24 s after the
second command (docs/measured/ppo.md: Intel Xeon, 2 cores, gloo, torch 2.15.0, 2026-11-25). Several GPUs and
NCCL: not run.

Base: none.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common import bounds, precision, seed, session
from common.run import cli, exits
from common.run.process import Process, World
from common.state import start
from common.train import guard, initial, metrics, sampler, schedule, sync_batchnorm
from common.workloads import actor_critic, environments

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args(session.TrainArgs):
    """Train a policy in a gymnasium environment."""

    # run
    out: str = f"runs/{Path(__file__).parent.name}"  # folder that holds the runs
    max_steps: bounds.PositiveInt = 120  # length of the training in updates
    log_every: bounds.PositiveInt = 5  # updates between log lines
    eval_every: bounds.NonNegativeInt = 20  # updates between evaluations; 0 for one at the end
    save_every: bounds.NonNegativeInt = 20  # updates between checkpoints; 0 for one at the end
    # data
    env: str = "CartPole-v1"  # id of a gymnasium environment with vectors as observations, or of an ALE/ game
    # environments and rollouts
    num_envs: bounds.PositiveInt = 8  # environments, over all ranks
    rollout_steps: bounds.PositiveInt = 128  # steps of each environment per update
    eval_episodes: bounds.PositiveInt = 100  # greedy episodes of an evaluation, over all ranks
    film: bool = False  # show one episode of an evaluation in TensorBoard
    # batch and rate
    global_batch_size: bounds.PositiveInt = 256  # samples of a minibatch, over all ranks
    lr: bounds.NonNegativeFloat = 1e-3  # peak learning rate of Adam
    warmup_steps: bounds.NonNegativeInt = 0  # updates of linear warm-up
    max_grad_norm: bounds.NonNegativeFloat = 0.5  # clip the global gradient norm to this; 0 for never
    # model
    width: bounds.PositiveInt = 64  # units of a hidden layer
    batch_norm: bool = True  # SyncBatchNorm after each hidden layer
    dtype: Literal["float32", "float64"] = "float32"  # bfloat16 is too coarse for the ratio of two probabilities
    # policy optimization
    update_epochs: bounds.PositiveInt = 8  # epochs of an update over its samples
    target_kl: bounds.NonNegativeFloat = 0.01  # end the update when the policy has moved further; 0 for no limit
    clip: bounds.NonNegativeFloat = 0.2  # clip the ratio of new to old probability to 1 plus or minus this
    gamma: bounds.Fraction = 0.99  # discount per step
    gae_lambda: bounds.Fraction = 0.95  # lambda of generalised advantage estimation
    value_weight: bounds.NonNegativeFloat = 0.5  # weight of the value function's loss
    entropy_weight: bounds.NonNegativeFloat = 0.01  # weight of the policy's entropy, which PPO increases


# --- 2 Workload -------------------------------------------------------------------------------------------


class Samples(NamedTuple):
    """A rollout (T, n, ...) of this rank's n environments, or this rank's part of a minibatch (b, ...)."""

    observations: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor  # of the actions, when they were taken
    advantages: torch.Tensor
    returns: torch.Tensor  # what the value function is to learn


def make_envs(args: Args, dp_rank: int, dp_size: int) -> tuple[environments.Environments, sampler.Division]:
    """This rank's environments, and how an update's samples are divided."""
    index, samples = environments.share(args.num_envs, args.rollout_steps, args.global_batch_size, dp_rank, dp_size)
    division = sampler.Division(samples, args.global_batch_size, dp_size, part="minibatch")
    return environments.Environments(args.env, index, args.seed, seed.EPISODE), division


def make_filmed(args: Args) -> Any:
    """The environment of --film, which draws itself; None without that flag."""
    return environments.make(args.env, render_mode="rgb_array") if args.film else None


def make_model(args: Args, envs: environments.Environments) -> nn.Module:
    """The plain model, with the same initial weights on every rank."""
    seed.everything(args.seed, seed.INIT)
    shape = envs.observations.shape[1:]
    return actor_critic.ActorCritic(shape, envs.num_outputs, envs.continuous, args.width, args.batch_norm)


def make_optimizer(args: Args, model: nn.Module) -> Optimizer:
    """Adam, with the epsilon that is usual for PPO."""
    return torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5, fused=True)


def lr_factor(args: Args, step: int, max_steps: int) -> float:
    """Factor on the peak rates in a step: linear warm-up, then half a cosine."""
    return schedule.warmup_cosine(step - 1, args.warmup_steps, max_steps)


def forward(args: Args, model: nn.Module, batch: Samples) -> metrics.Sums:
    """Sums over one rank's part of a minibatch; "loss" is that of PPO (Schulman et al. 2017, eq. 9)."""
    outputs, values = model(batch.observations)
    actions = actor_critic.distribution(outputs, batch.actions.is_floating_point())
    log_ratio = actions.log_prob(batch.actions) - batch.log_probs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
    policy_loss = -torch.min(ratio * batch.advantages, clipped * batch.advantages).sum()
    value_loss = 0.5 * (values - batch.returns).square().sum()
    entropy = actions.entropy().sum()
    kl = (ratio - 1 - log_ratio).sum()  # never negative, and of little variance: http://joschu.net/blog/kl-approx.html
    return {
        "loss": policy_loss + args.value_weight * value_loss - args.entropy_weight * entropy,
        **{"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "kl": kl},
        "clip_fraction": (ratio != clipped).sum(),
        "count": torch.full((), len(values), device=values.device),
    }


def estimate_advantages(args: Args, rewards: Any, values: Any, next_values: Any, done: Any, terminated: Any) -> Any:
    """Generalised advantages (Schulman et al. 2016, https://arxiv.org/abs/1506.02438); everything is (T, n)."""
    # If the step limit ended an episode, add the value of its last state; if it terminated, add nothing.
    errors = rewards + args.gamma * next_values * ~terminated - values
    advantages = torch.zeros_like(errors)
    last = torch.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        advantages[t] = last = errors[t] + args.gamma * args.gae_lambda * last * ~done[t]
    return advantages


# --- 3 Strategy -------------------------------------------------------------------------------------------


def make_mesh(args: Args, world: World) -> DeviceMesh:
    """The ranks and their axes."""
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))


def dp_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Index of this rank's part of the environments, and number of parts."""
    return mesh.get_local_rank("dp"), mesh.size()


def parallelize(args: Args, model: nn.Module, mesh: DeviceMesh, device: torch.device) -> Any:
    """Put the plain model on its device and under the strategy."""
    dtype = precision.compute_dtype(args.dtype, device)
    model = initial.materialize(model, args.seed, device, precision.param_dtype(dtype))
    model = sync_batchnorm.convert(model, mesh.get_group("dp")).train(False)
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # equal since DDP's start; SyncBatchNorm keeps them so
    return model


def normalise(values: torch.Tensor) -> torch.Tensor:
    """Normalise to mean 0 and deviation 1 over all ranks, which hold equally many values (all ranks take part)."""
    count = values.numel() * dist.get_world_size()
    dist.all_reduce(total := values.sum())
    centred = values - total / count
    dist.all_reduce(squares := centred.square().sum())
    return centred / ((squares / count).sqrt() + 1e-8)


# --- 4 Step -----------------------------------------------------------------------------------------------


@torch.no_grad()
def play(args: Args, model: Any, envs: environments.Environments, step: int) -> Samples:
    """Act for `rollout_steps` in this rank's environments; draws depend on (seed, step, environment) alone."""
    policy = model.module  # without gradients there is nothing to send
    times = np.arange(args.rollout_steps) + (step - 1) * args.rollout_steps
    noise = seed.uniform(args.seed, seed.ACTION, times[:, None, None], envs.index[:, None], np.arange(envs.num_outputs))
    history = []
    for step_noise in noise:
        before = envs.observations
        chosen = policy.act(before, step_noise)
        history.append((before, chosen, *envs.step(chosen)))
    # From T tuples of arrays (n, ...) to arrays (T, n, ...): observations before the step first, after it last.
    columns = [np.stack(column) for column in zip(*history, strict=True)]
    observations = policy.inputs(columns[0])
    next_observations = policy.inputs(columns[-1])
    actions, rewards, done, terminated = (torch.from_numpy(column).to(observations.device) for column in columns[1:-1])
    # The network takes (T * n, ...).
    outputs, values = (part.unflatten(0, rewards.shape) for part in policy(observations.flatten(0, 1)))
    next_values = policy(next_observations.flatten(0, 1))[1].view_as(values)
    advantages = estimate_advantages(args, rewards.to(values), values, next_values, done, terminated)
    log_probs = actor_critic.distribution(outputs, envs.continuous).log_prob(actions)
    return Samples(observations, actions, log_probs, normalise(advantages), advantages + values)


def minibatches(args: Args, rollout: Samples, index: np.ndarray, epoch: int) -> Iterator[Samples]:
    """This rank's equal parts of an epoch's minibatches; each has as many steps of every environment."""
    keys = seed.mix(args.seed, seed.ORDER, epoch, index, np.arange(args.rollout_steps)[:, None])
    # Copied to the device once: with an index on the CPU, each minibatch of each tensor would wait for a copy.
    device = rollout.actions.device
    order = torch.from_numpy(keys.argsort(axis=0, kind="stable")).to(device)  # (T, n)
    columns = torch.arange(len(index), device=device)
    for times in order.split(args.global_batch_size // args.num_envs):
        yield Samples(*(values[times, columns].flatten(0, 1) for values in rollout))


def train_step(
    args: Args, model: Any, optimizer: Optimizer, finite: guard.FiniteGuard, envs: environments.Environments, step: int
) -> tuple[metrics.Sums, torch.Tensor]:
    """One update; returns this rank's sums over all minibatches, and the mean of their global gradient norms, ()."""
    rollout = play(args, model, envs, step)
    sums: metrics.Sums = {}
    norms = []
    for epoch in range(args.update_epochs):
        epoch_sums: metrics.Sums = {}
        for batch in minibatches(args, rollout, envs.index, (step - 1) * args.update_epochs + epoch):
            batch_sums = forward(args, model, batch)
            # The mean over the samples of all ranks: `dp_size` cancels DDP's mean over the ranks.
            (batch_sums["loss"] * (dist.get_world_size() / args.global_batch_size)).backward()
            norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            if args.max_grad_norm:
                nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, norms[-1])
            finite.skip_if_not_finite(norms[-1])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            epoch_sums = metrics.add(epoch_sums, batch_sums)
        sums = metrics.add(sums, epoch_sums)
        if args.target_kl and metrics.means(epoch_sums)["kl"] > args.target_kl:  # of all ranks, so that all stop
            break
    # The running statistics change only here, so that until now the policy was the one that acted.
    with torch.no_grad():
        model.train().module(rollout.observations.flatten(0, 1))
        model.train(False)
    finite.skip_if_not_finite(torch.stack(norms).sum())
    return sums, torch.stack(norms).mean()


def evaluate(args: Args, model: Any, dp_rank: int, dp_size: int) -> metrics.Sums:
    """This rank's sums over its part of the episodes, with the most likely actions."""
    model.eval()
    index = np.array_split(np.arange(args.eval_episodes), dp_size)[dp_rank]
    return environments.play_once(args.env, index, model.module.act, args.seed, seed.HOLD_OUT)


# --- 5 Main -----------------------------------------------------------------------------------------------


@exits.entry
def main(process: Process) -> None:
    """Train to the end, from the newest checkpoint or from the start."""
    args = cli.parse(Args)
    # Stops if the ranks run with different flags or code.
    world = session.join(args, __file__, process)
    mesh = make_mesh(args, world)
    dp_rank, dp_size = dp_coordinates(mesh)
    envs, division = make_envs(args, dp_rank, dp_size)
    filmed = make_filmed(args)
    model = make_model(args, envs)
    # Refuses a checkpoint of another model or environment before playing.
    found = start.find(args.out, process.name, args.resume, model, seed=args.seed, env=args.env)
    plan = sampler.make_plan(division, 0, run_seed=args.seed, max_steps=args.max_steps, progress=found.progress)
    model = parallelize(args, model, mesh, world.device)
    if args.compile:
        model.compile()
    optimizer = make_optimizer(args, model)
    state = envs.tensors()
    start.restore(found.path, args.init, model, optimizer, state)
    envs.restore(state)
    run = session.Session(args, world, mesh, found, plan, model, optimizer)
    for step in run.steps(dp_rank):
        lr = schedule.scale_rates(optimizer, lr_factor(args, step, plan.max_steps))
        sums, grad_norm = train_step(args, model, optimizer, run.finite, envs, step)
        episodes = envs.take_ended() if run.logs(step) else {}
        run.log_train(step, sums, grad_norm=grad_norm, data_wait_s=envs.wait_s, lr=lr, **episodes)
        if run.evaluates(step):
            run.log_validation(step, evaluate(args, model, dp_rank, dp_size))
            if filmed and world.rank == 0:
                run.log_images(step, "val/film", environments.film(filmed, model.module.act, args.seed))
        if run.saves(step):
            run.save(step, envs.tensors())
    run.finish()


if __name__ == "__main__":
    main()
