"""Text to training samples: tokenizers, Megatron `.bin/.idx` corpora, objectives, fine-tuning data and
streams.
"""

from .corpus import Corpus, prepare_corpus
from .documents import SourceReport, fail_on_bad, iter_documents, skip_bad
from .entropy import token_counts, unigram_entropy
from .gpt import GPTDataset
from .index_format import dtype_for_vocabulary
from .indexed import IndexedDataset
from .indexed_writer import IndexedDatasetWriter, WriterState
from .merge import merge_datasets, split_dataset
from .prepare import PrepareOptions, PrepareReport, prepare_dataset
from .stdlib import python_stdlib
from .tokenizer import Tokenizer, load_tokenizer
from .tokenizer_training import train_byte_level_bpe

__all__ = [
    "Corpus",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "PrepareOptions",
    "PrepareReport",
    "SourceReport",
    "Tokenizer",
    "WriterState",
    "dtype_for_vocabulary",
    "fail_on_bad",
    "iter_documents",
    "load_tokenizer",
    "merge_datasets",
    "prepare_corpus",
    "prepare_dataset",
    "python_stdlib",
    "skip_bad",
    "split_dataset",
    "token_counts",
    "train_byte_level_bpe",
    "unigram_entropy",
]
