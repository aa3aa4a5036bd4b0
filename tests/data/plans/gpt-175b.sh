#!/bin/bash
#SBATCH --job-name=gpt-175b
#SBATCH --nodes=128
#SBATCH --ntasks-per-node=1

# 175 billion parameters on 1,024 GPUs: tensor 8, pipeline 16, data 8
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-128}
WORLD_SIZE=$((GPUS_PER_NODE * NNODES))
TP=8
PP=16
LAYERS=96
CHECKPOINTS=$1
DATE=$(date +%F)

DISTRIBUTED=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes "$NNODES"
    --rdzv_backend c10d
    --master_addr ${MASTER_ADDR:-localhost}
)

MODEL=(
    --num-layers $LAYERS
    --hidden-size 12288          # 96 heads of 128
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-dropout 0.0
    --hidden-dropout 0.0
)

PARALLEL="
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size ${PP} \
    --num-layers-per-virtual-pipeline-stage $((LAYERS / PP / 3))
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
"

TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --bf16
    --recompute-activations
    --cross-entropy-loss-fusion
    --tokenizer-type GPT2BPETokenizer
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
    --data-path "$CHECKPOINTS/data set"
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
    --train-iters 500000 --clip-grad 1.0
)
TRAINING+=( --log-interval 10 --save "$CHECKPOINTS/$DATE" --save-interval 1000 )

srun torchrun "${DISTRIBUTED[@]}" pretrain_gpt.py \
    "${MODEL[@]}" \
    $PARALLEL \
    "${TRAINING[@]}" 2>&1 | tee "log-$DATE.txt"
