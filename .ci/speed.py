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

# CODE: where the program to measure is, if not in this checkout. `compare` sets it.
sys.path.insert(0, os.environ.get("CODE", str(Path(__file__).resolve().parent.parent)))
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

import grpo
import sapo

NUM_GENERATIONS = 8  # G
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
        "MODEL_NAME": model_name, "DEVICE": "cpu", "DTYPE": os.environ.get("DTYPE", "float32"),
        "MAX_NEW_TOKENS": str(max_new_tokens), "LEARNING_RATE": "1e-6",
        "MICRO_BATCH_SIZE": os.environ.get("ROWS", "auto"),
    }  # fmt: skip
    env, _ = sapo.read_environment(environ)
    config = sapo.resolve_config(env, {}, [])
    model, codec = grpo.load_model(config, list(tasks))

    rng = random.Random(1)
    batches = [[] for _ in range(STEPS + 1)]
    for batch in batches:
        for _ in range(num_questions):
            task = rng.choice(tasks)
            batch.append(grpo.first_valid_question(task, rng.randrange(10**6)))
    return config, model, codec, batches


def print_report(steps: list[dict], prompts: list, who=resource.RUSAGE_SELF) -> None:
    """Print one line of JSON: the measured steps without the first, which warms up, the peak memory
    of this process, and the ids of the prompts, by which `compare` knows that they are equal."""
    peak_gb = resource.getrusage(who).ru_maxrss * 1024 / 1e9
    print(json.dumps({"steps": steps[1:], "peak_gb": peak_gb, "prompts": prompts}), flush=True)


def describe_step(step: float, generation: float, num_tokens: int) -> dict:
    """A measured step: its seconds and those of generation, and the tokens that it generated."""
    update = step - generation
    return {"step": step, "generation": generation, "update": update, "tokens": num_tokens}


def made_up_rewards(completions, **_) -> list[float]:
    """Every second completion is rewarded, so that every group is informative."""
    return [float(i % 2) for i in range(len(completions))]


def run_ours(setting: str, model_name: str, seed: str) -> None:
    """Measure this program."""
    grpo.keep_freed_memory()
    config, model, codec, batches = load(setting, model_name)
    optimizer = grpo.make_optimizer(model, config)
    update_limit = grpo.RowLimit(grpo.estimate_micro_batch_size(model, config, 0), "the update")
    generation_limit = grpo.RowLimit(2**30, "generation")

    steps = []
    prompts_of_steps = []
    for step, questions in enumerate(batches):
        started = time.perf_counter()
        prompts = [codec.encode_prompt(question) for question in questions]
        sampling_seed = 1000 * int(seed) + step
        completions = grpo.generate(
            model, codec, prompts, NUM_GENERATIONS, config, sampling_seed, generation_limit
        )
        generated = time.perf_counter()

        groups = []
        for prompt, of_prompt in zip(prompts, completions, strict=True):
            groups.append(grpo.Group(prompt, of_prompt, made_up_rewards(of_prompt)))
        grpo.update_policy(model, optimizer, groups, config, codec, update_limit)
        ended = time.perf_counter()

        num_tokens = sum(len(ids) for ids in itertools.chain(*completions))
        steps.append(describe_step(ended - started, generated - started, num_tokens))
        prompts_of_steps.append(prompts)
    print_report(steps, prompts_of_steps)


def run_swarm(setting: str, model_name: str, seed: str) -> None:
    """Measure the rounds of a swarm that run_swarm.sh starts."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            "PATH": os.environ["PATH"], "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1",
            "GDRIVE_PATH": f"{folder}/shared", "LOG_DIR": f"{folder}/logs",
            "MODEL_NAME": model_name, "DEVICE": "cpu", "SEED": seed, "MAX_ROUNDS": str(STEPS + 2),
            "WARM_START_STEPS": "200", "ANSWER_TAG_SHARE": "0.3", "ROUND_ADVANCE": "completion",
        }  # fmt: skip
        command = ["bash", Path(sapo.__file__).with_name("run_swarm.sh")]
        subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
        [log] = Path(folder).rglob("worker_0/**/metrics.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (usage.ru_utime + usage.ru_stime) / len(rows)

    # A round lasts from one row of a worker's log to the next.
    steps = []
    for before, row in itertools.pairwise(rows):
        lasted = row["timestamp"] - before["timestamp"]
        step = describe_step(lasted, row["generate_seconds"], row["generated_tokens"])
        steps.append(step | {"update": row["train_seconds"], "cpu": cpu})
    print_report(steps, [], resource.RUSAGE_CHILDREN)


def run_trl(setting: str, model_name: str, seed: str) -> None:
    """Measure TRL. A step lasts from the end of one optimizer step to the end of the next one. Its
    generation is all that _generate_single_turn does."""
    from datasets import Dataset
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    config, model, codec, batches = load(setting, model_name)
    num_rows = len(batches[0]) * NUM_GENERATIONS
    rows_per_piece = int(os.environ.get("TRL_ROWS", num_rows))
    num_pieces = num_rows // rows_per_piece

    generations = []  # seconds and tokens
    prompts_of_steps = []

    class TimedTrainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            started = time.perf_counter()
            output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            num_tokens = sum(len(ids) for ids in output[0])
            generations.append((time.perf_counter() - started, num_tokens))
            prompts_of_steps.append([list(ids) for ids in prompt_ids[::NUM_GENERATIONS]])
            return output

    settings = GRPOConfig(
        seed=int(seed), use_cpu=True, bf16=config.DTYPE == "bfloat16",

        # The batch.
        per_device_train_batch_size=rows_per_piece, gradient_accumulation_steps=num_pieces,
        steps_per_generation=num_pieces, num_generations=NUM_GENERATIONS, num_iterations=1,
        max_steps=len(batches), shuffle_dataset=False,

        # Sampling, loss and optimizer are this program's.
        max_completion_length=config.MAX_NEW_TOKENS, temperature=1.0, top_p=1.0, top_k=0,
        beta=0.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28,
        learning_rate=config.LEARNING_RATE, lr_scheduler_type="constant", warmup_steps=0,
        adam_beta1=0.9, adam_beta2=0.95,

        # Nothing else that takes time.
        gradient_checkpointing=False, logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, output_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    questions = itertools.chain(*batches)
    texts = [codec.tokenizer.decode(codec.encode_prompt(question)) for question in questions]
    trainer = TimedTrainer(
        model=model,
        reward_funcs=made_up_rewards,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=codec.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    step_ends = [time.perf_counter()]
    register_optimizer_step_post_hook(lambda *_: step_ends.append(time.perf_counter()))
    trainer.train()

    steps = []
    measured = zip(itertools.pairwise(step_ends), generations, strict=True)
    for (started, ended), (generation, num_tokens) in measured:
        steps.append(describe_step(ended - started, generation, num_tokens))
    print_report(steps, prompts_of_steps)


def run_program(program: str, setting: str, model_name: str, seed: int) -> dict:
    """Measure "ours", "trl" or another checkout in a process of its own. Returns its report."""
    script = __file__
    mode = "swarm" if setting == "swarm" else "ours"
    environ = dict(os.environ)
    if program == "trl":
        mode = "trl"
    elif program != "ours":
        environ["CODE"] = program
        own_script = Path(program) / ".ci" / "speed.py"
        if own_script.exists() and setting != "swarm":
            script = str(own_script)

    command = [sys.executable, script, mode, setting, model_name, str(seed)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(other: str, setting: str, model_name: str) -> None:
    """Measure both programs in alternating order, and print medians over all measured steps."""
    measured = {"ours": [], other: []}
    prompts = set()
    for seed in range(REPETITIONS):
        for program in sorted(measured, reverse=seed % 2 == 1):
            report = run_program(program, setting, model_name, seed)
            prompts.add(json.dumps(report["prompts"]))
            for step in report["steps"]:
                measured[program].append(step | {"peak GB": report["peak_gb"]})
            print(program, seed, *(f"{step['step']:.2f}" for step in report["steps"]), flush=True)
    assert len(prompts) == 1, "not the same prompts"

    for name in measured["ours"][0]:
        ours, theirs = [median(step[name] for step in steps) for steps in measured.values()]
        decimals = 2 if name == "peak GB" else 3
        numbers = f"ours {ours:9.{decimals}f}  {other} {theirs:9.{decimals}f}"
        print(f"{name:10} {numbers}  {theirs / ours:.2f} x")


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    modes = {"compare": compare, "ours": run_ours, "swarm": run_swarm, "trl": run_trl}
    modes[mode](*arguments)
