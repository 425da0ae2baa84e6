"""Finds the folder of a model or tokenizer on disk, or downloads it from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WEIGHTS = ("*.safetensors",)
TEXTS = ("*.json", "*.model", "*.txt")


def find_folder(
    name: str, argument: str, patterns: tuple[str, ...] = (*TEXTS, *WEIGHTS), *, cache: str | None = None
) -> Path:
    """Returns the folder `name`, or that of the Hub's repository `name`, downloaded if needed.

    Args:
        argument: What the name was given as, for messages.
        patterns: The files to download.
        cache: The folder for downloads; by default the Hub's.

    Raises ValueError if there is neither.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{argument}: {name} is not a folder")
    import huggingface_hub

    hub: Any = huggingface_hub
    try:
        place = {} if cache is None else {"cache_dir": str(Path(cache).expanduser())}
        return Path(hub.snapshot_download(name, allow_patterns=list(patterns), **place))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{argument}: {name} is not a folder, and downloading it from the Hugging Face Hub failed: {reason}"
        ) from None
