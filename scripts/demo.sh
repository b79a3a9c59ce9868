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
