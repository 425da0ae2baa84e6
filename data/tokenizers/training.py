"""Trains tokenizers: byte-level BPE (as GPT-2's, RoBERTa's and GLM's), WordPiece (BERT's) and
SentencePiece (T5's).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from ...files.working_copies import writing
from .files import remove_tokenizer
from .glm_tokens import DEFAULT_VOCABULARY, TOKEN_NAMES, glm_tokenizer
from .sentinels import T5_SENTINELS
from .tokenizer import (
    FastTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TransformersTokenizer,
    load_tokenizer,
    save_tokenizer,
    write_config,
)

TokenizerKind = Literal[
    "bpe", "roberta-bpe", "wordpiece", "sentencepiece", "unigram", "bytes", "glm-bpe"
]
TOKENIZER_KINDS: tuple[TokenizerKind, ...] = get_args(TokenizerKind)
AnyTokenizer = TypeVar("AnyTokenizer", bound=Tokenizer)

END_OF_TEXT = "<|endoftext|>"
BYTES = 256
ROBERTA_TOKENS = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
BERT_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def train_tokenizer(
    kind: TokenizerKind, documents: Iterable[str], vocab_size: int, output_dir: str | Path
) -> Tokenizer:
    """Trains a tokenizer of a family's kind and saves it in a folder, or at the URL of one in an
    object store; see the function of each kind.
    """
    trainers = {
        "bpe": train_byte_level_bpe,
        "roberta-bpe": train_roberta_bpe,
        "wordpiece": train_wordpiece,
        "sentencepiece": train_sentencepiece,
        "unigram": train_unigram,
        "bytes": make_byte_tokenizer,
        "glm-bpe": train_glm_bpe,
    }
    if kind not in trainers:
        raise ValueError(
            f"no tokenizer of the kind {kind!r} can be trained; use one of {', '.join(trainers)}"
        )
    with writing(output_dir) as folder:
        return trainers[kind](documents, vocab_size, folder)


def train_byte_level_bpe(
    documents: Iterable[str], vocab_size: int, output_dir: str | Path, *, progress: bool = False
) -> FastTokenizer:
    """Trains a byte-level BPE and saves it so that `AutoTokenizer.from_pretrained(output_dir)`
    loads it.

    `<|endoftext|>` has id 0 and is the beginning-of-sequence, end-of-sequence and unknown token.
    The vocabulary is smaller than `vocab_size` if the text has too few pairs. Any text can be
    encoded, and decoding restores it exactly.
    """
    from tokenizers import processors

    tokenizer = _train_byte_level(documents, vocab_size, [END_OF_TEXT], progress=progress)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    return _save(tokenizer, Path(output_dir), special)


def train_roberta_bpe(
    documents: Iterable[str], vocab_size: int, output_dir: str | Path
) -> FastTokenizer:
    """Trains a byte-level BPE with RoBERTa's special tokens and saves it so that transformers loads
    it as RoBERTa's.

    `<s>`, `<pad>`, `</s>` and `<unk>` have the ids 0 to 3, `<mask>` the last one. `<mask>` takes
    the white space before it, as in the published vocabulary.
    """
    from tokenizers import AddedToken, processors

    first = list(dict.fromkeys(ROBERTA_TOKENS.values()))[:-1]
    tokenizer = _train_byte_level(documents, vocab_size, first, appended=1)
    mask = AddedToken(ROBERTA_TOKENS["mask_token"], lstrip=True, normalized=False, special=True)
    tokenizer.add_special_tokens([mask])
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", first.index("</s>")),
        ("<s>", first.index("<s>")),
        trim_offsets=True,
        add_prefix_space=False,
    )
    return _save(tokenizer, Path(output_dir), ROBERTA_TOKENS, "RobertaTokenizer")


def train_glm_bpe(
    documents: Iterable[str], vocab_size: int, output_dir: str | Path
) -> FastTokenizer:
    """Trains a byte-level BPE, appends GLM's special tokens to it and saves it for transformers.

    `<|endoftext|>` has id 0. `glm_tokenizer(tokenizer, "gpt2")` finds the special tokens, which are
    the last ids, in the order of the released English models.
    """
    special = {f"{role}_token": TOKEN_NAMES[role] for role in ("eos", "cls", "sep", "mask", "unk")}
    special["pad_token"] = END_OF_TEXT
    folder = Path(output_dir)
    # All of GLM's tokens but the end of text are appended to the trained vocabulary.
    backend = _train_byte_level(documents, vocab_size, [END_OF_TEXT], appended=len(TOKEN_NAMES) - 1)
    bpe = _save(backend, folder, special)
    glm_tokenizer(bpe, DEFAULT_VOCABULARY)
    save_tokenizer(bpe, folder)
    return _reload(folder, FastTokenizer)


def _train_byte_level(
    documents: Iterable[str],
    vocab_size: int,
    special: Sequence[str],
    *,
    appended: int = 0,
    progress: bool = False,
) -> Any:
    """Trains a byte-level BPE of `vocab_size - appended` entries, which begin with the special
    tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = BYTES + len(special) + appended
    if vocab_size < least:
        raise ValueError(
            f"a byte-level vocabulary needs at least {least} entries, not {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - appended,
        min_frequency=2,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(_not_empty(documents), trainer)
    return tokenizer


def train_wordpiece(
    documents: Iterable[str],
    vocab_size: int,
    output_dir: str | Path,
    *,
    lowercase: bool = True,
    progress: bool = False,
) -> FastTokenizer:
    """Trains a WordPiece tokenizer and saves it so that `AutoTokenizer.from_pretrained(output_dir)`
    loads it.

    `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]` and `[MASK]` have the ids 0 to 4, and transformers puts
    `[CLS]` and `[SEP]` around a text. Splitting, lowercasing and removal of accents are those of
    the published BERTs. The vocabulary holds every letter that occurs, so it may be larger than
    `vocab_size`; it is smaller if the text has too few pairs.

    Args:
        documents: Read twice; what can be iterated only once is held in memory.
        lowercase: Whether to remove case and accents, as the uncased models do.
    """
    from tokenizers import processors, trainers

    special = list(BERT_TOKENS.values())
    if vocab_size <= len(special):
        raise ValueError(
            f"a WordPiece vocabulary needs more than its {len(special)} special tokens, "
            f"not {vocab_size}"
        )
    if isinstance(documents, Iterator):
        documents = list(documents)

    def train(first: list[str], size: int) -> dict[str, int]:
        """Trains a vocabulary that begins with the given tokens."""
        tokenizer = _build_wordpiece(None, lowercase)
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, min_frequency=2, special_tokens=first, show_progress=progress
        )
        tokenizer.train_from_iterator(_not_empty(documents), trainer)
        return tokenizer.get_vocab()

    # The library numbers the continuing letters (##a) at random, and breaks ties between pairs by
    # these numbers. Given as the first tokens, they have a fixed order.
    alphabet = train(special, len(special))
    letters = sorted(token for token in alphabet if token.startswith("##") and len(token) == 3)
    tokenizer = _build_wordpiece(train(special + letters, vocab_size), lowercase)
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", special.index("[SEP]")), ("[CLS]", special.index("[CLS]"))
    )
    # By default, transformers would leave out the types of a pair's texts.
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return _save(tokenizer, Path(output_dir), BERT_TOKENS, model_input_names=inputs)


def _build_wordpiece(vocabulary: dict[str, int] | None, lowercase: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=BERT_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _save(
    tokenizer: Any,
    folder: Path,
    special: dict[str, str],
    tokenizer_class: str = "PreTrainedTokenizerFast",
    **options: Any,
) -> FastTokenizer:
    """Writes the files that transformers reads, and loads them.

    `options` are more entries of tokenizer_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_tokenizer(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": tokenizer_class,
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),
        **options,
    }
    write_config(folder, config)
    return _reload(folder, FastTokenizer)


def _reload(folder: Path, kind: type[AnyTokenizer]) -> AnyTokenizer:
    """Reads back a tokenizer that was just saved."""
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, kind)
    return loaded


def _not_empty(documents: Iterable[str]) -> Iterator[str]:
    """Yields the documents.

    Raises:
        ValueError: There are none, because the trainer would return a vocabulary of bytes.
    """
    is_empty = True
    for document in documents:
        is_empty = False
        yield document
    if is_empty:
        raise ValueError("cannot train a tokenizer: the corpus has no document with text")


T5_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
LEAST_VOCABULARY = BYTES + len(T5_TOKENS) + 1  # bytes, special pieces, one more
SAMPLE_TEXTS = 1_000_000
SENTENCE_BYTES = 4000  # The trainer skips longer pieces of text; its limit is 4192 bytes.


def train_sentencepiece(
    documents: Iterable[str],
    vocab_size: int,
    output_dir: str | Path,
    *,
    sample_texts: int = SAMPLE_TEXTS,
) -> SentencePieceTokenizer:
    """Trains a SentencePiece unigram model and saves it as `spiece.model` with T5's special ids.

    Padding is 0, the end of sequence 1, the unknown token 2. The sentinels `<extra_id_0>` … are
    part of the vocabulary, `<extra_id_0>` last as in T5. Bytes that no piece covers are encoded as
    byte tokens, so every text can be encoded. White space is normalized, as SentencePiece does by
    default.

    Args:
        vocab_size: Number of pieces, without the sentinels.
        sample_texts: Maximum number of text pieces to train on.
    """
    folder = Path(output_dir)
    _train_t5_model(documents, vocab_size, folder, sample_texts)
    # transformers' T5Tokenizer does not know byte tokens, so it gets a tokenizer.json, too.
    save_tokenizer(load_tokenizer(folder), folder)
    return _reload(folder, SentencePieceTokenizer)


def _train_t5_model(
    documents: Iterable[str], vocab_size: int, folder: Path, sample_texts: int
) -> None:
    """Writes the model and the tokenizer_config.json of `train_sentencepiece`."""
    from sentencepiece import SentencePieceTrainer

    if vocab_size < LEAST_VOCABULARY:
        raise ValueError(
            f"a SentencePiece vocabulary needs at least {LEAST_VOCABULARY} entries, "
            f"not {vocab_size}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_iter_sentences(documents),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            byte_fallback=True,
            character_coverage=0.9995,
            input_sentence_size=sample_texts,
            shuffle_input_sentence=False,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"SentencePiece could not be trained on this text: {error}") from None
    remove_tokenizer(folder)
    (folder / "spiece.model").write_bytes(model.getvalue())
    write_config(folder, {"tokenizer_class": "T5Tokenizer", "extra_ids": T5_SENTINELS, **T5_TOKENS})


def train_unigram(
    documents: Iterable[str], vocab_size: int, output_dir: str | Path
) -> FastTokenizer:
    """Trains as `train_sentencepiece`, and saves a `tokenizer.json`, the only file that
    transformers reads for UMT5.
    """
    from tokenizers import Tokenizer, decoders
    from transformers import T5Tokenizer

    folder = Path(output_dir)
    _train_t5_model(documents, vocab_size, folder, SAMPLE_TEXTS)
    converted: Any = T5Tokenizer.from_pretrained(str(folder)).backend_tokenizer
    values = json.loads(converted.to_str())
    values["model"]["byte_fallback"] = True  # Transformers' conversion leaves it out.
    backend: Any = Tokenizer.from_str(json.dumps(values))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), converted.decoder])
    return _save(backend, folder, T5_TOKENS)


def make_byte_tokenizer(
    documents: Iterable[str], vocab_size: int, output_dir: str | Path
) -> TransformersTokenizer:
    """Writes ByT5's tokenizer (Xue et al., 2021, arXiv:2105.13626), which no text trains.

    Padding is 0, the end of sequence 1, the unknown token 2; a byte b is b + 3; sentinels fill the
    vocabulary.
    """
    from transformers import ByT5Tokenizer

    least = BYTES + len(T5_TOKENS) + 1
    if vocab_size < least:
        raise ValueError(f"a vocabulary of bytes needs at least {least} entries, not {vocab_size}")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    remove_tokenizer(folder)
    ByT5Tokenizer(extra_ids=vocab_size - least + 1).save_pretrained(str(folder))
    tokenizer = _reload(folder, TransformersTokenizer)
    # Transformers writes a tokenizer that it has read with more settings than a new one.
    tokenizer.save(folder)
    return tokenizer


def _iter_sentences(documents: Iterable[str]) -> Iterator[str]:
    """Yields the lines of the documents, cut into pieces that the trainer accepts."""
    is_empty = True
    for document in documents:
        for line in document.splitlines():
            raw = line.encode("utf-8")
            for start in range(0, len(raw), SENTENCE_BYTES):
                piece = raw[start : start + SENTENCE_BYTES].decode("utf-8", "ignore")
                piece = piece.replace("\0", "")
                if piece and not piece.isspace():
                    is_empty = False
                    yield piece
    if is_empty:
        raise ValueError("cannot train a tokenizer: the corpus has no document with text")
