#!/usr/bin/env bash
# Compares plans with stock llama.cpp's fit under budgets of device memory, on a machine with an NVIDIA GPU, no network.
#   scripts/bench_plan_gpu.sh pack SOURCES BINDING STOCK   here: writes .gpu/ (sources, binding; STOCK: folder of stock-sm90.txz.*)
#   scripts/bench_plan_gpu.sh build                        there: 4 to 5 minutes on 16 cores
#   scripts/bench_plan_gpu.sh measure [STAGE ...]          there: 8 minutes in all; JSON lines to $OUT/plan_gpu.jsonl
# Stages: profile dense8 experts30 dense32 report. Each can be a call of its own while the machine is held.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export HGGUF_GPU_WORK=${HGGUF_GPU_WORK:-/tmp/tiers}
work=$HGGUF_GPU_WORK

verb=${1:?pack, build or measure}
shift
case $verb in
  pack)
    "$root/scripts/bench_tiers.sh" pack "$1" "$2"
    cat "$3"/stock-sm90.txz.* > "$root/.gpu/stock.txz"
    ls -l "$root/.gpu"
    ;;
  build)
    "$root/scripts/bench_tiers.sh" build
    mkdir -p "$work/stock"
    tar -C "$work/stock" -xJf "$root/.gpu/stock.txz"
    ;;
  measure)
    export PYTHONPATH="$work/binding:$root:$work/llama.cpp/gguf-py" PYTHONUNBUFFERED=1
    export LD_LIBRARY_PATH="$work/build/bin:${LD_LIBRARY_PATH:-}"
    python3 "$root/scripts/bench_plan_gpu.py" "$work" "$@" || { echo "stopped early: the lines so far are kept" >&2; }
    cp "$work/plan_gpu.jsonl" "${OUT:-$work}/plan_gpu.jsonl" 2> /dev/null || true
    ;;
  *) echo "error: unknown verb $verb" >&2; exit 2 ;;
esac
