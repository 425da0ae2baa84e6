"""One interface over three kinds of tokenizers; GLM's special ids; T5's sentinels."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from shardzoo.data import (
    add_sentinels,
    glm_token_ids,
    glm_tokenizer,
    load_tokenizer,
    sentence_end_ids,
    sentinel_ids,
    split_sentences,
    train_byte_level_bpe,
    train_sentencepiece,
    train_wordpiece,
)
from shardzoo.data.tokenizers.glm_tokens import gmask_from_hf


@pytest.fixture(scope="module")
def spiece_dir(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spiece")
    train_sentencepiece(texts, 320, folder)
    return folder


@pytest.fixture
def wordpiece_dir(tmp_path):
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "wp")
    return tmp_path / "wp"


@pytest.fixture
def trained_wordpiece_dir(texts, tmp_path):
    train_wordpiece(texts, 150, tmp_path / "trained")
    return tmp_path / "trained"


def test_wordpiece_puts_the_tokens_of_bert_around_a_text(trained_wordpiece_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained_wordpiece_dir)
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    text = tokenizer("Thé of AND")
    assert tokenizer.decode(text.input_ids) == "[CLS] the of and [SEP]"


@pytest.mark.parametrize("kind", ["tokenizer_dir", "spiece_dir", "wordpiece_dir", "trained_wordpiece_dir"])
def test_the_interface_agrees_with_transformers(kind, request):
    from transformers import AutoTokenizer

    folder = request.getfixturevalue(kind)
    mine, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert mine.vocab_size == len(reference)
    for name in ("eos_token", "pad_token", "unk_token", "cls_token", "mask_token"):
        assert mine.special.get(name) == getattr(reference, f"{name}_id")
    for text in ("the of and.", "a b c", "have"):
        ids = reference(text, add_special_tokens=False).input_ids
        assert mine.encode(text) == ids
        assert mine.decode(ids) == reference.decode(ids)
        assert [mine.id_to_token(index) for index in ids] == reference.convert_ids_to_tokens(ids)
    for index in (0, 5, mine.vocab_size - 1):
        assert mine.token_to_id(mine.id_to_token(index)) == index
    assert mine.token_to_id("no such token") is None
    with pytest.raises(ValueError, match=f"{mine.vocab_size} is not in the vocabulary"):
        mine.id_to_token(mine.vocab_size)
    copy = pickle.loads(pickle.dumps(mine))
    for text in ("the of", "<|endoftext|> </s> [SEP]"):
        assert copy.encode(text) == mine.encode(text)


def test_byte_level_bpe_brings_any_text_back(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    for text in ["", "\0", " \t\n", "中文 \U0001f600", "<|endoftext|>", "é" * 50]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_spells_unknown_characters_in_bytes(spiece_dir):
    tokenizer = load_tokenizer(spiece_dir)
    assert tokenizer.decode(tokenizer.encode("the 中 \U0001f600")) == "the 中 \U0001f600"
    assert tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id == 0


def test_sentinels_of_sentencepiece_are_where_t5_has_them(spiece_dir):
    from transformers import AutoTokenizer

    tokenizer, reference = load_tokenizer(spiece_dir), AutoTokenizer.from_pretrained(spiece_dir)
    ids = sentinel_ids(tokenizer)
    assert len(ids) == 100
    assert list(ids) == reference.convert_tokens_to_ids([f"<extra_id_{k}>" for k in range(100)])
    assert ids[0] == tokenizer.vocab_size - 1
    assert tokenizer.decode([ids[0], *tokenizer.encode("the"), ids[1]]) == "<extra_id_0>the<extra_id_1>"
    assert tokenizer.decode([ids[0], 1, *tokenizer.encode("the")], skip_special_tokens=True) == "the"
    # A bare model file, as T5 publishes it, has none; they go behind it.
    bare = load_tokenizer(spiece_dir / "spiece.model")
    with pytest.raises(ValueError, match="add_sentinels"):
        sentinel_ids(bare)
    assert add_sentinels(bare) == ids == add_sentinels(bare)


def test_sentinels_of_bpe_are_appended_once(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    size = tokenizer.vocab_size
    ids = add_sentinels(tokenizer, 10)
    assert ids == tuple(range(size + 9, size - 1, -1))
    assert add_sentinels(tokenizer, 10) == ids
    assert tokenizer.vocab_size == size + 10
    assert tokenizer.encode("<extra_id_0>") != [ids[0]]  # text that spells a sentinel stays text


def test_the_sentinels_of_a_published_mt5_keep_their_ids(texts, tmp_path):
    """Its SentencePiece model has them as pieces with a leading space."""
    from sentencepiece import SentencePieceTrainer

    pieces = [f"▁<extra_id_{number}>" for number in range(99, -1, -1)]
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(tmp_path / "spiece"), vocab_size=420, hard_vocab_limit=False,
        user_defined_symbols=pieces, minloglevel=2,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "spiece.model")
    size = tokenizer.vocab_size
    ids = add_sentinels(tokenizer)
    assert [tokenizer.id_to_token(index) for index in ids] == pieces[::-1]
    assert tokenizer.vocab_size == size > max(ids)


def test_gaps_in_the_sentinels_are_named(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.add_tokens(["<extra_id_0>", "<extra_id_2>"])
    with pytest.raises(ValueError, match="<extra_id_1> is missing"):
        sentinel_ids(tokenizer)


# Table of the GLM specification, section 4.
ROLES = ("eos", "cls", "sep", "mask", "unk", "sop", "eop", "gmask", "smask", "dblock")
GLM_IDS = {
    "gpt2": (50257, [50256, 50259, 50261, 50260, 50262, 50257, 50258, 50263, 50264, 50265]),
    "bert": (30522, [0, 101, 102, 103, 100, 30522, 30523, 30524, 30525, 30526]),
    "roberta": (50265, [2, 0, 2, 50264, 3, 50265, 50266, 50267, 50268, 50269]),
    "chinese": (50000, [50000, 50002, 50001, 50003, 50004, 50006, 50007, 50009, 50008, 50010]),
    "chinese-10b": (50000, [50000, 50002, 50001, 50003, 50004, 50006, 50007, 50007, 50008, 50009]),
}
PADDED = {"gpt2": 50304, "bert": 30592, "roberta": 50304, "chinese": 50048, "chinese-10b": 50048}


@pytest.mark.parametrize("family", list(GLM_IDS))
def test_glm_ids_are_those_of_the_released_models(family):
    size, expected = GLM_IDS[family]
    own = {role: index for role, index in zip(ROLES, expected, strict=True) if index < size}
    tokens = glm_token_ids(size, family, own)
    assert [getattr(tokens, role) for role in ROLES] == expected
    assert tokens.pad == tokens.eos
    assert tokens.padded_vocab_size() == PADDED[family]


def test_glm_tokens_are_put_on_a_tokenizer_once(tokenizer_dir, wordpiece_dir, spiece_dir):
    bpe = load_tokenizer(tokenizer_dir)
    size = bpe.vocab_size
    tokens = glm_tokenizer(bpe, "gpt2")
    assert (tokens.eos, tokens.sop, tokens.gmask, bpe.vocab_size) == (0, size, size + 6, size + 9)
    assert bpe.id_to_token(tokens.gmask) == "[gMASK]"
    assert glm_tokenizer(bpe, "gpt2") == tokens
    wordpiece = load_tokenizer(wordpiece_dir)
    tokens = glm_tokenizer(wordpiece, "bert")
    assert (tokens.eos, tokens.cls, tokens.mask, tokens.sop) == (0, 2, 4, 9)
    assert glm_tokenizer(wordpiece, "bert") == tokens
    with pytest.raises(ValueError, match=r"not a bert vocabulary: it has no \[PAD\]"):
        glm_tokenizer(load_tokenizer(tokenizer_dir), "bert")
    with pytest.raises(ValueError, match="unknown GLM vocabulary"):
        glm_token_ids(10, "xlnet")


@pytest.mark.parametrize("family", ["chinese", "chinese-10b"])
def test_glm_chinese_ids_keep_their_hole(family, spiece_dir):
    tokenizer = load_tokenizer(spiece_dir / "spiece.model")
    size = tokenizer.vocab_size
    tokens = glm_tokenizer(tokenizer, family)
    assert tokenizer.id_to_token(size + 5) == "<|unused_5|>"
    assert tokenizer.id_to_token(tokens.sop) == "<|startofpiece|>"
    assert tokenizer.id_to_token(tokens.eop) == "<|endofpiece|>"
    assert (tokens.gmask == tokens.eop) == (family == "chinese-10b")
    assert tokenizer.vocab_size == tokens.vocab_size
    assert glm_tokenizer(tokenizer, family) == tokens


def test_the_exported_chinese_gmask_maps_to_the_trained_one():
    ids = np.array([1, 50009, 50007])
    assert gmask_from_hf(ids).tolist() == [1, 50007, 50007]
    assert ids.tolist() == [1, 50009, 50007]


def test_sentences_join_to_the_text_and_end_at_marks():
    text = 'He said "stop." Then 3.14 came! Why?\nNew line\n\n他来了。真的吗？“好。”是 end'
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert [s.strip() for s in sentences] == [
        'He said "stop."', "Then 3.14 came!", "Why?", "New line", "他来了。", "真的吗？", "“好。”", "是 end",
    ]  # fmt: skip
    assert split_sentences("") == []


def test_sentence_end_tokens_are_the_marks(tokenizer_dir, spiece_dir):
    for folder in (tokenizer_dir, spiece_dir):
        tokenizer = load_tokenizer(folder)
        ends = sentence_end_ids(tokenizer)
        found = {tokenizer.id_to_token(int(i)).strip("Ġ▁") for i in np.flatnonzero(ends)}
        assert "." in found
        assert found <= {".", "?", "!", ";", ":", "Ċ", "<0x0A>", "。", "？", "！", "；", "…"}


def test_what_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "x.model").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for name, reason in [
        ("tokenizer.json", "tokenizer.json has no model"),
        ("x.model", "x.model holds no readable tokenizer"),
        ("empty", "holds no readable tokenizer"),
        ("missing", "does not exist"),
    ]:
        with pytest.raises(ValueError, match=reason):
            load_tokenizer(tmp_path / name)


def test_too_little_to_train_on_is_named(tmp_path):
    with pytest.raises(ValueError, match="at least 257 entries, not 256"):
        train_byte_level_bpe(["a"], 256, tmp_path)
    with pytest.raises(ValueError, match="more than its 5 special tokens, not 5"):
        train_wordpiece(["a"], 5, tmp_path)
    with pytest.raises(ValueError, match="at least 260 entries"):
        train_sentencepiece(["a"], 100, tmp_path)
    for train in (train_byte_level_bpe, train_sentencepiece):
        with pytest.raises(ValueError, match="no document with text"):
            train([], 300, tmp_path)
