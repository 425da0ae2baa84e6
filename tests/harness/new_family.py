"""The checks of a family that is nothing but a folder: run as a script, in a copy of the package that has the folder.

    python new_family.py SCRATCH

Compares Llama with transformers: logits, loss and gradients at tensor-parallel size 1 and 2 in every mode, generated
tokens, converted files, and the bytes that a block keeps for its backward pass.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp
import transformers
from parity import MODES, assert_same, oracle, randomize, run_modes, whole
from safetensors.torch import load_file

CASES = {
    "grouped queries": {
        "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 35,
        "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21,
    },
    "head size of its own, tied": {
        "hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6, "intermediate_size": 28,
        "num_hidden_layers": 1, "vocab_size": 67, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0,
        },
    },
    "a file of transformers 4": {
        "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 40,
        "num_hidden_layers": 3, "vocab_size": 131, "rope_theta": 20000.0,
    },
}  # fmt: skip
BATCH, LENGTH = 3, 12


def build(sizes: dict) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config)
    randomize(model, seed=3)
    return model


def make_inputs(config) -> dict[str, torch.Tensor]:
    """A batch with padding on the right, on the left, and none; padding is no target."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, LENGTH - 3 :], mask[1, :4] = 0, 0
    ids = torch.randint(8, config.vocab_size, (BATCH, LENGTH), generator=generator)
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 4] = -100
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask, "labels": labels}


def run_rank(rank: int, size: int, scratch: Path, cases: list) -> None:
    """Every case in every mode on one rank; `whole` puts the saved results of all ranks together."""
    import torch.distributed as dist

    from shardzoo.mpu import ParallelMesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous{size}", rank=rank, world_size=size)
    mesh = ParallelMesh(size)
    torch.save([run_modes(mesh, *case) for case in cases], scratch / f"{size}-{rank}.pt")
    dist.destroy_process_group()


def check_parity(scratch: Path) -> None:
    cases, references = [], []
    for sizes in CASES.values():
        model = build(sizes)
        inputs = make_inputs(model.config)
        stored = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        values = {**sizes, "model_type": "llama"}
        cases.append((values, stored, inputs))
        references.append(oracle(model, inputs))
    for size in (1, 2):
        mp.spawn(run_rank, (size, scratch, cases), nprocs=size)
        ranks = [torch.load(scratch / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)]
        for number, ((values, _, inputs), reference) in enumerate(zip(cases, references, strict=True)):
            seen = inputs["attention_mask"][..., None]
            for mode in range(len(MODES)):
                found = whole(values, [rank[number] for rank in ranks], mode)
                found.logits, reference.logits = found.logits * seen, reference.logits * seen
                assert_same(found, reference)


def check_commands(scratch: Path) -> None:
    """`shardzoo models`, `estimate`, and a split and a merge that give the same file back."""
    from shardzoo.cli.main import main

    folder, shards, merged = scratch / "llama", scratch / "shards", scratch / "merged"
    build(CASES["grouped queries"]).save_pretrained(folder)
    assert main(["models", "llama"]) == 0
    assert main(["estimate", str(folder), "--length", "16", "--tp", "2", "--device-memory", "1"]) == 0
    assert main(["convert", "split", str(folder), str(shards), "--tp", "2"]) == 0
    assert main(["convert", "merge", str(shards), str(merged)]) == 0
    assert main(["convert", "verify", str(folder), str(merged)]) == 0
    before, after = (load_file(place / "model.safetensors") for place in (folder, merged))
    assert before.keys() == after.keys()
    assert all(
        tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]) for name, tensor in before.items()
    )
    transformers.LlamaForCausalLM.from_pretrained(merged)


def check_generation(scratch: Path) -> None:
    """The same tokens as transformers, of prompts that are padded on the left, greedily and by beam search."""
    import shardzoo

    folder = scratch / "llama"
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder)
    ours = shardzoo.from_pretrained(folder)
    prompts = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = (prompts != 0).long()
    for beams in (1, 3):
        settings = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
        expected = theirs.generate(prompts, attention_mask=mask, **settings)
        assert torch.equal(shardzoo.generate(ours, prompts, mask, **settings), expected)


def kept_bytes(layers: int, dtype: torch.dtype, padded: bool, recompute: str) -> int:
    """Bytes of all storages that one forward pass keeps for backward, parameters aside."""
    from shardzoo.models import ParallelConfig, from_config

    values = {**CASES["grouped queries"], "model_type": "llama", "num_hidden_layers": layers}
    model = from_config(values, dtype=dtype, parallel_config=ParallelConfig(recompute=recompute)).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    inputs = make_inputs(model.config)
    if not padded:
        del inputs["attention_mask"]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    del loss
    return sum(storage.nbytes() for storage in kept.values())


def check_memory() -> None:
    from shardzoo.models import ParallelConfig, config_from_dict, family
    from shardzoo.models.activations import Batch, Layout, block_bytes

    config = config_from_dict({**CASES["grouped queries"], "model_type": "llama"})
    (stack,) = family("llama").activations(config).stacks
    for dtype in (torch.float32, torch.bfloat16):
        for padded in (False, True):
            for recompute in ("none", "selective", "full"):
                one, two = (kept_bytes(layers, dtype, padded, recompute) for layers in (1, 2))
                layout = Layout(dtype.itemsize, 1, ParallelConfig(recompute=recompute))
                expected = block_bytes(stack, Batch(BATCH, LENGTH, 0, padded), layout).kept
                assert two - one == expected, (dtype, padded, recompute, two - one, expected)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    check_parity(place)
    check_commands(place)
    check_generation(place)
    check_memory()
