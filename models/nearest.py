"""Suggests the nearest model of the zoo for one that it does not have, and says what is missing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from .config import shown

MOST_NAMES = 12  # of architectures that one message lists

# model_type of a family that the zoo does not have -> (the nearest family, what the zoo lacks).
MISSING: dict[str, tuple[str, str]] = {
    "albert": ("bert", "layers that share their weights, and a factorized word embedding"),
    "big_bird": ("bert", "block-sparse attention"),
    "bigbird_pegasus": ("mbart", "block-sparse attention"),
    "bloom": ("gpt2", "ALiBi, a bias of attention scores"),
    "chatglm": (
        "glm4",
        "blocks without norms after attention and MLP, and the names of its tensors",
    ),
    "deberta": ("deberta-v2", "the first DeBERTa's norms, biases and names"),
    "falcon": ("llama", "blocks with attention and MLP side by side"),
    "gemma3": ("gemma3_text", "the part that reads images; its text_config is a gemma3_text"),
    "gemma3n": ("gemma3_text", "several residual streams, and embeddings of each layer"),
    "gpt_neo": ("gpt2", "layers with local attention"),
    "gpt_neox": ("llama", "blocks with attention and MLP side by side"),
    "gptj": ("llama", "blocks with attention and MLP side by side"),
    "led": ("bart", "local attention with global tokens"),
    "longformer": ("roberta", "local attention with global tokens"),
    "mpnet": ("bert", "a relative bias of attention scores"),
    "mpt": ("gpt2", "ALiBi, a bias of attention scores"),
    "opt": ("gpt2", "positions that start at 2 after padding"),
    "phi": ("llama", "blocks with attention and MLP side by side"),
    "prophetnet": ("bart", "n-gram prediction"),
    "xlnet": ("bert", "permuted attention with two streams"),
}
_HEAD = re.compile(r"(For[A-Z]\w*|LMHeadModel|LMHead|DoubleHeadsModel|EncoderModel|Encoder|Model)$")


def find_head(architecture: str) -> str:
    """Returns the part of a name that stands for the head: "ForMaskedLM" of BertForMaskedLM.

    It is "" if there is none.
    """
    found = _HEAD.search(architecture)
    if found is None:
        return ""
    return found[0].replace("LMHeadModel", "ForCausalLM")


def refuse_family(
    model_type: object, architecture: object, zoo: Mapping[str, Sequence[str]]
) -> str:
    """Returns the message for a `model_type` that the zoo does not have.

    Args:
        model_type, architecture: As a `config.json` names them; the latter may be "".
        zoo: Family -> its architectures.
    """
    name = str(model_type)
    wanted = str(architecture or "")
    closest, missing = MISSING.get(name, ("", ""))
    if closest not in zoo:
        # Of the families with this head, or else of all, take the one with the most similar name.
        families = [
            family
            for family, known in zoo.items()
            if not wanted or find_head(wanted) in map(find_head, known)
        ]
        closest = max(families or list(zoo), key=lambda family: _compare(name, family))
        missing = "its blocks (docs/adding-a-model.md adds a family)"
    for family, known in zoo.items():
        if wanted in known:
            closest = family
            missing = f"nothing, if model_type becomes {family!r}"
    architecture = _find_closest_architecture(wanted, zoo[closest])
    described = shown(model_type)
    if wanted:
        described += f" (of {shown(wanted)})"
    return (
        f"there is no model family {described}; use one of {', '.join(zoo)}. The nearest model "
        f"that works is {architecture} ({closest}); missing: {missing}"
    )


def refuse_architecture(
    architecture: object, model_type: str, zoo: Mapping[str, Sequence[str]]
) -> str:
    """Returns the message for an architecture that a family of the zoo does not have."""
    known = zoo[model_type]
    name = str(architecture)
    listed = ", ".join(known[:MOST_NAMES])
    if len(known) > MOST_NAMES:
        listed += ", …"
    problem = f"architecture {shown(architecture)} is not supported; use one of {listed}"
    owners = [family for family, others in zoo.items() if name in others]
    if owners:
        return f"{problem}, or set model_type to {owners[0]!r}, whose architecture it is"
    head = find_head(name)
    if head and head not in map(find_head, known):
        missing = f"the head {head}"
    else:
        missing = f"a class called {shown(name)}"
    closest = _find_closest_architecture(name, known)
    return f"{problem}. The nearest one that works is {closest}; missing: {missing}"


def _find_closest_architecture(wanted: str, known: Sequence[str]) -> str:
    """Returns the architecture with the most similar head, and of those the most similar name."""
    if not wanted:
        return known[0]
    head = find_head(wanted)
    return max(known, key=lambda name: (_compare(find_head(name), head), _compare(name, wanted)))


def _compare(first: str, second: str) -> float:
    """Returns how similar two names are, from 0 to 1."""
    return difflib.SequenceMatcher(None, first.lower(), second.lower()).ratio()
