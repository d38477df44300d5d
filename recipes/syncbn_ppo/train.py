"""Train a policy by PPO with DistributedDataParallel and SyncBatchNorm: each rank plays in environments of its own.

Every rank holds the whole policy and a part of the environments, and has the samples of each minibatch that come
from these. Gradients, advantages and BatchNorm's statistics are over all ranks.

    what               each rank
    parameters         all, a replica; BatchNorm's running statistics as well
    gradients          all, the mean over the ranks
    optimizer state    all, a replica
    environments       an equal part, and the samples that come from them

One step, or update, sends: two all-reduces of a number for the mean and deviation of the advantages; one all-reduce
of the gradients per minibatch; one of the epoch's sums, for the stop that all agree on; BatchNorm's, per layer.

    python recipes/syncbn_ppo/train.py                                        # one process
    bash launch/torchrun.sh recipes/syncbn_ppo                                # one per GPU, else 2 on the CPU
    bash launch/slurm.sh -N2 --gpus-per-node=4 recipes/syncbn_ppo --num-envs 64

Measured: a greedy return of 475 or more over 100 episodes of CartPole-v1 with 9 of 10 seeds, 30 to 59 s after the
second command (docs/ppo.md: AMD EPYC, 2 cores, gloo, torch 2.15.0, 2026-11-21). Several GPUs and NCCL: not run.

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

from common import UserError, checkpoint, cli, guard, initial, keymap, log, metrics, precision, run_dir, sampler, saver
from common import schedule, seed, stop, sync_batchnorm, watch, world
from common.workloads import actor_critic, environments

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args:
    """Train a policy in a gymnasium environment."""

    out: str = f"runs/{Path(__file__).parent.name}"  # folder for runs
    name: str = ""  # name of this run, by default date and time; the same name again continues the run
    resume: str = ""  # continue from this run or checkpoint
    env: str = "CartPole-v1"  # id of a gymnasium environment, whose observations are vectors, or an ALE/ game
    seed: int = 0  # decides initial weights, episodes, actions and the order of samples
    backend: str = "auto"  # auto (NCCL on GPUs, else gloo), gloo, nccl or mpi
    max_steps: int = 120  # length of the training in updates
    stop_after: int = 0  # leave, saved, once this update is done; 0 for never
    deadline: float = 0.0  # leave, saved, after this many minutes; 0 for never
    log_every: int = 5  # updates between lines of the log
    eval_every: int = 20  # updates between evaluations; 0 for one at the end
    save_every: int = 20  # updates between checkpoints; 0 for one at the end
    keep: int = 2  # newest checkpoints that stay on the disk
    async_save: bool = False  # write checkpoints while the training goes on
    check_every: int = 100  # updates between comparisons of the replicas; 0 for never
    max_skips: int = 3  # updates in a row that may have a gradient that is not finite
    hang_timeout: float = 300.0  # seconds without progress after which a hang is named and ended
    global_batch_size: int = 256  # samples per optimizer step, over all ranks: a minibatch
    lr: float = 1e-3  # peak learning rate of Adam
    warmup_steps: int = 0  # updates of linear warm-up
    max_grad_norm: float = 0.5  # clip the global gradient norm to this; 0 for never
    dtype: Literal["float32", "float64"] = "float32"  # coarser, the ratio of two probabilities would be noise
    compile: bool = False  # torch.compile the model
    width: int = 64  # of the hidden layers
    batch_norm: bool = True  # SyncBatchNorm after each hidden layer
    num_envs: int = 8  # environments, over all ranks
    rollout_steps: int = 128  # steps of each environment per update
    update_epochs: int = 8  # times that an update goes through its samples
    target_kl: float = 0.01  # an epoch whose policy has moved further is the update's last; 0 for no limit
    clip: float = 0.2  # the ratio of new to old probability counts up to 1 plus or minus this
    gamma: float = 0.99  # discount of a step
    gae_lambda: float = 0.95  # weight of longer returns in an advantage
    value_weight: float = 0.5  # of the value function's loss
    entropy_weight: float = 0.01  # of the policy's entropy, which is to be large
    eval_episodes: int = 100  # greedy episodes of an evaluation, over all ranks
    film: bool = False  # show one of them in TensorBoard


# --- 2 Workload -------------------------------------------------------------------------------------------


class Samples(NamedTuple):
    """A rollout (T, n, ...) of this rank's n environments, or this rank's part of a minibatch (b, ...)."""

    observations: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor  # of the actions, when they were taken
    advantages: torch.Tensor
    returns: torch.Tensor  # what the value function is to learn


def make_model(args: Args, envs: environments.Environments) -> nn.Module:
    """The plain model, with the same initial weights on every rank."""
    seed.everything(args.seed, seed.INIT)
    shape = envs.observations.shape[1:]
    return actor_critic.ActorCritic(shape, envs.num_outputs, envs.continuous, args.width, args.batch_norm)


def make_optimizer(args: Args, model: nn.Module) -> Optimizer:
    """Adam, with the epsilon that is usual for PPO."""
    return torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5, fused=True)


def forward(args: Args, model: nn.Module, batch: Samples) -> metrics.Sums:
    """Sums over one rank's part of a minibatch, of which "loss" carries the gradient (Schulman et al. 2017, eq. 9)."""
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
    # An episode that the limit of steps cut off counts the value of where it was; one that was over does not.
    errors = rewards + args.gamma * next_values * ~terminated - values
    advantages, last = torch.zeros_like(errors), torch.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        advantages[t] = last = errors[t] + args.gamma * args.gae_lambda * last * ~done[t]
    return advantages


# --- 3 Strategy -------------------------------------------------------------------------------------------


def make_mesh(args: Args, here: world.World) -> DeviceMesh:
    """The ranks and their axes."""
    return init_device_mesh(here.device.type, (here.size,), mesh_dim_names=("dp",))


def data_shard(mesh: DeviceMesh) -> tuple[int, int]:
    """Which part of the environments this rank has, of how many."""
    return mesh.get_local_rank("dp"), mesh.size()


def parallelize(args: Args, model: nn.Module, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> Any:
    """Put the plain model on its device and under the strategy."""
    model = initial.place(model, args.seed, device, precision.storage(dtype))
    model = sync_batchnorm.convert(model, mesh.get_group("dp")).train(False)
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # running statistics are the same on all ranks already
    return model


def normalise(values: torch.Tensor) -> torch.Tensor:
    """Shift and scale to mean 0 and deviation 1 over all ranks, which hold equally many (all ranks)."""
    count = values.numel() * dist.get_world_size()
    dist.all_reduce(total := values.sum())
    centred = values - total / count
    dist.all_reduce(squares := centred.square().sum())
    return centred / ((squares / count).sqrt() + 1e-8)


# --- 4 Step -----------------------------------------------------------------------------------------------


@torch.no_grad()
def play(args: Args, model: Any, envs: environments.Environments, step: int) -> Samples:
    """Act for `rollout_steps` in this rank's environments; what is drawn depends on (seed, step, environment) alone."""
    model = model.module  # without gradients there is nothing to send
    times = np.arange(args.rollout_steps) + (step - 1) * args.rollout_steps
    noise = seed.uniform(args.seed, seed.ACTION, times[:, None, None], envs.index[:, None], np.arange(envs.num_outputs))
    rows = [(envs.observations, act := model.act(envs.observations, drawn), *envs.step(act)) for drawn in noise]
    columns = [np.stack(column) for column in zip(*rows, strict=True)]
    seen, led_to = model.inputs(columns[0]), model.inputs(columns[-1])
    actions, rewards, done, terminated = (torch.from_numpy(column).to(seen.device) for column in columns[1:-1])
    outputs, values = (part.unflatten(0, rewards.shape) for part in model(seen.flatten(0, 1)))
    next_values = model(led_to.flatten(0, 1))[1].view_as(values)
    advantages = estimate_advantages(args, rewards.to(values), values, next_values, done, terminated)
    log_probs = actor_critic.distribution(outputs, envs.continuous).log_prob(actions)
    return Samples(seen, actions, log_probs, normalise(advantages), advantages + values)


def minibatches(args: Args, rollout: Samples, index: np.ndarray, epoch: int) -> Iterator[Samples]:
    """This rank's parts of an epoch's minibatches, which are equal: each takes as many steps of every environment."""
    keys = seed.mix(args.seed, seed.ORDER, epoch, index, np.arange(args.rollout_steps)[:, None])
    order = torch.from_numpy(keys.argsort(axis=0, kind="stable"))  # (T, n)
    for times in order.split(args.global_batch_size // args.num_envs):
        yield Samples(*(values[times, torch.arange(len(index))].flatten(0, 1) for values in rollout))


def train_step(
    args: Args, model: Any, optimizer: Optimizer, finite: guard.FiniteGuard, envs: environments.Environments, step: int
) -> tuple[metrics.Sums, torch.Tensor]:
    """One update; returns this rank's sums over all minibatches, and the mean of their global gradient norms, ()."""
    rollout = play(args, model, envs, step)
    sums, norms = dict[str, torch.Tensor](), []
    for epoch in range(args.update_epochs):
        epoch_sums: metrics.Sums = {}
        for batch in minibatches(args, rollout, envs.index, (step - 1) * args.update_epochs + epoch):
            batch_sums = forward(args, model, batch)
            # The mean over the samples of all ranks; DDP averages over the ranks, so each one's part counts that often.
            (batch_sums["loss"] * (dist.get_world_size() / args.global_batch_size)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf")))
            finite.judge(norms[-1])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            epoch_sums = metrics.add(epoch_sums, batch_sums)
        sums = metrics.add(sums, epoch_sums)
        if args.target_kl and metrics.means(epoch_sums)["kl"] > args.target_kl:  # of all ranks, so that all stop
            break
    # Here alone the running statistics change: until now the policy normalised as when it acted.
    with torch.no_grad():
        model.train().module(rollout.observations.flatten(0, 1))
        model.train(False)
    finite.judge(torch.stack(norms).sum())
    return sums, torch.stack(norms).mean()


def evaluate(args: Args, model: Any, shard: int, num_shards: int) -> metrics.Sums:
    """This rank's sums over its part of the episodes, in which the likeliest action is taken."""
    model.eval()
    index = np.array_split(np.arange(args.eval_episodes), num_shards)[shard]
    return environments.play_once(args.env, index, model.module.act, args.seed, seed.HOLD_OUT)


# --- 5 Main -----------------------------------------------------------------------------------------------


@cli.entry
def main() -> None:
    """Train from the newest checkpoint, or from the start, to the end."""
    args = cli.parse(Args)
    if not args.max_steps:
        raise UserError("--max-steps 0: a training needs a length, in updates")
    here = world.start(args.backend, flag=dataclasses.asdict(args), code=world.code_digests(__file__))
    mesh = make_mesh(args, here)
    shard, num_shards = data_shard(mesh)
    dtype = precision.pick(args.dtype, here.device)
    index, samples = environments.share(args.num_envs, args.rollout_steps, args.global_batch_size, shard, num_shards)
    envs = environments.Environments(args.env, index, args.seed, seed.EPISODE)
    filmed = environments.make(args.env, render_mode="rgb_array") if args.film else None
    terms = {"seed": args.seed, "env": args.env}

    path = run_dir.choose(args.out, args.name)
    model = make_model(args, envs)
    source, done = checkpoint.find(path, args.resume, terms, model)
    model = parallelize(args, model, mesh, here.device, dtype)
    if args.compile:
        model.compile()
    optimizer = make_optimizer(args, model)
    state = keymap.tensors(model, optimizer) | envs.tensors()
    checkpoint.load(source, state)
    envs.restore(state)
    plan = sampler.make_plan(samples, args.seed, 0, args.max_steps, samples, args.global_batch_size, num_shards, done)

    run_dir.claim(path)
    stopping = stop.Stop(args.deadline, plan.first_step)
    watching = watch.Watch(here, path, plan.first_step, args.hang_timeout)
    finite = guard.FiniteGuard(model, optimizer, None, args.max_skips)
    saving = saver.Saver(path, __file__, mesh, terms, args.keep, args.async_save)
    run = log.Run(path, __file__, args, here, plan, 0.0, dtype)

    last_step = min(plan.max_steps, args.stop_after or plan.max_steps)
    for step in range(plan.first_step + 1, last_step + 1):
        watching.step(step)
        lr = schedule.set_rate(optimizer, args.lr * schedule.warmup_cosine(step - 1, args.warmup_steps, plan.max_steps))
        sums, grad_norm = train_step(args, model, optimizer, finite, envs, step)
        run.add(sums)
        finite.after(step)
        last = stopping.after(step) or step == last_step
        if step % args.log_every == 0 or last:
            run.train(step, lr=lr, grad_norm=grad_norm.item(), data_wait_s=envs.wait_s, **envs.take_ended())
            finite.check()
        with run.paused():
            if args.check_every and (step % args.check_every == 0 or last):
                guard.check_replicas(model, step)
            if step % (args.eval_every or plan.max_steps) == 0 or step == last_step:
                run.validation(step, metrics.means(evaluate(args, model, shard, num_shards)))
                if filmed:
                    run.frames(step, "val/film", lambda: environments.film(filmed, model.module.act, args.seed))
            if step % (args.save_every or plan.max_steps) == 0 or last:
                saving.save(step, keymap.tensors(model, optimizer) | envs.tensors(), plan.position(step), last)
        if last:
            break
    run.finish(stopping.reason)
    world.finish()


if __name__ == "__main__":
    main()
