"""Shapes of the linear layers of Qwen3, with the bytes and operations that each product cannot do without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["LinearCase", "cases"]

# hidden size, intermediate size, query width, key/value width of the published models; the vocabulary is common to all
_MODELS = {"0.6b": (1024, 3072, 2048, 1024), "8b": (4096, 12288, 4096, 1024)}
_VOCABULARY = 151936


@dataclass(frozen=True)
class LinearCase:
    """One product ``x [m, k] @ weight [n, k].T`` of a model.

    ``out_bytes`` per element: 2 for an activation, 4 for logits, 8 where a float32 residual is read and written.
    """

    model: str
    layer: str
    m: int
    n: int
    k: int
    out_bytes: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Weight, input and output, each moved once."""
        return 2 * self.n * self.k + 2 * self.m * self.k + self.out_bytes * self.m * self.n

    def floor_us(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The larger of the two times, in microseconds."""
        return 1e6 * max(self.bytes / bytes_per_second, self.flops / flops_per_second)


def cases(
    models: Sequence[str] = ("0.6b", "8b"), rows: Sequence[int] = (1, 16, 64, 128, 2048, 8192)
) -> Iterator[LinearCase]:
    """Every layer of the models at every number of rows; the vocabulary's only up to 128 rows (one per sequence).

    Parameters
    ----------
    models : sequence of str
        "0.6b", "8b".
    rows : sequence of int
        Values of M.

    Raises
    ------
    ValueError
        For a model that is not in the table.
    """
    for model in models:
        if model not in _MODELS:
            raise ValueError(f"cases: model {model!r} is not known, expected one of {', '.join(_MODELS)}")
        hidden, intermediate, query, key = _MODELS[model]
        for layer, n, k, out_bytes in (
            ("qkv", query + 2 * key, hidden, 2),
            ("o", hidden, query, 8),
            ("gate_up", 2 * intermediate, hidden, 2),
            ("down", hidden, intermediate, 8),
            ("lm_head", _VOCABULARY, hidden, 4),
        ):
            for m in rows:
                if layer != "lm_head" or m <= 128:
                    yield LinearCase(model, layer, m, n, k, out_bytes)
