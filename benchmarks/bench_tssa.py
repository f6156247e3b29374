from benchmarks import common


@common.operator_grid("tssa")
def test_tssa(timed, what, dtype, direction, provider):
    common.operator(timed, "tssa", what, dtype, direction, provider)
