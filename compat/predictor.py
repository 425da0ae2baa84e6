"""Adapts this package to scripts for FlagAI: its `Predictor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..finetuning.loading import ModelSource, find_positions
from ..finetuning.text_generator import TextGenerator
from ..models import FAMILIES, family
from .auto_loader import FlagAITokenizer


class Predictor:
    """Predicts and generates with a model and a tokenizer of `AutoLoader`, by FlagAI's method
    names.

    predictor = Predictor(model, tokenizer) predictor.predict_generate_beamsearch("Hollym Gate
    railway station", beam_size=5, out_max_length=100)
    """

    def __init__(self, model: Any, tokenizer: FlagAITokenizer) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer

    def predict_generate_beamsearch(
        self, text: str, input_max_length: int = 256, out_max_length: int = 100, beam_size: int = 1
    ) -> str:
        """Returns the text that beam search generates for `text`, as `generate` does with
        num_beams.
        """
        return self._generate(text, input_max_length, out_max_length, num_beams=beam_size)

    def predict_generate_randomsample(
        self,
        text: str,
        input_max_length: int = 256,
        out_max_length: int = 200,
        top_k: int = 30,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
    ) -> str:
        """Returns a text sampled for `text`, as `generate` does with do_sample."""
        chosen = {
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
        }
        return self._generate(
            text, input_max_length, out_max_length, num_beams=1, do_sample=True, **chosen
        )

    def predict_ner(
        self, text: str, target: Sequence[str], maxlen: int = 256
    ) -> list[tuple[int, int, str]]:
        """Returns (first character, last character, kind) of each entity;

        `target` are the BIO labels by class, which a conditional random field predicts together; for
        a global pointer they are the kinds, whose entities may overlap.
        """
        tokens = self.tokenizer.tokenize(text, maxlen=maxlen, add_spatial_tokens=True)
        places = self.tokenizer.rematch(text, tokens)
        output = self._run(self.tokenizer.convert_tokens_to_ids(tokens))
        if getattr(self.model.config, "pointer_size", None) is not None:
            spans = (output.logits[0] > 0).nonzero().tolist()
            return [
                (places[first][0], places[last][-1], str(target[kind]))
                for kind, first, last in spans
                if places[first] and places[last]  # neither end is a special token
            ]
        predictions = getattr(output, "predictions", None)
        if predictions is None:
            predictions = output.logits.argmax(-1)
        classes = predictions[0].tolist()
        entities: list[tuple[int, int, str]] = []
        inside = False
        for place, number in zip(places, classes, strict=True):
            label = str(target[number])
            kind = label[2:]
            if place and inside and label.startswith("I-") and entities[-1][2] == kind:
                entities[-1] = (entities[-1][0], place[-1], kind)
            elif place and label.startswith("B-"):
                entities.append((place[0], place[-1], kind))
            inside = (
                bool(place) and label != "O" and bool(entities) and entities[-1][1] == place[-1]
            )
        return entities

    def predict_cls_classifier(self, text: str | Sequence[str], maxlen: int = 512) -> int:
        """Returns the class of a text, or of two."""
        texts = (text,) if isinstance(text, str) else tuple(text)
        return int(
            self._logits(self.tokenizer.encode_plus(*texts, max_length=maxlen)["input_ids"])[
                0
            ].argmax()
        )

    @torch.inference_mode()
    def predict_embedding(self, text: str, maxlen: int = 256) -> torch.Tensor:
        """Returns the embedding of a text [H], fp32 on the CPU: the mean of the last hidden states of
        its tokens, special ones included.
        """
        encoded = self.tokenizer.encode_plus(text, max_length=maxlen)
        device = next(self.model.parameters()).device
        output = self.model(
            torch.tensor([encoded["input_ids"]], device=device),
            token_type_ids=torch.tensor([encoded["token_type_ids"]], device=device),
        )
        return output.last_hidden_state.float().mean(1)[0].cpu()

    def predict_masklm(self, text: str, maxlen: int = 512) -> str:
        """Returns the text with the most probable token at each position."""
        ids = self._logits(self.tokenizer.encode_plus(text, max_length=maxlen)["input_ids"])[
            0
        ].argmax(-1)
        return self.tokenizer.decode(ids.tolist())

    @torch.inference_mode()
    def _run(self, ids: list[int]) -> Any:
        """Returns the model's output for one text."""
        return self.model(torch.tensor([ids], device=next(self.model.parameters()).device))

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> torch.Tensor:
        logits = self._run(ids).logits
        gather = getattr(self.model, "gather_logits", None)
        return gather(logits) if gather else logits

    def _generate(self, text: str, longest_input: int, longest_output: int, **settings: Any) -> str:
        config = self.model.config
        native = config.model_type in FAMILIES
        if native:
            kind = family(config.model_type).kind
        else:
            kind = "encoder-decoder" if config.is_encoder_decoder else "decoder"
        source = ModelSource(
            Path(self.model.name_or_path), {"model_type": config.model_type}, kind, native
        )
        generator = TextGenerator(
            source,
            self.tokenizer.words,
            positions=find_positions(self.model, source),
            max_source_length=longest_input,
            max_new_tokens=longest_output,
            num_beams=settings.pop("num_beams"),
            batch_size=1,
            blanks=self.tokenizer.text,
            segments=getattr(config, "type_vocab_size", 0) > 1,
        )
        return generator(self.model, [text], **settings)[0]
