"""Arguments named as in FlagAI, t2t-tuner, transformers and LiBai, and misspelt ones: taken, or answered rightly."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from every_case import by_turns

from shardzoo.cli.arguments import overrides_as_options, parse
from shardzoo.cli.help import HelpPage
from shardzoo.finetuning.arguments import FinetuningArguments
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.arguments.aliases import argument_aliases, hint

SPLIT = {"env_type": "deepspeed+mpu"}
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # FlagAI
    ({"batch_size": 3}, {"micro_batch_size": 3}),
    ({"warm_up": 0.2}, {"warmup_ratio": 0.2}),
    ({"optimizer_type": "lion"}, {"optimizer": "lion"}),
    ({"fp16": True}, {"precision": "fp16"}),
    ({"fp16": False, "bf16": True}, {"precision": "bf16"}),
    ({"checkpoint_activations": True}, {"recompute": "full"}),
    ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}),
    ({"model_parallel_size": 2, **SPLIT}, {"model_parallel_size": 2}),
    (
        {"master_ip": "127.0.0.1", "master_port": 17751},
        {"master_ip": "127.0.0.1", "master_port": 17751},
    ),
    # transformers and t2t-tuner
    ({"learning_rate": 0.5}, {"lr": 0.5}),
    ({"num_train_epochs": 4}, {"epochs": 4}),
    ({"max_steps": 9}, {"train_steps": 9}),
    ({"per_device_train_batch_size": 3}, {"micro_batch_size": 3}),
    ({"lr_scheduler_type": "linear"}, {"lr_schedule": "linear"}),
    ({"max_grad_norm": 0.1}, {"clip_grad": 0.1}),
    (
        {"adam_beta1": 0.8, "adam_beta2": 0.7, "adam_epsilon": 0.1},
        {"beta1": 0.8, "beta2": 0.7, "adam_eps": 0.1},
    ),
    (
        {"eval_steps": 5, "save_steps": 6, "logging_steps": 7},
        {"eval_interval": 5, "save_interval": 6, "log_interval": 7},
    ),
    ({"adafactor": True}, {"optimizer": "adafactor"}),
    ({"adafactor": False}, {}),
    ({"output_dir": "runs/x"}, {"save_dir": "runs/x"}),
    ({"evaluation_strategy": "steps"}, {}),
    ({"eval_strategy": "steps", "save_strategy": "steps", "logging_strategy": "steps"}, {}),
    (
        {"evaluation_strategy": "epoch", "save_strategy": "no"},
        {"eval_strategy": "epoch", "save_strategy": "no"},
    ),
    ({"per_device_eval_batch_size": 8}, {"eval_batch_size": 8}),
    ({"save_epoch": 1}, {"save_strategy": "epoch"}),
    ({"num_checkpoints": 1}, {}),
    ({"tf32": True}, {"tf32": True}),
    ({"metric_for_best_model": "loss"}, {"save_best": "loss"}),
    ({"resume_from_checkpoint": True}, {"resume": True}),
    ({"resume_from_checkpoint": "runs/x"}, {"load_dir": "runs/x"}),
    ({"dataloader_num_workers": 2}, {"num_workers": 2}),
    ({"model_parallel_gpus": 2, **SPLIT}, {"model_parallel_size": 2}),
    # Megatron-LM and LiBai
    ({"tensor_model_parallel_size": 2, **SPLIT}, {"model_parallel_size": 2}),
    ({"tensor_parallel_size": 2, **SPLIT}, {"model_parallel_size": 2}),
    ({"pipeline_model_parallel_size": 2, **SPLIT}, {"pipeline_parallel_size": 2}),
    ({"train.dist.tensor_parallel_size": 2, **SPLIT}, {"model_parallel_size": 2}),
    ({"train.dist.pipeline_parallel_size": 2, **SPLIT}, {"pipeline_parallel_size": 2}),
    ({"train.train_iter": 7}, {"train_steps": 7}),
    ({"train.train_epoch": 2}, {"epochs": 2}),
    ({"train.train_micro_batch_size": 3}, {"micro_batch_size": 3}),
    ({"train.num_accumulation_steps": 3}, {"gradient_accumulation_steps": 3}),
    ({"train.amp.enabled": True}, {"precision": "fp16"}),
    ({"train.activation_checkpoint.enabled": True}, {"recompute": "full"}),
    (
        {"train.checkpointer.period": 5, "train.checkpointer.max_to_keep": 2},
        {"save_interval": 5, "save_total_limit": 2},
    ),
    (
        {"train.evaluation.eval_period": 5, "train.log_period": 2},
        {"eval_interval": 5, "log_interval": 2},
    ),
    ({"optim.lr": 0.5, "optim.weight_decay": 0.0}, {"lr": 0.5, "weight_decay": 0.0}),
]


@pytest.mark.parametrize(("given", "expected"), by_turns(TAKEN, 2))
def test_arguments_of_other_tools_are_taken(given, expected):
    """As keywords, and as overrides on the command line."""
    plain = TrainingArguments(**(SPLIT if SPLIT.items() <= given.items() else {}))
    made = TrainingArguments(**given)
    words = overrides_as_options(
        [f"{name}={value}" for name, value in given.items()], TrainingArguments
    )
    for found in (
        made,
        parse(TrainingArguments, HelpPage("test", TrainingArguments), words, quiet=True),
    ):
        changed = {
            field.name
            for field in fields(found)
            if getattr(found, field.name) != getattr(plain, field.name)
        }
        assert {name: getattr(found, name) for name in {*changed, *expected}} == expected


def test_a_share_of_the_training_file_is_held_out_as_its_percentage():
    assert FinetuningArguments(validation_split=0.1).validation_split == 10
    assert FinetuningArguments(validation_split=10).validation_split == 10


REFUSED = [
    ("load_best_model_at_end", True, "save_best names a validation value"),
    ("wandb", True, "tensorboard wandb are TensorBoard and Weights & Biases"),
    ("data_parallel_size", 2, "it follows from the number of processes"),
    ("adafactor", "yes", "adafactor must be True or False, not 'yes'"),
    ("resume_from_checkpoint", 3, "resume must be True or False, not 3"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_other_arguments_are_answered_with_what_to_do(name, value, message):
    with pytest.raises(ValueError, match=message):
        TrainingArguments(**{name: value})


HINTS = {
    "model_paralle_size": "model_parallel_size", "batchsize": "batch_size", "leraning_rate": "learning_rate",
    "train_stesp": "train_steps", "max_target_len": "max_target_length", "prefx": "prefix", "epoch": "epochs",
    "gradientcheckpointing": "gradient_checkpointing", "save_total_limits": "save_total_limit",
    "weightdecay": "weight_decay", "lr_scheduler": "lr_schedule", "model_name_or_pth": "model_name_or_path",
    # Nothing resembles these closely enough for a guess.
    "beta3": "", "fp32": "", "fp8": "", "world_size": "", "dropout": "", "eval_freq": "",
    "num_layers": "", "hidden_size": "", "max_length": "", "min_lr": "", "master": "",
    "zero": "", "num_beams": "", "train": "", "tokenizer": "", "model_name": "", "cpu": "", "log": "", "seeds_dir": "",
}  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), HINTS.items())
def test_a_hint_is_right_or_there_is_none(name, meant):
    known = [field.name for field in fields(FinetuningArguments)]
    assert hint(name, [*known, *argument_aliases(known)]) == (
        f"; did you mean {meant}?" if meant else ""
    )


ALL_TAKEN = (
    "env_type epochs batch_size eval_interval log_interval experiment_name pytorch_device load_dir lr fp16 "
    "checkpoint_activations master_ip master_port num_nodes num_gpus hostfile training_script deepspeed_config "
    "save_dir save_interval gradient_accumulation_steps weight_decay warm_up seed optimizer_type save_epoch "
    "tensorboard_dir clip_grad load_type save_optim save_rng load_optim load_rng save_best model_parallel_size "
    "model_name_or_path train_file validation_file test_file validation_split source_id target_id prefix "
    "max_source_length max_target_length block_size gradient_checkpointing ignore_pad_token_for_loss metric "
    "predict_with_generate generation_num_beams cache_dir output_dir overwrite_output_dir num_train_epochs "
    "per_device_train_batch_size per_device_eval_batch_size evaluation_strategy logging_strategy save_strategy "
    "learning_rate model_parallel_gpus dropout_rate tf32 lr_scheduler_type warmup_ratio save_total_limit adafactor "
    "resume_from_checkpoint deepspeed bf16 train.train_iter train.train_epoch train.train_micro_batch_size "
    "train.log_period train.warmup_ratio train.output_dir train.num_accumulation_steps train.amp.enabled "
    "train.checkpointer.period train.checkpointer.max_to_keep train.evaluation.eval_period "
    "train.dist.tensor_parallel_size train.dist.pipeline_parallel_size relative_step num_workers save_steps "
    "scale_parameter mode"
)
UNKNOWN = (
    "clip_threshold decay_rate warmup_init max_length model_path hidden_layers "
    "pipeline_num_layers input_placement_device scheduler vocab_file data_prefix "
    # transformers, Megatron-LM and nanoGPT
    "prediction_loss_only log_level logging_dir use_cpu data_seed fp16_full_eval local_rank run_name "
    "remove_unused_columns fsdp optim optim_args hub_token gradient_checkpointing_kwargs lr_scheduler_kwargs "
    "train_samples no_load_optim no_load_rng virtual_pipeline_model_parallel_size recompute_num_layers lr_decay_style "
    "lr_warmup_iters save load finetune eval_iters split seq_length mask_prob weight_decay_incr_style min_loss_scale "
    "out_dir eval_only always_save_checkpoint init_from dataset n_layer dropout bias max_iters decay_lr min_lr backend"
)
# Of the documents and examples of FlagAI, t2t-tuner, LiBai and the T5x diacritics: 0 if taken; else a part of the
# answer, or None for no hint at all.
DOCUMENTED: dict[str, Any] = {
    **dict.fromkeys(ALL_TAKEN.split(), 0),
    **dict.fromkeys(UNKNOWN.split()),
    "train.zero_optimization.stage": 0, "optim.eps": 0, "optim.params.clip_grad_max_norm": 0,
    "train.evaluation.eval_iter": "eval_sequences", "train.zero_optimization.enabled": "zero_stage=0",
    "train.evaluation.enabled": "eval_strategy=no", "train.scheduler.gamma": "constant_with_warmup",
    "model.cfg.head_size": "config.json", "model.cfg.vocab_size": "tokenizer", "optim.betas": "beta1 and beta2",
    "model_paralle_size": "model_parallel_size", "train.dist.data_parallel_size": "it follows from the number of",
    "torch_ort": "torch_compile", "dataset_name": "name that in train_file",
    "dataset_config_name": "name that in train_file", "embedding_on_cpu": "freeze(embeddings=True)",
    "pad_to_max_length": "padded to its longest sequence", "load_best_model_at_end": "save_best",
}  # fmt: skip


def test_the_ancestors_documented_arguments_are_taken_or_answered_rightly():
    assert len(DOCUMENTED) > 60
    known = [field.name for field in fields(FinetuningArguments)]
    taken = {*known, *argument_aliases(known)}
    for name, expected in DOCUMENTED.items():
        answer = hint(name, taken)
        if expected == 0:
            assert name in taken, name
        elif expected is None:
            assert name not in taken, name
            assert answer == "", (name, answer)
        else:
            assert expected in answer, (name, answer)


# The arguments of t2t-tuner that its users leave in a call, with its defaults.
T2T_DEFAULTS = {
    "dataset_name": None,
    "dataset_config_name": None,
    "pad_to_max_length": False,
    "preprocessing_num_workers": 1,
    "overwrite_cache": False,
    "pad_to_multiple_of": 8,
    "mode": None,
    "optimizer": None,
    "torch_ort": False,
    "embedding_on_cpu": False,
    "dataset_cache": True,
}


def test_t2t_tuners_arguments_that_ask_for_nothing_else_are_taken():
    assert FinetuningArguments(**T2T_DEFAULTS) == FinetuningArguments()
    assert FinetuningArguments(mode="seq2seq").task == "text2text-generation"
    assert FinetuningArguments(mode="clm").task == "text-generation"
    words = ["--torch-ort", "False", "--pad-to-multiple-of=8", "--overwrite-cache"]
    words += ["--preprocessing-num-workers", "4", "--lr", "0.5"]
    page = HelpPage("test", FinetuningArguments)
    assert parse(FinetuningArguments, page, words, quiet=True) == FinetuningArguments(lr=0.5)
    for name, value in (
        ("dataset_name", "wmt16"),
        ("pad_to_max_length", True),
        ("embedding_on_cpu", True),
        ("torch_ort", True),
        ("mode", "mlm"),
    ):
        with pytest.raises(ValueError, match=name):
            FinetuningArguments(**{name: value})


# What FlagAI's scripts leave in a call when they change env_type.
OF_OTHER_ENVIRONMENTS = {
    "deepspeed_config": "missing.json",
    "num_gpus": 2,
    "model_parallel_size": 2,
    "master_port": 17750,
}


def test_arguments_of_other_environments_are_named_and_not_used(tmp_path, capsys):
    made = TrainingArguments(env_type="pytorch", **OF_OTHER_ENVIRONMENTS)
    assert made.unused == ("num_gpus=2", "deepspeed_config='missing.json'", "model_parallel_size=2")
    assert (made.num_gpus, made.deepspeed_config, made.model_parallel_size) == (1, None, 1)
    assert (
        TrainingArguments(env_type="pytorchDDP", **OF_OTHER_ENVIRONMENTS).unused == made.unused[1:]
    )
    given = {"env_type": "deepspeed", "model_parallel_size": 2, "num_gpus": 2}
    assert TrainingArguments(**given).unused == ("model_parallel_size=2",)
    assert TrainingArguments().unused == ()

    from shardzoo.trainer import Trainer

    Trainer(env_type="pytorch", save_dir=str(tmp_path), **OF_OTHER_ENVIRONMENTS)
    assert capsys.readouterr().out.splitlines()[-1:] == [
        "env_type='pytorch' does not use num_gpus=2, deepspeed_config='missing.json', "
        "model_parallel_size=2; env_type='deepspeed+mpu' does"
    ]


def test_a_deepspeed_file_decides_the_environment(tmp_path):
    """t2t-tuner's deepspeed_test.py names a file of ZeRO 3, and nothing else."""
    file = tmp_path / "zero_3.json"
    for stage, found in ((3, "deepspeed"), (2, "deepspeed+mpu")):
        file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        assert FinetuningArguments(deepspeed=str(file))._find_environment() == found
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    split = FinetuningArguments(deepspeed=str(file), model_parallel_size=2)
    assert split._find_environment() == "deepspeed+mpu"  # which refuses the stage
    with pytest.raises(ValueError, match="use zero_stage 0, 1 or 2"):
        FinetuningArguments(zero_stage=3, model_parallel_size=2)
