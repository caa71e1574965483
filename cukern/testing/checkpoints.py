"""Random-weight checkpoints with the true shapes of the Qwen3 models, for tests and benchmarks without a network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..models.config import Qwen3Config
from ..models.hub import demo_checkpoint
from ..models.weights import tensor_shapes

__all__ = ["QWEN3_SHAPES", "make_checkpoint"]


def _published(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        bos_token_id=151643,
        eos_token_id=(151645,),
    )


QWEN3_SHAPES = {
    "0.6B": _published(1024, 3072, 28, 16, True),
    "1.7B": _published(2048, 6144, 28, 16, True),
    "4B": _published(2560, 9728, 36, 32, True),
    "8B": _published(4096, 12288, 36, 32, False),
    "14B": _published(5120, 17408, 40, 40, False),
    "32B": _published(5120, 25600, 64, 64, False),
}
"""Configurations of the published dense Qwen3 chat models."""

_DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
_PIECE = 1 << 22  # weights drawn from one random stream, whatever the number of threads


def make_checkpoint(
    path: str | os.PathLike[str],
    config: str | Qwen3Config = "0.6B",
    dtype: str = "bfloat16",
    seed: int = 0,
    *,
    std: float = 0.02,
    shard_bytes: int = 1 << 30,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write a checkpoint with random weights: config.json, generation_config.json, safetensors.

    Matrices are normal with deviation `std` (Qwen's initialisation), norm weights normal around 1 with deviation
    0.1, biases normal with `std`. The same arguments give the same bytes on any machine.

    Parameters
    ----------
    path : path
        Folder; made if it does not exist.
    config : str or Qwen3Config
        A name in `QWEN3_SHAPES` ("0.6B", "1.7B", "4B", "8B", "14B", "32B") or a configuration.
    dtype : str
        "float16", "bfloat16" or "float32": how the weights are stored.
    seed : int
    shard_bytes : int
        Largest file, and about the memory that is needed. A model that fits gives one file, a larger one shards and
        their index.
    tokenizer : bool
        Copy the demonstration model's tokenizer (its ids are below 4096) and end token.
    **overrides
        Fields of the configuration to change, such as ``num_hidden_layers=4``.

    Returns
    -------
    Path
        The folder.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if isinstance(config, str):
        if config not in QWEN3_SHAPES:
            raise ValueError(f"config must be one of {', '.join(QWEN3_SHAPES)} or a Qwen3Config, got {config!r}")
        config = QWEN3_SHAPES[config]
    config = replace(config, **{"dtype": dtype, **overrides})
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        if config.vocab_size < 4096:
            raise ValueError(f"the demonstration tokenizer needs a vocab_size of 4096 or more, got {config.vocab_size}")
        config = replace(config, bos_token_id=None, eos_token_id=(4093,))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(demo_checkpoint() / name, folder / name)
    _write_json(folder / "config.json", config.to_dict())
    _write_json(folder / "generation_config.json", {"eos_token_id": config.to_dict()["eos_token_id"]})
    _write_weights(folder, tensor_shapes(config), np.dtype(_DTYPES[dtype]), seed, std, shard_bytes)
    return folder


def _write_weights(
    folder: Path, shapes: dict[str, tuple[int, ...]], dtype: np.dtype, seed: int, std: float, shard_bytes: int
) -> None:
    from safetensors.numpy import save_file

    order = {name: i for i, name in enumerate(shapes)}
    shards = list(_split(shapes, dtype.itemsize, shard_bytes))
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for n, names in enumerate(shards):
            file = "model.safetensors" if len(shards) == 1 else f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
            tensors = {name: _draw(pool, name, shapes[name], dtype, (seed, order[name]), std) for name in names}
            save_file(tensors, str(folder / file), metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(names, file))
            del tensors
    if len(shards) > 1:
        total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _split(shapes: dict[str, tuple[int, ...]], itemsize: int, limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    used = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * itemsize
        if names and used + size > limit:
            yield names
            names, used = [], 0
        names.append(name)
        used += size
    yield names


def _draw(
    pool: ThreadPoolExecutor, name: str, shape: tuple[int, ...], dtype: np.dtype, key: tuple[int, int], std: float
) -> np.ndarray:
    """Draw one tensor; every piece has its own random stream, so that threads do not change the numbers."""
    norm = name.endswith("norm.weight")
    mean, deviation = (1.0, 0.1) if norm else (0.0, std)
    out = np.empty(shape, dtype)
    flat = out.reshape(-1)

    def fill(piece: int) -> None:
        part = flat[piece * _PIECE : (piece + 1) * _PIECE]
        values = np.random.default_rng((*key, piece)).standard_normal(part.size, np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        part[...] = values.astype(dtype)

    list(pool.map(fill, range(-(-flat.size // _PIECE))))
    return out


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
