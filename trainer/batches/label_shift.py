"""Finds out whether a model predicts the next token: whether its loss compares position i with
label i + 1.

The first label of a row is then not a target. The name of a class does not say so: transformers'
GPT2LMHeadModel shifts labels inside, and BartForCausalLM does not. For the classes that are trained
most often a table says it, which tests/trainer/test_loss_normalization.py compares with their
behavior. Any other model is asked: it computes the loss of a row of two tokens.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100
# transformers' classes -> whether they shift labels.
SHIFTS_LABELS = {
    "BartForCausalLM": False,
    "BartForConditionalGeneration": False,
    "BertLMHeadModel": True,
    "GPT2LMHeadModel": True,
    "LlamaForCausalLM": True,
    "OpenAIGPTLMHeadModel": True,
    "T5ForConditionalGeneration": False,
    "XLNetLMHeadModel": False,
}
# Heads of transformers whose labels stand where their logits do, or are not tokens at all.
ALIGNED_HEADS = (
    "ForAudioClassification",
    "ForCTC",
    "ForImageClassification",
    "ForMaskedLM",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForVideoClassification",
)
# If a model cannot compute the loss of two tokens, the end of its name decides.
SHIFTING_HEADS = ("ForCausalLM", "LMHeadModel")

_asked: dict[type[nn.Module], bool] = {}  # the answers of this process


def shifts_labels(model: nn.Module) -> bool:
    """Returns whether the loss of `model` leaves out the first label of each row.

    The first call for a class that the table does not have runs a forward pass, so if the model's
    forward pass is collective, all ranks must call this together.
    """
    unwrap: Any = getattr(
        model, "get_base_model", lambda: model
    )  # PEFT's wrappers have this method
    inner: nn.Module = unwrap()
    kind = type(inner)
    known = _look_up(inner)
    if known is not None:
        return known
    if kind not in _asked:
        _asked[kind] = _ask(inner)
    return _asked[kind]


def _look_up(model: nn.Module) -> bool | None:
    """Returns what the table says, or None for a model whose forward pass or loss is not
    transformers' own.
    """
    kind = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    is_transformers = kind.__module__.partition(".")[0] == "transformers"
    # transformers keeps a loss function that a user has set under this name.
    if not is_transformers or "_loss_function" in vars(model):
        return None
    if kind.__name__.endswith(ALIGNED_HEADS):
        return False
    return SHIFTS_LABELS.get(kind.__name__)


def _ask(model: nn.Module) -> bool:
    """Computes the loss of two tokens of which only the first has a label.

    A model that shifts labels has no target then, and its loss is NaN, or 0 if it guards against
    that.
    """
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters or "labels" not in parameters:
        return False
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    ids = torch.tensor([[0, 1]], device=device)  # [B, S]
    inputs = {"input_ids": ids, "labels": torch.tensor([[1, IGNORED]], device=device)}
    if "attention_mask" in parameters:
        inputs["attention_mask"] = torch.ones_like(ids)
    if "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = ids
    try:
        with _unchanged(model, device):
            output: Any = model.forward(**inputs)
        loss: Any = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(output, tuple):
            loss = output[0]
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return not (loss.isfinite() and loss != 0)
    except (
        Exception
    ):  # nothing is known of this forward pass, which may refuse such a row in its own way
        pass
    return type(model).__name__.endswith(SHIFTING_HEADS)


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Generator[None]:
    """A context for a forward pass that leaves modes, gradients and random generators as they are."""
    modes = {module: module.training for module in model.modules()}
    devices = [device] if device.type == "cuda" else []
    python_state = random.getstate()
    try:
        model.eval()
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        random.setstate(python_state)
        for module, mode in modes.items():
            module.training = mode
