"""A declarative map between native parameter names and a checkpoint's tensor names, used in both directions."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
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
class Match:
    """How the tensors of one checkpoint meet the parameters of one model.

    entries: native name -> its entry, layer numbers filled in.
    sources: stored name, as entries have it -> the tensor's name in this checkpoint.
    aliases: name in this checkpoint of a tensor that must repeat another -> that one's stored name.
    other_heads: names in this checkpoint of tensors that belong to heads which the model does not have.
    """

    entries: dict[str, Entry]
    sources: dict[str, str]
    aliases: dict[str, str]
    other_heads: tuple[str, ...]


@dataclass(frozen=True)
class NameMap:
    """All entries of a family, whichever head a model of it has.

    prefix: what the checkpoint's names may or may not start with (`transformer.`); entries are written with it.
    aliases: stored names that repeat another stored tensor (tied weights): name -> the name that is kept. Where a
        model has a parameter of its own for such a name (an untied head), it is no alias.
    renamed: names in old files: regular expression (full match) -> today's name, in which `\\1` is the first group.
    ignored: regular expressions (full match) of stored tensors that are no parameters.
    """

    entries: tuple[Entry, ...]
    prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
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

    def stored_names(self) -> set[str]:
        """All names that entries have."""
        return {name for entry in self.entries for name in entry.stored_names()}

    def untied_names(self) -> list[str]:
        """Stored names that are an alias in a tied model and a parameter of their own in an untied one."""
        own = self.stored_names()
        return [alias for alias, _ in self.aliases if alias in own]

    def untied_entries(self) -> list[Entry]:
        """Entries of the parameters that only an untied model has."""
        names = set(self.untied_names())
        return [entry for entry in self.entries if names & set(entry.stored_names())]

    def todays_name(self, stored_name: str, known: Container[str]) -> str:
        """`stored_name` as entries spell it: renamed if it is an old name, with the prefix if only that is known."""
        for pattern, replacement in self.renamed:
            if match := re.fullmatch(pattern, stored_name):
                stored_name = match.expand(replacement)
        prefixed = self.prefix + stored_name
        return prefixed if stored_name not in known and prefixed in known else stored_name

    def match(self, native_names: Iterable[str], stored_names: Iterable[str]) -> Match:
        """Pairs a model's parameters with a checkpoint's tensors.

        Raises `ValueError` naming every parameter without a tensor, every tensor that no model of this family has,
        and tensors that are there under two names.
        """
        entries = {entry.native: entry for entry in self.resolve(native_names)}
        wanted = {name for entry in entries.values() for name in entry.stored_names()}
        heads = {name for entry in self.entries if "{i}" not in entry.native for name in entry.stored_names()}
        kept_as = {alias: kept for alias, kept in self.aliases if alias not in wanted}
        known = wanted | heads | kept_as.keys()
        sources: dict[str, str] = {}
        aliases: dict[str, str] = {}
        other_heads: list[str] = []
        unexpected: list[str] = []
        for stored in stored_names:
            name = self.todays_name(stored, known)
            if name in wanted:
                if name in sources:
                    raise ValueError(f"the checkpoint has {name} twice, as {sources[name]} and as {stored}")
                sources[name] = stored
            elif name in kept_as:
                aliases[stored] = kept_as[name]
            elif name in heads:
                other_heads.append(stored)
            elif not (self.is_ignored(stored) or self.is_ignored(name)):
                unexpected.append(stored)
        for stored, kept in list(aliases.items()):
            if kept in wanted and kept not in sources:  # files that kept another one of the equal tensors
                sources[kept] = stored
                del aliases[stored]
        refuse_names(sorted(wanted - sources.keys()), unexpected)
        return Match(entries, sources, aliases, tuple(other_heads))


def refuse_names(missing: list[str], unexpected: list[str]) -> None:
    """ValueError if a checkpoint lacks tensors of the model, or has tensors that the model does not."""
    problems: list[str] = []
    if missing:
        problems.append(f"lacks {_listed(missing)}")
    if unexpected:
        problems.append(f"has {_listed(unexpected)}, which the model does not have")
    if problems:
        raise ValueError(f"the checkpoint {' and '.join(problems)}")


def _listed(names: list[str], most: int = 20) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _layer_pattern(name: str) -> str:
    return re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)")
