"""Simulate the uplink of a cell-free massive MIMO network, its coherence blocks or its access points split over ranks.

Nothing is trained. A step is one drop of users at random places; its result is each user's spectral efficiency for
four levels of cooperation between the access points, with two kinds of combining. Setup, levels and formulas are those
of Björnson and Sanguinetti 2020 (https://arxiv.org/abs/1903.10611), sections II to IV; README.md writes them out.

    what                      --split users           --split antennas
    access points             all                     a part: antennas, estimates and combining vectors
    coherence blocks          a part, of every user   all
    spectral efficiencies     all, a replica          all, a replica

--split both has both on a mesh of two axes: --antenna-ranks ranks share the access points of each part of the blocks.

One step sends: among ranks that share access points, one all-reduce of two K x K Gram matrices and K numbers per
coherence block (the fronthaul of the centralised level), for --micro-batch-size blocks at a time; two all-reduces at
the end of the drop, for the other levels. Among ranks that share blocks, one all-reduce of sums at the end of the drop.

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
from common.state import checkpoint
from common.train import metrics, sampler

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

SIDE = 1000.0  # m, of the square; what leaves it at one edge comes back at the opposite one
HEIGHT = 10.0  # m, of an access point above the users
GAIN_AT_1M = -30.5  # dB
GAIN_PER_DECADE = -36.7  # dB, for ten times the distance
SHADOWING = 4.0  # dB, standard deviation
DECORRELATION = 9.0  # m, at which the correlation of two users' shadowing is 1/2
NOISE = -174 + 10 * math.log10(20e6) + 5  # dBm, of 20 MHz and a noise figure of 5 dB
ANGULAR_SPREAD = math.radians(15)  # standard deviation of the angles that a user's signal comes from
POWER = 100.0  # mW of each user
BLOCK = 200  # symbols of a coherence block
STATIONS = 4  # cells of the paper's cellular network; each pilot is used equally often in each of them
NODES = 48  # of Gauss-Hermite quadrature, which is then exact to rounding for the arrays here
SETUPS = {"paper": (100, 4, 40), "large": (128, 4, 1000)}  # access points, antennas of each, users
SERIES = tuple(f"l{level}_{kind}" for level in (4, 3, 2, 1) for kind in ("mmse", "mr"))


class Sizes(NamedTuple):
    """The sizes of a network."""

    access_points: int
    antennas: int
    users: int
    pilots: int


def sizes_of(args: Args) -> Sizes:
    """Those of the setup, or of the flags that replace them."""
    access_points, antennas, users = SETUPS[args.setup]
    if args.pilots >= BLOCK:
        raise UserError(f"--pilots {args.pilots} leaves no data in a block of {BLOCK} symbols: use fewer")
    return Sizes(args.access_points or access_points, args.antennas or antennas, args.users or users, args.pilots)


def complex_normal(*keys: int | np.ndarray) -> np.ndarray:
    """Circular complex normal numbers of variance 1, functions of the keys alone (Box and Muller 1958)."""
    return np.sqrt(-np.log1p(-seed.uniform(*keys, 0))) * np.exp(2j * np.pi * seed.uniform(*keys, 1))


def normal(*keys: int | np.ndarray) -> np.ndarray:
    """Normal numbers of variance 1, functions of the keys alone."""
    return math.sqrt(2) * complex_normal(*keys).real


def grid(number: int) -> np.ndarray:
    """Places (number, 2) in m, in the middles of equal rectangles, as nearly square as the number allows."""
    rows = max(n for n in range(1, math.isqrt(number) + 1) if number % n == 0)
    columns = number // rows
    x, y = np.meshgrid((np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows)
    return SIDE * np.stack([x.ravel(), y.ravel()], axis=-1)


def displacement(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The shortest way (..., 2) from one place to another, over the edges if that is shorter."""
    straight = end - start
    return straight - SIDE * np.round(straight / SIDE)


def gain_db(way: np.ndarray) -> np.ndarray:
    """Path gain over the noise in dB, without shadowing, for horizontal ways (..., 2) in m."""
    distance = np.sqrt(HEIGHT**2 + np.square(way).sum(-1))
    return GAIN_AT_1M + GAIN_PER_DECADE * np.log10(distance) - NOISE


class Drop(NamedTuple):
    """Users at their places.

    Attributes:
        places: (K, 2) in m.
        pilots: (K,) number of each user's pilot.
        roots: (K, K) lower-triangular root of the correlation between the users' shadowing.
    """

    places: np.ndarray
    pilots: np.ndarray
    roots: np.ndarray


def drop_users(run_seed: int, drop: int, sizes: Sizes) -> Drop:
    """Drop users at uniform places, one after the other, until each of four cells has its share of them.

    The pilots are those of the authors' program: the paper compares with a cellular network of four stations, each
    with as many users as there are pilots. A user belongs to the station with the best gain, shadowing included. A
    user of a full cell is dropped again elsewhere. Within a cell, users take the pilots in turn.
    """
    stations = grid(STATIONS)
    share = math.ceil(sizes.users / STATIONS)
    places = np.zeros((sizes.users, 2))
    pilots = np.zeros(sizes.users, int)
    roots = np.zeros((sizes.users, sizes.users))
    drawn = np.zeros((sizes.users, STATIONS))
    members = [0] * STATIONS
    for attempt in itertools.count():
        user = sum(members)
        if user == sizes.users:
            break
        keys = (run_seed, seed.PLACE, drop, attempt)
        place = SIDE * seed.uniform(*keys, np.arange(2))
        apart = np.linalg.norm(displacement(places[:user], place), axis=-1)
        # A new row of the Cholesky factor: given the shadowing of the users before, this one's is normal again.
        known = torch.from_numpy(roots[:user, :user])
        wanted = torch.from_numpy(2 ** (-apart / DECORRELATION))
        root = torch.linalg.solve_triangular(known, wanted[:, None], upper=False)[:, 0].numpy()
        spread = math.sqrt(max(0.0, 1 - root @ root))
        own = normal(*keys, 2 + np.arange(STATIONS))
        shadowing = SHADOWING * (root @ drawn[:user] + spread * own)
        station = int(np.argmax(gain_db(displacement(stations, place)) + shadowing))
        if members[station] < share:
            places[user] = place
            pilots[user] = members[station] % sizes.pilots
            roots[user, : user + 1] = [*root, spread]
            drawn[user] = own
            members[station] += 1
    return Drop(places, pilots, roots)


def local_scattering(angles: np.ndarray, antennas: int) -> np.ndarray:
    """Correlation (..., N, N) between an array's antennas, half a wavelength apart, of signals from around `angles`.

    The local scattering model (section II-A): the angles are normal around the direction of the user, in radians.
    """
    nodes, weights = np.polynomial.hermite.hermgauss(NODES)
    directions = np.sin(angles[..., None] + math.sqrt(2) * ANGULAR_SPREAD * nodes)
    lags = np.exp(1j * np.pi * np.arange(antennas)[:, None] * directions[..., None, :]) @ weights / math.sqrt(np.pi)
    both = np.concatenate([lags[..., :0:-1].conj(), lags], axis=-1)  # of lags 1 - N to N - 1
    return both[..., np.arange(antennas)[:, None] - np.arange(antennas) + antennas - 1]


def correlations(run_seed: int, number: int, drop: Drop, sizes: Sizes, mine: np.ndarray) -> np.ndarray:
    """Spatial correlation matrices (A, K, N, N) of all users at the access points `mine`, over the noise.

    Shadowing is correlated between users and independent between access points.
    """
    ways = displacement(grid(sizes.access_points)[mine, None], drop.places)
    drawn = normal(run_seed, seed.SHADOW, number, mine[:, None], np.arange(sizes.users))
    gains = 10 ** ((gain_db(ways) + SHADOWING * drawn @ drop.roots.T) / 10)
    return gains[..., None, None] * local_scattering(np.arctan2(ways[..., 1], ways[..., 0]), sizes.antennas)


def slots_of(pilots: np.ndarray, number: int) -> tuple[np.ndarray, int]:
    """A slot for each user, (K,), and the number P of slots of a pilot: the users of pilot t have slots t P to t P + P.

    If some pilots have fewer users than others, they have empty slots, in which nobody sends.
    """
    per_pilot = int(np.bincount(pilots, minlength=number).max())
    places = [int((pilots[:user] == pilot).sum()) for user, pilot in enumerate(pilots)]
    return pilots * per_pilot + places, per_pilot


class Network(NamedTuple):
    """What a drop's access points know: A of them with N antennas; T pilots with P slots each, T P = U.

    Attributes:
        numbers: (A,) of the access points.
        estimators: (A, T, P, N, N), from white noise, in the place of a received pilot, to estimates of channels.
        disturbance: (A, N, N), Z: covariance of the noise and of all users' estimation errors.
        whitening: (A, N, N), inverse of Z's Cholesky factor.
        empty: (U,), 1 for a slot without a user.
    """

    numbers: np.ndarray
    estimators: torch.Tensor
    disturbance: torch.Tensor
    whitening: torch.Tensor
    empty: torch.Tensor


def make_network(found: np.ndarray, slots: np.ndarray, per_pilot: int, sizes: Sizes, numbers: np.ndarray) -> Network:
    """MMSE estimation (section II-B) from correlations (A, K, N, N), in float64.

    With R the correlation of a user's channel and p the power, the received pilot has the covariance
    Psi = I + p tau sum R, over the users of the pilot. The estimate's is B = p tau R Psi^-1 R, the error's C = R - B.
    An estimate sqrt(p tau) R Psi^-1 y of a received pilot y = L w, with Psi = L L^H and w white, is
    sqrt(p tau) R L^-H w.
    """
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
    return Network(numbers, estimators, disturbance, whitening, empty)


def draw_estimates(run_seed: int, network: Network, blocks: np.ndarray) -> torch.Tensor:
    """Estimates of all channels (A, B, N, T, P) in the blocks of these numbers (B,).

    A draw depends on the block, the access point, the pilot and the antenna, and on no number of ranks.
    """
    _, pilots, _, antennas, _ = network.estimators.shape
    numbers = network.numbers[:, None, None, None]
    place = np.arange(pilots * antennas).reshape(antennas, pilots)
    white = torch.from_numpy(complex_normal(run_seed, seed.FADING, numbers, blocks[:, None, None], place))
    return torch.einsum("atpnm,abmt->abntp", network.estimators, white.to(network.estimators))


class Statistics(NamedTuple):
    """Sums over blocks of what the combining vectors v of A access points do, in float64.

    Attributes:
        pairs: (A, T, P, P), v_i^H h_j of users i and j of one pilot. For other pairs the mean is 0, by symmetry.
        total: (A, U), power of v^H y: all users' signals, and the noise.
        rate: (A, U), log2(1 + SINR) of an access point alone.
    """

    pairs: torch.Tensor
    total: torch.Tensor
    rate: torch.Tensor


def local_statistics(estimates: torch.Tensor, network: Network) -> list[Statistics]:
    """For L-MMSE and for MR combining, from the estimates (A, B, N, T, P) of some blocks.

    Given the estimates, the channels' errors are independent of them. So means over the errors are taken exactly, by
    the covariance Z in the place of draws: E|v^H h|^2 summed over users, and noise, is p |v^H Hhat|^2 + v^H Z v.
    """
    channels = estimates.flatten(3)
    received = POWER * channels @ channels.mH + network.disturbance[:, None]  # covariance, given the estimates
    found = []
    for vectors in (POWER * torch.linalg.solve(received, channels), channels):
        by_pilot = vectors.unflatten(-1, estimates.shape[3:])
        pairs = torch.einsum("abntp,abntq->abtpq", by_pilot.conj(), estimates)
        total = (vectors.conj() * (received @ vectors)).sum(2).real
        signal = POWER * pairs.diagonal(dim1=-2, dim2=-1).flatten(2).abs().square()
        rate = torch.log2(1 + signal / (at_least_rounding(total - signal, total) + network.empty))
        found.append(Statistics(pairs.sum(1).to(torch.complex128), total.sum(1).double(), rate.sum(1).double()))
    return found


def at_least_rounding(difference: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """What remains of a number when nearly all of it is subtracted is not less than its rounding."""
    return torch.maximum(difference, torch.finfo(of.dtype).eps * of)


class Grams(NamedTuple):
    """Sums over access points, of a block each: all that the centralised level needs of the estimates Hhat (B, N, U).

    Attributes:
        whitened: (B, U, U), Hhat^H Z^-1 Hhat.
        plain: (B, U, U), Hhat^H Hhat.
        disturbed: (B, U), the diagonal of Hhat^H Z Hhat.
    """

    whitened: torch.Tensor
    plain: torch.Tensor
    disturbed: torch.Tensor


def local_grams(estimates: torch.Tensor, network: Network) -> Grams:
    """The parts of the access points here. Z is block diagonal over access points, so the sum of the parts is exact."""
    channels = estimates.flatten(3)
    white = (network.whitening[:, None] @ channels).transpose(0, 1).flatten(1, 2)
    disturbed = (channels.conj() * (network.disturbance[:, None] @ channels)).real.sum((0, 2))
    plain = channels.transpose(0, 1).flatten(1, 2)  # (B, A N, U)
    return Grams(white.mH @ white, plain.mH @ plain, disturbed)


def best_sinr(gram: torch.Tensor) -> torch.Tensor:
    """SINR (..., n) of the best combination of signals with the Gram matrix (..., n, n), whitened.

    By the matrix inversion lemma, 1 / (1 + SINR_k) of MMSE combining is the k-th element on the diagonal of
    (I + p G)^-1. So n x n matrices are enough, however many antennas there are.
    """
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    root = torch.linalg.cholesky(identity + POWER * gram)
    inverse = torch.linalg.solve_triangular(root, identity.expand_as(root), upper=False)
    return 1 / inverse.abs().square().sum(-2) - 1  # the diagonal of L^-H L^-1


def centralised_rates(grams: Grams, empty: torch.Tensor) -> torch.Tensor:
    """Level 4 (section III-A), log2(1 + SINR) summed over blocks, (2, U): MMSE and MR combining over all antennas."""
    mmse = best_sinr(grams.whitened)
    signal = POWER * grams.plain.diagonal(dim1=-2, dim2=-1).abs().square()
    total = POWER * grams.plain.abs().square().sum(-1) + grams.disturbed
    mr = signal / (at_least_rounding(total - signal, total) + empty)
    return torch.log2(1 + torch.stack([mmse, mr])).sum(1).double()


class Means(NamedTuple):
    """Sums over access points of a drop's means: what levels 3 and 2 need.

    Attributes:
        pairs: (T, P, P), m: of v_i^H h_j.
        noise: (T, P), of D: power at an access point that is not due to the means m of its pilot.
        gram: (T, P, P, P), for user i: m_ij^* m_ik / D_i.
    """

    pairs: torch.Tensor
    noise: torch.Tensor
    gram: torch.Tensor


def local_means(found: Statistics, empty: torch.Tensor) -> Means:
    """The part of the access points here, from their statistics, divided by the number of blocks.

    Channels of different access points are independent. So the covariance of what they send for user i is a diagonal
    matrix D, plus p m_j m_j^H for each user j of the pilot, where m_j (A,) are means.
    """
    total = found.total.view(found.pairs.shape[:-1])
    noise = at_least_rounding(total - POWER * found.pairs.abs().square().sum(-1), total)
    scaled = found.pairs / (noise + empty.view(total.shape[1:]))[..., None]
    return Means(found.pairs.sum(0), noise.sum(0), torch.einsum("atij,atik->tijk", found.pairs.conj(), scaled))


def cooperative_rates(means: Means, empty: torch.Tensor) -> torch.Tensor:
    """Levels 3 and 2 (sections III-B and III-C), log2(1 + SINR), (2, U), by the use-and-then-forget bound.

    Level 3 weights the access points best, by large-scale fading decoding; level 2 weights them equally.
    """
    level3 = best_sinr(means.gram).diagonal(dim1=-2, dim2=-1)  # of the matrix for user i, the SINR of user i
    powers = POWER * means.pairs.abs().square()
    signal = powers.diagonal(dim1=-2, dim2=-1)
    level2 = signal / (powers.sum(-1) - signal + means.noise + empty.view_as(signal))
    return torch.log2(1 + torch.stack([level3, level2])).flatten(1)


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


def my_access_points(sizes: Sizes, mesh: DeviceMesh) -> np.ndarray:
    """Numbers of the access points of this rank, in near-equal parts."""
    return np.array_split(np.arange(sizes.access_points), mesh["antennas"].size())[mesh.get_local_rank("antennas")]


def pack(gram: torch.Tensor) -> torch.Tensor:
    """A Hermitian matrix (..., n, n) as as many real numbers: its real part below, its imaginary part above."""
    return gram.real.tril() + gram.imag.triu(1)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The Hermitian matrix that `pack` has packed."""
    lower = packed.tril()
    upper = packed.triu(1)
    return torch.complex(lower + lower.tril(-1).mT, upper - upper.mT)


def fronthaul(grams: Grams, mesh: DeviceMesh) -> Grams:
    """Add up the parts of all access points (ranks that share them): one all-reduce of U (2 U + 1) numbers a block."""
    sent = torch.cat([pack(grams.whitened), pack(grams.plain), grams.disturbed[..., None]], dim=-1)
    dist.all_reduce(sent, group=mesh.get_group("antennas"))
    count = grams.disturbed.shape[-1]
    whitened, plain, disturbed = sent.split([count, count, 1], dim=-1)
    return Grams(unpack(whitened), unpack(plain), disturbed[..., 0])


def add_up(tensors: list[torch.Tensor], mesh: DeviceMesh, axis: str) -> list[torch.Tensor]:
    """Add up tensors over an axis of the mesh (all its ranks), in one all-reduce."""
    real = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
    sent = torch.cat([one.flatten() for one in real])
    dist.all_reduce(sent, group=mesh.get_group(axis))
    found = [part.view_as(one) for part, one in zip(sent.split([one.numel() for one in real]), real, strict=True)]
    # A complex number begins at an even place of its storage, so each part gets a storage of its own.
    return [
        torch.view_as_complex(part.clone()) if one.is_complex() else part
        for part, one in zip(found, tensors, strict=True)
    ]


# --- 4 Step -----------------------------------------------------------------------------------------------


class Results(nn.Module):
    """The result of each drop. As a parameter, it is saved, and compared between the ranks, like a model."""

    def __init__(self, drops: int, users: int) -> None:
        """Make room for all drops."""
        super().__init__()
        self.spectral_efficiency = nn.Parameter(torch.zeros(drops, len(SERIES), users, dtype=torch.float64))


def make_drop(args: Args, mesh: DeviceMesh, device: torch.device, step: int) -> tuple[Network, np.ndarray]:
    """The access points of this rank in a drop, and the users' slots (K,)."""
    sizes = sizes_of(args)
    mine = my_access_points(sizes, mesh)
    drop = drop_users(args.seed, step, sizes)
    slots, per_pilot = slots_of(drop.pilots, sizes.pilots)
    exact = make_network(correlations(args.seed, step, drop, sizes, mine), slots, per_pilot, sizes, mine)
    real = precision.compute_dtype(args.dtype, device)
    estimators, disturbance, whitening = (one.to(device, real.to_complex()) for one in exact[1:4])
    return Network(mine, estimators, disturbance, whitening, exact.empty.to(device, real)), slots


def simulate(args: Args, plan: sampler.Plan, mesh: DeviceMesh, device: torch.device, step: int) -> torch.Tensor:
    """Spectral efficiencies (8, K) in bit/s/Hz of a drop, by SERIES and user, on every rank (all ranks take part)."""
    network, slots = make_drop(args, mesh, device, step)
    start, stop = plan.position(step - 1), plan.position(step)
    sums: list[torch.Tensor] = []
    for first, end in sampler.micro_batches(start, stop, plan.division, mesh.get_local_rank("users")):
        estimates = draw_estimates(args.seed, network, np.arange(first, end))
        level4 = centralised_rates(fronthaul(local_grams(estimates, network), mesh), network.empty)
        parts = [level4, *itertools.chain(*local_statistics(estimates, network))]
        sums = [one + part for one, part in zip(sums, parts, strict=True)] if sums else parts
    level4, *local = (one / (stop - start) for one in add_up(sums, mesh, "users"))
    mmse, mr = Statistics(*local[:3]), Statistics(*local[3:])
    empty = network.empty.double()
    means = add_up([*local_means(mmse, empty), *local_means(mr, empty)], mesh, "antennas")
    cooperative = torch.stack([cooperative_rates(Means(*some), empty) for some in (means[:3], means[3:])], dim=1)
    level1 = torch.stack([mmse.rate.amax(0), mr.rate.amax(0)])  # each user's best access point
    dist.all_reduce(level1, dist.ReduceOp.MAX, group=mesh.get_group("antennas"))
    rates = torch.cat([level4, *cooperative, level1])
    return (1 - args.pilots / BLOCK) * rates[:, torch.from_numpy(slots).to(device)]


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


def restore(found: checkpoint.Found, results: Results) -> None:
    """Fill in the drops that a checkpoint has, which may be of a run with more or fewer drops (all ranks)."""
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
    found = checkpoint.find(
        args.out, process.name, args.resume, seed=args.seed, network=list(sizes), blocks=args.global_batch_size
    )
    restore(found, results)
    plan = sampler.make_plan(division, 0, run_seed=args.seed, max_steps=args.max_steps, progress=found.progress)
    run = session.Session(args, __file__, world, mesh, found, plan, results, optimizer=None)
    every = results.spectral_efficiency
    for step in run.steps(mesh.get_local_rank("users")):
        every[step - 1] = simulate(args, plan, mesh, world.device, step)
        sums = {f"se/{name}": users.sum() for name, users in zip(SERIES, every[step - 1], strict=True)}
        sums["count"] = torch.full((), sizes.users, device=world.device)
        run.log_train(step, sums, grad_norm=None, data_wait_s=0.0)
        if run.evaluates(step):
            run.log_validation(step, evaluate(every[:step]))
            if world.rank == 0:
                write_cdf(found.run_dir, every[:step].cpu())
        run.save(step)
    run.finish()


if __name__ == "__main__":
    main()
