"""No copy loses a byte: Hugging Face -> ranks -> other ranks -> Hugging Face, for every family and variant."""

from __future__ import annotations

import json
from itertools import count

import pytest
import torch
from every_case import EVERY_CASE, by_turns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardzoo.convert.operations import Options, merge, split
from shardzoo.models import from_pretrained

SIZES = (2, 3, 4, 8)

# A factor of both heads and feed-forward width lets every size of SIZES be legal.
VARIANTS = (
    "gpt2",
    "gpt2-untied",
    "bert",
    "bert-pretraining",
    "bert-classification",
    "roberta",
    "t5",
    "t5-v1.1",
    "mt5",
    "mt5-tied",
    "glm",
)


@pytest.mark.parametrize("variant", by_turns(VARIANTS, 6))
def test_every_size_to_every_other(variant, zoo, hashes, tmp_path):
    source = zoo.make(tmp_path / "hf", variant, heads=24, head_size=2, feed_forward=48, layers=1)
    wanted = hashes(source)
    for size in SIZES:
        split(source, tmp_path / str(size), size)
    for size in SIZES:
        for other in SIZES:
            resharded = tmp_path / f"{size}-{other}"
            split(tmp_path / str(size), resharded, other)
            assert hashes(resharded) == hashes(tmp_path / str(other))
            for rank in range(other):
                name = f"rank_{rank:02d}.safetensors"
                assert (resharded / name).read_bytes() == (
                    tmp_path / str(other) / name
                ).read_bytes()
        merge(tmp_path / str(size), tmp_path / f"merged-{size}")
        assert hashes(tmp_path / f"merged-{size}") == wanted
        assert (tmp_path / f"merged-{size}" / "config.json").read_bytes() == (
            source / "config.json"
        ).read_bytes()
        assert (tmp_path / f"merged-{size}" / "tokenizer.json").exists()


drawn = count()


@settings(
    max_examples=40 if EVERY_CASE else 20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_drawn_configurations(zoo, hashes, tmp_path, data):
    folder = tmp_path / str(next(drawn))
    variant = data.draw(st.sampled_from(VARIANTS), "variant")
    size, other = (
        data.draw(st.sampled_from((1, 2, 3, 4, 5, 6, 8)), name) for name in ("ranks", "other ranks")
    )
    common = size * other  # more than their least common multiple, but enough
    source = zoo.make(
        folder / "hf",
        variant,
        heads=common * data.draw(st.integers(1, 2), "heads per rank"),
        head_size=data.draw(st.integers(1, 5), "head size"),
        feed_forward=common * data.draw(st.integers(1, 3), "feed-forward rows per rank"),
        layers=data.draw(st.integers(1, 2), "layers"),
        vocabulary=data.draw(st.integers(2, 700), "vocabulary"),
        dtype=data.draw(st.sampled_from(("float32", "float16", "bfloat16")), "type"),
        sharded=variant not in ("glm", "t5-v1.1", "mt5")
        and data.draw(st.booleans(), "several files"),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    jobs = Options(
        jobs=data.draw(st.integers(1, 3), "jobs"),
        largest_file=data.draw(st.sampled_from((3000, 10**9))),
    )
    split(source, folder / "split", size, jobs)
    split(folder / "split", folder / "resharded", other, jobs)
    merge(folder / "resharded", folder / "merged", jobs)
    assert hashes(folder / "merged") == hashes(source)


@pytest.mark.parametrize("variant", by_turns(VARIANTS, 3))
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_what_the_layers_slice(variant, size, zoo, tmp_path):
    """Against the models' own loader and `Shard.slice`, which share nothing with the byte-range engine."""
    source = zoo.make(
        tmp_path / "hf", variant, heads=6, head_size=3, feed_forward=18, dtype="bfloat16"
    )
    split(source, tmp_path / "split", size)
    model = from_pretrained(source)
    parameters = dict(model.named_parameters())
    for rank in range(size):
        shards = load_file(tmp_path / "split" / f"rank_{rank:02d}.safetensors")
        assert shards.keys() == parameters.keys()
        for name, parameter in parameters.items():
            shard = getattr(parameter, "shard", None)
            if shard is None:
                expected = parameter.data
            else:
                full = parameter.data.narrow(shard.dim, 0, shard.shape[shard.dim])
                expected = shard.slice(full, rank, size)
            assert torch.equal(
                shards[name].view(torch.int16), expected.contiguous().view(torch.int16)
            ), name


def test_the_vocabulary_is_padded_and_the_padding_dropped(zoo, hashes, tmp_path):
    source = zoo.make(tmp_path / "hf", "gpt2", vocabulary=131)
    split(source, tmp_path / "three", 4)
    manifest = json.loads((tmp_path / "three" / "manifest.json").read_text())
    assert (manifest["vocab_size"], manifest["padded_vocab_size"]) == (131, 256)
    embeddings = [
        load_file(tmp_path / "three" / f"rank_{rank:02d}.safetensors")["word_embeddings.weight"]
        for rank in range(4)
    ]
    assert all(embedding.shape == (64, 16) for embedding in embeddings)
    assert not embeddings[2][3:].view(torch.int32).any()  # rows 131 … 191
    assert not embeddings[3].view(torch.int32).any()
    merge(tmp_path / "three", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(source)
