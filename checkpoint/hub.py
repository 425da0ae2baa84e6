"""Finds the folder of a model or tokenizer on disk, or downloads it from the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ..files.hashing import hash_file
from ..files.working_copies import find_source
from .folder_files import CONFIG

WEIGHTS = ("*.safetensors",)
TEXTS = ("*.json", "*.model", "*.txt", "*.jinja")
# Files that no reader of a model opens: those in folders, which are other programs' formats, and
# Mistral's second copy.
IGNORED = ("*/*", "consolidated*.safetensors")
# Weight files of an earlier upload, which a new one removes.
_NUMBER = "[0-9]" * 5
REPLACED = [
    "model.safetensors",
    f"model-{_NUMBER}-of-{_NUMBER}.safetensors",
    "model.safetensors.index.json",
]
HUB_NAME = re.compile(r"(?P<owner>[\w.-]+)/[\w.-]+(@\S+)?")
# The name in the cache of a file that the Hub stores under its sha256.
SHA256 = re.compile(r"[0-9a-f]{64}")
# The folder, beside a repository's snapshots in the cache, with a record of each verified file.
VERIFIED = ".shardzoo-verified"


def find_model(
    name: str | Path,
    argument: str,
    patterns: tuple[str, ...] = (*TEXTS, *WEIGHTS),
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Returns the folder of `org/name[@revision]` on the Hub, or of a URL of an object store, or of
    any other name the path itself.

    A folder on the Hub is downloaded if needed; of a store, see `find_source`. A name is one on the
    Hub if there is neither such a path nor a folder `org`. Arguments and errors are those of
    `find_folder`.
    """
    copy = _find_in_store(name, patterns)
    if copy is not None:
        return copy
    path = Path(name)
    match = HUB_NAME.fullmatch(str(name))
    if match is None or path.exists() or path.is_symlink() or Path(match["owner"]).exists():
        return path
    return find_folder(str(name), argument, patterns, options=options)


def find_config_folder(name: str, options: Mapping[str, Any] | None = None) -> str:
    """Does what `find_model` does, but downloads only `config.json`."""
    return str(find_model(name, "model", (CONFIG,), options))


def find_folder(
    name: str,
    argument: str,
    patterns: tuple[str, ...] = (*TEXTS, *WEIGHTS),
    *,
    cache: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Returns the folder `name`, of a URL of an object store, or of the Hub's repository
    `name[@revision]`.

    The repository is downloaded if needed; a download that was cut is continued. Weight files are
    compared once with the sha256 that names them.

    Args:
        name: A path, a URL, or a name on the Hub.
        argument: What the name was given as, for messages.
        patterns: The files to download.
        cache: The folder for downloads; by default the Hub's.
        options: Other options of the Hub's client, such as `token`.

    Raises:
        ValueError: There is neither, the Hub cannot be reached, or a file is damaged.
    """
    copy = _find_in_store(name, patterns)
    if copy is not None:
        return copy
    if Path(name).is_dir():
        return Path(name)
    repository, _, revision = name.partition("@")
    if Path(name).exists() or name.startswith((".", "/", "~")) or repository.count("/") > 1:
        raise ValueError(f"{argument}: {name} is not a folder")

    import huggingface_hub

    settings = dict(options or {})
    if revision:
        settings["revision"] = revision
    if cache is not None:
        settings["cache_dir"] = str(Path(cache).expanduser())
    hub = cast(Any, huggingface_hub)  # It leaves the types of some arguments open.
    try:
        downloaded: str = hub.snapshot_download(
            repository, allow_patterns=list(patterns), ignore_patterns=list(IGNORED), **settings
        )
    except _list_failures() as error:
        raise ValueError(
            f"{argument}: {name} is not a folder, and downloading it from the Hugging Face Hub "
            f"failed: {_explain(error, repository, revision)}"
        ) from None
    folder = Path(downloaded)
    _check_downloads(folder, f"{argument}: {name}")
    if set(WEIGHTS) <= set(patterns) and not any(folder.glob(WEIGHTS[0])):
        raise ValueError(
            f"{argument}: {name} has no safetensors files on the Hugging Face Hub, and others are "
            f"not downloaded; to use them, run `hf download {repository}` and name the folder that "
            f"it prints"
        )
    return folder


def _find_in_store(name: str | Path, patterns: tuple[str, ...]) -> Path | None:
    """Returns a local copy of a URL's folder, or None for other names.

    Where weights are asked for, they may have any format.
    """
    if set(WEIGHTS) <= set(patterns):
        patterns = ("*",)
    return find_source(name, patterns)


def upload_folder(
    folder: Path,
    repository: str,
    *,
    revision: str | None,
    private: bool | None,
    message: str,
    token: str | None,
) -> str:
    """Commits the files of a folder to a repository of the Hub, which is made if needed.

    Weight files there that the folder does not have are removed by the same commit.

    Returns:
        The address of the commit.

    Raises:
        ValueError: The Hub cannot be reached or refuses.
    """
    import huggingface_hub

    api: Any = huggingface_hub.HfApi(token=token)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message=message,
            delete_patterns=REPLACED,
        )
    except _list_failures() as error:
        raise ValueError(
            f"pushing to {repository} on the Hugging Face Hub failed: "
            f"{_explain(error, repository, revision or '')}"
        ) from None
    return str(commit.commit_url)


def _list_failures() -> tuple[type[Exception], ...]:
    """Returns what the Hub's client raises.

    HTTPError, of whichever library the client uses, covers a connection that is cut.
    """
    from huggingface_hub import errors

    return OSError, ValueError, cast(Any, errors).HTTPError


def _explain(error: Exception, repository: str, revision: str) -> str:
    """Returns one line that says why a download or an upload failed."""
    from huggingface_hub import constants, errors

    # GatedRepoError and RepositoryNotFoundError are of one family; the narrower one comes first.
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repository} asks for its terms to be accepted; do that on its page, "
            f"then run `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no {repository}, or it is private; "
            f"for a private one run `hf auth login` first"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"cannot reach {constants.ENDPOINT}, and the files are not in the cache"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            "the Hub refused the token, or there is none; "
            "run `hf auth login` with a token that can write"
        )
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]


def _check_downloads(folder: Path, what: str) -> None:
    """Compares the weight files of a snapshot in the cache with the sha256 that names them.

    The Hub's client compares only the sizes. That a file is in the cache proves nothing, because a
    call may have ended between the download and this check; so each verified file is recorded.

    Raises:
        ValueError: A file is damaged. It is removed, so that the next call downloads it again.
    """
    for path in sorted(folder.iterdir()):
        if not path.is_symlink():
            continue
        blob = path.parent / os.readlink(path)
        if not SHA256.fullmatch(blob.name):
            continue
        found = blob.stat()
        state = f"{found.st_size} {found.st_mtime_ns}"
        record = folder.parent.parent / VERIFIED / blob.name
        if record.is_file() and record.read_text(errors="replace") == state:
            continue
        digest = hash_file(blob)
        if digest != blob.name:
            # The blob may itself be a link, into a store that repositories share. Another process
            # may have found the damage at the same time.
            stored = blob.resolve()
            for name in (path, blob, stored):
                name.unlink(missing_ok=True)
            raise ValueError(
                f"{what}: the Hugging Face Hub sent a damaged {path.name}, whose sha256 is "
                f"{digest} instead of {blob.name}; it was removed, so try again"
            )
        # A cache that cannot be written is verified each time.
        with suppress(OSError):
            record.parent.mkdir(exist_ok=True)
            record.write_text(state)
