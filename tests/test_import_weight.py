"""What an import of each public package brings into every process, rank and command."""

from __future__ import annotations

import json
import subprocess
import sys

COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "triton"}
LIBRARIES = {"transformers", "deepspeed", "datasets", "peft", "torch.distributed.tensor"}
UNWANTED = COMPILERS | LIBRARIES

# In this order in one process: what one of them brings, the next ones have.
IMPORTS = {
    "import shardzoo": UNWANTED | {"torch", "numpy"},
    "import shardzoo.cli.main": UNWANTED | {"torch", "numpy"},
    "import shardzoo.ops": UNWANTED,
    "from shardzoo.mpu import ParallelMesh": UNWANTED,
    "from shardzoo.models import T5ForConditionalGeneration, from_pretrained": UNWANTED,
    "from shardzoo.convert import split": UNWANTED,
    "from shardzoo.trainer import Trainer": UNWANTED,
    "from shardzoo.finetuning import Trainer": UNWANTED,
}
IMPORTER = """
import json, sys
imports = json.loads(sys.argv[1])
brought = {}
for statement, unwanted in imports.items():
    exec(statement)
    brought[statement] = sorted(set(unwanted) & set(sys.modules))
print(json.dumps(brought))
"""


def test_an_import_brings_no_compiler_and_no_library_that_few_calls_use():
    imports = {statement: sorted(unwanted) for statement, unwanted in IMPORTS.items()}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTER, json.dumps(imports)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {statement: [] for statement in IMPORTS}
