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
