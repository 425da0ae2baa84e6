"""megatron-core's T5 with relative positions, in and out, against transformers and megatron-core's own T5."""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import shutil
import warnings
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import by_turns, every_day
from megatron_files import without_extra_states
from parity import randomize

from shardzoo.cli.convert import main
from shardzoo.convert.operations import Options, merge, split

SIZES = {
    "vocab_size": 97, "d_model": 48, "d_kv": 10, "d_ff": 36, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "dropout_rate": 0.0,
}  # fmt: skip
# transformers: false means an unscaled head, and nothing else.
UNSCALED = {**SIZES, "tie_word_embeddings": False}
# Case -> architecture, configuration, whether the model has an output head of its own.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gated": ("T5ForConditionalGeneration", {**UNSCALED, "feed_forward_proj": "gated-gelu"}, True),
    "plain": ("T5ForConditionalGeneration", {**UNSCALED, "feed_forward_proj": "relu"}, True),
    "tied": ("T5ForConditionalGeneration", {**UNSCALED, "feed_forward_proj": "gated-silu"}, False),
    "mt5": ("MT5ForConditionalGeneration", {**SIZES, "feed_forward_proj": "gated-gelu"}, True),
}
# Those that megatron-core runs: one more is the first one in bf16.
RUN = every_day(CASES, more=["bf16"])
LAYOUTS = ((1, 1), (2, 1), (2, 2))  # tensor-parallel ranks, pipeline stages
IDS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))


def save_t5(case: str, folder: Path) -> Path:
    import transformers

    transformers.logging.set_verbosity_error()
    architecture, changes, untied = CASES["gated" if case == "bf16" else case]
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**changes))
    if untied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    randomize(model, 1)
    if case == "bf16":
        model.bfloat16()
    model.save_pretrained(folder)
    path = folder / "config.json"
    # The files decide whether the head is tied.
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": False}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {case: save_t5(case, tmp_path_factory.mktemp(case) / "hf") for case in RUN}


def build_core(given: Namespace, has_encoder: bool, has_decoder: bool) -> Any:
    """megatron-core's T5 of local layers, or one stack of it, as the arguments describe it, on a CPU.

    Its attention without Transformer Engine takes no bias, so the scores get it before the softmax.
    """
    from megatron.core import tensor_parallel
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer import TransformerConfig, dot_product_attention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
    nothing = Namespace(fork=contextlib.nullcontext)
    tensor_parallel.get_cuda_rng_tracker = (
        dot_product_attention.tensor_parallel.get_cuda_rng_tracker
    ) = lambda: nothing

    class BiasedAttention(dot_product_attention.DotProductAttention):
        def forward(self, query, key, value, mask, attention_bias=None, **options):
            softmax = self.scale_mask_softmax
            bias = 0.0 if attention_bias is None else attention_bias
            self.__dict__["scale_mask_softmax"] = lambda x, *rest: softmax(x + bias, *rest)
            y = super().forward(query, key, value, mask, **options)
            del self.__dict__["scale_mask_softmax"]
            return y

    activation = {
        "relu": torch.nn.functional.relu, "silu": torch.nn.functional.silu,
        "gelu_new": partial(torch.nn.functional.gelu, approximate="tanh"),
    }[given.activation_func]  # fmt: skip
    configs = [
        TransformerConfig(
            num_layers=layers, hidden_size=given.hidden_size, num_attention_heads=given.num_attention_heads,
            kv_channels=given.kv_channels, ffn_hidden_size=given.ffn_hidden_size, softmax_scale=given.softmax_scale,
            tensor_model_parallel_size=given.tensor_model_parallel_size, use_cpu_initialization=True,
            params_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0, normalization=given.normalization,
            layernorm_epsilon=given.norm_epsilon, activation_func=activation, add_bias_linear=given.add_bias_linear,
            gated_linear_unit=given.gated_linear_unit, bias_activation_fusion=False, masked_softmax_fusion=False,
            gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        )
        for layers in (given.encoder_num_layers, given.decoder_num_layers)
    ]  # fmt: skip
    specs = []
    for layer, config in zip(
        (t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()),
        configs, strict=True,
    ):  # fmt: skip
        layer.submodules.self_attention.submodules.core_attention = BiasedAttention
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
        if layer is not None and config is configs[1]:
            layer.submodules.pre_cross_attn_layernorm = WrappedTorchNorm
        specs.append(
            TransformerBlockSubmodules([layer] * config.num_layers, layer_norm=WrappedTorchNorm)
        )
    encoder, decoder = configs
    return T5Model(
        decoder, encoder, *specs, given.padded_vocab_size, 64, parallel_output=False,
        share_embeddings_and_output_weights=not given.untie_embeddings_and_output_weights,
        position_embedding_type=given.position_embedding_type,
        relative_attention_num_buckets=given.relative_attention_num_buckets,
        relative_attention_max_distance=given.relative_attention_max_distance,
        add_encoder=has_encoder, add_decoder=has_decoder,
    )  # fmt: skip


def run_in_core(jobs: list[tuple[Path, Path, Path, int, int, Path]]) -> list[torch.Tensor]:
    """Called on four ranks, once in a process, for each of our folders: loads it into megatron-core's T5, saves that
    as `torch.save` and as `dist_checkpointing` write it, and returns the logits of the last stage.

    A job is our folder, the folders to save to, the numbers of ranks and stages, and our torch_dist folder, which one
    rank loads by `dist_checkpointing`, too.
    """
    warnings.simplefilter("ignore")
    multiprocessing.current_process()._config["daemon"] = False  # megatron-core writes in another
    from megatron.core import dist_checkpointing, parallel_state

    # The process that collects what the writers did takes its time to start.
    torch.distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(minutes=3))
    found = []
    for written, legacy, place, size, stages, ours in jobs:
        parallel_state.initialize_model_parallel(size, stages)
        rank = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
        state = torch.load(written / "release" / name / "model_optim_rng.pt", weights_only=False)
        has_encoder, has_decoder = stages == 1 or stage == 0, stage == stages - 1
        model = build_core(state["args"], has_encoder, has_decoder).eval()
        model.load_state_dict(state["model"], strict=True)
        dtype = next(iter(state["model"].values())).dtype

        sees_all = torch.zeros(2, 1, 1, 1, dtype=torch.bool)
        causal = torch.ones(1, 1, 9, 9).tril() < 0.5
        masks = (
            sees_all.expand(2, 1, 13, 13),
            causal.expand(2, 1, 9, 9),
            sees_all.expand(2, 1, 9, 13),
        )
        with torch.no_grad():
            if stages == 1:
                logits = model(IDS, TARGETS, *masks)
            else:
                states = torch.empty(13, 2, SIZES["d_model"])
                group = parallel_state.get_pipeline_model_parallel_group()
                source = parallel_state.get_pipeline_model_parallel_first_rank()
                if has_encoder:
                    states = model(IDS, TARGETS, *masks)
                torch.distributed.broadcast(states, source, group)
                logits = states
                if has_decoder:
                    logits = model(IDS, TARGETS, *masks, encoder_hidden_states=states)
        found.append(logits)

        # The logits were those of the stored weights in fp32; a run of bf16 saves bf16.
        model.to(dtype)
        # As a run would save it: the head of an encoder's stage is never trained.
        content = {**state, "model": model.state_dict(), "iteration": 50}
        if has_encoder and not has_decoder and "output_layer.weight" in content["model"]:
            untied = state["args"].untie_embeddings_and_output_weights
            if untied:
                for head in ("output_layer.weight", "lm_head.output_layer.weight"):
                    content["model"][head] = torch.full_like(content["model"][head], 7.5)
        if parallel_state.get_data_parallel_rank() == 0:
            folder = legacy / "iter_0000050" / name
            folder.mkdir(parents=True)
            torch.save(content, folder / "model_optim_rng.pt")
            (legacy / "latest_checkpointed_iteration.txt").write_text("50")
        if size == 1:
            before = {
                name: value.clone()
                for name, value in model.state_dict().items()
                if value is not None
            }
            for parameter in model.parameters():
                parameter.data.fill_(7.5)
            wanted = without_extra_states(model.sharded_state_dict(prefix=""))
            loaded = dist_checkpointing.load(wanted, str(ours / "release"))
            model.load_state_dict(loaded, strict=False)
            assert all(
                torch.equal(model.state_dict()[name], value) for name, value in before.items()
            )
        if (size, stages) == (2, 1):
            place.mkdir(exist_ok=True, parents=True)
            torch.distributed.barrier()
            common = {"args": state["args"], "checkpoint_version": 3.0, "iteration": 50}
            dist_checkpointing.save({**model.sharded_state_dict(prefix=""), **common}, str(place))
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    for child in multiprocessing.active_children():  # the writer would outlive this process
        child.terminate()
        child.join()
    return found


@pytest.fixture(scope="module")
def by_core(
    folders, run_ranks, tmp_path_factory
) -> dict[tuple[str, int, int], tuple[Any, Path, Path]]:
    """Logits, legacy folder and torch_dist folder of each case and layout, from megatron-core."""
    root = tmp_path_factory.mktemp("core")
    jobs = {}
    for case, source in folders.items():
        ours = root / f"{case}-ours"
        merge(source, ours, style="torch_dist")
        for size, stages in LAYOUTS:
            written = root / f"{case}-{size}-{stages}"
            split(source, written, size, style="megatron", stages=stages, names="local")
            places = written.with_suffix(".legacy"), written.with_suffix(".dist")
            jobs[case, size, stages] = (written, *places, size, stages, ours)
    results = run_ranks(4, run_in_core, list(jobs.values()), isolated=True, timeout=500)
    # The last rank has the last stage.
    return {key: (results[3][i], *job[1:3]) for i, (key, job) in enumerate(jobs.items())}


@pytest.mark.parametrize("case", RUN)
def test_megatron_core_computes_transformers_logits(case, folders, by_core):
    import transformers

    architecture = CASES.get(case, CASES["gated"])[0]
    model = getattr(transformers, architecture).from_pretrained(folders[case]).eval().float()
    with torch.no_grad():
        wanted = model(input_ids=IDS, decoder_input_ids=TARGETS).logits
    assert wanted.abs().max() > 0.5
    for size, stages in LAYOUTS:
        logits = by_core[case, size, stages][0]
        scale = wanted.abs().max()
        assert (logits[..., :97] - wanted).abs().max() <= 1e-5 * scale, (size, stages)


@pytest.mark.parametrize("case", RUN)
def test_what_megatron_core_saves_becomes_the_original_bytes(
    case, folders, by_core, hashes, tmp_path
):
    shutil.copy(folders[case] / "config.json", tmp_path / "c.json")
    options = Options(config_file=tmp_path / "c.json")
    for size, stages in LAYOUTS:
        _, legacy, dist = by_core[case, size, stages]
        for number, source in enumerate((legacy, dist) if (size, stages) == (2, 1) else (legacy,)):
            place = tmp_path / f"{size}-{stages}-{number}"
            merge(source, place, options)
            assert hashes(place) == hashes(folders[case]), (source, size, stages)


def edit(folder: Path, change: Any) -> Path:
    """Changes what each rank's file holds, and removes the configuration beside them."""
    for path in folder.glob("release/*/model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)
    (folder / "config.json").unlink()
    return folder


def say(**arguments: Any) -> Any:
    return lambda state: vars(state["args"]).update(arguments)


REFUSED = {
    "learned positions": ("gated", say(position_embedding_type="learned_absolute"),
                          "position_embedding_type='learned_absolute', but the zoo's models have 'relative'"),
    "rotary positions": ("gated", say(position_embedding_type="rope"), "position_embedding_type='rope'"),
    "other norms": ("gated", say(normalization="LayerNorm"), "normalization='LayerNorm'"),
    "norms around 1": ("gated", say(layernorm_zero_centered_gamma=True), "layernorm_zero_centered_gamma=True"),
    "scaled scores": ("gated", say(softmax_scale=None), "softmax_scale=None, but the zoo's models have 1.0"),
    "scores that nobody tells of": (
        "gated", lambda state: delattr(state["args"], "softmax_scale"), "arguments lack softmax_scale"
    ),
    "biases": ("plain", say(add_bias_linear=True), "add_bias_linear=True"),
    "grouped queries": ("plain", say(group_query_attention=True), "group_query_attention=True"),
    "experts": ("plain", say(num_experts=4), "num_experts=4"),
    "other stages": ("plain", say(pipeline_model_parallel_size=4), "pipeline_model_parallel_size=4"),
    "a bias of the head": (
        "tied",
        lambda state: state["model"]["output_layer.bias"].fill_(1) if "output_layer.bias" in state["model"] else None,
        "output_layer.bias in",
    ),
    "no tables": (
        "gated",
        lambda state: [state["model"].pop(name) for name in list(state["model"]) if "relative_pos_emb" in name],
        "T5 without relative positions",
    ),
    "one table": (
        "gated",
        lambda state: state["model"].pop("decoder_relative_pos_emb.relative_attention_bias.weight"),
        "lacks decoder_relative_pos_emb",
    ),
    "unequal tables": (
        "gated",
        lambda state: state["model"]["encoder_relative_pos_emb.relative_attention_bias.weight"].mul_(
            1.0 + ("decoder.layers.0.input_layernorm.weight" in state["model"])
        ),
        "encoder_relative_pos_emb.relative_attention_bias.weight",
    ),
    "an odd gate": (
        "gated",
        lambda state: state["model"].update({
            name: value[:-1] for name, value in state["model"].items() if name.endswith("linear_fc1.weight")
        }),
        "linear_fc1",
    ),
    "no matrix": (
        "gated", lambda state: state["model"].update({"encoder.layers.0.mlp.linear_fc1.weight": torch.tensor(1.0)}),
        "encoder.layers.0.mlp.linear_fc1.weight has the shape []",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", by_turns(REFUSED, 2))
def test_what_equals_no_t5_is_refused_with_the_reason(name, folders, tmp_path, capsys):
    case, change, message = REFUSED[name]
    split(folders[case], tmp_path / "megatron", 2, style="megatron", stages=2, names="local")
    source = edit(tmp_path / "megatron", change)
    assert main(["merge", str(source), str(tmp_path / "hf")]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "hf").exists()


def test_the_arguments_tell_the_configuration(folders, tmp_path):
    """Of all sizes; the vocabulary has its padding, and the files do not tell an mT5 from a T5."""
    for case in CASES:
        split(folders[case], tmp_path / case, 2, style="megatron", stages=4)
        merge(edit(tmp_path / case, lambda state: None), tmp_path / f"{case}-hf")
        found = json.loads((tmp_path / f"{case}-hf" / "config.json").read_text())
        assert (found["vocab_size"], found["scale_decoder_outputs"]) == (256, False)
        wanted = {**CASES[case][1], "tie_word_embeddings": not CASES[case][2]}
        for key in (set(SIZES) | {"feed_forward_proj", "tie_word_embeddings"}) - {"vocab_size"}:
            assert found[key] == wanted[key], (case, key)


def test_t5s_that_megatron_core_does_not_have(folders, tmp_path):
    import transformers

    values = json.loads((folders["gated"] / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(values | {"scale_decoder_outputs": True, "transformers_version": "4.0"})
    )
    with pytest.raises(ValueError, match="multiplies the head's input by d_model"):
        split(folders["gated"], tmp_path / "out", 1, Options(config_file=path), style="megatron")
    # Of an encoder alone, the files' decoder would be left.
    path.write_text(json.dumps(values | {"architectures": ["T5EncoderModel"]}))
    with pytest.raises(ValueError, match="can hold only parameters of the model"):
        split(folders["gated"], tmp_path / "out", 1, Options(config_file=path), style="megatron")
    with pytest.raises(ValueError, match=r"2 layers .* 3 pipeline stages; use one of \[1, 2\]"):
        split(folders["gated"], tmp_path / "out", 1, style="megatron", stages=6)
    umt5 = transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**SIZES))
    umt5.save_pretrained(tmp_path / "umt5")
    with pytest.raises(ValueError, match="has no umt5 that equals transformers'"):
        split(tmp_path / "umt5", tmp_path / "out", 1, style="megatron")


def test_a_conversion_of_halves_resumes(folders, hashes, tmp_path):
    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    def convert(**options: Any) -> Any:
        report = options.pop("report", None)
        return split(
            folders["tied"], tmp_path / "out", 2, Options(jobs=1, **options), report,
            style="megatron", stages=2,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        convert(report=stop)
    for _ in range(2):  # the second time it is complete
        assert convert(resume=True).kept > 0
    merge(tmp_path / "out", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(folders["tied"])
