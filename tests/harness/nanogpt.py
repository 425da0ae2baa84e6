"""What nanoGPT's train.py saves, and the logits of that model by the operations of its model.py."""

from __future__ import annotations

import torch
from torch.nn import functional

SIZES = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 12,
    "block_size": 16,
    "vocab_size": 40,
    "bias": False,
    "dropout": 0.0,
}


def nanogpt_checkpoint() -> dict:
    """What nanoGPT saves: names behind torch.compile's prefix, linear weights [out, in], no biases, a copied head."""
    width, draw = SIZES["n_embd"], torch.Generator().manual_seed(0)
    shapes = {
        "wte.weight": (SIZES["vocab_size"], width),
        "wpe.weight": (SIZES["block_size"], width),
        "ln_f.weight": (width,),
    }
    for layer in range(SIZES["n_layer"]):
        sizes = {
            "ln_1": (width,),
            "ln_2": (width,),
            "attn.c_attn": (3 * width, width),
            "attn.c_proj": (width, width),
        }
        sizes |= {"mlp.c_fc": (4 * width, width), "mlp.c_proj": (width, 4 * width)}
        shapes |= {f"h.{layer}.{name}.weight": shape for name, shape in sizes.items()}
    model = {
        f"_orig_mod.transformer.{name}": torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
    }
    model["_orig_mod.lm_head.weight"] = model["_orig_mod.transformer.wte.weight"]
    return {"model": model, "model_args": SIZES, "iter_num": 1}


def nanogpt_logits(ids: torch.Tensor) -> torch.Tensor:
    """The forward pass of nanoGPT's model.py, written out for the weights above."""
    w = {
        name.removeprefix("_orig_mod.transformer."): x
        for name, x in nanogpt_checkpoint()["model"].items()
    }
    length, width = ids.shape[1], SIZES["n_embd"]
    x = w["wte.weight"][ids] + w["wpe.weight"][:length]
    for layer in range(SIZES["n_layer"]):
        part = {name.removeprefix(f"h.{layer}."): x for name, x in w.items()}
        q, k, v = (
            functional.layer_norm(x, (width,), part["ln_1.weight"]) @ part["attn.c_attn.weight"].T
        ).split(width, -1)
        heads = [y.view(*ids.shape, SIZES["n_head"], -1).transpose(1, 2) for y in (q, k, v)]
        y = (
            functional.scaled_dot_product_attention(*heads, is_causal=True)
            .transpose(1, 2)
            .reshape(*ids.shape, width)
        )
        x = x + y @ part["attn.c_proj.weight"].T
        inner = functional.gelu(
            functional.layer_norm(x, (width,), part["ln_2.weight"]) @ part["mlp.c_fc.weight"].T
        )
        x = x + inner @ part["mlp.c_proj.weight"].T
    return functional.layer_norm(x, (width,), w["ln_f.weight"]) @ w["wte.weight"].T
