"""Makes RoBERTa samples: masked words in full sentences (Liu et al., "RoBERTa", 2019, section 4.2)."""

from __future__ import annotations

from dataclasses import replace

from ..indexed.dataset import IndexedDataset
from ..tokenizers.tokenizer import Tokenizer
from .masking import Masking, masking_with
from .packed import ObjectiveDataset
from .pretraining import PretrainingData, objective


def masked_dataset(
    indexed: IndexedDataset, masking: Masking, length: int, *, cls_token_id: int, sep_token_id: int, seed: int = 1234
) -> ObjectiveDataset:
    """Returns samples in RoBERTa's FULL-SENTENCES format: `[CLS] packed text [SEP]`, masked, `length` tokens each."""
    special = (*masking.special_ids, cls_token_id, sep_token_id)
    masking = replace(masking, special_ids=tuple(dict.fromkeys(special)))
    return ObjectiveDataset(indexed, length, masking, seed=seed, prefix=(cls_token_id,), suffix=(sep_token_id,))


@objective("roberta")
def build_roberta(config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer) -> ObjectiveDataset:
    """Builds samples for an encoder."""
    return masked_dataset(
        indexed,
        masking_with(
            tokenizer, config.mask_probability, whole_words=config.whole_words, longest_ngram=config.longest_ngram
        ),
        config.sequence_length,
        cls_token_id=tokenizer.special_id("cls_token"),
        sep_token_id=tokenizer.special_id("sep_token"),
        seed=config.seed,
    )
