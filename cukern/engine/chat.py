"""Chat templates: the Jinja text that a checkpoint ships, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]
"""One turn: ``{"role": "user", "content": "..."}``, plus whatever else the template reads (``tool_calls`` and so
on)."""


def _environment() -> jinja2.Environment:
    """The environment in which model hubs expect chat templates to be rendered.

    Same settings and helpers as Hugging Face's ``apply_chat_template`` (its documentation, "Writing a chat template"):
    trim_blocks, lstrip_blocks, break and continue, ``raise_exception``, ``strftime_now``, ``tojson`` that leaves HTML
    alone.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}`` marks the assistant's tokens for training; rendering passes its body through."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A checkpoint's chat template.

    Parameters
    ----------
    source : str or None
        Jinja text; None for a checkpoint without one, whose ``render`` then says so.
    special_tokens : mapping
        Variables such as ``eos_token`` that the template may print.
    where : str
        The file it came from, for messages.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None, where: str = "") -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.where = where or "chat template"
        self._compiled: jinja2.Template | None = None

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
        """Read chat_template.jinja, else ``chat_template`` of tokenizer_config.json (a string, or a list with a
        default).

        Parameters
        ----------
        folder : path
        tokenizer_config : mapping
            The parsed tokenizer_config.json.

        Raises
        ------
        ValueError
            What the files hold is no text.
        """
        special = {}
        for name, value in tokenizer_config.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(text, str):
                special[name] = text
        path = Path(folder) / "chat_template.jinja"
        if path.exists():
            try:
                return cls(path.read_text(encoding="utf-8"), special, str(path))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
            except OSError as error:
                raise ValueError(
                    f"{path} cannot be read ({error.strerror}): make it a text file, or remove it"
                ) from None
        where = str(Path(folder) / "tokenizer_config.json")
        source = tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
            source = named.get("default")
        if source is not None and not isinstance(source, str):
            raise ValueError(f"{where}: chat_template must be a string, found {type(source).__name__}")
        return cls(source, special, where)

    def render(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text of a conversation.

        Parameters
        ----------
        messages : sequence of mappings
            Each with ``role`` and ``content``.
        enable_thinking : bool, optional
            Passed to the template where given; Qwen3's thinks unless it is False.
        tools : sequence, optional
            JSON schemas of tools, passed to the template.
        add_generation_prompt : bool
            End with the start of the assistant's turn.

        Raises
        ------
        ValueError
            No template, a malformed message, or the template itself refuses or fails.
        TypeError
            ``messages`` is no sequence of mappings.
        """
        import jinja2

        if self.source is None:
            raise ValueError(
                f"{self.where} has no chat_template and there is no chat_template.jinja: this is no chat checkpoint; "
                "use a plain prompt"
            )
        checked = [_check_message(i, m) for i, m in enumerate(_sequence(messages))]
        if not checked:
            raise ValueError("chat: messages must hold at least one message")
        variables: dict[str, Any] = dict(self.special_tokens)
        variables.update(messages=checked, tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
            return self._compiled.render(**variables)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{self.where}: chat template line {error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.where}: chat template: {error}") from None
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{self.where}: chat template failed: {type(error).__name__}: {error}") from error


def _sequence(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(
            f'chat: messages must be a list of {{"role": ..., "content": ...}}, got {type(messages).__name__}'
        )
    return messages


def _check_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"chat: messages[{index}] must be a mapping with role and content, got {type(message).__name__}"
        )
    if not isinstance(message.get("role"), str):
        raise ValueError(f"chat: messages[{index}] needs a 'role' string, got {message.get('role')!r}")
    if "content" not in message and "tool_calls" not in message:
        raise ValueError(f"chat: messages[{index}] (role {message['role']!r}) needs 'content'")
    return dict(message)
