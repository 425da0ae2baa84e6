"""Small checkpoints, and what is in them."""

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
