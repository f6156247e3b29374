"""The mixture, the theorem to rounding, and a check that fails where it is broken."""

from dataclasses import replace

import pytest
import torch

from crate_kernels.experiments.denoise import job, mixture
from crate_kernels.experiments.denoise.settings import PRESETS, Mixture

CPU = torch.device("cpu")
A, B = PRESETS["default"].theorem
SMALL = Mixture(64, 2, 16, 40, noise=0.2, layers=2)


def test_tokens_are_drawn_from_the_mixture():
    many = replace(SMALL, tokens=4000)
    z, subspaces, labels = mixture.draw(many, 0)
    assert z.shape == (4000, 40)
    basis = subspaces.transpose(0, 1).flatten(1)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(32).double())
    assert labels.bincount().tolist() == [2000, 2000]
    w = torch.einsum("nd,kdp->nkp", z, subspaces)
    torch.testing.assert_close(torch.einsum("nkp,kdp->nd", w, subspaces), z)  # nothing outside the subspaces
    own = labels[:, None] == torch.arange(2)
    # 64,000 draws each: a standard deviation is known to 0.3%.
    assert w[own].std().item() == pytest.approx(1.0, rel=0.02)
    assert w[~own].std().item() == pytest.approx(0.2, rel=0.02)
    assert torch.equal(mixture.draw(many, 0)[0], z)
    assert not torch.equal(mixture.draw(many, 1)[0], z)


@pytest.mark.parametrize("form", ["unscaled", "scaled", "normalised"])
def test_a_layer_is_the_papers(form):
    m = replace(SMALL, layers=1, form=form)
    z, subspaces, labels = mixture.draw(m, 0)
    seen = torch.nn.functional.layer_norm(z, (40,)) if form == "normalised" else z
    scale = 1.0 if form == "unscaled" else 16**-0.5
    update = torch.zeros_like(z)
    for basis in subspaces:
        w = seen @ basis
        update += (scale * w @ w.mT).softmax(-1) @ w @ basis.mT
    after = z + m.eta * update
    signal = torch.stack([after[labels == k] @ subspaces[k] for k in range(2)]).norm(dim=(1, 2))
    noise = torch.stack([(after @ (torch.eye(40) - u @ u.mT))[labels == k].norm() for k, u in enumerate(subspaces)])
    torch.testing.assert_close(mixture.denoise(m, 0, CPU, None)[1], signal / noise)


@pytest.mark.parametrize("backend", ["reference", "composite"])
@pytest.mark.parametrize("m", [A, B], ids=["N=512", "N=128"])
def test_theorem_3_1_to_rounding(m, backend):
    ratios = mixture.denoise(replace(m, layers=m.exact), 0, CPU, backend)
    assert ratios.shape == (m.exact + 1, m.clusters)
    assert mixture.departure(m, ratios).max() < 4e-15
    assert ratios[-1].min() / ratios[0].max() > 0.9 * 1.3**m.exact


def test_its_conditions_end():
    """Beyond the first layers the noise passes the threshold too, and the ratio leaves the line."""
    off = mixture.departure(B, mixture.denoise(B, 0, CPU, None))
    assert off[: B.exact + 1].max() < 4e-15
    assert off[-1] > 0.1


def test_a_broken_threshold_fails_the_experiment(run, undrawn, monkeypatch):
    inner = mixture.layer
    monkeypatch.setattr(
        mixture, "layer", lambda m, *args: inner(replace(m, threshold=0.599) if m.threshold else m, *args)
    )
    status, printed, folder = run("denoise")
    assert status == 1
    assert "Theorem 3.1 is NOT followed to rounding" in printed
    assert (folder / "theorem.png").exists()


def test_not_a_number_fails_the_experiment(run, undrawn, metrics, monkeypatch):
    """One cluster of one layer of one draw; the departure of the first layer is 0 whatever happens."""
    inner, calls = job.denoise, []

    def corrupted(m, seed, device, backend, dtype):
        ratios = inner(m, seed, device, backend, dtype)
        if not calls:
            ratios[m.exact, 0] = torch.nan
        calls.append(seed)
        return ratios

    monkeypatch.setattr(job, "denoise", corrupted)
    status, printed, folder = run("denoise")
    assert status == 1
    assert "Theorem 3.1 is NOT followed to rounding" in printed
    assert metrics(folder)["theorem"][0]["holds"] is False


def test_the_kernels_are_shown_in_float32(run, undrawn, metrics):
    *_, folder = run("denoise")
    (entry,) = metrics(folder)["theorem"]
    assert entry["holds"] is True
    exact = entry["departure_float32"][1 : B.exact + 1]
    assert 1e-9 < max(exact) < 1e-5
    assert job._ROUNDING < 1e-9


def test_no_panel_cuts_a_curve_off():
    mixtures = [replace(SMALL, form=form, noise=noise) for form in ("unscaled", "scaled") for noise in (0.5, 0.2)]
    # Curves rise from panel to panel and within each panel.
    found = [(n + 1) * torch.linspace(1, 2, SMALL.layers + 1)[:, None].expand(2, -1, 3) for n in range(4)]
    figure = job._draw_softmax(mixtures, found)
    for ax in figure.axes:
        low, high = ax.get_ylim()
        assert low == 0
        assert all(line.get_ydata().max() < high for line in ax.lines)


def test_every_mixture_has_to_follow_the_theorem(run, monkeypatch):
    quick = PRESETS["quick"]
    monkeypatch.setitem(PRESETS, "quick", replace(quick, theorem=2 * quick.theorem))
    denoise, calls = job.denoise, []

    def corrupted(mixture, *args):
        ratios = denoise(mixture, *args)
        if not calls:
            ratios[mixture.exact, 0] = torch.nan
        calls.append(mixture)
        return ratios

    monkeypatch.setattr(job, "denoise", corrupted)
    assert run("denoise")[0] == 1
