"""How fast this program is, beside TRL's GRPOTrainer or beside another checkout of it.

Started by hand, on an idle machine. TRL needs an environment of its own.

    python -m venv trl && trl/bin/pip install torch transformers reasoning-gym trl
    trl/bin/python .ci/speed.py compare trl SETTING MODEL
    python .ci/speed.py compare FOLDER SETTING MODEL

MODEL: a local folder, a Hugging Face id, or tiny. FOLDER: another checkout, also of an earlier
version. Its own .ci/speed.py is run if it has one, because the two programs may have different
functions; this file otherwise.

SETTING: arith (basic_arithmetic) and paper (the paper's nine tasks) have 4 questions x 8
completions x 64 tokens, tiny (its eight tasks) has 8 x 8 x 10. All use two threads and one
optimizer step. All programs get the same questions, and every second completion of a group is
rewarded. swarm (not for TRL) measures rounds of run_swarm.sh instead: a coordinator and four
workers at 4/4, with a short warm start. "cpu" is what all processes used for one round of all,
their start included. Environment variables:

    REPETITIONS   of each program, in alternating order (2)
    STEPS         measured in each repetition, after one that warms up (3; swarm: 40 rounds)
    DTYPE         float32 (the default) or bfloat16, for TRL bf16=True
    ROWS          MICRO_BATCH_SIZE
    TRL_ROWS      TRL's per_device_train_batch_size; the rest is done by gradient accumulation (all
                  rows at once need more than 24 GB in the setting paper)
"""

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# CODE: where the program to measure is, if not in this checkout. `compare` sets it.
sys.path.insert(0, os.environ.get("CODE", str(Path(__file__).resolve().parent.parent)))
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

import grpo
import sapo

NUM_GENERATIONS = 8  # G
LEARNING_RATE = 1e-6
BETAS = (0.9, 0.95)
SETTINGS = {  # tasks, questions of a step, longest completion
    "arith": (["basic_arithmetic"], 4, 64),
    "paper": (grpo.PAPER_TASKS, 4, 64),
    "tiny": (grpo.TINY_TASKS, 8, 10),
}
REPETITIONS = int(os.environ.get("REPETITIONS", 2))
STEPS = int(os.environ.get("STEPS", 40 if "swarm" in sys.argv else 3))


def load(setting: str, model_name: str):
    """Load what a setting needs: Config, model, Codec, and its questions, STEPS + 1 lists."""
    tasks, num_questions, max_new_tokens = SETTINGS[setting]
    environ = {
        "MODEL_NAME": model_name,
        "DEVICE": "cpu",
        "DTYPE": os.environ.get("DTYPE", "float32"),
        "MAX_NEW_TOKENS": str(max_new_tokens),
        "LEARNING_RATE": str(LEARNING_RATE),
        "MICRO_BATCH_SIZE": os.environ.get("ROWS", "auto"),
    }
    env, _ = sapo.read_environment(environ)
    config = sapo.resolve_config(env, {}, [])
    model, codec = grpo.load_model(config, list(tasks))

    rng = random.Random(1)
    batches = []
    for _ in range(STEPS + 1):
        questions = []
        for _ in range(num_questions):
            task = rng.choice(tasks)
            questions.append(grpo.first_valid_question(task, rng.randrange(10**6)))
        batches.append(questions)
    return config, model, codec, batches


def print_report(steps: list[dict], prompts: list, who=resource.RUSAGE_SELF) -> None:
    """Print one line of JSON: the measured steps without the first, which warms up, the peak memory
    of this process, and the ids of the prompts, by which `compare` knows that they are equal."""
    peak_gb = resource.getrusage(who).ru_maxrss * 1024 / 1e9
    print(json.dumps({"steps": steps[1:], "peak_gb": peak_gb, "prompts": prompts}), flush=True)


def run_ours(setting: str, model_name: str, seed: str) -> None:
    """Measure this program."""
    grpo.keep_freed_memory()
    config, model, codec, batches = load(setting, model_name)
    optimizer = grpo.make_optimizer(model, config)
    max_rows = grpo.estimate_micro_batch_size(model, config, 0)
    # Made-up rewards, so that every group is informative.
    rewards = [float(i % 2) for i in range(NUM_GENERATIONS)]

    steps = []
    prompts_of_steps = []
    for step, questions in enumerate(batches):
        started = time.perf_counter()
        prompts = [codec.encode_prompt(question) for question in questions]
        completions, _ = grpo.generate(
            model,
            prompts,
            NUM_GENERATIONS,
            config,
            seed=1000 * int(seed) + step,
            eos_ids=codec.eos_ids,
            pad_id=codec.pad_id,
        )
        generated = time.perf_counter()

        groups = []
        for prompt, of_prompt in zip(prompts, completions, strict=True):
            groups.append(grpo.Group(prompt, of_prompt, rewards))
        grpo.update_policy(model, optimizer, groups, config, codec.pad_id, max_rows)
        ended = time.perf_counter()

        num_tokens = 0
        for of_prompt in completions:
            num_tokens += sum(len(ids) for ids in of_prompt)
        steps.append(
            {
                "step": ended - started,
                "generation": generated - started,
                "update": ended - generated,
                "tokens": num_tokens,
            }
        )
        prompts_of_steps.append(prompts)
    print_report(steps, prompts_of_steps)


def run_swarm(setting: str, model_name: str, seed: str) -> None:
    """Measure the rounds of a swarm that run_swarm.sh starts."""
    folder = tempfile.mkdtemp()
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "HF_HUB_OFFLINE": "1",
        "GDRIVE_PATH": f"{folder}/shared",
        "LOG_DIR": f"{folder}/logs",
        "MODEL_NAME": model_name,
        "DEVICE": "cpu",
        "SEED": seed,
        "MAX_ROUNDS": str(STEPS + 2),
        "WARM_START_STEPS": "200",
        "ANSWER_TAG_SHARE": "0.3",
        "ROUND_ADVANCE": "completion",
    }
    command = ["bash", Path(sapo.__file__).with_name("run_swarm.sh")]
    subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)

    # A round lasts from one row of a worker's log to the next.
    steps = []
    for path in Path(folder).rglob("worker_0/**/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for before, row in zip(rows, rows[1:], strict=False):
            steps.append(
                {
                    "step": row["timestamp"] - before["timestamp"],
                    "generation": row["generate_seconds"],
                    "update": row["train_seconds"],
                    "tokens": row["generated_tokens"],
                    "cpu": (usage.ru_utime + usage.ru_stime) / len(rows),
                }
            )
    shutil.rmtree(folder)
    print_report(steps, [], resource.RUSAGE_CHILDREN)


def run_trl(setting: str, model_name: str, seed: str) -> None:
    """Measure TRL. A step lasts from the end of one optimizer step to the end of the next one. Its
    generation is all that _generate_single_turn does."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config, model, codec, batches = load(setting, model_name)
    num_rows = len(batches[0]) * NUM_GENERATIONS
    rows_per_piece = int(os.environ.get("TRL_ROWS", num_rows))
    num_pieces = num_rows // rows_per_piece

    generation_seconds = []
    num_tokens = []
    prompts_of_steps = []
    step_ends = []

    class TimedTrainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            started = time.perf_counter()
            output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            generation_seconds.append(time.perf_counter() - started)
            num_tokens.append(sum(len(ids) for ids in output[0]))
            prompts_of_steps.append([list(ids) for ids in prompt_ids[::NUM_GENERATIONS]])
            return output

    class StepTimer(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            step_ends.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            step_ends.append(time.perf_counter())

    def made_up_rewards(completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        seed=int(seed),
        use_cpu=True,
        bf16=config.DTYPE == "bfloat16",
        # The batch.
        per_device_train_batch_size=rows_per_piece,
        gradient_accumulation_steps=num_pieces,
        steps_per_generation=num_pieces,
        num_generations=NUM_GENERATIONS,
        num_iterations=1,
        max_steps=len(batches),
        shuffle_dataset=False,
        # Sampling.
        max_completion_length=config.MAX_NEW_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # The loss.
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        # The optimizer.
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        # Nothing else that takes time.
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    texts = []
    for questions in batches:
        for question in questions:
            texts.append(codec.tokenizer.decode(codec.encode_prompt(question)))
    trainer = TimedTrainer(
        model=model,
        reward_funcs=made_up_rewards,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=codec.tokenizer,
        callbacks=[StepTimer()],
    )
    trainer.remove_callback(PrinterCallback)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    trainer.train()

    steps = []
    measured = zip(step_ends, step_ends[1:], generation_seconds, num_tokens, strict=False)
    for started, ended, generation, tokens in measured:
        steps.append(
            {
                "step": ended - started,
                "generation": generation,
                "update": ended - started - generation,
                "tokens": tokens,
            }
        )
    print_report(steps, prompts_of_steps)


def run_program(program: str, setting: str, model_name: str, seed: int) -> dict:
    """Measure "ours", "trl" or another checkout in a process of its own. Returns its report."""
    script = __file__
    mode = "swarm" if setting == "swarm" else "ours"
    environ = dict(os.environ)
    if program == "trl":
        mode = "trl"
    elif program != "ours":
        own_script = Path(program) / ".ci" / "speed.py"
        if own_script.exists() and setting != "swarm":
            script = str(own_script)
            environ.pop("CODE", None)  # that script measures the checkout in which it lies
        else:
            environ["CODE"] = program

    command = [sys.executable, script, mode, setting, model_name, str(seed)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(other: str, setting: str, model_name: str) -> None:
    """Measure both programs in alternating order, and print medians over all measured steps."""
    reports = {"ours": [], other: []}
    for seed in range(REPETITIONS):
        for program in sorted(reports, reverse=seed % 2 == 1):
            report = run_program(program, setting, model_name, seed)
            reports[program].append(report)
            seconds = [f"{step['step']:.2f}" for step in report["steps"]]
            print(program, seed, *seconds, flush=True)

    prompts = set()
    for runs in reports.values():
        prompts |= {json.dumps(report["prompts"]) for report in runs}
    assert len(prompts) == 1, "not the same prompts"

    for name in reports["ours"][0]["steps"][0]:
        medians = []
        for runs in reports.values():
            values = []
            for report in runs:
                values += [step[name] for step in report["steps"]]
            medians.append(statistics.median(values))
        ours, theirs = medians
        print(f"{name:10} ours {ours:9.3f}  {other} {theirs:9.3f}  {theirs / ours:.2f} x")

    medians = []
    for runs in reports.values():
        medians.append(statistics.median(report["peak_gb"] for report in runs))
    ours, theirs = medians
    print(f"peak GB    ours {ours:9.2f}  {other} {theirs:9.2f}  {theirs / ours:.2f} x")


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    modes = {"compare": compare, "ours": run_ours, "swarm": run_swarm, "trl": run_trl}
    modes[mode](*arguments)
