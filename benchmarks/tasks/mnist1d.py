"""Digits as generated signals of 40 values: Greydanus and Kobak, "Scaling Down Deep Learning with MNIST-1D", 2024."""

from __future__ import annotations

import numpy as np
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

from benchmarks.pipelines import layered
from benchmarks.tasks.task import Task

#: The shape of each digit, as its authors drew it.
_TEMPLATES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
_SIZE, _NUM_TRAIN, _NUM_TEST = 40, 4000, 1000
_PADDINGS, _MOST_MOVED = (36, 60), 48
_GAIN, _SHEAR, _NOISE_AROUND, _NOISE = 0.4, 0.75, 0.25, 0.02


def mnist1d() -> Task:
    """Returns the task to classify ten digits, drawn as signals: 4,000 to train on, 1,000 to test on.

    It follows the data set's own recipe with other random numbers: the same distribution, not the same signals.

    Raises:
        ModuleNotFoundError: SciPy, which comes with scikit-learn, is not installed.
    """
    generator = np.random.default_rng(42)
    labels = np.tile(np.arange(10), (_NUM_TRAIN + _NUM_TEST) // 10)
    shapes = np.array(_TEMPLATES)
    shapes = (shapes - shapes[:, :1]) / shapes.std(axis=1, keepdims=True) / 6
    signals = np.stack([_signal(shapes[label], generator) for label in labels])
    signals = (signals - signals.mean()) / signals.std()
    order = generator.permutation(len(labels))
    x, y = torch.from_numpy(signals[order]).float(), torch.from_numpy(labels[order])
    return Task.classification(
        name="mnist1d",
        build_module=lambda: layered.mlp(_SIZE),
        train_set=TensorDataset(x[:_NUM_TRAIN], y[:_NUM_TRAIN]),
        test_set=TensorDataset(x[_NUM_TRAIN:], y[_NUM_TRAIN:]),
        labels=y[:_NUM_TRAIN],
        batch_size=16,
        epochs=30,
        target=50.0,
        optimizer=lambda module: SGD(module.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4),
        scheduler=lambda optimizer, steps: MultiStepLR(optimizer, [steps * 6 // 10, steps * 8 // 10]),
    )


def _signal(shape: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Returns a digit of a shape, stretched, scaled, moved, sheared and with noise, of 40 values."""
    from scipy.ndimage import gaussian_filter

    shortest, longest = _PADDINGS
    padded = np.concatenate([shape + 1e-8, np.zeros(generator.integers(shortest, longest + 1))])
    signal = _resampled(padded, len(shape) + longest) * (1 + _GAIN * (generator.random() - 0.5))
    signal = np.roll(signal, generator.integers(_MOST_MOVED))
    around = gaussian_filter(_NOISE_AROUND * generator.standard_normal(len(signal)), 2)
    signal = np.where(signal != 0, signal, around) + _NOISE * generator.standard_normal(len(signal))
    sheared = signal - _SHEAR * (generator.random() - 0.5) * np.linspace(-0.5, 0.5, len(signal))
    return _resampled(sheared, _SIZE)


def _resampled(signal: np.ndarray, size: int) -> np.ndarray:
    return np.interp(np.linspace(0, 1, size), np.linspace(0, 1, len(signal)), signal)
