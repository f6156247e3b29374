"""The dictionaries of the tests of sparse coding."""

from tests.ops.common import randn

DIM = 6


def dictionary(dim=DIM, hidden=DIM, seed=1):
    return randn(dim, hidden, seed=seed) * dim**-0.5
