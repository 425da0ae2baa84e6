"""Generates text from prompts with the model of a folder, without handling tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.hub import find_model
from ..checkpoint.manifest import checked_tokenizer
from ..data.tokenizers.glm_tokens import GLMVocabulary
from ..data.tokenizers.tokenizer import load_transformers_tokenizer
from ..files.strict_json import read_folder_json
from ..models import from_pretrained
from ..models.family import BlankText
from ..models.generation.generate import generate
from ..models.generation.prompts import pad_prompts
from ..models.generation.settings import make_settings
from ..models.lora import merge_lora
from ..models.registry import family
from ..mpu import ParallelMesh
from .filling import fill_blanks, fill_mask, fills_masks


class TextGenerationPipeline:
    """Continues, answers or fills texts with the model of a folder, split over the ranks of a mesh.

        pipeline = TextGenerationPipeline("path/to/mt5-small", mesh)
        pipeline(["summarize: she is a student, she is tall, she loves study"], num_beams=4)

    Every rank must make the same calls and gets the same results.

    Args:
        path: A Hugging Face folder or a shardzoo folder with its tokenizer. The settings in its
            generation_config.json apply unless a call overrides them.
        dtype: The model's dtype; by default the stored one.
        batch_size: Prompts that are decoded together.
        glm_vocabulary: The base vocabulary of a GLM, if its size does not determine it.
        tokenizer: A folder with the tokenizer; by default the model's.
        adapter: A folder of peft with LoRA weights, which are merged into the model.

    Raises ValueError if there is no tokenizer, or it is not the one that the model was trained
    with.
    """

    def __init__(
        self,
        path: str | Path,
        mesh: ParallelMesh | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        batch_size: int = 8,
        glm_vocabulary: GLMVocabulary | None = None,
        tokenizer: str | Path | None = None,
        adapter: str | Path | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        folder = path = find_model(path, "path")
        text_folder = folder if tokenizer is None else Path(tokenizer)
        size = checked_tokenizer(
            folder, text_folder
        ).vocab_size  # before the weights are read, which may take minutes
        self.model: Any = from_pretrained(path, mesh, dtype, device=device, adapter=adapter)
        if adapter is not None:
            merge_lora(self.model)
        if tokenizer is not None and size > self.model.config.vocab_size:
            raise ValueError(
                f"the tokenizer in {tokenizer} has {size:,} tokens, but the model in {path} has a vocabulary of "
                f"{self.model.config.vocab_size:,}; use the tokenizer that it was trained with"
            )
        self.batch_size = batch_size
        self.generation_config = read_folder_json(folder, "generation_config.json")
        make_blank_text = family(self.model.config.model_type).blank_text
        self.blank_text = (
            None if make_blank_text is None else make_blank_text(text_folder, glm_vocabulary)
        )
        self.tokenizer = None if self.blank_text else load_transformers_tokenizer(text_folder)

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        return_full_text: bool = True,
        streamer: Any = None,
        **settings: Any,
    ) -> list[dict[str, Any]]:
        """Returns one entry for each sequence, in the order of the texts.

        `generated_text` is the answer of an encoder-decoder, or a text with its continuation
        (without `return_full_text` the continuation alone), or a text with its blanks filled by a
        GLM, whose contents are in `pieces`. BERT and RoBERTa give `masks` instead: for each mask
        the best `top_k` tokens and their probabilities. `streamer` and `settings` are as for
        `generate`.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        entries: list[dict[str, Any]] = []
        for start in range(0, len(texts), self.batch_size):
            part = texts[start : start + self.batch_size]
            if self.blank_text is not None:
                entries += self._fill_blanks(part, self.blank_text, settings)
            elif fills_masks(type(self.model)):
                entries += [self._fill_masks(text, settings) for text in part]
            else:
                entries += self._generate(part, return_full_text, streamer, settings)
        return entries

    @property
    def streams(self) -> bool:
        """Whether a streamer can show tokens as they are generated."""
        return self.blank_text is None and not fills_masks(type(self.model))

    def _generate(
        self, texts: list[str], full: bool, streamer: Any, given: dict[str, Any]
    ) -> list[dict[str, Any]]:
        tokenizer: Any = self.tokenizer
        settings = make_settings(self.model.config, self.generation_config, given)
        rows = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
        if any(not row for row in rows):
            first = (
                tokenizer.bos_token_id if settings.bos_token_id is None else settings.bos_token_id
            )
            if first is None:
                raise ValueError(
                    "a prompt is empty, and neither the tokenizer nor the model has a bos token to start with"
                )
            rows = [row or [first] for row in rows]
        pad = settings.pad_token_id
        # The model ignores masked positions, but their ids must be in the vocabulary.
        ids, mask = pad_prompts(
            rows, pad if pad is not None and pad < self.model.config.vocab_size else 0
        )
        found: Any = generate(
            self.model, ids, mask, generation_config=settings, tokenizer=tokenizer, streamer=streamer,
            return_dict_in_generate=True,
        )  # fmt: skip
        answers = self.model.generates == "answer"
        entries = []
        for number, sequence in enumerate(found.sequences.tolist()):
            text = texts[number // settings.num_return_sequences]
            new = tokenizer.decode(
                sequence[0 if answers else ids.shape[1] :], skip_special_tokens=True
            )
            entry = {"prompt": text, "generated_text": text + new if full and not answers else new}
            if found.sequences_scores is not None:
                entry["score"] = float(found.sequences_scores[number])
            entries.append(entry)
        return entries

    def _fill_blanks(
        self, texts: list[str], blanks: BlankText, settings: dict[str, Any]
    ) -> list[dict[str, Any]]:
        ids, mask = pad_prompts([blanks.encode(text) for text in texts], blanks.tokens.pad)
        found = fill_blanks(
            self.model,
            ids,
            blanks.tokens,
            mask,
            generation_config=self.generation_config,
            **settings,
        )
        return [
            {
                "prompt": text,
                "generated_text": blanks.decode(one.ids),
                "pieces": [blanks.decode(p) for p in one.pieces],
            }
            for text, one in zip(texts, found, strict=True)
        ]

    def _fill_masks(self, text: str, settings: dict[str, Any]) -> dict[str, Any]:
        if others := settings.keys() - {"top_k"}:
            raise ValueError(
                f"{', '.join(sorted(others))} cannot be used with a model that fills masks; its only setting is top_k"
            )
        tokenizer: Any = self.tokenizer
        encoded = tokenizer(text, return_tensors="pt")
        found = fill_mask(
            self.model, encoded["input_ids"], mask_token_id=tokenizer.mask_token_id, **settings
        )
        masks = [
            [
                {"token": tokenizer.decode([token]).strip(), "score": score}
                for token, score in zip(*row, strict=True)
            ]
            for row in zip(found.tokens.tolist(), found.scores.tolist(), strict=True)
        ]
        return {"prompt": text, "masks": masks}
