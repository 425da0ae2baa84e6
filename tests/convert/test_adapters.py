"""peft's LoRA weights, merged into a conversion or kept beside it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from every_case import by_turns, every_day
from parity import randomize
from safetensors.torch import load_file, save_file
from tiny_models import hf_model

from shardzoo.cli.convert import main
from shardzoo.convert import workers
from shardzoo.convert.operations import Options, merge, split
from shardzoo.models import from_pretrained
from shardzoo.models.lora import merge_lora

UNTIED = {"tie_word_embeddings": False}
# (architecture, peft's settings, changes of the configuration): uneven heads and widths, stacked or transposed modules
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"target_modules": ["c_attn", "c_proj", "c_fc"]},
        {"n_embd": 40, "n_head": 5},
    ),
    "llama": (
        "LlamaForCausalLM",
        {"target_modules": "all-linear"},
        {"intermediate_size": 43, **UNTIED},
    ),
    "saved": (
        "LlamaForCausalLM",
        {
            "target_modules": ["q_proj", "v_proj"],
            "modules_to_save": ["lm_head", "embed_tokens"],
            "use_rslora": True,
        },
        UNTIED,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"target_modules": ["q", "v", "wo"], "rank_pattern": {"q": 5}},
        {},
    ),
    "bert": ("BertForMaskedLM", {"target_modules": ["query", "dense"]}, {}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(case)`: base/, adapter/ and peft's merged/."""
    folders: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in folders:
            architecture, settings, changes = CASES[case]
            folders[case] = folder = tmp_path_factory.mktemp(case)
            base = hf_model(architecture, 0.0, **changes)
            randomize(base, 1)
            base.save_pretrained(folder / "base")
            with torch.random.fork_rng():
                torch.manual_seed(2)
                model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=7, **settings))
                for name, parameter in model.named_parameters():
                    if "lora_" in name or "modules_to_save" in name:
                        torch.nn.init.normal_(parameter, std=0.3)
            model.save_pretrained(folder / "adapter")
            model.merge_and_unload().save_pretrained(folder / "merged")
        return folders[case]

    return make


def assert_close(folder: Path, wanted: Path) -> None:
    mine, theirs = load_file(folder / "model.safetensors"), load_file(wanted / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            mine[name], tensor, atol=3e-6, rtol=3e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", by_turns(CASES, 2))
def test_the_merged_weights_are_pefts_however_they_are_split(
    case, made, tmp_path, hashes, monkeypatch
):
    folder = made(case)
    options = Options(adapter=folder / "adapter")
    merge(folder / "base", tmp_path / "direct", options)
    assert_close(tmp_path / "direct", folder / "merged")
    split(folder / "base", tmp_path / "three", 3, options)
    merge(tmp_path / "three", tmp_path / "through-three", Options())
    split(folder / "base", tmp_path / "two", 2)
    monkeypatch.setattr(workers, "SMALLEST_BLOCK", 100)  # bytes: less than a row
    monkeypatch.setattr(workers, "MEMORY", 1)
    split(tmp_path / "two", tmp_path / "four", 4 if case != "saved" else 3, options)
    merge(tmp_path / "four", tmp_path / "through-four", Options())
    assert (
        hashes(tmp_path / "direct")
        == hashes(tmp_path / "through-three")
        == hashes(tmp_path / "through-four")
    )


def test_every_bit_is_that_of_the_sum_in_fp64(made, tmp_path):
    """Of each element: the terms in the order of the rank, then the weight, rounded once to the stored type."""
    folder = made("gpt2")
    merge(folder / "base", tmp_path / "merged", Options(adapter=folder / "adapter", dtype="BF16"))
    factors = load_file(folder / "adapter" / "adapter_model.safetensors")
    weights, merged = (
        load_file(folder / "base" / "model.safetensors"),
        load_file(tmp_path / "merged" / "model.safetensors"),
    )
    for name in ("transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"):
        a, b = (
            factors[f"base_model.model.{name}.lora_{factor}.weight"].tolist() for factor in "AB"
        )
        for row, column in ((0, 0), (7, 31), (39, 39)):  # of the transposed matrix [in, out]
            total = 0.0
            for k in range(3):
                total += 7 / 3 * b[column][k] * a[k][row]
            exact = weights[f"{name}.weight"][row, column].item() + total
            assert merged[f"{name}.weight"][row, column] == torch.tensor(
                exact, dtype=torch.float64
            ).to(torch.bfloat16)


@pytest.mark.parametrize("style", ["megatron", "legacy"])
def test_other_formats_and_processes(style, made, tmp_path, hashes, quick_processes):
    folder = made("gpt2")
    options = Options(adapter=folder / "adapter")
    merge(folder / "base", tmp_path / "direct", options)
    split(
        folder / "base", tmp_path / "there", 1, options, style=style
    )  # all heads on one rank: their rows alternate
    merge(tmp_path / "there", tmp_path / "back", Options(config_file=folder / "base"))
    assert_close(tmp_path / "back", tmp_path / "direct")
    merge(folder / "base", tmp_path / "dcp", options, style="dcp")
    merge(tmp_path / "dcp", tmp_path / "from-dcp", Options())
    merge(folder / "base", tmp_path / "processes", Options(adapter=folder / "adapter", workers=2))
    assert (
        hashes(tmp_path / "from-dcp")
        == hashes(tmp_path / "direct")
        == hashes(tmp_path / "processes")
    )


def test_the_whole_model_computes_what_was_trained(made, tmp_path, run_mesh):
    folder = made("llama")
    assert (
        main(
            [
                "split",
                str(folder / "base"),
                str(tmp_path / "merged"),
                "--adapter",
                str(folder / "adapter"),
            ]
        )
        == 0
    )
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    model: Any = from_pretrained(folder / "base", adapter=folder / "adapter")
    wanted = model(ids).logits
    merge_lora(model)
    for result in (model(ids).logits, *run_mesh(2, logits_of, tmp_path / "merged", ids)):
        torch.testing.assert_close(result, wanted, atol=1e-4, rtol=1e-4)


def logits_of(mesh: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model: Any = from_pretrained(folder, mesh)
    return model.gather_logits(model(ids).logits).detach()


def test_an_adapter_is_kept_beside_the_weights(made, tmp_path, file_tree):
    folder = made("llama")
    command = [
        "split",
        str(folder / "base"),
        str(tmp_path / "two"),
        "--adapter",
        str(folder / "adapter"),
        "--keep-adapter",
    ]
    assert main(command) == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "two" / "adapter" / name).read_bytes() == (
            folder / "adapter" / name
        ).read_bytes()
    ids = torch.arange(9)[None]
    model: Any = from_pretrained(tmp_path / "two", adapter=tmp_path / "two" / "adapter")
    wanted: Any = from_pretrained(folder / "base", adapter=folder / "adapter")
    assert torch.equal(model(ids).logits, wanted(ids).logits)
    split(folder / "base", tmp_path / "plain", 2)
    shutil.rmtree(tmp_path / "two" / "adapter")
    assert file_tree(tmp_path / "two") == file_tree(tmp_path / "plain")


def test_an_interrupted_merge_is_resumed_with_the_same_adapter_alone(made, tmp_path, hashes):
    folder = made("llama")

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    with pytest.raises(Stop):
        merge(
            folder / "base", tmp_path / "merged", Options(adapter=folder / "adapter", jobs=1), stop
        )
    shutil.copytree(folder / "adapter", tmp_path / "other")
    factors = load_file(tmp_path / "other" / "adapter_model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in factors.items()},
        tmp_path / "other" / "adapter_model.safetensors",
    )
    for adapter in (tmp_path / "other", None):
        with pytest.raises(ValueError, match="started with another source or other arguments"):
            merge(folder / "base", tmp_path / "merged", Options(adapter=adapter, resume=True))
    outcome = merge(
        folder / "base", tmp_path / "merged", Options(adapter=folder / "adapter", resume=True)
    )
    assert outcome.kept > 0
    merge(folder / "base", tmp_path / "fresh", Options(adapter=folder / "adapter"))
    assert hashes(tmp_path / "merged") == hashes(tmp_path / "fresh")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


ENDLESS = "([a-z_.0-9]+)+!"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MISTAKES: dict[str, tuple[Any, str]] = {
    "no configuration": (lambda f: (f / "adapter_config.json").unlink(), "it has no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "another kind": (lambda f: change_config(f, peft_type="IA3"), "an adapter of type 'IA3', not LORA"),
    "DoRA": (lambda f: change_config(f, use_dora=True), "use_dora=True"),
    "another rank": (lambda f: change_config(f, r=4), f"tensor {FIRST}"),
    "a negative factor": (lambda f: change_config(f, lora_alpha=-1), "lora_alpha must be a finite"),
    "a missing factor": (lambda f: change_weights(f, lambda t: t.pop(FIRST)), f"lacks {FIRST}"),
    "an unknown factor": (lambda f: change_weights(f, lambda t: t.update(more=torch.ones(1))), "has more, which"),
    "integers": (lambda f: change_weights(f, lambda t: t.update({FIRST: t[FIRST].int()})), "has type int32"),
    "an endless target": (lambda f: change_config(f, target_modules=ENDLESS), "takes too long to match"),
    "an endless exclusion": (lambda f: change_config(f, exclude_modules=ENDLESS), "takes too long to match"),
    "an endless rank pattern": (lambda f: change_config(f, rank_pattern={ENDLESS: 2}), "takes too long to match"),
    "an endless module": (lambda f: change_config(f, modules_to_save=[ENDLESS]), "takes too long to match"),
    "flags in the middle": (lambda f: change_config(f, rank_pattern={"(?i)q": 2}), "is no regular expression"),
    "half a group": (lambda f: change_config(f, modules_to_save=["("]), "is no regular expression"),
    "half a layer": (lambda f: change_config(f, layers_to_transform=[0], layers_pattern="("), "no regular expression"),
    "a factor beyond all floats": (lambda f: change_config(f, lora_alpha=10**400), "lora_alpha must be a finite"),
    "not a number": (lambda f: change_weights(f, lambda t: t[FIRST].fill_(math.nan)), "which does not fit float32"),
}  # fmt: skip
# Each of these takes the seconds that a match may take; one is met every day.
ENDLESS_MISTAKES = ["an endless exclusion", "an endless rank pattern", "an endless module"]
QUICK_MISTAKES = [name for name in MISTAKES if name not in ENDLESS_MISTAKES]


@pytest.mark.parametrize("name", every_day(QUICK_MISTAKES, more=ENDLESS_MISTAKES))
def test_what_is_refused_leaves_nothing(name, made, tmp_path, capsys):
    folder = made("llama")
    change, message = MISTAKES[name]
    shutil.copytree(folder / "adapter", tmp_path / "adapter")
    change(tmp_path / "adapter")
    arguments = [
        "merge",
        str(folder / "base"),
        str(tmp_path / "merged"),
        "--adapter",
        str(tmp_path / "adapter"),
    ]
    assert main(arguments) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_an_adapter_of_another_model(made, tmp_path, capsys):
    assert (
        main(
            [
                "merge",
                str(made("bert") / "base"),
                str(tmp_path / "x"),
                "--adapter",
                str(made("gpt2") / "adapter"),
            ]
        )
        == 2
    )
    assert "match no linear layer of the model" in " ".join(capsys.readouterr().err.split())
    assert main(["merge", str(made("bert") / "base"), str(tmp_path / "x"), "--keep-adapter"]) == 2
    assert "--keep-adapter needs an adapter" in capsys.readouterr().err
