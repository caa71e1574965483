"""`Qwen3Config`: the fields of a Qwen3 ``config.json``, checked when they are read.

Nothing is guessed: a feature that the forward pass does not implement is refused by name, and two fields that
say different things about one value are an error rather than a silent precedence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard

__all__ = ["ConfigError", "Qwen3Config"]

_DTYPES = ("float16", "bfloat16", "float32")
_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3Model")
_ROPE_TYPES = ("default", "yarn")
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


class ConfigError(ValueError):
    """A config.json that is malformed, contradicts itself, or asks for something cukern does not implement."""


@dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Shape and constants of one dense Qwen3 model; the names are those of ``config.json``.

    Attributes
    ----------
    vocab_size, hidden_size, intermediate_size, num_hidden_layers : int
        V, H, I and the number of decoder layers.
    num_attention_heads, num_key_value_heads : int
        Query heads Hq and key/value heads Hkv; Hq is a multiple of Hkv.
    rope_theta : float
        Base of the rotary angles (1e6 for the published models, 5e6 for some of the 2507 releases).
    head_dim : int
        D, independent of ``hidden_size / num_attention_heads``. 128 where the file does not say, as in
        transformers' Qwen3Config.
    max_position_embeddings : int
        Positions that the model was made for (before YaRN extends them, see `max_positions`).
    rms_norm_eps : float
        Epsilon of every RMSNorm, the per-head query/key norms included.
    rope_scaling : dict or None
        None for plain RoPE, or YaRN's settings: ``rope_type``, ``factor``,
        ``original_max_position_embeddings`` and, where given, ``attention_factor``, ``beta_fast``,
        ``beta_slow``, ``mscale``, ``mscale_all_dim``, ``truncate``.
    attention_bias : bool
        The four attention projections have a bias.
    tie_word_embeddings : bool
        The embedding matrix is also the head.
    dtype : str or None
        Declared storage dtype: "float16", "bfloat16", "float32", or None where the file does not say.
    bos_token_id, pad_token_id : int or None
    eos_token_id : tuple of int
        Empty where the file names none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not _is_int(value) or value <= 0:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not _is_number(value) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} must be a positive number, got {value!r}")
        for name in ("attention_bias", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if self.rope_scaling is not None:
            _check_yarn(self.rope_scaling)
        for name in ("bos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and not _is_int(value):
                raise ConfigError(f"{name} must be an integer or null, got {value!r}")

    # -- derived sizes ------------------------------------------------------------------------------------

    @property
    def q_size(self) -> int:
        """Rows of the query projection, Hq * D."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (or value) projection, Hkv * D."""
        return self.num_key_value_heads * self.head_dim

    @property
    def max_positions(self) -> int:
        """Positions the model can be run at: ``max_position_embeddings``, or what YaRN extends it to.

        Qwen's own YaRN recipe leaves ``max_position_embeddings`` at 40960 while the scaling reaches
        4 * 32768, so the larger of the two counts.
        """
        if self.rope_scaling is None:
            return self.max_position_embeddings
        reach = self.rope_scaling["factor"] * self.rope_scaling["original_max_position_embeddings"]
        return max(self.max_position_embeddings, int(reach))

    @property
    def num_parameters(self) -> int:
        """Number of stored weights (a tied head counted once)."""
        h, qkv = self.hidden_size, self.q_size + 2 * self.kv_size
        layer = h * qkv + self.q_size * h + 3 * h * self.intermediate_size + 2 * h + 2 * self.head_dim
        if self.attention_bias:
            layer += qkv + h
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + heads * self.vocab_size * h + h

    # -- reading and writing ------------------------------------------------------------------------------

    @classmethod
    def from_file(cls, path: str | Path) -> Qwen3Config:
        """Read ``config.json`` (or the folder that holds it).

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ConfigError
            See `from_dict`; the message begins with the path.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: no such file; a checkpoint folder needs a config.json") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text ({error})") from None
        if text.startswith("version https://git-lfs"):
            raise ConfigError(f"{path}: this is a Git LFS pointer, not the file itself; run `git lfs pull`")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # also an integer too long, brackets too deep
            raise ConfigError(f"{path}: not valid JSON ({error})") from None
        return cls.from_dict(data, source=str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "config.json") -> Qwen3Config:
        """Build a config from the parsed ``config.json``, in the layout of transformers 4 or 5.

        Parameters
        ----------
        data : mapping
            The parsed file. ``rope_theta``/``rope_scaling``/``torch_dtype`` (transformers 4) and
            ``rope_parameters``/``dtype`` (transformers 5) are both read; where both layouts are present they
            must agree. Unknown keys that do not change the computation are ignored.
        source : str
            Where `data` came from, for messages.

        Raises
        ------
        ConfigError
            A missing, misshapen or contradicting field, or a feature that is not implemented: another
            model_type or activation, an unknown RoPE type, sliding-window layers, quantised weights.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"{source}: expected a JSON object, got {type(data).__name__}")
        try:
            _check_supported(data)
            values = _read(data)
            _check_sliding_window(data, values["num_hidden_layers"])
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` for this model, in the layout of the published Qwen3 files."""
        out: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "dtype":
                if value is not None:
                    out["torch_dtype"] = value
            elif field.name == "eos_token_id":
                out["eos_token_id"] = None if not value else value[0] if len(value) == 1 else list(value)
            else:
                out[field.name] = dict(value) if isinstance(value, dict) else value
        out.update(use_sliding_window=False, sliding_window=None, use_cache=True)
        return out


# -- reading the two layouts ----------------------------------------------------------------------------------


def _read(data: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in _SIZES[:-2]:
        if name not in data:
            raise ConfigError(f"{name} is missing")
        values[name] = data[name]
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    optional = (
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "attention_bias",
        "tie_word_embeddings",
        "bos_token_id",
        "pad_token_id",
    )
    values |= {name: data[name] for name in optional if data.get(name) is not None}
    for name in ("num_hidden_layers", "max_position_embeddings"):  # used below, before the dataclass checks them
        if name in values and (not _is_int(values[name]) or values[name] <= 0):
            raise ConfigError(f"{name} must be a positive integer, got {values[name]!r}")
    values["dtype"] = _read_dtype(data)
    values["rope_theta"], values["rope_scaling"] = _read_rope(data, values.get("max_position_embeddings", 32768))
    eos = data.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(_is_int(i) and 0 <= i < 2**31 for i in eos):
        raise ConfigError(f"eos_token_id must be a token id or a list of them, got {data['eos_token_id']!r}")
    values["eos_token_id"] = tuple(eos)
    return values


def _read_dtype(data: Mapping[str, Any]) -> str | None:
    found = {}
    for key in ("dtype", "torch_dtype"):
        value = data.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise ConfigError(f"{key} must be a string, got {value!r}")
        found[key] = value.removeprefix("torch.")
    if len(set(found.values())) > 1:
        raise ConfigError(f"dtype ({found['dtype']}) and torch_dtype ({found['torch_dtype']}) disagree; keep one")
    return next(iter(found.values()), None)


def _read_rope(data: Mapping[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """Return (rope_theta, normalised rope_scaling) from either layout; what both state must agree."""
    new, old = data.get("rope_parameters"), data.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be an object or null, got {value!r}")

    thetas: dict[str, float] = {}
    for key, holder in (("rope_theta", data), ("rope_parameters", new), ("rope_scaling", old)):
        if holder and holder.get("rope_theta") is not None:
            value = holder["rope_theta"]
            if not _is_number(value):
                where = "" if holder is data else f" in {key}"
                raise ConfigError(f"rope_theta{where} must be a number, got {value!r}")
            thetas[key] = float(value)
    if not thetas:
        raise ConfigError(
            "no rope_theta, neither at the top level nor in rope_parameters; the published Qwen3 models use 1000000"
        )
    if len(set(thetas.values())) > 1:
        stated = ", ".join(f"{key}: {value:g}" for key, value in thetas.items())
        raise ConfigError(f"the places that state rope_theta disagree ({stated}); keep the right one")

    scalings = {
        key: _normalise_scaling(key, value, max_positions)
        for key, value in (("rope_parameters", new), ("rope_scaling", old))
        if value is not None
    }
    if len(scalings) == 2 and scalings["rope_parameters"] != scalings["rope_scaling"]:
        raise ConfigError(f"rope_parameters ({new!r}) and rope_scaling ({old!r}) disagree; keep the right one")
    return next(iter(thetas.values())), next(iter(scalings.values()), None)


def _normalise_scaling(key: str, value: Mapping[str, Any], max_positions: int) -> dict[str, Any] | None:
    stated = [value[name] for name in ("rope_type", "type") if value.get(name) is not None]
    wrong = [kind for kind in stated if not isinstance(kind, str)]
    if wrong:
        raise ConfigError(f"{key}: rope_type must be a string, got {wrong[0]!r}")
    kinds = set(stated)
    if len(kinds) > 1:
        raise ConfigError(f"{key}: rope_type ({value['rope_type']!r}) and type ({value['type']!r}) disagree")
    kind = next(iter(kinds), "default" if key == "rope_parameters" else None)
    if kind is None:
        raise ConfigError(f"{key}: rope_type is missing in {dict(value)!r}")
    if kind not in _ROPE_TYPES:
        raise ConfigError(f"{key}: rope_type {kind!r} is not supported (supported: {', '.join(_ROPE_TYPES)})")
    if value.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"{key}: partial_rotary_factor {value['partial_rotary_factor']!r} is not supported, only 1.0")
    if kind == "default":
        return None
    out: dict[str, Any] = {"rope_type": "yarn"}
    original = value.get("original_max_position_embeddings")
    out["original_max_position_embeddings"] = max_positions if original is None else original
    if value.get("factor") is None:
        raise ConfigError(f"{key}: rope_type 'yarn' needs a factor")
    out["factor"] = value["factor"]
    out |= {name: value[name] for name in (*_YARN_OPTIONS, "truncate") if value.get(name) is not None}
    _check_yarn(out)
    return out


# -- checks ---------------------------------------------------------------------------------------------------


def _check_yarn(scaling: Any) -> None:
    if not isinstance(scaling, dict) or scaling.get("rope_type") != "yarn":
        raise ConfigError(f"rope_scaling must be None or a dict with rope_type 'yarn', got {scaling!r}")
    for name in ("factor", *_YARN_OPTIONS):
        value = scaling.get(name)
        if value is None and name != "factor":
            continue
        if not _is_number(value) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"rope_scaling: {name} must be a positive number, got {value!r}")
    if scaling["factor"] < 1:
        raise ConfigError(f"rope_scaling: factor must be at least 1, got {scaling['factor']!r}")
    original = scaling.get("original_max_position_embeddings")
    if not _is_int(original) or original <= 0:
        raise ConfigError(
            f"rope_scaling: original_max_position_embeddings must be a positive integer, got {original!r}"
        )
    if not isinstance(scaling.get("truncate", True), bool):
        raise ConfigError(f"rope_scaling: truncate must be true or false, got {scaling['truncate']!r}")


def _check_supported(data: Mapping[str, Any]) -> None:
    """Refuse by name what the forward pass does not implement."""
    architectures = data.get("architectures")
    if architectures is not None:
        if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
            raise ConfigError(f"architectures must be a list of strings, got {architectures!r}")
        if architectures and not any(a in _ARCHITECTURES for a in architectures):
            raise ConfigError(f"architecture {architectures[0]!r} is not supported (supported: Qwen3ForCausalLM)")
    kind = data.get("model_type")
    if kind != "qwen3":
        if kind is None and architectures:
            kind = "qwen3"
        else:
            what = "is missing" if kind is None else f"{kind!r} is not supported"
            raise ConfigError(f"model_type {what} (supported: 'qwen3', the dense Qwen3 models)")
    if data.get("quantization_config") is not None:
        config = data["quantization_config"]
        method = config.get("quant_method") if isinstance(config, Mapping) else config
        raise ConfigError(
            f"quantization_config (quant_method {method!r}) is not supported; "
            "use the checkpoint with float16, bfloat16 or float32 weights"
        )
    if data.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(f"partial_rotary_factor {data['partial_rotary_factor']!r} is not supported, only 1.0")
    activation = data.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported (supported: 'silu')")


def _check_sliding_window(data: Mapping[str, Any], layers: int) -> None:
    """Refuse sliding-window layers. `layer_types` decides where present; else layer i slides if use_sliding_window
    is true, sliding_window is set and i >= max_window_layers (the rule of transformers' Qwen3Config)."""
    types = data.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigError(f"layer_types must list num_hidden_layers ({layers}) entries, got {types!r}")
        other = [(i, kind) for i, kind in enumerate(types) if kind != "full_attention"]
        if other:
            raise ConfigError(
                f"layer_types[{other[0][0]}] is {other[0][1]!r}: only 'full_attention' is supported "
                f"({len(other)} of {layers} layers differ)"
            )
        return
    use = data.get("use_sliding_window", False)
    if not isinstance(use, bool):
        raise ConfigError(f"use_sliding_window must be true or false, got {use!r}")
    # an absent key means transformers' default, an explicit null means no window
    window, first = data.get("sliding_window", 4096), data.get("max_window_layers", 28)
    if not use or window is None:
        return
    if not _is_int(first):
        raise ConfigError(f"max_window_layers must be an integer, got {first!r}")
    if first < layers:
        raise ConfigError(
            f"sliding-window attention is not supported: use_sliding_window is true and layers {first} to {layers - 1} "
            f"have a window of {window} (max_window_layers {first} of {layers} layers)"
        )


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True
