#!/usr/bin/env bash
# A target of 115 M parameters, its drafters and their table: trained and measured on one GPU within ten minutes.
# Figures go to $OUT, or to assets/benchmarks; each record names the device. SIZE, TARGET, HEAD and SAMPLES are
# for a rehearsal on a CPU:
#   SIZE=tiny TARGET="--steps 2" HEAD="--steps 2" SAMPLES=1 OUT=/tmp/rehearsal bash benchmarks/gpu_drafters.sh
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-assets/benchmarks}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
export PYTHONPATH=. HF_HUB_OFFLINE=1
size=${SIZE:-large} target=${TARGET:---minutes 4} head=${HEAD:---minutes 0.6} samples=${SAMPLES:-20}
tower=(--tower-from assets/scenes-llava)
if [ "$size" = tiny ]; then tower=(); fi

# target and head hold an option and its value
# shellcheck disable=SC2086
python3 -m mmspec train vlm --size "$size" "${tower[@]}" --out "$work/target" $target
for method in eagle eagle3 flash:block=10:own_guesses=0.3 medusa hydra; do
    # shellcheck disable=SC2086
    python3 -m mmspec train drafter --target "$work/target" --method "$method" --out "$work/${method%%:*}" $head
done
accelerators=none,copy
for name in eagle eagle3 flash medusa hydra; do accelerators+=",$name:drafter=$work/$name"; done
python3 -m mmspec evaluate drafters "$work/target" --accelerators "$accelerators" --samples "$samples" \
    --out "$out/drafters-$size-$(python3 -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")').json"
