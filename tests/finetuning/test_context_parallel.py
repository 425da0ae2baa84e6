"""Every task learns alike when its sequences are split over context-parallel ranks.

Oracle: one process, of which other tests say that it is transformers' curve.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from every_case import every_day
from tiny_models import PRETRAINED, save_model, text

from shardzoo import finetuning as t2t

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
SHORT = {
    "max_source_length": 20, "max_target_length": 12, "lr": 5e-3, "train_steps": 4, "log_interval": 1,
    "micro_batch_size": 4, "dropout_rate": 0.1, "generation_num_beams": 2,
}  # fmt: skip
LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.2}
KEYS = {"context_exchange": "keys"}
SPLIT = {"env_type": "deepspeed+mpu", "model_parallel_size": 2, "sequence_parallel": True}
# Kind of model, file, arguments of both runs, and of the one with several ranks.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "t5 lora": ("t5", "pairs", {**LORA, "predict_with_generate": True, "metric": "chrf"}, {}),
    "gpt2 packed": ("gpt2", "chats", {"packing": True, "block_size": 48, "label_smoothing": 0.1}, KEYS),
    "bert classes": ("bert", "classes", {"class_weights": "balanced"},
                     SPLIT),
    "gpt2 preference": ("gpt2", "answers", {"task": "preference", "preference_loss": "dpo", **LORA}, {}),
}  # fmt: skip
MORE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama lora": ("llama", "pairs", {**LORA, "target_modules": "all-linear"},
                   {**SPLIT, **KEYS}),
    "t5 zero": ("t5", "pairs", {"label_smoothing": 0.1}, {"env_type": "deepspeed+mpu", "zero_stage": 2}),
    "t5 fsdp": ("t5", "pairs", LORA, {"env_type": "fsdp"}),
    "t5 teacher": ("t5", "pairs", {"teacher_model": "gpt2-teacher", "teacher_weight": 0.7}, {}),
    "gpt2 teacher": ("gpt2", "pairs", {"teacher_model": "gpt2-teacher", "teacher_weight": 0.7}, {}),
    "bert words": ("bert", "words", {"metric": "accuracy"}, KEYS),
    "bert answers": ("bert", "questions", {"doc_stride": 5}, {}),
    "gpt2 classes": ("gpt2", "classes", {"task": "text-classification", **LORA}, {}),
    "t5 classes": ("t5", "classes", {"task": "text-classification"}, {}),
    "bert embedding": ("bert", "columns", {"task": "embedding"}, {}),
    "bert cached embedding": ("bert", "columns", {"task": "embedding", "embedding_mini_batch": 2},
                              {"env_type": "deepspeed+mpu"}),
    "bert ranking": ("bert", "rankings", {"task": "reranking"}, {}),
    "gpt2 reward": ("gpt2", "answers", {"task": "reward"}, KEYS),
    "gpt2 orpo": ("gpt2", "answers", {"task": "preference", "preference_loss": "orpo"}, KEYS),
    "bert sources": ("bert", "pairs", {"task": "text2text-generation", "predict_with_generate": True}, {}),
}  # fmt: skip
RECORDS = {
    "pairs": lambda n: {"s": text(n, 2 + n % 4), "t": text(n, 1 + n % 3)},
    "chats": lambda n: {
        "messages": [
            {"role": "user", "content": text(n, 2 + n % 3)},
            {"role": "assistant", "content": text(n, 2)},
        ]
    },
    "classes": lambda n: {"s": text(n, 2 + n % 4), "t": int(n % 3 == 0)},
    "words": lambda n: {"s": text(n, 4).split(), "t": [n % 2, 1, 0, 1]},
    "questions": lambda n: {
        "question": f"where is {text(n, 6).split()[n % 6]}",
        "context": text(n, 6),
        "answers": {
            "text": [text(n, 6).split()[n % 6]],
            "answer_start": [len(" ".join(text(n, 6).split()[: n % 6])) + (n % 6 > 0)],
        },
    },
    "columns": lambda n: {"anchor": text(n, 3), "positive": text(n + 1, 2 + n % 3)},
    "rankings": lambda n: {"query": text(n, 3), "docs": [text(n + 1, 2), text(n, 4)], "labels": [1, 0]},
    "answers": lambda n: {"prompt": text(n, 3), "chosen": text(n + 1, 2), "rejected": text(n + 2, 3)},
}  # fmt: skip


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context")
    kinds = {"t5": "t5", "gpt2": "gpt2", "bert": "bert"}
    for kind, tokenizer in kinds.items():
        save_model(folder / kind, PRETRAINED[kind], tokenizer)
        (folder / kind / "chat_template.jinja").write_text(TEMPLATE)
    for name, make in RECORDS.items():
        lines = [json.dumps(make(n)) + "\n" for n in range(16)]
        (folder / f"{name}.json").write_text("".join(lines))
    return folder


def curve(folder: Any) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


def tune(mesh: Any, setting: Any, output: Any, kind: str, file: str, **arguments: Any) -> Any:
    """The validation values, and a text that the model generates."""
    if "teacher_model" in arguments:
        teacher = setting / arguments["teacher_model"]
        arguments["teacher_model"] = str(teacher)
    path = str(setting / f"{file}.json")
    trainer = t2t.Trainer(
        model_name_or_path=str(setting / kind),
        train_file=path,
        validation_file=path,
        output_dir=str(output),
        mesh=mesh,
        **{**SHORT, **arguments},
    )
    return trainer.train()


@pytest.mark.parametrize("case", every_day(CASES, more=MORE))
def test_the_curve_is_that_of_one_process(setting, tmp_path, run_mesh, case):
    kind, file, arguments, layout = {**CASES, **MORE}[case]
    if kind == "llama" and not (setting / "llama").exists():
        save_model(setting / "llama", "LlamaForCausalLM", "gpt2")
    if "teacher_model" in arguments:
        arguments = {**arguments, "teacher_model": f"{kind}-teacher"}
        save_model(setting / f"{kind}-teacher", PRETRAINED[kind], kind, seed=5)
    work = partial(tune, setting=setting, kind=kind, file=file, **arguments)
    values = work(None, output=tmp_path / "one")
    layout = {"env_type": "pytorchDDP", "context_parallel_size": 2, **layout}
    tensor = layout.get("model_parallel_size", 1)
    results = run_mesh(tensor, partial(work, output=tmp_path / "split", **layout), context=2)
    expected = curve(tmp_path / "one")
    assert len(expected) == 4
    assert curve(tmp_path / "split") == pytest.approx(expected, rel=2e-5)
    # The divergence from the reference is a small difference of sums in fp32.
    assert results[0] == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_models_of_transformers_are_refused(setting):
    with pytest.raises(ValueError, match="only the zoo's models support"):
        t2t.Trainer(
            model_name_or_path=str(setting / "t5"),
            train_file=str(setting / "pairs.json"),
            native=False,
            context_parallel_size=2,
            env_type="pytorchDDP",
        )
