#!/usr/bin/env bash
# Everything that needs a GPU, in one command: builds the kernels, tests every variant against fp64, measures the
# kernels at sizes well beyond the L2 cache, then training steps against transformers.
#
#   benchmarks/gpu.sh [output folder]        default: benchmarks/results/gpu
#
# Writes report.json and report.txt there. A part that fails is reported and does not stop the others; the whole
# takes less than 10 minutes. The exit status is the number of parts that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-benchmarks/results/gpu}" && cd "${1:-benchmarks/results/gpu}" && pwd)
python=${PYTHON:-python}
failed=()

part() { # part <name> <seconds> <command...>
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  echo "== $name"
  if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
    echo "   passed in $((SECONDS - start)) s"
  else
    echo "   FAILED ($?) after $((SECONDS - start)) s: $out/$name.log"
    failed+=("$name")
  fi
}

export SHARDZOO_CUDA=1 SHARDZOO_BUILD=required
part build 150 "$python" setup.py build_ext --inplace
part doctor 30 "$python" -m shardzoo.cli.main doctor
part tests 90 "$python" -m pytest -q tests/ops/test_gpu.py
part kernels_cuda 120 env SHARDZOO_KERNELS=cuda "$python" -m shardzoo.cli.main bench kernels --device cuda \
  --json "$out/kernels_cuda.json" --plot "$out/kernels_cuda.png"
part kernels_triton 60 env SHARDZOO_KERNELS=triton "$python" -m shardzoo.cli.main bench kernels --device cuda \
  --no-compile --repetitions 7 --json "$out/kernels_triton.json"
part training 120 "$python" benchmarks/train_step.py --families gpt2 t5 --dtypes bfloat16 --rounds 5 \
  --json "$out/training.json"

"$python" - "$out" "${failed[@]:-}" <<'PYTHON'
import json
import sys
from pathlib import Path

out, failed = Path(sys.argv[1]), [name for name in sys.argv[2:] if name]
parts = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if path.stem != "report"}
(out / "report.json").write_text(json.dumps({"failed": failed, **parts}, indent=1) + "\n")
logs = [f"{path.stem}\n{'=' * len(path.stem)}\n{path.read_text()}" for path in sorted(out.glob("*.log"))]
(out / "report.txt").write_text(f"failed: {', '.join(failed) or 'nothing'}\n\n" + "\n".join(logs))
PYTHON
echo "report: $out/report.txt"
exit ${#failed[@]}
