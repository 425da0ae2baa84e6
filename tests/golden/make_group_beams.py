"""Makes group_beams.safetensors: what diverse beam search found in a release of transformers that still had it.

    pip install --no-deps --target OLD transformers==4.49.0 tokenizers==0.21.4 huggingface-hub==0.36.0
    PYTHONPATH=OLD python tests/golden/make_group_beams.py

The file holds the weights of a GPT-2 and a T5 under transformers' names, prompts, and sequences for each case; its
metadata their configurations and cases.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

ENDS = [2, *range(7, 22)]
CASES = [
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.5, "num_return_sequences": 4},
    {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 2.0, "eos_token_id": ENDS, "num_return_sequences": 4},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "eos_token_id": ENDS, "early_stopping": True},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.4, "eos_token_id": ENDS, "early_stopping": "never",
     "length_penalty": 1.5},
    {"num_beams": 6, "num_beam_groups": 2, "diversity_penalty": 0.9, "no_repeat_ngram_size": 2, "length_penalty": 0.0},
]  # fmt: skip
SIZES = {
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 1, "vocab_size": 101, "n_positions": 24, "bos_token_id": 1,
             "eos_token_id": 2, "pad_token_id": 0},
    "t5": {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "vocab_size": 101,
           "decoder_start_token_id": 0},
}  # fmt: skip


def main() -> None:
    tensors, metadata = {}, {"transformers": transformers.__version__, "cases": json.dumps(CASES)}
    generator = torch.Generator().manual_seed(0)
    classes = {"gpt2": transformers.GPT2LMHeadModel, "t5": transformers.T5ForConditionalGeneration}
    for family, values in SIZES.items():
        model = classes[family](classes[family].config_class(**values)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
        metadata[family] = json.dumps({"model_type": family, **values})
        for name, parameter in model.named_parameters():
            tensors[f"{family}.param.{name}"] = parameter.detach()
        ids = torch.randint(3, 101, (50, 7), generator=generator)
        padding = torch.arange(50)[:, None] % 5
        # That release decodes padded prompts of a T5 differently from what its own forward pass says.
        mask = (
            (torch.arange(7)[None] >= padding).long() if family == "gpt2" else torch.ones_like(ids)
        )
        tensors[f"{family}.ids"], tensors[f"{family}.mask"] = ids * mask, mask
        for i, case in enumerate(CASES):
            result = model.generate(
                ids * mask,
                attention_mask=mask,
                max_new_tokens=10,
                output_scores=True,
                return_dict_in_generate=True,
                use_cache=False,
                **case,
            )
            tensors[f"{family}.sequences.{i}"] = result.sequences.contiguous()
            tensors[f"{family}.scores.{i}"] = result.sequences_scores.contiguous()
    save_file(tensors, Path(__file__).with_name("group_beams.safetensors"), metadata)


if __name__ == "__main__":
    main()
