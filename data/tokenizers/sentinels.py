"""Finds the sentinels of T5-like vocabularies, and adds them to vocabularies without any."""

from __future__ import annotations

import re

from .tokenizer import T5_SENTINELS, Tokenizer, t5_sentinel_names

EXTRA_ID = re.compile(r"^(?:▁)?<extra_id_(\d+)>$")


def sentinel_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids of `<extra_id_0>`, `<extra_id_1>`, …, in the order in which spans use them.

    T5 counts them down from the end of its vocabulary (`<extra_id_0>` = 32099); others count up.
    Only the names decide. mT5 has none and uses the last ids of its SentencePiece vocabulary, as
    its published model does.
    """
    found: dict[int, int] = {}
    for index, token in enumerate(tokenizer.tokens(tokenizer.vocab_size)):
        match = EXTRA_ID.match(token or "")
        if match:
            found[int(match[1])] = index
    if not found:
        raise ValueError("this vocabulary has no <extra_id_0> …; append them with add_sentinels")
    missing = [number for number in range(len(found)) if number not in found]
    if missing:
        raise ValueError(
            f"the sentinels are not numbered without gaps: <extra_id_{missing[0]}> is missing"
        )
    return tuple(found[number] for number in range(len(found)))


def add_sentinels(tokenizer: Tokenizer, count: int = T5_SENTINELS) -> tuple[int, ...]:
    """Appends `<extra_id_0>` … to a vocabulary, `<extra_id_0>` last as in T5 (32099 there), and
    returns their ids.

    Those that the vocabulary has keep their ids, also under mT5's names `▁<extra_id_0>` ….
    """
    names = t5_sentinel_names(count)
    missing = [name for name in names if tokenizer.token_to_id("▁" + name) is None]
    tokenizer.add_tokens(missing)
    return sentinel_ids(tokenizer)
