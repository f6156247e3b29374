from benchmarks import common


@common.operator_grid("mssa")
def test_mssa(timed, what, dtype, direction, provider):
    common.operator(timed, "mssa", what, dtype, direction, provider)
