"""Makes the files that Megatron-LM writes, from transformers' weights and by the rules of its source.

Names are those of tools/checkpoint/schema_core.py and of megatron/legacy/model; the orders of fused QKV are those of
`fix_query_key_value_ordering` and of transformers' conversion script for Megatron-GPT2.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import queue
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

PADDING = 16  # --make-vocab-size-divisible-by
LAYER = {
    "norm_1": {
        "local": "input_layernorm",
        "te": "self_attention.linear_qkv.layer_norm",
        "legacy": "input_layernorm",
    },
    "qkv": {"local": "self_attention.linear_qkv", "legacy": "self_attention.query_key_value"},
    "output": {"local": "self_attention.linear_proj", "legacy": "self_attention.dense"},
    "norm_2": {
        "local": "pre_mlp_layernorm",
        "te": "mlp.linear_fc1.layer_norm",
        "legacy": "post_attention_layernorm",
    },
    "up": {"local": "mlp.linear_fc1", "legacy": "mlp.dense_h_to_4h"},
    "down": {"local": "mlp.linear_fc2", "legacy": "mlp.dense_4h_to_h"},
}


@dataclass
class Layout:
    """How the files are laid out. style: local, te, legacy, or oldest: names before 2021."""

    tp: int = 1
    pp: int = 1
    version: float | None = 3.0
    style: str = "local"
    chunks: int = 1  # interleaved pipeline stages: parts of the model on each stage
    arguments: dict[str, Any] = field(default_factory=dict)


def layer_name(part: str, kind: str, style: str) -> str:
    names = LAYER[part]
    if style == "oldest":
        return f"{names['legacy'].replace('self_attention', 'attention')}.{kind}"
    if style == "te" and "te" in names:
        return f"{names['te']}_{kind}"
    return f"{names['local' if style == 'te' else style]}.{kind}"


def fuse(q: Tensor, k: Tensor, v: Tensor, heads: int, rank: int, layout: Layout) -> Tensor:
    """One rank's rows of the fused tensor, from three of shape [H, ...]."""
    mine = [
        t.view(heads, -1, *t.shape[1:]).chunk(layout.tp)[rank] for t in (q, k, v)
    ]  # [np, hn, ...]
    version = layout.version or 0
    if version == 0:
        return torch.stack(mine).reshape(-1, *q.shape[1:])  # [3, np, hn, ...]
    return torch.stack(mine, dim=2 if version == 1 else 1).reshape(
        -1, *q.shape[1:]
    )  # [np, hn, 3] or [np, 3, hn]


def pad(table: Tensor, tp: int) -> Tensor:
    """With padding rows of garbage, as Megatron-LM initializes and trains them."""
    multiple = PADDING * tp
    rows = -len(table) % multiple
    return torch.cat([table, torch.full((rows, *table.shape[1:]), 7.5, dtype=table.dtype)])


def gpt_modules(weights: Mapping[str, Tensor], heads: int, layers: int) -> dict[str, Any]:
    """{"layers": [{part: (weight, bias)}], other module: tensors} of transformers' GPT-2."""

    def both(name: str, transpose: bool = False) -> tuple[Tensor, Tensor]:
        weight = weights[f"transformer.{name}.weight"]
        return weight.T.contiguous() if transpose else weight, weights[f"transformer.{name}.bias"]

    blocks = []
    for i in range(layers):
        weight, bias = both(f"h.{i}.attn.c_attn", True)
        blocks.append({
            "norm_1": both(f"h.{i}.ln_1"),
            "qkv": list(zip(weight.chunk(3), bias.chunk(3), strict=True)),
            "output": both(f"h.{i}.attn.c_proj", True),
            "norm_2": both(f"h.{i}.ln_2"),
            "up": both(f"h.{i}.mlp.c_fc", True),
            "down": both(f"h.{i}.mlp.c_proj", True),
        })  # fmt: skip
    found = {"layers": blocks, "final": both("ln_f"), "words": weights["transformer.wte.weight"]}
    found |= {"positions": weights["transformer.wpe.weight"], "heads": heads, "stack": "decoder"}
    return found | ({"untied": weights["lm_head.weight"]} if "lm_head.weight" in weights else {})


def bert_modules(weights: Mapping[str, Tensor], heads: int, layers: int) -> dict[str, Any]:
    """The same for transformers' BERT: a layer's first norm is the norm before it, and the last norm the final one."""

    def both(name: str) -> tuple[Tensor, Tensor]:
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    blocks, before = [], both("bert.embeddings.LayerNorm")
    for i in range(layers):
        at = f"bert.encoder.layer.{i}"
        blocks.append({
            "norm_1": before,
            "qkv": [both(f"{at}.attention.self.{name}") for name in ("query", "key", "value")],
            "output": both(f"{at}.attention.output.dense"),
            "norm_2": both(f"{at}.attention.output.LayerNorm"),
            "up": both(f"{at}.intermediate.dense"),
            "down": both(f"{at}.output.dense"),
        })  # fmt: skip
        before = both(f"{at}.output.LayerNorm")
    found = {"layers": blocks, "final": before, "heads": heads, "stack": "encoder"}
    for key, name in (("words", "word"), ("positions", "position"), ("types", "token_type")):
        found[key] = weights[f"bert.embeddings.{name}_embeddings.weight"]
    found["dense"], found["norm"] = (
        both(f"cls.predictions.transform.{name}") for name in ("dense", "LayerNorm")
    )
    found["bias"] = weights["cls.predictions.bias"]
    if "cls.seq_relationship.weight" in weights:
        found["pooler"], found["binary"] = both("bert.pooler.dense"), both("cls.seq_relationship")
    return found


def megatron_bert_modules(weights: Mapping[str, Tensor], heads: int, layers: int) -> dict[str, Any]:
    """The same for transformers' Megatron-BERT, whose norms have Megatron-LM's places."""

    def both(name: str) -> tuple[Tensor, Tensor]:
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    at = "bert.encoder.layer.{}"
    # BERT's names of the norms, so that the rest is read as a BERT's.
    first, last = both("bert.encoder.layer.0.attention.ln"), both("bert.encoder.ln")
    named = {
        **weights,
        "bert.embeddings.LayerNorm.weight": first[0],
        "bert.embeddings.LayerNorm.bias": first[1],
    }
    for i in range(layers):
        before_mlp = both(f"{at.format(i)}.ln")
        following = last if i == layers - 1 else both(f"{at.format(i + 1)}.attention.ln")
        for name, pair in (("attention.output", before_mlp), ("output", following)):
            for kind, tensor in zip(("weight", "bias"), pair, strict=True):
                named[f"{at.format(i)}.{name}.LayerNorm.{kind}"] = tensor
    found = {**bert_modules(named, heads, layers), "post_norm": False}
    untied = "cls.predictions.decoder.weight"
    return found | ({"untied": weights[untied]} if untied in weights else {})


def stage_tensors(
    modules: Mapping[str, Any], layout: Layout, rank: int, layers: range, first: bool, last: bool
) -> dict[str, Tensor]:
    """The flat state of one chunk of the model on one rank, with its layers numbered from 0."""
    legacy = layout.style in ("legacy", "oldest")
    root = "language_model." if legacy else ""
    stack = {"legacy": "language_model.encoder", "oldest": "language_model.transformer"}.get(
        layout.style, modules["stack"]
    )
    state: dict[str, Tensor] = {}

    def add(name: str, value: tuple[Tensor, Tensor]) -> None:
        state[f"{name}.weight"], state[f"{name}.bias"] = value

    def mine(table: Tensor) -> Tensor:
        return pad(table, layout.tp).chunk(layout.tp)[rank]

    if first:
        state[f"{root}embedding.word_embeddings.weight"] = mine(modules["words"])
        state[f"{root}embedding.position_embeddings.weight"] = modules["positions"]
        if "types" in modules:
            state[f"{root}embedding.tokentype_embeddings.weight"] = modules["types"]
    for local, number in enumerate(layers):
        for part, value in modules["layers"][number].items():
            for at, kind in enumerate(("weight", "bias")):
                if part == "qkv":
                    tensor = fuse(*(group[at] for group in value), modules["heads"], rank, layout)
                elif part == "up":
                    tensor = value[at].chunk(layout.tp)[rank]
                else:
                    split = part in ("output", "down") and kind == "weight"
                    tensor = value[at].chunk(layout.tp, dim=1)[rank] if split else value[at]
                state[f"{stack}.layers.{local}.{layer_name(part, kind, layout.style)}"] = (
                    tensor.contiguous()
                )
    if last:
        add(f"{stack}.final_layernorm", modules["final"])
        if "untied" in modules:
            state[f"{root}output_layer.weight"] = mine(modules["untied"])
        elif not first:
            state["word_embeddings_for_head.weight" if legacy else "output_layer.weight"] = mine(
                modules["words"]
            )
        if "dense" in modules:
            add("lm_head.dense", modules["dense"])
            add("lm_head.layernorm" if legacy else "lm_head.layer_norm", modules["norm"])
            state["lm_head.bias" if legacy else "output_layer.bias"] = mine(modules["bias"])
        if "pooler" in modules:
            add(f"{root}pooler.dense", modules["pooler"])
            add("binary_head", modules["binary"])
    return state


def nest(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """In dictionaries as `state_dict_for_save_checkpoint` nests them before megatron-core."""
    tree: dict[str, Any] = {}
    for name, tensor in state.items():
        keys = name.split(".")
        depth = 3 if ".embedding." in name else 2 if name.startswith("language_model.") else 1
        place = tree
        for key in keys[:depth]:
            place = place.setdefault(key, {})
        place[".".join(keys[depth:])] = tensor
    return tree


def states(modules: Mapping[str, Any], layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each rank's folder and the contents of its file."""
    arguments = {
        "num_layers": len(modules["layers"]),
        "hidden_size": modules["words"].shape[1],
        "num_attention_heads": modules["heads"],
        "padded_vocab_size": len(pad(modules["words"], layout.tp)),
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "params_dtype": torch.float32,
        "openai_gelu": modules["stack"] == "decoder",
        "bias_gelu_fusion": False,
        "layernorm_epsilon": 1e-5 if modules["stack"] == "decoder" else 1e-12,
        "apply_residual_connection_post_layernorm": modules.get(
            "post_norm", modules["stack"] == "encoder"
        ),
        **layout.arguments,
    }
    whole, parts = len(modules["layers"]), layout.pp * layout.chunks
    size = whole // parts
    for rank in range(layout.tp):
        for stage in range(layout.pp):
            state: dict[str, Any] = {"iteration": 500, "args": Namespace(**arguments)}
            if layout.version is not None:
                state["checkpoint_version"] = layout.version
            for chunk in range(layout.chunks):
                part = chunk * layout.pp + stage
                layers = range(part * size, (part + 1) * size)
                flat = stage_tensors(modules, layout, rank, layers, part == 0, part == parts - 1)
                flat |= {"rest._extra_state": None} if layout.style == "te" else {}
                model = nest(flat) if layout.style in ("legacy", "oldest") else flat
                state["model" if layout.chunks == 1 else f"model{chunk}"] = model
            state["optimizer"] = {
                "state": {0: {"exp_avg": torch.zeros(3)}},
                "param_groups": [{"lr": 0.1}],
            }
            state["rng_state"] = [
                {"np_rng_state": np.random.RandomState(0).get_state(), "n": torch.get_rng_state()}
            ]
            yield f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if layout.pp > 1 else ""), state


def write(
    folder: Path,
    modules: Mapping[str, Any],
    layout: Layout,
    edit: Callable[[str, dict[str, Any]], None] = lambda name, state: None,
) -> Path:
    """Writes the folder of a run at iteration 500. `edit` changes the state of a rank's folder before it is saved."""
    for name, state in states(modules, layout):
        edit(name, state)
        place = folder / "iter_0000500" / name
        place.mkdir(parents=True)
        torch.save(state, place / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("500")
    return folder


def layer_files(
    modules: Mapping[str, Any], layout: Layout, program: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the names and contents of the files that Megatron-DeepSpeed ("deepspeed") or GPT-NeoX ("neox") writes."""
    count = len(modules["layers"])
    first_block = {"deepspeed": 3, "neox": 2}[program]
    last = count + {"deepspeed": 4, "neox": 3}[program]
    for rank in range(layout.tp):
        flat = stage_tensors(
            modules, Layout(layout.tp, 1, style="oldest"), rank, range(count), True, True
        )
        files: dict[int, dict[str, Tensor]] = {}
        for name, tensor in flat.items():
            parts = name.removeprefix("language_model.").split(".")
            if parts[0] == "embedding":
                files.setdefault(first_block - 2, {})[".".join(parts[1:])] = tensor
            elif parts[1] == "layers":
                own = ".".join(parts[3:])
                own = (
                    own
                    if program == "neox"
                    else own.replace("attention.", "self_attention.", own.startswith("att"))
                )
                files.setdefault(first_block + int(parts[2]), {})[own] = tensor
            elif parts[1] == "final_layernorm":
                files.setdefault(last, {})[("norm." if program == "neox" else "") + parts[2]] = (
                    tensor
                )
            else:
                files[last + 1] = {
                    "final_linear.weight" if program == "neox" else "lm_head.weight": tensor
                }
        for number, tensors in files.items():
            yield f"layer_{number:02d}-model_{rank:02d}-model_states.pt", tensors
        arguments: dict[str, Any] = {
            "num_attention_heads": modules["heads"],
            "layernorm_epsilon": 1e-5,
        }
        if program == "neox":
            arguments |= {
                "pos_emb": "learned",
                "norm": "layernorm",
                "no_weight_tying": "untied" in modules,
            }
            arguments |= {
                "model_parallel_size": layout.tp,
                "pipe_parallel_size": 0,
                "bias_gelu_fusion": True,
            }
        else:
            arguments |= {
                "tensor_model_parallel_size": layout.tp,
                "pipeline_model_parallel_size": layout.pp,
            }
        arguments |= layout.arguments
        state = {
            "module": None,
            "args": arguments if program == "neox" else Namespace(**arguments),
            "iteration": 90,
        }
        yield f"mp_rank_{rank:02d}_model_states.pt", state


def write_layers(
    folder: Path,
    modules: Mapping[str, Any],
    layout: Layout,
    program: str,
    edit: Callable[[str, dict[str, Any]], None] = lambda name, state: None,
) -> Path:
    """Writes the folder of a run of one of these programs. `edit` changes a file's contents before they are saved."""
    place = folder / "global_step90"
    place.mkdir(parents=True)
    for name, content in layer_files(modules, layout, program):
        edit(name, content)
        torch.save(content, place / name)
    (folder / "latest").write_text("global_step90")
    return folder


def write_decoder_layers(
    source: Path, folder: Path, size: int, program: str, **changes: Any
) -> Path:
    """Writes a Llama's or Mistral's files of layers at step 9, with a program's names, orders of rows and arguments.

    They are those of GPT-NeoX's `tools/ckpts/convert_hf_llama_to_neox.py` ("neox"), of its
    `convert_raw_llama_weights_to_neox.py` before `linear1` ("old neox"), and of Megatron-DeepSpeed's
    `tools/hf2megads_weight_converter.py` ("deepspeed").
    """
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    count, heads, groups = (
        config[f"num_{what}"] for what in ("hidden_layers", "attention_heads", "key_value_heads")
    )
    is_neox = program != "deepspeed"
    place = folder / "global_step9"
    place.mkdir(parents=True)
    for rank in range(size):

        def vocabulary(tensor: torch.Tensor, rank: int = rank) -> torch.Tensor:
            rows = -len(tensor) % (16 * size)
            return _part(torch.cat([tensor, torch.zeros(rows, tensor.shape[1])]), rank, size)

        files = {
            0 if is_neox else 1: {"word_embeddings.weight": weights["model.embed_tokens.weight"]}
        }
        files = {n: {k: vocabulary(v) for k, v in own.items()} for n, own in files.items()}
        for i in range(count):
            own = {
                name.removeprefix(f"model.layers.{i}."): tensor
                for name, tensor in weights.items()
                if name.startswith(f"model.layers.{i}.")
            }
            q, k, v = (_part(own[f"self_attn.{x}_proj.weight"], rank, size) for x in "qkv")
            if is_neox and heads != groups:
                qkv = torch.cat([q, k, v])
            else:
                by_group = [x.reshape(groups // size, -1, x.shape[1]) for x in (q, k, v)]
                qkv = torch.cat(by_group, 1).flatten(0, 1)
            gate, up = (_part(own[f"mlp.{x}_proj.weight"], rank, size) for x in ("gate", "up"))
            down = _part(own["mlp.down_proj.weight"], rank, size, 1)
            attention, norm = ("attention", "scale") if is_neox else ("self_attention", "weight")
            files[i + 2] = {
                f"input_layernorm.{norm}": own["input_layernorm.weight"],
                f"post_attention_layernorm.{norm}": own["post_attention_layernorm.weight"],
                f"{attention}.query_key_value.weight": qkv,
                f"{attention}.dense.weight": _part(own["self_attn.o_proj.weight"], rank, size, 1),
                **{
                    "neox": {"mlp.linear1.weight": torch.cat([up, gate]), "mlp.linear2.weight": down},
                    "old neox": {
                        "mlp.w1.weight": gate, "mlp.w3.weight": up, "mlp.w2.weight": down,
                        "attention.rotary_emb.inv_freq": torch.ones(4),
                    },
                    "deepspeed": {
                        "mlp.dense_h_to_4h.weight": torch.cat([gate, up]), "mlp.dense_4h_to_h.weight": down
                    },
                }[program],
            }  # fmt: skip
        last = count + (3 if is_neox else 2)
        files[last] = {"norm.scale" if is_neox else "weight": weights["model.norm.weight"]}
        if "lm_head.weight" in weights:
            name = "final_linear.weight" if is_neox else "lm_head.weight"
            files[last + 1] = {name: vocabulary(weights["lm_head.weight"])}
        for number, tensors in files.items():
            torch.save(
                {name: tensor.clone() for name, tensor in tensors.items()},
                place / f"layer_{number:02d}-model_{rank:02d}-model_states.pt",
            )
        arguments: dict[str, Any] = {"num_attention_heads": heads, "max_position_embeddings": 64}
        if is_neox:
            arguments |= {
                "pos_emb": "rotary", "norm": "rmsnorm", "rms_norm_epsilon": config["rms_norm_eps"], "rotary_pct": 1,
                "no_weight_tying": "lm_head.weight" in weights, "num_kv_heads": groups if groups != heads else None,
                "gpt_j_residual": False, "rotary_emb_base": 10000, "layernorm_epsilon": 0.5, "pipe_parallel_size": 1,
                "attention_config": ["flash"] * count, "sliding_window_width": None, "model_parallel_size": size,
                **({"mlp_type": "llama", "activation": "silu"} if program == "old neox" else {"activation": "swiglu"}),
            }  # fmt: skip
            if config["model_type"] == "mistral":
                arguments["sliding_window_width"] = 6
        else:
            arguments |= {
                "use_rotary_position_embeddings": True, "add_position_embedding": False, "normalization": "rmsnorm",
                "layernorm_epsilon": config["rms_norm_eps"], "swiglu": True, "num_key_value_heads": groups,
                "rope_theta": 10000, "add_bias_linear": False, "tensor_model_parallel_size": size,
                "untie_embeddings_and_output_weights": "lm_head.weight" in weights,
            }  # fmt: skip
        arguments |= changes
        torch.save(
            {"args": arguments if is_neox else Namespace(**arguments), "iteration": 9},
            place / f"mp_rank_{rank:02d}_model_states.pt",
        )
    (folder / "latest").write_text("global_step9")
    return folder


def _part(tensor: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    return tensor.chunk(size, dim)[rank].clone()


def in_megatron_core(
    build: Callable[[Namespace], Any], folders: Sequence[tuple[Path, Path]], ids: Tensor
) -> list[Tensor]:
    """Called on two ranks, once in a process: loads our files into megatron-core's models, saves those by its own code.

    folders: Pairs of our folder and of the one to save to. A torch_dist folder of ours beside the first, `NAME.dist`,
    is loaded by megatron-core's own code, too. Returns each model's logits.
    """
    warnings.simplefilter("ignore")
    multiprocessing.current_process()._config["daemon"] = (
        False  # megatron-core writes in a process of its own
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2, 1)
    logits = [_load_save_and_run(build, written, place, ids) for written, place in folders]
    for child in multiprocessing.active_children():  # the writer would outlive this process
        child.terminate()
        child.join()
    return logits


def _load_save_and_run(
    build: Callable[[Namespace], Any], written: Path, place: Path, ids: Tensor
) -> Tensor:
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    state = torch.load(
        written / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False
    )
    model = build(state["args"]).eval()
    missing, unexpected = model.load_state_dict(state["model"], strict=False)
    assert not unexpected, unexpected
    assert all("_extra_state" in name for name in missing), missing
    place.mkdir(exist_ok=True)
    torch.distributed.barrier()
    common = {"args": state["args"], "checkpoint_version": 3.0, "iteration": 50}
    save_in_this_process({**model.sharded_state_dict(prefix=""), **common}, place)
    ours = written.with_name(f"{written.name}.dist") / "release"
    if ours.exists():
        check_torch_dist(model, ours, rank)
    length = ids.shape[1]
    positions = torch.arange(length)[None].expand_as(ids)
    with torch.no_grad():
        return model(ids, positions, torch.ones(1, 1, length, length).tril() < 0.5)


def save_in_this_process(state: dict[str, Any], place: Path) -> None:
    """Saves by megatron-core's own code, but for its writing processes.

    They are forked from this one, which has threads: on a busy machine a thread often holds a lock at that moment, and
    the new process waits for it without end.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    options: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"  # its own; another package's is the default since 0.19
    request = dist_checkpointing.save(state, str(place), **options)
    transforms = request.async_fn.args[0]
    results = request.async_fn_args[2]
    written, unfinished = queue.SimpleQueue(), queue.Queue()
    for number, bucket in enumerate(request.preload_fn()):
        unfinished.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, written, unfinished, use_fsync=False
        )
    by_number = dict(written.get() for _ in range(written.qsize()))
    for found in by_number.values():
        if isinstance(found, Exception):
            raise found
    results.put(by_number)
    torch.distributed.barrier()
    for finalize in request.finalize_fns:
        finalize()


def without_extra_states(wanted: dict[str, Any]) -> dict[str, Any]:
    """What megatron-core asks of a torch_dist folder, but for Transformer Engine's extra states, which ours have not.

    Asked to be lenient with them instead, it reads all the folder's properties of tensors, one of which it does not
    know since torch 2.15.
    """
    return {name: value for name, value in wanted.items() if "_extra_state" not in name}


def check_torch_dist(model: Any, folder: Path, rank: int) -> None:
    """Loads a torch_dist folder over a model, which must have the same weights afterwards.

    Of the vocabulary, whose padding is another one, the first rank has all that is no padding.
    """
    from megatron.core import dist_checkpointing

    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data.fill_(7.5)
    wanted = without_extra_states(model.sharded_state_dict(prefix=""))
    if any(".experts." in name for name in before):
        # Layers of Transformer Engine with experts, unlike local ones, keep the name of this norm.
        for tensor in wanted.values():
            tensor.key = tensor.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    model.load_state_dict(dist_checkpointing.load(wanted, str(folder)), strict=False)
    for name, parameter in model.named_parameters():
        rows = slice(None)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"):
            rows = slice(0, 97 if rank == 0 else 0)
        assert torch.equal(parameter[rows], before[name][rows]), name
