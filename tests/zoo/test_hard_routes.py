"""Mixtures of every family with one token, and with all tokens on one expert and none on the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from every_case import by_turns
from matrix import Case, check_case, load_rows

ROWS = load_rows()
BOTH = "sequence parallel and recompute"
FAVORED = 3  # the expert of all tokens, which the last rank holds


@dataclass(frozen=True)
class Crowd:
    """A case whose router sends all tokens to the expert FAVORED, or to it and to one other.

    Attributes:
        base: The name of the row that it changes.
        config: What it changes.
        bias: What the names of the routers' biases or corrections end with; None if equal scores
            of all experts decide, and then both libraries choose the first ones.
    """

    base: str
    config: dict[str, Any]
    bias: str | None = None

    def crowd(self, model: Any) -> None:
        """Changes transformers' model in place."""
        mend = ROWS[self.base][1].mend
        if mend is not None:
            mend(model)
        names = dict(model.named_parameters()) | dict(model.named_buffers())
        found = [name for name in names if name.endswith(self.bias or ".gate.weight")]
        assert found
        for name in found:
            value = names[name].detach()
            if self.bias is None:
                torch.nn.init.zeros_(value)
            else:
                value[FAVORED] += 50.0

    def case(self) -> Case:
        case = ROWS[self.base][1]
        return replace(case, config={**case.config, **self.config}, mend=self.crowd)


ONE = {"num_experts_per_tok": 1}
CROWDS = {
    "mixtral": Crowd("MixtralForCausalLM", ONE),
    "qwen2_moe": Crowd("Qwen2MoeForCausalLM", ONE),
    "qwen3_moe": Crowd("Qwen3MoeForCausalLM", ONE),
    "olmoe": Crowd("OlmoeForCausalLM", ONE),
    "gpt_oss": Crowd("GptOssForCausalLM", ONE, "router.bias"),
    "glm4_moe": Crowd("Glm4MoeForCausalLM", ONE, "e_score_correction_bias"),
    "deepseek_v3": Crowd("DeepseekV3ForCausalLM", ONE, "e_score_correction_bias"),
    # Some tokens are beyond the capacity, which counts those of a row.
    "switch_transformers": Crowd(
        "SwitchTransformersForConditionalGeneration", {"router_bias": True}, "classifier.bias"
    ),
    "nllb-moe": Crowd(
        "NllbMoeForConditionalGeneration", {"router_bias": True}, "classifier.bias"
    ),
}  # fmt: skip
LAYOUTS = {(1, 4): "plain", (2, 2): BOTH, (3, 1): BOTH}
PAIRS = [
    (family, list(LAYOUTS)[(number + turn) % 3])
    for turn in range(3)
    for number, family in enumerate(CROWDS)
]


@pytest.mark.parametrize(("family", "sizes"), by_turns(PAIRS, 14))
def test_all_tokens_on_one_expert(family, sizes, run_mesh, tmp_path):
    crowd = CROWDS[family]
    layouts = [(LAYOUTS[sizes], "fp32")]
    figures = check_case(
        crowd.base, (family, crowd.case()), tmp_path, run_mesh, [sizes], layouts, converts=False
    )
    assert not figures.problems, "\n".join(figures.problems)


BODIES = {
    "mixtral": "MixtralModel", "qwen2_moe": "Qwen2MoeModel", "qwen3_moe": "Qwen3MoeModel", "olmoe": "OlmoeModel",
    "gpt_oss": "GptOssModel", "glm4_moe": "Glm4MoeModel", "deepseek_v3": "DeepseekV3Model",
    "switch_transformers": "SwitchTransformersModel", "nllb-moe": "NllbMoeModel",
}  # fmt: skip


@pytest.mark.parametrize(("family", "sizes"), by_turns(PAIRS, 14))
def test_one_token(family, sizes, run_mesh, tmp_path):
    """On each rank along the expert axis; not under sequence parallelism, which would divide it."""
    name = BODIES[family]
    case = replace(ROWS[name][1], padding=("",), shape=(1, 1))
    layouts = [("recompute", "fp32"), ("plain", "bf16")]
    figures = check_case(name, (family, case), tmp_path, run_mesh, [sizes], layouts, converts=False)
    assert not figures.problems, "\n".join(figures.problems)


def test_no_family_is_left_out():
    from shardzoo.models import FAMILIES, family
    from shardzoo.models.config import ModelConfig

    def has_experts(name: str) -> bool:
        config = family(name).config
        return getattr(config, "expert_count", None) is not ModelConfig.expert_count

    assert set(CROWDS) == set(BODIES) == {name for name in FAMILIES if has_experts(name)}
