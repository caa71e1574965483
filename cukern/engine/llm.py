"""`LLM`: a checkpoint with its tokenizer, ready to generate."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cukern.engine.blocks import blocks_for
from cukern.engine.chat import Message
from cukern.engine.engine import Engine, plan_memory
from cukern.engine.params import DEFAULT_MAX_TOKENS, GenerationDefaults, SamplingParams
from cukern.engine.score import Score, Scoring
from cukern.engine.sequence import Completion, counted
from cukern.engine.sequence import Sequence as Request
from cukern.engine.tokenizer import Tokenizer, read_json

__all__ = ["LLM", "Stream"]

Prompt = str | Sequence[int]
"""A text, or its token ids."""


class LLM:
    """A Qwen3 checkpoint that turns prompts into text.

    Parameters
    ----------
    path : str, path or cukern.Qwen3
        Checkpoint folder, hub name such as "Qwen/Qwen3-0.6B", or a loaded model (which is shared, so that an edit of
        its weights shows in the next step; its tokenizer is given by ``tokenizer``).
    dtype : str
        "auto" (the checkpoint's), "float16" or "bfloat16"; "float32" on a CPU, which computes in it anyway.
    device : str, optional
        "cuda", "cuda:1", "cpu" (NumPy float32 reference), "emulated" (the CUDA kernels on the CPU); None picks a GPU
        if one is usable.
    max_num_seqs : int
        Most requests that run at once; more wait.
    max_model_len : int, optional
        Longest prompt plus completion, in tokens. Default: the model's positions, or what the KV pool holds.
    num_blocks, kv_memory : int, optional
        Size of the KV pool, in blocks or in bytes (one of them). Default: full-length room for ``max_num_seqs``
        requests, at most what 90 % of the free GPU memory leaves; on the host four requests, at most 1 GiB.
    block_size : int
        Tokens per block: 16, 32, 64, 128 or 256.
    max_batched_tokens : int
        Most prompt tokens in one step.
    cuda_graphs : bool
        On a GPU, decode by CUDA graphs, with the next step queued before the host looks at the last one;
        ``engine.stats`` says whether they are in use. Results are the same without, bit for bit.
    tokenizer : str, path or Tokenizer, optional
        Where the tokenizer is, if not in the checkpoint. Without any, prompts are token ids and completions have no
        text.

    Notes
    -----
    Requests of any length share one block pool; when it runs dry the youngest request is pre-empted and computed
    again later with the same result. Results do not depend on what else is in the batch. One LLM is for one thread at
    a time, and for the process that made it. Edit weights while no request runs: a step that is queued ahead may still
    read the old ones.

    Raises
    ------
    ValueError, TypeError, FileNotFoundError
        The checkpoint or an option is not usable; the message says which and why.
    MemoryError
        Weights or KV pool do not fit.
    """

    def __init__(
        self,
        path: Any,
        *,
        dtype: str = "auto",
        device: str | None = None,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        num_blocks: int | None = None,
        kv_memory: int | None = None,
        block_size: int = 64,
        max_batched_tokens: int = 8192,
        cuda_graphs: bool = True,
        tokenizer: str | Path | Tokenizer | None = None,
    ) -> None:
        from cukern.jit.launch import check_flag
        from cukern.models import Qwen3, resolve_checkpoint
        from cukern.ops._rows import as_count

        # As Python's integers: NumPy's narrow ones would overflow in what follows.
        max_num_seqs = as_count("LLM", "max_num_seqs", max_num_seqs)
        max_batched_tokens = as_count("LLM", "max_batched_tokens", max_batched_tokens)
        block_size = as_count("LLM", "block_size", block_size)
        max_model_len = None if max_model_len is None else as_count("LLM", "max_model_len", max_model_len)
        num_blocks = None if num_blocks is None else as_count("LLM", "num_blocks", num_blocks)
        kv_memory = None if kv_memory is None else as_count("LLM", "kv_memory", kv_memory)
        check_flag("LLM", "cuda_graphs", cuda_graphs)
        if tokenizer is not None and not isinstance(tokenizer, (str, os.PathLike, Tokenizer)):
            raise TypeError(f"LLM: tokenizer must be a folder or a Tokenizer, got {type(tokenizer).__name__}")
        if isinstance(path, Qwen3):
            if dtype != "auto" or device is not None:
                raise ValueError("LLM: dtype and device belong to the model that was passed; leave them out")
            folder, self.model = None, path
        else:
            folder = resolve_checkpoint(path)
            self.model = Qwen3.from_pretrained(folder, dtype=dtype, device=device)
        self.defaults = self._read_defaults(folder)
        self.tokenizer = self._read_tokenizer(folder, tokenizer)
        if self.tokenizer is not None and not self.defaults.eos_token_ids and self.tokenizer.eos_token_id is not None:
            self.defaults = GenerationDefaults.from_config({}, eos_fallback=self.tokenizer.eos_token_id)
        self._pool_bounds_len = max_model_len is None
        count, self.max_model_len = plan_memory(
            self.model,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            kv_memory=kv_memory,
        )
        self._engine: Engine | None = Engine(
            self.model,
            num_blocks=count,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_model_len=self.max_model_len,
            cuda_graphs=cuda_graphs,
        )

    def _read_defaults(self, folder: Path | None) -> GenerationDefaults:
        path = None if folder is None else folder / "generation_config.json"
        generation = {} if path is None else read_json(path)
        config = self.model.config
        return GenerationDefaults.from_config(
            generation,
            eos_fallback=config.eos_token_id or None,
            source=str(path or "generation_config.json"),
            vocab_size=config.vocab_size,
        )

    @staticmethod
    def _read_tokenizer(folder: Path | None, tokenizer: Any) -> Tokenizer | None:
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        if tokenizer is not None:
            return Tokenizer(tokenizer)
        if folder is not None and (folder / "tokenizer.json").exists():
            return Tokenizer(folder)
        return None

    # -- generation ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts, batched together.

        Parameters
        ----------
        prompts : str, list of int, or a list of these
            Texts or token ids. No prompts give no completions.
        sampling : SamplingParams or list, optional
            One for all prompts, or one each. None: the checkpoint's defaults and 256 tokens.

        Returns
        -------
        list of Completion
            In the order of the prompts.

        Raises
        ------
        ValueError, TypeError
            An empty prompt, a token id outside the vocabulary, a prompt that does not fit with its ``max_tokens``, as
            many sampling parameters as there are no prompts. Nothing has been computed then.
        """
        listed, _ = _as_prompts(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            params = [sampling] * len(listed)
        else:
            if not isinstance(sampling, (list, tuple)):
                raise TypeError(f"sampling must be SamplingParams or a list of them, got {type(sampling).__name__}")
            params = list(sampling)
            if len(params) != len(listed):
                raise ValueError(
                    f"generate: {len(params)} sampling parameters for {len(listed)} prompts; give one, or one each"
                )
        engine = self.engine
        requests = [self.request(p, s, f"prompts[{i}]") for i, (p, s) in enumerate(zip(listed, params))]
        engine.run(requests)
        return [r.completion() for r in requests]

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Any,
        *,
        temperature: float = 1.0,
    ) -> list[Score]:
        """Log-probabilities of given completions, batched together.

        A token's log-probability has the same bits here, in `generate` at that temperature (SamplingParams.logprobs;
        greedy decoding reports temperature 1), in any batch, and in pieces of any size (docs/numerics.md).

        Parameters
        ----------
        prompts : str, list of int, or a list of these
            Texts or token ids, as for `generate`.
        completions : str, list of int, or a list of these
            One for each prompt, or a list of several for each. For a single prompt: one, or a list of several. A text
            is encoded by itself, without special tokens; what is scored are its tokens behind those of the prompt.
        temperature : float
            Positive: the logits are divided by it.

        Returns
        -------
        list of Score
            One for each completion, prompt by prompt; ``Score.prompt_index`` says to which it belongs.

        Raises
        ------
        ValueError, TypeError
            An empty prompt or completion, a token id outside the vocabulary, a prompt that does not fit with its
            completion, not as many entries as prompts, a temperature that is not positive and finite. Nothing has been
            computed then.

        Notes
        -----
        Prompt and completion go through the model as one packed batch without padding, ``max_batched_tokens`` tokens a
        step. Logits are kept for 512 tokens at a time. Several completions of one prompt share its blocks of the cache:
        it is computed once, but for the last block, and again only for one that begins when those before it have ended.
        """
        engine = self.engine
        factor = _temperature(temperature)
        listed, single = _as_prompts(prompts)
        entries = [completions] if single else _per_prompt(completions, len(listed))
        requests, owners = list[Scoring](), list[int]()
        for i, (prompt, entry) in enumerate(zip(listed, entries)):
            ids = self._prompt_ids(prompt, f"prompts[{i}]")
            several, alone = _as_prompts(entry, f"completions[{i}]")
            if not several:
                raise ValueError(f"completions[{i}] is empty; give at least one token to score")
            for j, completion in enumerate(several):
                name = f"completions[{i}]" if alone else f"completions[{i}][{j}]"
                given = self._checked_ids(completion, name, special=False, empty="give at least one token to score")
                self._check_length(
                    len(ids), len(given), f"prompts[{i}]", f"with the {counted(len(given), 'token')} of {name}"
                )
                request = Scoring(engine.next_number(), ids, given, factor)
                request.follows = requests[-1] if j else None
                requests.append(request)
                owners.append(i)
        engine.run(requests)
        return [request.result(i) for request, i in zip(requests, owners)]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Stream:
        """Complete one prompt and give the text as it comes.

        Parameters
        ----------
        prompt : str or list of int
        sampling : SamplingParams, optional

        Returns
        -------
        Stream
            Iterate over it for the pieces; ``.result`` is the Completion at the end. Leaving the loop early, closing
            or deleting it frees its blocks.

        Raises
        ------
        ValueError, TypeError
            As in `generate`.
        """
        return Stream(self.engine, self.request(prompt, sampling, "prompt"))

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Completion:
        """Answer a conversation through the checkpoint's chat template.

        Parameters
        ----------
        messages : list of mappings
            ``{"role": "user", "content": "..."}`` and so on.
        sampling : SamplingParams, optional
        enable_thinking, tools : optional
            Passed to the template.

        Raises
        ------
        ValueError
            No tokenizer or chat template, a malformed message, or as in `generate`.
        """
        ids = self.chat_prompt(messages, enable_thinking=enable_thinking, tools=tools)
        return self.generate([ids], sampling)[0]

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, for `generate` (several conversations at once) and `stream`."""
        tokenizer = self._need_tokenizer("chat")
        text = tokenizer.chat_template.render(messages, enable_thinking=enable_thinking, tools=tools)
        return tokenizer.encode(text, add_special_tokens=False)

    # -- requests ------------------------------------------------------------------------------------------

    def request(self, prompt: Prompt, sampling: SamplingParams | None = None, name: str = "prompt") -> Request:
        """A checked request, not yet queued: for those who drive `engine` themselves (``llm.engine.add([request])``).

        Parameters
        ----------
        prompt : str or list of int
        sampling : SamplingParams, optional
        name : str
            What messages call the prompt.

        Raises
        ------
        ValueError, TypeError
            As in `generate`.
        """
        engine = self.engine
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
        ids = self._prompt_ids(prompt, name)
        # The last token that is drawn needs no room in the cache: a sequence ends with it.
        room = min(self.max_model_len, engine.pool.num_blocks * engine.pool.block_size) - len(ids)
        params = self.defaults.resolve(
            sampling or SamplingParams(),
            vocab_size=self.model.config.vocab_size,
            room=max(room, 0),
            fresh_seed=secrets.randbits(63),
        )
        if params.stop and self.tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer, and the checkpoint has no tokenizer.json; use stop_token_ids"
            )
        default = " (the default)" if params.max_tokens == DEFAULT_MAX_TOKENS else ""
        advice = "lower max_tokens (None: as many as fit)"
        self._check_length(len(ids), params.max_tokens, name, f"with max_tokens {params.max_tokens}{default}", advice)
        detokenizer = None if self.tokenizer is None else self.tokenizer.detokenizer()
        request = Request(engine.next_number(), ids, params, detokenizer)
        if params.max_tokens == 0:
            request.finish("length")
        return request

    def _check_length(self, prompt: int, behind: int, name: str, what: str, advice: str = "") -> None:
        """Raise ValueError for a prompt that does not fit with the tokens behind it."""
        pool = self.engine.pool
        if prompt + behind > self.max_model_len:
            # only what can help: fewer tokens behind a prompt that fits, a limit that is not the model's own
            lower = [advice] if advice and prompt < self.max_model_len else []
            remedies = lower if lower and behind >= self.max_model_len else ["shorten it", *lower]
            whose = ""
            if self.max_model_len >= self.model.max_positions:
                whose = ", the model's own limit"
            elif self._pool_bounds_len:
                whose = ", all that the KV pool holds"
                remedies.append("give more KV memory")
            else:
                remedies.append("raise max_model_len")
            too_much = f"{what} that" if prompt <= self.max_model_len else "that alone"
            raise ValueError(
                f"{name} has {counted(prompt, 'token')}; {too_much} exceeds max_model_len {self.max_model_len}{whose}; "
                + " or ".join(filter(None, [", ".join(remedies[:-1]), remedies[-1]]))
            )
        if blocks_for(prompt + behind, pool.block_size) > pool.num_blocks:
            raise ValueError(
                f"{name} has {counted(prompt, 'token')}; {what} that exceeds the KV pool of {pool.num_blocks} blocks "
                f"of {pool.block_size} tokens; raise num_blocks or kv_memory"
            )

    def _prompt_ids(self, prompt: Prompt, name: str) -> list[int]:
        return self._checked_ids(prompt, name, special=True, empty="a model continues at least one token")

    def _checked_ids(self, tokens: Prompt, name: str, *, special: bool, empty: str) -> list[int]:
        """Token ids of a text (``special``: with what the tokenizer puts around it), or the ids given."""
        if isinstance(tokens, str):
            what = f"a text {'prompt' if special else 'completion'}"
            ids = self._need_tokenizer(what).encode(tokens, add_special_tokens=special, name=name)
        else:
            ids = _token_ids(tokens, name)
        if not ids:
            raise ValueError(f"{name} is empty; {empty}")
        vocab = self.model.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            outside = next(i for i in ids if not 0 <= i < vocab)
            raise ValueError(f"{name} has token id {outside}, outside the vocabulary 0..{vocab - 1}")
        return ids

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer, and the checkpoint has no tokenizer.json; pass token ids or tokenizer="
            )
        return self.tokenizer

    # -- resources -----------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request holds."""
        return self.engine.pool.num_free

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""
        return self.engine.pool.num_blocks

    @property
    def engine(self) -> Engine:
        """The engine: `Engine.step` advances every request by one step.

        Raises
        ------
        RuntimeError
            The LLM is closed.
        """
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def close(self) -> None:
        """Free the KV cache and let go of the model; streams still open end with an error."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self.__dict__.pop("model", None)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._engine is None:
            return "LLM(closed)"
        pool = self._engine.pool
        blocks = f"{pool.num_blocks} blocks of {pool.block_size}"
        return f"LLM({self.model!r}, max_model_len {self.max_model_len}, {blocks})"


class Stream(Iterator[str]):
    """The pieces of one completion as they come; made by `LLM.stream`.

    Pieces hold whole characters, and joined they are the completion's text. Other requests of the same LLM advance in
    the same steps. Use it as a context manager, or just leave the loop: `close` runs when it is deleted.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request
        if request.finish_reason is None:
            engine.add([request])

    def __next__(self) -> str:
        request = self._request
        try:
            while not request.pieces and request.finish_reason is None:
                self._engine.step()
        except BaseException:
            self.close()
            raise
        if request.pieces:
            return request.pieces.popleft()
        raise StopIteration

    @property
    def finished(self) -> bool:
        """Every token has been generated (pieces may still wait to be read)."""
        return self._request.finish_reason is not None

    @property
    def result(self) -> Completion:
        """The completion.

        Raises
        ------
        RuntimeError
            The stream is not at its end; read on or close it.
        """
        if not self.finished:
            raise RuntimeError("the stream is not at its end: read all its pieces, or close() it, before result")
        return self._request.completion()

    def close(self) -> None:
        """End the request and free its blocks; ``result`` then holds what was generated so far."""
        self._engine.drop([self._request])

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_request"):  # not set when __init__ failed
            self.close()


def _unordered(value: Any) -> bool:
    """Whether a value cannot be a list of anything: a single value, or a collection without an order."""
    single = isinstance(value, (bytes, bytearray)) or getattr(value, "ndim", 1) == 0
    return single or isinstance(value, (dict, set, frozenset)) or not hasattr(value, "__iter__")


def _as_prompts(prompts: Any, name: str = "prompts") -> tuple[list[Prompt], bool]:
    """One prompt or many, as a list of prompts, and whether it was one."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.size:
        return [prompts.tolist()], True
    if _unordered(prompts):
        raise TypeError(f"{name} must be a text, token ids, or a list of these, got {type(prompts).__name__}")
    listed = list(prompts)
    if listed and all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in listed):
        return [listed], True
    return listed, False


def _per_prompt(completions: Any, count: int) -> list[Any]:
    """The entries of a list that must have one for each prompt."""
    if isinstance(completions, str) or _unordered(completions):
        raise TypeError(f"completions must be a list with one entry a prompt, got {type(completions).__name__}")
    entries = list(completions)
    if len(entries) != count:
        raise ValueError(f"score: {len(entries)} completions for {count} prompts; give one entry a prompt")
    return entries


def _temperature(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"score: temperature must be a number, got {value!r}")
    try:
        with np.errstate(over="ignore"):
            number = float(np.float32(value))
    except OverflowError:  # an int beyond float64
        number = float("inf")
    if not 0 < number < float("inf"):
        raise ValueError(f"score: temperature must be positive and finite in float32, got {value!r}")
    return number


def _token_ids(prompt: Any, name: str) -> list[int]:
    if _unordered(prompt):
        raise TypeError(f"{name} must be a text or token ids, got {type(prompt).__name__}")
    ids = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
    if set(map(type, ids)) <= {int}:  # the usual case, without a look at each in Python
        return ids
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, (int, np.integer)):
            raise TypeError(f"{name} must hold integer token ids, got {i!r}")
    return [int(i) for i in ids]
