#!/usr/bin/env bash
# One coordinator and NUM_WORKERS (4) workers on this machine, or the paper's comparison, one after another.
#   bash run_swarm.sh                                     4 workers, I/J 4/4, embedded model: the main job
#   NUM_WORKERS=2 MODEL_NAME=gpt2 bash run_swarm.sh       any variable of sapo.py is passed on
#   CONFIGS="8/0 4/4" SEEDS="1 2 3" bash run_swarm.sh     an experiment for each I/J and seed, then the report
#   LOCAL_NODES=8 CONFIGS="8/0 4/4u 8/0x4" … run_swarm.sh the same with all nodes in one process;
#                                                         u: EXTERNAL_FILTER off, xK: LOCAL_OVERSAMPLE=K
#   LOG_DIR=/tmp/logs bash run_swarm.sh                   every process's output also in a file of its own
# It ends with one line of what was learned and a picture; NODE_ROLE=report compares experiments.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python3 || command -v python)}
if [ $# -gt 0 ]; then  # --help, -h, help: nothing is set by arguments
  sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exec "$python" "$here/sapo.py" --help
fi
[[ ${LOCAL_NODES:-1} == 1 ]] || NUM_WORKERS=1  # one process holds them all
export NUM_WORKERS=${NUM_WORKERS:-4} MODEL_NAME=${MODEL_NAME:-tiny}  # large models: several seldom fit
[[ $NUM_WORKERS =~ ^[1-9][0-9]*$ ]] || { echo "NUM_WORKERS=$NUM_WORKERS: expected 1, 2, 3 …"; exit 2; }

missing=$("$python" -c 'import importlib.util as u
print(*(n for n in ("torch", "transformers", "reasoning_gym") if not u.find_spec(n)))')
[ -z "$missing" ] || { echo "missing: $missing; pip install torch transformers reasoning-gym" >&2; exit 1; }

if [ "$MODEL_NAME" != tiny ] && [ "$MODEL_NAME" != auto ]; then  # found out once, not by every worker
  why=$("$python" -c 'import os, transformers as t
try: t.AutoTokenizer.from_pretrained(os.environ["MODEL_NAME"]), t.AutoConfig.from_pretrained(os.environ["MODEL_NAME"])
except Exception as error: raise SystemExit(str(error).splitlines()[0])' 2>&1) || {
    echo "MODEL_NAME=$MODEL_NAME cannot be used: ${why##*$'\n'}; expected tiny, a Hugging Face id or a local folder" >&2
    exit 2
  }
fi

# Threads are shared out fairly: without this every worker starts one per core and all of them crawl.
cores=$("$python" -c 'import os
print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cores > NUM_WORKERS ? cores / NUM_WORKERS : 1 ))}
columns=$(tput cols 2>/dev/null || echo 100)
export COLUMNS=${COLUMNS:-$columns} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} PYTHONUNBUFFERED=1

pids=() names=() stopping=0
stop_all() {  # only what this script started; a second Ctrl-C makes them exit at once
  stopping=1
  for pid in ${pids[@]+"${pids[@]}"}; do kill -INT "$pid" 2>/dev/null || true; done
}
trap stop_all INT TERM HUP USR1  # HUP: the terminal was closed; USR1: a time limit of Slurm
trap '' PIPE  # nobody may read what is printed

prefixed() {  # NAME LOG: each line with the name before it. Without VERBOSE what all say is shown once
  trap '' INT TERM HUP USR1
  exec 2>/dev/null  # where the terminal is closed this would be the very pipe that is read here
  local quiet= once='^(new experiment|experiment |to resume:|final model:|  try it:|note:|picture:|no picture:|'
  once+='these settings cannot|  [A-Z_]+[=:]|  [A-Z_]+ is not a variable|NUM_TRANSPLANT|writing |what it said|[^ ]*: already finished|\? |reward per task|  [A-Z_]+ {2}|  [0-9.]+  |worker_. (start|end|sample):)'
  [[ ${VERBOSE:-0} =~ ^(0|[Ff]alse|[Nn]o|[Oo]ff)$ && $1 == worker_* ]] && quiet=1
  while IFS= read -r line; do
    printf '%s\n' "[$1] $line" >> "$2" || true  # LOG_DIR may be full
    [[ $quiet && $line == *" round "*" | reward "* ]] && continue
    [[ $quiet && $1 != worker_0 && $line =~ $once ]] && continue
    [[ $1 == coordinator && $line =~ ^(new\ exp|experiment\ |note:|these\ sett|\ \ [A-Z_]+|[^ ]+:\ already) ]] && continue
    [[ $1 != worker_0 && $line == "another node makes"* ]] && continue
    [[ $line == "stopping (a round"* || $line == *"stopped before round"* || $line == "stopped; to go on"* ]] && continue
    [[ $line == "  "*"python sapo.py" ]] && continue  # the same command goes on
    if [ -t 1 ] && [[ $line == "warm start "* ]]; then  # one line that is rewritten
      printf '\r%s ' "[$1] $line"
      [[ $line != *"eta 0s" ]] || echo
      continue
    fi
    [ -z "$line" ] || printf '%s\n' "[$1] $line" || true
  done
}

start() {  # NAME VAR=VALUE…: one process in the background, in a process group of its own
  local name=$1 log=/dev/null; shift
  [ -z "${LOG_DIR:-}" ] || log=$LOG_DIR/$name.log
  # Job control only here: the terminal's Ctrl-C must reach this script, which passes it on exactly once.
  # With job control on for good it would go to whatever command the script is just waiting for.
  set -m
  env "$@" "$python" "$here/sapo.py" < /dev/null > >(prefixed "$name" "$log") 2>&1 &
  set +m
  pids+=($!) names+=("$name")
  [ "$stopping" -eq 0 ] || kill -INT $! 2>/dev/null || true  # Ctrl-C came before it was in the list
}

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
gpu_of() {  # a worker's own GPU, where there are several and nobody has chosen
  [ "${gpus:-0}" -lt 2 ] || [ -n "${CUDA_VISIBLE_DEVICES:-}${DEVICE:-}" ] || echo "CUDA_VISIBLE_DEVICES=$(($1 % gpus))"
}

run_experiment() {  # coordinator and workers, until all have ended; returns 1 and names whoever failed
  pids=() names=()
  echo "run_swarm: loading torch in every process, some seconds" || true
  if [ "${LOCAL_NODES:-1}" -gt 1 ]; then
    start swarm NODE_ROLE=worker "$@"  # its nodes keep step by themselves
  else
    start coordinator NODE_ROLE=coordinator "$@"
    for ((i = 0; i < NUM_WORKERS && stopping == 0; i++)); do
      start "worker_$i" NODE_ROLE=worker NODE_ID="worker_$i" $(gpu_of "$i") "$@"
    done
  fi
  local failed=0 status waiting="${!pids[*]}" still
  while [ -n "$waiting" ]; do
    still=
    for i in $waiting; do
      if kill -0 "${pids[$i]}" 2>/dev/null; then still+="$i "; continue; fi
      status=0
      wait "${pids[$i]}" || status=$?
      if [ "$status" -ne 0 ] && [ "$stopping" -eq 0 ] && [ "$failed" -ne 2 ]; then
        echo "run_swarm: ${names[$i]} ended with exit code $status" >&2 || true
        failed=1
      fi
    done
    waiting=$still
    if [ "$waiting" = "0 " ] && [ "${names[0]}" = coordinator ] && [ "$failed" -eq 1 ]; then
      kill -INT "${pids[0]}" 2>/dev/null || true  # a coordinator waits for workers to come; here none will
      failed=2
    fi
    sleep 0.5 || true  # Ctrl-C ends it too
  done
  [ "$failed" -eq 0 ]
}

is_stopped() {
  [ "$stopping" -eq 1 ] && { echo "run_swarm: stopped; to go on: the same command" || true; }
}

main() {
  [ -z "${LOG_DIR:-}" ] || mkdir -p "$LOG_DIR" || exit 2
  case ${TEST_MODE:-0} in
    0 | [Ff]alse | [Nn]o | [Oo]ff)
      export MAX_ROUNDS=${MAX_ROUNDS:-120}
      [ -n "${CONFIGS:-}" ] || export NUM_TRAIN_SAMPLES=${NUM_TRAIN_SAMPLES:-4} NUM_TRANSPLANT_TREES=${NUM_TRANSPLANT_TREES:-4} ;;
  esac  # TEST_MODE has its own
  if [ -z "${CONFIGS:-}" ]; then
    [ -z "${SEEDS:-}" ] || { echo "SEEDS=$SEEDS: goes with CONFIGS, such as CONFIGS=4/4; of one run set SEED"; exit 2; }
    run_experiment || exit 1
    ! is_stopped || exit 130
    return
  fi
  local pattern='^([1-9][0-9]*)/([0-9]+)(u?)(x([1-9][0-9]*))?$' name filter
  export ROUND_ADVANCE=${ROUND_ADVANCE:-completion}  # a late starter must not lose rounds of a study
  local number=0 pairs=($CONFIGS) seeds=(${SEEDS:-${SEED:-42}})
  for config in "${pairs[@]:-}"; do  # before hours of training
    [[ $config =~ $pattern ]] || { echo "CONFIGS=$CONFIGS: expected I/J pairs such as 8/0 4/4 4/4u 8/0x4"; exit 2; }
  done
  [[ ${seeds[*]} =~ ^[0-9\ ]+$ ]] || { echo "SEEDS=${seeds[*]}: expected numbers such as 1 2 3"; exit 2; }
  for seed in "${seeds[@]}"; do
    for config in "${pairs[@]}"; do
      [[ $config =~ $pattern ]]
      name=${EXPERIMENT_NAME:-compare}_${config/\//-}_seed$seed filter=True
      [ -z "${BASH_REMATCH[3]}" ] || filter=False
      number=$((number + 1))
      echo "run_swarm: experiment $number of $((${#pairs[@]} * ${#seeds[@]})): $name" || true
      run_experiment EXPERIMENT_NAME="$name" SEED="$seed" NUM_TRAIN_SAMPLES="${BASH_REMATCH[1]}" \
        NUM_TRANSPLANT_TREES="${BASH_REMATCH[2]}" EXTERNAL_FILTER=$filter \
        LOCAL_OVERSAMPLE="${BASH_REMATCH[5]:-1}" || exit 1
      ! is_stopped || exit 130
    done
  done
  NODE_ROLE=report EXPERIMENT_NAME="${EXPERIMENT_NAME:-compare}_*" "$python" "$here/sapo.py"
}

main; exit  # on one line: bash reads a script as it goes, and someone may edit this one meanwhile
