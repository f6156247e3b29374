"""What is measured inside the model, and how it is printed."""

from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from crate_kernels import analysis
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo import compare, figures, job, report, whitebox
from tests.experiments.demo.common import CPU, assert_equal


@pytest.fixture
def model(training):
    return training.model


def test_layers_are_measured_on_all_test_images(model, small):
    found = whitebox.measure(model, small, CPU)
    exact = analysis.layerwise(model, small.test_images)
    assert found.rate.shape == (2, len(small.test_images))
    torch.testing.assert_close(found.rate, torch.stack([layer.rate_half for layer in exact]))
    torch.testing.assert_close(found.sparsity, torch.stack([layer.sparsity for layer in exact]))


def test_the_summary_of_layers():
    overlap = torch.tensor([[[1.0, 0.25], [0.25, 1.0]]])
    found = whitebox.Layers(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.25, 0.25]]), overlap, overlap)
    assert found.summary() == {
        "coding_rate": [2.0],
        "coding_rate_std": [pytest.approx(2**0.5)],
        "nonzeros": [0.25],
        "nonzeros_std": [0.0],
        "coherence_between_heads": [0.25],
    }


def test_attention_is_that_of_the_class_token_in_the_last_layer(model, small):
    keys = []
    model.transformer.layers[-1][0].fn.qkv.register_forward_hook(lambda m, args, out: keys.append(out))
    seen = whitebox.class_attention(model, small, CPU, (7, 2))
    first = [small.test_labels.tolist().index(each) for each in (7, 2)]
    assert_equal(seen.images, small.test_images[first, 0])
    assert seen.labels.tolist() == [7, 2]
    assert_equal(seen.predictions, model(small.test_images[first]).argmax(-1))
    w = keys[0].detach().unflatten(-1, (2, 8)).transpose(1, 2)
    weights = (8**-0.5 * w @ w.mT).softmax(-1)[:, :, 0]  # (digits, heads, tokens), class token first
    torch.testing.assert_close(seen.itself, weights[..., 0])
    torch.testing.assert_close(seen.patches.flatten(2), weights[..., 1:])


COST = compare.Cost(patch_size=2, tokens=17, batch_size=100, seconds=(2.0, 0.5), peak_bytes=(90 << 20, 30 << 20))


def test_costs_are_stated_as_what_was_won():
    assert report.cost_rows([COST]) == [
        ["17 tokens, batch 100: seconds a step", "2.000", "0.500", "4.00x"],
        ["17 tokens, batch 100: peak memory, MiB", "90", "30", "3.00x"],
    ]


@pytest.mark.parametrize("fused", [(2.0, 1.0), (2.0, 9.0)])
@pytest.mark.parametrize("seconds", [None, 61.7])
def test_what_is_printed_at_the_end(seconds, fused, tmp_path):
    agreement = compare.Agreement(list(fused), [2.0, 1.0], [1e-6, 1e-6], [1e-3, 1e-3])
    inside = torch.tensor([[10.04, 10.06], [0.24, 0.26]]), torch.tensor([[0.25, 0.25], [0.0104, 0.0104]])
    before = whitebox.Layers(*inside, *[torch.eye(2).expand(2, 2, 2)] * 2)
    after = whitebox.Layers(*(2 * each for each in inside), before.coherence, before.gram)
    training = SimpleNamespace(config=SimpleNamespace(depth=2), seconds=seconds, watched=[(1, 0.98765)])
    written = StringIO()
    trial = Trial("demo", tmp_path, CPU, console=Console(file=written, width=200))
    job._print(report.Outcome(training, 0.87654, agreement, [COST], before, after, None), trial)
    *table, same, rates, nonzeros, accuracy = written.getvalue().splitlines()
    assert [cell.strip() for cell in table[3].split("│")[1:-1]] == report.cost_rows([COST])[0]
    verdict, apart = ("agrees with", "0.0e+00") if fused[1] == 1 else ("DISAGREES with", "8.0e+00")
    assert same == f"Same model: the fused loss {verdict} the naive one over 2 steps, at most {apart} apart"
    meaning = "layers 1 to 2, before to after training"
    assert rates == f"White box: coding rate after MSSA, {meaning}: 10.1 to 20.1, 0.2 to 0.5"
    assert nonzeros == f"White box: nonzeros after ISTA, {meaning}: 0.250 to 0.500, 0.010 to 0.021"
    took = "" if seconds is None else ", trained in 62 s"
    assert accuracy == f"Test accuracy 0.9877{took}; 3 nearest neighbours 0.8765"


def test_the_accuracy_is_that_after_the_last_step(training):
    training.watched = [(3, 0.5), (6, 0.9), (7, 0.8)]
    fields = dict.fromkeys(("neighbours", "agreement", "costs", "before", "after", "attention"))
    assert report.Outcome(training=training, **fields).accuracy == 0.8


def test_figures_show_the_naive_form_as_such():
    seconds, memory = (
        {bars.get_label(): list(bars.datavalues) for bars in ax.containers} for ax in figures.cost([COST], "cpp").axes
    )
    assert seconds == {"naive": [2000.0], "cpp": [500.0]}
    assert memory == {"naive": [90.0], "cpp": [30.0]}
    result = compare.Agreement(fused=[2.0, 1.0], naive=[2.5, 1.5], noise=[0.1, 0.2], bound=[0.3, 0.6])
    curves, apart = (
        {line.get_label(): list(line.get_ydata()) for line in ax.lines} for ax in figures.same_model(result, "cpp").axes
    )
    assert curves == {"naive equations": [2.5, 1.5], "cpp": [2.0, 1.0]}
    assert apart == {"bound": [0.3, 0.6], "naive: rounding alone": [0.1, 0.2], "cpp − naive": [0.5, 0.5]}


def values(line):
    return [list(map(float, each)) for each in (line.get_xdata(), line.get_ydata())]


def test_learning_is_drawn_smoothed_beside_each_step(training):
    training.losses = [float(n) for n in range(30)]  # a tenth are three steps
    training.watched = [(10, 0.5), (30, 0.75)]
    loss, accuracy = figures.learning(training, 0.25).axes
    each, mean = loss.lines
    assert values(each) == [list(range(1, 31)), list(range(30))]
    assert values(mean) == [list(range(2, 30)), [float(n) for n in range(1, 29)]]
    assert mean.get_label() == "mean of 3 steps"
    assert values(accuracy.lines[0]) == [[10, 30], [0.5, 0.75]]
    assert set(accuracy.lines[1].get_ydata()) == {0.25}
    assert accuracy.get_ylim() == (0.23, 1)
    assert [ax.get_xlabel() for ax in (loss, accuracy)] == ["step", "step"]
    assert [ax.get_legend() is None for ax in (loss, accuracy)] == [False, False]
    training.losses = [2.0]
    assert values(figures.learning(training, 0.25).axes[0].lines[1]) == [[1], [2]]


def test_layers_are_drawn_with_a_deviation_around():
    seen = {
        "before": {"coding_rate": [3.0, 2.0], "coding_rate_std": [0.5, 0.25], "nonzeros": [0.5, 0.4]},
        "after": {"coding_rate": [2.0, 1.0], "coding_rate_std": [0.1, 0.2], "nonzeros": [0.3, 0.2]},
    }
    for each in seen.values():
        each["nonzeros_std"] = [0.01, 0.02]
    figure = figures.layers(seen)
    for ax, key in zip(figure.axes, ("coding_rate", "nonzeros"), strict=True):
        for line, band, each in zip(ax.lines, ax.collections, seen.values(), strict=True):
            assert values(line) == [[1, 2], each[key]]
            corners = {tuple(round(float(x), 6) for x in corner) for corner in band.get_paths()[0].vertices}
            spread = [(s, m) for s, m in zip(each[f"{key}_std"], each[key], strict=True)]
            wanted = {(n, round(m + sign * s, 6)) for n, (s, m) in enumerate(spread, 1) for sign in (-1, 1)}
            assert wanted <= corners
        assert ax.get_ylim()[0] == 0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["before", "after"]


def test_overlaps_are_drawn_before_and_after_and_the_directions_below():
    def layers(shift):
        overlap = torch.tensor([[[1.0, 0.25 + shift], [0.25 + shift, 1.0]]])
        gram = torch.eye(6)[None] * 0.5 + shift
        return whitebox.Layers(torch.ones(1, 3), torch.ones(1, 3), overlap, gram)

    before, after = layers(0.0), layers(0.4)
    first, second, third, *bars = figures.coherence(before, after, 12).axes
    for ax, shown in ((first, before.coherence), (second, after.coherence), (third, after.gram)):
        torch.testing.assert_close(torch.tensor(ax.images[0].get_array().data), shown[0])
        assert ax.images[0].get_clim() == (0, 1)
    assert [[text.get_text() for text in ax.texts] for ax in (first, second, third)] == [
        ["1.00", "0.25", "0.25", "1.00"], ["1.00", "0.65", "0.65", "1.00"], []
    ]  # fmt: skip
    assert [text.get_color() for text in second.texts] == ["black"] * 4
    assert [text.get_color() for text in first.texts] == ["black", "white", "white", "black"]
    assert list(third.get_xticks()) == [-0.5, 2.5, 5.5]
    assert [label.get_text() for label in third.get_xticklabels()] == ["0", "3", "6"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["1", "2"]
    assert [ax.get_ylabel() for ax in (first, second, third)] == ["before\nhead", "after\nhead", "after\ndirection"]
    assert (first.get_title(), third.get_xlabel(), first.get_xlabel()) == ("layer 1", "direction", "head")
    assert [bar.get_ylabel() for bar in bars] == ["overlap (random: 0.25)"] * 2 + ["absolute cosine"]


def test_attention_is_drawn_head_by_head_on_one_scale():
    patches = torch.arange(16.0).reshape(2, 2, 2, 2) / 16
    seen = whitebox.DigitAttention(
        torch.rand(2, 4, 4), torch.tensor([7, 3]), torch.tensor([7, 8]), torch.tensor([[0.1, 0.2], [0.3, 0.4]]), patches
    )
    *axes, bar = figures.attention(seen).axes
    grid = [axes[:3], axes[3:]]
    for digit, row in enumerate(grid):
        torch.testing.assert_close(torch.tensor(row[0].images[0].get_array().data), seen.images[digit])
        for head, ax in enumerate(row[1:]):
            torch.testing.assert_close(torch.tensor(ax.images[0].get_array().data), patches[digit, head])
            assert ax.images[0].get_clim() == (0, 15 / 16)
            assert ax.get_xlabel() == f"to itself {seen.itself[digit, head]:.2f}"
            assert ax.get_title() == (f"head {head + 1}" if digit == 0 else "")
    assert [row[0].get_ylabel() for row in grid] == ["digit 7,\nread as 7", "digit 3,\nread as 8"]
    assert bar.get_ylim() == (0, 15 / 16)
