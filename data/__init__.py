"""Turns text into training samples: tokenizers, Megatron `.bin/.idx` corpora, objectives,
fine-tuning data, streams.

Each name is imported at its first use, so that reading and writing corpora needs neither torch nor
`datasets`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .indexed.dataset import IndexedDataset
    from .indexed.format import dtype_for_vocabulary
    from .indexed.merge import merge_datasets, split_dataset
    from .indexed.writer import IndexedDatasetWriter, WriterState
    from .loading.blocks import BlockStream, documents_in_memory
    from .loading.collate import DataCollator, PadBatch
    from .loading.loader import ResumableLoader, Share
    from .loading.mixture import MixedSamples, parse_mixture
    from .loading.orders import EpochShuffle, LengthBuckets
    from .loading.packing import PackedBlanks, PackedDataset, pack_lengths
    from .loading.pretraining import build_loader
    from .loading.stream import DocumentRecords, IterableRecords, ResumableStream, TextStream
    from .objectives.bart import BartObjective, MBartObjective, TextInfilling
    from .objectives.bert import (
        NextSentenceObjective,
        SentenceOrderObjective,
        SentencePairDataset,
        SentencePairs,
    )
    from .objectives.blank_infilling import BlankInfilling
    from .objectives.denoising import PrefixLM, SpanCorruption
    from .objectives.glm import GLMDataset, GLMMixture, GLMObjective
    from .objectives.gpt import GPTDataset, GPTObjective
    from .objectives.masking import Masking
    from .objectives.objective import Objective, PretrainingData
    from .objectives.packed import ObjectiveDataset, PackedTokens
    from .objectives.prefix_lm import PrefixLMObjective
    from .objectives.registry import build_dataset, find_objective, objective_names
    from .objectives.roberta import RobertaObjective, masked_dataset
    from .objectives.t5 import T5Objective, span_corruption_dataset
    from .objectives.ul2 import MixtureOfDenoisers, UL2Objective
    from .pairs.datasets import (
        BlankDataset,
        BlockDataset,
        ChatDataset,
        PrefixMaskedDataset,
        PromptDataset,
        Seq2SeqDataset,
        load_chats,
    )
    from .pairs.labeled import (
        AnswerSpans,
        ChoiceSamples,
        ClassifiedTexts,
        ClassifiedWords,
        Encoder,
        load_choices,
        load_labeled,
        load_labeled_words,
        load_questions,
    )
    from .pairs.pairs import load_pairs
    from .text.corpus import Corpus, prepare_corpora, prepare_corpus
    from .text.documents import SourceReport, fail_on_bad, iter_documents, skip_bad
    from .text.entropy import target_entropy, token_counts, unigram_entropy
    from .text.prepare import PrepareOptions, PrepareReport, prepare_dataset
    from .text.sentences import sentence_end_ids, split_sentences
    from .text.sources import python_stdlib
    from .tokenizers.glm_tokens import GLMTokens, glm_token_ids, glm_tokenizer
    from .tokenizers.sentinels import add_sentinels, sentinel_ids
    from .tokenizers.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
    from .tokenizers.training import (
        train_byte_level_bpe,
        train_sentencepiece,
        train_tokenizer,
        train_wordpiece,
    )
    from .tokenizers.vocabulary import Vocabulary

# fmt: off
_NAMES = {
    "indexed.dataset": ("IndexedDataset",),
    "indexed.format": ("dtype_for_vocabulary",),
    "indexed.merge": ("merge_datasets", "split_dataset"),
    "indexed.writer": ("IndexedDatasetWriter", "WriterState"),
    "loading.blocks": ("BlockStream", "documents_in_memory"),
    "loading.collate": ("DataCollator", "PadBatch"),
    "loading.loader": ("ResumableLoader", "Share"),
    "loading.mixture": ("MixedSamples", "parse_mixture"),
    "loading.orders": ("EpochShuffle", "LengthBuckets"),
    "loading.packing": ("PackedBlanks", "PackedDataset", "pack_lengths"),
    "loading.pretraining": ("build_loader",),
    "loading.stream": ("DocumentRecords", "IterableRecords", "ResumableStream", "TextStream"),
    "objectives.bart": ("BartObjective", "MBartObjective", "TextInfilling"),
    "objectives.bert": (
        "NextSentenceObjective", "SentenceOrderObjective", "SentencePairDataset", "SentencePairs",
    ),
    "objectives.blank_infilling": ("BlankInfilling",),
    "objectives.denoising": ("PrefixLM", "SpanCorruption"),
    "objectives.glm": ("GLMDataset", "GLMMixture", "GLMObjective"),
    "objectives.gpt": ("GPTDataset", "GPTObjective"),
    "objectives.masking": ("Masking",),
    "objectives.objective": ("Objective", "PretrainingData"),
    "objectives.packed": ("ObjectiveDataset", "PackedTokens"),
    "objectives.prefix_lm": ("PrefixLMObjective",),
    "objectives.registry": ("build_dataset", "find_objective", "objective_names"),
    "objectives.roberta": ("RobertaObjective", "masked_dataset"),
    "objectives.t5": ("T5Objective", "span_corruption_dataset"),
    "objectives.ul2": ("MixtureOfDenoisers", "UL2Objective"),
    "pairs.datasets": (
        "BlankDataset", "BlockDataset", "ChatDataset", "PrefixMaskedDataset", "PromptDataset",
        "Seq2SeqDataset", "load_chats",
    ),
    "pairs.labeled": (
        "AnswerSpans", "ChoiceSamples", "ClassifiedTexts", "ClassifiedWords", "Encoder",
        "load_choices", "load_labeled", "load_labeled_words", "load_questions",
    ),
    "pairs.pairs": ("load_pairs",),
    "text.corpus": ("Corpus", "prepare_corpora", "prepare_corpus"),
    "text.documents": ("SourceReport", "fail_on_bad", "iter_documents", "skip_bad"),
    "text.entropy": ("target_entropy", "token_counts", "unigram_entropy"),
    "text.prepare": ("PrepareOptions", "PrepareReport", "prepare_dataset"),
    "text.sentences": ("sentence_end_ids", "split_sentences"),
    "text.sources": ("python_stdlib",),
    "tokenizers.glm_tokens": ("GLMTokens", "glm_token_ids", "glm_tokenizer"),
    "tokenizers.sentinels": ("add_sentinels", "sentinel_ids"),
    "tokenizers.tokenizer": ("Tokenizer", "load_tokenizer", "save_tokenizer"),
    "tokenizers.training": (
        "train_byte_level_bpe", "train_sentencepiece", "train_tokenizer", "train_wordpiece",
    ),
    "tokenizers.vocabulary": ("Vocabulary",),
}
__all__ = [
    "AnswerSpans", "BartObjective", "BlankDataset", "BlankInfilling", "BlockDataset", "BlockStream",
    "ChatDataset", "ChoiceSamples", "ClassifiedTexts", "ClassifiedWords", "Corpus", "DataCollator",
    "DocumentRecords", "Encoder", "EpochShuffle", "GLMDataset", "GLMMixture", "GLMObjective",
    "GLMTokens", "GPTDataset", "GPTObjective", "IndexedDataset", "IndexedDatasetWriter",
    "IterableRecords", "LengthBuckets", "MBartObjective", "Masking", "MixedSamples",
    "MixtureOfDenoisers", "NextSentenceObjective", "Objective", "ObjectiveDataset", "PackedBlanks", "PackedDataset",
    "PackedTokens", "PadBatch", "PrefixLM", "PrefixLMObjective", "PrefixMaskedDataset",
    "PrepareOptions", "PrepareReport", "PretrainingData", "PromptDataset", "ResumableLoader",
    "ResumableStream", "RobertaObjective", "SentenceOrderObjective", "SentencePairDataset",
    "SentencePairs", "Seq2SeqDataset", "Share", "SourceReport", "SpanCorruption", "T5Objective",
    "TextInfilling", "TextStream", "Tokenizer", "UL2Objective", "Vocabulary", "WriterState",
    "add_sentinels", "build_dataset", "build_loader", "documents_in_memory", "dtype_for_vocabulary",
    "fail_on_bad", "find_objective", "glm_token_ids", "glm_tokenizer", "iter_documents",
    "load_chats", "load_choices", "load_labeled", "load_labeled_words", "load_pairs",
    "load_questions", "load_tokenizer", "masked_dataset", "merge_datasets", "objective_names",
    "pack_lengths", "parse_mixture", "prepare_corpora", "prepare_corpus", "prepare_dataset",
    "python_stdlib", "save_tokenizer", "sentence_end_ids", "sentinel_ids", "skip_bad",
    "span_corruption_dataset", "split_dataset", "split_sentences", "target_entropy", "token_counts",
    "train_byte_level_bpe", "train_sentencepiece", "train_tokenizer", "train_wordpiece",
    "unigram_entropy",
]
# fmt: on
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
