"""``cukern score``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
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
        inputs: list[tuple[str, Any, list[Any]]] = [("", prompt, list(completions or ()))]
    else:
        inputs = list(_read_lines(file))
    text = any(isinstance(given, str) for _, prompt, entry in inputs for given in (prompt, *entry))
    llm = _load(model, text=text, device=device, dtype=dtype, max_model_len=max_model_len)
    typer.echo(f"cukern score: {_where(llm, asked=device is not None)}", err=True)
    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    for start in range(0, len(inputs), _LINES):
        places, prompts, entries = zip(*inputs[start : start + _LINES])
        given = [c for entry in entries for c in entry]
        try:
            scores = llm.score(prompts, entries, temperature=temperature)
        except (TypeError, ValueError) as error:
            raise ValueError(_placed(places, start, str(error))) from error
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


def _placed(places: Sequence[str], start: int, message: str) -> str:
    """A message about one of some prompts: where it was read, and its number among all, the output's `prompt_index`."""
    indexed = r"\b(prompts|completions)\[(\d+)\]"
    first = re.search(indexed, message)
    place = places[int(first[2])] if first else ""
    message = re.sub(indexed, lambda m: f"{m[1]}[{start + int(m[2])}]", message)
    return f"{place}: {message}" if place else message


def _read_lines(file: Path | None) -> Iterator[tuple[str, Any, list[Any]]]:
    """From JSON lines: where one stands, its prompt and its completions."""
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
        place = f"{where}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is not JSON: {error}") from None
        keys = set(value) if isinstance(value, dict) else set()
        if not (keys >= {"prompt"} and len(keys & {"completion", "completions"}) == 1):
            raise ValueError(f'{place} must hold "prompt" and "completion" or "completions"')
        unknown = sorted(keys - {"prompt", "completion", "completions"})
        if unknown:  # an option there would seem to count
            raise ValueError(
                f'{place} holds the unknown key {json.dumps(unknown[0])}; there are "prompt" and "completion" or '
                '"completions", and options of the command for all lines'
            )
        entry = [value["completion"]] if "completion" in keys else value["completions"]
        if not isinstance(entry, list) or not all(isinstance(c, (str, list)) for c in [value["prompt"], *entry]):
            raise ValueError(f"{place}: prompt and completions must be texts or lists of token ids")
        yield place, value["prompt"], entry
