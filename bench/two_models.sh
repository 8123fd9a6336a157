#!/usr/bin/env bash
# Two models behind one proxy, on simulated engines in real time: four engines of each, a trace for each model, both traces
# replayed at once. Prints a comparison of the arms for each model. Records: OUTPUT/ARM-REPEAT/{first,second}.jsonl.
#
#   python -m bench.admission_live cut kct_v6_sample1k.jsonl.gz first.jsonl --sessions 15 --min-tokens 15000 --max-tokens 90000
#   bench/two_models.sh OUTPUT first.jsonl second.jsonl
#
# Environment: PYTHON (default .venv/bin/python), ARMS (never_hold working_set: admission rules, the first is the baseline),
# REPEATS (3), ENGINE_SPEED (4), POOL_TOKENS (160432), FIRST_PORT (12100, and the 16 after it), PROXY_TREE (another
# source tree of warmroute, whose proxy runs an arm "before" with working_set as well).
set -euo pipefail
[ $# -eq 3 ] || { sed -n '2,11p' "$0"; exit 2; }
output=$(mkdir -p "$1" && cd "$1" && pwd) first=$(realpath "$2") second=$(realpath "$3")
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}") speed=${ENGINE_SPEED:-4} port=${FIRST_PORT:-12100}
read -r -a arms <<< "${ARMS:-never_hold working_set}"
[ -z "${PROXY_TREE:-}" ] || arms+=(before)
export PYTHONPATH=$PWD
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
    if "$python" -c 'import sys, httpx; sys.exit(httpx.get(sys.argv[1], trust_env=False).status_code != 200)' "$1" 2> /dev/null; then return; fi
    sleep 0.5
  done
  echo "$1 does not answer: see $folder"
  exit 1
}
play() { # MODEL TRACE NAME
  exec "$python" -m warmroute replay "$2" --endpoint "http://127.0.0.1:$((port + 16))" --model "$1" --engine-speed "$speed" \
    --idle-gap-cap-s 10 -o "$folder/$3.jsonl" > "$folder/$3.log" 2>&1
}
for ((repeat = 0; repeat < ${REPEATS:-3}; repeat++)); do
  for arm in "${arms[@]}"; do
    folder=$output/$arm-$repeat
    [ ! -e "$folder/done" ] || continue
    rm -rf "$folder"
    mkdir -p "$folder"
    rule=$arm tree=$PWD
    [ "$arm" != before ] || { rule=working_set; tree=$PROXY_TREE; }
    printf 'host: 127.0.0.1\nport: %d\npolicy: {name: warm}\nadmission: {name: %s}\ninstances:\n' $((port + 16)) "$rule" > "$folder/proxy.yaml"
    for ((i = 0; i < 8; i++)); do
      model=first
      [ "$i" -lt 4 ] || model=second
      "$python" -m sim --port $((port + i)) --bootstrap-port $((port + 8 + i)) --model $model --engine-speed "$speed" \
        --profile h200 --kv-capacity-tokens "${POOL_TOKENS:-160432}" --max-model-len 130000 > "$folder/engine-$i.log" 2>&1 &
      started+=($!)
      echo "  - {name: $model-$i, url: 'http://127.0.0.1:$((port + i))'}" >> "$folder/proxy.yaml"
    done
    for ((i = 0; i < 8; i++)); do ready "http://127.0.0.1:$((port + i))/health"; done
    (cd "$tree" && PYTHONPATH=$tree exec "$python" -m warmroute serve --config "$folder/proxy.yaml") > "$folder/proxy.log" 2>&1 &
    started+=($!)
    ready "http://127.0.0.1:$((port + 16))/ready"
    play first "$first" first & one=$!
    play second "$second" second & two=$!
    started+=("$one" "$two")
    wait "$one"
    wait "$two"
    end
    touch "$folder/done"
    echo "$arm, repeat $repeat: done"
  done
done
for name in first second; do
  options=()
  for arm in "${arms[@]}"; do
    runs=("$output/$arm"-*/"$name.jsonl")
    options+=(--arm "$arm=$(IFS=,; echo "${runs[*]}")")
  done
  echo "$name model"
  "$python" -m warmroute compare "${options[@]}" --keep-all --details
done
