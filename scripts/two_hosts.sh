#!/usr/bin/env bash
# Two network namespaces as two hosts: a run on both, and what it says when the link between them is cut.
# Needs root, iproute2 and an environment with vramfit. Usage: scripts/two_hosts.sh [run|cut] [ddp|fsdp]
set -euo pipefail
what=${1:-run} parallel=${2:-ddp}
python=${PYTHON:-python}
folder=$(mktemp -d)
a="vf$$a" b="vf$$b"
tidy() { ip netns del "$a" 2>/dev/null || true; ip netns del "$b" 2>/dev/null || true; rm -rf "$folder"; }
trap tidy EXIT

ip netns add "$a"; ip netns add "$b"
ip link add "$a" type veth peer name "$b"
ip link set "$a" netns "$a"; ip link set "$b" netns "$b"
for side in "$a 10.77.0.1" "$b 10.77.0.2"; do
  set -- $side
  ip -n "$1" addr add "$2/24" dev "$1"; ip -n "$1" link set "$1" up; ip -n "$1" link set lo up
done

cd "$(dirname "$0")/.."
"$python" -c "
from pathlib import Path
from tests.unit.runtime.training.small_runs import write_classes, write_model
write_model(Path('$folder/source')); write_classes(Path('$folder/train.csv'), num_rows=64)" 2>/dev/null

steps=$([ "$what" = cut ] && echo 100000 || echo 8)
host() {  # namespace, node rank
  ip netns exec "$1" env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="$1" TP_SOCKET_IFNAME="$1" \
    "$python" -m torch.distributed.run --nnodes 2 --node-rank "$2" --nproc-per-node 1 \
    --master-addr 10.77.0.1 --master-port 29555 \
    -m vramfit train "$folder/train.csv" --model "$folder/source" --output "$folder/out" \
    --device cpu --parallel "$parallel" --batch 8 --max-steps "$steps" --save-every 1000000 > "$folder/host$2.log" 2>&1
}
host "$a" 0 & first=$!
host "$b" 1 & second=$!
if [ "$what" = cut ]; then
  for _ in $(seq 120); do grep -q "^step " "$folder/host0.log" 2>/dev/null && break; sleep 1; done
  sleep 2
  echo "cutting the link"; start=$(date +%s)
  ip -n "$a" link set "$a" down
fi
code=0
wait "$first" || code=$?
wait "$second" || code=$?
[ "$what" = cut ] && echo "both have ended, $(($(date +%s) - start)) s after the cut"
for n in 0 1; do
  echo "== host $n"; grep -E "^(Error|Training|step|Saved|  →)|has stopped|is lost" "$folder/host$n.log" || tail -3 "$folder/host$n.log"
done
[ "$what" = cut ] || exit "$code"
