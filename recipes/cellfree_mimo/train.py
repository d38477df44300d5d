"""Simulate the uplink of a cell-free massive MIMO network, its coherence blocks or its access points split over ranks.

Why a simulation among trainings? It proves that common/ is general: a run without a model, data and gradients starts,
stops, resumes, logs and saves like every training. And its all-reduce stands for a real message, the fronthaul, by
which the access points of such a network cooperate.

A step is one drop of users at random places. Its result is each user's spectral efficiency for four levels of
cooperation between the access points, with two kinds of combining. Setup, levels and formulas are those of Björnson and
Sanguinetti 2020 (https://arxiv.org/abs/1903.10611), sections II to IV; README.md writes them out.

    what                      --split users           --split antennas
    access points             all                     a part: antennas, estimates and combining vectors
    coherence blocks          a part, of every user   all
    spectral efficiencies     all, a replica          all, a replica

--split both has both on a mesh of two axes: --antenna-ranks ranks share the access points of each part of the blocks.

Ranks that share access points send one all-reduce of two K x K Gram matrices and K numbers per coherence block (the
fronthaul of level 4), for --micro-batch-size blocks at a time. At the end of the drop they send two more, for the other
levels. Ranks that share blocks send one all-reduce of sums, at the end of the drop.

    python recipes/cellfree_mimo/train.py                                               # one process
    bash launch/torchrun.sh recipes/cellfree_mimo --split antennas                      # one per GPU, else 2 on the CPU
    bash launch/slurm.sh -N2 --gpus-per-node=4 recipes/cellfree_mimo --split both --setup large

Measured: 200 drops of the paper's network give a median of 7.85 bit/s/Hz for level 4 with MMSE combining, 5.54 for
level 3 and 5.46 for small cells with L-MMSE (docs/measured/mimo.md: Intel Xeon, 2 cores, gloo, torch 2.15.0,
2026-11-23). GPUs and NCCL: not run.

Base: none.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common import UserError, bounds, manifest, precision, ranks, seed, session
from common.run import cli, exits
from common.run.process import Process, World
from common.state import checkpoint, start
from common.train import metrics, sampler
from common.workloads import cellfree

# --- 1 Arguments ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Args(session.RunArgs):
    """Simulate the uplink of a cell-free massive MIMO network."""

    # run
    out: str = f"runs/{Path(__file__).parent.name}"  # folder that holds the runs
    max_steps: bounds.PositiveInt = 200  # drops of users at random places
    log_every: bounds.PositiveInt = 5  # drops between log lines
    eval_every: bounds.NonNegativeInt = 50  # drops between distributions of all drops so far; 0 for one at the end
    save_every: bounds.NonNegativeInt = 50  # drops between checkpoints; 0 for one at the end
    # network
    setup: Literal["paper", "large"] = "paper"  # 100 access points and 40 users, or 128 and 1,000
    access_points: bounds.NonNegativeInt = 0  # on a grid; 0 for the setup's
    antennas: bounds.NonNegativeInt = 0  # of an access point; 0 for the setup's, 4
    users: bounds.NonNegativeInt = 0  # of a drop; 0 for the setup's
    pilots: bounds.PositiveInt = 10  # symbols of a block's 200 that are pilots, and number of orthogonal pilots
    global_batch_size: bounds.PositiveInt = 100  # coherence blocks of a drop, over all ranks: the log's samples
    micro_batch_size: bounds.Smaller = 5  # blocks that a rank computes and sends at once; 0 for its whole part
    dtype: Literal["float32", "float64"] = "float32"  # of the blocks; what a drop needs once is always float64
    # strategy
    split: Literal["users", "antennas", "both"] = "users"  # what each rank has a part of: the blocks, or access points
    antenna_ranks: bounds.PositiveInt = 2  # with --split both: ranks that share the access points


# --- 2 Workload -------------------------------------------------------------------------------------------

POWER = 100.0  # mW of each user
BLOCK = 200  # symbols of a coherence block
SETUPS = {"paper": (100, 4, 40), "large": (128, 4, 1000)}  # access points, antennas of each, users
SERIES = tuple(f"l{level}_{kind}" for level in (4, 3, 2, 1) for kind in ("mmse", "mr"))


def sizes_of(args: Args) -> cellfree.Sizes:
    """Sizes of the setup, or of the flags that replace them."""
    access_points, antennas, users = SETUPS[args.setup]
    if args.pilots >= BLOCK:
        raise UserError(f"--pilots {args.pilots} leaves no data in a block of {BLOCK} symbols: use fewer")
    return cellfree.Sizes(
        args.access_points or access_points, args.antennas or antennas, args.users or users, args.pilots
    )


def slots_of(pilots: np.ndarray, number: int) -> tuple[np.ndarray, int]:
    """A slot for each user, (K,), and the number P of slots of a pilot: the users of pilot t have slots t P to t P + P.

    If some pilots have fewer users than others, they have empty slots, in which nobody sends.
    """
    per_pilot = int(np.bincount(pilots, minlength=number).max())
    places = [int((pilots[:user] == pilot).sum()) for user, pilot in enumerate(pilots)]
    return pilots * per_pilot + places, per_pilot


class Network(NamedTuple):
    """Knowledge of a drop's access points: A of them with N antennas; T pilots with P slots each, T P = U.

    Attributes:
        slots: (K,) of the users; see `slots_of`.
        numbers: (A,) of the access points.
        estimators: (A, T, P, N, N), from white noise, in the place of a received pilot, to estimates of channels.
        disturbance: (A, N, N), Z: covariance of the noise and of all users' estimation errors.
        whitening: (A, N, N), inverse of Z's Cholesky factor.
        empty: (U,), 1 for a slot without a user.
    """

    slots: np.ndarray
    numbers: np.ndarray
    estimators: torch.Tensor
    disturbance: torch.Tensor
    whitening: torch.Tensor
    empty: torch.Tensor


def make_network(found: np.ndarray, pilots: np.ndarray, sizes: cellfree.Sizes, numbers: np.ndarray) -> Network:
    """MMSE estimation (section II-B) from correlations (A, K, N, N) and the users' pilots (K,), in float64.

    With R the correlation of a user's channel and p the power, the received pilot has the covariance
    Psi = I + p tau sum R, over the users of the pilot. The estimate's is B = p tau R Psi^-1 R, the error's C = R - B.
    An estimate sqrt(p tau) R Psi^-1 y of a received pilot y = L w, with Psi = L L^H and w white, is
    sqrt(p tau) R L^-H w.
    """
    slots, per_pilot = slots_of(pilots, sizes.pilots)
    count = sizes.pilots * per_pilot
    every = torch.zeros(len(found), count, *found.shape[2:], dtype=torch.complex128)
    every[:, slots] = torch.from_numpy(found)
    every = every.unflatten(1, (sizes.pilots, per_pilot))
    identity = torch.eye(found.shape[-1], dtype=every.dtype)
    energy = POWER * sizes.pilots
    root = torch.linalg.cholesky(identity + energy * every.sum(2))[:, :, None]
    # X = R L^-H solves L X^H = R, because R is its own conjugate transpose.
    estimators = math.sqrt(energy) * torch.linalg.solve_triangular(root, every, upper=False).mH
    errors = every - estimators @ estimators.mH
    disturbance = identity + POWER * errors.sum((1, 2))
    whitening = torch.linalg.solve_triangular(torch.linalg.cholesky(disturbance), identity, upper=False)
    empty = torch.ones(count, dtype=torch.float64)
    empty[slots] = 0
    return Network(slots, numbers, estimators, disturbance, whitening, empty)


def draw_estimates(run_seed: int, network: Network, blocks: np.ndarray) -> torch.Tensor:
    """Estimates of all channels (A, B, N, T, P) in the blocks of these numbers (B,).

    Each random number depends on the block, the access point, the pilot and the antenna, and on no number of ranks.
    """
    _, pilots, _, antennas, _ = network.estimators.shape
    numbers = network.numbers[:, None, None, None]
    place = np.arange(pilots * antennas).reshape(antennas, pilots)
    white = torch.from_numpy(cellfree.complex_normal(run_seed, seed.FADING, numbers, blocks[:, None, None], place))
    return torch.einsum("atpnm,abmt->abntp", network.estimators, white.to(network.estimators))


class Statistics(NamedTuple):
    """Sums over blocks for the combining vectors v of A access points, L-MMSE and MR, in float64.

    Attributes:
        pairs: (2, A, T, P, P), v_i^H h_j of users i and j of one pilot. For other pairs the mean is 0, by symmetry.
        total: (2, A, U), power of v^H y: all users' signals, and the noise.
        rate: (2, A, U), log2(1 + SINR) of an access point alone.
    """

    pairs: torch.Tensor
    total: torch.Tensor
    rate: torch.Tensor


def local_statistics(estimates: torch.Tensor, network: Network) -> Statistics:
    """Statistics of the access points here, from the estimates (A, B, N, T, P) of some blocks.

    Given the estimates, the channels' errors are independent of them. So means over the errors are taken exactly, by
    the covariance Z in the place of draws: E|v^H h|^2 summed over users, and noise, is p |v^H Hhat|^2 + v^H Z v.
    """
    channels = estimates.flatten(3)
    received = POWER * channels @ channels.mH + network.disturbance[:, None]  # covariance, given the estimates
    kinds = []
    for vectors in (POWER * torch.linalg.solve(received, channels), channels):  # (A, B, N, U)
        by_pilot = vectors.unflatten(-1, estimates.shape[3:])
        pairs = torch.einsum("abntp,abntq->abtpq", by_pilot.conj(), estimates)
        total = (vectors.conj() * (received @ vectors)).sum(2).real
        signal = POWER * pairs.diagonal(dim1=-2, dim2=-1).flatten(2).abs().square()
        rate = torch.log2(1 + signal / (at_least_rounding(total - signal, total) + network.empty))
        kinds.append((pairs.sum(1).to(torch.complex128), total.sum(1).double(), rate.sum(1).double()))
    return Statistics(*map(torch.stack, zip(*kinds, strict=True)))


def at_least_rounding(difference: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """A small difference of two large numbers, or the rounding error of these, if that is larger."""
    return torch.maximum(difference, torch.finfo(of.dtype).eps * of)


def local_grams(estimates: torch.Tensor, network: Network) -> torch.Tensor:
    """Level 4 needs no more of the estimates Hhat (B, A N, U) than these Gram matrices, packed, (B, U, 2 U + 1).

    They are Hhat^H Z^-1 Hhat, then Hhat^H Hhat, and in the last column the diagonal of Hhat^H Z Hhat. This rank has the
    parts of its access points. Z is block diagonal over access points, so the sum of all parts is exact.
    """
    channels = estimates.flatten(3)
    white = (network.whitening[:, None] @ channels).transpose(0, 1).flatten(1, 2)
    plain = channels.transpose(0, 1).flatten(1, 2)  # (B, A N, U)
    disturbed = (channels.conj() * (network.disturbance[:, None] @ channels)).real.sum((0, 2))
    return torch.cat([pack(white.mH @ white), pack(plain.mH @ plain), disturbed[..., None]], dim=-1)


def best_sinr(gram: torch.Tensor) -> torch.Tensor:
    """SINR (..., n) of the best combination of signals with the Gram matrix (..., n, n), whitened.

    By the matrix inversion lemma, 1 / (1 + SINR_k) of MMSE combining is the k-th element on the diagonal of
    (I + p G)^-1. So n x n matrices are enough, however many antennas there are.
    """
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    root = torch.linalg.cholesky(identity + POWER * gram)
    inverse = torch.linalg.solve_triangular(root, identity.expand_as(root), upper=False)
    return 1 / inverse.abs().square().sum(-2) - 1  # the diagonal of L^-H L^-1


def centralised_rates(grams: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Level 4 (section III-A), log2(1 + SINR) summed over blocks, (2, U): MMSE and MR combining over all antennas."""
    whitened, plain, disturbed = grams.split([len(empty), len(empty), 1], dim=-1)
    mmse = best_sinr(unpack(whitened))
    powers = POWER * unpack(plain).abs().square()
    signal = powers.diagonal(dim1=-2, dim2=-1)
    total = powers.sum(-1) + disturbed[..., 0]
    mr = signal / (at_least_rounding(total - signal, total) + empty)
    return torch.log2(1 + torch.stack([mmse, mr])).sum(1).double()


class Means(NamedTuple):
    """Sums over access points of a drop's means, for levels 3 and 2; the first dim is L-MMSE and MR.

    Attributes:
        pairs: (2, T, P, P), m: of v_i^H h_j.
        noise: (2, T, P), of D: power at an access point that is not due to the means m of its pilot.
        gram: (2, T, P, P, P), for user i: m_ij^* m_il / D_i.
    """

    pairs: torch.Tensor
    noise: torch.Tensor
    gram: torch.Tensor


def local_means(found: Statistics, empty: torch.Tensor) -> Means:
    """The part of the access points here, from their statistics, divided by the number of blocks.

    Channels of different access points are independent. So the covariance of their signals for user i is a diagonal
    matrix D, plus p m_j m_j^H for each user j of the pilot, where m_j (A,) are means.
    """
    total = found.total.view(found.pairs.shape[:-1])
    noise = at_least_rounding(total - POWER * found.pairs.abs().square().sum(-1), total)
    scaled = found.pairs / (noise + empty.view(total.shape[2:]))[..., None]
    return Means(found.pairs.sum(1), noise.sum(1), torch.einsum("katij,katil->ktijl", found.pairs.conj(), scaled))


def cooperative_rates(means: Means, empty: torch.Tensor) -> torch.Tensor:
    """Levels 3 and 2 (sections III-B and III-C), log2(1 + SINR), (2, 2, U), by the use-and-then-forget bound.

    Level 3 weights the access points best, by large-scale fading decoding; level 2 weights them equally.
    """
    level3 = best_sinr(means.gram).diagonal(dim1=-2, dim2=-1)  # of the matrix for user i, the SINR of user i
    powers = POWER * means.pairs.abs().square()
    signal = powers.diagonal(dim1=-2, dim2=-1)
    level2 = signal / (powers.sum(-1) - signal + means.noise + empty.view(signal.shape[1:]))
    return torch.log2(1 + torch.stack([level3, level2])).flatten(2)


# --- 3 Strategy -------------------------------------------------------------------------------------------


def make_mesh(args: Args, world: World) -> DeviceMesh:
    """The ranks and their axes: over the coherence blocks of all users, and over the access points."""
    antennas = {"users": 1, "antennas": world.size, "both": args.antenna_ranks}[args.split]
    cli.check_divides("--antenna-ranks", antennas, {"the number of ranks": world.size})
    access_points = sizes_of(args).access_points
    if access_points < antennas:
        raise UserError(f"{antennas} ranks cannot share {access_points} access points: raise --access-points")
    shape = (world.size // antennas, antennas)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("users", "antennas"))


def my_access_points(sizes: cellfree.Sizes, mesh: DeviceMesh) -> np.ndarray:
    """Numbers of the access points of this rank, in near-equal parts."""
    return np.array_split(np.arange(sizes.access_points), mesh["antennas"].size())[mesh.get_local_rank("antennas")]


def pack(gram: torch.Tensor) -> torch.Tensor:
    """A Hermitian matrix (..., n, n) in n x n real numbers: its real part below, its imaginary part above."""
    return gram.real.tril() + gram.imag.triu(1)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The Hermitian matrix behind the result of `pack`."""
    lower = packed.tril()
    upper = packed.triu(1)
    return torch.complex(lower + lower.tril(-1).mT, upper - upper.mT)


def fronthaul(sent: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Add up the parts of all access points (ranks that share them): one all-reduce of U (2 U + 1) numbers a block."""
    dist.all_reduce(sent, group=mesh.get_group("antennas"))
    return sent


def add_up(tensors: Iterable[torch.Tensor], mesh: DeviceMesh, axis: str) -> None:
    """Add up tensors in place over an axis of the mesh (all its ranks), in one all-reduce."""
    real = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]  # share memory with them
    sent = torch.cat([one.flatten() for one in real])
    dist.all_reduce(sent, group=mesh.get_group(axis))
    for one, part in zip(real, sent.split([one.numel() for one in real]), strict=True):
        one.copy_(part.view_as(one))


# --- 4 Step -----------------------------------------------------------------------------------------------


class Results(nn.Module):
    """The result of each drop. As a parameter, it is saved, and compared between the ranks, like a model."""

    def __init__(self, drops: int, users: int) -> None:
        """Make room for all drops."""
        super().__init__()
        self.spectral_efficiency = nn.Parameter(torch.zeros(drops, len(SERIES), users, dtype=torch.float64))


def make_drop(args: Args, mesh: DeviceMesh, device: torch.device, step: int) -> Network:
    """The access points of this rank in a drop."""
    sizes = sizes_of(args)
    mine = my_access_points(sizes, mesh)
    drop = cellfree.drop_users(args.seed, step, sizes)
    exact = make_network(cellfree.correlations(args.seed, step, drop, sizes, mine), drop.pilots, sizes, mine)
    real = precision.compute_dtype(args.dtype, device)
    estimators, disturbance, whitening = (one.to(device, real.to_complex()) for one in exact[2:5])
    return Network(exact.slots, mine, estimators, disturbance, whitening, exact.empty.to(device, real))


def simulate(args: Args, plan: sampler.Plan, mesh: DeviceMesh, device: torch.device, step: int) -> torch.Tensor:
    """Spectral efficiencies (8, K) in bit/s/Hz of a drop, by SERIES and user, on every rank (all ranks take part)."""
    network = make_drop(args, mesh, device, step)
    start, stop = plan.position(step - 1), plan.position(step)
    sums: list[torch.Tensor] = []
    for first, end in sampler.micro_batches(start, stop, plan.division, mesh.get_local_rank("users")):
        estimates = draw_estimates(args.seed, network, np.arange(first, end))
        level4 = centralised_rates(fronthaul(local_grams(estimates, network), mesh), network.empty)
        parts = [level4, *local_statistics(estimates, network)]
        sums = [one + part for one, part in zip(sums, parts, strict=True)] if sums else parts
    add_up(sums, mesh, "users")
    level4, *local = (one / (stop - start) for one in sums)
    statistics = Statistics(*local)
    empty = network.empty.double()
    means = local_means(statistics, empty)
    add_up(means, mesh, "antennas")
    level1 = statistics.rate.amax(1)  # each user's best access point
    dist.all_reduce(level1, dist.ReduceOp.MAX, group=mesh.get_group("antennas"))
    rates = torch.cat([level4, *cooperative_rates(means, empty), level1])
    return (1 - args.pilots / BLOCK) * rates[:, torch.from_numpy(network.slots).to(device)]


def evaluate(found: torch.Tensor) -> metrics.Sums:
    """Median and 5 % point over the users of all drops so far, (S, 8, K); all ranks have the same, and count alike."""
    users = found.transpose(0, 1).flatten(1)
    sums = {"count": torch.ones((), device=found.device)}
    for name, part in (("median", 0.5), ("p5", 0.05)):
        points = torch.from_numpy(np.quantile(users.cpu().numpy(), part, axis=1)).to(found.device)
        sums |= {f"se_{name}/{series}": point for series, point in zip(SERIES, points, strict=True)}
    return sums


def write_cdf(folder: Path, found: torch.Tensor) -> None:
    """Write the distribution of the users' spectral efficiency, (S, 8, K), as cdf.csv and cdf.png (rank 0)."""
    users = found.transpose(0, 1).flatten(1).sort().values.T.tolist()
    lines = [",".join([f"{(i + 1) / len(users):.6f}", *map(repr, row)]) for i, row in enumerate(users)]
    try:
        manifest.replace(folder / "cdf.csv", "\n".join([",".join(["cdf", *SERIES]), *lines, ""]))
        draw_cdf(folder / "cdf.png", np.array(users).T)
    except OSError as error:
        ranks.print0(f"warning: the distribution was not written to {folder}: {error}")
    except ImportError:
        ranks.print0(f"note: {folder / 'cdf.csv'} is not drawn: pip install matplotlib")


def draw_cdf(path: Path, users: np.ndarray) -> None:
    """Draw the sorted spectral efficiencies (8, S K)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    height = np.arange(1, users.shape[1] + 1) / users.shape[1]
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("mmse", "mr"), strict=True):
        for series, values in zip(SERIES, users, strict=True):
            if series.endswith(f"_{kind}"):
                axes.plot(values, height, label=f"level {series[1]}, {kind.upper()}")
        axes.set(xlabel="spectral efficiency of a user, bit/s/Hz", ylabel="CDF", xlim=(0, None), ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def restore(found: start.Found, results: Results) -> None:
    """Fill in the drops of a checkpoint, which may be of a run with more or fewer drops (all ranks)."""
    if found.path is None:
        return
    ((name, parameter),) = results.named_parameters()
    saved = checkpoint.tensors_in(found.path)
    if name not in saved or saved[name].shape[1:] != parameter.shape[1:]:
        sizes = {other: tuple(entry.shape) for other, entry in itertools.islice(saved.items(), 3)}
        raise UserError(
            f"checkpoint {found.path} is of another network: it has {sizes}, and this run needs {name} of the shape "
            f"(drops, {len(SERIES)}, {parameter.shape[2]}); use the --setup and --users that it was made with"
        )
    every = torch.zeros(saved[name].shape, dtype=parameter.dtype)
    checkpoint.load(found.path, {name: every})
    done = min(found.progress["step"], len(parameter))
    parameter.data[:done] = every[:done]


# --- 5 Main -----------------------------------------------------------------------------------------------


@exits.entry
@torch.no_grad()
def main(process: Process) -> None:
    """Simulate all drops, from the newest checkpoint or from the start."""
    args = cli.parse(Args)
    # Stops if the ranks run with different flags or code.
    world = session.join(args, __file__, process)
    mesh = make_mesh(args, world)
    sizes = sizes_of(args)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, mesh["users"].size())
    results = Results(args.max_steps, sizes.users).to(world.device)
    found = start.find(
        args.out, process.name, args.resume, seed=args.seed, network=list(sizes), blocks=args.global_batch_size
    )
    restore(found, results)
    plan = sampler.make_plan(division, 0, run_seed=args.seed, max_steps=args.max_steps, progress=found.progress)
    run = session.Session(args, world, mesh, found, plan, results, optimizer=None)
    every = results.spectral_efficiency
    for step in run.steps(mesh.get_local_rank("users")):
        every[step - 1] = simulate(args, plan, mesh, world.device, step)
        sums = {f"se/{name}": users.sum() for name, users in zip(SERIES, every[step - 1], strict=True)}
        sums["count"] = torch.full((), sizes.users, device=world.device)
        run.log_train(step, sums, grad_norm=None, data_wait_s=0.0)
        if run.evaluates(step):
            run.log_validation(step, evaluate(every[:step]))
            if world.rank == 0:
                write_cdf(found.place.run_dir, every[:step].cpu())
        run.save(step)
    run.finish()


if __name__ == "__main__":
    main()
