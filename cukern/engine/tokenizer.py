"""The checkpoint's tokenizer (tokenizer.json, by the ``tokenizers`` library) as the engine needs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cukern.engine.chat import ChatTemplate
from cukern.engine.text import ByteDetokenizer, WindowDetokenizer, byte_level_bytes

__all__ = ["Tokenizer", "read_json"]


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object from a file; empty if the file is absent and not required.

    Raises
    ------
    FileNotFoundError, ValueError
        The file is absent though required, or holds no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if required:
            raise FileNotFoundError(f"{path} does not exist; a checkpoint folder needs it") from None
        return {}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if text.startswith("version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself; run 'git lfs pull' or download it again")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer too long, brackets too deep
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


class Tokenizer:
    """Text to token ids and back, and the chat template of the checkpoint.

    Parameters
    ----------
    folder : path
        Holds tokenizer.json, and tokenizer_config.json and chat_template.jinja where the checkpoint has them.

    Raises
    ------
    FileNotFoundError, ValueError
        tokenizer.json is missing or cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        import tokenizers

        path = Path(folder) / "tokenizer.json"
        read_json(path, required=True)  # its errors are clearer than the library's
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer that the tokenizers library reads: {error}") from None
        # A file saved after training may carry truncation and padding: both would change prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = read_json(Path(folder) / "tokenizer_config.json")
        self.chat_template = ChatTemplate.from_folder(folder, self.config)
        self._special = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self._byte_level = _is_byte_level(json.loads(self._tokenizer.to_str()).get("decoder"))

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows (the model's vocabulary may be padded beyond it)."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text, or None."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    @property
    def eos_token_id(self) -> int | None:
        """Id of tokenizer_config.json's ``eos_token``, or None."""
        eos = self.config.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        return self.token_id(eos) if isinstance(eos, str) else None

    def encode(self, text: str, *, add_special_tokens: bool = True, name: str = "text") -> list[int]:
        """Token ids of a text. Special tokens written in the text ("<|im_end|>") become those tokens.

        Parameters
        ----------
        text : str
        add_special_tokens : bool
            Let the tokenizer add what it puts around a text (Qwen's adds nothing).
        name : str
            What messages call the text.

        Raises
        ------
        ValueError
            The text holds a lone surrogate, which UTF-8 cannot hold.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} holds a lone surrogate ({text[error.start]!r} at character {error.start}), which is not valid"
            ) from None
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, ids without a token give nothing."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token of a byte-level vocabulary; empty for a special token or an id without a token."""
        if token in self._special:
            return b""
        text = self._tokenizer.id_to_token(token)
        return b"" if text is None else byte_level_bytes(text)

    def detokenizer(self) -> ByteDetokenizer | WindowDetokenizer:
        """A fresh incremental detokeniser; special tokens give no text."""
        if self._byte_level:
            return ByteDetokenizer(self.token_bytes)
        return WindowDetokenizer(self.decode)


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"
