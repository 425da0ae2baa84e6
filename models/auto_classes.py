"""The Auto classes: they find the architecture for a kind of head by the family of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ..mpu import ParallelMesh
from .auto import as_config, config_from_dict, from_config, read_config_values
from .config import ModelConfig
from .family import Family
from .family_table import family, find_family
from .family_table import presets as list_presets
from .loading import from_pretrained
from .loading_options import LoadingOptions, change_config, name_source


class AutoConfig:
    """Finds configurations, as transformers' class of this name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        return_unused_kwargs: bool = False,
        **options: Any,
    ) -> Any:
        """Returns the configuration of a folder, a file, a preset, or a name on the Hub.

        Args:
            return_unused_kwargs: Return the options that are no settings of the configuration, too.
            options: Options of the Hub's client, and settings of the configuration.

        Raises:
            ValueError: There is no configuration, or an option is refused.
        """
        taken = LoadingOptions.from_arguments(options)
        name = name_source(pretrained_model_name_or_path, taken)
        config = dict(list_presets()).get(name)
        if config is None:
            config = config_from_dict(read_config_values(name, taken.hub))
        changes = dict(taken.changes)
        unused: dict[str, Any] = {}
        if return_unused_kwargs:
            unused = {key: value for key, value in changes.items() if not hasattr(config, key)}
            changes = {key: value for key, value in changes.items() if key not in unused}
        changed = change_config(config, changes, "AutoConfig.from_pretrained")
        changed.name_or_path = str(pretrained_model_name_or_path)  # type: ignore[misc]
        return (changed, unused) if return_unused_kwargs else changed

    @staticmethod
    def for_model(model_type: str, **settings: Any) -> ModelConfig:
        """Returns a family's configuration with these settings."""
        return family(model_type).config(**settings)


class AutoModelClass:
    """Base of the Auto classes.

    Attributes:
        heads: How the names of the architectures end, the preferred one first.
    """

    heads: ClassVar[tuple[str, ...]]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        mesh: ParallelMesh | None = None,
        dtype: Any = None,
        *,
        config: Any = None,
        **options: Any,
    ) -> Any:
        """Loads the model with this kind of head; see `shardzoo.from_pretrained`."""
        if config is None:
            taken = LoadingOptions.from_arguments(options)
            name = name_source(pretrained_model_name_or_path, taken)
            facts = find_family(read_config_values(str(Path(name, taken.subfolder)), taken.hub))
        else:
            config = as_config(config)
            facts = family(config.model_type)
        return from_pretrained(
            pretrained_model_name_or_path,
            mesh,
            dtype,
            config=config,
            architecture=cls.find_class(facts),
            **options,
        )

    @classmethod
    def from_config(cls, config: Any, mesh: ParallelMesh | None = None, **options: Any) -> Any:
        """Builds the model with this kind of head; see `shardzoo.from_config`."""
        read = as_config(config)
        architecture = cls.find_class(family(read.model_type))
        return from_config(read, mesh, architecture=architecture, **options)

    @classmethod
    def find_class(cls, facts: Family) -> Any:
        """Returns the class of a family that has this kind of head.

        Raises:
            ValueError: The family has none.
        """
        for head in cls.heads:
            for name, architecture in facts.architectures.items():
                is_other = head == "Model" and name.endswith(
                    ("HeadModel", "HeadsModel", "MTModel", "EncoderModel")
                )
                if name.endswith(head) and not is_other:
                    return architecture
        raise ValueError(
            f"{cls.__name__}: {facts.config.model_type} has no architecture …{cls.heads[0]}; it has "
            f"{', '.join(facts.architectures)}"
        )


class AutoModel(AutoModelClass):
    """A model without a head."""

    heads = ("Model",)


class AutoModelForPreTraining(AutoModelClass):
    """A model with the heads of its pretraining."""

    heads = ("ForPreTraining", "")


class AutoModelForCausalLM(AutoModelClass):
    """A model that predicts the next token."""

    heads = ("ForCausalLM", "LMHeadModel")


class AutoModelForMaskedLM(AutoModelClass):
    """A model that predicts masked tokens."""

    heads = ("ForMaskedLM",)


class AutoModelForSeq2SeqLM(AutoModelClass):
    """An encoder-decoder that answers a text with another one."""

    heads = ("ForConditionalGeneration", "MTModel")


class AutoModelForSequenceClassification(AutoModelClass):
    """A model that classifies a text."""

    heads = ("ForSequenceClassification",)


class AutoModelForTokenClassification(AutoModelClass):
    """A model that classifies each token."""

    heads = ("ForTokenClassification",)


class AutoModelForQuestionAnswering(AutoModelClass):
    """A model that finds the first and the last token of an answer."""

    heads = ("ForQuestionAnswering",)


class AutoModelForMultipleChoice(AutoModelClass):
    """A model that chooses one of several texts."""

    heads = ("ForMultipleChoice",)


class AutoModelForNextSentencePrediction(AutoModelClass):
    """A model that predicts whether the second sentence follows the first."""

    heads = ("ForNextSentencePrediction",)
