#!/usr/bin/env bash
# One coordinator and NUM_WORKERS (4) workers on this machine, or the paper's comparison, one after another.
#   bash run_swarm.sh                                     4 workers, I/J 4/4, embedded model: the main job
#   NUM_WORKERS=2 MODEL_NAME=gpt2 bash run_swarm.sh       any variable of sapo.py is passed on
#   CONFIGS="8/0 4/4" SEEDS="1 2 3" bash run_swarm.sh     an experiment for each I/J and seed, then the report
#   LOCAL_NODES=8 CONFIGS="8/0 4/4u 8/0x4" … run_swarm.sh the same with all nodes in one process;
#                                                         u: EXTERNAL_FILTER=False, xK: LOCAL_OVERSAMPLE=K
#   LOG_DIR=/tmp/logs bash run_swarm.sh                   every process's output also in a file of its own
# It ends with one line of what was learned and a picture; NODE_ROLE=report compares experiments.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python3 || command -v python)}
if [ $# -gt 0 ]; then  # --help, -h, help: settings are variables, never arguments
  sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exec "$python" "$here/sapo.py" --help
fi

# ---- Settings

if [[ ${LOCAL_NODES:-1} != 1 ]]; then NUM_WORKERS=1; fi  # one process holds all nodes
export NUM_WORKERS=${NUM_WORKERS:-4}
export MODEL_NAME=${MODEL_NAME:-tiny}  # several large models seldom fit on one machine
if ! [[ $NUM_WORKERS =~ ^[1-9][0-9]*$ ]]; then
  echo "NUM_WORKERS=$NUM_WORKERS: expected 1, 2, 3 …"
  exit 2
fi

missing=$("$python" -c 'import importlib.util as util
print(*(name for name in ("torch", "transformers", "reasoning_gym") if not util.find_spec(name)))')
if [ -n "$missing" ]; then
  echo "missing packages: $missing; pip install torch transformers reasoning-gym" >&2
  exit 1
fi

# Threads are shared out fairly. Otherwise every worker starts one per core, and all of them crawl.
cores=$("$python" -c 'import os
print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
threads=$(( cores > NUM_WORKERS ? cores / NUM_WORKERS : 1 ))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} PYTHONUNBUFFERED=1

# The processes fit their lines into what the prefix "[coordinator] " leaves of the terminal.
columns=${COLUMNS:-$(tput cols 2>/dev/null || echo 100)}
lines_width=$(( columns > 74 ? columns - 14 : 60 ))

# The shared folder, by the same rule as in sapo.py.
drive=${GDRIVE_PATH:-auto}
if [ "$drive" = auto ]; then
  drive=rl-swarm
  for folder in /content/gdrive/MyDrive /content/drive/MyDrive; do
    if [ -d "$folder" ]; then drive=$folder/rl-swarm; fi
  done
fi

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
gpu_of() {  # a worker's own GPU, if there are several and the user has not chosen
  if [ "${gpus:-0}" -ge 2 ] && [ -z "${CUDA_VISIBLE_DEVICES:-}${DEVICE:-}" ]; then
    echo "CUDA_VISIBLE_DEVICES=$(($1 % gpus))"
  fi
}

# ---- Processes

pids=() names=() stopping=0
stop_all() {  # only what this script started; a second Ctrl-C makes the processes exit at once
  if [ "$stopping" -eq 0 ]; then
    echo "run_swarm: stopping (a round is finished first); once more to exit at once" || true
  fi
  stopping=1
  for pid in ${pids[@]+"${pids[@]}"}; do kill -INT "$pid" 2>/dev/null || true; done
}
trap stop_all INT TERM HUP USR1  # HUP: the terminal was closed; USR1: Slurm's time limit
trap '' PIPE  # the reader of the output may be gone

prefixed() {  # NAME LOG: print each line of a process with its name before it
  trap '' INT TERM HUP USR1
  exec 2>/dev/null  # if the terminal is closed, this would be the very pipe that is read here
  while IFS= read -r line; do
    printf '%s\n' "[$1] $line" >> "$2" || true  # LOG_DIR may be full
    printf '%s\n' "[$1] $line" || true
  done
}

start() {  # NAME VAR=VALUE…: one process in the background, in a process group of its own
  local name=$1 log=/dev/null
  shift
  if [ -n "${LOG_DIR:-}" ]; then log=$LOG_DIR/$name.log; fi
  # Job control is on only here. The terminal's Ctrl-C must reach this script, which passes it on
  # exactly once; with job control on for good it would go to the command that the script waits for.
  set -m
  env COLUMNS="$lines_width" "$@" "$python" "$here/sapo.py" \
    < /dev/null > >(prefixed "$name" "$log") 2>&1 &
  set +m
  pids+=($!) names+=("$name")
  if [ "$stopping" -ne 0 ]; then kill -INT $! 2>/dev/null || true; fi  # Ctrl-C came before pids+=
}

say_goodbye() {  # EXPERIMENT NODE: write the heartbeat "stopped" of a worker that cannot do it itself
  # Otherwise the others would wait for it in every round, until STALE_AFTER_SECONDS have passed.
  "$python" -c 'import sys
sys.path.insert(0, sys.argv[1])
import drive_store
store = drive_store.DriveStore(*sys.argv[2:5])
session = store.latest_sessions()[sys.argv[4]]
store.write_heartbeat(sys.argv[4], session, store.current_round(), "stopped")
' "$here" "$drive" "$1" "$2" 2>/dev/null || true
}

wait_for_all() {  # EXPERIMENT: until all processes have ended; returns 1 and names those that failed
  local failed=0 status still text failures=() waiting="${!pids[*]}"
  exec 3>&2 2>/dev/null  # bash itself would write "line 89: 11281 Killed env …"
  while [ -n "$waiting" ]; do
    still=
    for i in $waiting; do
      if kill -0 "${pids[$i]}"; then still+="$i "; continue; fi
      status=0
      wait "${pids[$i]}" || status=$?
      if [ "$status" -ne 0 ] && [ "$stopping" -eq 0 ] && [ "$failed" -ne 2 ]; then
        text="${names[$i]} ended with exit code $status"
        if [[ ${names[$i]} = worker_* ]]; then
          # Status 3: a newer process of this name has taken over, and is alive.
          if [ "$status" -ne 3 ]; then say_goodbye "$1" "${names[$i]}"; fi
          text+="; to start it again: GDRIVE_PATH=$drive EXPERIMENT_NAME=$1 NODE_ID=${names[$i]}"
          text+=" MODEL_NAME=$MODEL_NAME $python $here/sapo.py"
        fi
        echo "run_swarm: $text" >&3 || true
        failures+=("$text")
        failed=1
      fi
    done
    waiting=$still
    # A coordinator waits for workers to come. If all have ended and one has failed, none will.
    if [ "$waiting" = "0 " ] && [ "${names[0]}" = coordinator ] && [ "$failed" -eq 1 ]; then
      kill -INT "${pids[0]}" 2>/dev/null || true
      failed=2
    fi
    sleep 0.5 || true  # Ctrl-C ends it, too
  done
  exec 2>&3 3>&-
  if [[ $failed -ne 0 && ${names[0]} != prepare ]]; then
    for text in "${failures[@]}"; do echo "run_swarm: $text" >&2 || true; done
  fi
  [ "$failed" -eq 0 ]
}

run_experiment() {  # NAME VAR=VALUE…: prepare, then coordinator and workers, until all have ended
  local experiment=$1
  shift
  # Load the model once and make its warm start. If that fails, nothing else is started.
  echo "run_swarm: loading torch, some seconds" || true
  pids=() names=()
  start prepare NODE_ROLE=prepare "$@"
  wait_for_all "$experiment" || return 1
  if [ "$stopping" -ne 0 ]; then return 0; fi

  # What several processes would say is said once: QUIET=True prints only errors and the end,
  # QUIET=rounds no line per round. VERBOSE=True shows it all.
  local quiet=True quiet_rounds=rounds
  case ${VERBOSE:-0} in 0 | [Ff]alse | [Nn]o | [Oo]ff) ;; *) quiet=False quiet_rounds=False ;; esac
  pids=() names=()
  if [ "${LOCAL_NODES:-1}" -gt 1 ]; then
    start swarm NODE_ROLE=worker "$@"  # its nodes keep step by themselves
  else
    start coordinator NODE_ROLE=coordinator QUIET=$quiet "$@"
    for ((i = 0; i < NUM_WORKERS && stopping == 0; i++)); do
      if [ "$i" -gt 0 ]; then quiet_rounds=$quiet; fi  # worker_0 speaks for all
      start "worker_$i" NODE_ROLE=worker NODE_ID="worker_$i" QUIET=$quiet_rounds $(gpu_of "$i") "$@"
    done
  fi
  wait_for_all "$experiment"
}

is_stopped() {
  if [ "$stopping" -eq 0 ]; then return 1; fi
  echo "run_swarm: stopped; to go on: the same command" || true
}

# ---- One experiment, or a comparison

run_comparison() {  # an experiment for each pair of CONFIGS and each of SEEDS, then the report
  local pattern='^([1-9][0-9]*)/([0-9]+)(u?)(x([1-9][0-9]*))?$'
  local pairs=($CONFIGS) seeds=(${SEEDS:-${SEED:-42}}) number=0 config seed name filter
  local total eta began=$SECONDS
  export ROUND_ADVANCE=${ROUND_ADVANCE:-completion}  # a late starter must not lose rounds of a study

  # Check all of it before hours of training.
  for config in "${pairs[@]:-}"; do
    if ! [[ $config =~ $pattern ]]; then
      echo "CONFIGS=$CONFIGS: expected I/J pairs such as 8/0 4/4 4/4u 8/0x4"
      exit 2
    fi
  done
  if ! [[ ${seeds[*]} =~ ^[0-9\ ]+$ ]]; then
    echo "SEEDS=${seeds[*]}: expected numbers such as 1 2 3"
    exit 2
  fi

  total=$((${#pairs[@]} * ${#seeds[@]}))
  for seed in "${seeds[@]}"; do
    for config in "${pairs[@]}"; do
      eta=
      if [ "$number" -gt 0 ]; then
        eta="; about $(((SECONDS - began) * (total - number) / number / 60 + 1)) minutes left for all"
      fi
      [[ $config =~ $pattern ]]
      name=${EXPERIMENT_NAME:-compare}_${config/\//-}_seed$seed
      filter=True
      if [ -n "${BASH_REMATCH[3]}" ]; then filter=False; fi
      number=$((number + 1))
      echo "run_swarm: experiment $number of $total: $name$eta" || true
      run_experiment "$name" EXPERIMENT_NAME="$name" SEED="$seed" \
        NUM_TRAIN_SAMPLES="${BASH_REMATCH[1]}" NUM_TRANSPLANT_TREES="${BASH_REMATCH[2]}" \
        EXTERNAL_FILTER=$filter LOCAL_OVERSAMPLE="${BASH_REMATCH[5]:-1}" || exit 1
      if is_stopped; then exit 130; fi
    done
  done
  NODE_ROLE=report EXPERIMENT_NAME="${EXPERIMENT_NAME:-compare}_*" "$python" "$here/sapo.py"
}

main() {
  if [ -n "${LOG_DIR:-}" ]; then mkdir -p "$LOG_DIR" || exit 2; fi
  case ${TEST_MODE:-0} in  # TEST_MODE has its own defaults
    0 | [Ff]alse | [Nn]o | [Oo]ff)
      export MAX_ROUNDS=${MAX_ROUNDS:-120}
      if [ -z "${CONFIGS:-}" ]; then
        export NUM_TRAIN_SAMPLES=${NUM_TRAIN_SAMPLES:-4}
        export NUM_TRANSPLANT_TREES=${NUM_TRANSPLANT_TREES:-4}
      fi ;;
  esac

  if [ -n "${CONFIGS:-}" ]; then
    run_comparison
    return
  fi
  if [ -n "${SEEDS:-}" ]; then
    echo "SEEDS=$SEEDS: goes with CONFIGS, such as CONFIGS=4/4; for one run set SEED"
    exit 2
  fi
  run_experiment "${EXPERIMENT_NAME:-default}" || exit 1
  if is_stopped; then exit 130; fi
}

main; exit  # on one line: bash reads a script as it goes, and someone may edit this one meanwhile
