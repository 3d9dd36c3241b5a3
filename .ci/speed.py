"""How fast this is: beside TRL's GRPOTrainer, and beside another checkout of this program.

By hand, on an idle machine. TRL needs an environment of its own.

    python -m venv trl && trl/bin/pip install torch transformers reasoning-gym trl
    trl/bin/python .ci/speed.py compare trl arith MODEL      MODEL: a local folder or Hugging Face id, or tiny
    python .ci/speed.py compare FOLDER arith MODEL           FOLDER: another checkout, with a speed.py like this

Settings: arith (basic_arithmetic) and paper (its nine tasks) with 4 questions x 8 completions x 64 tokens,
tiny (its eight tasks) with 8 x 8 x 10. float32, two threads, one optimizer step, the same questions for all
programs, every second completion of a group rewarded. Environment:

    REPETITIONS   of each program, in alternating order (2)
    STEPS         measured in each of them, after one that warms up (3)
    ROWS          MICRO_BATCH_SIZE
    TRL_ROWS      its per_device_train_batch_size, the rest by gradient accumulation (all at once need more
                  than 24 GB in the setting paper)
"""

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, os.environ.get("CODE", str(Path(__file__).resolve().parent.parent)))
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

import grpo
import sapo

G, LEARNING_RATE, BETAS = 8, 1e-6, (0.9, 0.95)
SETTINGS = {  # tasks, questions, longest completion
    "arith": (["basic_arithmetic"], 4, 64), "paper": (grpo.PAPER_TASKS, 4, 64), "tiny": (grpo.SMALL_TASKS, 8, 10)
}  # fmt: skip
REPETITIONS, STEPS = int(os.environ.get("REPETITIONS", 2)), int(os.environ.get("STEPS", 3))


def load(setting: str, model_name: str):
    """The setting's Config, model and Codec, and STEPS + 1 lists of its questions."""
    tasks, questions, max_new_tokens = SETTINGS[setting]
    environ = {
        "MODEL_NAME": model_name, "DEVICE": "cpu", "DTYPE": "float32", "MAX_NEW_TOKENS": str(max_new_tokens),
        "LEARNING_RATE": str(LEARNING_RATE), "MICRO_BATCH_SIZE": os.environ.get("ROWS", "auto"),
    }  # fmt: skip
    config = sapo.settle(sapo.read_environment(environ)[0], {}, [])
    rng = random.Random(1)
    seeds = [[(rng.choice(tasks), rng.randrange(10**6)) for _ in range(questions)] for _ in range(STEPS + 1)]
    steps = [[grpo.lucky_question(*seed) for seed in each] for each in seeds]
    return config, *grpo.load_model(config, list(tasks)), steps


def report(steps: list[dict], prompts) -> None:
    """One line of JSON: the measured steps, the peak of this process, and the prompts' ids to compare."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps({"steps": steps[1:], "peak_gb": peak, "prompts": prompts}), flush=True)


def run_ours(setting: str, model_name: str, seed: str) -> None:
    grpo.keep_freed_memory()
    config, model, codec, batches = load(setting, model_name)
    optimizer = grpo.new_optimizer(model, config)
    rng, steps, seen = torch.Generator().manual_seed(int(seed)), [], []
    rows = grpo.rows_that_fit(model, config, 0)
    rewards = [float(i % 2) for i in range(G)]  # made up, so that every group has something to train on
    for questions in batches:
        began, prompts = time.perf_counter(), [codec.prompt(q) for q in questions]
        some = (model, prompts, G, config.MAX_NEW_TOKENS, 1.0, codec.eos_ids, rng, codec.eos_id)
        completions = grpo.generate(*some)
        generated = time.perf_counter()
        groups = [grpo.Group(p, group, rewards) for p, group in zip(prompts, completions, strict=True)]
        limits = {"max_new_tokens": config.MAX_NEW_TOKENS, "max_rows": rows, "pad_id": codec.eos_id}
        grpo.update(model, optimizer, groups, **limits)
        ended = time.perf_counter()
        tokens = sum(len(c) for group in completions for c in group)
        took = {"step": ended - began, "generation": generated - began, "update": ended - generated}
        steps.append({**took, "tokens": tokens})
        seen.append(prompts)
    report(steps, seen)


def run_trl(setting: str, model_name: str, seed: str) -> None:
    """A step: from one optimizer step's end to the next's. Generation: all of _generate_single_turn."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config, model, codec, batches = load(setting, model_name)
    rows = int(os.environ.get("TRL_ROWS", len(batches[0]) * G))
    pieces = len(batches[0]) * G // rows
    generation, tokens, seen, ends = [], [], [], []

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            began = time.perf_counter()
            out = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            generation.append(time.perf_counter() - began)
            tokens.append(sum(len(c) for c in out[0]))
            seen.append([list(p) for p in prompt_ids[::G]])
            return out

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

        on_train_begin = on_step_end

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, seed=int(seed), per_device_train_batch_size=rows,
        gradient_accumulation_steps=pieces, steps_per_generation=pieces, num_generations=G, num_iterations=1,
        max_completion_length=config.MAX_NEW_TOKENS, temperature=1.0, top_p=1.0, top_k=0, beta=0.0,
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", warmup_steps=0, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        max_steps=len(batches), gradient_checkpointing=False, shuffle_dataset=False, logging_strategy="no",
        save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    texts = [codec.tokenizer.decode(codec.prompt(q)) for questions in batches for q in questions]
    trainer = Trainer(
        model=model, reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=settings, train_dataset=Dataset.from_dict({"prompt": texts}), processing_class=codec.tokenizer,
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    trainer.train()
    spans = zip(ends, ends[1:], generation, tokens, strict=False)
    report([{"step": b - a, "generation": g, "update": b - a - g, "tokens": n} for a, b, g, n in spans], seen)


def compare(other: str, setting: str, model_name: str) -> None:
    """Both programs in processes of their own, in alternating order; medians over all measured steps."""
    found = {"ours": [], other: []}
    for seed in range(REPETITIONS):
        for program in sorted(found, reverse=seed % 2 == 1):
            code = {} if program in ("ours", "trl") else {"CODE": program}
            name = "trl" if program == "trl" else "ours"
            command = [sys.executable, __file__, name, setting, model_name, str(seed)]
            settings = dict(env=os.environ | code, stdout=subprocess.PIPE, text=True, check=True)
            done = subprocess.run(command, **settings)
            found[program].append(json.loads(done.stdout.splitlines()[-1]))
            print(program, seed, *(f"{s['step']:.2f}" for s in found[program][-1]["steps"]), flush=True)
    runs = [json.dumps(run["prompts"]) for runs in found.values() for run in runs]
    assert len(set(runs)) == 1, "not the same prompts"
    for key in ("step", "generation", "update", "tokens"):
        values = [[s[key] for run in runs for s in run["steps"]] for runs in found.values()]
        ours, theirs = map(statistics.median, values)
        print(f"{key:10} ours {ours:9.3f}  {other} {theirs:9.3f}  {theirs / ours:.2f} x")
    ours, theirs = (statistics.median(run["peak_gb"] for run in runs) for runs in found.values())
    print(f"peak GB    ours {ours:9.2f}  {other} {theirs:9.2f}  {theirs / ours:.2f} x")


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    {"compare": compare, "ours": run_ours, "trl": run_trl}[mode](*rest)
