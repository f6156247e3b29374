"""Linear probes: logistic regression on frozen features, and on pixels."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crate_kernels.experiments.common.trial import Trial
from crate_kernels.experiments.demo.data import Digits
from crate_kernels.experiments.mae.settings import MAESettings
from crate_kernels.models import CRATEMAE

_HELD_OUT = 5  # every fifth training digit: to choose the strength


@torch.no_grad()
def _features(model: CRATEMAE, images: Tensor, trial: Trial) -> dict[str, np.ndarray]:
    tokens = torch.cat([model.forward_features(x.to(trial.device)).cpu() for x in images.split(250)])
    return {
        "the class token": tokens[:, 0].numpy(),
        "the mean of the tokens": tokens[:, 1:].mean(1).numpy(),
        "all tokens": tokens[:, 1:].flatten(1).numpy(),
    }


def accuracy(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, settings: MAESettings
) -> float:
    """Return the test accuracy of logistic regression on standardised features.

    The strength of its regularisation is the best one on held-out training samples.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, PredefinedSplit
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    validation = np.arange(len(train)) % _HELD_OUT == 0
    search: Any = GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)),
        {"logisticregression__C": [1 / strength for strength in settings.strengths]},
        cv=PredefinedSplit(np.where(validation, 0, -1)),
    )
    with warnings.catch_warnings():
        # An early stop only lowers the accuracy, and the accuracy is reported.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return float(search.fit(train, labels).score(test, truth))


def probe_all(
    start: CRATEMAE, model: CRATEMAE, digits: Digits, settings: MAESettings, trial: Trial
) -> dict[str, float]:
    """Probe pixels, and the encoder's tokens before training and after it."""
    images, unseen = digits.crop(digits.train_images), digits.crop(digits.test_images)
    labels, truth = digits.train_labels.numpy(), digits.test_labels.numpy()
    sets = {"pixels": (images.flatten(1).numpy(), unseen.flatten(1).numpy())}
    for name, each in (("an untrained CRATE-MAE", start.to(trial.device)), ("CRATE-MAE", model)):
        train, test = _features(each, images, trial), _features(each, unseen, trial)
        sets |= {f"{name}, {kind}": (train[kind], test[kind]) for kind in train}
    with trial.progress("linear probes", len(sets)) as advance:
        found = {}
        for name, (train, test) in sets.items():
            found[name] = accuracy(train, labels, test, truth, settings)
            advance()
    return found
