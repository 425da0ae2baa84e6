"""Presets have the published numbers of parameters; `from_config` takes a configuration in every form."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch
import transformers
from every_case import by_turns

import shardzoo
from shardzoo.cli.models import bytes_on_rank, main, measure
from shardzoo.models import FAMILIES, family, find_config, presets
from shardzoo.models.auto import as_config

# Of the checkpoints on the hub, tied weights once: the model cards' and papers' figures to the last parameter.
PUBLISHED = {
    "bert-base-uncased": 109_514_298,
    "bert-base-cased": 108_340_804,
    "bert-large-uncased": 335_174_458,
    "bert-large-cased": 333_610_308,
    "bert-large-uncased-whole-word-masking": 335_174_458,
    "bert-large-cased-whole-word-masking": 333_610_308,
    "bert-base-chinese": 102_290_312,
    "bert-base-multilingual-uncased": 167_463_831,
    "bert-base-multilingual-cased": 177_974_523,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "distilroberta-base": 82_170_201,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    **{f"{name}-small": 76_961_152 for name in ("t5-v1_1", "flan-t5")},
    **{f"{name}-base": 247_577_856 for name in ("t5-v1_1", "flan-t5")},
    **{f"{name}-large": 783_150_080 for name in ("t5-v1_1", "flan-t5")},
    **{f"{name}-xl": 2_849_757_184 for name in ("t5-v1_1", "flan-t5")},
    **{f"{name}-xxl": 11_135_332_352 for name in ("t5-v1_1", "flan-t5")},
    "byt5-small": 299_637_760,
    "byt5-base": 581_653_248,
    "byt5-large": 1_228_183_552,
    "byt5-xl": 3_737_801_728,
    "byt5-xxl": 12_906_899_328,
    **{f"{name}-small": 300_176_768 for name in ("mt5", "mt0")},
    **{f"{name}-base": 582_401_280 for name in ("mt5", "mt0")},
    **{f"{name}-large": 1_229_581_312 for name in ("mt5", "mt0")},
    **{f"{name}-xl": 3_742_619_648 for name in ("mt5", "mt0")},
    **{f"{name}-xxl": 12_921_057_280 for name in ("mt5", "mt0")},
    # Those of T5 1.1, and of transient-global attention a norm a layer and a table.
    "long-t5-local-base": 247_577_856,
    "long-t5-local-large": 783_150_080,
    "long-t5-tglobal-base": 247_587_456,
    "long-t5-tglobal-large": 783_175_168,
    "long-t5-tglobal-xl": 2_849_807_360,
    # Both stacks, each with its own embedding.
    "t5gemma-s-s-ul2": 312_517_632,
    "t5gemma-b-b-ul2": 591_490_560,
    "t5gemma-l-l-ul2": 1_241_761_792,
    "t5gemma-xl-xl-ul2": 3_766_980_608,
    "t5gemma-2b-2b-ul2": 5_596_853_760,
    "t5gemma-9b-2b-ul2": 12_292_375_296,
    "t5gemma-9b-9b-ul2": 20_333_401_088,
    # Without the part that reads images.
    "t5gemma-2-270m-270m": 368_424_832,
    "t5gemma-2-1b-1b": 1_697_783_168,
    "t5gemma-2-4b-4b": 7_089_112_576,
    "xlm-roberta-base": 278_295_186,
    "xlm-roberta-large": 560_142_482,
    "camembert-base": 110_655_493,
    "camembert-large": 336_695_557,
    "distilbert-base-uncased": 66_985_530,
    "distilbert-base-cased": 65_812_036,
    "distilbert-base-multilingual-cased": 135_445_755,
    "electra-small-generator": 13_546_682,
    "electra-small-discriminator": 13_549_057,
    "electra-base-generator": 33_740_602,
    "electra-base-discriminator": 109_483_009,
    "electra-large-generator": 51_295_290,
    "electra-large-discriminator": 335_142_913,
    # With the rows that pad the vocabularies.
    "megatron-bert-uncased-345m": 335_246_208,
    "megatron-bert-cased-345m": 333_671_808,
    "xlm-roberta-xl": 3_482_741_760,
    "xlm-roberta-xxl": 10_712_994_816,
    "eurobert-210m": 211_766_016,
    "eurobert-610m": 607_874_688,
    "eurobert-2.1b": 2_107_590_912,
    "modernbert-base": 149_655_232,
    "modernbert-large": 395_881_664,
    "umt5-small": 306_601_984,
    "umt5-base": 592_043_520,
    "umt5-xl": 3_768_356_864,
    "umt5-xxl": 12_972_531_712,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "bart-large-cnn": 406_290_432,
    "bart-large-mnli": 407_344_131,
    "mbart-large-cc25": 610_851_840,
    "mbart-large-50": 610_879_488,
    "m2m100_418m": 483_905_536,
    "m2m100_1.2b": 1_239_470_080,
    "nllb-200-distilled-600m": 615_073_792,
    "nllb-200-distilled-1.3b": 1_370_638_336,
    "nllb-200-1.3b": 1_370_638_336,
    "nllb-200-3.3b": 3_344_863_232,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "meta-llama-3-8b": 8_030_261_248,
    "meta-llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b-v0.1": 46_702_792_704,
    "mixtral-8x22b-v0.1": 140_620_634_112,
    "olmoe-1b-7b-0924": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # Without the layer that predicts further tokens.
    "deepseek-v3": 671_026_419_200,
    "deepseek-r1": 671_026_419_200,
    "moonlight-16b-a3b": 15_960_110_208,
    "glm-4.5-air": 106_852_251_264,
    "glm-4.5": 352_797_829_024,
    "glm-4.6": 352_797_829_024,
    "switch-base-8": 619_339_008,
    "switch-base-16": 1_072_397_568,
    "switch-base-32": 1_978_514_688,
    "switch-base-64": 3_790_748_928,
    "switch-base-128": 7_415_217_408,
    "switch-base-256": 14_664_154_368,
    "switch-large-128": 26_309_291_008,
    "nllb-moe-54b": 54_500_569_088,
    # Without the sinusoids, which are no parameters here.
    "pegasus-large": 568_699_904,
    "pegasus-xsum": 568_699_904,
    "opus-mt-en-de": 73_886_208,
    "opus-mt-en-fr": 74_609_664,
    "phi-3-mini-4k-instruct": 3_821_079_552,
    "phi-3-medium-4k-instruct": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
    "granite-3.0-2b-base": 2_533_531_648,
    "granite-3.0-8b-base": 8_170_848_256,
    "deberta-v3-xsmall": 70_958_820,
    "deberta-v3-small": 142_024_548,
    "deberta-v3-base": 184_551_780,
    "deberta-v3-large": 435_191_908,
    "mdeberta-v3-base": 279_061_880,
    # Without the head that predicts contacts, with the frequencies of the rotation.
    "esm2_t6_8m_ur50d": 7_512_361,
    "esm2_t12_35m_ur50d": 33_501_165,
    "esm2_t30_150m_ur50d": 148_139_569,
    "esm2_t33_650m_ur50d": 651_042_625,
    "esm2_t36_3b_ur50d": 2_839_004_225,
    "esm2_t48_15b_ur50d": 15_129_098_337,
    "ettin-decoder-17m": 16_913_600,
    "ettin-decoder-32m": 32_081_344,
    "ettin-decoder-68m": 68_457_664,
    "ettin-decoder-150m": 149_655_232,
    "ettin-decoder-400m": 395_881_664,
    "ettin-decoder-1b": 1_031_314_112,
    "olmo-2-0425-1b": 1_484_916_736,
    "olmo-2-1124-7b": 7_298_617_344,
    "olmo-2-1124-13b": 13_716_198_400,
    "olmo-2-0325-32b": 32_234_279_936,
    "olmo-3-1025-7b": 7_298_011_136,
    "olmo-3-1125-32b": 32_233_522_176,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b-pt": 999_885_952,
    "glm-4-9b-0414": 9_400_279_040,
    "glm-4-32b-0414": 32_566_081_536,
}


# Those without a publication: the zoo's own sizes, and GLM's, whose oracle is in test_glm.py.
UNPUBLISHED = ("quickstart", "libai", "glm-")


def test_every_preset_has_its_published_number_of_parameters():
    lacking = [
        name
        for name, _ in presets()
        if name not in PUBLISHED and not any(x in name for x in UNPUBLISHED)
    ]
    assert not lacking


@pytest.mark.parametrize("name", by_turns(PUBLISHED, 8))
def test_parameter_counts(name):
    assert measure(find_config(name), 1).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    "name",
    [
        "gpt2-medium",
        "t5-base",
        "t5-v1_1-large",
        "mt5-small",
        "llama-3.2-1b",
        "glm-4-9b-0414",
        "bart-base",
        "t5gemma-9b-2b-ul2",
    ],
)
def test_the_written_config_builds_the_same_model_in_transformers(name, tmp_path):
    config = find_config(name)
    config.save(tmp_path)
    assert as_config(str(tmp_path)) == config
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        decodes = family(config.model_type).kind == "decoder"
        kind = transformers.AutoModelForCausalLM if decodes else transformers.AutoModelForSeq2SeqLM
        model = kind.from_config(theirs)
    head = model.get_output_embeddings().weight
    ties = head is model.get_input_embeddings().weight  # transformers 5 does for T5
    own_head = prod(head.shape) if ties and not config.tie_word_embeddings else 0
    assert sum(p.numel() for p in model.parameters()) + own_head == PUBLISHED[name]
    assert getattr(theirs, "scale_decoder_outputs", None) == getattr(
        config, "scale_decoder_outputs", None
    ) or (config.model_type == "mt5")


HEADS = {"gpt2": 12, "gpt2-xl": 25, "t5-small": 8, "mt5-small": 6}


@pytest.mark.parametrize("name", HEADS)
def test_any_size_up_to_the_number_of_heads(name):
    config = find_config(name)
    assert measure(config, 1).largest == HEADS[name]
    assert measure(config, HEADS[name]).on_rank is not None
    assert measure(config, HEADS[name] + 1).on_rank is None


def test_what_uneven_heads_cost():
    """Of GPT-2 XL over four ranks the first multiplies 7 of 25 heads, and 12,608 of 50,257 rows of the vocabulary."""
    block, head, vocabulary = 1600 * 1600 * 8, 4 * 1600 * 64, 1600
    busiest = 48 * (7 * head + block / 4) + 12608 * vocabulary
    even = (48 * (25 * head + block) + 50257 * vocabulary) / 4
    assert measure(find_config("gpt2-xl"), 4).uneven == pytest.approx(busiest / even - 1, rel=1e-3)
    assert measure(find_config("gpt2-xl").with_changes(vocab_size=50240), 5).uneven == 0


def parameters_held(mesh, name):
    return sum(p.numel() for p in shardzoo.from_config(name, mesh, device="meta").parameters())


@pytest.mark.parametrize(("name", "tp"), [("mt5-small", 3), ("gpt2", 2), ("gpt2-xl", 4)])
def test_the_size_on_a_rank_is_what_the_largest_rank_holds(name, tp, run_mesh):
    assert max(run_mesh(tp, parameters_held, name)) == measure(find_config(name), tp).on_rank


def test_bytes_on_a_rank():
    assert bytes_on_rank(10, "fp32", "none") == 40
    assert bytes_on_rank(10, "fp32", "adam") == 160  # weight, gradient, two moments
    assert bytes_on_rank(10, "bf16", "adam") == 160  # 2 + 2, two moments of 4, and an fp32 copy


@pytest.mark.before_release
def test_the_command_lists_models(capsys):
    assert main(["mt5", "gpt2-xl", "--tp", "16"]) == 0
    out = capsys.readouterr().out
    assert "300,176,768" in out
    assert "cannot be split so" in out  # the six heads of mt5-small
    assert re.search(r"gpt2-xl +1,557,611,200 .* \d+\.\d% +25", out)
    assert main([]) == 0
    out = capsys.readouterr().out
    for name in FAMILIES:
        assert all(
            word in out for word in (name, *family(name).architectures, *family(name).presets)
        )
    assert "gpt2-xl (1.56B)" in out
    assert "gpt2 (124M)" in out
    assert main(["no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


def test_from_config_takes_every_form(tmp_path):
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 1, "vocab_size": 50, "n_positions": 8}
    values = {"model_type": "gpt2", **sizes}
    native = as_config(values)
    native.save(tmp_path)
    theirs = transformers.GPT2Config(**sizes)
    models = [
        shardzoo.from_config(form, seed=3) for form in (values, native, str(tmp_path), theirs)
    ]
    first = models[0].state_dict()
    for model in models[1:]:
        assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
    other = shardzoo.from_config(values, seed=4)
    assert not torch.equal(other.word_embeddings.weight, models[0].word_embeddings.weight)
    meta = shardzoo.from_config("t5-11b", device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2", "n_embd": 25, "n_head": 2}, "n_embd=25 is not a multiple of n_head=2"),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer must be at least 1"),
        ({"model_type": "gpt2", "activation_function": "cosine"}, "activation_function must be one of gelu, "),
        ({"model_type": "t5", "feed_forward_proj": "double-gelu"}, "feed_forward_proj='double-gelu'"),
        ({"model_type": "t5", "relative_attention_num_buckets": 2}, "num_buckets must be at least 4"),
        ({"model_type": "t5", "num_decoder_layers": 0}, "decoder_layers must be at least 1"),
        ({"model_type": "opt"}, "no model family 'opt'"),
        ({"n_embd": 8}, "no model_type"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_built_says_why(values, message):
    with pytest.raises(ValueError, match=message):
        shardzoo.from_config(values, device="meta")


def fresh_values(mesh, values):
    model = shardzoo.from_config(values, mesh, seed=9)
    return {name: (p.detach(), getattr(p, "shard", None)) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "values",
    [
        {
            "model_type": "gpt2",
            "n_embd": 24,
            "n_head": 12,
            "n_layer": 1,
            "vocab_size": 50,
            "n_positions": 8,
        },
        {
            "model_type": "mt5",
            "d_model": 24,
            "num_heads": 12,
            "d_kv": 4,
            "d_ff": 25,
            "num_layers": 1,
            "vocab_size": 70,
        },
    ],
)
def test_initial_weights_do_not_depend_on_the_layout(values, run_mesh):
    whole = fresh_values(None, values)
    for tp in (2, 3):
        for rank, held in enumerate(run_mesh(tp, fresh_values, values)):
            for name, (value, shard) in held.items():
                full = whole[name][0] if shard is None else shard.merge([whole[name][0]])
                assert torch.equal(value, full if shard is None else shard.slice(full, rank, tp)), (
                    name
                )


def test_t5_starts_as_the_papers_code_does():
    """Standard deviations of transformers' `_init_weights`, but for the untied head, which has d_model^-0.5."""
    sizes = {
        "d_model": 96,
        "num_heads": 8,
        "d_kv": 32,
        "d_ff": 200,
        "num_layers": 1,
        "vocab_size": 3000,
    }
    model = shardzoo.from_config({"model_type": "mt5", **sizes})
    torch.manual_seed(0)
    theirs = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**sizes))
    match = model.encoder.blocks[0]
    stored = dict(theirs.named_parameters())
    prefix = "encoder.block.0.layer"
    q, k, v = match.attention.qkv.weight.detach().chunk(3)
    for own, name in [
        (q, "0.SelfAttention.q"), (k, "0.SelfAttention.k"), (v, "0.SelfAttention.v"),
        (match.attention.output.weight, "0.SelfAttention.o"), (match.mlp.gate_up.gate, "1.DenseReluDense.wi_0"),
        (match.mlp.gate_up.up, "1.DenseReluDense.wi_1"), (match.mlp.down.weight, "1.DenseReluDense.wo"),
        (model.encoder.relative_bias.weight, "0.SelfAttention.relative_attention_bias"),
    ]:  # fmt: skip
        expected = stored[f"{prefix}.{name}.weight"].std()
        assert 0.85 < own.detach().std() / expected < 1.15, name
    assert abs(model.word_embeddings.weight[:3000].std() - 1) < 0.01
    assert abs(model.head.weight[:3000].std() / 96**-0.5 - 1) < 0.01
