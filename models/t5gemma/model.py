"""T5Gemma (Zhang et al., 2025, "Encoder-Decoder Gemma: Improving the Quality-Efficiency Trade-Off via
Adaptation", arXiv:2504.06225), an encoder-decoder of two Gemma 2s (see `models/gemma2/model.py`).

- the blocks of Gemma 2: norms of inputs and outputs, capped scores, windows in each second layer,
  rotary positions; the encoder's tokens attend to both sides
- the decoder also attends to the encoder's output, without positions; its stack may be narrower
- each stack has its own scaled word embedding; the head is the decoder's, and caps its logits
- without a mask, ids of padding attend to nothing in their own stack
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...mpu import ParallelMesh, RMSNorm, VocabParallelEmbedding
from ..backbone import Backbone
from ..blocks.attention import CrossAttention, SelfAttention
from ..blocks.cache import Cache, LayerKVCache
from ..blocks.documents import Documents
from ..blocks.masks import key_mask, restart_positions, window_mask
from ..blocks.mlp import GatedMLP
from ..blocks.padding import Tokens
from ..blocks.residual import add_and_norm, residual_dropout
from ..blocks.rotary import Rotary, rotary_embedding
from ..blocks.stack import Block, BlockList
from ..gemma.model import GemmaWordEmbedding
from ..gemma2.config import Gemma2Config
from ..generation.mixin import GenerationMixin
from ..heads import BareModel, SequenceClassification, TokenClassification
from ..language_model import VOCABULARY_MULTIPLE, vocabulary_head
from ..llama.model import Masks
from ..outputs import BackboneOutput, StageOutput
from ..parallel_config import ParallelConfig, layer_arguments
from ..pipeline import PipelineStage
from ..seq2seq import EncoderBackbone, Seq2SeqBackbone, Seq2SeqLM, Seq2SeqStack
from .config import T5GemmaConfig

Rotaries = Mapping[int | None, Rotary]  # window of a layer -> its rotation

# Positions that are given are refused: they follow from the order of the tokens.
T5GEMMA_INPUTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
    "decoder_position_ids",
    "encoder_outputs",
)


class T5GemmaBlock(Block):
    """One layer of the encoder or of the decoder."""

    attends_separately: ClassVar[bool] = True
    """Whether a decoder's block attends to the encoder's output by an attention of its own."""

    def __init__(
        self,
        config: T5GemmaConfig,
        is_decoder: bool,
        layer: int,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        stack = config.decoder_config if is_decoder else config.encoder_config
        size = stack.hidden_size
        shared = layer_arguments(mesh, parallel_config)
        norm = partial(RMSNorm, size, stack.rms_norm_eps, offset=stack.norm_offset, **shared)
        dropout = partial(residual_dropout, config.dropout_rate, mesh, parallel_config)
        attention: dict[str, Any] = {
            "num_key_value_heads": stack.key_value_heads,
            "head_size": stack.head_size,
            "qkv_bias": stack.qkv_bias,
            "output_bias": stack.output_bias,
            "scale": stack.attention_scale,
            "softcap": stack.score_cap,
            "dropout": stack.attention_dropout,
            "mesh": mesh,
            "parallel_config": parallel_config,
        }
        self.is_decoder = is_decoder
        self.window = stack.windows[layer]
        self.attention_norm = norm()
        self.attention = self.build_attention(stack, is_decoder, **attention)
        self.attention_output_norm = norm()
        self.attention_dropout = dropout()
        if is_decoder and self.attends_separately:
            width = config.encoder_config.hidden_size
            self.cross_attention_norm = norm()
            self.cross_attention = CrossAttention(
                size, stack.num_attention_heads, source_size=width, **attention
            )
            self.cross_attention_output_norm = norm()
            self.cross_attention_dropout = dropout()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(
            size,
            stack.intermediate_size,
            stack.hidden_act,
            fused=True,
            dropout=config.dropout_rate,
            mesh=mesh,
            parallel_config=parallel_config,
        )
        self.mlp_output_norm = norm()
        self.mlp_dropout = dropout()

    @classmethod
    def build_attention(
        cls, stack: Gemma2Config, is_decoder: bool, **arguments: Any
    ) -> SelfAttention:
        """Returns the attention of a block to its own tokens."""
        return SelfAttention(stack.hidden_size, stack.num_attention_heads, **arguments)

    def compute(
        self,
        x: Tensor,
        masks: Masks,
        rotaries: Rotaries,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        cache: LayerKVCache | None = None,
        source_cache: LayerKVCache | None = None,
    ) -> Tensor:
        """Returns [B, S, H].

        Args:
            x: [B, S, H].
            masks: The window of a layer -> its mask.
            rotaries: The same of the rotation.
            source: The encoder's output [B, T, E]. For the other arguments see `SelfAttention` and
                `CrossAttention`.
        """
        y, x = self.attention_norm(x, return_residual=True)
        y = self.attend(y, masks[self.window], rotaries[self.window], source, cache, source_cache)
        y = self.attention_output_norm(y)
        dropout = self.attention_dropout
        if source is not None and self.attends_separately:
            y, x = add_and_norm(self.cross_attention_norm, dropout, y, x)
            y = self.cross_attention(y, source, source_mask, source_cache)
            y = self.cross_attention_output_norm(y)
            dropout = self.cross_attention_dropout
        y, x = add_and_norm(self.mlp_norm, dropout, y, x)
        return self.mlp_dropout(self.mlp_output_norm(self.mlp(y)), x)

    def attend(
        self,
        y: Tensor,
        mask: Tensor | Documents | None,
        rotary: Rotary,
        source: Tensor | None,
        cache: LayerKVCache | None,
        source_cache: LayerKVCache | None,
    ) -> Tensor:
        """Returns what the block's tokens see of each other, [B, S, H]; see `compute`."""
        return self.attention(y, mask, causal=self.is_decoder, rotary=rotary, cache=cache)


def build_word_embedding(
    stack: Gemma2Config, mesh: ParallelMesh | None, parallel_config: ParallelConfig
) -> GemmaWordEmbedding:
    """Returns the word embedding of a stack."""
    return GemmaWordEmbedding(
        stack.vocab_size,
        stack.hidden_size,
        pad_multiple=VOCABULARY_MULTIPLE,
        padding_idx=stack.padding_idx,
        **layer_arguments(mesh, parallel_config),
    )


class T5GemmaStack(Seq2SeqStack):
    """The encoder or the decoder."""

    block_class: ClassVar[type[T5GemmaBlock]] = T5GemmaBlock
    shares_embedding: ClassVar[bool] = False
    """Whether both stacks look up their tokens in the embedding of the model."""

    def __init__(
        self,
        config: T5GemmaConfig,
        is_decoder: bool,
        mesh: ParallelMesh | None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        stack = config.decoder_config if is_decoder else config.encoder_config
        if not is_decoder and not self.shares_embedding:
            self.word_embeddings = build_word_embedding(stack, mesh, parallel_config)
        self.config = stack
        self.is_decoder = is_decoder
        self.mesh = mesh
        self.sequence_parallel = parallel_config.sequence_parallel
        self.embedding_dropout = residual_dropout(config.dropout_rate, mesh, parallel_config)
        self.blocks = BlockList(
            (
                self.block_class(config, is_decoder, layer, mesh, parallel_config)
                for layer in range(stack.num_hidden_layers)
            ),
            parallel_config,
        )
        self.final_norm = RMSNorm(
            stack.hidden_size,
            stack.rms_norm_eps,
            offset=stack.norm_offset,
            **layer_arguments(mesh, parallel_config),
        )
        self.final_dropout = residual_dropout(config.dropout_rate, mesh, parallel_config)

    def embed(
        self, words: Tensor, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> Tensor:
        # transformers scales the embeddings that a program gives, too.
        factor = torch.full(
            (), self.config.hidden_size**0.5, dtype=words.dtype, device=words.device
        )
        return self.embedding_dropout(words * factor)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        mask: Any,
        source: Tensor | None = None,
        source_mask: Tensor | Tokens | Documents | None = None,
        cache: Cache | None = None,
        pieces: Tensor | None = None,
    ) -> list[Tensor]:
        cached = 0 if cache is None else cache.length
        if mask is None and cache is None and pieces is None and not ids.is_floating_point():
            padding = self.config.pad_token_id
            if padding is not None:
                mask = (ids != padding)[:, None, None]
        masks = self.find_masks(mask, ids, cached, pieces)
        return super().forward(x, ids, cast(Any, masks), source, source_mask, cache, pieces)

    def find_masks(self, mask: Any, ids: Tensor, cached: int, pieces: Tensor | None) -> Masks:
        """Returns the window of a layer -> its mask, from that of a call without windows."""
        masks: dict[int | None, Any] = {}
        for window in set(self.config.windows):
            masks[window] = mask
            if window is None:
                continue
            given: Any = mask
            if isinstance(mask, Documents):
                given = None if mask.keys is None else mask.keys[:, 0, 0]
            elif mask is not None and mask.shape[-2] == 1 and not mask.is_floating_point():
                given = mask[:, 0, 0]
            masks[window] = self.make_window_mask(given, ids, cached, window, pieces)
        return masks

    def make_window_mask(
        self, given: Tensor | None, ids: Tensor, cached: int, window: int, pieces: Tensor | None
    ) -> Tensor | Documents | None:
        """Returns the mask of a window; see `window_mask`."""
        return window_mask(
            given,
            ids.shape[1],
            cached,
            window,
            causal=self.is_decoder,
            device=ids.device,
            pieces=pieces,
        )

    def shared_arguments(
        self, ids: Tensor, cached: int, pieces: Tensor | None = None
    ) -> tuple[Rotaries]:
        positions = torch.arange(cached, cached + ids.shape[1], device=ids.device)[None]
        if pieces is not None:
            positions = restart_positions(pieces)
        rotaries: dict[int | None, Rotary] = {}
        # A pipeline stage may lack the final norm, but has a block.
        dtype = next(self.blocks.parameters()).dtype
        for window, rope in zip(self.config.windows, self.config.ropes, strict=True):
            # All layers with a window rotate alike, and so do the others.
            if window not in rotaries:
                rotaries[window] = rotary_embedding(
                    positions,
                    self.config.head_size,
                    rope,
                    self.config.max_position_embeddings,
                    dtype,
                    mesh=self.mesh,
                )
        return (rotaries,)

    def finish(self, x: Tensor) -> Tensor:
        return self.final_dropout(self.final_norm(x))


class T5GemmaWeights(Backbone):
    """The encoder and the initial weights. With `mesh=None` the model is not split."""

    config: T5GemmaConfig
    stack_class: ClassVar[type[T5GemmaStack]] = T5GemmaStack

    def __init__(
        self,
        config: T5GemmaConfig,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.parallel_config = parallel_config or ParallelConfig()
        self.add_stacks()

    def add_stacks(self) -> None:
        """Adds the encoder, and what else there is without a head, in the order of the pipeline."""
        self.encoder = self.stack_class(self.config, False, self.mesh, self.parallel_config)

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        if name.endswith(".bias") or "norm" in name:  # The norms multiply by 1 + weight.
            full.zero_()
            return
        scale = self.config.decoder_config.initializer_range
        if name in ("classifier.weight", "head.weight"):
            scale *= full.shape[0] ** -0.5
        full.normal_(0.0, scale, generator=generator)


class T5GemmaEncoderBackbone(EncoderBackbone, T5GemmaWeights):
    """The encoder without a head."""

    positional_inputs = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")

    @property
    def word_embeddings(self) -> GemmaWordEmbedding:  # type: ignore[override] - that of its stack
        return cast(GemmaWordEmbedding, self.encoder.word_embeddings)


class T5GemmaBackbone(Seq2SeqBackbone, T5GemmaWeights):
    """Encoder and decoder without a head."""

    positional_inputs = (
        *T5GEMMA_INPUTS,
        "past_key_values",
        "inputs_embeds",
        "decoder_inputs_embeds",
    )
    drops_padding = False  # Windows count positions with padding.

    def add_stacks(self) -> None:
        super().add_stacks()
        stack = self.config.decoder_config
        self.word_embeddings = build_word_embedding(stack, self.mesh, self.parallel_config)
        self.decoder = self.stack_class(self.config, True, self.mesh, self.parallel_config)

    def send_hidden_states(self, *states: Tensor) -> StageOutput:
        widths = self.config.encoder_config.hidden_size, self.config.decoder_config.hidden_size
        if widths[0] != widths[1]:
            raise ValueError(
                "pipeline stages exchange states of one width, but the stacks have "
                f"{widths[0]} and {widths[1]}; use pipeline_parallel_size=1"
            )
        return super().send_hidden_states(*states)


class T5GemmaForConditionalGeneration(Seq2SeqLM, T5GemmaBackbone, GenerationMixin):
    """T5Gemma that answers a text with another one."""

    def add_head(self) -> None:
        softcap = self.config.decoder_config.final_logit_softcapping
        self.head = vocabulary_head(self, softcap=softcap)


class T5GemmaModel(BareModel, T5GemmaBackbone):
    """T5Gemma without a head."""


class T5GemmaEncoderModel(BareModel, T5GemmaEncoderBackbone):
    """The encoder of T5Gemma without a head."""


class T5GemmaClassifier(T5GemmaBackbone):
    """T5Gemma whose outputs are those of a classifier without an encoder, as in transformers.

    With `is_encoder_decoder=false` it has no decoder, and classifies the encoder's states.
    """

    def add_stacks(self) -> None:
        if self.config.has_encoder_alone:
            T5GemmaWeights.add_stacks(self)
        else:
            super().add_stacks()

    @property
    def embedding(self) -> VocabParallelEmbedding:
        if self.config.has_encoder_alone:
            return cast(GemmaWordEmbedding, self.encoder.word_embeddings)
        return super().embedding

    @property
    def attends_to_encoder(self) -> bool:
        return not self.config.has_encoder_alone

    def run_backbone(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: tuple[Any, ...] | None = None,
        cache: Cache | None = None,
        *,
        seq_idx: Tensor | None = None,
        decoder_seq_idx: Tensor | None = None,
    ) -> BackboneOutput | StageOutput:
        """Runs both stacks, or the encoder alone. See `Seq2SeqBackbone.run_backbone`.

        Raises:
            ValueError: A decoder's input is given, but there is no decoder.
        """
        if not self.config.has_encoder_alone:
            return super().run_backbone(
                input_ids,
                attention_mask,
                decoder_input_ids,
                decoder_attention_mask,
                encoder_outputs,
                cache,
                seq_idx=seq_idx,
                decoder_seq_idx=decoder_seq_idx,
            )
        for name, value in (
            ("decoder_input_ids", decoder_input_ids),
            ("decoder_attention_mask", decoder_attention_mask),
            ("encoder_outputs", encoder_outputs),
            ("decoder_seq_idx", decoder_seq_idx),
        ):
            if value is not None:
                raise ValueError(
                    f"{name} is for a decoder, which a {type(self).__name__} with "
                    "is_encoder_decoder=false does not have"
                )
        states, _ = self.run_encoder(input_ids, key_mask(attention_mask, seq_idx), seq_idx)
        if not self.encoder.blocks.has_last:
            return PipelineStage.send_hidden_states(self, states[-1])
        return BackboneOutput(states, None)

    def collect_hidden_states(
        self, hidden: BackboneOutput, output_hidden_states: bool
    ) -> dict[str, Any]:
        decoder_alone = hidden._replace(encoder_states=None)
        return super().collect_hidden_states(decoder_alone, output_hidden_states)


class T5GemmaForSequenceClassification(SequenceClassification, T5GemmaClassifier):
    """T5Gemma that classifies a text, by the decoder's state at the last token of the source, or by
    the encoder's if there is no decoder.
    """

    positional_inputs = (*T5GEMMA_INPUTS, "inputs_embeds", "decoder_inputs_embeds")
    pooling = "last"

    def pool(self, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.config.has_encoder_alone:
            return super().pool(x, input_ids, attention_mask)
        x = self.gather_hidden_states(x)  # [B, T, H]
        tokens = self.find_tokens(input_ids)
        last = (torch.arange(tokens.shape[1], device=x.device) * tokens).argmax(-1)
        # The decoder reads the source behind a start token.
        last = (last + 1).clamp(max=x.shape[1] - 1)
        return x[torch.arange(len(x), device=x.device), last]


class T5GemmaForTokenClassification(TokenClassification, T5GemmaClassifier):
    """T5Gemma that classifies each token, by the decoder's states of a source that it reads, or by
    the encoder's if there is no decoder.
    """

    positional_inputs = (*T5GEMMA_INPUTS, "inputs_embeds", "decoder_inputs_embeds")
    linear_name = "classifier"
