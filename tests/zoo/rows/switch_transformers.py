"""Switch Transformers: a capacity that drops tokens, stacks of unequal depth, all layers sparse; auxiliary losses."""

from matrix import Case

SIZES = {
    "d_model": 24, "d_kv": 4, "d_ff": 35, "num_layers": 4, "num_decoder_layers": 2, "num_heads": 6, "vocab_size": 101,
    "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1, "num_experts": 5, "expert_capacity": 3,
    "router_jitter_noise": 0.0, "router_z_loss_coef": 0.2, "router_aux_loss_coef": 0.3, "decoder_start_token_id": 0,
}  # fmt: skip
ROUTERS = {"output_router_logits": True}


def read_router_logits(model):
    """transformers 5.17 looks for pairs among the logits [B, S, E] of its routers and finds none: "torch.cat():
    expected a non-empty list of Tensors". This is what 5.18 does."""
    import torch

    def unpack(router_outputs):
        router_logits = torch.cat(router_outputs, dim=1)
        return router_logits, router_logits.argmax(dim=-1)

    model._unpack_router_logits = unpack


CASES = {
    "SwitchTransformersForConditionalGeneration": Case(
        SIZES, options=ROUTERS, mend=read_router_logits
    ),
    "SwitchTransformersForConditionalGeneration, all layers sparse, router bias": Case(
        {**SIZES, "num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 2, "router_bias": True,
         "num_experts": 16, "expert_capacity": 64, "dense_act_fn": "gelu"},
    ),
    "SwitchTransformersModel": Case(SIZES),
    "SwitchTransformersEncoderModel": Case(SIZES),
}  # fmt: skip
