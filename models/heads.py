"""Provides the heads that a family puts on its backbone, besides those of language_model.py.

An architecture is a class of its family that inherits from a head and from the family's backbone:

    class BertForSequenceClassification(SequenceClassification, BertBackbone): ...

The class attributes of a head are settings, which the architecture may change. All matrices of a
head but the vocabulary's are replicated. Losses are transformers': the mean over the labels, or the
sum divided by `num_items_in_batch`. The outputs have Hugging Face's field names; logits without a
vocabulary are the same on every rank.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..mpu import (
    Dropout,
    ParallelMesh,
    dropout_state,
    gather_from_context,
    gather_sequence,
    share_gradient,
)
from .backbone import Head
from .blocks.activation_functions import find_activation
from .blocks.conditional_random_field import ConditionalRandomField
from .blocks.global_pointer import score_spans, span_loss
from .language_model import IGNORED, MaskedLM
from .outputs import (
    BaseModelOutput,
    ClassifierOutput,
    ModelOutput,
    PreTrainingOutput,
    QuestionAnsweringOutput,
    StageOutput,
)
from .parallel_config import layer_arguments


def class_loss(
    logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None, ignored: int = IGNORED
) -> Tensor:
    """Returns the fp32 cross-entropy of replicated logits [..., C] with classes int64 [...].

    The result is the mean over the labels that are not `ignored`, or the sum divided by
    `num_items`.

    Raises:
        ValueError: The logits do not have the class of a label. On an accelerator, where a check
            would wait for the device, PyTorch stops the process instead.
    """
    reduction = "mean" if num_items is None else "sum"
    rows = widen(logits).view(-1, logits.shape[-1])
    classes = labels.reshape(-1)
    try:
        loss = F.cross_entropy(rows, classes, ignore_index=ignored, reduction=reduction)
    except IndexError:
        wrong = classes[(classes != ignored) & ((classes < 0) | (classes >= rows.shape[1]))]
        raise ValueError(
            f"label {int(wrong[0])} is no class of the model, which has {rows.shape[1]}"
        ) from None
    return loss if num_items is None else loss / num_items


def widen(logits: Tensor) -> Tensor:
    """Returns logits as fp32, or as fp64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def first_token(x: Tensor, *, sequence_parallel: bool, mesh: ParallelMesh | None) -> Tensor:
    """Returns the first position's hidden state on every rank: [B, S, H], or [B, S/tp, H] -> [B,
    H].
    """
    if sequence_parallel:
        # Each rank sends the first position of its part: [B, tp, H].
        x = gather_sequence(x[:, :1], mesh, partial_grad=False)
    return gather_from_context(x[:, :1], mesh)[:, 0]


def average_tokens(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Returns the mean [B, H] of the states x [B, S, H] of the tokens that are not padding."""
    weights = attention_mask
    if weights is None:
        weights = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
    weights = weights[..., None]  # [B, S, 1]
    return (x * weights).sum(1) / weights.sum(1)


class BareModel(Head):
    """The embeddings and blocks without a head."""

    is_bare = True
    pooler_name: ClassVar[str | None] = None
    """The name of the module that pools the first token's state, which `config.add_pooling_layer`
    may leave out.
    """

    def add_head(self) -> None:
        if self.pooler_name is not None and self.config.add_pooling_layer:
            self.add_module(self.pooler_name, nn.Linear(self.hidden_size, self.hidden_size))

    def compute_outputs(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        **options: Any,
    ) -> BaseModelOutput | StageOutput:
        """Returns the last hidden states. For the inputs see the family's `run_backbone`."""
        hidden = self.run_backbone(input_ids, attention_mask, **options)
        if isinstance(hidden, StageOutput):
            return hidden
        pooled = None
        if self.pooler_name is not None and self.config.add_pooling_layer:
            shared = layer_arguments(self.mesh, self.parallel_config)
            first = first_token(hidden.states[-1], **shared)
            pooled = self.get_submodule(self.pooler_name)(first).tanh()
        last = self.gather_hidden_states(hidden.states[-1])
        states = self.collect_hidden_states(hidden, output_hidden_states)
        return BaseModelOutput(last, pooled, **states)


class PreTraining(MaskedLM):
    """Predicts the masked tokens, and whether the second sentence follows the first."""

    label_names = ("labels", "next_sentence_label")

    def add_head(self) -> None:
        super().add_head()
        self.pooler = nn.Linear(self.hidden_size, self.hidden_size)
        self.next_sentence = nn.Linear(self.hidden_size, 2)

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_sequences_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        **options: Any,
    ) -> PreTrainingOutput | StageOutput:
        """Returns both kinds of logits and, with both kinds of labels, the loss, as in
        transformers.

        The loss is the sum of the two mean losses, or of the two summed losses divided by
        `num_items_in_batch` labels and `num_sequences_in_batch` sequences.

        Args:
            next_sentence_label: int64 [B], 0 if the second sentence follows the first, else 1. For
                the other arguments see `MaskedLM`.
        """
        if labels is None or next_sentence_label is None:
            labels = None
            next_sentence_label = None
        elif (num_items_in_batch is None) != (num_sequences_in_batch is None):
            raise ValueError("give both num_items_in_batch and num_sequences_in_batch, or neither")
        hidden = self.run_backbone(input_ids, attention_mask, **options)
        if isinstance(hidden, StageOutput):
            return hidden
        x = self.head.transform(hidden.states[-1])
        first = first_token(hidden.states[-1], **layer_arguments(self.mesh, self.parallel_config))
        scores = self.next_sentence(self.pooler(first).tanh())  # [B, 2]
        loss, logits = self.loss_and_logits(
            self.head.decoder, x, labels, num_items_in_batch, hidden.table
        )
        if loss is not None and next_sentence_label is not None:
            sentence_loss = class_loss(scores, next_sentence_label, num_sequences_in_batch)
            loss = loss + share_gradient(sentence_loss, self.mesh)
        states = self.collect_hidden_states(hidden, output_hidden_states)
        return PreTrainingOutput(loss, logits, scores, **states)


class Classifier(Head):
    """Base of the heads that classify. Their logits are replicated."""

    label_names = ("labels",)
    dropout_rate: ClassVar[str | None] = "classifier_dropout_prob"
    """The configuration's attribute with the rate of the dropouts; None for no dropout."""
    linear_name: ClassVar[str] = "classifier"
    """The name of the module that makes the logits."""
    bias: ClassVar[bool] = True
    """Whether the logits have a bias."""

    @property
    def num_outputs(self) -> int:
        """The number of logits for each position or sequence."""
        return self.config.num_labels

    def add_head(self) -> None:
        self.dropout = self.make_dropout()
        linear = nn.Linear(self.hidden_size, self.num_outputs, bias=self.bias)
        self.add_module(self.linear_name, linear)

    def make_dropout(self) -> nn.Module:
        """Returns a dropout of the configured rate, or an identity if the head has none."""
        if self.dropout_rate is None:
            return nn.Identity()
        return Dropout(getattr(self.config, self.dropout_rate))

    def score(self, x: Tensor) -> Tensor:
        """Returns the logits [..., C] of replicated states [..., H]."""
        return self.get_submodule(self.linear_name)(self.dropout(x))

    @property
    def label_classes(self) -> int | None:
        """The number of classes of integer labels; None for a regression, which one class is unless
        `problem_type` says that it is a class.
        """
        is_class = self.config.problem_type == "single_label_classification"
        if self.config.num_labels == 1 and not is_class:
            return None
        return self.config.num_labels

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        **options: Any,
    ) -> ModelOutput:
        """Returns the logits and, with labels, the loss.

        See `loss` and the family's `run_backbone` for the inputs.
        """
        hidden = self.run_backbone(input_ids, attention_mask, **options)
        if isinstance(hidden, StageOutput):
            return hidden
        logits = self.make_logits(hidden.states[-1], input_ids, attention_mask)
        loss = None
        if labels is not None:
            loss = share_gradient(self.loss(logits, labels, num_items_in_batch), self.mesh)
        states = self.collect_hidden_states(hidden, output_hidden_states)
        return ClassifierOutput(loss, logits, **states)

    def make_logits(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Returns the logits of the last hidden states, [B, S, H] or [B, S/tp, H]: by default those
        of each token.
        """
        return self.score(self.gather_hidden_states(x))

    def loss(
        self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Returns the mean cross-entropy with the classes `labels`, or the sum divided by
        `num_items_in_batch`.

        Labels of -100 are ignored.
        """
        return class_loss(logits, labels, num_items_in_batch)

    def count_targets(self, labels: Tensor) -> Tensor:
        """Returns the number of terms in the loss of `labels`."""
        return (labels != IGNORED).sum()


class SequenceClassification(Classifier):
    """Classifies sequences: with one label, several labels or numbers for each, by
    `config.problem_type`.

    The pooled state passes through a dropout, a dense layer and its activation, another dropout and
    the classifier.
    """

    pooling: Literal["first", "last", "eos", "mean"] = "first"
    """Which states represent a sequence: those of its first, its last (that is not padding) or its
    last end-of-sequence token, or the mean over its attention mask."""
    dense_name: ClassVar[str | None] = None
    """The name of the dense layer; None for none."""
    activation: str = "tanh"
    """The activation of the dense layer."""
    drops_input: ClassVar[bool] = False
    """Whether there is a dropout before the dense layer."""

    def add_head(self) -> None:
        if self.dense_name is not None:
            self.add_module(self.dense_name, nn.Linear(self.hidden_size, self.hidden_size))
        super().add_head()
        self.input_dropout = self.make_dropout() if self.drops_input else nn.Identity()

    def make_logits(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.classify(self.pool(x, input_ids, attention_mask))  # [B, num_labels]

    @classmethod
    def example_ids(cls, config: Any, ids: Tensor) -> Tensor:
        if cls.pooling == "eos":
            # Each row gets one end-of-sequence token, at its end.
            ends = torch.tensor(config.eos_token_id)
            without_ends = ids.masked_fill(torch.isin(ids, ends), 0)
            last = ends.view(-1)[:1].expand(len(ids), 1)
            return torch.cat([without_ends[:, :-1], last], 1)
        if cls.pooling == "last" and config.pad_token_id is None:
            return ids[:1]  # See `find_tokens`.
        return ids

    def classify(self, pooled: Tensor) -> Tensor:
        """Returns the logits [B, C] of the sequences' states [B, H]."""
        if self.dense_name is not None:
            pooled = self.get_submodule(self.dense_name)(self.input_dropout(pooled))
            if self.activation == "tanh":
                pooled = pooled.tanh()
            else:
                pooled = find_activation(self.activation)(pooled)
        return self.score(pooled)

    def pool(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Returns the state of each sequence [B, H], from [B, S, H] or [B, S/tp, H]."""
        if self.pooling == "first":
            return first_token(x, **layer_arguments(self.mesh, self.parallel_config))
        x = self.gather_hidden_states(x)  # [B, S, H]
        if self.pooling == "mean":
            return average_tokens(x, attention_mask)
        if self.pooling == "eos":
            candidates = self.find_ends(input_ids)
        else:
            candidates = self.find_tokens(input_ids)
        last = (torch.arange(x.shape[1], device=x.device) * candidates).argmax(-1)  # [B]
        return x[torch.arange(len(x), device=x.device), last]

    def find_tokens(self, input_ids: Tensor) -> Tensor:
        """Returns which ids are not padding, bool [B, S].

        Without a padding token, a batch is one sequence.
        """
        if self.config.pad_token_id is not None:
            if input_ids.is_floating_point():  # as in transformers, none are padding then
                return torch.ones_like(input_ids[..., 0], dtype=torch.bool)
            return input_ids != self.config.pad_token_id
        if len(input_ids) > 1:
            raise ValueError(
                f"{type(self).__name__} finds the last token by the padding token's id: set "
                "pad_token_id in the configuration, or classify one sequence at a time"
            )
        return torch.ones(input_ids.shape[:2], dtype=torch.bool, device=input_ids.device)

    def find_ends(self, input_ids: Tensor) -> Tensor:
        """Returns which ids end a sequence, bool [B, S].

        Raises ValueError if a sequence has no end.
        """
        if input_ids.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} finds the end of a sequence by its id: pass input_ids "
                "instead of inputs_embeds"
            )
        end_ids = torch.tensor(self.config.eos_token_id, device=input_ids.device)
        ends = torch.isin(input_ids, end_ids)
        if not ends.any(1).all():
            raise ValueError(
                f"{type(self).__name__} classifies the state of the last token "
                f"{self.config.eos_token_id} (eos_token_id), but a sequence of input_ids has none"
            )
        return ends

    def problem_type(self, labels: Tensor) -> str:
        """Returns the configured problem type, or infers it like transformers: integer labels are
        classes.
        """
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.config.num_labels == 1:
            return "regression"
        if labels.is_floating_point():
            return "multi_label_classification"
        return "single_label_classification"

    def loss(
        self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Returns the mean loss, or the sum divided by `num_items_in_batch`; see `count_targets`.

        The loss is the cross-entropy, the squared error, or the binary cross-entropy of each label.

        Args:
            logits: [B, num_labels].
            labels: Classes int64 [B] (-100 is ignored), or floats [B, num_labels] (or [B] for one
                output).
        """
        problem = self.problem_type(labels)
        if problem == "single_label_classification":
            return class_loss(logits, labels, num_items_in_batch)
        if labels.numel() != logits.numel():
            raise ValueError(
                f"{problem} needs labels of shape {tuple(logits.shape)}, one for each output, not "
                f"{tuple(labels.shape)}"
            )
        function = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        wide = widen(logits)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = function(wide, labels.view_as(wide).to(wide.dtype), reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def count_targets(self, labels: Tensor) -> Tensor:
        if self.problem_type(labels) == "single_label_classification":
            return super().count_targets(labels)
        return torch.tensor(labels.numel(), device=labels.device)


class NextSentencePrediction(SequenceClassification):
    """Predicts whether the second sentence follows the first (class 0) or not (class 1)."""

    dropout_rate = None
    linear_name = "next_sentence"

    @property
    def num_outputs(self) -> int:
        return 2

    @property
    def label_classes(self) -> int:
        return 2

    def problem_type(self, labels: Tensor) -> str:
        return "single_label_classification"


class MultipleChoice(SequenceClassification):
    """Chooses one of C sequences: each is classified by one logit."""

    linear_name = "choice_classifier"

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def label_classes(self) -> None:
        """None: a batch's number of choices limits its labels."""
        return

    @classmethod
    def example_ids(cls, config: Any, ids: Tensor) -> Tensor:
        return torch.stack([ids, ids.flip(1)], 1)  # [B, 2, S]

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> ModelOutput:
        """Returns the logits [B, C] and, with labels, the loss.

        Hidden states are those of all B · C sequences.

        Args:
            input_ids: int64 [B, C, S], or embeddings [B, C, S, H]; the other inputs of the family's
                `run_backbone` have the shape of the ids.
            labels: int64 [B], the number of the right choice; -100 is ignored.
        """
        batch, choices = input_ids.shape[:2]
        for name, value in options.items():
            if isinstance(value, Tensor) and value.dim() >= 3:
                options[name] = value.flatten(0, 1)  # [B · C, S]
        with dropout_state.rows_per_sample(choices):
            output = super().compute_outputs(input_ids.flatten(0, 1), **options)
        if isinstance(output, StageOutput):
            return output
        logits = output.logits.view(batch, choices)
        loss = None
        if labels is not None:
            loss = share_gradient(class_loss(logits, labels, num_items_in_batch), self.mesh)
        return ClassifierOutput(loss, logits, hidden_states=output.hidden_states)

    def count_targets(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED).sum()


class TokenClassification(Classifier):
    """Classifies each token: labels int64 [B, S], logits [B, S, num_labels].

    With `config.crf` a conditional random field scores the labels of a sequence together: the logits
    are its emissions. Its positions are those whose label is not -100, so that the further pieces of
    a word, whose labels are ignored, are skipped. Without labels they are those of the attention
    mask.

    With `config.pointer_size` a global pointer scores spans instead: the logits and the labels are
    [B, num_labels, S, S], by the first and the last token of a span; see blocks/global_pointer.py.
    """

    linear_name = "token_classifier"

    @property
    def num_outputs(self) -> int:
        pointer_size = self.config.pointer_size
        width = 1 if pointer_size is None else 2 * pointer_size  # a query and a key
        return self.config.num_labels * width

    @property
    def label_classes(self) -> int | None:
        return super().label_classes if self.config.pointer_size is None else 2

    def add_head(self) -> None:
        super().add_head()
        if self.config.crf:
            self.crf_layer = ConditionalRandomField(self.num_outputs)

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        if name.startswith("crf_layer."):
            full.uniform_(-0.1, 0.1, generator=generator)
        else:
            super().initialize_parameter(name, full, generator)

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> ModelOutput:
        """Returns the logits and, with labels, the loss; see `Classifier.compute_outputs`.

        With a conditional random field, the output in evaluation mode has its `predictions` too.
        """
        output = super().compute_outputs(
            input_ids, attention_mask=attention_mask, labels=labels, **options
        )
        if not self.config.crf or self.training or not isinstance(output, ClassifierOutput):
            return output
        if labels is not None:
            kept = labels != IGNORED
        else:
            kept = find_tokens_to_label(output.logits, attention_mask)
        output.predictions = self.crf_layer.decode(output.logits, kept, IGNORED)
        return output

    def make_logits(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        logits = super().make_logits(x, input_ids, attention_mask)
        if self.config.pointer_size is None:
            return logits
        kept = find_tokens_to_label(logits, attention_mask)
        return score_spans(logits, self.config.num_labels, kept)

    def loss(
        self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Returns the loss of `Classifier.loss`, or that of the conditional random field or of the
        global pointer.

        A field's is the negative log-likelihood of all sequences, divided by the number of labels
        that are not -100, or by `num_items_in_batch`. A pointer's is the mean over texts and kinds
        of entities, or their sum divided by `num_items_in_batch`.
        """
        if self.config.pointer_size is not None:
            losses = span_loss(logits, labels)
            return (
                losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch
            )
        if not self.config.crf:
            return super().loss(logits, labels, num_items_in_batch)
        kept = labels != IGNORED
        total = self.crf_layer.negative_log_likelihood(logits, labels, kept).sum()
        return total / (kept.sum() if num_items_in_batch is None else num_items_in_batch)

    def count_targets(self, labels: Tensor) -> Tensor:
        if self.config.pointer_size is None:
            return super().count_targets(labels)
        return torch.tensor(labels.shape[0] * self.config.num_labels, device=labels.device)


def find_tokens_to_label(logits: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Returns which tokens of logits [B, S, …] are not padding, bool [B, S]."""
    if attention_mask is not None and attention_mask.dim() == 2:
        return attention_mask != 0
    return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)


class QuestionAnswering(Classifier):
    """Finds the first and the last token of the answer in the text."""

    label_names = ("start_positions", "end_positions")
    dropout_rate = None
    linear_name = "qa_outputs"

    @property
    def num_outputs(self) -> int:
        return 2

    def compute_outputs(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
        **options: Any,
    ) -> QuestionAnsweringOutput | StageOutput:
        """Returns both kinds of logits and, with both positions, the mean of their losses.

        Args:
            input_ids, attention_mask, options: See the family's `run_backbone`.
            start_positions, end_positions: int64 [B]; as in transformers, positions after the
                sequence are ignored.
        """
        hidden = self.run_backbone(input_ids, attention_mask, **options)
        if isinstance(hidden, StageOutput):
            return hidden
        scores = self.score(self.gather_hidden_states(hidden.states[-1]))  # [B, S, 2]
        start, end = scores.unbind(-1)  # [B, S] each
        loss = None
        if start_positions is not None and end_positions is not None:
            length = start.shape[1]
            losses: list[Tensor] = []
            for logits, positions in ((start, start_positions), (end, end_positions)):
                inside = positions.view(-1).clamp(0, length)
                losses.append(class_loss(logits, inside, num_items_in_batch, ignored=length))
            loss = share_gradient((losses[0] + losses[1]) / 2, self.mesh)
        states = self.collect_hidden_states(hidden, output_hidden_states)
        return QuestionAnsweringOutput(loss, start, end, **states)
