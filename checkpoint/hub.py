"""Finds the folder of a model or tokenizer on disk, or downloads it from the Hugging Face Hub."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from .folder_files import CONFIG, file_digest

WEIGHTS = ("*.safetensors",)
STALE = ["model*.safetensors", "model.safetensors.index.json"]
TEXTS = ("*.json", "*.model", "*.txt", "*.jinja")
# Files that no reader of a model opens: those in folders (other programs' formats) and Mistral's second copy.
IGNORED = ("*/*", "consolidated*.safetensors")
HUB_NAME = re.compile(r"(?P<owner>[\w.-]+)/[\w.-]+(@\S+)?")
SHA256 = re.compile(
    r"[0-9a-f]{64}"
)  # the name in the cache of a file that the Hub stores under its sha256


def find_model(
    name: str | Path, argument: str, patterns: tuple[str, ...] = (*TEXTS, *WEIGHTS)
) -> Path:
    """Returns the folder of `org/name[@revision]` on the Hub, downloaded if needed; of any other name, the path itself.

    A name is one on the Hub if there is neither such a path nor a folder `org`. Arguments and errors are those of
    `find_folder`.
    """
    path, match = Path(name), HUB_NAME.fullmatch(str(name))
    if match is None or path.exists() or path.is_symlink() or Path(match["owner"]).exists():
        return path
    return find_folder(str(name), argument, patterns)


def find_config_folder(name: str) -> str:
    """Returns `name`, or the folder of `org/name[@revision]` on the Hub, of which only `config.json` is downloaded."""
    return str(find_model(name, "model", (CONFIG,)))


def find_folder(
    name: str,
    argument: str,
    patterns: tuple[str, ...] = (*TEXTS, *WEIGHTS),
    *,
    cache: str | None = None,
) -> Path:
    """Returns the folder `name`, or that of the Hub's repository `name[@revision]`, downloaded if needed.

    A connection that is cut is continued. The files that are new are compared with the sha256 that names them.

    Args:
        argument: What the name was given as, for messages.
        patterns: The files to download.
        cache: The folder for downloads; by default the Hub's.

    Raises ValueError if there is neither, the Hub cannot be reached, or a file is damaged.
    """
    if Path(name).is_dir():
        return Path(name)
    repository, _, revision = name.partition("@")
    if Path(name).exists() or name.startswith((".", "/", "~")) or repository.count("/") > 1:
        raise ValueError(f"{argument}: {name} is not a folder")
    hub: Any = import_module("huggingface_hub")
    for part in ("constants", "errors"):  # which it does not import by itself
        import_module(f"huggingface_hub.{part}")
    options = {"revision": revision} if revision else {}
    if cache is not None:
        options["cache_dir"] = str(Path(cache).expanduser())
    # HTTPError, of whichever library the client uses, covers a connection that is cut
    failures: Any = (OSError, ValueError, hub.errors.HTTPError)
    known = _stored_files(hub, repository, options.get("cache_dir"))
    try:
        folder = Path(
            hub.snapshot_download(
                repository, allow_patterns=list(patterns), ignore_patterns=list(IGNORED), **options
            )
        )
    except failures as error:
        raise ValueError(
            f"{argument}: {name} is not a folder, and downloading it from the Hugging Face Hub failed: "
            f"{_reason(hub, error, repository, revision)}"
        ) from None
    _check_downloads(folder, known, f"{argument}: {name}")
    if set(WEIGHTS) <= set(patterns) and not any(folder.glob(WEIGHTS[0])):
        raise ValueError(
            f"{argument}: {name} has no safetensors files on the Hugging Face Hub, and others are not downloaded; to "
            f"use them, run `hf download {repository}` and name the folder that it prints"
        )
    return folder


def upload_folder(
    folder: Path,
    repository: str,
    *,
    revision: str | None,
    private: bool | None,
    message: str,
    token: str | None,
) -> str:
    """Commits the files of a folder to the Hub's repository, which is made if needed. Returns the commit's address.

    Weight files there that the folder does not have are removed by the same commit. Raises ValueError if it fails.
    """
    hub: Any = import_module("huggingface_hub")
    errors: Any = import_module("huggingface_hub.errors")
    failures: Any = (OSError, ValueError, errors.HTTPError)
    api = hub.HfApi(token=token)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message=message,
            delete_patterns=STALE,
        )
    except failures as error:
        raise ValueError(
            f"pushing to {repository} on the Hugging Face Hub failed: {_reason(hub, error, repository, revision or '')}"
        ) from None
    return str(commit.commit_url)


def _reason(hub: Any, error: Exception, repository: str, revision: str) -> str:
    """Returns one line that says why a download or an upload failed."""
    errors = hub.errors
    if isinstance(error, errors.GatedRepoError):
        return f"{repository} asks for its terms to be accepted; do that on its page, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no {repository}, or it is private; for a private one run `hf auth login` first"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"cannot reach {hub.constants.ENDPOINT}, and the files are not in the cache"
    if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
        return "the Hub refused the token, or there is none; run `hf auth login` with a token that can write"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _stored_files(hub: Any, repository: str, cache: str | None) -> set[str]:
    """Returns the names of the files that the cache has of a repository."""
    folder = (
        Path(cache or hub.constants.HF_HUB_CACHE)
        / f"models--{repository.replace('/', '--')}"
        / "blobs"
    )
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _check_downloads(folder: Path, known: set[str], what: str) -> None:
    """Removes new files of the cache that do not have the sha256 that names them, and raises ValueError for them.

    The Hub's client compares only the sizes.
    """
    for path in sorted(folder.iterdir()):
        stored = path.resolve()
        if not path.is_symlink() or stored.name in known or not SHA256.fullmatch(stored.name):
            continue
        if (digest := file_digest(stored)) != stored.name:
            path.unlink(missing_ok=True)  # another process may have found it at the same time
            stored.unlink(missing_ok=True)
            raise ValueError(
                f"{what}: the Hugging Face Hub sent a damaged {path.name}, whose sha256 is {digest} instead of "
                f"{stored.name}; it was removed, so try again"
            )
