#!/usr/bin/env bash
# Two models behind one proxy, a trace for each, both replayed at once: admission rules in turns. On simulated engines
# in real time, four of each model, started for every run; or on engines that run, whose caches are proven empty before
# every run. Prints the runs and a comparison of the arms for each model. Records are OUTPUT/ARM-REPEAT/first.jsonl and
# second.jsonl, which may be compressed by gzip, and engines.json, whose presence means that the run has ended. The same
# command makes the runs that are missing.
#
#   python -m bench.admission_live cut TRACE first.jsonl --sessions 15 --min-tokens 15000 --max-tokens 90000
#   bench/gpu/two_models.sh OUTPUT first.jsonl second.jsonl
#
#   NAMES=first,second GPUS=1 LOAD_FORMAT=dummy bench/gpu/small_engines.sh fleet
#   ENGINES=fleet bench/gpu/two_models.sh OUTPUT first.jsonl second.jsonl
#
# Environment: PYTHON (default .venv/bin/python), ARMS (never_hold working_set: admission rules, the first is the
# baseline), REPEATS (3), PROXY_TREE (another source tree of warmroute, whose proxy runs an arm "before" with
# working_set as well), ENGINE_SPEED (4; with ENGINES 1), ENGINES (folder of small_engines.sh, whose engines serve first
# and second), LONGEST (60000; with ENGINES: tokens of a prompt that every engine computes once before the first run),
# RUN_S (600; a replay is ended after so many seconds), BUDGET_S (no run begins that could end later), POOL_TOKENS
# (160432), and FIRST_PORT (12100, and the 16 after it).
set -euo pipefail
[ $# -eq 3 ] || { sed -n '2,19p' "$0"; exit 2; }
output=$(mkdir -p "$1" && cd "$1" && pwd) first=$(realpath "$2") second=$(realpath "$3")
engines=
if [ -n "${ENGINES:-}" ]; then
  engines=$(realpath "$ENGINES")
  [ -e "$engines/proxy.yaml" ] || { echo "ENGINES: no proxy.yaml in it; give the folder of small_engines.sh"; exit 2; }
fi
[ -z "${PROXY_TREE:-}" ] || PROXY_TREE=$(realpath "$PROXY_TREE")
cd "$(dirname "$0")/../.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}") port=${FIRST_PORT:-12100}
if [ -n "$engines" ]; then speed=${ENGINE_SPEED:-1} door=$(sed -n 's/^port: //p' "$engines/proxy.yaml")
else speed=${ENGINE_SPEED:-4} door=$((port + 16)); fi
read -r -a arms <<< "${ARMS:-never_hold working_set}"
[ -z "${PROXY_TREE:-}" ] || arms+=(before)
path=${PYTHONPATH:+:$PYTHONPATH} proxy=http://127.0.0.1:$door
export PYTHONPATH=$PWD$path
started=()
end() {
  for pid in "${started[@]}"; do kill "$pid" 2> /dev/null || true; done
  for pid in "${started[@]}"; do wait "$pid" 2> /dev/null || true; done
  started=()
}
trap end EXIT
ready() { # URL
  local i
  for ((i = 0; i < 240; i++)); do
    if curl -sf --noproxy "*" -m 5 -o /dev/null "$1"; then return; fi
    kill -0 "${started[-1]}" 2> /dev/null || break
    sleep 0.5
  done
  echo "$1 does not answer: see $folder"
  exit 1
}
play() { # MODEL TRACE
  exec timeout "${RUN_S:-600}" "$python" -m warmroute replay "$2" --endpoint "$proxy" --model "$1" \
    --engine-speed "$speed" --idle-gap-cap-s 10 -o "$folder/$1.jsonl" > "$folder/$1.log" 2>&1
}
start_engines() {
  for ((i = 0; i < 8; i++)); do
    model=first
    [ "$i" -lt 4 ] || model=second
    "$python" -m sim --port $((port + i)) --bootstrap-port $((port + 8 + i)) --model $model --profile h200 \
      --engine-speed "$speed" --kv-capacity-tokens "${POOL_TOKENS:-160432}" --max-model-len 130000 \
      > "$folder/engine-$i.log" 2>&1 &
    started+=($!)
    echo "  - {name: $model-$i, url: 'http://127.0.0.1:$((port + i))'}" >> "$folder/proxy.yaml"
  done
  for ((i = 0; i < 8; i++)); do ready "http://127.0.0.1:$((port + i))/health"; done
}
warm=
for ((repeat = 0; repeat < ${REPEATS:-3}; repeat++)); do
  for ((turn = 0; turn < ${#arms[@]}; turn++)); do
    arm=${arms[(turn + repeat) % ${#arms[@]}]}
    folder=$output/$arm-$repeat
    [ ! -e "$folder/engines.json" ] || continue
    if [ -n "${BUDGET_S:-}" ] && [ $((SECONDS + ${RUN_S:-600})) -gt "$BUDGET_S" ]; then
      echo "no time for $arm, repeat $repeat"
      exit 1
    fi
    rm -rf "$folder"
    mkdir -p "$folder"
    rule=$arm tree=$PWD
    [ "$arm" != before ] || { rule=working_set; tree=${PROXY_TREE:?the arm before needs it}; }
    printf 'host: 127.0.0.1\nport: %d\npolicy: {name: warm}\nadmission: {name: %s}\ninstances:\n' "$door" "$rule" \
      > "$folder/proxy.yaml"
    if [ -n "$engines" ]; then
      # A proxy would replay the events of all runs before its own, whose blocks are gone.
      sed -n '/^ *- /p' "$engines/proxy.yaml" | sed 's/, events_replay_url: "[^"]*"//' >> "$folder/proxy.yaml"
      [ -n "$warm" ] || "$python" -m bench.gpu.model_engines warm-up "$folder/proxy.yaml" --longest "${LONGEST:-60000}"
      warm=1
      "$python" -m bench.gpu.model_engines empty "$folder/proxy.yaml" "$folder/begun.json"
    else
      start_engines
    fi
    (cd "$tree" && PYTHONPATH=$tree$path exec "$python" -m warmroute serve --config "$folder/proxy.yaml") \
      > "$folder/proxy.log" 2>&1 &
    started+=($!)
    ready "$proxy/ready"
    "$python" -m bench.gpu.model_engines begin "$folder/proxy.yaml" "$folder/begun.json" "$proxy"
    play first "$first" & one=$!
    play second "$second" & two=$!
    started+=("$one" "$two")
    wait "$one"
    wait "$two"
    "$python" -m bench.gpu.model_engines end "$folder/begun.json" "$folder/engines.json" "$proxy"
    end
    echo "$(date +%T) $arm, repeat $repeat: done after $SECONDS s"
  done
done
"$python" -m bench.gpu.model_engines table "$output" "${arms[@]}"
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
for name in first second; do
  options=()
  for arm in "${arms[@]}"; do
    runs=()
    for note in "$output/$arm"-*/engines.json; do
      folder=$(dirname "$note")
      runs+=("$folder/$name.jsonl")
      [ -e "${runs[-1]}" ] && continue
      runs[-1]=$unpacked/$(basename "$folder")-$name.jsonl
      gunzip -c "$folder/$name.jsonl.gz" > "${runs[-1]}"
    done
    options+=(--arm "$arm=$(IFS=,; echo "${runs[*]}")")
  done
  echo "$name model"
  "$python" -m warmroute compare "${options[@]}" --keep-all --details
done
