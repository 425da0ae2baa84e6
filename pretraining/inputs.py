"""Chooses what a run starts from (weights, tokenizer, objective, corpora), and checks that all belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.hub import TEXTS, find_folder
from ..checkpoint.manifest import checked_tokenizer
from ..data.indexed.meta import read_meta
from ..data.loading.mixture import parse_mixture
from ..data.objectives.objective import Objective
from ..data.objectives.registry import find_objective, objective_names
from ..data.text.corpus import as_prefix, find_tokenizer
from ..data.text.sources import Source
from ..data.tokenizers.files import has_tokenizer
from ..data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from ..data.tokenizers.vocabulary import Vocabulary
from ..models import family, find_config, presets
from ..models.config import ModelConfig
from ..models.mapping import stored_config
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
        config: The configuration of the objective's architecture. That of new weights gets the tokenizer's vocabulary.
        weights: None for new weights.
        tokenizer: Has the objective's special tokens. None if one of the family's kind is trained on the corpus.
        tokenizer_name: Where the tokenizer is from, for messages.
        sequence_length, target_length: As in `PretrainingData`.
        continues: Whether the weights are the last checkpoint of a run, which has its own corpora.
    """

    config: ModelConfig
    objective: Objective
    weights: Weights | None
    tokenizer: Tokenizer | None
    tokenizer_name: str
    sequence_length: int
    target_length: int | None
    continues: bool = False

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of an input, and of its target if that is another sequence."""
        lengths = self.objective.lengths(self.sequence_length, self.target_length)
        return sum(lengths) if self.objective.format == "seq2seq" else lengths[0]


def choose_inputs(arguments: PretrainingArguments, launch: RankInfo) -> Inputs:
    """Chooses and checks everything that can be checked before the processes are joined.

    Raises ValueError, naming both, if two of model, objective, weights, tokenizer and corpora do not belong together.
    """
    check_folder(arguments)
    checkpoint = checkpoint_of(arguments)
    adapts = (
        arguments.lora_rank or arguments.adapter is not None
    )  # then a checkpoint holds no whole model
    if checkpoint is not None and adapts and arguments.eval_only:
        raise ValueError(
            f"{checkpoint} holds LoRA weights alone; evaluate the exported model: --init-from …/hf"
        )
    start = arguments.init_from if checkpoint is None or adapts else str(checkpoint)
    if adapts and not start:
        raise ValueError("LoRA weights adapt a trained model: name its folder with --init-from")
    weights = find_weights(start) if start else None
    if arguments.eval_only and weights is None:
        found = (
            f"; {arguments.output_dir} holds no complete checkpoint" if arguments.output_dir else ""
        )
        raise ValueError(
            f"eval_only needs weights: name them with init_from, or name the output_dir of a run{found}"
        )
    config = choose_config(arguments, weights)
    objective = arguments.objective or find_objective(family(config.model_type).objective)()
    config = config_for(config, objective, arguments.model_name)
    # A run that continues has its own tokenizer and corpora.
    named, sources = (
        (arguments.tokenizer, sources_of(arguments)) if checkpoint is None else (None, [])
    )
    tokenizer, name = choose_tokenizer(named, weights, sources)
    if tokenizer is not None:
        prepare_tokenizer(tokenizer, name, objective, weights)
        config = config if weights else with_vocabulary(config, tokenizer, objective)
        for prefix in filter(None, map(as_prefix, sources)):
            check_pair(prefix, tokenizer, name, stated=named is not None)
    check_layout(arguments, config, launch)
    lengths = choose_lengths(arguments, config, objective)
    return Inputs(
        config, objective, weights, tokenizer, name, *lengths, continues=checkpoint is not None
    )


def check_folder(arguments: PretrainingArguments) -> None:
    """Raises ValueError if the run's folder cannot be used."""
    if arguments.output_dir is None or arguments.eval_only:
        return
    texts = [source for source, _ in parse_mixture(arguments.data)]
    named = chain.from_iterable(
        [text] if isinstance(text, str | Path) else text or () for text in texts
    )
    reads = (arguments.init_from, arguments.load_dir, arguments.tokenizer, *named)
    folder = RunFolder(Path(arguments.output_dir))
    folder.first_step(resume=arguments.resume, overwrite=arguments.overwrite, reads=reads)


def checkpoint_of(arguments: PretrainingArguments) -> Path | None:
    """Returns the last checkpoint of the run that is resumed or evaluated; None if there is none."""
    if arguments.output_dir is None or not (arguments.resume or arguments.eval_only):
        return None
    run = RunFolder(Path(arguments.output_dir))
    step = run.latest_step()
    return None if step is None else run.checkpoint(step)


def sources_of(arguments: PretrainingArguments) -> list[Source]:
    """Returns the sources of the run's text, without their shares. ValueError for a pair that is to be streamed."""
    sources = [source for source, _ in parse_mixture(arguments.data)]
    for prefix in filter(None, map(as_prefix, sources if arguments.stream else ())):
        raise ValueError(
            f"stream: {prefix} is a prepared .bin/.idx pair, which is read from disk as it is; use no stream"
        )
    return sources


def choose_config(arguments: PretrainingArguments, weights: Weights | None) -> ModelConfig:
    """Returns the configuration of the weights, or of new weights. ValueError if `model` contradicts the weights."""
    changes = {
        name: getattr(arguments, name)
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if weights is None:
        return find_config(arguments.model_name).with_changes(**changes)
    if arguments.model is None and not changes:
        return weights.config
    asked = find_config(arguments.model or str(weights.folder)).with_changes(**changes)
    for name in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        mine, theirs = (
            getattr(config, config.attribute_map.get(name, name))
            for config in (asked, weights.config)
        )
        if mine != theirs:
            raise ValueError(
                f"model {arguments.model_name} has {name}={mine}, but the weights in {weights.name} have {theirs}; "
                "leave the model out, because the weights have its configuration"
            )
    return weights.config


def config_for(config: ModelConfig, objective: Objective, name: str) -> ModelConfig:
    """Returns the configuration of the architecture that takes the objective's samples. ValueError if none does."""
    facts = family(config.model_type)
    able = facts.pretrains
    if config.architecture.endswith("ForPreTraining") and config.architecture not in able.values():
        fitting = [
            preset for preset, known in facts.presets.items() if known.architecture in able.values()
        ]
        raise ValueError(
            f"model {name} is an {config.architecture}, which no objective pretrains; objective {objective.name!r} "
            f"works with {', '.join(fitting)}"
        )
    if objective.format not in able:
        fitting = [other for other in objective_names() if find_objective(other).format in able]
        raise ValueError(
            f"objective {objective.name!r} does not fit model {name}, a {config.model_type}; use {', '.join(fitting)}"
        )
    architecture = able[objective.format]
    return (
        config
        if config.architecture == architecture
        else config.with_changes(architecture=architecture)
    )


def choose_lengths(
    arguments: PretrainingArguments, config: ModelConfig, objective: Objective
) -> tuple[int, int | None]:
    """Returns the lengths of an input and a target. ValueError if the model or the layout does not allow them."""
    longest, size = config.max_sequence_length, arguments.model_parallel_size
    length = longest if arguments.sequence_length is None else arguments.sequence_length
    has_target = family(config.model_type).kind == "encoder-decoder"  # whose positions are relative
    if not objective.shortest <= length <= (length if has_target else longest):
        raise ValueError(
            f"sequence_length of objective {objective.name!r} must be from {objective.shortest} to the model's "
            f"{longest} positions, not {length}"
        )
    if arguments.target_length is not None and not has_target:
        raise ValueError(
            f"target_length is for encoder-decoders; model {arguments.model_name} has only one sequence"
        )
    inputs, targets = objective.lengths(length, arguments.target_length)
    for name, value in {"sequence_length": inputs, "target_length": targets}.items():
        if arguments.sequence_parallel and value % size:
            raise ValueError(
                f"sequence parallelism splits sequences over model_parallel_size={size} ranks, but those of objective "
                f"{objective.name!r} have {value} tokens; choose a {name} with which they are a multiple of {size}"
            )
    return length, arguments.target_length


def default_objective(model: str | None, init_from: str | None) -> str:
    """Returns the name of the objective that the family of a model, or of weights, is pretrained with."""
    if model or not init_from:
        return family(find_config(model or DEFAULT_MODEL).model_type).objective
    config = dict(presets()).get(
        init_from
    )  # a name on the Hub, whose family is known without a download
    return family((config or open_weights(init_from)[1]).model_type).objective


def find_weights(name: str) -> Weights:
    """Finds weights and their tokenizer. ValueError if a checkpoint's tokenizer is not the one it was trained with."""
    checkpoint, config = open_weights(name)
    folder, manifest = checkpoint.folder, checkpoint.manifest
    tokenizer = checked_tokenizer(folder, folder) if has_tokenizer(folder) else None
    vocabulary = (
        Vocabulary.from_tokenizer(tokenizer) if tokenizer else manifest and manifest.vocabulary
    )
    return Weights(name, folder, config, tokenizer, vocabulary)


def open_weights(name: str) -> tuple[Checkpoint, ModelConfig]:
    """Opens the weights of a folder, of a run's last checkpoint, or of the Hub. Reads no tensor."""
    folder = find_folder(name, "init_from")
    run = RunFolder(folder)
    if (step := run.latest_step()) is not None:
        folder = run.checkpoint(step)
    checkpoint = open_checkpoint(folder)
    try:
        return checkpoint, stored_config(checkpoint)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def choose_tokenizer(
    name: str | None, weights: Weights | None, sources: Sequence[Source]
) -> tuple[Tokenizer | None, str]:
    """Returns the tokenizer `name`, that of the weights, or that of a prepared corpus; and where it is from.

    None if one is to be trained. ValueError if the given one is not that of the weights, or theirs is unknown.
    """
    own = weights.tokenizer if weights else None
    if name is None:
        if weights and own is None:
            raise ValueError(
                f"the weights in {weights.name} have no tokenizer, so the text cannot be encoded as in their training; "
                "name theirs with --tokenizer"
            )
        return (own, weights.name) if weights else corpus_tokenizer(sources)
    given = load_tokenizer(name if Path(name).exists() else find_folder(name, "tokenizer", TEXTS))
    if weights and weights.vocabulary is None:
        check_special_ids(weights, given, name)
    elif weights and weights.vocabulary and not weights.vocabulary.begins(given):
        raise ValueError(
            f"tokenizer {name} ({given.vocab_size} tokens) has another vocabulary than that of the weights in "
            f"{weights.name} ({weights.vocabulary.size} tokens); use the tokenizer that they were trained with"
        )
    return given, name


def check_special_ids(weights: Weights, tokenizer: Tokenizer, name: str) -> None:
    """Raises ValueError if the weights' configuration has other special ids than a tokenizer."""
    for key in ("bos", "eos", "pad"):
        theirs, mine = (
            getattr(weights.config, f"{key}_token_id", None),
            tokenizer.special.get(f"{key}_token"),
        )
        if isinstance(theirs, int) and mine is not None and theirs != mine:
            raise ValueError(
                f"tokenizer {name} has {key}_token_id {mine}, but the weights in {weights.name} have {theirs}; name "
                "the tokenizer that they were trained with"
            )


def corpus_tokenizer(sources: Sequence[Source]) -> tuple[Tokenizer | None, str]:
    """Returns the tokenizer beside the first prepared pair. ValueError if a pair has none."""
    for prefix in filter(None, map(as_prefix, sources)):
        folder = find_tokenizer(prefix)
        return load_tokenizer(folder), str(folder)
    return None, ""


def prepare_tokenizer(
    tokenizer: Tokenizer, name: str, objective: Objective, weights: Weights | None
) -> None:
    """Adds the objective's special tokens. ValueError if they cannot be added, or the weights lack rows for them."""
    before = tokenizer.vocab_size
    try:
        objective.add_special_tokens(tokenizer)
    except ValueError as error:
        raise ValueError(f"tokenizer {name}: {error}") from None
    size = tokenizer.vocab_size
    if weights is not None and size > weights.config.vocab_size:
        added = (
            f" with the {size - before} that objective {objective.name!r} adds"
            if size > before
            else ""
        )
        raise ValueError(
            f"tokenizer {name} has {size} tokens{added}, but the weights in {weights.name} have only "
            f"{weights.config.vocab_size}"
        )


def check_pair(prefix: Path, tokenizer: Tokenizer, name: str, *, stated: bool) -> None:
    """Raises ValueError unless a .bin/.idx pair was prepared with a tokenizer's vocabulary, as far as is known.

    `stated` says that the user named the tokenizer. Then a pair without any record must only have ids below its size,
    which is checked when it is read.
    """
    meta = read_meta(prefix)
    if meta is not None:
        vocabulary, known = meta.vocabulary, str(prefix)
    else:
        try:
            folder = find_tokenizer(prefix)
        except ValueError:
            if stated:
                return
            raise ValueError(
                f"corpus {prefix} does not record its vocabulary, so it may not be that of {name}; name the tokenizer "
                "that it was prepared with by --tokenizer"
            ) from None
        vocabulary, known = (
            Vocabulary.from_tokenizer(load_tokenizer(folder)),
            f"{prefix}, whose tokenizer is {folder},",
        )
    if not vocabulary.begins(tokenizer):
        raise ValueError(
            f"corpus {known} was prepared with another vocabulary ({vocabulary.size} tokens) than that of {name} "
            f"({tokenizer.vocab_size} tokens); prepare its text again with this tokenizer"
        )


def with_vocabulary(config: ModelConfig, tokenizer: Tokenizer, objective: Objective) -> ModelConfig:
    """Returns the configuration of new weights for a tokenizer: its size and its special ids."""
    special, now = tokenizer.special, asdict(config)
    ids = {
        f"{key}_token_id": special.get(f"{key}_token")
        for key in ("bos", "eos", "pad", "cls", "sep")
    }
    ids |= {f"forced_{key}": ids[key] for key in tuple(ids) if now.get(f"forced_{key}") is not None}
    known = {field.name for field in fields(config)}
    if "decoder_start_token_id" in known:
        ids["pad_token_id"] = special.get("pad_token", special.get("eos_token"))
        starts_with_padding = now["decoder_start_token_id"] == now["pad_token_id"]
        ids["decoder_start_token_id"] = ids[
            "pad_token_id" if starts_with_padding else "eos_token_id"
        ]
    ids |= objective.token_ids(tokenizer)
    own = {name: value for name, value in ids.items() if name in known}
    try:
        return config.with_changes(vocab_size=tokenizer.vocab_size, **own)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer {tokenizer.path} does not fit a {config.model_type}: {error}"
        ) from None
