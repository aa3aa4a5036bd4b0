#!/bin/bash
# Llama 3 8B with Megatron-LM on two nodes of eight GPUs
GPUS_PER_NODE=8
NNODES=2
MODEL="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --padded-vocab-size 128256
  --attention-dropout 0 --hidden-dropout 0"
torchrun --nproc-per-node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py $MODEL \
  --tensor-model-parallel-size 2 --sequence-parallel \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --micro-batch-size 1 --global-batch-size 128 --bf16 --cross-entropy-loss-fusion
