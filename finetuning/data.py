"""Reads the records of a fine-tuning run's files, and makes samples of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..data import (
    AnswerSpans,
    BlankDataset,
    BlockDataset,
    ChatDataset,
    ChoiceSamples,
    ClassifiedTexts,
    ClassifiedWords,
    Encoder,
    LengthBuckets,
    PackedBlanks,
    PackedDataset,
    PadBatch,
    PrefixMaskedDataset,
    PromptDataset,
    Seq2SeqDataset,
    iter_documents,
    load_chats,
    load_choices,
    load_labeled,
    load_labeled_words,
    load_pairs,
    load_questions,
)
from ..data.tokenizers.tokenizer import TransformersTokenizer
from ..files.working_copies import find_source
from ..models import family
from ..models.language_model import IGNORED
from .arguments import WITH_LABELS, FinetuningArguments
from .embedding.data import ColumnKeys, ColumnSamples, load_columns
from .embedding.export import EmbeddingSettings
from .loading import ModelSource
from .preference.data import PreferenceSamples, RewardSamples, load_preferences
from .ranking.data import RankingKeys, RankingSamples, load_rankings
from .tasks import WITH_ANSWERS, WITHOUT_TEXTS, Labels, find_labels, first_record

LONGEST_BLOCK = 1024
Keys = TypeVar("Keys", ColumnKeys, RankingKeys)


class FinetuningData:
    """Gives the records and samples of the run's files. Reads each file once.

    Attributes:
        prompt: The soft prompt's tokens, which are put before every source.
        positions: The maximum number of tokens that the model reads; None if it is unlimited.
        labels: A classifier's labels; None for other tasks.
        blanks: The texts of a family that fills blanks; None for the others.
    """

    def __init__(
        self,
        arguments: FinetuningArguments,
        task: str,
        source: ModelSource,
        tokenizer: TextTokenizer,
    ) -> None:
        self.arguments = arguments
        self.task = task
        self.source = source
        self.tokenizer = tokenizer
        self.prompt: list[str] = []
        self.positions: int | None = None
        self._records: Any = None
        self._split: HeldOutSplit | None = None
        self._validation: Any = None
        self.labels: Labels | None = None
        makes_blanks = family(source.model_type).blank_text if source.native else None
        self.blanks: Any = None if makes_blanks is None else makes_blanks(source.folder, None)
        self.columns: ColumnKeys | None = None
        self.embedding: EmbeddingSettings | None = None
        self.ranking: RankingKeys | None = None
        if task in WITH_LABELS:
            self._choose_labels()
        if task == "embedding":
            self.columns = self._find_columns(ColumnKeys)
            self.embedding = self._choose_embedding()
        if task == "reranking":
            self.ranking = self._find_columns(RankingKeys)

    def _choose_labels(self) -> None:
        found = None
        if self.arguments.train_file is not None:
            found = self._collect_labels(self._train_records())
        self.labels = find_labels(self.arguments, self.task, self.source, found)

    def _find_columns(self, keys: type[Keys]) -> Keys:
        """Returns the keys of the records, from the first of the files."""
        chosen = self.arguments
        for path in (chosen.train_file, chosen.validation_file, chosen.test_file):
            if path is None:
                continue
            record = first_record(find_source(path) or Path(path))
            if record:
                return keys.from_record(record, chosen.columns)
        raise ValueError(
            f"{self.task} needs a train_file, validation_file or test_file with records: JSON "
            "lines, parquet, or a datasets folder with columns of texts"
        )

    def _choose_embedding(self) -> EmbeddingSettings:
        """Returns how embeddings are made: as the arguments say, else as the model's folder does."""
        chosen = self.arguments
        changes = {
            "pooling": chosen.pooling,
            "normalize": chosen.normalize,
            "query_prompt": chosen.query_prompt,
            "document_prompt": chosen.document_prompt,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        folder = self.source.adapter or self.source.folder
        if "pooling" in given:
            # What the folder says of its pooling need not be understood then.
            return EmbeddingSettings(**given)
        return replace(EmbeddingSettings.from_folder(folder, self.source.shape), **given)

    def label_counts(self) -> list[int]:
        """Returns the number of each class in the training data."""
        assert self.labels is not None
        if self.arguments.train_file is None:
            return [1] * len(self.labels.names)
        counts = np.zeros(len(self.labels.names), np.int64)
        for label in self._collect_labels(self._train_records()):
            names = label if isinstance(label, tuple) else (label,)
            for name in names:
                counts[self.labels.find_class(name)] += 1
        return counts.tolist()

    def _collect_labels(self, records: Any) -> list[Any]:
        """Returns the labels of all records, or of all their words."""
        if self.task == WITH_LABELS[0]:
            return [record.label for record in records]
        labels: list[Any] = []
        for record in records:
            labels += record.labels
        return labels

    @property
    def generates(self) -> bool:
        """Whether the model generates texts for sources."""
        return self.task not in (*WITHOUT_TEXTS, "text-generation")

    def pair(self, record: Any) -> tuple[str, str]:
        """Returns source and target of a record as texts; the source as the generator reads it."""
        if self.task != "chat":
            source = self.prepare_source(record[0])
            if self.continues:
                source += self.arguments.separator
            return source, record[1]
        answers = [place for place, message in enumerate(record) if message["role"] == "assistant"]
        last = answers[-1]
        return self.chat(record[:last]), record[last]["content"]

    def chat(self, messages: list[dict[str, str]]) -> str:
        """Returns the text of a conversation, which ends with the beginning of an answer."""
        return ChatDataset([], self.tokenizer.backend, 0).render(messages, prompt=True)

    @property
    def kind(self) -> str:
        """What is measured: a key of `evaluation.METRICS`."""
        if self.labels is not None and self.task == WITH_LABELS[0]:
            of_problems = {"regression": "numbers", "multi_label_classification": "several classes"}
            return of_problems.get(self.labels.problem, "classes")
        if self.ranking is not None:
            return "rankings"
        if self.task in WITH_ANSWERS:
            return "preferences" if self.task == "preference" else "rewards"
        if self.columns is not None:
            return "retrieval" if self.columns.score is None else "similarities"
        kinds = {
            "text-generation": "tokens",
            "token-classification": "words",
            "question-answering": "answers",
            "multiple-choice": "classes",
        }
        return kinds.get(self.task, "texts")

    @property
    def continues(self) -> bool:
        """Whether a target continues its source after the separator."""
        is_decoder = self.source.shape == "decoder" and self.blanks is None
        return is_decoder and self.task == "text2text-generation"

    def check_lengths(self, positions: int | None) -> None:
        """Raises ValueError if samples may be longer than the model's positions."""
        self.positions = positions
        if positions is None:
            return
        arguments = self.arguments
        asked: dict[str, int] = {}
        if self.task == "text-generation":
            asked["block_size"] = arguments.block_size or 0
        else:
            asked["max_source_length"] = arguments.max_source_length
            if self.task not in WITHOUT_TEXTS:
                asked["max_target_length"] = arguments.max_target_length
        if sum(asked.values()) > positions:
            named = " + ".join(f"{name}={value}" for name, value in asked.items())
            raise ValueError(f"{named} is more than the model's {positions} positions; use less")

    def train(self, valid: bool) -> Any:
        """Returns the records to train on, without those for validation if `valid` and there is no
        validation_file.
        """
        if not valid or self.arguments.validation_file is not None:
            return self._train_records()
        return self._split_records().train

    def validation(self) -> Any:
        """Returns the records for validation; None if there are none."""
        if self._validation is None:
            if self.arguments.validation_file is not None:
                found = self.read(self.arguments.validation_file, self.arguments.max_eval_samples)
            elif self.arguments.train_file is None:
                return None
            else:
                found = self._split_records().valid
                if found is not None:
                    found = _select_first(found, self.arguments.max_eval_samples)
            self._validation = found
        return self._validation

    def read(self, path: str, most: int | None) -> Any:
        """Returns the first `most` records of a file, by default all.

        Raises:
            ValueError: A record is bad, or has a label that the model does not have.
        """
        local = str(find_source(path) or path)
        records = _select_first(self._read(local), most)
        if self.labels is not None:
            for number in range(len(records)):
                record = records[number]
                labels = getattr(record, "labels", None) or [record.label]
                for label in labels:
                    self.labels.target(label)
        return records

    def _read(self, path: str) -> Any:
        """Reads the records of the task. ValueError for a bad file."""
        chosen = self.arguments
        keys: Any = {"source_id": chosen.source_id, "target_id": chosen.target_id}
        if self.task == "text-generation":
            size = chosen.block_size or min(self.positions or LONGEST_BLOCK, LONGEST_BLOCK)
            return BlockDataset(iter_documents(path), self.tokenizer, size)
        if self.columns is not None:
            return load_columns(path, self.columns)
        if self.ranking is not None:
            return load_rankings(path, self.ranking)
        if self.task in WITH_ANSWERS:
            is_single = self.task == "preference" and chosen.preference_loss == "kto"
            return load_preferences(path, paired=not is_single)
        if self.task == "text-classification":
            others = {
                "pair_id": chosen.pair_id,
                "weight_id": chosen.weight_id,
                "prefix": chosen.prefix,
            }
            return load_labeled(path, **keys, **others)
        if self.task == "token-classification":
            return load_labeled_words(path, **keys)
        if self.task == "question-answering":
            return load_questions(path)
        if self.task == "multiple-choice":
            others = {
                "pair_id": chosen.pair_id,
                "choices_id": chosen.choices_id,
                "prefix": chosen.prefix,
            }
            return load_choices(path, **keys, **others)
        if self.task == "chat":
            return load_chats(path, messages_id=chosen.messages_id)
        return load_pairs(path, **keys, prefix=chosen.prefix)

    def samples(self, records: Any) -> Any:
        """Returns the samples that the model is trained on: dicts of arrays, each made when it is
        accessed.
        """
        chosen = self.arguments
        lengths = {
            "max_source_length": self.arguments.max_source_length,
            "max_target_length": self.arguments.max_target_length,
        }
        if self.task == "text-generation":
            return records
        if self.task == "chat":
            return ChatDataset(records, self.tokenizer.backend, sum(lengths.values()))
        if self.embedding is not None:
            prompts = (self.embedding.query_prompt, self.embedding.document_prompt)
            return ColumnSamples(records, self.tokenizer.backend, chosen.max_source_length, prompts)
        if self.ranking is not None:
            return RankingSamples(records, self.tokenizer.backend, chosen.max_source_length)
        if self.task == "preference":
            return PreferenceSamples(
                records,
                self.tokenizer.backend,
                chosen.max_source_length,
                chosen.max_target_length,
                has_decoder=self.source.shape == "encoder-decoder",
                shifts=chosen.preference_loss == "kto",
            )
        if self.task == "reward":
            return RewardSamples(records, self.tokenizer.backend, sum(lengths.values()))
        if self.task in WITHOUT_TEXTS:
            return self._labeled_samples(records)
        pairs = SourcesChanged(records, self.prepare_source)
        if self.blanks is not None:
            return BlankDataset(pairs, self.blanks, **lengths)
        if self.source.shape == "encoder":
            return PrefixMaskedDataset(
                pairs, self.tokenizer, self.tokenizer.ends, segments=self.segments, **lengths
            )
        if self.source.shape == "decoder":
            return PromptDataset(
                pairs,
                self.tokenizer,
                separator=chosen.separator,
                begin=self.tokenizer.begin,
                **lengths,
            )
        return Seq2SeqDataset(pairs, self.tokenizer, begin=self.tokenizer.begin, **lengths)

    def training_samples(self, records: Any) -> Any:
        """Returns the samples as they are trained on: packed, or in an order by length, if the
        arguments say so.
        """
        samples = self.samples(records)
        chosen = self.arguments
        if chosen.packing:
            is_decoder = self.source.shape == "decoder"
            if not is_decoder or self.task not in ("chat", "text2text-generation"):
                raise ValueError(
                    "packing is for conversations and pairs of decoders and GLMs, not for "
                    f"{self.task} of {self.source.shape}s"
                )
            if not self.source.native:
                raise ValueError("packing needs a model of the zoo (native=True)")
            size = chosen.block_size or chosen.max_source_length + chosen.max_target_length
            samples = (PackedBlanks if self.blanks else PackedDataset)(samples, size)
        return ByLength(samples) if chosen.group_by_length else samples

    def _labeled_samples(self, records: Any) -> Any:
        encoder = Encoder(
            self.tokenizer.backend, self.arguments.max_source_length, segments=self.segments
        )
        if self.task == "question-answering":
            return AnswerSpans(records, encoder, self.arguments.doc_stride)
        if self.task == "multiple-choice":
            return ChoiceSamples(records, encoder, self.tokenizer.backend.pad_token_id or 0)
        assert self.labels is not None
        if self.task == "token-classification":
            return ClassifiedWords(records, encoder, self.labels.target)
        weighs = self.arguments.weight_id is not None
        return ClassifiedTexts(
            records, encoder, self.labels.target, self.prepare_source, weighs=weighs
        )

    @property
    def segments(self) -> bool:
        """Whether the model tells two texts apart by `token_type_ids`."""
        return int(self.source.values.get("type_vocab_size") or 0) > 1

    def prepare_source(self, text: str) -> str:
        """Returns the text with the soft prompt before it, unless the text has one of its tokens."""
        if any(token in text for token in self.prompt):
            return text
        return "".join(self.prompt) + text

    def _train_records(self) -> Any:
        if self._records is None:
            assert self.arguments.train_file is not None
            self._records = self.read(self.arguments.train_file, self.arguments.max_train_samples)
        return self._records

    def _split_records(self) -> HeldOutSplit:
        if self._split is None:
            self._split = held_out(
                self._train_records(), self.arguments.validation_split, self.arguments.seed
            )
        return self._split


def _select_first(records: Any, most: int | None) -> Any:
    """Returns the first `most` records, or all."""
    if most is None or most >= len(records):
        return records
    return Chosen(records, range(most))


class TextTokenizer(TransformersTokenizer):
    """Gives transformers' tokenizer the interface of `shardzoo.data`. It recognizes special tokens
    in text.

    Attributes:
        begin: Ids that the tokenizer puts before every text, such as a beginning-of-sequence token.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.vocab_size = len(backend)
        whole = backend("a")["input_ids"]
        bare = backend("a", add_special_tokens=False)["input_ids"]
        self.begin: list[int] = []
        for place in range(len(whole)):
            if whole[place : place + len(bare)] == bare:
                self.begin = whole[:place]
                break
        # They are around the texts of an encoder.
        self.ends = (backend.cls_token_id, backend.sep_token_id)
        self.special = {}
        if backend.eos_token_id is not None:
            self.special["eos_token"] = backend.eos_token_id

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.backend(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


class Chosen(Sequence[Any]):
    """A selection of records, in a given order."""

    def __init__(self, records: Sequence[Any], numbers: Sequence[int]) -> None:
        self.records = records
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.records[self.numbers[index]]


class SourcesChanged(Sequence[tuple[str, str]]):
    """Pairs with a function applied to their sources."""

    def __init__(self, pairs: Sequence[tuple[str, str]], change: Callable[[str], str]) -> None:
        self.pairs = pairs
        self.change = change

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        source, target = self.pairs[index]
        return self.change(source), target


class ByLength:
    """Samples whose order gives a batch similar lengths; see `LengthBuckets`."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def make_order(self, seed: int, global_batch: int) -> LengthBuckets:
        lengths: list[int] = []
        for number in range(len(self.samples)):
            lengths.append(self.samples[number]["input_ids"].shape[-1])
        return LengthBuckets(lengths, global_batch, seed=seed)


@dataclass(frozen=True)
class HeldOutSplit:
    train: Sequence[Any]
    valid: Sequence[Any] | None


def held_out(records: Any, percent: float, seed: int) -> HeldOutSplit:
    """Holds out `percent` of the records for validation, at least one unless 0.

    Raises:
        ValueError: None remains to train on.
    """
    if percent == 0:
        return HeldOutSplit(records, None)
    count = max(1, round(len(records) * percent / 100))
    if count >= len(records):
        raise ValueError(
            f"the training file has {len(records)} sample(s), and validation_split={percent:g} "
            "leaves none to train on; name a validation_file, or set validation_split=0"
        )
    order = np.random.default_rng(seed).permutation(len(records))
    return HeldOutSplit(
        Chosen(records, np.sort(order[count:]).tolist()),
        Chosen(records, np.sort(order[:count]).tolist()),
    )


class Collate:
    """Makes a padded batch of samples.

    Args:
        multiple_of: Lengths are rounded up to a multiple of this.
        learn_padding: Whether to pad labels with pad_token_id, which is then predicted, instead of
            -100.
        prefixes: Whether the samples' attention_mask is the length of the part that all tokens
            attend to.
    """

    def __init__(
        self,
        pad_token_id: int,
        multiple_of: int = 1,
        *,
        learn_padding: bool = False,
        prefixes: bool = False,
    ) -> None:
        self.pad_token_id = pad_token_id
        self.learn_padding = learn_padding
        self.prefixes = prefixes
        self._pad = PadBatch(pad_token_id, multiple_of=multiple_of)

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        batch = self._pad(samples)
        if "segment_ids" in batch:
            # Padding is a document of its own, after the others.
            documents = batch.pop("segment_ids")
            is_padding = batch["attention_mask"] == 0
            if "prefix_lengths" in batch:
                batch.pop("attention_mask")
            batch["seq_idx"] = documents.masked_fill(is_padding, documents.shape[1])
        if self.prefixes:
            lengths = [len(sample["input_ids"]) for sample in samples]
            batch["attention_mask"] = prefix_mask(
                batch["attention_mask"], lengths, batch["input_ids"].shape[1]
            )
        if self.learn_padding:
            learned = batch["labels"][:, : max(len(sample["labels"]) for sample in samples)]
            learned[learned == IGNORED] = self.pad_token_id
        return batch


def prefix_mask(prefixes: Tensor, lengths: Sequence[int], size: int | None = None) -> Tensor:
    """Returns bool [B, 1, S, S], True where a query attends to a key: to the prefix, and causally
    to what follows it.

    Args:
        prefixes: int64 [B], the lengths of the prefixes.
        lengths: The lengths of the rows.
        size: S; by default the longest length.
    """
    places = torch.arange(size or max(lengths))
    inside = places < torch.tensor(lengths)[:, None]  # [B, S]
    seen = (places < prefixes[:, None])[:, None] | (places <= places[:, None])  # [B, S, S]
    return (seen & inside[:, None])[:, None]
