"""Tiny models of every family: their configurations, transformers' models of them, tokenizers, and folders of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from parity import randomize

WORDS = "one two three four five six seven eight nine ten red green blue black white big small old new good".split()  # noqa: SIM905
_ENCODER = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "max_position_embeddings": 64}
_GEMMA_STACK = {
    **_DECODER, "head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 2.0, "vocab_size": 97,
}  # fmt: skip
_GEMMA3_STACK = {
    **_DECODER, "head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 6, "sliding_window_pattern": 2,
    "vocab_size": 97,
}  # fmt: skip
_MODERN_DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "glm4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "olmo3",
    "phi3",
    "smollm3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)
_SEQ2SEQ = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 1, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0},
    "bert": {**_ENCODER, "max_position_embeddings": 64},
    "roberta": {**_ENCODER, "max_position_embeddings": 66},
    "megatron-bert": {**_ENCODER, "max_position_embeddings": 64},
    "distilbert": {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "max_position_embeddings": 64},
    "electra": {**_ENCODER, "max_position_embeddings": 64, "embedding_size": 24},
    "xlm-roberta-xl": {**_ENCODER, "max_position_embeddings": 66, "pad_token_id": 1},
    "esm": {
        **_ENCODER, "max_position_embeddings": 66, "pad_token_id": 1, "mask_token_id": 3, "token_dropout": True,
        "position_embedding_type": "rotary",
    },
    "eurobert": {**_DECODER, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "mask_token_id": 3},
    "modernbert": {**_ENCODER, "max_position_embeddings": 64, "local_attention": 8, "pad_token_id": 1},
    "modernbert-decoder": {**_ENCODER, "max_position_embeddings": 64, "local_attention": 14, "pad_token_id": 1},
    "glm": {
        "hidden_size": 32, "num_attention_heads": 4, "num_layers": 2, "max_sequence_length": 64,
        "block_position_encoding": True,
    },
    "llama": _DECODER,
    "mistral": {**_DECODER, "sliding_window": 7},
    "qwen2": _DECODER,
    "qwen3": {**_DECODER, "head_dim": 16},
    "glm4": {**_DECODER, "head_dim": 8, "pad_token_id": 0},
    "gemma": {**_DECODER, "head_dim": 16},
    "gemma2": {**_DECODER, "head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 2.0},
    "gemma3_text": {
        **_DECODER, "head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 7, "sliding_window_pattern": 2,
    },
    "granite": {**_DECODER, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.3},
    "olmo2": {**_DECODER, "num_key_value_heads": 4, "pad_token_id": 0},
    "olmo3": {**_DECODER, "num_key_value_heads": 4, "pad_token_id": 0, "sliding_window": 7},
    "phi3": {**_DECODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "smollm3": {**_DECODER, "no_rope_layer_interval": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "mixtral": {**_DECODER, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_DECODER, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {
        **_DECODER, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    },
    "t5": _SEQ2SEQ,
    "mt5": _SEQ2SEQ,
    "umt5": _SEQ2SEQ,
    "bart": _BART,
    "mbart": {**_BART, "scale_embedding": True},
    "m2m_100": _BART,
    "pegasus": _BART,
    "marian": {**_BART, "pad_token_id": 1, "decoder_start_token_id": 1},
}  # fmt: skip
# More families, of which not every table has a row. The encoder-decoders leave no padding out.
SPARSE: dict[str, dict[str, Any]] = {
    "longt5": {**_SEQ2SEQ, "local_radius": 3, "encoder_attention_type": "transient-global", "global_block_size": 4},
    "t5gemma": {"encoder": _GEMMA_STACK, "decoder": _GEMMA_STACK},
    "t5gemma2": {"encoder": {"text_config": _GEMMA3_STACK, "eoi_token_index": 96}, "decoder": _GEMMA3_STACK},
    "deberta-v2": {
        **_ENCODER, "max_position_embeddings": 64, "relative_attention": True, "position_buckets": 8,
        "pos_att_type": "c2p|p2c", "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
        "pad_token_id": 0, "type_vocab_size": 0,
    },
    "olmoe": {**_DECODER, "num_key_value_heads": 4, "num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": 0},
    "gpt_oss": {
        **_DECODER, "head_dim": 16, "intermediate_size": 20, "num_local_experts": 7, "num_experts_per_tok": 3,
        "sliding_window": 7, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "glm4_moe": {
        **_DECODER, "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "n_group": 3, "topk_group": 2, "use_qk_norm": True, "pad_token_id": 0,
    },
    "deepseek_v3": {
        **_DECODER, "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3,
        "topk_group": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "q_lora_rank": 18,
        "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "switch_transformers": {
        **_SEQ2SEQ, "num_experts": 5, "expert_capacity": 6, "encoder_sparse_step": 2, "decoder_sparse_step": 1,
        "router_jitter_noise": 0.0,
    },
    "nllb-moe": {**_BART, "num_experts": 5, "encoder_sparse_step": 2, "decoder_sparse_step": 1},
}  # fmt: skip
PRETRAINED = {
    "t5": "T5ForConditionalGeneration", "gpt2": "GPT2LMHeadModel", "bert": "BertForPreTraining",
    "bart": "BartForConditionalGeneration",
}  # fmt: skip
_BERT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": _BERT_DROPOUTS,
    "roberta": _BERT_DROPOUTS,
    "distilbert": ("dropout", "attention_dropout"),
    "electra": _BERT_DROPOUTS,
    "xlm-roberta-xl": _BERT_DROPOUTS,
    "megatron-bert": _BERT_DROPOUTS,
    "esm": _BERT_DROPOUTS,
    "t5gemma": ("dropout_rate", "attention_dropout"),
    "t5gemma2": ("dropout_rate", "attention_dropout"),
    "deberta-v2": (*_BERT_DROPOUTS, "pooler_dropout"),
    "eurobert": ("attention_dropout",),
    **dict.fromkeys(
        ("modernbert", "modernbert-decoder"),
        ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout"),
    ),
    "glm": ("embedding_dropout_prob", "attention_dropout_prob", "output_dropout_prob"),
    "t5": ("dropout_rate",),
    "switch_transformers": ("dropout_rate",),
    "nllb-moe": ("dropout", "attention_dropout", "activation_dropout", "moe_token_dropout"),
    "mt5": ("dropout_rate",),
    "umt5": ("dropout_rate",),
    "longt5": ("dropout_rate",),
    **dict.fromkeys(
        ("bart", "mbart", "m2m_100", "pegasus", "marian"),
        ("dropout", "attention_dropout", "activation_dropout"),
    ),
    **dict.fromkeys(_MODERN_DECODERS, ("attention_dropout",)),
    "olmoe": ("attention_dropout",),
    "gpt_oss": ("attention_dropout",),
    "glm4_moe": ("attention_dropout",),
    "deepseek_v3": ("attention_dropout",),
    "phi3": ("attention_dropout", "resid_pdrop"),
}
_DEPTHS = {
    "gpt2": ("n_layer",),
    "bert": ("num_hidden_layers",),
    "roberta": ("num_hidden_layers",),
    "distilbert": ("n_layers",),
    "electra": ("num_hidden_layers",),
    "xlm-roberta-xl": ("num_hidden_layers",),
    "megatron-bert": ("num_hidden_layers",),
    "esm": ("num_hidden_layers",),
    "deberta-v2": ("num_hidden_layers",),
    "t5gemma": (),
    "t5gemma2": (),
    "eurobert": ("num_hidden_layers",),
    "modernbert": ("num_hidden_layers",),
    "modernbert-decoder": ("num_hidden_layers",),
    "glm": ("num_layers",),
    "t5": ("num_layers", "num_decoder_layers"),
    "switch_transformers": ("num_layers", "num_decoder_layers"),
    "nllb-moe": ("encoder_layers", "decoder_layers"),
    "olmoe": ("num_hidden_layers",),
    "gpt_oss": ("num_hidden_layers",),
    "glm4_moe": ("num_hidden_layers",),
    "deepseek_v3": ("num_hidden_layers",),
    "mt5": ("num_layers", "num_decoder_layers"),
    "umt5": ("num_layers", "num_decoder_layers"),
    "longt5": ("num_layers", "num_decoder_layers"),
    **dict.fromkeys(
        ("bart", "mbart", "m2m_100", "pegasus", "marian"), ("encoder_layers", "decoder_layers")
    ),
    **dict.fromkeys(_MODERN_DECODERS, ("num_hidden_layers",)),
}
# Families that are another one with other published weights.
_LIKE = {"xlm-roberta": "roberta", "camembert": "roberta"}
_SPECIAL_TOKENS = {
    "gpt2": {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"},
    "bert": {
        "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "unk_token": "[UNK]",
    },
    "t5": {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    "bart": {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
}  # fmt: skip


def tiny(
    family: str,
    dropout: float | None = None,
    *,
    layers: int | None = None,
    vocab_size: int = 97,
    **changes: Any,
) -> dict[str, Any]:
    """The keys of a `config.json`.

    dropout: of every kind; None leaves the family's defaults. layers: of each stack. changes: other keys.
    """
    like = _LIKE.get(family, family)
    rates = {} if dropout is None else dict.fromkeys(_DROPOUTS[like], dropout)
    sizes = (TINY | SPARSE)[like]
    depths = {} if layers is None else dict.fromkeys(_DEPTHS[like], layers)
    values = {"model_type": family, "vocab_size": vocab_size, **sizes, **rates, **depths, **changes}
    for name in ("encoder", "decoder"):  # stacks with configurations of their own
        if name in sizes:
            depth = {} if layers is None else {"num_hidden_layers": layers}
            of_text = values[name].get("text_config")
            if of_text is not None:
                text = {**of_text, "vocab_size": vocab_size, **depth}
                values[name] = {**values[name], "text_config": text}
            else:
                values[name] = {**values[name], "vocab_size": vocab_size, **depth}
    return values


def hf_model(architecture: str, dropout: float | None = None, **changes: Any) -> Any:
    """transformers' class of that name, of `tiny` sizes, with the same random weights at each call."""
    import transformers

    model_class = getattr(transformers, architecture)
    values = tiny(model_class.config_class.model_type, dropout, **changes)
    del values["model_type"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(model_class.config_class(**values))


def text(seed: int, length: int) -> str:
    """So many words."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))


def tokenizer_like(family: str) -> Any:
    """Byte-level BPE; T5 closes texts by </s>, BERT and BART put them between two tokens, GPT-2 leaves them bare."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    names = _SPECIAL_TOKENS[family]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(dict.fromkeys(names.values())),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text(seed, 20) for seed in range(200)], trainer)
    if family == "t5":
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    if family in ("bert", "bart"):
        (first, last), place = (("[CLS]", "[SEP]"), 1) if family == "bert" else (("<s>", "</s>"), 0)
        ends = [(first, place), (last, 2)]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}", special_tokens=ends
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def save_model(
    folder: Path, architecture: str, tokenizer: str, *, seed: int | None = None, **changes: Any
) -> Path:
    """Writes `hf_model` without dropout, and a tokenizer like that family's, as transformers does.

    seed: of large weights, with which every token of a text matters; None leaves transformers' initial ones.
    """
    entries = tokenizer_like(tokenizer)
    entries.save_pretrained(folder)
    model = hf_model(architecture, 0.0, **{"vocab_size": len(entries), **changes})
    if seed is not None:
        randomize(model, seed)
    model.save_pretrained(folder)
    return folder


def save_glm(folder: Path, vocabulary: str, **changes: Any) -> Path:
    """Completes a folder that holds a tokenizer with a GLM whose vocabulary extends it."""
    from safetensors.torch import save_file

    from shardzoo.data import glm_tokenizer, load_tokenizer
    from shardzoo.models import from_config
    from shardzoo.models.glm.hf import NAME_MAP

    tokens = glm_tokenizer(load_tokenizer(folder), vocabulary)
    model = from_config(tiny("glm", vocab_size=tokens.vocab_size, **changes))
    randomize(model, 0)
    entries = NAME_MAP.resolve([name for name, _ in model.named_parameters()])
    stored = {
        e.stored_names()[0]: p.detach() for e, p in zip(entries, model.parameters(), strict=True)
    }
    stored["word_embeddings.weight"] = stored["word_embeddings.weight"][: tokens.vocab_size].clone()
    save_file(stored, folder / "model.safetensors")
    model.config.save(folder)
    return folder
