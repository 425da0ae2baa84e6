"""The checks of a family that is nothing but a folder: run as a script, in a copy of the package that has the folder.

    python new_family.py SCRATCH

Compares StarCoder2 with transformers, as the parity matrix does: outputs, loss, gradients, generated tokens, converted
files; then the commands, and the bytes that a block keeps for its backward pass.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from every_case import EVERY_CASE
from matrix import Case, check_case
from memory import kept_bytes
from rank_pool import RankPools

FAMILY = "starcoder2"
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 35,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CASES = {
    "Starcoder2ForCausalLM": Case(SIZES),
    "Starcoder2ForCausalLM, a window, no biases, a file of transformers 4": Case(
        {
            **SIZES,
            "sliding_window": 5,
            "use_bias": False,
            "tie_word_embeddings": False,
            "rope_theta": 500.0,
        }
    ),
    "Starcoder2ForTokenClassification": Case({**SIZES, "num_labels": 5}),
}
LAYOUTS = [("sequence parallel and recompute", "fp32"), ("selective recompute", "fp32")]
if EVERY_CASE:
    CASES |= {
        "Starcoder2Model": Case(SIZES),
        "Starcoder2ForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    }
    LAYOUTS += [("plain", "fp32")]
BATCH, LENGTH = 3, 12


def check_parity(scratch: Path) -> None:
    pools = RankPools()
    for number, (name, case) in enumerate(CASES.items()):
        folder = scratch / str(number)
        figures = check_case(
            name, (FAMILY, case), folder, pools.run_mesh, [(1 + number % 3, 1)], LAYOUTS
        )
        assert not figures.problems, "\n".join([name, *figures.problems])
    pools.close()


def check_commands(folder: Path) -> None:
    """`shardzoo models` and `estimate`; the matrix has converted files."""
    from shardzoo.cli.main import main

    assert main(["models", FAMILY]) == 0
    assert (
        main(
            [
                "estimate",
                str(folder),
                "--sequence-length",
                "16",
                "--tp",
                "2",
                "--device-memory",
                "1",
            ]
        )
        == 0
    )


def kept_by_blocks(layers: int, dtype: torch.dtype, padded: bool, recompute: str) -> int:
    from shardzoo.models import ParallelConfig, from_config

    values = {**SIZES, "model_type": FAMILY, "num_hidden_layers": layers}
    model = from_config(
        values, dtype=dtype, parallel_config=ParallelConfig(recompute=recompute)
    ).train()
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 37 + 5
    mask = (
        (torch.arange(LENGTH) < LENGTH - 3 * torch.arange(BATCH)[:, None]).long()
        if padded
        else None
    )
    return kept_bytes(lambda: model(ids, mask, labels=ids).loss, model.parameters())


def check_memory() -> None:
    from shardzoo.models import ParallelConfig, config_from_dict, family
    from shardzoo.models.activations import Batch, Layout, block_bytes

    (stack,) = family(FAMILY).activations(config_from_dict({**SIZES, "model_type": FAMILY})).stacks
    for dtype in (torch.float32, torch.bfloat16):
        for padded in (False, True):
            for recompute in ("none", "selective", "full"):
                one, two = (kept_by_blocks(layers, dtype, padded, recompute) for layers in (1, 2))
                layout = Layout(dtype.itemsize, 1, ParallelConfig(recompute=recompute))
                expected = block_bytes(stack, Batch(BATCH, LENGTH, 0, padded), layout).kept
                assert two - one == expected, (dtype, padded, recompute, two - one, expected)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.set_num_threads(1)
    check_parity(place)
    check_commands(place / "0" / "hf")
    check_memory()
