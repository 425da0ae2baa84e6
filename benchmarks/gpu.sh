#!/usr/bin/env bash
# Everything that needs a GPU, in one command: builds the kernels, tests every variant against fp64, measures the
# kernels at sizes well beyond the L2 cache, then training steps against transformers.
#
#   benchmarks/gpu.sh [output folder]        default: benchmarks/results/gpu
#
# Runs from the checkout, which need not be installed. Python must have torch, triton, transformers, safetensors, pytest,
# hypothesis, cloudpickle, rich, matplotlib, tyro and setuptools; nothing is fetched. WHEELS=<folder> installs
# the wheels in it first, to a folder of their own. PYTHON=<command> chooses the interpreter. Without nvcc a library
# that is already in ops/ is used.
#
# Writes report.json and report.txt. A part that fails is reported and does not stop the others; their limits add up to
# less than 10 minutes. The exit status is the number of parts that failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
mkdir -p "${1:-benchmarks/results/gpu}" || exit 1
out=$(cd "${1:-benchmarks/results/gpu}" && pwd)
rm -f "$out"/*.json "$out"/*.log "$out"/*.txt # of an earlier run
python=${PYTHON:-$(command -v python3 || command -v python)}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$PWD" "$site/shardzoo" # the checkout is the package
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 # nothing is to be waited for where there is no network
unset SHARDZOO_KERNELS TRITON_INTERPRET
failed=()

part() { # part <name> <seconds> <command...>
  local name=$1 limit=$2 start=$SECONDS status
  shift 2
  echo "== $name"
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  if [ $status = 0 ]; then
    echo "   passed in $((SECONDS - start)) s"
  else
    echo "   FAILED ($status) after $((SECONDS - start)) s: $out/$name.log"
    tail -n 5 "$out/$name.log" | sed 's/^/   | /'
    failed+=("$name")
  fi
}

bench() { # bench <name> <seconds> <variant> <options...>
  local name=$1 limit=$2 variant=$3
  shift 3
  part "$name" "$limit" env SHARDZOO_KERNELS="$variant" "$python" -m shardzoo.cli.main bench kernels --device cuda \
    --json "$out/$name.json" "$@"
}

if [ -n "${WHEELS:-}" ]; then
  part wheels 30 "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$WHEELS"/*.whl
fi
nvcc=${NVCC:-$(command -v nvcc || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
if [ -n "$nvcc" ] || [ ! -f ops/_kernels.so ]; then
  part build 120 env SHARDZOO_CUDA=1 SHARDZOO_BUILD=required "$python" csrc/build.py
else
  echo "== build: there is no nvcc; ops/_kernels.so is used as it is"
fi
part doctor 20 "$python" -m shardzoo.cli.main doctor
workers=() # compiling Triton's kernels is most of the tests' time
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 8)
part tests 120 "$python" -m pytest -q -p no:cacheprovider "${workers[@]}" tests/ops/test_gpu.py
bench kernels_bf16 110 cuda --dtype bfloat16 --plot "$out/kernels_bf16.png"
bench kernels_fp32 50 cuda --dtype float32 --no-compile --repetitions 11
bench kernels_triton 50 triton --dtype bfloat16 --no-compile --repetitions 11
part training 90 "$python" benchmarks/train_step.py --device cuda --families gpt2 t5 --dtypes bfloat16 --batch-size 16 \
  --length 512 --rounds 5 --json "$out/training.json"

"$python" - "$out" "${failed[@]:-}" <<'PYTHON'
import json
import sys
from pathlib import Path

out, failed = Path(sys.argv[1]), [name for name in sys.argv[2:] if name]
parts = {}
for path in sorted(out.glob("*.json")):
    try:
        parts[path.stem] = json.loads(path.read_text())
    except ValueError as error:  # the part ended while writing
        parts[path.stem] = {"unreadable": str(error)}
(out / "report.json").write_text(json.dumps({"failed": failed, **parts}, indent=1) + "\n")
logs = [f"{path.stem}\n{'=' * len(path.stem)}\n{path.read_text(errors='replace')}" for path in sorted(out.glob("*.log"))]
(out / "report.txt").write_text(f"failed: {', '.join(failed) or 'nothing'}\n\n" + "\n".join(logs))
PYTHON
echo "report: $out/report.txt"
exit ${#failed[@]}
