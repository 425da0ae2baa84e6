"""How evenly tokens are spread over the experts: counted once, in every layout alike, and logged."""

from __future__ import annotations

import math

import pytest
import torch
from every_case import every_day
from tiny_models import tiny
from training import Pairs, run_training

MIXTURE = {
    "model_type": "mixtral", "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3,
    "num_hidden_layers": 2, "intermediate_size": 20, "vocab_size": 97, "max_position_embeddings": 24,
    "attention_dropout": 0.0, "num_local_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip
SWITCH = tiny("switch_transformers", 0.0, vocab_size=64, expert_capacity=2, router_jitter_noise=0.0)


class EvenPairs(Pairs):
    """Samples of 4 to 10 tokens, which two ranks can share."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        length = len(sample["input_ids"]) // 2 * 2
        return {name: value[:length] for name, value in sample.items()}


def build(mesh, config, **options):
    from shardzoo.models import ParallelConfig, from_config

    return from_config(config, mesh, seed=3, parallel_config=ParallelConfig(**options))


def train(mesh, folder, config=MIXTURE, options=None, **arguments):
    """Returns the values of the routers at each logged step of 2, which have all samples once."""
    size = 1 if mesh is None else mesh.size("data", "expert")
    settings = {
        "env_type": "deepspeed+mpu", "micro_batch_size": 8 // size, "global_batch_size": 8, "lr": 1e-4,
        "train_steps": 2, **arguments,
    }  # fmt: skip
    steps, _ = run_training(
        mesh,
        folder,
        model=lambda mesh: build(mesh, config, **(options or {})),
        data=EvenPairs(16),
        **settings,
        **({} if mesh is None else {"model_parallel_size": mesh.tp_size}),
    )
    return [
        {name: value for name, value in step.items() if name.startswith("router/")}
        for step in steps
    ]


def test_the_values_are_those_of_transformers_choices(tmp_path):
    """Without padding, over two steps of two micro-batches each, of which only the second is logged."""
    import transformers

    build(None, MIXTURE).save_pretrained(tmp_path / "hf")
    theirs = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "hf")
    counts = torch.zeros(2, 5, dtype=torch.long)
    for number in range(16):
        ids = EvenPairs(16)[number]["input_ids"][None]
        for layer, scores in enumerate(
            theirs(input_ids=ids, output_router_logits=True).router_logits
        ):
            counts[layer] += scores.topk(2).indices.flatten().bincount(minlength=5)
    # The weights stay as they are, so that both steps have these choices.
    [found] = train(
        None, tmp_path / "run", env_type="pytorch", micro_batch_size=4, train_steps=2, log_interval=2, lr=1e-12
    )  # fmt: skip
    shares = counts / counts.sum(1, keepdim=True)
    loads = 5 * shares.max(1).values
    entropies = torch.special.entr(shares.double()).sum(1) / math.log(5)
    assert found == pytest.approx(
        {
            "router/load": loads.max().item(),
            "router/entropy": entropies.min().item(),
            "router/load/0": loads[0].item(),
            "router/load/1": loads[1].item(),
            "router/entropy/0": entropies[0].item(),
            "router/entropy/1": entropies[1].item(),
        },
        rel=1e-6,
    )


LAYOUTS = {
    "TP 2 x DP 2": (
        2, {"data": 2}, {"zero_stage": 1, "micro_batch_size": 2}, {"sequence_parallel": True, "recompute": "full"}
    ),
}  # fmt: skip
MORE = {
    "DDP": (1, {"data": 2}, {"env_type": "pytorchDDP"}, {}),
    "pipeline": (1, {"pipeline": 2}, {"micro_batch_size": 4}, {"recompute": "selective"}),
    "context": (1, {"context": 2}, {"context_parallel_size": 2}, {}),
}


@pytest.mark.parametrize("name", every_day(LAYOUTS, more=MORE))
def test_every_layout_logs_the_same(run_mesh, tmp_path, name):
    tp, axes, arguments, options = (LAYOUTS | MORE)[name]
    [expected] = run_mesh(1, train, tmp_path / "one")
    assert all(len(values) == 6 for values in expected)
    ranks = run_mesh(tp, train, tmp_path / "run", MIXTURE, options, **arguments, **axes)
    for own in ranks:
        assert own == expected


def train_dealt(tensor, expert, folder, **arguments):
    from shardzoo.mpu import ParallelMesh

    mesh = ParallelMesh(tensor, expert_parallel_size=expert)
    return train(mesh, folder, expert_parallel_size=expert, **arguments)


@pytest.mark.before_release
def test_dealt_experts_log_the_same(run_ranks, run_mesh, tmp_path):
    [expected] = run_mesh(1, train, tmp_path / "one")
    for own in run_ranks(4, train_dealt, 2, 2, tmp_path / "run", zero_stage=None):
        assert own == expected


def test_dropped_choices_are_logged_and_padding_is_not(tmp_path):
    """Of each row an expert computes two tokens; some rows are shorter than others."""
    values = train(None, tmp_path / "run", SWITCH, env_type="pytorch", train_steps=1)[0]
    assert 0.1 < values["router/dropped"] < 0.9
    layers = [name for name in values if name.startswith("router/dropped/")]
    assert any("encoder." in name for name in layers)
    assert any("decoder." in name for name in layers)
    again = train(
        None, tmp_path / "again", SWITCH, env_type="pytorch", train_steps=1, micro_batch_size=1
    )[0]  # no row has padding
    assert again == values


@pytest.mark.before_release
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("config", [MIXTURE, SWITCH], ids=["mixtral", "switch"])
def test_compiled_blocks_count_alike(tmp_path, config, recompute):
    """Also where the backward pass runs a compiled block again."""
    settings = {"env_type": "pytorch", "micro_batch_size": 4, "recompute": recompute}
    expected = train(None, tmp_path / "plain", config, **settings)
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    torch.compiler.reset()  # the graphs of another test's model count against the limit of this one
    assert train(None, tmp_path / "compiled", config, **settings, **compiled) == expected
    assert all(expected)


def test_each_reading_counts_anew_and_evaluation_does_not_count():
    from shardzoo.mpu import expert_load_counting
    from shardzoo.trainer.launch.ranks import Ranks
    from shardzoo.trainer.logging.expert_load import ExpertLoad

    model = build(None, MIXTURE)
    load = ExpertLoad(model, Ranks(None), torch.device("cpu"))
    first, second = torch.arange(3, 13).view(1, -1), torch.arange(40, 50).view(1, -1)
    found = []
    for ids in (first, second, second):
        with expert_load_counting.over({}):
            model(input_ids=ids)
        model(input_ids=first)  # outside
        found.append(load.read())
    assert found[1] == found[2] != found[0]
    assert load.read() == {}


def test_the_formulas():
    from shardzoo.trainer.logging.expert_load import describe_load, summarize_load

    found = summarize_load({"0": [2, 2, 0], "1": [6, 0, 3], "2": [0, 0, 0, 0]})
    assert found == {
        "router/load": 2.0,
        "router/entropy": 0.0,
        "router/dropped": 3 / 13,
        "router/load/0": 1.0,
        "router/load/1": 2.0,
        "router/entropy/0": 1.0,
        "router/entropy/1": 0.0,
        "router/dropped/0": 0.0,
        "router/dropped/1": 3 / 9,
    }
    assert describe_load(found) == "  expert load 2.00, 23.1% dropped"
    assert summarize_load({"0": [0, 0, 0]}) == {}
    assert describe_load({"loss": 1.0}) == ""


def test_the_report_shows_each_layer(tmp_path):
    from shardzoo.trainer.logging.report import write_report

    train_values = {"loss": 1.0, "tokens_per_second": 9, "seconds": 1, "mfu": 0.1, "memory_gb": 1}
    values = {"router/load": 1.5, "router/load/3": 1.5, "router/entropy/3": 0.97}
    record = {"step": 1, **{f"train/{k}": v for k, v in (train_values | values).items()}}
    write_report(tmp_path / "report.html", [record], {}, title="a run")
    page = (tmp_path / "report.html").read_text()
    assert "<th>layer 3</th><td>busiest expert 1.50 of the mean, entropy 0.970" in page
    assert "expert load" in page
