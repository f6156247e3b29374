"""What a run prints and draws, compared with the numbers in its ``metrics.json``."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_hex

from crate_kernels.bench.drawing import BLUE, CYCLE, GREEN, GREY, ORANGE, SKY

# Title, labels and legend of each axes that has any, in order; numbers in them are checked below.
TEXTS = {
    "denoise": [
        ["|layer|SNR|N=128, K=2, p=32|Theorem 3.1: $(1+\\eta\\tau)^\\ell$|to its left, checked to rounding",
         "|layer|largest relative departure from the line|N=128, K=2, p=32, float64|N=128, K=2, p=32, float32 (cpp)"],
        ["softmax, unscaled|layer|SNR|noise 0.2|noise 0.5", "softmax, scaled|layer|", "softmax, normalised|layer|"],
    ],
    "icl": [
        ["linear regression|examples in context|squared error / variance of the answers|least squares|AoT-MSSA|AoT-MHSA"
         "|transformer",
         "sparse regression|examples in context||least squares|least squares on the weights that count|AoT-MSSA"
         "|AoT-MHSA|transformer"],
        ["linear regression|step|training loss|AoT-MSSA|AoT-MHSA|transformer",
         "sparse regression|step|training loss|AoT-MSSA|AoT-MHSA|transformer"],
    ],
    "redunet": [
        ["|layer|nats|$\\Delta R$, training|$R$, training|$R^c$, training|$\\Delta R$, test|$R$, test|$R^c$, test"],
        ["test samples|||class 0|class 1|class 2", "after the last layer||"],
        ["a digit||", "in polar coordinates|angle|radius", "|layer|nats|$\\Delta R$|$R$|$R^c$",
         "cosines of features|sample, by class|sample, by class"],
    ],
    "layers": [
        ["|layer|coding rate $R^c$ after MSSA (nats)", "|layer|share of nonzeros after ISTA",
         "before training|epoch 1"],
        ["layer 1\n{}% nonzero|channel|token (digit 2)", "layer 2\n{}% nonzero|channel|",
         "||code / largest of the layer"],
        ["layer 1||", "layer 2||", "||absolute cosine; a block is a head"],
        ["1\n{}%||", "2\n{}%||"],
    ],
    "classify": [
        ["|step|test accuracy|3 nearest neighbours", "|test accuracy after the last step|"],
    ],
    "mae": [
        ["||digit", "||what is shown", "||filled in", "||prediction\nof all patches"],
        ["|step|squared error on removed patches|training|test|mean training digit",
         "|test accuracy of a linear probe|"],
    ],
    "language": [
        ["training|step|bits a byte",
         "test|step||causal CRATE: {}|causal CRATE, overcomplete: {}|ToST: {}|AoT, MSSA: {}|AoT, MHSA: {}|GPT-2: {}"],
    ],
}  # fmt: skip


def check(subcommand, figures, tables, facts):
    """Require that the figures and the tables of a quick run show its numbers."""
    said = [_texts(figure) for figure in figures]
    backend = facts["backend"] or ""
    wanted = [[text.replace("(cpp)", f"({backend})") for text in axes] for axes in TEXTS[subcommand]]
    for ours, each in zip(said, wanted, strict=True):
        assert [re.sub(r"\d+(?=%)|(?<=: )\d\.\d\d", "{}", text) for text in ours] == each
    (table,) = tables
    globals()[f"_{subcommand}"](figures, table, facts)


def _at_the_edge(figure):
    """Require that what one of a row's or column's axes says, of which the others say nothing, stands at its edge."""
    places = [(ax, ax.get_subplotspec()) for ax in figure.axes]
    places = [(ax, spec.rowspan.start, spec.colspan.start) for ax, spec in places if spec is not None]
    for text, along, across, edge in (("ylabel", 1, 2, min), ("title", 2, 1, min), ("xlabel", 2, 1, max)):
        for line in {place[along] for place in places}:
            every = [place for place in places if place[along] == line]
            labelled = [place[across] for place in every if getattr(place[0], f"get_{text}")()]
            assert len(labelled) != 1 or labelled == [edge(place[across] for place in every)]


def _texts(figure):
    found = []
    _at_the_edge(figure)
    for ax in figure.axes:
        legend = ax.get_legend()
        names = [text.get_text() for text in legend.get_texts()] if legend else []
        parts = [ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), *names]
        if any(parts):
            found.append("|".join(parts))
    return found + ["|".join(text.get_text() for text in legend.get_texts()) for legend in figure.legends]


def _curve(line, values, start, colour=None, step=1):
    xs, ys = (np.asarray(each, dtype=float) for each in (line.get_xdata(), line.get_ydata()))
    assert ys == pytest.approx(np.asarray(values, dtype=float), rel=1e-6)
    assert xs == pytest.approx(start + step * np.arange(len(ys)))
    if colour is not None:
        assert to_hex(line.get_color()) == colour


def _whole(*axes):
    """Require ticks at integers alone, however few are shown."""
    for ax in axes:
        ax.set_xlim(0, 1.5)
        assert all(tick == int(tick) for tick in ax.get_xticks())


def _band(filled, low, high):
    """Require that a filled band runs over layers 1, 2, .. from ``low`` to ``high``."""
    xs, ys = filled.get_paths()[0].vertices.T
    for index, (bottom, top) in enumerate(zip(low, high, strict=True)):
        here = ys[np.isclose(xs, index + 1)]
        assert (here.min(), here.max()) == (pytest.approx(bottom), pytest.approx(top))


def _denoise(figures, table, facts):
    (entry,) = facts["theorem"]
    theorem, softmax = figures
    curve, off = theorem.axes
    _curve(curve.lines[0], [entry["snr"][0] * 1.3**layer for layer in range(11)], 0, BLUE)
    _curve(curve.lines[1], entry["snr"], 0, BLUE)
    _curve(off.lines[0], entry["departure"][1:], 1, BLUE)
    _curve(off.lines[1], entry["departure_float32"][1:], 1, BLUE)
    assert [ax.lines[2].get_xdata()[0] for ax in (curve, off)] == [4.5, 4.5]
    assert {ax.get_yscale() for ax in (curve, off)} == {"log"}
    found = {(each["form"], each["noise"]): each["snr"] for each in facts["softmax"]}
    for ax, form in zip(softmax.axes, ("unscaled", "scaled", "normalised"), strict=True):
        for line, noise, colour in zip(ax.lines, (0.2, 0.5), CYCLE, strict=False):
            _curve(line, found[form, noise], 0, colour)
    _whole(*theorem.axes, *softmax.axes)
    rows = iter(table)
    assert next(rows) == ["threshold 0.6, N=128, K=2, p=32: SNR growth a layer, layers 1-4", "1.3000", "1.3000"]
    assert next(rows) == ["  largest departure, float64", "0", f"{max(entry['departure'][:5]):.1e}"]
    rough = f"{max(entry['departure_float32'][:5]):.1e}"
    assert next(rows) == [f"  largest departure, float32, {facts['backend']}", "-", rough]
    broken = next(layer for layer, each in enumerate(entry["departure"]) if each > 1e-12)
    assert next(rows) == ["  conditions of the theorem first broken at", "-", f"layer {broken}"]
    for (form, noise), snr in found.items():
        first, last = {0.2: (1.55, 2.62), 0.5: (1.63, 2.73)}[noise]
        peak = max(range(4), key=lambda layer: snr[layer])
        name = f"softmax {form}, noise {noise}: SNR before, highest, after 3 layers"
        measured = f"{snr[0]:.2f}, {snr[peak]:.2f} at layer {peak}, {snr[3]:.2f}"
        assert next(rows) == [name, f"{first}, rising, {last}", measured]
        assert next(rows) == ["  growth in all", f"{last / first:.2f}", f"{snr[3] / snr[0]:.2f}"]


def _icl(figures, table, facts):
    error, learning = figures
    rows = {row[0]: row[1:] for row in table}
    count = 0
    for ax, losses, task, exact in zip(error.axes, learning.axes, ("linear", "sparse"), (2, 1), strict=True):
        found = facts["tasks"][task]
        measured = {**found["floors"], **found["models"]}
        for line, values in zip(ax.lines, measured.values(), strict=True):
            _curve(line, values, 0)
        assert [line.get_linestyle() for line in ax.lines] == [*["--", ":"][: len(found["floors"])], "-", "-", "--"]
        assert ax.get_ylim() == (-0.05, 1.6)
        _whole(ax)
        for line, values, colour in zip(losses.lines, found["losses"].values(), CYCLE, strict=False):
            _curve(line, values, 0.5, colour)
        assert losses.get_ylim()[0] == 0
        for name, values in measured.items():
            marks = ", ".join(f"{values[k]:.3f} after {k}" for k in (0, exact, 4))
            published = {"AoT-MSSA": "near the transformer", "AoT-MHSA": "near the transformer"}
            said = published.get(name, "0 once solvable" if name == "least squares" else "-")
            assert rows[f"{task}: {name}"] == [said, marks]
            count += 1
        assert found["parameters"].keys() == found["seconds"].keys() == found["models"].keys()
    assert count == len(table)


def _redunet(figures, table, facts):
    rates, sphere, turned = figures
    spheres, polar = facts["gaussians"], facts["digits"]
    (ax,) = rates.axes
    colours = (GREEN, BLUE, ORANGE)
    for lines, name in ((ax.lines[:3], "train_rates"), (ax.lines[3:], "test_rates")):
        for column, (line, colour) in enumerate(zip(lines, colours, strict=True)):
            _curve(line, [rate[column] for rate in spheres[name]], 0, colour)
    assert ax.get_xscale() == "symlog"
    for ax in sphere.axes:
        assert [len(each.get_offsets()) for each in ax.collections if len(each.get_offsets()) == 20] == [20] * 3
    digit, picture, layers, cosines, _ = turned.axes
    assert digit.images[0].get_array().shape == (8, 8)
    assert picture.images[0].get_array().shape == (15, 16)
    assert cosines.images[0].get_array().shape == (16, 16)
    assert np.diag(cosines.images[0].get_array().data) == pytest.approx(1)
    for column, (line, colour) in enumerate(zip(layers.lines, colours, strict=True)):
        _curve(line, [rate[column] for rate in polar["rates"]], 0, colour)

    def span(rates):
        return f"{rates[0][0]:.3f} to {rates[-1][0]:.3f}"

    def falls(rates):
        gains = [after[0] - before[0] for before, after in pairwise(rates)]
        return f"falls at {sum(gain < 0 for gain in gains)} of {len(gains)} layers"

    values = [span(spheres["train_rates"]), falls(spheres["train_rates"]), span(spheres["test_rates"])]
    values += [f"{spheres['test_accuracy']:.4f}", span(polar["rates"]), falls(polar["rates"])]
    for what in ("", "features_", "pixels_"):
        values.append(f"{polar[f'{what}upright']:.3f} / {polar[f'{what}turned']:.3f}")
    assert [row[2] for row in table] == [*values, f"{polar['invariance']:.1e}"]
    assert [row[0].split(",")[0].strip() for row in table] == [
        "Gaussians", "of which", "test", "classes as the last layer estimates them", "Digits", "of which",
        *["accuracy upright / turned"] * 3, "features of a shifted digit",
    ]  # fmt: skip


def _layers(figures, table, facts):
    epochs, heatmaps, subspaces, principal = figures
    seen = facts["epochs"]
    for ax, key in zip(epochs.axes, ("coding_rate", "nonzeros"), strict=True):
        for line, band, epoch in zip(ax.lines, ax.collections, ("0", "1"), strict=True):
            mean, spread = (np.array(seen[epoch][name]) for name in (key, f"{key}_std"))
            _curve(line, mean, 1)
            _band(band, mean - spread, mean + spread)
        assert ax.get_ylim()[0] == 0
    _whole(*epochs.axes)
    for layer, ax in enumerate(heatmaps.axes[:2]):
        code = ax.images[0].get_array()
        assert code.shape == (17, 16)
        assert code.max() == pytest.approx(1)
        assert f"\n{100 * (code != 0).mean():.0f}% nonzero" in ax.get_title(), layer
    for ax in subspaces.axes[:2]:
        assert np.diag(ax.images[0].get_array().data) == pytest.approx(1, abs=1e-5)
        assert list(ax.get_xticks()) == list(ax.get_yticks()) == [-0.5, 7.5, 15.5]
    for layer, share in enumerate(facts["principal_components_explain"]):
        assert f"{layer + 1}\n{100 * share:.0f}%" == principal.axes[1 + layer].get_title()
    assert [ax.images[0].get_array().shape for ax in principal.axes] == [(8, 8), (4, 4, 3), (4, 4, 3)] * 2
    first, last = seen["0"], seen["1"]

    def series(values, places):
        return ", ".join(f"{value:.{places}f}" for value in values)

    falls = {key: "2 of 2-2" if last[key][1] < last[key][0] else "none of 2-2" for key in ("coding_rate", "nonzeros")}
    overlap = sum(last["coherence_between_heads"]) / 2
    assert [row[2] for row in table] == [
        f"{first['accuracy']:.4f} before, {last['accuracy']:.4f} after training",
        series(first["coding_rate"], 1), series(last["coding_rate"], 1), falls["coding_rate"],
        series(first["nonzeros"], 3), series(last["nonzeros"], 3), falls["nonzeros"],
        series(first["added_by_mssa"], 2), series(last["added_by_mssa"], 2),
        f"{overlap:.2f} (random: 0.50)",
    ]  # fmt: skip


def _classify(figures, table, facts):
    ((curves, bars),) = (figure.axes for figure in figures)
    found, neighbours = facts["models"], facts["nearest_neighbours"]
    assert len(found) == 9
    for index, (line, bar, (name, each)) in enumerate(zip(curves.lines, bars.patches, found.items(), strict=False)):
        _curve(line, [value for _, value in each["accuracies"]], 3)
        assert each["accuracies"][-1] == [3, each["accuracy"]]
        assert bar.get_width() == pytest.approx(each["accuracy"])
        assert to_hex(bar.get_facecolor()) == to_hex(line.get_color())
        assert bars.texts[index].get_text() == f"{each['accuracy']:.3f}"
        assert bars.get_yticklabels()[index].get_text() == name
        assert table[index][0] == name
        assert table[index][2:] == [f"{each['accuracy']:.4f}", f"{each['parameters']:,}", f"{each['seconds']:.0f} s"]
    assert list(curves.lines[-1].get_ydata()) == list(bars.lines[-1].get_xdata()) == [neighbours] * 2
    assert curves.get_ylim() == bars.get_xlim() == (0, 1)
    assert bars.get_ylim()[0] > bars.get_ylim()[1]  # the first model is on top
    assert table[9:] == [["3 nearest neighbours, on pixels", "-", f"{neighbours:.4f}", "-", "-"]]
    published = {row[0]: row[1] for row in table if row[1] != "-"}
    assert {name: text[:5] for name, text in published.items()} == {
        "CRATE": "70.8%", "CRATE-alpha": "81.2%", "ToST": "77.9%"
    }  # fmt: skip


def _mae(figures, table, facts):
    reconstruction, learning = figures
    grid = np.array([ax.images[0].get_array() for ax in reconstruction.axes]).reshape(4, 2, 8, 8)
    digit, seen, both, prediction = grid
    patches = (seen != digit).reshape(2, 4, 2, 4, 2).any((2, 4))
    assert patches.sum((1, 2)).tolist() == [12, 12]
    hidden = patches.repeat(2, 1).repeat(2, 2)
    assert np.unique(seen[hidden]).tolist() == [pytest.approx((digit.min() + digit.max()) / 2)]
    assert np.array_equal(both, np.where(hidden, prediction, digit))
    curve, bars = learning.axes
    _curve(curve.lines[0], facts["losses"], 0.5, BLUE)
    assert curve.lines[1].get_ydata()[-1] == facts["error"]
    assert list(curve.lines[1].get_xdata()) == [1, 2, 3, 4]
    assert list(curve.lines[2].get_ydata()) == [facts["error_of_the_mean"]] * 2
    assert curve.get_ylim()[0] == 0
    for bar, text, label, (name, value) in zip(
        bars.patches, bars.texts, bars.get_yticklabels(), facts["probes"].items(), strict=True
    ):
        colour = GREY if name == "pixels" else SKY if name.startswith("an untrained") else BLUE
        assert (bar.get_width(), to_hex(bar.get_facecolor())) == (pytest.approx(value), colour)
        assert (text.get_text().strip(), label.get_text()) == (f"{value:.3f}", name)
    assert bars.get_xlim() == (0, 1.12)
    assert bars.get_ylim()[0] > bars.get_ylim()[1]
    assert table[0][2] == f"{facts['error']:.3f} (filling in the mean digit: {facts['error_of_the_mean']:.3f})"
    assert [(row[0], row[2]) for row in table[1:]] == [
        (f"linear probe on {name}", f"{value:.4f}") for name, value in facts["probes"].items()
    ]
    assert [row[0] for row in table[1:] if row[1] != "-"] == ["linear probe on CRATE-MAE, the class token"]


def _language(figures, table, facts):
    ((training, test),) = (figure.axes for figure in figures)
    found = facts["models"]
    legend = [text.get_text() for text in test.get_legend().get_texts()]
    assert legend == [f"{name}: {each['bits_per_byte']:.2f}" for name, each in found.items()]
    for train, line, row, colour, (name, each) in zip(
        training.lines, test.lines, table, CYCLE, found.items(), strict=True
    ):
        _curve(train, np.array(each["losses"]) / math.log(2), 0.5, colour)
        _curve(line, [bits for _, bits in each["watched"]], 1, colour)
        assert each["watched"][-1][1] == each["bits_per_byte"]
        rates = each["tokens_per_second"]
        speeds = f"{rates['cached']:.0f}, {rates['recomputing']:.0f}"
        assert row[0] == train.get_label() == name
        assert row[2:] == [f"{each['bits_per_byte']:.3f}", f"{each['parameters']:,}", speeds]
        assert each["sample"].startswith("The ")
