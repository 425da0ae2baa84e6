"""The name map: what a checkpoint's names mean, and that every family's map covers its models both ways."""

from __future__ import annotations

import pytest
from every_case import by_turns

from shardzoo.models import FAMILIES, family, presets
from shardzoo.models.auto import build_on_meta, model_class
from shardzoo.models.name_map import NameEntry, NameMap

MAP = NameMap(
    prefix="body.",
    entries=(
        NameEntry("embedding", "body.emb"),
        NameEntry("layers.{i}.qkv", ("body.l.{i}.q", "body.l.{i}.k")),
        NameEntry("layers.{i}.out", "body.l.{i}.o", transpose=True),
        NameEntry("head", "out"),
        NameEntry("pooler", "pool"),
    ),
    aliases=(("out", "body.emb"), ("body.copy", "body.emb")),
    renamed=((r"(.*)\.query", r"\1.q"),),
    ignored=(r"(body\.)?l\.\d+\.mask",),
)
NATIVE = ["embedding", "layers.0.qkv", "layers.10.qkv", "layers.0.out", "layers.10.out"]
STORED = [
    "body.emb", "body.l.0.q", "body.l.0.k", "body.l.10.q", "body.l.10.k", "body.l.0.o", "body.l.10.o",
]  # fmt: skip


def test_layers_are_filled_in():
    match = MAP.match(NATIVE, STORED)
    assert match.entries["layers.10.qkv"].stored_names() == ("body.l.10.q", "body.l.10.k")
    assert match.entries["layers.10.out"].transpose
    assert match.sources == {name: name for name in STORED}
    assert (match.aliases, match.other_heads) == ({}, ())


def test_old_names_prefixes_copies_buffers_and_other_heads():
    renamed = {"body.l.0.q": "l.0.query"}
    stored = [renamed.get(name, name.removeprefix("body.")) for name in STORED]
    match = MAP.match(NATIVE, [*stored, "out", "copy", "l.0.mask", "body.l.10.mask", "pool"])
    assert match.sources["body.l.0.q"] == "l.0.query"
    assert match.sources["body.emb"] == "emb"
    assert match.aliases == {"out": "body.emb", "copy": "body.emb"}
    assert match.other_heads == ("pool",)


def test_a_copy_stands_in_for_the_tensor_it_repeats():
    match = MAP.match(NATIVE, [*STORED[1:], "body.copy"])
    assert match.sources["body.emb"] == "body.copy"
    assert match.aliases == {}


def test_an_untied_head_is_no_copy():
    assert MAP.untied_names() == ["out"]
    match = MAP.match([*NATIVE, "head"], [*STORED, "out"])
    assert match.sources["out"] == "out"
    assert match.aliases == {}


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (STORED[:-1], r"lacks body\.l\.10\.o$"),
        ([*STORED, "body.l.11.o"], r"has body\.l\.11\.o, which the model does not have"),
        ([*STORED, "body.l.0.masks"], r"has body\.l\.0\.masks"),
        ([*STORED, "l.0.o"], r"has body\.l\.0\.o twice, as body\.l\.0\.o and as l\.0\.o"),
        ([*STORED[1:], "x"], r"lacks body\.emb and has x"),
    ],
)
def test_what_does_not_match_is_named(stored, message):
    with pytest.raises(ValueError, match=message):
        MAP.match(NATIVE, stored)


def test_a_parameter_without_an_entry_is_a_mistake_of_the_family():
    with pytest.raises(
        KeyError, match=r"no entry of the name map covers the parameter 'layers\.0\.new'"
    ):
        list(MAP.resolve(["layers.0.new"]))


@pytest.mark.parametrize("name", by_turns(FAMILIES, 2))
def test_every_map_covers_its_models_and_nothing_twice(name):
    """Each parameter has stored names of its own, from which the map leads back to it."""
    small = next(config for _, config in presets() if config.model_type == name)
    heads, name_map = family(name).architectures, family(name).find_names(small)
    used = set()
    for architecture in heads:
        config = small.with_changes(architecture=architecture) if len(heads) > 1 else small
        assert model_class(config) is heads[architecture]
        parameters = dict(build_on_meta(config, None).named_parameters())
        entries = list(name_map.resolve(parameters))
        stored = [name for entry in entries for name in entry.stored_names()]
        assert len(set(stored)) == len(stored)
        assert list(name_map.match(parameters, stored).entries) == list(parameters)
        for entry in entries:
            shard = getattr(parameters[entry.native], "shard", None)
            if len(entry.stored_names()) > 1:
                assert len(shard.groups) == len(entry.stored_names())
        used |= {entry.native for entry in entries}
    assert used
