#!/bin/bash
# Starts its training as the examples of Megatron-LM do: torchrun, with arguments made of variables.
set -e
DISTRIBUTED_ARGS=(
    --nproc_per_node "${NPROC_PER_NODE:-1}"
    --nnodes "${NNODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)
torchrun "${DISTRIBUTED_ARGS[@]}" "$(dirname "$0")/ranks.py" "$@"
