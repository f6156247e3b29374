from benchmarks import common


@common.operator_grid("ista", "ista_overcomplete")
def test_ista(timed, what, dtype, direction, provider):
    common.operator(timed, "ista", what, dtype, direction, provider)
