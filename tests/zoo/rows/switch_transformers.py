"""Switch Transformers: a capacity that drops tokens, stacks of unequal depth, all layers sparse; auxiliary losses."""

from matrix import Case

SIZES = {
    "d_model": 24, "d_kv": 4, "d_ff": 35, "num_layers": 4, "num_decoder_layers": 2, "num_heads": 6, "vocab_size": 101,
    "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1, "num_experts": 5, "expert_capacity": 3,
    "router_jitter_noise": 0.0, "router_z_loss_coef": 0.2, "router_aux_loss_coef": 0.3, "decoder_start_token_id": 0,
}  # fmt: skip
# transformers 5.17 drops no token beyond an expert's capacity, and records a probability instead of a router's logits.
SINCE = "5.18"
CASES = {
    "SwitchTransformersForConditionalGeneration": Case(
        SIZES, options={"output_router_logits": True}, since=SINCE
    ),
    "SwitchTransformersForConditionalGeneration, all layers sparse, router bias": Case(
        {**SIZES, "num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 2, "router_bias": True,
         "num_experts": 16, "expert_capacity": 64, "dense_act_fn": "gelu"},
    ),
    "SwitchTransformersModel": Case(SIZES, since=SINCE),
    "SwitchTransformersEncoderModel": Case(SIZES, since=SINCE),
}  # fmt: skip
