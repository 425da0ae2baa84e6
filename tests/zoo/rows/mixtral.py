"""Mixtral: numbers of experts that no rank divides, one expert a token, all of them; experts without tokens; one
token; the auxiliary loss; windows."""

import torch
from matrix import Case

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 35, "head_dim": 6,
    "num_hidden_layers": 2, "vocab_size": 101, "max_position_embeddings": 21, "num_local_experts": 5,
    "num_experts_per_tok": 2, **TOKENS,
}  # fmt: skip
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


def send_all_tokens_to_one_expert(model):
    """All scores are equal, and then both libraries choose the same expert."""
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.zeros_(parameter)


CASES = {
    "MixtralForCausalLM": Case({**SIZES, **BALANCED}),
    "MixtralForCausalLM, one expert of many, window, tied": Case(
        {**SIZES, **BALANCED, "num_local_experts": 16, "num_experts_per_tok": 1, "sliding_window": 5,
         "tie_word_embeddings": True}
    ),
    "MixtralForCausalLM, all experts": Case(
        {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 3, "num_key_value_heads": 6}
    ),
    "MixtralForCausalLM, all tokens on one expert": Case(
        {**SIZES, **BALANCED, "num_experts_per_tok": 1}, mend=send_all_tokens_to_one_expert
    ),
    "MixtralModel": Case(SIZES),
    "MixtralModel, one token": Case(SIZES, sizes=(1,), padding=("",), shape=(1, 1)),
    "MixtralForSequenceClassification": Case({**SIZES, "num_labels": 11}),
    "MixtralForTokenClassification": Case({**SIZES, "num_labels": 5}),
    "MixtralForQuestionAnswering": Case(SIZES, padding=("right", "")),
}  # fmt: skip
