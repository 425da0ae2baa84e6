#!/usr/bin/env bash
# Gathers the packages that benchmarks/gpu.sh needs beside a bare image's, on a machine with a package index:
#
#   benchmarks/gpu_wheels.sh FOLDER [PYTHON VERSION] [PLATFORM]        default: 3.12 manylinux_2_28_x86_64
#
# Copy FOLDER to the machine with the GPU, and run benchmarks/gpu.sh there with WHEELS=FOLDER. Only what is missing
# there is installed from it, to a folder that is removed afterwards. RIVALS="liger-kernel quack-kernels" adds the
# kernels of others to the measurements.
set -euo pipefail
folder=${1:?usage: benchmarks/gpu_wheels.sh FOLDER [PYTHON VERSION] [PLATFORM]}
version=${2:-3.12}
platform=${3:-manylinux_2_28_x86_64}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3 || command -v python)}
read -ra rivals <<<"${RIVALS:-}"
mapfile -t names < <("$python" benchmarks/gpu/packages.py --names "${rivals[@]}")
# Versions are those that the tests run with. Dependencies are named, so that none brings a second torch along.
fetch=("$python" -m pip --disable-pip-version-check)
target=(--python-version "$version" --implementation cp --platform "$platform" --platform "${platform/_2_28_/_2_17_}" --platform "${platform/_2_28_/2014_}")
for name in "${names[@]}"; do
  if ! "${fetch[@]}" download --quiet --no-deps --only-binary=:all: "${target[@]}" -c constraints.txt \
    --dest "$folder" "$name" 2>"$folder/.error"; then
    # A package without a wheel, such as DeepSpeed. Nothing of it is compiled, so its wheel fits every platform.
    DS_BUILD_OPS=0 "${fetch[@]}" wheel --quiet --no-deps --no-build-isolation -c constraints.txt \
      --wheel-dir "$folder" "$name" || { cat "$folder/.error" >&2; exit 1; }
  fi
done
rm -f "$folder/.error"
du -sh "$folder"
