"""What code written for transformers does with a model, it does with a split one: both are asked the same."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import every_day
from tiny_models import hf_model

import shardzoo.models as zoo

NAMES = ("GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForSequenceClassification")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [3, 11, 12, 4, 2, 2]])
MASK = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])


def load(mesh: Any, folder: Path, name: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(zoo, name).from_pretrained(folder, mesh=mesh, **options)


def visit_loading(mesh: Any, folder: Path, name: str, found: dict[str, Any]) -> None:
    """Passes every keyword of `from_pretrained` that has a meaning."""
    model = load(
        mesh, folder, name, trust_remote_code=True, revision="main", cache_dir=None, token=None,
        torch_dtype="auto", device_map="auto", ignore_mismatched_sizes=True, low_cpu_mem_usage=True,
        attn_implementation="eager", use_safetensors=True, config=zoo.AutoConfig.from_pretrained(folder),
    )  # fmt: skip
    found["dtype"] = str(model.dtype)
    found["half"] = str(load(mesh, folder, name, dtype="bfloat16", device_map="cpu").dtype)
    found["attention"] = model.config._attn_implementation
    for option, value in {
        "load_in_4bit": True,
        "gguf_file": "model.gguf",
        "device_map": "balanced",
    }.items():
        with pytest.raises(ValueError, match=option) as caught:
            load(mesh, folder, name, **{option: value})
        found[f"refused {option}"] = str(caught.value)
    again = getattr(zoo, name).from_config(model.config, mesh=mesh)
    found["built"] = again.num_parameters()


def visit_configuration(model: Any, found: dict[str, Any]) -> None:
    config = model.config
    found["common"] = (config.hidden_size, config.num_hidden_layers, config.is_encoder_decoder)
    found["config"] = config.to_dict()
    found["text"] = config.to_json_string()
    config.pad_token_id = 3
    config.a_note = "kept"
    found["changed"] = (config.pad_token_id, config.a_note, config.return_dict, config.use_cache)
    with pytest.raises(ValueError, match="before the model is built") as caught:
        config.hidden_size = 64
    found["refused size"] = str(caught.value)
    config.pad_token_id = 0


def visit_methods(model: Any, folder: Path, found: dict[str, Any]) -> None:
    found["says"] = (model.device, model.can_generate(), model.main_input_name)
    found["counts"] = (model.num_parameters(), model.num_parameters(exclude_embeddings=True))
    found["base"] = type(model.base_model).__name__
    embedding = model.get_input_embeddings()
    found["words"] = (embedding.num_embeddings, embedding.embedding_dim)
    found["has head"] = model.get_output_embeddings() is not None
    model.gradient_checkpointing_enable()
    found["recomputes"] = model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    model.enable_input_require_grads()
    model.disable_input_require_grads()
    model.tie_weights()
    twin = copy.deepcopy(model)
    state = model.hf_state_dict()
    twin.load_state_dict(
        {key: torch.zeros_like(value) for key, value in state.items()}, strict=False
    )
    twin.load_state_dict(state)
    with torch.no_grad():
        table = torch.arange(97 * 32.0).view(97, 32) / 3000
        fresh = torch.nn.Embedding(97, 32, _weight=table)
        twin.set_input_embeddings(fresh)
    found["set"] = twin.hf_state_dict()[
        next(key for key in state if tuple(state[key].shape) == (97, 32))
    ]
    found["state"] = state
    sizes = {"max_shard_size": "20KB", "is_main_process": True, "safe_serialization": True}
    model.save_pretrained(folder, **sizes)
    found["files"] = sorted(path.name for path in folder.glob("*.safetensors"))


def visit_calls(model: Any, found: dict[str, Any]) -> None:
    more = {"decoder_input_ids": IDS.flip(1)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(
            IDS, attention_mask=MASK, output_hidden_states=True, output_attentions=True, **more
        )
        found["keys"] = list(output.keys())
        plain = model(IDS, attention_mask=MASK, return_dict=False, **more)
        assert isinstance(plain, tuple)
        torch.testing.assert_close(plain[0], output.logits)
        assert output[0] is output["logits"]
        assert output.get("loss") is None
        if model.config.is_encoder_decoder:
            encoded = model.get_encoder()(IDS, attention_mask=MASK)
            repeated = model(encoder_outputs=encoded, attention_mask=MASK, **more)
            torch.testing.assert_close(repeated.logits, output.logits)
        embedded = model(
            inputs_embeds=model.get_input_embeddings()(IDS), attention_mask=MASK, **more
        )
        torch.testing.assert_close(embedded.logits, output.logits)
        found["logits"] = model.gather_logits(output.logits)
        labels = torch.tensor([0, 0]) if found["logits"].dim() == 2 else IDS
        found["loss"] = model(
            IDS, attention_mask=MASK, labels=labels, **({} if labels.dim() == 1 else more)
        ).loss
        if model.can_generate():
            found["tokens"] = model.generate(input_ids=IDS[:, :4], max_new_tokens=4, num_beams=2)


def visit(mesh: Any, folder: Path, name: str, saved: Path) -> dict[str, Any]:
    """Returns what a model answers to all that code written for transformers asks."""
    found: dict[str, Any] = {}
    saved = saved / ("whole" if mesh is None else "split")
    visit_loading(mesh, folder, name, found)
    options = {"num_labels": 1, "problem_type": "single_label_classification"}
    model = load(mesh, folder, name, **(options if "Classification" in name else {}))
    visit_configuration(model, found)
    visit_methods(model, saved, found)
    visit_calls(model, found)
    return found


@pytest.mark.parametrize("name", every_day(NAMES[1:], more=NAMES[:1]))
def test_a_split_model_answers_as_the_whole_one(name, run_mesh, tmp_path):
    changes = {"num_labels": 1} if "Classification" in name else {}
    folder = tmp_path / "hf"
    hf_model(name, 0.0, **changes).save_pretrained(folder)
    expected = visit(None, folder, name, tmp_path)
    for found in run_mesh(2, visit, folder, name, tmp_path):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if isinstance(value, (torch.Tensor, dict)) and key in (
                "set",
                "state",
                "logits",
                "loss",
            ):
                torch.testing.assert_close(found[key], value, atol=2e-6, rtol=1e-5)
            else:
                assert str(found[key]) == str(value), key
