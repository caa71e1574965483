"""``cukern score``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cukern.cli import app
from cukern.cli.generate import Device, Dtype, MaxModelLen, Model, _json_numbers, _load, _where

_LINES = 256  # of the input that are scored together


@app.command(
    short_help="Log-probabilities of given completions, as JSON lines.",
    epilog="Example: cukern score demo 'The whale' ' swims' ' flies'",
)
def score(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without one JSON lines are read.", show_default=False)
    ] = None,
    completions: Annotated[
        list[str] | None, typer.Argument(help="What may follow the prompt.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="Read JSON lines from a file.", exists=True, dir_okay=False, show_default=False
        ),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Divide the logits by it.")] = 1.0,
    max_model_len: MaxModelLen = None,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Log-probabilities of given completions, as JSON lines.

    Input lines, from --file or standard input, hold a "prompt" and its "completion" or a list of "completions", each a
    text or a list of token ids. One line comes out for each completion, in their order: prompt_index, completion,
    token_ids, logprobs, is_greedy (greedy decoding would have chosen the token) and total (the sum of the
    log-probabilities).
    """
    if prompt is not None and file is not None:
        raise typer.BadParameter("give a prompt or --file, not both")
    if prompt is not None and not completions:
        raise typer.BadParameter("give at least one completion of the prompt")
    if not 0 < temperature < float("inf"):
        raise typer.BadParameter(f"--temperature must be positive and finite, got {temperature}")
    if prompt is not None:
        pairs: list[tuple[Any, list[Any]]] = [(prompt, list(completions or ()))]
    else:
        pairs = list(_read_lines(file))
    text = any(isinstance(given, str) for prompt, entry in pairs for given in (prompt, *entry))
    llm = _load(model, text=text, device=device, dtype=dtype, max_model_len=max_model_len)
    typer.echo(f"cukern score: {_where(llm, asked=device is not None)}", err=True)
    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    for start in range(0, len(pairs), _LINES):
        some = pairs[start : start + _LINES]
        given = [c for _, entry in some for c in entry]
        try:
            scores = llm.score([p for p, _ in some], [entry for _, entry in some], temperature=temperature)
        except (TypeError, ValueError) as error:
            raise ValueError(_counted_from(start, str(error))) from error
        for completion, found in zip(given, scores):
            line = {
                "prompt_index": start + found.prompt_index,
                "completion": completion,
                "total": found.total,
                "token_ids": found.token_ids,
                "logprobs": found.logprobs.tolist(),
                "is_greedy": found.is_greedy.tolist(),
            }
            typer.echo(json.dumps(_json_numbers(line), ensure_ascii=ascii_only))


def _counted_from(start: int, message: str) -> str:
    """A message about some of the prompts, with their numbers among all of them: the `prompt_index` of the output."""
    return re.sub(r"\b(prompts|completions)\[(\d+)\]", lambda m: f"{m[1]}[{start + int(m[2])}]", message)


def _read_lines(file: Path | None) -> Iterator[tuple[Any, list[Any]]]:
    """Prompts and their completions from JSON lines."""
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt and completions, --file, or JSON lines on standard input")
    where, data = (str(file), file.read_bytes()) if file is not None else ("standard input", sys.stdin.buffer.read())
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}, line {number} is not JSON: {error}") from None
        keys = set(value) if isinstance(value, dict) else set()
        if not (keys >= {"prompt"} and len(keys & {"completion", "completions"}) == 1):
            raise ValueError(f'{where}, line {number} must hold "prompt" and "completion" or "completions"')
        entry = [value["completion"]] if "completion" in keys else value["completions"]
        if not isinstance(entry, list) or not all(isinstance(c, (str, list)) for c in [value["prompt"], *entry]):
            raise ValueError(f"{where}, line {number}: prompt and completions must be texts or lists of token ids")
        yield value["prompt"], entry
