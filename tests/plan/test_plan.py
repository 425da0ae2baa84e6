"""`shardzoo plan`: its predictions, its layouts, and the recipe that it writes."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from every_case import by_turns, every_day
from pretraining_runs import run_pretraining, train_losses

from shardzoo.cli.arguments import read_yaml
from shardzoo.cli.main import main
from shardzoo.cli.plan import PlanArguments, build_recipe
from shardzoo.cli.pretrain import PretrainCommand
from shardzoo.models import find_config
from shardzoo.models.sizes import parameter_sizes
from shardzoo.plan import PlannedRun, Rates, find_cluster, step_time
from shardzoo.plan.cost import expert_parallel_bytes
from shardzoo.plan.hardware import LINKS
from shardzoo.plan.layouts import (
    Plan,
    PlanRequest,
    build_estimate_job,
    build_network,
    find_plans,
    list_layouts,
)
from shardzoo.pretraining.arguments import PretrainingArguments
from shardzoo.trainer import TrainingArguments
from shardzoo.trainer.estimate import Job, estimate

ROOT = Path(__file__).parents[2]


def tiny(**changes):
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 4, "vocab_size": 128, "n_positions": 128}
    return find_config("gpt2").with_changes(**sizes | changes)


def test_published_runs_are_predicted():
    """Half of the runs are held out of the fit; the script names the sources."""
    spec = importlib.util.spec_from_file_location(
        "published_runs", ROOT / "benchmarks" / "published_runs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = script.published()
    assert len(rows) == 228
    for part in (rows, [row for number, row in enumerate(rows) if number % 4 >= 2]):
        errors = sorted(abs(script.error(row, Rates())) for row in part)
        assert errors[len(errors) // 2] < 0.15
        assert errors[-1] < 0.35
    assert script.other_errors("llama-3-2024") == pytest.approx(
        [0.248, 0.242], abs=5e-4
    )  # as docs/scale.md says
    assert script.other_errors("libai-mt5-2022") == pytest.approx(
        [-0.512, -0.626, -0.849, -0.802], abs=5e-4
    )


def test_the_tables_show_the_measured_exponents():
    """No cost grows faster than expected by more than 0.1, except those whose reasons docs/performance.md gives."""
    found = json.loads((ROOT / "benchmarks" / "results" / "scaling_cpu.json").read_text())
    page = (ROOT / "benchmarks" / "results" / "cpu.md").read_text()
    too_fast = []
    for title, figures in found.items():
        for name, row in figures.items():
            line = next(
                line
                for line in page.splitlines()
                if line.startswith(f"| {title}: {name.removesuffix(' s')} |")
            )
            assert line.endswith(f"| {row['exponent']:.2f} | {row['expected']:.2f} |")
            if row["exponent"] > row["expected"] + 0.1:
                too_fast.append(f"{title}: {name}")
    assert sorted(too_fast) == [
        "conversion over files: splitting s",
        "saving and loading over width: saving s",
        "training step over data-parallel ranks: seconds",
        "training step over tensor-parallel ranks: seconds",
    ]


def count_ring_messages(ranks: int, *, reduces: bool) -> int:
    """Passes parts around a ring until a reduce-scatter or an all-gather is done: the messages of each rank.

    `parts[r][p]` are the ranks whose share of part p rank r has.
    """
    parts = [
        [{rank} if reduces or part == rank else set() for part in range(ranks)]
        for rank in range(ranks)
    ]
    everyone = set(range(ranks))
    count = 0
    while True:
        if reduces:
            done = all(any(held == everyone for held in row) for row in parts)
        else:
            done = all(all(held for held in row) for row in parts)
        if done:
            return count
        # In round k, rank r sends on the part that it received in the round before; in the first, its own.
        sent = [(rank - count) % ranks for rank in range(ranks)]
        messages = [set(parts[rank][part]) for rank, part in enumerate(sent)]
        for rank, part in enumerate(sent):
            parts[(rank + 1) % ranks][part] |= messages[rank]
        count += 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "fsdp"])
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_the_rings_of_each_stage_are_counted(stage, ranks):
    """The collectives of a step are those of ZeRO's paper (section 7), walked message by message."""
    micro_batches = 3
    reduce_scatter = count_ring_messages(ranks, reduces=True)
    all_gather = count_ring_messages(ranks, reduces=False)
    itemsize = 2  # of bf16
    summed = 4 if stage == "fsdp" else itemsize  # bytes of an element of the gradients
    messages = []  # bytes of an element
    for micro_batch in range(micro_batches):
        if stage in (3, "fsdp"):
            messages += all_gather * [itemsize]  # the weights, for the forward pass
            messages += all_gather * [itemsize]  # and again for the backward pass
        if stage in (2, 3, "fsdp") or micro_batch == micro_batches - 1:
            messages += reduce_scatter * [summed]  # the gradients
    if stage not in (3, "fsdp"):
        # the sums of the gradients, or from stage 1 on the new weights
        messages += all_gather * [itemsize]
    network = build_network(tiny())
    cluster = find_cluster("h100")
    cluster = replace(cluster, node_size=8, rates=replace(Rates(), link=1.0, overlap=0.0))
    engine = {"fsdp": True} if stage == "fsdp" else {"zero_stage": stage}
    run = PlannedRun(gpus=ranks, global_batch=ranks * micro_batches, length=64, **engine)
    seconds = 0.0
    for size in messages:
        part = network.parameters * size / ranks
        seconds += part / cluster.inside.bandwidth + cluster.inside.latency
    assert step_time(network, run, cluster).gradients == pytest.approx(seconds, rel=1e-9)


def test_flops_are_six_for_each_weight_and_token():
    config = tiny(n_embd=256, n_layer=8)
    run = PlannedRun(gpus=1, global_batch=16, length=64)
    time = step_time(build_network(config), run, find_cluster("h100"))
    sizes = parameter_sizes(config)
    multiplied = sum(
        size.full for size in sizes if len(size.shape) == 2 and "position" not in size.name
    )
    scores = (
        3 * 4 * 8 * 16 * 64 * 64 * 256
    )  # forward and backward, two products of 2 FLOPs, layers, B, S, S, H
    assert time.flops == pytest.approx(6 * 16 * 64 * multiplied + scores, rel=1e-9)


@pytest.mark.parametrize("precision", by_turns(["fp32", "bf16", "fp16"], 3))
def test_the_layouts_are_those_that_the_trainer_accepts(precision):
    """Every combination of sizes, tried on the trainer's own checks of its arguments."""
    config, request_ = tiny(n_layer=6), PlanRequest(12, 24, 126, precision=precision)
    found = set(list_layouts(config, request_, node_size=8))
    accepted = set()
    for tensor, pipeline, stage, recompute, split, batch in product(
        (1, 2, 3, 4),
        (1, 2, 3, 6, 12),
        (1, 2, 3, "fsdp"),
        ("none", "selective", "full"),
        (False, True),
        (1, 2, 4, 8),
    ):
        if 12 % (tensor * pipeline) or (split and (tensor == 1 or 126 % tensor)) or 6 % pipeline:
            continue
        data, whole = 12 // (tensor * pipeline), tensor * pipeline > 1
        if (data == 1 and stage != 1) or 24 % (data * batch):
            continue
        engine = {"env_type": "deepspeed+mpu" if whole else "deepspeed", "zero_stage": stage}
        if stage == "fsdp":
            engine = {"env_type": "fsdp"}
        try:
            arguments = TrainingArguments(
                **engine, model_parallel_size=tensor,
                pipeline_parallel_size=pipeline, recompute=recompute, sequence_parallel=split,
                micro_batch_size=batch, global_batch_size=24, precision=precision,
            )  # fmt: skip
            arguments.accumulation_steps(data)
        except ValueError:
            continue
        accepted.add((tensor, pipeline, stage, recompute, split, batch))
    assert {
        (
            run.tensor,
            run.pipeline,
            "fsdp" if run.fsdp else run.zero_stage,
            run.recompute,
            run.sequence_parallel,
            run.micro_batch,
        )
        for run in found
    } == accepted


def test_the_memory_is_that_of_the_estimate():
    config, request_ = tiny(), PlanRequest(4, 16, 128)
    for plan in find_plans(config, request_, find_cluster("a100"), best=5):
        run = plan.run
        values: Any = {"fsdp": True} if run.fsdp else {"zero_stage": run.zero_stage}
        job = Job(
            **values,
            micro_batch_size=run.micro_batch, length=128, accumulation_steps=run.micro_batches,
            tensor_parallel_size=run.tensor, data_parallel_size=run.data, pipeline_parallel_size=run.pipeline,
            sequence_parallel=run.sequence_parallel, recompute=run.recompute,
        )  # fmt: skip
        assert plan.memory == estimate(config, job).peak.total
        assert build_estimate_job(run, request_) == job


@pytest.mark.parametrize(
    ("width", "share"), every_day([(512, 0.3)], more=[(512, 0.5), (1024, 0.1)])
)
def test_only_layouts_that_do_not_fit_are_left_out(width, share):
    """The plans are what remains of all layouts if each is estimated by itself; the widest has large updates."""
    config, request_ = tiny(n_embd=width, n_layer=6, vocab_size=4096), PlanRequest(4, 16, 128)
    cluster, network = find_cluster("h100"), build_network(config)
    peaks = {
        run: estimate(config, build_estimate_job(run, request_)).peak.total
        for run in list_layouts(config, request_, 8)
    }
    least, most = min(peaks.values()), max(peaks.values())
    memory = least + share * (most - least)
    cluster = replace(cluster, device=replace(cluster.device, memory=memory / 0.95))
    fitting = sorted(
        (step_time(network, run, cluster).total, peak)
        for run, peak in peaks.items()
        if peak < memory
    )
    assert 0 < len(fitting) < 0.9 * len(peaks)
    found = find_plans(config, request_, cluster, best=len(peaks))
    assert sorted((plan.time.total, plan.memory) for plan in found) == fitting


def test_a_device_with_little_memory_gets_other_layouts():
    config, request_ = tiny(n_embd=1024, n_layer=12, n_head=16), PlanRequest(4, 16, 128)
    cluster = find_cluster("h100")
    fast = find_plans(config, request_, cluster)[0]
    small = replace(
        cluster, device=replace(cluster.device, memory=fast.memory)
    )  # 5 % are left free
    tight = find_plans(config, request_, small)[0]
    assert tight.memory <= 0.95 * fast.memory
    assert tight.time.total >= fast.time.total


@pytest.mark.parametrize("name", ["inside", "network"])
def test_slower_links_never_make_a_step_faster(name):
    config = find_config("gpt2-xl")
    usual = find_cluster("h100")
    slow = replace(usual, **{name: LINKS["pcie3"]})
    network = build_network(config)
    for run in list(list_layouts(config, PlanRequest(16, 64, 1024), 8))[::7]:
        assert step_time(network, run, slow).total >= step_time(network, run, usual).total


def test_the_command_prints_the_best_layouts_and_writes_a_recipe(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    words = ["plan", "gpt2-xl", "--gpus", "16", "--tokens", "1e9", "--json", "--write", str(path)]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    first, written = rows[0], yaml.safe_load(path.read_text())
    assert sum(first["parts"].values()) == pytest.approx(first["step"])
    assert first["days"] * 86400 * first["tokens_per_second"] == pytest.approx(1e9)
    assert written["train_steps"] == -(-(10**9) // (512 * 1024))
    for name in ("micro_batch_size", "recompute", "zero_stage"):
        assert written.get(name) == first[name]
    assert written["lr"]  # from the model's own recipe


@pytest.mark.before_release
def test_the_first_recipe_for_four_processes_runs(run_mesh, tmp_path):
    """As many steps as the tokens need, each of the whole global batch, on a mesh of the layout that was written."""
    path, text = tmp_path / "plan.yaml", tmp_path / "text.txt"
    text.write_text(
        "\n\n".join(f"line {number} of {number**3} and {number**5}" for number in range(2000))
    )
    shape = ["--global-batch-size", "8", "--sequence-length", "64", "--tokens", "2000"]
    words = [
        "plan",
        "gpt2-quickstart",
        "--gpus",
        "4",
        "--device",
        "cpu",
        *shape,
        "--write",
        str(path),
    ]
    assert main(words) == 0
    values = read_yaml(PretrainCommand, path)
    assert (values["num_gpus"], values["num_nodes"], values["train_steps"]) == (4, 1, 4)
    tensor, stages = values.pop("model_parallel_size"), values["pipeline_parallel_size"]
    small = {"data": (str(text),), "vocab_size": 300, "final_eval_sequences": 5}
    run = partial(run_pretraining, folder=tmp_path / "run", export=False, **values | small)
    metrics = run_mesh(tensor, run, data=4 // tensor // stages, pipeline=stages)
    assert len(train_losses(metrics[0])) == 4
    assert metrics[0][-1]["final/loss"] < 7


@pytest.mark.parametrize(
    ("gpus", "size", "nodes"), [(8, 8, (1, 8)), (16, 8, (2, 8)), (12, 8, (2, 6)), (4, 8, (1, 4))]
)
def test_the_recipe_names_its_processes(gpus, size, nodes):
    arguments = PlanArguments("gpt2", gpus=gpus, global_batch_size=2 * gpus, node_size=size)
    request_ = arguments.build_request(1024, arguments.find_cluster())
    [plan] = find_plans(find_config("gpt2"), request_, arguments.find_cluster(), best=1)
    values = build_recipe(plan, request_, arguments)
    assert (values["num_nodes"], values["num_gpus"]) == nodes


def test_the_recipe_of_every_layout_is_accepted():
    config, request_ = find_config("gpt2"), PlanRequest(8, 32, 1024)
    arguments = PlanArguments("gpt2", gpus=8, tokens=1e9, global_batch_size=32)
    time = step_time(build_network(config), PlannedRun(1, 1), find_cluster("h100"))
    every = list(list_layouts(config, request_, 8))
    assert {0 if run.fsdp else run.zero_stage for run in every} == {0, 1, 2, 3}
    assert any(run.fsdp for run in every if run.tensor > 1)
    for run in every:
        values = build_recipe(Plan(run, time, 0), request_, arguments)
        accepted = PretrainingArguments(**values)
        assert accepted.accumulation_steps(run.data) == run.micro_batches
        assert (accepted.env_type == "fsdp") == run.fsdp


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "there is no 'tpu'; use one of v100"),
        (["--network", "ethernet"], "there is no 'ethernet'"),
        (["--gpus", "0"], "gpus must be at least 1, not 0"),
        (["--tokens", "-1"], "tokens must be above 0"),
        (["--node-size", "0"], "--node-size must be a whole number above 0 and below 1e+09, not 0"),
        (["--peak", "nan"], "peak must be a number above 0 and below 1e+09, not nan"),
        (["--memory", "-80"], "memory must be a number above 0"),
        (["--inside", "0"], "inside must be a link's name or GB/s above 0, not '0'"),
        (["--device", "missing.yaml"], "missing.yaml"),
        (["--sequence-length", "4096"], "1024"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(["plan", "gpt2", *words]) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert error.startswith("error: ")


DESCRIBED = {
    "peak": 500, "peak_fp32": 40.5, "memory": 64, "bandwidth": 1800, "inside": 200, "network": "infiniband-hdr",
    "node_size": 4, "adapters": 2,
}  # fmt: skip


def test_a_device_is_described_by_flags_or_a_file(tmp_path, capsys):
    """Both say the same, and the figures are those that the prediction uses."""
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(DESCRIBED))
    shape = ["--gpus", "8", "--sequence-length", "512", "--json"]
    flags = [
        word
        for name, value in DESCRIBED.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert main(["plan", "gpt2-xl", "--device", str(path), *shape]) == 0
    by_file = json.loads(capsys.readouterr().out)
    assert main(["plan", "gpt2-xl", "--device", "a100", *flags, *shape]) == 0
    assert json.loads(capsys.readouterr().out) == by_file
    cluster = find_cluster(str(path))
    assert cluster.device.memory == 64 * 2**30 >= by_file[0]["memory"]
    assert (
        cluster.device.peak_flops(2),
        cluster.device.peak_flops(4),
        cluster.device.bandwidth,
    ) == (5e14, 4.05e13, 1.8e12)
    assert (cluster.inside.bandwidth, cluster.network, cluster.node_size) == (
        2e11,
        LINKS["infiniband-hdr"],
        4,
    )
    assert (
        cluster.link(8, 1).bandwidth == 2 * 25e9
    )  # two adapters for the one ring that crosses a node
    assert find_cluster(str(path), memory=16.0).device.memory == 16 * 2**30  # a flag goes first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "peak: 300",
            "needs a device to start from, or all of peak, peak_fp32, memory, bandwidth, inside, network",
        ),
        (
            "peak: 1\npeak_fp32: 1\nmemory: 1\nbandwidth: 1",
            "needs a device to start from",
        ),  # whose links?
        ("device: h100\npeek: 300", "not by ['peek']"),
        ("device: h100\nnode_size: true", "node_size must be a whole number"),
        ("device: h100\nnode_size: 2.5", "node_size must be a whole number"),
        ("device: h100\ninside: [1]", "there is no '[1]'"),
        ("device: h100\ninside: true", "not True"),
        ("device: [h100]", "there is no ['h100']"),
        ("device: tpu", "there is no 'tpu'"),
        ("peak: '300'\ndevice: h100", "not '300'"),
        ("device: cpu\nrates: [1]", "rates are some of compute, attention, memory,"),
        ("device: cpu\nrates: {speed: 1}", "not {'speed': 1}"),
        ("device: cpu\nrates: {compute: 0}", "compute must be a number above 0"),
        ("device: cpu\nrates: {step: -1}", "step must be a number from 0"),
        ("device: cpu\nrates: {launch: .nan}", "launch must be a number from 0"),
        ("device: cpu\nrates: {asynchronous: 1}", "asynchronous must be true or false, not 1"),
        (
            "device: cpu\ninside: {bandwidth: 1, latency: -1}",
            "inside's latency must be a number from 0",
        ),
        (
            "device: cpu\ninside: {bandwidth: 0, latency: 0}",
            "inside must be a link's name or GB/s above 0, not 0",
        ),
        ("device: cpu\ninside: {latency: 1}", "there is no \"{'latency': 1}\""),
        ("- h100", "not by ['h100']"),
        ("", "not by None"),
        ("a: [", "is not YAML"),
        ("a: &a [1, 1]\nb: [*a, *a]", "no aliases"),
        ("device: cpu\ninside: 1" + "0" * 400, "inside must be a link's name or GB/s above 0"),
        ("device: cpu\npeak: 1" + "0" * 400, "peak must be a number above 0"),
        ("device: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_file_that_describes_no_device_is_refused(text, message, tmp_path):
    path = tmp_path / "device.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_cluster(str(path))
    assert message in str(caught.value)


def test_a_pipe_describes_no_device(tmp_path):
    os.mkfifo(tmp_path / "device.yaml")
    with pytest.raises(ValueError, match="not a regular file"):
        find_cluster(str(tmp_path / "device.yaml"))


@pytest.mark.parametrize("name", ["gpus", "global_batch", "length"])
def test_requests_beyond_all_clusters_are_refused(name):
    sizes = {"gpus": 8, "global_batch": 8, "length": 8, name: 10**10}
    with pytest.raises(ValueError, match=f"{name} must be at most"):
        PlanRequest(**sizes)


def test_fp32_products_take_the_devices_fp32_rate():
    """The products' share grows by the ratio of the peaks; an A100's is 16."""
    config, request_ = tiny(n_embd=4096, n_head=32), PlanRequest(1, 8, 128)
    cluster = find_cluster("a100", bandwidth=1e6)  # so much that operands take no time
    half = step_time(build_network(config), PlannedRun(1, 8, 8, 128, itemsize=2), cluster)
    full = step_time(build_network(config), PlannedRun(1, 8, 8, 128, itemsize=4), cluster)
    assert full.products / half.products == pytest.approx(312 / 19.5, rel=0.02)
    both = [
        find_plans(config, replace(request_, precision=name), cluster)[0]
        for name in ("bf16", "fp32")
    ]
    assert all(0.1 < plan.mfu(cluster) < 1 for plan in both)


def test_a_model_that_no_layout_holds_exits_with_1(capsys):
    assert (
        main(["plan", "t5-v1_1-xxl", "--gpus", "1", "--device", "v100", "--global-batch-size", "2"])
        == 1
    )
    assert "no layout" in capsys.readouterr().out


@pytest.mark.before_release
def test_long_sequences_are_split_over_context_parallel_ranks():
    """One of 131,072 tokens fits no GPU whole, and short ones are never split."""
    config = find_config("llama-3.1-8b")
    cluster = find_cluster("h100")
    request = PlanRequest(64, 32, 131072)
    [best] = find_plans(config, request, cluster, best=1)
    assert best.run.context > 1
    assert best.run.gpus == best.run.tensor * best.run.pipeline * best.run.context * best.run.data
    assert best.time.context_parallel > 0
    assert sum(best.time.parts.values()) == pytest.approx(best.time.total)
    job = build_estimate_job(best.run, request)
    assert job.context_parallel_size == best.run.context
    short = list_layouts(config, PlanRequest(16, 32, 2048), cluster.node_size)
    assert {run.context for run in short} == {1}


def test_the_all_to_alls_of_a_mixture_take_the_bytes_of_the_formula():
    """docs/experts.md has it; tests/mpu/test_expert_parallel.py counts what is sent."""
    network = build_network(find_config("mixtral-quickstart"))  # two experts a token, H = 128
    run = PlannedRun(gpus=4, global_batch=16, micro_batch=2, length=64, expert=4, itemsize=4)
    [stack] = network.stacks
    assert expert_parallel_bytes(stack, run) == 4 * 128 * 2 * (3 / 4) * 128 * 4
    again = replace(run, recompute="full")
    assert expert_parallel_bytes(stack, again) == 6 * 128 * 2 * (3 / 4) * 128 * 4
    cluster = find_cluster("h100")
    cluster = replace(cluster, rates=replace(Rates(), link=1.0, overlap=0.0))
    time = step_time(network, run, cluster)
    # Of each layer and micro-batch: four exchanges, and the numbers of rows, with three others.
    link = cluster.inside
    each = expert_parallel_bytes(stack, run) / link.bandwidth + 5 * 3 * link.latency
    assert time.expert_parallel == pytest.approx(3 * 2 * each, rel=1e-9)
    # No rank has the same experts as another one, so only other gradients are summed.
    whole = step_time(network, replace(run, expert=1), cluster)
    assert whole.expert_parallel == 0
    sent = (
        2 * 3 * ((network.parameters - network.in_experts) * 2 / 4 / link.bandwidth + link.latency)
    )
    assert time.gradients == pytest.approx(sent, rel=1e-9)
    assert time.gradients < whole.gradients


def test_layouts_of_a_mixture_deal_its_experts_evenly():
    request = PlanRequest(gpus=12, global_batch=12, length=64, precision="fp32")
    layouts = list(list_layouts(find_config("mixtral-quickstart"), request, 12))  # eight experts
    assert {run.expert for run in layouts} == {1, 2, 4}
    assert all(run.data % run.expert == 0 for run in layouts)
    assert all(run.zero_stage < 3 for run in layouts if run.expert > 1)
    assert any(run.fsdp for run in layouts if run.expert > 1)
    assert {run.expert for run in list_layouts(tiny(), request, 12)} == {1}
