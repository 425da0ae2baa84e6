"""Provides what encoder-decoders with mixtures of experts share: their auxiliary losses."""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .blocks.moe import RouterSums, asks_for_router, router_record
from .heads import BareModel
from .language_model import IGNORED
from .outputs import MoeModelOutput, MoeSeq2SeqLMOutput, MoeSeq2SeqModelOutput, StageOutput
from .router_losses import RouterLossStage, RouterTally, select_logits
from .seq2seq import Seq2SeqLM


class MixtureSeq2SeqLM(RouterLossStage, Seq2SeqLM):
    """Predicts the label at each position of the decoder, with the auxiliary losses of mixtures."""

    config: Any  # with `output_router_logits` and the factors of the losses

    experts_per_token: ClassVar[int] = 1
    losses_count_padding: ClassVar[bool] = False
    """Whether padding counts in the losses of all samples together, as in transformers."""

    def compute_auxiliary(
        self, sums: RouterSums, is_decoder: bool, by_sample: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the z-loss and the balance loss of a stack, or None if the family has none.

        Args:
            sums: Of the scores of its routers.
            by_sample: Whether to return the losses of each sample, [B]; otherwise what transformers
                computes.
        """
        raise NotImplementedError

    def shape_logits(self, logits: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns a stack's scores in the shape in which transformers returns them, by default [B, S, E]
        of each router.
        """
        return tuple(logits)

    def compute_outputs(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_router_logits: bool | None = None,
        **options: Any,
    ) -> Any:
        """Returns the outputs of `Seq2SeqLM`, and those of the routers if they are asked for.

        Then the loss has the auxiliary losses times their factors added to it, as in transformers.
        If this call is a part of a batch of `num_items_in_batch` targets, they are each sample's
        own, weighted by its share of the targets, and padding does not count: the losses of the
        parts add up to a mean over the batch, which does not depend on how the batch is divided. In
        a pipeline the last stage adds the losses of all layers, and returns the scores of its own.

        Args:
            output_router_logits: By default what the configuration says.
        """
        inputs: dict[str, Any] = {
            "attention_mask": attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            "labels": labels,
            "num_items_in_batch": num_items_in_batch,
            **options,
        }
        if not asks_for_router(self, output_router_logits):
            return super().compute_outputs(input_ids, **inputs)
        shares = None
        target_mask = decoder_attention_mask
        if labels is not None and num_items_in_batch is not None:
            is_target = labels != IGNORED
            shares = is_target.sum(-1) / num_items_in_batch  # [B]
            if target_mask is None:
                target_mask = is_target
        model: Any = self
        stacks = [(model.encoder, attention_mask), (model.decoder, target_mask)]
        if shares is None and self.losses_count_padding:
            stacks = [(stack, None) for stack, _ in stacks]
        tally = RouterTally(stacks, self.config.expert_count, self.experts_per_token, self.mesh)
        with router_record.recording(tally) as tally.record:
            output: Any = super().compute_outputs(input_ids, **inputs)
        if isinstance(output, StageOutput):
            return output
        loss = output.loss
        found: dict[str, Any] = {}
        for name, (stack, _) in zip(("encoder", "decoder"), stacks, strict=True):
            logits = select_logits(tally.record, stack)
            found[f"{name}_router_logits"] = self.shape_logits(logits)
        if labels is None:
            return MoeSeq2SeqLMOutput.from_output(output, **found)
        for name, sums in zip(("encoder", "decoder"), tally.split(labels), strict=True):
            is_decoder = name == "decoder"
            layers = range(len(getattr(self, name).blocks))
            if not any(self.config.has_experts(layer, is_decoder) for layer in layers):
                continue
            z_loss, balance = self.compute_auxiliary(sums, is_decoder, shares is not None)
            factors = (self.config.router_z_loss_coef, self.config.router_aux_loss_coef)
            names = (f"{name}_z_loss", f"{name}_aux_loss")
            for key, value, factor in zip(names, (z_loss, balance), factors, strict=True):
                if value is None:
                    continue
                if shares is None:
                    loss = loss + factor * value
                    found[key] = value
                else:
                    loss = loss + factor * (shares * value).sum()
                    found[key] = value.mean()
        return MoeSeq2SeqLMOutput.from_output(output, **{"loss": loss, **found})


class MixtureSeq2SeqModel(BareModel):
    """Encoder and decoder with mixtures, or an encoder alone, without a head."""

    def shape_logits(self, logits: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns a stack's scores in the shape in which transformers returns them, by default [B, S, E]
        of each router.
        """
        return tuple(logits)

    def compute_outputs(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        output_router_logits: bool | None = None,
        **options: Any,
    ) -> Any:
        """Returns the last hidden states, and the routers' scores if they are asked for."""
        inputs: dict[str, Any] = {
            "attention_mask": attention_mask,
            "output_hidden_states": output_hidden_states,
            **options,
        }
        if not asks_for_router(self, output_router_logits):
            return super().compute_outputs(input_ids, **inputs)
        with router_record.recording() as record:
            output = super().compute_outputs(input_ids, **inputs)
        if isinstance(output, StageOutput):
            return output
        model: Any = self
        encoder = self.shape_logits(select_logits(record, model.encoder))
        if not hasattr(model, "decoder"):
            return MoeModelOutput.from_output(output, router_logits=encoder)
        return MoeSeq2SeqModelOutput.from_output(
            output,
            encoder_router_logits=encoder,
            decoder_router_logits=self.shape_logits(select_logits(record, model.decoder)),
        )
