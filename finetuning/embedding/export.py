"""Reads and writes what sentence-transformers keeps beside the weights of a model that embeds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.strict_json import parse_json, read_folder_json, read_regular_file
from .pooling import POOLING_MODES

MODULES = "modules.json"
POOLING_FOLDER = "1_Pooling"
SETTINGS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
LIBRARY = "sentence_transformers.models"
# Encoders that sentence-transformers loads only as a part of the whole model.
LOADED_WHOLE = ("BartEncoder", "MBartEncoder")


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a model's hidden states become embeddings.

    Attributes:
        pooling: See `pool`.
        normalize: Whether embeddings have the length 1.
        query_prompt: The text before queries; `document_prompt` is the one before documents.
    """

    pooling: str
    normalize: bool = False
    query_prompt: str = ""
    document_prompt: str = ""

    @classmethod
    def from_folder(cls, folder: Path, kind: str) -> EmbeddingSettings:
        """Reads the settings of a folder of sentence-transformers.

        For other folders it returns a mean for encoders, and the last token's state for decoders.

        Raises:
            ValueError: The folder has modules or a pooling that this library does not have.
        """
        modules: Any = None
        if (folder / MODULES).exists():
            modules = parse_json(read_regular_file(folder / MODULES), str(folder / MODULES))
        if not isinstance(modules, list):
            return cls("last" if kind == "decoder" else "mean")
        names = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        unknown = set(names) - {"Transformer", "Pooling", "Normalize"}
        if unknown:
            raise ValueError(
                f"{folder} has the module {sorted(unknown)[0]} of sentence-transformers, which is "
                "not supported; Transformer, Pooling and Normalize are"
            )
        values: dict[str, Any] = {}
        if "Pooling" in names:
            path = folder / str(modules[names.index("Pooling")].get("path"))
            values = read_folder_json(path, "config.json") or {}
        chosen = [name for name, key in POOLING_MODES.items() if values.get(key)]
        mode = values.get("pooling_mode")
        if isinstance(mode, str):
            renamed = {"lasttoken": "last", "weightedmean": "weighted_mean"}
            chosen = [renamed.get(mode, mode)]
        if len(chosen) != 1 or chosen[0] not in POOLING_MODES:
            raise ValueError(
                f"{folder / POOLING_FOLDER} does not name one of the poolings "
                f"{', '.join(POOLING_MODES)}; set pooling"
            )
        settings = read_folder_json(folder, SETTINGS) or {}
        prompts = settings.get("prompts") or {}
        return cls(
            chosen[0],
            "Normalize" in names,
            prompts.get("query") or "",
            prompts.get("document") or "",
        )

    def save(
        self, folder: Path, *, hidden_size: int, max_length: int, architecture: str = ""
    ) -> None:
        """Writes the files with which `SentenceTransformer(folder)` loads the model.

        Args:
            architecture: That of the model.
        """
        modules = [("Transformer", ""), ("Pooling", POOLING_FOLDER)]
        if self.normalize:
            modules.append(("Normalize", "2_Normalize"))
        listed: list[dict[str, Any]] = []
        for number, (name, path) in enumerate(modules):
            listed.append(
                {"idx": number, "name": str(number), "path": path, "type": f"{LIBRARY}.{name}"}
            )
            (folder / path).mkdir(parents=True, exist_ok=True)
        pooling: dict[str, Any] = {"word_embedding_dimension": hidden_size}
        for name, key in POOLING_MODES.items():
            pooling[key] = name == self.pooling
        pooling |= {"pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False}
        settings = {
            "prompts": {"query": self.query_prompt, "document": self.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        }
        _write(folder / MODULES, listed)
        _write(folder / POOLING_FOLDER / "config.json", pooling)
        _write(folder / SETTINGS, settings)
        loading: dict[str, Any] = {"max_seq_length": max_length, "do_lower_case": False}
        if architecture in LOADED_WHOLE:
            loading |= describe_encoder_of_model()
        _write(folder / LENGTHS, loading)


def describe_encoder_of_model() -> dict[str, Any]:
    """Returns how sentence-transformers loads the files of an encoder into the whole model.

    The tensors get the names that they have there, the decoder has no blocks, and embeddings are
    made of the encoder's states.
    """
    inside = r"^((?:layers|embed_positions|layernorm_embedding|layer_norm)\.)"
    return {
        "model_kwargs": {"key_mapping": {inside: r"encoder.\1", r"^embed_tokens\.": "shared."}},
        "config_kwargs": {"decoder_layers": 0},
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "encoder_last_hidden_state"}
        },
        "module_output_name": "token_embeddings",
    }


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
