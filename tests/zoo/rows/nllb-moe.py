"""NLLB-MoE: two experts a token, capacities that drop tokens, padding without experts; the auxiliary loss."""

from matrix import Case

SIZES = {
    "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 6, "encoder_ffn_dim": 30, "decoder_layers": 2,
    "decoder_attention_heads": 6, "decoder_ffn_dim": 35, "vocab_size": 97, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "num_experts": 5, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
    "moe_eval_capacity_token_fraction": 0.2, "router_aux_loss_coef": 0.3,
}  # fmt: skip


def use_all_experts(model):
    """transformers 5 calls the experts 0 and 1 alone: it takes the mask [T, E] of the chosen experts for their
    numbers. Here each expert computes the tokens with a weight for it, as in transformers 4 and in fairseq."""
    import torch
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts

    class AllExperts(NllbMoeExperts):
        def forward(self, hidden_states, router_mask, router_probs):
            final = torch.zeros_like(hidden_states)
            for number in range(self.num_experts):
                tokens = router_probs[:, number].nonzero()[:, 0]
                weights = router_probs[tokens, number, None]
                result = self[f"expert_{number}"](hidden_states[tokens]) * weights
                assert not self.training
                final.index_add_(0, tokens, result * (1 - self.moe_token_dropout))
            return final

    for module in model.modules():
        if isinstance(module, NllbMoeExperts):
            module.__class__ = AllExperts


CASES = {
    "NllbMoeForConditionalGeneration": Case(
        {**SIZES, "output_router_logits": True}, mend=use_all_experts
    ),
    "NllbMoeForConditionalGeneration, all layers sparse, prioritized, a fixed capacity": Case(
        {**SIZES, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "batch_prioritized_routing": True,
         "normalize_router_prob_before_dropping": True, "moe_eval_capacity_token_fraction": -1.0,
         "expert_capacity": 13, "router_ignore_padding_tokens": True, "router_bias": True},
        mend=use_all_experts,
    ),
    "NllbMoeModel": Case(SIZES, mend=use_all_experts),
}  # fmt: skip
