"""Mixtures learn alike when their experts are dealt over ranks, and generate and evaluate so.

Oracle: one process, of which other tests say that it is transformers' curve.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from every_case import by_turns
from tiny_models import save_model, text

from shardzoo import finetuning as t2t

SHORT = {
    "max_source_length": 20, "max_target_length": 12, "lr": 5e-3, "train_steps": 4, "log_interval": 1,
    "micro_batch_size": 4, "dropout_rate": 0.1, "generation_num_beams": 2, "eval_batch_size": 1,
}  # fmt: skip
RECORDS = {
    "pairs": lambda n: {"s": text(n, 2 + n % 4), "t": text(n, 1 + n % 3)},
    "columns": lambda n: {"anchor": text(n, 3), "positive": text(n + 1, 2 + n % 3)},
}
WRITTEN = {"predict_with_generate": True, "metric": "chrf"}
# Tensor- and expert-parallel ranks, processes, file, arguments of both runs and of the one with several ranks.
CASES: dict[str, tuple[int, int, int, str, dict[str, Any], dict[str, Any]]] = {
    "EP 2 x DP 2": (1, 2, 4, "pairs", WRITTEN, {"env_type": "deepspeed+mpu", "zero_stage": 1}),
    "TP 2 x EP 2": (2, 2, 4, "pairs", {"label_smoothing": 0.1, **WRITTEN}, {"recompute": "full"}),
    "FSDP": (1, 2, 4, "pairs", WRITTEN, {"env_type": "fsdp"}),
    "embedding": (1, 2, 4, "columns", {"task": "embedding"}, {"env_type": "pytorchDDP"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    changes = {"num_local_experts": 5, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    save_model(folder / "mixtral", "MixtralForCausalLM", "gpt2", **changes)
    for name, make in RECORDS.items():
        lines = [json.dumps(make(n)) + "\n" for n in range(16)]
        (folder / f"{name}.json").write_text("".join(lines))
    return folder


def tune(mesh: Any, setting: Any, output: Any, file: str, **arguments: Any) -> Any:
    """The validation values, a text that the trained model generates, and the folder with it."""
    path = str(setting / f"{file}.json")
    trainer = t2t.Trainer(
        model_name_or_path=str(setting / "mixtral"),
        train_file=path,
        validation_file=path,
        output_dir=str(output),
        mesh=mesh,
        **{**SHORT, **arguments},
    )
    values = trainer.train()
    written = "" if "task" in arguments else trainer.generate_single(text(3, 4))
    return values, written, str(trainer.save_model())


def tune_dealt(tensor: int, expert: int, **arguments: Any) -> Any:
    from shardzoo.mpu import ParallelMesh

    mesh = ParallelMesh(tensor, expert_parallel_size=expert)
    sizes = {"model_parallel_size": tensor, "expert_parallel_size": expert}
    samples = 4 // mesh.size("data", "expert")
    return tune(mesh, micro_batch_size=samples, **sizes, **arguments)


def curve(folder: Any) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


@pytest.mark.parametrize("case", by_turns(CASES, 4))
def test_the_curve_is_that_of_one_process(setting, tmp_path, run_ranks, case):
    from safetensors.torch import load_file

    tensor, expert, processes, file, arguments, layout = CASES[case]
    shared = {"setting": setting, "file": file, **arguments}
    values, written, folder = tune(None, output=tmp_path / "one", **shared)
    work = partial(tune_dealt, output=tmp_path / "dealt", **shared, **layout)
    results = run_ranks(processes, work, tensor, expert)
    expected = curve(tmp_path / "one")
    assert len(expected) == 4
    assert curve(tmp_path / "dealt") == pytest.approx(expected, rel=2e-5)
    for own, text_of_rank, _ in results:
        assert own == pytest.approx(values, rel=1e-4, abs=1e-6)
        assert text_of_rank == written
    trained = load_file(f"{folder}/model.safetensors")
    dealt = load_file(f"{results[0][2]}/model.safetensors")
    assert trained.keys() == dealt.keys()
    for name, value in trained.items():
        torch.testing.assert_close(dealt[name], value, rtol=1e-3, atol=1e-4)


def test_models_of_transformers_are_refused(setting):
    with pytest.raises(ValueError, match="only the zoo's models support"):
        t2t.Trainer(
            model_name_or_path=str(setting / "mixtral"),
            train_file=str(setting / "pairs.json"),
            native=False,
            expert_parallel_size=2,
            env_type="pytorchDDP",
        )
