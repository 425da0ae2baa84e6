"""Gives the tokenizers that the zoo reads one interface: Hugging Face `tokenizers`, SentencePiece,
`transformers`.
"""

from __future__ import annotations

import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...files.strict_json import read_json_object
from ...files.working_copies import find_source, writing
from .files import (
    TOKENIZER_FILES,
    check_tokenizer_file,
    check_tokenizer_folder,
    library_errors,
    remove_tokenizer,
)
from .sentencepiece_model import BPE, SentencePieceModel

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
T5_SENTINELS = 100
# What transformers returns for a folder without a vocabulary has at most this many ordinary tokens.
FALLBACK_TOKENS = 1
# A text that a tokenizer must be able to encode when it is loaded.
PROBE = "A word, \u4f60"
# Texts that all readers of a saved tokenizer must encode alike, besides a sample of its tokens.
PROBES = (
    PROBE,
    "two  spaces,\ta tab\nand (a new) line",
    "na\u00efve \u00c4pfel, it's 123,456.78 % \u2026",
    "\u65e5\u672c\u8a9e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f600",
)
SAMPLED_TOKENS = 512
SAMPLED_PER_TEXT = 32
# Two segmentations of a unigram model whose log-probabilities differ less are equally likely.
TIE = 1e-3
FAST_CLASS = "PreTrainedTokenizerFast"
TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
TOKENIZER_JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
VOCABULARY = "vocab.txt"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Files that name the class of a folder's tokenizer, or its model, which determines the class.
NAMES_CLASS = (CONFIG, "config.json")
SPECIAL_MAP = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
SIDE_FILES = (CONFIG, SPECIAL_MAP, ADDED_FILE, "chat_template.jinja")
# In a tokenizer_config.json: the SentencePiece model from which the folder's tokenizer.json was
# made. The zoo reads the model itself, transformers the tokenizer.json.
MADE_FROM = "tokenizer_json_made_from"


class Tokenizer(ABC):
    """Converts text to token ids and back.

    `encode` adds no special tokens, and treats a spelled-out one as text.

    Attributes:
        path: The file or folder that it was read from.
        vocab_size: Number of ids, including added tokens; every id is below it.
        special: Ids of the special tokens by their Hugging Face name ("eos_token": 0, …).
    """

    path: Path
    vocab_size: int
    special: dict[str, int]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    @abstractmethod
    def token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def id_to_token(self, index: int) -> str: ...

    @abstractmethod
    def add_tokens(self, tokens: Sequence[str]) -> None:
        """Appends special tokens to the vocabulary; existing ones keep their ids."""

    def set_special_token(self, name: str, index: int) -> None:
        """Gives a token of the vocabulary a role, such as "eos_token"."""
        self.special[name] = index

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the files of `save_tokenizer` to an existing folder."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def are_equal(self, ids: Sequence[int], others: Sequence[int]) -> bool:
        """Returns whether two encodings of a text are the same."""
        return list(ids) == list(others)

    def tokens(self, size: int) -> list[str | None]:
        """Returns the tokens of the ids below `size`; None for an id that has none."""
        found: list[str | None] = [None] * size
        for index in range(min(size, self.vocab_size)):
            with suppress(ValueError):  # vocabularies may have holes
                found[index] = self.id_to_token(index)
        return found

    def special_id(self, name: str) -> int:
        """Returns the id of a special token such as "eos_token".

        Raises:
            ValueError: The tokenizer has none.
        """
        if name not in self.special:
            known = ", ".join(f"{key}={value}" for key, value in self.special.items()) or "none"
            raise ValueError(f"this tokenizer has no {name}; its special tokens are {known}")
        return self.special[name]

    def special_tokens(self) -> dict[str, str]:
        """Returns the special tokens by Hugging Face name, as tokenizer_config.json has them."""
        return {name: self.id_to_token(index) for name, index in self.special.items()}

    @property
    def eos_token_id(self) -> int:
        return self.special_id("eos_token")

    @property
    def pad_token_id(self) -> int:
        return self.special_id("pad_token")


class FastTokenizer(Tokenizer):
    """Reads a `tokenizer.json` with the Rust library `tokenizers`, without transformers."""

    def __init__(
        self,
        path: str | Path,
        special_tokens: dict[str, str] | None = None,
        added: Sequence[Any] = (),
    ) -> None:
        """Reads a file.

        Args:
            special_tokens: The special tokens by their Hugging Face name.
            added: Tokens (`tokenizers.AddedToken`) that the files beside it name.
        """
        from tokenizers import Tokenizer as RustTokenizer

        self.path = Path(path)
        check_tokenizer_file(self.path)
        with library_errors(self.path):
            self.backend = RustTokenizer.from_file(str(path))
            # "<|endoftext|>" inside a document is text, not its end.
            self.backend.encode_special_tokens = True
            self.backend.no_padding()
            self.backend.no_truncation()
            self.backend.add_tokens(list(added))
            self.backend.encode_batch_fast([PROBE], add_special_tokens=False)
        self.vocab_size = self._count_ids()
        self.stored_size = self.vocab_size
        self.special = {}
        for name, token in (special_tokens or {}).items():
            index = self.backend.token_to_id(token)
            if index is not None:
                self.special[name] = index

    def _count_ids(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "vocab_size": self.vocab_size,
            "stored_size": self.stored_size,
            "special": self.special,
            "backend": self.backend.to_str(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        from tokenizers import Tokenizer as RustTokenizer

        self.path = state["path"]
        self.vocab_size = state["vocab_size"]
        self.stored_size = state["stored_size"]
        self.special = state["special"]
        self.backend = RustTokenizer.from_str(state["backend"])
        # The library's serialized state does not hold this setting.
        self.backend.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with library_errors(self.path):
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def add_tokens(self, tokens: Sequence[str]) -> None:
        from tokenizers import AddedToken

        added = [AddedToken(token, special=True, normalized=False) for token in tokens]
        self.backend.add_special_tokens(added)
        self.vocab_size = self._count_ids()

    def id_to_token(self, index: int) -> str:
        token = self.backend.id_to_token(index)
        if token is None:
            raise ValueError(f"token id {index} is not in the vocabulary of {self.vocab_size}")
        return token

    def tokens(self, size: int) -> list[str | None]:
        return list(map(self.backend.id_to_token, range(size)))

    def save(self, folder: Path) -> None:
        config = {**self.special_tokens(), **_read_config_beside(self.path)}
        # If no file names the special tokens, the model's type in config.json determines both them
        # and the class.
        if not self.special or _read_special_names(self.path.parent):
            config = {"tokenizer_class": FAST_CLASS, **config}
        if self.vocab_size == self.stored_size:
            _copy_files(self.path, folder / TOKENIZER_JSON, SIDE_FILES + SENTENCEPIECE_FILES)
        else:
            (folder / TOKENIZER_JSON).write_text(self.backend.to_str(pretty=True), encoding="utf-8")
            # The old list would hide the tokens that tokenizer.json has now.
            config.pop("added_tokens_decoder", None)
            write_config(folder, config)
        lacks_special_names = bool(self.special.keys() - _read_special_names(folder).keys())
        if not (folder / CONFIG).exists() or lacks_special_names:
            write_config(folder, config)
        if find_other_reading(self, folder) is not None:
            # The class that the files name makes another tokenizer of the vocabulary; this one
            # takes tokenizer.json as it is.
            written = _read_config_beside(folder / TOKENIZER_JSON)
            write_config(folder, {**written, "tokenizer_class": FAST_CLASS})


class SentencePieceTokenizer(Tokenizer):
    """Reads a SentencePiece `.model` with its normalization; added tokens follow its pieces."""

    def __init__(self, path: str | Path, added: Sequence[str] = ()) -> None:
        from sentencepiece import SentencePieceProcessor

        self.path = Path(path)
        check_tokenizer_file(self.path)
        with library_errors(self.path):
            self.backend = SentencePieceProcessor(model_file=str(path))
            self.pieces: int = self.backend.get_piece_size()
            # This raises if a piece is not valid text.
            self.backend.id_to_piece(list(range(self.pieces)))
        self.added: list[str] = []
        self.add_tokens(added)
        ids = {
            "bos_token": self.backend.bos_id(),
            "eos_token": self.backend.eos_id(),
            "unk_token": self.backend.unk_id(),
            "pad_token": self.backend.pad_id(),
        }
        self.special = {name: index for name, index in ids.items() if index >= 0}

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "added": self.added, "special": self.special}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["added"])
        self.special = state["special"]

    def are_equal(self, ids: Sequence[int], others: Sequence[int]) -> bool:
        """Returns whether two encodings of a text are the same, or equally likely.

        Of equally likely segmentations of a unigram model, SentencePiece (fp32) and the library
        `tokenizers` (fp64) may choose different ones.
        """
        if list(ids) == list(others):
            return True
        if len(ids) != len(others) or max(*ids, *others) >= self.pieces:
            return False
        difference = sum(map(self.backend.get_score, ids)) - sum(
            map(self.backend.get_score, others)
        )
        return abs(difference) <= TIE and self.decode(ids) == self.decode(others)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.backend.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        parts: list[str] = []
        pieces: list[int] = []
        for index in map(int, ids):
            is_added = index >= self.pieces
            if skip_special_tokens and (is_added or index in self.special.values()):
                continue
            if is_added:
                # The library does not know the token, and decodes the pieces before it together.
                parts.append(self.backend.decode(pieces))
                parts.append(self.id_to_token(index))
                pieces = []
            else:
                pieces.append(index)
        parts.append(self.backend.decode(pieces))
        return "".join(parts)

    def token_to_id(self, token: str) -> int | None:
        if token in self.added:
            return self.pieces + self.added.index(token)
        index = self.backend.piece_to_id(token)
        # The library returns the unknown token's id for a token that it does not know.
        return index if self.backend.id_to_piece(index) == token else None

    def id_to_token(self, index: int) -> str:
        if not 0 <= index < self.vocab_size:
            raise ValueError(f"token id {index} is not in the vocabulary of {self.vocab_size}")
        if index < self.pieces:
            return self.backend.id_to_piece(index)
        return self.added[index - self.pieces]

    def add_tokens(self, tokens: Sequence[str]) -> None:
        self.added += [token for token in dict.fromkeys(tokens) if self.token_to_id(token) is None]
        self.vocab_size = self.pieces + len(self.added)

    def save(self, folder: Path) -> None:
        copied = folder / SENTENCEPIECE_FILES[0]
        before = _read_config_beside(self.path)
        if MADE_FROM in before:
            _copy_files(self.path, copied, (*SIDE_FILES, TOKENIZER_JSON))
        else:
            _copy_files(self.path, copied, SIDE_FILES)
        read_back = _read_sentencepiece(copied)
        is_complete = read_back is not None and read_back.added == self.added
        if not (folder / CONFIG).exists() or not is_complete:
            (folder / TOKENIZER_JSON).unlink(missing_ok=True)
            self._write_config(folder, before)
        if (folder / TOKENIZER_JSON).exists():
            return
        # T5Tokenizer makes a unigram model without byte tokens of any file.
        is_bpe = SentencePieceModel.from_file(self.path).kind == BPE
        if is_bpe or find_other_reading(self, folder) is not None:
            self._write_fast(folder)

    def _write_config(self, folder: Path, before: dict[str, Any]) -> None:
        """Writes a tokenizer_config.json of T5's class, with the added tokens.

        Args:
            before: The tokenizer_config.json beside the model.
        """
        config = {"tokenizer_class": "T5Tokenizer", **self.special_tokens(), **before}
        if MADE_FROM in config:
            del config[MADE_FROM]
            config["tokenizer_class"] = "T5Tokenizer"
        # T5's sentinels are recorded by their number; other added tokens by their names.
        sentinels = 0
        first = re.fullmatch(r"<extra_id_(\d{1,6})>", self.added[0]) if self.added else None
        if first:
            count = int(first[1]) + 1
            if self.added[:count] == t5_sentinel_names(count):
                sentinels = count
        config["extra_ids"] = sentinels
        named: dict[str, Any] = {}
        for index, token in enumerate(self.added[sentinels:], self.pieces + sentinels):
            named[str(index)] = {"content": token, "special": True}
        config["added_tokens_decoder"] = named
        write_config(folder, config)
        (folder / ADDED_FILE).unlink(missing_ok=True)

    def _write_fast(self, folder: Path) -> None:
        """Writes a tokenizer.json with the same ids, which transformers reads instead of the model.

        Raises:
            ValueError: There is none.
        """
        from tokenizers import AddedToken, processors

        model = SentencePieceModel.from_file(self.path)
        fast = model.to_fast()
        added = [AddedToken(token, special=True, normalized=False) for token in self.added]
        fast.add_special_tokens(added)
        end = self.special.get("eos_token")
        if model.kind != BPE and end is not None:
            # T5Tokenizer puts the end token behind a text, too.
            token = self.id_to_token(end)
            fast.post_processor = processors.TemplateProcessing(
                single=["$A", token], pair=["$A", token, "$B", token], special_tokens=[(token, end)]
            )
        (folder / TOKENIZER_JSON).write_text(fast.to_str(pretty=True), encoding="utf-8")
        config = {**_read_config_beside(folder / CONFIG), **self.special_tokens()}
        config["tokenizer_class"] = FAST_CLASS
        config[MADE_FROM] = SENTENCEPIECE_FILES[0]
        write_config(folder, config)


class TransformersTokenizer(Tokenizer):
    """Reads any other folder that `transformers.AutoTokenizer` supports."""

    def __init__(self, path: str | Path, backend: Any = None) -> None:
        """Reads a folder, or takes transformers' tokenizer that was read from it."""
        self.path = Path(path)
        self.backend = load_transformers_tokenizer(self.path) if backend is None else backend
        self.vocab_size = len(self.backend)
        ids = {name: getattr(self.backend, f"{name}_id") for name in SPECIAL_NAMES}
        self.special = {name: index for name, index in ids.items() if index is not None}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        with library_errors(self.path):
            return self.backend(list(texts), **options).input_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        index = self.backend.convert_tokens_to_ids(token)
        return index if index is not None and self.id_to_token(index) == token else None

    def add_tokens(self, tokens: Sequence[str]) -> None:
        new = [token for token in tokens if self.token_to_id(token) is None]
        if new:
            self.backend.add_special_tokens({"extra_special_tokens": new})
            self.vocab_size = len(self.backend)

    def id_to_token(self, index: int) -> str:
        return self.backend.convert_ids_to_tokens(index)

    def set_special_token(self, name: str, index: int) -> None:
        super().set_special_token(name, index)
        setattr(self.backend, name, self.id_to_token(index))

    def save(self, folder: Path) -> None:
        self.backend.save_pretrained(str(folder))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer from a `tokenizer.json`, a SentencePiece `.model`, BERT's `vocab.txt`, or a
    folder with one, which may be the URL of one in an object store; downloads nothing from the Hub.

    A `vocab.txt` without a `tokenizer_config.json` beside it is a vocabulary of lower-case words if
    it has no capital letter.
    """
    path = find_source(path, (*TOKENIZER_FILES, "config.json")) or Path(path)
    if path.is_dir():
        check_tokenizer_folder(path)
    if path.is_file():
        if path.suffix == ".model":
            return SentencePieceTokenizer(path)
        if path.suffix == ".txt":
            return _read_word_pieces(path)
        return _read_fast(path, path.parent)
    if not path.is_dir():
        raise ValueError(
            f"{path} does not exist; "
            "give a tokenizer.json, a SentencePiece .model, a vocab.txt, or a folder with one"
        )
    made_from = _read_config_beside(path / CONFIG).get(MADE_FROM)
    is_original = made_from in SENTENCEPIECE_FILES and (path / made_from).is_file()
    if (path / TOKENIZER_JSON).is_file() and not is_original:
        return _read_fast(path / TOKENIZER_JSON, path)
    for name in SENTENCEPIECE_FILES:
        if (path / name).is_file():
            tokenizer = _read_sentencepiece(path / name)
            if tokenizer is not None:
                return tokenizer
    if (path / VOCABULARY).is_file() and not any((path / name).exists() for name in NAMES_CLASS):
        return _read_word_pieces(path / VOCABULARY)
    return TransformersTokenizer(path)


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Writes a tokenizer and the tokens added to it into a folder, or at the URL of one in an object
    store, so that `load_tokenizer` and transformers read them.

    The files of a tokenizer to which nothing was added are copied unchanged, unless transformers
    would make another tokenizer of them. Another tokenizer in the folder is replaced.

    Raises:
        ValueError: The folder's readers would encode text in another way than the tokenizer does.
    """
    with writing(folder) as work:
        work.mkdir(parents=True, exist_ok=True)
        if work.resolve() not in (tokenizer.path.resolve(), tokenizer.path.resolve().parent):
            remove_tokenizer(work)
        tokenizer.save(work)
        check_readers(tokenizer, work)


def check_readers(tokenizer: Tokenizer, folder: Path, texts: Sequence[str] = ()) -> None:
    """Raises ValueError unless the readers of a folder encode text as a tokenizer does.

    They are `load_tokenizer`, and transformers, with which `generate` and fine-tuning read.

    Args:
        texts: Texts to compare, besides a sample of the vocabulary.
    """
    problem = find_other_reading(tokenizer, folder, texts, load_tokenizer(folder))
    if problem is None:
        problem = find_other_reading(tokenizer, folder, texts)
    if problem is not None:
        raise ValueError(
            f"the tokenizer of {tokenizer.path} cannot be saved in {folder}: {problem}; use a "
            "tokenizer.json whose tokenizer_config.json has the tokenizer_class "
            f"{FAST_CLASS}"
        )


def check_saved_copy(backend: Any, folder: Path) -> None:
    """Raises ValueError unless transformers reads a folder, in which it has saved a tokenizer, as
    that tokenizer.
    """
    given = TransformersTokenizer(getattr(backend, "name_or_path", None) or folder, backend)
    problem = find_other_reading(given, folder)
    if problem is not None:
        raise ValueError(
            f"transformers cannot save the tokenizer of {given.path}: after it, {problem}"
        )


def find_other_reading(
    tokenizer: Tokenizer, folder: Path, texts: Sequence[str] = (), reader: Tokenizer | None = None
) -> str | None:
    """Returns how a reader of a folder encodes a text in another way than a tokenizer; None if it
    does not.

    Args:
        texts: Texts to compare, besides a sample of the vocabulary.
        reader: A reader of the folder; by default transformers, if it can read the folder.
    """
    if reader is None:
        try:
            reader = TransformersTokenizer(folder)
        except ValueError:
            return None  # The reader says so itself.
    name = "transformers" if isinstance(reader, TransformersTokenizer) else "shardzoo"
    if reader.vocab_size != tokenizer.vocab_size:
        return f"{name} finds {reader.vocab_size} tokens instead of {tokenizer.vocab_size}"
    compared = [*PROBES, *_sample_texts(tokenizer), *texts]
    wanted = tokenizer.encode_batch(compared)
    found = reader.encode_batch(compared)
    for text, ids, others in zip(compared, wanted, found, strict=True):
        if not tokenizer.are_equal(ids, others):
            return f"{name} encodes {text!r:.60} as {others!r:.60} instead of {ids!r:.60}"
    return None


def _sample_texts(tokenizer: Tokenizer) -> list[str]:
    """Returns texts of tokens from all over the vocabulary."""
    step = max(1, tokenizer.vocab_size // SAMPLED_TOKENS)
    special = set(tokenizer.special.values())
    words: list[str] = []
    for index in range(0, tokenizer.vocab_size, step):
        if index not in special:
            with suppress(ValueError):  # vocabularies may have holes
                words.append(tokenizer.decode([index], skip_special_tokens=True))
    return [
        " ".join(words[start : start + SAMPLED_PER_TEXT])
        for start in range(0, len(words), SAMPLED_PER_TEXT)
    ]


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes a folder's tokenizer_config.json."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_transformers_tokenizer(folder: Path) -> Any:
    """Returns transformers' tokenizer of a folder after checking its files.

    ValueError if there is none.

    Downloads nothing and runs no code of the folder.
    """
    from transformers import AutoTokenizer

    check_tokenizer_folder(folder)
    _check_t5_model(folder)
    with library_errors(folder):
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        tokenizer(PROBE)
        ordinary = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    if len(ordinary) <= FALLBACK_TOKENS:
        raise ValueError(
            f"{folder} holds no tokenizer: copy the files of the model's tokenizer into it, such "
            "as tokenizer.json, vocab.txt, or spiece.model with tokenizer_config.json"
        )
    return tokenizer


def _check_t5_model(folder: Path) -> None:
    """Raises ValueError for a BPE model that is said to be T5's, which transformers would read as a
    unigram model.
    """
    kind = str(_read_json(folder / CONFIG).get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in ("T5Tokenizer", "MT5Tokenizer") or (folder / TOKENIZER_JSON).is_file():
        return
    file = folder / SENTENCEPIECE_FILES[0]
    if file.is_file() and SentencePieceModel.from_file(file).kind == BPE:
        raise ValueError(
            f"{file} is a BPE model, of which transformers' {kind} makes another tokenizer; write "
            f"the folder again: save_tokenizer(load_tokenizer({str(folder)!r}), {str(folder)!r})"
        )


def t5_sentinel_names(count: int = T5_SENTINELS) -> list[str]:
    """Returns `<extra_id_99>` … `<extra_id_0>`, the order in which they follow T5's pieces."""
    return [f"<extra_id_{number}>" for number in reversed(range(count))]


def _read_sentencepiece(file: Path) -> SentencePieceTokenizer | None:
    """Reads a folder's model, and the special tokens that follow its pieces.

    Returns:
        None if transformers reads another tokenizer from the folder: one of another class, or with
        tokens that are found in text or have other ids.
    """
    config = _read_config_beside(file)
    kind = _find_class(file.parent, config)
    default_sentinels = {"T5Tokenizer": T5_SENTINELS, "MT5Tokenizer": 0}
    if kind not in default_sentinels:
        return None
    sentinels = config.get("extra_ids", default_sentinels[kind])
    tokenizer = SentencePieceTokenizer(file, t5_sentinel_names(sentinels))
    named: dict[int, str] = {}
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        if not token.get("special") and int(index) >= tokenizer.vocab_size:
            return None
        named[int(index)] = token["content"]
    tokenizer.add_tokens([named[index] for index in sorted(named)])
    if "added_tokens_decoder" not in config:
        for token, index in _read_json(file.with_name(ADDED_FILE)).items():
            named[int(index)] = token
    for index, token in named.items():
        if tokenizer.token_to_id(token) != index:
            return None
    values = _read_named_values(file.parent)
    for token in _list_extra_tokens(values):
        if tokenizer.token_to_id(token) is None:
            return None
    for name, token in _select_special_names(values).items():
        index = tokenizer.token_to_id(token)
        if index is None:
            return None
        tokenizer.special[name] = index
    return tokenizer


def _find_class(folder: Path, config: dict[str, Any]) -> str:
    """Returns the class that a SentencePiece folder's files name, or transformers chooses by the
    model's type.

    Without any, it is mT5's, which adds no tokens.
    """
    if MADE_FROM in config:
        return "MT5Tokenizer"
    if config:
        return str(config.get("tokenizer_class", "")).removesuffix("Fast")
    model_type = _read_json(folder / "config.json").get("model_type")
    if not isinstance(model_type, str):
        return "MT5Tokenizer"
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    chosen = TOKENIZER_MAPPING_NAMES.get(model_type)
    if chosen == "T5Tokenizer" or model_type not in CONFIG_MAPPING:
        return "MT5Tokenizer"
    return str(chosen)


def _read_config_beside(file: Path) -> dict[str, Any]:
    """Returns the tokenizer_config.json beside a file; {} if there is none."""
    return _read_json(file.with_name(CONFIG))


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object of a file; {} if there is none."""
    return read_json_object(file) if file.is_file() else {}


def _copy_files(file: Path, target: Path, beside: Sequence[str]) -> None:
    """Copies a tokenizer's file, and those of its folder that are named in `beside`, to the folder
    of `target`.
    """
    names = {target.name: file} | {name: file.with_name(name) for name in beside}
    for name, path in names.items():
        copy = target.with_name(name)
        if path.is_file() and path.resolve() != copy.resolve():
            shutil.copyfile(path, copy)


def _read_word_pieces(file: Path) -> TransformersTokenizer:
    """Reads BERT's list of tokens, one a line, as transformers' BertTokenizer."""
    from transformers import BertTokenizer

    check_tokenizer_file(file)
    special = set(BERT_TOKENS)
    with library_errors(file):
        tokens = file.read_text(encoding="utf-8").splitlines()
        missing = [token for token in BERT_TOKENS if token not in tokens]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}, which a BERT vocabulary has")
        has_capitals = any(token != token.lower() for token in tokens if token not in special)
        backend = BertTokenizer(vocab=str(file), do_lower_case=not has_capitals)
    return TransformersTokenizer(file, backend)


def _read_fast(file: Path, folder: Path) -> FastTokenizer:
    """Reads a tokenizer.json, with the tokens that the files beside it name."""
    values = _read_named_values(folder)
    names = _select_special_names(values) or _find_special_names_by_model(folder)
    return FastTokenizer(file, names, _list_added_tokens(values))


def _list_added_tokens(values: dict[str, Any]) -> list[Any]:
    """Returns the tokens that a folder's files name, in the order in which transformers adds those
    that its tokenizer.json lacks.
    """
    from tokenizers import AddedToken

    listed = values.get("added_tokens_decoder") or {}
    added: dict[str, Any] = {}
    for index in sorted(listed, key=int):
        token = {name: value for name, value in listed[index].items() if name in TOKEN_FIELDS}
        added[token["content"]] = AddedToken(**token)
    special = [*_select_special_names(values).values(), *_list_extra_tokens(values)]
    for token in special:
        if token not in added:
            added[token] = AddedToken(token, special=True, normalized=False)
    return list(added.values())


def _read_named_values(folder: Path) -> dict[str, Any]:
    """Returns what tokenizer_config.json and special_tokens_map.json name.

    As in transformers, the map comes first, unless the former lists all added tokens.
    """
    values = _read_json(folder / CONFIG)
    if "added_tokens_decoder" not in values:
        values = {**values, **_read_json(folder / SPECIAL_MAP)}
    return values


def _read_special_names(folder: Path) -> dict[str, str]:
    """Returns the special tokens that a folder's files name, by their Hugging Face name."""
    return _select_special_names(_read_named_values(folder))


def _select_special_names(values: dict[str, Any]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        token = _read_token(values.get(name))
        if token is not None:
            names[name] = token
    return names


def _list_extra_tokens(values: dict[str, Any]) -> list[str]:
    """Returns the special tokens without one of the usual names."""
    found: list[str] = []
    for name, value in values.items():
        if name.endswith("_token") and name not in SPECIAL_NAMES and isinstance(value, str):
            found.append(value)
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        extra = list(extra.values())
    for value in extra:
        token = _read_token(value)
        if token is not None:
            found.append(token)
    return found


def _read_token(value: Any) -> str | None:
    """Returns the text of a token: a string, or the content of an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _find_special_names_by_model(folder: Path) -> dict[str, str]:
    """Returns the special tokens of the tokenizer class that transformers chooses by a folder's
    config.json.

    The first published models name no special tokens: gpt2, bert-base-uncased, roberta-base.
    """
    if not (folder / "config.json").is_file():
        return {}
    with suppress(ValueError):
        return dict(load_transformers_tokenizer(folder).special_tokens_map)
    return {}
