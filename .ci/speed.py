"""Compare the speed of this program with TRL or another checkout. Run it by hand, on an idle machine:

    python -m venv trl && trl/bin/pip install torch transformers reasoning-gym trl
    trl/bin/python .ci/speed.py compare trl SETTING MODEL
    python .ci/speed.py compare FOLDER SETTING MODEL

MODEL is a folder, a Hugging Face id, or tiny. FOLDER is another checkout, whose own .ci/speed.py is
used to measure it. SETTING is one of these:

    arith   basic_arithmetic with 4 questions x 8 completions x 64 tokens
    paper   the paper's nine tasks, with 4 x 8 x 64
    tiny    the eight small tasks, with 8 x 8 x 10
    swarm   rounds of run_swarm.sh with a coordinator and four workers at 4/4 (not for TRL)

In the first three settings, both programs answer the same questions with two threads. A step
generates all completions, rewards every second completion, and does one optimizer step. In swarm,
"cpu" is the CPU time of all processes, including their startup, divided by the number of rounds.

These environment variables, here with their defaults, change a measurement:

    REPETITIONS   repetitions of each program, in alternating order (2)
    STEPS         measured steps per repetition, after one warm-up step (3; swarm: 40 rounds)
    DTYPE         float32, float16 or bfloat16, which is bf16=True in TRL (float32)
    ROWS          this program's MICRO_BATCH_SIZE (auto)
    TRL_ROWS      TRL's per_device_train_batch_size (all completions; paper then needs over 24 GB)
"""

import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import grpo
import sapo

NUM_GENERATIONS = 8  # G
SETTINGS = {  # tasks, questions per step, maximum tokens per completion
    "arith": (["basic_arithmetic"], 4, 64),
    "paper": (grpo.PAPER_TASKS, 4, 64),
    "tiny": (grpo.TINY_TASKS, 8, 10),
}
REPETITIONS = int(os.environ.get("REPETITIONS", 2))
STEPS = int(os.environ.get("STEPS", 40 if "swarm" in sys.argv else 3))


def load(setting: str, model_name: str):
    """Return the Config, the model, its Codec and STEPS + 1 lists of questions for a setting."""
    tasks, num_questions, max_new_tokens = SETTINGS[setting]
    environ = {
        "MODEL_NAME": model_name, "DEVICE": "cpu", "DTYPE": os.environ.get("DTYPE", "float32"),
        "MAX_NEW_TOKENS": str(max_new_tokens), "LEARNING_RATE": "1e-6",
        "MICRO_BATCH_SIZE": os.environ.get("ROWS", "auto"),
    }  # fmt: skip
    config = sapo.read_config(environ)
    model, codec = grpo.load_model(config, list(tasks))
    rng = random.Random(1)

    def draw():
        return grpo.first_valid_question(rng.choice(tasks), rng.randrange(10**6))

    return config, model, codec, [[draw() for _ in range(num_questions)] for _ in range(STEPS + 1)]


def print_report(steps: list[dict], prompts: list, who=resource.RUSAGE_SELF) -> None:
    """Print a JSON report with all steps but the first, the peak memory and the prompts."""
    peak_gb = resource.getrusage(who).ru_maxrss * 1024 / 1e9
    print(json.dumps({"steps": steps[1:], "peak_gb": peak_gb, "prompts": prompts}), flush=True)


def made_up_rewards(completions, **_) -> list[float]:
    """Return a reward of 1 for every second completion, so that every group is informative."""
    return [float(i % 2) for i in range(len(completions))]


def run_ours(setting: str, model_name: str, seed: str) -> None:
    """Measure the steps of this program."""
    grpo.keep_freed_memory()
    config, model, codec, batches = load(setting, model_name)
    optimizer = grpo.make_optimizer(model, config)
    at_once = grpo.estimate_completions_at_once(model, config, grpo.available_memory("cpu"))
    limits = (grpo.Limit(2**30, "generation"), grpo.Limit(at_once, "the update"))
    steps, prompts_of_steps = [], []
    for number, questions in enumerate(batches):
        started = time.perf_counter()
        prompts = [codec.encode_prompt(question) for question in questions]
        sampling_seed = 1000 * int(seed) + number
        completions = grpo.sample_in_batches(
            model, codec, prompts, NUM_GENERATIONS, config, sampling_seed, limits[0]
        )
        generated = time.perf_counter()
        rewards = map(made_up_rewards, completions)
        groups = [*map(grpo.Group, prompts, completions, rewards)]
        grpo.update_policy(model, optimizer, groups, config, codec, limits[1])
        ended = time.perf_counter()
        step = {"step": ended - started, "generation": generated - started}
        num_tokens = sum(map(len, itertools.chain(*completions)))
        steps.append(step | {"update": ended - generated, "tokens": num_tokens})
        prompts_of_steps.append(prompts)
    print_report(steps, prompts_of_steps)


def run_swarm(checkout: str, model_name: str, seed: str) -> None:
    """Measure the rounds of a swarm that a checkout's run_swarm.sh starts."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            "PATH": os.environ["PATH"], "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1",
            "GDRIVE_PATH": f"{folder}/shared", "LOG_DIR": f"{folder}/logs",
            "MODEL_NAME": model_name, "DEVICE": "cpu", "SEED": seed, "MAX_ROUNDS": str(STEPS + 2),
            "WARM_START_STEPS": "200", "ANSWER_TAG_SHARE": "0.3", "ROUND_ADVANCE": "completion",
        }  # fmt: skip
        command = ["bash", f"{checkout}/run_swarm.sh"]
        subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
        [log] = Path(folder).rglob("worker_0/**/metrics.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) / len(rows)

    # A round lasts from one row of a worker's log to the next.
    steps = []
    for before, row in itertools.pairwise(rows):
        step = {"step": row["timestamp"] - before["timestamp"], "cpu": cpu}
        step |= {"generation": row["generate_seconds"], "update": row["train_seconds"]}
        steps.append(step | {"tokens": row["generated_tokens"]})
    print_report(steps, [], resource.RUSAGE_CHILDREN)


def run_trl(setting: str, model_name: str, seed: str) -> None:
    """Measure TRL. A step lasts from the end of one optimizer step to the end of the next."""
    import torch
    from datasets import Dataset
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from trl import GRPOConfig, GRPOTrainer

    config, model, codec, batches = load(setting, model_name)
    num_rows = len(batches[0]) * NUM_GENERATIONS
    rows_per_piece = int(os.environ.get("TRL_ROWS", num_rows))
    generations, prompts_of_steps = [], []

    class TimedTrainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            started = time.perf_counter()
            output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            seconds = time.perf_counter() - started
            generations.append({"generation": seconds, "tokens": sum(map(len, output[0]))})
            prompts_of_steps.append([list(ids) for ids in prompt_ids[::NUM_GENERATIONS]])
            return output

    settings = GRPOConfig(
        seed=int(seed), use_cpu=True, bf16=config.DTYPE == "bfloat16", shuffle_dataset=False,
        # Each batch gets one optimizer step.
        per_device_train_batch_size=rows_per_piece, num_generations=NUM_GENERATIONS,
        gradient_accumulation_steps=num_rows // rows_per_piece, num_iterations=1,
        steps_per_generation=num_rows // rows_per_piece, max_steps=len(batches),
        # Sampling, loss and optimizer are set as in this program.
        max_completion_length=config.MAX_NEW_TOKENS, temperature=1.0, top_p=1.0, top_k=0,
        beta=0.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28,
        learning_rate=config.LEARNING_RATE, lr_scheduler_type="constant", warmup_steps=0,
        adam_beta1=0.9, adam_beta2=0.95,
        # Everything else that takes time is off.
        gradient_checkpointing=False, logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, output_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    prompts = map(codec.encode_prompt, itertools.chain(*batches))
    data = Dataset.from_dict({"prompt": [codec.tokenizer.decode(prompt) for prompt in prompts]})
    trainer = TimedTrainer(model, made_up_rewards, settings, data, None, codec.tokenizer)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step_ends = [time.perf_counter()]
    register_optimizer_step_post_hook(lambda *_: step_ends.append(time.perf_counter()))
    trainer.train()

    steps = []
    for (started, ended), step in zip(itertools.pairwise(step_ends), generations, strict=True):
        seconds = {"step": ended - started, "update": ended - started - step["generation"]}
        steps.append(seconds | step)
    print_report(steps, prompts_of_steps)


def run_program(program: str, setting: str, model_name: str, seed: int) -> dict:
    """Measure "ours", "trl" or another checkout in a separate process. Return its report."""
    checkout = Path(__file__).parent.parent if program in ("ours", "trl") else program
    mode = "trl" if program == "trl" else "ours"
    command = [sys.executable, f"{checkout}/.ci/speed.py", mode, setting]
    if setting == "swarm":  # this file measures both checkouts
        command = [sys.executable, __file__, "swarm", str(checkout)]
    command += [model_name, str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(other: str, setting: str, model_name: str) -> None:
    """Measure both programs in alternating order, and print medians over all measured steps."""
    measured = {"ours": [], other: []}
    prompts = set()
    for seed in range(REPETITIONS):
        for program in sorted(measured, reverse=seed % 2 == 1):
            report = run_program(program, setting, model_name, seed)
            prompts.add(json.dumps(report["prompts"]))
            measured[program] += [step | {"peak GB": report["peak_gb"]} for step in report["steps"]]
            print(program, seed, *(f"{step['step']:.2f}" for step in report["steps"]), flush=True)
    assert len(prompts) == 1, "the programs had different prompts"
    for name in measured["ours"][0]:
        ours, theirs = [median(step[name] for step in steps) for steps in measured.values()]
        print(f"{name:10} ours {ours:9.3f}  {other} {theirs:9.3f}  {theirs / ours:.2f} x")


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    {"compare": compare, "ours": run_ours, "swarm": run_swarm, "trl": run_trl}[mode](*arguments)
