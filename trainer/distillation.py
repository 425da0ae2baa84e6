"""Distills a teacher: a second model, whose distribution of each target token is learned beside the
targets (Hinton et al., 2015).

The teacher may be split over more or fewer tensor-parallel ranks than the student, or not at all.
Its logits travel to the ranks of the student that have the same part of the vocabulary, and are
gathered nowhere.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models.config import ModelConfig
from ..mpu import ParallelMesh, cut_sequence, reduce_from_context
from ..mpu.columns import redistribute_columns
from ..mpu.divergence import vocab_parallel_divergence
from ..mpu.mesh import tp_rank, tp_size
from .batches.label_shift import IGNORED, shifts_labels
from .batches.loss_normalization import COUNTED_LABELS, find_loss, find_output_field
from .environments import ENVIRONMENTS

# What a batch holds beside the inputs of a forward pass.
NO_INPUTS = ("labels", "next_sentence_label", "sample_weight", *COUNTED_LABELS)
MOST_DIMENSIONS = 8  # of an input


def check_teacher_arguments(arguments: Any) -> None:
    """Raises ValueError for arguments of a run that a teacher does not work with."""
    if not 0 <= arguments.teacher_weight <= 1:
        raise ValueError(f"teacher_weight must be from 0 to 1, not {arguments.teacher_weight}")
    if not arguments.teacher_temperature > 0:
        raise ValueError(
            f"teacher_temperature must be above 0, not {arguments.teacher_temperature}"
        )
    size = arguments.teacher_parallel_size
    if size is not None and size < 1:
        raise ValueError(f"teacher_parallel_size must be at least 1, not {size}")
    if arguments.teacher_model is None:
        if size is not None:
            raise ValueError(
                f"teacher_parallel_size={size} is for a teacher: name it by teacher_model"
            )
        return
    environment = ENVIRONMENTS[arguments.env_type or "pytorch"]
    if environment.uses_fsdp or arguments.zero_stage == 3:
        raise ValueError(
            "teacher_model works with neither env_type='fsdp' nor ZeRO stage 3, which would not "
            "split the teacher; use another env_type with zero_stage below 3"
        )
    for name in ("pipeline_parallel_size", "expert_parallel_size"):
        if getattr(arguments, name) > 1:
            raise ValueError(f"teacher_model does not work with {name} above 1; use {name}=1")
    own = arguments.model_parallel_size
    if size is not None and size != own and arguments.context_parallel_size > 1:
        raise ValueError(
            f"teacher_parallel_size={size} moves logits of whole sequences, which "
            "context_parallel_size above 1 splits; leave it out, or use context_parallel_size=1"
        )
    if size is not None and own % size and size % own:
        raise ValueError(
            f"teacher_parallel_size={size} must divide model_parallel_size={own}, or be a multiple "
            "of it"
        )


def make_teacher_mesh(
    mesh: ParallelMesh | None, teacher_parallel_size: int | None
) -> ParallelMesh | None:
    """Returns the mesh of a teacher beside a student on `mesh`: the same one, or another of the same
    processes. Collective.

    Args:
        teacher_parallel_size: The tensor-parallel ranks of the teacher; None for the student's. A
            teacher on one rank has no mesh: each process holds all of it.
    """
    if teacher_parallel_size is None or teacher_parallel_size == tp_size(mesh):
        return mesh
    if teacher_parallel_size == 1:
        return None
    return ParallelMesh(teacher_parallel_size)


class Teacher:
    """Computes a teacher's logits in the layout of the student's.

    If the teacher is split over more ranks than the student, its ranks have several batches, one of
    each of the student's replicas, and run them one after another.

    Args:
        model: The teacher; it is not trained.
        mesh: That of the teacher; see `make_teacher_mesh`.
        student_mesh: That of the student.
    """

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh | None, student_mesh: ParallelMesh | None
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        # A cache for generation would keep the keys and values of all layers.
        config: Any = getattr(model, "config", None)
        self._options: dict[str, Any] = {}
        if "use_cache" in getattr(model, "call_names", ()):
            self._options["use_cache"] = False
        elif hasattr(config, "use_cache") and not isinstance(config, ModelConfig):
            config.use_cache = False
        self.mesh = mesh
        student_size = tp_size(student_mesh)
        self._student_size = student_size
        self.shares_layout = tp_size(mesh) == student_size
        # The student's replicas whose batches this rank's group of the teacher runs.
        self.replicas = max(1, tp_size(mesh) // student_size)
        self.replica = tp_rank(mesh) // student_size if self.replicas > 1 else 0
        # The student's tensor-parallel rank of each rank of that group.
        first = 0 if student_mesh is None else student_mesh.rank - tp_rank(mesh)
        self._student_ranks = [(first + rank) % student_size for rank in range(tp_size(mesh))]

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Any], columns: int) -> Tensor:
        """Returns the logits [..., columns] of a batch: the columns of the student's rank.

        Collective over the teacher's tensor-parallel ranks. Columns after the vocabulary hold any
        numbers.
        """
        if self.shares_layout:
            return self._run(inputs)
        logits: Tensor | None = None
        for replica, batch in enumerate(self._iterate_batches(inputs)):
            wanted: list[tuple[int, int]] = []
            for rank, student_rank in enumerate(self._student_ranks):
                is_wanted = self.replicas == 1 or rank // self._student_size == replica
                first = student_rank * columns
                wanted.append((first, first + columns) if is_wanted else (0, 0))
            moved = redistribute_columns(self._run(batch), self.mesh, wanted)
            if replica == self.replica:
                logits = moved
        assert logits is not None
        return logits

    def _run(self, inputs: Mapping[str, Any]) -> Tensor:
        return find_logits(self.model(**inputs, **self._options))

    def _iterate_batches(self, inputs: Mapping[str, Any]) -> Generator[Mapping[str, Any]]:
        """Yields the batches of the student's replicas, the same on all ranks of the teacher."""
        if self.replicas == 1:
            yield inputs
            return
        assert self.mesh is not None
        group = self.mesh.tp_group
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        # All ranks have the same inputs, of other sizes.
        sizes = torch.full((len(tensors), MOST_DIMENSIONS), -1, dtype=torch.int64)
        for row, value in enumerate(tensors.values()):
            sizes[row, : value.dim()] = torch.tensor(value.shape)
        sizes = sizes.to(self.mesh.device_type)
        every = [torch.empty_like(sizes) for _ in range(self.mesh.tp_size)]
        dist.all_gather(every, sizes, group=group)
        ranks = dist.get_process_group_ranks(group)
        for replica in range(self.replicas):
            source = replica * self._student_size
            batch = dict(inputs)
            for (name, own), row in zip(tensors.items(), every[source].tolist(), strict=True):
                shape = [size for size in row if size >= 0]
                value = own.contiguous()
                if replica != self.replica:
                    value = own.new_empty(shape)
                dist.broadcast(value, ranks[source], group=group)
                batch[name] = value
            yield batch


def find_logits(output: Any) -> Tensor:
    """Returns the logits of the vocabulary in a model's output."""
    logits = find_output_field(output, "logits")
    return find_output_field(output, "prediction_logits") if logits is None else logits


@dataclass(frozen=True)
class Distillation:
    """Adds the divergence from a teacher to the loss of target tokens:

        (1 - weight) · loss + weight · T² · KL(teacher ‖ student), of logits divided by T.

    The factor T² keeps the gradients as large as without a temperature.

    Attributes:
        student: The model that is trained.
        native: Whether it is the zoo's.
        weight: The share of the divergence.
        temperature: T.
        mesh: The student's.
    """

    student: Any
    teacher: Teacher
    weight: float = 0.5
    temperature: float = 1.0
    mesh: ParallelMesh | None = None
    native: bool = True

    def measure(self, logits: Tensor, data: Mapping[str, Any]) -> Tensor:
        """Returns T² times the divergence at each position, 0 where no label is predicted, fp32
        [B, S], of this context rank's positions.

        Args:
            logits: [B, S, Vp] of the student.
            data: The batch, with `labels`.
        """
        labels = data["labels"]
        inputs = {name: value for name, value in data.items() if name not in NO_INPUTS}
        prepare = getattr(self.student, "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = prepare(labels)
        divergence = vocab_parallel_divergence(
            logits,
            self.teacher(inputs, logits.shape[-1]),
            num_classes=self.student.config.vocab_size,
            temperature=self.temperature,
            mesh=self.mesh,
        )
        kept = cut_sequence(self.place_targets(labels), self.mesh) != IGNORED
        return divergence.masked_fill(~kept, 0.0) * self.temperature**2

    def place_targets(self, labels: Tensor) -> Tensor:
        """Returns the target of each position of the logits."""
        if self.native:
            return self.student.targets(labels)
        if shifts_labels(self.student):
            return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return labels

    def mix(self, losses: Tensor, divergence: Tensor) -> Tensor:
        """Returns both by their shares."""
        return (1 - self.weight) * losses + self.weight * divergence

    def add_to_loss(self, output: Any, data: Mapping[str, Any]) -> Tensor:
        """Returns the loss of a forward pass with the divergence, whose sum is divided as the loss
        is: by `num_items_in_batch` in the batch, or by its number of targets.
        """
        divergence = self.measure(find_logits(output), data)
        items = data.get("num_items_in_batch")
        if items is None:
            items = (self.place_targets(data["labels"]) != IGNORED).sum()
        total = reduce_from_context(divergence.sum() / items, self.mesh)
        return self.mix(find_loss(output), total)
