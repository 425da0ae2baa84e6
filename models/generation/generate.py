"""Implements `generate`, which decodes sequences from prompts, for every kind of generative model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...mpu import cache_shared_heads, whole_sequences
from ...ops.device import attending_to_growing_cache
from ..blocks.attention import attention_record
from ..calls import read_encoder_outputs
from ..config import shown
from ..outputs import EncoderOutput
from .assistance_settings import AssistanceSettings
from .assisted import Assistant, Drafts, PromptLookup, decode_assisted
from .decoders import BlankDecoder, CausalDecoder, Decoder, Seq2SeqDecoder
from .generation_config import resolve_call
from .outputs import Decoded, StepRecord
from .prompts import begin_decoder, check_ids, check_mask, find_padding, name_token_types
from .settings import GenerationSettings
from .strategies import beam_search, decode, group_beam_search

if TYPE_CHECKING:
    from transformers.generation.utils import GenerateOutput


@dataclass(frozen=True)
class Extras:
    """The arguments of `generate` that are objects: with transformers' interfaces, and what keeps
    the steps' results. stop_strings needs the tokenizer, and `past` is a cache of transformers.
    """

    logits_processor: Sequence[Any] = ()
    stopping_criteria: Sequence[Any] = ()
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None
    streamer: Any = None
    tokenizer: Any = None
    record: StepRecord | None = None
    assistance: AssistanceSettings = field(default_factory=AssistanceSettings)
    assistant: Any = None
    past: Any = None


def generate(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    decoder_input_ids: Tensor | None = None,
    decoder_attention_mask: Tensor | None = None,
    encoder_outputs: EncoderOutput | tuple[Tensor, ...] | None = None,
    inputs_embeds: Tensor | None = None,
    position_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    generation_attention_mask: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    past_key_values: Any = None,
    cache: Any = None,
    **settings: Any,
) -> Tensor | GenerateOutput:
    """Generates sequences. The model's class attribute `generates` determines what they are.

    These are continuations of the prompts (GPT-2), answers to them (T5, mT5), or the contents of
    their first blank (GLM). Arguments that are not listed have transformers' meaning.

    Args:
        input_ids: int64 [B, S], the same on every tensor-parallel rank; None starts from the bos
            token.
        attention_mask: [B, S], 0 for padding, which should be on the left of prompts to be
            continued.
        inputs_embeds: [B, S, H], what is read instead of the prompts' tokens. Without input_ids,
            the result of a decoder is new tokens alone.
        position_ids: int64 [B or 1, S], for a decoder; by default the mask's tokens are counted.
            For a GLM, as its tokenizer's `build_inputs_for_generation` makes them; not for
            `fill_blanks`.
        token_type_ids: int64 [B, S], for a decoder that has token types (GPT-2); for others zeros.
        generation_attention_mask: See position_ids.
        generation_config: transformers' object, the contents of its file, or `GenerationSettings`.
            It overrides `model.generation_config`, the settings of the model's folder.
        synced_gpus: Only for replicas that gather each other's parameters, which the zoo's models
            do not do in decoding.
        assistant_model: A smaller model of the zoo with the same vocabulary, on the same mesh or
            whole on each rank, that drafts tokens, for one prompt without beams.
        past_key_values: A cache of transformers, such as an earlier call has returned, with the
            first positions of input_ids, or of decoder_input_ids. It is extended in place.
        cache: The same, by the name of transformers 5.24 and later.
        settings: fields of `GenerationSettings`, `OutputSettings` and `AssistanceSettings`, with
            transformers' names. They override generation_config; None unsets a setting.

    Returns:
        int64 [B * num_return_sequences, T] on every rank: prompt and continuation, or the decoder's
        sequence. With return_dict_in_generate, a `GenerateOutput`, with scores of all sequences
        after beam search. With max_new_tokens=0 the result is the prompt.

    Raises:
        ValueError: an unknown argument, a token outside the vocabulary, or too few positions for
            the sequences.
    """
    check_model(model)
    if synced_gpus:
        raise ValueError(
            "synced_gpus=True is for replicas that gather each other's parameters in each step; a "
            "model of the zoo decodes with its own parts: leave it out"
        )
    if cache is not None:
        if past_key_values is not None:
            raise ValueError("cache and past_key_values are the same argument: pass one of them")
        past_key_values = cache
    prefix = None
    if inputs_embeds is not None:
        if assistant_model is not None or settings.get("prompt_lookup_num_tokens"):
            raise ValueError("tokens cannot be drafted for inputs_embeds: pass input_ids")
        if input_ids is not None and input_ids.numel():
            prefix = input_ids
        input_ids = inputs_embeds
    call = resolve_call(model, generation_config, settings)
    made = call.generation
    kind = getattr(model, "generates", None)
    record = None
    if call.outputs.return_dict_in_generate:
        is_static = settings.get("cache_implementation") == "static"
        record = StepRecord(call.outputs, is_static=is_static)
        _check_record(record, model, made)
    extras = Extras(
        logits_processor or (),
        stopping_criteria or (),
        prefix_allowed_tokens_fn,
        streamer,
        tokenizer,
        record,
        call.assistance,
        assistant_model,
        past_key_values,
    )
    if past_key_values is not None:
        _check_past(past_key_values, model, made, extras)
    # Inference mode saves a few percent of a step; the results are copied into ordinary tensors
    # afterwards. What the steps leave is too large to copy.
    mode: Any = torch.no_grad()
    if record is None and past_key_values is None:
        mode = torch.inference_mode()
    assistant_mode: Any = nullcontext()
    if assistant_model is not None:
        _check_assistant(assistant_model, model)
        assistant_mode = evaluating(assistant_model)
    growing = attending_to_growing_cache(find_device(model))
    with evaluating(model), assistant_mode, mode, growing:
        if kind == "answer":
            _check_absent(model, position_ids=position_ids)
            name_token_types(model, token_type_ids, _find_source(input_ids, token_type_ids))
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
            _check_absent(
                model,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=encoder_outputs,
                generation_attention_mask=generation_attention_mask,
            )
            found = _continue(
                model, input_ids, attention_mask, position_ids, token_type_ids, made, extras, prefix
            )
        else:
            raise ValueError(
                f"a {type(model).__name__} generates no text; see generation.fill_mask"
            )
    if record is None:
        return found.sequences.clone()
    return record.make_output(found, has_encoder=kind == "answer", has_beams=made.num_beams > 1)


def _find_source(ids: Tensor | None, types: Tensor | None) -> Any:
    """Returns the tensor whose shape an encoder's token types must have."""
    return types if ids is None else ids


def _check_absent(model: Any, **arguments: Any) -> None:
    """Raises ValueError for an argument that models of this kind do not have."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"a {type(model).__name__} generates without {name}: leave it out")


def _check_assistant(assistant: Any, model: Any) -> None:
    """Raises ValueError unless a model can draft tokens for another one."""
    kind = getattr(assistant, "generates", None)
    if kind != getattr(model, "generates", None):
        raise ValueError(
            f"assistant_model is a {type(assistant).__name__}, but a {type(model).__name__} needs "
            "a model of the zoo that generates as it does: load it with shardzoo.from_pretrained"
        )
    check_model(assistant)
    words = model.config.vocab_size
    if assistant.config.vocab_size != words:
        raise ValueError(
            f"assistant_model has a vocabulary of {assistant.config.vocab_size} tokens, but the "
            f"model has {words}; use an assistant with the same tokenizer"
        )
    if assistant.mesh is not None and assistant.mesh is not model.mesh:
        raise ValueError(
            "assistant_model is split over another mesh than the model; load it with the model's "
            "mesh, or without one"
        )


def _check_past(past: Any, model: Any, settings: GenerationSettings, extras: Extras) -> None:
    """Raises ValueError unless a call can go on from a cache."""
    wrong = None
    if not hasattr(past, "get_seq_length"):
        wrong = f"it must be a Cache of transformers, such as DynamicCache, not {shown(past)}"
    elif model.generates == "blanks":
        wrong = "a GLM makes its own cache in each call"
    elif not settings.use_cache:
        wrong = "it needs use_cache=True"
    elif getattr(model, "stage", None) is not None:
        wrong = "a pipeline stage has the keys and values of its own blocks alone"
    elif extras.assistant is not None or extras.assistance.prompt_lookup_num_tokens is not None:
        wrong = "tokens are drafted with a cache of the call's own"
    if wrong is not None:
        raise ValueError(f"past_key_values: {wrong}")


def _check_past_length(past: Any, length: int) -> None:
    """Raises ValueError unless a cache has fewer positions than the tokens so far."""
    if past is not None and past.get_seq_length() >= length:
        raise ValueError(
            f"past_key_values has {past.get_seq_length()} positions, so the {length} tokens of the "
            "prompt have nothing new: pass all tokens so far"
        )


def _check_record(record: StepRecord, model: Any, settings: GenerationSettings) -> None:
    """Raises ValueError if the model or the strategy cannot keep what a call asks for."""
    wanted = record.wanted
    wants_states = wanted.output_hidden_states or wanted.output_attentions
    if wants_states and getattr(model, "stage", None) is not None:
        raise ValueError(
            "output_hidden_states and output_attentions: a pipeline stage has those of its own "
            "blocks only; use tensor parallelism alone"
        )
    if wanted.output_attentions and model.generates == "blanks":
        raise ValueError("output_attentions: a GLM keeps none in decoding; call the model instead")
    has_steps = wanted.output_scores or wanted.output_logits or wants_states
    if settings.num_beam_groups > 1 and has_steps:
        raise ValueError(
            "diverse beam search keeps no scores, logits or states of its steps; use "
            "num_beam_groups=1"
        )


def _continue(
    model: Any,
    ids: Tensor | None,
    mask: Tensor | None,
    positions: Tensor | None,
    types: Tensor | None,
    settings: GenerationSettings,
    extras: Extras,
    prefix: Tensor | None,
) -> Decoded:
    """Continues prompts int64 [B, S], or the bos token.

    Args:
        prefix: int64 [B, S], with which the sequences begin, if `ids` are embeddings [B, S, H].
    """
    device = find_device(model)
    embeddings = None
    if ids is not None and ids.is_floating_point() and ids.dim() == 3:
        embeddings = ids.to(device)
        if prefix is None:
            return _continue_embeddings(model, embeddings, mask, positions, types, settings, extras)
        if prefix.shape != embeddings.shape[:2]:
            raise ValueError(
                f"input_ids {list(prefix.shape)} beside inputs_embeds must be their tokens, "
                f"{list(embeddings.shape[:2])}"
            )
        ids = prefix
    if ids is None or ids.shape[-1] == 0:
        if settings.bos_token_id is None:
            raise ValueError(
                "the prompt is empty and the model has no bos_token_id to start with: pass "
                "bos_token_id=…"
            )
        rows = 1 if ids is None else len(ids)
        ids = torch.full((rows, 1), settings.bos_token_id, device=device)
        mask = None
    ids = ids.to(device)
    check_ids(ids, model.config.vocab_size + model.extra_input_ids)
    mask = find_padding(ids, None if mask is None else mask.to(device), settings)
    if positions is not None:
        positions = positions.to(device)
        if positions.dim() != 2 or positions.shape[1] != ids.shape[1]:
            raise ValueError(
                f"position_ids must be [batch or 1, {ids.shape[1]}], not {list(positions.shape)}"
            )
    types = name_token_types(model, types, ids)
    limit = settings.length_limit(ids.shape[1])
    limit = fit_positions(ids.shape[1], limit, model.config.max_sequence_length, settings)
    copies = sequences_per_prompt(settings)
    _check_past_length(extras.past, ids.shape[1])
    # The last token is never read.
    capacity = None
    if settings.use_cache or embeddings is not None:
        capacity = limit - 1
    decoder = CausalDecoder(
        model,
        mask,
        position_ids=positions,
        token_type_ids=types,
        embeddings=embeddings,
        copies=copies,
        capacity=capacity,
        past=extras.past,
    )
    drafting = None
    if extras.assistant is not None:
        drafting = CausalDecoder(
            extras.assistant,
            mask,
            position_ids=positions,
            token_type_ids=name_token_types(extras.assistant, types, ids),
            capacity=limit,
        )
    return search(decoder, ids, limit, settings, extras, attention_mask=mask, drafting=drafting)


def _continue_embeddings(
    model: Any,
    embeddings: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    types: Tensor | None,
    settings: GenerationSettings,
    extras: Extras,
) -> Decoded:
    """Continues prompts that are no tokens, [B, S, H]; the sequences are the new tokens."""
    length = embeddings.shape[1]
    if mask is not None:
        mask = find_padding(embeddings[..., 0], mask.to(embeddings.device), settings)
    limit = settings.length_limit(length)
    limit = fit_positions(length, limit, model.config.max_sequence_length, settings)
    _check_past_length(extras.past, length)
    decoder = CausalDecoder(
        model,
        mask,
        position_ids=None if positions is None else positions.to(embeddings.device),
        token_type_ids=name_token_types(model, types, embeddings[..., 0]),
        embeddings=embeddings,
        before=length,
        copies=sequences_per_prompt(settings),
        capacity=limit - 1,
        past=extras.past,
    )
    ids = torch.zeros(len(embeddings), 0, dtype=torch.int64, device=embeddings.device)
    settings = replace(settings, min_length=max(0, settings.min_length - length))
    return search(decoder, ids, limit - length, settings, extras)


def _answer(
    model: Any,
    ids: Tensor | None,
    mask: Tensor | None,
    decoder_ids: Tensor | None,
    decoder_mask: Tensor | None,
    encoded: Any,
    settings: GenerationSettings,
    extras: Extras,
) -> Decoded:
    """Answers inputs int64 [B, S], or what the encoder made of them."""
    device = find_device(model)
    copies = sequences_per_prompt(settings)
    record = extras.record
    if ids is None and encoded is None:
        if settings.bos_token_id is None:
            raise ValueError("an encoder-decoder answers input_ids: pass them, or encoder_outputs")
        ids = torch.full((1, 1), settings.bos_token_id, device=device)
        mask = torch.ones_like(ids)  # It is no padding, even where both have one id, as in T5.
    if ids is not None:
        if ids.shape[-1] == 0:
            raise ValueError(
                "the prompt is empty; an encoder needs at least one token, such as the "
                "end-of-sequence token"
            )
        ids = ids.to(device)
        is_embedded = ids.is_floating_point() and ids.dim() == 3
        if not is_embedded:
            check_ids(ids, model.config.vocab_size + model.extra_input_ids)
        pad = settings.pad_token_id
        if (
            mask is None
            and not is_embedded
            and pad is not None
            and pad not in settings.eos_token_ids
        ):
            mask = (ids != pad).long()
        if mask is not None:
            mask = mask.to(device)
            check_mask(mask, ids[..., 0] if is_embedded else ids)
            if bool((mask != 0).all()):
                mask = None
    if encoded is None:
        encoded = _encode(model, ids, mask, record)
    elif record is not None:
        record.add_encoder(*read_encoder_outputs(encoded)[1:])
    source: Tensor = encoded[0]
    prompt, decoder_mask = begin_decoder(decoder_ids, decoder_mask, len(source), settings, device)
    check_ids(prompt, model.config.vocab_size, "decoder_input_ids")
    if decoder_mask is not None and bool((decoder_mask != 0).all()):
        decoder_mask = None
    limit = settings.length_limit(prompt.shape[1])
    positions = model.config.max_target_length
    if positions is not None:
        limit = fit_positions(prompt.shape[1], limit, positions, settings)
    _check_past_length(extras.past, prompt.shape[1])
    capacity = limit - 1 if settings.use_cache else None
    decoder = Seq2SeqDecoder(
        model,
        EncoderOutput(source),
        mask,
        decoder_mask,
        copies=copies,
        capacity=capacity,
        past=extras.past,
    )
    drafting = None
    if extras.assistant is not None:
        if ids is None:
            raise ValueError("an assistant_model encodes the prompt itself: pass input_ids, too")
        drafting = Seq2SeqDecoder(
            extras.assistant, extras.assistant.encode(ids, mask), mask, decoder_mask, capacity=limit
        )
    encoder_ids = None if ids is None or ids.is_floating_point() else ids
    return search(
        decoder, prompt, limit, settings, extras, encoder_ids=encoder_ids, drafting=drafting
    )


def _encode(model: Any, ids: Any, mask: Tensor | None, record: StepRecord | None) -> EncoderOutput:
    """Runs the encoder, and keeps its states if they are wanted."""
    if record is None:
        return model.encode(ids, mask)
    wanted = record.wanted
    if not wanted.output_attentions:
        encoded = model.encode(ids, mask, wanted.output_hidden_states)
        record.add_encoder(encoded.hidden_states, None)
        return encoded
    with attention_record.recording() as kept:
        encoded = model.encode(ids, mask, wanted.output_hidden_states)
    weights = model.encoder.blocks.gather_attentions(kept, "attention")
    record.add_encoder(encoded.hidden_states, weights)
    return encoded


def _fill(
    model: Any,
    ids: Tensor | None,
    positions: Tensor | None,
    visible: Tensor | None,
    settings: GenerationSettings,
    extras: Extras,
) -> Decoded:
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
) -> Decoded:
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
    drafting: Decoder | None = None,
) -> Decoded:
    """Decodes from prompts int64 [B, T] to at most `limit` tokens, with the strategy that the
    settings select.

    Args:
        encoder_ids: [B, S], the encoder's input.
        attention_mask: [B, T], that of prompts that are continued.
        drafting: The assistant's decoder for the same prompts.
    """
    is_assisted = drafting is not None or extras.assistance.prompt_lookup_num_tokens is not None
    if is_assisted:
        _check_assistance(decoder, prompt, settings, drafting, extras)
    ids = prompt.repeat_interleave(decoder.copies, 0)
    model = decoder.model
    if limit == prompt.shape[1]:
        return Decoded(ids[:: max(1, decoder.copies // settings.num_return_sequences)])
    decoder.record = extras.record
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
    if is_assisted:
        drafts: Drafts
        if drafting is None:
            drafts = PromptLookup(extras.assistance, encoder_ids, settings.eos_token_ids)
        else:
            drafts = Assistant(
                drafting,
                # Without what the caller gave, which may count its calls.
                LogitsProcessors(
                    replace(settings, watermarking_config=None, max_time=None, stop_strings=None),
                    model.config.vocab_size,
                    drafting.model.mesh,
                    prompt=ids,
                    limit=limit,
                    encoder_ids=encoder_ids,
                    attention_mask=attention_mask,
                ),
                extras.assistance,
                settings.eos_token_ids,
                _count_positions(drafting.model),
                model.mesh,
            )
        found = decode_assisted(decoder, ids, limit, settings, processors, drafts, extras.streamer)
    elif settings.num_beams == 1:
        found = decode(decoder, ids, limit, settings, processors, extras.streamer)
    elif extras.streamer is not None:
        raise ValueError(
            "a streamer needs num_beams=1, because beam search chooses its tokens only at the end"
        )
    else:
        method = beam_search if settings.num_beam_groups == 1 else group_beam_search
        found = method(decoder, ids, limit, settings, processors)
    cache = None if isinstance(decoder, BlankDecoder) else decoder.cache
    if extras.record is not None and cache is not None and model.stage is None:
        extras.record.keep_past(cache, len(ids), model.config)
    return found


def _check_assistance(
    decoder: Decoder,
    prompt: Tensor,
    settings: GenerationSettings,
    drafting: Decoder | None,
    extras: Extras,
) -> None:
    """Raises ValueError unless tokens can be drafted for the prompts."""
    wrong = None
    if isinstance(decoder, BlankDecoder):
        wrong = (
            "a GLM decodes without drafts: leave assistant_model and prompt_lookup_num_tokens out"
        )
    elif drafting is not None and extras.assistance.prompt_lookup_num_tokens is not None:
        wrong = "pass assistant_model or prompt_lookup_num_tokens, not both"
    elif len(prompt) > 1:
        wrong = f"assisted decoding is for one prompt, not {len(prompt)}: call it for each"
    elif settings.num_beams > 1 or settings.num_return_sequences > 1:
        wrong = "assisted decoding makes one sequence: use num_beams=1 and num_return_sequences=1"
    elif not settings.use_cache:
        wrong = "assisted decoding needs use_cache=True"
    if wrong is not None:
        raise ValueError(wrong)


def _count_positions(model: Any) -> int | None:
    """Returns the number of positions that generated tokens can have; None if it is unlimited."""
    if model.generates == "answer":
        return model.config.max_target_length
    return model.config.max_sequence_length


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
def evaluating(model: Any) -> Generator[None]:
    """Puts the model in evaluation mode for the duration of the context, in which its weights must
    not change. A model of the zoo has split logits there, and each context-parallel rank computes
    whole sequences.
    """
    was_training = model.training
    model.eval()
    try:
        # A model of transformers has none.
        keeping_logits_split = getattr(model, "keeping_logits_split", nullcontext)
        whole = whole_sequences(getattr(model, "mesh", None))
        with cache_shared_heads(model), keeping_logits_split(), whole:
            yield
    finally:
        model.train(was_training)
