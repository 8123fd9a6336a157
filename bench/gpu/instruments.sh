#!/usr/bin/env bash
# Run every instrument on two GPUs of this machine: interference, transfers over NVLink and TCP, idle and loaded, stage by
# stage, calibration, overhead of the connector and of its hooks, transfers of smaller blocks. Needs vLLM and
# Mooncake >= 0.3.13 (CUDA) in ENGINE_PYTHON, and this project installed (make setup) or on PYTHONPATH. Records, the
# profile and a log of all tables go to OUTPUT.
#
#   bench/gpu/instruments.sh OUTPUT
#   warmroute measure show OUTPUT/interference.json --figures FOLDER        # and of the other records
#
# Environment: PYTHON (this project's, default .venv/bin/python), ENGINE_PYTHON (default the fleet file's), MODEL (default
# the fleet file's; a local folder works), DUMMY=1 (random weights: speeds and memory are real, texts are not),
# ENGINE_ARGS (a YAML list of further vLLM arguments), SETTINGS (further KEY=VALUE of the fleet file, with spaces between;
# GPUs of 80 GB: vllm.gpu_memory_utilization=0.94 vllm.max_model_len=140000), STREAMS and PREFILLS (of the interference,
# comma-separated), HARDWARE (for the records), PROFILE (name of the profile, default h200-measured), REPEATS (default
# 2), STARTS (of each arm of the overhead, default 1; each takes an engine's start), WEAR (rounds of 65,536 tokens handed over
# before transfers are measured, default 12; after fewer more free memory lies together, so transfers have fewer pieces),
# SMALL_BLOCK (tokens, default 16: of the last fleet; the others have the fleet file's),
# HOOKS=0 (leave the connector's hooks out; else they are installed into the engines' Python and removed again; keep:
# installed and not removed), PARTS (default fast,overhead,tcp,blocks: each starts fleets of its own), and
# BUDGET_S (default 1500: steps that would begin later are left out, one that runs then is ended).
#
# Four GPUs: two parts on each pair, side by side, in half the time. The second pair has GPUs and ports of its own:
#   HOOKS=keep PARTS=fast bench/gpu/instruments.sh OUTPUT-1
#   HOOKS=keep PARTS=overhead,tcp,blocks bench/gpu/instruments.sh OUTPUT-2     # and in SETTINGS: devices=[2,3]
#     # base_port=8101 base_bootstrap_port=9098 base_events_port=6701 base_events_replay_port=6801 base_master_port=29600
#
# Rehearsal on the CPU, with small sizes (make engines):  SMALL=1 bench/gpu/instruments.sh OUTPUT
set -uo pipefail
cd "$(dirname "$0")/../.."
[ $# -eq 1 ] || { sed -n '2,/^set/{/^#/p}' "$0"; exit 2; }
parts=${PARTS:-fast,overhead,tcp,blocks}
for part in ${parts//,/ }; do
  case $part in fast | overhead | tcp | blocks) ;; *) echo "PARTS: fast, overhead, tcp and blocks, with commas between"; exit 2 ;; esac
done
output=$1
mkdir -p "$output"
output=$(cd "$output" && pwd)
warmroute=("${PYTHON:-.venv/bin/python}" -m warmroute)
deadline=$((SECONDS + ${BUDGET_S:-1500}))
settings=()
[ -z "${ENGINE_PYTHON:-}" ] || settings+=(--set "vllm.python=$ENGINE_PYTHON")
[ -z "${MODEL:-}" ] || settings+=(--set "model=$MODEL")
[ -z "${DUMMY:-}" ] || settings+=(--set vllm.load_format=dummy)
[ -z "${ENGINE_ARGS:-}" ] || settings+=(--set "vllm.extra_args=$ENGINE_ARGS")
for setting in ${SETTINGS:-}; do
  settings+=(--set "$setting")
done

if [ -n "${SMALL:-}" ]; then
  fleet=vllm-cpu-4x fast=tcp
  settings+=(--set count=2 --set base_port=18801 --set base_bootstrap_port=19801 --set base_events_port=17861
    --set base_events_replay_port=17961 --set base_master_port=19961)
  ids=(--token-low 10 --token-high 2000)
  streams=1,4 prefills=512,2048 context=64 sizes=512,2048 small=512 smallest=512 shared=512 at_once=1,2 loads=0,2 few=0,1 hint=cpu
  wear=512 wear_repeats=${WEAR:-1}
  calibration=(--largest-tokens 2048) overhead=(--prefill-tokens 512 --streams 1,4 --context-tokens 64)
  repeats=${REPEATS:-1} starts=${STARTS:-1}
  queue=65535                  # the most that Mooncake 0.3.13 accepts
else
  fleet=elastic-2x-kv-both fast=nvlink
  ids=()
  streams=${STREAMS:-1,4,8,16} prefills=${PREFILLS:-2048,8192,32768,65536,131072} context=1024
  sizes=2048,8192,32768,65536,131072 small=2048,8192 smallest=2048
  shared=16384 at_once=1,2,4,8 loads=0,4,12 few=0,4 hint="$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)"
  wear=8192 wear_repeats=${WEAR:-12}     # 8 at once
  calibration=() overhead=()
  repeats=${REPEATS:-2} starts=${STARTS:-1}
  queue=1000000                # 131,072 tokens of a worn pool are up to 786,528 pieces
fi
hardware=${HARDWARE:-$hint}
run_dir="$output/fleet"
running=
hooked=
failed=()
engine_python=${ENGINE_PYTHON:-$([ -n "${SMALL:-}" ] && echo .venv-engines/bin/python || echo python3)}

finish() {
  [ -z "$running" ] || "${warmroute[@]}" down --run-dir "$running" > /dev/null
  [ -z "$hooked" ] || [ "${HOOKS:-1}" = keep ] || "${warmroute[@]}" measure hooks revert --python "$engine_python" >> "$output/progress.log" 2>&1
}
trap finish EXIT

step() { # NAME COMMAND...: run it within the time that is left, its output on the terminal and in tables.txt
  local name=$1 left=$((deadline - SECONDS))
  shift
  if [ "$left" -lt 10 ]; then
    echo "== $name: left out, no time"
    failed+=("$name")
    return 0
  fi
  echo "== $name ($left s left)" | tee -a "$output/tables.txt"
  if ! timeout --signal=INT --kill-after=60 "$left" "$@" 2>> "$output/progress.log" | tee -a "$output/tables.txt"; then
    echo "== $name failed; see progress.log and fleet-*/"
    failed+=("$name")
  fi
}

use() { # NAME TRANSPORT SETTING...: the fleet that the next steps start and measure
  running="$run_dir-$1"
  local arguments=("${settings[@]}" --set "vllm.transfer.protocol=$2") setting
  shift 2
  for setting in "$@"; do
    arguments+=(--set "$setting")
  done
  stages=()
  if [ -n "$hooked" ]; then
    arguments+=(--set "env.WARMROUTE_TRANSFER_RECORDS=$running.jsonl")
    stages=(--hook-records "$running.jsonl")
  fi
  target=("$fleet" "${arguments[@]}" "${ids[@]}" --hardware "$hardware")
  step "start, $(basename "$running")" "${warmroute[@]}" up "$fleet" --no-proxy --detach --run-dir "$running" "${arguments[@]}"
}

measure() { # INSTRUMENT NAME OPTIONS...
  local instrument=$1 name=$2
  shift 2
  [ "$instrument" != transfer ] || set -- "${stages[@]}" "$@"
  step "$name" "${warmroute[@]}" measure "$instrument" "${target[@]}" --output "$output/$name.json" "$@"
}

down() {
  "${warmroute[@]}" down --run-dir "$running" > /dev/null
  running=
}

if [ "${HOOKS:-1}" != 0 ]; then
  if "${warmroute[@]}" measure hooks apply --python "$engine_python" >> "$output/progress.log" 2>&1; then
    hooked=1
  else
    echo "== no hooks: see progress.log"
    failed+=(hooks)
  fi
fi

# Blocks of a worn pool lie apart, so a transfer has more pieces: every pool is worn before transfers are measured.
fast_part() {
  use first "$fast"
  measure transfer "transfer-$fast-wear" --tokens "$wear" --concurrent 8 --repeats "$wear_repeats"
  measure interference interference --streams "$streams" --prefill-tokens "$prefills" --context-tokens "$context" \
    --repeats "$repeats"
  step calibrate "${warmroute[@]}" calibrate "${target[@]}" --name "${PROFILE:-h200-measured}" --force \
    --output "$output" "${calibration[@]}" --repeats "$repeats"
  measure transfer "transfer-$fast" --tokens "$sizes" --background "$loads" --background-tokens "$context" \
    --repeats "$repeats"
  measure transfer "transfer-$fast-shared" --tokens "$shared" --concurrent "$at_once" --repeats "$repeats"
  measure transfer "transfer-$fast-prefills" --tokens "$shared" --background "$few" \
    --background-kind prefill --background-tokens "$shared" --repeats "$repeats"
  down
}

overhead_part() {
  step overhead "${warmroute[@]}" measure overhead "$fleet" "${settings[@]}" "${ids[@]}" --hardware "$hardware" \
    --arms "none,idle,used${hooked:+,hooked}" --starts "$starts" --run-dir "$output/overhead-runs" \
    --output "$output/overhead.json" "${overhead[@]}"
}

# Over TCP a pull under load takes longer than the 30 s after which Mooncake gives up by default, and a large one has more
# pieces than its queue takes by default (docs/instruments-h100.md). Between busy engines one of 16,384 tokens takes minutes: there
# small ones are measured, once, and among prefills the smallest: 8,192 tokens may not end before the timeout.
tcp_part() {
  use tcp tcp 'env.MC_TRANSFER_TIMEOUT="110"' "env.MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=\"$queue\"" \
    vllm.transfer.abort_timeout_s=120
  if [ "$fast" != tcp ]; then
    measure transfer transfer-tcp-wear --tokens "$wear" --concurrent 8 --repeats "$wear_repeats"
    measure transfer transfer-tcp --tokens "$sizes" --repeats "$repeats"
  fi
  measure transfer transfer-tcp-shared --tokens "$shared" --concurrent "$at_once" --repeats "$repeats"
  measure transfer transfer-tcp-loaded --tokens "$small" --background "$loads" --background-tokens "$context" --repeats 1
  measure transfer transfer-tcp-prefills --tokens "$smallest" --background "$few" \
    --background-kind prefill --background-tokens "$shared" --repeats 1
  down
}

# The size of the blocks decides how large the pieces of a transfer are. Pairs are warm here.
blocks_part() {
  use blocks "$fast" "vllm.block_size=${SMALL_BLOCK:-16}" pair_warmup.mode=warn
  measure transfer "transfer-$fast-blocks-wear" --tokens "$wear" --concurrent 8 --repeats "$wear_repeats"
  measure transfer "transfer-$fast-blocks" --tokens "$sizes" --repeats "$repeats"
  down
}

for part in fast overhead tcp blocks; do
  case ,$parts, in *,"$part",*) "${part}_part" ;; esac
done
echo "done in $SECONDS s${failed[*]:+; not complete: ${failed[*]}}"
[ ${#failed[@]} -eq 0 ]
