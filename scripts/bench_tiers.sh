#!/usr/bin/env bash
# Builds the patched engine for Hopper and measures KV in two tiers on a machine with an NVIDIA GPU and no network.
#   scripts/bench_tiers.sh pack             here: writes .gpu/ (engine sources, binding, generator; 6 MB), to be carried there
#   scripts/bench_tiers.sh build            there: 4 to 5 minutes on 16 cores, into /tmp/tiers
#   scripts/bench_tiers.sh measure [STAGE...]  there: JSON lines to stdout and to $OUT/tiers.jsonl; 4 minutes for "prompt f16 border q8_0
#                                           overlap", 7 for all stages
# Both steps in one command: scripts/bench_tiers.sh build && scripts/bench_tiers.sh measure
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=${HGGUF_GPU_WORK:-/tmp/tiers}
out=${OUT:-$work}

pack() { # ENGINE_SOURCES BINDING_FOLDER
  local engine=${1:?patched engine sources} binding=${2:?folder llama_cpp of the binding} tmp
  tmp=$(mktemp -d)
  mkdir -p "$root/.gpu" "$tmp/llama.cpp" "$tmp/binding/llama_cpp"
  tar -C "$engine" --exclude=.git --exclude='./build*' --exclude=./docs --exclude=./models --exclude=./media --exclude=./benches \
    --exclude=./examples --exclude=./pocs --exclude=./app --exclude=./ci --exclude=./conversion --exclude=./skills --exclude=./tests \
    --exclude=./tools --exclude=ggml-opencl --exclude=ggml-vulkan --exclude=ggml-sycl --exclude=ggml-hexagon --exclude=ggml-metal \
    --exclude=ggml-et --exclude=ggml-webgpu --exclude=ggml-openvino --exclude=ggml-cann --exclude=ggml-zdnn -cf - . | tar -C "$tmp/llama.cpp" -xf -
  cp "$binding"/llama_cpp.py "$binding"/_ctypes_extensions.py "$binding"/_ggml.py "$tmp/binding/llama_cpp/"
  # the package itself imports what that machine does not have; the module with the declarations needs none of it
  printf '__version__ = "0.3.36"\n' > "$tmp/binding/llama_cpp/__init__.py"
  tar -C "$tmp" -czf "$root/.gpu/engine.tgz" llama.cpp binding
  rm -rf "$tmp"
  ls -l "$root/.gpu/engine.tgz"
}

build() {
  mkdir -p "$work" && tar -C "$work" -xzf "$root/.gpu/engine.tgz"
  cmake -S "$work/llama.cpp" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON \
    -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90 -DCMAKE_SHARED_LINKER_FLAGS=-Wl,--exclude-libs,ALL "-DGGML_CUDA_FA_QUANTS=f16-f16;q8_0-q8_0" \
    -DHG_COMMIT=0c1e57098 -DHG_PATCHES=bench -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_APP=OFF > "$work/configure.log"
  cmake --build "$work/build" -j "$(nproc)" --target llama ggml-cuda ggml-cpu > "$work/build.log" 2>&1 || { tail -40 "$work/build.log"; exit 1; }
  PYTHONPATH="$work/llama.cpp/gguf-py" python3 "$root/scripts/synthetic_gguf.py" "$work/s8b.gguf" 32 4096 14336 32 8 128256
}

measure() {
  export HGGUF_ENGINE="$work/build/bin" LLAMA_CPP_LIB_PATH="$work/build/bin" LD_LIBRARY_PATH="$work/build/bin:${LD_LIBRARY_PATH:-}"
  export PYTHONPATH="$work/binding:$root" PYTHONUNBUFFERED=1
  python3 "$root/scripts/bench_tiers.py" "$work/s8b.gguf" "$@" | tee "$out/tiers.jsonl"
}

verb=${1:?pack, build or measure}
shift
"$verb" "$@"
