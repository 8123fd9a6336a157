#!/usr/bin/env bash
# Start several small vLLM instances a GPU, wait until all are ready, and write the settings of a proxy in front of them:
# a fleet of eight on two GPUs, with KV pools small enough to be outgrown within minutes. Several instances share a GPU's
# time, or with MPS=1 each has a part of its multiprocessors, so only comparisons on one machine mean something. The
# engines run on until they are ended (OUTPUT/pids).
#
#   bench/gpu/small_engines.sh OUTPUT
#   python -m bench.admission_live run TRACE --config OUTPUT/proxy.yaml ...
#   python -m bench.gpu.routers_ab run TRACE --config OUTPUT/proxy.yaml ...
#
# Environment: ENGINE_PYTHON (one that has vLLM, default python3), MODEL (default Qwen/Qwen3-0.6B), LOAD_FORMAT (default
# auto; dummy: random weights), GPUS (default: all of nvidia-smi), PER_GPU (4), POOL_BYTES (18400000000: 160,432 tokens of
# Qwen3-0.6B), BLOCK_SIZE (16 tokens; larger ones for hand-offs, which move a piece for each block and layer), HF_OVERRIDES
# (JSON object of further changes to the model's configuration; with random weights its shape too: fewer KV heads or
# layers make KV smaller, and pools larger), MAX_MODEL_LEN (130000, must fit the pool), READY_S (300), PROXY_PORT (9090),
# FIRST_PORT (8001; those of events and hand-over are 1000 and more above), TRANSFER (default none; tcp or nvlink: engines
# that hand over KV with Mooncake, for the hand-offs of joint), SCHEDULING (default fcfs; priority: the engines compute
# waiting prompts in the order that the proxy gives), MPS (0; 1: an engine has 1/PER_GPU of the GPU's multiprocessors for
# itself by CUDA's Multi-Process Service, instead of all of them in turns), PARTS (with MPS=1: percentages of a GPU's
# multiprocessors, one for each of its PER_GPU engines, such as 40,40,10,10: engines of different speed), LONG_PREFILL
# (0; most tokens of a step for one prompt), MAX_NUM_SEQS (32; requests that an engine computes together), NAMES (names of
# the served model, such as first,second, one for each equal part of the engines in their order; default one model), and
# SIMULATED=1 (simulated engines of the same pool and blocks instead, to rehearse without a GPU; ENGINE_SPEED times as
# fast, timed by the hardware profile PROFILE, h20).
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,24p' "$0"; exit 2; }
output=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
python=${ENGINE_PYTHON:-python3} model=${MODEL:-Qwen/Qwen3-0.6B} per_gpu=${PER_GPU:-4} longest=${MAX_MODEL_LEN:-130000}
if [ -n "${SIMULATED:-}" ]; then gpus=${GPUS:-2}; else gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}; fi
count=$((gpus * per_gpu)) first=${FIRST_PORT:-8001} transfer=${TRANSFER:-none}
pool_bytes=${POOL_BYTES:-18400000000} block=${BLOCK_SIZE:-16} weights=()
if [ -n "${SIMULATED:-}" ] || [ "${LOAD_FORMAT:-auto}" = dummy ]; then weights=(--random-weights); fi
if [ -z "${SIMULATED:-}" ] && [ -n "${ENGINE_SPEED:-}${PROFILE:-}" ]; then
  echo "ENGINE_SPEED and PROFILE are for simulated engines: set SIMULATED=1 too, or unset them"
  exit 2
fi
scheduling=${SCHEDULING:-fcfs} threshold=${LONG_PREFILL:-0}
case $scheduling in fcfs | priority) ;; *) echo "SCHEDULING: fcfs or priority"; exit 2 ;; esac
case ${MPS:-0} in 0 | 1) ;; *) echo "MPS: 0 or 1"; exit 2 ;; esac
IFS=, read -r -a parts <<< "${PARTS:-}"
if [ -n "${PARTS:-}" ]; then
  [ "${MPS:-0}" = 1 ] || { echo "PARTS needs MPS=1"; exit 2; }
  sum=0
  for part in "${parts[@]}"; do
    [[ $part =~ ^[1-9][0-9]?$ ]] || { echo "PARTS: percentages from 1 to 99, separated by commas"; exit 2; }
    sum=$((sum + part))
  done
  [ ${#parts[@]} = "$per_gpu" ] || { echo "PARTS: ${#parts[@]} values for PER_GPU=$per_gpu engines"; exit 2; }
  [ "$sum" -le 100 ] || { echo "PARTS: $sum % of a GPU"; exit 2; }
fi
IFS=, read -r -a names <<< "${NAMES:-}"
if [ -n "${NAMES:-}" ]; then
  name='[A-Za-z0-9][A-Za-z0-9._/-]*'
  [[ $NAMES =~ ^$name(,$name)*$ ]] || { echo "NAMES: names of models, separated by commas"; exit 2; }
  [ $((count % ${#names[@]})) = 0 ] || { echo "NAMES: $count engines cannot be dealt equally to ${#names[@]} names"; exit 2; }
fi
case $transfer in none) role=none ;; tcp | nvlink) role=kv_both ;; *) echo "TRANSFER: none, tcp or nvlink"; exit 2 ;; esac
shape=$("$python" bench/gpu/engine_shape.py --model "$model" --longest "$longest" --pool-bytes "$pool_bytes" \
  --block-size "$block" --overrides "${HF_OVERRIDES:-{\}}" "${weights[@]}") || exit 2
read -r pool overrides <<< "$shape"
if [ -n "${SIMULATED:-}" ] && [ "$pool" = 0 ]; then
  echo "the pool of $model is not known: set MODEL to a folder that has its config.json"
  exit 2
fi
: > "$output/pids"
if [ "${MPS:-0}" = 1 ] && [ -z "${SIMULATED:-}" ]; then
  export CUDA_MPS_PIPE_DIRECTORY=$output/mps CUDA_MPS_LOG_DIRECTORY=$output/mps
  mkdir -p "$output/mps"
  setsid nvidia-cuda-mps-control -f > "$output/mps.log" 2>&1 < /dev/null &
  mps=$!
  for ((i = 0; i < 100; i++)); do
    if [ -e "$output/mps/control" ] || ! kill -0 "$mps" 2> /dev/null; then break; fi
    sleep 0.1
  done
  [ -e "$output/mps/control" ] || { echo "MPS did not start:"; cat "$output/mps.log"; kill "$mps" 2> /dev/null; exit 1; }
fi
{
  printf 'host: 127.0.0.1\nport: %d\npolicy: {name: warm}\ninstances:\n' "${PROXY_PORT:-9090}"
  for ((i = 0; i < count; i++)); do
    printf '  - {name: inst-%d, url: "http://127.0.0.1:%d", events_url: "tcp://127.0.0.1:%d", events_replay_url: "tcp://127.0.0.1:%d"' \
      "$i" $((first + i)) $((first + 1000 + i)) $((first + 1100 + i))
    [ "$role" = none ] || printf ', role: %s, bootstrap_url: "http://127.0.0.1:%d", transport: %s' "$role" $((first + 1200 + i)) "$transfer"
    [ "$scheduling" = fcfs ] || printf ', priority_scheduling: true'
    printf '}\n'
  done
} > "$output/proxy.yaml"
for ((i = 0; i < count; i++)); do
  events=$(printf '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}' \
    $((first + 1000 + i)) $((first + 1100 + i)))
  handover=()
  if [ "$role" != none ]; then
    handover=(--kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_both","kv_connector_extra_config":{"mooncake_protocol":"tcp"}}')
    export VLLM_MOONCAKE_BOOTSTRAP_PORT=$((first + 1200 + i))
    # Mooncake looks at the presence of this variable, not at its value.
    if [ "$transfer" = nvlink ]; then export MC_INTRANODE_NVLINK=1; else unset MC_INTRANODE_NVLINK; fi
  fi
  served=()
  [ -z "${NAMES:-}" ] || served=("${names[i * ${#names[@]} / count]}")
  if [ -n "${SIMULATED:-}" ]; then
    setsid "$python" -m sim --port $((first + i)) "${served[@]/#/--model=}" --kv-capacity-tokens "$pool" --block-size "$block" --role "$role" \
      --scheduling-policy "$scheduling" --long-prefill-token-threshold "$threshold" --max-model-len "$longest" --max-num-seqs "${MAX_NUM_SEQS:-32}" --bootstrap-port $((first + 1200 + i)) --engine-speed "${ENGINE_SPEED:-1}" \
      --profile "${PROFILE:-h20}" --kv-events-port $((first + 1000 + i)) --kv-events-replay-port $((first + 1100 + i)) > "$output/engine-$i.log" 2>&1 < /dev/null &
  else
    if [ "${MPS:-0}" = 1 ]; then
      export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=${parts[i % per_gpu]:-$((100 / per_gpu))}
    fi
    CUDA_VISIBLE_DEVICES=$((i / per_gpu)) MASTER_PORT=$((first + 1300 + i)) VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 \
      setsid "$python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name "${served[0]:-q}" \
      --host 127.0.0.1 --port $((first + i)) --load-format "${LOAD_FORMAT:-auto}" --generation-config vllm \
      --attention-backend FLASH_ATTN -cc '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}' --max-num-seqs "${MAX_NUM_SEQS:-32}" \
      --scheduling-policy "$scheduling" --long-prefill-token-threshold "$threshold" --max-model-len "$longest" --hf-overrides "$overrides" --block-size "$block" \
      --gpu-memory-utilization 0.22 --kv-cache-memory-bytes "$pool_bytes" \
      --enable-prefix-caching --enable-prompt-tokens-details --kv-events-config "$events" "${handover[@]}" \
      > "$output/engine-$i.log" 2>&1 < /dev/null &
  fi
  echo $! >> "$output/pids"
done
if [ -n "${mps:-}" ]; then echo "$mps" >> "$output/pids"; fi
deadline=$((SECONDS + ${READY_S:-300}))
for ((i = 0; i < count; i++)); do
  until curl -sf -m 2 -o /dev/null "http://127.0.0.1:$((first + i))/health"; do
    if ! kill -0 "$(sed -n "$((i + 1))p" "$output/pids")" 2> /dev/null || [ $SECONDS -ge $deadline ]; then
      echo "instance $i did not become ready; its log ends:"
      tail -n 30 "$output/engine-$i.log"
      xargs kill < "$output/pids" 2> /dev/null || true
      exit 1
    fi
    sleep 1
  done
done
if [ "$pool" = 0 ]; then pools=; else pools=", pools of $pool tokens"; fi
echo "$count instances ready after $SECONDS s$pools"
