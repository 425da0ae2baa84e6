"""Lists the optimizers, with all that the rest of the package knows of each.

Arguments, the options of the training commands, the memory estimate, the plan, DeepSpeed's files
and the engines read this list. To add an optimizer, write a function that builds it, and its entry
in `OPTIMIZERS`. A hyperparameter of its own is also an argument (`TrainingArguments`), a field of
`OptimizerSettings`, and listed in the entry's `own_arguments`.

Importing this file is cheap: the functions that build import torch and the libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...mpu import ParallelMesh

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerSettings:
    """What a function that builds an optimizer may read of the run's arguments, and how parameters
    lie.

    Attributes:
        scale_parameter: None to follow `relative_step`.
        muon_momentum, muon_scaling: See `Muon`.
        in_parts: Whether the optimizer gets parts of parameters, because tensor parallelism or ZeRO
            splits them; or padded ones, if padding matters to it. The same on all ranks.
        mesh: The model's.
    """

    lr: float
    beta1: float
    beta2: float
    adam_eps: float
    relative_step: bool
    scale_parameter: bool | None
    muon_momentum: float
    muon_scaling: str
    in_parts: bool
    mesh: ParallelMesh | None


@dataclass(frozen=True)
class UpdatedTensors:
    """The sizes of the tensors that an optimizer updates on a rank, in elements.

    Attributes:
        groups: The sizes in each parameter group.
        in_parts: As in `OptimizerSettings`.
        largest_parameter: Of the model, if a tensor holds several parameters, as under ZeRO.
    """

    groups: Sequence[Sequence[int]]
    in_parts: bool = False
    largest_parameter: int | None = None

    @property
    def largest_tensor(self) -> int:
        return max((size for group in self.groups for size in group), default=0)

    @property
    def largest_group(self) -> int:
        return max((sum(group) for group in self.groups), default=0)

    @property
    def largest_part(self) -> int:
        """The size of the largest part of a single parameter."""
        return min(self.largest_tensor, self.largest_parameter or self.largest_tensor)


@dataclass(frozen=True)
class OptimizerEntry:
    """What the package knows of an optimizer.

    Attributes:
        name: Its name in the arguments.
        title: Its name in texts.
        build: Makes it from parameter groups.
        element_states: The fp32 states with a value for each element, which ZeRO splits like the
            parameter. Empty if matrices have other states.
        is_elementwise: Whether the update of an element depends on that element alone, so that
            matrices may be split anywhere. The others need statistics of whole matrices, and ZeRO
            stage 3, which splits parameters without saying where, refuses them.
        count_temporaries: Returns the elements of fp32 temporary tensors during an update.
        count_matrix_state: Returns the elements of state of a whole matrix, from its shape. Every
            rank has them. None if `element_states` are all.
        padding_matters: Whether the padding of a parameter would enter its statistics.
        other_names: Further names in the arguments.
        deepspeed_types: DeepSpeed's names for it, in lower case.
        class_names: Classes, of any library, whose states are exactly `element_states`, and whose
            updates are elementwise. ZeRO and tensor parallelism accept an optimizer of these
            classes, or a `WholeMatrixOptimizer`, and no other that they do not know.
        counts_steps_by_group: Whether the classes count their steps in each parameter group, and
            not in the state of each parameter.
        hidden_matrix_states: The states of the matrices of hidden layers, if these have others than
            `element_states`. Such an optimizer gets them in parameter groups of their own, which
            have `is_hidden_matrix`.
        own_arguments: Arguments that only this optimizer reads; others refuse them.
        lone_step_classes: The classes that it is built as, if their `step` may be called for one
            parameter at a time, because all that they keep belongs to parameters.
        count_state_bytes: Returns the bytes of the states of a tensor from its number of elements,
            if they are not fp32 elements: quantized states, which have blocks of whole parameters.
            Only engines that split nothing take such an optimizer.
    """

    name: str
    title: str
    build: Callable[[Groups, OptimizerSettings], Optimizer]
    element_states: tuple[str, ...]
    is_elementwise: bool
    count_temporaries: Callable[[UpdatedTensors], int]
    count_matrix_state: Callable[[tuple[int, ...]], int] | None = None
    padding_matters: bool = False
    other_names: tuple[str, ...] = ()
    deepspeed_types: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    counts_steps_by_group: bool = False
    hidden_matrix_states: tuple[str, ...] | None = None
    own_arguments: tuple[str, ...] = ()
    lone_step_classes: tuple[str, ...] = ()
    count_state_bytes: Callable[[int], int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)


def _build_adamw(groups: Groups, settings: OptimizerSettings) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): Adam with decoupled weight decay."""
    from .adamw import AdamW

    betas = (settings.beta1, settings.beta2)
    return AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True)


def _build_adafactor(groups: Groups, settings: OptimizerSettings) -> Optimizer:
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) without a first moment, of transformers or
    our own.
    """
    relative_step = settings.relative_step
    scale_parameter = settings.scale_parameter
    if scale_parameter is None:
        scale_parameter = relative_step
    lr = None if relative_step else settings.lr
    if settings.in_parts:
        from .adafactor import Adafactor

        return Adafactor(
            groups,
            lr,
            relative_step=relative_step,
            scale_parameter=scale_parameter,
            mesh=settings.mesh,
        )
    from transformers.optimization import Adafactor as UnsplitAdafactor

    return UnsplitAdafactor(
        groups,
        lr=lr,
        relative_step=relative_step,
        scale_parameter=scale_parameter,
        warmup_init=relative_step,
    )


def _build_lion(groups: Groups, settings: OptimizerSettings) -> Optimizer:
    """Lion (Chen et al. 2023, arXiv:2302.06675), of pytorch_optimizer.

    The betas are the run's, AdamW's by default; the paper's are 0.9 and 0.99.
    """
    import pytorch_optimizer

    return pytorch_optimizer.Lion(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2))


def _build_lamb(groups: Groups, settings: OptimizerSettings) -> Optimizer:
    """LAMB (You et al. 2020, arXiv:1904.00962), of pytorch_optimizer or our own."""
    betas = (settings.beta1, settings.beta2)
    if settings.in_parts:
        from .lamb import Lamb

        return Lamb(groups, settings.lr, betas, mesh=settings.mesh)
    import pytorch_optimizer

    return pytorch_optimizer.Lamb(groups, lr=settings.lr, betas=betas)


def _build_muon(groups: Groups, settings: OptimizerSettings) -> Optimizer:
    """Muon (Jordan et al. 2024) for matrices of hidden layers, AdamW for the rest."""
    from .muon import Muon

    return Muon(
        groups,
        settings.lr,
        momentum=settings.muon_momentum,
        scaling=settings.muon_scaling,
        betas=(settings.beta1, settings.beta2),
        eps=settings.adam_eps,
        mesh=settings.mesh,
    )


def _build_adamw8bit(groups: Groups, settings: OptimizerSettings) -> Optimizer:
    """AdamW with states in 8 bits (Dettmers et al. 2022, arXiv:2110.02861), of torchao.

    Raises ValueError if torchao is not installed.
    """
    from .adamw8bit import AdamW8bit

    betas = (settings.beta1, settings.beta2)
    return AdamW8bit(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps)


def _count_8bit_state(elements: int) -> int:
    """Returns the bytes of two states: a byte an element, an fp32 scale for each 256, and the
    values of the 256 codes. Small tensors and those that blocks do not divide have fp32 states.
    """
    if elements < 4096 or elements % 256:
        return 2 * 4 * elements
    return 2 * (elements + 4 * (elements // 256) + 4 * 256)


def _count_factored_state(shape: tuple[int, ...]) -> int:
    """Returns the elements of the row means and the column means of matrices [..., R, C]."""
    rows = prod(shape[:-1])
    columns = prod(shape[:-2]) * shape[-1]
    return rows + columns


def _count_adafactor_temporaries(sizes: UpdatedTensors) -> int:
    # transformers' class needs two tensors of a parameter's size at once; ours, one of a part's.
    return sizes.largest_part if sizes.in_parts else 2 * sizes.largest_tensor


def _count_lamb_temporaries(sizes: UpdatedTensors) -> int:
    # pytorch_optimizer updates all parameters of a group at once, and needs a tensor for each.
    return sizes.largest_part if sizes.in_parts else sizes.largest_group


def _count_muon_temporaries(sizes: UpdatedTensors) -> int:
    # Matrices are sent, computed and sent back in bf16, half an element each.
    return 2 * sizes.largest_group + sizes.largest_part


OPTIMIZERS = {
    entry.name: entry
    for entry in (
        OptimizerEntry(
            name="adamw",
            title="AdamW",
            build=_build_adamw,
            element_states=("exp_avg", "exp_avg_sq"),
            is_elementwise=True,
            count_temporaries=lambda sizes: 0,  # it is fused
            other_names=("adam",),  # FlagAI's name
            deepspeed_types=("adam", "adamw", "fusedadam"),
            class_names=("AdamW", "Adam"),
            lone_step_classes=("AdamW",),
        ),
        OptimizerEntry(
            name="adafactor",
            title="Adafactor",
            build=_build_adafactor,
            element_states=(),
            is_elementwise=False,
            count_temporaries=_count_adafactor_temporaries,
            count_matrix_state=_count_factored_state,
            padding_matters=True,
            own_arguments=("relative_step", "scale_parameter"),
            lone_step_classes=("Adafactor",),
        ),
        OptimizerEntry(
            name="lion",
            title="Lion",
            build=_build_lion,
            element_states=("exp_avg",),
            is_elementwise=True,
            # pytorch_optimizer updates all parameters of a group at once.
            count_temporaries=lambda sizes: sizes.largest_group,
            deepspeed_types=("lion", "fusedlion"),
            class_names=("Lion",),
            counts_steps_by_group=True,
        ),
        OptimizerEntry(
            name="adamw8bit",
            title="8-bit AdamW",
            build=_build_adamw8bit,
            element_states=("exp_avg", "exp_avg_sq"),
            is_elementwise=True,
            # In fp32: weight, gradient, both states, the update's numerator and denominator.
            count_temporaries=lambda sizes: 6 * sizes.largest_tensor,
            other_names=("adamw_torch_8bit",),  # transformers'
            lone_step_classes=("AdamW8bit",),
            count_state_bytes=_count_8bit_state,
        ),
        OptimizerEntry(
            name="lamb",
            title="LAMB",
            build=_build_lamb,
            element_states=("exp_avg", "exp_avg_sq"),
            is_elementwise=False,
            count_temporaries=_count_lamb_temporaries,
            deepspeed_types=("lamb",),
        ),
        OptimizerEntry(
            name="muon",
            title="Muon",
            build=_build_muon,
            element_states=("exp_avg", "exp_avg_sq"),
            hidden_matrix_states=("momentum_buffer",),
            is_elementwise=False,
            count_temporaries=_count_muon_temporaries,
            own_arguments=("muon_momentum", "muon_scaling"),
        ),
    )
}
ENTRIES_BY_NAME = {name: entry for entry in OPTIMIZERS.values() for name in entry.names}
ELEMENTWISE_NAMES = tuple(
    name
    for name, entry in ENTRIES_BY_NAME.items()
    if entry.is_elementwise and entry.count_state_bytes is None
)
WHOLE_MATRIX_NAMES = tuple(
    name for name, entry in ENTRIES_BY_NAME.items() if not entry.is_elementwise
)
LONE_STEP_NAMES = tuple(entry.name for entry in OPTIMIZERS.values() if entry.lone_step_classes)
LONE_STEP_CLASSES = tuple(name for entry in OPTIMIZERS.values() for name in entry.lone_step_classes)
ELEMENTWISE_CLASSES = {
    class_name: entry for entry in OPTIMIZERS.values() for class_name in entry.class_names
}
"""The entries of elementwise optimizers, by the name of the optimizer's class."""

if TYPE_CHECKING:
    OptimizerName = str
else:
    # For the command line and its help, and for the checks of values.
    OptimizerName = Literal[tuple(ENTRIES_BY_NAME)]


def find_optimizer(name: str) -> OptimizerEntry:
    """Returns the entry of an optimizer by any of its names. Raises ValueError for another name."""
    if name not in ENTRIES_BY_NAME:
        raise ValueError(f"there is no optimizer {name!r}; use one of {', '.join(ENTRIES_BY_NAME)}")
    return ENTRIES_BY_NAME[name]
