"""Qwen3Config: both layouts of config.json, and refusals by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukern.models import ConfigError, Qwen3Config, demo_checkpoint
from cukern.testing.checkpoints import QWEN3_SHAPES

DATA = Path(__file__).parent / "data"
FIXTURES = ["tied-fp16", "untied-bf16-sharded", "hd128-fp16", "yarn-fp16"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def base(**changes: Any) -> dict[str, Any]:
    """A config.json like Qwen3-0.6B's; a change to `...` removes the key."""
    data = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    data.update(changes)
    return {k: v for k, v in data.items() if v is not ...}


def test_published_config() -> None:
    assert Qwen3Config.from_dict(base()) == QWEN3_SHAPES["0.6B"]


@pytest.mark.parametrize(
    ("name", "millions"), [("0.6B", 596), ("1.7B", 1721), ("4B", 4022), ("8B", 8191), ("14B", 14768), ("32B", 32762)]
)
def test_parameter_count_matches_the_published_models(name: str, millions: int) -> None:
    assert round(QWEN3_SHAPES[name].num_parameters / 1e6) == millions


@pytest.mark.parametrize("name", FIXTURES)
def test_fixture(name: str) -> None:
    config = Qwen3Config.from_file(DATA / name)
    assert config.rope_theta == 1e6
    assert config.dtype == ("bfloat16" if "bf16" in name else "float16")
    assert config.tie_word_embeddings == ("untied" not in name)
    assert (config.rope_scaling is not None) == ("yarn" in name)
    assert config == Qwen3Config.from_file(DATA / name / "config.json")


def test_head_dim_is_not_derived_from_hidden_size() -> None:
    config = Qwen3Config.from_file(DATA / "untied-bf16-sharded")
    assert (config.head_dim, config.hidden_size, config.num_attention_heads) == (32, 48, 4)
    assert (config.q_size, config.kv_size) == (128, 64)
    # transformers' Qwen3Config has 128 where the file is silent
    assert Qwen3Config.from_dict(base(head_dim=...)).head_dim == 128


@pytest.mark.parametrize("config", [*QWEN3_SHAPES.values(), None])
def test_round_trip(config: Qwen3Config | None) -> None:
    config = config or replace(
        QWEN3_SHAPES["0.6B"], rope_scaling=dict(YARN), eos_token_id=(1, 2), dtype=None, attention_bias=True
    )
    text = json.dumps(config.to_dict())
    assert Qwen3Config.from_dict(json.loads(text)) == config


# -- rope_theta -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [1e6, 1000000])
@pytest.mark.parametrize("place", ["top", "nested", "both"])
def test_rope_theta_in_either_layout(theta: float, place: str) -> None:
    changes: dict[str, Any] = {"rope_theta": ... if place == "nested" else theta}
    if place != "top":
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config = Qwen3Config.from_dict(base(**changes))
    assert config.rope_theta == 1e6
    assert isinstance(config.rope_theta, float)
    assert config.rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": ...}, "no rope_theta"),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "disagree.*1e\\+06.*10000"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number, got '1e6'"),
        ({"rope_theta": True}, "rope_theta must be a number"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta in rope_parameters must be a number"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
    ],
)
def test_rope_theta_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3Config.from_dict(base(**changes))


# -- rope scaling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {**YARN, "rope_theta": 1e6}},
        {"rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 1e6}},
    ],
)
def test_yarn_in_either_layout(changes: dict[str, Any]) -> None:
    config = Qwen3Config.from_dict(base(**changes))
    assert config.rope_scaling == YARN
    # Qwen's recipe leaves max_position_embeddings below what YaRN reaches
    assert (config.max_position_embeddings, config.max_positions) == (40960, 131072)


def test_yarn_options_are_kept() -> None:
    options = {"attention_factor": 1.1, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    config = Qwen3Config.from_dict(base(rope_scaling={**YARN, **options}))
    assert config.rope_scaling == {**YARN, **options}


def test_yarn_original_length_defaults_to_max_position_embeddings() -> None:
    config = Qwen3Config.from_dict(base(rope_scaling={"rope_type": "yarn", "factor": 2.0}))
    assert config.rope_scaling is not None
    assert config.rope_scaling["original_max_position_embeddings"] == 40960


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supported"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "'yarn'.*'linear'.*disagree"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "needs a factor"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor must be a positive number"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 1.5}}, "must be a positive integer, got 1.5"),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast must be a positive number"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate must be true or false"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0, "rope_theta": 1e6}}, "disagree"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "disagree"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    ],
)
def test_rope_scaling_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3Config.from_dict(base(**changes))


# -- dtype ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": ..., "dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": ...}, None),
        ({"torch_dtype": None}, None),
    ],
)
def test_dtype(changes: dict[str, Any], expected: str | None) -> None:
    assert Qwen3Config.from_dict(base(**changes)).dtype == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, r"dtype \(float16\) and torch_dtype \(bfloat16\) disagree"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype must be one of .* got 'float8_e4m3fn'"),
        ({"torch_dtype": 16}, "torch_dtype must be a string"),
    ],
)
def test_dtype_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3Config.from_dict(base(**changes))


# -- sliding window ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28},
        {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
        # layer_types wins over the flags
        {
            "sliding_window": 4096,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "layer_types": ["full_attention"] * 28,
        },
    ],
)
def test_sliding_window_off(changes: dict[str, Any]) -> None:
    assert Qwen3Config.from_dict(base(**changes)) == QWEN3_SHAPES["0.6B"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0},
            "sliding-window attention is not supported.*layers 0 to 27 have a window of 4096",
        ),
        (
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 20},
            "layers 20 to 27 have a window of 64",
        ),
        # absent keys mean transformers' defaults: a window of 4096
        ({"sliding_window": ..., "use_sliding_window": True, "max_window_layers": 3}, "window of 4096"),
        (
            {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]},
            r"layer_types\[27\] is 'sliding_attention'.*1 of 28",
        ),
        ({"layer_types": ["full_attention"]}, r"layer_types must list num_hidden_layers \(28\) entries"),
        ({"use_sliding_window": "no"}, "use_sliding_window must be true or false"),
    ],
)
def test_sliding_window_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3Config.from_dict(base(**changes))


# -- other refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_moe", "architectures": ...}, "model_type 'qwen3_moe' is not supported"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "architecture 'Qwen2ForCausalLM'"),
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"model_type": ..., "architectures": ...}, "model_type is missing"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "'Qwen3ForSequenceClassification' is not supported"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures must be a list of strings"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(quant_method 'fp8'\)"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"hidden_size": 1024.0}, "hidden_size must be a positive integer, got 1024.0"),
        ({"hidden_size": True}, "hidden_size must be a positive integer"),
        ({"num_attention_heads": 12}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 127}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id must be"),
        ({"bos_token_id": "x"}, "bos_token_id must be"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        Qwen3Config.from_dict(base(**changes), source="folder/config.json")
    assert str(info.value).startswith("folder/config.json: ")
    assert "\n" not in str(info.value)


def test_missing_model_type_is_read_from_the_architecture() -> None:
    assert Qwen3Config.from_dict(base(model_type=...)) == QWEN3_SHAPES["0.6B"]


@pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([5, 6], (5, 6)), (None, ()), (..., ()), ([], ())])
def test_eos(eos: Any, expected: tuple[int, ...]) -> None:
    assert Qwen3Config.from_dict(base(eos_token_id=eos)).eos_token_id == expected


def test_null_key_value_heads_means_one_per_query_head() -> None:
    assert Qwen3Config.from_dict(base(num_key_value_heads=None)).num_key_value_heads == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"\xff\xfe", "not UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 700\n", "Git LFS pointer"),
    ],
)
def test_broken_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as info:
        Qwen3Config.from_file(tmp_path)
    assert str(tmp_path / "config.json") in str(info.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        Qwen3Config.from_file(tmp_path)


def test_demo_checkpoint_is_in_the_package() -> None:
    config = Qwen3Config.from_file(demo_checkpoint())
    assert (config.vocab_size, config.eos_token_id) == (4096, (4093,))
    assert np.isclose(config.num_parameters, 4.2e6, rtol=0.01)
