#!/usr/bin/env bash
# One coordinator and NUM_WORKERS (4) workers on this machine, or the paper's comparison, one after another.
#   bash run_swarm.sh                                     4 workers, I/J 4/4, embedded model: the main job
#   NUM_WORKERS=2 MODEL_NAME=gpt2 bash run_swarm.sh       any variable of sapo.py is passed on
#   CONFIGS="8/0 4/4" SEEDS="1 2 3" bash run_swarm.sh     an experiment for each I/J and seed, then the report
#   LOCAL_NODES=8 CONFIGS="8/0 4/4u 8/0x4" … run_swarm.sh the same with all nodes in one process;
#                                                         u: EXTERNAL_FILTER=False, xK: LOCAL_OVERSAMPLE=K
# It shows the coordinator and worker_0; the others write to LOG_DIR (a new folder in /tmp).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python3 || command -v python)}
if [ $# -gt 0 ]; then  # --help: settings are variables, never arguments
  sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exec "$python" "$here/sapo.py" --help
fi

# ---- Settings

if [ "${LOCAL_NODES:-1}" != 1 ]; then NUM_WORKERS=1; fi  # one process holds all nodes
export NUM_WORKERS=${NUM_WORKERS:-4} MODEL_NAME=${MODEL_NAME:-tiny}
if ! [[ $NUM_WORKERS =~ ^[1-9][0-9]*$ ]]; then
  echo "NUM_WORKERS=$NUM_WORKERS: expected 1, 2, 3 …"
  exit 2
fi
case $(printf %s "${TEST_MODE:-0}" | tr '[:upper:]' '[:lower:]') in  # it has its own defaults
  0 | false | no | off)
    export MAX_ROUNDS=${MAX_ROUNDS:-120}
    export NUM_TRAIN_SAMPLES=${NUM_TRAIN_SAMPLES:-4} NUM_TRANSPLANT_TREES=${NUM_TRANSPLANT_TREES:-4} ;;
esac

# Threads are shared out fairly. Otherwise every worker starts one per core, and all of them crawl.
cores=$("$python" -c 'import os; print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NUM_WORKERS ? cores / NUM_WORKERS : 1))}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} PYTHONUNBUFFERED=1
logs=${LOG_DIR:-$(mktemp -d "${TMPDIR:-/tmp}/swarm.XXXX")}
mkdir -p "$logs"
echo "run_swarm: all output is in $logs"
export COLUMNS=${COLUMNS:-$(tput cols 2>/dev/null || echo 80)}

# ---- Processes

pids=() names=() stopping=0
stop_all() {  # only what this script started; a second Ctrl-C makes the processes exit at once
  if [ $stopping = 0 ]; then echo "run_swarm: stopping (a round is finished first)" || true; fi
  stopping=1
  for pid in ${pids[@]+"${pids[@]}"}; do kill -INT "$pid" 2>/dev/null || true; done
}
trap stop_all INT TERM HUP USR1  # HUP: the terminal was closed; USR1: Slurm's time limit
trap '' PIPE  # the reader of the output may be gone

show() {  # NAME: a process's output to its file, and to the screen where it says what no other says
  trap '' INT TERM HUP USR1
  while IFS= read -r line; do
    printf '%s\n' "$line" >> "$logs/$1.log" || true
    case $1:$line in
      worker_0:worker_0\ [0-9]*/* | worker_[1-9]*) ;;  # rounds are the coordinator's, for all
      *:"to resume: "* | *:"stopped; to go on:" | *" python sapo.py") ;;  # this script's command resumes all
      *) printf '%s\n' "[$1] $line" || true ;;
    esac
  done
}

start() {  # NAME VAR=VALUE…: one process in the background, in a process group of its own
  local name=$1
  shift
  # Job control is on only here. The terminal's Ctrl-C must reach this script alone, which passes it
  # on exactly once.
  set -m
  env "$@" "$python" "$here/sapo.py" < /dev/null > >(show "$name") 2>&1 &
  set +m
  pids+=($!) names+=("$name")
  if [ $stopping = 1 ]; then kill -INT $! 2>/dev/null || true; fi  # Ctrl-C came before pids+=
}

goodbye='import os, sys, drive_store
root = os.path.expanduser(os.environ.get("GDRIVE_PATH", "").strip())
root = drive_store.default_root() if root in ("", "auto") else root
store, node = drive_store.DriveStore(root, sys.argv[1]), sys.argv[2]
store.write_heartbeat(node, store.board().sessions[node], "failed")'

report_failure() {  # EXPERIMENT NAME STATUS
  if [[ $2 = worker_[1-9]* ]]; then tail -n 5 "$logs/$2.log" | sed "s/^/[$2] /"; fi
  echo "run_swarm: $2 ended with exit code $3 ($logs/$2.log)"
  if [[ $2 = worker_* && $3 != 3 ]]; then  # 3: a newer process of this name is alive
    grep -m1 "to resume: " "$logs/$2.log" || true  # the command that starts it again
    # Say goodbye for it, or the others would wait for it in every round until it is stale.
    PYTHONPATH=$here "$python" -c "$goodbye" "$1" "$2" 2>/dev/null || true
  fi
}

wait_for_all() {  # EXPERIMENT: until all processes have ended; returns 1 if one failed
  local failed=0 waiting="${!pids[*]}" still status
  exec 3>&2 2>/dev/null  # bash itself would write "line 89: 11281 Killed env …"
  while [ -n "$waiting" ]; do
    still=
    for i in $waiting; do
      if kill -0 "${pids[$i]}"; then still+="$i "; continue; fi
      status=0
      wait "${pids[$i]}" || status=$?
      if [ $status != 0 ] && [ $stopping = 0 ] && [ $failed != 2 ]; then
        report_failure "$1" "${names[$i]}" $status || true
        failed=1
      fi
    done
    waiting=$still
    # A coordinator waits for workers to come. If all have ended and one has failed, none will.
    if [ "$waiting" = "0 " ] && [ "${names[0]}" = coordinator ] && [ $failed = 1 ]; then
      echo "run_swarm: no worker is left; the coordinator is stopped"
      kill -INT "${pids[0]}" || true
      failed=2
    fi
    sleep 0.5 || true  # Ctrl-C ends it, too
  done
  exec 2>&3 3>&-
  [ $failed = 0 ]
}

run_experiment() {  # NAME VAR=VALUE…: prepare, then coordinator and workers, until all have ended
  local name=$1 i
  shift
  # Load the model once and make its warm start. If that fails, nothing else is started.
  pids=() names=()
  start prepare NODE_ROLE=prepare EXPERIMENT_NAME="$name" "$@"
  wait_for_all "$name" || exit 1

  pids=() names=()
  if [ "${LOCAL_NODES:-1}" != 1 ] && [ $stopping = 0 ]; then
    start swarm NODE_ROLE=worker EXPERIMENT_NAME="$name" "$@"  # its nodes keep step by themselves
  elif [ $stopping = 0 ]; then
    echo "run_swarm: starting $((NUM_WORKERS + 1)) processes"
    start coordinator NODE_ROLE=coordinator EXPERIMENT_NAME="$name" "$@"
    for ((i = 0; i < NUM_WORKERS && stopping == 0; i++)); do
      # Of several GPUs each worker takes the one of its local rank.
      start "worker_$i" NODE_ROLE=worker NODE_ID="worker_$i" LOCAL_RANK=$i EXPERIMENT_NAME="$name" "$@"
    done
  fi
  if [ ${#pids[@]} != 0 ]; then wait_for_all "$name" || exit 1; fi
  if [ $stopping = 1 ]; then echo "run_swarm: stopped; to go on: the same command" || true; exit 130; fi
}

main() {
  local pattern='^([1-9][0-9]*)/([0-9]+)(u?)(x([1-9][0-9]*))?$' config seed filter
  if [ -z "${CONFIGS:-}" ]; then
    run_experiment "${EXPERIMENT_NAME:-default}"
    return
  fi
  for config in $CONFIGS; do  # check all of it before hours of training
    if ! [[ $config =~ $pattern ]]; then
      echo "CONFIGS=$CONFIGS: expected I/J pairs such as 8/0 4/4 4/4u 8/0x4"
      exit 2
    fi
  done
  export ROUND_ADVANCE=${ROUND_ADVANCE:-completion}  # a late starter must not lose rounds of a study
  for seed in ${SEEDS:-${SEED:-42}}; do
    for config in $CONFIGS; do
      [[ $config =~ $pattern ]]
      if [ -n "${BASH_REMATCH[3]}" ]; then filter=False; else filter=True; fi
      echo "run_swarm: ${EXPERIMENT_NAME:-compare}_${config/\//-}_seed$seed"
      run_experiment "${EXPERIMENT_NAME:-compare}_${config/\//-}_seed$seed" SEED="$seed" \
        NUM_TRAIN_SAMPLES="${BASH_REMATCH[1]}" NUM_TRANSPLANT_TREES="${BASH_REMATCH[2]}" \
        EXTERNAL_FILTER=$filter LOCAL_OVERSAMPLE="${BASH_REMATCH[5]:-1}"
    done
  done
  NODE_ROLE=report EXPERIMENT_NAME="${EXPERIMENT_NAME:-compare}_*" "$python" "$here/sapo.py"
}

main; exit  # on one line: bash reads a script as it goes, and someone may edit this one meanwhile
