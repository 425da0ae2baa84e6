"""What the public `Trainer` takes, refuses and says."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny
from training import Pairs, losses, native_t5, on_ranks, run_training, tiny_t5


def test_flagai_keywords_and_arguments_are_one():
    from shardzoo.trainer import TrainingArguments

    familiar = TrainingArguments(
        env_type="deepspeed+mpu", batch_size=4, warm_up=0.2, fp16=False, checkpoint_activations=True, epochs=1,
        optimizer_type="lion", save_dir="runs", experiment_name="t5", eval_interval=10, model_parallel_size=2,
        master_ip="127.0.0.1", master_port=17750, num_nodes=1, num_gpus=2, hostfile="hostfile",
        training_script="train.py", save_optim=True, save_rng=True, load_optim=True, load_rng=True, bf16=True,
    )  # fmt: skip
    assert familiar == TrainingArguments(
        env_type="deepspeed+mpu", micro_batch_size=4, warmup_ratio=0.2, recompute="full", epochs=1, optimizer="lion",
        save_dir="runs", experiment_name="t5", eval_interval=10, model_parallel_size=2, master_ip="127.0.0.1",
        num_gpus=2, hostfile="hostfile", training_script="train.py", precision="bf16",
    )  # fmt: skip
    defaults = TrainingArguments()
    assert (defaults.env_type, defaults.pytorch_device, defaults.seed, defaults.micro_batch_size) == (
        "pytorch", "auto", 1234, 1,
    )  # fmt: skip
    assert (defaults.weight_decay, defaults.lr, defaults.warmup_ratio, defaults.clip_grad) == (
        0.1,
        1e-3,
        0.1,
        1.0,
    )
    assert (defaults.log_interval, defaults.eval_interval, defaults.save_interval) == (
        100,
        100,
        1000,
    )


class OutOfRange(Pairs):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == 9:
            sample["labels"][1] = 64
        return sample


def test_labels_out_of_range_end_every_rank(run_mesh, tmp_path):
    with pytest.raises(AssertionError) as failure:
        on_ranks(
            run_mesh,
            tmp_path,
            data_ranks=2,
            env_type="pytorchDDP",
            data=OutOfRange(16),
            train_steps=8,
        )
    text = str(failure.value)
    assert "labels of training sample" in text
    assert "at position 1 is 64; it must be from 0 to 63, or -100 to be ignored" in text
    assert "another rank's labels are out of range" in text
    assert "stuck" not in text


def test_a_run_is_not_overwritten(tmp_path):
    run_training(None, tmp_path, train_steps=1)
    with pytest.raises(ValueError, match="saved at step 1; resume it with resume=True"):
        run_training(None, tmp_path, train_steps=1)
    steps, _ = run_training(None, tmp_path, train_steps=3, resume=True)
    assert [step["step"] for step in steps] == [2, 3]


def test_another_global_batch_cannot_go_on(tmp_path):
    run_training(None, tmp_path, train_steps=1)
    with pytest.raises(ValueError, match="global batch of 2 sequences and cannot resume with 4"):
        run_training(None, tmp_path, train_steps=3, resume=True, micro_batch_size=4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_no_number_stops_training_and_says_where(run_mesh, tmp_path, ranks):
    from functools import partial

    env = "pytorch" if ranks == 1 else "pytorchDDP"
    with pytest.raises(AssertionError) as failure:
        run_mesh(1, partial(broken_always, folder=tmp_path, env_type=env), data=ranks)
    text = str(failure.value)
    assert "the loss is nan at step 3, from training samples" in text
    assert "encoder.block.1.layer.1.DenseReluDense (T5DenseActDense) is the first module" in text
    assert "stuck" not in text
    assert (tmp_path / "checkpoints" / "step-000002").exists()


def broken_always(mesh, folder, **settings):
    """From the third step on, one block of the encoder puts out nothing that is finite."""
    model = tiny_t5()
    calls = []
    model.encoder.register_forward_pre_hook(lambda *_: calls.append(1))
    module = model.encoder.block[1].layer[1].DenseReluDense
    module.register_forward_hook(
        lambda m, i, output: output * float("nan") if len(calls) > 2 else output
    )
    return run_training(mesh, folder, model=model, save_interval=1, **settings)


def full_disk(mesh, folder, **settings):
    """Files may not grow beyond what the optimizer's state needs, so that writing fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        run_training(mesh, folder, resume=True, **settings)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "no error"


@pytest.mark.parametrize("env_type", ["pytorchDDP", "fsdp"])
def test_a_full_disk_stops_training_and_leaves_the_last_checkpoint(run_mesh, tmp_path, env_type):
    from functools import partial

    settings = {"env_type": env_type, "save_interval": 2}
    on_ranks(run_mesh, tmp_path, data_ranks=2, train_steps=2, **settings)
    before = {
        path.name: path.read_bytes()
        for path in (tmp_path / "checkpoints" / "step-000002").iterdir()
    }
    messages = run_mesh(1, partial(full_disk, folder=tmp_path, train_steps=6, **settings), data=2)
    assert all("could not write a checkpoint: File too large" in message for message in messages), (
        messages
    )
    assert os.listdir(tmp_path / "checkpoints") == ["step-000002"]
    assert {
        path.name: path.read_bytes()
        for path in (tmp_path / "checkpoints" / "step-000002").iterdir()
    } == before
    [(steps, _), _] = on_ranks(
        run_mesh, tmp_path, data_ranks=2, train_steps=4, resume=True, **settings
    )
    assert [step["step"] for step in steps] == [3, 4]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_ends(tmp_path, number, code):
    class Stopping(Pairs):
        def __getitem__(self, index):
            self.reads = getattr(self, "reads", 0) + 1
            if self.reads == 6:  # in the third step
                signal.raise_signal(number)
            return super().__getitem__(index)

    with pytest.raises(SystemExit) as ended:
        run_training(None, tmp_path / "run", data=Stopping(64), train_steps=8, dropout=0.1)
    assert ended.value.code == code
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-000003"]
    rest, _ = run_training(None, tmp_path / "run", train_steps=8, dropout=0.1, resume=True)
    whole, _ = run_training(None, tmp_path / "whole", train_steps=8, dropout=0.1)
    assert losses(rest) == losses(whole)[3:]


def test_a_run_under_nohup_goes_on_without_its_terminal(tmp_path):
    class HangingUp(Pairs):
        def __getitem__(self, index):
            signal.raise_signal(signal.SIGHUP)
            return super().__getitem__(index)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        steps, _ = run_training(None, tmp_path, data=HangingUp(64), train_steps=2)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(steps) == 2


def test_a_closed_terminal_ends_no_run_that_prints(run_ranks):
    """It may be closed in the moment before its SIGHUP arrives. A full disk still is an error."""

    def report() -> tuple[int, str]:
        from rich.console import Console

        from shardzoo.trainer.logging.reporter import RunReporter

        raised = ""
        kept = [os.dup(1), os.dup(2)]
        master, terminal = os.openpty()
        try:
            os.dup2(terminal, 1)
            os.dup2(terminal, 2)
            with open(1, "w", closefd=False) as output:
                console = Console(file=output, force_terminal=True)
                with RunReporter(console, [], first_step=0, total_steps=2) as reporter:
                    os.close(terminal)
                    os.close(master)
                    reporter.training(1, {"mean_loss": 1.0, "tokens_per_second": 1.0})
                    reporter.notice("stopped by a signal")
            written = os.write(2, b"discarded")
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            # Closing the file fails too.
            with contextlib.suppress(OSError), open(1, "w", closefd=False) as output:
                console = Console(file=output)
                reporter = RunReporter(console, [], first_step=0, total_steps=2)
                try:
                    reporter.notice("saved")
                except OSError as error:
                    raised = error.strerror
        finally:
            for number, file in enumerate(kept, 1):
                os.dup2(file, number)
                os.close(file)
        return written, raised

    assert run_ranks(1, report) == [(9, "No space left on device")]


def test_the_console_shows_mean_losses():
    """The loss of one batch says little. A line is of all steps since the line before, also where a
    step is not logged."""
    import io

    from rich.console import Console

    from shardzoo.trainer.logging.reporter import RunReporter

    lines = io.StringIO()
    with RunReporter(Console(file=lines), [], first_step=0, total_steps=43) as reporter:
        for step in range(1, 44):  # A line is printed every second step, and at the last one.
            reporter.training(
                step, {"loss": 99.0, "mean_loss": float(step), "tokens_per_second": 1.0}
            )
    shown = lines.getvalue().splitlines()
    assert shown[:2] == [
        "step 1/43  loss 1.000  1 target tokens/s",
        "step 2/43  loss 2.000  1 target tokens/s",
    ]
    assert shown[2] == "step 4/43  loss 3.500  1 target tokens/s"
    assert shown[21:] == [
        "step 42/43  loss 41.500  1 target tokens/s",
        "step 43/43  loss 43.000  1 target tokens/s",
    ]

    lines = io.StringIO()
    with RunReporter(Console(file=lines), [], first_step=0, total_steps=None) as reporter:
        reporter.training(10, {"mean_loss": 2.0, "tokens_per_second": 1.0})
        reporter.training(13, {"mean_loss": 3.0, "tokens_per_second": 1.0})
    assert [line.split()[3] for line in lines.getvalue().splitlines()] == ["2.000", "3.000"]

    # A run that passed over its last checkpoint, at step 60, continues from the one before.
    lines = io.StringIO()
    with RunReporter(Console(file=lines), [], first_step=60, total_steps=66) as reporter:
        for step in range(41, 61):
            reporter.training(step, {"mean_loss": float(step), "tokens_per_second": 1.0})
    assert [line.split()[3] for line in lines.getvalue().splitlines()][-1] == "59.000"

    # A twentieth of 950 steps is 47, of which few multiples are logged.
    lines = io.StringIO()
    console = Console(file=lines)
    with RunReporter(console, [], first_step=0, total_steps=950, log_interval=20) as reporter:
        for step in (*range(20, 950, 20), 950):
            reporter.training(step, {"mean_loss": 1.0, "tokens_per_second": 1.0})
    steps = [line.split()[1] for line in lines.getvalue().splitlines()]
    assert steps == ["20/950", *(f"{step}/950" for step in range(60, 950, 60)), "950/950"]

    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80, color_system=None)
    with RunReporter(console, [], first_step=0, total_steps=12_000) as reporter:
        reporter.training(10, {"mean_loss": 2.0, "tokens_per_second": 123_456.0})
        reporter.training(40, {"mean_loss": 3.0, "tokens_per_second": 123_456.0})
    last = terminal.getvalue().split("\r")[-1]
    assert "loss 2.750  123,456 tokens/s" in last
    # The elapsed and the remaining time are not cut off.
    assert ("0:00:0" in last and " ETA -:--:--" in last) or " ETA 0:" in last


def test_mean_losses_are_of_all_steps_since_the_last_line(tmp_path):
    """Also where a run was resumed between two lines."""
    import shutil

    from shardzoo.trainer import Trainer

    def run(folder: str, **arguments) -> dict[int, dict[str, float]]:
        trainer = Trainer(
            epochs=2, batch_size=4, lr=1e-2, save_dir=str(tmp_path / folder), **arguments
        )
        trainer.train(tiny_t5(), train_dataset=Pairs(24))
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record for record in map(json.loads, lines)}

    every_step = run("every-step", log_interval=1)
    losses = [every_step[step]["train/loss"] for step in range(1, 13)]
    assert [every_step[step]["train/mean_loss"] for step in range(1, 13)] == losses
    wanted = {4: sum(losses[:4]) / 4, 8: sum(losses[4:8]) / 4, 12: sum(losses[8:]) / 4}
    fourth = run("fourth", log_interval=4, save_interval=6)
    assert {step: fourth[step]["train/mean_loss"] for step in fourth} == pytest.approx(wanted)
    shutil.rmtree(tmp_path / "fourth/checkpoints/step-000012")
    resumed = run("fourth", log_interval=4, save_interval=6, resume=True)
    assert {step: record["train/mean_loss"] for step, record in resumed.items()} == {
        step: record["train/mean_loss"] for step, record in fourth.items()
    }


def test_forward_step_may_be_overridden_and_metrics_are_means(tmp_path, capsys):
    from shardzoo.trainer import Trainer

    calls = []
    targets = []  # of each training step

    class Mine(Trainer):
        def forward_step(self, data, model, mems):
            calls.append(set(data))
            if model.training:
                targets.append(int((data["labels"] != -100).sum()))
            outputs = model(**data)
            return {"loss": outputs.loss, "logits": outputs.logits}

    def accuracy(logits, labels):
        kept = labels != -100
        return float((logits.argmax(-1)[kept] == labels[kept]).sum()), float(kept.sum())

    def flagais_metric(logits, labels):
        return int(accuracy(logits, labels)[0])

    trainer = Mine(
        epochs=2, batch_size=4, lr=1e-2, save_dir=str(tmp_path), eval_interval=10, log_interval=5
    )
    model = tiny_t5()
    values = trainer.train(
        model,
        train_dataset=Pairs(40),
        valid_dataset=Pairs(10),
        metric_methods=[["accuracy", accuracy], ["right", flagais_metric]],
    )
    assert values["step"] == 20
    assert values["right"] == values["accuracy"]
    assert "right: integers are taken as numbers of hits" in capsys.readouterr().out
    assert all(names == {"input_ids", "attention_mask", "labels"} for names in calls)
    hits = total = loss = 0.0
    for i in range(10):
        sample = {name: value[None] for name, value in Pairs(10)[i].items()}
        output = model(**sample)
        count = int((sample["labels"] != -100).sum())
        loss += output.loss.item() * count
        hits += accuracy(output.logits, sample["labels"])[0]
        total += count
    assert values["loss"] == pytest.approx(loss / total, rel=1e-5)
    assert values["accuracy"] == pytest.approx(hits / total)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [record for record in records if "train/loss" in record]
    assert [record["step"] for record in logged] == [5, 10, 15, 20]
    wanted = {"loss", "mean_loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory_gb", "seconds", "samples",
              "samples_per_second"}  # fmt: skip
    assert all(
        {name.removeprefix("train/") for name in record if "/" in name} == wanted
        for record in logged
    )
    assert logged[-1]["train/loss"] < logged[0]["train/loss"]
    assert all(record["train/mean_loss"] != record["train/loss"] for record in logged)
    assert all(0 < record["train/mfu"] < 1 for record in logged)
    assert [record["train/samples"] for record in logged] == [20, 40, 60, 80]
    assert all(
        record["train/samples_per_second"] == 4 / record["train/seconds"] for record in logged
    )
    assert [
        record["train/tokens_per_second"] * record["train/seconds"] for record in logged
    ] == pytest.approx(targets[4::5])
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert f"{values['loss']:.4f}" in page
    assert "src=" not in page
    assert 'href="http' not in page


def test_every_ranks_memory_is_logged(run_mesh, tmp_path):
    results = on_ranks(
        run_mesh, tmp_path, tp=2, model=native_t5, env_type="deepspeed+mpu", model_parallel_size=2
    )
    for steps, _ in results:
        for values in steps:
            ranks = [values[f"memory_gb_rank_{rank}"] for rank in range(2)]
            assert values["memory_gb"] == max(ranks)
            assert 0.05 < min(ranks) < 20
            assert "memory_gb_rank_2" not in values


def test_fp16_scales_the_loss_and_leaves_out_steps_that_overflow(tmp_path):
    steps, weights = run_training(None, tmp_path, precision="fp16", train_steps=6)
    assert all(value.dtype == torch.float16 for value in weights.values())
    scales = [step["loss_scale"] for step in steps]
    assert scales[0] in (65536.0, 32768.0)
    assert losses(steps)[-1] < losses(steps)[0]


def test_recomputing_a_transformers_model_changes_nothing(tmp_path):
    kept, _ = run_training(None, tmp_path / "kept", dropout=0.1)
    again, _ = run_training(None, tmp_path / "again", dropout=0.1, checkpoint_activations=True)
    assert losses(again) == pytest.approx(losses(kept), rel=1e-6)


def test_forward_step_goes_on_from_the_memory_of_glm(tmp_path):
    from shardzoo.models import from_config
    from shardzoo.trainer import Trainer

    model = from_config(tiny("glm")).eval()
    trainer = Trainer(epochs=1, save_dir=str(tmp_path))
    ids = torch.randint(0, 97, (2, 12))
    positions = torch.stack([torch.arange(12), torch.zeros(12, dtype=torch.int64)])[None]
    with torch.no_grad():
        whole = trainer.forward_step({"input_ids": ids}, model, None)
        first = trainer.forward_step({"input_ids": ids[:, :8]}, model, None)
        data = {"input_ids": ids[:, 8:], "position_ids": positions[:, :, 8:]}
        rest = trainer.forward_step(data, model, first.mems)
    torch.testing.assert_close(rest.logits, whole.logits[:, 8:], rtol=1e-5, atol=1e-5)


def test_counting_the_flops_of_compiled_code_draws_no_random_numbers():
    """It takes a forward pass of its own, after which the step has the masks and numbers of other runs."""
    from shardzoo.mpu import Dropout, assign_dropout_sites, dropout_state
    from shardzoo.trainer.logging.diagnostics import Throughput
    from shardzoo.trainer.step import TrainingStep

    layer = torch.nn.ModuleDict({"dropout": Dropout(0.5)})
    assign_dropout_sites(layer)

    def forward_step(data, model, mems):
        return model["dropout"](torch.ones(3, 64)) @ torch.rand(64, 5)

    step = TrainingStep.__new__(TrainingStep)
    step.arguments = SimpleNamespace(torch_compile=True)
    step.engine = SimpleNamespace(model=layer)
    step.forward_step = forward_step
    drawn = []
    for counts in (True, False):
        step.throughput = Throughput(torch.device("cpu"))
        step.throughput.flops_per_token = None if counts else 1.0
        torch.manual_seed(0)
        dropout_state.set(1, 2)
        with step._flops_counted_once({"input_ids": torch.ones(3, 4)}):
            drawn.append(forward_step({}, layer, None))
        assert step.throughput.flops_per_token == (2 * 3 * 64 * 5 / 12 if counts else 1.0)
    assert torch.equal(*drawn)


def test_the_profiler_records_the_steps_asked_for(tmp_path):
    run_training(None, tmp_path, profile_steps=2, train_steps=6)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert {name for name in names if name.startswith("ProfilerStep#")} == {
        "ProfilerStep#2",
        "ProfilerStep#3",
    }


def test_torch_schedulers_and_optimizers_are_taken(tmp_path):
    from shardzoo.trainer import Trainer

    rates = []
    for run in ("whole", "half"):
        model = tiny_t5()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        arguments = (
            {"load_dir": str(tmp_path / "whole" / "checkpoints" / "step-000003")}
            if run == "half"
            else {}
        )
        trainer = Trainer(
            train_steps=6,
            save_interval=3,
            log_interval=1,
            save_dir=str(tmp_path / run),
            **arguments,
        )
        trainer.train(model, optimizer, scheduler, Pairs())
        lines = Path(tmp_path / run / "metrics.jsonl").read_text().splitlines()
        rates.append([json.loads(line) for line in lines])
    whole, half = ([(r["train/lr"], r["train/loss"]) for r in run] for run in rates)
    assert [lr for lr, _ in whole] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    assert half == whole[3:]
