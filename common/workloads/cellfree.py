"""Users at random places of a square, and their channels to access points on a grid: a drop of a cell-free network.

The setup is that of Björnson and Sanguinetti 2020 (https://arxiv.org/abs/1903.10611). Each random number is a function
of the seed, the drop, the user and the access point, so a rank computes its own part alone.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch

from common import seed

SIDE = 1000.0  # m, of the square; a way that crosses one edge enters at the opposite one
HEIGHT = 10.0  # m, of an access point above the users
GAIN_AT_1M = -30.5  # dB
GAIN_PER_DECADE = -36.7  # dB, for ten times the distance
SHADOWING = 4.0  # dB, standard deviation
DECORRELATION = 9.0  # m, at which the correlation of two users' shadowing is 1/2
NOISE = -174 + 10 * math.log10(20e6) + 5  # dBm, of 20 MHz and a noise figure of 5 dB
ANGULAR_SPREAD = math.radians(15)  # standard deviation of the angles that a user's signal comes from
STATIONS = 4  # cells of the paper's cellular network; each pilot is used equally often in each of them
NODES = 48  # of Gauss-Hermite quadrature, which is then exact to rounding for the arrays here


class Sizes(NamedTuple):
    """The sizes of a network."""

    access_points: int
    antennas: int
    users: int
    pilots: int


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
