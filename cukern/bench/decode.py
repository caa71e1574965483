"""Decoding: time of a step through the engine, its floor, peers in the same process, and the check of its bits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cukern.bench.report import Row, describe

if TYPE_CHECKING:
    from cukern.bench.model import ModelBench

__all__ = ["SAMPLINGS", "DecodeBench", "DecodeCase", "decode_cases"]

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "seed": 0},
}
"""Name -> sampling parameters of a case."""

_SHAPES = ((1, 128), (1, 4096), (1, 32768), (64, 1024), (256, 160))
_WARM = 8
_GROUP = 4  # steps of one sample of wall time: with a step queued ahead, single ones alternate
_CHECKED = 4  # steps whose logits are compared
_PEER_STEPS = 24
_PEER_ERROR = 0.05
# Bandwidth on the data sheet, bytes a second.
_DATA_SHEET = {"H200": 4.8e12, "H100": 3.35e12, "B200": 8.0e12, "A100": 2.04e12}


@dataclass(frozen=True)
class DecodeCase:
    """``batch`` sequences of ``context`` tokens in the middle of the timed steps; ``sampling`` is one of SAMPLINGS."""

    batch: int
    context: int
    sampling: str

    @property
    def label(self) -> str:
        return f"B{self.batch} ctx{self.context} {self.sampling}"


def decode_cases(
    batches: Sequence[int] = (), contexts: Sequence[int] = (), samplings: Sequence[str] = ()
) -> list[DecodeCase]:
    """The standard cases, or every combination of the batches and contexts given (1 and 128 where only one is)."""
    shapes = list(_SHAPES)
    if batches or contexts:
        shapes = [(batch, context) for context in contexts or (128,) for batch in batches or (1,)]
    return [DecodeCase(*shape, sampling) for shape in shapes for sampling in samplings or SAMPLINGS]


class DecodeBench:
    """Measures decoding steps.

    Parameters
    ----------
    bench : ModelBench
        Model and peers.
    gpu : str
        Name of the GPU, for its bandwidth on the data sheet.
    steps : int
        Steps that are timed.
    compiled_peer : bool
        Let the peers be compiled, which takes minutes.
    """

    def __init__(self, bench: ModelBench, gpu: str = "", steps: int = 100, *, compiled_peer: bool = False) -> None:
        self._bench, self._steps, self._compiled = bench, max(steps, _GROUP), compiled_peer
        self._paper = next((rate for name, rate in _DATA_SHEET.items() if name in gpu), None)
        self._llms: dict[tuple[int, int], Any] = {}

    def rows(self, cases: Sequence[DecodeCase]) -> Iterator[Row]:
        """Measure the cases one after another; the last row compares the logits of decoding steps with
        transformers.

        A context too short to lie in the middle of the timed steps is measured, and named, as the shortest that does.

        Raises
        ------
        ValueError
            A context that leaves no room for the steps in the model's positions.
        """
        shortest, most = 1 + self._ahead, self._bench.model.max_positions
        cases = list(dict.fromkeys(replace(case, context=max(case.context, shortest)) for case in cases))
        for case in cases:
            if self._reach(case) > most:
                raise ValueError(
                    f"bench decode: context {case.context} and the timed steps need {self._reach(case)} positions, "
                    f"the model has {most}; give a context of at most {most - self._reach(case) + case.context}"
                )
        for case in cases:
            yield self._row(case)
        if cases and self._bench.transformers_model is not None:
            yield self._logits_row(DecodeCase(1, min(128, cases[0].context), "greedy"))

    @property
    def _ahead(self) -> int:
        """Steps before the middle of the timed ones; each makes the context a token longer."""
        return _WARM + self._steps // 2

    def _reach(self, case: DecodeCase) -> int:
        """Positions for all steps, those of the GPU alone among them."""
        return case.context + self._steps + 4 * _WARM

    def _row(self, case: DecodeCase) -> Row:
        bench = self._bench
        llm = self._llm(case)
        length = case.context - self._ahead
        prompts = [bench.prompt(length, seed=i).tolist() for i in range(case.batch)]
        microseconds, device = self._time(llm, prompts, case)
        different, compared = self._check(llm, prompts, case)
        nbytes = bench.weight_bytes() + case.batch * case.context * bench.kv_bytes()
        notes = [f"{case.batch / microseconds * 1e6:.0f} tokens/s"]
        if self._paper is not None:
            share = 100 * nbytes / self._paper / (microseconds * 1e-6)
            notes.append(f"{share:.0f} % of {self._paper / 1e12:g} TB/s")
        if device is not None:
            notes.append(f"{device:.1f} us on the GPU")
        state = llm.engine.stats["cuda_graphs"]
        notes.append(f"{compared} tokens and logits as without graphs" if state == "on" else f"no CUDA graphs: {state}")
        times, problems = self._peers(case, prompts)
        best = min(times, key=times.__getitem__) if times else ""
        notes += [f"{name} {us:.0f} us" for name, us in times.items() if name != best]
        return Row(
            "decode",
            f"{bench.name} {case.label}",
            bench.dtype,
            microseconds,
            nbytes=nbytes,
            error=float(different),
            limit=0.0,
            peer=best,
            peer_microseconds=times.get(best),
            note=", ".join([*notes, *problems]),
        )

    def _llm(self, case: DecodeCase) -> Any:
        """Made for a batch and context, and kept until another one is asked for."""
        key = (case.batch, case.context)
        if key not in self._llms:
            for llm in self._llms.values():
                llm.close()
            self._llms.clear()
            self._bench.collect()
            self._llms[key] = self._bench.llm(case.batch, self._reach(case))
        return self._llms[key]

    def _start(self, llm: Any, prompts: list[list[int]], case: DecodeCase) -> list[Any]:
        """Requests whose prompts are computed."""
        from cukern.engine import SamplingParams

        sampling = SamplingParams(**SAMPLINGS[case.sampling], max_tokens=None, ignore_eos=True)
        requests = [llm.request(prompt, sampling, "prompt") for prompt in prompts]
        llm.engine.add(requests)
        while any(r.num_generated == 0 for r in requests):
            llm.engine.step()
        return requests

    def _time(self, llm: Any, prompts: list[list[int]], case: DecodeCase) -> tuple[float, float | None]:
        """Median microseconds of a step, host included, and of the GPU alone."""
        engine = llm.engine
        requests = self._start(llm, prompts, case)
        for _ in range(_WARM):
            engine.step()
        times = []
        for _ in range(self._steps // _GROUP):
            began = time.perf_counter()
            for _ in range(_GROUP):
                engine.step()
            times.append((time.perf_counter() - began) / _GROUP)
        device = self._time_device(engine)
        engine.drop(requests)
        return statistics.median(times) * 1e6, device

    def _time_device(self, engine: Any) -> float | None:
        """Microseconds a step of several that are queued at once."""
        loop = engine.loop
        if loop is None or self._bench.model.device.kind != "cuda":
            return None
        cuda = self._bench.model.device.xp.cuda
        times = []
        for _ in range(3):
            loop.stale = True
            while loop.busy:
                engine.step()
            with engine.stream.use():
                depth, loop.depth = loop.depth, _GROUP
                loop.load(engine.scheduler.schedule())
                start, stop = cuda.Event(), cuda.Event()
                start.record()
                loop.extend()
                stop.record()
                stop.synchronize()
                loop.depth = depth
            times.append(cuda.get_elapsed_time(start, stop) * 1e3 / _GROUP)
        return statistics.median(times)

    def _check(self, llm: Any, prompts: list[list[int]], case: DecodeCase) -> tuple[int, int]:
        """Tokens and logits of the first steps that differ between captured steps and operators launched one by one,
        and how many were compared."""
        first, captured = self._trace(llm, prompts, case, plain=False)
        other_first, launched = self._trace(llm, prompts, case, plain=True)
        different, compared = sum(a != b for a, b in zip(first, other_first)), len(first)
        for (tokens, logits), (other_tokens, other_logits) in zip(captured, launched):
            different += sum(a != b for a, b in zip(tokens, other_tokens))
            different += int((logits.view(np.uint32) != other_logits.view(np.uint32)).sum())
            compared += len(tokens) + logits.size
        return different, compared

    def _trace(
        self, llm: Any, prompts: list[list[int]], case: DecodeCase, *, plain: bool
    ) -> tuple[list[int], list[tuple[list[int], Any]]]:
        """The first tokens, and tokens and logits of some steps, one at a time."""
        from cukern.engine.decode import DecodeLoop

        engine = llm.engine
        kept = engine.loop
        options = {"persistent_rows": 0} if plain else {}
        capture = not plain and self._bench.model.device.kind == "cuda"
        engine.loop = DecodeLoop(
            engine.model,
            engine.cache,
            engine.pool,
            max_num_seqs=case.batch,
            max_model_len=llm.max_model_len,
            capture=capture,
            depth=1,
            keep_logits=True,
            **options,
        )
        requests = self._start(llm, prompts, case)
        first = [r.tokens[-1] for r in requests]
        out = []
        for _ in range(_CHECKED):
            engine.step()
            logits = engine.loop.program.logits[engine.loop.flavour][: case.batch]
            out.append(([r.tokens[-1] for r in requests], logits.copy()))
        engine.drop(requests)
        engine.loop = kept
        return first, out

    def _logits_row(self, case: DecodeCase) -> Row:
        """Relative L2 error of the logits of decoding steps against transformers in float32."""
        bench = self._bench
        prompt = bench.prompt(case.context).tolist()
        (token,), steps = self._trace(self._llm(case), [prompt], case, plain=False)
        tokens = [token, *(drawn[0] for drawn, _ in steps[:-1])]
        began = time.perf_counter()
        error: float | None = None
        limit: float | None = None
        problem = ""
        try:
            error, limit = bench.compare_logits(np.array(prompt + tokens), [logits for _, logits in steps])
        except Exception as failure:
            problem = f"; transformers: {describe(failure)}"
        return Row(
            "decode",
            f"{bench.name} B1 ctx{case.context} logits",
            bench.dtype,
            (time.perf_counter() - began) * 1e6,
            error=error,
            limit=limit,
            note=f"relative L2 error of {len(steps)} steps against transformers in float32{problem}",
        )

    def _peers(self, case: DecodeCase, prompts: list[list[int]]) -> tuple[dict[str, float], list[str]]:
        """Microseconds a step of each peer, and what went wrong with others, which must not end the run."""
        bench, times, problems = self._bench, dict[str, float](), list[str]()
        if bench.torch is None:
            return times, problems
        jobs = {"torch graph": lambda: self._torch_graph(case)}
        if case.sampling == "greedy" and bench.transformers_model is not None:
            name = "transformers static" + (" compiled" if self._compiled else "")
            jobs[name] = lambda: bench.peer_step(prompts, _PEER_STEPS, self._compiled)
        for name, job in jobs.items():
            try:
                times[name] = job()
            except Exception as error:
                problems.append(f"{name}: {describe(error)}")
            bench.collect()
        return times, problems

    def _torch_graph(self, case: DecodeCase) -> float:
        """The faster of a masked and an unmasked decoder in a CUDA graph, whose logits are checked first."""
        from cukern.bench.torch_peer import TorchDecoder

        bench = self._bench
        times = []
        for masked in (True, False):
            decoder = TorchDecoder(
                bench.torch, bench.model, case.batch, case.context, sampled=case.sampling != "greedy", masked=masked
            )
            if masked:
                error = decoder.error(bench.model, bench.prompt(8).tolist())
                if not error < _PEER_ERROR:
                    raise RuntimeError(f"its logits are {error:.2g} away from ours")
            times.append(decoder.microseconds(compiled=self._compiled))
            del decoder
            bench.collect()
        return min(times)
