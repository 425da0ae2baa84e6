"""Writes GGUF files as llama.cpp's converter does, and tells what their numbers stand for.

After https://github.com/ggml-org/llama.cpp/tree/master/conversion. The names of the tensors are those
of the `gguf` package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

# Types of the matrices, in turn.
KINDS = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_0", "Q5_K", "Q2_K", "Q3_K", "MXFP4",
)  # fmt: skip
# Bytes of a block at which a half-precision scale begins, of types that the package does not encode.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}
_PERMUTED = ("llama", "granite", "smollm3")  # GGUF's names of models whose features are neighbors
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def random_blocks(rows: int, columns: int, kind: Any, seed: int) -> Any:
    """Rows of a type that the package does not encode: random bits, with scales that are finite."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = torch.Generator().manual_seed(seed)
    shape = rows, columns // block, size
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for at in _SCALES.get(kind.name, ()):
        scale = torch.rand(rows, columns // block, 1, generator=generator).half() * 5e-4
        bits[..., at : at + 2] = scale.view(torch.uint8)
    if kind.name == "MXFP4":
        bits[..., 0] = 120  # the exponent: 2^-8 for the smallest number
    return bits.reshape(rows, -1).numpy()


# Stored name, tensor as it is stored, and the function of its dequantized numbers that returns Hugging
# Face's tensors by name.
Stored = tuple[str, Tensor, Callable[[Tensor], dict[str, Tensor]]]


def store_tensors(arch: str, model: Any, state: dict[str, Tensor]) -> Iterator[Stored]:
    """Yields a model's tensors as llama.cpp stores them."""
    import gguf

    config = model.config
    layers = getattr(config, "num_hidden_layers", None) or config.num_layers
    layers = max(layers, getattr(config, "num_decoder_layers", None) or 0)
    number = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == arch)
    names = gguf.get_tensor_name_map(number, layers)

    experts: dict[str, dict[int, str]] = {}
    for name in state:
        found = _EXPERT.fullmatch(name)
        if found:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = name
    for whole, parts in experts.items():
        members = [parts[expert] for expert in range(len(parts))]
        # The package knows Mixtral's experts by the names of the original files.
        key = (
            whole.replace("block_sparse_moe", "feed_forward").removeprefix("model.")
            if arch == "llama"
            else whole
        )
        stacked = torch.stack([state[member] for member in members])
        yield (
            f"{names.get_name(key)}.weight",
            stacked,
            lambda read, members=members: dict(zip(members, read, strict=True)),
        )

    for name, tensor in state.items():
        if _EXPERT.fullmatch(name):
            continue
        if arch == "gpt-oss" and ".experts." in name:
            yield from _store_gpt_oss(names, name, tensor)
            continue
        if arch == "deepseek2" and name.endswith("kv_b_proj.weight"):
            yield from _store_latent(names, name, tensor, config)
            continue
        stem, _, kind = name.rpartition(".")
        if name.endswith(".sinks"):
            stem, kind = name, "weight"
        if name.endswith("e_score_correction_bias"):
            kind = "bias"
            stored = f"blk.{name.split('.')[2]}.exp_probs_b"
        else:
            stored = names.get_name(stem)
        assert stored, name
        forward, back = _find_changes(arch, config, name, tensor)
        yield (
            f"{stored}.{kind}",
            forward(tensor).contiguous(),
            lambda read, name=name, back=back: {name: back(read)},
        )


def _store_gpt_oss(names: Any, name: str, tensor: Tensor) -> Iterator[Stored]:
    """Yields the experts of gpt-oss: [experts, out, in], those of gate and up as two tensors."""
    stem = name.removesuffix("_bias")
    kind = "weight" if stem == name else "bias"

    def turn(given: Tensor) -> Tensor:
        return given.transpose(1, 2).contiguous() if kind == "weight" else given

    tensor = turn(tensor)
    if stem.endswith("down_proj"):
        yield f"{names.get_name(stem)}.{kind}", tensor, lambda read: {name: turn(read)}
        return
    halves: dict[int, Tensor] = {}

    def join(read: Tensor, half: int) -> dict[str, Tensor]:
        halves[half] = read
        if len(halves) < 2:
            return {}
        return {name: turn(torch.stack([halves[0], halves[1]], 2).flatten(1, 2))}

    for half, part in enumerate(("gate_proj", "up_proj")):
        stored = names.get_name(stem.replace("gate_up_proj", part))
        yield (
            f"{stored}.{kind}",
            tensor[:, half::2].contiguous(),
            lambda read, half=half: join(read, half),
        )


def _store_latent(names: Any, name: str, tensor: Tensor, config: Any) -> Iterator[Stored]:
    """Yields the two parts of the matrix that makes keys, which are transposed, and values."""
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = tensor.view(config.num_attention_heads, sum(sizes), -1).split(sizes, 1)
    found: list[Tensor] = []

    def join(read: Tensor) -> dict[str, Tensor]:
        found.append(read)
        if len(found) < 2:
            return {}
        return {name: torch.cat([found[0].transpose(1, 2), found[1]], 1).flatten(0, 1)}

    stem = name.removesuffix(".weight")
    for part, matrices in (("k_b_proj", keys.transpose(1, 2)), ("v_b_proj", values)):
        yield (
            f"{names.get_name(stem.replace('kv_b_proj', part))}.weight",
            matrices.contiguous(),
            join,
        )


def _find_changes(arch: str, config: Any, name: str, tensor: Tensor) -> tuple[Callable, Callable]:
    """How llama.cpp changes a tensor, and how that is undone."""
    if arch == "gpt2" and tensor.dim() == 2 and ".h." in name:
        return torch.t, lambda read: read.t().contiguous()
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return lambda given: given + 1, lambda read: read - 1
    if name.endswith("shared_expert_gate.weight"):
        return torch.flatten, lambda read: read[None]
    projection = re.search(r"\.([qk])_proj\.", name)
    if arch in _PERMUTED and projection:
        heads = config.num_attention_heads if projection[1] == "q" else config.num_key_value_heads
        rest = tensor.shape[1:]
        return (
            lambda given: given.view(heads, 2, -1, *rest).transpose(1, 2).reshape(tensor.shape),
            lambda read: read.view(heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape),
        )
    return torch.clone, torch.clone


def add_header(writer: Any, arch: str, config: Any) -> None:
    """Adds the keys that llama.cpp's converter writes for a model."""
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_array(f"{arch}.an_array_of_numbers", [0.5] * 2000)  # as the tokens' scores are
    if arch.startswith("t5"):
        _add_t5_header(writer, config)
        return
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    # Latent attention is that of one head of keys and values.
    writer.add_head_count_kv(1 if arch == "deepseek2" else config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if arch != "granite":
        writer.add_key_length(size)
        writer.add_value_length(size)
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    _add_further_keys(writer, arch, config)


def _add_further_keys(writer: Any, arch: str, config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    if arch in ("gemma2", "gemma3", "gpt-oss") or (arch == "olmo2" and window):
        writer.add_sliding_window(window)
    if arch == "olmo2" and window:
        writer.add_sliding_window_pattern(
            [kind == "sliding_attention" for kind in config.layer_types]
        )
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if arch in ("deepseek2", "glm4moe"):
        _add_corrected_keys(writer, arch, config)
    elif experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        inner = getattr(config, "moe_intermediate_size", None)
        if arch == "gpt-oss" or inner:
            writer.add_expert_feed_forward_length(inner or config.intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_corrected_keys(writer: Any, arch: str, config: Any) -> None:
    """Adds the keys of mixtures whose routers have corrections."""
    import gguf

    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if arch == "deepseek2":
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        rope = config.rope_parameters
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_t5_header(writer: Any, config: Any) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    if writer.arch == "t5":
        writer.add_decoder_block_count(config.num_decoder_layers)
        writer.add_decoder_start_token_id(config.decoder_start_token_id)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)


def write_gguf(
    folder: Path, arch: str, model: Any, edit: Callable[[Any], None] | None = None
) -> tuple[Path, dict[str, Tensor]]:
    """Writes `folder/model.gguf`, its matrices in the types of `KINDS` in turn.

    Args:
        folder: The folder, which is made.
        arch: GGUF's name of the architecture.
        model: transformers' model.
        edit: Called with the writer before the file is written.

    Returns:
        The file, and Hugging Face's tensors that its numbers stand for.
    """
    import gguf

    folder.mkdir(parents=True)
    model.save_pretrained(folder / "saved")
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    add_header(writer, arch, model.config)
    expected: dict[str, Tensor] = {}
    state = load_file(folder / "saved" / "model.safetensors")
    for number, (name, tensor, read_back) in enumerate(store_tensors(arch, model, state)):
        if tensor.dim() == 1 or "bias" in name or "ffn_gate_inp" in name or "rel_b" in name:
            writer.add_tensor(name, tensor.numpy())
            expected |= read_back(tensor)
            continue
        flat = tensor.flatten(0, -2)
        kinds = [gguf.GGMLQuantizationType[kind] for kind in KINDS]
        kinds = [kind for kind in kinds if flat.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0]
        kind = kinds[number % len(kinds)]
        if kind.name.endswith("_K") or kind.name == "MXFP4":
            blocks = random_blocks(*flat.shape, kind, number)
        else:
            blocks = gguf.quants.quantize(flat.numpy(), kind)
        numbers = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
        expected |= read_back(numbers.view(tensor.shape))
        writer.add_tensor(name, blocks.reshape(*tensor.shape[:-1], -1), raw_dtype=kind)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, expected
