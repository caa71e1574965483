"""The model as a whole: error of its logits and time of a prefill, beside transformers. Decoding: decode.py."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cukern.bench.report import Row, describe
from cukern.bench.timing import median_wall

__all__ = ["ModelBench", "forward_flops"]

BLOCK = 64
ERROR_RATIO = 1.2
"""Our error may be this many times what transformers itself loses in the same dtype."""


def forward_flops(config: Any, tokens: int, rows: int) -> float:
    """Operations of a causal forward pass over one sequence: products and attention; ``rows`` of it go through the
    head."""
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    attention = 2 * config.q_size * (tokens + 1)  # q k and p v over the keys before, on average half of them
    products = config.num_hidden_layers * tokens * (2.0 * layer + attention)
    return products + 2.0 * rows * config.hidden_size * config.vocab_size


class ModelBench:
    """Benchmarks of one checkpoint; the models are loaded when first needed.

    Parameters
    ----------
    folder : Path
    dtype : str
        "float16" or "bfloat16".
    name : str
        Shown in the table.
    torch, transformers : module or None
        The peer, where it can be imported.
    device : str
    model : Qwen3, optional
        Instead of a checkpoint, which only transformers needs then.
    """

    def __init__(
        self,
        folder: Path | None,
        dtype: str,
        name: str,
        torch: Any = None,
        transformers: Any = None,
        device: str = "cuda",
        model: Any = None,
    ) -> None:
        import cukern

        self.folder, self.dtype, self.name = folder, dtype, name
        self.torch = torch
        self._torch: Any = torch if transformers is not None else None
        self.transformers_model = transformers
        if model is None:
            if folder is None:
                raise ValueError("ModelBench: give a folder or a model")
            model = cukern.Qwen3.from_pretrained(folder, dtype=dtype, device=device)
        self.model = model
        self._half: Any = None
        self._peer_problem = ""
        self._peer_device = "cuda" if self.model.device.kind == "cuda" else "cpu"

    # -- logits against transformers ---------------------------------------------------------------------------

    def logits(self, lengths: Sequence[int]) -> list[Row]:
        """All logits of a prompt: time, and relative L2 error against transformers in float32.

        The limit is ``ERROR_RATIO`` times the error of transformers in this dtype.
        """
        prompts = [self.prompt(length) for length in lengths]
        exact: list[Any] = [None] * len(prompts)
        if self._torch is not None:
            exact = self._peer(lambda: self._exact_logits(prompts)) or exact
        rows = []
        for prompt, expected in zip(prompts, exact):
            ours = self.model(prompt[None])[0]
            error = limit = peer_us = None
            if expected is not None:
                theirs = self._peer_logits(self._half_peer(), prompt)
                error = self._relative_error(self._tensor(ours), expected)
                limit = ERROR_RATIO * self._relative_error(theirs, expected)
                del ours, theirs
                peer_us = self.wall(partial(self._peer_logits, self._half_peer(), prompt))
            rows.append(
                Row(
                    "model",
                    f"{self.name} logits S{len(prompt)}",
                    self.dtype,
                    self.wall(partial(self.model, prompt[None])),
                    flops=forward_flops(self.model.config, len(prompt), len(prompt)),
                    error=error,
                    limit=limit,
                    peer="transformers" if peer_us else "",
                    peer_microseconds=peer_us,
                    note=f"relative L2 error of the logits{self._peer_problem}",
                )
            )
        return rows

    # -- the engine --------------------------------------------------------------------------------------------

    def prefill(self, lengths: Sequence[int]) -> list[Row]:
        """First token of a prompt through the engine. Checked: the same token and log-probability, bit for bit, in
        pieces of 336."""
        rows = []
        for length in lengths:
            prompt = self.prompt(length).tolist()
            whole = self.llm(1, length + 1)
            once = self.first(whole, prompt)
            pieces = self.llm(1, length + 1, max_batched_tokens=length // 3 + 1)
            microseconds = self.wall(partial(self.first, whole, prompt))
            peer_us = None
            if self._torch is not None:
                peer_us = self._peer(partial(self.wall, partial(self._last_logits, np.array(prompt))))
            rows.append(
                Row(
                    "prefill",
                    f"{self.name} B1 S{length}",
                    self.dtype,
                    microseconds,
                    nbytes=self.weight_bytes(),
                    flops=forward_flops(self.model.config, length, 1),
                    error=float(self.first(pieces, prompt) != once),
                    limit=0.0,
                    peer="transformers" if peer_us else "",
                    peer_microseconds=peer_us,
                    note=f"{length / microseconds * 1e6:.0f} tokens/s; same bits in pieces{self._peer_problem}",
                )
            )
        return rows

    def llm(self, batch: int, length: int, max_batched_tokens: int = 8192) -> Any:
        from cukern.engine import LLM

        blocks = batch * (-(-length // BLOCK) + 1)
        return LLM(
            self.model,
            num_blocks=blocks,
            block_size=BLOCK,
            max_num_seqs=batch,
            max_batched_tokens=max_batched_tokens,
            max_model_len=min(length, self.model.max_positions),
        )

    @staticmethod
    def first(llm: Any, prompt: list[int]) -> tuple[list[int], list[float] | None]:
        """Token that follows a prompt, and its log-probability."""
        from cukern.engine import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=True)
        (completion,) = llm.generate([prompt], sampling)
        return completion.token_ids, completion.logprobs

    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but an embedding table that is not also the head."""
        config = self.model.config
        table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        return (config.num_parameters - table) * self.model.dtype.itemsize

    def kv_bytes(self) -> int:
        config = self.model.config
        return 2 * config.num_hidden_layers * config.kv_size * self.model.dtype.itemsize

    def prompt(self, length: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.model.config.vocab_size, length)

    def wall(self, work: Callable[[], Any]) -> float:
        """Median microseconds of work, the host's share included."""
        return median_wall(work, self._synchronize)

    def _synchronize(self) -> None:
        if self.model.device.kind == "cuda":
            self.model.device.xp.cuda.runtime.deviceSynchronize()

    # -- transformers ------------------------------------------------------------------------------------------

    def _load_peer(self, dtype: str) -> Any:
        load = self.transformers_model.AutoModelForCausalLM.from_pretrained
        return load(self.folder, dtype=getattr(self._torch, dtype)).to(self._peer_device).eval()

    def _half_peer(self) -> Any:
        if self._half is None:
            self._half = self._load_peer(self.dtype)
        return self._half

    def _peer(self, work: Callable[[], Any]) -> Any:
        """The result of work with transformers; None if it fails: another library's error must not end the run."""
        try:
            return work()
        except Exception as error:
            self._peer_problem = f"; transformers: {describe(error)}"
            return None

    def _exact_logits(self, prompts: list[np.ndarray]) -> list[Any]:
        peer = self._load_peer("float32")
        exact = [self._peer_logits(peer, p) for p in prompts]
        del peer
        self.collect()
        return exact

    def compare_logits(self, ids: np.ndarray, steps: Sequence[Any]) -> tuple[float, float]:
        """Error of our logits [1, V] of the last tokens of a sequence, one array a step, and what is allowed."""
        count = len(steps)
        exact = self._exact_logits([ids])[0][-count:]
        theirs = self._peer_logits(self._half_peer(), ids)[-count:]
        ours = self._torch.cat([self._tensor(logits) for logits in steps])
        return self._relative_error(ours, exact), ERROR_RATIO * self._relative_error(theirs, exact)

    def _last_logits(self, prompt: np.ndarray) -> Any:
        return self._peer_logits(self._half_peer(), prompt, last=True)

    def _peer_logits(self, peer: Any, prompt: np.ndarray, *, last: bool = False) -> Any:
        with self._torch.inference_mode():
            ids = self._torch.from_numpy(np.asarray(prompt, np.int64))[None].to(self._peer_device)
            return peer(ids, use_cache=False, logits_to_keep=1 if last else 0).logits[0].float()

    def peer_step(self, prompts: list[list[int]], steps: int, compiled: bool) -> float:
        """Microseconds a step of greedy generate with a static cache: the difference of two lengths."""
        torch = self._torch
        ids = torch.tensor(prompts, device=self._peer_device)
        short = max(1, steps // 4)

        def run(count: int) -> float:
            began = time.perf_counter()
            with torch.inference_mode():
                self._half_peer().generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    cache_implementation="static",
                    disable_compile=not compiled,
                )
            self._synchronize()
            return time.perf_counter() - began

        for count in (short, steps):
            run(count)
        differences = [run(steps) - run(short) for _ in range(3)]
        return statistics.median(differences) / (steps - short) * 1e6

    def _tensor(self, array: Any) -> Any:
        return self._torch.from_numpy(array) if isinstance(array, np.ndarray) else self._torch.from_dlpack(array)

    @staticmethod
    def _relative_error(logits: Any, exact: Any) -> float:
        """L2 norm of the difference over that of the exact logits, summed in float64 row by row."""
        off = scale = 0.0
        for row, wanted in zip(logits.split(256), exact.split(256)):
            off += float((row.double() - wanted.double()).square().sum())
            scale += float(wanted.double().square().sum())
        return (off / scale) ** 0.5

    def collect(self) -> None:
        gc.collect()
        if self.torch is not None and self.model.device.kind == "cuda":
            self.torch.cuda.empty_cache()
