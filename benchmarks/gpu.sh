#!/usr/bin/env bash
# What a GPU alone can show (docs/gpu.md): the most in one call of under eight minutes, and what failed in three more;
# or everything in two calls of under nine minutes each.
#
#   benchmarks/gpu.sh first      [--output FOLDER] [--parts NAME ...]
#   benchmarks/gpu.sh repair     [--output FOLDER] [--parts NAME ...]
#   benchmarks/gpu.sh prove      [--output FOLDER] [--parts NAME ...]
#   benchmarks/gpu.sh measure    [--output FOLDER] [--parts NAME ...]
#
# Runs from a checkout, which need not be installed, without a network. WHEELS=<folder> has the packages that are
# missing (benchmarks/gpu_wheels.sh gathers them); PYTHON=<command> chooses the interpreter. --dry-run does the same on a
# CPU in tiny sizes.
set -euo pipefail
export PYTHON="${PYTHON:-$(command -v python3 || command -v python)}"
exec "$PYTHON" "$(dirname "$0")/gpu/run.py" "$@"
