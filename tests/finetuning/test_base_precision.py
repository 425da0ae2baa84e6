"""LoRA on packed bases by the trainer: layouts learn alike, a run resumes bit for bit, and the merged export is what
was trained.
"""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
import transformers
from every_case import every_day

from shardzoo import finetuning as t2t
from shardzoo.models.packing import find_packed_parameters, unpack_parameters

SHORT = {
    "max_source_length": 16,
    "max_target_length": 16,
    "micro_batch_size": 4,
    "lr": 3e-3,
    "train_steps": 6,
    "save_interval": 3,
    "log_interval": 1,
    "lora_rank": 2,
    "lora_target_modules": ("all-linear",),
    "dropout_rate": 0.0,
}


def losses(folder) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["train/loss"] for record in records if "train/loss" in record]


def tune(mesh, model, data, output, **arguments):
    trainer = t2t.Trainer(
        model_name_or_path=model,
        train_file=data,
        output_dir=str(output),
        mesh=mesh,
        **{**SHORT, **arguments},
    )
    trainer.train(valid=False)
    return trainer


def tune_and_forget(mesh, **arguments):
    """A trainer does not travel between processes."""
    tune(mesh, **arguments)


@pytest.mark.parametrize(("kind", "format"), every_day([("t5", "nf4")], more=[("gpt2", "int8")]))
def test_layouts_learn_alike_and_resume(checkpoints, files, tmp_path, run_mesh, kind, format):
    data = str(files / "pairs.json")
    work = partial(tune, model=checkpoints(kind), data=data, base_precision=format)
    trainer = work(None, output=tmp_path / "one")
    assert {p.packing.format for p in find_packed_parameters(trainer.model).values()} == {format}
    curve = losses(tmp_path / "one")
    assert len(curve) == 6
    assert curve[-1] < curve[0]

    spread = partial(tune_and_forget, model=checkpoints(kind), data=data, base_precision=format)
    run_mesh(2, partial(spread, output=tmp_path / "split", model_parallel_size=2))
    assert losses(tmp_path / "split") == pytest.approx(curve, rel=1e-4)
    replicas = {"micro_batch_size": 2, "env_type": "pytorchDDP"}
    run_mesh(1, partial(spread, output=tmp_path / "replicas", **replicas), data=2)
    assert losses(tmp_path / "replicas") == pytest.approx(curve, rel=1e-4)

    # The first half of the run, and then the rest of it.
    shutil.copytree(tmp_path / "one", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-000006")
    with pytest.raises(
        ValueError, match=f"trained on a base in {format}, and cannot go on with fp8"
    ):
        tune(None, checkpoints(kind), data, tmp_path / "again", resume=True, base_precision="fp8")
    resumed = work(None, output=tmp_path / "again", resume=True)
    assert losses(tmp_path / "again")[-3:] == curve[-3:]
    trained = dict(trainer.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, trained[name])

    # transformers computes with the merged folder what the packed model with its adapter does.
    ids = torch.arange(2, 12).view(2, 5)
    inputs = {"input_ids": ids}
    load = transformers.AutoModelForCausalLM
    if kind == "t5":
        inputs["decoder_input_ids"] = ids
        load = transformers.AutoModelForSeq2SeqLM
    model = trainer.model.eval()
    with torch.no_grad():
        expected = model(**inputs).logits
        folder = trainer.save_model(tmp_path / "merged", merge_adapter=True)
        merged = load.from_pretrained(folder).eval()
        torch.testing.assert_close(merged(**inputs).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.before_release
def test_a_reference_is_packed_too(checkpoints, tmp_path):
    """The base of LoRA weights is the reference: at first the loss is log 2."""
    records = [{"prompt": "red", "chosen": f" blue {n}", "rejected": " two"} for n in range(8)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"task": "preference", "train_steps": 2, "base_precision": "nf4"}
    tune(None, checkpoints("gpt2"), str(data), tmp_path / "run", **options)
    assert losses(tmp_path / "run")[0] == pytest.approx(0.693147, abs=1e-5)


def test_mistakes(checkpoints, files, tmp_path):
    def refuse(match, **arguments):
        options = {"base_precision": "nf4", **arguments}
        with pytest.raises(ValueError, match=match):
            tune(None, checkpoints("gpt2"), str(files / "pairs.json"), tmp_path / "no", **options)

    refuse("nothing is trained; set lora_rank", lora_rank=0, lora_target_modules=())
    refuse("does not work with env_type='fsdp'", env_type="fsdp")
    refuse("does not work with native=False", native=False)
    refuse("does not work with torch_compile", torch_compile=True)
    refuse("which is packed and cannot be trained", lora_modules_to_save=("c_fc",),
           lora_target_modules=("c_attn",))  # fmt: skip
    trainer = t2t.Trainer(
        model_name_or_path=checkpoints("gpt2"),
        train_file=str(files / "pairs.json"),
        base_precision="nf4",
        max_source_length=16,
        max_target_length=16,
    )
    with pytest.raises(ValueError, match="that base_precision has packed"):
        trainer.freeze(decoder=False)
    with pytest.raises(ValueError, match="a soft prompt is saved with the whole model"):
        trainer.convert_to_prompt_tuning(["<p>"])
    unpack_parameters(trainer.model)
    trainer.freeze(decoder=False)
