"""A training checkpoint becomes DeepSpeed's universal checkpoint, which DeepSpeed's own engine loads."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_case import EVERY_CASE, by_turns, every_day
from safetensors.torch import load_file
from tiny_models import hf_model
from training import Pairs, on_ranks

from shardzoo.checkpoint.checkpoint import open_checkpoint
from shardzoo.checkpoint.folder_files import read_state_file, write_state_file
from shardzoo.checkpoint.rank_files import write_tensors
from shardzoo.checkpoint.tensor_reader import tensor_bytes
from shardzoo.cli.convert import main
from shardzoo.convert.operations import Options, merge
from shardzoo.trainer.checkpointing.resume import read_state
from shardzoo.trainer.run_folder import RunFolder

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
    "bert": "BertForMaskedLM",
    "llama": "LlamaForCausalLM",
}
WIDE = {"vocab_size": 61}  # no multiple of the ranks, so the shards are padded
# Above the rounding of gradients, about 1e-9. With AdamW's default, 1e-8, the first step of an element whose gradient
# is as small follows that rounding, and the second gradient of its whole row follows the step.
EPSILON = 1e-6


def native(folder: Path, mesh: Any) -> Any:
    from shardzoo import from_pretrained

    return from_pretrained(folder, mesh).train()


def train(run_mesh: Any, folder: Path, size: int, model: Any, **changes: Any) -> Path:
    """The checkpoint of the second step."""
    settings = {"train_steps": 2, "global_batch_size": 4, "adam_eps": EPSILON, **changes}
    on_ranks(run_mesh, folder, tp=size, model=model, data=Pairs(vocab_size=61), **settings)
    return RunFolder(folder).checkpoint(2)


@pytest.fixture(scope="module")
def saved(run_mesh, tmp_path_factory):
    """`saved(family, size)`: our checkpoint on so many ranks, and transformers' model after the same steps."""
    made: dict[Any, Path] = {}

    def make(family: str, size: int, **changes: Any) -> Path:
        key = family, size, str(changes)
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            hf_model(ARCHITECTURES[family], 0.0, **WIDE).save_pretrained(folder / "hf")
            engine = {"env_type": "deepspeed+mpu", "zero_stage": 1}
            made[key] = train(
                run_mesh,
                folder / "run",
                size,
                partial(native, folder / "hf"),
                **{**engine, **changes},
            )
        return made[key]

    return make


def reference(
    run_mesh: Any, folder: Path, family: str, **changes: Any
) -> tuple[dict[str, torch.Tensor], Path]:
    """The state after the same two steps of transformers' model, as `KIND/NAME`."""
    model = hf_model(ARCHITECTURES[family], 0.0, **WIDE).train()
    saved = train(run_mesh, folder, 1, model, env_type="pytorch", **changes)
    weights = {
        f"fp32/{name}": value for name, value in load_file(saved / "model.safetensors").items()
    }
    return weights | load_file(saved / "optimizer_00.safetensors"), saved


def adamw(named: dict[str, torch.Tensor], stage: int, rate: float) -> torch.optim.AdamW:
    """Under ZeRO 3, DeepSpeed loads one step count into all groups, which torch then counts up once for each group."""
    groups = [
        [p for p in named.values() if (p.dim() > 1 or stage == 3) == decayed]
        for decayed in (True, False)
    ]
    decays = [0.1, 0.0]
    groups_of_decay = [
        {"params": g, "weight_decay": d} for g, d in zip(groups, decays, strict=True) if g
    ]
    return torch.optim.AdamW(groups_of_decay, rate, eps=EPSILON)


def resume_in_deepspeed(folder: Path, family: str, stage: int) -> dict[str, torch.Tensor]:
    """What DeepSpeed's engine with torch's AdamW holds after it loaded the folder, and the weights of the next step."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = hf_model(ARCHITECTURES[family], 0.0, **WIDE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = adamw(dict(model.named_parameters()), stage, 5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "checkpoint": {"load_universal": True},
    }
    engine: Any = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )[0]
    engine.load_checkpoint(str(folder))
    assert engine.global_steps == 2
    assert engine.lr_scheduler.last_epoch == 2
    found: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        found[f"fp32/{name}"] = safe_get_full_fp32_param(parameter)
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind}/{name}"] = safe_get_full_optimizer_state(parameter, kind)
    found["rate"] = torch.tensor(engine.get_lr())
    ids = torch.arange(2, 22).view(2, 10)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    found |= {
        f"next/{name}": safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()
    }
    return {name: value.clone() for name, value in found.items()}


def next_weights(
    family: str, state: dict[str, torch.Tensor], stage: int, rate: float
) -> dict[str, torch.Tensor]:
    """One step of transformers' model by torch's AdamW from a state."""
    model = hf_model(ARCHITECTURES[family], 0.0, **WIDE)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.data.copy_(state[f"fp32/{name}"])
    optimizer = adamw(named, stage, rate)
    for name, parameter in named.items():
        moments = {kind: state[f"{kind}/{name}"] for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(2.0), **moments}
    ids = torch.arange(2, 22).view(2, 10)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def check_state(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Other roundings reach the moments at the size of the gradients, and the weights divided by EPSILON at most."""
    if name.startswith("exp_avg_sq/"):
        found, wanted = found.sqrt(), wanted.sqrt()
    least = 1e-4 if name.startswith("fp32/") else 1e-4 * float(wanted.abs().max()) + 1e-8
    torch.testing.assert_close(
        found, wanted, rtol=1e-4, atol=least, msg=lambda message: f"{name}: {message}"
    )


CASES = [("gpt2", 3, 1, 1), ("t5", 2, 2, 2), ("bert", 2, 1, 3)]
CASES += [
    (family, size, 2, stage) for family in ARCHITECTURES for size in (1, 2) for stage in (1, 2, 3)
] * EVERY_CASE


@pytest.mark.parametrize(("family", "size", "replicas", "stage"), by_turns(CASES, 2))
def test_deepspeed_goes_on_where_the_run_was(
    family, size, replicas, stage, saved, run_ranks, run_mesh, tmp_path
):
    source = saved(family, size)
    command = [
        "merge",
        str(source),
        str(tmp_path / "universal"),
        "--to",
        "universal",
        "--step",
        "tensor",
    ]
    assert main(command) == 0
    wanted, _ = reference(run_mesh, tmp_path / "reference", family)
    loaded = run_ranks(replicas, resume_in_deepspeed, tmp_path / "universal", family, stage)[0]
    rate = float(loaded.pop("rate")[0])
    after = {name: loaded.pop(name) for name in [*loaded] if name.startswith("next/")}
    assert {name for name in wanted if not name.startswith("step/")} == loaded.keys()
    for name, value in loaded.items():
        check_state(name, value, wanted[name])
    weights = next_weights(family, loaded, stage, rate)
    for name, value in after.items():
        torch.testing.assert_close(value, weights[name.partition("/")[2]], rtol=1e-5, atol=1e-6)


def rates_of_warm_up(folder: Path, stage: int) -> list[list[float]]:
    """The rates in and after each of five steps of DeepSpeed's WarmupLR, and of those that follow the folder."""
    import deepspeed
    from deepspeed.runtime.lr_schedules import WarmupLR

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = hf_model(ARCHITECTURES["gpt2"], 0.0, **WIDE)
    optimizer = adamw(dict(model.named_parameters()), stage, 5e-3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
    }
    schedule: Any = WarmupLR(optimizer, warmup_num_steps=6, warmup_type="linear")
    engine: Any = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )[0]
    ids = torch.arange(2, 22).view(2, 10)

    def train(steps: int) -> list[float]:
        rates = [*engine.get_lr()[:1]]
        for _ in range(steps):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            rates.append(engine.get_lr()[0])
        return rates

    whole = train(5)
    engine.load_checkpoint(str(folder))
    return [whole, train(3)]


@pytest.mark.parametrize("stage", every_day([1], more=[2, 3]))
def test_a_schedule_of_deepspeed_goes_on_at_the_runs_step(stage, saved, run_ranks, tmp_path):
    """The folder is of the second step. The third one has our run's rate, and those after it are DeepSpeed's."""
    schedule = {"lr": 5e-3, "lr_schedule": "constant_with_warmup", "warmup_steps": 8}
    source = saved("gpt2", 3, **schedule)
    command = ["merge", str(source), str(tmp_path / "universal"), "--to", "universal"]
    assert main([*command, "--step", "tensor"]) == 0  # torch's AdamW counts in tensors
    [[whole, rest]] = run_ranks(1, rates_of_warm_up, tmp_path / "universal", stage)
    assert len(set(whole)) == 5  # its first two steps have the same rate, 0
    assert rest == [5e-3 * 2 / 8, *whole[3:]]


def test_the_rates_of_unequal_groups_are_kept():
    from shardzoo.convert.target import _build_optimizer_state

    state = _build_optimizer_state(2, [0.1, None, 0.3])
    assert state["param_groups"][:4] == [{"lr": 0.1}, {}, {"lr": 0.3}, {}]
    assert state["optimizer_state_dict"]["param_groups"][0] == {}  # stage 3 gives it to all groups
    for rates in ([], [None, None]):
        assert _build_optimizer_state(2, rates)["param_groups"][0] == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("step", value) for value in (None, -1, "2", True, 10**400)),
        *(("consumed_samples", value) for value in (None, 1.5)),
        *(("rates", value) for value in (None, ["x", 10**400, [1]], {"a": 1})),
        ("optimizer", None),
    ],
)
def test_a_state_that_lacks_something(name, value, saved, tmp_path, capsys):
    """None: the state has no such entry. Steps and samples are needed; older checkpoints lack the others."""
    source = tmp_path / "run"
    shutil.copytree(saved("gpt2", 2), source)
    state = read_state_file(source)
    state[name] = value
    if value is None:
        del state[name]
    (source / "trainer_state.json").unlink()
    write_state_file(source, state)
    needed = name in ("step", "consumed_samples")
    command = ["merge", str(source), str(tmp_path / "universal"), "--to", "universal"]
    assert main(command) == (2 if needed else 0)
    if needed:
        assert f"has {name}=" in " ".join(capsys.readouterr().err.split())
        with pytest.raises(ValueError, match=f"has {name}="):
            read_state(source)


MISTAKES = {
    "no moments of a kind": (
        {"optimizer": "adafactor", "zero_stage": 0},
        [],
        "of Adafactor, has no exp_avg_sq/",
    ),
    "a type": ({}, ["--dtype", "bfloat16"], "leave out adapter and dtype"),
    "no optimizer": ({"save_optim": False}, [], "with 0 files of an optimizer's state"),
    "another format": ({}, ["--step", "tensor", "--to", "dcp"], "leave it out for --to dcp"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_refused_leaves_nothing(name, saved, tmp_path, capsys):
    changes, words, message = MISTAKES[name]
    source = saved("gpt2", 2, **changes)
    assert (
        main(["merge", str(source), str(tmp_path / "universal"), "--to", "universal", *words]) == 2
    )
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_bit_of_the_state_is_kept(precision, saved, tmp_path, capsys):
    """Two ranks' parts are the whole tensors, in fp32; master weights go before the weights in 16 bits."""
    source = saved("llama", 2, precision=precision)
    assert main(["merge", str(source), str(tmp_path / "universal"), "--to", "universal"]) == 0
    assert main(["merge", str(source), str(tmp_path / "merged")]) == 0
    zero = tmp_path / "universal" / "global_step2" / "zero"
    kinds = {"fp32": "rank", "exp_avg": "optimizer", "exp_avg_sq": "optimizer"}
    parts = {
        stem: [load_file(source / f"{stem}_0{rank}.safetensors") for rank in range(2)]
        for stem in kinds.values()
    }
    for kind, stem in kinds.items():
        prefix = f"{kind}/" if kind != "fp32" else "master_weight/" if precision == "bf16" else ""
        stem = "optimizer" if prefix else stem
        down = torch.cat([part[f"{prefix}blocks.0.mlp.down.weight"] for part in parts[stem]], 1)
        found = torch.load(zero / "model.layers.0.mlp.down_proj.weight" / f"{kind}.pt")["param"]
        assert found.dtype == torch.float32
        assert torch.equal(found, down)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {path.name for path in zero.iterdir() if path.is_dir()} == merged.keys()
    for name, weight in merged.items():
        assert torch.equal(torch.load(zero / name / "fp32.pt")["param"].to(weight.dtype), weight)
        assert torch.load(zero / name / "step.pt") == 2
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "universal")]) == 0
    assert "universal" in capsys.readouterr().out


CONVERT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from shardzoo.cli.main import main
sys.exit(main(["convert", "merge", sys.argv[3], sys.argv[4], "--to", "universal"]))
"""


@pytest.mark.before_release
@pytest.mark.parametrize(("most", "code"), [(150, 2), (4096, 0)])
def test_many_files_need_a_higher_limit(most, code, saved, tmp_path):
    source = str(saved("bert", 2))
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, "100", str(most), source, str(tmp_path / "universal")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert code == 0 or "files must be open at once, but the limit is 150" in done.stderr
    assert code == 0 or not list(tmp_path.iterdir())


def test_an_interrupted_one_is_resumed(saved, tmp_path, file_tree):
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    with pytest.raises(Stop):
        merge(saved("gpt2", 2), tmp_path / "universal", Options(jobs=1), stop, "universal")
    outcome = merge(
        saved("gpt2", 2), tmp_path / "universal", Options(resume=True), style="universal"
    )
    assert outcome.kept > 0
    merge(saved("gpt2", 2), tmp_path / "fresh", style="universal")
    assert file_tree(tmp_path / "universal") == file_tree(tmp_path / "fresh")
    again = merge(saved("gpt2", 2), tmp_path / "fresh", Options(resume=True), style="universal")
    assert again.kept == again.nbytes
    (tmp_path / "fresh" / "global_step2" / "zero" / "lm_head.weight").mkdir()
    merge(saved("gpt2", 2), tmp_path / "merged")
    with pytest.raises(ValueError, match="of another conversion"):
        merge(saved("gpt2", 2), tmp_path / "merged", Options(resume=True), style="universal")


@pytest.mark.parametrize("by", [1e-8, 1e-2])
def test_copies_of_a_run_may_differ_by_rounding(by, saved, tmp_path, capsys):
    """ZeRO's flat buffers of unequal ranks have a replicated parameter at different places: its last bits drift."""
    source = tmp_path / "run"
    shutil.copytree(saved("gpt2", 3), source)
    path = source / "rank_02.safetensors"
    tensors = load_file(path)
    tensors["final_norm.bias"] += by
    write_tensors(path, tensors)
    manifest = open_checkpoint(source).manifest
    assert manifest is not None
    record = manifest.tensors["final_norm.bias"]
    digest = hashlib.sha256(bytes(tensor_bytes(tensors["final_norm.bias"]))).hexdigest()
    records = {
        **manifest.tensors,
        "final_norm.bias": replace(record, sha256=(*record.sha256[:2], digest)),
    }
    replace(manifest, tensors=records).write(source)
    state = read_state_file(source)
    (source / "trainer_state.json").unlink()
    write_state_file(source, state)
    command = ["merge", str(source), str(tmp_path / "merged")]
    if by > 1e-3:
        assert main(command) == main(["verify", str(source)]) == 2
        assert "may differ by rounding only" in capsys.readouterr().err
        return
    assert main(command) == main(["verify", str(source)]) == 0
    first = load_file(source / "rank_00.safetensors")["final_norm.bias"]
    assert torch.equal(
        load_file(tmp_path / "merged" / "model.safetensors")["transformer.ln_f.bias"], first
    )


@pytest.mark.parametrize(("family", "size"), by_turns([("llama", 2), ("t5", 1)], 2))
def test_a_universal_checkpoint_resumes_as_the_run_would(
    family, size, saved, run_mesh, hashes, tmp_path
):
    """Weights and moments have the run's bytes, and the third step its loss."""
    source = saved(family, size)
    universal, back = tmp_path / "universal", tmp_path / "back"
    assert main(["merge", str(source), str(universal), "--to", "universal"]) == 0
    command = ["split", str(universal), str(back), "--tp", str(size), "--with-optimizer"]
    assert main(command) == 0
    for rank in range(size):
        name = f"rank_{rank:02d}.safetensors"
        assert hashes(back / name) == hashes(source / name)
        kept = load_file(back / f"optimizer_{rank:02d}.safetensors")
        stored = load_file(source / f"optimizer_{rank:02d}.safetensors")
        assert kept.keys() == {name for name in stored if not name.startswith("step/")}
        assert all(torch.equal(kept[name], stored[name]) for name in kept)
    hf = source.parents[2] / "hf"
    ends = []
    for name, begin in (("of the run", source), ("of the universal one", back)):
        model = partial(native, hf)
        place = tmp_path / name
        settings = {"env_type": "deepspeed+mpu", "zero_stage": 1, "load_dir": str(begin)}
        on_ranks(
            run_mesh, place, tp=size, model=model, data=Pairs(vocab_size=61), train_steps=3,
            global_batch_size=4, adam_eps=EPSILON, **settings,
        )  # fmt: skip
        end = RunFolder(place).checkpoint(3)
        ends.append([load_file(end / f"rank_{rank:02d}.safetensors") for rank in range(size)])
    for one, other in zip(*ends, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def train_in_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    """Two steps of transformers' GPT-2 by DeepSpeed's engine, whose checkpoint DeepSpeed's own program converts.

    Returns the state as `KIND/NAME`.
    """
    import deepspeed
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = hf_model(ARCHITECTURES["gpt2"], 0.0, **WIDE)
    optimizer = adamw(dict(model.named_parameters()), 1, 5e-3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    ids = torch.arange(2, 22).view(2, 10)
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder / "own"), tag="global_step2")
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder / "own" / "global_step2"),
            output_folder=str(folder / "universal" / "step2"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
            inject_missing_state=True,
        )
    )  # fmt: skip
    found: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        found[f"fp32/{name}"] = safe_get_full_fp32_param(parameter).clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            path = folder / "universal" / "step2" / "zero" / name / f"{kind}.pt"
            found[f"{kind}/{name}"] = torch.load(path)["param"]
    return found


def test_what_deepspeed_wrote_becomes_a_training_checkpoint(run_ranks, tmp_path, capsys):
    """Its own program writes the tied head a second time, without moments."""
    [wanted] = run_ranks(1, train_in_deepspeed, tmp_path, isolated=True)
    universal, moved = tmp_path / "universal", tmp_path / "moved"
    hf_model(ARCHITECTURES["gpt2"], 0.0, **WIDE).save_pretrained(tmp_path / "hf")
    shutil.copy(tmp_path / "hf" / "config.json", universal)
    assert main(["inspect", str(universal)]) == 0
    assert "universal checkpoint of DeepSpeed" in capsys.readouterr().out
    assert main(["split", str(universal), str(moved), "--tp", "2", "--with-optimizer"]) == 0
    state = read_state_file(moved)
    assert (state["step"], state["world_size"]) == (2, 0)
    assert main(["merge", str(universal), str(tmp_path / "merged")]) == 0
    assert main(["verify", str(tmp_path / "merged"), str(universal)]) == 0
    assert main(["merge", str(moved), str(tmp_path / "again"), "--to", "universal"]) == 0
    zero = tmp_path / "again" / "global_step2" / "zero"
    for name, value in wanted.items():
        kind, _, parameter = name.partition("/")
        found = torch.load(zero / parameter / f"{kind}.pt")["param"]
        assert torch.equal(found, value), name


DAMAGED = {
    "no zero folder": (lambda tag: shutil.rmtree(tag / "zero"), "has no folder zero"),
    "no weights": (lambda tag: [path.unlink() for path in tag.glob("zero/*/fp32.pt")], "no file NAME/fp32.pt"),
    "no engine": (
        lambda tag: [path.unlink() for path in tag.glob("*_states.pt")], "mp_rank_00_model_states.pt"
    ),
    "a moment less": (
        lambda tag: (tag / "zero" / "model.norm.weight" / "exp_avg.pt").unlink(), "lacks model.norm.weight"
    ),
    "another object": (
        lambda tag: torch.save([1], tag / "zero" / "model.norm.weight" / "fp32.pt"), "holds no tensor 'param'"
    ),
    "another shape": (
        lambda tag: torch.save({"param": torch.ones(3)}, tag / "zero" / "model.norm.weight" / "exp_avg.pt"),
        "has shape [3], but final_norm.weight",
    ),
    "steps that are none": (
        lambda tag: torch.save({"global_steps": -1}, tag / "mp_rank_00_model_states.pt"), "which is no count"
    ),
    "no state": (
        lambda tag: [path.unlink() for path in tag.glob("zero/*/exp*.pt")], "has no optimizer's state"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_universal_checkpoint_is_refused(name, saved, tmp_path, capsys):
    source = tmp_path / "universal"
    assert main(["merge", str(saved("llama", 2)), str(source), "--to", "universal"]) == 0
    change, message = DAMAGED[name]
    change(source / "global_step2")
    command = ["split", str(source), str(tmp_path / "moved"), "--tp", "2", "--with-optimizer"]
    capsys.readouterr()
    assert main(command) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "moved").exists()
