"""Defines GLM's special tokens for each of its five base vocabularies, with the ids of the released
models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .tokenizer import Tokenizer

GLMVocabulary = Literal["bert", "gpt2", "roberta", "chinese", "chinese-10b"]
DEFAULT_VOCABULARY: GLMVocabulary = "gpt2"

# Order in which the reference appends tokens to a base vocabulary; the last three only if they are
# switched on.
_APPENDED: dict[GLMVocabulary, tuple[str, ...]] = {
    "bert": ("sop", "eop", "gmask", "smask", "dblock"),
    "gpt2": ("sop", "eop", "cls", "mask", "sep", "unk", "gmask", "smask", "dblock"),
    "roberta": ("sop", "eop", "gmask", "smask", "dblock"),
}
_OWN: dict[GLMVocabulary, dict[str, str]] = {  # roles of tokens of the base vocabulary
    "bert": {"eos": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "unk": "[UNK]"},
    "gpt2": {"eos": "<|endoftext|>"},
    "roberta": {"eos": "</s>", "cls": "<s>", "sep": "</s>", "mask": "<mask>", "unk": "<unk>"},
}
TOKEN_NAMES = {
    "sop": "<|startofpiece|>",
    "eop": "<|endofpiece|>",
    "cls": "[CLS]",
    "mask": "[MASK]",
    "sep": "[SEP]",
    "unk": "[UNK]",
    "gmask": "[gMASK]",
    "smask": "[sMASK]",
    "dblock": "[dBLOCK]",
    "eos": "<|endoftext|>",
}
_HOLE = "<|unused_5|>"  # the id that the Chinese vocabularies leave out
# Offsets from the size of the Chinese SentencePiece vocabulary (50000). The reference gave sop and
# eop the counter + 1 and + 2, but moved the counter by 3 only after a fix; the 10B model came
# before the fix, so its gMASK is the same token as eop.
_CHINESE = {"eos": 0, "sep": 1, "cls": 2, "mask": 3, "unk": 4, "sop": 6, "eop": 7}
_CHINESE_TASKS = {
    "chinese": {"smask": 8, "gmask": 9, "dblock": 10},
    "chinese-10b": {"gmask": 7, "smask": 8, "dblock": 9},
}
# gMASK's id in transformers' copy of glm-10b-chinese. Its embedding row is a copy of eop's.
HF_CHINESE_10B_GMASK = 50009


@dataclass(frozen=True)
class GLMTokens:
    """Ids of GLM's special tokens. `pad` equals `eos` in every released model."""

    eos: int
    cls: int
    sep: int
    mask: int
    unk: int
    sop: int
    eop: int
    gmask: int
    smask: int
    dblock: int
    vocab_size: int

    @property
    def pad(self) -> int:
        return self.eos

    def padded_vocab_size(self, multiple: int = 128) -> int:
        """Returns the rows of the released embeddings: the vocabulary rounded up, by default to a
        multiple of 128.
        """
        return -(-self.vocab_size // multiple) * multiple


def glm_token_ids(
    base_size: int, family: GLMVocabulary, base_ids: dict[str, int] | None = None
) -> GLMTokens:
    """Returns the ids for a base vocabulary of `base_size` entries, by the reference's rule for its
    family.

    `base_ids` are the ids of the roles that tokens of the base vocabulary have (see
    `glm_tokenizer`); "chinese" and "chinese-10b" have none. With "chinese-10b", gMASK has eop's id,
    as in the model's training.
    """
    if family in _CHINESE_TASKS:
        offsets = {**_CHINESE, **_CHINESE_TASKS[family]}
        return GLMTokens(
            **{role: base_size + offset for role, offset in offsets.items()},
            vocab_size=base_size + max(offsets.values()) + 1,
        )
    _check_family(family)
    ids = dict(base_ids or {})
    missing = [role for role in _OWN[family] if role not in ids]
    if missing:
        raise ValueError(f"the {family} vocabulary must have tokens for {', '.join(missing)}")
    appended = {role: base_size + place for place, role in enumerate(_APPENDED[family])}
    return GLMTokens(**ids, **appended, vocab_size=base_size + len(appended))


def glm_tokenizer(tokenizer: Tokenizer, family: GLMVocabulary) -> GLMTokens:
    """Appends GLM's special tokens to a base tokenizer, unless it has them, and returns their ids.

    Raises:
        ValueError: The vocabulary is not of that family.
    """
    if family in _CHINESE_TASKS:
        base = _find_base_size(tokenizer, set(TOKEN_NAMES.values()))
        tokens = glm_token_ids(base, family)
        names_by_id: dict[int, str] = {}
        for role, name in TOKEN_NAMES.items():
            # In the 10B model gMASK is the same token as eop, whose name it has.
            if role != "gmask" or family == "chinese":
                names_by_id[getattr(tokens, role)] = name
        appended: list[str] = []
        for index in range(base, tokens.vocab_size):
            appended.append(names_by_id.get(index, f"<|unused_{index - base}|>"))
        tokenizer.add_tokens(appended)
        return tokens
    own = _find_own_ids(tokenizer, family)
    names = [TOKEN_NAMES[role] for role in _APPENDED[family]]
    base = _find_base_size(tokenizer, set(names))
    tokens = glm_token_ids(base, family, own)
    tokenizer.add_tokens(names)
    return tokens


def find_glm_vocabulary(tokenizer: Tokenizer) -> GLMVocabulary | None:
    """Returns the vocabulary that a tokenizer's special tokens belong to.

    The result is None unless it has all of them.

    The Chinese vocabularies cannot be told apart by their tokens, and are not found.
    """
    for family, appended in _APPENDED.items():
        names = [*_OWN[family].values(), *(TOKEN_NAMES[role] for role in appended)]
        has_all = all(tokenizer.token_to_id(name) is not None for name in names)
        is_chinese = bool(tokenizer.token_to_id(_HOLE))
        if has_all and not is_chinese:
            return family
    return None


def _check_family(family: str) -> None:
    known = [*_APPENDED, *_CHINESE_TASKS]
    if family not in known:
        raise ValueError(f"unknown GLM vocabulary {family!r}; use one of {', '.join(known)}")


def _find_own_ids(tokenizer: Tokenizer, family: GLMVocabulary) -> dict[str, int]:
    """Returns the ids of the roles of tokens of the base vocabulary.

    Raises:
        ValueError: The base vocabulary is of another family.
    """
    _check_family(family)
    ids: dict[str, int] = {}
    missing: list[str] = []
    for role, token in _OWN[family].items():
        index = tokenizer.token_to_id(token)
        if index is None:
            missing.append(token)
        else:
            ids[role] = index
    if missing:
        fitting: list[str] = []
        for name, own in _OWN.items():
            if None not in map(tokenizer.token_to_id, own.values()):
                fitting.append(name)
        advice = " or ".join(fitting)
        if not fitting:
            advice = "chinese if it is a SentencePiece model, or another tokenizer"
        raise ValueError(
            f"this is not a {family} vocabulary: it has no {', '.join(missing)}; "
            f"use the vocabulary {advice}"
        )
    return ids


def _find_base_size(tokenizer: Tokenizer, appended: set[str]) -> int:
    """Returns the vocabulary size without the tokens that an earlier call appended."""
    size = tokenizer.vocab_size
    while size > 0:
        last = tokenizer.id_to_token(size - 1)
        if last not in appended and not last.startswith("<|unused_"):
            break
        size -= 1
    return size


def gmask_from_hf(ids):
    """Maps glm-10b-chinese ids (an int array) from transformers' vocabulary to the reference's.

    In transformers' copy gMASK is 50009, whose vector equals eop's (50007); the reference uses
    50007 for both. There is no inverse: 50007 may be either.
    """
    mapped = ids.copy()
    mapped[mapped == HF_CHINESE_10B_GMASK] = HF_CHINESE_10B_GMASK - 2
    return mapped
