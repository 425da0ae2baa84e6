#!/bin/bash
# Runs a command of training, or goes on with its run if that has a checkpoint:
#     bash examples/cluster/resume.sh RUN COMMAND…
# A scheduler starts the same line again after a failure. Before the first checkpoint, the run begins anew.
set -euo pipefail
run=$1
shift
if compgen -G "$run/checkpoints/step-*" > /dev/null; then
    exec "$@" --output-dir "$run" --resume
fi
exec "$@" --output-dir "$run" --overwrite
