"""The figures of results: what each line, cell and label is of."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from crate_kernels.bench import drawing, figures
from crate_kernels.bench.rows import BenchRow, Results

MACHINE = {"device": "a CPU", "gpu": False, "product_flops": {"fp32": 2e11, "bf16": 1e11}, "copy_bytes": 1e10}


def row(provider, seconds, shape=(1, 2, 128, 64), bench="mssa", direction="both", dtype="fp32", op="mssa", **kwargs):
    options = {"flops": 3e9, "bytes": 1e7, "seconds": [seconds] if seconds else [], "shape": list(shape)}
    return BenchRow(bench, op, f"n{shape[2]}", dtype, direction, provider, **(options | kwargs))


def swept(provider, seconds, sizes, **kwargs):
    return [
        row(provider, seconds(n), (1, 2, n, 64), "scaling", sweep="seqlen", peak_bytes=n * 2**20, **kwargs)
        for n in sizes
    ]


def values(line):
    return [list(map(float, each)) for each in (line.get_xdata(), line.get_ydata())]


def test_a_sweep_has_time_above_memory():
    sizes = [128, 256, 512, 1024]
    spent = row("eager", 0, (1, 2, 2048, 64), "scaling", sweep="seqlen", skipped="out of memory")
    found = [*swept("eager", lambda n: 1e-3 * (n / 128) ** 2, sizes), spent, *swept("cpp", lambda n: 1e-5 * n, sizes)]
    time, memory = figures.sweep(Results(MACHINE, found), "seqlen").axes
    assert [values(line) for line in time.lines] == [
        [sizes, pytest.approx([1, 4, 16, 64])],
        [[2048], pytest.approx([64])],
        [sizes, pytest.approx([1.28, 2.56, 5.12, 10.24])],
    ]
    assert values(memory.lines[0]) == [sizes, sizes]
    legend = [text.get_text() for text in time.get_legend().get_texts()]
    assert [text.rpartition(" ")[2] for text in legend] == ["[2.0]", "[1.0]"]
    assert [text.get_text() for text in time.texts] == ["out of\nmemory"]
    assert (time.get_ylabel(), memory.get_ylabel()) == ("ms", "MiB beyond inputs")
    assert {ax.get_xscale() for ax in (time, memory)} == {ax.get_yscale() for ax in (time, memory)} == {"log"}
    assert [time.lines[index].get_linewidth() for index in (0, 2)] == [1.2, 2.2]  # ours are thick
    assert time.get_title().startswith(figures._SWEEPS["mssa"].title)
    assert "a CPU" in time.figure.get_suptitle()


def test_memory_is_the_processs_where_that_is_more():
    rows = [
        row("cpp", 1.0, peak_bytes=peak, resident_bytes=own) for peak, own in ((1, 2), (4, 3), (None, 5), (6, None))
    ]
    assert figures.Series("cpp", [1, 2, 3, 4], rows, None).memory == [2.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1, 1, 1, 2, 4, 8], 1.0),  # of the largest half alone
        ([5, 1, 4, 16], 2.0),  # of three at least
        ([1, 2], None),
        ([1, 1, 0, 2], None),
    ],
)
def test_an_exponent_is_of_the_larger_sizes(values, wanted):
    sizes = [2**k for k in range(len(values))]
    found = figures.Series("cpp", sizes, [], None).exponent([float(value) for value in values])
    assert found == (None if wanted is None else pytest.approx(wanted))


def test_a_series_is_in_the_order_of_sizes():
    found = swept("cpp", lambda n: 1.0, [512, 128, 256]) + [
        row("cpp", 0, (1, 2, n, 64), "scaling", sweep="seqlen", skipped="out of memory") for n in (4096, 2048)
    ]
    found.append(row("eager", 0, bench="scaling", sweep="seqlen", skipped="not here"))
    (one,) = figures.series(Results(MACHINE, found), "mssa", "seqlen", "both")
    assert (one.provider, one.sizes, one.exhausted) == ("cpp", [128, 256, 512], 2048)
    assert figures.series(Results(MACHINE, found), "mssa", "seqlen", "forward") == []
    assert figures.series(Results(MACHINE, found), "mssa", "batch", "both") == []


def test_a_roofline_is_the_lower_of_copy_and_product():
    found = [
        row("cpp", 1e-1, direction="forward"),
        row("cpp", 1e-1, direction="both"),
        row("eager", 3e-1, direction="forward"),
        row("eager", 1e-1, direction="forward", dtype="bf16"),
        row("eager", 0, (1, 2, 9, 64), direction="forward"),
        row("eager", 1e-1, (1, 2, 8, 64), direction="forward", flops=None),
        row("eager", 1e-1, direction="forward", op="tssa", bench="tssa"),
    ]
    (ax,) = figures.roofline(Results(MACHINE, found)).axes
    roof, cpp, eager = ax.lines
    xs, ys = map(np.array, values(roof))
    np.testing.assert_allclose(ys, np.minimum(xs * 1e10, 2e11) / 1e12)
    assert values(cpp) == [[300.0], [pytest.approx(0.03)]]
    assert values(eager) == [[300.0], [pytest.approx(0.01)]]
    assert [line.get_linewidth() for line in (cpp, eager)] == [0, 0], "calls are points, not a curve"
    assert "fp32; a CPU" in ax.get_title()
    assert "bf16; a CPU" in figures.roofline(Results(MACHINE, found), "bf16").axes[0].get_title()
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_a_table_of_times_has_baselines_over_ours():
    found = [row("default", 1e-3), row("eager", 4e-3), row("sdpa", 5e-4), row("composite", 9.0)]
    found += [row("default", 1e-3, (1, 2, 64, 64)), row("eager", 32e-3, (1, 2, 64, 64))]
    found.append(row("eager", 7.0, direction="forward"))
    (ax,) = figures.heatmap(Results(MACHINE, found)).axes
    cells = {text.get_position(): (text.get_text(), text.get_color()) for text in ax.texts}
    assert cells == {(0, 0): ("4×", "black"), (1, 0): ("0.5×", "black"), (0, 1): ("32×", "white")}
    shown = np.ma.filled(ax.images[0].get_array(), np.nan)
    np.testing.assert_allclose(shown, np.log2([[4, 0.5], [32, np.nan]]))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["mssa n128 fp32", "mssa n64 fp32"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["eager", "SDPA"]
    assert ax.get_title(loc="right") == "Speedup over each baseline, forward and backward"
    names = figures.every(Results(MACHINE, found)).keys()
    assert names == {"speedup_both", "roofline_fp32"}, "forward has none of ours"


@pytest.mark.parametrize(("count", "parts", "window"), [(10, 5, 2), (11, 5, 2), (4, 60, 1), (7, 2, 3), (1, 1, 1)])
def test_a_smoothed_series_has_means_at_their_middles(count, parts, window):
    steps, means = drawing.smoothed([float(n) ** 2 for n in range(count)], parts)
    for index, (step, mean) in enumerate(zip(steps, means, strict=True)):
        own = range(index * window, (index + 1) * window)
        assert mean == pytest.approx(sum(n * n for n in own) / window)
        assert step == pytest.approx((own[0] + own[-1] + 1) / 2)
    assert len(means) == count // window


def test_axes_ticks_and_colour_bars():
    figure, made = drawing.axes(4, 3, 2, 3)
    assert isinstance(figure, Figure)
    assert made.shape == (2, 3)
    assert tuple(figure.get_size_inches()) == (4, 3)
    ax = made[0, 0]
    assert [name for name, spine in ax.spines.items() if spine.get_visible()] == ["left", "bottom"]
    drawing.bare(ax)
    assert not any(spine.get_visible() for spine in ax.spines.values())
    assert len(ax.get_xticks()) == len(ax.get_yticks()) == 0
    ax = made[1, 2]
    ax.plot([0, 1, 2], [0.0, 1.0, 2.0])
    drawing.whole_numbers(ax)
    assert all(tick == int(tick) for tick in ax.get_xticks())
    drawing.colour_bar(figure, ax, "share", 0.25, cmap="viridis")
    bar = figure.axes[-1]
    assert bar.get_ylabel() == "share"
    assert bar.get_ylim() == (0, 0.25)
    assert len({to_hex(colour) for colour in drawing.CYCLE}) == len(drawing.CYCLE) == 6
    assert drawing.png(figure).startswith(b"\x89PNG")
