"""``cukern generate`` and ``cukern demo``."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cukern.cli import app

if TYPE_CHECKING:
    from cukern.engine import LLM, Completion, SamplingParams

DEMO_PROMPT = "According to a careful calculation I have made"


def _check_device(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"cpu|emulated|cuda(:\d+)?", value):
        raise typer.BadParameter(f"must be cuda, cuda:N, cpu or emulated, got {value!r}")
    return value


def _check_dtype(value: str) -> str:
    if value not in ("auto", "float16", "bfloat16"):
        raise typer.BadParameter(f"must be auto, float16 or bfloat16, got {value!r}")
    return value


Device = Annotated[
    str | None,
    typer.Option(
        help="cuda, cuda:N, cpu (NumPy float32) or emulated (the kernels on the CPU). Default: a GPU if usable.",
        callback=_check_device,
        show_default=False,
    ),
]
Model = Annotated[str, typer.Argument(help="Checkpoint folder, hub name, or 'demo' for the model in the package.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt plus completion, in tokens.", min=1, show_default=False)
]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float16 or bfloat16.", callback=_check_dtype)]


@app.command(
    short_help="Complete a prompt, or answer it with --chat.",
    epilog="Example: cukern generate Qwen/Qwen3-0.6B 'Why is the sky blue?' --chat -t 0.7 --top-p 0.8 --top-k 20",
)
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="Read the prompt from a file.", exists=True, dir_okay=False, show_default=False
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt through the checkpoint's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.", show_default=False)] = None,
    think: Annotated[
        bool | None,
        typer.Option("--think/--no-think", help="enable_thinking of the chat template.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", help="0 is greedy. Default: the checkpoint's.", show_default=False),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.", show_default=False)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this probability.", show_default=False)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens this many times as likely as the likeliest.", show_default=False),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Divide the logits of tokens used so far, prompt included; 1 is off.", show_default=False),
    ] = None,
    presence_penalty: Annotated[float, typer.Option(help="Subtract from the logits of generated tokens.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Subtract for every time that a token was generated.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.", show_default=False)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text (may be repeated).", show_default=False)
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="End at this token (may be repeated).", min=0, show_default=False)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past end-of-sequence tokens.")] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Log-probabilities of the tokens, in the --json output.")
    ] = False,
    top_logprobs: Annotated[
        int, typer.Option(help="The n likeliest tokens of every position, in the --json output.", min=0, max=20)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it comes.")] = True,
    max_model_len: MaxModelLen = None,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Decode by CUDA graphs on a GPU.")
    ] = True,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Complete a prompt, or answer it with --chat. The device is named on standard error."""
    from cukern.engine import SamplingParams

    try:
        sampling = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=stop or (),
            stop_token_ids=stop_token_id or (),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            top_logprobs=top_logprobs,
        )
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(_of_options(error)) from None
    if (logprobs or top_logprobs) and not as_json:
        name = "--logprobs" if logprobs else "--top-logprobs"
        raise typer.BadParameter(f"{name} needs --json, which prints them")
    if not chat and (system is not None or think is not None):
        raise typer.BadParameter("--system, --think and --no-think need --chat")
    text = _read_prompt(prompt, file)
    llm = _load(model, device=device, dtype=dtype, max_num_seqs=1, max_model_len=max_model_len, cuda_graphs=cuda_graphs)
    vocab = llm.model.config.vocab_size
    outside = [i for i in stop_token_id or () if i >= vocab]
    if outside:
        raise typer.BadParameter(
            f"{outside[0]} is outside the vocabulary 0..{vocab - 1}", param_hint="'--stop-token-id'"
        )
    request: Any = text
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        request = llm.chat_prompt([*messages, {"role": "user", "content": text}], enable_thinking=think)
    started = time.perf_counter()
    note = f"cukern generate: {_where(llm, asked=device is not None)}"
    completion = _run(llm, request, sampling, show=stream and not as_json, note=note)
    seconds = time.perf_counter() - started
    if as_json:
        # a stream that lacks a character would put "?" into the text
        ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        typer.echo(json.dumps(_json_numbers(_as_dict(completion, text, llm, seconds)), ensure_ascii=ascii_only))
    elif not stream:
        typer.echo(completion.text)


def _of_options(error: Exception) -> str:
    """What is said about sampling parameters, as of options of the command: none of these can be None."""
    return str(error).removeprefix("SamplingParams: ").replace(" (None: as many as fit)", "")


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from its one source; a single line break at the end of a file or of standard input is dropped."""
    if file is not None and prompt is not None:
        raise typer.BadParameter("give a prompt or --file, not both")
    if file is not None:
        where, data = str(file), file.read_bytes()
    elif prompt in (None, "-"):
        if prompt is None and sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, --file, or text on standard input")
        where, data = "standard input", sys.stdin.buffer.read()
    else:
        assert prompt is not None
        return prompt
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")


def _load(model: str, *, text: bool = True, **options: Any) -> LLM:
    """The model; `text` says that its tokenizer will be needed."""
    from cukern.engine import LLM
    from cukern.models import demo_checkpoint, resolve_checkpoint

    folder = demo_checkpoint() if model == "demo" else resolve_checkpoint(model)
    if text and (folder / "config.json").exists() and not (folder / "tokenizer.json").exists():
        raise FileNotFoundError(f"{folder / 'tokenizer.json'} does not exist, and a text needs the tokenizer")
    return LLM(folder, **options)


def _run(
    llm: LLM, prompt: Any, sampling: SamplingParams, *, show: bool, note: str = "", before: str = ""
) -> Completion:
    """`note` goes to standard error once the request has been accepted, `before` in front of the first piece of text:
    what keeps a model from running shows in its first step."""
    try:
        stream = llm.stream(prompt, sampling)
    except ValueError as error:
        raise ValueError(_of_options(error)) from error
    with stream:
        if note:
            typer.echo(note, err=True)
        pieces = itertools.chain([next(stream, "")], stream)
        if not show:
            for _ in pieces:
                pass
            return stream.result
        sys.stdout.write(before)
        try:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
        except (Exception, KeyboardInterrupt) as error:
            if not isinstance(error, BrokenPipeError):  # the message begins a line
                typer.echo()
            raise
        typer.echo()
        return stream.result


def _as_dict(completion: Completion, prompt: str, llm: LLM, seconds: float) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "top_logprobs": completion.top_logprobs,
        "prompt_tokens": len(completion.prompt_token_ids),
        "seed": completion.seed,
        "device": str(llm.model.device),
        "seconds": round(seconds, 6),
    }


def _json_numbers(value: Any) -> Any:
    """The value with null for what JSON has no number: a model that gives NaN must not give invalid output."""
    if isinstance(value, dict):
        return {k: _json_numbers(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_numbers(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@app.command(
    short_help="Generate text with the model in the package, and say on what.",
    epilog="Example: cukern demo --emulate --tokens 8 --check",
)
def demo(
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens to generate.", min=1, max=1024)] = 48,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = DEMO_PROMPT,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.", show_default=False)] = None,
    emulate: Annotated[bool, typer.Option("--emulate", help="Run the CUDA kernels on the CPU (slow).")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Compare the kernels' tokens with the NumPy reference; exit code 1 if they differ."
        ),
    ] = False,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Generate text with the small model that ships with the package, and say on what it runs."""
    from cukern.engine import SamplingParams
    from cukern.engine.sequence import counted

    if emulate and device not in (None, "emulated"):
        raise typer.BadParameter(f"--emulate contradicts --device {device}")
    try:
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(_of_options(error)) from None
    llm = _load("demo", device="emulated" if emulate else device, dtype=dtype, max_num_seqs=1)
    if check and llm.model.device.kind == "cpu":  # it would be compared with itself
        raise ValueError(
            "--check compares the CUDA kernels with the NumPy reference, and there is nothing to compare "
            f"{_where(llm, asked=device is not None)}; leave --check out, or run the kernels with --emulate"
        )
    kind = f"{llm.model.config.num_parameters / 1e6:.1f} M parameters, {llm.model.dtype}"
    typer.echo(f"Demonstration model ({kind}) {_where(llm, asked=emulate or device is not None)}.")
    started = time.perf_counter()
    completion = _run(llm, prompt, sampling, show=True, before=f"\n{prompt}")
    seconds = time.perf_counter() - started
    note = "" if llm.model.device.kind == "cpu" else ", compilation of kernels included"
    typer.echo(f"\n{counted(len(completion.token_ids), 'token')} in {seconds:.2f} s{note}")
    if check:
        _compare(completion, prompt, tokens, temperature)


def _where(llm: LLM, *, asked: bool) -> str:
    """The device, and why that one."""
    from cukern.models.device import cuda_problem

    device = llm.model.device
    if device.kind == "cuda":
        from cukern import jit

        return f"on the GPU {jit.device().name} ({device}), kernels compiled for it"
    if device.kind == "emulated":
        return "on the CPU by emulation of the CUDA kernels, which is slow"
    why = "as asked" if asked else f"because no GPU can be used: {cuda_problem()}"
    return f"on the CPU through the NumPy reference, {why}"


def _compare(completion: Completion, prompt: str, tokens: int, temperature: float) -> None:
    from cukern.engine import SamplingParams
    from cukern.engine.sequence import counted

    reference = _load("demo", device="cpu", max_num_seqs=1)
    sampling = SamplingParams(temperature=temperature, seed=completion.seed, max_tokens=tokens, ignore_eos=True)
    expected = reference.generate(prompt, sampling)[0].token_ids
    same = next((i for i, (a, b) in enumerate(zip(completion.token_ids, expected)) if a != b), len(expected))
    if same < len(expected):
        raise RuntimeError(f"check failed: token {same} differs from the NumPy reference")
    typer.echo(f"check: all {counted(len(expected), 'token')} equal those of the NumPy reference")
