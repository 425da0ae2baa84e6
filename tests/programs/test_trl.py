"""TRL's trainers train the zoo's models as they train transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from datasets import Dataset
from tiny_models import save_model

import shardzoo

trl = pytest.importorskip("trl")

SETTINGS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "max_length": 32,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 1,
}


@pytest.fixture(scope="module", params=["GPT2LMHeadModel", "Qwen3ForCausalLM"])
def folder(request, tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param, "gpt2", seed=1)


def load_tokenizer(folder: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train(trainer: Any) -> list[float]:
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_supervised_fine_tuning_has_the_losses_of_transformers(folder, tmp_path):
    rows = Dataset.from_list([{"text": f"hello world {i}, and {3 * i} more"} for i in range(8)])

    def losses(model: Any) -> list[float]:
        arguments = trl.SFTConfig(output_dir=str(tmp_path), **SETTINGS)
        tokenizer = load_tokenizer(folder)
        return train(
            trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        )

    oracle = losses(transformers.AutoModelForCausalLM.from_pretrained(folder))
    assert oracle[-1] < oracle[0]
    assert losses(shardzoo.from_pretrained(folder)) == pytest.approx(oracle, rel=1e-4)


def test_preference_optimization_has_the_losses_of_transformers(folder, tmp_path):
    rows = Dataset.from_list(
        [{"prompt": f"say {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(8)]
    )

    def losses(load: Any) -> list[float]:
        arguments = trl.DPOConfig(output_dir=str(tmp_path), **SETTINGS)
        trainer = trl.DPOTrainer(
            load(folder),
            ref_model=load(folder),
            args=arguments,
            train_dataset=rows,
            processing_class=load_tokenizer(folder),
        )
        return train(trainer)

    oracle = losses(transformers.AutoModelForCausalLM.from_pretrained)
    assert oracle[-1] < oracle[0]
    assert losses(shardzoo.from_pretrained) == pytest.approx(oracle, rel=1e-4)
