"""The table of docs/convert.md that says what converts into what, made from conversions that are run here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from megatron_files import Layout, gpt_modules, write_decoder_layers, write_layers
from safetensors.torch import load_file

from shardzoo.cli.convert import main

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
TARGETS = {
    "Hugging Face": ("merge",),
    "shardzoo": ("split",),
    "mp_rank files": ("split", "--to", "legacy"),
    "Megatron-LM": ("split", "--to", "megatron"),
    "DCP": ("merge", "--to", "dcp"),
    "torch_dist": ("merge", "--to", "torch_dist"),
}
# Formats that are only read, or are written of training checkpoints alone.
SOURCES = (*TARGETS, "universal", "layer files")
FAMILIES = {
    "gpt2": "GPT-2",
    "bert-pretraining": "BERT",
    "megatron-bert": "Megatron-BERT",
    "roberta": "RoBERTa",
    "t5": "T5",
    "t5-v1.1": "T5 v1.1",
    "mt5": "mT5",
    "glm": "GLM",
    "llama": "Llama",
}


def write_universal(origin: Path, folder: Path) -> Path:
    """Writes the weights as DeepSpeed's `ds_to_universal` does."""
    place = folder / "global_step1"
    for name, tensor in load_file(origin / "model.safetensors").items():
        (place / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor}, place / "zero" / name / "fp32.pt")
    torch.save({"global_steps": 1}, place / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text("global_step1")
    shutil.copy(origin / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def table(zoo, tmp_path_factory) -> str:
    """For each format and each other one: the families that are converted and come back with the same bytes."""
    from stored_models import tensor_hashes

    place = tmp_path_factory.mktemp("formats")
    found: dict[tuple[str, str], list[str]] = {}
    for variant, name in FAMILIES.items():
        origin = zoo.make(place / variant / "origin", variant, vocabulary=104)
        wanted = tensor_hashes(origin)
        sources = {
            "Hugging Face": origin,
            "universal": write_universal(origin, place / variant / "universal"),
        }
        for target, command in TARGETS.items():
            made = place / variant / target
            if (
                target != "Hugging Face"
                and main([command[0], str(origin), str(made), *command[1:]]) == 0
            ):
                sources[target] = made
        if variant == "gpt2":
            modules = gpt_modules(load_file(origin / "model.safetensors"), 4, 2)
            sources["layer files"] = write_layers(
                place / variant / "layers", modules, Layout(2), "deepspeed"
            )
        if variant == "llama":
            sources["layer files"] = write_decoder_layers(
                origin, place / variant / "layers", 1, "neox"
            )
        if "layer files" in sources:
            shutil.copy(origin / "config.json", sources["layer files"])
        for source, folder in sources.items():
            for target, command in TARGETS.items():
                made, back = place / variant / "made", place / variant / "back"
                if main([command[0], str(folder), str(made), *command[1:]]) == 0:
                    assert main(["merge", str(made), str(back)]) == 0
                    assert tensor_hashes(back) == wanted, (variant, source, target)
                    found.setdefault((source, target), []).append(name)
                    shutil.rmtree(back)
                    shutil.rmtree(made)
    lines = [f"| from, to | {' | '.join(TARGETS)} |", "|---" * (len(TARGETS) + 1) + "|"]
    for source in SOURCES:
        cells = [found.get((source, target), []) for target in TARGETS]
        shown = (
            "all families" if len(cell) == len(FAMILIES) else ", ".join(cell) or "–"
            for cell in cells
        )
        lines.append(f"| {source} | {' | '.join(shown)} |")
    return "\n".join(lines)


@pytest.mark.before_release
def test_the_table_of_the_page_is_what_happens(table):
    assert table in PAGE.read_text(), f"docs/convert.md needs this table:\n{table}"
