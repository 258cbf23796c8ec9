#!/usr/bin/env bash
# Everything to run on a machine with a GPU, within ten minutes: the GPU tests, identity in float32 and
# bfloat16, the benches of words and of pictures, and the table of drafters. Figures go to $OUT, or to
# assets/benchmarks; each record names the device. A larger target and its drafters: gpu_drafters.sh.
#   bash benchmarks/gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-assets/benchmarks}
mkdir -p "$out"
export PYTHONPATH=. HF_HUB_OFFLINE=1

python3 -m pytest -q -m gpu
failed=
for dtype in float32 bfloat16; do
    python3 -m mmspec check assets/scenes-llava --accelerator flash --device cuda --dtype "$dtype" \
        --samples 50 --task describe --json > "$out/check-$dtype-gpu.json" || failed="$failed $dtype"
done
python3 -m mmspec check assets/scenes-llamagen --accelerator sjd:coupling=exact --device cuda --dtype float32 \
    --samples 20 --json > "$out/check-pictures-gpu.json" || failed="$failed pictures"
python3 -m mmspec bench assets/scenes-llamagen --accelerators none,sjd,sjd:coupling=exact,gsd,lantern,eagle \
    --samples 10 --repeats 3 --device cuda --json > "$out/bench-generate-gpu.json"
for task in caption describe; do
    python3 -m mmspec bench assets/scenes-llava --accelerators none,copy,draft_model,eagle,flash --task "$task" \
        --samples 50 --repeats 5 --device cuda --json > "$out/bench-$task-gpu.json"
done
python3 -m mmspec evaluate drafters assets/scenes-llava --samples 8 --device cuda --out "$out/drafters-gpu.json"
if [ -n "$failed" ]; then  # after the bench, so that its figures are there either way
    echo "mmspec check failed in$failed" >&2
    exit 1
fi
