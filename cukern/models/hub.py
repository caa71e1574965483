"""Find a checkpoint folder: a local path, the model hub's cache, or a download of the few files that are needed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["HubError", "demo_checkpoint", "resolve_checkpoint"]

# What is downloaded: config, generation config, index, tokenizer, chat template, weights; nothing from subfolders.
_WANTED = ["*.json", "*.jinja", "model*.safetensors"]
_UNWANTED = ["*/*"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")


class HubError(OSError):
    """A hub name that is neither in the local cache nor can be downloaded."""


def demo_checkpoint() -> Path:
    """Return the folder of the demonstration model that ships with the package."""
    return Path(__file__).resolve().parent.parent / "data" / "demo-qwen3"


def resolve_checkpoint(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Path:
    """Turn a path or a hub name into a folder with a checkpoint.

    A folder of that name wins. Else a hub name is looked up in huggingface_hub's cache, without a network
    request; what is missing there is downloaded, with huggingface_hub's progress bars.

    Parameters
    ----------
    name : str or path
        A folder, or a hub name like ``Qwen/Qwen3-0.6B``.
    revision : str, optional
        Branch, tag or commit of a hub name; its default branch otherwise.
    cache_dir : path, optional
        The hub's cache; huggingface_hub's own choice (``HF_HOME``, ``HF_HUB_CACHE``) otherwise.
    progress : bool, optional
        False hides the progress bars of a download.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        A path that does not exist, or is a file.
    HubError
        A hub name that is not cached and cannot be downloaded; the message says what to do.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"a checkpoint is given by its folder or hub name, got {type(name).__name__}")
    text = os.fsdecode(name)
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # ~ of a user that does not exist
        path = Path(text)
    if text and path.is_dir():
        if revision is not None:
            raise ValueError(f"revision {revision!r} applies to a hub name, but {path} is a folder")
        return path
    if text and path.exists():
        raise NotADirectoryError(f"{path} is a file; pass the checkpoint's folder {path.parent}")
    if isinstance(name, os.PathLike) or not _HUB_NAME.fullmatch(text):
        # the command line knows that name, a newcomer tries it here too
        demo = "; the model in the package is in cukern.models.demo_checkpoint()" if text == "demo" else ""
        raise FileNotFoundError(
            f"{text or repr(text)}: no such folder (and not a hub name of the form owner/name){demo}"
        )
    return _from_hub(text, revision, cache_dir, progress)


def _from_hub(name: str, revision: str | None, cache_dir: str | os.PathLike[str] | None, progress: bool | None) -> Path:
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    def snapshot(local_only: bool) -> Path:
        return Path(
            hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=local_only,
            )
        )

    cached: Path | None
    found: Path | None
    try:
        cached = snapshot(local_only=True)
    except (errors.LocalEntryNotFoundError, FileNotFoundError):
        cached = None
    except errors.HFValidationError as error:
        raise HubError(f"{name}: not a valid hub name ({error})") from None
    lacking = _lacking(cached) if cached else ["config.json", "weights"]
    if cached and not lacking:
        return cached
    try:
        with _bars(progress):
            found = snapshot(local_only=False)
    except errors.GatedRepoError:
        raise HubError(
            f"{name}: access is restricted; accept its terms on https://huggingface.co/{name} "
            "and log in (hf auth login)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{name}: neither a folder here nor a public model on the hub; check the name, "
            "or log in for a private one (hf auth login)"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{name}: the hub has no revision {revision!r}") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise  # the disk's fault, not the network's
        # connection and HTTP errors come from whichever HTTP library huggingface_hub uses
        found, reason = cached, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    else:
        reason = "the hub did not provide them"
    lacking = _lacking(found) if found else lacking
    if found and set(lacking) <= {"tokenizer.json"}:
        return found  # the model can run; a caller that needs text says so itself
    where = Path(cache_dir or constants.HF_HUB_CACHE)
    raise HubError(
        f"{name}: not a folder here, {'incomplete' if cached else 'absent'} in the hub cache {where} "
        f"(missing: {', '.join(lacking)}), and not downloaded ({reason}). "
        "Either connect to the internet (and unset HF_HUB_OFFLINE), or run "
        f"`hf download {name} --local-dir FOLDER` on a connected machine, copy FOLDER here and pass its path"
    )


def _lacking(folder: Path) -> list[str]:
    """Files that a cached snapshot should have and has not."""
    import json

    lacking = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return lacking
    if not index.is_file():
        return [*lacking, "model.safetensors"]
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return lacking  # a broken index is the loader's to report
    return lacking + [str(shard) for shard in shards if not (folder / str(shard)).is_file()]


@contextmanager
def _bars(progress: bool | None) -> Iterator[None]:
    from huggingface_hub import utils

    if progress is not False or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()
