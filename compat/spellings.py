"""Lists the names of arguments in FlagAI, t2t-tuner, LiBai and transformers, and hands them to the
trainer's arguments.

Importing this file makes all dataclasses of arguments, and the command line, accept them. The
package's face does so.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from ..trainer.arguments.aliases import ANY_VALUE, DATA_PARALLEL, Spellings, add_spellings

SAVE_EPOCH = "save_epoch"
"""FlagAI's number of epochs between checkpoints, of which 1 is our strategy."""
RESUME = "resume_from_checkpoint"
"""transformers' switch, which may also be a path; that is our load_dir."""


def _translate_save_epoch(value: Any) -> tuple[str, Any]:
    if value != 1:
        raise ValueError(
            f"{SAVE_EPOCH} must be 1, a checkpoint after each epoch, not {value!r}; use "
            "save_interval in steps"
        )
    return "save_strategy", "epoch"


def _translate_resume(value: Any) -> tuple[str, Any]:
    is_path = isinstance(value, (str, PurePath))
    return ("load_dir" if is_path else "resume"), value


def _translate_mode(value: Any) -> tuple[str, Any]:
    tasks = {None: None, "seq2seq": "text2text-generation", "clm": "text-generation"}
    if value not in tasks:
        raise ValueError(f"mode must be seq2seq or clm, not {value!r}")
    return "task", tasks[value]


_BEST = "save_best names a validation value, and keeps the checkpoint where it was best"
_NO_DOWNLOAD = (
    "no data set is downloaded by its name; save it as JSON lines or with datasets' save_to_disk, "
    "and name that in train_file"
)
_PADDING = "a batch is padded to its longest sequence; leave it out"
_OF_FINETUNING = "it is an argument of fine-tuning: use Trainer of shardzoo.finetuning"

FLAGAI = Spellings(
    renamed={
        "batch_size": "micro_batch_size",
        "warm_up": "warmup_ratio",
        "optimizer_type": "optimizer",
        SAVE_EPOCH: "save_strategy",
    },
    switches={
        "fp16": ("precision", "fp16"),
        "bf16": ("precision", "bf16"),
        "checkpoint_activations": ("recompute", "full"),
    },
    translated={SAVE_EPOCH: _translate_save_epoch},
    taken_as_is={
        "num_checkpoints": 1,  # blocks between recomputed activations
        "wandb": False,
    },
    explained={
        "wandb": "report_to names the trackers; tensorboard wandb are TensorBoard and Weights & Biases"
    },
)
T2T_TUNER = Spellings(
    renamed={"model_parallel_gpus": "model_parallel_size", "mode": "task"},
    translated={"mode": _translate_mode},
    taken_as_is={
        "torch_ort": False,
        "dataset_name": None,
        "dataset_config_name": None,
        "pad_to_max_length": False,
        # Of a batch's length; padding changes neither loss nor gradients.
        "pad_to_multiple_of": ANY_VALUE,
        "embedding_on_cpu": False,
        # Texts are encoded when they are read, and kept in no cache.
        "preprocessing_num_workers": ANY_VALUE,
        "overwrite_cache": ANY_VALUE,
        "dataset_cache": ANY_VALUE,
    },
    left_at_default={"optimizer": None},
    explained={
        "torch_ort": "ONNX Runtime's training has ended; use torch_compile",
        "dataset_name": _NO_DOWNLOAD,
        "dataset_config_name": _NO_DOWNLOAD,
        "pad_to_max_length": _PADDING,
        "embedding_on_cpu": "frozen embeddings need no optimizer state, and model_parallel_size "
        "splits them: use trainer.freeze(embeddings=True), or more devices",
        "model_name_or_path": _OF_FINETUNING,
        "train_file": _OF_FINETUNING,
    },
)
_SCHEDULER = (
    "lr_schedule names a schedule; LiBai's mT5 keeps its rate after the warm-up, which is "
    "lr_schedule=constant_with_warmup"
)
_HELD_OUT = "held_out_fraction of data is held out for the evaluation"
# Those with a dot are paths in LiBai's configuration.
LIBAI = Spellings(
    renamed={
        "train.dist.tensor_parallel_size": "model_parallel_size",
        "train.dist.pipeline_parallel_size": "pipeline_parallel_size",
        "train.dist.num_nodes": "num_nodes",
        "train.train_iter": "train_steps",
        "train.train_epoch": "epochs",
        "train.train_micro_batch_size": "micro_batch_size",
        "train.test_micro_batch_size": "eval_batch_size",
        "train.global_batch_size": "global_batch_size",
        "train.num_accumulation_steps": "gradient_accumulation_steps",
        "train.warmup_ratio": "warmup_ratio",
        "train.log_period": "log_interval",
        "train.evaluation.eval_period": "eval_interval",
        "train.checkpointer.period": "save_interval",
        "train.checkpointer.max_to_keep": "save_total_limit",
        "train.output_dir": "output_dir",
        "train.seed": "seed",
        "train.load_weight": "load_dir",
        "train.resume": "resume",
        "train.zero_optimization.stage": "zero_stage",
        "optim.lr": "lr",
        "optim.weight_decay": "weight_decay",
        "optim.eps": "adam_eps",
        "optim.params.clip_grad_max_norm": "clip_grad",
        "model.cfg.hidden_size": "hidden_size",
        "model.cfg.hidden_layers": "num_hidden_layers",
        "model.cfg.num_attention_heads": "num_attention_heads",
        "model.cfg.pretrained_model_path": "init_from",
        "tokenization.tokenizer.vocab_file": "tokenizer",
        "dataloader.train.dataset[0].data_prefix": "data",
        "num_pipeline_stages": "pipeline_parallel_size",
        "pipe_parallel_size": "pipeline_parallel_size",
    },
    switches={
        "train.amp.enabled": ("precision", "fp16"),
        "train.activation_checkpoint.enabled": ("recompute", "full"),
    },
    taken_as_is={
        # Whole batches go to the device, the stages count their blocks, and kernels are PyTorch's.
        "train.dist.pipeline_num_layers": ANY_VALUE,
        "train.dist.custom_pipeline_stage_id": None,
        "train.input_placement_device": ANY_VALUE,
        "train.rdma_enabled": ANY_VALUE,
        "train.nccl_fusion_threshold_mb": ANY_VALUE,
        "train.nccl_fusion_max_ops": ANY_VALUE,
        "graph.enabled": ANY_VALUE,
        "graph.debug": ANY_VALUE,
        "model.cfg.amp_enabled": ANY_VALUE,
        "model.cfg.is_encoder_decoder": ANY_VALUE,
        "model.cfg.pretrained_model_path": None,
        # LiBai names the same files once more.
        "dataloader.train.dataset[0].indexed_dataset.data_prefix": ANY_VALUE,
        # Stage 1 is the default.
        "train.zero_optimization.enabled": True,
        "train.evaluation.enabled": True,
        "optim.do_bias_correction": True,
    },
    explained={
        "train.dist.data_parallel_size": DATA_PARALLEL,
        "train.dist.custom_pipeline_stage_id": "pipeline_partition says how blocks are dealt to "
        "stages: uniform, or by their parameters",
        "train.zero_optimization.enabled": "without ZeRO, use zero_stage=0",
        "train.evaluation.enabled": "without evaluation, use eval_strategy=no",
        "train.evaluation.eval_iter": "it counts batches; eval_sequences counts the sequences of an "
        "evaluation, and final_eval_sequences those of the last one",
        "optim.betas": "set beta1 and beta2",
        "optim.do_bias_correction": "Adam's averages are always corrected",
        "train.scheduler.gamma": _SCHEDULER,
        "train.scheduler.warmup_factor": _SCHEDULER,
        "train.scheduler.warmup_method": _SCHEDULER,
        "train.scheduler.warmup_iter": "it is warmup_steps",
        "train.scheduler.alpha": _SCHEDULER,
        "dataloader.test[0].dataset.data_prefix": _HELD_OUT,
        "dataloader.test[0].dataset.indexed_dataset.data_prefix": _HELD_OUT,
        "model.cfg.vocab_size": "the tokenizer determines it; leave it out",
        **dict.fromkeys(
            (
                "model.cfg.model_type",
                "model.cfg.head_size",
                "model.cfg.intermediate_size",
                "model.cfg.hidden_dropout_prob",
                "model.cfg.attention_probs_dropout_prob",
                "model.cfg.embedding_dropout_prob",
                "model.cfg.layernorm_eps",
                "model.cfg.initializer_range",
                "model.cfg.padding_idx",
                "model.cfg.tie_word_embeddings",
            ),
            "the model's config.json has it: name a folder with one, or a preset such as mt5-libai, "
            "by model",
        ),
    },
)
# Of transformers' Trainer and of LLaMA-Factory.
TRANSFORMERS = Spellings(
    renamed={
        "max_steps": "train_steps",
        "num_train_epochs": "epochs",
        "per_device_train_batch_size": "micro_batch_size",
        "per_device_eval_batch_size": "eval_batch_size",
        "learning_rate": "lr",
        "lr_scheduler_type": "lr_schedule",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
        "adam_epsilon": "adam_eps",
        "max_grad_norm": "clip_grad",
        "label_smoothing_factor": "label_smoothing",
        "dataloader_num_workers": "num_workers",
        "deepspeed": "deepspeed_config",
        "logging_steps": "log_interval",
        "eval_steps": "eval_interval",
        "evaluation_strategy": "eval_strategy",
        "save_steps": "save_interval",
        "metric_for_best_model": "save_best",
        "output_dir": "save_dir",
        "overwrite_output_dir": "overwrite",
        RESUME: "resume",
        "lora_r": "lora_rank",
        "lora_target": "lora_target_modules",
        "target_modules": "lora_target_modules",
        "target_parameters": "lora_target_parameters",
        "additional_target": "lora_modules_to_save",
        "modules_to_save": "lora_modules_to_save",
        "adapter_name_or_path": "adapter",
    },
    switches={"adafactor": ("optimizer", "adafactor")},
    translated={RESUME: _translate_resume},
    explained={
        "load_best_model_at_end": _BEST,
        "greater_is_better": _BEST,
        "do_train": "name a train_file to train, or call train with a data set",
        "do_eval": "name a validation_file to evaluate, or call train with a valid_dataset",
    },
)

for _spellings in (FLAGAI, T2T_TUNER, LIBAI, TRANSFORMERS):
    add_spellings(_spellings)
