"""Small checkpoints, and what is in them."""

import pytest
from checkpoint_fixtures import (
    arena,
    file_tree,
    gpt2_folder,
    gpt2_shards,
    hashes,
    rewrite_header,
    zoo,
)

__all__ = ["arena", "file_tree", "gpt2_folder", "gpt2_shards", "hashes", "rewrite_header", "zoo"]


@pytest.fixture
def quick_processes(fork_server, monkeypatch):
    """Conversions fork their processes from the server of the ranks, which has loaded torch, and spawn none."""
    monkeypatch.setattr("shardzoo.convert.workers.get_context", lambda kind: fork_server)
