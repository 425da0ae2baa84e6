"""What transformers makes of an exported folder: its held-out loss, and text that it continues."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..trainer.batches.collate import collate


def load_with_transformers(folder: Path) -> Any:
    """The folder's model in fp32. ValueError if a key is missing or unexpected, which transformers only warns of."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what it would warn of, missing keys, is an error here
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    problems = {kind: sorted(keys) for kind, keys in report.items() if keys}
    if problems:
        raise ValueError(f"transformers does not load {folder} as it is: {problems}")
    return model.eval()


@torch.no_grad()
def held_out_loss(folder: Path, samples: Sequence[dict[str, Tensor]], batch_size: int = 8) -> float:
    """transformers' mean loss in nats per token over samples of equal length, on this CPU."""
    model = load_with_transformers(folder)
    total = 0.0
    with all_cores():
        for first in range(0, len(samples), batch_size):
            batch = collate(samples[first : first + batch_size], torch.device("cpu"))
            total += model(**batch).loss.double().item() * len(batch["labels"])
    return total / len(samples)


def sample_continuation(folder: Path, prompt: str, *, new_tokens: int = 120) -> str:
    """`prompt` and what the exported model writes after it; the same text at every call."""
    from transformers import AutoTokenizer

    model, tokenizer = load_with_transformers(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(0)
    with all_cores():
        tokens = model.generate(
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            do_sample=True,
            temperature=0.7,
            top_k=40,
            max_new_tokens=min(new_tokens, model.config.max_position_embeddings - inputs.input_ids.shape[1]),
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


class all_cores:
    """For work that one rank does while the others wait."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self._threads)
