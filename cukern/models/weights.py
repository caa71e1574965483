"""The weights of a Qwen3 on one device: packed for the kernels, and visible under their hub names.

The query, key and value projections of a layer are one matrix, gate and up another, so that one kernel launch
computes each group. A hub name such as ``model.layers.0.self_attn.k_proj.weight`` is a view of rows of such a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .config import Qwen3Config
from .device import Device

__all__ = ["LayerWeights", "LoadReport", "Weights", "tensor_shapes"]

Array = Any


@dataclass
class LayerWeights:
    """One decoder layer. H hidden, D head_dim, I intermediate; norms and biases are float32, matrices the compute
    dtype."""

    input_norm: Array
    """float32 [H]"""
    qkv: Array
    """[(Hq + 2 Hkv) D, H]: rows of q, then k, then v"""
    qkv_bias: Array | None
    """float32 [(Hq + 2 Hkv) D], only with attention_bias"""
    q_norm: Array
    """float32 [D]"""
    k_norm: Array
    """float32 [D]"""
    o: Array
    """[H, Hq D]"""
    o_bias: Array | None
    """float32 [H], only with attention_bias"""
    post_norm: Array
    """float32 [H]"""
    gate_up: Array
    """[2 I, H]: rows of gate, then up"""
    down: Array
    """[H, I]"""


@dataclass
class LoadReport:
    """What loading a checkpoint did.

    Attributes
    ----------
    nbytes : int
        Bytes read from the files.
    seconds : float
        Wall time of the copy.
    stored, computed : str
        Dtypes of the matrices in the files (joined by "+" if several) and of the model.
    overflowed, subnormal, zeroed : dict
        Tensor name to the number of weights that are out of float16's range, below its normal range (6.1e-5, kept
        with fewer bits), and of those the ones that became 0. Empty unless wider weights were read as float16.
    """

    nbytes: int = 0
    seconds: float = 0.0
    stored: str = ""
    computed: str = ""
    overflowed: dict[str, int] = field(default_factory=dict)
    subnormal: dict[str, int] = field(default_factory=dict)
    zeroed: dict[str, int] = field(default_factory=dict)


def tensor_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Hub name of every weight that the model has, with its shape; a tied head is not listed."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.q_size, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, h)}
    for n in range(config.num_hidden_layers):
        p = f"model.layers.{n}."
        shapes[p + "input_layernorm.weight"] = (h,)
        for name, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (rows, columns)
            if config.attention_bias:
                shapes[f"{p}self_attn.{name}_proj.bias"] = (rows,)
        shapes[p + "self_attn.q_norm.weight"] = (d,)
        shapes[p + "self_attn.k_norm.weight"] = (d,)
        shapes[p + "post_attention_layernorm.weight"] = (h,)
        shapes[p + "mlp.gate_proj.weight"] = (i, h)
        shapes[p + "mlp.up_proj.weight"] = (i, h)
        shapes[p + "mlp.down_proj.weight"] = (h, i)
    shapes["model.norm.weight"] = (h,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    return shapes


class Weights(Mapping[str, Array]):
    """All weights: ``weights["model.layers.0.mlp.up_proj.weight"]`` is an array that shares memory with the model.

    Writing into such an array, or assigning to the name (which copies into it), is seen by the next forward pass.
    Norm weights and biases are float32 whatever the compute dtype. A tied model has no ``lm_head.weight``: its head is
    ``model.embed_tokens.weight``.

    Attributes
    ----------
    embed : [V, H]
    layers : list of LayerWeights
    norm : float32 [H]
    head : [V, H]
        The same array as `embed` in a tied model.
    dtype : numpy.dtype
        The compute dtype.
    report : LoadReport
    """

    embed: Array
    layers: list[LayerWeights]
    norm: Array
    head: Array

    def __init__(self, config: Qwen3Config, device: Device, dtype: Any) -> None:
        """Allocate uninitialised arrays; see `load_weights` for filling them from a checkpoint.

        Raises
        ------
        MemoryError
            The GPU has too little free memory.
        """
        self.device, self.dtype, self.report = device, np.dtype(dtype), LoadReport()
        self._tied = config.tie_word_embeddings
        self._named: dict[str, Array] = {}
        with device.context():
            try:
                self._allocate(config, device.xp)
            except Exception as error:
                if type(error).__name__ != "OutOfMemoryError":  # CuPy's, which may not be importable here
                    raise
                self._named.clear()
                free = device.xp.cuda.runtime.memGetInfo()[0]
                raise MemoryError(
                    f"the weights take {config.num_parameters * self.dtype.itemsize / 2**30:.2f} GiB in {self.dtype}, "
                    f"but {device} has {free / 2**30:.2f} GiB free"
                ) from None

    def _allocate(self, config: Qwen3Config, xp: Any) -> None:
        h, d, half = config.hidden_size, config.head_dim, self.dtype
        q, kv = config.q_size, config.kv_size

        def norm(name: str, size: int) -> Array:
            return self._name(name, xp.empty(size, np.float32))

        def packed(names: list[str], rows: list[int], *columns: int) -> Array:
            whole = xp.empty((sum(rows), *columns), half if columns else np.float32)  # no columns: a bias
            start = 0
            for name, count in zip(names, rows, strict=True):
                self._name(name, whole[start : start + count])
                start += count
            return whole

        self.embed = packed(["model.embed_tokens.weight"], [config.vocab_size], h)
        self.layers = []
        for n in range(config.num_hidden_layers):
            p = f"model.layers.{n}."
            a, m = p + "self_attn.", p + "mlp."
            bias, i = config.attention_bias, config.intermediate_size
            self.layers.append(
                LayerWeights(
                    input_norm=norm(p + "input_layernorm.weight", h),
                    qkv=packed([f"{a}{x}_proj.weight" for x in "qkv"], [q, kv, kv], h),
                    qkv_bias=packed([f"{a}{x}_proj.bias" for x in "qkv"], [q, kv, kv]) if bias else None,
                    q_norm=norm(a + "q_norm.weight", d),
                    k_norm=norm(a + "k_norm.weight", d),
                    o=packed([a + "o_proj.weight"], [h], q),
                    o_bias=packed([a + "o_proj.bias"], [h]) if bias else None,
                    post_norm=norm(p + "post_attention_layernorm.weight", h),
                    gate_up=packed([m + "gate_proj.weight", m + "up_proj.weight"], [i, i], h),
                    down=packed([m + "down_proj.weight"], [h], i),
                )
            )
        self.norm = norm("model.norm.weight", h)
        self.head = self.embed if self._tied else packed(["lm_head.weight"], [config.vocab_size], h)

    def _name(self, name: str, array: Array) -> Array:
        self._named[name] = array
        return array

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(int(a.nbytes) for a in self._named.values())

    def __getitem__(self, name: str) -> Array:
        try:
            return self._named[name]
        except KeyError:
            if name == "lm_head.weight":
                raise KeyError("lm_head.weight: the head is tied, edit model.embed_tokens.weight") from None
            raise KeyError(f"{name}: no such weight; iterate over model.weights for the names") from None

    def __setitem__(self, name: str, value: Array) -> None:
        """Copy `value` into the weight (same shape; converted to its dtype)."""
        target = self[name]
        if tuple(np.shape(value)) != tuple(target.shape):
            raise ValueError(f"{name} has shape {tuple(target.shape)}, got {tuple(np.shape(value))}")
        with self.device.context():
            target[...] = self.device.xp.asarray(value, dtype=target.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)
