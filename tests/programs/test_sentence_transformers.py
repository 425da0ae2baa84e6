"""sentence-transformers embeds sentences with the zoo's BERT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import save_model

import shardzoo

sentence_transformers = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

SENTENCES = ["the old house by the sea", "a", "rain falls on the hills, and on the town"]


def test_the_embeddings_are_those_of_transformers_model(tmp_path, run_mesh):
    folder = save_model(tmp_path / "bert", "BertModel", "bert", seed=1)

    def embed(model: Any) -> torch.Tensor:
        module = modules.Transformer(str(folder), max_seq_length=32)
        if model is not None:
            module.model = model
        pooling = modules.Pooling(module.get_embedding_dimension())
        encoder = sentence_transformers.SentenceTransformer(modules=[module, pooling], device="cpu")
        return encoder.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False)

    oracle = embed(None)
    assert oracle.shape[0] == len(SENTENCES)
    torch.testing.assert_close(embed(shardzoo.from_pretrained(folder)), oracle)
    for found in run_mesh(2, lambda mesh: embed(shardzoo.from_pretrained(folder, mesh=mesh))):
        torch.testing.assert_close(found, oracle)
