"""A small transformer of mpu's layers, whose weights do not depend on the layout."""

from __future__ import annotations

import torch
from torch import nn

from shardzoo import mpu


class Block(nn.Module):
    """A pre-norm GPT block: the smallest thing that uses every mode."""

    def __init__(self, hidden, heads, dropout, sequence_parallel, recompute, mesh):
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "mesh": mesh}
        split_dim = 1 if sequence_parallel else None
        self.head_size, self.recompute = hidden // heads, recompute
        self.norm_1 = mpu.LayerNorm(hidden, **options)
        self.qkv = mpu.ColumnParallelLinear(
            hidden, 3 * hidden, groups=(hidden,) * 3, unit=self.head_size, **options
        )
        self.attention_dropout = mpu.Dropout(dropout, mesh=mesh)
        self.out = mpu.RowParallelLinear(hidden, hidden, unit=self.head_size, **options)
        self.dropout_1 = mpu.Dropout(dropout, split_dim=split_dim, mesh=mesh)
        self.norm_2 = mpu.LayerNorm(hidden, **options)
        self.up = mpu.ColumnParallelLinear(hidden, 4 * hidden, **options)
        self.down = mpu.RowParallelLinear(4 * hidden, hidden, **options)
        self.dropout_2 = mpu.Dropout(dropout, split_dim=split_dim, mesh=mesh)

    def attend(self, q, k, v):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        weights = mpu.scaled_masked_softmax(
            q @ k.transpose(-1, -2),
            mask,
            scale=self.head_size**-0.5,
            dropout=self.attention_dropout,
        )
        return weights @ v

    def block(self, x):
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for t in (q, k, v))
        selective = self.recompute == "selective"
        attended = mpu.checkpoint(self.attend, q, k, v) if selective else self.attend(q, k, v)
        x = x + self.dropout_1(self.out(attended.transpose(1, 2).flatten(2)))
        hidden = nn.functional.gelu(self.up(self.norm_2(x)))
        return x + self.dropout_2(self.down(hidden))

    def forward(self, x):
        return mpu.checkpoint(self.block, x) if self.recompute == "full" else self.block(x)


class Transformer(nn.Module):
    """Embedding, blocks, tied head; returns the sum of the tokens' losses."""

    def __init__(
        self, *, vocabulary, hidden, heads, layers, dropout, sequence_parallel, recompute, mesh
    ):
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "mesh": mesh}
        self.vocabulary, self.mesh = vocabulary, mesh
        self.embedding = mpu.VocabParallelEmbedding(vocabulary, hidden, **options)
        self.dropout = mpu.Dropout(dropout, split_dim=1 if sequence_parallel else None, mesh=mesh)
        self.blocks = nn.ModuleList(
            Block(hidden, heads, dropout, sequence_parallel, recompute, mesh) for _ in range(layers)
        )
        self.norm = mpu.LayerNorm(hidden, **options)
        self.head = mpu.VocabParallelHead(
            hidden, vocabulary, tied=self.embedding, bias=True, **options
        )

    def forward(self, ids, labels):
        x = self.dropout(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return mpu.vocab_parallel_cross_entropy(
            self.head(self.norm(x)),
            labels,
            num_classes=self.vocabulary,
            reduction="sum",
            mesh=self.mesh,
        )


def fill(name, full, generator):
    """Weights N(0, 0.05²), norm weights 1, biases small but not zero, so that a lost one is seen."""
    if "norm" in name and name.endswith("weight"):
        full.fill_(1.0)
    else:
        full.normal_(0.0, 0.05, generator=generator)


def build_transformer(mesh, **options):
    """A small transformer with layout-free weights."""
    defaults = {"vocabulary": 1009, "hidden": 32, "heads": 4, "layers": 4, "dropout": 0.1}
    with torch.device("meta"):
        model = Transformer(
            **{**defaults, "sequence_parallel": False, "recompute": "none", **options}, mesh=mesh
        )
    mpu.materialize(model, "cpu")
    mpu.initialize(model, fill, seed=11, mesh=mesh)
    return model
