"""Quantized folders are dequantized to what the programs that wrote them compute, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardzoo.checkpoint.formats import quantized
from shardzoo.cli.main import main
from shardzoo.convert import Options, merge, split

GOLDEN = Path(__file__).parent.parent / "golden" / "quantized.safetensors"
TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAME = "model.layers.0.mlp.up_proj"


def read_golden() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]]:
    """For each case its parts, its settings and what the other program dequantizes it to."""
    with safe_open(GOLDEN, "pt") as file:
        settings = json.loads(file.metadata()["settings"])
        parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in settings}
        for key in file.keys():  # noqa: SIM118 - no mapping
            case, part = key.split("/")
            parts[case][part] = file.get_tensor(key)
    return {name: (parts[name], settings[name], parts[name].pop("expected")) for name in settings}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], settings: Any) -> Path:
    folder.mkdir()
    stored = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama", "torch_dtype": "float16", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dequantized(source: Path, dtype: str = "F32") -> dict[str, torch.Tensor]:
    target = source.with_name(f"{source.name}-{dtype}")
    outcome = merge(source, target, Options(dequantize=dtype))
    found = load_file(target / "model.safetensors")
    assert outcome.tensors == len(found)
    config = json.loads((target / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == str(TYPES[dtype]).removeprefix("torch.")
    return found


@pytest.mark.parametrize("name", read_golden())
def test_weights_are_those_of_the_program_that_wrote_them(name, tmp_path):
    parts, settings, expected = read_golden()[name]
    tensors = {f"{NAME}.{part}": tensor for part, tensor in parts.items()}
    tensors[f"{NAME}.input_scale"] = torch.ones(1)
    tensors["model.norm.weight"] = torch.arange(5.0)
    source = write_folder(tmp_path / "source", tensors, settings)
    for dtype, torch_dtype in TYPES.items():
        if settings["quant_method"] == "bitsandbytes" and torch_dtype != expected.dtype:
            continue  # it rounds once, to the type that the weight had
        found = dequantized(source, dtype)
        assert found.keys() == {f"{NAME}.weight", "model.norm.weight"}
        assert found[f"{NAME}.weight"].equal(expected.to(torch_dtype)), dtype
        assert found["model.norm.weight"].equal(torch.arange(5.0))


def test_fp8_in_blocks(tmp_path):
    """As transformers where blocks divide the matrix; DeepSeek's last blocks are smaller."""
    torch.manual_seed(1)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    even = (torch.randn(256, 384) * 50).to(torch.float8_e4m3fn)
    odd = even[:200, :300]
    scales = torch.rand(2, 3)
    wanted = Fp8Dequantize(None)._dequantize_one(even, scales, torch.bfloat16)
    whole_scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    exponents = torch.randint(120, 130, (2, 3), dtype=torch.uint8)
    tensors = {
        "even.weight": even,
        "even.weight_scale_inv": scales,
        "odd.weight": odd,
        "odd.weight_scale_inv": scales,
        "experts.gate_up_proj": even,
        "experts.gate_up_proj_scale_inv": exponents,
        "whole.weight": even,
        "whole.weight_scale": torch.tensor(0.5),
    }
    found = dequantized(write_folder(tmp_path / "source", tensors, settings), "BF16")
    assert len(found) == 4
    assert found["even.weight"].equal(wanted)
    expected = odd.float() * whole_scales[:200, :300]
    assert found["odd.weight"].equal(expected.bfloat16())
    expected = Fp8Dequantize(None)._dequantize_one(even, exponents, torch.bfloat16)
    assert found["experts.gate_up_proj"].equal(expected)
    assert found["whole.weight"].equal((even.float() * 0.5).bfloat16())


def test_mxfp4(tmp_path):
    torch.manual_seed(2)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, (3, 10, 4), dtype=torch.uint8)
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    source = write_folder(tmp_path / "source", tensors, {"quant_method": "mxfp4"})
    found = dequantized(source, "BF16")["experts.down_proj"]
    assert found.equal(convert_moe_packed_tensors(blocks.clone(), scales.clone()))


def pack(numbers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Packs numbers along a dimension by plain arithmetic: place i of a word has order[i]."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    moved = numbers.long().movedim(dim, -1).reshape(-1, per_word)
    words = torch.zeros(len(moved), dtype=torch.int64)
    for place, which in enumerate(order):
        words += moved[:, which] << (bits * place)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    shape = list(numbers.movedim(dim, -1).shape)
    shape[-1] //= per_word
    return words.reshape(shape).movedim(-1, dim)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(bits, version, tmp_path):
    """By the published formula, with features in the order of their activations."""
    torch.manual_seed(bits)
    inputs, outputs, groups = 64, 96, 4
    values = torch.randint(0, 1 << bits, (inputs, outputs))
    zeros = torch.randint(1, 1 << bits, (groups, outputs))
    scales = torch.rand(groups, outputs).half()
    group_of = torch.arange(inputs)[torch.randperm(inputs)] % groups
    tensors = {
        f"{NAME}.qweight": pack(values, bits, 0),
        f"{NAME}.qzeros": pack(zeros - int(version == "gptq"), bits, 1),
        f"{NAME}.scales": scales,
        f"{NAME}.g_idx": group_of.int(),
        f"{NAME}.bias": torch.ones(outputs),
    }
    settings = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    found = dequantized(write_folder(tmp_path / "source", tensors, settings), "F16")
    expected = (values - zeros[group_of]).half() * scales[group_of]
    assert found[f"{NAME}.weight"].equal(expected.t())
    assert found.keys() == {f"{NAME}.weight", f"{NAME}.bias"}


def test_awq(tmp_path):
    torch.manual_seed(3)
    inputs, outputs, groups = 64, 96, 4
    values = torch.randint(0, 16, (inputs, outputs))
    zeros = torch.randint(0, 16, (groups, outputs))
    scales = torch.rand(groups, outputs).half()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        f"{NAME}.qweight": pack(values, 4, 1, order),
        f"{NAME}.qzeros": pack(zeros, 4, 1, order),
        f"{NAME}.scales": scales,
    }
    settings = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    found = dequantized(write_folder(tmp_path / "source", tensors, settings), "F16")
    group_of = torch.arange(inputs) // (inputs // groups)
    expected = (values - zeros[group_of]).half() * scales[group_of]
    assert found[f"{NAME}.weight"].equal(expected.t())


def test_pieces_and_the_columns_that_are_kept_meet(tmp_path, monkeypatch):
    """16 outputs at a time, of which three words of the eight outputs of AWQ are kept."""
    monkeypatch.setattr(quantized, "PIECE_ELEMENTS", 64 * 16)
    monkeypatch.setattr(quantized, "KEPT_WORDS", 64 * 3)
    for name in ("awq", "gptq", "mxfp4"):
        (tmp_path / name).mkdir()
    test_awq(tmp_path / "awq")
    test_gptq(4, "gptq", tmp_path / "gptq")
    test_mxfp4(tmp_path / "mxfp4")


# What transformers dequantizes GPTQ and AWQ by. It changes PyTorch's settings when it is imported.
GPTQMODEL = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

cases = json.loads(sys.argv[1])
stored = load_file(sys.argv[2])
found = {}
for name, (method, bits, version, inputs, outputs, groups) in cases.items():
    parts = {part: stored[f"{name}/{part}"] for part in ("qweight", "qzeros", "scales")}
    group = inputs // groups
    if method == "awq":
        found[name] = dequantize_gemm(*parts.values(), bits, group).t().contiguous()
        layer = AwqTorchLinear(bits, group, False, False, inputs, outputs, register_buffers=True,
                               dtype=parts["scales"].dtype)
        for part, tensor in parts.items():
            getattr(layer, part).data = tensor
        layer.post_init()
        identity = torch.eye(inputs, dtype=parts["scales"].dtype)
        assert layer(identity).t().equal(found[name])
        continue
    layer = TorchLinear(bits, group, False, True, inputs, outputs)
    for part, tensor in {**parts, "g_idx": stored[f"{name}/g_idx"]}.items():
        getattr(layer, part).data = tensor
    if version == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
    layer.post_init()
    found[name] = layer.dequantize_weight().t().contiguous()
save_file(found, sys.argv[3])
"""


@pytest.mark.before_release
@pytest.mark.skipif(find_spec("gptqmodel") is None, reason="GPTQModel is not installed")
def test_gptq_and_awq_are_what_the_library_of_transformers_computes(tmp_path):
    torch.manual_seed(7)
    inputs, outputs, groups = 128, 96, 4
    cases: dict[str, Any] = {}
    stored: dict[str, torch.Tensor] = {}
    for bits in (2, 4, 8):
        for version in ("gptq", "gptq_v2"):
            cases[f"{version} {bits}"] = ("gptq", bits, version, inputs, outputs, groups)
    cases["awq"] = ("awq", 4, "gemm", inputs, outputs, groups)
    cases |= {f"{name} bf16": case for name, case in cases.items() if "awq" in name or "4" in name}
    for name, (method, bits, version, *_) in cases.items():
        order = (0, 2, 4, 6, 1, 3, 5, 7) if method == "awq" else ()
        values = torch.randint(0, 1 << bits, (inputs, outputs))
        # GPTQ's first format keeps z - 1, so that z is not 0.
        zeros = torch.randint(int(version == "gptq"), 1 << bits, (groups, outputs))
        dtype = torch.bfloat16 if "bf16" in name else torch.float16
        stored[f"{name}/qweight"] = pack(values, bits, int(method == "awq"), order)
        stored[f"{name}/qzeros"] = pack(zeros - int(version == "gptq"), bits, 1, order)
        stored[f"{name}/scales"] = torch.rand(groups, outputs).to(dtype)
        if method == "gptq":
            group_of = torch.arange(inputs)[torch.randperm(inputs)] % groups
            stored[f"{name}/g_idx"] = group_of.int()
    stored = {key: tensor.contiguous() for key, tensor in stored.items()}
    save_file(stored, tmp_path / "stored.safetensors")
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("stored", "expected")]
    done = subprocess.run(
        [sys.executable, "-c", GPTQMODEL, json.dumps(cases), *paths],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    expected = load_file(paths[1])
    assert expected.keys() == cases.keys()
    for name, (method, bits, version, *_) in cases.items():
        parts = {
            f"{NAME}.{key.rpartition('/')[2]}": tensor
            for key, tensor in stored.items()
            if key.startswith(f"{name}/")
        }
        settings = {"quant_method": method, "bits": bits}
        settings["version" if method == "awq" else "checkpoint_format"] = version
        source = write_folder(tmp_path / name.replace(" ", "-"), parts, settings)
        dtype = "BF16" if "bf16" in name else "F16"
        assert dequantized(source, dtype)[f"{NAME}.weight"].equal(expected[name]), name


@pytest.fixture(scope="module")
def quantized_llama(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny Llama of fp8 in blocks of 16, and the folder of the same weights in bf16."""
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith("proj.weight"):
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.float().view(rows // 16, 16, columns // 16, 16)
        scales = blocks.abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
        tensors[name] = (tensor.float() / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        tensor.copy_((tensors[name].float() * spread).bfloat16())
    model.save_pretrained(folder / "full")
    values = json.loads((folder / "full" / "config.json").read_text())
    (folder / "fp8").mkdir()
    save_file(tensors, folder / "fp8" / "model.safetensors", {"format": "pt"})
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "fp8" / "config.json").write_text(json.dumps(values))
    return folder / "fp8", folder / "full"


def test_a_model_is_split_as_its_full_weights_are(quantized_llama, tmp_path, capsys):
    source, full = quantized_llama
    command = ["convert", "split", str(source), str(tmp_path / "two"), "--tp", "2"]
    assert main([*command, "--dequantize", "bf16"]) == 0
    split(full, tmp_path / "expected", 2)
    for name in ("rank_00.safetensors", "rank_01.safetensors"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "two"]
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        source, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    merge(source, tmp_path / "merged", Options(dequantize="BF16"))
    found = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in theirs.state_dict().items():
        assert found[name].equal(tensor), name


@pytest.mark.parametrize("stop", [1, 9, 24])
def test_an_interrupted_conversion_goes_on(quantized_llama, tmp_path, stop):
    """Stopped after some tensors of the full weights, or while these are split."""
    source, full = quantized_llama
    calls = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt

    target = tmp_path / "two"
    with pytest.raises(KeyboardInterrupt):
        split(source, target, 2, Options(dequantize="BF16"), interrupt)
    assert not target.exists()
    split(source, target, 2, Options(dequantize="BF16", resume=True))
    split(full, tmp_path / "expected", 2)
    for name in ("rank_00.safetensors", "rank_01.safetensors"):
        assert (target / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "two"]


def test_what_cannot_be_dequantized_is_one_message(quantized_llama, tmp_path, capsys):
    source, full = quantized_llama
    with pytest.raises(ValueError, match=r"--dequantize bf16"):
        split(source, tmp_path / "a", 2)
    with pytest.raises(ValueError, match="is not quantized"):
        merge(full, tmp_path / "a", Options(dequantize="BF16"))
    with pytest.raises(ValueError, match="leave out dtype"):
        merge(source, tmp_path / "a", Options(dequantize="BF16", dtype="F16"))
    parts = read_golden()["nf4"][0]
    cases = {
        "needs": {f"{NAME}.{part}": t for part, t in parts.items() if "quant_state" not in part},
        "scales do not divide": {
            "a.weight": torch.zeros(10, 10).to(torch.float8_e4m3fn),
            "a.weight_scale_inv": torch.ones(3, 3),
        },
        "not known here": {"a.weight_packed": torch.zeros(4, 4, dtype=torch.uint8)},
        "3 bits": {"a.qweight": torch.zeros(3, 8).int(), "a.scales": torch.ones(1, 8),
                   "a.qzeros": torch.zeros(1, 1).int()},
        "do not fit": {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
                       "a.weight_scale": torch.ones(4, 2), "a.weight_g_idx": torch.full((4,), 7)},
    }  # fmt: skip
    for number, (message, tensors) in enumerate(cases.items()):
        folder = write_folder(tmp_path / f"case{number}", tensors, {"quant_method": "x", "bits": 3})
        with pytest.raises(ValueError, match=message):
            merge(folder, tmp_path / "a", Options(dequantize="BF16"))
        assert not (tmp_path / "a").exists()
        assert not list(tmp_path.glob(".*"))
    assert main(["convert", "merge", str(full), str(tmp_path / "a"), "--dequantize", "bf16"]) == 2
    assert "is not quantized" in capsys.readouterr().err
