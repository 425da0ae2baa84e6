"""Draws the pictures of docs/concepts.md from the code's own numbers: `Shard` objects, counted messages, a manifest.

    python docs/scripts/drawings.py [FOLDER]        default: docs/pictures

Models of published size are on the meta device, and the second rank is a stand-in that answers nothing, so this takes
seconds and computes nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.fx.experimental._config as symbolic
from svg import RANKS, WHOLE, Drawing
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shardzoo
from shardzoo.checkpoint.manifest import MANIFEST, Manifest
from shardzoo.convert import Options, split
from shardzoo.data import train_byte_level_bpe
from shardzoo.models import ParallelConfig, family, find_config
from shardzoo.models.activations import Batch, Layout, block_bytes
from shardzoo.mpu import ParallelMesh, Shard, assign_dropout_sites, dropout_state
from shardzoo.trainer import Trainer

PICTURES = Path(__file__).parents[1] / "pictures"
RANKS_OF_ALL = 2
PRESET, POSITIONS = "gpt2", 1024
# torch knows no autocast of the meta device, and no number of its nonzero elements.
ON_META = (
    mock.patch.multiple(
        "torch", is_autocast_enabled=lambda *_: False, get_autocast_dtype=lambda *_: torch.float32
    ),
    mock.patch.object(symbolic, "meta_nonzero_assume_all_nonzero", True),
)


def draw_layers(path: Path) -> None:
    """The four weights of a block, with the rows or columns of each rank."""
    model = shardzoo.from_config(PRESET, device="meta")
    parameters = dict(model.named_parameters())
    heads = find_config(PRESET).n_head // RANKS_OF_ALL
    inner = parameters["blocks.0.mlp.up.weight"].shard.shape[0] // RANKS_OF_ALL
    drawing = Drawing(
        1000, 450, "How a column-parallel and a row-parallel layer are split over two ranks"
    )
    for row, (names, between) in enumerate(
        (
            (
                ("attention.qkv", "attention.output"),
                [f"{heads} heads", "on each rank:", "no messages"],
            ),
            (("mlp.up", "mlp.down"), [f"{inner:,} features", "on each rank:", "no messages"]),
        )
    ):
        y = 26 + row * 210
        drawing.labeled(10, y + 70, 110, 50, WHOLE, ["x, whole on", "every rank"])
        drawing.arrow(122, y + 95, 150)
        draw_weight(drawing, 155, y, names[0], parameters[f"blocks.0.{names[0]}.weight"].shard)
        drawing.arrow(415, y + 95, 440)
        drawing.lines(500, y + 82, between, "middle")
        drawing.arrow(565, y + 95, 590)
        draw_weight(drawing, 595, y, names[1], parameters[f"blocks.0.{names[1]}.weight"].shard)
        drawing.arrow(800, y + 95, 875)
        drawing.labeled(
            880, y + 60, 110, 70, WHOLE, ["all-reduce: the", "ranks' partial", "results, added"]
        )
    drawing.legend(155, 436)
    drawing.save(path)


def draw_weight(drawing: Drawing, x: float, y: float, name: str, shard: Shard) -> None:
    """A weight [out, in] to scale, each rank's part in its color, and the ranges in words."""
    kind = (
        "column-parallel: outputs are split" if shard.dim == 0 else "row-parallel: inputs are split"
    )
    drawing.text(x, y, f"{name}.weight [{shard.shape[0]:,}, {shard.shape[1]:,}]", weight="bold")
    drawing.text(x, y + 16, kind)
    scale = 120 / 3072
    height, width = (size * scale for size in shard.shape)
    top = y + 28
    for rank in range(RANKS_OF_ALL):
        for start, stop in shard.ranges(rank, RANKS_OF_ALL):
            first, length = start * scale, (stop - start) * scale
            place = (
                (x, top + first, width, length)
                if shard.dim == 0
                else (x + first, top, length, height)
            )
            drawing.box(*place, RANKS[rank])
    words = []
    for rank in range(RANKS_OF_ALL):
        ranges = [f"{start:,}–{stop - 1:,}" for start, stop in shard.ranges(rank, RANKS_OF_ALL)]
        unit = "rows" if shard.dim == 0 else "columns"
        words += [f"rank {rank}: {unit} {ranges[0]}", *(f"   {part}" for part in ranges[1:])]
        words.append(
            f"   = [{', '.join(f'{size:,}' for size in shard.local_shape(rank, RANKS_OF_ALL))}]"
        )
    drawing.lines(
        *((x + width + 10, top + 12) if shard.dim == 0 else (x, top + height + 20)), words
    )


class Messages(TorchDispatchMode):
    """Counts the collectives by name and by the bytes of the whole tensor."""

    NAMES = {  # noqa: RUF012 - operation -> name, and which argument is the whole tensor
        "allreduce_": ("all-reduce", 0),
        "_allgather_base_": ("all-gather", 0),
        "_reduce_scatter_base_": ("reduce-scatter", 1),
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, which = self.NAMES[func._schema.name.removeprefix("c10d::")]
            tensors = args[which] if isinstance(args[which], (list, tuple)) else [args[which]]
            self.counts[
                name, sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            ] += 1
        return func(*args, **(kwargs or {}))


def messages(mesh: ParallelMesh, sequence_parallel: bool, layers: int) -> tuple[Counter, Counter]:
    """What a model of so many blocks sends in the forward and in the backward pass of one sequence."""
    config = find_config(PRESET).with_changes(n_layer=layers)
    parallel = ParallelConfig(sequence_parallel=sequence_parallel)
    model = shardzoo.from_config(config, mesh, device="meta", parallel_config=parallel).train()
    assign_dropout_sites(model)
    dropout_state.set(0, 0)
    ids = torch.zeros(1, POSITIONS, dtype=torch.long, device="meta")
    with Messages() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with Messages() as backward:
        loss.backward()
    return forward.counts, backward.counts


def of_a_block(mesh: ParallelMesh, sequence_parallel: bool) -> list[list[str]]:
    """The messages that one more block adds, forward and backward, in words."""
    one, two = (messages(mesh, sequence_parallel, layers) for layers in (1, 2))
    added = [many - few for few, many in zip(one, two, strict=True)]
    return [
        [f"{count} × {name} of {megabytes(size)}" for (name, size), count in sorted(part.items())]
        for part in added
    ]


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size > 1e5 else f"{size / 1e3:.1f} kB"


def draw_sequence(path: Path) -> None:
    """What each rank holds and sends in a block, without and with sequence parallelism."""
    hidden = find_config(PRESET).n_embd
    dist.init_process_group("fake", rank=0, world_size=RANKS_OF_ALL, store=FakeStore())
    mesh = ParallelMesh(tensor_parallel_size=RANKS_OF_ALL)
    drawing = Drawing(1000, 430, "What sequence parallelism moves")
    for row, sequence_parallel in enumerate((False, True)):
        y = 24 + row * 195
        with ON_META[0], ON_META[1]:
            forward, backward = of_a_block(mesh, sequence_parallel)
        drawing.text(
            10,
            y,
            f"{'With' if sequence_parallel else 'Without'} sequence parallelism",
            weight="bold",
        )
        before, after = (
            ("all-gather", "reduce-scatter") if sequence_parallel else ("", "all-reduce")
        )
        x = 10
        for layer in ("attention", "MLP"):
            held = POSITIONS // RANKS_OF_ALL if sequence_parallel else POSITIONS
            draw_stream(drawing, x, y + 14, ["norm", f"{held:,} × {hidden}"], sequence_parallel)
            drawing.text(x + 132, y + 40, before, "middle")
            drawing.arrow(x + 92, y + 55, x + 172)
            draw_stream(
                drawing, x + 175, y + 14, [layer, f"{POSITIONS:,} × {hidden // RANKS_OF_ALL}"], True
            )
            drawing.text(x + 318, y + 40, after, "middle")
            drawing.arrow(x + 267, y + 55, x + 372)
            draw_stream(
                drawing,
                x + 375,
                y + 14,
                ["dropout, sum", f"{held:,} × {hidden}"],
                sequence_parallel,
            )
            x += 475
            if layer == "attention":
                drawing.arrow(x - 6, y + 55, x + 8)
                x += 10
        drawing.lines(10, y + 130, ["forward pass of a block:", *forward])
        drawing.lines(350, y + 130, ["backward pass of a block:", *backward])
        drawing.lines(
            690,
            y + 130,
            ["kept on a rank for the backward pass:", megabytes(kept(sequence_parallel))],
        )
    drawing.legend(10, 416)
    drawing.text(400, 416, f"{PRESET}, one sequence of {POSITIONS:,} positions, fp32")
    drawing.save(path)
    dist.destroy_process_group()


def draw_stream(drawing: Drawing, x: float, y: float, texts: list[str], is_split: bool) -> None:
    """One tensor on each rank: of a color of its own if the ranks hold different parts."""
    for rank in range(RANKS_OF_ALL):
        drawing.labeled(x, y + rank * 44, 90, 40, RANKS[rank] if is_split else WHOLE, texts)


def kept(sequence_parallel: bool) -> int:
    """Bytes that a block keeps on a rank, as `shardzoo estimate` counts them."""
    config = find_config(PRESET)
    [stack] = family(PRESET).activations(config).stacks
    layout = Layout(4, RANKS_OF_ALL, ParallelConfig(sequence_parallel=sequence_parallel))
    return block_bytes(stack, Batch(1, POSITIONS), layout).kept


def make_checkpoint(folder: Path) -> Path:
    """A training checkpoint of two ranks, after one step of a small model."""
    train_byte_level_bpe(["def one(two): return three"], 300, folder / "model")
    config = find_config("gpt2-quickstart").with_changes(
        vocab_size=300, bos_token_id=0, eos_token_id=0
    )
    shardzoo.from_config(config).save_pretrained(folder / "model")
    model = shardzoo.from_pretrained(folder / "model")
    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    trainer = Trainer(
        env_type="pytorch", train_steps=1, batch_size=2, save_dir=str(folder), experiment_name="run"
    )
    trainer.train(model, train_dataset=samples)
    split(
        trainer.run_folder.checkpoint(1), folder / "two", RANKS_OF_ALL, Options(with_optimizer=True)
    )
    return folder / "two"


WHAT = {
    "config.json": "Hugging Face's configuration",
    MANIFEST: "every tensor's shape, type, split and sha256",
    "rank_00.safetensors": "weights of rank 0",
    "rank_01.safetensors": "weights of rank 1",
    "optimizer_00.safetensors": "moments of rank 0",
    "optimizer_01.safetensors": "moments of rank 1",
    "trainer_state.json": "step, position in the data, all files' sha256",
}
SHOWN = (
    "word_embeddings.weight",
    "blocks.0.attention.qkv.weight",
    "blocks.0.mlp.down.weight",
    "blocks.0.ln_1.weight",
)


def draw_checkpoint(path: Path) -> None:
    """The files of a training checkpoint, and where the manifest says that some tensors are."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name))
        manifest = Manifest.read(folder)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    texts = sorted(file for file in sizes if file not in WHAT)
    drawing = Drawing(1000, 455, "What a checkpoint folder holds")
    drawing.text(
        10,
        26,
        f"{'step-000001/':<14}  a training checkpoint of {RANKS_OF_ALL} ranks",
        weight="bold",
    )
    for row, (file, what) in enumerate(
        [*WHAT.items(), *((file, "of the tokenizer") for file in texts)]
    ):
        y = 52 + row * 24
        rank = int(file.partition("_0")[2][:1] or 0)
        color = RANKS[rank] if file.startswith(("rank_", "optimizer_")) else WHOLE
        drawing.box(24, y - 12, 14, 14, color)
        weight = f", {sizes[file] / 2**20:.1f} MiB" if file.endswith(".safetensors") else ""
        drawing.text(46, y, file)
        drawing.text(225, y, what + weight)
    drawing.text(545, 26, "manifest.json, some of its tensors", weight="bold")
    for row, name in enumerate(SHOWN):
        draw_record(drawing, 545, 52 + row * 100, name, manifest)
    drawing.legend(24, 445)
    drawing.save(path)


def draw_record(drawing: Drawing, x: float, y: float, name: str, manifest: Manifest) -> None:
    record = manifest.tensors[name]
    drawing.text(x, y, f"{name} [{', '.join(f'{size:,}' for size in record.shape)}] {record.dtype}")
    shard = Shard.from_record(record.shard) if record.shard else None
    how = "replicated: not split" if shard is None else f"split along dim {shard.dim}"
    if shard is not None and len(shard.groups) > 1:
        how += f", in blocks of {', '.join(map(str, shard.groups))}"
    if shard is not None and shard.pad_multiple:
        how += f", padded to {manifest.padded_vocab_size} rows"
    drawing.text(x, y + 17, how)
    for rank in range(RANKS_OF_ALL):
        part = record.shape if shard is None else shard.local_shape(rank, RANKS_OF_ALL)
        words = [f"rank_0{rank}: [{', '.join(f'{size:,}' for size in part)}]"]
        drawing.labeled(
            x + rank * 200, y + 26, 190, 30, WHOLE if shard is None else RANKS[rank], words
        )


DRAWINGS = {
    "layers.svg": draw_layers,
    "sequence.svg": draw_sequence,
    "checkpoint.svg": draw_checkpoint,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for drawn in folder.glob("*.svg"):  # the others are of docs/scripts/board.py
        drawn.unlink()
    for name, draw in DRAWINGS.items():
        draw(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
