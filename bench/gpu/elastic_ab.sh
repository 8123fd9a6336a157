#!/usr/bin/env bash
# Compare the planners never, threshold and cost_model on this machine over NVLink: the same trace at two loads, a fresh
# fleet for every arm. Needs vLLM and Mooncake >= 0.3.13 (CUDA) in ENGINE_PYTHON, NVIDIA GPUs of one host, and this
# project installed (make setup) or on PYTHONPATH.
#
#   bench/gpu/elastic_ab.sh TRACE OUTPUT [arguments of `python -m bench.elastic_ab run`, such as --load 5]
#
# Environment: PYTHON (this project's, default .venv/bin/python), ENGINE_PYTHON (default python3), MODEL (default the
# fleet file's; a local folder works), GPUS (default: all of nvidia-smi; 2, 4 and 8 have fleet files), DUMMY=1 (random
# weights: speeds and memory are real, texts are not), ENGINE_ARGS (a YAML list of further vLLM arguments), and
# FLEET (another fleet file, for instance vllm-cpu-4x, which needs no GPU).
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] || { sed -n '2,12p' "$0"; exit 2; }
trace=$1 output=$2
shift 2
python=${PYTHON:-.venv/bin/python}
if [ -z "${FLEET:-}" ]; then
  gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
  FLEET=elastic-${gpus}x-kv-both
  [ -e "configs/fleets/$FLEET.yaml" ] || { echo "no fleet file for $gpus GPUs; set GPUS to 2, 4 or 8"; exit 2; }
  hardware="$gpus x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)"
fi
settings=()
[ -z "${ENGINE_PYTHON:-}" ] || settings+=(--set "vllm.python=$ENGINE_PYTHON")
[ -z "${MODEL:-}" ] || settings+=(--set "model=$MODEL")
[ -z "${DUMMY:-}" ] || settings+=(--set vllm.load_format=dummy)
[ -z "${ENGINE_ARGS:-}" ] || settings+=(--set "vllm.extra_args=$ENGINE_ARGS")
exec "$python" -u -m bench.elastic_ab run "$trace" --output "$output" --fleet "$FLEET" \
  --hardware "${hardware:-$(uname -m) CPU}" "${settings[@]}" "$@"
