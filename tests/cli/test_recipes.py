"""Every file of recipes/ is a run that could start: its names, its model, its layout and its objective fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from every_case import by_turns

import shardzoo.cli.pretrain
from shardzoo.cli.models import measure
from shardzoo.cli.pretrain import RECIPES, read_arguments
from shardzoo.data.indexed.writer import IndexedDatasetWriter
from shardzoo.models import family, find_config
from shardzoo.pretraining.inputs import check_sources, choose_inputs
from shardzoo.pretraining.tables import estimated_job
from shardzoo.trainer.estimate import estimate
from shardzoo.trainer.launch.rank_info import RankInfo

FILES = sorted(RECIPES.glob("*.yaml"))
NAMES = [file.stem for file in FILES]


def read(file: Path):
    return read_arguments(["--config", str(file)], quiet=True)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_recipe_is_found_by_the_name_of_its_model(file):
    by_config = read(file)
    if (
        file.stem == f"{by_config.model}-{by_config.sequence_length}"
    ):  # of another length, by --config alone
        return
    by_model = read_arguments(["--model", file.stem], quiet=True)
    assert by_model.config == file
    assert by_model.run_arguments() == by_config.run_arguments()
    assert by_config.model == file.stem


def test_weights_to_start_from_replace_the_model_of_a_file():
    file = str(RECIPES / "mt5-libai.yaml")
    started = read_arguments(["--config", file, "--init-from", "folder"], quiet=True)
    assert started.model is None
    assert started.model_name == "folder"
    assert started.objective == read(RECIPES / "mt5-libai.yaml").objective
    both = ["--config", file, "--init-from", "folder", "--model", "mt5-base"]
    assert read_arguments(both, quiet=True).model == "mt5-base"


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_recipe_says_what_it_is(file):
    comment = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert len(comment) >= 2
    if not file.stem.endswith("-quickstart"):
        assert any("Published" in line or "published" in line for line in comment)
        assert any(line.startswith("# Hardware: ") for line in comment)


@pytest.mark.parametrize("file", by_turns(FILES, 2), ids=by_turns(NAMES, 2))
def test_a_recipe_can_start_on_its_hardware(file):
    """Its model can be split so, its objective fits the model, and a rank's memory is enough."""
    arguments = read(file)
    size = arguments.model_parallel_size
    assert size <= measure(find_config(arguments.model), 1).largest
    hardware = re.search(r"# Hardware: (\d+) GPUs? of (\d+) GB", file.read_text())
    ranks, memory = (int(hardware[1]), int(hardware[2]) * 10**9) if hardware else (2, 4 << 30)
    inputs = choose_inputs(
        replace(arguments, model_parallel_size=size if hardware else 2),
        RankInfo(0, ranks, 0, ranks),
    )
    of_a_replica = size * arguments.context_parallel_size
    config, job = estimated_job(arguments, inputs, ranks // of_a_replica)
    assert estimate(config, replace(job, device="cuda" if hardware else "cpu")).peak.total < memory
    assert (arguments.warmup_steps or 0) < arguments.train_steps
    assert set(yaml.safe_load(file.read_text()).get("objective", {})) <= {
        "name",
        *vars(arguments.objective),
    }


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_the_objective_of_a_recipe_fits_its_model(file):
    arguments = read(file)
    assert arguments.objective.format in family(find_config(arguments.model).model_type).pretrains


def test_a_quickstart_is_named_after_its_family():
    quickstarts = [name for name in NAMES if name.endswith("-quickstart")]
    assert len(quickstarts) > 6
    families = [find_config(name).model_type for name in quickstarts]
    assert [name.replace("_", "-") for name in quickstarts] == [
        f"{family.replace('_', '-')}-quickstart" for family in families
    ]


# Figures of the papers' tables, as far as the recipe's own numbers are theirs.
PUBLISHED = {
    "bert-base-uncased": {"sequence_length": 512, "global_batch_size": 256, "train_steps": 1_000_000, "lr": 1e-4},
    "bert-large-uncased": {"warmup_steps": 10_000, "weight_decay": 0.01, "lr_schedule": "linear", "beta2": 0.999},
    "roberta-base": {"global_batch_size": 8192, "train_steps": 500_000, "lr": 6e-4, "warmup_steps": 24_000},
    "roberta-large": {"lr": 4e-4, "warmup_steps": 30_000, "beta2": 0.98, "adam_eps": 1e-6, "clip_grad": 0.0},
    "bart-large": {"global_batch_size": 8000, "train_steps": 500_000},
    "glm-base": {"global_batch_size": 1024, "train_steps": 120_000, "lr": 4e-4, "warmup_steps": 6_000},
    "glm-10b": {"lr": 1e-4, "weight_decay": 0.1, "beta2": 0.95, "train_steps": 175_000, "warmup_steps": 7_000},
    "t5-v1_1-xxl": {"sequence_length": 512, "target_length": 114, "global_batch_size": 2048},
    "mt5-xxl": {"sequence_length": 1024, "target_length": 229, "global_batch_size": 1024},
    "olmoe-1b-7b-0924": {
        "sequence_length": 4096, "global_batch_size": 1024, "warmup_steps": 2500, "lr": 4e-4, "weight_decay": 0.1,
        "beta1": 0.9, "beta2": 0.95, "adam_eps": 1e-8, "clip_grad": 1.0, "router_aux_loss_coef": 0.01,
    },
    "switch-base-8": {
        "sequence_length": 512, "target_length": 114, "global_batch_size": 2048, "train_steps": 550_000,
        "router_aux_loss_coef": 0.01,
    },
    "deepseek-v3": {
        "sequence_length": 4096, "global_batch_size": 15_360, "warmup_steps": 2000, "lr": 2.2e-4, "weight_decay": 0.1,
        "beta1": 0.9, "beta2": 0.95, "clip_grad": 1.0, "router_bias_update_rate": 0.001,
    },
    "glm-4.5-air": {"lr": 2.5e-4, "weight_decay": 0.1, "sequence_length": 4096, "router_bias_update_rate": 0.001},
    "nllb-moe-54b": {"lr": 2e-3, "warmup_steps": 8000, "train_steps": 300_000, "router_aux_loss_coef": 0.01,
                     "beta2": 0.98, "adam_eps": 1e-6, "clip_grad": 0.0},
    "mt5-libai": {
        "sequence_length": 512, "target_length": 128, "micro_batch_size": 16, "lr": 1e-4, "weight_decay": 0.01,
        "beta1": 0.9, "beta2": 0.999, "clip_grad": 1.0, "tf32": True, "optimizer": "adamw",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name):
    arguments = read(RECIPES / f"{name}.yaml")
    assert {key: getattr(arguments, key) for key in PUBLISHED[name]} == PUBLISHED[name]


def test_targets_are_as_long_as_span_corruption_makes_them():
    """Three-token spans over 15 % of a text that fills the input: T5's code gives 114 for 512, 229 for 1024, LongT5's
    910 for 4096."""
    lengths = {512: 114, 1024: 229, 4096: 910, 32768: 7282}
    for name in (
        "t5-v1_1-base",
        "t5-v1_1-base-4096",
        "t5-v1_1-base-32768",
        "t5-v1_1-xxl",
        "switch-base-8",
        "mt5-base",
        "mt5-xxl",
    ):
        arguments = read(RECIPES / f"{name}.yaml")
        assert arguments.target_length == lengths[arguments.sequence_length]


def test_libai_model_is_the_benchmark_of_its_repository():
    config = find_config("mt5-libai")
    expected = {
        "vocab_size": 21248, "d_model": 768, "num_layers": 12, "num_heads": 12, "d_kv": 64, "d_ff": 2048,
        "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32, "tie_word_embeddings": False,
        "dropout_rate": 0.0,
    }  # fmt: skip
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.num_decoder_layers in (12, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train_stepz: 5", "sets train_stepz, which is not an argument; did you mean train_steps"),
        ("model: t6-quickstart", "'t6-quickstart' is neither a preset nor a folder"),
        ("objective: t6", "unknown objective 't6'"),
        (
            "objective: {name: t5, mask: 0.1}",
            "objective 't5' has no setting 'mask'; its settings are mask_probability",
        ),
        ("lr: fast", "lr must be a finite number, not 'fast'"),
    ],
)
def test_a_wrong_name_in_a_recipe_is_told(line, message, tmp_path, monkeypatch):
    (tmp_path / "gpt2.yaml").write_text(f"{line}\n")
    monkeypatch.setattr(shardzoo.cli.pretrain, "RECIPES", tmp_path)
    with pytest.raises(ValueError, match=message):
        read_arguments(
            ["--model", "gpt2"]
            if "model" not in line
            else ["--config", str(tmp_path / "gpt2.yaml")],
            quiet=True,
        )


def test_a_run_says_whose_defaults_it_has(capsys):
    with pytest.raises(SystemExit) as end:
        shardzoo.cli.pretrain.main(["--model", "bert-large-uncased", "--dry-run"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.count("defaults of recipes/bert-large-uncased.yaml") == 1
    assert "bert-nsp (mask_probability=0.15" in shown


def test_a_dry_run_looks_at_the_corpus(tmp_path, capsys):
    line = ["--model", "gpt2", "--dry-run", "--data"]
    assert shardzoo.cli.pretrain.main([*line, "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl does not exist" in capsys.readouterr().err
    prefix = tmp_path / "pair"
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_documents(np.arange(9, dtype=np.uint16), np.array([9]))
    Path(f"{prefix}.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"pair\.bin has 4 bytes"):
        check_sources(read_arguments([*line, str(prefix)], quiet=True))


def test_the_recipes_are_listed_and_printed(capsys):
    from shardzoo.cli.main import main

    assert main(["recipes"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert {*NAMES, "dpo"} <= listed.keys()
    assert "pretrain  GPT-2 small, 124 million parameters" in listed["gpt2"]
    assert "finetune  zephyr-7b-dpo-qlora" in listed["dpo"]
    assert "pretrain  DistilBERT" in listed["distillation"]
    assert main(["recipes", "gpt2"]) == 0
    assert capsys.readouterr().out.endswith((RECIPES / "gpt2.yaml").read_text())
    assert main(["recipes", "gpt2-x1"]) == 2
    assert "did you mean gpt2-xl?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mixtral-8x7b-v0.1", "olmoe-1b-7b-0924", "switch-base-8"])
def test_a_mixture_is_trained_with_its_balance_loss(name):
    arguments = read(RECIPES / f"{name}.yaml")
    config = choose_inputs(arguments, RankInfo(0, 8, 0, 8)).config
    assert config.output_router_logits
    assert config.router_aux_loss_coef == 0.01
    # A preset is what the published config.json says.
    assert not find_config(name).output_router_logits


@pytest.mark.parametrize("name", ["gpt2", "glm-4.5-air"])
def test_a_model_without_a_balance_loss_is_refused(name):
    arguments = read_arguments(["--model", name, "--router-aux-loss-coef", "0.01"], quiet=True)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.01 needs a mixture"):
        choose_inputs(arguments, RankInfo(0, 1, 0, 1))
