"""Text to training samples: tokenizers, Megatron `.bin/.idx` corpora, objectives, fine-tuning data, streams.

Names are loaded when they are first used, so that reading and writing corpora needs neither torch nor
datasets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batching import EpochShuffle, LengthBuckets, PackedDataset, pack_lengths
    from .blank_infilling import BlankInfilling
    from .collate import PadBatch
    from .corpus import Corpus, prepare_corpus
    from .documents import SourceReport, fail_on_bad, iter_documents, skip_bad
    from .entropy import token_counts, unigram_entropy
    from .finetune import BlockDataset, PromptDataset, Seq2SeqDataset
    from .glm_texts import GLMDataset, GLMMixture
    from .glm_tokens import GLMTokens, glm_token_ids, glm_tokenizer
    from .gpt import GPTDataset
    from .index_format import dtype_for_vocabulary
    from .indexed import IndexedDataset
    from .indexed_writer import IndexedDatasetWriter, WriterState
    from .loader import ResumableLoader, Share
    from .masking import Masking
    from .merge import merge_datasets, split_dataset
    from .objectives import ObjectiveDataset, SentencePairDataset, masked_dataset, span_corruption_dataset
    from .packed import PackedTokens
    from .pairs import load_pairs
    from .prepare import PrepareOptions, PrepareReport, prepare_dataset
    from .pretraining import LIBAI_MT5, PretrainingData, build_dataset, build_loader
    from .sentence_pairs import SentencePairs
    from .sentencepiece_training import train_sentencepiece
    from .sentences import sentence_end_ids, split_sentences
    from .sentinels import add_sentinels, sentinel_ids
    from .span_corruption import PrefixLM, SpanCorruption
    from .stdlib import python_stdlib
    from .stream import DocumentRecords, IterableRecords, ResumableStream
    from .tokenizer import Tokenizer, load_tokenizer
    from .tokenizer_training import train_byte_level_bpe, train_wordpiece

_MODULES = {
    "BlankInfilling": "blank_infilling",
    "BlockDataset": "finetune",
    "Corpus": "corpus",
    "DocumentRecords": "stream",
    "EpochShuffle": "batching",
    "GLMDataset": "glm_texts",
    "GLMMixture": "glm_texts",
    "GLMTokens": "glm_tokens",
    "GPTDataset": "gpt",
    "IndexedDataset": "indexed",
    "IndexedDatasetWriter": "indexed_writer",
    "IterableRecords": "stream",
    "LIBAI_MT5": "pretraining",
    "LengthBuckets": "batching",
    "Masking": "masking",
    "ObjectiveDataset": "objectives",
    "PackedDataset": "batching",
    "PackedTokens": "packed",
    "PadBatch": "collate",
    "PrefixLM": "span_corruption",
    "PrepareOptions": "prepare",
    "PrepareReport": "prepare",
    "PretrainingData": "pretraining",
    "PromptDataset": "finetune",
    "ResumableLoader": "loader",
    "ResumableStream": "stream",
    "SentencePairDataset": "objectives",
    "SentencePairs": "sentence_pairs",
    "Seq2SeqDataset": "finetune",
    "Share": "loader",
    "SourceReport": "documents",
    "SpanCorruption": "span_corruption",
    "Tokenizer": "tokenizer",
    "WriterState": "indexed_writer",
    "add_sentinels": "sentinels",
    "build_dataset": "pretraining",
    "build_loader": "pretraining",
    "dtype_for_vocabulary": "index_format",
    "fail_on_bad": "documents",
    "glm_tokenizer": "glm_tokens",
    "glm_token_ids": "glm_tokens",
    "iter_documents": "documents",
    "load_pairs": "pairs",
    "load_tokenizer": "tokenizer",
    "masked_dataset": "objectives",
    "merge_datasets": "merge",
    "pack_lengths": "batching",
    "prepare_corpus": "corpus",
    "prepare_dataset": "prepare",
    "python_stdlib": "stdlib",
    "sentence_end_ids": "sentences",
    "sentinel_ids": "sentinels",
    "skip_bad": "documents",
    "span_corruption_dataset": "objectives",
    "split_dataset": "merge",
    "split_sentences": "sentences",
    "token_counts": "entropy",
    "train_byte_level_bpe": "tokenizer_training",
    "train_sentencepiece": "sentencepiece_training",
    "train_wordpiece": "tokenizer_training",
    "unigram_entropy": "entropy",
}
__all__ = [
    "LIBAI_MT5",
    "BlankInfilling",
    "BlockDataset",
    "Corpus",
    "DocumentRecords",
    "EpochShuffle",
    "GLMDataset",
    "GLMMixture",
    "GLMTokens",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "IterableRecords",
    "LengthBuckets",
    "Masking",
    "ObjectiveDataset",
    "PackedDataset",
    "PackedTokens",
    "PadBatch",
    "PrefixLM",
    "PrepareOptions",
    "PrepareReport",
    "PretrainingData",
    "PromptDataset",
    "ResumableLoader",
    "ResumableStream",
    "SentencePairDataset",
    "SentencePairs",
    "Seq2SeqDataset",
    "Share",
    "SourceReport",
    "SpanCorruption",
    "Tokenizer",
    "WriterState",
    "add_sentinels",
    "build_dataset",
    "build_loader",
    "dtype_for_vocabulary",
    "fail_on_bad",
    "glm_token_ids",
    "glm_tokenizer",
    "iter_documents",
    "load_pairs",
    "load_tokenizer",
    "masked_dataset",
    "merge_datasets",
    "pack_lengths",
    "prepare_corpus",
    "prepare_dataset",
    "python_stdlib",
    "sentence_end_ids",
    "sentinel_ids",
    "skip_bad",
    "span_corruption_dataset",
    "split_dataset",
    "split_sentences",
    "token_counts",
    "train_byte_level_bpe",
    "train_sentencepiece",
    "train_wordpiece",
    "unigram_entropy",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value
