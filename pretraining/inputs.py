"""Chooses what a run starts from, and checks that weights, tokenizer, objective and corpora fit.

`choose_inputs` is the way through this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.hub import TEXTS, find_folder, find_model
from ..checkpoint.manifest import checked_tokenizer
from ..data.indexed.dataset import IndexedDataset
from ..data.indexed.meta import read_meta
from ..data.loading.mixture import parse_mixture
from ..data.objectives.objective import Objective
from ..data.objectives.registry import find_objective, objective_names
from ..data.text.corpus import as_prefix, find_tokenizer
from ..data.text.sources import Source, plan_chunks
from ..data.tokenizers.files import has_tokenizer
from ..data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from ..data.tokenizers.vocabulary import Vocabulary
from ..models import family, find_config, presets
from ..models.config import ModelConfig
from ..models.loading import check_stored_model
from ..models.lora import read_adapter_config
from ..models.mapping import read_model_config
from ..trainer.estimate.pipeline import check_layout
from ..trainer.launch.rank_info import RankInfo
from ..trainer.run_folder import RunFolder
from .arguments import DEFAULT_MODEL, PretrainingArguments


@dataclass(frozen=True)
class Weights:
    """Weights to start from, as named by the user.

    Attributes:
        tokenizer: That in the folder; None if there is none.
        vocabulary: The tokenizer's, or the one that a checkpoint records; None if it is unknown.
    """

    name: str
    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary | None


@dataclass(frozen=True)
class Inputs:
    """What a run starts from.

    Attributes:
        config: The configuration of the objective's architecture. That of new weights gets the
            tokenizer's vocabulary.
        weights: None for new weights.
        tokenizer: Has the objective's special tokens. None if one of the family's kind is trained
            on the corpus.
        tokenizer_name: Where the tokenizer is from, for messages.
        sequence_length, target_length: As in `PretrainingData`.
        continues: Whether the weights are the last checkpoint of a run, which has its own corpora.
        teacher: A model that is distilled, in the architecture of the objective; None without.
    """

    config: ModelConfig
    objective: Objective
    weights: Weights | None
    tokenizer: Tokenizer | None
    tokenizer_name: str
    sequence_length: int
    target_length: int | None
    continues: bool = False
    teacher: Weights | None = None

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of an input, and of its target if that is another sequence."""
        lengths = self.objective.lengths(self.sequence_length, self.target_length)
        return sum(lengths) if self.objective.format == "seq2seq" else lengths[0]


def choose_inputs(arguments: PretrainingArguments, launch: RankInfo) -> Inputs:
    """Chooses and checks everything that can be checked before the processes are joined.

    Raises:
        ValueError: Two of model, objective, weights, tokenizer and corpora do not belong together.
            The message names both.
    """
    check_folder(arguments)
    # A run that continues starts from its own checkpoint. With LoRA that holds no whole model, so
    # the run starts from its base again.
    checkpoint = find_checkpoint(arguments)
    adapts = bool(arguments.lora_rank) or arguments.adapter is not None
    if checkpoint is not None and adapts and arguments.eval_only:
        raise ValueError(
            f"{checkpoint} holds LoRA weights alone; evaluate the exported model: --init-from …/hf"
        )
    start = str(checkpoint)
    if checkpoint is None or adapts:
        start = arguments.init_from
    if adapts and not start:
        raise ValueError("LoRA weights adapt a trained model: name its folder with --init-from")
    if arguments.adapter is not None:
        read_adapter_config(find_model(arguments.adapter, "adapter"))
    weights = find_weights(start) if start else None
    if arguments.eval_only and weights is None:
        searched = ""
        if arguments.output_dir:
            searched = f"; {arguments.output_dir} holds no complete checkpoint"
        raise ValueError(
            "eval_only needs weights: name them with init_from, or name the output_dir of a run"
            f"{searched}"
        )

    config = choose_config(arguments, weights)
    objective = arguments.objective
    if objective is None:
        objective = arguments.mask_documents(find_objective(family(config.model_type).objective)())
    config = choose_architecture(config, objective, arguments.model_name)

    # A run that continues has its own tokenizer and corpora.
    named_tokenizer = None
    sources: list[Source] = []
    if checkpoint is None:
        named_tokenizer = arguments.tokenizer
        sources = list_sources(arguments)
        if named_tokenizer is None and weights is None:
            named_tokenizer = arguments.teacher_model
    tokenizer, name = choose_tokenizer(named_tokenizer, weights, sources)
    if tokenizer is not None:
        prepare_tokenizer(tokenizer, name, objective, weights)
        if weights is None:
            config = with_vocabulary(config, tokenizer, objective)
        for prefix in list_prefixes(sources):
            check_pair(prefix, tokenizer, name, stated=named_tokenizer is not None)

    teacher = find_teacher(
        arguments.teacher_model, config, objective, tokenizer, is_new=weights is None
    )
    if teacher is not None and weights is None:
        # A teacher may have rows after its tokens, as T5 has.
        config = config.with_changes(vocab_size=teacher.config.vocab_size)
    check_layout(arguments, config, launch)
    # Of a run's own checkpoints the trainer takes the last that is not damaged.
    has_choice = checkpoint is not None and not arguments.eval_only and not adapts
    if weights is not None and launch.world_size == 1 and not has_choice:
        check_stored_model(weights.folder, config)
    sequence_length, target_length = choose_lengths(arguments, config, objective)
    return Inputs(
        config,
        objective,
        weights,
        tokenizer,
        name,
        sequence_length,
        target_length,
        continues=checkpoint is not None,
        teacher=teacher,
    )


def find_teacher(
    name: str | None,
    config: ModelConfig,
    objective: Objective,
    tokenizer: Tokenizer | None,
    *,
    is_new: bool,
) -> Weights | None:
    """Returns the teacher of a name; None without one.

    Args:
        config, tokenizer: The student's.
        is_new: Whether the student has new weights, which get as many tokens as the teacher has.

    Raises:
        ValueError: The teacher does not take the student's samples, or has another vocabulary.
    """
    if name is None:
        return None
    teacher = find_weights(name)
    own = choose_architecture(teacher.config, objective, name)
    kinds = (family(own.model_type).kind, family(config.model_type).kind)
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the teacher {name} is an {kinds[0]} and the model an {kinds[1]}; both must be of one "
            "kind"
        )
    is_other = False
    if tokenizer is not None and teacher.vocabulary is not None:
        is_other = not teacher.vocabulary.begins(tokenizer)
    fits = own.vocab_size == config.vocab_size
    if is_new:
        fits = own.vocab_size >= config.vocab_size
    if is_other or not fits:
        raise ValueError(
            f"the teacher {name} ({own.vocab_size} tokens) has another vocabulary than the model "
            f"({config.vocab_size} tokens); both must have the same tokenizer and number of tokens"
        )
    return replace(teacher, config=own)


def check_folder(arguments: PretrainingArguments) -> None:
    """Raises ValueError if the run's folder cannot be used."""
    if arguments.output_dir is None or arguments.eval_only:
        return
    # Nothing that the run reads may lie in the folder whose contents `overwrite` deletes.
    reads: list[str | Path | None] = [arguments.init_from, arguments.load_dir, arguments.tokenizer]
    reads.append(arguments.teacher_model)
    for source, _ in parse_mixture(arguments.data):
        if isinstance(source, str | Path):
            reads.append(source)
        else:
            reads.extend(source or ())
    folder = RunFolder.named(arguments.output_dir)
    step = folder.first_step(resume=arguments.resume, overwrite=arguments.overwrite, reads=reads)
    if arguments.train_steps is not None and step > arguments.train_steps:
        raise ValueError(
            f"the run in {arguments.output_dir} is at step {step} already, behind "
            f"train_steps={arguments.train_steps}; name at least {step} steps"
        )


def find_checkpoint(arguments: PretrainingArguments) -> Path | None:
    """Returns the last checkpoint of the run that is resumed or evaluated; None if there is none.

    A run is resumed from the last that can be opened. The trainer compares the digests of all, and
    says which it passes over.
    """
    if arguments.output_dir is None or not (arguments.resume or arguments.eval_only):
        return None
    run = RunFolder.named(arguments.output_dir)
    step = run.latest_step()
    if step is None:
        return None
    if arguments.resume:
        for earlier in reversed(run.steps()):
            try:
                find_weights(str(run.checkpoint(earlier)))
            except (ValueError, OSError):
                continue
            return run.checkpoint(earlier)
    return run.checkpoint(step)


def list_sources(arguments: PretrainingArguments) -> list[Source]:
    """Returns the sources of the run's text, without their shares.

    Raises:
        ValueError: A prepared pair is to be streamed.
    """
    sources = [source for source, _ in parse_mixture(arguments.data)]
    if arguments.stream:
        for prefix in list_prefixes(sources):
            raise ValueError(
                f"stream: {prefix} is a prepared .bin/.idx pair, which is read from disk as it is; "
                "use no stream"
            )
    return sources


def check_sources(arguments: PretrainingArguments) -> None:
    """Raises ValueError if a source of the run's text is missing or is damaged, as far as that is
    known without reading the text.
    """
    for source in list_sources(arguments):
        prefix = as_prefix(source)
        if prefix is not None:
            IndexedDataset(prefix)
        elif not arguments.stream:  # A stream's source may be a data set on the Hub.
            plan_chunks(source)


def list_prefixes(sources: Sequence[Source]) -> list[Path]:
    """Returns the prefixes of those sources that are prepared .bin/.idx pairs."""
    prefixes = [as_prefix(source) for source in sources]
    return [prefix for prefix in prefixes if prefix is not None]


def choose_config(arguments: PretrainingArguments, weights: Weights | None) -> ModelConfig:
    """Returns the configuration of the weights, or of new weights.

    Raises:
        ValueError: `model` contradicts the weights.
    """
    changes: dict[str, int] = {}
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        value = getattr(arguments, name)
        if value is not None:
            changes[name] = value
    if weights is None:
        config = find_config(arguments.model_name).with_changes(**changes)
        return add_balance_loss(config, arguments.router_aux_loss_coef)
    own = add_balance_loss(weights.config, arguments.router_aux_loss_coef)
    if arguments.model is None and not changes:
        return own
    asked = find_config(arguments.model or str(weights.folder)).with_changes(**changes)
    for name in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        mine = getattr(asked, asked.attribute_map.get(name, name))
        theirs = getattr(weights.config, weights.config.attribute_map.get(name, name))
        if mine != theirs:
            raise ValueError(
                f"model {arguments.model_name} has {name}={mine}, but the weights in "
                f"{weights.name} have {theirs}; leave the model out, because the weights have its "
                "configuration"
            )
    return own


def add_balance_loss(config: ModelConfig, weight: float | None) -> ModelConfig:
    """Returns a configuration of the same model whose loss has that of its routers added to it.

    Args:
        weight: Of the routers' loss; None to leave the configuration as it is.

    Raises:
        ValueError: The model's routers have no such loss.
    """
    if weight is None:
        return config
    names = {field.name for field in fields(config)}
    if "router_aux_loss_coef" not in names:
        raise ValueError(
            f"router_aux_loss_coef={weight} needs a mixture whose routers have a balance loss, such "
            f"as mixtral; {config.architecture} has none, so leave it out"
        )
    changes: dict[str, Any] = {"router_aux_loss_coef": weight, "output_router_logits": True}
    return config.with_changes(**changes)


def choose_architecture(config: ModelConfig, objective: Objective, name: str) -> ModelConfig:
    """Returns the configuration of the architecture that takes the objective's samples.

    Raises:
        ValueError: No architecture of the model `name` does.
    """
    facts = family(config.model_type)
    # Format of the samples -> architecture that is pretrained on them.
    pretrains = facts.pretrains
    is_pretrained = config.architecture in pretrains.values()
    if config.architecture.endswith("ForPreTraining") and not is_pretrained:
        fitting = [
            preset
            for preset, known in facts.presets.items()
            if known.architecture in pretrains.values()
        ]
        raise ValueError(
            f"model {name} is an {config.architecture}, which no objective pretrains; objective "
            f"{objective.name!r} works with {', '.join(fitting)}"
        )
    if objective.format not in pretrains:
        fitting = [
            other for other in objective_names() if find_objective(other).format in pretrains
        ]
        raise ValueError(
            f"objective {objective.name!r} does not fit model {name}, a {config.model_type}; use "
            f"{', '.join(fitting)}"
        )
    architecture = pretrains[objective.format]
    if config.architecture == architecture:
        return config
    return config.with_changes(architecture=architecture)


def choose_lengths(
    arguments: PretrainingArguments, config: ModelConfig, objective: Objective
) -> tuple[int, int | None]:
    """Returns the lengths of an input and of a target, in tokens.

    Raises:
        ValueError: The model or the layout does not allow them.
    """
    longest = config.max_sequence_length
    length = arguments.sequence_length
    if length is None:
        length = longest
    # The positions of encoder-decoders are relative, so no length is too long for them.
    has_target = family(config.model_type).kind == "encoder-decoder"
    is_too_long = length > longest and not has_target
    if length < objective.shortest or is_too_long:
        raise ValueError(
            f"sequence_length of objective {objective.name!r} must be from {objective.shortest} to "
            f"the model's {longest} positions, not {length}"
        )
    if arguments.target_length is not None and not has_target:
        raise ValueError(
            f"target_length is for encoder-decoders; model {arguments.model_name} has only one "
            "sequence"
        )
    ranks = arguments.length_multiple
    if ranks > 1:
        inputs, targets = objective.lengths(length, arguments.target_length)
        for name, tokens in {"sequence_length": inputs, "target_length": targets}.items():
            if tokens % ranks:
                raise ValueError(
                    f"sequences are split over {describe_split(arguments)}, but those of objective "
                    f"{objective.name!r} have {tokens} tokens; choose a {name} with which they are "
                    f"a multiple of {ranks}"
                )
    return length, arguments.target_length


def describe_split(arguments: PretrainingArguments) -> str:
    """Returns which processes split sequences between them."""
    parts: list[str] = []
    if arguments.context_parallel_size > 1:
        parts.append(f"context_parallel_size={arguments.context_parallel_size}")
    if arguments.sequence_parallel:
        parts.append(f"model_parallel_size={arguments.model_parallel_size}")
    return " x ".join(parts) + " ranks"


def default_objective(model: str | None, init_from: str | None) -> str:
    """Returns the name of the objective that the family of a model, or of weights, is pretrained
    with.
    """
    if model or not init_from:
        return family(find_config(model or DEFAULT_MODEL).model_type).objective
    # The family of a preset's name on the Hub is known without a download.
    config = dict(presets()).get(init_from)
    if config is None:
        _, config = open_weights(init_from)
    return family(config.model_type).objective


def find_weights(name: str) -> Weights:
    """Finds weights and their tokenizer.

    Raises:
        ValueError: A checkpoint's tokenizer is not the one that it was trained with.
    """
    checkpoint, config = open_weights(name)
    folder = checkpoint.folder
    tokenizer = None
    vocabulary = None
    if has_tokenizer(folder):
        tokenizer = checked_tokenizer(folder, folder)
        vocabulary = Vocabulary.from_tokenizer(tokenizer)
    elif checkpoint.manifest is not None:
        vocabulary = checkpoint.manifest.vocabulary
    return Weights(name, folder, config, tokenizer, vocabulary)


def open_weights(name: str) -> tuple[Checkpoint, ModelConfig]:
    """Opens the weights of a folder, of a run's last checkpoint, or of the Hub. Reads no tensor."""
    folder = find_folder(name, "init_from")
    run = RunFolder(folder)
    step = run.latest_step()
    if step is not None:
        folder = run.checkpoint(step)
    checkpoint = open_checkpoint(folder)
    try:
        return checkpoint, read_model_config(checkpoint)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def choose_tokenizer(
    name: str | None, weights: Weights | None, sources: Sequence[Source]
) -> tuple[Tokenizer | None, str]:
    """Returns the tokenizer `name`, that of the weights, or that of a prepared corpus.

    Also returns where it is from. It is None if one is to be trained.

    Raises:
        ValueError: The given tokenizer is not that of the weights, or theirs is unknown.
    """
    if name is None and weights is None:
        return find_corpus_tokenizer(sources)
    if name is None:
        assert weights is not None
        if weights.tokenizer is None:
            raise ValueError(
                f"the weights in {weights.name} have no tokenizer, so the text cannot be encoded "
                "as in their training; name theirs with --tokenizer"
            )
        return weights.tokenizer, weights.name
    is_local = Path(name).exists()
    tokenizer = load_tokenizer(name if is_local else find_folder(name, "tokenizer", TEXTS))
    if weights is None:
        return tokenizer, name
    if weights.vocabulary is None:
        check_special_ids(weights, tokenizer, name)
    elif not weights.vocabulary.begins(tokenizer):
        raise ValueError(
            f"tokenizer {name} ({tokenizer.vocab_size} tokens) has another vocabulary than that of "
            f"the weights in {weights.name} ({weights.vocabulary.size} tokens); use the tokenizer "
            "that they were trained with"
        )
    return tokenizer, name


def check_special_ids(weights: Weights, tokenizer: Tokenizer, name: str) -> None:
    """Raises ValueError if the weights' configuration has other special ids than a tokenizer."""
    for key in ("bos", "eos", "pad"):
        theirs = getattr(weights.config, f"{key}_token_id", None)
        mine = tokenizer.special.get(f"{key}_token")
        if isinstance(theirs, int) and mine is not None and theirs != mine:
            raise ValueError(
                f"tokenizer {name} has {key}_token_id {mine}, but the weights in {weights.name} "
                f"have {theirs}; name the tokenizer that they were trained with"
            )


def find_corpus_tokenizer(sources: Sequence[Source]) -> tuple[Tokenizer | None, str]:
    """Returns the tokenizer beside the first prepared pair, and where it is; None without a pair.

    Raises:
        ValueError: The pair has no tokenizer.
    """
    prefixes = list_prefixes(sources)
    if not prefixes:
        return None, ""
    folder = find_tokenizer(prefixes[0])
    return load_tokenizer(folder), str(folder)


def prepare_tokenizer(
    tokenizer: Tokenizer, name: str, objective: Objective, weights: Weights | None
) -> None:
    """Adds the objective's special tokens.

    Raises:
        ValueError: They cannot be added, or the weights lack rows for them.
    """
    before = tokenizer.vocab_size
    try:
        objective.add_special_tokens(tokenizer)
    except ValueError as error:
        raise ValueError(f"tokenizer {name}: {error}") from None
    size = tokenizer.vocab_size
    if weights is not None and size > weights.config.vocab_size:
        added = ""
        if size > before:
            added = f" with the {size - before} that objective {objective.name!r} adds"
        raise ValueError(
            f"tokenizer {name} has {size} tokens{added}, but the weights in {weights.name} have only "
            f"{weights.config.vocab_size}"
        )


def check_pair(prefix: Path, tokenizer: Tokenizer, name: str, *, stated: bool) -> None:
    """Raises ValueError unless a .bin/.idx pair was prepared with a tokenizer's vocabulary.

    Args:
        stated: Whether the user named the tokenizer. Then a pair without any record need only have
            ids below its size, which is checked when it is read.
    """
    meta = read_meta(prefix)
    if meta is not None:
        vocabulary = meta.vocabulary
        corpus = str(prefix)
    else:
        try:
            folder = find_tokenizer(prefix)
        except ValueError:
            if stated:
                return
            raise ValueError(
                f"corpus {prefix} does not record its vocabulary, so it may not be that of {name}; "
                "name the tokenizer that it was prepared with by --tokenizer"
            ) from None
        vocabulary = Vocabulary.from_tokenizer(load_tokenizer(folder))
        corpus = f"{prefix}, whose tokenizer is {folder},"
    if not vocabulary.begins(tokenizer):
        raise ValueError(
            f"corpus {corpus} was prepared with another vocabulary ({vocabulary.size} tokens) than "
            f"that of {name} ({tokenizer.vocab_size} tokens); prepare its text again with this "
            "tokenizer"
        )


def with_vocabulary(config: ModelConfig, tokenizer: Tokenizer, objective: Objective) -> ModelConfig:
    """Returns the configuration of new weights for a tokenizer: its size and its special ids."""
    special = tokenizer.special
    now = asdict(config)
    known = {field.name for field in fields(config)}
    ids: dict[str, int | None] = {}
    for key in ("bos", "eos", "pad", "cls", "sep"):
        ids[f"{key}_token_id"] = special.get(f"{key}_token")
    for key in tuple(ids):
        if now.get(f"forced_{key}") is not None:
            ids[f"forced_{key}"] = ids[key]
    if "decoder_start_token_id" in known:
        # Decoders begin with the padding token, as T5's, with the beginning of a sequence, as T5Gemma's,
        # or with its end, as BART's.
        ids["pad_token_id"] = special.get("pad_token", special.get("eos_token"))
        start = "eos_token_id"
        for name in ("bos_token_id", "pad_token_id"):
            if ids[name] is not None and now["decoder_start_token_id"] == now[name]:
                start = name
        ids["decoder_start_token_id"] = ids[start]
    ids |= objective.token_ids(tokenizer)
    changes = {name: value for name, value in ids.items() if name in known}
    try:
        return config.with_changes(vocab_size=tokenizer.vocab_size, **changes)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer {tokenizer.path} does not fit a {config.model_type}: {error}"
        ) from None
