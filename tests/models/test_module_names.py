"""The names in transformers' modules, which `torch.distributed.checkpoint` and DeepSpeed look for."""

from __future__ import annotations

import re

import pytest
import torch
from every_case import by_turns
from matrix import architecture_of, find_class, load_rows

from shardzoo.models.auto import config_from_dict
from shardzoo.models.mapping import NativeModel

ROWS = load_rows()
PROJECTIONS = {
    "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj",
}  # fmt: skip

# ESM's head that predicts contacts, and what T5Gemma 2 sees images with.
ABSENT = ("contact_head.", "vision_tower.", "multi_modal_projector.")
# What no training changes and files have: the corrections of routers, and ESM's frequencies.
STORED_BUFFERS = (".e_score_correction_bias", "rotary_embeddings.inv_freq")


def stack_experts(name: str) -> str:
    """The name in a module, which stacks what files have for each expert."""
    name = name.replace("block_sparse_moe", "mlp")
    found = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name)
    return name if found is None else f"{found[1]}.{PROJECTIONS[found[2]]}"


@pytest.mark.parametrize("name", by_turns(ROWS, 2))
def test_each_parameter_has_the_name_that_the_module_has(name):
    module_class = find_class(architecture_of(name))
    with torch.device("meta"):
        module = module_class(module_class.config_class(**ROWS[name][1].config))
        if ROWS[name][1].untied:
            module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.clone())
    config = {**module.config.to_dict(), "architectures": [module_class.__name__]}
    native = NativeModel.from_config(config_from_dict(config))
    first = {
        stored
        for stored_names in native.list_first_module_names().by_parameter.values()
        for stored in stored_names
    }
    first = {stack_experts(name) for name in first}
    # Tables of sines are computed and not stored.
    stored = {
        name
        for name, value in module.named_parameters()
        if value.requires_grad and not any(part in name for part in ABSENT)
    }
    stored |= {name for name, _ in module.named_buffers() if name.endswith(STORED_BUFFERS)}
    assert first == stored
    names = {
        stored
        for stored_names in native.list_module_names().by_parameter.values()
        for stored in stored_names
    }
    assert {stack_experts(name) for name in names} <= module.state_dict().keys()
