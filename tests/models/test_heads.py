"""What the matrix of `tests/zoo` does not compare: poolers that are left out, dropout of choices, mistakes."""

from __future__ import annotations

import hashlib
import sys

import pytest
import torch
import transformers
from every_case import by_turns
from matrix import architecture_of, find_class, load_rows
from safetensors.torch import save_file

import shardzoo
from shardzoo.convert.operations import merge, split
from shardzoo.models import FAMILIES, family, from_config
from shardzoo.models.heads import QuestionAnswering
from shardzoo.models.language_model import MaskedLM
from shardzoo.models.loading import missing_modules
from shardzoo.mpu import dropout_state
from shardzoo.trainer.checkpointing.model_files import model_files
from shardzoo.trainer.engines.state import model_tensors

TINY = {
    "hidden_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "vocab_size": 40,
}


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_a_body_has_a_pooler_if_its_files_have_one(name, tmp_path):
    config = getattr(transformers, f"{name}Config")(**TINY)
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 1, 1]])
    for pools in (True, False):
        model = getattr(transformers, f"{name}Model")(config, add_pooling_layer=pools).eval()
        model.save_pretrained(tmp_path / f"{pools}")
        split(tmp_path / f"{pools}", tmp_path / f"{pools}-2", 2)
        merge(tmp_path / f"{pools}-2", tmp_path / f"{pools}-1")
        expected = model(ids, ids != 1)
        for folder in (tmp_path / f"{pools}", tmp_path / f"{pools}-1"):
            ours = shardzoo.from_pretrained(folder)
            output = ours(ids, ids != 1)
            assert type(ours).__name__ == f"{name}Model"
            torch.testing.assert_close(output.last_hidden_state, expected.last_hidden_state)
            assert output.keys() == ("last_hidden_state", "pooler_output")[: 1 + pools]
            if pools:
                torch.testing.assert_close(output.pooler_output, expected.pooler_output)
            changed = ours.config.to_dict()
            assert changed.get("add_pooling_layer", True) == pools
            assert shardzoo.models.config_from_dict(changed) == ours.config


def test_a_body_of_a_file_with_another_head(tmp_path):
    """The masked language model's file has no pooler; the head in it is not read."""
    model = transformers.BertForMaskedLM(transformers.BertConfig(**TINY)).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    body = shardzoo.from_pretrained(
        tmp_path, config={**model.config.to_dict(), "architectures": ["BertModel"]}
    )
    torch.testing.assert_close(body(ids).last_hidden_state, model.bert(ids).last_hidden_state)


def test_choices_drop_the_same_in_any_micro_batch():
    """Each choice of each sample has a mask of its own, which does not depend on how the batch is cut."""
    facts = family("bert")
    model = from_config(facts.config(**TINY, architecture="BertForMultipleChoice")).train()
    ids = torch.full((4, 3, 5), 7)  # all choices are the same, so only dropout tells them apart
    labels = torch.tensor([0, 1, 2, 1])

    def run(first, stop):
        dropout_state.set(1, first)
        return model(ids[first:stop], labels=labels[first:stop], num_items_in_batch=4)

    whole, parts = run(0, 4), [run(0, 2), run(2, 3), run(3, 4)]
    torch.testing.assert_close(torch.cat([part.logits for part in parts]), whole.logits)
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    assert len(whole.logits.flatten().unique()) == whole.logits.numel()


def test_the_last_token_of_padding_on_both_sides(tmp_path):
    """As in transformers, the last token whose id is not the padding token's; without one, a single sequence."""
    config = transformers.GPT2Config(
        n_embd=12, n_head=2, n_layer=2, vocab_size=40, num_labels=3, n_positions=8
    )
    for pad in (None, 1):
        config.pad_token_id = pad
        theirs = transformers.GPT2ForSequenceClassification(config).eval()
        theirs.save_pretrained(tmp_path / f"{pad}")
        model = shardzoo.from_pretrained(tmp_path / f"{pad}")
        ids = torch.tensor([[1, 1, 5, 6, 7], [5, 6, 7, 1, 1], [5, 1, 6, 1, 1], [1, 1, 1, 1, 1]])[
            : 4 if pad else 1
        ]
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits)
    with pytest.raises(
        ValueError,
        match="GPT2ForSequenceClassification finds the last token by the padding token's",
    ):
        shardzoo.from_pretrained(tmp_path / "None")(torch.tensor([[5], [6]]))


def test_positions_after_the_text_are_ignored():
    model = from_config(
        family("gpt2")
        .presets["gpt2-quickstart"]
        .with_changes(architecture="GPT2ForQuestionAnswering")
    )
    ids, start, end = (
        torch.arange(20, 32).view(2, 6),
        torch.tensor([2, 9]),
        torch.tensor([[1], [5]]),
    )
    output = model.eval()(ids, start_positions=start, end_positions=end)
    function = torch.nn.functional.cross_entropy
    expected = function(output.start_logits[:1], start[:1]) + function(output.end_logits, end[:, 0])
    torch.testing.assert_close(output.loss, expected / 2)
    summed = model(ids, start_positions=start, end_positions=end, num_items_in_batch=4)
    expected = function(output.start_logits[:1], start[:1]) + 2 * function(
        output.end_logits, end[:, 0]
    )
    torch.testing.assert_close(summed.loss, expected / 8)


def misspelled(architecture):
    """The class attributes of an architecture that its head and its backbone do not have."""
    own = [name for name in vars(architecture) if not name.startswith("__")]
    return [name for name in own if not any(hasattr(base, name) for base in architecture.__bases__)]


def test_a_head_has_no_other_settings():
    class WithoutBias(QuestionAnswering):
        bias = False

    class Pooled(MaskedLM):
        pooling = "first"

    assert not misspelled(WithoutBias)
    assert misspelled(Pooled) == ["pooling"]
    for name in FAMILIES:
        for architecture in family(name).architectures.values():
            assert name == "glm" or not misspelled(architecture)  # GLM's is whole, without a head


def test_each_architecture_is_a_class_of_its_familys_files():
    for name in FAMILIES:
        for architecture in family(name).architectures.values():
            own = vars(sys.modules[architecture.__module__])
            assert own[architecture.__name__] is architecture
            assert architecture.__module__.startswith(f"shardzoo.models.{name.replace('-', '_')}.")
            assert getattr(shardzoo.models, architecture.__name__) is architecture
            assert architecture.__doc__


def test_the_modules_that_a_checkpoint_lacks(tmp_path):
    """Those of the head alone, and not the vocabulary's, which the word embedding may hold."""
    lacking = {
        "bert-quickstart": {
            "BertForMaskedLM": [], "BertForPreTraining": ["pooler", "next_sentence"],
            "BertForSequenceClassification": ["pooler", "classifier"], "BertForQuestionAnswering": ["qa_outputs"],
        },
        "gpt2-quickstart": {"GPT2LMHeadModel": [], "GPT2Model": [], "GPT2ForTokenClassification": ["token_classifier"]},
        "mt5-quickstart": {"MT5ForConditionalGeneration": [], "MT5ForSequenceClassification": ["pooler", "classifier"]},
    }  # fmt: skip
    for preset, heads in lacking.items():
        config = shardzoo.models.find_config(preset)
        values = {**config.to_dict(), "num_labels": 2}
        theirs = transformers.AutoConfig.for_model(**values)
        getattr(transformers, config.architecture)(theirs).save_pretrained(tmp_path / preset)
        for architecture, expected in heads.items():
            found = missing_modules(
                tmp_path / preset, config.with_changes(architecture=architecture)
            )
            assert found == expected, architecture


@pytest.mark.parametrize("name", by_turns(sorted(load_rows()), 6))
def test_transformers_loads_every_new_model(name, tmp_path):
    """As after training: shards of a model that no Hugging Face folder gave names, merged into such a folder."""
    architecture, (kind, case) = architecture_of(name), load_rows()[name]
    theirs = find_class(architecture)
    model = from_config(theirs.config_class(**case.config, architectures=[architecture]))
    files, tensors = model_files(model), model_tensors(model)
    (tmp_path / "shards").mkdir()
    digests = {
        n: hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest()
        for n, t in tensors.items()
    }
    save_file(tensors, tmp_path / "shards" / "rank_00.safetensors")
    files.describe([digests], None)(tmp_path / "shards")
    merge(tmp_path / "shards", tmp_path / "hf")
    loaded, report = theirs.from_pretrained(tmp_path / "hf", output_loading_info=True)
    if kind in ("pegasus", "marian"):
        # It computes these tables of sinusoids when a file lacks them.
        tables = [
            name for name in report["missing_keys"] if name.endswith("embed_positions.weight")
        ]
        report["missing_keys"] = set(report["missing_keys"]) - set(tables)
        for table in tables:
            values = loaded.get_parameter(table)
            positions = loaded.get_submodule(table.removesuffix(".weight"))
            assert torch.equal(values, positions.create_weight())
    if kind == "esm":
        # Its head that predicts contacts is not part of our models, and starts anew.
        contact_head = [name for name in report["missing_keys"] if "contact_head." in name]
        assert len(contact_head) == 2
        report["missing_keys"] = set(report["missing_keys"]) - set(contact_head)
    if kind == "t5gemma2":
        # Our models read no images, and what does starts anew.
        parts = ("vision_tower.", "multi_modal_projector.")
        report["missing_keys"] = {
            name for name in report["missing_keys"] if not any(part in name for part in parts)
        }
    assert not any(report.values())
