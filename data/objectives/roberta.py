"""Makes RoBERTa samples: masked words in full sentences.

Liu et al., "RoBERTa", 2019, section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..indexed.dataset import IndexedDataset
from ..tokenizers.tokenizer import Tokenizer
from .masking import MaskedObjective, Masking
from .objective import Format, PretrainingData
from .packed import ObjectiveDataset


def masked_dataset(
    indexed: IndexedDataset,
    masking: Masking,
    length: int,
    *,
    cls_token_id: int,
    sep_token_id: int,
    seed: int = 1234,
    separate_documents: bool = False,
) -> ObjectiveDataset:
    """Returns samples in RoBERTa's FULL-SENTENCES format: `[CLS] packed text [SEP]`, masked,
    `length` tokens each.

    For `separate_documents` see `ObjectiveDataset`.
    """
    special = (*masking.special_ids, cls_token_id, sep_token_id)
    masking = replace(masking, special_ids=tuple(dict.fromkeys(special)))
    return ObjectiveDataset(
        indexed,
        length,
        masking,
        seed=seed,
        prefix=(cls_token_id,),
        suffix=(sep_token_id,),
        separate_documents=separate_documents,
    )


@dataclass(frozen=True)
class RobertaObjective(MaskedObjective):
    """Predicts masked tokens of packed text, whose masks differ in every epoch.

    Args:
        separate_documents: Whether the documents that are packed into one sequence do not see one
            another: attention and positions begin anew with each.
    """

    name: ClassVar[str] = "roberta"
    format: ClassVar[Format] = "masked"
    shortest: ClassVar[int] = 4  # <s>, two tokens of text, </s>

    separate_documents: bool = False

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> ObjectiveDataset:
        return masked_dataset(
            indexed,
            self.masking(tokenizer),
            data.sequence_length,
            cls_token_id=tokenizer.special_id("cls_token"),
            sep_token_id=tokenizer.special_id("sep_token"),
            seed=data.seed,
            separate_documents=self.separate_documents,
        )
