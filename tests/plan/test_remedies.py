"""What `shardzoo estimate` says would make a run fit, against every combination tried one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
from every_case import every_day

from shardzoo.cli.main import main
from shardzoo.models import find_config
from shardzoo.plan.remedies import find_remedies
from shardzoo.trainer.estimate import Job, estimate

GIB, MIB = 1 << 30, 1 << 20
# What each way to save memory offers to a job of 6 sequences and two data-parallel ranks, from mild to strong.
OFFERS = {
    "recompute": ["none", "selective", "full", "offload"],
    "zero_stage": [None, 1, 2, 3, "fsdp"],
    "micro_batch_size": [6, 3, 2, 1],
    "tensor_parallel_size": [1, 2, 4],
    "sequence_parallel": [False, True],
    "optimizer": ["adamw", "adafactor"],
}


def tiny():
    return find_config("gpt2").with_changes(
        n_embd=256, n_head=4, n_layer=6, vocab_size=512, n_positions=512
    )


def every_way(config, job: Job) -> dict[tuple[int, ...], int]:
    """The peak of each combination that the trainer accepts, by its place in `OFFERS`."""
    found = {}
    for place in product(*(range(len(values)) for values in OFFERS.values())):
        changes = {
            name: values[rung] for (name, values), rung in zip(OFFERS.items(), place, strict=True)
        }
        if changes["zero_stage"] == "fsdp":
            changes |= {"zero_stage": None, "fsdp": True}
        changes["accumulation_steps"] = 6 // changes["micro_batch_size"] * job.accumulation_steps
        if changes["sequence_parallel"] and (
            changes["tensor_parallel_size"] == 1 or job.length % changes["tensor_parallel_size"]
        ):
            continue
        try:
            found[place] = estimate(config, replace(job, **changes)).peak.total
        except ValueError:
            continue
    return found


def place_of(changes: dict) -> tuple[int, ...]:
    if changes.get("fsdp"):
        changes = {**changes, "zero_stage": "fsdp"}
    return tuple(values.index(changes.get(name, values[0])) for name, values in OFFERS.items())


def does_less(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("length", "share"), every_day([(510, 0.5)], more=[(512, 0.9), (512, 0.25)])
)
def test_the_remedies_are_all_that_fit_and_none_does_more_than_another(length, share):
    config, job = (
        tiny(),
        Job(micro_batch_size=6, length=length, accumulation_steps=2, data_parallel_size=2),
    )
    peaks = every_way(config, job)
    framework = 600 * MIB
    memory = framework + share * (peaks[(0,) * 6] - framework)
    fitting = {place for place, peak in peaks.items() if peak <= memory}
    least = {place for place in fitting if not any(does_less(other, place) for other in fitting)}
    found = find_remedies(config, job, memory)
    assert {place_of(remedy.changes) for remedy in found} == least
    assert len(found) == len(least) > 1
    for remedy in found:
        changed = replace(job, **remedy.changes)
        assert remedy.memory == estimate(config, changed).peak.total
        assert (
            changed.micro_batch_size * changed.accumulation_steps == 12
        )  # the global batch is as it was
    assert [("optimizer" in one.changes, one.cost) for one in found] == sorted(
        ("optimizer" in one.changes, one.cost) for one in found
    )


def test_recomputing_everything_costs_a_third_of_the_products():
    """Of a model so wide that products are nearly all: 8 instead of 6 FLOPs for each weight and token."""
    config = find_config("gpt2").with_changes(
        n_embd=8192, n_head=64, n_layer=2, vocab_size=512, n_positions=2048
    )
    job = Job(micro_batch_size=64, length=2048, accumulation_steps=4)
    whole, slim = (
        estimate(config, job).peak.total,
        estimate(config, replace(job, recompute="full")).peak.total,
    )
    assert slim < whole
    costs = [
        one.cost for one in find_remedies(config, job, slim) if one.changes == {"recompute": "full"}
    ]
    assert costs == [pytest.approx(4 / 3, rel=0.05)]


def test_the_command_says_what_makes_it_fit(capsys):
    asked = {"--device-memory": "40", "--micro-batch-size": "8"}
    names = {"tensor_parallel_size": "--tp"}

    def words(options: dict[str, str]) -> list[str]:
        return ["estimate", "gpt2-xl", *(word for pair in options.items() for word in pair)]

    assert main([*words(asked), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["remedies"]
    assert found
    assert main(words(asked)) == 1
    assert f"{found[0]['memory'] / GIB:.2f}" in capsys.readouterr().out
    for one in found:
        split = ["--sequence-parallel"] if one["changes"].pop("sequence_parallel", False) else []
        options = asked | {
            str(names.get(name, "--" + name.replace("_", "-"))): str(value)
            for name, value in one["changes"].items()
        }
        assert main([*words(options), *split]) == 0
        capsys.readouterr()


@pytest.mark.parametrize("memory", ["80", "0.5"])
def test_nothing_is_proposed_where_nothing_helps_or_is_needed(memory, capsys):
    code = main(["estimate", "gpt2", "--device-memory", memory, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == int(memory == "0.5")
    assert found.get("remedies") == ([] if code else None)
