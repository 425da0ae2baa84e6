"""Maps native parameter names to a checkpoint's tensor names, in both directions."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace

MOST_NAMES = 20  # that one error message lists


@dataclass(frozen=True)
class NameEntry:
    """One native parameter and the tensor, or the stacked tensors, that a checkpoint stores for it.

    Attributes:
        native, stored: Names, in which `{i}` stands for a layer number, and `{i+1}` for the next
            one. Several stored tensors are stacked along the native parameter's split dimension,
            one for each group of its `Shard` (separate q, k, v of a fused qkv). `{e}` stands for
            the number of an expert, all of which are stacked, one after the other, unless it is in
            the native name, too.
        transpose: The checkpoint stores [in, out] and the native weight is [out, in] (GPT-2's
            Conv1D).
        by_expert: The checkpoint stores one tensor [E, ...] with a matrix, perhaps transposed, or a
            vector of each expert, and the native parameter has their rows one after the other.
    """

    native: str
    stored: str | tuple[str, ...]
    transpose: bool = False
    by_expert: bool = False

    def stored_names(self) -> tuple[str, ...]:
        """Returns the names of the stored tensors, in the order in which they are stacked."""
        if isinstance(self.stored, str):
            return (self.stored,)
        return self.stored

    def with_experts(self, count: int) -> NameEntry:
        """Returns the entry with the stored names of so many experts."""
        names = self.stored_names()
        if "{e}" not in names[0]:
            return self
        stored = tuple(
            name.replace("{e}", str(expert)) for expert in range(count) for name in names
        )
        return replace(self, stored=stored)

    def of_expert(self, expert: str) -> NameEntry:
        """Returns the entry of a parameter of one expert with the expert's number filled in."""
        stored = tuple(name.replace("{e}", expert) for name in self.stored_names())
        return replace(self, native=self.native.replace("{e}", expert), stored=stored)

    def at_layer(self, layer: int | str) -> NameEntry:
        """Returns the entry with this layer's number filled in; "" is for names without a
        number.
        """
        following = "" if layer == "" else str(int(layer) + 1)
        stored = tuple(
            name.replace("{i}", str(layer)).replace("{i+1}", following)
            for name in self.stored_names()
        )
        return replace(self, native=self.native.replace("{i}", str(layer)), stored=stored)


@dataclass(frozen=True)
class Match:
    """Which tensors of one checkpoint belong to which parameters of one model.

    Attributes:
        entries: Native name -> its entry, with layer numbers filled in.
        sources: Stored name, as entries have it -> the tensor's name in this checkpoint.
        aliases: A tensor's name in this checkpoint -> the stored name of another tensor that must
            be equal.
        other_heads: The names in this checkpoint of tensors of heads, and of a decoder, that the
            model does not have.
    """

    entries: dict[str, NameEntry]
    sources: dict[str, str]
    aliases: dict[str, str]
    other_heads: tuple[str, ...]


@dataclass(frozen=True)
class NameMap:
    """All entries of a family, for models with any head.

    Attributes:
        prefix: An optional prefix of the checkpoint's names (`transformer.`); entries include it.
        aliases: Pairs (name, kept name) of stored tensors with equal values (tied weights). The
            pair does not apply to a model that has a separate parameter for the name (an untied
            head).
        renamed: Pairs (regular expression for the full name in old files, current name); `\\1` is
            the first group.
        ignored: Regular expressions for the full names of stored tensors that are not parameters.
        zeros: Names among the ignored ones of tensors that must be zeros, because the model does
            not add them.
        spelled: Triples (regular expressions for an architecture and for a stored name, the name
            there) of what transformers' class of that architecture calls differently, and finds
            under no other name.
        own_embeddings: Entries of the stacks' word embeddings, for models in which these differ from
            the shared one. In other models their stored names are aliases of it.
        head_first: A regular expression for the architectures whose module creates the head before
            the body, so that its first name of a tied tensor is the alias.
    """

    entries: tuple[NameEntry, ...]
    prefix: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    spelled: tuple[tuple[str, str, str], ...] = ()
    head_first: str = ""
    own_embeddings: tuple[NameEntry, ...] = ()

    def with_experts(self, count: int) -> NameMap:
        """Returns the map of models that have so many experts in each mixture."""
        if not count:
            return self
        return replace(self, entries=tuple(entry.with_experts(count) for entry in self.entries))

    def ignoring_layers(self, layers: Iterable[int]) -> NameMap:
        """Returns the map of models that leave out some layers of their files, which are kept there
        unchanged.
        """
        numbers = "|".join(str(layer) for layer in layers)
        if not numbers:
            return self
        pattern = rf"{re.escape(self.prefix)}layers\.({numbers})\..*"
        return replace(self, ignored=(*self.ignored, pattern))

    def with_own_embeddings(self) -> NameMap:
        """Returns the map of models whose stacks have word embeddings of their own."""
        own = {name for entry in self.own_embeddings for name in entry.stored_names()}
        aliases = tuple((alias, kept) for alias, kept in self.aliases if alias not in own)
        return replace(self, entries=self.entries + self.own_embeddings, aliases=aliases)

    def resolve(self, native_names: Iterable[str]) -> Iterator[NameEntry]:
        """Yields the entry of each native parameter, with layer numbers filled in.

        Raises KeyError for a parameter without an entry.
        """
        patterns = [(re.compile(_layer_pattern(entry.native)), entry) for entry in self.entries]
        for name in native_names:
            for pattern, entry in patterns:
                found = pattern.fullmatch(name)
                if found:
                    numbers = found.groupdict()
                    filled = entry.at_layer(numbers.get("i", ""))
                    yield filled.of_expert(numbers["e"]) if "e" in numbers else filled
                    break
            else:
                raise KeyError(f"no entry of the name map covers the parameter {name!r}")

    def to_hf_name(self, stored_name: str, architecture: str) -> str:
        """Returns the name under which transformers' class of an architecture finds an entry's
        tensor.
        """
        for wanted, pattern, replacement in self.spelled:
            found = re.fullmatch(pattern, stored_name)
            if found and re.fullmatch(wanted, architecture):
                return found.expand(replacement)
        return stored_name

    def to_module_name(self, stored_name: str, architecture: str) -> str:
        """Returns the name of an entry's tensor in transformers' module of an architecture."""
        name = self.to_hf_name(stored_name, architecture)
        has_head = architecture.endswith(("HeadModel", "HeadsModel", "MTModel"))
        is_body = architecture.endswith("Model") and not has_head
        if is_body:
            return name.removeprefix(self.prefix)
        return name

    def to_current_name(self, stored_name: str, known: Container[str]) -> str:
        """Returns `stored_name` as entries have it.

        An old name is replaced, and a missing prefix is added if that makes it one of the `known`
        names.
        """
        for pattern, replacement in self.renamed:
            found = re.fullmatch(pattern, stored_name)
            if found:
                stored_name = found.expand(replacement)
        prefixed = self.prefix + stored_name
        if stored_name not in known and prefixed in known:
            return prefixed
        return stored_name

    def find_current_names(
        self, stored_names: Iterable[str], entries: Iterable[NameEntry]
    ) -> dict[str, str]:
        """Returns the name that entries have -> the name in a checkpoint, of each tensor there.

        A tied tensor that is stored under its alias alone has both names.

        Args:
            entries: Those of the model's parameters, with layer numbers filled in.
        """
        known = self.stored_names()
        for entry in entries:
            known.update(entry.stored_names())
        found: dict[str, str] = {}
        for stored in stored_names:
            found[self.to_current_name(stored, known)] = stored
        for alias, kept in self.aliases:
            if alias in found and alias not in self.untied_names():
                found.setdefault(kept, found[alias])
        return found

    def is_ignored(self, stored_name: str) -> bool:
        """Returns whether a stored tensor of this name is known to be no parameter."""
        return any(re.fullmatch(pattern, stored_name) for pattern in self.ignored)

    def stored_names(self) -> set[str]:
        """Returns the stored names of all entries."""
        return {name for entry in self.entries for name in entry.stored_names()}

    def untied_names(self) -> list[str]:
        """Returns the stored names that are aliases in a tied model and parameters in an untied
        model.
        """
        own = self.stored_names()
        return [alias for alias, _ in self.aliases if alias in own]

    def untied_entries(self) -> list[NameEntry]:
        """Returns the entries of the parameters that only an untied model has."""
        names = set(self.untied_names())
        return [entry for entry in self.entries if names & set(entry.stored_names())]

    def match(
        self, native_names: Iterable[str], stored_names: Iterable[str], *, untied: bool = False
    ) -> Match:
        """Matches a model's parameters with a checkpoint's tensors.

        Args:
            native_names: The model's parameters.
            stored_names: The checkpoint's tensors.
            untied: Whether the checkpoint's output head differs from its embedding; the model may
                have a head or not.

        Raises:
            ValueError: A parameter has no tensor, no model of this family has a tensor, or a tensor
                is stored under two names. The message lists the names.
        """
        entries = {entry.native: entry for entry in self.resolve(native_names)}
        wanted = {name for entry in entries.values() for name in entry.stored_names()}

        # Tensors of other heads, and of stacks that this model lacks, may be there and are not
        # read.
        heads: set[str] = set()
        for entry in self.entries:
            if "{i}" not in entry.native:
                heads.update(entry.stored_names())
        absent_blocks = self._compile_absent_blocks({name.partition(".")[0] for name in entries})

        untied_heads = self.untied_names() if untied else []
        kept_names: dict[str, str] = {}
        for alias, kept in self.aliases:
            if alias not in wanted and alias not in untied_heads:
                kept_names[alias] = kept

        known = wanted | heads | kept_names.keys()
        sources: dict[str, str] = {}
        aliases: dict[str, str] = {}
        other_heads: list[str] = []
        unexpected: list[str] = []
        for stored in stored_names:
            name = self.to_current_name(stored, known)
            if name in wanted:
                if name in sources:
                    raise ValueError(
                        f"the checkpoint has {name} twice, as {sources[name]} and as {stored}"
                    )
                sources[name] = stored
            elif name in kept_names:
                aliases[stored] = kept_names[name]
            elif name in heads or any(pattern.fullmatch(name) for pattern in absent_blocks):
                other_heads.append(stored)
            elif not (self.is_ignored(stored) or self.is_ignored(name)):
                unexpected.append(stored)

        # A file may store a tied tensor under its alias alone.
        for stored, kept in list(aliases.items()):
            if kept in wanted and kept not in sources:
                sources[kept] = stored
                del aliases[stored]
        refuse_names(sorted(wanted - sources.keys()), unexpected)
        return Match(entries, sources, aliases, tuple(other_heads))

    def _compile_absent_blocks(self, modules: Container[str]) -> list[re.Pattern[str]]:
        """Returns patterns for the stored names of blocks in stacks that a model lacks.

        Args:
            modules: The names of the model's own modules.
        """
        patterns: list[re.Pattern[str]] = []
        for entry in self.entries:
            if entry.native.partition(".")[0] in modules:
                continue
            for name in entry.stored_names():
                if "{i}" in name:
                    patterns.append(re.compile(_layer_pattern(name)))
        return patterns


def refuse_names(missing: list[str], unexpected: list[str]) -> None:
    """Raises ValueError if a checkpoint lacks tensors of the model, or has tensors that it does not
    have.
    """
    problems: list[str] = []
    if missing:
        problems.append(f"lacks {_join(missing)}")
    if unexpected:
        problems.append(f"has {_join(unexpected)}, which the model does not have")
    if problems:
        raise ValueError(f"the checkpoint {' and '.join(problems)}")


def _join(names: list[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    if len(names) <= MOST_NAMES:
        return shown
    return f"{shown} and {len(names) - MOST_NAMES} more"


def _layer_pattern(name: str) -> str:
    """Returns a regular expression for a name in which `{i}` stands for a layer number, and perhaps
    `{e}` for that of an expert.
    """
    pattern = re.escape(name).replace(r"\{i\}", r"(?P<i>\d+)")
    return pattern.replace(r"\{e\}", r"(?P<e>\d+)")
