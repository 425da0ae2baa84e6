"""Defines the arguments of a pretraining run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from ..data.objectives.objective import Objective
from ..trainer.arguments.training_arguments import TrainingArguments
from ..trainer.arguments.value_types import check_types
from ..trainer.distillation import check_teacher_arguments
from ..trainer.environments import EnvType


@dataclass(frozen=True)
class PretrainingArguments(TrainingArguments):
    """Arguments of pretraining: the trainer's arguments, the model, the corpus and the run's
    folder.
    """

    env_type: EnvType = "deepspeed+mpu"
    train_steps: int | None = 1600
    """Optimizer steps."""
    micro_batch_size: int = 4
    """Sequences in one forward pass of one data-parallel rank."""
    lr: float = 3e-3
    """Peak learning rate; linear warm-up, then cosine decay to a tenth."""
    warmup_steps: int | None = 100
    beta2: float = 0.95
    save_interval: int = 500
    """Steps between checkpoints; the last step is always saved."""
    log_interval: int = 1
    """Steps between points in the logs."""
    sequence_length: int | None = None
    """Tokens in a sequence; by default the model's maximum, or 512 if it has none."""
    target_length: int | None = None
    """Tokens in an encoder-decoder's target; by default what the objective needs."""
    eval_sequences: int = 64
    """Held-out sequences for each evaluation during training."""
    final_eval_sequences: int | None = None
    """Held-out sequences for the final evaluation and the comparison with the exported model; by
    default all.
    """

    model: str | None = None
    """A preset, or a folder or file with a Hugging Face config.json; by default that of
    `init_from`, else gpt2-quickstart. The tokenizer determines the vocabulary size of a model with
    new weights."""
    hidden_size: int | None = None
    """Overrides the model's."""
    num_hidden_layers: int | None = None
    """Overrides the model's."""
    num_attention_heads: int | None = None
    """Overrides the model's."""
    router_aux_loss_coef: float | None = None
    """Adds the loss that balances a mixture's experts, times this weight; by default what the model's
    configuration says."""
    init_from: str | None = None
    """Weights to start from, with their tokenizer: a Hugging Face folder, a shardzoo folder or
    checkpoint, or a name on the Hugging Face Hub; by default new weights."""
    tokenizer: str | None = None
    """A tokenizer's file or folder, or a name on the Hugging Face Hub; by default that of
    `init_from` or of a prepared corpus, else one of the family's kind is trained on the corpus."""

    teacher_model: str | None = None
    """A trained model of the same vocabulary, whose distribution of every target is learned beside
    the targets (distillation): a Hugging Face folder, a shardzoo folder or checkpoint, or a name on
    the Hub. New weights take its tokenizer by default."""
    teacher_weight: float = 0.5
    """Share of the divergence from the teacher in the loss."""
    teacher_temperature: float = 1.0
    """Divisor of the logits of both models in the divergence."""
    teacher_parallel_size: int | None = None
    """Tensor-parallel ranks that the teacher is split over, by default as many as the model; 1 for
    a whole teacher on each rank."""

    objective: Objective | None = None
    """What the model learns to predict; by default the family's own objective."""
    document_mask: bool | None = None
    """Let the documents that are packed into one sequence not see one another: the objective's
    setting separate_documents, which counts by default."""
    data: tuple[str, ...] = ()
    """Text files, folders of text, JSON lines with a `text` key, parquet files, datasets folders,
    or prefixes of prepared .bin/.idx pairs; `name:0.7 name:0.3` mixes two by these shares. By
    default the source of the Python standard library."""
    stream: bool = False
    """Read and tokenize the text during training instead of preparing a corpus first."""
    vocab_size: int | None = None
    """Size of the vocabulary that is trained on the corpus; by default the model's."""
    held_out_fraction: float = 0.05
    """Share of the documents that is not used for training."""

    output_dir: str | None = None
    """Folder of the run; by default a new one under runs/."""
    resume: bool = False
    """Resume the run in output_dir, with its arguments except those given now."""
    overwrite: bool = False
    """Delete the run in output_dir first."""
    fast_dev_run: bool = False
    """Run only 20 steps, to find mistakes, with an evaluation after the tenth and one at the end."""
    eval_only: bool = False
    """Only evaluate, on held-out text: the last checkpoint in output_dir, or the weights of
    `init_from`.
    """
    tf32: bool = False
    """Multiply fp32 matrices as TensorFloat-32 on a GPU that supports it."""
    sample_prompt: str | None = None
    """Text that the exported model continues, or whose spans, masks or blanks it fills; by default
    held-out text.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        data = (self.data,) if isinstance(self.data, str) else tuple(self.data or ())
        object.__setattr__(self, "data", data)
        if self.objective is not None:
            check_types(self.objective)
            object.__setattr__(self, "objective", self.mask_documents(self.objective))
        for name in ("eval_sequences", "final_eval_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        check_teacher_arguments(self)
        if self.train_steps is None:
            raise ValueError(
                "the corpus is repeated endlessly: set train_steps to the number of steps"
            )

    @property
    def model_name(self) -> str:
        """The name of the model: that of `model`, of the weights to start from, or of the default."""
        return self.model or self.init_from or DEFAULT_MODEL

    def mask_documents(self, objective: Objective) -> Objective:
        """Returns an objective whose documents see one another as `document_mask` says.

        Raises:
            ValueError: The objective does not pack documents.
        """
        if self.document_mask is None:
            return objective
        if not hasattr(objective, "separate_documents"):
            raise ValueError(
                f"document_mask={self.document_mask} is for objectives that pack documents into "
                f"sequences, which {objective.name!r} does not; leave it out, or use objective 'gpt' "
                "or 'roberta'"
            )
        changed: Any = replace(cast(Any, objective), separate_documents=self.document_mask)
        return changed

    def run_arguments(self) -> dict[str, object]:
        """Returns the arguments that describe the run, as `--config` reads them.

        Those that belong to one invocation are left out.
        """
        values: dict[str, Any] = {
            name: value for name, value in asdict(self).items() if name not in INVOCATION
        }
        if self.objective is not None:
            values["objective"] = {"name": self.objective.name, **values["objective"]}
        return values


DEFAULT_MODEL = "gpt2-quickstart"
INVOCATION = (
    "resume",
    "overwrite",
    "config",
    "local_rank",
    "dry_run",
    "fast_dev_run",
    "eval_only",
    "document_mask",
)
"""Arguments of one invocation, which do not describe the run; the objective keeps what
`document_mask` says."""
FIXED = (
    "model",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "router_aux_loss_coef",
    "init_from",
    "tokenizer",
    "objective",
    "data",
    "stream",
    "vocab_size",
    "held_out_fraction",
    "sequence_length",
    "target_length",
    "seed",
)
"""Arguments that cannot change when a run is resumed."""
