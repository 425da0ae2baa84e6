"""What an import of each public package brings into every process, rank and command."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "triton"}
LIBRARIES = {"transformers", "deepspeed", "datasets", "peft", "torch.distributed.tensor"}

IMPORTS = {
    "import shardzoo": {"torch", "numpy"},
    "import shardzoo.cli.main": {"torch", "numpy"},
    "import shardzoo.ops": set(),
    "from shardzoo.mpu import ParallelMesh": set(),
    "from shardzoo.convert import split": set(),
    "from shardzoo.models import T5ForConditionalGeneration, from_pretrained": set(),
    "from shardzoo.trainer import Trainer": set(),
    "from shardzoo.finetuning import Trainer": set(),
}


@pytest.mark.parametrize("statement", IMPORTS)
def test_an_import_brings_no_compiler_and_no_library_that_few_calls_use(statement):
    unwanted = COMPILERS | LIBRARIES | IMPORTS[statement]
    code = f"import sys\n{statement}\nprint(*sorted(set(sys.modules) & set({sorted(unwanted)})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
