#!/usr/bin/env bash
# What one GPU has to show: bash benchmarks/gpu_check.sh [OUT]
# bfloat16, ZeRO-3 and an env runner with vLLM (weights by the store, by IPC; asleep in the update; two policies with an
# engine each, both asleep, by both ways; against its own past), then with the module itself, on one GPU with a randomly
# initialised Llama of 1.2 thousand million parameters: seconds of an iteration and of a weight sync, tokens a second,
# peak memory. Every way ends with the probe: sync_logprob_diff must be below 0.1. Before that searches
# over a million vectors of 384, Flat, IVF and IVF-PQ, as `gpu: true` and `gpu: half` do them, against the CPU's,
# and rows that branch by SDPA and by FlexAttention.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-gpu_check}"
mkdir -p "$out"
nvidia-smi --query-gpu=name,memory.total --format=csv | tee "$out/gpu.csv"
python benchmarks/gpu_check.py --out "$out" 2>&1 | tee "$out/log.txt"
