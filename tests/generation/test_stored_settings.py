"""What a folder's files say about generation counts in every call, as in transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from every_case import by_turns

import shardzoo
from shardzoo.models.for_transformers import TransformersModel

CASES = {
    "none": {},
    "beams": {"num_beams": 3, "max_length": 14, "min_length": 6, "no_repeat_ngram_size": 2, "length_penalty": 2.0},
    "unknown": {"max_new_tokens": 4, "a_name_of_the_future": 3, "top_k": -1},
    "tokens": {"max_new_tokens": 5, "eos_token_id": [7, 9], "suppress_tokens": [4, 5], "repetition_penalty": 1.7},
    "first": {"max_new_tokens": 5, "force_bos_token_to_be_generated": True, "bos_token_id": 11},
}  # fmt: skip


def copy_with(folder, target, settings, place):
    """Copies a folder, with settings in one of its files: generation_config or config."""
    shutil.copytree(folder, target)
    (target / "generation_config.json").unlink()
    path = target / f"{place}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **settings}))
    return target


@pytest.mark.parametrize("place", ["generation_config", "config"])
@pytest.mark.parametrize("case", by_turns(CASES, 4))
@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_the_settings_of_a_folder_are_those_of_transformers(family, case, place, saved, tmp_path):
    settings = dict(CASES[case])
    if place == "generation_config" and family == "bart":
        settings.setdefault("bos_token_id", 0)
    folder = copy_with(saved(family)[1], tmp_path / "model", settings, place)
    theirs = type(saved(family)[0]).from_pretrained(folder).eval()
    ours = shardzoo.from_pretrained(folder)
    ids = torch.randint(3, 261, (2, 6), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    for given in ({}, {"num_beams": 2, "max_new_tokens": 3}):
        wanted = theirs.generate(ids, attention_mask=mask, **given)
        found = ours.generate(ids, mask, **given)
        assert found.tolist() == wanted.tolist(), given
    # What is saved has the same settings, for both libraries.
    ours.save_pretrained(tmp_path / "saved")
    again = shardzoo.from_pretrained(tmp_path / "saved")
    theirs = type(saved(family)[0]).from_pretrained(tmp_path / "saved").eval()
    wanted = ours.generate(ids, mask)
    assert again.generate(ids, mask).tolist() == wanted.tolist()
    assert theirs.generate(ids, attention_mask=mask).tolist() == wanted.tolist()
    assert TransformersModel(ours).generate(ids, mask).tolist() == wanted.tolist()


def test_a_file_without_a_token_means_none(saved, tmp_path):
    """With a generation_config.json, the configuration's tokens do not count."""
    folder = copy_with(
        saved("gpt2")[1], tmp_path / "model", {"max_new_tokens": 6}, "generation_config"
    )
    model = shardzoo.from_pretrained(folder)
    assert model.generation_config.eos_token_id is None
    with pytest.raises(ValueError, match="no bos_token_id"):
        model.generate()


def test_arguments_that_are_none_unset_a_setting(saved):
    reference, folder = saved("gpt2")
    model = shardzoo.from_pretrained(folder)
    model.generation_config.eos_token_id = 5
    ids = torch.tensor([[7, 8, 9]])
    wanted = reference.generate(ids, eos_token_id=None, pad_token_id=0, max_new_tokens=30)
    found = model.generate(ids, eos_token_id=None, pad_token_id=0, max_new_tokens=30)
    assert found.tolist() == wanted.tolist()


def test_settings_that_change_tokens_are_not_ignored(saved, tmp_path):
    folder = copy_with(
        saved("gpt2")[1], tmp_path / "model", {"guidance_scale": 2.0}, "generation_config"
    )
    model = shardzoo.from_pretrained(folder)
    with pytest.raises(ValueError, match="no argument 'guidance_scale'"):
        model.generate(torch.tensor([[7, 8]]))
    model.generation_config.guidance_scale = 1.0
    model.generate(torch.tensor([[7, 8]]), max_new_tokens=1)


def test_a_new_model_writes_its_settings_and_replaces_others(saved, tmp_path):
    model = shardzoo.from_config(shardzoo.from_pretrained(saved("gpt2")[1]).config)
    model.save_pretrained(tmp_path)
    written = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert written.eos_token_id == model.config.eos_token_id
    (tmp_path / "generation_config.json").write_text('{"num_beams": 9}')
    model.save_pretrained(tmp_path)
    assert shardzoo.from_pretrained(tmp_path).generation_config.num_beams is None
