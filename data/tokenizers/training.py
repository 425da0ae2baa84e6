"""Train tokenizers: byte-level BPE (GPT2's kind) and WordPiece (BERT's kind)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .tokenizer import FastTokenizer, load_tokenizer

END_OF_TEXT = "<|endoftext|>"
LEAST_BPE_VOCABULARY = 257  # every byte and the end of text
BERT_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def train_byte_level_bpe(
    documents: Iterable[str], vocab_size: int, output_dir: str | Path, *, progress: bool = False
) -> FastTokenizer:
    """Byte-level BPE over `documents`, saved so that `AutoTokenizer.from_pretrained(output_dir)` loads it.

    `<|endoftext|>` has id 0 and is the beginning, the end and the unknown token. The vocabulary may end up
    smaller than asked when the text has too few pairs. Any text can be encoded and comes back exactly.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if vocab_size < LEAST_BPE_VOCABULARY:
        raise ValueError(f"a byte-level vocabulary needs at least {LEAST_BPE_VOCABULARY} entries, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(_not_empty(documents), trainer)
    return _save(tokenizer, Path(output_dir), dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT))


def train_wordpiece(
    documents: Iterable[str],
    vocab_size: int,
    output_dir: str | Path,
    *,
    lowercase: bool = True,
    progress: bool = False,
) -> FastTokenizer:
    """WordPiece over `documents`, saved so that `AutoTokenizer.from_pretrained(output_dir)` loads it.

    `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]` and `[MASK]` have the ids 0 to 4, and transformers puts the third and
    fourth around a text. Words are split, and lowercased and freed of accents, as the published BERTs do. The
    vocabulary holds every letter that was seen, so it may end up larger than asked, or smaller when the text
    has too few pairs.

    Args:
        lowercase: as the uncased models; False keeps case and accents.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = list(BERT_TOKENS.values())
    if vocab_size <= len(special):
        raise ValueError(f"a WordPiece vocabulary needs more than its {len(special)} special tokens, not {vocab_size}")
    tokenizer = Tokenizer(models.WordPiece(unk_token=BERT_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=special, show_progress=progress
    )
    tokenizer.train_from_iterator(_not_empty(documents), trainer)
    sep, cls = ((name, special.index(name)) for name in ("[SEP]", "[CLS]"))  # trained first, in their order
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return _save(tokenizer, Path(output_dir), BERT_TOKENS)


def _save(tokenizer: Any, folder: Path, special: dict[str, str]) -> FastTokenizer:
    """Writes what transformers reads, and reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, FastTokenizer)
    return loaded


def _not_empty(documents: Iterable[str]) -> Iterator[str]:
    """The documents, or a ValueError if there is none: the trainer would return bytes alone."""
    count = 0
    for count, document in enumerate(documents, 1):  # noqa: B007
        yield document
    if count == 0:
        raise ValueError("cannot train a tokenizer: the corpus has no document with text")
