#!/bin/bash
# As the examples of Megatron-LM start it, but for the lines that set MASTER_ADDR and the like: slurmtrain sets those.
set -e
DISTRIBUTED_ARGS=(
    --nproc_per_node "$NPROC_PER_NODE"
    --nnodes "$NNODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)
GPT_ARGS=(
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 64
    --global-batch-size 32
    --lr 0.003
    --exit-signal-handler
)
exec torchrun "${DISTRIBUTED_ARGS[@]}" "$(dirname "$0")/pretrain_gpt.py" "${GPT_ARGS[@]}" "$@"
