"""The spectral efficiencies of cellfree_mimo are those of the paper's formulas, on any ranks and however it is split.

Two oracles in plain NumPy. The first has the recipe's draws, and must agree within 1e-9: it writes out the whole
matrices over all antennas and all access points, one block and one user after the other. The second has its own draws,
of the channels themselves, and takes every mean over them, as the authors' program does: it must agree within the
error of the draws. It shares none of the recipe's identities.
"""

import itertools
import math
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import seed
from common.train import sampler
from common.workloads import cellfree
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from tests.harness import module, mutants, runner
from tests.harness.fault_case import checkpoints

MIMO = "cellfree_mimo"
P, SYMBOLS = 100.0, 200
DROPS, BLOCKS = 2, 10
# 9 access points, 10 users with 4, 3 and 3 on a pilot, 10 blocks in micro-batches of 2: little divides by the ranks.
SIZES = (9, 2, 10, 3)
FLAGS = (
    *("--access-points", "9", "--antennas", "2", "--users", "10", "--pilots", "3", "--dtype", "float64"),
    *("--max-steps", str(DROPS), "--global-batch-size", str(BLOCKS), "--micro-batch-size", "2"),
    *("--log-every", "1", "--eval-every", "1", "--save-every", "1", "--check-every", "1"),
)
SPLITS = (
    *((size, "users", "2") for size in (1, 2, 3, 4)),
    *((size, "antennas", "2") for size in (2, 3, 4)),
    *((2, "both", "2"), (2, "both", "1"), (4, "both", "2")),
)


@pytest.fixture(scope="module")
def mimo() -> ModuleType:
    return module.load(MIMO)


# --- the first oracle -------------------------------------------------------------------------------------


def gaussian(*keys: Any) -> np.ndarray:
    """Circular complex normal numbers by the recipe's keys."""
    first, second = seed.uniform(*keys, 0), seed.uniform(*keys, 1)
    return np.sqrt(-np.log1p(-first)) * np.exp(2j * np.pi * second)


def shortest(start: complex, end: complex) -> complex:
    """The way from one place to the nearest of the nine copies of another, in m."""
    copies = [end + 1000 * (x + 1j * y) for x in (-1, 0, 1) for y in (-1, 0, 1)]
    return min((copy - start for copy in copies), key=abs)


def middle(number: int, rows: int, columns: int) -> complex:
    """A place of the grid, counted along its rows."""
    return 1000 * ((number % columns + 0.5) / columns + 1j * (number // columns + 0.5) / rows)


def gain(way: complex) -> float:
    """In dB over the noise."""
    noise = -174 + 10 * math.log10(20e6) + 5
    return -30.5 - 36.7 * math.log10(math.sqrt(abs(way) ** 2 + 100)) - noise


def scattered(angle: float, antennas: int) -> np.ndarray:
    """Local scattering by summing over a fine grid of angles."""
    spread = math.radians(15)
    offsets = np.linspace(-10 * spread, 10 * spread, 4001)
    weights = np.exp(-(offsets**2) / (2 * spread**2))
    weights /= weights.sum()
    steer = np.exp(1j * np.pi * np.arange(antennas)[:, None] * np.sin(angle + offsets))
    return (steer * weights) @ steer.conj().T


def scene(access_points: int, antennas: int, users: int, pilots: int, drop: int) -> tuple[np.ndarray, list[int]]:
    """Correlation matrices (L, K, N, N) and the users' pilots, dropped one after the other as the authors do."""
    places: list[complex] = []
    own: list[list[float]] = []
    of_pilot: list[int] = []
    cells = [0] * 4

    def correlation(some: list[complex]) -> np.ndarray:
        return np.array([[2 ** (-abs(shortest(a, b)) / 9) for b in some] for a in some])

    for attempt in itertools.count():
        if len(places) == users:
            break
        keys = (0, seed.PLACE, drop, attempt)
        place = complex(*(1000 * seed.uniform(*keys, np.arange(2))))
        drawn = math.sqrt(2) * gaussian(*keys, np.arange(2, 6)).real
        root = np.linalg.cholesky(correlation([*places, place]))
        shadows = 4 * (root @ np.array([*own, drawn]))[-1]
        gains = [gain(shortest(middle(i, 2, 2), place)) + shadows[i] for i in range(4)]
        cell = int(np.argmax(gains))
        if cells[cell] < math.ceil(users / 4):
            places.append(place)
            own.append(list(drawn))
            of_pilot.append(cells[cell] % pilots)
            cells[cell] += 1
    root = np.linalg.cholesky(correlation(places))
    side = math.isqrt(access_points)
    matrices = np.zeros((access_points, users, antennas, antennas), complex)
    for point in range(access_points):
        drawn = math.sqrt(2) * gaussian(0, seed.SHADOW, drop, point, np.arange(users)).real
        for user, place in enumerate(places):
            way = shortest(middle(point, side, side), place)
            strength = gain(way) + 4 * (root @ drawn)[user]
            matrices[point, user] = 10 ** (strength / 10) * scattered(math.atan2(way.imag, way.real), antennas)
    return matrices, of_pilot


class Known(NamedTuple):
    """What is known of an access point before any block: root L and inverse of Psi by pilot, errors C by user, Z."""

    roots: list[np.ndarray]
    inverses: list[np.ndarray]
    errors: np.ndarray
    disturbance: np.ndarray


def know(matrices: np.ndarray, of_pilot: list[int], pilots: int) -> Known:
    """Of one access point, from (K, N, N)."""
    identity = np.eye(matrices.shape[-1])
    psi = [
        identity + P * pilots * sum((m for m, t in zip(matrices, of_pilot, strict=True) if t == pilot), 0 * identity)
        for pilot in range(pilots)
    ]
    inverses = [np.linalg.inv(one) for one in psi]
    errors = np.array([m - P * pilots * m @ inverses[t] @ m for m, t in zip(matrices, of_pilot, strict=True)])
    return Known([np.linalg.cholesky(one) for one in psi], inverses, errors, identity + P * errors.sum(0))


def log_rate(signal: float, rest: float) -> float:
    return math.log2(1 + signal / rest)


def combiners(estimates: np.ndarray, disturbance: np.ndarray) -> list[np.ndarray]:
    """MMSE and MR combining vectors, the columns of a matrix as `estimates`, (M, K)."""
    return [P * np.linalg.inv(P * estimates @ estimates.conj().T + disturbance) @ estimates, estimates]


def instantaneous(vector: np.ndarray, user: int, estimates: np.ndarray, disturbance: np.ndarray) -> float:
    """log2(1 + SINR) given the estimates (M, K), of which `disturbance` is the covariance of all else."""
    powers = P * np.abs(vector.conj() @ estimates) ** 2
    return log_rate(powers[user], powers.sum() - powers[user] + (vector.conj() @ disturbance @ vector).real)


def statistical(means: np.ndarray, squares: np.ndarray, noise: np.ndarray, user: int) -> tuple[float, float]:
    """log2(1 + SINR) of levels 3 and 2 by the use-and-then-forget bound.

    Args:
        means: (L, K), of v_l^H h_il.
        squares: (L, L, K), of what two access points get of a user, g g^H.
        noise: (L,), of |v_l|^2.
        user: whose combining vectors they are.
    """
    signal = means[:, user]
    rest = P * squares.sum(-1) - P * np.outer(signal, signal.conj()) + np.diag(noise)
    best = (signal.conj() @ np.linalg.solve(rest, signal)).real
    return math.log2(1 + P * best), log_rate(P * abs(signal.sum()) ** 2, rest.sum().real)


def oracle(sizes: tuple[int, int, int, int], drop: int, blocks: int) -> np.ndarray:
    """Spectral efficiencies (8, K) of a drop, levels 4 to 1, each with MMSE and MR combining."""
    access_points, antennas, users, pilots = sizes
    matrices, of_pilot = scene(*sizes, drop)
    known = [know(one, of_pilot, pilots) for one in matrices]
    rates = np.zeros((8, users))
    alone = np.zeros((2, access_points, users))
    means = np.zeros((2, users, access_points, users), complex)
    squares = np.zeros((2, users, access_points, access_points, users), complex)
    noise = np.zeros((2, users, access_points))
    whole = np.zeros((access_points * antennas,) * 2, complex)
    for point, one in enumerate(known):
        whole[point * antennas : (point + 1) * antennas, point * antennas : (point + 1) * antennas] = one.disturbance
    for block in range((drop - 1) * blocks, drop * blocks):
        estimates = np.zeros((access_points, antennas, users), complex)
        for point, user in itertools.product(range(access_points), range(users)):
            t = of_pilot[user]
            white = gaussian(0, seed.FADING, point, block, np.arange(antennas) * pilots + t)
            pilot = known[point].roots[t] @ white
            estimates[point, :, user] = math.sqrt(P * pilots) * matrices[point, user] @ known[point].inverses[t] @ pilot
        collected = estimates.reshape(-1, users)
        for kind, vectors in enumerate(combiners(collected, whole)):
            for user in range(users):
                rates[kind, user] += instantaneous(vectors[:, user], user, collected, whole) / blocks
        for point, one in enumerate(known):
            for kind, vectors in enumerate(combiners(estimates[point], one.disturbance)):
                for user in range(users):
                    v = vectors[:, user]
                    alone[kind, point, user] += instantaneous(v, user, estimates[point], one.disturbance) / blocks
                    got = v.conj() @ estimates[point]
                    unknown = np.array([(v.conj() @ error @ v).real for error in one.errors])
                    # The mean of v^H h is 0 for users of other pilots.
                    same = np.array([t == of_pilot[user] for t in of_pilot])
                    means[kind, user, point] += np.where(same, got, 0) / blocks
                    squares[kind, user, point, point] += (np.abs(got) ** 2 + unknown) / blocks
                    noise[kind, user, point] += np.linalg.norm(v) ** 2 / blocks
    for kind, user in itertools.product(range(2), range(users)):
        for one, other in itertools.permutations(range(access_points), 2):  # independent: the product of the means
            squares[kind, user, one, other] = means[kind, user, one] * means[kind, user, other].conj()
        found = statistical(means[kind, user], squares[kind, user], noise[kind, user], user)
        rates[2 + kind, user], rates[4 + kind, user] = found
    rates[6:] = alone.max(1)
    return (1 - pilots / SYMBOLS) * rates


@pytest.fixture(scope="module")
def wanted() -> np.ndarray:
    """(drops, 8, K)."""
    return np.stack([oracle(SIZES, drop, BLOCKS) for drop in range(1, DROPS + 1)])


# --- any number of ranks ----------------------------------------------------------------------------------


def results(run: Path) -> np.ndarray:
    """What the newest checkpoint of a run has, (drops, 8, K)."""
    (file,) = checkpoints(run)[max(checkpoints(run))].glob("*.safetensors")
    return load_file(file)["spectral_efficiency"].numpy()


def simulate(recipe: str | Path, size: int, out: Path, *flags: str, name: str = "run") -> np.ndarray:
    result = runner.run_recipe(recipe, size, *FLAGS, "--out", str(out), "--name", name, *flags)
    assert result.ok, str(result)
    return results(out / name)


def worst(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest relative difference."""
    return float((np.abs(found - wanted) / wanted).max())


@pytest.mark.parametrize(("size", "split", "antenna_ranks"), SPLITS)
def test_equal_to_the_formulas(size: int, split: str, antenna_ranks: str, wanted: np.ndarray, tmp_path: Path) -> None:
    found = simulate(MIMO, size, tmp_path, "--split", split, "--antenna-ranks", antenna_ranks)
    assert worst(found, wanted) < 1e-9
    curve = runner.records(tmp_path / "run", "se/l4_mmse")
    assert [*curve.values()] == pytest.approx(wanted[:, 0].mean(1), rel=1e-9)


def test_one_pilot_user_each_and_other_micro_batches(tmp_path: Path) -> None:
    """No contamination, one antenna; a rank computes its whole part at once."""
    flags = ("--users", "3", "--antennas", "1", "--access-points", "4", "--micro-batch-size", "0")
    found = simulate(MIMO, 2, tmp_path, "--split", "antennas", *flags)
    wanted = np.stack([oracle((4, 1, 3, 3), drop, BLOCKS) for drop in (1, 2)])
    assert worst(found, wanted) < 1e-9


REDUCE = "dist.all_reduce(sent, group=mesh.get_group('antennas'))"
SUM = "dist.all_reduce(sent, group=mesh.get_group(axis))"
DROPPED = "sent *= mesh.get_rank() != 1"
DROPPED_THERE = "sent *= mesh[axis].size() == 1 or mesh.get_rank() != 1"
MUTANTS = {  # what is wrong: how it is split, and where
    "a part is dropped from the fronthaul": ("antennas", {"fronthaul": {REDUCE: f"{DROPPED}\n{REDUCE}"}}),
    "a part is dropped from a drop's sums": ("users", {"add_up": {SUM: f"{DROPPED_THERE}\n{SUM}"}}),
    "a part is dropped from a drop's means": ("antennas", {"add_up": {SUM: f"{DROPPED_THERE}\n{SUM}"}}),
    "nothing is added up over the blocks' ranks": ("users", {"add_up": {SUM: "pass"}}),
    "all ranks take the first blocks": ("users", {"simulate": {"mesh.get_local_rank('users')": "0"}}),
    "blocks are counted from each part's first": (
        "users",
        {"simulate": {"np.arange(first, end)": "np.arange(end - first)"}},
    ),
    "ranks draw the same fading for their access points": (
        "antennas",
        {
            "draw_estimates": {
                "network.numbers[:, None, None, None]": "np.arange(len(network.numbers))[:, None, None, None]"
            }
        },
    ),
    "the best access point is the best of each rank": (
        "antennas",
        {"simulate": {"dist.all_reduce(level1, dist.ReduceOp.MAX, group=mesh.get_group('antennas'))": "pass"}},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name: str, wanted: np.ndarray, tmp_path: Path) -> None:
    split, changes = MUTANTS[name]
    path = mutants.mutate(MIMO, tmp_path, changes)
    flags = ("--check-every", "0", "--split", split)  # else ranks with different results stop it before
    assert worst(simulate(path, 2, tmp_path, *flags), wanted) > 1e-3


# --- the second oracle, and closed forms ------------------------------------------------------------------


@pytest.fixture
def mesh(group: None) -> DeviceMesh:
    """Of one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("users", "antennas"))


@torch.no_grad()
def alone(
    mimo: ModuleType, mesh: DeviceMesh, sizes: tuple[int, int, int, int], blocks: int, step: int = 1
) -> np.ndarray:
    """The recipe's spectral efficiencies (8, K) of a drop, in this process."""
    names = ("access_points", "antennas", "users", "pilots")
    args = mimo.Args(dtype="float64", **dict(zip(names, sizes, strict=True)))
    division = sampler.divide_batch(blocks, 200, 1)
    plan = sampler.make_plan(division, 0, run_seed=0, epochs=0, max_steps=step, progress={})
    return mimo.simulate(args, plan, mesh, torch.device("cpu"), step).numpy()


def sampled(sizes: tuple[int, int, int, int], drop: int, blocks: int, generator: np.random.Generator) -> np.ndarray:
    """Spectral efficiencies (8, K), with the channels drawn and every mean taken over the draws."""
    access_points, antennas, users, pilots = sizes
    matrices, of_pilot = scene(*sizes, drop)
    known = [know(one, of_pilot, pilots) for one in matrices]
    disturbance = np.array([one.disturbance for one in known])

    def draw(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)) / math.sqrt(2)

    channels = np.einsum("lknm,blmk->blnk", np.linalg.cholesky(matrices), draw(blocks, access_points, antennas, users))
    estimates = np.zeros_like(channels)
    for t in range(pilots):
        mates = [user for user in range(users) if of_pilot[user] == t]
        received = math.sqrt(P * pilots) * channels[..., mates].sum(-1) + draw(blocks, access_points, antennas)
        for user, point in itertools.product(mates, range(access_points)):
            filtered = math.sqrt(P * pilots) * matrices[point, user] @ known[point].inverses[t]
            estimates[:, point, :, user] = received[:, point] @ filtered.T
    collected = estimates.reshape(blocks, -1, users)
    whole = np.zeros((access_points * antennas,) * 2, complex)
    for point in range(access_points):
        whole[point * antennas : (point + 1) * antennas, point * antennas : (point + 1) * antennas] = disturbance[point]
    rates = np.zeros((8, users))

    def rate(vectors: np.ndarray, others: np.ndarray, rest: np.ndarray) -> np.ndarray:
        powers = P * np.abs(vectors.conj().swapaxes(-1, -2) @ others) ** 2
        signal = np.diagonal(powers, axis1=-2, axis2=-1)
        noise = np.einsum("...nk,...nm,...mk->...k", vectors.conj(), rest, vectors).real
        return np.log2(1 + signal / (powers.sum(-1) - signal + noise)).mean(0)

    local = np.linalg.inv(P * estimates @ estimates.conj().swapaxes(-1, -2) + disturbance) @ (P * estimates)
    central = np.linalg.inv(P * collected @ collected.conj().swapaxes(-1, -2) + whole) @ (P * collected)
    for kind, (of_all, of_each) in enumerate(((central, local), (collected, estimates))):
        rates[kind] = rate(of_all, collected, whole)
        rates[6 + kind] = rate(of_each, estimates, disturbance).max(0)
        got = of_each.conj().swapaxes(-1, -2) @ channels  # (B, L, K, K)
        for user in range(users):
            mine = got[:, :, user]
            squares = np.einsum("bli,bmi->lmi", mine, mine.conj()) / blocks
            noise = (np.abs(of_each[..., user]) ** 2).sum(-1).mean(0)
            rates[2 + kind, user], rates[4 + kind, user] = statistical(mine.mean(0), squares, noise, user)
    return (1 - pilots / SYMBOLS) * rates


def test_equal_to_drawn_channels(mimo: ModuleType, mesh: DeviceMesh) -> None:
    """Within four standard errors for each of 48 numbers, and about one on average; with another pilot it is not."""
    sizes, parts, blocks = (4, 2, 6, 2), 8, 500
    found = alone(mimo, mesh, sizes, parts * blocks)
    generator = np.random.default_rng(0)
    drawn = np.stack([sampled(sizes, 1, blocks, generator) for _ in range(parts)])
    error = drawn.std(0, ddof=1) / math.sqrt(parts)
    # The recipe's own draws have an error, too; and levels 3 and 2 of 500 draws have a bias, of about 1 / 500.
    off = np.abs(drawn.mean(0) - found) / (math.sqrt(2) * error + 4e-3)
    assert off.max() < 4, off
    assert math.sqrt((off**2).mean()) < 1.5
    assert (error < 0.06).all()
    other = alone(mimo, mesh, (4, 2, 6, 3), parts * blocks)
    assert (np.abs(drawn.mean(0) - other) / (math.sqrt(2) * error + 4e-3)).max() > 5


def exponential_integral(x: float) -> float:
    """exp(x) E1(x), the integral of exp(-t) / (t + x) over t from 0, by substituting t = x (exp(s) - 1)."""
    s = np.linspace(0.0, math.log1p(60 / x), 200_001)
    return float(np.trapezoid(np.exp(-x * np.expm1(s)), s))


def test_one_user(mimo: ModuleType, mesh: DeviceMesh) -> None:
    """One user, one antenna, so uncorrelated fading and no contamination: every level in closed form.

    With an exponential variable E_l of mean 1 for each access point, level 4 has the SINR sum c_l E_l, with
    c = p gamma / (1 + p (beta - gamma)). 40,000 blocks: a standard error of 0.01 bit/s/Hz at most.
    """
    sizes, blocks = (4, 1, 1, 1), 40_000
    found = alone(mimo, mesh, sizes, blocks)[:, 0] / (1 - 1 / SYMBOLS)
    beta = scene(*sizes, 1)[0][:, 0, 0, 0].real
    gamma = P * beta**2 / (1 + P * beta)
    c = P * gamma / (1 + P * (beta - gamma))
    each = np.array([exponential_integral(1 / one) for one in c])  # mean of log(1 + c E)
    weights = np.array([math.prod(one / (one - other) for other in c if other != one) for one in c])
    level4 = (weights * each).sum() / math.log(2)
    level1 = each.max() / math.log(2)
    b = 1 - np.array([exponential_integral(1 / one) / one for one in c])  # mean of c E / (1 + c E)
    levels = {
        "l4_mmse": level4,
        "l3_mmse": math.log2(1 + (b / (1 - b)).sum()),
        "l3_mr": math.log2(1 + (P * gamma / (1 + P * beta)).sum()),
        "l2_mmse": log_rate(b.sum() ** 2, (b * (1 - b)).sum()),
        "l2_mr": log_rate(P * gamma.sum() ** 2, (gamma * (1 + P * beta)).sum()),
        "l1_mmse": level1,
        "l1_mr": level1,
    }
    named = dict(zip(mimo.SERIES, found, strict=True))
    assert {name: named[name] for name in levels} == pytest.approx(levels, abs=0.05)
    assert named["l4_mr"] < named["l4_mmse"] + 1e-9


def test_contamination_in_closed_form(mimo: ModuleType, mesh: DeviceMesh) -> None:
    """MR combining at levels 3 and 2: all means are traces of matrices, also between users of one pilot."""
    sizes, blocks = (4, 2, 8, 2), 5_000
    users, pilots = sizes[2:]
    found = alone(mimo, mesh, sizes, blocks)
    matrices, of_pilot = scene(*sizes, 1)
    known = [know(one, of_pilot, pilots) for one in matrices]
    for user in range(users):
        means = np.zeros((4, users), complex)
        squares = np.zeros((4, 4, users), complex)
        noise = np.zeros(4)
        for point, other in itertools.product(range(4), range(users)):
            mine, theirs = matrices[point, user], matrices[point, other]
            shared = P * pilots * theirs @ known[point].inverses[of_pilot[user]] @ mine  # of estimates, if of one pilot
            own = P * pilots * mine @ known[point].inverses[of_pilot[user]] @ mine
            means[point, other] = np.trace(shared) * (of_pilot[other] == of_pilot[user])
            noise[point] = np.trace(own).real
            squares[point, point, other] = np.trace(own @ theirs) + abs(means[point, other]) ** 2
        for one, other in itertools.permutations(range(4), 2):
            squares[one, other] = means[one] * means[other].conj()
        level3, level2 = statistical(means, squares, noise, user)
        factor = 1 - pilots / SYMBOLS
        assert found[3, user] == pytest.approx(factor * level3, abs=0.05)
        assert found[5, user] == pytest.approx(factor * level2, abs=0.05)


# --- the setup --------------------------------------------------------------------------------------------


def test_paper_setup(mimo: ModuleType) -> None:
    sizes = mimo.sizes_of(mimo.Args())
    assert sizes == (100, 4, 40, 10)
    assert mimo.sizes_of(mimo.Args(setup="large")) == (128, 4, 1000, 10)
    grid = cellfree.grid(100)
    assert sorted({x for x, _ in grid}) == [50 + 100 * i for i in range(10)]
    assert len({tuple(place) for place in cellfree.grid(128)}) == 128
    assert len({x for x, _ in cellfree.grid(128)}) == 16
    drops = [cellfree.drop_users(0, step, sizes) for step in range(1, 30)]
    assert all(np.bincount(drop.pilots).tolist() == [4] * 10 for drop in drops)
    places = np.concatenate([drop.places for drop in drops]) / 1000
    assert places.min() > 0
    assert places.max() < 1
    assert places.mean(0) == pytest.approx([0.5, 0.5], abs=0.03)
    assert places.std(0) == pytest.approx([12**-0.5] * 2, abs=0.02)
    for drop in drops[:3]:
        root = drop.roots
        apart = np.abs(cellfree.displacement(drop.places[:, None], drop.places))
        assert apart.max() <= 500
        assert root @ root.T == pytest.approx(2 ** (-np.linalg.norm(apart, axis=-1) / 9), abs=1e-12)


def test_places_and_matrices_are_the_oracles() -> None:
    """Wrap-around, shadowing, pilots, scattering with four antennas."""
    sizes = cellfree.Sizes(9, 4, 10, 3)
    drop = cellfree.drop_users(0, 1, sizes)
    matrices, of_pilot = scene(*sizes, 1)
    assert drop.pilots.tolist() == of_pilot
    found = cellfree.correlations(0, 1, drop, sizes, np.arange(9))
    assert np.abs(found / matrices - 1).max() < 1e-8
    assert (cellfree.correlations(0, 1, drop, sizes, np.arange(3, 5)) == found[3:5]).all()


def test_shadowing_has_its_statistics() -> None:
    """4 dB, correlated between users by their distance and independent between access points."""
    sizes = cellfree.Sizes(400, 1, 2, 2)
    places = np.array([[500.0, 500.0], [509.0, 500.0]])
    root = np.array([[1, 0], [0.5, math.sqrt(0.75)]])
    drop = cellfree.Drop(places, np.arange(2), root)
    shadows = []
    for number in range(20):
        gains = cellfree.correlations(0, number, drop, sizes, np.arange(400))[..., 0, 0].real
        ways = cellfree.displacement(cellfree.grid(400)[:, None], places)
        shadows.append(10 * np.log10(gains) - cellfree.gain_db(ways))
    users = np.concatenate(shadows).T
    assert users.std(1) == pytest.approx([4, 4], rel=0.03)
    assert np.corrcoef(users)[0, 1] == pytest.approx(0.5, abs=0.03)
    assert np.abs(np.corrcoef(np.stack(shadows)[..., 0].T)[0, 1:]).mean() < 0.25  # of 20 draws: 0.18 by chance


# --- the fronthaul ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_fronthaul_is_the_theory(mimo: ModuleType, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block sends K (2 K + 1) numbers, in one all-reduce for a micro-batch; a drop's end, what README.md says."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, *_, **__: sent.append((tensor.numel(), tensor.element_size()))
    )
    args = mimo.Args(access_points=9, global_batch_size=12, micro_batch_size=3)
    plan = sampler.make_plan(sampler.divide_batch(12, 3, 1), 0, run_seed=0, epochs=0, max_steps=1, progress={})
    mimo.simulate(args, plan, mesh, torch.device("cpu"), 1)
    users, mates, points = 40, 4, 9
    blocks = [(3 * users * (2 * users + 1), 4)] * 4
    sums = 2 * users + 2 * points * users * (2 * mates + 2)
    means = 2 * users * (2 * mates + 1 + 2 * mates**2)
    assert sent == [*blocks, (sums, 8), (means, 8), (2 * users, 8)]


def test_packed_matrices_come_back(mimo: ModuleType) -> None:
    rows = torch.randn(3, 5, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    gram = rows.mH @ rows
    assert mimo.pack(gram).dtype == torch.float64
    assert torch.equal(mimo.unpack(mimo.pack(gram)), (gram + gram.mH) / 2) or torch.allclose(
        mimo.unpack(mimo.pack(gram)), gram, rtol=0, atol=1e-15
    )


# --- a run like any other ---------------------------------------------------------------------------------


def test_resume_is_exact(tmp_path: Path) -> None:
    """On the same ranks bit for bit; on others, split in another way, and with more drops than before, within 1e-9."""
    whole = simulate(MIMO, 2, tmp_path, "--max-steps", "4", name="whole")
    for stop in ("1", "3", "0"):
        parts = simulate(MIMO, 2, tmp_path, "--max-steps", "4", "--stop-after", stop, name="parts")
    assert (parts == whole).all()
    simulate(MIMO, 2, tmp_path, "--max-steps", "2", "--split", "antennas", name="other")
    other = simulate(MIMO, 3, tmp_path, "--max-steps", "4", name="other")
    assert worst(other, whole) < 1e-9
    third = str(tmp_path / "whole" / "checkpoints" / "step_00000003")
    assert worst(simulate(MIMO, 1, tmp_path, "--max-steps", "4", "--resume", third), whole) < 1e-9


def test_results_are_written(mimo: ModuleType, wanted: np.ndarray, tmp_path: Path) -> None:
    """The distribution over users of all drops as a table and as a picture; progress and TensorBoard on the way."""
    result = runner.run_recipe(MIMO, 2, *FLAGS, "--out", str(tmp_path), "--name", "run")
    assert result.ok, str(result)
    head, *rows = (tmp_path / "run" / "cdf.csv").read_text().splitlines()
    assert head.split(",") == ["cdf", *mimo.SERIES]
    table = np.array([[float(cell) for cell in row.split(",")] for row in rows])
    count = DROPS * SIZES[2]
    assert table[:, 0] == pytest.approx(np.arange(1, count + 1) / count, abs=1e-6)
    assert table[:, 1:] == pytest.approx(np.sort(wanted.swapaxes(0, 1).reshape(8, -1)).T, rel=1e-9)
    assert (tmp_path / "run" / "cdf.png").read_bytes().startswith(b"\x89PNG")
    assert [*tmp_path.glob("run/events.out.tfevents.*")]
    median = runner.records(tmp_path / "run", "se_median/l4_mmse")[DROPS]
    assert median == pytest.approx(np.quantile(wanted[:, 0], 0.5), rel=1e-9)
    assert "learning rate" not in str(result), "nothing is trained"


REFUSED = {
    "ranks and axes": (
        2,
        ["--split", "both", "--antenna-ranks", "3"],
        "--antenna-ranks 3 must divide the number of ranks (2)",
    ),
    "access points": (2, ["--split", "antennas", "--access-points", "1"], "2 ranks cannot share 1 access points"),
    "pilots": (1, ["--pilots", "200"], "--pilots 200 leaves no data in a block of 200 symbols"),
    "blocks": (2, ["--global-batch-size", "1"], "--global-batch-size 1 does not divide by 2 data-parallel ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input(case: str, tmp_path: Path) -> None:
    size, flags, message = REFUSED[case]
    result = runner.run_recipe(MIMO, size, *FLAGS, "--out", str(tmp_path / "out"), *flags)
    assert all(result.codes), str(result)
    assert result.outputs[0].count(message) == 1, str(result)
    assert "Traceback" not in str(result)
    assert not (tmp_path / "out").exists()


def test_checkpoint_of_another_network(tmp_path: Path) -> None:
    simulate(MIMO, 1, tmp_path)
    flags = (*FLAGS, "--out", str(tmp_path), "--name", "run", "--users", "8")
    result = runner.run_recipe(MIMO, 1, *flags)
    assert "is of another network" in str(result)
    assert "(drops, 8, 8); use the --setup and --users" in str(result)
    assert result.codes == [2]
