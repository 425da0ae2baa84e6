#!/usr/bin/env bash
# Gathers the packages that benchmarks/gpu.sh needs beside a bare image's, on a machine with a package index:
#
#   benchmarks/gpu_wheels.sh FOLDER [PYTHON VERSION] [ARCHITECTURE]        default: 3.12 x86_64
#
# Copy FOLDER to the machine with the GPU, and run benchmarks/gpu.sh there with WHEELS=FOLDER. What is not there in the
# same version is installed to a folder that is removed afterwards. RIVALS="liger-kernel" adds the kernels of others to
# the measurements. This machine's Python (PYTHON) needs pip, setuptools and torch, with which DeepSpeed's wheel is made.
set -euo pipefail
folder=${1:?usage: benchmarks/gpu_wheels.sh FOLDER [PYTHON VERSION] [ARCHITECTURE]}
version=${2:-3.12}
machine=${3:-x86_64}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || command -v python)}
pip=("$python" -m pip --disable-pip-version-check --quiet)
target=(--dest "$folder" --only-binary=:all: --implementation cp --python-version "$version")
for platform in manylinux_2_28 manylinux_2_17 manylinux2014; do
  target+=(--platform "${platform}_$machine")
done
mapfile -t names < <("$python" benchmarks/gpu/packages.py --names)
read -ra rivals <<<"${RIVALS:-}"
# Versions are those that the tests run with, and what they depend on.
"${pip[@]}" download "${target[@]}" -c constraints.txt "${names[@]}"
# These depend on torch, which the image has. DeepSpeed is published as source; nothing of it is compiled, so its wheel
# fits every platform.
DS_BUILD_OPS=0 "${pip[@]}" wheel --no-deps --no-build-isolation -c constraints.txt --wheel-dir "$folder" deepspeed
for rival in "${rivals[@]}"; do
  "${pip[@]}" download "${target[@]}" --no-deps "$rival"
done
du -sh "$folder"
