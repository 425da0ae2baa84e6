"""Maps a family's parameters to the names that Megatron-LM gives them, in all its styles.

The styles are `local`, megatron-core's names without Transformer Engine; `transformer_engine`, with
its names of the norms; and `legacy`, the names of Megatron-LM before megatron-core. Entries use
those of `local`; others are renamed.

Megatron-LM has a matrix of each expert where the zoo has those of all experts in one parameter. So a
mixture is mapped with a parameter for each expert (`part_experts`), and then put together again
(`join_experts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ..checkpoint.formats.megatron import find_repeated
from ..checkpoint.layout import ParameterPlacement, ParameterSpec, RowOrder, TensorSlice
from ..checkpoint.stored_tensor import StoredTensor, cut_rows
from ..mpu import Shard
from .config import ModelConfig
from .name_map import Match, NameEntry, NameMap, refuse_names

Style = Literal["local", "transformer_engine", "legacy"]
STYLES: tuple[Style, ...] = get_args(Style)
PADDING = 128  # Megatron-LM's default of --make-vocab-size-divisible-by
TIED_HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"
# Arguments that more than one place asks for.
POST_NORM = "apply_residual_connection_post_layernorm"
UNTIED = "untie_embeddings_and_output_weights"
# The first matrix of a gated MLP, and the names of its two halves where the model has them as two
# parameters.
_FIRST_MATRIX = ".mlp.linear_fc1.weight"
_HALVES = (".mlp.linear_fc1.gate", ".mlp.linear_fc1.up")

# Name within a layer: local, Transformer Engine's, legacy.
_IN_LAYER = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.linear_qkv.", "self_attention.linear_qkv.", "self_attention.query_key_value."),
    ("self_attention.linear_proj.", "self_attention.linear_proj.", "self_attention.dense."),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", "post_attention_layernorm."),
    ("mlp.linear_fc1.", "mlp.linear_fc1.", "mlp.dense_h_to_4h."),
    ("mlp.linear_fc2.", "mlp.linear_fc2.", "mlp.dense_4h_to_h."),
)
# The matrices of a layer's experts: local, and with Transformer Engine's grouped products.
_LOCAL_EXPERT = (
    r"(.*\.mlp\.experts\.)local_experts\.(\d+)\.linear_fc([12])\.weight",
    r"\1linear_fc\3.weight\2",
)
_GROUPED_EXPERT = (
    r"(.*\.mlp\.experts\.)linear_fc([12])\.weight(\d+)",
    r"\1local_experts.\3.linear_fc\2.weight",
)
# Beginning of a name outside the layers: local, legacy.
_OUTSIDE = (
    ("embedding.", "language_model.embedding."),
    ("pooler.", "language_model.pooler."),
    ("output_layer.weight", "language_model.output_layer.weight"),
    ("output_layer.bias", "lm_head.bias"),
    ("lm_head.layer_norm.", "lm_head.layernorm."),
)
# Names that other releases have in place of a legacy one.
_OLDER = (
    (r"(.*\.layers\.\d+)\.attention\.(.*)", r"\1.self_attention.\2"),
    (r"(.*\.layers\.\d+)\.input_norm\.(.*)", r"\1.input_layernorm.\2"),
    (r"(.*\.layers\.\d+)\.post_attention_norm\.(.*)", r"\1.post_attention_layernorm.\2"),
    (r"(.*)\.final_norm\.(.*)", r"\1.final_layernorm.\2"),
    (r"lm_head\.norm\.(.*)", r"lm_head.layernorm.\1"),
)
# Argument -> the values that the zoo's models have. The first one is meant if none is stored, and
# is written.
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "absolute"),
    "use_rotary_position_embeddings": (False,),
    "normalization": ("LayerNorm",),
    "apply_layernorm_1p": (False,),
    "swiglu": (False,),
    "squared_relu": (False,),
    "group_query_attention": (False,),
    "num_experts": (None, 0),
    "add_bias_linear": (True,),
    "multi_latent_attention": (False,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
}
# Argument -> its name in GPT-NeoX.
_NAMES_IN_NEOX = {
    "position_embedding_type": "pos_emb",
    "normalization": "norm",
    "swiglu": "activation",
    "rotary_percent": "rotary_pct",
    "window_size": "sliding_window_width",
}
# Arguments that GPT-NeoX alone has; those with another name in Megatron-LM are known by that.
_SUPPORTED_BY_NEOX: Mapping[str, tuple[Any, ...]] = {
    "gpt_j_residual": (False,),
    "activation": ("gelu",),
    "attention_config": ("global",),
    "use_qk_layernorm": (False,),
    "use_mup": (False,),
    "moe_num_experts": (1, 0, None),
}


@dataclass(frozen=True)
class MegatronMap:
    """How Megatron-LM stores the models of a family.

    Attributes:
        name_map: Native name -> name in the style `local`. A tied head repeats the word embedding.
        stacks: First parts of the names of the layers: `decoder`, `encoder`, or both. Of several
            pipeline stages, those of the encoder come first.
        fused_qkv: Ends of the native names of fused QKV parameters.
        stored_whole: Ends of the native names of parameters that every rank and every pipeline stage
            stores whole.
        repeated: Pairs (regular expression, name) of tensors that repeat another one of the same
            file.
        zeros: Names of stored tensors that must be zeros, because the zoo's model does not have
            them. A tied model stores them, of the length of a rank's vocabulary.
        supported: Argument -> the values that the family has; the first one is meant if none is
            stored, and is written.
        writable: The styles in which a new checkpoint can be written; the first one is the default.
        post_norm: A layer's input norm is the output norm of the one before, as in the original
            BERT: Megatron-LM's `--apply-residual-connection-post-layernorm`. The final norm then
            counts as input norm of one more layer.
        owns: Returns whether tensors of these names, as entries spell them, of a run with these
            arguments, are of this family.
        infer: Returns the configuration for the arguments, the tensors' full shapes, and the number
            of layers.
        arguments: Returns those of Megatron-LM's arguments that only this family sets.
        mixture: Whether each layer has experts in place of an MLP.
        lacking: What megatron-core lacks of a family that only Megatron-LM before it has.
        check_config: Raises ValueError for a configuration whose models Megatron-LM does not have,
            or that is not that of a run with these arguments.
        legacy_is_tied: Whether the head is always the word embedding before megatron-core.
        ignored_by_core: Arguments that megatron-core declares, but does not read. Which model it is
            if they are set, a `config.json` must tell.
    """

    name_map: NameMap
    stacks: tuple[str, ...]
    owns: Callable[[Iterable[str], Mapping[str, Any]], bool]
    infer: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]], int], ModelConfig]
    arguments: Callable[[Any], dict[str, Any]]
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: SUPPORTED)
    writable: tuple[Style, ...] = ("transformer_engine", "local", "legacy")
    post_norm: bool = False
    fused_qkv: tuple[str, ...] = ("attention.qkv.weight", "attention.qkv.bias")
    stored_whole: tuple[str, ...] = ()
    repeated: tuple[tuple[str, str], ...] = ()
    zeros: tuple[str, ...] = ()
    mixture: bool = False
    lacking: str = ""
    check_config: Callable[[Any, Mapping[str, Any]], None] = lambda config, arguments: None
    legacy_is_tied: bool = False
    ignored_by_core: tuple[str, ...] = ()

    @property
    def stack(self) -> str:
        """The only stack, or the decoder's."""
        return self.stacks[-1]

    @property
    def _any_stack(self) -> str:
        """A regular expression for the first part of the names of the layers."""
        return f"(?:{'|'.join(self.stacks)})"

    def checked_style(self, style: Style | None) -> Style:
        """Returns the style, or the default. ValueError if it cannot hold the family."""
        if style is not None and style not in self.writable:
            raise ValueError(
                f"this family has no tensors of the style {style}; use {', '.join(self.writable)}"
            )
        return style or self.writable[0]

    def to_local_names(self, stored: Iterable[str]) -> dict[str, str]:
        """Returns name as entries spell it -> name in a checkpoint of any style.

        Raises ValueError if two names are spelled alike.
        """
        spelled: dict[str, str] = {}
        for name in stored:
            found = name
            for pattern, replacement in (*_OLDER, *self._list_renamings(), *self.repeated):
                found = re.sub(f"^{pattern}$", replacement, found)
            if spelled.setdefault(found, name) != name:
                raise ValueError(
                    f"the checkpoint has {found} twice, as {spelled[found]} and as {name}"
                )
        for name in list(spelled):
            # A repeated tensor may be stored alone.
            kept = find_repeated(name)
            if kept is not None and kept not in spelled:
                spelled[kept] = spelled.pop(name)
        if not self.post_norm:
            return spelled
        # The final norm counts as the input norm of one more layer.
        final = f"{self.stack}.final_layernorm."
        following = f"{self.stack}.layers.{count_layers(spelled)}.input_layernorm."
        renamed: dict[str, str] = {}
        for name, own in spelled.items():
            if name.startswith(final):
                name = following + name.removeprefix(final)
            renamed[name] = own
        return renamed

    def _list_renamings(self) -> list[tuple[str, str]]:
        """Returns (regular expression for a name in another style, name in the style `local`)."""
        stack = self.stack
        pairs = [(r"language_model\.(?:transformer|encoder)\.(.*)", rf"{stack}.\1")]
        for local, legacy in _OUTSIDE:
            pairs.append((re.escape(legacy) + "(.*)", rf"{local}\1"))
        pairs.append((r"word_embeddings_for_head\.weight", TIED_HEAD))
        pairs.append(_GROUPED_EXPERT)
        for local, fused, legacy in _IN_LAYER:
            for other in {fused, legacy} - {local}:
                within = rf"({self._any_stack}\.layers\.\d+\.)"
                pairs.append((rf"{within}{re.escape(other)}(.*)", rf"\1{local}\2"))
        # The names of Transformer Engine's norms begin like those of its matrices, so they come
        # first.
        return sorted(pairs, key=lambda pair: "layer_norm_" not in pair[0])

    def written_name(self, name: str, style: Style, layers: int) -> str:
        """Returns the name that a checkpoint of this style has in place of an entry's.

        Args:
            layers: The number of the model's layers.
        """
        if self.post_norm:
            following = f"{self.stack}.layers.{layers}.input_layernorm."
            name = name.replace(following, f"{self.stack}.final_layernorm.")
        column = STYLES.index(style)
        if self.mixture and style == "transformer_engine":
            if ".pre_mlp_layernorm." in name:
                return name  # It belongs to no expert's matrix.
            name = re.sub(f"^{_LOCAL_EXPERT[0]}$", _LOCAL_EXPERT[1], name)
        for row in _IN_LAYER:
            within = rf"({self._any_stack}\.layers\.\d+\.)"
            name = re.sub(rf"^{within}{re.escape(row[0])}", rf"\1{row[column]}", name)
        if style != "legacy":
            return name
        for local, legacy in _OUTSIDE:
            name = re.sub(f"^{re.escape(local)}", legacy, name)
        return re.sub(f"^{self.stack}\\.", "language_model.encoder.", name)

    def stored_spec(
        self, parameter: ParameterSpec, order: RowOrder, rows: int | None = None
    ) -> ParameterSpec:
        """Returns the parameter as Megatron-LM stores it: with this order of the rows of a fused
        QKV.

        If the vocabulary is padded, each rank has a multiple of `rows`: the stored number, or by
        default 128.
        """
        shard = parameter.shard
        if self.stored_whole and parameter.name.endswith(self.stored_whole):
            return replace(parameter, stored_whole=True)
        if shard is not None and shard.pad_multiple == 1:
            # Rows of an MLP, of which Megatron-LM's ranks have equally many.
            return parameter.without_padding()
        if shard is not None and shard.pad_multiple:
            split = replace(shard.tensor_split, pad_multiple=rows or PADDING)
            padded = Shard.from_splits(shard.shape, split, tied_to=shard.tied_to)
            return replace(parameter, shard=padded)
        is_fused = parameter.name.endswith(self.fused_qkv)
        return replace(parameter, order=order if is_fused else "blocks")

    def check(self, arguments: Mapping[str, Any], names: Iterable[str]) -> None:
        """Raises ValueError, with the reason, if the zoo's family is not the model that the
        arguments describe.
        """
        is_legacy = _is_legacy(names)
        if self.post_norm and not is_legacy:
            raise ValueError(
                "it is a BERT of megatron-core, which is transformers' megatron-bert: its layers "
                f"do not read {POST_NORM} (since 0.5); name a config.json with that model_type by "
                "--config"
            )
        supported = {**self.supported, **_SUPPORTED_BY_NEOX, POST_NORM: (self.post_norm,)}
        if is_legacy and self.legacy_is_tied:
            supported[UNTIED] = (False,)
        if not is_legacy:
            supported = {
                name: values
                for name, values in supported.items()
                if name not in self.ignored_by_core
            }
        for name, values in supported.items():
            if arguments.get(name, values[0]) not in values:
                wanted = " or ".join(map(repr, dict.fromkeys(values)))
                said = f"{name}={arguments[name]!r}"
                own = _NAMES_IN_NEOX.get(name, name)
                if own != name and own in arguments:
                    said = f"{own}={arguments[own]!r}, which is Megatron-LM's {said}"
                raise ValueError(f"its arguments say {said}, but the zoo's models have {wanted}")

    def infer_config(
        self, arguments: Mapping[str, Any], ranks: Sequence[Mapping[str, StoredTensor]]
    ) -> ModelConfig:
        """Returns the configuration for the arguments and each rank's tensors; the vocabulary
        includes its padding.
        """
        names = self.to_local_names(ranks[0])
        self.check(arguments, ranks[0])
        if not _is_legacy(ranks[0]):
            arguments = {
                name: value for name, value in arguments.items() if name not in self.ignored_by_core
            }
        shapes = {name: ranks[0][own].shape for name, own in names.items()}
        # Of the sizes that configurations hold, the ranks split these alone.
        for name, shape in shapes.items():
            is_split = name == EMBEDDING or name.endswith(".linear_fc1.weight")
            if is_split and len(shape) > 1:
                rows = sum(tensors[names[name]].shape[0] for tensors in ranks)
                shapes[name] = (rows, *shape[1:])
            elif name.endswith(".mlp.linear_fc2.weight") and len(shape) == 2:
                shapes[name] = (shape[0], len(ranks) * shape[1])
        return self.infer(arguments, shapes, count_layers(ranks[0]))

    def match(self, parameters: Iterable[str], spelled: Iterable[str]) -> Match:
        """Matches a model's parameters with a checkpoint's tensors, whose names are spelled as
        entries do.

        Raises ValueError if one of both has something that the other lacks.
        """
        try:
            found = self.name_map.match(parameters, spelled)
        except KeyError as error:
            raise ValueError(f"Megatron-LM has no such model: {error.args[0]}") from None
        refuse_names([], list(found.other_heads))
        return found

    def part_halves(
        self, parameters: Iterable[str], tensors: Mapping[str, StoredTensor]
    ) -> dict[str, StoredTensor]:
        """Returns a rank's tensors with each gated MLP's first matrix as two, if the model has two
        parameters for it.

        Args:
            parameters: The native names of the model's parameters.
            tensors: The tensors, by the names that entries have.

        Raises:
            ValueError: A matrix does not have two halves.
        """
        try:
            stored = {entry.stored_names()[0] for entry in self.name_map.resolve(parameters)}
        except KeyError as error:
            raise ValueError(f"Megatron-LM has no such model: {error.args[0]}") from None
        parted: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            stem = name.removesuffix(_FIRST_MATRIX)
            if stem + _HALVES[0] not in stored:
                parted[name] = tensor
                continue
            rows = tensor.shape[0] if tensor.shape else 0
            if len(tensor.shape) != 2 or not rows or rows % 2:
                raise ValueError(
                    f"{tensor} has the shape {list(tensor.shape)}, but it must have the rows of a "
                    "gate and as many of an up projection"
                )
            for half, end in enumerate(_HALVES):
                start = half * rows // 2
                parted[stem + end] = cut_rows(tensor, start, start + rows // 2, tensor.name + end)
        return parted

    def divide(self, parameters: Iterable[str], stages: int, style: Style) -> list[dict[str, str]]:
        """Returns, for each pipeline stage, the names in its files of the parameters that it holds
        -> native names.

        The last of several stages repeats a tied embedding. Raises ValueError if the stages cannot
        have as many layers.
        """
        stored = {
            entry.native: entry.stored_names()[0] for entry in self.name_map.resolve(parameters)
        }
        if len(self.stacks) > 1:
            return self._divide_two_stacks(stored, stages, style)
        layers = count_layers(stored.values()) - self.post_norm
        per_stage = _count_layers_per_stage(layers, stages)
        plan: list[dict[str, str]] = [{} for _ in range(stages)]
        for native, name in stored.items():
            name = self.written_name(name, style, layers)
            match = re.search(r"\.layers\.(\d+)\.", name)
            if match is not None:
                # Each stage counts its own layers from 0.
                stage, local = divmod(int(match[1]), per_stage)
                name = name[: match.start(1)] + str(local) + name[match.end(1) :]
            elif ".embedding." in f".{name}":
                stage = 0
            else:
                stage = stages - 1
            plan[stage][name] = native
        tied = TIED_HEAD not in stored.values()
        if stages > 1 and tied:
            head = "word_embeddings_for_head.weight" if style == "legacy" else TIED_HEAD
            plan[-1][head] = find_embedding(self, stored)
        return plan

    def _divide_two_stacks(
        self, stored: Mapping[str, str], stages: int, style: Style
    ) -> list[dict[str, str]]:
        """Does what `divide` does for an encoder and a decoder.

        One stage has both. Of several, the first half has the encoder and the others the decoder.
        The first stages of both have the word embedding, and their last ones a head: that of the
        encoder is never used, but megatron-core makes it.

        Args:
            stored: Native name -> name in the style `local`.
        """
        encoder_stages = stages // 2
        decoder_stages = stages - encoder_stages
        first_stages = {"encoder": 0, "decoder": encoder_stages}
        last_stages = {"encoder": max(encoder_stages - 1, 0), "decoder": stages - 1}
        per_stage: dict[str, int] = {}
        for stack, own in (("encoder", max(encoder_stages, 1)), ("decoder", decoder_stages)):
            layers = count_layers(name for name in stored.values() if name.startswith(f"{stack}."))
            per_stage[stack] = _count_layers_per_stage(layers, own)

        plan: list[dict[str, str]] = [{} for _ in range(stages)]
        for native, name in stored.items():
            stack = name.partition(".")[0]
            match = re.search(r"\.layers\.(\d+)\.", name)
            written = self.written_name(name, style, 0)
            if match is not None:
                stage, local = divmod(int(match[1]), per_stage[stack])
                number = re.search(r"\.layers\.(\d+)\.", written)
                assert number is not None
                written = written[: number.start(1)] + str(local) + written[number.end(1) :]
                own_stages = {first_stages[stack] + stage}
            elif native.endswith(self.stored_whole):
                own_stages = set(range(stages))
            elif name == EMBEDDING:
                own_stages = set(first_stages.values())
            elif name == TIED_HEAD:
                own_stages = set(last_stages.values())
            else:
                own_stages = {last_stages[stack]}
            for stage in own_stages:
                plan[stage][written] = native
        # A stage that has the word embedding needs no copy of it as the tied head.
        if TIED_HEAD not in stored.values():
            embedding = find_embedding(self, stored)
            for stage in set(last_stages.values()) - set(first_stages.values()):
                plan[stage][TIED_HEAD] = embedding
        for names in plan:
            if TIED_HEAD in names:
                names[f"lm_head.{TIED_HEAD}"] = names[TIED_HEAD]
        return plan

    def list_zeros(self, parameters: Iterable[str], stages: int) -> list[tuple[str, ...]]:
        """Returns, for each pipeline stage, the names of tensors of zeros that its files have: the
        bias of a tied head, one number for each row of the vocabulary.
        """
        stored = [entry.stored_names()[0] for entry in self.name_map.resolve(parameters)]
        plan: list[tuple[str, ...]] = [() for _ in range(stages)]
        if self.zeros and TIED_HEAD not in stored:
            for stage in {max(stages // 2 - 1, 0), stages - 1} if stages > 1 else {0}:
                plan[stage] = self.zeros
        return plan

    def all_arguments(
        self,
        config: ModelConfig,
        specs: Mapping[str, ParameterSpec],
        ranks: tuple[int, int],
        style: Style,
    ) -> dict[str, Any]:
        """Returns Megatron-LM's arguments for a model that is stored as `specs` over these ranks
        and stages.
        """
        own = self.arguments(config)
        stored = {
            entry.stored_names()[0]: specs[entry.native] for entry in self.name_map.resolve(specs)
        }
        if style == "legacy" and self.legacy_is_tied and TIED_HEAD in stored:
            raise ValueError(
                f"before megatron-core the head of a {config.model_type} is the word embedding, but "
                "this model's differs from it; use another style of names"
            )
        embedding = stored[EMBEDDING]
        hidden = embedding.shape[1]
        return {
            "num_layers": count_layers(stored) - self.post_norm,
            "hidden_size": hidden,
            "num_attention_heads": config.attention_heads,
            "kv_channels": hidden // config.attention_heads,
            "max_position_embeddings": config.max_sequence_length,
            "seq_length": config.max_sequence_length,
            "padded_vocab_size": ranks[0] * embedding.local_shape(0, ranks[0])[0],
            "make_vocab_size_divisible_by": PADDING,
            "tensor_model_parallel_size": ranks[0],
            "pipeline_model_parallel_size": ranks[1],
            "transformer_impl": "transformer_engine" if style == "transformer_engine" else "local",
            UNTIED: TIED_HEAD in stored,
            POST_NORM: self.post_norm,
            **{name: values[0] for name, values in self.supported.items()},
            **({"moe_grouped_gemm": style == "transformer_engine"} if self.mixture else {}),
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            **own,
        }


def part_experts(parameters: Mapping[str, ParameterSpec]) -> dict[str, ParameterSpec]:
    """Returns a model's parameters with one of each expert in place of those of all experts.

    `blocks.0.mlp.experts.down` [E · F, H] becomes `blocks.0.mlp.experts.0.down` [H, F], and so on,
    as Megatron-LM has them.
    """
    parted: dict[str, ParameterSpec] = {}
    for name, parameter in parameters.items():
        shard = parameter.shard
        if shard is None or not shard.is_nested:
            parted[name] = parameter
            continue
        rows = shard.splits[0].unit
        count = parameter.shape[0] // rows
        groups = shard.groups[: len(shard.groups) // count]
        own = Shard((rows, *parameter.shape[1:]), 0, groups)
        if name.endswith(".down"):
            own = Shard((*parameter.shape[1:], rows), 1)
        stem, _, end = name.rpartition(".")
        for expert in range(count):
            one = f"{stem}.{expert}.{end}"
            parted[one] = ParameterSpec(one, own.shape, own)
    return parted


def find_owner(name: str) -> str:
    """Returns the native name of the parameter that holds one of `part_experts`."""
    return re.sub(r"(\.mlp\.experts)\.\d+\.", r"\1.", name)


def join_experts(
    parameters: Mapping[str, ParameterSpec], placements: Mapping[str, ParameterPlacement]
) -> dict[str, ParameterPlacement]:
    """Returns the placements of a model's parameters, from those of `part_experts`."""
    slices: dict[str, list[TensorSlice]] = {}
    joined: dict[str, ParameterPlacement] = {}
    for name, placement in placements.items():
        owner = find_owner(name)
        if owner == name:
            joined[name] = placement
            continue
        # The experts' rows follow one another.
        own = slices.setdefault(owner, [])
        start = sum(stop - first for part in own for first, stop in part.ranges)
        for part in placement.copies[0]:
            ranges = tuple((first + start, stop + start) for first, stop in part.ranges)
            own.append(replace(part, ranges=ranges, transposed=placement.dim == 1))
    for name, parts in slices.items():
        joined[name] = ParameterPlacement(name, parameters[name].shape, 0, (tuple(parts),))
    return {name: joined[name] for name in parameters}


def _is_legacy(names: Iterable[str]) -> bool:
    """Returns whether stored tensors of these names are of layers before megatron-core."""
    return any(name.startswith("language_model.") for name in names)


def _count_layers_per_stage(layers: int, stages: int) -> int:
    """Raises ValueError if the stages cannot have as many layers each."""
    if stages < 1 or layers % stages:
        fitting = [count for count in range(1, layers + 1) if layers % count == 0]
        raise ValueError(
            f"{layers} layers cannot be divided over {stages} pipeline stages; use one of {fitting}"
        )
    return layers // stages


def find_embedding(megatron: MegatronMap, parameters: Iterable[str]) -> str:
    """Returns the native name of the word embedding."""
    for entry in megatron.name_map.resolve(parameters):
        if entry.stored_names()[0] == EMBEDDING:
            return entry.native
    raise ValueError("the model has no word embedding")


def join_halves(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns a file's (type, shape) by name, with the two halves of a gated MLP's first matrix as
    one tensor.
    """
    joined: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in shapes.items():
        stem = name.removesuffix(_HALVES[0]).removesuffix(_HALVES[1])
        if stem == name:
            joined[name] = (dtype, shape)
            continue
        whole = stem + _FIRST_MATRIX
        if whole in joined and joined[whole][0] != dtype:
            raise ValueError(
                f"the halves of {whole} have the types {joined[whole][0]} and {dtype}; choose one "
                "for all parameters with --dtype"
            )
        joined[whole] = (dtype, (2 * shape[0], *shape[1:]))
    return joined


def find_half(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    """Returns a file's tensor, or of a gated MLP's first matrix the half of that name."""
    for half, end in enumerate(_HALVES):
        stem = name.removesuffix(end)
        if stem != name:
            whole = tensors[stem + _FIRST_MATRIX]
            rows = whole.shape[0] // 2
            return cut_rows(whole, half * rows, (half + 1) * rows, name)
    return tensors[name]


def count_layers(names: Iterable[str]) -> int:
    """Returns the number of layers that the names have."""
    last = -1
    for name in names:
        found = re.search(r"\.layers\.(\d+)\.", name)
        if found:
            last = max(last, int(found[1]))
    return last + 1


def block_entries(
    stack: str, native: str, norms: tuple[tuple[str, str], ...]
) -> tuple[NameEntry, ...]:
    """Returns the entries of a family's blocks.

    Args:
        stack: First part of the names of the layers: `decoder` or `encoder`.
        native: The native name of the list of blocks.
        norms: Pairs of a native norm and its name in Megatron-LM.
    """
    pairs = (
        ("attention.qkv", f"{stack}.layers.{{i}}.self_attention.linear_qkv"),
        ("attention.output", f"{stack}.layers.{{i}}.self_attention.linear_proj"),
        ("mlp.up", f"{stack}.layers.{{i}}.mlp.linear_fc1"),
        ("mlp.down", f"{stack}.layers.{{i}}.mlp.linear_fc2"),
        *norms,
    )
    return tuple(
        entry
        for name, stored in pairs
        for entry in weight_and_bias(f"{native}.{{i}}.{name}", stored)
    )


def weight_and_bias(native: str, stored: str) -> tuple[NameEntry, NameEntry]:
    """Returns the entries of a weight and its bias."""
    weight = NameEntry(f"{native}.weight", f"{stored}.weight")
    bias = NameEntry(f"{native}.bias", f"{stored}.bias")
    return weight, bias


@dataclass(frozen=True)
class Sizes:
    """The sizes that the configurations of all families have."""

    heads: int
    vocabulary: int
    hidden: int
    inner: int
    positions: int
    norm_epsilon: float

    @classmethod
    def find(
        cls, arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], stack: str
    ) -> Sizes:
        """Finds the sizes. The tensors decide, except for the number of heads, which they do not
        show.

        Raises:
            ValueError: A tensor is missing or is no matrix, or the number of heads is not stored.
        """
        heads = arguments.get("num_attention_heads")
        if type(heads) is not int:
            raise ValueError(
                "its arguments, with the number of heads, are not stored; name a config.json by "
                "--config"
            )
        vocabulary, hidden = find_matrix(shapes, EMBEDDING)
        inner, _ = find_matrix(shapes, f"{stack}.layers.0.mlp.linear_fc1.weight")
        positions, _ = find_matrix(shapes, "embedding.position_embeddings.weight")
        epsilon = arguments.get("norm_epsilon", arguments.get("layernorm_epsilon"))
        return cls(
            heads,
            vocabulary,
            hidden,
            inner,
            positions,
            epsilon if isinstance(epsilon, float) else 1e-5,
        )


def find_matrix(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    """Returns the shape of a matrix. Raises ValueError if it is missing, or is none."""
    found = shapes.get(name, ())
    if len(found) != 2:
        raise ValueError(
            f"{name} has the shape {list(found)}, but a matrix is needed to find the sizes"
        )
    return found[0], found[1]


def rates(arguments: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Returns key of a configuration -> value of the argument that `keys` names for it, for those
    that are stored.
    """
    found: dict[str, Any] = {}
    for key, name in keys.items():
        value = arguments.get(name)
        if isinstance(value, (int, float)):
            found[key] = float(value)
    return found


def has_tanh_gelu(arguments: Mapping[str, Any]) -> bool:
    """Returns whether the blocks have the tanh approximation of GELU; Megatron-LM's fused kernel
    has it too.
    """
    return bool(arguments.get("openai_gelu")) or bool(arguments.get("bias_gelu_fusion", True))
