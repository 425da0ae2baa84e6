"""What the systems before this one promised or got wrong, as far as no other folder's tests hold it."""

from __future__ import annotations

import copy
import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from every_case import by_turns
from memory import peak_of
from tiny_models import hf_model, tiny
from training import Pairs, losses, native_t5, on_ranks, run_training, tiny_t5

MIB = 1 << 20
ADAFACTOR = {
    "optimizer": "adafactor",
    "lr": 1e-4,
    "lr_schedule": "constant",
    "weight_decay": 0.0,
    "clip_grad": 0.0,
}


class InOrder:
    """Sample i at place i, without end."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return Pairs(64)[index % 64]


def test_adafactor_is_the_reference_update_with_the_given_parameters(tmp_path):
    """transformers' Adafactor, made as the diacritics script makes it, on the same batches."""
    from transformers.optimization import Adafactor

    from shardzoo.data.loading.collate import DataCollator

    steps, batch_size = 5, 4
    model = tiny_t5()
    reference = copy.deepcopy(model)
    _, trained = run_training(
        None,
        tmp_path,
        model=model,
        data=InOrder(),
        train_steps=steps,
        micro_batch_size=batch_size,
        **ADAFACTOR,
    )
    optimizer = Adafactor(
        reference.parameters(), lr=1e-4, eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8, beta1=None,
        weight_decay=0.0, relative_step=False, scale_parameter=False, warmup_init=False,
    )  # fmt: skip
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    for step in range(steps):
        batch = DataCollator(0)([InOrder()[step * batch_size + i] for i in range(batch_size)])
        reference(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in reference.named_parameters():
        moved = (value - before[name]).abs().max()
        assert moved > 1e-5, name
        assert (trained[name] - value).abs().max() < 1e-3 * moved, name


def train_and_note_files(mesh, folder: Path, **settings):
    """The final weights, whether each is split, and the ranges of bytes that this rank wrote of each file."""
    import shardzoo.trainer.checkpointing.snapshot as snapshot

    written, write = [], snapshot.write_share

    def noting(path, share):
        ranges, digest = write(path, share)
        written.extend((f"{path.parent.name}/{path.name}", *span) for span in ranges)
        return ranges, digest

    snapshot.write_share = noting
    try:
        model = settings.pop("build")(mesh)
        _, weights = run_training(mesh, folder, model=model, **settings)
    finally:
        snapshot.write_share = write
    split = {
        name: getattr(parameter, "shard", None) is not None
        for name, parameter in model.named_parameters()
    }
    return weights, split, written


REPLICATED = {
    "DDP": (1, {"env_type": "pytorchDDP", "build": lambda mesh: tiny_t5(), **ADAFACTOR}),
    "TP": (2, {"env_type": "deepspeed+mpu", "model_parallel_size": 2, "build": native_t5}),
}


@pytest.mark.parametrize("name", by_turns(REPLICATED, 2))
def test_replicas_stay_identical_and_each_byte_has_one_writer(run_mesh, tmp_path, name):
    tp, settings = REPLICATED[name]
    training = partial(
        train_and_note_files, folder=tmp_path, train_steps=20, save_interval=10, **settings
    )
    ranks = run_mesh(tp, training, data=2)
    for rank, (weights, split, _) in enumerate(ranks):
        for key, value in weights.items():
            same = ranks[rank % tp if split[key] else 0][0][key]
            assert torch.equal(value, same), (rank, key)
    assert name == "DDP" or 0 < sum(ranks[0][1].values()) < len(ranks[0][1])
    written = sorted(span for *_, spans in ranks for span in spans)
    assert len({file for file, *_ in written}) > 2
    for (file, _, end), (following, start, _) in pairwise(written):
        assert start == (end if following == file else 0)


def hf_mt5():
    """A small mT5 of transformers whose weights are all different, its head untied."""
    model = hf_model(
        "MT5ForConditionalGeneration", 0.0, vocab_size=66, num_layers=2, tie_word_embeddings=False
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(
            parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1, generator=generator
        )
    return model


def native_mt5(mesh, folder: Path):
    import shardzoo

    return shardzoo.from_pretrained(folder, mesh)


def whole_logits(mesh, folder: Path) -> torch.Tensor:
    model = native_mt5(mesh, folder)
    with torch.no_grad():
        return model.gather_logits(model(**batch()).logits)


def batch() -> dict[str, torch.Tensor]:
    from shardzoo.data.loading.collate import DataCollator

    return DataCollator(0)([Pairs(64)[i] for i in range(8)])


def test_an_mt5_of_transformers_goes_on_here_under_one_layout_then_another(run_mesh, tmp_path):
    from transformers import MT5ForConditionalGeneration

    from shardzoo.convert.operations import merge

    model = hf_mt5().eval()
    model.save_pretrained(tmp_path / "from")
    with torch.no_grad():
        expected = model(**batch()).logits
    for tp in (1, 2):
        for logits in run_mesh(tp, whole_logits, tmp_path / "from"):
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    settings = {"data": InOrder(), "lr": 1e-3, "lr_schedule": "constant"}
    theirs, _ = run_training(
        None, tmp_path / "theirs", model=model, train_steps=12, micro_batch_size=8, **settings
    )
    settings |= {
        "env_type": "deepspeed+mpu",
        "model": partial(native_mt5, folder=tmp_path / "from"),
    }
    settings |= {"micro_batch_size": 2, "global_batch_size": 8}
    split = {"tp": 2, "data_ranks": 2, "model_parallel_size": 2}
    [(first, _), *_] = on_ranks(run_mesh, tmp_path / "first", train_steps=6, **split, **settings)
    there = tmp_path / "first/checkpoints/step-000006"
    [(then, _), *_] = on_ranks(
        run_mesh, tmp_path / "then", data_ranks=2, load_dir=str(there), train_steps=12, **settings
    )
    assert losses(first) + losses(then) == pytest.approx(losses(theirs), rel=1e-4)
    assert losses(then)[-1] < losses(first)[0] - 0.1

    last = tmp_path / "then/checkpoints/step-000012"
    merge(last, tmp_path / "to")
    [logits] = run_mesh(1, whole_logits, last)
    with torch.no_grad():
        again = (
            MT5ForConditionalGeneration.from_pretrained(tmp_path / "to").eval()(**batch()).logits
        )
    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-5)


def test_bf16_t5_stays_finite_with_activations_that_fp16_has_not(tmp_path):
    """Feed-forward outputs beyond 65504, as trained T5s have them."""
    import shardzoo

    large, outputs = tiny_t5(), []
    with torch.no_grad():
        for block in large.encoder.block:
            block.layer[1].DenseReluDense.wo.weight.mul_(1e6)
    large.save_pretrained(tmp_path / "hf")
    large.encoder.block[-1].layer[1].DenseReluDense.register_forward_hook(
        lambda m, i, output: outputs.append(output)
    )
    large(**batch())
    assert outputs[0].abs().max() > torch.finfo(torch.float16).max
    for name, load in (("theirs", type(large).from_pretrained), ("ours", shardzoo.from_pretrained)):
        model = load(tmp_path / "hf")
        steps, weights = run_training(
            None, tmp_path / name, model=model, precision="bf16", train_steps=20
        )
        assert all(
            value.dtype == torch.bfloat16 and value.isfinite().all() for value in weights.values()
        )
        assert losses(steps)[-1] < losses(steps)[0]


def recomputing(mesh, folder: Path, kind: str, active: bool) -> tuple[list[float], int]:
    """(losses of a few steps, their peak in bytes)"""
    import transformers

    from shardzoo.models import from_config

    config = transformers.T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=5,
        num_heads=4,
        vocab_size=64,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = (
        from_config(config) if kind == "native" else transformers.T5ForConditionalGeneration(config)
    )
    settings = {
        "model": model,
        "data": Pairs(288),
        "micro_batch_size": 96,
        "checkpoint_activations": active,
    }
    steps: list[dict[str, float]] = []
    peak = peak_of(lambda: steps.extend(run_training(mesh, folder, train_steps=3, **settings)[0]))
    return losses(steps), peak


@pytest.mark.before_release
@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_recomputation_changes_no_loss_and_lowers_the_peak(kind, run_mesh, tmp_path):
    [(kept, most)] = run_mesh(
        1, partial(recomputing, folder=tmp_path / "kept", kind=kind, active=False)
    )
    [(again, less)] = run_mesh(
        1, partial(recomputing, folder=tmp_path / "again", kind=kind, active=True)
    )
    assert again == pytest.approx(kept, rel=1e-6)
    assert less < 0.7 * most


def peaks(mesh, folder: Path) -> tuple[int, int, int]:
    """(peak of a training step, peak of an evaluation, all logits of the evaluation) in bytes."""
    from shardzoo.models import from_config
    from shardzoo.trainer import Trainer

    vocabulary, length, rows, batches = 4096, 64, 4, 24

    class Long:
        def __len__(self):
            return batches * rows

        def __getitem__(self, index):
            ids = torch.arange(length) + index
            return {"input_ids": ids, "labels": ids}

    model = from_config(
        tiny("gpt2", 0.0, layers=1, n_head=2, n_positions=length, vocab_size=vocabulary)
    )
    trainer = Trainer(train_steps=1, batch_size=rows, save_dir=str(folder))

    def step() -> None:
        batch = {name: torch.stack([Long()[i][name] for i in range(rows)]) for name in Long()[0]}
        trainer.forward_step(batch, model.train(), None).loss.backward()

    accuracy = {"accuracy": lambda logits, labels: (logits.argmax(-1) == labels).float().mean()}
    step()
    model.zero_grad(set_to_none=True)
    training, evaluation = peak_of(step), peak_of(lambda: trainer.evaluate(model, Long(), accuracy))
    return training, evaluation, batches * rows * length * vocabulary * 4


def test_evaluation_needs_no_more_memory_than_training(run_mesh, tmp_path):
    [(training, evaluation, everything)] = run_mesh(1, partial(peaks, folder=tmp_path))
    assert everything > 4 * training
    assert everything / 24 <= evaluation <= training


def streamed(mesh, path: Path) -> tuple[int, float]:
    """(texts of the stream, MiB that reading them took)"""
    import numpy as np

    from shardzoo.data import DocumentRecords, ResumableStream, Share

    def status(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

    def sample(text, generator):
        return {"input_ids": np.array([len(text)])}

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    stream = ResumableStream(DocumentRecords(path), sample, Share(8), shuffle_buffer=64)
    seen = sum(len(batch["input_ids"]) for batch in stream)
    return seen, status("VmHWM") - before


def test_a_stream_larger_than_its_memory(run_mesh, tmp_path):
    texts, length = 8192, 20_000
    with (tmp_path / "large.jsonl").open("w") as file:
        for number in range(texts):
            file.write(json.dumps({"text": f"{number:05d} " * (length // 6)}) + "\n")
    size = (tmp_path / "large.jsonl").stat().st_size / MIB
    [(seen, growth)] = run_mesh(1, partial(streamed, path=tmp_path / "large.jsonl"), isolated=True)
    assert seen == texts
    assert size > 150
    assert growth < size / 3
