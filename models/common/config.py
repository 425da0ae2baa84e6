"""What every family's configuration can do: be read from and written as Hugging Face's `config.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self


@dataclass(frozen=True)
class ModelConfig:
    """Base of the families' frozen configurations."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    attribute_map: ClassVar[dict[str, str]] = {}
    """Common name (`hidden_size`) -> this family's key (`n_embd`), as transformers' attribute of that name."""

    vocab_size: int

    @property
    def num_attention_heads(self) -> int:
        """The number that a tensor-parallel size must divide."""
        raise NotImplementedError

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence the position table serves."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From the keys of a `config.json`; keys that this family does not use are left aside."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        """As the contents of a `config.json` that transformers' `AutoConfig` reads."""
        return {"architectures": [self.architecture], "model_type": self.model_type, **asdict(self)}

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    def with_changes(self, **changes: Any) -> Self:
        """A copy with other values, given by this family's keys or by the common names."""
        return replace(self, **{self.attribute_map.get(name, name): value for name, value in changes.items()})
