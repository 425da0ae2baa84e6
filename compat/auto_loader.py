"""Adapts this package to scripts for FlagAI: its `AutoLoader`, methods of its tokenizers, and its
collate functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data import BlankDataset, PadBatch
from ..data.tokenizers.tokenizer import load_transformers_tokenizer
from ..finetuning.arguments import FinetuningArguments
from ..finetuning.data import TextTokenizer, prefix_mask
from ..finetuning.loading import ModelSource, find_source, load_model, task_config
from ..finetuning.tasks import Labels
from ..models import FAMILIES, family, from_config
from ..models.language_model import IGNORED
from ..mpu import ParallelMesh

# FlagAI's task -> ours. Those that generate mean the architecture that the family has for them.
TASKS = {
    **dict.fromkeys(("seq2seq", "title-generation", "poetry"), "text2text-generation"),
    **dict.fromkeys(("lm", "masklm", "llama3"), "text-generation"),
    **dict.fromkeys(("classification", "semantic-matching"), "text-classification"),
    **dict.fromkeys(("sequence-labeling", "ner"), "token-classification"),
    **dict.fromkeys(("sequence-labeling-crf", "ner-crf"), "token-classification"),
    **dict.fromkeys(("sequence-labeling-gp", "ner-gp"), "token-classification"),
    "embedding": "embedding",
}


class AutoLoader:
    """Loads the zoo's model of a folder with the head of a FlagAI task, and its tokenizer.

    A decoder or an encoder-decoder that the zoo does not have, such as OPT, is transformers' own.

        loader = AutoLoader("ner", "RoBERTa-base-ch", model_dir="./checkpoints", class_num=7)
        model, tokenizer = loader.get_model(), loader.get_tokenizer()

    Args:
        task_name: FlagAI's name of the task: lm, masklm, seq2seq, title-generation, poetry,
            classification, semantic-matching, embedding, sequence-labeling or ner. The last two
            with `-crf` have a conditional random field, `model.crf_layer`; with `-gp` a global
            pointer. FlagAI's llama3, and the name of a family, mean lm.
        model_name: The folder in `model_dir`, which is a Hugging Face or a shardzoo folder with its
            tokenizer.
        load_pretrain_params: Load the folder's weights; else the model is new.
        only_download_config: The folder has a config.json alone, so that the model is new.
        class_num: Number of classes of a new head.
        inner_dim: Features of a query of a new global pointer, 64 by default; for `-gp` alone.
        fp16: Make the parameters fp16.
        use_cache: Taken for FlagAI's scripts: generating keeps keys and values either way.
        device: Where the parameters are.
        mesh: The mesh over which the model is split, such as `trainer.mesh`.

    Raises ValueError for another task, a model that does not learn it, and a folder that holds
    none.
    """

    def __init__(
        self,
        task_name: str = "lm",
        model_name: str = "RoBERTa-base-ch",
        model_dir: str = "./checkpoints/",
        only_download_config: bool = False,
        *,
        load_pretrain_params: bool = True,
        class_num: int | None = None,
        inner_dim: int | None = None,
        fp16: bool = False,
        use_cache: bool = True,
        device: torch.device | str = "cpu",
        mesh: ParallelMesh | None = None,
    ) -> None:
        if task_name in FAMILIES:
            task_name = "lm"
        if task_name not in TASKS:
            raise ValueError(f"task_name must be one of {', '.join(TASKS)}, not {task_name!r}")
        self.folder = Path(model_dir, model_name)
        if not self.folder.is_dir():
            raise ValueError(
                f"{self.folder} is not a folder; put the model {model_name} there, as "
                "transformers saves it"
            )
        has_crf = task_name.endswith("-crf")
        has_pointer = task_name.endswith("-gp")
        if inner_dim is not None and not has_pointer:
            raise ValueError(
                f"inner_dim is for the tasks with -gp, not for {task_name}: leave it out"
            )
        generates = TASKS[task_name] in ("text-generation", "text2text-generation")
        arguments = FinetuningArguments(
            model_name_or_path=str(self.folder),
            native=None if generates and mesh is None else True,
            crf=has_crf,
        )
        source = find_source(arguments)
        if not source.native:
            new = only_download_config or not load_pretrain_params
            self._load_transformers(source, arguments, torch.device(device), new)
            if fp16:
                self.model.half()
            return
        known = family(source.model_type).tasks
        task = TASKS[task_name]
        if task == "text-generation" and task not in known:
            task = "text2text-generation"  # of an encoder, its language model
        if task not in known:
            raise ValueError(
                f"a {source.model_type} does not learn {task_name}; it learns {', '.join(known)}"
            )
        labels = [f"LABEL_{number}" for number in range(class_num or 0)]
        head = Labels(labels, "single_label_classification", stored=not labels).head(task)
        stored_size = source.values.get("pointer_size")
        size = inner_dim or stored_size or 64 if has_pointer else None
        if size != stored_size:
            head = {**(head or {}), "pointer_size": size}
            if has_pointer:
                head["crf"] = False
        if only_download_config or not load_pretrain_params:
            config = task_config(source, task).with_changes(**(head or {}))
            if has_crf:
                config = config.with_changes(crf=True)
            self.model = from_config(config, mesh, device=torch.device(device))
        else:
            self.model = load_model(source, task, arguments, mesh, torch.device(device), head)
        if fp16:
            self.model.half()
        blank_text = family(source.model_type).blank_text
        text = None if blank_text is None else blank_text(self.folder, None)
        self.tokenizer = FlagAITokenizer(load_transformers_tokenizer(self.folder), text)

    def _load_transformers(
        self, source: ModelSource, arguments: FinetuningArguments, device: torch.device, new: bool
    ) -> None:
        """Loads a model that generates and is not in the zoo, or makes a `new` one of its
        configuration.
        """
        task = "text2text-generation" if source.shape == "encoder-decoder" else "text-generation"
        if new:
            from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

            config = AutoConfig.from_pretrained(self.folder)
            kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model = kind.from_config(config)
        else:
            model = load_model(source, task, arguments, None, device, None)
        self.model: Any = model.to(device)
        self.tokenizer = FlagAITokenizer(load_transformers_tokenizer(self.folder))

    def get_model(self) -> Any:
        return self.model

    def get_tokenizer(self) -> FlagAITokenizer:
        return self.tokenizer


class FlagAITokenizer:
    """transformers' tokenizer with the methods that FlagAI's scripts call besides.

    Attributes:
        backend: The tokenizer itself, which has all other methods.
        text: The `BlankText` of a family that fills blanks; None for the others.
    """

    def __init__(self, backend: Any, text: Any = None) -> None:
        self.backend, self.text, self.words = backend, text, TextTokenizer(backend)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "backend":
            raise AttributeError(name)
        return getattr(self.backend, name)

    def __len__(self) -> int:
        return len(self.backend)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self.backend(*texts, **options)

    def encode_plus(
        self,
        source_text: str,
        target_text: str | None = None,
        *,
        max_length: int | None = None,
        truncation: bool = True,
    ) -> Any:
        """Encodes a text or two. With blanks, the second text fills that of the first, or follows
        it.

        The result has `input_ids` and `token_type_ids`; for a model that fills blanks `input_ids`,
        `target_ids`, `position_ids` (two lists), `attention_mask` (the length of the first text)
        and `loss_mask`.
        """
        if self.text is None:
            cut = {"max_length": max_length, "truncation": truncation} if max_length else {}
            return self.backend(
                source_text, target_text, return_token_type_ids=True, verbose=False, **cut
            )
        length = max_length or 512
        [sample] = BlankDataset(
            [(source_text, target_text or "")],
            self.text,
            max_source_length=length,
            max_target_length=length,
        )
        labels = sample.pop("labels")
        masks = {
            "target_ids": labels.tolist(),
            "loss_mask": (labels != IGNORED).astype(int).tolist(),
        }
        return {name: value.tolist() for name, value in sample.items()} | masks

    def get_command_id(self, name: str) -> int:
        """Returns the id of a special token by its name without brackets, such as "pad", "cls" or
        "eop".
        """
        found = (
            getattr(self.text.tokens, name, None)
            if self.text
            else getattr(self.backend, f"{name}_token_id", None)
        )
        if found is None:
            raise ValueError(f"the tokenizer has no special token {name!r}")
        return int(found)

    def tokenize(
        self, text: str, maxlen: int | None = None, add_spatial_tokens: bool = False
    ) -> list[str]:
        """Returns the tokens of a text, at most `maxlen`, with the special ones around them if they
        are added.
        """
        cut = {"max_length": maxlen, "truncation": True} if maxlen else {}
        ids = self.backend(text, add_special_tokens=add_spatial_tokens, verbose=False, **cut)[
            "input_ids"
        ]
        return self.backend.convert_ids_to_tokens(ids)

    def rematch(self, text: str, tokens: Sequence[str]) -> list[list[int]]:
        """Returns the characters of the text that each of its `tokens` has; none for a special
        token.
        """
        special = bool(tokens) and tokens[0] in self.backend.all_special_tokens
        encoded = self.backend(
            text, return_offsets_mapping=True, add_special_tokens=special, verbose=False
        )
        pieces = [list(range(*place)) for place in encoded["offset_mapping"]][: len(tokens)]
        last = [[]] if special and tokens[-1] in self.backend.all_special_tokens else []
        return [*pieces[: len(tokens) - len(last)], *last]


def seq2seq_collate_fn(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Makes a batch for an encoder that generates, from `input_ids` and `segment_ids` (1 on the
    text to generate).

    See `data.PrefixMaskedDataset` for the labels and the mask that follow from the segments.
    """
    rows = [
        {"input_ids": np.array(one["input_ids"]), "token_type_ids": np.array(one["segment_ids"])}
        for one in samples
    ]
    for row in rows:
        ids = row["input_ids"]
        generated = row["token_type_ids"] == 1
        row["labels"] = np.append(np.where(generated[1:], ids[1:], IGNORED), IGNORED)
    prefixes = torch.tensor([int((row["token_type_ids"] == 0).sum()) for row in rows])
    mask = prefix_mask(prefixes, [len(row["input_ids"]) for row in rows])
    return PadBatch(attention_mask=False)(rows) | {"attention_mask": mask}


def bert_cls_collate_fn(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Makes a padded batch of `input_ids`, of `segment_ids` where samples have them, and a label
    for each text.
    """
    rows = []
    for sample in samples:
        row = {"input_ids": np.array(sample["input_ids"])}
        if "segment_ids" in sample:
            row["token_type_ids"] = np.array(sample["segment_ids"])
        rows.append(row)
    labels = torch.tensor([int(sample["labels"]) for sample in samples])
    return PadBatch()(rows) | {"labels": labels}


def bert_sequence_label_gp_collate_fn(
    samples: Sequence[Mapping[str, Any]],
) -> dict[str, torch.Tensor]:
    """Makes a padded batch of `input_ids` and labels [B, C, S, S] for a global pointer, which are 1
    for the first and the last token of an entity of each of C kinds.

    Raises:
        ValueError: The labels of a sample have another shape, or an entity ends before it begins.
    """
    batch = PadBatch()([{"input_ids": np.array(one["input_ids"])} for one in samples])
    length = batch["input_ids"].shape[1]
    kinds = len(samples[0]["labels"])
    labels = torch.zeros(len(samples), kinds, length, length)
    for row, sample in enumerate(samples):
        tokens = len(sample["input_ids"])
        own = torch.as_tensor(sample["labels"])
        if own.shape != (kinds, tokens, tokens):
            raise ValueError(
                f"labels must have the shape {(kinds, tokens, tokens)}, kinds of entities and "
                f"twice the {tokens} tokens of input_ids, not {tuple(own.shape)}"
            )
        if own.tril(-1).any():
            kind, first, last = own.tril(-1).nonzero()[0].tolist()
            raise ValueError(
                f"an entity of kind {kind} begins at token {first} and ends before it, at {last}"
            )
        labels[row, :, :tokens, :tokens] = own
    return batch | {"labels": labels}


def bert_sequence_label_collate_fn(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Makes a padded batch of `input_ids` and a label for each token."""
    return PadBatch()(
        [{name: np.array(one[name]) for name in ("input_ids", "labels")} for one in samples]
    )
