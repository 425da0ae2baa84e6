"""Converts a SentencePiece model to the `tokenizer.json` of the library `tokenizers`.

transformers' own T5Tokenizer reads every model as a unigram model without byte tokens, so it gives
other ids for BPE models, and for text with characters that the vocabulary lacks.

The format is SentencePiece's `sentencepiece_model.proto` (version 0.2); the numbers below are those
of its fields.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNIGRAM = 1
BPE = 2
KINDS = {UNIGRAM: "unigram", BPE: "BPE", 3: "word", 4: "character"}

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4

SPACE = "▁"


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a SentencePiece model that decide how it encodes.

    Attributes:
        kind: `UNIGRAM`, `BPE`, or a kind that has no equivalent in `tokenizers`.
        byte_fallback: Whether characters that no piece covers become byte tokens.
        charsmap: The compiled rules of normalization; empty for none.
        adds_prefix: Whether a text begins with a space that it does not have.
        merges_spaces: Whether spaces at the ends are removed, and repeated ones merged.
        is_plain: Whether spaces become "▁" before a word, as usual.
    """

    kind: int
    pieces: tuple[Piece, ...]
    unknown: int
    byte_fallback: bool
    charsmap: bytes
    adds_prefix: bool
    merges_spaces: bool
    is_plain: bool

    @classmethod
    def from_file(cls, path: Path) -> SentencePieceModel:
        """Reads a `.model` file.

        Raises:
            ValueError: It is not one.
        """
        try:
            fields = list(_iter_fields(path.read_bytes()))
            pieces = [_parse_piece(value) for number, value in fields if number == 1]
            trainer = _collect_last(fields, 2)
            normalizer = _collect_last(fields, 3)
        except (IndexError, TypeError, UnicodeDecodeError, struct.error):
            raise ValueError(f"{path} is not a SentencePiece model") from None
        return cls(
            kind=trainer.get(3, UNIGRAM),
            pieces=tuple(pieces),
            unknown=trainer.get(40, 0),
            byte_fallback=bool(trainer.get(35, 0)),
            charsmap=normalizer.get(2, b""),
            adds_prefix=bool(normalizer.get(3, 1)),
            merges_spaces=bool(normalizer.get(4, 1)),
            is_plain=bool(normalizer.get(5, 1)) and not trainer.get(24, 0),
        )

    def to_fast(self) -> Any:
        """Returns a tokenizer of the library `tokenizers` that gives the same ids.

        Of two segmentations of a unigram model with the same probability, it may choose the other
        one, because it adds in fp64.

        Raises:
            ValueError: The library has no such tokenizer.
        """
        from tokenizers import AddedToken, Tokenizer

        if self.kind not in (UNIGRAM, BPE) or not self.is_plain:
            raise ValueError(
                f"a SentencePiece {KINDS.get(self.kind, 'custom')} model with these settings has "
                "no equivalent in transformers; use a unigram or a BPE model"
            )
        model = self._make_unigram() if self.kind == UNIGRAM else self._make_bpe()
        tokenizer: Any = Tokenizer(model)
        tokenizer.normalizer = self._make_normalizer()
        tokenizer.decoder = self._make_decoder()
        if self.kind == UNIGRAM:
            tokenizer.pre_tokenizer = self._split_control_pieces()
        # Control pieces are special: they are not found in text. User-defined ones are.
        added: list[Any] = []
        for piece in self.pieces:
            if piece.kind in (UNKNOWN, CONTROL, USER_DEFINED):
                is_special = piece.kind != USER_DEFINED
                added.append(AddedToken(piece.text, normalized=False, special=is_special))
        tokenizer.add_tokens(added)
        return tokenizer

    def _make_unigram(self) -> Any:
        from tokenizers.models import Unigram

        vocabulary = [(piece.text, piece.score) for piece in self.pieces]
        return Unigram(vocabulary, self.unknown, self.byte_fallback)

    def _make_bpe(self) -> Any:
        """Returns a BPE whose merges are all pairs of pieces that form a piece, best score first."""
        from tokenizers.models import BPE as FastBPE

        scores = {piece.text: piece.score for piece in self.pieces if piece.kind == NORMAL}
        merges: list[tuple[float, int, int, str, str]] = []
        for text, score in scores.items():
            for place in range(1, len(text)):
                left = text[:place]
                right = text[place:]
                if left in scores and right in scores:
                    merges.append((score, len(left), len(right), left, right))
        merges.sort(key=lambda merge: merge[:3], reverse=True)
        return FastBPE(
            vocab={piece.text: number for number, piece in enumerate(self.pieces)},
            merges=[(left, right) for *_, left, right in merges],
            unk_token=self.pieces[self.unknown].text,
            fuse_unk=True,
            byte_fallback=self.byte_fallback,
        )

    def _make_normalizer(self) -> Any:
        from tokenizers import Regex, normalizers

        steps: list[Any] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.merges_spaces:
            steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if self.adds_prefix:
            steps.append(normalizers.Prepend(SPACE))
        steps.append(normalizers.Replace(" ", SPACE))
        return normalizers.Sequence(steps)

    def _make_decoder(self) -> Any:
        from tokenizers import decoders

        steps: list[Any] = [decoders.Replace(SPACE, " ")]
        if self.byte_fallback:
            steps.append(decoders.ByteFallback())
        steps.append(decoders.Fuse())
        if self.adds_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        return decoders.Sequence(steps)

    def _split_control_pieces(self) -> Any:
        """Returns a pre-tokenizer that cuts a text inside of what looks like a control piece.

        The library's unigram model would take "</s>" in a text for the end of a sequence.
        """
        from tokenizers import Regex, pre_tokenizers

        firsts: set[str] = set()
        rests: list[str] = []
        for piece in self.pieces:
            if piece.kind in (UNKNOWN, CONTROL) and len(piece.text) > 1:
                firsts.add(re.escape(piece.text[0]))
                rests.append(re.escape(piece.text[1:]))
        if not rests:
            return None
        pattern = f"[{''.join(sorted(firsts))}](?={'|'.join(rests)})"
        return pre_tokenizers.Split(Regex(pattern), "merged_with_previous")


def _parse_piece(raw: bytes) -> Piece:
    fields: dict[int, Any] = dict(_iter_fields(raw))
    text = fields[1].decode("utf-8")
    (score,) = struct.unpack("<f", fields.get(2, b"\0\0\0\0"))
    return Piece(text, score, fields.get(3, NORMAL))


def _collect_last(fields: list[tuple[int, Any]], number: int) -> dict[int, Any]:
    """Returns the fields of the last message with a number; of repeated ones the last."""
    found: dict[int, Any] = {}
    for field, value in fields:
        if field == number:
            found = dict(_iter_fields(value))
    return found


def _iter_fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each field of a message of protocol buffers: integers of
    varints, bytes of all others.
    """
    place = 0
    while place < len(raw):
        key, place = _read_varint(raw, place)
        number = key >> 3
        wire_type = key & 7
        if wire_type == 0:
            value, place = _read_varint(raw, place)
            yield number, value
            continue
        sizes = {1: 8, 5: 4}
        if wire_type == 2:
            size, place = _read_varint(raw, place)
        else:
            size = sizes.get(wire_type, len(raw) + 1)
        if place + size > len(raw):
            raise IndexError
        yield number, raw[place : place + size]
        place += size


def _read_varint(raw: bytes, place: int) -> tuple[int, int]:
    """Returns an integer and the place after it."""
    value = 0
    shift = 0
    while True:
        byte = raw[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise IndexError
