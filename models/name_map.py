"""Maps native parameter names to a checkpoint's tensor names, in both directions."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One native parameter and the tensor, or the stacked tensors, that a checkpoint stores for it.

    Attributes:
        native, stored: Names, in which `{i}` stands for a layer number, and `{i+1}` for the next one. Several stored
            tensors are stacked along the native parameter's split dimension, one for each group of its `Shard`
            (separate q, k, v of a fused qkv).
        transpose: The checkpoint stores [in, out] and the native weight is [out, in] (GPT-2's Conv1D).
    """

    native: str
    stored: str | tuple[str, ...]
    transpose: bool = False

    def stored_names(self) -> tuple[str, ...]:
        return (self.stored,) if isinstance(self.stored, str) else self.stored

    def at_layer(self, i: int | str) -> Entry:
        following = str(int(i) + 1) if i != "" else ""
        stored = tuple(
            name.replace("{i}", str(i)).replace("{i+1}", following) for name in self.stored_names()
        )
        return Entry(self.native.replace("{i}", str(i)), stored, self.transpose)


@dataclass(frozen=True)
class Match:
    """Which tensors of one checkpoint belong to which parameters of one model.

    Attributes:
        entries: Native name -> its entry, with layer numbers filled in.
        sources: Stored name, as entries spell it -> the tensor's name in this checkpoint.
        aliases: A tensor's name in this checkpoint -> the stored name of another tensor that must be equal.
        other_heads: The names in this checkpoint of tensors of heads, and of a decoder, that the model does not have.
    """

    entries: dict[str, Entry]
    sources: dict[str, str]
    aliases: dict[str, str]
    other_heads: tuple[str, ...]


@dataclass(frozen=True)
class NameMap:
    """All entries of a family, for models with any head.

    Attributes:
        prefix: An optional prefix of the checkpoint's names (`transformer.`); entries include it.
        aliases: Pairs (name, kept name) of stored tensors with equal values (tied weights). The pair does not apply
            to a model that has a separate parameter for the name (an untied head).
        renamed: Pairs (regular expression for the full name in old files, current name); `\\1` is the first group.
        ignored: Regular expressions for the full names of stored tensors that are not parameters.
        zeros: Names among the ignored ones of tensors that must be zeros, because the model does not add them.
        spelled: Triples (regular expressions for an architecture and for a stored name, the name there) of what
            transformers' class of that architecture calls differently, and finds under no other name.
        head_first: A regular expression for the architectures whose module creates the head before the body, so that
            its first name of a tied tensor is the alias.
    """

    entries: tuple[Entry, ...]
    prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    spelled: tuple[tuple[str, str, str], ...] = ()
    head_first: str = ""

    def resolve(self, native_names: Iterable[str]) -> Iterator[Entry]:
        """Yields the entry of each native parameter, with layer numbers filled in. Raises KeyError without an entry."""
        patterns = [(re.compile(_layer_pattern(entry.native)), entry) for entry in self.entries]
        for name in native_names:
            for pattern, entry in patterns:
                if match := pattern.fullmatch(name):
                    yield entry.at_layer(match.groupdict().get("i", ""))
                    break
            else:
                raise KeyError(f"no entry of the name map covers the parameter {name!r}")

    def spell(self, stored_name: str, architecture: str) -> str:
        """Returns the name under which transformers' class of an architecture finds the tensor of an entry."""
        for wanted, pattern, replacement in self.spelled:
            if re.fullmatch(wanted, architecture) and (match := re.fullmatch(pattern, stored_name)):
                return match.expand(replacement)
        return stored_name

    def module_name(self, stored_name: str, architecture: str) -> str:
        """Returns the name that the tensor of an entry has in transformers' module of an architecture."""
        name = self.spell(stored_name, architecture)
        is_body = architecture.endswith("Model") and not architecture.endswith("HeadModel")
        return name.removeprefix(self.prefix) if is_body else name

    def is_ignored(self, stored_name: str) -> bool:
        return any(re.fullmatch(pattern, stored_name) for pattern in self.ignored)

    def stored_names(self) -> set[str]:
        """Returns the stored names of all entries."""
        return {name for entry in self.entries for name in entry.stored_names()}

    def untied_names(self) -> list[str]:
        """Returns the stored names that are aliases in a tied model and parameters in an untied model."""
        own = self.stored_names()
        return [alias for alias, _ in self.aliases if alias in own]

    def untied_entries(self) -> list[Entry]:
        """Returns the entries of the parameters that only an untied model has."""
        names = set(self.untied_names())
        return [entry for entry in self.entries if names & set(entry.stored_names())]

    def todays_name(self, stored_name: str, known: Container[str]) -> str:
        """Returns `stored_name` as entries spell it: an old name is replaced, and a missing prefix is added."""
        for pattern, replacement in self.renamed:
            if match := re.fullmatch(pattern, stored_name):
                stored_name = match.expand(replacement)
        prefixed = self.prefix + stored_name
        return prefixed if stored_name not in known and prefixed in known else stored_name

    def match(
        self, native_names: Iterable[str], stored_names: Iterable[str], *, untied: bool = False
    ) -> Match:
        """Matches a model's parameters with a checkpoint's tensors.

        `untied` says that the checkpoint's output head differs from its embedding, whether the model has a head or not.

        Raises:
            ValueError: A parameter has no tensor, no model of this family has a tensor, or a tensor is stored under
                two names. The message lists the names.
        """
        entries = {entry.native: entry for entry in self.resolve(native_names)}
        wanted = {name for entry in entries.values() for name in entry.stored_names()}
        heads = {
            name
            for entry in self.entries
            if "{i}" not in entry.native
            for name in entry.stored_names()
        }
        absent = self._patterns_of_absent({name.partition(".")[0] for name in entries})
        heads_apart = self.untied_names() if untied else []
        kept_as = {
            alias: kept
            for alias, kept in self.aliases
            if alias not in wanted and alias not in heads_apart
        }
        known = wanted | heads | kept_as.keys()
        sources: dict[str, str] = {}
        aliases: dict[str, str] = {}
        other_heads: list[str] = []
        unexpected: list[str] = []
        for stored in stored_names:
            name = self.todays_name(stored, known)
            if name in wanted:
                if name in sources:
                    raise ValueError(
                        f"the checkpoint has {name} twice, as {sources[name]} and as {stored}"
                    )
                sources[name] = stored
            elif name in kept_as:
                aliases[stored] = kept_as[name]
            elif name in heads or any(pattern.fullmatch(name) for pattern in absent):
                other_heads.append(stored)
            elif not (self.is_ignored(stored) or self.is_ignored(name)):
                unexpected.append(stored)
        for stored, kept in list(aliases.items()):
            if kept in wanted and kept not in sources:  # the file stores only the alias
                sources[kept] = stored
                del aliases[stored]
        refuse_names(sorted(wanted - sources.keys()), unexpected)
        return Match(entries, sources, aliases, tuple(other_heads))

    def _patterns_of_absent(self, modules: Container[str]) -> list[re.Pattern[str]]:
        """Returns the stored names of blocks in stacks that are not among a model's modules, as regular expressions."""
        entries = (entry for entry in self.entries if entry.native.partition(".")[0] not in modules)
        return [
            re.compile(_layer_pattern(name))
            for entry in entries
            for name in entry.stored_names()
            if "{i}" in name
        ]


def refuse_names(missing: list[str], unexpected: list[str]) -> None:
    """Raises ValueError if a checkpoint lacks tensors of the model, or has tensors that the model does not have."""
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
