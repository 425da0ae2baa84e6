"""Implements `generate`, which decodes sequences from prompts, for every kind of generative model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import cache_shared_heads
from ..outputs import EncoderOutput, ModelOutput
from .decoders import BlankDecoder, CausalDecoder, Decoder, Seq2SeqDecoder
from .generation_config import resolve_settings
from .prompts import begin_decoder, check_ids, check_mask, find_left_padding
from .settings import GenerationSettings
from .strategies import beam_search, decode, group_beam_search


@dataclass
class GenerateOutput(ModelOutput):
    """Sequences, int64 [B · num_return_sequences, T], and after beam search their scores, fp32 of
    each.
    """

    sequences: Tensor
    sequences_scores: Tensor | None = None


@dataclass(frozen=True)
class Extras:
    """The arguments of `generate` that are objects with transformers' interfaces. stop_strings
    needs the tokenizer.
    """

    logits_processor: Sequence[Any] = ()
    stopping_criteria: Sequence[Any] = ()
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None
    streamer: Any = None
    tokenizer: Any = None


def generate(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    decoder_input_ids: Tensor | None = None,
    decoder_attention_mask: Tensor | None = None,
    encoder_outputs: EncoderOutput | None = None,
    position_ids: Tensor | None = None,
    generation_attention_mask: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    return_dict_in_generate: bool | None = None,
    **settings: Any,
) -> Tensor | GenerateOutput:
    """Generates sequences. The model's class attribute `generates` determines what they are.

    These are continuations of the prompts (GPT-2), answers to them (T5, mT5), or the contents of
    their first blank (GLM). Arguments that are not listed have transformers' meaning.

    Args:
        input_ids: int64 [B, S], the same on every tensor-parallel rank; None starts from the bos
            token.
        attention_mask: [B, S], 0 for padding, which is on the left of prompts to be continued.
        position_ids: for a GLM, as its tokenizer's `build_inputs_for_generation` makes them; not
            for `fill_blanks`.
        generation_attention_mask: The same.
        generation_config: transformers' object, the contents of its file, or `GenerationSettings`.
            It overrides `model.generation_config`, the settings of the model's folder.
        return_dict_in_generate: Whether to return a `GenerateOutput`; by default as
            `model.generation_config` says, or else not.
        settings: fields of `GenerationSettings`, with transformers' names. They override
            generation_config; None unsets a setting.

    Returns:
        int64 [B * num_return_sequences, T] on every rank: prompt and continuation, or the decoder's
        sequence. A `GenerateOutput` with return_dict_in_generate. With max_new_tokens=0 the result
        is the prompt.

    Raises:
        ValueError: an unknown argument, a token outside the vocabulary, or too few positions for
            the sequences.
    """
    check_model(model)
    made = resolve_settings(model, generation_config, settings)
    if return_dict_in_generate is None:
        return_dict_in_generate = model.generation_config.returns_dict
    extras = Extras(
        logits_processor or (),
        stopping_criteria or (),
        prefix_allowed_tokens_fn,
        streamer,
        tokenizer,
    )
    kind = getattr(model, "generates", None)
    # Inference mode saves a few percent of a step; the results are copied into ordinary tensors
    # afterwards.
    with evaluating(model), torch.inference_mode():
        if kind == "answer":
            found = _answer(
                model,
                input_ids,
                attention_mask,
                decoder_input_ids,
                decoder_attention_mask,
                encoder_outputs,
                made,
                extras,
            )
        elif kind == "blanks":
            found = _fill(model, input_ids, position_ids, generation_attention_mask, made, extras)
        elif kind == "continuation":
            found = _continue(model, input_ids, attention_mask, made, extras)
        else:
            raise ValueError(
                f"a {type(model).__name__} generates no text; see generation.fill_mask"
            )
    sequences = found.sequences.clone()
    if not return_dict_in_generate:
        return sequences
    scores = found.sequences_scores
    return GenerateOutput(sequences, None if scores is None else scores.clone())


def _continue(
    model: Any,
    ids: Tensor | None,
    mask: Tensor | None,
    settings: GenerationSettings,
    extras: Extras,
) -> GenerateOutput:
    """Continues prompts int64 [B, S], or the bos token."""
    if ids is None or ids.shape[-1] == 0:
        if settings.bos_token_id is None:
            raise ValueError(
                "the prompt is empty and the model has no bos_token_id to start with: pass "
                "bos_token_id=…"
            )
        rows = 1 if ids is None else len(ids)
        ids = torch.full((rows, 1), settings.bos_token_id, device=find_device(model))
        mask = None
    ids = ids.to(find_device(model))
    check_ids(ids, model.config.vocab_size + model.extra_input_ids)
    mask = find_left_padding(ids, None if mask is None else mask.to(ids.device), settings)
    limit = settings.length_limit(ids.shape[1])
    limit = fit_positions(ids.shape[1], limit, model.config.max_sequence_length, settings)
    copies = sequences_per_prompt(settings)
    # The last token is never read.
    capacity = limit - 1 if settings.use_cache else None
    decoder = CausalDecoder(model, mask, copies=copies, capacity=capacity)
    return search(decoder, ids, limit, settings, extras, attention_mask=mask)


def _answer(
    model: Any,
    ids: Tensor | None,
    mask: Tensor | None,
    decoder_ids: Tensor | None,
    decoder_mask: Tensor | None,
    encoded: EncoderOutput | None,
    settings: GenerationSettings,
    extras: Extras,
) -> GenerateOutput:
    """Answers inputs int64 [B, S], or what the encoder made of them."""
    device = find_device(model)
    copies = sequences_per_prompt(settings)
    if ids is None and encoded is None:
        raise ValueError("an encoder-decoder answers input_ids: pass them, or encoder_outputs")
    if ids is not None:
        if ids.shape[-1] == 0:
            raise ValueError(
                "the prompt is empty; an encoder needs at least one token, such as the "
                "end-of-sequence token"
            )
        ids = ids.to(device)
        check_ids(ids, model.config.vocab_size + model.extra_input_ids)
        pad = settings.pad_token_id
        if mask is None and pad is not None and pad not in settings.eos_token_ids:
            mask = (ids != pad).long()
        if mask is not None:
            mask = mask.to(device)
            check_mask(mask, ids)
            if bool((mask != 0).all()):
                mask = None
    if encoded is None:
        encoded = model.encode(ids, mask)
    assert encoded is not None
    prompt, decoder_mask = begin_decoder(
        decoder_ids, decoder_mask, len(encoded.last_hidden_state), settings, device
    )
    check_ids(prompt, model.config.vocab_size, "decoder_input_ids")
    if decoder_mask is not None and bool((decoder_mask != 0).all()):
        decoder_mask = None
    limit = settings.length_limit(prompt.shape[1])
    positions = model.config.max_target_length
    if positions is not None:
        limit = fit_positions(prompt.shape[1], limit, positions, settings)
    capacity = limit - 1 if settings.use_cache else None
    decoder = Seq2SeqDecoder(model, encoded, mask, decoder_mask, copies=copies, capacity=capacity)
    return search(decoder, prompt, limit, settings, extras, encoder_ids=ids)


def _fill(
    model: Any,
    ids: Tensor | None,
    positions: Tensor | None,
    visible: Tensor | None,
    settings: GenerationSettings,
    extras: Extras,
) -> GenerateOutput:
    """Fills the first blank of texts int64 [B, S] that the tokenizer of a GLM has prepared."""
    if ids is None or positions is None or visible is None:
        raise ValueError(
            "a GLM needs input_ids, position_ids and generation_attention_mask, which its "
            "tokenizer's build_inputs_for_generation makes; shardzoo.generation.fill_blanks needs "
            "only the tokens of a text"
        )
    device = find_device(model)
    length = ids.shape[1]
    ids = ids.to(device)
    check_ids(ids, model.config.vocab_size)
    has_positions = positions.dim() == 3 and positions.shape[2] >= length
    has_mask = visible.dim() == 4 and visible.shape[3] >= length
    if not has_positions or not has_mask:
        raise ValueError(
            f"for {length} tokens position_ids must be [B, 2, {length} or more] and "
            f"generation_attention_mask [B, 1, {length} or more, the same]; they are "
            f"{list(positions.shape)} and {list(visible.shape)}"
        )
    # The tokenizer has prepared them for the new tokens, too, which `BlankDecoder` adds itself.
    positions = positions.to(device)[:, :, :length].expand(len(ids), -1, -1)
    visible = visible.to(device)[:, 0, :length, :length].bool().expand(len(ids), -1, -1)
    return fill(model, ids, positions, visible, settings, extras)


def fill(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    visible: Tensor,
    settings: GenerationSettings,
    extras: Extras,
) -> GenerateOutput:
    """Fills one blank of each row of ids [B, T0], as `BlankDecoder`.

    Raises:
        ValueError: The positions do not suffice.
    """
    limit = settings.length_limit(ids.shape[1])
    most = model.config.max_sequence_length + 1
    last = int(positions[:, 1, -1].max()) + limit - ids.shape[1] - 1
    if int(positions.max()) >= most or last >= most:
        raise ValueError(
            f"the text needs {int(positions[:, 0].max()) + 1} positions and its span up to {last}, "
            f"but the model has {most}; use a shorter text or a smaller max_new_tokens"
        )
    capacity = limit - 1 if settings.use_cache else None
    decoder = BlankDecoder(
        model, positions, visible, copies=sequences_per_prompt(settings), capacity=capacity
    )
    return search(decoder, ids, limit, settings, extras, attention_mask=visible[:, -1].long())


def search(
    decoder: Decoder,
    prompt: Tensor,
    limit: int,
    settings: GenerationSettings,
    extras: Extras,
    *,
    encoder_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> GenerateOutput:
    """Decodes from prompts int64 [B, T] to at most `limit` tokens, with the strategy that the
    settings select.

    `encoder_ids` [B, S] are the encoder's input; `attention_mask` [B, T] is that of prompts that
    are continued.
    """
    ids = prompt.repeat_interleave(decoder.copies, 0)
    model = decoder.model
    if limit == prompt.shape[1]:
        return GenerateOutput(ids[:: max(1, decoder.copies // settings.num_return_sequences)])
    # Diverse beam search processes the scores of one group at a time.
    rows_of_call = decoder.copies // settings.num_beam_groups
    if encoder_ids is not None:
        encoder_ids = encoder_ids.repeat_interleave(rows_of_call, 0)
    if attention_mask is not None:
        attention_mask = attention_mask.repeat_interleave(rows_of_call, 0)

    # transformers' processors take a second to import, and only a call needs them.
    from .logits_processors import LogitsProcessors

    processors = LogitsProcessors(
        settings,
        model.config.vocab_size,
        model.mesh,
        prompt=ids,
        limit=limit,
        encoder_ids=encoder_ids,
        attention_mask=attention_mask,
        processors=extras.logits_processor,
        criteria=extras.stopping_criteria,
        prefix_allowed_tokens_fn=extras.prefix_allowed_tokens_fn,
        tokenizer=extras.tokenizer,
    )
    if settings.num_beams == 1:
        return GenerateOutput(decode(decoder, ids, limit, settings, processors, extras.streamer))
    if extras.streamer is not None:
        raise ValueError(
            "a streamer needs num_beams=1, because beam search chooses its tokens only at the end"
        )
    method = beam_search if settings.num_beam_groups == 1 else group_beam_search
    return GenerateOutput(*method(decoder, ids, limit, settings, processors))


def sequences_per_prompt(settings: GenerationSettings) -> int:
    """Returns the number of sequences that are decoded for each prompt."""
    return settings.num_beams if settings.num_beams > 1 else settings.num_return_sequences


def fit_positions(prompt: int, limit: int, positions: int, settings: GenerationSettings) -> int:
    """Returns `limit`, reduced to the positions if it is the default.

    Raises:
        ValueError: The positions do not suffice.
    """
    if prompt > positions:
        raise ValueError(
            f"the prompt has {prompt} tokens, but the model has only {positions} positions; "
            "shorten it"
        )
    # The last token needs no position, because nothing follows it.
    most = positions + 1
    if limit > most:
        if settings.max_new_tokens is None and settings.max_length is None:
            return most
        raise ValueError(
            f"{prompt} prompt tokens and {limit - prompt} new tokens need {limit - 1} positions, "
            f"but the model has {positions}; use max_new_tokens up to {most - prompt}"
        )
    return limit


def check_model(model: nn.Module) -> None:
    """Raises ValueError for models with sequence parallelism, and for models that are not of the
    zoo.
    """
    if getattr(getattr(model, "parallel_config", None), "sequence_parallel", False):
        raise ValueError(
            "decoding needs complete sequences on each rank: load the model without sequence "
            "parallelism"
        )
    if getattr(model, "config", None) is None:
        raise ValueError(
            f"a {type(model).__name__} is not a model of the zoo; load one with "
            "shardzoo.from_pretrained"
        )


def find_device(model: nn.Module) -> torch.device:
    """Returns the device of a model's parameters."""
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Puts the model in evaluation mode for the duration of the context, in which its weights must
    not change.
    """
    was_training = model.training
    model.eval()
    try:
        with cache_shared_heads(model):
            yield
    finally:
        model.train(was_training)
