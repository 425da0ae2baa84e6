"""`from_pretrained`, as a function, a class method and of the Auto classes, takes transformers' arguments."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from every_case import every_day
from tiny_models import hf_model

import shardzoo
import shardzoo.models as zoo


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of transformers' models, by architecture."""
    found = {}
    for name in ("BertForMaskedLM", "BertModel", "GPT2LMHeadModel", "T5ForConditionalGeneration",
                 "LlamaModel"):  # fmt: skip
        changes = {"tie_word_embeddings": False} if name == "LlamaModel" else {}
        model = hf_model(name, 0.0, **changes).eval()
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        found[name] = folder
    return found


IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.mark.parametrize(
    ("stored", "wanted", "fresh"),
    every_day(
        [
            ("BertForMaskedLM", "BertForSequenceClassification", ("classifier", "pooler")),
            ("BertModel", "BertForMaskedLM", ("head.decoder", "head.dense", "head.norm")),
            ("T5ForConditionalGeneration", "T5EncoderModel", ()),
        ],
        more=[
            ("BertForMaskedLM", "BertForMaskedLM", ()),
            ("BertForMaskedLM", "BertModel", ("pooler",)),
            ("GPT2LMHeadModel", "GPT2Model", ()),
            ("GPT2LMHeadModel", "GPT2ForTokenClassification", ("token_classifier",)),
            ("LlamaModel", "LlamaForCausalLM", ("head",)),
        ],
    ),
)
def test_class_methods(folders, stored, wanted, fresh):
    folder = folders[stored]
    ours_class = getattr(zoo, wanted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, info = ours_class.from_pretrained(folder, output_loading_info=True)
    said = [str(one.message) for one in caught if "newly initialized" in str(one.message)]
    assert type(model) is ours_class
    assert not model.training
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if fresh:
        verb = "is" if len(fresh) == 1 else "are"
        assert said[0].startswith(f"{', '.join(fresh)} of {wanted} {verb} newly initialized")
    else:
        assert not said
    theirs, their_info = getattr(transformers, wanted).from_pretrained(
        folder, output_loading_info=True
    )
    assert info["missing_keys"] == set(their_info["missing_keys"])
    assert info["mismatched_keys"] == set()
    # The body is the stored one.
    name = "last_hidden_state" if wanted.endswith("Model") and "LMHead" not in wanted else None
    if name is not None:
        options = {"input_ids": IDS}
        torch.testing.assert_close(model(**options)[name], theirs(**options)[name])
    assert model.config.name_or_path == str(folder)
    assert model.dtype == torch.float32


def test_auto_classes(folders):
    for auto, stored, expected in (
        ("AutoModel", "BertForMaskedLM", "BertModel"),
        ("AutoModel", "GPT2LMHeadModel", "GPT2Model"),
        ("AutoModelForCausalLM", "GPT2LMHeadModel", "GPT2LMHeadModel"),
        ("AutoModelForSeq2SeqLM", "T5ForConditionalGeneration", "T5ForConditionalGeneration"),
        ("AutoModelForMaskedLM", "BertForMaskedLM", "BertForMaskedLM"),
        ("AutoModelForPreTraining", "BertForMaskedLM", "BertForPreTraining"),
        ("AutoModelForPreTraining", "GPT2LMHeadModel", "GPT2LMHeadModel"),
        ("AutoModelForQuestionAnswering", "BertForMaskedLM", "BertForQuestionAnswering"),
        ("AutoModelForMultipleChoice", "BertForMaskedLM", "BertForMultipleChoice"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = getattr(zoo, auto).from_pretrained(folders[stored])
        assert type(model).__name__ == expected
        torch.manual_seed(0)
        built = getattr(zoo, auto).from_config(model.config, torch_dtype="bfloat16")
        assert type(built).__name__ == expected
        assert built.dtype == torch.bfloat16
    # MarianMTModel has a head.
    assert zoo.AutoModel.find_class(zoo.family("marian")) is zoo.MarianModel
    with pytest.raises(ValueError, match="gpt2 has no architecture …ForMaskedLM"):
        zoo.AutoModelForMaskedLM.from_pretrained(folders["GPT2LMHeadModel"])


def test_every_argument_is_taken_or_refused_with_its_reason(folders):
    folder = folders["BertForMaskedLM"]
    taken = {
        "trust_remote_code": True, "revision": "main", "cache_dir": "/tmp/x", "token": None,
        "torch_dtype": "auto", "device_map": "auto", "attn_implementation": "eager",
        "low_cpu_mem_usage": True, "use_safetensors": True, "force_download": False,
        "local_files_only": True, "_fast_init": True, "weights_only": True, "load_in_8bit": False,
        "quantization_config": None, "hidden_dropout_prob": 0.0,
    }  # fmt: skip
    model = shardzoo.from_pretrained(folder, **taken)
    assert model.config.hidden_dropout_prob == 0.0
    for dtype in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert shardzoo.from_pretrained(folder, dtype=dtype).dtype == torch.bfloat16
    for device_map in ("cpu", {"": "cpu"}, torch.device("cpu")):
        assert shardzoo.from_pretrained(folder, device_map=device_map).device.type == "cpu"
    for options, message in (
        ({"load_in_8bit": True}, "load_in_8bit=True is not supported: base_precision="),
        ({"device_map": "balanced"}, "device_map='balanced' puts the model on several devices"),
        ({"device_map": {"bert": 0, "cls": 1}}, "puts the model on 2 devices"),
        ({"tp_plan": {"lm_head": "colwise"}}, "each parameter declares how it is split"),
        ({"tp_size": 2}, "tensor_parallel_size 2 need a multiple of 2 processes"),
        ({"distributed_config": {"tp_size": 1, "fsdp_size": 2}}, "has fsdp_size=2"),
        ({"attn_implementation": "fast"}, '"fast"` is not supported: it must be one of eager'),
        ({"dtype": "int8"}, "dtype must be a floating-point type"),
        ({"use_safetensors": False}, "has safetensors"),
        ({"weights_only": False}, "no pickle"),
        ({"anything": 1}, "from_pretrained has no argument 'anything'"),
        ({"torch_dtpye": "float32"}, "no such setting; did you mean torch_dtype"),
        ({"hiden_size": 32}, "no such setting; did you mean hidden_size"),
        ({"gguf_file": "x"}, "GGUF"),
    ):
        with pytest.raises(ValueError, match=message):
            shardzoo.from_pretrained(folder, **options)
    with pytest.raises(ValueError, match="from_config takes no tp_plan"):
        shardzoo.from_config(model.config, tp_plan="auto")


def test_labels_and_mismatched_sizes(folders, tmp_path):
    folder = folders["BertForMaskedLM"]
    names = {0: "a", 1: "b", 2: "c"}
    with pytest.warns(UserWarning, match="classifier, pooler of BertForSequenceClassification"):
        model = zoo.BertForSequenceClassification.from_pretrained(
            folder, num_labels=3, id2label=names, label2id={"a": 0, "b": 1, "c": 2}
        )
    assert model.config.id2label == names
    assert model(IDS).logits.shape == (1, 3)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has shape \[3, 32\], but classifier.weight needs"):
        zoo.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    options = {"num_labels": 4, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with pytest.warns(UserWarning, match="classifier of .* is newly initialized, because .* other"):
        again, info = zoo.BertForSequenceClassification.from_pretrained(tmp_path, **options)
    _, their_info = transformers.BertForSequenceClassification.from_pretrained(tmp_path, **options)
    assert info["mismatched_keys"] == {
        (name, tuple(mine), tuple(theirs)) for name, mine, theirs in their_info["mismatched_keys"]
    }
    assert again(IDS).logits.shape == (1, 4)


def test_the_generator_governs_a_new_head(folders):
    def load(seed):
        torch.manual_seed(seed)
        model = zoo.GPT2ForSequenceClassification.from_pretrained(folders["GPT2LMHeadModel"])
        return model.classifier.weight

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(load(1), load(1))
        assert not torch.equal(load(1), load(2))


def test_configurations(folders):
    folder = folders["T5ForConditionalGeneration"]
    config = zoo.T5Config.from_pretrained(folder, dropout_rate=0.25, output_hidden_states=True)
    assert (config.dropout_rate, config.output_hidden_states) == (0.25, True)
    assert zoo.AutoConfig.from_pretrained(folder, dropout_rate=0.25) == config
    found, unused = zoo.AutoConfig.from_pretrained(folder, no_setting=3, return_unused_kwargs=True)
    assert (type(found), unused) == (zoo.T5Config, {"no_setting": 3})
    assert zoo.AutoConfig.for_model("gpt2", hidden_size=36).n_embd == 36
    with pytest.raises(ValueError, match="a configuration of t5, not of bert"):
        zoo.BertConfig.from_pretrained(folder)


def classify(mesh, folder):
    """The logits of a new head on a rank whose generator has its own state."""
    torch.manual_seed(mesh.rank + 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = zoo.AutoModelForSequenceClassification.from_pretrained(
            folder, mesh=mesh, num_labels=3, device_map="auto", torch_dtype="float32"
        )
    return model(IDS).logits.detach()


def test_split_models(folders, run_mesh):
    (whole,) = run_mesh(1, classify, folders["BertForMaskedLM"])
    for split in run_mesh(2, classify, folders["BertForMaskedLM"]):
        torch.testing.assert_close(split, whole)


def use_a_plan(mesh, folders):
    """What code for transformers' own tensor parallelism gets: whole logits, a loss, tokens."""
    from transformers.distributed import DistributedConfig

    import shardzoo

    found = []
    for name in ("BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"):
        more = {"decoder_input_ids": IDS.flip(1)} if name.startswith("T5") else {}
        options = {"tp_plan": "auto"}
        if name.startswith("T5"):
            options = {"distributed_config": DistributedConfig(tp_size=2)}
        if mesh.tp_size == 1:
            options = {}
        model = shardzoo.from_pretrained(folders[name], **options)
        assert (model.mesh is None) == (mesh.tp_size == 1)
        output = model(IDS, labels=IDS)
        output.logits.float().square().mean().backward()
        bias = next(value.grad for key, value in model.named_parameters() if "norm" in key)
        found += [output.loss.detach(), output.logits.detach(), bias]
        assert torch.equal(model.gather_logits(output.logits), output.logits)
        if model.can_generate():
            found.append(model.generate(IDS, max_new_tokens=4))
            assert model(IDS, **more).logits.shape[-1] == model.config.vocab_size
    if mesh.tp_size > 1:
        with pytest.raises(ValueError, match="leave tp_plan and tp_size out"):
            shardzoo.from_pretrained(folders["BertForMaskedLM"], mesh, tp_plan="auto")
    return found


def test_a_plan_of_transformers_splits_over_all_processes(folders, run_mesh):
    (whole,) = run_mesh(1, use_a_plan, folders)
    for split in run_mesh(2, use_a_plan, folders):
        torch.testing.assert_close(split, whole, atol=2e-6, rtol=1e-5)


def test_models_without_a_folder(folders):
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folders["GPT2LMHeadModel"])
    model = zoo.GPT2LMHeadModel.from_pretrained(
        None, config=theirs.config, state_dict=theirs.state_dict()
    )
    torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits)
    with pytest.raises(ValueError, match="config= and state_dict= are needed"):
        zoo.GPT2LMHeadModel.from_pretrained(None)
    assert zoo.GPT2LMHeadModel.config_class is zoo.GPT2Config
    torch.manual_seed(0)
    first = zoo.GPT2LMHeadModel._from_config(theirs.config, attn_implementation="eager")
    torch.manual_seed(0)
    second = zoo.GPT2LMHeadModel._from_config(theirs.config)
    assert torch.equal(first.word_embeddings.weight, second.word_embeddings.weight)
    assert first.config._attn_implementation == "eager"
    first.set_attn_implementation("sdpa")
    assert first.config._attn_implementation == second.config._attn_implementation == "sdpa"


def test_a_model_without_storage_has_the_type_that_is_asked_for():
    sizes = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 16, "n_layer": 1, "n_head": 2}
    values = {}
    for dtype in (None, "bfloat16", torch.float64):
        model = shardzoo.from_config(sizes, device="meta", dtype=dtype)
        wanted = {"bfloat16": torch.bfloat16, None: torch.float32}.get(dtype, dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {wanted}
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.word_embeddings.weight.shard.shape == (97, 16)
        assert model.head.weight is model.word_embeddings.weight
        model.fill_parameters(lambda name, value: values.setdefault(name, value))
    whole = shardzoo.from_config(sizes, dtype=torch.bfloat16)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, values[name].bfloat16())
