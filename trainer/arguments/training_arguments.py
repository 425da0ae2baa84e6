"""Defines the arguments of a training run: one dataclass for `Trainer`, its keywords, and the
command line.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import ClassVar, Literal

from ...files.object_store import check_local, find_url
from ..environments import ENVIRONMENTS, EnvType
from ..optimizers.registry import (
    ELEMENTWISE_NAMES,
    LONE_STEP_NAMES,
    OPTIMIZERS,
    OptimizerName,
    find_optimizer,
)
from ..precisions import PRECISIONS, PrecisionName
from ..schedules import ScheduleName
from .aliases import with_argument_aliases
from .deepspeed_file import take_file_arguments
from .trackers import checked_trackers
from .value_types import check_types, texts

Strategy = Literal["steps", "epoch", "no"]


LORA_OPTIONS = (
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "use_rslora",
)
"""What new LoRA weights are made with, besides their rank."""


@with_argument_aliases
@dataclass(frozen=True)
class TrainingArguments:
    """How a model is trained. The constructor checks all values, and its `ValueError` says what
    would work.

    FlagAI's names are accepted too: batch_size, warm_up, optimizer_type, fp16, bf16,
    checkpoint_activations.
    """

    unused: ClassVar[tuple[str, ...]] = ()
    """What was given and is not used in this environment, such as "num_gpus=2"."""

    env_type: EnvType = "pytorch"
    """pytorch: one process. pytorchDDP: data-parallel replicas. deepspeed: data-parallel with ZeRO.
    deepspeed+mpu: also tensor-parallel, each layer split over `model_parallel_size` processes.
    fsdp: parameters split over data-parallel ranks by torch's FSDP2, beside tensor parallelism."""
    pytorch_device: str = "auto"
    """The device of `env_type="pytorch"`, such as "cpu" or "cuda:0"; by default the first GPU, if
    there is one."""
    model_parallel_size: int = 1
    """Tensor-parallel size: the number of processes that each layer is split over."""
    pipeline_parallel_size: int = 1
    """Number of pipeline stages: each stage holds a part of the blocks, and micro-batches pass from
    stage to stage."""
    pipeline_partition: Literal["uniform", "parameters", "time"] = "uniform"
    """How blocks are dealt to the stages: equal numbers; or so that the largest stage has as few
    parameters, or needs as little time, as possible."""
    context_parallel_size: int = 1
    """Number of processes that share each sequence: each holds a part of its positions in every
    layer."""
    context_exchange: Literal["auto", "heads", "keys", "ring"] = "auto"
    """What context-parallel processes exchange in attention: heads (all-to-all), keys and values
    (gathered), or heads wherever their number allows it (when the model is built)."""
    expert_parallel_size: int = 1
    """Number of processes that the experts of a mixture are dealt over; each reads other samples,
    and everything else is replicated."""
    router_bias_update_rate: float = 0.0
    """How much each step changes the corrections of a mixture's scores that balance its experts;
    DeepSeek-V3 and GLM-4.5 were trained with 0.001."""
    sequence_parallel: bool = False
    """Also split norms, dropouts and residuals along the sequence (when the model is built)."""
    tensor_parallel_reduction: Literal["auto", "native", "fp32"] = "auto"
    """Who adds the ranks' partial results. native: the backend, such as NCCL, which rounds 16-bit
    sums at every hop. fp32: the ranks, which exchange them, add in fp32 and round once. auto:
    native on GPUs, fp32 on CPUs."""
    symmetric_memory: bool = False
    """Fuse sequence parallelism's collectives with products, in torch's symmetric memory. For GPUs
    of one host."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What the ranks communicate by. auto: NCCL on GPUs, else gloo. With gloo several ranks may
    share one GPU."""
    num_nodes: int = 1
    num_gpus: int = 1
    """Processes on each node, if the trainer starts them itself."""
    hostfile: str | None = None
    """File with a line `host slots=n` for each node; needed for more than one node."""
    master_ip: str = "localhost"
    master_port: int = 17750
    training_script: str | None = None
    """Script that the processes run; by default the current command."""
    dry_run: bool = False
    """Print the commands that would start the processes, and start none."""
    stall_timeout: float = 300.0
    """Seconds after which a job that stands still is ended, with the rank's stack and exit code 75;
    0 for never. Saving, and work before and after training, may take longer."""
    collective_timeout: float = 1800.0
    """Seconds that a rank waits for the others in a collective. For rank 0's preparations they wait
    without limit."""
    grace_period: float = 300.0
    """Seconds after SIGTERM or SIGHUP in which a run may finish its step, save and end before it is
    killed; after SIGINT, in which it may finish a save that has begun."""
    max_restarts: int = 0
    """How often a job whose rank has died or stood still is started again from its last checkpoint,
    on one machine. With a global_batch_size, a rank that fails twice is left out."""

    epochs: int = 0
    """Passes over the training data; ignored if `train_steps` is set."""
    train_steps: int | None = None
    """Optimizer steps."""
    micro_batch_size: int = 1
    """Samples in one forward pass of one data-parallel rank."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches that each rank accumulates for one optimizer step; by default 1."""
    global_batch_size: int | None = None
    """Samples in one optimizer step over all ranks; an alternative to
    `gradient_accumulation_steps`."""
    num_workers: int = 0
    """Processes of each rank that prepare batches; 0 prepares them between the steps."""

    optimizer: OptimizerName = "adamw"
    """What updates the parameters; `adam` is another name of adamw."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_schedule: ScheduleName = "warmup_cosine"
    """warmup_cosine: linear warm-up, then a cosine down to a tenth. The others are transformers'
    schedules of the same name."""
    warmup_ratio: float = 0.1
    """Share of the steps that warm up the learning rate."""
    warmup_steps: int | None = None
    """Number of warm-up steps; an alternative to `warmup_ratio`."""
    weight_decay: float = 0.1
    """Weight decay of matrices; biases and norms do not decay."""
    beta1: float = 0.9
    beta2: float = 0.999
    adam_eps: float = 1e-8
    relative_step: bool = False
    """Adafactor computes its learning rate from the step and each parameter's scale, as published;
    `lr` and its schedule are then unused. Off: it takes `lr` and its schedule."""
    scale_parameter: bool | None = None
    """Adafactor multiplies the rate by the root mean square of each parameter. Default: the same as
    `relative_step`."""
    muon_momentum: float = 0.95
    """Momentum of Muon's matrices."""
    muon_scaling: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon's updates are as large as AdamW's, so that one rate suits both; or as published first,
    which wants rates of about 0.02."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""

    lora_rank: int = 0
    """Rank of LoRA weights. Above 0 these are added to a frozen model, and only they are trained.
    """
    lora_alpha: int = 16
    """The product of the LoRA weights is multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout of the inputs of LoRA weights."""
    lora_target_modules: tuple[str, ...] = ()
    """transformers' names of the linear layers that get LoRA weights, a regular expression, or
    "all-linear"; by default peft's choice for the model."""
    lora_target_parameters: tuple[str, ...] = ()
    """transformers' names of stacked experts that get LoRA weights, such as
    mlp.experts.gate_up_proj; then no module gets some unless lora_target_modules names it."""
    lora_modules_to_save: tuple[str, ...] = ()
    """transformers' names of modules that are trained whole beside LoRA weights, such as lm_head.
    """
    use_rslora: bool = False
    """Multiply by lora_alpha / √lora_rank instead."""
    adapter: str | None = None
    """A folder of peft whose LoRA weights are trained further; an alternative to `lora_rank`."""

    precision: PrecisionName = "fp32"
    """Precision of the parameters in the forward pass; the optimizer keeps fp32 copies. fp16 scales
    the loss."""
    recompute: Literal["none", "selective", "full", "offload"] = "none"
    """Recompute activations in the backward pass: those of attention (selective), or of whole
    blocks (full), whose inputs a GPU moves to the host's memory until then (offload)."""
    torch_compile: bool = False
    """Compile the blocks of a model of the zoo, or another model as a whole, with torch.compile."""
    torch_compile_backend: str = "inductor"
    cuda_graph: bool = False
    """Record a step on a GPU, with its update, and queue it as one CUDA graph from then on: for small
    models, whose GPU waits for the host. `pytorch` in fp32 or bf16 with AdamW; other runs, and steps
    of other shapes, go without, and say why."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed ZeRO: 1 splits the optimizer's state over data-parallel ranks, 2 the gradients too,
    3 the parameters too. Default: the stage in `deepspeed_config`, else 1, or 0 for Adafactor and
    LAMB in fp32."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in CPU memory and update the parameters there: DeepSpeed, or FSDP,
    which then keeps its parts of the parameters and gradients there too."""
    gradient_accumulation_fusion: bool = False
    """Linear layers add the gradients of their weights to fp32 sums within the product, if a step
    has several micro-batches: `pytorch`, and `pytorchDDP` but for a step's last micro-batch."""
    optimizer_in_backward: bool = False
    """Update each parameter as soon as the backward pass has its gradient, and free the gradient:
    `pytorch` and `fsdp`, without clipping and accumulation, with AdamW, Adafactor or 8-bit AdamW.
    """
    fsdp_reshard_after_forward: bool = True
    """FSDP frees the gathered parameters of a block after its forward pass, and gathers them again
    for the backward pass; off, it keeps them: more memory, less communication."""
    fsdp_exchange_each_pass: bool = True
    """FSDP adds up the gradients of the ranks in each micro-batch. Off: once in a step, so that
    each rank keeps whole gradients until then."""
    fsdp_prefetch: int | None = None
    """Blocks that FSDP gathers ahead of the one that runs. Default: 1, or 0 on CPUs."""
    fsdp_replicas: int = 1
    """FSDP splits parameters over the data-parallel ranks of one replica, and exchanges gradients
    between so many replicas (hybrid sharding)."""
    deepspeed_config: str | None = None
    """A DeepSpeed JSON file. Its batch sizes, precision, clipping, optimizer, scheduler and
    offloading become arguments, unless an argument is set to another value; its other keys are
    passed to DeepSpeed."""

    eval_strategy: Strategy = "steps"
    """Evaluate every eval_interval steps, after each epoch, or only at the end (no)."""
    logging_strategy: Strategy = "steps"
    save_strategy: Strategy = "steps"
    eval_batch_size: int | None = None
    """Samples in one forward pass of an evaluation; by default micro_batch_size."""
    early_stopping_patience: int | None = None
    """Stop after so many evaluations without a new best value of `save_best`."""
    eval_interval: int = 100
    """Steps between evaluations."""
    log_interval: int = 100
    """Steps between points in the logs."""
    save_interval: int = 1000
    """Steps between checkpoints; the last step is always saved."""
    save_dir: str = "checkpoints"
    """Folder of runs. This run's folder is `save_dir/experiment_name`, or `save_dir` itself without
    a name."""
    experiment_name: str | None = None
    tensorboard_dir: str | None = None
    """Folder of TensorBoard's events; by default `tensorboard` in the run's folder."""
    save_total_limit: int | None = None
    """Number of checkpoints to keep, besides the best one; by default all."""
    save_best: str | None = None
    """A validation value such as "loss". The checkpoint where it was best is saved, kept, and named
    `best`. The best loss or perplexity is the lowest one; the best of any other value is the
    highest."""
    save_optim: bool = True
    save_rng: bool = True
    load_dir: str | None = None
    """The folder of a run, or a checkpoint, to continue from."""
    load_type: Literal["latest", "best"] = "latest"
    load_optim: bool = True
    """False loads only the weights and starts at step 0."""
    load_rng: bool = True
    resume: bool = False
    """Go on with the run in its folder, from its last checkpoint."""
    overwrite: bool = False
    """Delete the run in its folder first."""

    seed: int = 1234
    tf32: bool | None = None
    """Whether a GPU may multiply fp32 matrices in TF32; by default as PyTorch is set."""
    report_to: tuple[str, ...] = ("tensorboard",)
    """Experiment trackers that get the arguments and all values: tensorboard, wandb, mlflow, comet;
    or none. They must be installed."""
    profile_steps: int = 0
    """Number of steps to record, after the first two, with torch's profiler; writes a Chrome trace
    to the run's folder."""

    def __post_init__(self) -> None:
        if (
            type(self.pytorch_device).__name__ == "device"
        ):  # torch.device; importing torch here would take seconds
            object.__setattr__(self, "pytorch_device", str(self.pytorch_device))
        if self.load_dir == "":  # so do scripts for FlagAI name none
            object.__setattr__(self, "load_dir", None)
        check_types(self)
        self._leave_out_unused()
        self._take_deepspeed_file()
        self._check_ranges()
        if self.global_batch_size is not None and self.gradient_accumulation_steps is not None:
            raise ValueError(
                "global_batch_size and gradient_accumulation_steps are alternatives; set one of "
                "them"
            )
        if self.warmup_steps is not None and self.warmup_ratio != type(self).warmup_ratio:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warm_up={self.warmup_ratio} (warmup_ratio) "
                "are alternatives; leave warm_up out, or set warmup_steps to None"
            )
        if self.tensorboard_dir is not None:
            check_local(self.tensorboard_dir, "tensorboard_dir")
        name = PurePath(self.experiment_name or "")
        is_url = find_url(self.experiment_name or "") is not None
        if name.is_absolute() or ".." in name.parts or is_url:
            raise ValueError(
                f"experiment_name must be a folder within save_dir, not {self.experiment_name!r}"
            )
        if self.resume and self.overwrite:
            raise ValueError(
                "resume continues a run and overwrite deletes it: use only one of them"
            )
        if self.early_stopping_patience is not None and self.save_best is None:
            raise ValueError(
                "early_stopping_patience needs save_best, the value that must improve, such as "
                "'loss'"
            )
        object.__setattr__(self, "report_to", checked_trackers(texts("report_to", self.report_to)))
        self._check_lora()
        self._check_compiler()
        self._check_environment()
        self._check_optimizer()

    def _leave_out_unused(self) -> None:
        """Gives the arguments that FlagAI's environment does not use their default values, and
        notes them in `unused`.

        FlagAI's scripts leave the arguments of all environments in the call, and change `env_type`
        alone.
        """
        environment = ENVIRONMENTS[self.env_type]
        names: list[str] = []
        if environment.is_one_process:
            names += ["num_gpus", "num_nodes"]
        if not environment.uses_deepspeed and not environment.uses_fsdp:
            names.append("deepspeed_config")
        if not environment.splits_layers:
            names.append("model_parallel_size")
        defaults = {field.name: field.default for field in fields(self)}
        unused: list[str] = []
        for name in names:
            value = getattr(self, name)
            is_count = isinstance(value, int)
            if value != defaults[name] and not (is_count and value < 1):
                unused.append(f"{name}={value!r}")
                object.__setattr__(self, name, defaults[name])
        object.__setattr__(self, "unused", tuple(unused))

    def _take_deepspeed_file(self) -> None:
        """Takes the settings of `deepspeed_config` that are arguments too, unless an argument says
        otherwise.
        """
        defaults = {field.name: field.default for field in fields(self)}
        for name, value in take_file_arguments(self.deepspeed_config, vars(self), defaults).items():
            object.__setattr__(self, name, value)
        check_types(self)

    def _check_ranges(self) -> None:
        at_least_one = (
            "model_parallel_size",
            "pipeline_parallel_size",
            "context_parallel_size",
            "expert_parallel_size",
            "train_steps",
            "micro_batch_size",
            "global_batch_size",
            "gradient_accumulation_steps",
            "eval_interval",
            "save_interval",
            "log_interval",
            "save_total_limit",
            "num_nodes",
            "num_gpus",
            "eval_batch_size",
            "early_stopping_patience",
            "fsdp_replicas",
        )
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in (
            "epochs",
            "num_workers",
            "weight_decay",
            "clip_grad",
            "router_bias_update_rate",
            "profile_steps",
            "warmup_steps",
            "adam_eps",
            "stall_timeout",
            "grace_period",
            "max_restarts",
            "fsdp_prefetch",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, but is {value}")
        if not self.collective_timeout > 0:
            raise ValueError(f"collective_timeout must be above 0, not {self.collective_timeout}")
        if self.max_restarts and (self.num_nodes > 1 or getattr(self, "output_dir", "") is None):
            need = (
                "one machine; on several use torchrun's"
                if self.num_nodes > 1
                else "output_dir, to resume from"
            )
            raise ValueError(f"max_restarts={self.max_restarts} needs {need}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, not {self.lr}")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, not {getattr(self, name)}"
                )
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(
                f"warm_up is a share of the steps and must be from 0 to 1, not {self.warmup_ratio}"
            )
        if not 0 < self.master_port < 1 << 16:
            raise ValueError(
                f"master_port must be from 1 to {(1 << 16) - 1}, not {self.master_port}"
            )
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be from 0 to {(1 << 32) - 1}, not {self.seed}")

    def _check_lora(self) -> None:
        for name in ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save"):
            object.__setattr__(self, name, texts(name, getattr(self, name)))
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank must not be negative, but is {self.lora_rank}")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(
                f"lora_dropout must be at least 0 and below 1, not {self.lora_dropout}"
            )
        if self.router_bias_update_rate and (self.lora_rank or self.adapter is not None):
            raise ValueError(
                f"router_bias_update_rate={self.router_bias_update_rate} would change the model that "
                "LoRA weights are added to; use 0"
            )
        if self.lora_rank and self.adapter is not None:
            raise ValueError(
                "lora_rank makes new LoRA weights and adapter names a folder of them: use one of "
                "them"
            )
        if not self.lora_rank and self.adapter is None:
            self._refuse_lora_options()

    def _refuse_lora_options(self) -> None:
        """Raises ValueError if an option of LoRA weights is set in a run that has none."""
        defaults = {own_field.name: own_field.default for own_field in fields(TrainingArguments)}
        for name in LORA_OPTIONS:
            if getattr(self, name) == defaults[name]:
                continue
            raise ValueError(
                f"{name} is an option of LoRA weights, and there are none, so that the whole model "
                "would be trained: set lora_rank (or adapter), or leave it out"
            )

    def _check_compiler(self) -> None:
        if self.torch_compile and self.recompute == "selective":
            raise ValueError("torch_compile works with recompute='none' or 'full', not 'selective'")
        if self.torch_compile and self.symmetric_memory:
            raise ValueError(
                "torch_compile cannot compile products in symmetric memory; use one of the two"
            )
        if self.torch_compile and self.pipeline_parallel_size > 1:
            raise ValueError(
                "torch_compile does not work with pipeline stages; use pipeline_parallel_size=1"
            )
        if self.torch_compile_backend == type(self).torch_compile_backend:
            return
        from torch._dynamo import list_backends  # takes seconds to import

        if self.torch_compile_backend not in list_backends(()):
            raise ValueError(
                f"torch_compile_backend must be one of {', '.join(list_backends())}, not "
                f"{self.torch_compile_backend!r}"
            )

    def _check_environment(self) -> None:
        environment = ENVIRONMENTS[self.env_type]
        if self.symmetric_memory and (not self.sequence_parallel or self.model_parallel_size == 1):
            raise ValueError(
                "symmetric_memory fuses the collectives of sequence parallelism; use it with "
                "sequence_parallel=True and a model_parallel_size above 1"
            )
        if self.pipeline_parallel_size > 1:
            self._check_pipeline()
        if self.context_parallel_size > 1:
            self._check_context()
        if self.expert_parallel_size > 1:
            self._check_experts()
        if environment.splits_layers and environment.uses_deepspeed and self.zero_stage == 3:
            raise ValueError(
                "ZeRO stage 3 splits parameters that deepspeed+mpu has already split; use "
                "zero_stage 0, 1 or 2, or env_type='deepspeed'; to split parameters beside layers, use "
                "env_type='fsdp'"
            )
        if not environment.uses_deepspeed:
            names = ["zero_stage", "deepspeed_config"]
            if not environment.uses_fsdp:
                names.append("offload_optimizer")
            for name in names:
                if getattr(self, name):
                    raise ValueError(
                        f"{name} needs env_type 'deepspeed' or 'deepspeed+mpu', not "
                        f"{self.env_type!r}"
                    )
        self._check_fsdp()
        if self.optimizer_in_backward:
            self._check_backward_updates()
        if self.gradient_accumulation_fusion:
            self._check_fusion()

    def _check_fusion(self) -> None:
        """Raises ValueError for what takes gradients from the parameters themselves."""
        environment = ENVIRONMENTS[self.env_type]
        wrong = {
            f"env_type={self.env_type!r}": environment.uses_deepspeed or environment.uses_fsdp,
            "torch_compile": self.torch_compile,
            "optimizer_in_backward": self.optimizer_in_backward,
        }
        for name in (name for name, given in wrong.items() if given):
            raise ValueError(
                f"gradient_accumulation_fusion=True does not work with {name}; use "
                "env_type='pytorch' or 'pytorchDDP' without torch_compile and "
                "optimizer_in_backward"
            )

    def _check_backward_updates(self) -> None:
        """Raises ValueError for what needs all gradients before an update."""
        environment = ENVIRONMENTS[self.env_type]
        wrong = {
            f"env_type={self.env_type!r}": not (
                environment.is_one_process or environment.uses_fsdp
            ),
            f"clip_grad={self.clip_grad}": self.clip_grad > 0,
            f"gradient_accumulation_steps={self.gradient_accumulation_steps}": (
                self.gradient_accumulation_steps or 1
            )
            > 1,
            f"precision={self.precision!r}": PRECISIONS[self.precision].scales_loss,
            f"optimizer={self.optimizer!r}": not find_optimizer(self.optimizer).lone_step_classes,
        }
        for name in (name for name, given in wrong.items() if given):
            raise ValueError(
                f"optimizer_in_backward=True does not work with {name}; use env_type='pytorch' or "
                "'fsdp' in fp32 or bf16, clip_grad=0, one micro-batch a step, and "
                f"optimizer={' or '.join(map(repr, LONE_STEP_NAMES))}"
            )

    def _check_fsdp(self) -> None:
        """Raises ValueError for what does not work with FSDP, or only with it."""
        if not ENVIRONMENTS[self.env_type].uses_fsdp:
            for field in fields(self):
                if not field.name.startswith("fsdp_"):
                    continue
                if getattr(self, field.name) != field.default:
                    raise ValueError(f"{field.name} needs env_type 'fsdp', not {self.env_type!r}")
            return
        if PRECISIONS[self.precision].scales_loss:
            raise ValueError(
                f"precision={self.precision!r} does not work with env_type='fsdp'; use 'bf16' or "
                "'fp32'"
            )
        if self.symmetric_memory:
            raise ValueError(
                "symmetric_memory does not work with env_type='fsdp'; use 'deepspeed+mpu'"
            )

    def _check_optimizer(self) -> None:
        """Raises ValueError for an argument that the chosen optimizer does not read."""
        defaults = {field.name: field.default for field in fields(self)}
        chosen = find_optimizer(self.optimizer)
        for entry in OPTIMIZERS.values():
            for name in entry.own_arguments:
                if entry is not chosen and getattr(self, name) != defaults[name]:
                    raise ValueError(
                        f"{name} needs optimizer={entry.name!r}, not {self.optimizer!r}"
                    )
        environment = ENVIRONMENTS[self.env_type]
        is_split = environment.uses_deepspeed or environment.uses_fsdp
        if chosen.count_state_bytes is not None and (is_split or self.processes_of_a_replica > 1):
            raise ValueError(
                f"optimizer={self.optimizer!r} has states in blocks of whole parameters, so it works "
                "with env_type 'pytorch' and 'pytorchDDP' alone, without tensor, context and expert "
                f"parallelism; use one of {', '.join(ELEMENTWISE_NAMES)}"
            )

    def _check_pipeline(self) -> None:
        size = self.pipeline_parallel_size
        wrong = {
            f"env_type={self.env_type!r}": not ENVIRONMENTS[self.env_type].has_pipelines,
            f"precision={self.precision!r}": PRECISIONS[self.precision].scales_loss,
            f"zero_stage={self.zero_stage}": (self.zero_stage or 0) > 1,
            "offload_optimizer": self.offload_optimizer,
        }
        for name in (name for name, given in wrong.items() if given):
            raise ValueError(
                f"pipeline_parallel_size={size} does not work with {name}; use "
                "env_type='deepspeed+mpu', fp32 or bf16, and zero_stage 0 or 1 without "
                "offload_optimizer, or pipeline_parallel_size=1"
            )

    def _check_experts(self) -> None:
        """Raises ValueError for what does not work with experts that are dealt over processes."""
        environment = ENVIRONMENTS[self.env_type]
        wrong = {
            f"env_type={self.env_type!r}": environment.is_one_process,
            "torch_compile": self.torch_compile,
            f"zero_stage={self.zero_stage}": self.zero_stage == 3,
            f"deepspeed_config={self.deepspeed_config!r}": self.deepspeed_config is not None,
            "offload_optimizer": self.offload_optimizer and not environment.uses_fsdp,
            f"optimizer={self.optimizer!r}": not find_optimizer(self.optimizer).is_elementwise,
            f"precision={self.precision!r}": PRECISIONS[self.precision].scales_loss,
        }
        for name in (name for name, given in wrong.items() if given):
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} does not work with {name}; use "
                "env_type='deepspeed+mpu' or 'deepspeed' with zero_stage 0, 1 or 2, 'pytorchDDP' or "
                "'fsdp', in fp32 or bf16, an optimizer like adamw, and no torch_compile; or "
                "expert_parallel_size=1"
            )

    def _check_context(self) -> None:
        """Raises ValueError for what does not work with sequences that are split over processes."""
        environment = ENVIRONMENTS[self.env_type]
        wrong = {
            f"env_type={self.env_type!r}": environment.is_one_process,
            "zero_stage=3": self.zero_stage == 3,
            "torch_compile and context_exchange='ring'": self.torch_compile
            and self.context_exchange == "ring",
        }
        for name in (name for name, given in wrong.items() if given):
            raise ValueError(
                f"context_parallel_size={self.context_parallel_size} does not work with {name}; use "
                "env_type='deepspeed+mpu', 'deepspeed', 'pytorchDDP' or 'fsdp', without ZeRO stage 3, "
                "with torch_compile context_exchange 'heads' or 'keys', or context_parallel_size=1"
            )

    def resolved(self) -> TrainingArguments:
        """Returns the arguments with the defaults that depend on this machine and its files."""
        return self

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """Returns the number of micro-batches that each rank accumulates for one optimizer step."""
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps or 1
        per_pass = self.micro_batch_size * data_parallel_size
        if self.global_batch_size % per_pass:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size} x {data_parallel_size} data-parallel "
                f"ranks; use a multiple of {per_pass}"
            )
        count = self.global_batch_size // per_pass
        if self.optimizer_in_backward and count > 1:
            raise ValueError(
                f"optimizer_in_backward=True updates in each backward pass, and "
                f"global_batch_size={self.global_batch_size} makes {count} micro-batches a step; use "
                f"global_batch_size={per_pass}, or a larger micro_batch_size"
            )
        return count

    def global_batch(self, data_parallel_size: int) -> int:
        """Returns the number of samples in one optimizer step over all ranks."""
        return (
            self.micro_batch_size * self.accumulation_steps(data_parallel_size) * data_parallel_size
        )

    @property
    def length_multiple(self) -> int:
        """What the length of sequences must be a multiple of: sequence and context parallelism
        split them over the ranks.
        """
        return self.context_parallel_size * (
            self.model_parallel_size if self.sequence_parallel else 1
        )

    @property
    def processes_of_a_replica(self) -> int:
        """The number of processes that hold one replica of the model, experts included."""
        return (
            self.model_parallel_size
            * self.pipeline_parallel_size
            * self.context_parallel_size
            * self.expert_parallel_size
        )
