"""The model `shardzoo` of lm-evaluation-harness: its model `hf` of transformers, with a split model
of the zoo inside.

The first rank alone runs the harness: it reads the tasks, keeps its caches and reports. What it
asks the model for, it asks of all ranks, so the others need neither tasks nor data, and cannot
disagree about them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import lm_eval
import torch
from lm_eval.api.registry import register_model
from lm_eval.models import huggingface
from lm_eval.utils import simple_parse_args_string
from torch import Tensor, nn

from ..checkpoint.manifest import checked_tokenizer
from ..generation import generate
from ..models import from_pretrained
from ..models.lora import merge_lora
from ..models.sizes import full_size
from ..mpu import ParallelMesh
from ..trainer.launch.environment import initialize_distributed, single_device
from ..trainer.launch.rank_info import RankInfo
from ..trainer.launch.ranks import on_first_rank
from .arguments import ModelArguments

# Decorators of the harness hide the types of this class, and of `simple_evaluate` below.
HFLM: Any = huggingface.HFLM
# What a model generates -> the harness's word for it.
BACKENDS = {"continuation": "causal", "answer": "seq2seq"}


class WholeOutputs(nn.Module):
    """A model of the zoo with the interface that the harness expects of transformers' models."""

    def __init__(self, model: Any) -> None:
        from transformers import AutoConfig

        super().__init__()
        self.model = model
        self.generation_config = model.generation_config
        self.config = AutoConfig.for_model(**model.config.to_dict())
        self.device = next(model.parameters()).device
        self.dtype = model.dtype

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> SimpleNamespace:
        """Returns an object with the `logits` of the whole vocabulary, [B, S, V], or [B, T, V] for
        labels [B, T].
        """
        target: dict[str, Tensor] = {}
        if labels is not None:
            target["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
        logits = self.model(input_ids, attention_mask=attention_mask, **target).logits
        return SimpleNamespace(logits=self.model.gather_logits(logits))

    def generate(self, **arguments: Any) -> Any:
        """Returns sequences of tokens; see `shardzoo.generation.generate`."""
        return generate(self.model, return_dict_in_generate=False, **arguments)

    def num_parameters(self) -> int:
        """Returns the number of parameters of the unsplit model."""
        return sum(map(full_size, self.model.parameters()))

    def tie_weights(self) -> None:
        """Does nothing: a model of the zoo is built with its ties."""


class ShardzooLM(HFLM):
    """A causal language model or an encoder-decoder of the zoo, for lm-evaluation-harness.

    Results are those of the harness's model `hf`, whose way to tokenize, truncate, batch and stop
    it has. Under tensor parallelism every rank creates it; then the first one evaluates, and the
    others `serve`. See `simple_evaluate`.

    Args:
        given: The fields of `ModelArguments`, and arguments of `hf` that say how it evaluates, such
            as batch_size.

    Raises:
        ValueError: An argument is unknown, the model generates no text, or the number of processes
            is another one.
    """

    def __init__(self, **given: Any) -> None:
        arguments = ModelArguments.from_given(given)
        folder, texts, adapter = arguments.find_folders()
        mesh, device = _join_ranks(arguments)
        # The tokenizer is checked before the weights are read, which may take minutes.
        checked_tokenizer(folder, texts)
        dtype = None
        if arguments.dtype != "auto":
            dtype = getattr(torch, arguments.dtype.removeprefix("torch."))
        model: Any = from_pretrained(folder, mesh, dtype, device=device, adapter=adapter)
        if adapter is not None:
            merge_lora(model)
        backend = BACKENDS.get(getattr(model, "generates", ""))
        if backend is None:
            raise ValueError(
                f"pretrained: {folder} is a {type(model).__name__}; lm-evaluation-harness evaluates "
                "causal language models and encoder-decoders"
            )
        whole: Any = WholeOutputs(model)
        super().__init__(whole, backend=backend, tokenizer=str(texts), **arguments.harness)
        self.pretrained = str(folder)

    def serve(self) -> None:
        """On a rank that is not the first: computes what the first one asks for, until it has
        finished.
        """
        while True:
            request: Any = on_first_rank(lambda: None)
            if request is None:
                return
            name, arguments = request
            # The first rank sends ids and masks as lists of rows, and nothing else in that form.
            for key, value in arguments.items():
                if isinstance(value, list) and value and isinstance(value[0], list):
                    arguments[key] = torch.tensor(value, device=self.device)
            getattr(super(), name)(**arguments)

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:  # [B, S, V]
        return self._on_all_ranks("_model_call", inps=inps, attn_mask=attn_mask, labels=labels)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **settings: Any
    ) -> Tensor:  # [B, T]
        return self._on_all_ranks(
            "_model_generate", context=context, max_length=max_length, stop=stop, **settings
        )

    def _on_all_ranks(self, name: str, **arguments: Any) -> Tensor:
        """Calls one of the harness's methods here, and on the ranks that `serve`."""
        sent: dict[str, Any] = {}
        for key, value in arguments.items():
            sent[key] = value.tolist() if isinstance(value, Tensor) else value
        on_first_rank(lambda: [name, sent])
        return getattr(super(), name)(**arguments)


register_model("shardzoo")(ShardzooLM)


def simple_evaluate(model_args: Mapping[str, Any] | str, **options: Any) -> dict[str, Any] | None:
    """Evaluates a model on all ranks; returns the results on the first one, and None on the others.

    Args:
        model_args: See `ShardzooLM`; a mapping, or text such as
            "pretrained=FOLDER,tensor_parallel_size=2".
        options: Of `lm_eval.simple_evaluate`, such as `tasks`.
    """
    if isinstance(model_args, str):
        model_args = simple_parse_args_string(model_args)
    given = dict(model_args)
    if not RankInfo.from_environment().is_first:
        ShardzooLM(**given, device=options.get("device")).serve()
        return None
    evaluate: Any = lm_eval.simple_evaluate
    with leading():
        return evaluate(model="shardzoo", model_args=given, **options)


@contextmanager
def leading() -> Generator[None]:
    """On the first rank: ends `ShardzooLM.serve` of the others after the context, with its user's
    error if it fails.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        # Ranks that failed alike have left.
        with suppress(RuntimeError):
            on_first_rank(partial(_raise, error))
        raise
    on_first_rank(lambda: None)


def _raise(error: Exception) -> None:
    raise error


def _join_ranks(arguments: ModelArguments) -> tuple[ParallelMesh | None, torch.device]:
    """Returns the mesh and the device of this rank.

    Raises:
        ValueError: The processes are not those of the arguments.
    """
    launch = RankInfo.from_environment()
    size = arguments.tensor_parallel_size
    if launch.world_size != size:
        raise ValueError(
            f"tensor_parallel_size={size} needs {size} processes, but {launch.world_size} were "
            f"started; use `shardzoo lm-eval`, which starts them, or `torchrun --nproc-per-node "
            f"{size}`"
        )
    wanted = torch.device(arguments.device or "cuda").type
    # "cuda:0" is the harness's default, also on machines without a GPU.
    if wanted == "cuda" and not torch.cuda.is_available():
        wanted = "cpu"
    if size == 1:
        named = wanted if wanted == "cpu" else arguments.device or wanted
        return None, single_device(named)
    device = initialize_distributed(launch)
    if device.type != wanted:
        raise ValueError(
            f"device={arguments.device} is not what the ranks use on this machine: {device.type}"
        )
    return ParallelMesh(size), device
