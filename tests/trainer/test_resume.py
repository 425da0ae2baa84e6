"""A run that goes on from a checkpoint repeats what an uninterrupted one does, bit for bit."""

from __future__ import annotations

import json
import os
import random
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from every_case import EVERY_CASE, by_turns, every_day
from training import Pairs, Stream, losses, native_t5, on_ranks, run_training, tiny_t5

RUNS = {
    "pytorch": ({"env_type": "pytorch"}, 1),
    "pytorch bf16": ({"env_type": "pytorch", "precision": "bf16"}, 1),
    "pytorch fp16": ({"env_type": "pytorch", "precision": "fp16"}, 1),
    "DDP": ({"env_type": "pytorchDDP"}, 2),
    "DDP of three": (
        {"env_type": "pytorchDDP", "global_batch_size": 12},
        3,
    ),  # sums of three have an order
    "DDP bf16": ({"env_type": "pytorchDDP", "precision": "bf16"}, 2),
    "ZeRO-0": ({"env_type": "deepspeed", "zero_stage": 0}, 2),
    "ZeRO-2": ({"env_type": "deepspeed", "zero_stage": 2}, 2),
    "ZeRO-2 bf16": ({"env_type": "deepspeed", "zero_stage": 2, "precision": "bf16"}, 2),
    "ZeRO-2 lion": ({"env_type": "deepspeed", "zero_stage": 2, "optimizer": "lion", "lr": 1e-3}, 2),
    "ZeRO-3": ({"env_type": "deepspeed", "zero_stage": 3}, 2),
    "ZeRO-3 offload": ({"env_type": "deepspeed", "zero_stage": 3, "offload_optimizer": True}, 2),
    "FSDP": ({"env_type": "fsdp"}, 2),
    "FSDP of three, bf16": (
        {"env_type": "fsdp", "precision": "bf16", "global_batch_size": 12, "model": native_t5},
        3,
    ),
    "adafactor": ({"optimizer": "adafactor", "lr": 1e-3}, 1),
    "adafactor relative": ({"optimizer": "adafactor", "relative_step": True}, 1),
    "adafactor ZeRO-0": ({"env_type": "deepspeed", "optimizer": "adafactor", "lr": 1e-3}, 2),
    "lion": ({"optimizer": "lion", "lr": 1e-3}, 1),
    "lamb": ({"optimizer": "lamb"}, 1),
    "linear": ({"lr_schedule": "linear"}, 1),
}
OF_THE_ZOO = {
    "ZeRO-3 of the zoo": ({"env_type": "deepspeed", "zero_stage": 3, "model": native_t5}, 2)
}
STREAMED = ("pytorch", "DDP", "ZeRO-2")


def checkpoint(folder: Path, step: int) -> str:
    return str(folder / "checkpoints" / f"step-{step:06d}")


# Every day, those that others do not contain: a run in bf16, for example, saves fp32's state and more.
CONTAINED = (
    "pytorch", "DDP", "DDP bf16", "FSDP", "ZeRO-0", "ZeRO-2", "ZeRO-3", "linear", "lion", "lamb", "adafactor",
    "ZeRO-2 lion",
)  # fmt: skip
STEPS, SAVED, SAMPLES = (8, 6, 40) if EVERY_CASE else (5, 4, 28)


@pytest.mark.parametrize(
    ("name", "data"),
    by_turns(
        every_day(
            [
                *((n, "indexed") for n in RUNS | OF_THE_ZOO if n not in CONTAINED),
                *((n, "streamed") for n in STREAMED),
            ],
            more=[(n, "indexed") for n in CONTAINED],
        ),
        3,
    ),
)
def test_going_on_is_bit_for_bit(run_mesh, tmp_path, name, data):
    arguments, ranks = (RUNS | OF_THE_ZOO)[name]
    # More than an epoch, with dropout from torch's generator.
    samples = Pairs(SAMPLES) if data == "indexed" else Stream(Pairs(SAMPLES))
    settings = {
        "train_steps": STEPS,
        "global_batch_size": 8,
        "dropout": 0.1,
        "data": samples,
        **arguments,
    }
    whole = on_ranks(
        run_mesh, tmp_path / "whole", data_ranks=ranks, save_interval=SAVED, **settings
    )
    load = {"load_dir": checkpoint(tmp_path / "whole", SAVED)}
    rest = on_ranks(run_mesh, tmp_path / "rest", data_ranks=ranks, **load, **settings)
    assert len(whole[0][0]) == STEPS
    for (steps, weights), (later, same) in zip(whole, rest, strict=True):
        assert losses(later) == losses(steps)[SAVED:]
        assert [s["grad_norm"] for s in later] == [s["grad_norm"] for s in steps][SAVED:]
        for key, value in weights.items():
            assert torch.equal(value, same[key]), key
    assert losses(whole[0][0])[-1] < losses(whole[0][0])[0]


def test_a_run_does_not_go_on_with_data_of_another_kind(tmp_path):
    for first, second, message in (
        (Pairs(40), Stream(Pairs(40)), "a stream cannot resume from it"),
        (Stream(Pairs(40)), Pairs(40), "a loader of numbered samples cannot resume"),
    ):
        folder = tmp_path / type(first).__name__
        run_training(None, folder, data=first, train_steps=1)
        with pytest.raises(ValueError, match=message):
            run_training(None, folder, data=second, train_steps=2, resume=True)


def test_a_longer_run_takes_the_samples_that_were_left_over(tmp_path):
    """Ten samples are two steps of four; the two that are left belong to the third step, if there is one."""
    settings = {
        "train_steps": None,
        "lr_schedule": "constant",
        "micro_batch_size": 1,
        "global_batch_size": 4,
    }
    settings["data"] = Stream(Pairs(10))
    whole, _ = run_training(None, tmp_path / "whole", epochs=2, **settings)
    first, _ = run_training(None, tmp_path / "longer", epochs=1, **settings)
    rest, _ = run_training(None, tmp_path / "longer", epochs=2, resume=True, **settings)
    assert losses(first) + losses(rest) == losses(whole)
    assert len(whole) == 5


@pytest.mark.parametrize("workers", by_turns([0, 2], 2))
@pytest.mark.parametrize("kind", [datasets.IterableDataset, torch.utils.data.IterableDataset])
def test_libraries_streams_go_on(tmp_path, kind, workers):
    """They have a `__getitem__` that only raises."""
    samples = [{name: value.tolist() for name, value in Pairs(20)[i].items()} for i in range(20)]
    if kind is datasets.IterableDataset:
        data = (
            datasets.Dataset.from_list(samples)
            .to_iterable_dataset(num_shards=2)
            .shuffle(seed=1, buffer_size=8)
        )
    else:
        data = type("Lines", (kind,), {"__iter__": lambda self: iter(samples)})()
    settings = {"data": data, "dropout": 0.1, "num_workers": workers, "train_steps": 14}
    steps, _ = run_training(None, tmp_path / "whole", save_interval=12, **settings)
    later, _ = run_training(
        None, tmp_path / "rest", load_dir=checkpoint(tmp_path / "whole", 12), **settings
    )
    assert losses(later) == losses(steps)[12:]
    assert len(set(losses(steps))) == 14


def test_one_command_begins_elsewhere_and_goes_on_after_each_kill(tmp_path):
    """With `load_dir` and `resume`, what is to be left out of the one is not left out of the other."""
    run_training(None, tmp_path / "first", train_steps=3)
    command = {
        "load_dir": str(tmp_path / "first"),
        "load_optim": False,
        "resume": True,
        "dropout": 0.1,
    }
    whole, weights = run_training(None, tmp_path / "whole", train_steps=6, **command)
    assert [step["step"] for step in whole] == [1, 2, 3, 4, 5, 6]
    # The same schedule, but saved at its second step.
    cut = {"save_interval": 2, "train_steps": 6, **command}
    with pytest.raises(KeyboardInterrupt):
        run_training(None, tmp_path / "cut", on_step=interrupt_at(3), **cut)
    rest, same = run_training(None, tmp_path / "cut", **cut)
    assert losses(rest) == losses(whole)[2:]
    assert all(torch.equal(value, same[key]) for key, value in weights.items())


def test_leftovers_of_killed_processes_are_cleared_away(tmp_path):
    run_training(None, tmp_path, train_steps=1)
    for name in (".step-000002.partial", ".step-000001.deleted"):
        (tmp_path / "checkpoints" / name).mkdir()
    run_training(None, tmp_path, train_steps=2, resume=True)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000001", "step-000002"]


def test_every_course_that_is_left_is_kept(tmp_path):
    run_training(None, tmp_path, train_steps=4, save_interval=2)
    for again in (1, 2):
        run_training(None, tmp_path, train_steps=4, load_dir=checkpoint(tmp_path, 2))
        names = ["step-000002", "step-000004", "step-000004.abandoned", "step-000004.abandoned1"]
        assert sorted(os.listdir(tmp_path / "checkpoints")) == names[: 2 + again]
    with pytest.raises(
        ValueError, match=r"and load_dir=.* belongs to the same run; leave one of them out"
    ):
        run_training(None, tmp_path, train_steps=4, load_dir=checkpoint(tmp_path, 2), resume=True)
    left = {"load_dir": str(tmp_path / "checkpoints" / "step-000004.abandoned"), "train_steps": 5}
    with pytest.raises(ValueError, match="holds a run that is saved at step 4"):
        run_training(None, tmp_path, **left)
    steps, _ = run_training(None, tmp_path / "other", **left)
    assert [step["step"] for step in steps] == [5]


def interrupt_at(last: int):
    def on_step(step: int, loss: float) -> None:
        if step == last:
            raise KeyboardInterrupt

    return on_step


def train_one_cycle(mesh, folder, **settings):
    """A run under a scheduler that changes the betas too."""
    model = tiny_t5(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
    return run_training(
        mesh, folder, model=model, updates=(optimizer, schedule), train_steps=8, **settings
    )


def test_a_scheduler_that_changes_betas_goes_on(tmp_path):
    steps, weights = train_one_cycle(None, tmp_path / "whole", save_interval=5)
    later, same = train_one_cycle(
        None, tmp_path / "rest", load_dir=checkpoint(tmp_path / "whole", 5)
    )
    assert losses(later) == losses(steps)[5:]
    assert all(torch.equal(value, same[key]) for key, value in weights.items())


def test_each_step_is_logged_once_after_kills(tmp_path):
    """Also after one that came before the first checkpoint, and cut a line."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from shardzoo.trainer import Trainer

    class Killed(Trainer):
        def forward_step(self, data, model, mems):
            self.done = getattr(self, "done", 0) + 1
            if self.done > last:
                raise KeyboardInterrupt
            return super().forward_step(data, model, mems)

    def train(**more):
        arguments = {"train_steps": 6, "save_interval": 4, "log_interval": 1, "lr": 1e-2, **more}
        Killed(save_dir=str(tmp_path), resume=True, **arguments).train(
            tiny_t5(), train_dataset=Pairs(40)
        )

    for last in (2, 5):  # noqa: B007 - read by `Killed`
        with pytest.raises(KeyboardInterrupt):
            train()
        with (tmp_path / "metrics.jsonl").open("a") as log:
            log.write('{"step": 9, "train/lo')
    last = 9
    train()
    logged = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert logged == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == logged


def test_a_folder_does_not_begin_anew_by_dropping_the_optimizer(tmp_path):
    run_training(None, tmp_path, train_steps=2)
    with pytest.raises(
        ValueError, match=r"load_optim=False starts at step 0, but .* saved at step 2; choose"
    ):
        run_training(None, tmp_path, train_steps=2, resume=True, load_optim=False)


def test_the_best_is_named_again_after_a_kill_just_before(tmp_path):
    settings = {
        "save_interval": 1,
        "save_total_limit": 1,
        "save_best": "loss",
        "eval_interval": 2,
        "valid": Pairs(8),
    }
    run_training(None, tmp_path, train_steps=3, **settings)
    named = tmp_path / "checkpoints" / "best"
    assert named.read_text() == "step-000002\n"
    named.write_text("step-000003\n")
    run_training(None, tmp_path, train_steps=4, resume=True, **settings)
    assert named.read_text() == "step-000002\n"
    assert Path(checkpoint(tmp_path, 2)).is_dir()


class LongPairs:
    """512 tokens, and the first 128 of them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 4096, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids[:128]}


@pytest.mark.before_release
def test_large_products_go_on_bit_for_bit(run_mesh, tmp_path):
    """Of a size from which products are computed in other ways than those of tiny models, in two processes."""
    model = partial(native_t5, vocab_size=4096, d_model=512, d_kv=64, d_ff=2048, num_heads=8)
    settings = {"model": model, "data": LongPairs(), "train_steps": 2, "lr": 1e-4, "isolated": True}
    [(steps, weights)] = on_ranks(run_mesh, tmp_path / "whole", save_interval=1, **settings)
    [(later, same)] = on_ranks(
        run_mesh, tmp_path / "rest", load_dir=checkpoint(tmp_path / "whole", 1), **settings
    )
    assert losses(later) == losses(steps)[1:]
    assert [s["grad_norm"] for s in later] == [s["grad_norm"] for s in steps][1:]
    assert all(torch.equal(value, same[key]) for key, value in weights.items())


@pytest.mark.before_release
def test_any_engine_and_size_goes_on_from_any_other(run_mesh, tmp_path):
    settings = {"train_steps": 8, "global_batch_size": 8}
    [(whole, _)] = on_ranks(run_mesh, tmp_path / "whole", save_interval=4, **settings)
    for name, ranks in every_day([("ZeRO-3", 4)], more=[("DDP", 2), ("ZeRO-2", 2), ("ZeRO-0", 2)]):
        load = {"load_dir": checkpoint(tmp_path / "whole", 4), **RUNS[name][0]}
        [(rest, _), *_] = on_ranks(
            run_mesh, tmp_path / name, data_ranks=ranks, save_interval=6, **load, **settings
        )
        assert losses(rest) == pytest.approx(losses(whole)[4:], rel=1e-5)
        back = {"load_dir": checkpoint(tmp_path / name, 6)}
        [(last, _)] = on_ranks(run_mesh, tmp_path / f"{name} back", **back, **settings)
        assert losses(last) == pytest.approx(losses(whole)[6:], rel=1e-5)


def test_checkpoints_hold_tensors_and_text_alone(run_mesh, tmp_path):
    on_ranks(run_mesh, tmp_path, data_ranks=2, env_type="deepspeed", train_steps=2)
    files = {path.name for path in Path(checkpoint(tmp_path, 2)).iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer_00.safetensors",
        "random_00.safetensors",
        "random_01.safetensors",
        "trainer_state.json",
    }
    from transformers import T5ForConditionalGeneration

    _, report = T5ForConditionalGeneration.from_pretrained(
        checkpoint(tmp_path, 2), output_loading_info=True
    )
    assert not any(report.values())


def test_limit_best_and_latest(run_mesh, tmp_path):
    settings = {
        "train_steps": 12,
        "save_interval": 2,
        "save_total_limit": 2,
        "save_best": "loss",
        "eval_interval": 3,
    }
    # A rate that makes the validation loss worse after the first evaluation.
    on_ranks(run_mesh, tmp_path, valid=Pairs(8), lr=0.5, warmup_steps=4, **settings)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    best = (tmp_path / "checkpoints" / "best").read_text().strip()
    assert kept == sorted({"best", best, "step-000010", "step-000012"})
    state = json.loads((tmp_path / "checkpoints" / best / "trainer_state.json").read_text())
    assert state["best"]["step"] == state["step"]
    [(steps, _)] = on_ranks(
        run_mesh, tmp_path / "on", load_dir=str(tmp_path), load_type="best", train_steps=12
    )
    assert steps[0]["step"] == state["step"] + 1


def test_a_damaged_checkpoint_is_passed_over_and_said(run_mesh, tmp_path):
    settings = {"train_steps": 6, "save_interval": 2, "save_dir": str(tmp_path / "run")}
    [(whole, _)] = on_ranks(run_mesh, tmp_path / "run", **settings)
    for step, name in ((6, "optimizer_00.safetensors"), (4, "trainer_state.json")):
        path = Path(checkpoint(tmp_path / "run", step), name)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def resume(mesh):
        import contextlib
        import io

        with contextlib.redirect_stdout(io.StringIO()) as shown:
            steps, _ = run_training(mesh, tmp_path / "run", resume=True, **settings)
        return steps, shown.getvalue()

    [(rest, shown)] = run_mesh(1, resume)
    assert losses(rest) == losses(whole)[2:]
    unwrapped = "".join(shown.split())  # lines may break within a path
    assert "optimizer_00.safetensorshaschangedsinceitwaswritten" in unwrapped
    assert "resumingfromstep-000002" in unwrapped
    os.unlink(Path(checkpoint(tmp_path / "run", 2), "model.safetensors"))
    for step in (4, 6):
        os.unlink(Path(checkpoint(tmp_path / "run", step), "trainer_state.json"))
    with pytest.raises(
        AssertionError,
        match=r"no undamaged checkpoint to resume from: .*model.safetensors is missing",
    ):
        on_ranks(run_mesh, tmp_path / "run", resume=True, **settings)


def find_after_damage(mesh, folder: Path) -> dict[str, str]:
    """What each rank says of a checkpoint while one byte of it is another: position -> message, "" if it is taken."""
    import torch.distributed as dist

    from shardzoo.trainer.checkpointing.resume import find_checkpoint
    from shardzoo.trainer.launch.ranks import Ranks

    def find() -> str:
        dist.barrier()
        try:
            find_checkpoint(folder, "latest", Ranks(mesh), print)
        except ValueError as error:
            return str(error)
        finally:
            dist.barrier()
        return ""

    contents = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    found = {"undamaged": find()}  # waits until all ranks have read, before rank 0 damages files
    for path, content in contents.items():
        for place in (0, len(content) - 1):  # which different ranks may have written
            damaged = bytearray(content)
            damaged[place] ^= 1
            if mesh.rank == 0:
                path.write_bytes(damaged)
            found[f"{path.name} {place}"] = find()
            if mesh.rank == 0:
                path.write_bytes(content)
    return found


@pytest.mark.parametrize("data_ranks", [1, 2])
def test_every_damaged_file_of_a_split_checkpoint_is_refused(run_mesh, tmp_path, data_ranks):
    """The ranks divide the files among them, and each finds out what the others have found."""
    how = {"env_type": "deepspeed+mpu", "model_parallel_size": 2, "model": native_t5}
    on_ranks(run_mesh, tmp_path, tp=2, data_ranks=data_ranks, train_steps=1, **how)
    saved = Path(checkpoint(tmp_path, 1))
    assert {"rank_00.safetensors", "rank_01.safetensors"} <= {path.name for path in saved.iterdir()}
    for found in run_mesh(2, find_after_damage, saved, data=data_ranks):
        assert found.pop("undamaged") == ""
        assert len(found) == 2 * len(list(saved.iterdir()))
        for place, message in found.items():
            assert "there is no undamaged checkpoint to resume from" in message, place
            assert place.split()[0] in message


def draw_after_change_of_layout(mesh, folder: Path) -> tuple[int, list[float]]:
    """The number of this rank's replica, and numbers of each generator."""
    from shardzoo.trainer.checkpointing.random_state import (
        random_state_tensors,
        restore_random_state,
    )
    from shardzoo.trainer.checkpointing.resume import restore_random
    from shardzoo.trainer.checkpointing.snapshot import TrainerState
    from shardzoo.trainer.launch.ranks import Ranks

    before = random_state_tensors()
    try:
        # Ranks that have drawn unequally often until now.
        for _ in range(mesh.rank):
            torch.rand(3)
        state = TrainerState(step=5, consumed_samples=40, world_size=2)
        assert not restore_random(folder, state, Ranks(mesh), 1234)
        return mesh.dp_rank, [random.random(), np.random.rand(), float(torch.rand(()))]
    finally:
        restore_random_state(before)


def test_ranks_of_a_replica_draw_the_same_after_a_change_of_layout(run_mesh, tmp_path):
    """Layers outside the split ones may use torch's own dropout, and have to drop the same on each of them."""
    drawn = run_mesh(2, draw_after_change_of_layout, tmp_path, data=2)
    by_replica = {
        replica: [numbers for at, numbers in drawn if at == replica] for replica in (0, 1)
    }
    for first, second in by_replica.values():
        assert first == second
    assert all(a != b for a, b in zip(by_replica[0][0], by_replica[1][0], strict=True))


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_of_another_vocabulary_are_refused(run_mesh, tmp_path, tp):
    """Of 64 tokens for 63, which two ranks pad to the same width."""
    how = {"env_type": "deepspeed+mpu", "model_parallel_size": tp, "train_steps": 1}
    on_ranks(run_mesh, tmp_path / "first", tp=tp, model=native_t5, **how)
    other = {"model": partial(native_t5, vocab_size=63), "load_optim": False}
    with pytest.raises(
        AssertionError, match=r"has shape \[64, 32\], but the model wants \[63, 32\]"
    ):
        on_ranks(
            run_mesh, tmp_path / "other", tp=tp, load_dir=str(tmp_path / "first"), **other, **how
        )
