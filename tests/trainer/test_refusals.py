"""What the trainer refuses, before it has touched anything, and what it says."""

from __future__ import annotations

import contextlib
import enum
import io
import json
import os
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from training import Pairs, Stream, on_ranks, run_training, tiny_t5

REFUSED = [
    (
        {"torch_compile": True, "recompute": "selective"},
        "torch_compile works with recompute='none' or 'full'",
    ),
    (
        {"torch_compile": True, "env_type": "deepspeed+mpu", "pipeline_parallel_size": 2},
        "torch_compile does not work with pipeline stages; use pipeline_parallel_size=1",
    ),
    (
        {"env_type": "deepspeed+mpu", "model_parallel_size": 2, "symmetric_memory": True},
        "symmetric_memory fuses the collectives of sequence parallelism; use it with sequence_parallel=True",
    ),
    (
        {
            "env_type": "deepspeed+mpu",
            "model_parallel_size": 2,
            "sequence_parallel": True,
            "symmetric_memory": True,
            "torch_compile": True,
        },
        "torch_compile cannot compile products in symmetric memory; use one of the two",
    ),
    (
        {"torch_compile_backend": "zzz"},
        "torch_compile_backend must be one of .*inductor.*, not 'zzz'",
    ),
    (
        {"model_paralle_size": 2},
        "no argument 'model_paralle_size'; did you mean model_parallel_size",
    ),
    (
        {"pipeline_parallel_size": 2},
        "pipeline_parallel_size=2 does not work with env_type='pytorch'; use env_type=",
    ),
    ({"data_parallel_size": 2}, "it follows from the number of processes"),
    ({"batchsize": 2}, "did you mean batch_size"),
    (
        {"batch_size": 2, "micro_batch_size": 2},
        "batch_size and micro_batch_size both set micro_batch_size",
    ),
    (
        {"env_type": "deepspeed+mpu", "zero_stage": 3},
        "use zero_stage 0, 1 or 2, or env_type='deepspeed'",
    ),
    ({"resume": True, "overwrite": True}, "use only one of them"),
    (
        {"env_type": "ddp"},
        "env_type must be one of pytorch, pytorchDDP, deepspeed, deepspeed[+]mpu, fsdp, not 'ddp'",
    ),
    ({"lora_alpha": 4}, r"lora_alpha is an option of LoRA weights, and .* set lora_rank"),
    ({"lora_target_modules": "q"}, "lora_target_modules is an option of LoRA weights"),
    ({"zero_stage": 1}, "zero_stage needs env_type 'deepspeed'"),
    ({"scale_parameter": True}, "scale_parameter needs optimizer='adafactor', not 'adamw'"),
    ({"lr": 0.0}, "lr must be above 0"),
    ({"batch_size": 0}, "micro_batch_size must be at least 1"),
    ({"global_batch_size": -8}, "global_batch_size must be at least 1, not -8"),
    ({"warm_up": 10}, "must be from 0 to 1, not 10"),
    ({"optimizer": "sgd"}, "optimizer must be one of adamw, .* not 'sgd'"),
    ({"global_batch_size": 8, "gradient_accumulation_steps": 2}, "set one of them"),
    ({"relative_step": True}, "relative_step needs optimizer='adafactor'"),
    ({"lr": "1e-3"}, "lr must be a finite number, not '1e-3'"),
    ({"lr": float("inf")}, "lr must be a finite number, not inf"),
    ({"clip_grad": float("nan")}, "clip_grad must be a finite number, not nan"),
    ({"epochs": "3"}, "epochs must be an integer, not '3'"),
    ({"env_type": "pytorch", "num_gpus": 0}, "num_gpus must be at least 1, not 0"),
    ({"report_to": "wandb"}, "report_to=wandb needs the package wandb: pip install wandb"),
    ({"master_port": 99999}, "master_port must be from 1 to 65535, not 99999"),
    ({"epochs": 0.5}, "epochs must be an integer, not 0.5"),
    ({"train_steps": 2.5}, "train_steps must be an integer or None, not 2.5"),
    ({"batch_size": True}, "micro_batch_size must be an integer, not True"),
    ({"resume": "no"}, "resume must be True or False, not 'no'"),
    ({"save_dir": 3}, "save_dir must be a string, not 3"),
    (
        {"zero_stage": True, "env_type": "deepspeed"},
        "zero_stage must be one of 0, 1, 2, 3, not True",
    ),
    ({"seed": -1}, "seed must be from 0 to 4294967295, not -1"),
    ({"beta2": 1.0}, "beta2 must be at least 0 and below 1, not 1.0"),
    ({"warm_up": 0.2, "warmup_steps": 3}, "warmup_steps=3 and warm_up=0.2 .* are alternatives"),
    ({"experiment_name": "a/../../b"}, "within save_dir, not 'a/../../b'"),
    ({"experiment_name": "/runs"}, "within save_dir"),
]


@pytest.mark.parametrize(("keywords", "message"), REFUSED)
def test_arguments_that_do_not_work_are_refused(keywords, message):
    from shardzoo.trainer import TrainingArguments

    with pytest.raises(ValueError, match=message):
        TrainingArguments(**keywords)


def test_symmetric_memory_needs_gpus(run_mesh, tmp_path):
    arguments = {"env_type": "deepspeed+mpu", "model_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(
        Exception, match=r"needs the GPUs of one host.*but the ranks compute on CPUs; use"
    ):
        on_ranks(run_mesh, tmp_path, tp=2, symmetric_memory=True, **arguments)


class Name(str, enum.Enum):
    COSINE = "cosine"


def test_arguments_become_what_they_are_declared_to_be(tmp_path):
    from shardzoo.trainer import TrainingArguments

    @dataclass(frozen=True)
    class Mine(TrainingArguments):
        bound: float = float("inf")
        later: int = field(init=False)

    mine = Mine(
        train_steps=np.int64(3),
        lr=np.float32(0.5),
        weight_decay=0,
        micro_batch_size=2.0,
        save_dir=tmp_path,
        lr_schedule=Name.COSINE,
        zero_stage=np.int64(1),
        env_type="deepspeed",
        pytorch_device=torch.device("cpu"),
    )
    made = (
        mine.train_steps,
        mine.lr,
        mine.weight_decay,
        mine.micro_batch_size,
        mine.save_dir,
        mine.lr_schedule,
    )
    assert made == (3, 0.5, 0.0, 2, str(tmp_path), "cosine")
    assert [type(value) for value in made] == [int, float, float, int, str, str]
    assert (type(mine.zero_stage), mine.pytorch_device) == (int, "cpu")


def test_numbers_of_numpy_train_and_are_saved(tmp_path):
    steps, _ = run_training(
        None, tmp_path, micro_batch_size=np.int64(2), seed=np.int64(3), beta1=np.float32(0.5)
    )
    assert len(steps) == 4


CONFIGURATIONS = [
    (
        '{"zero_optimization": {"stage": 3}}',
        r"asks for ZeRO stage 3, .* use stage 0, 1 or 2, or env_type='deepspeed'",
    ),
    (
        '{"zero_optimization": 2}',
        r'zero_optimization must be an object such as {"stage": 2}, not 2',
    ),
    (
        '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}',
        "enables both fp16 and bf16; enable one of them",
    ),
    ('{"fp16": true}', r'fp16 must be an object such as {"enabled": true}, not True'),
    (
        '{"optimizer": {"params": [1]}}',
        r'optimizer.params must be an object such as {"lr": 0.001}, not \[1\]',
    ),
    (
        '{"zero_optimization": {"offload_optimizer": "cpu"}}',
        r'zero_optimization.offload_optimizer must be an object such as {"device": "cpu"}, not \'cpu\'',
    ),
    (
        '{"zero_optimization": {"offload_param": []}}',
        r'zero_optimization.offload_param must be an object such as {"device": "cpu"}, not \[\]',
    ),
    ('{"torch_autocast": null}', "torch_autocast must be an object such as .*, not None"),
    ('{"train_batch_size": 1%s}' % ("0" * 400), "global_batch_size must be an integer"),
    ('{"gradient_clipping": "much"}', "clip_grad must be a finite number, not 'much'"),
    (
        '{"optimizer": {"type": "OneBitAdam"}}',
        "there is no optimizer 'OneBitAdam' here; use one of adam, adamw",
    ),
    (
        '{"optimizer": {"type": "Adam", "params": {"freeze_step": 9}}}',
        "the optimizer's freeze_step, for which the",
    ),
    (
        '{"scheduler": {"type": "OneCycle"}}',
        "there is no scheduler 'OneCycle' here; use one of warmupcosinelr, warmupdecaylr, warmuplr",
    ),
    (
        '{"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}',
        "optimizer.params.betas must be two numbers, not 0.9",
    ),
    (
        '{"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"}, "bf16": {"enabled": true}}',
        "sets data_types.grad_accum_dtype to 'bf16', but the arguments decide it to be 'fp32'",
    ),
    ("[1]", "must hold a JSON object, not a list"),
    ("{", "is not JSON"),
    ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ('{"fp16": 1' + "0" * 400 + "}", "fp16 must be an object"),
    (None, "cannot be read: Is a directory"),
]


@pytest.mark.parametrize(("text", "message"), CONFIGURATIONS)
def test_configuration_files_that_do_not_work_are_refused(tmp_path, text, message):
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.deepspeed_config import deepspeed_config

    path = tmp_path / "ds.json"
    path.write_text(text) if text else path.mkdir()
    with pytest.raises(ValueError, match=message):
        deepspeed_config(
            TrainingArguments(env_type="deepspeed+mpu", epochs=1, deepspeed_config=str(path)), 1, 9
        )


def test_a_pipe_is_no_configuration_file(tmp_path):
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.deepspeed_config import deepspeed_config

    os.mkfifo(tmp_path / "ds.json")
    path = str(tmp_path / "ds.json")
    with pytest.raises(ValueError, match="not a regular file"):
        deepspeed_config(
            TrainingArguments(env_type="deepspeed+mpu", epochs=1, deepspeed_config=path), 1, 9
        )


def test_a_usual_configuration_file_is_taken(tmp_path):
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.deepspeed_config import deepspeed_config

    config = {
        "train_batch_size": "auto",
        "steps_per_print": 100,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": "auto", "overlap_comm": False},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    made = deepspeed_config(
        TrainingArguments(env_type="deepspeed", deepspeed_config=tmp_path / "ds.json"), 1, 9
    )
    assert made["steps_per_print"] == 100
    assert made["zero_optimization"] == {
        "stage": 1, "offload_optimizer": {"device": "none"}, "overlap_comm": False, "reduce_bucket_size": 6_553_600
    }  # fmt: skip
    assert not {"optimizer", "scheduler"} & made.keys()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_null_is_no_offloading(tmp_path, stage, precision):
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.deepspeed_config import deepspeed_config

    if not stage and precision != "fp32":
        return
    zero = {"stage": stage, "offload_optimizer": None, "offload_param": None}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    arguments = TrainingArguments(
        env_type="deepspeed", deepspeed_config=tmp_path / "ds.json", precision=precision
    )
    assert not arguments.offload_optimizer
    made = deepspeed_config(arguments, 1, 9)["zero_optimization"]
    assert made["stage"] == stage
    assert made.get("offload_optimizer", {"device": "none"}) == {"device": "none"}
    assert "offload_param" not in made


FLAGAI = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "steps_per_print": 50,
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 1, "contiguous_gradients": False, "overlap_comm": True, "reduce_scatter": True,
        "reduce_bucket_size": 5e7, "allgather_bucket_size": 5e7, "cpu_offload": True,
    },
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 5e-6, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-6, "warmup_num_steps": 7}},
    "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": False},
    "wall_clock_breakdown": False,
}  # fmt: skip


def test_the_settings_of_a_whole_deepspeed_file_become_arguments(tmp_path, run_mesh):
    """Its keys are those of FlagAI's published deepspeed.json. An argument that is set counts more."""
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.engines.deepspeed_config import deepspeed_config

    path = str(tmp_path / "ds.json")
    (tmp_path / "ds.json").write_text(json.dumps(FLAGAI))
    made = TrainingArguments(env_type="deepspeed", deepspeed_config=path, lr=1e-4, precision="bf16")
    expected = {
        "micro_batch_size": 4, "gradient_accumulation_steps": 2, "clip_grad": 0.5, "offload_optimizer": True,
        "optimizer": "adamw", "beta1": 0.9, "beta2": 0.95, "adam_eps": 1e-7, "weight_decay": 0.01, "lr": 1e-4,
        "precision": "bf16", "lr_schedule": "constant_with_warmup", "warmup_steps": 7,
    }  # fmt: skip
    assert {name: getattr(made, name) for name in expected} == expected
    assert TrainingArguments(env_type="deepspeed", deepspeed_config=path).precision == "fp16"
    whole = TrainingArguments(env_type="deepspeed", deepspeed_config=path, global_batch_size=16)
    assert (whole.accumulation_steps(2), whole.gradient_accumulation_steps) == (2, None)
    config = deepspeed_config(made, 3, 9)
    assert config["train_batch_size"] == 4 * 2 * 3
    assert config["fp16"] == {**FLAGAI["fp16"], "enabled": False}
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert config["zero_optimization"]["reduce_bucket_size"] == 5e7
    assert not {"cpu_offload"} & config["zero_optimization"].keys()

    def train(mesh):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            run_training(
                mesh, tmp_path, env_type="deepspeed", deepspeed_config=path, lr=1e-4, precision="bf16",
                train_steps=2, data=Pairs(16), model=tiny_t5(),
            )  # fmt: skip
        return output.getvalue()

    said = "".join(run_mesh(1, train)[0].split())  # the console breaks lines in long paths too
    assert "ds.jsonsetsgradient_accumulation_steps=2,clip_grad=0.5,adam_eps=1e-07" in said
    assert "lr=0.0001(not5e-06),precision=bf16(notfp16)" in said


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", ""])
def test_devices_that_are_not_here_are_refused(device):
    from shardzoo.trainer import Trainer

    with pytest.raises(
        ValueError, match=f"pytorch_device '{device}' does not exist on this machine; use 'cpu'"
    ):
        Trainer(pytorch_device=device)


def test_a_dict_is_no_arguments():
    from shardzoo.trainer import Trainer

    with pytest.raises(
        ValueError, match=r"pass TrainingArguments, or keywords as in .*, not a dict"
    ):
        Trainer({"lr": 1e-3})


class NoTargets(Pairs):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "labels": torch.full_like(sample["labels"], -100)}


class Texts(Pairs):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "text": "as it was"}


class Sized(Stream):
    def __len__(self):
        return len(self.samples)


class Endless:
    def __getitem__(self, index):
        return Pairs()[index % 64]


class SomeText(Pairs):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "text": None if index < 3 else 1}


class SomeKey(Pairs):
    def __getitem__(self, index):
        return {**super().__getitem__(index), **({"text": 1} if index == 3 else {})}


def passes():
    from shardzoo.data import ResumableLoader, Share

    return ResumableLoader(Pairs(8), Share(2), total=8)


def loader():
    return torch.utils.data.DataLoader([{"labels": 1}] * 8)


UNFIT = [
    ({"data": Pairs(0)}, "train_dataset is empty"),
    (
        {"data": Pairs(7), "global_batch_size": 8},
        "has 7 samples, fewer than the 8 of one optimizer step",
    ),
    ({"data": Stream(Pairs(0))}, "the stream holds no records"),
    (
        {
            "data": Stream(Pairs(7)),
            "global_batch_size": 8,
            "train_steps": None,
            "epochs": 1,
            "lr_schedule": "constant",
        },
        "has fewer samples than the 8 of one optimizer step",
    ),
    ({"data": NoTargets(8)}, "has no target: all its labels are -100"),
    (
        {"data": Texts(8)},
        "the samples' 'text' must hold numbers, not 'as it was'; remove it, or pass a collate_fn",
    ),
    (
        {"data": SomeText(4), "micro_batch_size": 4},
        "the samples' 'text' must hold numbers, not None; remove it",
    ),
    (
        {"data": SomeKey(4), "micro_batch_size": 4},
        r"sample \d of a batch \(from 0\) has no 'text', which sample \d has",
    ),
    (
        {"data": [{"input_ids": [[1, 2], [3]]}] * 8},
        "'input_ids' holds lists of unequal lengths: .* pad them",
    ),
    ({"train_steps": None}, "set epochs or train_steps"),
    (
        {"train_steps": None, "epochs": 2, "data": Endless()},
        "without a length, so the end of epochs=2 is unknown; set",
    ),
    (
        {"train_steps": None, "epochs": 2, "data": passes()},
        "defines its own number of epochs, which epochs=2",
    ),
    ({"data": Sized(Pairs(0))}, "train_dataset is empty"),
    ({"data": pd.DataFrame({"input_ids": [1] * 8})}, "is a DataFrame; use a dataset"),
    (
        {"train_steps": None, "epochs": 1, "data": Stream(Pairs(8))},
        "the length of the data is unknown",
    ),
    ({"data": 3}, "is a int; use a dataset"),
    ({"data": {"train": Pairs(8)}}, "is a dict; use a dataset"),
    ({"data": Pairs}, "is the class Pairs; use a dataset"),
    ({"data": "corpus.txt"}, "is a str; use a dataset"),
    (
        {"data": iter(Stream(Pairs(8)))},
        "is a generator, which can be read only once; pass an object whose __iter__",
    ),
    (
        {"data": loader()},
        "is a DataLoader, which cannot resume .*; pass its dataset as train_dataset, and",
    ),
    ({"load_dir": "nowhere"}, "load_dir nowhere holds no checkpoint"),
    ({"valid": Pairs(0)}, "validation data is empty"),
    (
        {"valid": Stream(Pairs(8))},
        "must be a dataset with __len__ and __getitem__, .* not a Stream",
    ),
    ({"valid": {"test": Pairs(8)}}, "must be a dataset .* not a dict"),
    ({"valid": "valid.txt"}, "must be a dataset .* not a str"),
    ({"valid": Pairs}, "must be a dataset .* not the class Pairs"),
    ({"valid": pd.DataFrame({"input_ids": [1] * 8})}, "must be a dataset .* not a DataFrame"),
    ({"valid": Pairs(4), "save_best": "rouge"}, "is not among the validation values: loss"),
    ({"save_best": "loss"}, "save_best='loss' is a validation value: pass a valid_dataset too"),
    ({"metrics": len}, "metric_methods must be {name: function} or a list"),
    ({"metrics": [len]}, "metric_methods must be {name: function} or a list"),
    ({"metrics": {"loss": len}}, "a value of every evaluation already has the name 'loss'"),
    ({"metrics": {"step": len}}, "a value of every evaluation already has the name 'step'"),
    ({"metrics": [["a", len], ["a", min]]}, "two metrics have the name 'a'"),
    ({"model": lambda mesh: None}, "model must be a torch.nn.Module, .* not None"),
    (
        {"model": lambda mesh: torch.compile(tiny_t5())},
        "wrapped in a OptimizedModule, .* by model.compile",
    ),
    (
        {"model": lambda mesh: torch.nn.DataParallel(tiny_t5())},
        "wrapped in a DataParallel, .* pass the model itself",
    ),
    ({"model": lambda mesh: "t5-small"}, "model must be a torch.nn.Module, .* not 't5-small'"),
    ({"model": lambda mesh: torch.nn.Linear}, "model must be a torch.nn.Module, .* not <class"),
]


@pytest.mark.parametrize(("settings", "message"), UNFIT)
def test_data_and_models_that_do_not_fit_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        run_training(None, tmp_path, **settings)
    assert not (tmp_path / "checkpoints").exists()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def schedule_free(model):
    import pytorch_optimizer

    return pytorch_optimizer.ScheduleFreeAdamW(model.parameters())


def lookahead(model):
    import pytorch_optimizer

    return pytorch_optimizer.Lookahead(torch.optim.AdamW(model.parameters()))


UPDATES = [
    (
        lambda model: (torch.optim.SGD, None),
        "optimizer must be a torch.optim.Optimizer over the model's parameters",
    ),
    (
        lambda model: (sgd(tiny_t5()), None),
        "47 parameters of the optimizer do not belong to the model",
    ),
    (
        lambda model: (torch.optim.LBFGS(model.parameters()), None),
        "LBFGS recomputes the loss within a step",
    ),
    (
        lambda model: (schedule_free(model), None),
        "ScheduleFreeAdamW keeps separate weights for training and",
    ),
    (lambda model: (lookahead(model), None), "Lookahead keeps state that belongs to no parameter"),
    (
        lambda model: (None, StepLR(sgd(model), 2)),
        "lr_scheduler belongs to another optimizer than the one in use",
    ),
    (
        lambda model: (o := sgd(model), ReduceLROnPlateau(o)),
        "whose rate depends on the step alone, not <torch",
    ),
    (
        lambda model: (sgd(model), StepLR),
        "lr_scheduler must be a torch.optim.lr_scheduler.LRScheduler",
    ),
]


@pytest.mark.parametrize(("make", "message"), UPDATES)
def test_optimizers_and_schedulers_that_do_not_fit_are_refused(tmp_path, make, message):
    model = tiny_t5()
    with pytest.raises(ValueError, match=message):
        run_training(None, tmp_path, model=model, updates=make(model))
    assert not (tmp_path / "checkpoints").exists()


def test_a_file_in_the_folder_s_place_is_named(tmp_path):
    (tmp_path / "run").write_text("here")
    for folder in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(
            ValueError, match="cannot be the run's folder, because a file is in its place"
        ):
            run_training(None, folder)
    with pytest.raises(
        ValueError, match="run cannot be tensorboard_dir, because a file is in its place"
    ):
        run_training(None, tmp_path / "other", tensorboard_dir=tmp_path / "run")
    assert (tmp_path / "run").read_text() == "here"


def test_a_run_that_leaves_gpus_idle_says_so():
    from shardzoo.trainer import TrainingArguments
    from shardzoo.trainer.trainer import explain_idle_gpus

    several = TrainingArguments(env_type="deepspeed")
    assert "on 1 of this machine's 8 GPUs; num_gpus=8" in explain_idle_gpus(several, 1, 8)
    assert explain_idle_gpus(several, 8, 8) == explain_idle_gpus(several, 2, 0) == ""
    one = TrainingArguments()
    assert explain_idle_gpus(one, 1, 1) == ""
    assert "on 1 of this machine's 8 GPUs; env_type='pytorchDDP'" in explain_idle_gpus(one, 1, 8)
    chosen = TrainingArguments(pytorch_device="cpu")
    assert "pytorch_device='cuda'" in explain_idle_gpus(chosen, 1, 1)
    assert explain_idle_gpus(one, 1, 0) == ""
    assert explain_idle_gpus(TrainingArguments(pytorch_device="cuda:1"), 1, 8) == ""
