"""The private functions of torch, DeepSpeed and datasets that the package uses are there, and do what it expects.

A new release of a library may change them without notice. Each failure says what breaks then, and what to do.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_case import by_turns


@contextmanager
def needed_by(place: str, *, breaks: str, remedy: str) -> Iterator[None]:
    """Explains whatever fails inside."""
    try:
        yield
    except Exception as error:
        pytest.fail(
            f"{type(error).__name__}: {error}\nUsed by: {place}\nWhat breaks: {breaks}\nWhat to do: {remedy}"
        )


def buckets_after_backward(mesh: Any) -> tuple[bool, bool]:
    """Whether DDP has made its buckets anew after a backward pass: our subclass, and DDP itself."""
    from shardzoo.trainer.engines.ddp_engine import _FixedBuckets

    def rebuilds(kind: Callable[[torch.nn.Module], Any]) -> bool:
        model = kind(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
        model(torch.ones(1, 2)).sum().backward()
        return bool(model.reducer._rebuild_buckets())

    return rebuilds(_FixedBuckets), rebuilds(torch.nn.parallel.DistributedDataParallel)


def test_ddp_keeps_its_first_buckets(run_mesh):
    with needed_by(
        "trainer/engines/ddp_engine.py (_FixedBuckets)",
        breaks="The first step after a resume adds gradients in another order than the whole run did, so that a run "
        "under env_type='pytorchDDP' no longer resumes bit for bit on three ranks or more.",
        remedy="Find how the new DDP decides its buckets (torch/csrc/distributed/c10d/reducer.cpp), and keep them in "
        "the order of _build_params_for_reducer. If that cannot be done, exchange gradients by an all-reduce for "
        "each parameter.",
    ):
        for ours, theirs in run_mesh(1, buckets_after_backward, data=2):
            assert not ours, "DDP makes the buckets anew after the first backward pass"
            assert theirs, (
                "DDP itself no longer makes them anew: _FixedBuckets may not be needed any longer"
            )


def default_store_passes_messages(mesh: Any) -> bytes:
    from datetime import timedelta

    store = torch.distributed.distributed_c10d._get_default_store()
    if mesh.rank == 0:
        store.set("canary", "sings")
    store.wait(["canary"], timedelta(seconds=20))
    try:
        store.wait([f"never set by {mesh.rank}"], timedelta(milliseconds=10))
    except RuntimeError:
        return store.get("canary")
    raise AssertionError("a wait for a key that nobody sets has ended without a RuntimeError")


def test_the_default_store_passes_messages_outside_collectives(run_mesh):
    with needed_by(
        "cli/rank_errors.py",
        breaks="Ranks cannot agree on who reports a user's mistake: it is printed by each of them, or by none.",
        remedy="Make a TCPStore of our own in trainer/launch/environment.py when the process group starts, and use "
        "its set and wait. A collective will not do, because other ranks may be in one of their own.",
    ):
        assert run_mesh(1, default_store_passes_messages, data=2) == [b"sings"] * 2


@pytest.mark.before_release
def test_deepspeed_imports_muon_without_torchs_compiler():
    code = (
        "import sys, json\n"
        "import deepspeed\n"
        "from deepspeed.runtime import compiler\n"
        "original, before = compiler.compile, 'torch._inductor' in sys.modules\n"
        "from shardzoo.trainer.engines.deepspeed_engine import _import_muon\n"
        "_import_muon()\n"
        "from deepspeed.runtime.zero.muon import original_muon\n"
        "function = original_muon.zeropower_via_newtonschulz5\n"
        "print('CANARY', json.dumps([type(function).__name__, compiler.compile is original]))\n"
    )
    with needed_by(
        "trainer/engines/deepspeed_engine.py (_import_muon)",
        breaks="Each start under DeepSpeed imports torch's compiler, which takes a second or more; or Muon's functions "
        "are compiled at run time, or DeepSpeed's `compile` stays replaced.",
        remedy="Look at how deepspeed/runtime/zero/muon/original_muon.py is decorated now. If it no longer calls "
        "deepspeed.runtime.compiler.compile(), delete _import_muon.",
    ):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        [line] = [line for line in done.stdout.splitlines() if line.startswith("CANARY")]
        assert json.loads(line.removeprefix("CANARY")) == ["function", True]


def test_deepspeed_asks_a_table_before_it_compiles_a_collective():
    with needed_by(
        "trainer/engines/deepspeed_engine.py (DeepSpeedEngine)",
        breaks="On a CPU, DeepSpeed compiles its shared-memory all-reduce at run time, with a lock file that a killed "
        "run leaves behind: the next run waits for it without end.",
        remedy="Find what deepspeed/comm/torch.py asks before it loads the shm_comm builder, and switch that off.",
    ):
        import deepspeed
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        assert ShareMemCommBuilder.NAME == "deepspeed_shm_comm"
        assert isinstance(deepspeed.ops.__compatible_ops__, dict)
        backend = importlib.import_module("deepspeed.comm.torch")
        assert "__compatible_ops__" in inspect.getsource(backend)


def test_zero_optimizers_have_the_fields_that_states_are_saved_by():
    with needed_by(
        "trainer/engines/deepspeed_engine.py (optimizer_tensors, _create_element_states)",
        breaks="Optimizer states under ZeRO cannot be saved or resumed.",
        remedy="Find where the optimizer now keeps its flat partitions, its groups of parameters and their process "
        "groups, and where it links states to parameters; tests/trainer/test_resume.py and test_zero3.py check it.",
    ):
        from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        for kind, fields in (
            (BF16_Optimizer, ("self.bf16_groups", "self.real_dp_process_group")),
            (DeepSpeedZeroOptimizer, ("self.bit16_groups", "self.real_dp_process_group")),
            (DeepSpeedZeroOptimizer_Stage3, ("self.fp32_partitioned_groups_flat",)),
        ):
            source = inspect.getsource(kind)
            for field in fields:
                assert field in source, f"{kind.__name__} has no {field}"
        for kind in (BF16_Optimizer, DeepSpeedZeroOptimizer):
            assert callable(kind._lazy_init_hp_params_optimizer_state)


def test_deepspeed_runs_a_pipelines_schedule_by_instructions():
    with needed_by(
        "trainer/engines/pipeline_engine.py (PipelineEngine)",
        breaks="Models cannot be trained in pipeline stages, or are updated before the loop has checked the loss.",
        remedy="Compare with what `train_batch` of DeepSpeed's PipelineEngine does: its schedule must run without the "
        "update and with our sum of shared gradients, and the update alone afterwards.",
    ):
        from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
        from deepspeed.runtime.pipe import schedule
        from deepspeed.runtime.pipe.engine import PipelineEngine
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        instructions = PipelineEngine._INSTRUCTION_MAP
        assert {schedule.ReduceTiedGrads, schedule.OptimizerStep, schedule.LoadMicroBatch} <= set(
            instructions
        )
        assert "self._INSTRUCTION_MAP" in inspect.getsource(PipelineEngine._exec_schedule)
        source = inspect.getsource(PipelineEngine.train_batch)
        for part in (
            "self.total_loss = None",
            "self._compute_loss = True",
            "self._exec_schedule(sched)",
        ):
            assert part in source
        assert list(inspect.signature(PipelineEngine._train_schedule).parameters) == ["self"]
        assert instructions[schedule.OptimizerStep] is PipelineEngine._exec_optimizer_step
        assert "_hp_grad" in inspect.getsource(BF16_Optimizer)
        norm = inspect.getsource(
            DeepSpeedZeroOptimizer.scaled_global_norm
        )  # what _even_out_norms does for each group
        assert (
            "self.get_grad_norm_direct(self.averaged_gradients[i], self.params_in_partition[i])"
            in norm
        )


def test_torchruns_error_file(tmp_path, monkeypatch):
    with needed_by(
        "trainer/launch/rank_process.py",
        breaks="torchrun shows no traceback of a rank that failed, and our launcher reads none of one that torch's "
        "own handler wrote.",
        remedy="Write and read the fields that torch/distributed/elastic/multiprocessing/errors/error_handler.py has "
        "now.",
    ):
        from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

        from shardzoo.trainer.launch.rank_process import ERROR_FILE, read_error, write_error

        theirs, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
        monkeypatch.setenv(ERROR_FILE, str(theirs))
        error = ValueError("a canary")
        ErrorHandler().record_exception(error)
        assert write_error(ours, error)
        assert _keys(json.loads(theirs.read_text())) == _keys(json.loads(ours.read_text()))
        found = read_error(theirs)
        assert found is not None
        assert found.summary == "ValueError: a canary"


def test_torchs_elastic_agent_has_the_methods_that_ours_extends(tmp_path):
    with needed_by(
        "trainer/launch/agent.py",
        breaks="`python script.py` no longer starts ranks, or no longer ends and restarts them together.",
        remedy="Compare RankAgent with torch/distributed/elastic/agent/server/local_elastic_agent.py and api.py.",
    ):
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import PContext, SubprocessContext
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        from shardzoo.trainer.launch.agent import SIGNALS_OF_TORCH, RankAgent

        replaced = {
            name
            for name, value in vars(RankAgent).items()
            if inspect.isfunction(value)
            and name.startswith("_")
            and hasattr(LocalElasticAgent, name)
        }
        methods = ["start_workers", "monitor_workers", "restart_workers", "stop_workers"]
        assert replaced == {"__init__", "_shutdown", *(f"_{name}" for name in methods)}
        run = inspect.getsource(SimpleElasticAgent._invoke_run)
        for name in ("_monitor_workers", "_restart_workers", "_stop_workers"):
            assert f"self.{name}(self._worker_group)" in run
        assert "self._remaining_restarts > 0" in run
        assert "start_new_session" in inspect.getsource(SubprocessHandler)
        assert "subprocess_handlers" in inspect.getsource(SubprocessContext)
        assert "reify(envs)" in inspect.getsource(PContext)
        assert SIGNALS_OF_TORCH in inspect.getsource(PContext.start)
        shutdown = inspect.signature(LocalElasticAgent._shutdown).parameters
        assert [*shutdown] == ["self", "death_sig", "timeout"]


def _keys(value: Any) -> Any:
    return {key: _keys(entry) for key, entry in value.items()} if isinstance(value, dict) else None


DISPATCHER = "ops/dispatcher.py (is_watched, can_bypass_dispatcher)"
BYPASS = (
    "A call of one of our operators may go past torch's dispatcher while something watches it: "
)
ASK = "Find another way to ask, or let `can_bypass_dispatcher` return False: all is then correct, and slower."


def test_modes_of_the_dispatcher_are_seen():
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import FlopCounterMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            return function(*arguments, **(keywords or {}))

    breaks = BYPASS + "a FlopCounterMode, fake tensors, or a profiler of memory miss it."
    with needed_by(DISPATCHER, breaks=breaks, remedy=ASK):
        assert torch._C._len_torch_dispatch_stack() == 0
        with Mode(), FlopCounterMode(display=False) as counter:
            assert torch._C._len_torch_dispatch_stack() == 2
            stack: list[Any] = _get_current_dispatch_mode_stack()
            assert [type(mode).__module__ == "torch.utils.flop_counter" for mode in stack] == [
                False,
                True,
            ]
            assert stack[1].counter is counter
            assert isinstance(counter.flop_registry, dict)


def test_the_compiler_takes_a_marked_function_as_a_constant():
    from shardzoo.ops.compiling import assume_constant_result

    @assume_constant_result
    def read_environment(name: str) -> int:
        return len(os.environ.get(name, "")) + len(list(os.scandir("/")))

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * read_environment("HOME")

    breaks = "compiled blocks break their graph where a kernel is chosen."
    remedy = "Use torch.compiler.assume_constant_result, at the cost of importing torch._dynamo."
    with needed_by("ops/compiling.py (assume_constant_result)", breaks=breaks, remedy=remedy):
        x = torch.ones(3)
        compiled = torch.compile(scale, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), scale(x))


def test_modes_of_torch_function_are_seen():
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            return function(*arguments, **(keywords or {}))

    breaks = BYPASS + "a TorchFunctionMode misses it."
    with needed_by(DISPATCHER, breaks=breaks, remedy=ASK):
        assert torch._C._len_torch_function_stack() == 0
        with Mode():
            assert torch._C._len_torch_function_stack() == 1


def test_transforms_of_functorch_are_seen():
    breaks = BYPASS + "torch.func.vmap and grad get wrong results or an error from a kernel."
    with needed_by(DISPATCHER, breaks=breaks, remedy=ASK):
        peek: Any = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
        assert peek() is None
        seen: list[bool] = []

        def watched(x: torch.Tensor) -> torch.Tensor:
            seen.append(peek() is not None)
            return x * 2

        torch.func.vmap(watched)(torch.ones(2))
        assert seen == [True]


def test_levels_of_forward_derivatives_are_seen():
    from torch.autograd import forward_ad

    with needed_by(
        "ops/cpu/pool.py (is_plain_call)",
        breaks="A matmul by our kernel, which has no forward derivative, is taken inside torch.autograd.forward_ad.",
        remedy="Find another way to ask whether a dual level is open, or leave the fast path out for all tensors that "
        "are not plain.",
    ):
        assert forward_ad._current_level < 0
        with forward_ad.dual_level():
            assert forward_ad._current_level >= 0


def test_a_fused_optimizer_can_skip_an_update_and_lists_are_updated_like_their_tensors():
    with needed_by(
        "trainer/engines/torch_engine.py (takes_found_inf, step), trainer/engines/master_weights.py, "
        "mpu/grad_clipping.py",
        breaks="On a GPU, a step whose loss is NaN would change the weights before the host has read the loss.",
        remedy="Find what GradScaler tells fused optimizers now, or set takes_found_inf = False: the loss is then read "
        "before each update.",
    ):
        for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
            weight = torch.nn.Parameter(torch.ones(3))
            optimizer: Any = kind([weight], lr=0.5, fused=True)
            assert optimizer._step_supports_amp_scaling
            for found, moves in ((0.0, True), (1.0, False), (0.0, True)):
                before = weight.detach().clone()
                weight.grad, optimizer.found_inf = torch.ones(3), torch.tensor(found)
                optimizer.step()
                assert torch.equal(before, weight) != moves
        assert not getattr(torch.optim.AdamW([weight]), "_step_supports_amp_scaling", False)
        wide, narrow = torch.rand(2, 9), torch.rand(2, 9).bfloat16()
        (a, b), factor = wide.clone(), torch.tensor(0.3)
        torch.ops.aten._foreach_add_.List([a, b], list(narrow))
        assert torch.equal(torch.stack([a, b]), wide + narrow)
        torch.ops.aten._foreach_copy_.default(list(narrow), [a, b])
        assert torch.equal(narrow, torch.stack([a, b]).bfloat16())
        scaled = narrow.clone()
        torch.ops.aten._foreach_mul_.Tensor(list(scaled), factor)
        assert torch.equal(scaled, narrow * factor)


def test_operators_that_are_called_by_their_private_names():
    with needed_by(
        "mpu/embedding.py, mpu/token_ids.py",
        breaks="The check of token ids, or gradient norms raise AttributeError, or have other results.",
        remedy="Use the operator's new name, or torch._assert_async and torch.linalg.vector_norm of each tensor; "
        "compare bits with the old path.",
    ):
        torch.ops.aten._assert_async(torch.tensor(True))
        [norm] = torch.ops.aten._foreach_norm.Scalar(
            [torch.tensor([3.0, 4.0])], 2, dtype=torch.float64
        )
        assert norm.dtype == torch.float64
        assert float(norm) == 5.0


def test_zero_takes_gradients_by_the_methods_that_are_replaced():
    with needed_by(
        "trainer/engines/buckets.py (OrderedGradients), trainer/engines/deepspeed_engine.py (_bucketing_optimizer)",
        breaks="Gradients are exchanged in each rank's own order, or in bf16 under ZeRO 1 after the backward pass.",
        remedy="Find what DeepSpeed's hooks call with a gradient, and what ends a pass. If it orders gradients itself, "
        "delete OrderedGradients; if BF16_Optimizer exchanges gradients in hooks, delete _bucketing_optimizer. "
        "tests/trainer/test_overlap.py checks both.",
    ):
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        for method, text in (
            (
                DeepSpeedZeroOptimizer.create_gradient_handling_hooks,
                "self.process_gradients(param, i)",
            ),
            (
                DeepSpeedZeroOptimizer.overlapping_partition_gradients_reduce_epilogue,
                "self.independent_gradient_partition_epilogue()",
            ),
            (DeepSpeedEngine._do_optimizer_sanity_check, "return BFLOAT16"),
        ):
            assert text in inspect.getsource(method)


def test_torchs_fused_products_in_symmetric_memory():
    """Their names, arguments and requirements; what they compute is tested in tests/mpu/test_fused_products.py."""
    with needed_by(
        "mpu/fused_products.py",
        breaks="symmetric_memory=True raises in the first forward pass, or is refused everywhere.",
        remedy="Find how torch/distributed/_symmetric_memory/__init__.py now names the product of a gathered tensor "
        "and the scattered sum of a product, and what they ask of a group. If they are gone, delete "
        "`use_symmetric_memory` and the argument `symmetric_memory`.",
    ):
        module = importlib.import_module("torch.distributed._symmetric_memory")
        expected = {
            "fused_all_gather_matmul": ["A", "Bs", "gather_dim", "group_name", "return_A"],
            "fused_matmul_reduce_scatter": ["A", "B", "reduce_op", "scatter_dim", "group_name"],
        }
        for name, arguments in expected.items():
            schema = getattr(torch.ops.symm_mem, name).default._schema
            assert [argument.name for argument in schema.arguments] == arguments
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CUDA")
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CPU")
        assert list(inspect.signature(module.rendezvous).parameters) == ["tensor", "group"]
        # Groups need no registration from torch 2.11 on; `use_symmetric_memory` makes none.
        assert "no need to call" in module.enable_symm_mem_for_group.__deprecated__


def test_a_process_group_is_found_by_its_name(tmp_path):
    with needed_by(
        "mpu/collectives.py, whose collectives in compiled graphs name their groups",
        breaks="no block of a split model can be compiled",
        remedy="find a group by its name as torch.distributed's functional collectives do",
    ):
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
        )
        try:
            group = dist.new_group([0])
            assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
        finally:
            dist.destroy_process_group()


def test_a_worker_of_the_data_loader_can_be_hidden():
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils import worker

    with needed_by(
        "data/loading/stream.py (_hide_worker)",
        breaks="With num_workers, each worker of a stream reads a part of it only, and takes a share of that: samples "
        "are lost.",
        remedy="Find where torch.utils.data.get_worker_info() reads from now, and hide that.",
    ):
        before, worker._worker_info = worker._worker_info, "a worker"  # type: ignore[assignment]
        try:
            assert get_worker_info() == "a worker"
        finally:
            worker._worker_info = before


def test_datasets_shares_the_epoch_between_workers():
    datasets = pytest.importorskip("datasets")
    with needed_by(
        "data/loading/stream.py (_set_epoch)",
        breaks="Workers that are in different epochs of a shuffled stream of datasets change one another's order.",
        remedy="Find where datasets.IterableDataset keeps its epoch now, and give each worker a copy.",
    ):
        stream = datasets.IterableDataset.from_generator(lambda: iter([{"x": 1}]))
        assert isinstance(stream._epoch, torch.Tensor)
        assert stream._epoch.is_shared()
        stream._epoch = stream._epoch.clone()
        stream.set_epoch(3)
        assert int(stream._epoch) == 3
        assert stream.epoch == 3


def test_storages_have_an_identity_without_data():
    with needed_by(
        "trainer/estimate/model.py",
        breaks="The estimate for a transformers model counts what autograd keeps more than once.",
        remedy="Tell storages apart by another identity that works on the meta device.",
    ):
        first = torch.empty(4, device="meta")
        assert first.untyped_storage()._cdata == first.view(2, 2).untyped_storage()._cdata
        assert (
            first.untyped_storage()._cdata != torch.empty(4, device="meta").untyped_storage()._cdata
        )


def test_a_torch_file_tells_where_its_tensors_lie(tmp_path):
    with needed_by(
        "checkpoint/formats/torch_file.py",
        breaks="A .bin or .pt file is refused, because the places of its tensors are unknown.",
        remedy="Find what torch.load on the meta device notes on storages now; else read the "
        "records of the zip file, and let only .safetensors through meanwhile.",
    ):
        path = tmp_path / "weights.bin"
        torch.save({"weight": torch.arange(4.0)}, path)
        storage: Any = torch.load(path, map_location="meta", mmap=True, weights_only=True)[
            "weight"
        ].untyped_storage()
        offset = storage._checkpoint_offset
        assert path.read_bytes()[offset : offset + 16] == torch.arange(4.0).numpy().tobytes()
        typed: Any = torch.TypedStorage(wrap_storage=torch.UntypedStorage(8, device="meta"), dtype=torch.float32,
                                        _internal=True)  # fmt: skip
        assert typed._untyped_storage.nbytes() == 8


def test_tensors_count_their_changes():
    with needed_by(
        "models/language_model.py (lazy logits)",
        breaks="Logits that are calculated late may be those of changed weights, without an error.",
        remedy="Find another counter of in-place changes, or calculate the logits at once.",
    ):
        tensor = torch.ones(2)
        before = tensor._version
        tensor.add_(1)
        assert tensor._version > before


def test_a_loss_function_that_a_user_sets_is_noticed():
    from transformers import GPT2Config, GPT2LMHeadModel

    with needed_by(
        "trainer/batches/label_shift.py (_look_up)",
        breaks="For a model of transformers with a loss of the user's own, the trainer may count the first label of a "
        "row where the loss does not, so that unequal micro-batches have wrong shares of the loss.",
        remedy="Find where transformers keeps the function that is assigned to a model's loss_function now.",
    ):
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
        )
        assert "_loss_function" not in vars(model)
        model.loss_function = _keys
        assert "_loss_function" in vars(model)


@pytest.mark.before_release
def test_the_timeout_of_a_process_group_can_change(run_ranks):
    def times_out(seconds: float) -> bool:
        from torch.distributed import distributed_c10d

        group = dist.new_group(backend="gloo", timeout=timedelta(minutes=5))
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
        started = time.monotonic()
        if dist.get_rank() == 1:
            time.sleep(3)
            return True
        with pytest.raises(RuntimeError):
            dist.barrier(group)
        return time.monotonic() - started < 3

    with needed_by(
        "trainer/launch/environment.py",
        breaks="collective_timeout has no effect on process groups that a launcher or a user has made.",
        remedy="Find how the timeout of a group that exists changes now.",
    ):
        assert run_ranks(2, times_out, 1.0, isolated=True) == [True, True]


def test_lm_evaluation_harness_has_its_command():
    from lm_eval._cli import HarnessCLI

    with needed_by(
        "cli/lm_eval/command.py",
        breaks="`shardzoo lm-eval` fails.",
        remedy="Find how the harness parses and executes its command line now.",
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys, "argv", ["lm-eval", "run", "--tasks", "a,b", "--model_args", "pretrained=x"]
            )
            parsed = HarnessCLI().parse_args()
        assert (parsed.command, parsed.model, parsed.config) == ("run", None, None)
        assert callable(HarnessCLI().execute)


@pytest.mark.before_release
@pytest.mark.parametrize("name", by_turns(["bf16", "fp16"], 2))
def test_pytorch_says_in_which_types_it_multiplies_by_a_library(name):
    with needed_by(
        "ops/cpu/products.py (_has_library)",
        breaks="Products of 16-bit types use PyTorch's loops, up to 100 times slower, or our kernel where PyTorch's "
        "library is faster.",
        remedy="Find how at::native decides (use_mkldnn_bf16_matmul and use_mkldnn_fp16_matmul in "
        "aten/src/ATen/native/mkldnn/Matmul.cpp).",
    ):
        kind = {"bf16": "bfloat16", "fp16": "float16"}[name]
        code = f"import torch; a = torch.ones(256, 256, dtype=torch.{kind}); a @ a"
        code += f"; print('supported', torch.ops.mkldnn._is_mkldnn_{name}_supported())"
        environment = os.environ | {"ONEDNN_VERBOSE": "1"}
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"supported {'matmul' in run.stdout}" in run.stdout


def test_peft_tells_which_attributes_a_wrapper_trains():
    peft = pytest.importorskip("peft")
    with needed_by(
        "models/for_peft.py (_read_value)",
        breaks="The forward pass of a model with modules_to_save or trainable_token_indices reads the weights "
        "from before the training, and so computes as if nothing had been trained.",
        remedy="Find how peft's AuxiliaryTrainingWrapper.__getattr__ decides between the original module and the "
        "trained one, and ask that.",
    ):
        wrapper = peft.utils.other.ModulesToSaveWrapper(torch.nn.Linear(2, 3), "default")
        assert wrapper._hasattr_wrapped("weight", wrapper._modules)


def test_every_private_name_has_a_canary():
    """A new use of another library's private name needs a test in this file."""
    import shardzoo

    known = {
        "_push_all_rebuilt_params", "_rebuild_buckets", "_build_params_for_reducer", "_get_default_store",
        "_lazy_init_hp_params_optimizer_state", "_len_torch_dispatch_stack", "_len_torch_function_stack",
        "_get_current_dispatch_mode_stack", "_functorch", "_C", "_current_level", "_assert_async",
        "_foreach_norm", "_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_step_supports_amp_scaling",
        "_resolve_process_group", "_worker_info", "_epoch", "_cdata", "_version", "_python_dispatch",
        "_utils", "_untyped_storage", "_checkpoint_offset", "_rebuild_tensor_v2", "_StorageInfo",
        "_MEM_FORMAT_ENCODING", "_get_layout", "_sparse_tensors_to_validate",
        "_get_sparse_tensors_to_validate",
        "_set_pg_timeout", "_symmetric_memory", "_cli", "_do_optimizer_sanity_check",
        "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported",
        "_hasattr_wrapped",
        "_INSTRUCTION_MAP", "_exec_schedule", "_train_schedule", "_exec_optimizer_step", "_compute_loss", "_hp_grad",
        "_composable", "_composable_state", "_get_fsdp_state", "_pre_forward_hook_handle", "_post_forward_hook_handle",
        "_fsdp_param_groups", "_module_to_pre_save_state_dict_hook_handle", "_post_load_hook_handle",
        "_module_to_pre_load_state_dict_hook_handle",
        "_op", "_set_params_and_buffers_to_ignore_for_model", "_ddp_params_and_buffers_to_ignore",
            "_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS",
        "_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    }  # fmt: skip
    # Of long standing and documented, in a benchmark alone, or the name of a logger.
    accepted = {"_exit", "_parameters", "_buffers", "_modules", "_attn_implementation", "_sleep", "_ops", "_dynamo",
                "_inductor", "_core", "_local", "_reconstruct", "_frombuffer", "_replace", "_asdict", "_current_frames",
                "_apply", "_pytree", "_fields"}  # fmt: skip
    package, found = Path(shardzoo.__file__).parent, {}
    rooms = "trainer mpu ops models checkpoint convert data generation finetuning pretraining cli".split()  # noqa: SIM905
    foreign = re.compile(r"(?<!self)(?<!cls)(?<!\(\))(?<=[a-z_\])])\.(_[a-zA-Z]\w*)")
    for room in rooms:
        for path in (package / room).rglob("*.py"):
            source = path.read_text()
            own = set(re.findall(r"(?:def |self\.|cls\.|class )(_\w+)", source))
            for name in foreign.findall(source):
                if name not in own | known | accepted:
                    found[name] = str(path.relative_to(package))
    assert not found, f"private names of other libraries without a canary: {found}"


def test_a_storage_keeps_where_its_bytes_lie():
    with needed_by(
        "checkpoint/formats/torch_file.py, which notes the place of a tensor's bytes at its storage",
        breaks="no file of torch.save is read: every tensor has no bytes in the file",
        remedy="note the places by name of the storage, and ask tensors for that name",
    ):
        storage: Any = torch.UntypedStorage(24, device="meta")
        storage._checkpoint_offset = 64
        typed = torch.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
        tensor = torch._utils._rebuild_tensor_v2(typed, 0, (6,), (1,), False, OrderedDict())
        assert tensor.untyped_storage()._checkpoint_offset == 64


def test_the_unpickler_lists_sparse_tensors():
    with needed_by(
        "checkpoint/formats/torch_file.py, which takes sparse tensors without storage off torch's list",
        breaks="the torch.load after a file with a sparse tensor fails",
        remedy="find where torch.load keeps the tensors that it will check",
    ):
        from shardzoo.checkpoint.formats.torch_file import list_unchecked_tensors

        unchecked = list_unchecked_tensors()
        before = len(unchecked)
        made: Any = torch.eye(2).to_sparse().__reduce_ex__(2)
        made[0](*made[1])
        assert len(unchecked) == before + 1
        del unchecked[before:]


def test_an_operator_holds_the_call_that_it_makes():
    with needed_by(
        "ops/library.py, which calls compiled kernels without the call in Python around them",
        breaks="every call of a compiled kernel",
        remedy="let find_kernel return the operator itself",
    ):
        operator = torch.ops.aten.neg.default
        x = torch.arange(3.0)
        assert torch.equal(operator._op(x), operator(x))


def test_torch_saves_a_tensor_as_a_call_that_builds_it_from_its_storage():
    with needed_by(
        "checkpoint/formats/torch_file_writer.py, which writes files as torch.save does",
        breaks="files that the converter writes for DeepSpeed do not load",
        remedy="name the function that torch.save names now, with its arguments",
    ):
        tensor = torch.arange(6.0).reshape(2, 3)
        build, arguments = tensor.__reduce_ex__(2)[:2]
        assert build is torch._utils._rebuild_tensor_v2
        assert arguments[1:] == (0, (2, 3), (3, 1), False, OrderedDict())


def test_the_metadata_of_a_distributed_checkpoint_has_known_classes():
    with needed_by(
        "checkpoint/formats/dcp.py, which reads and writes .metadata by the names of its classes",
        breaks="folders of torch.distributed.checkpoint are refused, or it does not load those of the converter",
        remedy="add the new names to those that the reader knows, and write what filesystem.py expects",
    ):
        from torch import serialization
        from torch.distributed.checkpoint import filesystem, metadata

        place: Any = filesystem._StorageInfo("file", 3, 4)
        assert (place.relative_path, place.offset, place.length) == ("file", 3, 4)
        pickled = pickle.dumps(metadata.TensorProperties(dtype=torch.float16))
        assert b"_MEM_FORMAT_ENCODING" in pickled
        assert b"_get_layout" in pickled
        assert hasattr(serialization, "_get_layout")


def test_the_restricted_unpickler_takes_our_storages():
    with needed_by(
        "checkpoint/formats/legacy_torch_file.py, which reads old files by torch._weights_only_unpickler",
        breaks="these files are refused as damaged",
        remedy="refuse them with the advice to save them again, as torch.save writes them today",
    ):
        from torch import _weights_only_unpickler
        from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

        assert (MAGIC_NUMBER, PROTOCOL_VERSION) == (0x1950A86A20F9469CFC6C, 1001)
        saved_id = (
            b"\x80\x02(X\7\0\0\0storageK\1tQ."  # the pickle of a persistent id, ("storage", 1)
        )
        unpickler: Any = _weights_only_unpickler.Unpickler(io.BytesIO(saved_id), encoding="utf-8")
        unpickler.persistent_load = lambda saved: ("found", saved)
        assert unpickler.load() == ("found", ("storage", 1))


def test_fsdp_can_be_taken_off_a_module():
    with needed_by(
        "trainer/engines/fully_sharded.py",
        breaks="a model has FSDP's hooks after training, and cannot be trained or called alone",
        remedy="remove what `fully_shard` now registers in `_remove_hooks`",
    ):
        from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

        assert REGISTRY_KEY != STATE_KEY
        assert hasattr(_module_state_mapping, "pop")
        for module, names in (
            (_fsdp_state, ("_pre_forward_hook_handle", "_post_forward_hook_handle")),
            (_fsdp_state, ("_fsdp_param_groups",)),
            (_fsdp_param_group, ("_module_to_pre_save_state_dict_hook_handle", "fsdp_params")),
            (_fsdp_param_group, ("_module_to_pre_load_state_dict_hook_handle",)),
            (_fsdp_param, ("_post_load_hook_handle",)),
        ):
            source = inspect.getsource(module)
            for name in names:
                assert f"self.{name}" in source, name


def test_ddp_leaves_out_the_parameters_that_it_is_told_to():
    from torch.nn.parallel import DistributedDataParallel

    with needed_by(
        "trainer/engines/ddp_engine.py",
        breaks="DDP sums the gradients of experts over ranks that hold other experts.",
        remedy="Find how DDP is told now which parameters it must not exchange.",
    ):
        model = torch.nn.Linear(2, 2)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
        assert model._ddp_params_and_buffers_to_ignore == ["bias"]
        assert "_ddp_params_and_buffers_to_ignore" in inspect.getsource(
            DistributedDataParallel.__init__
        )


def test_deepspeed_finds_the_groups_of_experts_by_name():
    from deepspeed.utils import groups

    with needed_by(
        "trainer/engines/deepspeed_engine.py (_mark_experts)",
        breaks="DeepSpeed sums the gradients of experts over ranks that hold other experts.",
        remedy="Find where deepspeed.utils.groups keeps the groups of an expert-parallel size now.",
    ):
        for known, find in (
            ("_EXPERT_PARALLEL_GROUP", groups._get_expert_parallel_group),
            ("_EXPERT_DATA_PARALLEL_GROUP", groups._get_expert_data_parallel_group),
        ):
            assert isinstance(getattr(groups, known), dict)
            assert isinstance(getattr(groups, f"{known}_RANKS"), dict)
            assert known in inspect.getsource(find)
