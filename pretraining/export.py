"""Exports a trained model to a Hugging Face folder, evaluates it there, and lets it write a sample."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.folder_files import CONFIG
from ..data.labels import IGNORED
from ..data.tokenizers.glm_tokens import GLMVocabulary
from ..data.tokenizers.sentinels import sentinel_ids
from ..data.tokenizers.tokenizer import (
    Tokenizer,
    find_other_reading,
    load_tokenizer,
    save_tokenizer,
)
from ..generation import TextGenerationPipeline, fill_blanks, fill_mask, generate
from ..models import family, find_config, from_pretrained
from ..models.config import ModelConfig
from ..models.saving import model_card
from ..trainer.evaluation import evaluate
from ..trainer.launch.ranks import Ranks

TOLERANCE = 1e-4
"""Largest difference in nats between the losses of the sharded and the exported model, both in
fp32.
"""
NEW_TOKENS = 120
# Small models repeat themselves when they are decoded greedily.
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 40}
MARKS = ("[[", "]]")
"""They stand around what the model wrote."""

TextPiece = tuple[Sequence[int], bool]
"""Token ids, and whether the model wrote them."""


def evaluates_in_transformers(config: ModelConfig) -> bool:
    """Returns whether transformers evaluates an exported model of this configuration."""
    found = family(config.model_type)
    return found.in_transformers and found.transformers_agrees


def load_exported(folder: Path) -> Any:
    """Loads the folder's model in fp32, with transformers or, where `evaluates_in_transformers` says
    that it cannot compute the family, with the zoo.

    Raises:
        ValueError: Keys are missing or unexpected, of which transformers only warns.
    """
    config = find_config(str(folder))
    if not evaluates_in_transformers(config):
        return from_pretrained(folder, dtype=torch.float32)
    # Where torchao is installed, transformers imports it, and it warns of CUDA libraries on a CPU.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Missing keys, of which it would warn, are an error here.
    transformers_logging.set_verbosity_error()
    kind: Any = getattr(transformers, config.architecture)
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    # A part that the zoo does not have, such as one that reads images, is not in its files.
    names = family(config.model_type).find_names(config)
    report["missing_keys"] = {key for key in report["missing_keys"] if not names.is_ignored(key)}
    problems = {kind: sorted(keys) for kind, keys in report.items() if keys}
    if problems:
        raise ValueError(f"transformers does not load {folder} completely: {problems}")
    if getattr(config, "tie_word_embeddings", None) is False:
        # transformers 5 sets this to true for every UMT5, and then scales its logits.
        model.config.tie_word_embeddings = False
    return model.eval()


def exported_loss(
    folder: Path,
    samples: Any,
    *,
    batch_size: int,
    collate: Callable[[Sequence[Any]], Any],
    device: torch.device,
) -> float:
    """Returns the mean loss of the exported model over samples, in nats per target.

    It is computed on the device, or on the CPU if the device's memory, which the trained model
    shares, does not suffice.
    """
    model = load_exported(folder)

    def run(batch: Any, model: Any, mems: Any) -> Any:
        if "seq_idx" in batch and "position_ids" not in batch:
            batch = unpack_documents(batch, model.config.pad_token_id)
        elif "seq_idx" in batch:
            # transformers finds the documents of a sample by their positions, if there is neither
            # a mask nor a cache.
            names = ("input_ids", "labels", "position_ids", "num_items_in_batch")
            batch = {name: batch[name] for name in names if name in batch}
            batch["use_cache"] = False
        if getattr(model.config, "output_router_logits", False):
            # transformers' Switch Transformer does not look into its configuration for it.
            batch = {**batch, "output_router_logits": True}
        return model(**batch)

    def loss_on(device: torch.device) -> float:
        with all_cores():
            return evaluate(
                run,
                model.to(device),
                model,
                samples,
                Ranks(None),
                batch_size=batch_size,
                collate=collate,
            )["loss"]

    try:
        return loss_on(device)
    except torch.OutOfMemoryError:
        return loss_on(torch.device("cpu"))


def unpack_documents(batch: dict[str, torch.Tensor], padding: int) -> dict[str, torch.Tensor]:
    """Returns a batch in which each document of packed rows is a row of its own, for encoders of
    transformers, which know no packed rows.

    Args:
        batch: `input_ids` and `labels`, int64 [B, S], and `seq_idx`, the number of each token's
            document.
        padding: The id behind shorter documents.
    """
    begins = torch.nn.functional.pad(batch["seq_idx"].diff(dim=1) != 0, (1, 0), value=True)
    first = begins.flatten().nonzero()[:, 0].tolist()
    lengths = [end - start for start, end in pairwise([*first, begins.numel()])]
    unpacked = {
        name: torch.nn.utils.rnn.pad_sequence(
            list(batch[name].flatten().split(lengths)), batch_first=True, padding_value=value
        )
        for name, value in (("input_ids", padding), ("labels", IGNORED))
    }
    places = torch.arange(max(lengths), device=batch["input_ids"].device)
    unpacked["attention_mask"] = places < torch.tensor(lengths, device=places.device)[:, None]
    if "num_items_in_batch" in batch:
        unpacked["num_items_in_batch"] = batch["num_items_in_batch"]
    return unpacked


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises ValueError if transformers would read another tokenizer beside the exported model.

    It chooses the class by the model's type, too.
    """
    if not family(config.model_type).in_transformers:
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(tokenizer, folder)
        values = {"model_type": config.model_type}
        (folder / CONFIG).write_text(json.dumps(values), encoding="utf-8")
        problem = find_other_reading(tokenizer, folder)
    if problem is not None:
        raise ValueError(
            f"the exported {config.model_type} could not be used with this tokenizer: beside a "
            f"{config.model_type}, {problem}; use that family's tokenizer (--tokenizer), or another "
            "model"
        )


def complete_tokenizer(tokenizer: Tokenizer, folder: Path, sample: Mapping[str, Any]) -> None:
    """Makes transformers and the zoo read the tokenizer of an exported folder as it was trained.

    Args:
        sample: A held-out sample, whose text they must encode alike.

    Raises:
        ValueError: They cannot.
    """
    text = tokenizer.decode(_to_list(sample["input_ids"]), skip_special_tokens=True)
    problem = find_other_reading(tokenizer, folder, [text], load_tokenizer(folder))
    if problem is None and family(find_config(str(folder)).model_type).in_transformers:
        problem = find_other_reading(tokenizer, folder, [text])
    if problem is not None:
        save_tokenizer(tokenizer, folder)


def check_export(folder: Path, exported: float, sharded: float) -> None:
    """Raises ValueError unless the losses of the exported and the sharded model agree."""
    if not abs(exported - sharded) <= TOLERANCE:
        raise ValueError(
            f"the model exported to {folder} has a held-out loss of {exported:.6f}, but the trained "
            f"one {sharded:.6f}; they may differ by {TOLERANCE}. The checkpoint is complete; do not "
            "use the exported folder"
        )


def write_sample(
    folder: Path,
    sample: Mapping[str, Any],
    prompt: str | None = None,
    *,
    blanks: GLMVocabulary | None = None,
) -> str:
    """Returns a text of which the exported model wrote the parts in [[ ]], the same at every call.

    The model continues the text, fills its spans, masks or blanks, as its family does.

    Args:
        sample: A held-out sample, whose input is used if there is no prompt.
        prompt: A text; if it has no span, mask or blank, one is appended.
        blanks: The vocabulary of the blanks' special tokens, if the tokenizer does not show it.
    """
    pipeline = TextGenerationPipeline(folder, dtype=torch.float32, glm_vocabulary=blanks)
    tokenizer = load_tokenizer(folder)
    writers = {
        "continuation": _continue,
        "answer": _answer,
        "masks": _fill_masks,
        "blanks": _fill_blanks,
    }
    write = writers[pipeline.model.generates]
    torch.manual_seed(0)
    with all_cores():
        return _mark(write(pipeline, tokenizer, sample, prompt), tokenizer)


def _continue(
    pipeline: TextGenerationPipeline, tokenizer: Tokenizer, sample: Any, prompt: str | None
) -> list[TextPiece]:
    """Lets a decoder continue a prompt, or the first half of a sample."""
    longest = pipeline.model.config.max_sequence_length
    if prompt:
        ids = _encode(pipeline, prompt)
        kept = len(ids)
    else:
        ids = _to_list(sample["input_ids"])
        kept = len(ids) // 2
    ids = ids[: max(1, min(kept, longest - 1))]
    new = min(NEW_TOKENS, longest + 1 - len(ids))
    written = _generate(pipeline, ids, new)
    return [(ids, False), (written[len(ids) :], True)]


def _answer(
    pipeline: TextGenerationPipeline, tokenizer: Tokenizer, sample: Any, prompt: str | None
) -> list[TextPiece]:
    """Lets an encoder-decoder fill spans, or write a target."""
    known: tuple[int, ...] = ()
    with suppress(ValueError):  # Objectives that replace no spans need no sentinels.
        known = sentinel_ids(tokenizer)
    if prompt:
        ids = _encode(pipeline, prompt)
        if known and not set(ids) & set(known):
            ids = _encode(pipeline, f"{prompt} {tokenizer.id_to_token(known[0])}")
    else:
        ids = _to_list(sample["input_ids"])
    longest = pipeline.model.config.max_target_length or NEW_TOKENS
    written = _generate(pipeline, ids, min(NEW_TOKENS, longest))
    blanks = set(ids) & set(known)
    if not blanks:
        return [(ids, False), (written, True)]
    # The target is each sentinel, followed by the text in whose place it stands.
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in written:
        if token in known:
            span = spans.setdefault(token, [])
        else:
            span.append(token)
    fills = {place: spans.get(token, []) for place, token in enumerate(ids) if token in blanks}
    return _fill(ids, fills)


def _fill_masks(
    pipeline: TextGenerationPipeline, tokenizer: Tokenizer, sample: Any, prompt: str | None
) -> list[TextPiece]:
    """Lets an encoder fill masked words."""
    mask = tokenizer.special_id("mask_token")
    segments = None
    if prompt:
        ids = _encode(pipeline, prompt)
        if mask not in ids:
            ids = _encode(pipeline, f"{prompt} {tokenizer.id_to_token(mask)}")
    else:
        ids = _to_list(sample["input_ids"])
        if "token_type_ids" in sample:
            segments = torch.tensor([_to_list(sample["token_type_ids"])])
    found = fill_mask(
        pipeline.model, torch.tensor([ids]), token_type_ids=segments, mask_token_id=mask, top_k=1
    )
    places = found.places[:, 1].tolist()
    return _fill(ids, dict(zip(places, found.tokens.tolist(), strict=True)))


def _fill_blanks(
    pipeline: TextGenerationPipeline, tokenizer: Tokenizer, sample: Any, prompt: str | None
) -> list[TextPiece]:
    """Lets a GLM fill the blanks of a prompt, or of a sample's first part."""
    text: Any = pipeline.blank_text
    if prompt:
        ids = _shorten(text.encode(prompt), pipeline)
    else:
        source_length = int(sample["attention_mask"])
        ids = _to_list(sample["input_ids"])[:source_length]
    new = min(NEW_TOKENS, pipeline.model.config.max_sequence_length // 2)
    found = fill_blanks(
        pipeline.model, torch.tensor([ids]), text.tokens, max_new_tokens=new, **SAMPLING
    )[0]
    blanks = (text.tokens.mask, text.tokens.smask, text.tokens.gmask)
    places = [place for place, token in enumerate(ids) if token in blanks]
    return _fill(ids, dict(zip(places, found.pieces, strict=True)))


def _to_list(values: Any) -> list[int]:
    return torch.as_tensor(values).tolist()


def _encode(pipeline: TextGenerationPipeline, prompt: str) -> list[int]:
    tokenizer: Any = pipeline.tokenizer
    return _shorten(tokenizer(prompt, verbose=False)["input_ids"], pipeline)


def _shorten(ids: list[int], pipeline: TextGenerationPipeline) -> list[int]:
    """Returns the first token and the last ones if there are more than the model has positions."""
    longest = pipeline.model.config.max_sequence_length
    return ids if len(ids) < longest else [ids[0], *ids[2 - longest :]]


def _generate(pipeline: TextGenerationPipeline, ids: list[int], new_tokens: int) -> list[int]:
    settings: Any = {**SAMPLING, "max_new_tokens": new_tokens, "return_dict_in_generate": False}
    found = generate(pipeline.model, torch.tensor([ids]), **settings)
    assert isinstance(found, Tensor)
    return found[0].tolist()


def _fill(ids: Sequence[int], fills: Mapping[int, Sequence[int]]) -> list[TextPiece]:
    """Returns the pieces of a text in which the positions `fills` are replaced."""
    pieces: list[TextPiece] = []
    start = 0
    for place in sorted(fills):
        pieces += [(ids[start:place], False), (fills[place], True)]
        start = place + 1
    return [*pieces, (ids[start:], False)]


def _mark(pieces: Sequence[TextPiece], tokenizer: Tokenizer) -> str:
    """Returns a text without special tokens, with marks around what the model wrote."""
    # Some tokenizers drop the white space around a piece when they decode it.
    keeps_spaces = tokenizer.decode(tokenizer.encode(" a")) == " a"
    texts: list[str] = []
    for ids, is_written in pieces:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        texts.append(text.join(MARKS) if is_written else text)
    return ("" if keeps_spaces else " ").join(texts)


def write_card(
    folder: Path,
    config: ModelConfig,
    facts: Mapping[str, str],
    *,
    commands: Sequence[tuple[int, str]],
    sample: str,
) -> None:
    """Writes the folder's README.md: what the model is, how it was trained and how it is loaded.

    Args:
        commands: The command lines that have trained it, each with its first step.
    """
    lines: list[str] = []
    for step, command in commands:
        if step:
            lines.append(f"# from step {step:,} on")
        lines.append(command)
    trained = "\n".join(lines)
    quoted = "".join(f"    {line}\n" for line in sample.splitlines())
    sections = {
        "How it was trained": f"```bash\n{trained}\n```",
        "Sample": f"The model wrote what is between {MARKS[0]} and {MARKS[1]}, on held-out text."
        f"\n\n{quoted}",
    }
    text = model_card(config, f"{config.architecture}, pretrained with shardzoo", facts, sections)
    (folder / "README.md").write_text(text, encoding="utf-8")


class all_cores:
    """Lets torch use all cores for work that one rank does while the others wait."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self._threads)
