"""Damaged, hostile and oddly placed checkpoint folders: loaded right, or refused at once by an error with the path."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cukern
from cukern.engine.tokenizer import read_json
from cukern.models import CheckpointError, ConfigError, resolve_checkpoint
from cukern.models.safetensors_file import SafetensorsFile

SOURCE = Path(__file__).parent / "data" / "tied-fp16"
DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
LONG_NUMBER = b'{"a":' + b"9" * 5000 + b"}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "mein Modell é"))


def load(path: Any, **options: Any) -> cukern.Qwen3:
    return cukern.Qwen3.from_pretrained(path, device="cpu", **options)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# ---- places


def test_links_and_odd_names(folder: Path, tmp_path: Path) -> None:
    expected = load(folder)([[1, 2]])
    (tmp_path / "link").symlink_to(folder)
    blobs = tmp_path / "blobs"  # as the hub's cache keeps them
    blobs.mkdir()
    for file in list(folder.iterdir()):
        (blobs / file.name).write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(blobs / file.name)
    for place in (folder, str(folder), f"{folder}/", tmp_path / "link"):
        np.testing.assert_array_equal(load(place)([[1, 2]]), expected)


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert load(folder)([[1, 2]]).shape == (1, 2, 512)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (None, TypeError, "got NoneType"),
        (5, TypeError, "got int"),
        (b"folder", TypeError, "got bytes"),
        ("", FileNotFoundError, "''"),
        ("~no-such-user/model", FileNotFoundError, "no-such-user"),
        ("a\0b", FileNotFoundError, "no such folder"),
        ("a/b/c", FileNotFoundError, "a/b/c: no such folder"),
    ],
)
def test_what_is_no_place(name: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_checkpoint(name)


# ---- config.json and the other JSON files


def test_a_byte_order_mark(folder: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = folder / name
        if path.exists():
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
            read_json(path)
    assert load(folder)([[1, 2]]).shape == (1, 2, 512)


@pytest.mark.parametrize(
    "content", [DEEP, LONG_NUMBER, b"", b"[", b"\xff\xfe{\0}\0"], ids=["deep", "long", "", "[", "16"]
)
def test_what_json_cannot_hold(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: not"):
        load(folder)
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not"):
        read_json(folder / "tokenizer_config.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_theta": 10**400}, "rope_theta must be a number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 10**400}}, "factor must be a positive number"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type must be a string, got \['yarn'\]"),
        ({"rope_scaling": {"type": {}}}, "rope_type must be a string"),
        ({"eos_token_id": [-1]}, "eos_token_id must be a token id"),
        ({"eos_token_id": 2**31}, "eos_token_id must be a token id"),
        ({"eos_token_id": [[1]]}, "eos_token_id must be a token id"),
    ],
)
def test_values_that_no_field_takes(folder: Path, fields: dict[str, Any], message: str) -> None:
    change(folder, **fields)
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        load(folder)


@pytest.mark.parametrize("layers", [10**9, 2**63])
def test_a_number_of_layers_that_no_file_has_is_refused_at_once(folder: Path, layers: int) -> None:
    change(folder, num_hidden_layers=layers)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=f"num_hidden_layers is {layers} in config.json, but the files have only"):
        load(folder)
    assert time.perf_counter() - start < 20


def test_more_positions_than_memory(folder: Path) -> None:
    change(folder, max_position_embeddings=10**13)
    with pytest.raises(MemoryError, match="RoPE table of 10000000000000 positions"):
        load(folder)
    assert load(folder, max_positions=np.int64(16)).max_positions == 16  # the way out that the message names
    for wrong in ("16", 16.0, True):
        with pytest.raises(TypeError, match="max_positions must be an integer"):
            load(folder, max_positions=wrong)


# ---- tensor files


def raw(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("header", [DEEP, LONG_NUMBER], ids=["deep", "long number"])
def test_headers_that_python_cannot_parse(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(raw(header))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: corrupt, the header is not JSON"):
        SafetensorsFile(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "/etc/passwd", "a/b", "a\0b"])
def test_an_index_that_points_out_of_the_folder(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="points out of the checkpoint's folder"):
        load(folder)


@pytest.mark.parametrize("content", [DEEP, b'{"weight_map":' + LONG_NUMBER + b"}"], ids=["deep", "long number"])
def test_an_index_that_is_none(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json: not a safetensors index"):
        load(folder)


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", [_loop, _directory], ids=["link to itself", "folder"])
def test_files_that_are_none(folder: Path, file: str, damage: Callable[[Path], None]) -> None:
    damage(folder / file)
    with pytest.raises(OSError, match=rf"{file}'?") as caught:
        load(folder)
    assert os.fspath(folder) in str(caught.value)


# ---- caches


@pytest.mark.parametrize("size", [(2.5, 16), ("2", 16), (True, 16), (-1, 16), (2, 16.0), (2, "16"), (2, 0)])
def test_sizes_of_a_cache(size: Any) -> None:
    model = load(SOURCE)
    with pytest.raises(ValueError, match=r"(num_blocks|block_size) must be"):
        model.new_cache(*size)
