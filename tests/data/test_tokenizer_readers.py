"""A saved tokenizer gives the same ids in each library that reads it."""

from __future__ import annotations

import json

import pytest
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from shardzoo.data import load_tokenizer
from shardzoo.data.objectives.registry import find_objective
from shardzoo.data.tokenizers.sentencepiece_model import SentencePieceModel
from shardzoo.data.tokenizers.tokenizer import (
    SentencePieceTokenizer,
    check_readers,
    load_transformers_tokenizer,
    save_tokenizer,
)
from shardzoo.data.tokenizers.training import TOKENIZER_KINDS, train_tokenizer

WORDS = [
    *("one", "two", "three", "four", "five", "six", "seven", "eight"),
    *("nine", "ten", "red", "green", "blue", "black", "white"),
]
TEXTS = [" ".join(WORDS[place:] + WORDS[:place]) for place in range(len(WORDS))] * 3
ODD = [
    "a é 日本 😀",
    "two  spaces\tand\n",
    "one</s>two<unk> <pad>",
    "<extra_id_0> [MASK]",
    "**********'0')",
]


def train_model(folder, kind, **options):
    """Trains a SentencePiece model; returns its path."""
    from sentencepiece import SentencePieceTrainer

    settings = {"vocab_size": 330, "hard_vocab_limit": False, "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1,
                "model_type": kind, "byte_fallback": True, "minloglevel": 2, "character_coverage": 1.0}  # fmt: skip
    if not {**settings, **options}["byte_fallback"]:
        settings["vocab_size"] = 60
    SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, "< / s > u n k"]),
        model_prefix=str(folder / "tokenizer"),
        **{**settings, **options},
    )
    return folder / "tokenizer.model"


def ids_of_transformers(folder, texts):
    backend = load_transformers_tokenizer(folder)
    return backend(texts, add_special_tokens=False, split_special_tokens=True).input_ids


@pytest.mark.parametrize("added", [(), ("[NLU]", "two words")])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_models_are_saved_with_their_ids(
    kind, spaces, byte_fallback, added, tmp_path
):
    options = (
        {} if spaces else {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    )
    model = train_model(tmp_path, kind, byte_fallback=byte_fallback, **options)
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(added)
    save_tokenizer(tokenizer, tmp_path / "saved")
    texts = [*TEXTS[:4], *ODD]
    wanted = tokenizer.encode_batch(texts)
    assert isinstance(load_tokenizer(tmp_path / "saved"), SentencePieceTokenizer)
    assert load_tokenizer(tmp_path / "saved").encode_batch(texts) == wanted
    is_fast = (tmp_path / "saved/tokenizer.json").exists()
    assert is_fast or (kind == "unigram" and not byte_fallback)
    found = ids_of_transformers(tmp_path / "saved", texts)
    for text, ids, others in zip(texts, wanted, found, strict=True):
        if is_fast or "</s>" not in text:  # transformers' T5Tokenizer finds it in text
            assert tokenizer.are_equal(ids, others), (text, ids, others)
    back = load_transformers_tokenizer(tmp_path / "saved")
    assert back.decode(found[0]) == TEXTS[0]
    assert back.convert_ids_to_tokens(list(range(len(back)))) == tokenizer.tokens(
        tokenizer.vocab_size
    )
    save_tokenizer(load_tokenizer(tmp_path / "saved"), tmp_path / "again")
    for path in (tmp_path / "saved").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_trained_tokenizers_are_read_alike(kind, tmp_path):
    train_tokenizer(kind, TEXTS * 4, 400, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    check_readers(tokenizer, tmp_path, [*TEXTS[:2], "a é 日本 😀"])


def test_a_folder_of_another_family_is_read_as_transformers_does(tmp_path):
    train_model(tmp_path, "bpe")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 330}')
    assert load_tokenizer(tmp_path).encode_batch(ODD) == ids_of_transformers(tmp_path, ODD)


def test_an_old_export_of_a_bpe_model_is_refused(tmp_path):
    train_model(tmp_path, "bpe").rename(tmp_path / "spiece.model")
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 0}')
    with pytest.raises(ValueError, match="is a BPE model"):
        load_transformers_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    assert ids_of_transformers(tmp_path, ODD) == tokenizer.encode_batch(ODD)


def test_a_class_that_makes_another_tokenizer_is_replaced(tmp_path):
    """transformers' GPT2Tokenizer would split these words into letters."""
    backend = RustTokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    (tmp_path / "mine").mkdir()
    backend.save(str(tmp_path / "mine/tokenizer.json"))
    config = {"tokenizer_class": "BertTokenizer", "unk_token": "[UNK]"}
    (tmp_path / "mine/tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path / "mine")
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert ids_of_transformers(tmp_path / "saved", ["one two"]) == [tokenizer.encode("one two")]


def test_readers_that_disagree_are_an_error(tmp_path):
    train_tokenizer("bpe", TEXTS, 300, tmp_path / "a")
    train_tokenizer("bpe", [text.replace("o", "t") for text in TEXTS], 300, tmp_path / "b")
    with pytest.raises(ValueError, match="cannot be saved in"):
        check_readers(load_tokenizer(tmp_path / "a"), tmp_path / "b")


def save_words(folder, **config):
    backend = RustTokenizer(
        WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}, unk_token="<unk>")
    )
    backend.pre_tokenizer = Whitespace()
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "</s>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


ADDED = {
    "content": "<org>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}


@pytest.mark.parametrize(
    "config",
    [
        {"pad_token": "<pad>"},
        {"pad_token": {"content": "<pad>", "__type": "AddedToken"}, "mask_token": "<mask>"},
        {"additional_special_tokens": ["<a>", "<b>"], "bos_token": "<s>"},
        {"extra_special_tokens": ["<a>"], "pad_token": "<pad>"},
        {"image_token": "<image>", "pad_token": "<pad>"},
        {"added_tokens_decoder": {"5": {**ADDED, "special": False}}, "pad_token": "<pad>"},
        {"added_tokens_decoder": {"5": {**ADDED, "special": True}}},
    ],
)
def test_tokens_that_only_the_configuration_names_are_added(config, tmp_path):
    save_words(tmp_path, **config)
    theirs = load_transformers_tokenizer(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.tokens(ours.vocab_size) == theirs.convert_ids_to_tokens(list(range(len(theirs))))
    texts = ["one <org> two", "one<pad>two <s> <a>", "<image>"]
    assert ours.encode_batch(texts) == ids_of_transformers(tmp_path, texts)
    save_tokenizer(ours, tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").vocab_size == ours.vocab_size


@pytest.mark.parametrize("listed", [True, False])
def test_contradicting_special_tokens(listed, tmp_path):
    """The map counts, unless tokenizer_config.json lists all added tokens."""
    decoder = (
        {"added_tokens_decoder": {"1": {**ADDED, "content": "<s>", "special": True}}}
        if listed
        else {}
    )
    save_words(tmp_path, eos_token="<s>", **decoder)
    (tmp_path / "special_tokens_map.json").write_text(
        '{"eos_token": "</s>", "pad_token": {"content": "one"}}'
    )
    ours = load_tokenizer(tmp_path)
    theirs = load_transformers_tokenizer(tmp_path)
    assert ours.special["eos_token"] == theirs.eos_token_id == (1 if listed else 2)
    assert ours.special.get("pad_token") == theirs.pad_token_id


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"added_tokens.json": {"<x>": 55, "<y>": 56}}, "one<x>two"),
        (
            {
                "added_tokens.json": {"<x>": 55},
                "special_tokens_map.json": {"additional_special_tokens": ["<x>"]},
            },
            "<x>",
        ),
        ({"special_tokens_map.json": {"mask_token": "<mask>"}}, "one <mask>"),
    ],
)
def test_added_tokens_of_slow_folders(files, text, tmp_path):
    model = train_model(
        tmp_path,
        "unigram",
        byte_fallback=False,
        vocab_size=45,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )
    model.rename(tmp_path / "spiece.model")
    pieces = load_tokenizer(tmp_path / "spiece.model").vocab_size
    config = {
        "tokenizer_class": "T5Tokenizer",
        "extra_ids": 55 - pieces,
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.vocab_size == len(theirs)
    assert ours.encode(text) == ids_of_transformers(tmp_path, [text])[0]
    ours.add_tokens(["[NLU]"])
    assert ours.token_to_id("[NLU]") == len(theirs)
    save_tokenizer(ours, tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.tokens(again.vocab_size) == ours.tokens(ours.vocab_size)
    assert again.encode(text) == ours.encode(text)


def test_damaged_models_are_refused(tmp_path):
    whole = train_model(tmp_path, "bpe").read_bytes()
    for size in (1, 5, 100, len(whole) // 2):
        (tmp_path / "cut.model").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.model|no equivalent"):
            SentencePieceModel.from_file(tmp_path / "cut.model").to_fast()


@pytest.mark.parametrize("lower", [True, False])
def test_a_bare_vocabulary_of_bert_is_read(tmp_path, lower):
    """As LiBai's published data has it; the objectives of encoder-decoders end its texts with [SEP]."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "##lo", "world", "中", "国"]
    (tmp_path / "vocab.txt").write_text("\n".join(words if lower else [*words, "Hello"]))
    expected = [5 if lower else 10, 8, 9, 7]
    for path in (tmp_path / "vocab.txt", tmp_path):
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode("Hello中国 world") == expected
        assert "eos_token" not in tokenizer.special
    for objective, added in (("prefix-lm", 0), ("t5", 100)):
        tokenizer = load_tokenizer(tmp_path / "vocab.txt")
        find_objective(objective)().add_special_tokens(tokenizer)
        assert tokenizer.eos_token_id == 3
        saved = tmp_path / objective
        save_tokenizer(tokenizer, saved)
        for read in (load_tokenizer(saved), load_transformers_tokenizer(saved)):
            assert read.eos_token_id == 3
            assert len(read.encode("Hello中国 world", **add_no_tokens(read))) == 4
        assert load_tokenizer(saved).vocab_size == len(words) + (not lower) + added
    (tmp_path / "vocab.txt").write_text("one\ntwo\n")
    with pytest.raises(
        ValueError, match=r"vocab.txt holds no readable tokenizer: it has no \[PAD\]"
    ):
        load_tokenizer(tmp_path / "vocab.txt")


def add_no_tokens(reader):
    is_transformers = isinstance(reader, transformers.PreTrainedTokenizerBase)
    return {"add_special_tokens": False} if is_transformers else {}
