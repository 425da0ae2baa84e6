"""Says which model of the zoo is the nearest to one that it does not have, and what is missing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from .config import shown

MOST_NAMES = 12  # of architectures that one message lists

# model_type of a family that the zoo does not have -> (the nearest family, the part of it that the zoo lacks).
MISSING: dict[str, tuple[str, str]] = {
    "albert": ("bert", "layers that share their weights, and a factorized word embedding"),
    "big_bird": ("bert", "block-sparse attention"),
    "bigbird_pegasus": ("mbart", "block-sparse attention"),
    "bloom": ("gpt2", "ALiBi, a bias of attention scores"),
    "chatglm": (
        "glm4",
        "blocks without norms after attention and MLP, and the names of its tensors",
    ),
    "deberta": ("bert", "disentangled attention, with relative positions in queries and keys"),
    "deberta-v2": ("bert", "disentangled attention, with relative positions in queries and keys"),
    "falcon": ("llama", "blocks with attention and MLP side by side"),
    "gemma": ("llama", "norms that scale by 1 + weight, and a scaled embedding"),
    "gemma2": ("llama", "norms that scale by 1 + weight, and soft-capped scores"),
    "gpt_neo": ("gpt2", "layers with local attention"),
    "gpt_neox": ("llama", "blocks with attention and MLP side by side"),
    "gptj": ("llama", "blocks with attention and MLP side by side"),
    "led": ("bart", "local attention with global tokens"),
    "longformer": ("roberta", "local attention with global tokens"),
    "longt5": ("t5", "local and transient global attention"),
    "marian": ("bart", "sinusoidal positions"),
    "mixtral": ("mistral", "a mixture of experts"),
    "mpnet": ("bert", "a relative bias of attention scores"),
    "mpt": ("gpt2", "ALiBi, a bias of attention scores"),
    "nllb-moe": ("m2m_100", "a mixture of experts"),
    "opt": ("gpt2", "positions that start at 2 after padding"),
    "pegasus": ("mbart", "sinusoidal positions"),
    "phi": ("llama", "blocks with attention and MLP side by side"),
    "phi3": ("llama", "its tensors of stacked queries, keys, values and of stacked gate and up"),
    "prophetnet": ("bart", "n-gram prediction"),
    "qwen2_moe": ("qwen2", "a mixture of experts"),
    "qwen3_moe": ("qwen3", "a mixture of experts"),
    "switch_transformers": ("t5", "a mixture of experts"),
    "xlm-roberta-xl": ("xlm-roberta", "norms before attention and MLP"),
    "xlnet": ("bert", "permuted attention with two streams"),
}
_HEAD = re.compile(r"(For[A-Z]\w*|LMHeadModel|LMHead|DoubleHeadsModel|EncoderModel|Model)$")


def head_of(architecture: str) -> str:
    """Returns the part of a name that stands for the head: "ForMaskedLM" of BertForMaskedLM, "" if there is none."""
    found = _HEAD.search(architecture)
    return "" if found is None else found[0].replace("LMHeadModel", "ForCausalLM")


def refuse_family(
    model_type: object, architecture: object, zoo: Mapping[str, Sequence[str]]
) -> str:
    """Returns the message for a `model_type` that the zoo does not have.

    Args:
        model_type, architecture: As a `config.json` names them; the latter may be "".
        zoo: Family -> its architectures.
    """
    name, wanted = str(model_type), str(architecture or "")
    close, lacking = MISSING.get(name, ("", ""))
    if close not in zoo:
        able = [
            family
            for family, known in zoo.items()
            if not wanted or head_of(wanted) in map(head_of, known)
        ]
        close = _closest(name, able or list(zoo))
        lacking = "its blocks (docs/adding-a-model.md adds a family)"
    for family, known in zoo.items():
        if wanted in known:
            close, lacking = family, f"nothing, if model_type becomes {family!r}"
    of = f" (of {shown(wanted)})" if wanted else ""
    nearest = _closest_architecture(wanted, zoo[close])
    return (
        f"there is no model family {shown(model_type)}{of}; use one of {', '.join(zoo)}. The nearest model that works "
        f"is {nearest} ({close}); missing: {lacking}"
    )


def refuse_architecture(
    architecture: object, model_type: str, zoo: Mapping[str, Sequence[str]]
) -> str:
    """Returns the message for an architecture that a family of the zoo does not have."""
    known, name = zoo[model_type], str(architecture)
    owners = [family for family, others in zoo.items() if name in others]
    listed = ", ".join(known[:MOST_NAMES]) + (", …" if len(known) > MOST_NAMES else "")
    problem = f"architecture {shown(architecture)} is not supported; use one of {listed}"
    if owners:
        return f"{problem}, or set model_type to {owners[0]!r}, whose architecture it is"
    head = head_of(name)
    lacking = (
        f"the head {head}"
        if head and head not in map(head_of, known)
        else f"a class called {shown(name)}"
    )
    return f"{problem}. The nearest one that works is {_closest_architecture(name, known)}; missing: {lacking}"


def _closest_architecture(wanted: str, known: Sequence[str]) -> str:
    """Returns the architecture with the most similar head, and of those the one with the most similar name."""
    if not wanted:
        return known[0]
    return max(
        known, key=lambda name: (_likeness(head_of(name), head_of(wanted)), _likeness(name, wanted))
    )


def _closest(name: str, names: Sequence[str]) -> str:
    return max(names, key=lambda other: _likeness(name, other))


def _likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first.lower(), second.lower()).ratio()
