#!/bin/sh
# One epoch of a trainer cell; whoever runs the container starts the next. Further arguments are options of the cell.
set -eu
base_model=$(python -m trainer_cell.training.prepare_base "$BASE_MODEL" --cache "$CACHE")
exec torchrun --nnodes 1 --nproc-per-node "$RANKS" --max-restarts 0 --local-addr 127.0.0.1 \
    --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 \
    -m trainer_cell --base-model "$base_model" "$@"
