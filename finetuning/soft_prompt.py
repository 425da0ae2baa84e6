"""Soft prompts (Lester et al., 2021, arXiv:2104.08691): learned input vectors beside a model that stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ..checkpoint.tensor_reader import read_tensors
from ..data.files import checked_file, read_json_object
from ..mpu import VocabParallelEmbedding

PROMPT_FILE = "soft_prompt.safetensors"
TOKENS_FILE = "soft_prompt.json"
COMMON_TOKENS = 5000  # new rows begin as those of frequent tokens, which vocabularies number first


class PromptedEmbedding(nn.Module):
    """A model's input embedding, and beside it the rows of new tokens, whose ids begin at `first_id`.

    Parameters: `weight`, which is the embedding's, under its old name, and `prompt` [P, H], whole on every rank. The
    output head does not have the new tokens, so they are never predicted.
    """

    def __init__(self, base: nn.Module, first_id: int, prompt: nn.Parameter) -> None:
        super().__init__()
        self._base = (base,)  # no submodule: its weight is registered here, under the name it had
        self.weight: Any = base.weight
        self.first_id = first_id
        self.prompt = prompt

    @property
    def base(self) -> Any:
        return self._base[0]

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [B, S] -> [B, S, H]"""
        new = ids >= self.first_id
        return self._insert(self.base(ids.masked_fill(new, 0)), ids, new)

    def embed(self, ids: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As the zoo's embedding: the output, and the table for the next look-up or a tied head."""
        new = ids >= self.first_id
        x, shared = self.base.embed(ids.masked_fill(new, 0), table)
        return self._insert(x, ids, new), shared

    def _insert(self, x: Tensor, ids: Tensor, new: Tensor) -> Tensor:
        return torch.where(new[..., None], F.embedding((ids - self.first_id).clamp(min=0), self.prompt), x)


def input_embedding(model: Any) -> Any:
    """The module from token ids to vectors."""
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings()
    return next(module for module in model.modules() if isinstance(module, (VocabParallelEmbedding, PromptedEmbedding)))


@torch.no_grad()
def initial_rows(embedding: Any, count: int, vocab_size: int, seed: int) -> Tensor:
    """Copies of the rows of common tokens, the same on every rank: [P, H]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(min(COMMON_TOKENS, vocab_size), (1, count), generator=generator)
    return embedding(ids.to(embedding.weight.device))[0].detach().clone()


def add_prompt(model: Any, embedding: Any, first_id: int, rows: Tensor) -> nn.Parameter:
    """Gives the model new input tokens and freezes everything else. Returns their rows, [P, H].

    Every module that looks up the embedding's weight gets them: stacks of transformers' have their own. ValueError
    where sequences are split.
    """
    if getattr(embedding, "sequence_parallel", False):
        raise ValueError("soft prompts need whole sequences on a rank: use sequence_parallel=False")
    for parameter in model.parameters():
        parameter.requires_grad = False
    prompt = nn.Parameter(rows)
    _replace(
        model, lambda module: PromptedEmbedding(module, first_id, prompt) if _looks_up(module, embedding) else None
    )
    model.extra_input_ids = max(0, first_id + len(rows) - model.config.vocab_size)
    return prompt


def _looks_up(module: Any, embedding: Any) -> bool:
    return type(module) is type(embedding) and module.weight is embedding.weight


def _replace(model: nn.Module, choose: Callable[[nn.Module], nn.Module | None]) -> None:
    """Puts what `choose` gives, if anything, in the place of each submodule; one that is used twice stays one."""
    chosen: dict[int, nn.Module | None] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in chosen:
                chosen[id(child)] = choose(child)
            if (new := chosen[id(child)]) is not None:
                parent._modules[name] = new


@contextmanager
def without_prompt(model: nn.Module) -> Iterator[None]:
    """The model as it was before its soft prompt, if it has one, for as long as it lasts."""
    prompted = {id(m.base): m for m in model.modules() if isinstance(m, PromptedEmbedding)}
    _replace(model, lambda module: module.base if isinstance(module, PromptedEmbedding) else None)
    try:
        yield
    finally:
        _replace(model, lambda module: prompted.get(id(module)))


def save_prompt(prompt: Tensor, tokens: Sequence[str], first_id: int, folder: Path) -> None:
    """prompt: [P, H], the rows of the tokens, whose ids begin at `first_id`."""
    save_file({"prompt": prompt.detach().cpu().contiguous()}, folder / PROMPT_FILE)
    content = {"tokens": list(tokens), "first_id": first_id}
    (folder / TOKENS_FILE).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def load_prompt(folder: Path) -> tuple[list[str], int, Tensor] | None:
    """Tokens, first id and rows of a folder that `save_prompt` wrote into; None if there are none."""
    if not (folder / PROMPT_FILE).exists():
        return None
    try:
        content = read_json_object(checked_file(folder, TOKENS_FILE))
        tokens, first_id = [str(token) for token in content["tokens"]], int(content["first_id"])
        rows = read_tensors(checked_file(folder, PROMPT_FILE))["prompt"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder} has a soft prompt that is not readable: {error}") from None
    if rows.dim() != 2 or len(rows) != len(tokens):
        raise ValueError(f"{folder / PROMPT_FILE} has shape {list(rows.shape)} for {len(tokens)} tokens")
    return tokens, first_id, rows
