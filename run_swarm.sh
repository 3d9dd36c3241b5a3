#!/usr/bin/env bash
# Run a coordinator and NUM_WORKERS (4) workers on this machine, or compare several I/J settings.
#   bash run_swarm.sh                                     4 workers, I/J 4/4, the built-in model
#   NUM_WORKERS=2 MODEL_NAME=gpt2 bash run_swarm.sh       all settings of sapo.py are passed on
#   CONFIGS="8/0 4/4" SEEDS="1 2 3" bash run_swarm.sh     one run per I/J and seed, then the report
#   LOCAL_NODES=8 CONFIGS="8/0 4/4u 8/0x4" … run_swarm.sh the same with all nodes in one process
#                                     (u: EXTERNAL_FILTER=False, xK: LOCAL_OVERSAMPLE=K)
# The screen shows the coordinator and worker_0. All output is kept in LOG_DIR (default: a new folder).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python3 || command -v python)}
if [ $# -gt 0 ]; then  # such as --help; settings are environment variables, never arguments
  sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exec "$python" "$here/sapo.py" --help
fi

# ---- Settings

if [ "${LOCAL_NODES:-1}" != 1 ]; then NUM_WORKERS=1; fi  # one process runs all nodes
export NUM_WORKERS=${NUM_WORKERS:-4} MODEL_NAME=${MODEL_NAME:-tiny}
if ! [[ $NUM_WORKERS =~ ^[1-9][0-9]*$ ]]; then
  echo "NUM_WORKERS=$NUM_WORKERS: expected 1, 2, 3 …"
  exit 2
fi
case ${TEST_MODE:-0} in  # TEST_MODE has its own defaults
  0 | [Ff]alse | FALSE | [Nn]o | NO | [Oo]ff | OFF)
    export MAX_ROUNDS=${MAX_ROUNDS:-120}
    export NUM_TRAIN_SAMPLES=${NUM_TRAIN_SAMPLES:-4} NUM_TRANSPLANT_TREES=${NUM_TRANSPLANT_TREES:-4} ;;
esac

# Divide the threads evenly. If each worker started a thread per core, all would be very slow.
count='import os, sys
try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"{error}: activate the environment with the packages (such as `. venv/bin/activate`), "
             "or install them with the command in README.md")
print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)), torch.cuda.device_count())'
found=$("$python" -c "$count") || exit 2
read -r cores gpus <<< "$found"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NUM_WORKERS ? cores / NUM_WORKERS : 1))}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} PYTHONUNBUFFERED=1
logs=${LOG_DIR:-$(mktemp -d "${TMPDIR:-/tmp}/swarm.XXXX")}
mkdir -p "$logs"
echo "run_swarm: all output is in $logs"
export COLUMNS=${COLUMNS:-$(tput cols 2>/dev/null || echo 80)}

# ---- Processes

# Each process has its own process group, so the terminal's Ctrl-C reaches only this script, which
# passes it on once. A second Ctrl-C makes the processes exit immediately.
set -m
pids=() stopping=0
trap '' PIPE  # the output may be a closed pipe
say() { echo "run_swarm: $*" 2>/dev/null || true; }
stop_all() {
  local pid  # because this function may interrupt `wait_for`, which has its own `pid`
  if [ $stopping = 0 ]; then say "stopping; processes finish their current round first"; fi
  stopping=1
  for pid in ${pids[@]+"${pids[@]}"}; do kill -INT -- "-$pid" 2>/dev/null || true; done
}
trap stop_all INT TERM HUP USR1  # HUP: the terminal was closed; USR1: Slurm's time limit

# Mark the nodes of a killed process as failed, so that the others do not wait for them.
mark_failed='import os, sys
sys.path[0] = sys.argv[1]  # this folder
import drive_store, sapo
config = sapo.read_config(os.environ)
store = drive_store.DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME, config.node_ids)
store.check_own_dirs()
for path in [f"nodes/{node_id}/heartbeat.json" for node_id in config.node_ids]:
    heartbeat = store.read_valid(path) or {}
    if heartbeat.get("state") == "running":
        store.write(path, drive_store.dump_json(heartbeat | {"state": "failed"}))'

start() {  # NAME VAR=VALUE…: start a process in the background, and report it if it fails
  local name=$1
  shift
  echo "---- ${EXPERIMENT_NAME:-default}, $(date '+%Y-%m-%d %H:%M:%S')" >> "$logs/$name.log"
  (
    trap : INT TERM HUP USR1
    status=0
    env "$@" "$python" "$here/sapo.py" < /dev/null 2>&1 | keep_and_show "$name" || status=$?
    if [ $status != 0 ] && [ $status != 130 ]; then
      tail -n 5 "$logs/$name.log" | sed "s/^/[$name] /"
      say "$name ended with exit code $status ($logs/$name.log)"
      grep "to resume: " "$logs/$name.log" | tail -n 1 || true  # the command that resumes it
    fi
    if [ $status -gt 130 ]; then env "$@" "$python" -c "$mark_failed" "$here" || true; fi  # killed
    exit $status
  ) 2>/dev/null &  # hides bash's own "Killed" message
  pids+=($!)
  if [ $stopping = 1 ]; then kill -INT -- "-$!" 2>/dev/null || true; fi  # Ctrl-C came before pids+=
}

keep_and_show() {  # NAME: write stdin to the log of this process, and print selected lines
  trap '' INT TERM HUP USR1
  while IFS= read -r line || [ -n "$line" ]; do
    printf "%s\n" "$line" >> "$logs/$1.log"
    case $1:$line in
      # Hide the rounds, the verdict and the curve of worker_0, because the coordinator's lines cover
      # all workers. Hide the commands that start or resume a single process, because this script
      # runs all of them, and the lines that announce these commands.
      worker_0:worker_0\ [0-9]*/* | worker_0:worker_0\ end:* | worker_0:*"cumulative reward "*) ;;
      *:"to resume: "* | *"to resume, run:" | *"creates the experiment:" | *" python sapo.py") ;;
      worker_0:* | [!w]*) printf "%s\n" "[$1] ${line#"$1 "}" 2>/dev/null || true ;;
    esac
  done
}

wait_for() {  # PID…: wait until all of these processes have ended; return 1 if any failed
  local pid status failed=0
  for pid; do
    status=0
    wait "$pid" || status=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid" || status=$?; done  # a signal interrupts `wait`
    if [ $status != 0 ]; then failed=1; fi
  done
  if [ $stopping = 1 ]; then
    for pid in "${pids[@]}"; do while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done; done
    say "stopped; to resume, run the same command again"
    exit 130
  fi
  return $failed
}

run_experiment() {  # run prepare, then the coordinator and the workers, until all have ended
  local i device
  # Load the model once, and create its warm start. If that fails, no other process is started.
  pids=()
  say "preparing the model (python takes a while to load its libraries)"
  start prepare NODE_ROLE=prepare
  wait_for "${pids[@]}" || exit 1

  pids=()
  if [ "${LOCAL_NODES:-1}" != 1 ]; then
    start swarm NODE_ROLE=worker  # nodes of one process need no coordinator
    wait_for "${pids[@]}" || exit 1
    return
  fi
  say "starting $((NUM_WORKERS + 1)) processes (with few cores, this takes up to a minute)"
  start coordinator NODE_ROLE=coordinator
  for ((i = 0; i < NUM_WORKERS; i++)); do
    device=${DEVICE:-}
    if [ -z "$device" ] && [ "$gpus" -gt 1 ]; then device=cuda:$((i % gpus)); fi
    start "worker_$i" NODE_ROLE=worker NODE_ID="worker_$i" DEVICE="$device"
  done
  if ! wait_for "${pids[@]:1}"; then  # stop the coordinator, which would wait for new workers
    kill -INT -- "-${pids[0]}" 2>/dev/null || true
    wait_for "${pids[0]}" || true
    exit 1
  fi
  wait_for "${pids[0]}" || exit 1
}

main() {
  local pattern='^([1-9][0-9]*)/([0-9]+)(u?)(x([1-9][0-9]*))?$' name=${EXPERIMENT_NAME:-compare} config seed
  if [ -z "${CONFIGS:-}" ]; then
    run_experiment
    return
  fi
  for config in $CONFIGS; do  # check all of them before hours of training
    if ! [[ $config =~ $pattern ]]; then
      echo "CONFIGS=$CONFIGS: expected I/J pairs such as 8/0 4/4 4/4u 8/0x4"
      exit 2
    fi
  done
  export ROUND_ADVANCE=${ROUND_ADVANCE:-completion}  # a late worker must not miss rounds
  for seed in ${SEEDS:-${SEED:-42}}; do
    for config in $CONFIGS; do
      [[ $config =~ $pattern ]]
      export EXPERIMENT_NAME=${name}_${config/\//-}_seed$seed SEED=$seed EXTERNAL_FILTER=True
      export NUM_TRAIN_SAMPLES=${BASH_REMATCH[1]} NUM_TRANSPLANT_TREES=${BASH_REMATCH[2]}
      export LOCAL_OVERSAMPLE=${BASH_REMATCH[5]:-1}
      if [ -n "${BASH_REMATCH[3]}" ]; then EXTERNAL_FILTER=False; fi
      say "$EXPERIMENT_NAME"
      run_experiment
    done
  done
  NODE_ROLE=report EXPERIMENT_NAME="${name}_*" "$python" "$here/sapo.py"
}

main; exit  # on one line, because bash reads a script while it runs, and the script may be edited
