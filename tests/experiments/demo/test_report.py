"""What is measured inside the model, and how it is told."""

import pytest
import torch

from crate_kernels import analysis
from crate_kernels.experiments.demo import compare, figures, report, whitebox
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
    given = (8**-0.5 * w @ w.mT).softmax(-1)[:, :, 0]  # (digits, heads, tokens), class token first
    torch.testing.assert_close(seen.itself, given[..., 0])
    torch.testing.assert_close(seen.patches.flatten(2), given[..., 1:])


COST = compare.Cost(patch_size=2, tokens=17, batch_size=100, seconds=(2.0, 0.5), peak_bytes=(90 << 20, 30 << 20))


def test_costs_are_told_as_what_was_won():
    assert report.cost_rows([COST]) == [
        ["17 tokens, batch 100: seconds a step", "2.000", "0.500", "4.00x"],
        ["17 tokens, batch 100: peak memory, MiB", "90", "30", "3.00x"],
    ]


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
