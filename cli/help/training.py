"""The topics of the arguments that all commands that train have in common, for their help pages."""

# The first argument of each topic, in the order in which TrainingArguments declares them.
TRAINING_SECTIONS = {
    "env_type": "layout",
    "epochs": "training",
    "optimizer": "training",
    "precision": "precision and memory",
    "lora_rank": "LoRA and frozen parts",
    "eval_strategy": "evaluation, logs and checkpoints",
    "num_nodes": "processes",
    "seed": "other",
}
COMMON_TRAINING = (
    "model_parallel_size", "pipeline_parallel_size", "global_batch_size", "micro_batch_size", "lr", "precision",
    "recompute", "output_dir", "config",
)  # fmt: skip
