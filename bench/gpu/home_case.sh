#!/usr/bin/env bash
# The home case on all GPUs of this machine: one engine a GPU, each able to send and to receive KV, behind the proxy with
# its defaults. First a sustained run through that proxy (success, latencies, hit rate, predictions, memory, leaks), then
# routers head to head on the same engines. Needs vLLM and Mooncake >= 0.3.13 (CUDA) in ENGINE_PYTHON, and this project
# installed (make setup) or on PYTHONPATH. Finished runs are kept in OUTPUT; the same command makes those that are missing.
#
#   python -m bench.home_case cut TRACE long.jsonl --copies 4 --turns 28 --max-tokens 80000
#   python -m bench.home_case cut TRACE head.jsonl --copies 3 --turns 12 --max-tokens 80000
#   bench/gpu/home_case.sh OUTPUT long.jsonl head.jsonl [arguments of `bench.gpu.routers_ab run`, such as --load 0.6]
#   python -m bench.home_case table OUTPUT/sustained
#   python -m bench.gpu.routers_ab table OUTPUT/routers
#
# Environment: PYTHON (this project's, default .venv/bin/python), ENGINE_PYTHON (default the fleet file's), MODEL (default
# the fleet file's; a local folder works), DUMMY=1 (random weights: speeds and memory are real, texts are not), GPUS
# (default: all of nvidia-smi; 2, 4 and 8 have fleet files), SETTINGS (further KEY=VALUE of the fleet file, with spaces
# between; GPUs of 80 GB: vllm.gpu_memory_utilization=0.94 vllm.max_model_len=140000), ARRIVAL_SPEED (of the sustained
# run, 1), LIMIT_S (after which a replay is cut off, 300), HARDWARE (for the records), and BUDGET_S (1500: no run begins
# that is not expected to end by then).
#
# Rehearsal without GPUs, on simulated engines:  FLEET=sim-4x SPEED=10 bench/gpu/home_case.sh OUTPUT long.jsonl head.jsonl
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 3 ] || { sed -n '2,24p' "$0"; exit 2; }
output=$(mkdir -p "$1" && cd "$1" && pwd) long=$2 head=$3
shift 3
python=${PYTHON:-.venv/bin/python} speed=${SPEED:-1}
deadline=$((SECONDS + ${BUDGET_S:-1500}))
settings=()
if [ -z "${FLEET:-}" ]; then
  gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
  FLEET=elastic-${gpus}x-kv-both
  [ -e "configs/fleets/$FLEET.yaml" ] || { echo "no fleet file for $gpus GPUs; set GPUS to 2, 4 or 8"; exit 2; }
  hardware="$gpus x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)"
  settings+=(--set 'env.VLLM_SERVER_DEV_MODE="1"')   # POST /reset_prefix_cache, between the routers' runs
  [ -z "${ENGINE_PYTHON:-}" ] || settings+=(--set "vllm.python=$ENGINE_PYTHON")
  [ -z "${MODEL:-}" ] || settings+=(--set "model=$MODEL")
  [ -z "${DUMMY:-}" ] || settings+=(--set vllm.load_format=dummy)
else
  settings+=(--set "sim.time_scale=$speed")
fi
for setting in ${SETTINGS:-}; do
  settings+=(--set "$setting")
done
hardware=${HARDWARE:-${hardware:-simulated engines}}

rm -rf "$output/fleet"
trap '"$python" -m warmroute down --run-dir "$output/fleet" > /dev/null' EXIT
"$python" -m warmroute up "$FLEET" --detach --run-dir "$output/fleet" "${settings[@]}"
if [ ! -e "$output/sustained/sustained.json" ]; then
  "$python" -m bench.home_case run "$long" --run-dir "$output/fleet" -o "$output/sustained" --hardware "$hardware" \
    --arrival-speed "${ARRIVAL_SPEED:-1}" --limit-s "${LIMIT_S:-300}" --engine-speed "$speed"
fi
left=$((deadline - SECONDS))
[ "$left" -gt 0 ] || { echo "no time for the routers: run the same command again"; exit 1; }
"$python" -m bench.gpu.routers_ab run "$head" --config "$output/fleet/proxy.yaml" -o "$output/routers" \
  --hardware "$hardware" --budget-s "$left" --arm-limit-s "${LIMIT_S:-300}" --engine-speed "$speed" "$@"
