"""Implements soft prompts (Lester et al., 2021, arXiv:2104.08691): learned input vectors for a
frozen model.
"""

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
from ..files.safe_paths import checked_file
from ..files.strict_json import read_json_object
from ..mpu import ParallelMesh, VocabParallelEmbedding, cut_sequence, whole_sequences

PROMPT_FILE = "soft_prompt.safetensors"
TOKENS_FILE = "soft_prompt.json"
COMMON_TOKENS = 5000
"""New rows are initialized from frequent tokens, which have the lowest ids."""


class PromptedEmbedding(nn.Module):
    """Extends a model's input embedding by the rows of new tokens, whose ids begin at `first_id`.

    The output head does not have the new tokens, so they are never predicted.

    Attributes:
        weight: The weight of the embedding, under its old name.
        prompt: [P, H], the new rows, complete on every rank.
    """

    def __init__(self, base: nn.Module, first_id: int, prompt: nn.Parameter) -> None:
        super().__init__()
        # It is in a tuple, so that it is no submodule, and its weight keeps its name.
        self._base = (base,)
        self.weight: Any = base.weight
        self.first_id = first_id
        self.prompt = prompt

    @property
    def base(self) -> Any:
        return self._base[0]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, **options: Any
    ) -> Iterator[tuple[str, Any]]:
        """Yields a copy of the whole table, [first_id + P, H], as scripts for t2t-tuner read it.

        The model's `named_parameters` and those without `recurse` yield the parameters themselves.
        """
        if not recurse:
            return super().named_parameters(prefix, recurse, **options)
        table = torch.cat([self.weight.detach()[: self.first_id], self.prompt.detach()])
        return iter([(f"{prefix}.weight".lstrip("."), nn.Parameter(table, requires_grad=False))])

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the embeddings [B, S, H] of int64 [B, S]."""
        new = self._find_prompt(ids)
        return self._insert(self.base(ids.masked_fill(new, 0)), ids, new)

    def embed(self, ids: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the embeddings, and the table for the next lookup or a tied head, as the zoo's
        embedding does.
        """
        new = self._find_prompt(ids)
        x, shared = self.base.embed(ids.masked_fill(new, 0), table)
        return self._insert(x, ids, new), shared

    def _find_prompt(self, ids: Tensor) -> Tensor:
        """Returns which ids are of the prompt. Larger ones are of the base, whose table may have
        rows beyond the tokenizer's last token, as T5's has.
        """
        return (ids >= self.first_id) & (ids < self.first_id + len(self.prompt))

    def _insert(self, x: Tensor, ids: Tensor, new: Tensor) -> Tensor:
        """Returns embeddings x [B, S, H] with the rows of the prompt where ids are `new`.

        x has this rank's positions of a sequence that is split, and the ids have all.
        """
        mesh: ParallelMesh | None = getattr(self.base, "mesh", None)
        ids = cut_sequence(ids, mesh)
        new = cut_sequence(new, mesh)
        rows = F.embedding((ids - self.first_id).clamp(0, len(self.prompt) - 1), self.prompt)
        return torch.where(new[..., None], rows, x)


def input_embedding(model: Any) -> Any:
    """Returns the model's token embedding."""
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings()
    return next(
        module
        for module in model.modules()
        if isinstance(module, (VocabParallelEmbedding, PromptedEmbedding))
    )


@torch.no_grad()
def initial_rows(embedding: Any, count: int, vocab_size: int, seed: int) -> Tensor:
    """Returns copies of the rows of random common tokens, the same on every rank: [P, H]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(min(COMMON_TOKENS, vocab_size), (1, count), generator=generator)
    with whole_sequences(getattr(embedding, "mesh", None)):
        return embedding(ids.to(embedding.weight.device))[0].detach().clone()


def add_prompt(model: Any, embedding: Any, first_id: int, rows: Tensor) -> nn.Parameter:
    """Adds new input tokens to the model and freezes everything else. Returns their rows, [P, H].

    Every module with the embedding's weight is replaced, because encoder and decoder of
    transformers have their own.

    Raises:
        ValueError: The model has sequence parallelism.
    """
    if getattr(embedding, "sequence_parallel", False):
        raise ValueError(
            "soft prompts need complete sequences on each rank: use sequence_parallel=False"
        )
    for parameter in model.parameters():
        parameter.requires_grad = False
    prompt = nn.Parameter(rows)

    def extend(module: Any) -> nn.Module | None:
        if type(module) is type(embedding) and module.weight is embedding.weight:
            return PromptedEmbedding(module, first_id, prompt)
        return None

    _replace_modules(model, extend)
    model.extra_input_ids = max(0, first_id + len(rows) - model.config.vocab_size)
    return prompt


def _replace_modules(model: nn.Module, choose: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replaces each submodule by what `choose` returns for it, unless that is None; shared modules
    stay shared.
    """
    chosen: dict[int, nn.Module | None] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in chosen:
                chosen[id(child)] = choose(child)
            new = chosen[id(child)]
            if new is not None:
                parent._modules[name] = new


@contextmanager
def without_prompt(model: nn.Module) -> Iterator[None]:
    """Removes the model's soft prompt, if it has one, for the duration of the context."""
    prompted = {id(m.base): m for m in model.modules() if isinstance(m, PromptedEmbedding)}
    _replace_modules(
        model, lambda module: module.base if isinstance(module, PromptedEmbedding) else None
    )
    try:
        yield
    finally:
        _replace_modules(model, lambda module: prompted.get(id(module)))


def save_prompt(prompt: Tensor, tokens: Sequence[str], first_id: int, folder: Path) -> None:
    """Writes the rows of a soft prompt [P, H], its tokens and their first id."""
    save_file({"prompt": prompt.detach().cpu().contiguous()}, folder / PROMPT_FILE)
    content = {"tokens": list(tokens), "first_id": first_id}
    (folder / TOKENS_FILE).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def load_prompt(folder: Path) -> tuple[list[str], int, Tensor] | None:
    """Returns tokens, first id and rows that `save_prompt` wrote into a folder; None if there are
    none.
    """
    if not (folder / PROMPT_FILE).exists():
        return None
    try:
        content = read_json_object(checked_file(folder, TOKENS_FILE))
        tokens = [str(token) for token in content["tokens"]]
        first_id = int(content["first_id"])
        rows = read_tensors(checked_file(folder, PROMPT_FILE))["prompt"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder} has an unreadable soft prompt: {error}") from None
    if rows.dim() != 2 or len(rows) != len(tokens):
        raise ValueError(
            f"{folder / PROMPT_FILE} has shape {list(rows.shape)} for {len(tokens)} tokens"
        )
    return tokens, first_id, rows
