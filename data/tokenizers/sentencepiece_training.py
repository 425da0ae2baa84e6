"""Train SentencePiece unigram tokenizers (T5's kind)."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from .sentinels import T5_SENTINELS
from .tokenizer import SentencePieceTokenizer, load_tokenizer

LEAST_VOCABULARY = 256 + 3 + 1  # bytes, special pieces, one more
SENTENCE_BYTES = 4000  # the trainer leaves out longer pieces of text (its limit is 4192 bytes)


def train_sentencepiece(
    documents: Iterable[str],
    vocab_size: int,
    output_dir: str | Path,
    *,
    sample_texts: int = 1_000_000,
) -> SentencePieceTokenizer:
    """SentencePiece unigram over `documents`, saved as `spiece.model` with T5's special ids: pad 0, end 1,
    unknown 2.

    The sentinels `<extra_id_0>` … are pieces of the vocabulary, the first one last as in T5. Bytes that no
    piece covers are spelt out, so every text can be encoded; white space is normalised, as SentencePiece
    does.

    Args:
        vocab_size: pieces, without the sentinels.
        sample_texts: at most so many pieces of text are looked at.
    """
    from sentencepiece import SentencePieceTrainer

    if vocab_size < LEAST_VOCABULARY:
        raise ValueError(f"a SentencePiece vocabulary needs at least {LEAST_VOCABULARY} entries, not {vocab_size}")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_sentences(documents),
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
    (folder / "spiece.model").write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "T5Tokenizer",
        "extra_ids": T5_SENTINELS,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, SentencePieceTokenizer)
    return loaded


def _sentences(documents: Iterable[str]) -> Iterator[str]:
    count = 0
    for document in documents:
        for line in document.splitlines():
            raw = line.encode("utf-8")
            for start in range(0, len(raw), SENTENCE_BYTES):
                piece = raw[start : start + SENTENCE_BYTES].decode("utf-8", "ignore").replace("\0", "")
                if piece and not piece.isspace():
                    count += 1
                    yield piece
    if count == 0:
        raise ValueError("cannot train a tokenizer: the corpus has no document with text")
