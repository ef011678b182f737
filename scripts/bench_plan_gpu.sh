#!/usr/bin/env bash
# Compares plans with stock llama.cpp's fit under budgets of device memory, on a machine with an NVIDIA GPU, no network.
#   scripts/bench_plan_gpu.sh pack SOURCES BINDING STOCK   here: writes .gpu/ (sources, binding; STOCK: folder of stock-sm90.txz.*)
#   scripts/bench_plan_gpu.sh unpack                       there: what of .gpu/ is there: engine.tgz libs.txz stock.txz whl/
#   scripts/bench_plan_gpu.sh build                        there, without libs.txz: 4 to 5 minutes on 16 cores
#   scripts/bench_plan_gpu.sh models NAME ...              there: writes models ahead (dense8 experts30 dense32: 20 s)
#   scripts/bench_plan_gpu.sh measure [STAGE ...]          there: 6 minutes in all; JSON lines to $OUT/plan_gpu.jsonl
# Stages: profile dense8 experts30 dense32 parts report. Each can be a call of its own while the machine is held.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# in memory where that is large enough: writing 40 GB to a disk disturbs what is measured next
memory=$(df -k --output=avail /dev/shm 2> /dev/null | tail -1 || echo 0)
[ "$memory" -gt 56000000 ] && work=/dev/shm/tiers || work=/tmp/tiers
export HGGUF_GPU_WORK=${HGGUF_GPU_WORK:-$work}
work=$HGGUF_GPU_WORK
export PYTHONPATH="$work/binding:$root:$work/llama.cpp/gguf-py:$work/site" PYTHONUNBUFFERED=1

verb=${1:?pack, unpack, build, models or measure}
shift
case $verb in
  pack)
    "$root/scripts/bench_tiers.sh" pack "$1" "$2"
    cat "$3"/stock-sm90.txz.* > "$root/.gpu/stock.txz"
    ls -l "$root/.gpu"
    ;;
  unpack)
    mkdir -p "$work/build" "$work/stock" "$work/site"
    [ ! -e "$root/.gpu/engine.tgz" ] || tar -C "$work" -xzf "$root/.gpu/engine.tgz"
    [ ! -e "$root/.gpu/libs.txz" ] || tar -C "$work/build" -xJf "$root/.gpu/libs.txz"
    [ ! -e "$root/.gpu/stock.txz" ] || tar -C "$work/stock" -xJf "$root/.gpu/stock.txz"
    [ ! -e "$root/.gpu/whl" ] || python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$root"/.gpu/whl/*.whl
    ;;
  build)
    "$root/scripts/bench_tiers.sh" build
    ;;
  models)
    mkdir -p "$work"
    for name in "$@"; do python3 "$root/scripts/bench_plan_models.py" "$work/$name.gguf" "$name"; done
    ;;
  measure)
    export LD_LIBRARY_PATH="$work/build/bin:${LD_LIBRARY_PATH:-}"
    python3 "$root/scripts/bench_plan_gpu.py" "$work" "$@" || echo "stopped early: the lines so far are kept" >&2
    ;;
  *) echo "error: unknown verb $verb" >&2; exit 2 ;;
esac
