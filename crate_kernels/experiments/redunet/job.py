"""The experiment: build both networks, and report their results."""

from __future__ import annotations

from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.redunet import digits, figures, gaussians
from crate_kernels.experiments.redunet.settings import Settings

_SHARES = ("upright", "turned", "features_upright", "features_turned", "pixels_upright", "pixels_turned", "invariance")


def run(trial: Trial, settings: Settings) -> int:
    """Build, measure and draw."""
    with trial.progress("three Gaussians in R^3", settings.layers) as advance:
        spheres = gaussians.build(settings, trial.seed, trial.device, advance)
    with trial.progress("digits in polar coordinates", settings.polar_layers) as advance:
        polar = digits.build(settings, trial.device, advance)

    def span(rates) -> str:
        return f"{rates[0, 0]:.3f} to {rates[-1, 0]:.3f}"

    def rising(rates) -> str:
        falls = int((rates[1:, 0] < rates[:-1, 0]).sum())
        return f"falls at {falls} of {len(rates) - 1} layers"

    def both(estimate: str, upright: float, turned: float) -> list[str]:
        return [f"  accuracy upright / turned, {estimate}", "-", f"{upright:.3f} / {turned:.3f}"]

    published = "rises, test with training (figure)"
    trial.compare(
        [
            [f"Gaussians, {settings.layers} layers: rate reduction, training", published, span(spheres.train_rates)],
            ["  of which", "", rising(spheres.train_rates)],
            ["  test", published, span(spheres.test_rates)],
            ["  classes as the last layer estimates them, test", "separate (figure)", f"{spheres.test_accuracy:.4f}"],
            [f"Digits, {settings.polar_layers} layers: rate reduction", "rises (figure)", span(polar.rates)],
            ["  of which", "", rising(polar.rates)],
            both("last layer's estimate", polar.upright, polar.turned),
            both("nearest subspace on features", polar.features_upright, polar.features_turned),
            both("nearest subspace on polar pixels", polar.pixels_upright, polar.pixels_turned),
            ["  features of a shifted digit, off its features shifted", "0 (theorem)", f"{polar.invariance:.1e}"],
        ]
    )
    numbers = {
        "gaussians": {
            "train_rates": spheres.train_rates.tolist(),
            "test_rates": spheres.test_rates.tolist(),
            "train_accuracy": spheres.train_accuracy,
            "test_accuracy": spheres.test_accuracy,
        },
        "digits": {
            "digits": polar.name,
            "rates": polar.rates.tolist(),
            **{key: getattr(polar, key) for key in _SHARES},
        },
    }
    drawn = {
        "rates": figures.gaussian_rates(spheres),
        "sphere": figures.sphere(spheres),
        "turned": figures.turned(polar),
    }
    trial.write(drawn, numbers, settings)
    return 0
