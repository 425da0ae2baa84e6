"""BERT (Devlin et al., 2018, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding").

- word, position and segment embeddings, added and normalized
- post-LayerNorm blocks: norm(x + attention(x)), then norm(x + mlp(x)); every token attends to all but padding
- fused qkv with biases, exact GELU
- masked-language-model head: a replicated dense layer and norm, then the word embedding and a separate bias, both
  split over the vocabulary
- a tanh layer pools the first token's state to represent the sequence, for next-sentence prediction and classification
- initial weights N(0, 0.02); the padding token's embedding and all biases zero
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...mpu import Dropout, LayerNorm, ParallelMesh, VocabParallelEmbedding, VocabParallelHead
from ..common.language_model import VOCABULARY_MULTIPLE, LanguageModel, PositionEmbedding, ReplicatedLinear, first_token
from ..common.masks import key_mask
from ..common.parallel_config import LayerArguments, ParallelConfig, layer_arguments, residual_dropout
from ..common.stack import Hidden, run_blocks
from ..common.transformer import MLP, SelfAttention, find_activation
from .classification import SequenceClassifier, class_loss
from .config import BertConfig
from .outputs import MaskedLMOutput, PreTrainingOutput


class BertBlock(nn.Module):
    def __init__(self, config: BertConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig) -> None:
        super().__init__()
        size, eps, heads = config.hidden_size, config.layer_norm_eps, config.num_attention_heads
        shared = layer_arguments(mesh, parallel_config)
        self.attention = SelfAttention(
            size,
            heads,
            scale=(size // heads) ** -0.5,
            dropout=config.attention_probs_dropout_prob,
            mesh=mesh,
            parallel_config=parallel_config,
        )
        self.attention_dropout = residual_dropout(config.hidden_dropout_prob, mesh, parallel_config)
        self.attention_norm = LayerNorm(size, eps, **shared)
        self.mlp = MLP(size, config.intermediate_size, config.hidden_act, mesh=mesh, parallel_config=parallel_config)
        self.mlp_dropout = residual_dropout(config.hidden_dropout_prob, mesh, parallel_config)
        self.mlp_norm = LayerNorm(size, eps, **shared)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.attention_dropout(self.attention(x, mask)))
        return self.mlp_norm(x + self.mlp_dropout(self.mlp(x)))


class BertEncoder(nn.Module):
    """The embeddings and blocks, without a head."""

    def __init__(self, config: BertConfig, mesh: ParallelMesh | None, parallel_config: ParallelConfig) -> None:
        super().__init__()
        self.config, self.mesh, self.max_sequence_length = config, mesh, config.max_sequence_length
        self.sequence_parallel = parallel_config.sequence_parallel
        self.recompute_blocks = parallel_config.recompute == "full"
        size = config.hidden_size
        shared = layer_arguments(mesh, parallel_config)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, size, padding_idx=config.pad_token_id, pad_multiple=VOCABULARY_MULTIPLE, **shared
        )
        self.position_embeddings = PositionEmbedding(
            config.max_position_embeddings, size, padding_idx=config.position_padding_idx, **shared
        )
        self.token_type_embeddings = PositionEmbedding(config.type_vocab_size, size, **shared)
        self.embedding_norm = LayerNorm(size, config.layer_norm_eps, **shared)
        self.embedding_dropout = residual_dropout(config.hidden_dropout_prob, mesh, parallel_config)
        self.blocks = nn.ModuleList(BertBlock(config, mesh, parallel_config) for _ in range(config.num_hidden_layers))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Hidden:
        """Returns the hidden states, and the word embedding table for a head."""
        x, table = self.embed(input_ids, token_type_ids, position_ids)
        mask = key_mask(attention_mask)
        return Hidden(run_blocks(self.blocks, x, lambda _: (mask,), self.recompute_blocks), table)

    def embed(
        self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the blocks' input [B, S, H], or [B, S/tp, H] under sequence parallelism, and the table for a head."""
        if position_ids is None:
            position_ids = self.default_position_ids(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids[:1])
        x, table = self.word_embeddings.embed(input_ids)
        x = x + self.token_type_embeddings(token_type_ids)
        return self.embedding_dropout(self.embedding_norm(x + self.position_embeddings(position_ids))), table

    def default_position_ids(self, input_ids: Tensor) -> Tensor:
        """Returns position ids, int64 [1, S], or [B, S] if padding has a separate position.

        In that case the other tokens are counted from the padding position, wherever the padding is:
        cumsum(token is not padding) + padding position, as in fairseq and transformers.

        Raises:
            ValueError: There are more tokens than positions.
        """
        length, most = input_ids.shape[1], self.max_sequence_length
        if length > most:
            raise ValueError(f"the sequence has {length} tokens, but the model has only {most} positions")
        padding = self.position_embeddings.padding_idx
        if padding is None:
            return torch.arange(length, device=input_ids.device)[None]
        is_token = input_ids != self.config.pad_token_id
        return is_token.cumsum(1) * is_token + padding

    def first_token(self, x: Tensor) -> Tensor:
        """Returns the first token's hidden state [B, H] on every rank, from [B, S, H] or [B, S/tp, H]."""
        return first_token(x, sequence_parallel=self.sequence_parallel, mesh=self.mesh)


class MaskedLMHead(nn.Module):
    """Computes norm(activation(dense(x))) times the word embedding, plus a bias."""

    def __init__(self, encoder: BertEncoder, activation: str) -> None:
        super().__init__()
        config, size = encoder.config, encoder.config.hidden_size
        shared = LayerArguments(mesh=encoder.mesh, sequence_parallel=encoder.sequence_parallel)
        self.activation = find_activation(activation)
        self.dense = ReplicatedLinear(size, size, **shared)
        self.norm = LayerNorm(size, config.layer_norm_eps, **shared)
        self.decoder = VocabParallelHead(size, config.vocab_size, bias=True, tied=encoder.word_embeddings, **shared)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits [B, S, Vp] of [B, S, H] or [B, S/tp, H]."""
        return self.decoder(self.transform(x))

    def transform(self, x: Tensor) -> Tensor:
        """Returns the input of `decoder`, in the shape of x."""
        return self.norm(self.activation(self.dense(x)))


class BertModel(nn.Module):
    """Base of the models with different heads. With `mesh=None` the model is not split."""

    config: BertConfig

    def __init__(
        self, config: BertConfig, mesh: ParallelMesh | None = None, parallel_config: ParallelConfig | None = None
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.encoder = BertEncoder(config, mesh, parallel_config or ParallelConfig())

    def init_weights(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        if name.endswith(".bias"):
            full.zero_()
        elif "norm" in name:
            full.fill_(1.0)
        else:
            full.normal_(0.0, self.config.initializer_range, generator=generator)
            if "word_embeddings" in name and self.config.pad_token_id is not None:
                full[self.config.pad_token_id].zero_()
            if "position_embeddings" in name and self.config.position_padding_idx is not None:
                full[self.config.position_padding_idx].zero_()


class BertForMaskedLM(BertModel, LanguageModel):
    """Predicts the masked tokens."""

    generates = "masks"
    sparse_labels = True

    def __init__(
        self, config: BertConfig, mesh: ParallelMesh | None = None, parallel_config: ParallelConfig | None = None
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.head = MaskedLMHead(self.encoder, config.head_act)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
    ) -> MaskedLMOutput:
        """Returns the logits and, with labels, the mean loss, or the summed loss divided by `num_items_in_batch`.

        Args:
            input_ids, token_type_ids, position_ids: int64 [B, S].
            attention_mask: [B, S], 0 for padding.
            labels: int64 [B, S], the token at each position; -100 is ignored.
        """
        hidden_states, table = self.encoder(input_ids, attention_mask, token_type_ids, position_ids)
        x = self.head.transform(hidden_states[-1])
        loss, logits = self.loss_and_logits(self.head.decoder, x, labels, num_items_in_batch, table)
        return MaskedLMOutput(loss, logits, tuple(hidden_states) if output_hidden_states else None)


class BertForPreTraining(BertModel, LanguageModel):
    """Predicts the masked tokens, and whether the second sentence follows the first."""

    generates = "masks"
    sparse_labels = True

    def __init__(
        self, config: BertConfig, mesh: ParallelMesh | None = None, parallel_config: ParallelConfig | None = None
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.head = MaskedLMHead(self.encoder, config.head_act)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.next_sentence = nn.Linear(config.hidden_size, 2)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_sequences_in_batch: Tensor | int | None = None,
        output_hidden_states: bool = False,
    ) -> PreTrainingOutput:
        """Returns both kinds of logits and, with both kinds of labels, the loss, as in transformers.

        The loss is the sum of the two mean losses, or of the two summed losses divided by `num_items_in_batch` labels
        and `num_sequences_in_batch` sequences.

        Args:
            next_sentence_label: int64 [B], 0 if the second sentence follows the first, else 1. For the other
                arguments see `BertForMaskedLM`.
        """
        if labels is None or next_sentence_label is None:
            labels = next_sentence_label = None
        elif (num_items_in_batch is None) != (num_sequences_in_batch is None):
            raise ValueError("give both num_items_in_batch and num_sequences_in_batch, or neither")
        hidden_states, table = self.encoder(input_ids, attention_mask, token_type_ids, position_ids)
        x = self.head.transform(hidden_states[-1])
        scores = self.next_sentence(self.pooler(self.encoder.first_token(hidden_states[-1])).tanh())  # [B, 2]
        loss, logits = self.loss_and_logits(self.head.decoder, x, labels, num_items_in_batch, table)
        if loss is not None and next_sentence_label is not None:
            loss = loss + class_loss(scores, next_sentence_label, num_sequences_in_batch)
        return PreTrainingOutput(loss, logits, scores, tuple(hidden_states) if output_hidden_states else None)


class BertForSequenceClassification(BertModel, SequenceClassifier):
    """A linear classifier on the first token's pooled state."""

    def __init__(
        self, config: BertConfig, mesh: ParallelMesh | None = None, parallel_config: ParallelConfig | None = None
    ) -> None:
        super().__init__(config, mesh, parallel_config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def classify(self, first: Tensor) -> Tensor:
        """Returns the logits [B, num_labels] of the first token's hidden state [B, H]."""
        return self.classifier(self.dropout(self.pooler(first).tanh()))
