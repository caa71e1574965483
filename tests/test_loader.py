"""Loading checkpoints: what is stored arrives in the packed buffers, and every broken input has its own clear error."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cukern.models import CheckpointError, Qwen3Config, demo_checkpoint, loader
from cukern.models.device import Device
from cukern.models.loader import Checkpoint, choose_dtype, load_weights
from cukern.models.safetensors_file import SafetensorsFile
from cukern.models.weights import Weights, tensor_shapes
from cukern.testing.checkpoints import QWEN3_SHAPES, make_checkpoint

DATA = Path(__file__).parent / "data"
CPU, EMULATED = Device("cpu"), Device("emulated")
GPU = pytest.param(Device("cuda"), marks=pytest.mark.gpu)
BF16 = np.dtype(ml_dtypes.bfloat16)
TINY = Qwen3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=1e6,
    max_position_embeddings=128,
)


def stored(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by the safetensors library."""
    out: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= load_file(file)
    return out


def load(folder: Path, device: Device = CPU, **kwargs: Any) -> Weights:
    return load_weights(folder, Qwen3Config.from_file(folder), device, **kwargs)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change tensors of a single-file checkpoint: an array replaces one, None removes it."""
    tensors = stored(folder)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny", TINY, "float16")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "untied-bf16-sharded", tmp_path / "sharded"))


# -- what arrives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, EMULATED, GPU], ids=str)
@pytest.mark.parametrize("name", ["tied-fp16", "untied-bf16-sharded", "hd128-fp16", "yarn-fp16", "demo-qwen3"])
def test_every_weight_arrives(name: str, device: Device) -> None:
    folder = demo_checkpoint() if name == "demo-qwen3" else DATA / name
    weights = load(folder, device)
    expected = stored(folder)
    assert set(weights) == set(expected)
    assert weights.dtype == (np.float32 if device is CPU else next(iter(expected.values())).dtype)
    for key, value in weights.items():
        assert value.dtype == (np.float32 if value.ndim == 1 else weights.dtype)
        got = device.get(value)
        np.testing.assert_array_equal(got.astype(np.float32), expected[key].astype(np.float32), err_msg=key)
    assert weights.report.nbytes == sum(a.nbytes for a in expected.values())
    assert (weights.report.overflowed, weights.report.subnormal) == ({}, {})


def test_names_are_views_of_the_packed_matrices(tiny: Path) -> None:
    weights = load(tiny)
    layer, prefix = weights.layers[1], "model.layers.1."
    q, k, v = (weights[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv")
    np.testing.assert_array_equal(layer.qkv, np.concatenate([q, k, v]))
    gate, up = (weights[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up"))
    np.testing.assert_array_equal(layer.gate_up, np.concatenate([gate, up]))
    for view, whole in ((q, layer.qkv), (k, layer.qkv), (v, layer.qkv), (gate, layer.gate_up), (up, layer.gate_up)):
        assert np.shares_memory(view, whole)
    k[3, 5] = 77
    assert layer.qkv[TINY.q_size + 3, 5] == 77
    weights[prefix + "mlp.up_proj.weight"] = np.full(up.shape, 3.0)
    assert (layer.gate_up[TINY.intermediate_size :] == 3).all()
    assert np.shares_memory(weights[prefix + "mlp.up_proj.weight"], layer.gate_up)
    with pytest.raises(ValueError, match=r"norm.weight has shape \(32,\), got \(5,\)"):
        weights["model.norm.weight"] = np.zeros(5)
    with pytest.raises(KeyError, match="no such weight"):
        weights["model.layers.2.mlp.up_proj.weight"]


def test_tied_model_has_one_matrix() -> None:
    weights = load(DATA / "tied-fp16")
    assert weights.head is weights.embed
    assert "lm_head.weight" not in weights
    with pytest.raises(KeyError, match="tied"):
        weights["lm_head.weight"]


@pytest.mark.parametrize("device", [CPU, EMULATED], ids=str)
def test_attention_bias(tmp_path: Path, device: Device) -> None:
    """Biases are float32, as the linear kernel adds them."""
    folder = make_checkpoint(tmp_path, TINY, "float32", attention_bias=True)
    weights, expected = load(folder, device), stored(folder)
    for i, layer in enumerate(weights.layers):
        p = f"model.layers.{i}.self_attn."
        np.testing.assert_array_equal(layer.qkv_bias, np.concatenate([expected[f"{p}{x}_proj.bias"] for x in "qkv"]))
        np.testing.assert_array_equal(layer.o_bias, expected[p + "o_proj.bias"])


@pytest.mark.parametrize("chunk", [2, 6, 50, 1 << 24])
def test_chunks_do_not_change_the_result(tiny: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(loader, "CHUNK", chunk)
    config = replace(TINY, num_hidden_layers=1)
    folder = make_checkpoint(tiny.parent / "one", config, "bfloat16", seed=3)
    weights, expected = load(folder, EMULATED), stored(folder)
    for key, value in weights.items():
        np.testing.assert_array_equal(value.astype(np.float32), expected[key].astype(np.float32), err_msg=key)


def test_host_memory_holds_no_second_copy(tmp_path: Path) -> None:
    """Every array that loading allocates on the host, beyond the model itself, is at most a few chunks."""
    import tracemalloc

    config = replace(TINY, vocab_size=60000, hidden_size=256, num_hidden_layers=1)
    folder = make_checkpoint(tmp_path, config, "bfloat16")
    tracemalloc.start()
    weights = load(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert weights.nbytes > 120e6
    assert peak < weights.nbytes + loader.CHUNK


# -- dtypes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "formats", "declared", "expected"),
    [
        ("auto", {"F16"}, "bfloat16", "float16"),
        ("auto", {"BF16"}, None, "bfloat16"),
        ("auto", {"F32"}, None, "bfloat16"),
        ("auto", {"F32"}, "float32", "bfloat16"),
        ("auto", {"F32"}, "float16", "float16"),
        ("auto", {"F16", "F32"}, "float16", "float16"),
        ("auto", {"F16", "BF16"}, None, "bfloat16"),
        ("float16", {"BF16"}, "bfloat16", "float16"),
        ("bfloat16", {"F16"}, "float16", "bfloat16"),
    ],
)
def test_choose_dtype(dtype: str, formats: set[str], declared: str | None, expected: str) -> None:
    assert choose_dtype(dtype, formats, replace(TINY, dtype=declared), EMULATED).name == expected


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_cpu_computes_in_float32(dtype: str) -> None:
    assert choose_dtype(dtype, {"BF16"}, TINY, CPU) == np.float32


@pytest.mark.parametrize(
    ("dtype", "device", "message"),
    [
        ("float16", CPU, "device='cpu' computes in float32, not float16"),
        ("float32", EMULATED, "the kernels compute in float16 or bfloat16"),
        ("fp8", EMULATED, "dtype must be .* got 'fp8'"),
        (None, CPU, "dtype must be .* got None"),
    ],
)
def test_choose_dtype_errors(dtype: Any, device: Device, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_dtype(dtype, {"F16"}, TINY, device)


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("target", ["float16", "bfloat16"])
@pytest.mark.parametrize("device", [EMULATED, GPU], ids=str)
@pytest.mark.filterwarnings("ignore:.*float16's normal range")
def test_conversion_rounds_to_nearest(tmp_path: Path, source: str, target: str, device: Device) -> None:
    folder = make_checkpoint(tmp_path, TINY, source)
    weights, expected = load(folder, device, dtype=target), stored(folder)
    assert weights.dtype.name == target
    for key, value in weights.items():
        want = expected[key].astype(np.float32 if value.ndim == 1 else weights.dtype)
        np.testing.assert_array_equal(device.get(value), want, err_msg=key)
    assert (weights.report.stored, weights.report.computed) == (source, target)


def put_values(folder: Path, name: str, values: list[float], dtype: Any) -> None:
    tensor = np.zeros(tensor_shapes(Qwen3Config.from_file(folder))[name], np.float32)
    tensor.reshape(-1)[: len(values)] = values
    rewrite(folder, **{name: tensor.astype(dtype)})


@pytest.mark.parametrize("device", [EMULATED, GPU], ids=str)
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_float16_overflow_is_refused(tmp_path: Path, source: str, device: Device) -> None:
    folder = make_checkpoint(tmp_path, TINY, source, std=0.0)
    name = "model.layers.1.mlp.down_proj.weight"
    # inf and NaN in the file are not the conversion's doing; 65280 still fits
    put_values(folder, name, [65280, -7e4, 1e6, np.inf, np.nan], BF16 if source == "bfloat16" else np.float32)
    with pytest.raises(CheckpointError, match=r"cannot hold 2 weights.*down_proj\.weight \(2\).*bfloat16"):
        load(folder, device, dtype="float16")
    assert load(folder, device, dtype="bfloat16").report.overflowed == {}
    assert load(folder, CPU).report.overflowed == {}


@pytest.mark.parametrize("device", [EMULATED, GPU], ids=str)
def test_float16_subnormals_are_reported(tmp_path: Path, device: Device) -> None:
    folder = make_checkpoint(tmp_path, TINY, "bfloat16", std=0.0)
    name = "model.embed_tokens.weight"
    # normal, two subnormal, two that vanish; an exact zero is none of these
    put_values(folder, name, [7e-5, 5e-5, -6e-8, 1e-8, -1e-9, 0.0], BF16)
    with pytest.warns(UserWarning, match=r"4 of \d+ weights .*2 of them became 0.*embed_tokens\.weight \(4\)"):
        weights = load(folder, device, dtype="float16")
    assert weights.report.subnormal == {name: 4}
    assert weights.report.zeroed == {name: 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(folder, device).report.subnormal == {}


# -- tensors that do not match ----------------------------------------------------------------------------------


class Untouchable(Device):
    """A device on which nothing may be allocated: problems must be found first."""

    @property
    def xp(self) -> Any:
        raise AssertionError("allocated before the checkpoint was checked")


def refused(folder: Path, message: str, config: Qwen3Config | None = None) -> str:
    with pytest.raises(CheckpointError, match=message) as info:
        load_weights(folder, config or Qwen3Config.from_file(folder), Untouchable("cpu"))
    assert str(folder) in str(info.value)
    return str(info.value)


def test_all_mismatches_are_listed_before_anything_is_allocated(tiny: Path) -> None:
    rewrite(
        tiny,
        **{
            "model.norm.weight": None,
            "model.layers.1.self_attn.q_norm.weight": None,
            "model.layers.0.mlp.up_proj.weight": np.zeros((47, 32), np.float16),
            "model.layers.0.mlp.down_proj.weight": np.zeros((48, 32), np.float16),
            "model.layers.0.mlp.gate_proj.weight": np.zeros((48, 32), np.int8),
            "model.layers.2.mlp.up_proj.weight": np.zeros((48, 32), np.float16),
            "score.weight": np.zeros((2, 32), np.float16),
        },
    )
    text = refused(tiny, "do not match config.json")
    assert "2 missing: model.layers.1.self_attn.q_norm.weight, model.norm.weight" in text
    assert "2 unexpected: model.layers.2.mlp.up_proj.weight, score.weight" in text
    assert "2 misshapen: model.layers.0.mlp.up_proj.weight [47, 32] instead of [48, 32]" in text
    assert "model.layers.0.mlp.down_proj.weight [48, 32] instead of [32, 48]" in text
    assert "1 in an unsupported format: model.layers.0.mlp.gate_proj.weight (I8)" in text


def test_long_lists_are_cut(tiny: Path) -> None:
    text = refused(tiny, "11 missing|22 missing|33 missing", replace(TINY, num_hidden_layers=5))
    assert "33 missing: model.layers.2.input_layernorm.weight" in text
    assert "and 13 more" in text


def test_bias_must_be_in_the_file(tiny: Path) -> None:
    refused(tiny, r"8 missing: model\.layers\.0\.self_attn\.q_proj\.bias", replace(TINY, attention_bias=True))


def test_derived_buffers_of_old_exports_are_ignored(tiny: Path) -> None:
    rewrite(tiny, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)})
    assert set(load(tiny)) == set(tensor_shapes(TINY))


def test_tied_head_variants(tmp_path: Path) -> None:
    tied = make_checkpoint(tmp_path / "tied", TINY, "float16", tie_word_embeddings=True)
    without = load(tied)

    embedding = stored(tied)["model.embed_tokens.weight"]
    rewrite(tied, **{"lm_head.weight": embedding})
    equal = load(tied)
    assert equal.head is equal.embed
    np.testing.assert_array_equal(equal.head, without.head)
    # the same values in another format are the same head
    rewrite(tied, **{"lm_head.weight": embedding.astype(np.float32)})
    np.testing.assert_array_equal(load(tied).head, without.head)

    different = embedding.copy()
    different[-1, -1] += 1
    rewrite(tied, **{"lm_head.weight": different})
    refused(tied, "ties the head .* different lm_head.weight is stored")

    untied = make_checkpoint(tmp_path / "untied", TINY, "float16")
    rewrite(untied, **{"lm_head.weight": None})
    refused(untied, r"1 missing: lm_head\.weight")


def test_name_prefix(tiny: Path) -> None:
    expected = load(tiny)
    tensors = stored(tiny)
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(bare, tiny / "model.safetensors")
    weights = load(tiny)
    for name in expected:
        np.testing.assert_array_equal(weights[name], expected[name], err_msg=name)

    mixed = {n.removeprefix("model.") if "layers.0" in n else n: v for n, v in tensors.items()}
    save_file(mixed, tiny / "model.safetensors")
    refused(tiny, "some tensor names begin with 'model.' .* and some do not .*; all or none must")


# -- shards and index -------------------------------------------------------------------------------------------


def edit_index(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


SHARD1, SHARD2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_shard_not_there(sharded: Path) -> None:
    (sharded / SHARD2).unlink()
    with pytest.raises(FileNotFoundError, match=f"{SHARD2} named in .*index.json is not there"):
        load(sharded)


def test_index_names_a_tensor_in_the_wrong_shard(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"lm_head.weight": SHARD2}))
    text = refused(sharded, "stale")
    assert f"lm_head.weight is not in {SHARD2}" in text
    assert f"lm_head.weight is in {SHARD1} but the index has it in {SHARD2}" in text


def test_index_lacks_a_tensor(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.pop("lm_head.weight"))
    refused(sharded, f"stale.*lm_head.weight is in {SHARD1} but not in the index")


def test_index_points_elsewhere(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"lm_head.weight": "../" + SHARD1}))
    refused(sharded, "points out of the checkpoint's folder")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a safetensors index"),
        ("[]", "not a safetensors index"),
        ("{}", "not a safetensors index"),
        ('{"weight_map": {}}', "not a safetensors index"),
        ('{"weight_map": {"a": 1}}', "not a safetensors index"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_broken_index(sharded: Path, text: str, message: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, message)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"no model\.safetensors and no model\.safetensors\.index\.json$"),
        (["pytorch_model.bin"], r"found pytorch_model\.bin; only safetensors files are read"),
        (["model-q4.gguf"], r"found model-q4\.gguf"),
        ([SHARD1, SHARD2], f"found {SHARD1}, {SHARD2}; shards need their index"),
    ],
)
def test_no_tensor_files(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=message):
        Checkpoint(tmp_path)


# -- broken files -----------------------------------------------------------------------------------------------


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: Any, begin: Any, end: Any, dtype: str = "F16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1192135096\n"

BROKEN = {
    "lfs": (LFS, "Git LFS pointer of 135 bytes.*git lfs pull"),
    "empty": (b"", "truncated, 0 bytes"),
    "seven-bytes": (b"1234567", "truncated, 7 bytes"),
    "length-max": (b"\xff" * 8 + b"{}", "the header claims 18446744073709551615 bytes but 2 follow"),
    "length-beyond-file": (raw({}, length=100), "the header claims 100 bytes but 2 follow"),
    "not-json": (raw(b"{'a': 1}"), "the header is not JSON"),
    "not-utf8": (raw(b"\xff\xfe\xff\xfe"), "the header is not JSON|not a valid safetensors file"),
    "json-list": (raw([]), "the header is a JSON list"),
    "one-byte-short": (raw({"a": entry([2], 0, 4)}, b"\0" * 3), "tensor a: ends at byte 4 of 3: the file is truncated"),
    "trailing-byte": (raw({"a": entry([2], 0, 4)}, b"\0" * 5), "1 bytes after the last tensor"),
    "hole": (raw({"a": entry([1], 0, 2), "b": entry([1], 4, 6)}, b"\0" * 6), "2 bytes before tensor b"),
    "overlap": (raw({"a": entry([2], 0, 4), "b": entry([2], 2, 6)}, b"\0" * 6), "tensor b overlaps"),
    "shared-range": (raw({"k": entry([2], 0, 4), "v": entry([2], 0, 4)}, b"\0" * 4), "tensor v overlaps"),
    "begin-after-end": (raw({"a": entry([2], 4, 0)}, b"\0" * 4), "tensor a: data_offsets"),
    "negative-offset": (raw({"a": entry([2], -4, 0)}, b"\0" * 4), "tensor a: data_offsets"),
    "float-offset": (raw({"a": entry([2], 0.0, 4.0)}, b"\0" * 4), "tensor a: data_offsets"),
    "shape-too-big": (raw({"a": entry([3], 0, 4)}, b"\0" * 4), r"tensor a: shape \[3\] of F16 needs 6 bytes, has 4"),
    "shape-overflows": (raw({"a": entry([2**32, 2**32], 0, 4)}, b"\0" * 4), "tensor a: shape"),
    "shape-negative": (raw({"a": entry([-1], 0, 4)}, b"\0" * 4), r"tensor a: shape \[-1\]"),
    "no-shape": (raw({"a": {"dtype": "F16", "data_offsets": [0, 4]}}, b"\0" * 4), "tensor a: needs dtype, shape"),
    "same-name-twice": (
        raw(
            b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}'
        )
        + b"\0" * 4,
        "lists a twice",
    ),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_file(tiny: Path, content: bytes, message: str) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(content)
    text = refused(tiny, message)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text


def test_truncated_copy_of_a_real_file(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(tiny, r"tensor .*: ends at byte \d+ of \d+: the file is truncated; download it again")


def test_broken_symbolic_link(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.unlink()
    path.symlink_to(tiny / "gone")
    with pytest.raises(FileNotFoundError, match="broken symbolic link"):
        load(tiny)


def test_header_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    limit = 100_000_000
    for size in (100_000, limit):  # lengths at which other readers were off by a few bytes
        header = json.dumps({"a": entry([1], 0, 2)}).encode()
        path.write_bytes(raw(header + b" " * (size - len(header)), b"\0\x3c"))
        assert SafetensorsFile(path).tensors["a"].flat().tolist() == [1.0]
    path.write_bytes(raw(header + b" " * (limit + 1 - len(header)), b"\0\x3c"))
    with pytest.raises(CheckpointError, match="100000001 bytes, above the safetensors limit of 100000000"):
        SafetensorsFile(path)


@pytest.mark.parametrize("padding", range(8))
def test_tensors_may_start_at_any_byte(tmp_path: Path, padding: int) -> None:
    f32 = np.arange(5, dtype=np.float32) * 1.25
    bf16 = np.linspace(-3, 3, 7).astype(BF16)
    header = json.dumps(
        {"u": entry([3], 0, 3, "U8"), "f": entry([5], 3, 23, "F32"), "b": entry([7], 23, 37, "BF16")}
    ).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw(header + b" " * padding, b"abc" + f32.tobytes() + bf16.tobytes()))
    tensors = SafetensorsFile(path).tensors
    np.testing.assert_array_equal(tensors["f"].flat(), f32)
    np.testing.assert_array_equal(tensors["b"].flat(), bf16)


def test_unaligned_and_unordered_checkpoint(tiny: Path) -> None:
    """Tensor order in the header is free, and one byte before the data makes every tensor unaligned."""
    expected = load(tiny)
    path = tiny / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(dict(reversed(header.items()))).encode()
    text += b" " * (1 + len(text) % 2)  # an odd length
    path.write_bytes(raw(text, content[8 + length :]))
    assert len(text) % 2 == 1
    weights = load(tiny)
    for name in expected:
        np.testing.assert_array_equal(weights[name], expected[name], err_msg=name)


# -- progress ---------------------------------------------------------------------------------------------------


def test_progress_bar(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny, progress=True)
    out, err = capfd.readouterr()
    assert "Loading tiny" in err
    assert "kB" in err or "KiB" in err
    assert "/s" in err
    assert out == ""
    load(tiny, progress=False)
    load(tiny)  # stderr is no terminal here
    assert capfd.readouterr() == ("", "")


# -- random checkpoints -----------------------------------------------------------------------------------------


def test_make_checkpoint(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "a", "0.6B", "bfloat16", seed=5, num_hidden_layers=1, vocab_size=5000)
    again = make_checkpoint(
        tmp_path / "b",
        "0.6B",
        "bfloat16",
        seed=5,
        num_hidden_layers=1,
        vocab_size=5000,
        shard_bytes=1 << 23,
        tokenizer=True,
    )
    other = make_checkpoint(tmp_path / "c", TINY, "float16", seed=6)
    config = Qwen3Config.from_file(first)
    assert config == replace(QWEN3_SHAPES["0.6B"], num_hidden_layers=1, vocab_size=5000)
    assert not (first / "tokenizer.json").exists()
    assert (again / "tokenizer.json").is_file()
    assert Qwen3Config.from_file(again).eos_token_id == (4093,)
    # shards change the files, not the weights
    assert len(list(again.glob("*.safetensors"))) > 1
    one, many = stored(first), stored(again)
    assert set(one) == set(many) == set(tensor_shapes(config))
    for name, value in one.items():
        assert value.dtype == BF16
        np.testing.assert_array_equal(value.view(np.uint16), many[name].view(np.uint16), err_msg=name)
    gate = one["model.layers.0.mlp.gate_proj.weight"].astype(np.float64)
    assert abs(gate.mean()) < 1e-4
    assert abs(gate.std() - 0.02) < 1e-4
    norm = one["model.norm.weight"].astype(np.float64)
    assert abs(norm.mean() - 1) < 0.02
    assert 0.08 < norm.std() < 0.12
    up = one["model.layers.0.mlp.up_proj.weight"].astype(np.float64)
    assert abs(np.corrcoef(gate.ravel(), up.ravel())[0, 1]) < 0.01
    assert Qwen3Config.from_file(other) == replace(TINY, dtype="float16")
    load(again)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"config": "7B"}, "config must be one of 0.6B"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"config": TINY, "tokenizer": True}, "vocab_size of 4096 or more"),
    ],
)
def test_make_checkpoint_errors(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_checkpoint(tmp_path, **kwargs)
