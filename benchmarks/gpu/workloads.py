"""The models whose steps benchmarks/gpu/steps.py measures, at their published depth, and their batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shardzoo.models import find_config
from shardzoo.models.config import ModelConfig
from shardzoo.models.language_model import count_mask, note_token_count


@dataclass(frozen=True)
class Workload:
    """A model and the batch of a step.

    Attributes:
        auto: The class of transformers that builds it.
        length, target: Tokens of a sequence; of an encoder-decoder's target.
        padding: The largest share of a sample's inputs that is padding, on the right.
        masked: Whether batches have an attention mask. Without one, kernels without masks can compute.
        precision: Of weights and activations, as the trainer's argument.
        tf32: Whether fp32 products may be TF32.
        compiled: Whether compiled blocks are measured too, for which the deepest model leaves no time.
        note: What the title of its table says.
        changes: Changed values of the preset.
        sizes: Changed values of a tiny model.
    """

    preset: str
    auto: str
    batch: int
    length: int
    target: int = 0
    masked: bool = False
    padding: float = 0.0
    precision: str = "bf16"
    tf32: bool = False
    compiled: bool = True
    note: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def tokens(self) -> int:
        """Of a batch: those of the inputs, and of an encoder-decoder's targets."""
        return self.batch * (self.length + self.target)

    def tiny(self) -> Workload:
        return replace(self, batch=2, length=16, target=8 if self.target else 0)

    def config(self, tiny: bool) -> ModelConfig:
        changes = {**self.changes, **(self.sizes if tiny else {})}
        return find_config(self.preset).with_changes(**changes)


GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 99,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 99,
    "head_dim": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
OLMOE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 99,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
WORKLOADS = {
    "gpt2-medium": Workload("gpt2-medium", "AutoModelForCausalLM", 16, 1024, sizes=GPT2),
    "gpt2-xl": Workload("gpt2-xl", "AutoModelForCausalLM", 8, 1024, compiled=False, sizes=GPT2),
    "bert-large": Workload("bert-large-uncased", "AutoModelForMaskedLM", 32, 512, sizes=BERT),
    "t5-large": Workload("t5-large", "AutoModelForSeq2SeqLM", 16, 512, 128, sizes=T5),
    "llama-1b": Workload("llama-3.2-1b", "AutoModelForCausalLM", 4, 2048, compiled=False, sizes=LLAMA),
    "olmoe": Workload(
        "olmoe-1b-7b-0924", "AutoModelForCausalLM", 8, 1024, compiled=False, sizes=OLMOE,
        changes={"num_hidden_layers": 4}, note="4 of its 16 layers, 64 experts of which each token takes 8",
    ),
    "nanot5": Workload(
        "t5-v1_1-base", "AutoModelForSeq2SeqLM", 128, 512, 128, compiled=False, sizes=T5,
        note="nanoT5's workload, of which 229 samples/s on one A100, compiled, are published",
    ),
    # So few tokens that the host's time is all that counts.
    "gpt2-64": Workload("gpt2", "AutoModelForCausalLM", 1, 64, compiled=False, sizes=GPT2),
    "t5-64": Workload("t5-base", "AutoModelForSeq2SeqLM", 1, 64, 64, compiled=False, sizes=T5),
    # Of each sample up to three fifths are padding, three tenths in all.
    "t5-padded": Workload(
        "t5-base", "AutoModelForSeq2SeqLM", 32, 512, 128, masked=True, padding=0.6, compiled=False, sizes=T5,
        note="three tenths of the inputs are padding",
    ),
    "libai": Workload(
        "mt5-libai", "AutoModelForSeq2SeqLM", 16, 512, 128, masked=True, precision="fp32", tf32=True, compiled=False,
        note="LiBai's workload, of which 70 samples/s on one A100 are published", sizes=T5,
    ),
}  # fmt: skip


def build(workload: Workload, config: ModelConfig, device: str) -> nn.Module:
    """Returns transformers' model with new weights, made on the device."""
    values = transformers.AutoConfig.for_model(**config.to_dict())
    values.use_cache = False
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, workload.auto).from_config(values, attn_implementation="sdpa")
        if not values.tie_word_embeddings and hasattr(
            model, "lm_head"
        ):  # its own start gives losses of hundreds
            nn.init.normal_(model.lm_head.weight, std=values.hidden_size**-0.5)
    return model.to(device, workload.dtype)


def sample(workload: Workload, vocabulary: int, index: int) -> dict[str, Tensor]:
    """Returns sample `index` of an endless dataset, in CPU memory: random tokens."""
    generator = torch.Generator().manual_seed(index)

    def ids(length: int) -> Tensor:
        return torch.randint(5, vocabulary, (length,), generator=generator)

    inputs = ids(workload.length)
    labels = ids(workload.target) if workload.target else inputs.clone()
    if "Masked" in workload.auto:
        labels[torch.rand(workload.length, generator=generator) > 0.15] = -100
    mask = {"attention_mask": torch.ones_like(inputs)} if workload.masked else {}
    if workload.padding:
        padded = int(workload.padding * workload.length * (index % workload.batch) / workload.batch)
        mask["attention_mask"][workload.length - padded :] = 0
    return {"input_ids": inputs, "labels": labels, **mask}


def batch_of(workload: Workload, vocabulary: int, device: str) -> dict[str, Tensor]:
    """Returns a batch on the device, with what the trainer would tell the model of it."""
    samples = [sample(workload, vocabulary, index) for index in range(workload.batch)]
    on_host = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
    batch = {name: values.to(device) for name, values in on_host.items()}
    if "attention_mask" in batch:
        note_token_count(batch["attention_mask"], count_mask(on_host["attention_mask"]))
    return batch


class Samples:
    """The endless dataset, as the trainer takes it."""

    def __init__(self, workload: Workload, vocabulary: int) -> None:
        self.workload, self.vocabulary = workload, vocabulary

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(self.workload, self.vocabulary, index)
