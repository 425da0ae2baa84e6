"""One configuration that turns a prepared corpus into batches for any pre-training objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..indexed.dataset import IndexedDataset
from ..loading.collate import PadBatch
from ..loading.loader import ResumableLoader, Samples, Share
from ..text.sentences import sentence_end_ids
from ..tokenizers.glm_tokens import GLMVocabulary, glm_tokenizer
from ..tokenizers.sentinels import add_sentinels
from ..tokenizers.tokenizer import Tokenizer
from .blank_infilling import BlankInfilling
from .causal import GPTDataset
from .datasets import ObjectiveDataset, SentencePairDataset, masked_dataset, span_corruption_dataset
from .glm_texts import GLMDataset, GLMMixture
from .masking import Masking, continuation_ids
from .sentence_pairs import SentencePairs
from .span_corruption import PrefixLM, SpanCorruption

ObjectiveName = Literal["gpt", "bert-nsp", "bert-sop", "roberta", "t5", "prefix-lm", "glm"]


@dataclass(frozen=True)
class PretrainingData:
    """What a batch looks like.

    Args:
        objective: gpt (packed, every token predicted); bert-nsp, bert-sop (sentence pairs); roberta (packed,
            masked); t5 (span corruption); prefix-lm (encoder-decoder); glm (blank infilling).
        sequence_length: of the decoder or encoder input.
        target_length: of an encoder-decoder's target.
        padded: pad every batch to these lengths, so that all batches have one shape.
        mask_probability: share of tokens that is masked, corrupted or blanked.
        mean_span_length: of T5's spans.
        whole_words, longest_ngram: what BERT and RoBERTa mask at once.
        glm_vocabulary: the kind of vocabulary GLM's special tokens are put on.
        glm_token, glm_sentence, glm_single_span, glm_short: GLM's mixture; the rest is the document mode.
        block_mask_probability: GLM's hidden inputs.
    """

    objective: ObjectiveName = "gpt"
    sequence_length: int = 512
    target_length: int = 128
    padded: bool = True
    micro_batch_size: int = 16
    mask_probability: float = 0.15
    mean_span_length: float = 3.0
    whole_words: bool = False
    longest_ngram: int = 1
    glm_vocabulary: GLMVocabulary = "gpt2"
    glm_token: float = 0.5
    glm_sentence: float = 0.3
    glm_single_span: float = 0.0
    glm_short: float = 0.0
    block_mask_probability: float = 0.0
    seed: int = 1234


# The published benchmark of LiBai's mT5: encoder 512, decoder 128, always padded, 15 % masked, 16 per rank.
LIBAI_MT5 = PretrainingData("t5", 512, 128, True, 16, 0.15, 3.0)


def build_dataset(config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer) -> Samples:
    """The dataset of a configuration: endless, sample n a function of (corpus, configuration, n).

    T5's sentinels and GLM's special tokens are put on the tokenizer if it lacks them, so its `vocab_size`
    afterwards is the model's.
    """
    builders: dict[str, Callable[[PretrainingData, IndexedDataset, Tokenizer], Samples]] = {
        "gpt": lambda config, indexed, _: GPTDataset(indexed, config.sequence_length, config.seed),
        "bert-nsp": _bert,
        "bert-sop": _bert,
        "roberta": _roberta,
        "t5": _t5,
        "prefix-lm": _prefix_lm,
        "glm": _glm,
    }
    if config.objective not in builders:
        raise ValueError(f"unknown objective {config.objective!r}; use one of {', '.join(builders)}")
    return builders[config.objective](config, indexed, tokenizer)


def build_loader(
    config: PretrainingData,
    indexed: IndexedDataset,
    tokenizer: Tokenizer,
    *,
    rank: int = 0,
    world_size: int = 1,
    consumed: int = 0,
    num_workers: int = 0,
) -> ResumableLoader:
    """Batches of a configuration for one data-parallel rank, from `consumed` samples (of all ranks) on."""
    dataset = build_dataset(config, indexed, tokenizer)
    pad = tokenizer.special.get("pad_token", tokenizer.special.get("eos_token", 0))
    return ResumableLoader(
        dataset,
        Share(config.micro_batch_size, rank, world_size),
        consumed=consumed,
        num_workers=num_workers,
        collate=PadBatch(pad, _fixed_lengths(config) if config.padded else {}),
    )


def _fixed_lengths(config: PretrainingData) -> dict[str, int]:
    length = labels = config.sequence_length
    if config.objective in ("t5", "prefix-lm"):
        labels = config.target_length
    if config.objective == "glm":  # each span adds a mask and a start or end; there are at most so many spans
        length = labels = length + 2 * (int(config.mask_probability * length) + 1)
    return {"input_ids": length, "position_ids": length, "token_type_ids": length, "labels": labels}


def _masking(config: PretrainingData, tokenizer: Tokenizer) -> Masking:
    names = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)] if config.whole_words else []
    return Masking(
        tokenizer.special_id("mask_token"),
        tokenizer.vocab_size,
        tuple(sorted(set(tokenizer.special.values()))),
        config.mask_probability,
        continuation_ids(names) if names else None,
        config.longest_ngram,
    )


def _bert(config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer) -> Samples:
    pairs = SentencePairs(
        tokenizer.special_id("cls_token"),
        tokenizer.special_id("sep_token"),
        _masking(config, tokenizer),
        config.sequence_length,
        "sop" if config.objective == "bert-sop" else "nsp",
    )
    return SentencePairDataset(indexed, pairs, seed=config.seed)


def _roberta(config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer) -> Samples:
    return masked_dataset(
        indexed,
        _masking(config, tokenizer),
        config.sequence_length,
        cls_token_id=tokenizer.special_id("cls_token"),
        sep_token_id=tokenizer.special_id("sep_token"),
        seed=config.seed,
    )


def _t5(config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer) -> Samples:
    corruption = SpanCorruption(
        add_sentinels(tokenizer), tokenizer.eos_token_id, config.mask_probability, config.mean_span_length
    )
    return span_corruption_dataset(indexed, corruption, config.sequence_length, config.target_length, seed=config.seed)


def _prefix_lm(config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer) -> Samples:
    # Prefix and rest both lie in one run of tokens, so neither is longer than the shorter limit less its end.
    length = min(config.sequence_length, config.target_length)
    return ObjectiveDataset(indexed, length, PrefixLM(tokenizer.eos_token_id), seed=config.seed)


def _glm(config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer) -> Samples:
    ids = glm_tokenizer(tokenizer, config.glm_vocabulary)
    infilling = BlankInfilling(
        ids,
        config.mask_probability,
        config.block_mask_probability,
        sentence_ends=sentence_end_ids(tokenizer),
    )
    mixture = GLMMixture(config.glm_token, config.glm_sentence, config.glm_single_span, config.glm_short)
    return GLMDataset(indexed, config.sequence_length, infilling, mixture, seed=config.seed)
