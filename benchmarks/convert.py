"""Converts checkpoints of random bytes, checks that nothing is lost, and measures time and memory.

    python benchmarks/convert.py --folder /somewhere/with/space [--sizes 24x1024] [--families glm mixtral …]

For each size it runs `cp` and `sha256sum` on the same bytes, then split, reshard and merge, each in a separate process,
and repeats this `--repeat` times. `--formats` also writes and reads other programs' folders. Memory is the peak
resident memory (VmHWM) above that of `import torch`. No figure is printed for a conversion whose result is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from shutil import copyfile, rmtree

import numpy as np
from safetensors import safe_open

from shardzoo.checkpoint.safetensors_header import make_header

CHILD = """
import sys, time
started = time.perf_counter()
{work}
seconds = time.perf_counter() - started
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        peak = int(line.split()[1]) * 1024
print("MEASURED", seconds, time.process_time(), peak)
"""


def measure(work: str) -> tuple[float, float, int]:
    """Returns the seconds, CPU seconds and peak resident bytes of a Python process that runs `work`."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(work=work)], capture_output=True, text=True, check=False
    )
    if done.returncode or "MEASURED" not in done.stdout:
        raise SystemExit(f"failed: {work}\n{done.stdout}{done.stderr}")
    seconds, cpu, peak = done.stdout.rpartition("MEASURED")[2].split()
    return float(seconds), float(cpu), int(peak)


def convert(*arguments: str) -> tuple[float, float, int]:
    """Returns what `measure` returns, for a command of `shardzoo convert` with its imports."""
    return measure(
        f"from shardzoo.cli.main import main; assert main({['convert', *arguments]!r}) == 0"
    )


def shell(*command: str) -> tuple[float, float]:
    """Returns the seconds and CPU seconds of a command."""
    started, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, capture_output=True)
    seconds, after = time.perf_counter() - started, os.times()
    return seconds, sum(after[2:4]) - sum(before[2:4])


def glm_shapes(
    layers: int, hidden: int = 1024, positions: int = 1025, vocabulary: int = 50048
) -> tuple[dict, dict]:
    """Returns the config.json and the tensors' shapes of the original GLM.

    With 24 layers it is GLM-Large-Chinese: 356 million parameters, 1.42 GB in fp32.
    """
    shapes = {"word_embeddings.weight": (vocabulary, hidden)}
    for name in ("position_embeddings", "block_position_embeddings"):
        shapes[f"transformer.{name}.weight"] = (positions, hidden)
    for i in range(layers):
        at = f"transformer.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{at}{norm}.weight": (hidden,), f"{at}{norm}.bias": (hidden,)}
        for linear, rows, columns in (
            ("attention.query_key_value", 3 * hidden, hidden),
            ("attention.dense", hidden, hidden),
            ("mlp.dense_h_to_4h", 4 * hidden, hidden),
            ("mlp.dense_4h_to_h", hidden, 4 * hidden),
        ):
            shapes |= {f"{at}{linear}.weight": (rows, columns), f"{at}{linear}.bias": (rows,)}
    shapes |= {
        "transformer.final_layernorm.weight": (hidden,),
        "transformer.final_layernorm.bias": (hidden,),
    }
    config = {
        "model_type": "glm",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_attention_heads": hidden // 64,
        "max_sequence_length": positions - 1,
        "block_position_encoding": True,
    }
    return config, shapes


def gpt2_shapes(
    layers: int, hidden: int = 1024, positions: int = 1024, vocabulary: int = 50257
) -> tuple[dict, dict]:
    """Returns the config.json and the tensors' shapes of a GPT-2, whose matrices are stored transposed.

    With 24 layers it is gpt2-medium.
    """
    shapes = {
        "transformer.wte.weight": (vocabulary, hidden),
        "transformer.wpe.weight": (positions, hidden),
    }
    for i in range(layers):
        at = f"transformer.h.{i}."
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{at}{norm}.weight": (hidden,), f"{at}{norm}.bias": (hidden,)}
        for linear, rows, columns in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, 4 * hidden),
            ("mlp.c_proj", 4 * hidden, hidden),
        ):
            shapes |= {f"{at}{linear}.weight": (rows, columns), f"{at}{linear}.bias": (columns,)}
    shapes |= {"transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}
    config = {
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": 16,
        "n_positions": positions,
    }
    return config, shapes


def llama_shapes(
    layers: int, hidden: int = 1024, positions: int = 4096, vocabulary: int = 32000
) -> tuple[dict, dict]:
    """Returns the config.json and the tensors' shapes of a Llama with four query heads for each key-value head."""
    inner, narrow = 11 * hidden // 4, hidden // 4
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}{norm}.weight": (hidden,)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{at}self_attn.{x}_proj.weight": (hidden, hidden) for x in "qo"}
        shapes |= {f"{at}self_attn.{x}_proj.weight": (narrow, hidden) for x in "kv"}
        shapes |= {f"{at}mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
    }
    return config, shapes


def mixtral_shapes(layers: int, hidden: int = 512, vocabulary: int = 8000) -> tuple[dict, dict]:
    """Returns the config.json and the tensors' shapes of a Mixtral of 8 experts."""
    config, dense = llama_shapes(layers, hidden, vocabulary=vocabulary)
    inner = 7 * hidden // 2
    shapes = {name: shape for name, shape in dense.items() if ".mlp." not in name}
    for i in range(layers):
        at = f"model.layers.{i}.block_sparse_moe."
        shapes[f"{at}gate.weight"] = (8, hidden)
        for e in range(8):
            shapes |= {f"{at}experts.{e}.{x}.weight": (inner, hidden) for x in ("w1", "w3")}
            shapes[f"{at}experts.{e}.w2.weight"] = (hidden, inner)
    config |= {"model_type": "mixtral", "intermediate_size": inner, "num_local_experts": 8}
    return config, shapes


def gpt_oss_shapes(layers: int, hidden: int = 512, vocabulary: int = 8000) -> tuple[dict, dict]:
    """Returns those of a gpt-oss of 32 experts, with one tensor of all experts for each projection."""
    config, dense = llama_shapes(layers, hidden, vocabulary=vocabulary)
    shapes = {name: shape for name, shape in dense.items() if ".mlp." not in name}
    heads = config["num_attention_heads"]
    for i in range(layers):
        at = f"model.layers.{i}."
        for x in "qkvo":
            rows, _ = shapes[f"{at}self_attn.{x}_proj.weight"]
            shapes[f"{at}self_attn.{x}_proj.bias"] = (rows,)
        shapes |= {
            f"{at}self_attn.sinks": (heads,),
            f"{at}mlp.router.weight": (32, hidden),
            f"{at}mlp.router.bias": (32,),
            f"{at}mlp.experts.gate_up_proj": (32, hidden, 2 * hidden),
            f"{at}mlp.experts.gate_up_proj_bias": (32, 2 * hidden),
            f"{at}mlp.experts.down_proj": (32, hidden, hidden),
            f"{at}mlp.experts.down_proj_bias": (32, hidden),
        }
    config |= {
        "model_type": "gpt_oss",
        "intermediate_size": hidden,
        "num_local_experts": 32,
        "head_dim": 64,
    }
    return config, shapes


FAMILIES = {
    "glm": glm_shapes,
    "gpt2": gpt2_shapes,
    "llama": llama_shapes,
    "mixtral": mixtral_shapes,
    "gpt_oss": gpt_oss_shapes,
}


def write_checkpoint(folder: Path, config: dict, shapes: dict) -> int:
    """Writes a Hugging Face folder with random bytes as weights and returns their number."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, _ = make_header(
        {name: ("F32", shape) for name, shape in shapes.items()}, {"format": "pt"}
    )
    rest = total = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        while rest:
            block = random.bytes(min(rest, 8 << 20))
            file.write(block)
            rest -= len(block)
    return total


def tensor_hashes(path: str) -> dict[str, str]:
    """Returns the sha256 of each tensor by name, read with the safetensors library."""
    with safe_open(path, framework="np") as file:
        return {name: hashlib.sha256(file.get_tensor(name)).hexdigest() for name in file.keys()}  # noqa: SIM118


def steps_of_formats(family: str, source: Path, root: Path) -> dict[str, tuple[object, ...]]:
    """Returns the conversions to and from other programs' folders, each merged into a folder `of-…`."""
    one_file = ("--max-file-gb", "1000")
    steps: dict[str, tuple[object, ...]] = {
        "to mp_rank files": ("split", source, root / "legacy", "--to", "legacy", "--tp", 2),
        "from mp_rank files": ("merge", root / "legacy", root / "of-legacy", *one_file),
        "to DCP": ("merge", source, root / "dcp", "--to", "dcp"),
        "from DCP": ("merge", root / "dcp", root / "of-dcp", *one_file),
    }
    if family not in ("glm", "gpt_oss"):
        steps |= {
            "to Megatron-LM, 2 x 2": (
                "split",
                source,
                root / "megatron",
                "--to",
                "megatron",
                "--tp",
                2,
                "--pp",
                2,
            ),
            "from Megatron-LM": ("merge", root / "megatron", root / "of-megatron", *one_file),
        }
    if family == "gpt2":
        write_layer_files(source, root / "layers")
        steps["from layer files"] = ("merge", root / "layers", root / "of-layers", *one_file)
    return steps


def check_and_remove(digests: dict[str, str], merged_from: Path, merged: Path) -> None:
    if tensor_hashes(str(merged / "model.safetensors")) != digests:
        raise SystemExit(f"{merged} differs from the file that was split")
    rmtree(merged)
    rmtree(merged_from)


def write_layer_files(source: Path, folder: Path) -> None:
    """Writes Megatron-DeepSpeed's files of two tensor-parallel ranks, by the tests' own code. The folder may exist."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "harness"))
    from megatron_files import Layout, gpt_modules, write_layers
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    modules = gpt_modules(
        load_file(source / "model.safetensors"), config["n_head"], config["n_layer"]
    )
    write_layers(folder, modules, Layout(2), "deepspeed")
    copyfile(source / "config.json", folder / "config.json")


def run(family: str, size: str, root: Path, repeat: int, formats: bool) -> None:
    layers, hidden = map(int, size.split("x"))
    config, shapes = FAMILIES[family](layers, hidden)
    source = root / "source"
    nbytes = write_checkpoint(source, config, shapes)
    weights = str(source / "model.safetensors")
    digests = tensor_hashes(weights)
    _, _, bare = measure("import torch")
    print(
        f"{family}, {layers} layers of {hidden}, {nbytes / 1e9:.2f} GB; import torch alone: {bare / 2**20:.0f} MiB"
    )
    for _ in range(repeat):
        copied, copying = shell("cp", weights, str(root / "copy"))
        hashed, hashing = shell("sha256sum", str(root / "copy"))
        (root / "copy").unlink()
        steps = {
            "split, 2 ranks": ("split", source, root / "two", "--tp", "2"),
            "reshard, 2 to 4": ("reshard", root / "two", root / "four", "--tp", "4"),
            "merge, 4 ranks": ("merge", root / "four", root / "merged", "--max-file-gb", "1000"),
        }
        if formats:
            steps |= steps_of_formats(family, source, root)
        results: dict[str, tuple[float, float, int]] = {}
        for name, step in steps.items():
            results[name] = convert(*map(str, step))
            if step[0] == "merge" and "--to" not in step:
                check_and_remove(digests, Path(str(step[1])), Path(str(step[2])))
        base = copied + hashed
        print(
            f"  cp {copied:.2f} s + sha256sum {hashed:.2f} s = {base:.2f} s, {copying + hashing:.2f} s of CPU"
        )
        for name, (seconds, cpu, peak) in results.items():
            memory = (peak - bare) / 2**20
            print(
                f"  {name}: {seconds:.2f} s, {seconds / base:.2f} x; {cpu:.2f} s of CPU; {memory:.0f} MiB above torch"
            )
        for folder in root.iterdir():
            if folder != source:
                rmtree(folder)
    rmtree(source)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="where to work, in a new folder that is removed"
    )
    parser.add_argument("--families", nargs="+", default=["glm", "gpt2"], choices=list(FAMILIES))
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["24x1024", "108x1024", "24x2304"],
        help="layers x hidden size; by default 1.4 GB, and more than four times that in more tensors or larger ones",
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--formats", action="store_true", help="other programs' folders too")
    arguments = parser.parse_args()
    root = arguments.folder / "convert-benchmark"
    root.mkdir(parents=True)
    try:
        for size in arguments.sizes:
            for family in arguments.families:
                run(family, size, root, arguments.repeat, arguments.formats)
    finally:
        rmtree(root)


if __name__ == "__main__":
    main()
