"""How often the host waits for a GPU in a step of each family: once, for the results of the step before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from every_case import by_turns, every_day
from matrix import architecture_of, find_class, load_rows
from pretended_gpu import DEVICE, Waits, first_of_ranks, pretended_gpu
from tiny_models import SPARSE, TINY, tiny

from shardzoo.models import FAMILIES, config_from_dict, from_config
from shardzoo.mpu import assign_dropout_sites, dropout
from shardzoo.ops.dropout_mask import dropout_keys, send_use_keys, use_key
from shardzoo.trainer import TrainingArguments, step_graph
from shardzoo.trainer.batches.loss_normalization import LossNormalizer
from shardzoo.trainer.engines.factory import make_engine
from shardzoo.trainer.engines.optimizers import make_optimizer
from shardzoo.trainer.launch.ranks import Ranks
from shardzoo.trainer.step import TrainingStep

# A GPU multiplies the tokens of all experts at once if the rows of their matrices have multiples of 16 bytes, also of
# each rank's part. Other widths make the host wait for the number of each expert's tokens.
WIDTHS = {
    "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "d_ff": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip


def describe(family, dropout):
    """A tiny model's configuration: of the tests' table, or the first one of the family in the matrix."""
    if family in TINY | SPARSE:
        values = tiny(family, dropout)
    else:
        rows = load_rows().items()
        name, case = next(
            (name, case) for name, (of, case) in rows if of == family and "For" in name
        )
        values = find_class(architecture_of(name)).config_class(**case.config).to_dict()
        values["architectures"] = [architecture_of(name)]
        for key, value in values.items():
            if "drop" in key and isinstance(value, float):
                values[key] = dropout
    if config_from_dict(values).expert_count:
        values |= {key: width for key, width in WIDTHS.items() if key in values}
    return config_from_dict(values)


def make_batch():
    """Samples of which one is padded; the numbers of their labels differ."""
    ids = torch.randint(5, 60, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def make_step(model, mesh, **options):
    arguments = TrainingArguments(micro_batch_size=2, global_batch_size=4, **options)
    ranks = Ranks(mesh)
    engine = make_engine(model, make_optimizer(model, arguments), arguments, ranks)
    schedule = SimpleNamespace(before_step=lambda step: None, after_step=lambda: None)
    saver = SimpleNamespace(copied=SimpleNamespace(is_set=lambda: True))
    normalizer = LossNormalizer(model, mean_losses=False)
    forward = lambda inputs, model, _: model(**inputs)  # noqa: E731
    step = TrainingStep(arguments, engine, ranks, schedule, forward, normalizer, saver, print)
    step.copy_stream = None
    return step


def build_on_device(family, mesh, rate, spoil=None):
    """Returns a family's tiny model with this dropout on the pretended GPU, and its precision."""
    config = describe(family, rate)
    precision = (
        "bf16" if config.expert_count else "fp32"
    )  # fp32 has no grouped product without data
    dtype = torch.bfloat16 if config.expert_count else torch.float32
    model = from_config(config, mesh, device="meta", dtype=dtype)
    assign_dropout_sites(model)

    def spoil_step(model, inputs, output):
        spoil(output.loss)

    if spoil is not None:
        model.register_forward_hook(spoil_step)
    return model, precision


def count_waits(family, mesh, rate, spoil=None):
    """Returns what the host waits for in the third step. Before it, the device gets what it keeps."""
    model, precision = build_on_device(family, mesh, rate, spoil)
    with pretended_gpu() as waits:
        step = make_step(model, mesh, precision=precision)
        assert step.reads_late
        assert step.engine.takes_found_inf
        for number in range(3):
            waits.found.clear()
            step.run(number, iter([make_batch(), make_batch()]), SimpleNamespace(is_set=False))
    return waits.found


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("family", by_turns(FAMILIES, 12))
def test_a_step_waits_once(family, tensor_parallel_size):
    for rate in (0.0, 0.1):
        with first_of_ranks(tensor_parallel_size) as mesh:
            waits = count_waits(family, mesh, rate)
        assert len(waits) == 1, waits
        assert waits[0].startswith("values at trainer/step.py")


def record_steps(family, monkeypatch, spoil=None):
    """Takes four steps, the third of which is recorded, and returns what a user is told."""
    model, precision = build_on_device(family, None, 0.1, spoil)
    told = []
    with pretended_gpu() as waits:
        monkeypatch.setattr(step_graph, "can_record_graphs", lambda _: True)
        monkeypatch.setattr(step_graph, "record_graph", lambda _, step: waits.record(step))
        monkeypatch.setattr(dropout, "is_recording", lambda _: waits.is_recording)
        step = make_step(model, None, precision=precision, cuda_graph=True)
        step.graph._tell = told.append
        for number in range(4):
            step.run(number, iter([make_batch(), make_batch()]), SimpleNamespace(is_set=False))
            if number == 2 and not told:
                assert step.graph._replay is not None
    return told


@pytest.mark.parametrize("family", by_turns(FAMILIES, 24))
def test_a_step_can_be_recorded(family, monkeypatch):
    assert record_steps(family, monkeypatch) == []


SPOILS = [
    lambda loss: loss.item(),
    lambda loss: loss.tolist(),
    lambda loss: loss.cpu(),
    lambda loss: bool(loss > 0),
    lambda loss: torch.tensor([1.0, 2.0], device=loss.device),
    lambda loss: torch.ones(2).to(loss.device),
    lambda loss: loss.new_empty(2).copy_(torch.ones(2)),
    lambda loss: loss.new_empty(2)[torch.tensor([0])],
]


@pytest.mark.parametrize("spoil", range(len(SPOILS)))
def test_what_waits_is_counted(spoil):
    """In each of two micro-batches."""
    assert len(count_waits("gpt2", None, 0.0, SPOILS[spoil])) == 3


@pytest.mark.parametrize("spoil", every_day([0, 5], more=[1, 2, 3, 4, 6, 7]))
def test_what_waits_cannot_be_recorded(spoil, monkeypatch):
    [line] = record_steps("gpt2", monkeypatch, SPOILS[spoil])
    assert "it cannot be recorded: a recorded step has " in line


def test_keys_of_dropout_are_not_sent_while_a_step_is_recorded(monkeypatch):
    """A use that no step before has made has its key as a number."""

    def send_while_recording(loss):
        dropout.dropout_state.clear()
        for _ in range(2):
            dropout.dropout_state.set(0, loss.new_zeros((), dtype=torch.int64))
            dropout.dropout_state.visit(1, 2, loss.device)

    assert record_steps("gpt2", monkeypatch, send_while_recording) == []


@pytest.mark.parametrize("name", ["nonzero", "unique", "__getitem__"])
def test_sizes_that_depend_on_data_are_waits(name):
    values = torch.empty(3, dtype=torch.bool, device=DEVICE)
    arguments = (values,) if name == "__getitem__" else ()
    with Waits() as waits, pytest.raises((NotImplementedError, RuntimeError)):
        getattr(values, name)(*arguments)
    assert len(waits.found) == 1


def test_keys_of_uses_that_were_sent_are_those_of_numbers():
    uses = [use_key(5, site, 0) for site in (1, 2, (1 << 64) - 1)]
    sent = send_use_keys(uses, "cpu")
    assert torch.equal(dropout_keys(sent, 7, 4), dropout_keys(uses, 7, 4))
    for number, row in zip(uses, dropout_keys(sent, 7, 4), strict=True):
        assert torch.equal(dropout_keys(number, 7, 4), row)
