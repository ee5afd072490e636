#!/usr/bin/env bash
# The published checkpoint, from nothing, in three stages: each writes new conversations and goes on from the checkpoint before.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 TARGET.gguf OUTPUT [--tokenizer FILE] [further settings for every stage]" >&2
    exit 2
fi
target=$1 output=$2
shift 2
script=$(dirname "$0")/train_smollm2.py

# Later stages stay nearer to what people ask: likelier prompts, answers of the length that is served, fewer turns.
later=(--user-temperature 0.8 --answer-max 320 --next-turn 0.15 --long-share 0.05 --batch-rows 12)

python3 "$script" --target "$target" --output "$output/stage1" "$@"
python3 "$script" --target "$target" --output "$output/stage2" --start-from "$output/stage1/checkpoint" "${later[@]}" \
    --seed 21 --tokens 20000000 --lr 8e-4 --steps 9000 --stop-at 5700 "$@"
python3 "$script" --target "$target" --output "$output/stage3" --start-from "$output/stage2/checkpoint" "${later[@]}" \
    --seed 22 --tokens 26000000 --lr 7e-4 --steps 8000 --stop-at 8000 "$@"
echo "the checkpoint: $output/stage3/checkpoint"
