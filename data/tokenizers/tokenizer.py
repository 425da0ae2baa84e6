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
from .files import check_tokenizer_file, check_tokenizer_folder, library_errors, remove_tokenizer

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
TOKENIZER_JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
SIDE_FILES = (CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


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

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the files of `save_tokenizer` to an existing folder."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

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

    def __init__(self, path: str | Path, special_tokens: dict[str, str] | None = None) -> None:
        from tokenizers import Tokenizer as RustTokenizer

        self.path = Path(path)
        check_tokenizer_file(self.path)
        with library_errors(self.path):
            self.backend = RustTokenizer.from_file(str(path))
            # "<|endoftext|>" inside a document is text, not its end.
            self.backend.encode_special_tokens = True
            self.backend.no_padding()
            self.backend.no_truncation()
            self.backend.encode_batch_fast([PROBE], add_special_tokens=False)
        highest = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = highest + 1
        self.special = {}
        for name, token in (special_tokens or {}).items():
            index = self.backend.token_to_id(token)
            if index is not None:
                self.special[name] = index

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "vocab_size": self.vocab_size,
            "special": self.special,
            "backend": self.backend.to_str(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        from tokenizers import Tokenizer as RustTokenizer

        self.path = state["path"]
        self.vocab_size = state["vocab_size"]
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
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

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
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        if self.vocab_size == FastTokenizer(self.path).vocab_size:
            _copy_files(self.path, folder / TOKENIZER_JSON, SIDE_FILES + SENTENCEPIECE_FILES)
        else:
            (folder / TOKENIZER_JSON).write_text(self.backend.to_str(pretty=True), encoding="utf-8")
            # The old list would hide the tokens that tokenizer.json has now.
            config.pop("added_tokens_decoder", None)
            write_config(folder, config)
        lacks_special_names = bool(self.special) and not _read_special_names(folder)
        if not (folder / CONFIG).exists() or lacks_special_names:
            write_config(folder, config)


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
        return {"path": self.path, "added": self.added}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

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
        _copy_files(self.path, copied, SIDE_FILES)
        read_back = _read_sentencepiece(copied)
        if (folder / CONFIG).exists() and read_back is not None and read_back.added == self.added:
            return
        config = {
            "tokenizer_class": "T5Tokenizer",
            **self.special_tokens(),
            **_read_config_beside(self.path),
        }
        # T5's sentinels are recorded by their number; other added tokens by their names.
        sentinels = 0
        first = re.fullmatch(r"<extra_id_(\d{1,6})>", self.added[0]) if self.added else None
        if first:
            count = int(first[1]) + 1
            if self.added[:count] == t5_sentinel_names(count):
                sentinels = count
        config["extra_ids"] = sentinels
        named = {}
        for index, token in enumerate(self.added[sentinels:], self.pieces + sentinels):
            named[str(index)] = {"content": token, "special": True}
        config["added_tokens_decoder"] = named
        write_config(folder, config)


class TransformersTokenizer(Tokenizer):
    """Reads any other folder that `transformers.AutoTokenizer` supports."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.backend = load_transformers_tokenizer(self.path)
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

    def save(self, folder: Path) -> None:
        self.backend.save_pretrained(str(folder))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer from a `tokenizer.json`, a SentencePiece `.model`, or a folder with one;
    downloads nothing.
    """
    path = Path(path)
    if path.is_dir():
        check_tokenizer_folder(path)
    if path.is_file():
        if path.suffix == ".model":
            return SentencePieceTokenizer(path)
        return _read_fast(path, path.parent)
    if not path.is_dir():
        raise ValueError(
            f"{path} does not exist; "
            "give a tokenizer.json, a SentencePiece .model, or a folder with one"
        )
    if (path / TOKENIZER_JSON).is_file():
        return _read_fast(path / TOKENIZER_JSON, path)
    for name in SENTENCEPIECE_FILES:
        if (path / name).is_file():
            tokenizer = _read_sentencepiece(path / name)
            if tokenizer is not None:
                return tokenizer
    return TransformersTokenizer(path)


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Writes a tokenizer and the tokens added to it, so that `load_tokenizer` and transformers read
    them.

    The files of a tokenizer to which nothing was added are copied unchanged. Another tokenizer in
    the folder is replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() not in (tokenizer.path.resolve(), tokenizer.path.resolve().parent):
        remove_tokenizer(folder)
    tokenizer.save(folder)


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


def t5_sentinel_names(count: int = T5_SENTINELS) -> list[str]:
    """Returns `<extra_id_99>` … `<extra_id_0>`, the order in which they follow T5's pieces."""
    return [f"<extra_id_{number}>" for number in reversed(range(count))]


def _read_sentencepiece(file: Path) -> SentencePieceTokenizer | None:
    """Reads a folder's model and the tokens that follow its pieces.

    Returns:
        None if the vocabulary differs from the model's pieces in other ways.
    """
    config = _read_config_beside(file)
    kind = "MT5Tokenizer"
    if config:
        kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    default_sentinels = {"T5Tokenizer": T5_SENTINELS, "MT5Tokenizer": 0}
    if kind not in default_sentinels:
        return None
    sentinels = config.get("extra_ids", default_sentinels[kind])
    tokenizer = SentencePieceTokenizer(file, t5_sentinel_names(sentinels))
    named: dict[int, str] = {}
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        named[int(index)] = token["content"]
    tokenizer.add_tokens([named[index] for index in sorted(named)])
    for index, token in named.items():
        if tokenizer.token_to_id(token) != index:
            return None
    return tokenizer


def _read_config_beside(file: Path) -> dict[str, Any]:
    """Returns the tokenizer_config.json beside a file; {} if there is none."""
    config = file.with_name(CONFIG)
    return read_json_object(config) if config.is_file() else {}


def _copy_files(file: Path, target: Path, beside: Sequence[str]) -> None:
    """Copies a tokenizer's file, and those of its folder that are named in `beside`, to the folder
    of `target`.
    """
    names = {target.name: file} | {name: file.with_name(name) for name in beside}
    for name, path in names.items():
        copy = target.with_name(name)
        if path.is_file() and path.resolve() != copy.resolve():
            shutil.copyfile(path, copy)


def _read_fast(file: Path, folder: Path) -> FastTokenizer:
    """Reads a tokenizer.json; the roles of its special tokens are in the files beside it."""
    return FastTokenizer(file, _read_special_names(folder) or _find_special_names_by_model(folder))


def _read_special_names(folder: Path) -> dict[str, str]:
    """Returns the special tokens that a folder's files name, by their Hugging Face name."""
    names: dict[str, str] = {}
    for side in ("special_tokens_map.json", CONFIG):
        if (folder / side).is_file():
            values = read_json_object(folder / side)
            for name in SPECIAL_NAMES:
                value = values.get(name)
                value = value.get("content") if isinstance(value, dict) else value
                if isinstance(value, str):
                    names[name] = value
    return names


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
