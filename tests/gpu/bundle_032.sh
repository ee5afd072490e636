#!/usr/bin/env bash
# Packs vLLM 0.32.0, the oldest release that takes a DSpark drafter in a pipeline, into .gpu/c and .gpu/d of the repository,
# each under 64 MiB and ignored by git. Its compiled parts use torch's stable interface, so they load under the GPU machine's
# torch 2.11.0 although the wheel asks for 2.13.0; without torch.compile (mode 0) its Python does, too.
#     bash tests/gpu/bundle_032.sh [FOLDER-OF-THE-WHEEL]
# There, in one call each, after the calls for .gpu/a and .gpu/b, whose small dependencies it shares:
#     bash .gpu/c/unpack.sh          source .gpu/d/unpack.sh; python3 tests/gpu/pp_stress.py
set -euo pipefail
root=$(git rev-parse --show-toplevel); out=$root/.gpu; tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
grep -qx '/.gpu/' "$root/.git/info/exclude" 2>/dev/null || echo '/.gpu/' >> "$root/.git/info/exclude"
rm -rf "$out/c" "$out/d"; mkdir -p "$out/c" "$out/d" "$tmp/x"

wheels=${1:-$tmp}
[ $# -gt 0 ] || python3 -m pip download -q --no-deps -d "$wheels" --python-version 3.12 --only-binary=:all: --platform manylinux_2_28_x86_64 vllm==0.32.0
(cd "$tmp/x" && python3 -m zipfile -e "$wheels"/vllm-0.32.0*.whl .)

# What a dense bf16 model needs: general kernels, FlashAttention 3.
xz -T2 -3 -c "$tmp/x/vllm/_C_stable_libtorch.abi3.so" > "$out/c/C.so.xz"
xz -T2 -3 -c "$tmp/x/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so" > "$out/d/fa3.so.xz"
tar -C "$tmp/x" --exclude='vllm/third_party/fmha_sm100' --exclude='vllm/third_party/deep_gemm' --exclude='vllm/vllm-rs' \
  --exclude='*_C_stable_libtorch.abi3.so' --exclude='_vllm_fa?_C.abi3.so' --exclude='_flash*_C.abi3.so' --exclude='_qutlass_C.abi3.so' \
  -cf - vllm vllm-0.32.0.dist-info | xz -T2 -6 > "$out/d/vllm.tar.xz"

cat > "$out/c/unpack.sh" <<'U'
set -e; here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p /opt/vllm032/vllm && xz -dc "$here/C.so.xz" > /opt/vllm032/vllm/_C_stable_libtorch.abi3.so
U
cat > "$out/d/unpack.sh" <<'U'
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ ! -d /opt/vllm032/vllm/v1 ]; then
  tar -C /opt/vllm032 -xJf "$here/vllm.tar.xz" && xz -dc "$here/fa3.so.xz" > /opt/vllm032/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so
fi
export PYTHONPATH=/opt/vllm032:/opt/site VLLM_USE_V2_MODEL_RUNNER=1 VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
U
du -sb "$out/c" "$out/d"
