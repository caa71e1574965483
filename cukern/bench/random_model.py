"""Models of published shapes with random weights, made in the memory of the GPU: no file, no waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cukern.models import Qwen3
from cukern.models.device import Device
from cukern.models.weights import Weights
from cukern.testing.checkpoints import QWEN3_SHAPES

__all__ = ["Noise", "make_model"]


class Noise:
    """Normal numbers on the GPU, copied from one array at a different offset for every tensor."""

    def __init__(self, cupy: Any) -> None:
        self._values = np.random.default_rng(0).standard_normal((1 << 22) + 9973, np.float32)
        self._cupy, self._offset = cupy, 0
        self._ready: dict[tuple[str, float, float], Any] = {}

    def fill(self, array: Any, std: float, mean: float = 0.0) -> None:
        key, raw = (array.dtype.name, std, mean), np.dtype(f"u{array.itemsize}")
        if key not in self._ready:
            values = (self._values * np.float32(std) + np.float32(mean)).astype(array.dtype)
            self._ready[key] = self._cupy.asarray(values.view(raw))
        source, flat, at = self._ready[key], array.view(raw).reshape(-1), 0
        while at < flat.size:
            self._offset = (self._offset + 7919) % 9973
            count = min(flat.size - at, 1 << 22)
            flat[at : at + count] = source[self._offset : self._offset + count]
            at += count


def make_model(cupy: Any, name: str, dtype: Any, layers: int | None = None, max_positions: int = 40960) -> Qwen3:
    """A model of a published shape with random weights, made on the GPU in a second."""
    config = QWEN3_SHAPES[name]
    if layers is not None:
        config = replace(config, num_hidden_layers=layers)
    weights = Weights(config, Device.parse("cuda"), dtype)
    noise = Noise(cupy)
    for key in weights:
        if key.endswith("norm.weight"):
            noise.fill(weights[key], 0.1, 1.0)
        else:
            noise.fill(weights[key], 0.02)
    return Qwen3(config, weights, max_positions=max_positions)
