#!/usr/bin/env bash
# Attention and depth figures on a larger machine without a network: builds a CPU-only engine from a patched source tree and
# runs scripts/bench_attention with 1, 4 and all cores. Needs cmake, ninja or make, a C++ compiler, Python 3.11+ with numpy.
# usage: scripts/bench_attention_host.sh SOURCE OUT      SOURCE: patched engine sources; OUT: folder for the JSON files
set -euo pipefail
source=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cores=$(nproc)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
cmake -S "$source" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON \
    -DGGML_CCACHE=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF \
    -DHG_COMMIT=0c1e57098 -DHG_PATCHES=host >"$out/build.log"
cmake --build "$build" -j "$cores" --target llama ggml-cpu >>"$out/build.log"
export HGGUF_ENGINE="$build/bin" OPENBLAS_NUM_THREADS=1
lscpu >"$out/lscpu.txt"
for threads in 1 4 "$cores"; do
    types=f16,q8_0,q4_0 cells=2048,8192,32768
    [ "$threads" = "$cores" ] && types=f16,bf16,f32,q8_0,q4_0
    [ "$threads" = 1 ] && cells=8192
    timeout 100 python3 scripts/bench_attention --threads "$threads" --types "$types" --cells "$cells" --repeats 5 \
        --out "$out/attention-$threads-threads.json"
done
timeout 60 python3 scripts/bench_attention --threads "$cores" --types f16,q8_0 --cells 4096 --tokens 512 --repeats 3 \
    --out "$out/attention-$cores-threads-prompt.json"
