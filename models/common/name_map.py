"""A declarative map between native parameter names and a checkpoint's tensor names, used in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One native parameter and the tensor, or stacked tensors, that a checkpoint stores for it.

    native, stored: names; `{i}` stands for a layer number. Several stored names are stacked along the native
        parameter's split dimension, one for each group of its `Shard` (separate q, k, v of a fused qkv).
    transpose: the checkpoint stores [in, out] where the native weight is [out, in] (GPT2's Conv1D).
    """

    native: str
    stored: str | tuple[str, ...]
    transpose: bool = False

    def stored_names(self) -> tuple[str, ...]:
        return (self.stored,) if isinstance(self.stored, str) else self.stored

    def at_layer(self, i: int | str) -> Entry:
        stored = tuple(name.replace("{i}", str(i)) for name in self.stored_names())
        return Entry(self.native.replace("{i}", str(i)), stored, self.transpose)


@dataclass(frozen=True)
class NameMap:
    """All entries of a family.

    prefix: what the checkpoint's names may or may not start with (`transformer.`); entries are written with it.
    aliases: stored names that repeat another stored tensor (tied weights): name -> the name that is kept.
    ignored: regular expressions (full match) of stored tensors that are no parameters.
    """

    entries: tuple[Entry, ...]
    prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def resolve(self, native_names: Iterable[str]) -> Iterator[Entry]:
        """The entry of each native parameter, layer numbers filled in. KeyError where there is none."""
        patterns = [(re.compile(_layer_pattern(entry.native)), entry) for entry in self.entries]
        for name in native_names:
            for pattern, entry in patterns:
                if match := pattern.fullmatch(name):
                    yield entry.at_layer(match.groupdict().get("i", ""))
                    break
            else:
                raise KeyError(f"no entry of the name map covers the parameter {name!r}")

    def is_ignored(self, stored_name: str) -> bool:
        return any(re.fullmatch(pattern, stored_name) for pattern in self.ignored)


def _layer_pattern(name: str) -> str:
    return re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)")
