"""The strongest plain PyTorch decoder that is still fair: our packed weights, fused projections, scaled-dot-product
attention over a static cache, the drawn token fed back on the device, all of it one CUDA graph. Only for benchmarks."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

__all__ = ["TorchDecoder"]

_ROOM = 64  # positions behind the context


class TorchDecoder:
    """One decoding step of a batch whose sequences are equally long.

    The query heads of a key/value head are given to attention as its query rows, so that no backend has to repeat keys
    and values.

    Parameters
    ----------
    torch : module
    model : cukern.Qwen3
        Its weights are used where they are.
    batch, context : int
        Sequences, and tokens in the cache of each.
    sampled : bool
        Draw with temperature 0.6, top-k 20, top-p 0.95 instead of greedily.
    masked : bool
        Attend over the whole cache under a mask, as an engine has to; otherwise over a slice of fixed length, which is
        faster and right for one position only.
    """

    def __init__(
        self, torch: Any, model: Any, batch: int, context: int, *, sampled: bool = False, masked: bool = True
    ) -> None:
        self._torch, self._config = torch, model.config
        c, w = model.config, model.weights
        self._batch, self._context, self._sampled, self._masked = batch, context, sampled, masked
        self._eps = c.rms_norm_eps
        self._embed = self._tensor(w.embed)
        self._dtype, device = self._embed.dtype, self._embed.device
        self._head, self._norm = self._tensor(w.head), self._tensor(w.norm).to(self._dtype)
        names = ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "post_norm", "gate_up", "down")
        self._layers = [
            {n: None if (a := getattr(layer, n)) is None else self._tensor(a).to(self._dtype) for n in names}
            for layer in w.layers
        ]
        self._table = self._tensor(model.rope_table)
        length = -(-(context + _ROOM) // 64) * 64
        shape = (c.num_hidden_layers, batch, c.num_key_value_heads, length, c.head_dim)
        generator = torch.Generator(device=device).manual_seed(0)
        self._k = torch.empty(shape, dtype=self._dtype, device=device).normal_(generator=generator)
        self._v = torch.empty(shape, dtype=self._dtype, device=device).normal_(generator=generator)
        self.ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.full((1,), context, dtype=torch.int64, device=device)
        self._places = torch.arange(length, device=device)
        self.logits: Any = None

    def _tensor(self, array: Any) -> Any:
        """An array of ours as a tensor over the same memory; bfloat16 goes by its bits, which DLPack always takes."""
        torch = self._torch
        half = array.dtype.name == "bfloat16"
        raw = array.view(np.int16) if half else array
        tensor = torch.from_numpy(raw) if isinstance(array, np.ndarray) else torch.from_dlpack(raw)
        return tensor.view(torch.bfloat16) if half else tensor

    def step(self) -> None:
        """Compute `logits` [B, V] of the tokens `ids`, draw the next ones into `ids`, and move on."""
        torch, functional, c = self._torch, self._torch.nn.functional, self._config
        group = c.num_attention_heads // c.num_key_value_heads
        heads = (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
        keys = self._places.shape[0] if self._masked else self._context + 1
        mask = (self._places <= self.position) if self._masked else None
        if mask is not None:
            mask = mask.expand(self._batch, c.num_key_value_heads, group, keys)
        cos, sin = self._table[self.position].to(self._dtype).chunk(2, -1)

        def norm(x: Any, weight: Any) -> Any:
            return functional.rms_norm(x, weight.shape, weight, self._eps)

        def rotate(x: Any) -> Any:
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        x = functional.embedding(self.ids, self._embed)
        for layer, k_cache, v_cache in zip(self._layers, self._k, self._v):
            qkv = functional.linear(norm(x, layer["input_norm"]), layer["qkv"], layer["qkv_bias"])
            q, k, v = qkv.view(self._batch, -1, c.head_dim).split(heads, 1)
            q = rotate(norm(q, layer["q_norm"])).view(self._batch, c.num_key_value_heads, group, c.head_dim)
            k_cache.index_copy_(2, self.position, rotate(norm(k, layer["k_norm"])).unsqueeze(2))
            v_cache.index_copy_(2, self.position, v.unsqueeze(2))
            y = functional.scaled_dot_product_attention(q, k_cache[:, :, :keys], v_cache[:, :, :keys], attn_mask=mask)
            x = x + functional.linear(y.reshape(self._batch, -1), layer["o"], layer["o_bias"])
            gate, up = functional.linear(norm(x, layer["post_norm"]), layer["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        self.logits = functional.linear(norm(x, self._norm), self._head)
        self.ids.copy_(self._draw(self.logits))
        self.position.add_(1)

    def _draw(self, logits: Any) -> Any:
        if not self._sampled:
            return logits.argmax(-1)
        values, ids = (logits.float() / 0.6).topk(20, -1)
        p = values.softmax(-1)
        p = p * (p.cumsum(-1) - p < 0.95)
        noise = self._torch.empty_like(p).exponential_()
        return ids.gather(-1, (p / noise).argmax(-1, keepdim=True))[:, 0]

    def error(self, model: Any, tokens: list[int]) -> float:
        """Relative L2 distance of the last logits to ours after some tokens, for sequences that hold nothing else."""
        torch = self._torch
        ours = self._tensor(model([tokens])[0, -1]).double()
        with torch.inference_mode():
            self.position.zero_()
            for token in tokens:
                self.ids.fill_(token)
                self.step()
            theirs = self.logits[0].double()
        self.position.fill_(self._context)
        return float((theirs - ours).norm() / ours.norm())

    def microseconds(self, replays: int = 48, samples: int = 5, *, compiled: bool = False) -> float:
        """Median time of a step as a CUDA graph, without the host.

        Parameters
        ----------
        replays : int
            Steps of a sample, at most 60.
        samples : int
        compiled : bool
            Let torch.compile (max-autotune) fuse the step first; minutes.
        """
        torch = self._torch
        step = torch.compile(self.step, mode="max-autotune-no-cudagraphs") if compiled else self.step
        with torch.inference_mode():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            times = [self._sample(graph, replays) for _ in range(samples + 1)]
        if not math.isfinite(float(self.logits.float().sum())):
            raise RuntimeError("the torch decoder gave logits that are not finite")
        return statistics.median(times[1:])

    def _sample(self, graph: Any, replays: int) -> float:
        torch = self._torch
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.position.fill_(self._context)
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / replays
