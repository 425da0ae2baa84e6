"""Tiny models of transformers with their tokenizers on disk, and files of pairs and texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = "one two three four five six seven eight nine ten red green blue black white big small old new good".split()  # noqa: SIM905
ODD = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 1, "num_heads": 4}


def text(seed: int, length: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))


def make_tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE; T5 closes texts by </s>, BERT puts them between [CLS] and [SEP], GPT-2 leaves them bare."""
    names = {
        "t5": {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
        "gpt2": {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"},
        "bert": {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
    }[kind]
    special = list(dict.fromkeys(names.values()))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text(seed, 20) for seed in range(200)], trainer)
    if kind == "t5":
        backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    if kind == "bert":
        ends = [("[CLS]", 1), ("[SEP]", 2)]
        backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def make_model(kind: str, vocab_size: int):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": vocab_size}
    if kind == "t5":  # encoder and decoder of unequal depth
        config = transformers.T5Config(
            vocab_size=vocab_size, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, dropout_rate=0.0, **ODD
        )
        return transformers.T5ForConditionalGeneration(config)
    if kind == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocab_size, **sizes, **ends, **dropout))
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **quiet, intermediate_size=48, max_position_embeddings=64)
    return transformers.BertForPreTraining(config)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """`checkpoints(kind)`: the folder of a tiny "t5", "gpt2" or "bert" with its tokenizer."""
    made: dict[str, Path] = {}

    def get(kind: str) -> str:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            tokenizer = make_tokenizer(kind)
            tokenizer.save_pretrained(folder)
            make_model(kind, len(tokenizer)).save_pretrained(folder)
            made[kind] = folder
        return str(made[kind])

    return get


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The folder of pairs.json (repeat the first words), other.json (with other keys), labels.json and text.txt."""
    folder = tmp_path_factory.mktemp("files")
    sources = [text(seed, 3 + seed % 3) for seed in range(48)]
    pairs = [(source, " ".join(source.split()[: 1 + number % 2])) for number, source in enumerate(sources)]
    write = {
        "pairs.json": [{"translation": {"s": s, "t": t}} for s, t in pairs],
        "other.json": [{"translation": {"en": s, "ro": t}} for s, t in pairs],
        "labels.json": [{"s": s, "t": int("red" in s or "blue" in s)} for s in sources],
        "names.json": [{"s": s, "t": "colour" if "red" in s or "blue" in s else "none"} for s in sources],
    }
    for name, records in write.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "text.txt").write_text(text(0, 1200))
    return folder
