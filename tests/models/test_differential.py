"""Folders made by editing what transformers writes: the zoo gives transformers' results, or says why it does not.

The oracle is transformers. For every folder the logits are compared, the ids of a text, and with `generate` the ids of
a greedy answer. A folder that transformers loads without all of its tensors, or not at all, must be refused here.
`make test` visits a part of the folders, `make test-all` all of them.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from every_case import by_turns
from safetensors.torch import load_file, save_file
from tiny_models import save_model

import shardzoo
from shardzoo.data import load_tokenizer

WEIGHTS = "model.safetensors"
TEXTS = ["one two three", "red  green\nblue </s> <unk> [MASK]", "naïve 123,456 日本 😀"]
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "glm4")
ENCODER_DECODERS = ("t5", "mt5", "umt5", "bart", "mbart", "m2m_100")
ENCODERS = ("bert", "roberta", "electra", "distilbert", "modernbert")
BASES = {
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
    "llama": ("LlamaForCausalLM", "gpt2"),
    "mistral": ("MistralForCausalLM", "gpt2"),
    "qwen2": ("Qwen2ForCausalLM", "gpt2"),
    "qwen3": ("Qwen3ForCausalLM", "gpt2"),
    "glm4": ("Glm4ForCausalLM", "gpt2"),
    "t5": ("T5ForConditionalGeneration", "t5"),
    "mt5": ("MT5ForConditionalGeneration", "t5"),
    "umt5": ("UMT5ForConditionalGeneration", "t5"),
    "bart": ("BartForConditionalGeneration", "bart"),
    "mbart": ("MBartForConditionalGeneration", "bart"),
    "m2m_100": ("M2M100ForConditionalGeneration", "bart"),
    "bert": ("BertForMaskedLM", "bert"),
    "roberta": ("RobertaForMaskedLM", "bart"),
    "electra": ("ElectraForMaskedLM", "bert"),
    "distilbert": ("DistilBertForMaskedLM", "bert"),
    "modernbert": ("ModernBertForMaskedLM", "bert"),
}
EMBEDDINGS = {
    "gpt2": "transformer.wte.weight",
    "t5": "shared.weight",
    "mt5": "shared.weight",
    "umt5": "shared.weight",
    "bart": "model.shared.weight",
    "mbart": "model.shared.weight",
    "m2m_100": "model.shared.weight",
    "modernbert": "model.embeddings.tok_embeddings.weight",
    **dict.fromkeys(DECODERS[1:], "model.embed_tokens.weight"),
    **{name: f"{name}.embeddings.word_embeddings.weight" for name in ENCODERS[:4]},
}
HEADS = {
    **dict.fromkeys((*DECODERS, *ENCODER_DECODERS), "lm_head.weight"),
    "bert": "cls.predictions.decoder.weight",
    "roberta": "lm_head.decoder.weight",
    "electra": "generator_lm_head.weight",
    "distilbert": "vocab_projector.weight",
    "modernbert": "decoder.weight",
}
ACTIVATION_KEYS = {
    "gpt2": "activation_function",
    **dict.fromkeys(DECODERS[1:], "hidden_act"),
    **dict.fromkeys(("t5", "mt5", "umt5"), "feed_forward_proj"),
    **dict.fromkeys(("bart", "mbart", "m2m_100"), "activation_function"),
    **dict.fromkeys(("bert", "roberta", "electra"), "hidden_act"),
    "distilbert": "activation",
    "modernbert": "hidden_activation",
}


# ------------------------------------------------------------------------------------------- edits

Edit = Callable[[Path, str], None]


def edit_json(name: str, **changes: Any) -> Edit:
    """Sets keys of a JSON file, or removes those whose value is `...`."""

    def edit(folder: Path, family: str) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        values.update(changes)
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return edit


def config(**changes: Any) -> Edit:
    return edit_json("config.json", **changes)


def generation(**changes: Any) -> Edit:
    return edit_json("generation_config.json", **changes)


def tensors(change: Callable[[dict[str, torch.Tensor], str], dict[str, torch.Tensor]]) -> Edit:
    def edit(folder: Path, family: str) -> None:
        changed = change(load_file(folder / WEIGHTS), family)
        made = {name: tensor.clone().contiguous() for name, tensor in changed.items()}
        save_file(made, folder / WEIGHTS, {"format": "pt"})

    return edit


def rename(old: str, new: str) -> Edit:
    return tensors(lambda t, family: {name.replace(old, new): x for name, x in t.items()})


def without_prefix(t: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    prefix = {"gpt2": "transformer.", "modernbert": "model."}.get(family)
    if prefix is None:
        prefix = f"{family}." if family in ENCODERS else "model."
    return {name.removeprefix(prefix): x for name, x in t.items()}


def cast(dtype: torch.dtype, part: str = "", share: int = 1) -> Edit:
    def change(t: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
        chosen = [name for name in t if part in name][::share]
        return {name: x.to(dtype) if name in chosen else x for name, x in t.items()}

    return tensors(change)


def add(name: str, make: Callable[[dict[str, torch.Tensor], str], torch.Tensor]) -> Edit:
    def change(t: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
        return {**t, name.format(head=HEADS[family]): make(t, family)}

    return tensors(change)


def noise(t: dict[str, torch.Tensor], family: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(t[EMBEDDINGS[family]].shape, generator=generator)


def other_head(folder: Path, family: str) -> None:
    add("{head}", noise)(folder, family)


def copied_head(folder: Path, family: str) -> None:
    add("{head}", lambda t, name: t[EMBEDDINGS[name]])(folder, family)


def head_alone(folder: Path, family: str) -> None:
    def move(t: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        made = dict(t)
        made[HEADS[name]] = made.pop(EMBEDDINGS[name])
        return made

    tensors(move)(folder, family)


def drop(position: int) -> Edit:
    def change(t: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
        lost = sorted(t)[position % len(t)]
        return {name: x for name, x in t.items() if name != lost}

    return tensors(change)


def cut_rows(t: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    return {**t, EMBEDDINGS[family]: t[EMBEDDINGS[family]][:-3]}


def as_bin(change: Callable[[dict[str, torch.Tensor]], Any] = lambda t: t, **options: Any) -> Edit:
    def edit(folder: Path, family: str) -> None:
        stored = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        torch.save(change(stored), folder / "pytorch_model.bin", **options)

    return edit


def views(t: dict[str, torch.Tensor]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for number, (name, x) in enumerate(t.items()):
        if number % 3 == 0 and x.ndim == 2:
            x = x.t().contiguous().t()
        elif number % 3 == 1:
            x = torch.stack([x, x], -1)[..., 1]
        made[name] = x
    return {**made, "nothing": None}


def in_shards(folder: Path, family: str) -> None:
    model = getattr(transformers, BASES[family][0]).from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="20KB")


def activation(name: str) -> Edit:
    def edit(folder: Path, family: str) -> None:
        config(**{ACTIVATION_KEYS[family]: name})(folder, family)

    return edit


def common_name(common: str, factor: int, own: bool) -> Edit:
    """Writes a common name beside, or instead of, the family's own key."""

    def edit(folder: Path, family: str) -> None:
        names = transformers.CONFIG_MAPPING[family].attribute_map
        key = names.get(common, common)
        values = json.loads((folder / "config.json").read_text())
        changes: dict[str, Any] = {common: int(values[key] * factor)}
        if not own and key != common:
            changes[key] = ...
        config(**changes)(folder, family)

    return edit


def one_more_token(folder: Path, family: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    config(vocab_size=values["vocab_size"] + 1)(folder, family)


def remove(name: str) -> Edit:
    return lambda folder, family: (folder / name).unlink(missing_ok=True)


def add_tokens(folder: Path, family: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["two three", "日本"])
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    model = getattr(transformers, BASES[family][0]).from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)


def edit_tokenizer(change: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(folder: Path, family: str) -> None:
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return edit


def set_normalizer(values: dict[str, Any]) -> None:
    values["normalizer"] = {"type": "Lowercase"}


def set_prefix_space(values: dict[str, Any]) -> None:
    values["pre_tokenizer"]["add_prefix_space"] = True


def set_truncation(values: dict[str, Any]) -> None:
    values["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    values["padding"] = {
        "strategy": {"Fixed": 16}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip


ALL = tuple(BASES)
GENERATING = (*DECODERS, *ENCODER_DECODERS)
RARE = ("gpt2", "llama", "t5", "bart", "bert", "modernbert")  # of what is alike in all families
# Without a tokenizer_config.json transformers takes the kind of tokenizer of the model's family.
OWN_KIND = ("gpt2", "llama", "bart", "modernbert")
# transformers scales the logits of a UMT5 whose head is its own, other than it was trained (docs/convert.md).
UNTIED = tuple(family for family in ALL if family != "umt5")
T5S = ("t5", "mt5", "umt5")
BARTS = ("bart", "mbart", "m2m_100")
WRITTEN = {
    # tensors
    "as it is": (lambda folder, family: None, ALL),
    "names without a prefix": (tensors(without_prefix), ALL),
    "a body of the prefix alone": (rename("transformer.h.", "h."), ("gpt2",)),
    "norms of TensorFlow": (rename("LayerNorm.weight", "LayerNorm.gamma"), ("bert", "electra", "roberta")),
    "another head": (other_head, ALL),
    "another head, untied": (lambda f, n: (other_head(f, n), config(tie_word_embeddings=False)(f, n)), UNTIED),
    "a copy of the head": (copied_head, ALL),
    "the head alone": (head_alone, ALL),
    "no head, untied": (config(tie_word_embeddings=False), UNTIED),
    "tied": (config(tie_word_embeddings=True), ALL),
    "bf16": (cast(torch.bfloat16), RARE),
    "fp16": (cast(torch.float16), RARE),
    "fp64": (cast(torch.float64), RARE),
    "every third in bf16": (cast(torch.bfloat16, share=3), ALL),
    "norms in fp16": (cast(torch.float16, "orm"), RARE),
    "integers": (cast(torch.int8, share=7), RARE),
    "an unknown tensor": (add("model.unknown.weight", lambda t, n: torch.ones(3)), RARE),
    "a buffer of positions": (add("embeddings.position_ids", lambda t, n: torch.arange(64)[None]), ("bert", "electra")),
    "buffers of rotation": (
        add("model.layers.0.self_attn.rotary_emb.inv_freq", lambda t, n: torch.ones(4)), DECODERS[1:],
    ),
    "masks of GPT-2": (
        lambda f, n: (
            add("transformer.h.0.attn.bias", lambda t, n: torch.ones(1, 1, 64, 64).bool())(f, n),
            add("transformer.h.0.attn.masked_bias", lambda t, n: torch.tensor(-1e4))(f, n),
        ), ("gpt2",),
    ),
    "a bias of the logits": (add("final_logits_bias", lambda t, n: noise(t, n)[None, :, 0]), BARTS),
    "a bias of zeros": (add("final_logits_bias", lambda t, n: 0 * noise(t, n)[None, :, 0]), BARTS),
    "another decoder bias": (add("cls.predictions.decoder.bias", lambda t, n: noise(t, n)[:, 0]), ("bert",)),
    "another decoder bias of RoBERTa": (add("lm_head.decoder.bias", lambda t, n: noise(t, n)[:, 0]), ("roberta",)),
    "another embedding of the encoder": (add("encoder.embed_tokens.weight", noise), T5S),
    "the same embedding of the encoder": (
        add("encoder.embed_tokens.weight", lambda t, n: t["shared.weight"]), T5S,
    ),
    "a cross-attention bias": (
        add("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", lambda t, n: torch.ones(32, 4)),
        ("t5", "mt5"),
    ),
    "the first tensor missing": (drop(0), ALL),
    "a tensor missing": (drop(7), ALL),
    "the last tensor missing": (drop(-1), ALL),
    "three rows missing": (tensors(cut_rows), RARE),
    "bin": (as_bin(), RARE),
    "old bin": (as_bin(_use_new_zipfile_serialization=False), RARE),
    "bin of views": (as_bin(views), ALL),
    "many files": (in_shards, RARE),
    # configuration
    "no architectures": (config(architectures=...), RARE),
    "empty architectures": (config(architectures=[]), RARE),
    "no model_type": (config(model_type=...), RARE),
    "unknown keys": (config(a_key_of_the_future={"a": [1]}, torchscript=False), ALL),
    "torch_dtype": (config(dtype=..., torch_dtype="float16"), RARE),
    "no token ids": (config(pad_token_id=..., bos_token_id=..., eos_token_id=...), ALL),
    "null token ids": (config(pad_token_id=None, bos_token_id=None, eos_token_id=None), ALL),
    "pad_token_id -1": (config(pad_token_id=-1), ALL),
    "a pad_token_id beyond": (config(pad_token_id=100_000), ALL),
    "several eos": (config(eos_token_id=[1, 5]), GENERATING),
    "no cache": (config(use_cache=False), GENERATING),
    "a fraction of a layer": (config(num_hidden_layers=1.5, n_layer=1.5), RARE),
    "sizes as text": (config(vocab_size="400"), RARE),
    "one token more": (one_more_token, ALL),
    "is_decoder": (config(is_decoder=True), ENCODERS),
    "cross-attention": (config(add_cross_attention=True), ("gpt2", "bert")),
    "label names": (config(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1}), RARE),
    "labels with gaps": (config(id2label={"0": "a", "5": "b"}, label2id={"a": "0", "b": "5"}), RARE),
    "no dropout keys": (config(hidden_dropout_prob=..., attention_dropout=..., dropout=..., dropout_rate=...), RARE),
    **{
        f"activation {name}": (activation(name), families)
        for name, families in {
            "gelu_new": (*RARE, "roberta"), "relu": ALL, "silu": ("gpt2", "llama", "bart", "bert"), "gelu": ALL,
            "gelu_pytorch_tanh": ("gpt2", "llama", "modernbert"), "swish": ("llama", "bert"),
            "quick_gelu": ("gpt2", "bart"), "gelu_fast": ("gpt2", "bert"), "gelu_10": ("bert",),
            "tanh": ("gpt2", "bart"), "gated-gelu": T5S, "gated-silu": T5S, "no_such": RARE, "linear": ("bert",),
            "relu2": ("llama",), "mish": ("bert",), "sigmoid": ("bart",), "leaky_relu": ("gpt2",),
            "gelu_python": ("gpt2",),
        }.items()
    },
    "epsilons": (config(layer_norm_epsilon=0.1, rms_norm_eps=0.1, layer_norm_eps=0.1, norm_eps=0.1), ALL),
    "rope_theta": (config(rope_theta=100.0, rope_parameters=...), DECODERS[1:]),
    "rope_parameters": (config(rope_parameters={"rope_type": "default", "rope_theta": 50.0}), DECODERS[1:]),
    "rope linear": (config(rope_parameters=..., rope_scaling={"type": "linear", "factor": 4.0}), DECODERS[1:]),
    "rope dynamic": (config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), DECODERS[1:]),
    "rope yarn": (
        config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                "original_max_position_embeddings": 16}), DECODERS[1:],
    ),
    "rope llama3": (
        config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 16}), DECODERS[1:],
    ),
    "partial rotation": (config(partial_rotary_factor=0.5, rope_parameters=...), DECODERS[1:]),
    "a short window": (
        config(sliding_window=3, use_sliding_window=True, max_window_layers=0, layer_types=...), DECODERS[1:5],
    ),
    "no window": (config(sliding_window=None), DECODERS[1:5]),
    "attention bias": (config(attention_bias=True), ("llama", "qwen3", "modernbert")),
    "scaled attention": (config(scale_attn_weights=False), ("gpt2",)),
    "scaled by layer": (config(scale_attn_by_inverse_layer_idx=True), ("gpt2",)),
    "reordered": (config(reorder_and_upcast_attn=True), ("gpt2",)),
    "scaled embedding": (config(scale_embedding=True), BARTS),
    "unscaled embedding": (config(scale_embedding=False), BARTS),
    "no decoder start": (config(decoder_start_token_id=...), ENCODER_DECODERS),
    "few buckets": (config(relative_attention_max_distance=6), T5S),
    "a dense_act_fn": (config(dense_act_fn="silu"), T5S),
    "relative positions": (config(position_embedding_type="relative_key"), ("bert", "electra")),
    "pre-norm of the config": (config(normalize_before=True, add_final_layer_norm=True), ("bart",)),
    "few segments": (config(type_vocab_size=1), ("bert",)),
    "local attention": (config(local_attention=4, global_attn_every_n_layers=2, layer_types=...), ("modernbert",)),
    "heads by another name": (common_name("num_attention_heads", 1, False), ALL),
    "heads by both names": (common_name("num_attention_heads", 2, True), ALL),
    "the hidden size by another name": (common_name("hidden_size", 1, False), ALL),
    "layers by both names": (common_name("num_hidden_layers", 1, True), ALL),
    # tokenizers
    "no tokenizer_config": (remove("tokenizer_config.json"), OWN_KIND),
    "no special_tokens_map": (remove("special_tokens_map.json"), RARE),
    "added tokens": (add_tokens, RARE),
    "contradicting special tokens": (edit_json("special_tokens_map.json", eos_token="red", pad_token="blue"), RARE),
    "special tokens as objects": (
        edit_json("tokenizer_config.json", eos_token={"content": "one", "lstrip": True, "__type": "AddedToken"}), RARE,
    ),
    "a token named only in the config": (edit_json("tokenizer_config.json", mask_token="<mask-of-mine>"), RARE),
    "lower case": (edit_tokenizer(set_normalizer), RARE),
    "a space in front": (edit_tokenizer(set_prefix_space), RARE),
    "truncation and padding": (edit_tokenizer(set_truncation), RARE),
    "a tokenizer of three tokens": (edit_json("tokenizer_config.json", model_max_length=3), RARE),
    "padding on the left": (edit_json("tokenizer_config.json", padding_side="left"), RARE),
    "a space in front by the config": (edit_json("tokenizer_config.json", add_prefix_space=True), RARE),
    "split special tokens": (edit_json("tokenizer_config.json", split_special_tokens=True), RARE),
    "cleaned up": (edit_json("tokenizer_config.json", clean_up_tokenization_spaces=True), RARE),
    # generation
    "no generation_config": (remove("generation_config.json"), GENERATING),
    "an empty generation_config": (
        lambda f, n: (f / "generation_config.json").write_text("{}") and None, GENERATING,
    ),
    "beams": (generation(num_beams=2), GENERATING),
    "repetition": (generation(repetition_penalty=1.5, no_repeat_ngram_size=2), GENERATING),
    "suppressed": (generation(suppress_tokens=[20, 30], begin_suppress_tokens=[40]), GENERATING),
    "bad words": (generation(bad_words_ids=[[5], [6, 7]]), ("gpt2", "t5", "bart")),
    "lengths": (generation(min_new_tokens=4, max_new_tokens=5), GENERATING),
    "ends": (generation(eos_token_id=list(range(0, 400, 3)), pad_token_id=7), GENERATING),
    "forced": (generation(forced_bos_token_id=11, forced_eos_token_id=12), GENERATING),
    "settings of the future": (generation(top_k=-1, a_key_of_the_future=[1]), GENERATING),
    "beams of the config": (config(num_beams=2, length_penalty=2.0), GENERATING),
    "beams of the config alone": (
        lambda f, n: (config(num_beams=2, forced_bos_token_id=9)(f, n), remove("generation_config.json")(f, n)),
        GENERATING,
    ),
}  # fmt: skip


STORING = ("bin", "old bin", "bin of views", "many files")


@dataclass(frozen=True)
class Case:
    family: str
    edits: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.family}: {' + '.join(self.edits)}"


def list_cases() -> list[Case]:
    """Returns each edit of each family that it suits, and pairs of edits that chance chose."""
    cases = [
        Case(family, (name,)) for name, (_, families) in WRITTEN.items() for family in families
    ]
    chance = random.Random(11)
    for family in ALL:
        own = [name for name, (_, families) in WRITTEN.items() if family in families]
        for _ in range(6):
            # What stores the weights in other files comes last.
            first, second = sorted(chance.sample(own, 2), key=lambda name: name in STORING)
            if first not in STORING:
                cases.append(Case(family, (first, second)))
    return cases


# -------------------------------------------------------------------------------------- comparison


def make_inputs(family: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, 250, (2, 9), generator=torch.Generator().manual_seed(4))
    if family in ENCODER_DECODERS:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    return {"input_ids": ids}


def run_theirs(folder: Path, family: str, generates: bool) -> dict[str, Any] | str:
    """Returns transformers' results, or why there are none."""
    kind = getattr(transformers, BASES[family][0])
    try:
        model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # It raises errors of many kinds, and bare ones.
        return f"{type(error).__name__}: {error}"
    lacking = {name for name in report["missing_keys"] if "position_ids" not in name}
    if lacking or report["mismatched_keys"]:
        return f"it lacks {sorted(lacking)[:3]} {sorted(report['mismatched_keys'])[:2]}"
    try:
        with torch.no_grad():
            results = {"logits": model.eval()(**make_inputs(family)).logits}
            if generates:
                ids = make_inputs(family)["input_ids"]
                answer = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
                )
                results["answer"] = answer.tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        backend = transformers.AutoTokenizer.from_pretrained(folder)
        results["ids"] = backend(
            TEXTS, add_special_tokens=False, split_special_tokens=True
        ).input_ids
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return results


def run_ours(mesh: Any, folder: Path, family: str, generates: bool) -> dict[str, Any] | str:
    """Returns the zoo's results, or why it refuses the folder."""
    try:
        model = shardzoo.from_pretrained(folder, mesh, torch.float32)
        with torch.no_grad():
            logits = model(**make_inputs(family)).logits
            results = {"logits": model.gather_logits(logits)}
            if generates:
                ids = make_inputs(family)["input_ids"]
                answer = model.generate(
                    ids, torch.ones_like(ids), max_new_tokens=6, do_sample=False
                )
                results["answer"] = answer.tolist()
        results["ids"] = load_tokenizer(folder).encode_batch(TEXTS)
    except ValueError as error:
        return str(error)
    return results


def find_difference(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Returns what differs in both results."""
    scale = wanted["logits"].abs().max().clamp(min=1)
    if found["logits"].shape != wanted["logits"].shape:
        return f"logits of shape {list(found['logits'].shape)}, not {list(wanted['logits'].shape)}"
    error = ((found["logits"] - wanted["logits"]).abs().max() / scale).item()
    if not error < 2e-5:
        return f"logits differ by {error:.2g} of their scale"
    for what in ("answer", "ids"):
        if what in wanted and found[what] != wanted[what]:
            return f"{what} {found[what]}, not {wanted[what]}"
    return None


@pytest.fixture
def base(tmp_path):
    """`base(family)`: a folder as transformers writes it."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def make(family: str) -> Path:
        architecture, tokenizer = BASES[family]
        changes: dict[str, Any] = {"tie_word_embeddings": True} if family in DECODERS else {}
        return save_model(tmp_path / "base", architecture, tokenizer, seed=5, **changes)

    return make


def generates(case: Case) -> bool:
    """Whether an answer is compared too: where the case is about it."""
    names = list(WRITTEN)
    first = names.index("no generation_config")
    return case.family in GENERATING and any(names.index(name) >= first for name in case.edits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", by_turns(ALL, 3))
def test_edited_folders(family, base, tmp_path, run_mesh):
    counts: Counter[str] = Counter()
    problems: list[str] = []
    cases = [case for case in by_turns(list_cases(), 24) if case.family == family]
    source = base(family)
    for number, case in enumerate(cases):
        folder = tmp_path / f"case-{number}"
        shutil.copytree(source, folder)
        try:
            for name in case.edits:
                WRITTEN[name][0](folder, family)
        except KeyError:  # The second edit is about a tensor that the first has removed.
            continue
        wanted = run_theirs(folder, family, generates(case))
        found = [run_ours(None, folder, family, generates(case))]
        if number % 4 == 0 and not isinstance(found[0], str):
            found += run_mesh(2, run_ours, folder, family, generates(case))
        for ours in found:
            if isinstance(ours, str) and isinstance(wanted, str):
                counts["refused by both"] += 1
            elif isinstance(ours, str):
                counts["refused here"] += 1
                print(f"{case}: {ours.replace(str(folder), '')}")
            elif isinstance(wanted, str):
                problems.append(f"{case}: accepted, but not by transformers: {wanted:.200}")
            elif difference := find_difference(ours, wanted):
                problems.append(f"{case}: {difference}")
            else:
                counts["equal"] += 1
        shutil.rmtree(folder)
    print(f"{family}: {dict(counts)}, {len(problems)} problems")
    assert not problems, "\n".join(problems)
