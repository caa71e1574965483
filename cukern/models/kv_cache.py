"""Paged key/value cache: one pool of equal blocks a layer, shared by all sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .config import Qwen3Config
from .device import Device

__all__ = ["BLOCK_SIZES", "PagedKVCache", "ScratchKVCache"]

BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Keys per block that the attention kernels accept."""


class PagedKVCache:
    """Keys and values of every layer: two arrays [L, num_blocks, Hkv, block_size, D] in the model's compute dtype.

    Parameters
    ----------
    config : Qwen3Config
    num_blocks : int
        Blocks in the pool; a block holds `block_size` tokens of one sequence in every layer.
    block_size : int
        One of 16, 32, 64, 128, 256.
    device : Device
        Where the arrays live.
    dtype : numpy.dtype
        float16 or bfloat16 on a GPU and emulated, float32 on the CPU reference.
    num_layers : int, optional
        Layers that are stored; the model's by default.

    Raises
    ------
    ValueError
        A number of blocks or a block size that cannot be.
    MemoryError
        The arrays do not fit; the message says how much they need.

    Notes
    -----
    GPU memory is left uninitialised. On the host the pool starts as NaN, so that a read of a slot that nobody
    wrote shows.
    """

    def __init__(
        self,
        config: Qwen3Config,
        num_blocks: int,
        block_size: int,
        device: Device,
        dtype: Any,
        *,
        num_layers: int | None = None,
    ) -> None:
        if block_size not in BLOCK_SIZES or isinstance(block_size, float):
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size!r}")
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, (int, np.integer)) or num_blocks < 0:
            raise ValueError(f"num_blocks must be an integer that is not negative, got {num_blocks!r}")
        num_blocks, block_size = int(num_blocks), int(block_size)  # NumPy's narrow integers would overflow
        layers = config.num_hidden_layers if num_layers is None else num_layers
        shape = (layers, num_blocks, config.num_key_value_heads, block_size, config.head_dim)
        self.num_blocks, self.block_size = num_blocks, block_size
        try:
            with device.context():
                self.k = device.xp.empty(shape, dtype)
                self.v = device.xp.empty(shape, dtype)
        except (MemoryError, OverflowError, ValueError):  # the last two: beyond what a shape can hold
            size = 2 * math.prod(shape) * np.dtype(dtype).itemsize
            raise MemoryError(
                f"num_blocks {num_blocks}: the KV cache would need {size / 1e9:,.1f} GB, more than {device} has; "
                "lower num_blocks or kv_memory"
            ) from None
        if device.kind != "cuda":
            self.k.fill(float("nan"))
            self.v.fill(float("nan"))

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return int(self.k.nbytes + self.v.nbytes)

    @staticmethod
    def block_nbytes(config: Qwen3Config, block_size: int, dtype_bytes: int) -> int:
        """Bytes that one block takes over all layers, keys and values."""
        return 2 * config.num_hidden_layers * config.kv_size * block_size * dtype_bytes

    def layer(self, index: int) -> tuple[Any, Any]:
        """Return the caches (k, v) of one layer, each [num_blocks, Hkv, block_size, D], as views."""
        return self.k[index], self.v[index]

    def addresses(self, index: int) -> tuple[int, int]:
        """Where the caches of a layer are on the GPU."""
        return self.k.data.ptr + index * self.k.strides[0], self.v.data.ptr + index * self.v.strides[0]


class ScratchKVCache(PagedKVCache):
    """Room for one layer that every layer overwrites: all that a forward pass without a later step needs."""

    def __init__(self, config: Qwen3Config, num_blocks: int, block_size: int, device: Device, dtype: Any) -> None:
        super().__init__(config, num_blocks, block_size, device, dtype, num_layers=1)

    def layer(self, index: int) -> tuple[Any, Any]:
        """Return the one pair of caches, whichever layer asks."""
        return self.k[0], self.v[0]

    def addresses(self, index: int) -> tuple[int, int]:
        """Where that pair is on the GPU."""
        return super().addresses(0)
