"""Folders of torch.distributed.checkpoint and megatron-core, in and out, against both libraries."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import sys
import warnings
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import megatron_files
import pytest
import torch
import torch.distributed.checkpoint as dcp
from every_case import by_turns, every_day
from megatron_files import Layout, gpt_modules, in_megatron_core
from safetensors.torch import load_file
from tiny_models import save_model

from shardzoo.cli.convert import main
from shardzoo.convert.operations import Options, merge, split
from shardzoo.models import from_pretrained


@pytest.fixture(scope="module")
def gpt(tmp_path_factory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("gpt") / "hf", "GPT2LMHeadModel", "gpt2", seed=1, n_layer=4
    )


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert") / "hf"
    return save_model(folder, "BertForPreTraining", "bert", seed=2, num_hidden_layers=4)


def save(source: Path, folder: Path, prefix: str, layout: str) -> None:
    """Called on every rank: saves the weights as DTensors, with an optimizer's state and other objects beside them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid = init_device_mesh("cpu", (2, 2))
    weights = load_file(source / "model.safetensors")

    def shard(tensor: torch.Tensor) -> Any:
        second = {"rows": Replicate(), "grid": Shard(1)}.get(layout, Shard(0))
        both = (Shard(0), second if tensor.dim() > 1 else Replicate())
        return distribute_tensor(
            tensor, grid, both if layout != "columns" or tensor.dim() < 2 else (Shard(1), Shard(1))
        )

    tree: dict[str, Any] = {name: shard(tensor) for name, tensor in weights.items()}
    for key in filter(None, reversed(prefix.split("."))):
        tree = {key: tree}
    state = {
        **tree,
        "optimizer": {"state": {"a": {"exp_avg": shard(torch.ones(9, 4))}}},
        "step": 7,
        "text": "x",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(folder))


@pytest.mark.parametrize(
    ("name", "layout"),
    by_turns(
        every_day(
            [("gpt", "rows"), ("bert", "grid"), ("gpt", "columns"), ("bert", "both")],
            more=[("bert", "rows"), ("gpt", "grid"), ("bert", "columns"), ("gpt", "both")],
        ),
        2,
    ),
)
def test_chunks_of_every_kind_become_the_original_bytes(
    name, layout, request, run_ranks, hashes, tmp_path
):
    source = request.getfixturevalue(name)
    prefix = {"rows": "model", "grid": "", "columns": "app.model", "both": "model.module"}[layout]
    run_ranks(4, save, source, tmp_path / "dcp", prefix, layout)
    shutil.copy(source / "config.json", tmp_path / "dcp")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 4
    merge(tmp_path / "dcp", tmp_path / "hf")
    assert hashes(tmp_path / "hf") == hashes(source)
    split(tmp_path / "dcp", tmp_path / "two", 2)
    assert main(["verify", str(tmp_path / "two"), str(source)]) == 0
    assert main(["verify", str(tmp_path / "dcp")]) == 0
    mine, theirs = (
        from_pretrained(tmp_path / "dcp").state_dict(),
        from_pretrained(source).state_dict(),
    )
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


BESIDE = {
    "steps": ("model.", {"step": torch.tensor(3)}),
    "a data loader": ("module.", {"dataloader": {"position": torch.arange(5)}}),
    "both, wrapped": ("app.model.", {"app.step": torch.tensor(3), "app.loader.rng": torch.ones(9)}),
    "steps, not wrapped": ("", {"step": torch.tensor(3)}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_the_model_is_left_out(name, gpt, hashes, tmp_path):
    prefix, beside = BESIDE[name]
    tensors = load_file(gpt / "model.safetensors")
    state = {prefix + key: tensor for key, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**state, **beside}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    shutil.copy(gpt / "config.json", tmp_path / "dcp")
    merge(tmp_path / "dcp", tmp_path / "hf")
    assert hashes(tmp_path / "hf") == hashes(gpt)


def test_weights_of_another_model_beside_it_are_not_left_out(gpt, tmp_path):
    tensors = load_file(gpt / "model.safetensors")
    state = {f"model.{key}": tensor for key, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**state, "ema.weight": torch.ones(3)}, checkpoint_id=str(tmp_path), no_dist=True)
    shutil.copy(gpt / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"ema\.weight|model\.transformer"):
        from_pretrained(tmp_path)


def test_what_other_versions_of_python_pickle_is_read(gpt, hashes, tmp_path, monkeypatch):
    """Python 3.11.2 pickles a member as `getattr(kind, name)`, others by its value; 3.13 moves paths."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as ENCODING

    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    monkeypatch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
    monkeypatch.setattr(
        ENCODING, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            load_file(gpt / "model.safetensors"), checkpoint_id=str(tmp_path / "dcp"), no_dist=True
        )
    metadata = (tmp_path / "dcp" / ".metadata").read_bytes()
    assert b"getattr" in metadata
    assert b"_local" in metadata
    shutil.copy(gpt / "config.json", tmp_path / "dcp")
    merge(tmp_path / "dcp", tmp_path / "hf")
    assert hashes(tmp_path / "hf") == hashes(gpt)


@pytest.mark.parametrize("variant", ["gpt2", "bert-pretraining", "t5", "roberta", "glm", "mt5"])
def test_written_folders_load_in_torch(variant, zoo, hashes, tmp_path):
    """Into the state that transformers' model has, names of tied tensors included."""
    import torch.distributed.checkpoint as dcp
    import transformers

    source = zoo.make(tmp_path / "hf", variant, vocabulary=104 if variant == "glm" else 101)
    merge(source, tmp_path / "dcp", Options(largest_file=20_000), style="dcp")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 1
    found = load_file(source / "model.safetensors")
    wanted = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    if variant != "glm":
        architecture = json.loads((source / "config.json").read_text())["architectures"][0]
        wanted = getattr(transformers, architecture).from_pretrained(source).state_dict()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=str(tmp_path / "dcp"))
    for name, tensor in wanted.items():
        stored = found.get(name, tensor)
        assert torch.equal(loaded[name].view(torch.uint8), stored.view(torch.uint8)), name
    merge(tmp_path / "dcp", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(source)
    assert main(["verify", str(tmp_path / "dcp"), str(source)]) == 0


def test_a_bert_has_no_torch_dist_folder(bert, tmp_path):
    message = r"no bert that equals transformers' \(its layers do not read apply_residual_connect"
    with pytest.raises(ValueError, match=message):
        merge(bert, tmp_path / "out", style="torch_dist")


def test_megatron_core_declares_the_residuals_of_bert_and_reads_them_nowhere():
    """Once a module besides its configuration names the argument, a BERT of it may be ours."""
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    naming = [
        str(path.relative_to(Path(spec.origin).parent))
        for path in Path(spec.origin).parent.rglob("*.py")
        if "apply_residual_connection_post_layernorm" in path.read_text()
    ]
    assert naming == ["transformer/transformer_config.py"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("damage", [False, True])
def test_arguments_among_the_tensors(damage, gpt, hashes, tmp_path):
    """Newer releases of megatron-core, such as 0.19, write a list of what common.pt held as one more object."""
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader

    merge(gpt, tmp_path / "ours", style="torch_dist")
    place = tmp_path / "ours" / "release"
    listed = FileSystemReader(place).read_metadata().state_dict_metadata
    state: dict = {name: torch.empty(entry.size) for name, entry in listed.items()}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    common = torch.load(place / "common.pt", weights_only=False)
    state["common_state/shard_0_1"] = common if damage else [common]
    newer = tmp_path / "newer"
    dcp.save(
        state, checkpoint_id=newer, no_dist=True,
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )  # fmt: skip
    shutil.copy(place / "metadata.json", newer)
    if damage:
        with pytest.raises(ValueError, match=r"common_state/shard_0_1 in .* is no list of one"):
            merge(newer, tmp_path / "hf")
        return
    merge(newer, tmp_path / "padded")
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["n_head"] == 4
    shutil.copy(gpt / "config.json", tmp_path / "c.json")
    merge(newer, tmp_path / "hf", Options(config_file=tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(gpt)


def test_an_interrupted_conversion_resumes(gpt, hashes, tmp_path):
    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(gpt, tmp_path / "dcp", Options(jobs=1), stop, style="dcp")
    for _ in range(2):  # the second time it is complete
        outcome = merge(gpt, tmp_path / "dcp", Options(resume=True), style="dcp")
        assert outcome.kept > 0
    merge(tmp_path / "dcp", tmp_path / "back")
    assert hashes(tmp_path / "back") == hashes(gpt)


def core_gpt(given: Namespace) -> Any:
    """megatron-core's GPT of local layers, on a CPU: without fused kernels and without its GPU random states."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig, dot_product_attention

    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
    nothing = Namespace(fork=contextlib.nullcontext)
    tensor_parallel.get_cuda_rng_tracker = (
        dot_product_attention.tensor_parallel.get_cuda_rng_tracker
    ) = lambda: nothing
    sizes = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=128, tensor_model_parallel_size=2,
        use_cpu_initialization=True, params_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0,
        layernorm_epsilon=1e-5, activation_func=partial(torch.nn.functional.gelu, approximate="tanh"),
        bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    return GPTModel(
        sizes,
        spec,
        given.padded_vocab_size,
        64,
        share_embeddings_and_output_weights=True,
        parallel_output=False,
    )


@pytest.mark.before_release
def test_megatron_core_runs_what_is_written_and_its_checkpoints_are_read(
    gpt, run_ranks, hashes, tmp_path, capsys
):
    import transformers

    split(gpt, tmp_path / "megatron", 2, style="megatron", names="local")
    ids = torch.randint(300, (2, 17), generator=torch.Generator().manual_seed(0))
    folders = [(tmp_path / "megatron", tmp_path / "dist")]
    [logits] = run_ranks(2, in_megatron_core, core_gpt, folders, ids, isolated=True, timeout=500)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gpt, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        wanted = model(ids).logits
    assert wanted.abs().max() > 0.5
    assert torch.allclose(logits[..., : wanted.shape[-1]], wanted, rtol=1e-5, atol=1e-5)
    assert main(["inspect", str(tmp_path / "dist")]) == 0
    printed = capsys.readouterr().out
    assert "megatron-core torch_dist" in printed
    assert "gpt2" in printed
    shutil.copy(gpt / "config.json", tmp_path / "c.json")
    merge(tmp_path / "dist", tmp_path / "hf", Options(config_file=tmp_path / "c.json"))
    assert hashes(tmp_path / "hf") == hashes(gpt)
    merge(tmp_path / "dist", tmp_path / "padded")
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["vocab_size"] % 256 == 0


def test_the_hand_made_modules_are_megatron_cores(gpt, tmp_path):
    """The names of the files that the other tests make are those that megatron-core loaded above."""
    split(gpt, tmp_path / "out", 2, style="megatron", names="local")
    made = dict(
        megatron_files.states(gpt_modules(load_file(gpt / "model.safetensors"), 4, 4), Layout(2))
    )
    with torch.serialization.safe_globals([Namespace]):
        path = tmp_path / "out" / "release" / "mp_rank_01" / "model_optim_rng.pt"
        written = torch.load(path, weights_only=True)["model"]
    assert written.keys() == made["mp_rank_01"]["model"].keys()
