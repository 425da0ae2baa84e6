"""Shards load in the trainer and train, and the trainer's checkpoint becomes a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from shardzoo.cli.convert import main
from shardzoo.convert.operations import merge, split


def train(mesh, shards: Path, folder: Path) -> torch.Tensor:
    """Two steps from a converted checkpoint; returns the trained model's logits for fixed tokens."""
    from shardzoo.models import from_pretrained
    from shardzoo.trainer import Trainer, TrainingArguments
    from shardzoo.trainer.logging.reporter import SilentReporter

    class Samples:
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = (index + 3 * torch.arange(16)) % 101
            return {"input_ids": tokens, "labels": tokens}

        def __len__(self) -> int:
            return 4

    model = from_pretrained(shards, mesh).train()
    arguments = TrainingArguments(
        env_type="deepspeed+mpu",
        train_steps=2,
        micro_batch_size=2,
        lr=1e-2,
        model_parallel_size=mesh.tp_size,
        save_dir=str(folder),
    )
    Trainer(arguments, mesh=mesh).train(model, train_dataset=Samples(), reporter=SilentReporter())
    with torch.no_grad():
        return model.eval().gather_logits(model(input_ids=torch.arange(12)[None]).logits)


def test_from_a_checkpoint_through_training_to_a_checkpoint(run_mesh, zoo, tmp_path):
    from transformers import GPT2LMHeadModel

    source = zoo.make(tmp_path / "hf", "gpt2", layers=1)
    path = source / "model.safetensors"
    original = {name: torch.randn(tensor.shape) * 0.1 for name, tensor in load_file(path).items()}
    save_file(original, path, metadata={"format": "pt"})
    split(source, tmp_path / "two", 2)
    logits = run_mesh(2, train, tmp_path / "two", tmp_path / "run")[0]
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    assert (checkpoint / "trainer_state.json").exists()
    assert main(["verify", str(checkpoint)]) == 0
    merge(checkpoint, tmp_path / "trained")
    assert not list((tmp_path / "trained").glob("optimizer*"))
    assert not (tmp_path / "trained" / "trainer_state.json").exists()
    model, report = GPT2LMHeadModel.from_pretrained(
        tmp_path / "trained", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values())
    with torch.no_grad():
        theirs = model.eval()(input_ids=torch.arange(12)[None]).logits
    assert (logits - theirs).abs().max() < 1e-5 * theirs.abs().max()
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    assert trained.keys() == original.keys()
    assert not torch.equal(trained["transformer.wte.weight"], original["transformer.wte.weight"])


def test_a_training_checkpoint_is_resharded(run_mesh, zoo, hashes, tmp_path):
    source = zoo.make(tmp_path / "hf", "gpt2", layers=1)
    path = source / "model.safetensors"
    save_file(
        {name: torch.randn(tensor.shape) * 0.1 for name, tensor in load_file(path).items()}, path
    )
    split(source, tmp_path / "two", 2)
    run_mesh(2, train, tmp_path / "two", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    split(checkpoint, tmp_path / "four", 4)
    merge(tmp_path / "four", tmp_path / "merged")
    merge(checkpoint, tmp_path / "directly")
    assert hashes(tmp_path / "merged") == hashes(tmp_path / "directly")
    assert (
        json.loads((tmp_path / "four" / "manifest.json").read_text())["tensor_parallel_size"] == 4
    )
