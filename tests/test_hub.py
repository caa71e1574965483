"""Finding a checkpoint: a path, the hub cache laid out by hand, and what is said when neither is there. No network."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import huggingface_hub.utils
import numpy as np
import pytest

from cukern.models import HubError, Qwen3, demo_checkpoint, resolve_checkpoint

DATA = Path(__file__).parent / "data"
NAME = "Qwen/Qwen3-tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, so that a request that should not be made fails instead of leaving the machine."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def cache_with(cache: Path, source: Path, *, without: tuple[str, ...] = (), tokenizer: bool = True) -> Path:
    """Lay out a hub cache as huggingface_hub does: refs, blobs, and a snapshot of links to them."""
    root = cache / "models--Qwen--Qwen3-tiny"
    snapshot = root / "snapshots" / COMMIT
    (root / "refs").mkdir(parents=True)
    (root / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    files = [f for f in source.iterdir() if not f.name.startswith("golden") and f.name not in without]
    if tokenizer:
        files.append(demo_checkpoint() / "tokenizer.json")
    for number, file in enumerate(files):
        shutil.copyfile(file, root / "blobs" / f"blob{number}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob{number}")
    return snapshot


# -- paths ------------------------------------------------------------------------------------------------------


def test_local_folder() -> None:
    assert resolve_checkpoint(DATA / "tied-fp16") == DATA / "tied-fp16"
    assert resolve_checkpoint(str(DATA / "tied-fp16")) == DATA / "tied-fp16"


def test_local_folder_wins_over_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert resolve_checkpoint(NAME) == Path(NAME)


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_checkpoint("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "qwen3", "a/b/c", "", "../x/y", Path("Qwen/Qwen3-0.6B")])
def test_no_such_folder(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        resolve_checkpoint(name)


def test_the_name_of_the_demonstration_model_is_advised() -> None:
    with pytest.raises(FileNotFoundError, match=r"demo: no such folder .* in cukern\.models\.demo_checkpoint\(\)$"):
        resolve_checkpoint("demo")
    with pytest.raises(FileNotFoundError, match=r"owner/name\)$"):
        resolve_checkpoint("Demo")


def test_a_file_is_not_a_folder() -> None:
    file = DATA / "tied-fp16" / "model.safetensors"
    with pytest.raises(NotADirectoryError, match=f"pass the checkpoint's folder {file.parent}"):
        resolve_checkpoint(file)


def test_revision_of_a_folder() -> None:
    with pytest.raises(ValueError, match="revision 'v2' applies to a hub name"):
        resolve_checkpoint(DATA / "tied-fp16", revision="v2")


# -- the cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["tied-fp16", "untied-bf16-sharded"])
def test_cached_name_needs_no_network(fixture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cache_with(tmp_path, DATA / fixture)
    calls: list[bool] = []
    original = huggingface_hub.snapshot_download

    def watched(*args: Any, **kwargs: Any) -> str:
        calls.append(kwargs["local_files_only"])
        return original(*args, **kwargs)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", watched)
    assert resolve_checkpoint(NAME, cache_dir=tmp_path).resolve() == snapshot.resolve()
    assert resolve_checkpoint(NAME, cache_dir=tmp_path, revision=COMMIT).resolve() == snapshot.resolve()
    assert calls == [True, True]


def test_the_hubs_own_cache_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_with(tmp_path, DATA / "tied-fp16")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    golden = np.load(DATA / "tied-fp16" / "golden.npz")
    model = Qwen3.from_pretrained(NAME, device="cpu")
    np.testing.assert_allclose(model(golden["input_ids"]), golden["logits"], atol=1e-3)


def test_cached_without_tokenizer_is_enough_for_the_model(tmp_path: Path) -> None:
    snapshot = cache_with(tmp_path, DATA / "tied-fp16", tokenizer=False)
    assert resolve_checkpoint(NAME, cache_dir=tmp_path).resolve() == snapshot.resolve()


@pytest.mark.parametrize(
    ("fixture", "lost"),
    [
        ("tied-fp16", "config.json"),
        ("tied-fp16", "model.safetensors"),
        ("untied-bf16-sharded", "model-00002-of-00002.safetensors"),
    ],
)
def test_incomplete_cache_offline(fixture: str, lost: str, tmp_path: Path) -> None:
    cache_with(tmp_path, DATA / fixture, without=(lost,))
    with pytest.raises(HubError, match=rf"incomplete in the hub cache {tmp_path} \(missing: {lost}\)"):
        resolve_checkpoint(NAME, cache_dir=tmp_path)


def test_interrupted_download_is_incomplete(tmp_path: Path) -> None:
    snapshot = cache_with(tmp_path, DATA / "tied-fp16")
    (snapshot / "model.safetensors").resolve().unlink()  # the link stays, its blob is gone
    with pytest.raises(HubError, match=r"missing: model\.safetensors"):
        resolve_checkpoint(NAME, cache_dir=tmp_path)


# -- absent -----------------------------------------------------------------------------------------------------


def test_absent_and_offline_says_both_ways_out(tmp_path: Path) -> None:
    with pytest.raises(HubError) as info:
        resolve_checkpoint(NAME, cache_dir=tmp_path)
    text = str(info.value)
    assert f"{NAME}: not a folder here, absent in the hub cache {tmp_path}" in text
    assert "connect to the internet (and unset HF_HUB_OFFLINE)" in text
    assert f"hf download {NAME} --local-dir FOLDER" in text
    assert "\n" not in text
    assert info.value.__context__ is None  # one error, not a chain


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RepositoryNotFoundError", "neither a folder here nor a public model on the hub"),
        ("GatedRepoError", "access is restricted; accept its terms on https://huggingface.co/Qwen/Qwen3-tiny"),
        ("RevisionNotFoundError", "the hub has no revision 'v9'"),
    ],
)
def test_hub_says_no(error: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(huggingface_hub.errors, error)

    def download(*args: Any, local_files_only: bool, **kwargs: Any) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        raise kind.__new__(kind)  # its constructor wants a response of the HTTP library in use

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(HubError, match=message):
        resolve_checkpoint(NAME, cache_dir=tmp_path, revision="v9")


@pytest.mark.parametrize("progress", [None, True, False])
def test_download_asks_for_the_needed_files_only(
    progress: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fnmatch import fnmatch

    from huggingface_hub.utils import are_progress_bars_disabled

    repository = [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        *(
            "README.md",
            "pytorch_model.bin",
            "model.gguf",
            "onnx/model.onnx",
            "onnx/config.json",
            "fp32/model.safetensors",
        ),
    ]
    asked: list[str] = []
    bars: list[bool] = []

    def download(
        name: str, *, local_files_only: bool, allow_patterns: list[str], ignore_patterns: list[str], **kw: Any
    ) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        bars.append(not are_progress_bars_disabled())
        # the rule of huggingface_hub.utils.filter_repo_objects
        asked.extend(
            huggingface_hub.utils.filter_repo_objects(
                repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        assert all(any(fnmatch(f, p) for p in allow_patterns) for f in asked)
        return str(cache_with(tmp_path, DATA / "tied-fp16"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    before = are_progress_bars_disabled()
    resolve_checkpoint(NAME, cache_dir=tmp_path, progress=progress)
    assert asked == repository[:8]
    assert bars == [not before and progress is not False]
    assert are_progress_bars_disabled() == before


def test_full_disk_is_not_called_a_network_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, local_files_only: bool, **kwargs: Any) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(OSError, match="No space left on device") as info:
        resolve_checkpoint(NAME, cache_dir=tmp_path)
    assert not isinstance(info.value, HubError)


def test_repository_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, local_files_only: bool, **kwargs: Any) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        return str(cache_with(tmp_path, DATA / "tied-fp16", without=("model.safetensors",)))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(HubError, match=r"missing: model\.safetensors.*the hub did not provide them"):
        resolve_checkpoint(NAME, cache_dir=tmp_path)
