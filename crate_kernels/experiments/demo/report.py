"""The report on disk: figures, a page that needs no other file, and numbers for programs."""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from crate_kernels._core import files
from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo import figures
from crate_kernels.experiments.demo.compare import Agreement, Cost
from crate_kernels.experiments.demo.training import Training
from crate_kernels.experiments.demo.whitebox import DigitAttention, Layers

_STYLE = """
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; color: #222 }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem }
img { max-width: 100%; height: auto; display: block; margin: 1rem auto }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .3rem .9rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr + tr { border-top: 1px solid #ddd }
code, pre { background: #f4f4f4; padding: .1rem .3rem } pre { padding: .8rem; overflow-x: auto }
"""


@dataclass(frozen=True, eq=False)
class Outcome:
    """All results of the demo."""

    training: Training
    neighbours: float
    agreement: Agreement
    costs: list[Cost]
    before: Layers
    after: Layers
    attention: DigitAttention

    @property
    def accuracy(self) -> float:
        """Accuracy on the test images after the last step."""
        return self.training.watched[-1][1]


def write(outcome: Outcome, trial: Trial) -> None:
    """Write figures, metrics and page into the run's folder."""
    backend = outcome.training.fused
    drawn = {
        "learning": figures.learning(outcome.training, outcome.neighbours),
        "same-model": figures.same_model(outcome.agreement, backend),
        "cost": figures.cost(outcome.costs, backend),
        "layers": figures.layers(
            {"before training": outcome.before.summary(), "after training": outcome.after.summary()}
        ),
        "coherence": figures.coherence(outcome.before, outcome.after, outcome.training.config.dim),
        "attention": figures.attention(outcome.attention),
    }
    trial.write(drawn, _numbers(outcome), outcome.training.settings)
    pictures = {name: base64.b64encode((trial.folder / f"{name}.png").read_bytes()).decode() for name in drawn}
    files.put(trial.folder / "report.html", _page(outcome, pictures, trial.machine).encode())


def _numbers(outcome: Outcome) -> dict[str, Any]:
    training, agreement = outcome.training, outcome.agreement
    return {
        "digits": training.digits.name,
        "config": asdict(training.config),
        "parameters": training.parameters,
        "test_accuracy": outcome.accuracy,
        "nearest_neighbours_accuracy": outcome.neighbours,
        "training_seconds": training.seconds,
        "same_model": {**asdict(agreement), "differences": agreement.differences, "agrees": agreement.agrees},
        "costs": [asdict(cost) for cost in outcome.costs],
        "layers": {"before": outcome.before.summary(), "after": outcome.after.summary()},
        "losses": training.losses,
        "accuracies": training.watched,
    }


def cost_rows(costs: list[Cost]) -> list[list[str]]:
    """Return the comparison as cells: quantity, naive, fused, ratio."""
    rows = []
    for cost in costs:
        what = f"{cost.tokens} tokens, batch {cost.batch_size}"
        naive, fused = cost.seconds
        rows.append([f"{what}: seconds a step", f"{naive:.3f}", f"{fused:.3f}", f"{naive / fused:.2f}x"])
        naive, fused = (size / 2**20 for size in cost.peak_bytes)
        rows.append([f"{what}: peak memory, MiB", f"{naive:.0f}", f"{fused:.0f}", f"{naive / fused:.2f}x"])
    return rows


def _table(header: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _page(outcome: Outcome, pictures: dict[str, str], machine: dict[str, str]) -> str:
    training, agreement, config = outcome.training, outcome.agreement, outcome.training.config
    backend = escape(training.fused)

    def picture(name: str, what: str) -> str:
        return f'<img alt="{escape(what)}" src="data:image/png;base64,{pictures[name]}">'

    took = "" if training.seconds is None else f" in {training.seconds:.0f} seconds"
    verdict = "agree" if agreement.agrees else "<strong>do not agree</strong>"
    before, after = outcome.before.summary(), outcome.after.summary()
    depth = range(config.depth)
    layer_rows = [
        [str(i + 1)]
        + [f"{m[key][i]:.{places}f}" for key, places in (("coding_rate", 1), ("nonzeros", 3)) for m in (before, after)]
        for i in depth
    ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>CRATE on real digits</title><style>{_STYLE}</style></head><body>
<h1>A white-box transformer on real digits</h1>
<p>A CRATE of {config.depth} layers ({config.dim} channels, {config.heads} heads of {config.dim_head},
{training.parameters:,} parameters) on {escape(training.digits.name)}:
{len(training.digits.train_labels)} to learn from, {len(training.digits.test_labels)} to be tested on.
{training.done} steps of {training.settings.batch_size} images{took}, through the
<code>{backend}</code> operators of crate_kernels.</p>
{
        _table(
            ["", "test accuracy"],
            [["CRATE", f"{outcome.accuracy:.4f}"], ["3 nearest neighbours, on pixels", f"{outcome.neighbours:.4f}"]],
        )
    }
{picture("learning", "training loss and test accuracy by step")}

<h2>It is the same model</h2>
<p>The first {len(agreement.naive)} steps, repeated from the same seed with the naive equations
(<code>backend="reference"</code>). The losses {verdict}: at most {
        agreement.largest:.1e} apart. The dashed line is how far rounding
alone moves the naive losses: in float64, or with each initial weight off by its last bit. The bound is three
times that, but no less than float32's customary tolerance.</p>
{picture("same-model", "loss curves of both forms and their difference")}

<h2>What was won</h2>
<p>One training step, forward, backward and optimiser: the naive equations and the fused operators side by side in this
run. Seconds are medians of interleaved steps; memory is what tensors take during a step, beyond the model, its
gradients and the optimiser's state. Finer patches make more tokens of the same digit.</p>
{_table(["", "naive", training.fused, "ratio"], cost_rows(outcome.costs))}
{picture("cost", "seconds and memory of a training step")}

<h2>Layer by layer</h2>
<p>A layer compresses, then sparsifies. Rc is the coding rate of the tokens projected onto the layer's subspaces, after
its attention step (unit-norm tokens, &epsilon;<sup>2</sup> = 0.01); beside it the share of nonzeros in what
its ISTA step returns. Means over the test images; the bands are one standard deviation.</p>
{_table(["layer", "Rc before", "Rc after", "nonzeros before", "nonzeros after"], layer_rows)}
{picture("layers", "coding rate and sparsity by layer, before and after training")}

<h2>The subspaces</h2>
<p>How much the subspaces of two heads overlap: 1 where one contains the other, 0 where they are orthogonal. Below, the
cosines between all learned directions, whose blocks are the heads.</p>
{picture("coherence", "overlap of the heads' subspaces in every layer")}

<h2>What the class token looks at</h2>
<p>Last layer, the first test image of each of these classes. The rest of a head's attention goes to the class token
itself.</p>
{picture("attention", "attention of the class token by head on test digits")}

<h2>The model</h2>
<pre>import json
from safetensors import safe_open
from crate_kernels import models

with safe_open("crate.safetensors", framework="pt") as file:
    config = json.loads(file.metadata()["config"])
    weights = {{name: file.get_tensor(name) for name in file.keys()}}
model = models.from_official("crate", weights, config).eval()</pre>
<p>{escape(", ".join(f"{key} {value}" for key, value in machine.items()))}</p>
</body></html>
"""
