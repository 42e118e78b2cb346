#!/usr/bin/env bash
# What one GPU has to show, in about ten minutes: bash benchmarks/gpu_check.sh [OUT]
# bfloat16, ZeRO-3 and an env runner with vLLM (weights by the store, by IPC; asleep in the update), then with the module itself, on one GPU with a randomly initialised Llama of 1.2
# thousand million parameters: seconds of an iteration and of a weight sync, tokens a second, peak memory. Before that searches
# over a million vectors of 384, Flat, IVF and IVF-PQ, as `gpu: true` and `gpu: half` do them, against the CPU's,
# and rows that branch by SDPA and by FlexAttention.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-gpu_check}"
mkdir -p "$out"
nvidia-smi --query-gpu=name,memory.total --format=csv | tee "$out/gpu.csv"
python benchmarks/gpu_check.py --out "$out" 2>&1 | tee "$out/log.txt"
