"""Generates text from prompts with the model of a folder, without handling tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.folder_files import CONFIG
from ..checkpoint.hub import find_model
from ..checkpoint.manifest import checked_tokenizer
from ..data.text.records import check_text
from ..data.tokenizers.glm_tokens import GLMVocabulary
from ..data.tokenizers.tokenizer import load_transformers_tokenizer
from ..models import find_config, from_pretrained
from ..models.auto import model_class
from ..models.family import BlankText
from ..models.generation.generate import generate
from ..models.generation.generation_config import resolve_settings
from ..models.generation.prompts import pad_prompts
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
        path: A Hugging Face folder or a shardzoo folder with its tokenizer. The model's
            `generation_config` (that of the folder) applies unless a call overrides it.
        dtype: The model's dtype; by default the stored one.
        batch_size: Prompts that are decoded together.
        glm_vocabulary: The base vocabulary of a GLM, if its size does not determine it.
        tokenizer: A folder with the tokenizer; by default the model's.
        adapter: A folder of peft with LoRA weights, which are merged into the model.

    Raises:
        ValueError: There is no tokenizer, or it is not the one that the model was trained with; or
            the model generates no text, such as a classifier.
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
        folder = find_model(path, "path")
        text_folder = folder if tokenizer is None else Path(tokenizer)
        # The tokenizer is checked before the weights are read, which may take minutes.
        size = checked_tokenizer(folder, text_folder).vocab_size
        _check_generates(folder)
        self.model: Any = from_pretrained(folder, mesh, dtype, device=device, adapter=adapter)
        if adapter is not None:
            merge_lora(self.model)
        if tokenizer is not None and size > self.model.config.vocab_size:
            raise ValueError(
                f"the tokenizer in {tokenizer} has {size:,} tokens, but the model in {folder} has "
                f"a vocabulary of {self.model.config.vocab_size:,}; use the tokenizer that it was "
                "trained with"
            )
        self.batch_size = batch_size
        self.blank_text: BlankText | None = None
        self.tokenizer: Any = None
        make_blank_text = family(self.model.config.model_type).blank_text
        if make_blank_text is not None:
            self.blank_text = make_blank_text(text_folder, glm_vocabulary)
        else:
            self.tokenizer = load_transformers_tokenizer(text_folder)

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
        for text in texts:
            check_text(text, "a prompt")
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
        """Continues or answers texts that are decoded together."""
        options = dict(given)
        config = options.pop("generation_config", None)
        settings = resolve_settings(self.model, config, options)
        rows = self._encode(texts, settings.bos_token_id)
        # The model ignores masked positions, but their ids must be in the vocabulary.
        pad = settings.pad_token_id
        if pad is None or not 0 <= pad < self.model.config.vocab_size:
            pad = 0
        # A continuation follows its prompt directly, so there the padding comes first. An encoder's
        # learned positions count from the first column, so there it comes last.
        answers = self.model.generates == "answer"
        ids, mask = pad_prompts(rows, pad, left=not answers)
        found: Any = generate(
            self.model,
            ids,
            mask,
            generation_config=config,
            tokenizer=self.tokenizer,
            streamer=streamer,
            return_dict_in_generate=True,
            **options,
        )
        entries: list[dict[str, Any]] = []
        for number, sequence in enumerate(found.sequences.tolist()):
            text = texts[number // settings.num_return_sequences]
            written = sequence if answers else sequence[ids.shape[1] :]
            new = self.tokenizer.decode(written, skip_special_tokens=True)
            if full and not answers:
                new = text + new
            entry = {"prompt": text, "generated_text": new}
            if "sequences_scores" in found:
                entry["score"] = float(found.sequences_scores[number])
            entries.append(entry)
        return entries

    def _encode(self, texts: Sequence[str], first: int | None) -> list[list[int]]:
        """Returns the tokens of each text; those of an empty one are `first`, or the tokenizer's
        bos token.
        """
        rows: list[list[int]] = []
        for text in texts:
            row = self.tokenizer(text, verbose=False)["input_ids"]
            if not row:
                if first is None:
                    first = self.tokenizer.bos_token_id
                if first is None:
                    raise ValueError(
                        "a prompt is empty, and neither the tokenizer nor the model has a bos "
                        "token to start with"
                    )
                row = [first]
            rows.append(row)
        return rows

    def _fill_blanks(
        self, texts: list[str], blanks: BlankText, settings: dict[str, Any]
    ) -> list[dict[str, Any]]:
        ids, mask = pad_prompts([blanks.encode(text) for text in texts], blanks.tokens.pad)
        found = fill_blanks(self.model, ids, blanks.tokens, mask, **settings)
        entries: list[dict[str, Any]] = []
        for text, filled in zip(texts, found, strict=True):
            entries.append(
                {
                    "prompt": text,
                    "generated_text": blanks.decode(filled.ids),
                    "pieces": [blanks.decode(piece) for piece in filled.pieces],
                }
            )
        return entries

    def _fill_masks(self, text: str, settings: dict[str, Any]) -> dict[str, Any]:
        others = sorted(settings.keys() - {"top_k"})
        if others:
            raise ValueError(
                f"{', '.join(others)} cannot be used with a model that fills masks; its only "
                "setting is top_k"
            )
        encoded = self.tokenizer(text, return_tensors="pt")
        found = fill_mask(
            self.model, encoded["input_ids"], mask_token_id=self.tokenizer.mask_token_id, **settings
        )
        masks: list[list[dict[str, Any]]] = []
        for tokens, scores in zip(found.tokens.tolist(), found.scores.tolist(), strict=True):
            best: list[dict[str, Any]] = []
            for token, score in zip(tokens, scores, strict=True):
                best.append({"token": self.tokenizer.decode([token]).strip(), "score": score})
            masks.append(best)
        return {"prompt": text, "masks": masks}


def _check_generates(folder: Path) -> None:
    """Raises ValueError if the model of a folder generates no text. Reads its `config.json` alone."""
    if not (folder / CONFIG).exists():
        return  # Reading the weights says what is missing.
    kind = model_class(find_config(str(folder)))
    if getattr(kind, "generates", None) is None:
        raise ValueError(
            f"the model in {folder} is a {kind.__name__}, which generates no text: name a model that "
            "continues, answers or fills in texts"
        )
