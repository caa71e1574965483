"""Qwen3, dense (arXiv 2505.09388): a decoder-only transformer with grouped-query attention, RMSNorm on every query and
key head, rotary positions and SwiGLU.

The residual stream x is float32 throughout; what enters a matrix product is in the compute dtype. Each layer is

    x += W_o  attention(rope(norm(q)), rope(norm(k)), v)    with q, k, v = W_qkv norm(x)
    x += W_down (silu(gate) * up)                           with gate, up = W_gate_up norm(x)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ..jit.tape import Tape
from .batch import ForwardBatch
from .config import Qwen3Config
from .device import Device
from .hub import resolve_checkpoint
from .kv_cache import PagedKVCache, ScratchKVCache
from .loader import load_weights
from .weights import LayerWeights, Weights

__all__ = ["Qwen3"]

Array = Any
Tap = Callable[[int, Array], None]

_CALL_BLOCK = 64  # keys per block of the scratch cache of a plain call


class Qwen3:
    """A Qwen3 on one device: ``model(input_ids)`` gives logits, `forward` is one step of an engine.

    Attributes
    ----------
    config : Qwen3Config
    weights : Weights
        Hub name to array; writing into an array changes the model.
    device : Device
    dtype : numpy.dtype
        Compute dtype.
    max_positions : int
        Rows of the RoPE table: positions 0 to ``max_positions - 1`` can be computed.
    """

    def __init__(self, config: Qwen3Config, weights: Weights, *, max_positions: int | None = None) -> None:
        self.config, self.weights = config, weights
        self.device, self.dtype = weights.device, weights.dtype
        _check_head_dim(config, self.device)
        self.max_positions = config.max_positions if max_positions is None else max_positions
        if isinstance(self.max_positions, bool) or not isinstance(self.max_positions, (int, np.integer)):
            raise TypeError(f"max_positions must be an integer, got {max_positions!r}")
        if self.max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, got {max_positions}")
        from ..ops import rope_table

        try:
            table = rope_table(config.head_dim, self.max_positions, config.rope_theta, config.rope_scaling)
        except MemoryError as error:
            raise MemoryError(
                f"the RoPE table of {self.max_positions} positions: {error}; give max_positions"
            ) from None
        self.rope_table = self.device.put(table)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        dtype: str = "auto",
        device: str | Device | None = None,
        *,
        revision: str | None = None,
        max_positions: int | None = None,
        progress: bool | None = None,
    ) -> Qwen3:
        """Load a checkpoint folder, or a model by its hub name.

        Parameters
        ----------
        path : str or path
            A folder with config.json and safetensors, or a hub name like ``Qwen/Qwen3-0.6B`` (see
            `resolve_checkpoint`).
        dtype : str
            "auto" (what the checkpoint stores), "float16" or "bfloat16"; see `choose_dtype`.
        device : str, optional
            "cuda", "cuda:1", "cpu" (NumPy float32 reference), "emulated" (our kernels run on the CPU, slow), or
            None for a GPU where one is usable and else the CPU.
        revision : str, optional
            Branch, tag or commit of a hub name.
        max_positions : int, optional
            Longest sequence to be run; the model's own limit by default.
        progress : bool, optional
            Progress bars on stderr; by default where that is a terminal.

        Raises
        ------
        FileNotFoundError, HubError
            Nothing to load under that name.
        ConfigError, CheckpointError
            A checkpoint that cannot be run, and why.
        ValueError
            An unusable device or dtype.
        """
        where = Device.parse(device)
        folder = resolve_checkpoint(path, revision=revision, progress=progress)
        config = Qwen3Config.from_file(folder)
        _check_head_dim(config, where)
        weights = load_weights(folder, config, where, dtype=dtype, progress=progress)
        return cls(config, weights, max_positions=max_positions)

    # -- the forward pass ---------------------------------------------------------------------------------

    def forward(self, batch: ForwardBatch, cache: PagedKVCache, *, tap: Tap | None = None) -> Array:
        """Run one step: append the batch's keys and values to the cache and compute logits.

        Parameters
        ----------
        batch, cache, tap
            As for `hidden`.

        Returns
        -------
        float32 [R, V]
            Logits of the rows in ``batch.logits_indices``, or of all T tokens.
        """
        with self.device.running():
            x = self.hidden(batch, cache, tap=tap)
            return self.head(x if batch.logits_indices is None else x[batch.logits_indices])

    def hidden(self, batch: ForwardBatch, cache: PagedKVCache, *, tap: Tap | None = None) -> Array:
        """Run the decoder layers of one step: append the batch's keys and values to the cache.

        Parameters
        ----------
        batch : ForwardBatch
        cache : PagedKVCache
            Its blocks named in ``batch.slot_mapping`` are written, those in ``batch.block_tables`` are read.
        tap : callable, optional
            Called as ``tap(i, x)`` with the float32 residual stream [T, H]: i = 0 after the embedding, i = n after
            the n-th decoder layer. `x` is overwritten afterwards; copy what is kept.

        Returns
        -------
        float32 [T, H]
            The residual stream behind the last layer, of all tokens; `head` turns rows of it into logits.

        Notes
        -----
        Nothing is read back from the device, so contents are not checked here: a token id outside the vocabulary
        gives NaN on a GPU, and positions must be below `max_positions`.
        """
        w, ops = self.weights, self._ops
        with self.device.running():
            x = ops.embedding(batch.token_ids, w.embed, dtype=np.float32)
            if tap:
                tap(0, x)
            first = 0
            if tap is None and self.device.kind == "cuda" and not batch.is_decode:
                first = self._replayed_layers(x, batch, cache)
            for i in range(first, len(w.layers)):
                x = self._layer(i, x, batch, cache)
                if tap:
                    tap(i + 1, x)
            return x

    def _layer(self, index: int, x: Array, batch: ForwardBatch, cache: PagedKVCache) -> Array:
        layer = self.weights.layers[index]
        return self._mlp(self._attention(x, layer, batch, *cache.layer(index)), layer)

    def _replayed_layers(self, x: Array, batch: ForwardBatch, cache: PagedKVCache) -> int:
        """Run layers on a GPU with little host time; how many were run.

        The launches of the second layer (whose plans the first one has left) are recorded and made again with the
        addresses of the others: a prompt of a few hundred tokens would wait for Python otherwise. A layer whose weights
        are of other kinds, replaced by a caller, ends it: the operators' checks are for that.
        """
        layers = self.weights.layers
        if len(layers) < 3:
            return 0
        self._layer(0, x, batch, cache)
        tape = Tape()
        with tape.recording():
            self._layer(1, x, batch, cache)
        recorded, b = self._others(1, cache), batch
        if recorded is None:
            return 2
        same = (x, b.positions, b.slot_mapping, b.cu_seqlens_q, b.seq_lens, b.block_tables, self.rope_table)
        replay = tape.bind(recorded[1], [a.data.ptr for a in same])
        if replay is None:
            return 2
        with replay:
            for i in range(2, len(layers)):
                others = self._others(i, cache)
                if others is None or others[0] != recorded[0]:
                    return i
                replay(others[1])
        return len(layers)

    def _others(self, index: int, cache: PagedKVCache) -> tuple[Any, list[int]] | None:
        """Kinds and addresses of everything that is another array in every layer; None for weights that the operators
        would have to copy or refuse."""
        from ..ops._fast import kinds

        found = kinds(tuple(vars(self.weights.layers[index]).values()), None)
        return None if found is None else (found[0], [*found[1], *cache.addresses(index)])

    def head(self, x: Array) -> Array:
        """Logits of rows of the residual stream: the final norm and the product with the vocabulary.

        Parameters
        ----------
        x : float32 [R, H]

        Returns
        -------
        float32 [R, V]
        """
        w, ops = self.weights, self._ops
        with self.device.running():
            h = ops.rms_norm(x, w.norm, self.config.rms_norm_eps, dtype=self.dtype)
            return ops.linear(h, w.head, dtype=np.float32, static_weight=True)

    def _attention(self, x: Array, w: LayerWeights, batch: ForwardBatch, k_cache: Array, v_cache: Array) -> Array:
        c, ops = self.config, self._ops
        h = ops.rms_norm(x, w.input_norm, c.rms_norm_eps, dtype=self.dtype)
        qkv = ops.linear(h, w.qkv, bias=w.qkv_bias, static_weight=True)
        q = ops.qk_norm_rope_cache(
            qkv,
            w.q_norm,
            w.k_norm,
            batch.positions,
            self.rope_table,
            k_cache,
            v_cache,
            batch.slot_mapping,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            eps=c.rms_norm_eps,
        )
        if batch.is_decode:
            # `embedding` starts when all work ahead of it has ended: of keys and values only new ones are being written
            y = ops.attention_decode(
                q, k_cache, v_cache, batch.block_tables, batch.seq_lens, static_cache=batch.static_cache
            )
        else:
            y = ops.attention_prefill(
                q,
                k_cache,
                v_cache,
                cu_seqlens_q=batch.cu_seqlens_q,
                block_tables=batch.block_tables,
                seq_lens=batch.seq_lens,
            )
        return ops.linear(y.reshape(-1, c.q_size), w.o, bias=w.o_bias, residual=x, static_weight=True)

    def _mlp(self, x: Array, w: LayerWeights) -> Array:
        ops = self._ops
        h = ops.rms_norm(x, w.post_norm, self.config.rms_norm_eps, dtype=self.dtype)
        h = ops.linear(h, w.gate_up, activation="swiglu", static_weight=True)
        return ops.linear(h, w.down, residual=x, static_weight=True)

    # -- conveniences -------------------------------------------------------------------------------------

    def __call__(self, input_ids: Any, *, return_hidden: bool = False) -> Any:
        """Compute the logits of whole sequences.

        Parameters
        ----------
        input_ids : integer [B, S] or [S]
            Nested lists or an array (NumPy or CuPy); all rows have S tokens.
        return_hidden : bool
            Also return the residual stream.

        Returns
        -------
        logits : float32 [B, S, V] (or [S, V])
            On the model's device.
        hidden : float32 [L + 1, B, S, H], only with `return_hidden`
            The embeddings, then the output of every decoder layer, before the final norm.

        Raises
        ------
        TypeError
            `input_ids` is not of an integer type.
        ValueError
            A shape that is not [B, S] or [S], an id outside the vocabulary (of host input; reading a GPU array back
            would stall the stream), or more positions than the model has.
        """
        ids = self._check_ids(input_ids)
        lead = tuple(int(n) for n in ids.shape)
        rows, length = (1, *lead) if len(lead) == 1 else lead
        xp, c = self.device.xp, self.config
        with self.device.context():
            kept = c.num_hidden_layers + 1 if return_hidden else 0
            hidden: Array = xp.empty((kept, *lead, c.hidden_size), np.float32)
            if rows * length == 0:
                logits = xp.empty((*lead, c.vocab_size), np.float32)
                return (logits, hidden) if return_hidden else logits
            blocks = -(-length // _CALL_BLOCK)
            cache = ScratchKVCache(c, rows * blocks, _CALL_BLOCK, self.device, self.dtype)
            tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
            start = np.arange(rows, dtype=np.int64)[:, None]
            place = np.arange(length, dtype=np.int64)[None, :]
            put = self.device.put
            batch = ForwardBatch(
                token_ids=ids.reshape(-1).astype(np.int32),
                positions=put(np.tile(np.arange(length, dtype=np.int32), rows)),
                slot_mapping=put((start * (blocks * _CALL_BLOCK) + place).reshape(-1)),
                cu_seqlens_q=put(np.arange(rows + 1, dtype=np.int32) * np.int32(length)),
                seq_lens=put(np.full(rows, length, np.int32)),
                block_tables=put(tables),
                max_query_len=length,
            )

            def keep(index: int, x: Array) -> None:
                hidden[index] = x.reshape(*lead, -1)

            logits = self.forward(batch, cache, tap=keep if return_hidden else None).reshape(*lead, c.vocab_size)
        return (logits, hidden) if return_hidden else logits

    def new_cache(self, num_blocks: int, block_size: int = 16) -> PagedKVCache:
        """Allocate a paged cache for this model on its device."""
        return PagedKVCache(self.config, num_blocks, block_size, self.device, self.dtype)

    @property
    def _ops(self) -> ModuleType:
        # the CPU reference stays the reference even where the user has switched emulation on
        if self.device.kind == "cpu":
            from .. import reference

            return reference
        from .. import ops

        return ops

    def _check_ids(self, input_ids: Any) -> Array:
        xp = self.device.xp
        on_gpu = hasattr(input_ids, "__cuda_array_interface__")
        if on_gpu and self.device.kind != "cuda":
            raise TypeError(f"input_ids is on a GPU but the model on {self.device}; pass a NumPy array or a list")
        if not on_gpu:
            try:
                input_ids = np.asarray(input_ids)
            except ValueError as error:
                raise ValueError(f"input_ids must be rectangular, all rows of one length ({error})") from None
            if input_ids.size == 0 and input_ids.dtype == np.float64:  # what NumPy makes of an empty list
                input_ids = input_ids.astype(np.int64)
        if input_ids.dtype.kind not in "iu":
            raise TypeError(f"input_ids must be integers, got dtype {input_ids.dtype}")
        if input_ids.ndim not in (1, 2):
            raise ValueError(f"input_ids must have shape [B, S] or [S], got {tuple(input_ids.shape)}")
        length = int(input_ids.shape[-1])
        if length > self.max_positions:
            raise ValueError(f"input_ids has {length} positions, the model is loaded for at most {self.max_positions}")
        if not on_gpu and input_ids.size:
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.config.vocab_size:
                bad = low if low < 0 else high
                raise ValueError(f"input_ids contains {bad}, expected 0 to {self.config.vocab_size - 1}")
        with self.device.context():
            return xp.asarray(input_ids)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Qwen3({c.num_parameters / 1e6:.1f} M parameters, {c.num_hidden_layers} layers, hidden {c.hidden_size}, "
            f"{self.dtype}, {self.device})"
        )


def _check_head_dim(config: Qwen3Config, device: Device) -> None:
    """The attention kernels' limit; the CPU reference has none."""
    if device.kind != "cpu" and (config.head_dim % 16 or config.head_dim > 256):
        raise ValueError(
            f"head_dim {config.head_dim} is not supported on {device}: the attention kernels take multiples of 16 up "
            "to 256; device='cpu' runs any even head_dim"
        )
