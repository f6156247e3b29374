"""What the mark ``turns`` leaves in every run: any two values of a test's parameters."""

import itertools

from tests.ops.conftest import left_out

SETS = [
    ("dtype", ["fp32", "bf16"]),
    (("backend", "device"), [("a", 0), ("a", 1)]),
    ("n, causal", [(1, 0), (1, 1), (2, 0)]),
]


def test_of_three_sets_any_two_values_meet():
    places = list(itertools.product(*(range(len(values)) for _, values in SETS)))
    kept = []
    for dtype, where, call in places:
        (backend, device), (n, causal) = SETS[1][1][where], SETS[2][1][call]
        params = {"dtype": SETS[0][1][dtype], "backend": backend, "device": device, "n": n, "causal": causal}
        if not left_out(params, SETS):
            kept.append((dtype, where, call))
    assert len(kept) == len(places) // 2
    for one, other in itertools.combinations(range(3), 2):
        assert {(p[one], p[other]) for p in kept} == {(p[one], p[other]) for p in places}
