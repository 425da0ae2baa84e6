"""Records in `PREFIX.meta.json` which vocabulary the tokens of a `.bin/.idx` pair belong to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...files.strict_json import read_json_object
from ..tokenizers.vocabulary import Vocabulary


@dataclass(frozen=True)
class CorpusMeta:
    """What the files of a pair do not say about themselves.

    Args:
        vocabulary: The vocabulary of the tokens.
        end_token: Id of the token after every document; None if there is none.
        split_sentences: Whether a sequence is a sentence, rather than a document.
        made_from: Hash of the texts' files and of the settings that the pair was made from; None if
            it was made in another way. It says nothing about the tokens.
    """

    vocabulary: Vocabulary
    end_token: int | None
    split_sentences: bool = False
    made_from: str | None = field(default=None, compare=False)

    def write(self, prefix: str | Path) -> None:
        """Writes the record of a pair, in one step."""
        path = meta_path(prefix)
        partial = path.with_name(f"{path.name}.partial")
        values = asdict(self)
        if self.made_from is None:
            del values["made_from"]
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)


def read_meta(prefix: str | Path) -> CorpusMeta | None:
    """Returns what is recorded of a pair; None for a pair of another tool.

    Raises:
        ValueError: The file is damaged.
    """
    path = meta_path(prefix)
    if not path.exists() and not path.is_symlink():
        return None
    values = read_json_object(path, largest=1 << 16)
    vocabulary = Vocabulary.from_json(values.get("vocabulary"), str(path))
    end = values.get("end_token")
    split = values.get("split_sentences", False)
    is_id = isinstance(end, int) and not isinstance(end, bool) and 0 <= end < vocabulary.size
    if end is not None and not is_id:
        raise ValueError(
            f"{path}: end_token must be null or an id below {vocabulary.size}, not {end!r:.100}"
        )
    if not isinstance(split, bool):
        raise ValueError(f"{path}: split_sentences must be true or false, not {split!r:.100}")
    made_from = values.get("made_from")
    return CorpusMeta(vocabulary, end, split, made_from if isinstance(made_from, str) else None)


def meta_path(prefix: str | Path) -> Path:
    """Returns the file that records what the pair of a prefix does not say about itself."""
    return Path(f"{prefix}.meta.json")
