"""One interface over three kinds of tokenizers; GLM's special ids; T5's sentinels."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizers
from every_case import by_turns

from shardzoo.data import (
    Vocabulary,
    add_sentinels,
    glm_token_ids,
    glm_tokenizer,
    load_tokenizer,
    save_tokenizer,
    sentence_end_ids,
    sentinel_ids,
    split_sentences,
    train_byte_level_bpe,
    train_sentencepiece,
    train_tokenizer,
    train_wordpiece,
)
from shardzoo.data.tokenizers.files import has_tokenizer
from shardzoo.data.tokenizers.glm_tokens import find_glm_vocabulary, gmask_from_hf
from shardzoo.data.tokenizers.training import TOKENIZER_KINDS
from shardzoo.models.glm.text import GLMText


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
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [
        0,
        1,
        2,
        3,
        4,
    ]
    text = tokenizer("Thé of AND")
    assert tokenizer.decode(text.input_ids) == "[CLS] the of and [SEP]"


@pytest.mark.parametrize(
    "kind", ["tokenizer_dir", "spiece_dir", "wordpiece_dir", "trained_wordpiece_dir"]
)
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
    assert (
        tokenizer.decode([ids[0], *tokenizer.encode("the"), ids[1]])
        == "<extra_id_0>the<extra_id_1>"
    )
    assert (
        tokenizer.decode([ids[0], 1, *tokenizer.encode("the")], skip_special_tokens=True) == "the"
    )
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
    for kind in ("roberta-bpe", "glm-bpe"):
        with pytest.raises(ValueError, match="entries, not 260"):
            train_tokenizer(kind, ["a"], 260, tmp_path)
    with pytest.raises(ValueError, match="'xlnet' can be trained; use one of bpe, roberta"):
        train_tokenizer("xlnet", ["a"], 300, tmp_path)


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """A trained tokenizer's folder of each kind; with 320 entries, SentencePiece's sentinels apart."""
    root = tmp_path_factory.mktemp("kinds")
    for kind in TOKENIZER_KINDS:
        train_tokenizer(kind, texts, 320, root / kind)
    return root


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_transformers_loads_each_trained_kind(kind, trained, texts):
    from transformers import AutoTokenizer

    mine, reference = load_tokenizer(trained / kind), AutoTokenizer.from_pretrained(trained / kind)
    assert mine.vocab_size == len(reference)
    if kind != "wordpiece":  # it runs out of pairs
        assert mine.vocab_size == (420 if kind in ("sentencepiece", "unigram") else 320)
    assert reference.convert_ids_to_tokens(list(range(len(reference)))) == mine.tokens(
        len(reference)
    )
    for name in (
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "cls_token",
        "sep_token",
        "mask_token",
    ):
        assert mine.special.get(name) == getattr(reference, f"{name}_id")
    for text in texts[:5]:
        assert reference(text, add_special_tokens=False).input_ids == mine.encode(text)


def test_a_trained_wordpiece_tells_the_texts_of_a_pair_apart(trained):
    from transformers import AutoTokenizer

    pair = AutoTokenizer.from_pretrained(trained / "wordpiece")("of the", "the")
    assert pair.token_type_ids == sorted(pair.token_type_ids)
    assert set(pair.token_type_ids) == {0, 1}


@pytest.mark.parametrize(
    ("kind", "family"), [("bpe", "gpt2"), ("wordpiece", "bert"), ("roberta-bpe", "roberta")]
)
@pytest.mark.parametrize("values", [None, {"model_max_length": 512}])
def test_the_model_type_gives_special_tokens_that_no_file_names(
    kind, family, values, trained, tmp_path
):
    """The first published models, such as bert-base-uncased, name no special tokens beside their tokenizer.json."""
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(trained / kind / "tokenizer.json", folder)
    assert load_tokenizer(folder).special == {}  # nothing says what the tokens are for
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    if values:
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special == load_tokenizer(trained / kind).special
    save_tokenizer(tokenizer, tmp_path / "alone")  # as in a run's folder, without the model
    tokenizer.add_tokens(ADDED)
    save_tokenizer(tokenizer, tmp_path / "more")
    for copy in (tmp_path / "alone", tmp_path / "more"):
        reference = AutoTokenizer.from_pretrained(copy)
        assert load_tokenizer(copy).special == tokenizer.special
        assert all(
            getattr(reference, f"{name}_id") == index for name, index in tokenizer.special.items()
        )
    shutil.copy(folder / "config.json", tmp_path / "alone")
    assert type(AutoTokenizer.from_pretrained(tmp_path / "alone")) is type(
        AutoTokenizer.from_pretrained(folder)
    )


def test_robertas_tokens_have_robertas_places(trained):
    from transformers import AutoTokenizer, RobertaTokenizer

    reference = AutoTokenizer.from_pretrained(trained / "roberta-bpe")
    assert isinstance(reference, RobertaTokenizer)
    assert reference.convert_ids_to_tokens([0, 1, 2, 3, len(reference) - 1]) == [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
    ]
    ids = reference("of the <mask> of", "the").input_ids
    assert reference.decode(ids) == "<s>of the<mask> of</s></s>the</s>"
    assert ids.count(reference.mask_token_id) == 1
    tokenizer = load_tokenizer(trained / "roberta-bpe")
    for text in ("\0 \t\n", "中文 \U0001f600", "<mask></s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_trained_glm_tokenizer_has_the_special_tokens_last(trained):
    tokenizer = load_tokenizer(trained / "glm-bpe")
    tokens = glm_tokenizer(tokenizer, "gpt2")
    assert tokenizer.vocab_size == tokens.vocab_size == 320
    assert [tokens.sop, tokens.eop, tokens.cls, tokens.mask, tokens.gmask, tokens.dblock] == [
        311,
        312,
        313,
        314,
        317,
        319,
    ]
    assert tokens.eos == tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    text = GLMText(trained / "glm-bpe")  # finds the vocabulary by its tokens
    assert text.tokens == tokens
    ids = text.encode("the [MASK] of")
    assert (ids[0], ids.count(tokens.mask), ids[-1], text.decode(ids)) == (
        tokens.cls,
        1,
        tokens.eos,
        "the  of",
    )


def test_the_vocabularies_of_glm_are_found_by_their_tokens_alone(trained, spiece_dir):
    for kind, vocabulary in (("bpe", "gpt2"), ("wordpiece", "bert"), ("roberta-bpe", "roberta")):
        tokenizer = load_tokenizer(trained / kind)
        assert find_glm_vocabulary(tokenizer) is None
        glm_tokenizer(tokenizer, vocabulary)
        assert find_glm_vocabulary(tokenizer) == vocabulary
    chinese = load_tokenizer(spiece_dir / "spiece.model")
    glm_tokenizer(chinese, "chinese")
    assert find_glm_vocabulary(chinese) is None


ADDED = ["[NLU]", "[S2S]", "two words"]


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize(
    "added", [[], ["<extra_id_1>", "<extra_id_0>"], ADDED, [*ADDED, "<extra_id_100>"]]
)
def test_a_saved_tokenizer_has_the_added_tokens_everywhere(kind, added, trained, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(trained / kind)
    tokenizer.add_tokens(added)
    save_tokenizer(tokenizer, tmp_path / "saved")
    size = tokenizer.vocab_size
    back, reference = (
        load_tokenizer(tmp_path / "saved"),
        AutoTokenizer.from_pretrained(tmp_path / "saved"),
    )
    assert type(back) is type(tokenizer)
    assert back.tokens(size + 1) == [*tokenizer.tokens(size), None]
    assert reference.convert_ids_to_tokens(list(range(len(reference)))) == tokenizer.tokens(size)
    assert back.special == tokenizer.special
    assert back.encode("of the [NLU]") == tokenizer.encode("of the [NLU]")
    save_tokenizer(back, tmp_path / "again")
    for path in (tmp_path / "saved").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
        if not set(added) - set(load_tokenizer(trained / kind).tokens(size)):
            assert (
                trained / kind / path.name
            ).read_bytes() == path.read_bytes()  # nothing is new: a copy


def test_a_saved_model_file_and_a_saved_transformers_folder(spiece_dir, wordpiece_dir, tmp_path):
    bare = load_tokenizer(
        spiece_dir / "spiece.model"
    )  # as T5 publishes it: no sentinels, although the folder has them
    save_tokenizer(bare, tmp_path / "bare")
    assert load_tokenizer(tmp_path / "bare").vocab_size == bare.vocab_size
    add_sentinels(bare, 7)
    glm_tokenizer(bare, "chinese")
    save_tokenizer(bare, tmp_path / "glm")
    assert load_tokenizer(tmp_path / "glm").tokens(bare.vocab_size) == bare.tokens(bare.vocab_size)
    shutil.copy(spiece_dir / "spiece.model", tmp_path / "mine.model")
    save_tokenizer(load_tokenizer(tmp_path / "mine.model"), tmp_path / "named")
    assert load_tokenizer(tmp_path / "named").encode("the") == load_tokenizer(spiece_dir).encode(
        "the"
    )
    save_tokenizer(load_tokenizer(tmp_path / "named"), tmp_path / "named")  # onto itself
    for number, order in enumerate(
        (["[R]", "sentinels"], ["sentinels", "[R]"], ["<extra_id_0>", "[R]", "sentinels"])
    ):
        mixed = load_tokenizer(spiece_dir / "spiece.model")
        for token in order:
            _ = add_sentinels(mixed, 9) if token == "sentinels" else mixed.add_tokens([token])
        save_tokenizer(mixed, tmp_path / f"order{number}")
        assert load_tokenizer(tmp_path / f"order{number}").tokens(mixed.vocab_size) == mixed.tokens(
            mixed.vocab_size
        )
    (tmp_path / "old").mkdir()
    (tmp_path / "old/vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb")
    (tmp_path / "old/tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    old = load_tokenizer(tmp_path / "old")
    old.add_tokens(["[NEW]"])
    save_tokenizer(old, tmp_path / "new")
    assert load_tokenizer(tmp_path / "new").tokens(9) == [*old.tokens(8), None]


def test_the_digest_is_that_of_the_tokens_in_any_format(trained, tmp_path):
    from transformers import AutoTokenizer

    pieces = load_tokenizer(trained / "sentencepiece")
    AutoTokenizer.from_pretrained(trained / "sentencepiece").save_pretrained(tmp_path)
    assert not (tmp_path / "spiece.model").exists()
    vocabulary = Vocabulary.from_tokenizer(pieces)
    assert Vocabulary.from_tokenizer(load_tokenizer(tmp_path)) == vocabulary
    stored = b"".join(
        len(raw := token.encode()).to_bytes(4, "little") + raw for token in pieces.tokens(420)
    )
    assert vocabulary == Vocabulary(420, hashlib.sha256(stored).hexdigest())
    others = {
        kind: Vocabulary.from_tokenizer(load_tokenizer(trained / kind)).sha256
        for kind in TOKENIZER_KINDS
    }
    assert others["unigram"] == others["sentencepiece"]  # the same pieces in another format
    assert len(set(others.values())) == len(TOKENIZER_KINDS) - 1


def test_a_vocabulary_begins_those_that_extend_it(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    before = Vocabulary.from_tokenizer(tokenizer)
    assert before.begins(tokenizer)
    tokenizer.add_tokens(["<extra_id_0>"])
    after = Vocabulary.from_tokenizer(tokenizer)
    assert before.begins(tokenizer)
    assert not after.begins(load_tokenizer(tokenizer_dir))
    other = load_tokenizer(tokenizer_dir)
    other.add_tokens(["<extra_id_1>"])
    assert not after.begins(other)
    assert Vocabulary.from_tokenizer(tokenizer, before.size) == before


def test_holes_and_token_borders_change_the_digest(tmp_path):
    def digest(ids: dict[str, int], size: int | None = None) -> str:
        rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="A"))
        rust.save(str(tmp_path / "tokenizer.json"))
        return Vocabulary.from_tokenizer(load_tokenizer(tmp_path), size).sha256

    cases = [({"A": 0, "bc": 1}, None), ({"A": 0, "b": 1, "c": 2}, None), ({"Ab": 0, "A": 1}, None),
             ({"A": 0, "bc": 2}, None), ({"A": 0, "": 1, "bc": 2}, None), ({"A": 0, "bc": 1}, 3)]  # fmt: skip
    assert len({digest(*case) for case in cases}) == len(cases)


def test_a_large_vocabulary_is_quick_to_identify(tmp_path):
    rust = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"word{n}": n for n in range(250_000)}, unk_token="word0")
    )
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    start = time.process_time()
    Vocabulary.from_tokenizer(tokenizer)
    assert time.process_time() - start < 1


def test_another_tokenizer_in_the_folder_is_replaced(trained, texts, tmp_path):
    for kind in ("bpe", "sentencepiece", "roberta-bpe", "sentencepiece", "wordpiece"):
        expected = load_tokenizer(trained / kind).tokens(50)
        assert train_tokenizer(kind, texts, 320, tmp_path / "trained").tokens(50) == expected
        assert load_tokenizer(tmp_path / "trained").tokens(50) == expected
        save_tokenizer(load_tokenizer(trained / kind), tmp_path / "saved")
        assert load_tokenizer(tmp_path / "saved").tokens(50) == expected
    (tmp_path / "saved/config.json").write_text("{}")
    save_tokenizer(load_tokenizer(trained / "bpe"), tmp_path / "saved")
    assert (tmp_path / "saved/config.json").exists()  # a model's file


@pytest.mark.parametrize("kind", by_turns(TOKENIZER_KINDS, 4))
def test_training_twice_gives_the_same_tokenizer(kind, trained, texts, tmp_path):
    """Also in another process: the library's WordPiece numbers its letters at random."""
    code = (
        "import json, sys; from shardzoo.data import train_tokenizer; "
        "train_tokenizer(sys.argv[1], iter(json.load(sys.stdin)), 320, sys.argv[2])"
    )
    subprocess.run(
        [sys.executable, "-c", code, kind, str(tmp_path)],
        input=json.dumps(texts),
        text=True,
        check=True,
    )
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (trained / kind / path.name).read_bytes()


def test_wordpiece_has_every_letter_and_no_other_special_tokens(texts, tmp_path):
    tokenizer = train_wordpiece([*texts, "Zürich ABC\u4f60x"], 200, tmp_path)
    vocabulary = tokenizer.backend.get_vocab()
    assert {"z", "u", "##r", "##h", "\u4f60", "x"} <= vocabulary.keys()
    assert not {"##\u4f60", "##.", "ü"} & vocabulary.keys()
    special = [
        token.content
        for token in tokenizer.backend.get_added_tokens_decoder().values()
        if token.special
    ]
    assert special == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.decode(tokenizer.encode("Zurich abc")) == "zurich abc"


def test_unigram_encodes_as_the_sentencepiece_it_comes_from(trained, tmp_path):
    from transformers import AutoTokenizer

    unigram, sentencepiece = (
        load_tokenizer(trained / kind) for kind in ("unigram", "sentencepiece")
    )
    assert Vocabulary.from_tokenizer(unigram) == Vocabulary.from_tokenizer(sentencepiece)
    for text in ("the of", "Zürich 你好 🙂 of"):
        assert unigram.encode(text) == sentencepiece.encode(text)
        assert unigram.decode(unigram.encode(text)) == text
    folder = shutil.copytree(trained / "unigram", tmp_path / "umt5")
    (folder / "config.json").write_text('{"model_type": "umt5"}')
    assert AutoTokenizer.from_pretrained(folder)("of").input_ids == [*unigram.encode("of"), 1]


def test_bytes_are_byt5s(trained):
    tokenizer = load_tokenizer(trained / "bytes")
    assert tokenizer.encode("né</s>") == [byte + 3 for byte in "né</s>".encode()]
    assert sentinel_ids(tokenizer) == tuple(range(259, 320))
    assert has_tokenizer(trained / "bytes")
    with pytest.raises(ValueError, match="at least 260 entries, not 259"):
        train_tokenizer("bytes", [], 259, trained / "none")
