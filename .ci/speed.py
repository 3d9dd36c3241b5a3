"""How fast this is: beside TRL's GRPOTrainer, beside GenRL's way to generate, beside bare forward passes.

Not part of the gate: it wants an idle machine, and for TRL an environment of its own, which this project does
not need.

    python -m venv trl && trl/bin/pip install torch transformers reasoning-gym trl
    trl/bin/python .ci/speed.py compare arith MODEL       MODEL: a local folder or Hugging Face id, or tiny
    trl/bin/python .ci/speed.py generation arith MODEL
    trl/bin/python .ci/speed.py machine arith MODEL       tokens per second, memory and store of this machine
    trl/bin/python .ci/speed.py inside arith MODEL        the share of it that the model and torch take
    trl/bin/python .ci/speed.py round                     what a round of tiny costs beside learning
    trl/bin/python .ci/speed.py fetch                     fetching with 8, 100 and 1000 peers

Settings: arith (basic_arithmetic) and paper (its nine tasks) with 4 questions x 8 completions x 64 tokens,
tiny (its eight tasks) with 8 x 8 x 10. float32, two threads, one optimizer step, the same questions for all
programs, every second completion of a group rewarded. Environment:

    REPETITIONS   of each program, in alternating order (2)
    STEPS         measured in each of them, after one that warms up (3)
    ROWS          MICRO_BATCH_SIZE
    TRL_ROWS      its per_device_train_batch_size, the rest by gradient accumulation (all at once need more
                  than 24 GB in the setting paper)
    NO_EOS        nothing ends a completion
    GIVE_BACK     without keep_freed_memory
"""

import contextlib
import io
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.update(
    {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "TOKENIZERS_PARALLELISM": "false"}
)

import torch

import sapo
from drive_store import DriveStore
from grpo import PAPER_TASKS, SMALL_TASKS, Group, generate, keep_freed_memory, left_pad, load_model
from grpo import available_memory, lucky_question, new_optimizer, rows_that_fit, update

G, LEARNING_RATE, BETAS = 8, 1e-6, (0.9, 0.95)
SETTINGS = {
    "arith": (["basic_arithmetic"], 4, 64),
    "paper": (PAPER_TASKS, 4, 64),
    "tiny": (SMALL_TASKS, 8, 10),
}
REPETITIONS, STEPS = int(os.environ.get("REPETITIONS", 2)), int(os.environ.get("STEPS", 3))


def load(setting: str, model_name: str):
    """The setting's Config, model and Codec, and STEPS + 1 lists of its questions."""
    tasks, questions, max_new_tokens = SETTINGS[setting]
    config, _ = sapo.read_config({
        "MODEL_NAME": model_name, "DEVICE": "cpu", "DTYPE": "float32", "MAX_NEW_TOKENS": str(max_new_tokens),
        "LEARNING_RATE": str(LEARNING_RATE), "MICRO_BATCH_SIZE": os.environ.get("ROWS", "auto"),
    })  # fmt: skip
    rng = random.Random(1)
    steps = [
        [lucky_question(rng.choice(tasks), rng.randrange(10**6)) for _ in range(questions)]
        for _ in range(STEPS + 1)
    ]
    return config, *load_model(config, list(tasks)), steps


def report(steps: list[dict], prompts) -> None:
    """One line of JSON: the measured steps, the peak of this process, and the prompts' ids to compare."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps({"steps": steps[1:], "peak_gb": peak, "prompts": prompts}), flush=True)


def our_steps(config, model, codec, batches, seed: int) -> tuple[list[dict], list]:
    """What each step took, and its prompts."""
    optimizer = new_optimizer(model, config)
    rng, rows, steps, seen = (
        torch.Generator().manual_seed(seed),
        rows_that_fit(model, config, available_memory(config.DEVICE)[0])[0],
        [],
        [],
    )
    rewards = [float(i % 2) for i in range(G)]  # made up, so that every group has something to train on
    for questions in batches:
        began, prompts = time.perf_counter(), [codec.prompt(q) for q in questions]
        some = (model, prompts, G, config.MAX_NEW_TOKENS, 1.0, codec.eos_ids, rng, codec.eos_id)
        completions = generate(*some)
        generated = time.perf_counter()
        groups = [Group(p, group, rewards) for p, group in zip(prompts, completions, strict=True)]
        limits = {"max_new_tokens": config.MAX_NEW_TOKENS, "max_rows": rows, "pad_id": codec.eos_id}
        update(model, optimizer, groups, **limits)
        ended = time.perf_counter()
        tokens = sum(len(c) for group in completions for c in group)
        took = {"step": ended - began, "generation": generated - began, "update": ended - generated}
        steps.append({**took, "tokens": tokens})
        seen.append(prompts)
    return steps, seen


def run_ours(setting: str, model_name: str, seed: int) -> None:
    if not os.environ.get("GIVE_BACK"):
        keep_freed_memory()
    report(*our_steps(*load(setting, model_name), seed))


def machine(setting: str, model_name: str) -> None:
    """Tokens per second, seconds per round, peak memory, and milliseconds of a local folder."""
    keep_freed_memory()
    config, model, codec, batches = load(setting, model_name)
    steps = our_steps(config, model, codec, batches, 0)[0][1:]  # the first one warms up
    tokens, generating, training, each = (
        statistics.median(step[key] for step in steps) for key in ("tokens", "generation", "update", "step")
    )
    publishing, fetching = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = DriveStore(folder, "x", "me")
        store.create()
        for t in range(20):
            groups = {str(i): a_group(100 * t + i) for i in range(len(batches[0]))}
            began = time.perf_counter()
            store.publish(t, 0, "me", {}, groups)
            published = time.perf_counter()
            store.fetch(t, 0, "me")
            publishing.append(1000 * (published - began))
            fetching.append(1000 * (time.perf_counter() - published))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    publish_ms, fetch_ms = statistics.median(publishing), statistics.median(fetching)
    print(f"{model_name} on {config.DEVICE}, {setting}: {len(batches[0])} questions x {G} completions")
    print(f"generated {tokens / generating:.0f} tokens/s, trained {tokens / training:.0f} tokens/s")
    print(f"a round {each:.2f} s, {peak:.2f} GB at the peak")
    print(f"store {publish_ms:.1f} ms to publish, {fetch_ms:.1f} ms to fetch (a temporary folder)")


def inside(setting: str, model_name: str) -> None:
    """The share of a step inside the model's forward pass, backward, clipping and Adam: what bounds it here.

    And of the peak what weights, gradients and Adam's moments take, which every trainer needs.
    """
    keep_freed_memory()
    config, model, codec, batches = load(setting, model_name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    seconds = dict.fromkeys(("forward", "head", "backward", "clip", "adam"), 0.0)
    head, running = model.get_output_embeddings(), []
    for place, name, part in (
        (model.base_model, "forward", "forward"), (head, "forward", "head"),
        (torch.Tensor, "backward", "backward"), (torch.nn.utils, "clip_grad_norm_", "clip"),
        (torch.optim.AdamW, "step", "adam"),
    ):  # fmt: skip
        setattr(place, name, timed(getattr(place, name), seconds, part, running))
    steps, _ = our_steps(config, model, codec, batches, 0)
    total = sum(step["step"] for step in steps)
    shares = ", ".join(f"{part} {spent / total:.0%}" for part, spent in seconds.items())
    print(f"{model_name}, {setting}: {shares}, together {sum(seconds.values()) / total:.0%} of a step")
    parameters, peak = sum(p.numel() for p in model.parameters()), resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"peak {peak.ru_maxrss * 1024 / 1e9:.2f} GB: {before:.2f} with the model loaded, "
        f"gradients and moments {12e-9 * parameters:.2f}, the rest activations"
    )


def run_trl(setting: str, model_name: str, seed: int) -> None:
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
        def on_train_begin(self, *args, **kwargs):
            ends.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, seed=seed, per_device_train_batch_size=rows,
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


def compare(setting: str, model_name: str) -> None:
    """Both programs in processes of their own, in alternating order; medians over all measured steps."""
    found = {"ours": [], "trl": []}
    for seed in range(REPETITIONS):
        for program in sorted(found, reverse=seed % 2 == 1):
            command = [sys.executable, __file__, program, setting, model_name, str(seed)]
            line = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[
                -1
            ]
            found[program].append(json.loads(line))
            print(
                f"{program} {seed}: " + " ".join(f"{s['step']:.2f}" for s in found[program][-1]["steps"]),
                "s a step",
                flush=True,
            )
    assert len({json.dumps(run["prompts"]) for runs in found.values() for run in runs}) == 1, (
        "not the same prompts"
    )

    def median(program, key, per_token=False):
        steps = [s for run in found[program] for s in run["steps"]]
        return statistics.median(s[key] / (s["tokens"] if per_token else 1) for s in steps)

    for key in ("step", "generation", "update", "tokens"):
        ours, trl = median("ours", key), median("trl", key)
        each = (
            f", per generated token {median('trl', key, True) / median('ours', key, True):.2f} x"
            if key != "tokens"
            else ""
        )
        print(f"{key:10} ours {ours:9.3f}  trl {trl:9.3f}  {trl / ours:.2f} x{each}")
    ours, trl = (statistics.median(run["peak_gb"] for run in found[program]) for program in ("ours", "trl"))
    print(f"peak GB    ours {ours:9.2f}  trl {trl:9.2f}  {trl / ours:.2f} x")


@torch.no_grad()
def bare_forwards(model, prompts, max_new_tokens: int, pad_id: int) -> int:
    """What no generation can do without: prefill of each prompt, then one forward pass a token for all completions."""
    ids, mask = left_pad(prompts, pad_id, model.device)
    out = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    cache.batch_repeat_interleave(G)
    mask = None if mask is None else mask.repeat_interleave(G, 0)
    token = torch.full((len(prompts) * G, 1), 5)
    for _ in range(max_new_tokens - 1):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(token), 1)], 1)
        model(input_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return len(token) * max_new_tokens


@torch.no_grad()
def genrl(model, prompts, max_new_tokens: int, codec) -> int:
    """G calls of model.generate, each with a prefill of its own: the completions of a group one after another."""
    ids, mask = left_pad(prompts, codec.eos_id, model.device)
    mask, tokens = torch.ones_like(ids) if mask is None else mask, 0
    for _ in range(G):
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=True, top_k=0,
            pad_token_id=codec.eos_id, eos_token_id=sorted(codec.eos_ids),
        )  # fmt: skip
        for row in out[:, ids.shape[1] :].tolist():
            tokens += next((i + 1 for i, t in enumerate(row) if t in codec.eos_ids), len(row))
    return tokens


def generation(setting: str, model_name: str) -> None:
    """Milliseconds per generated token, in alternating order; bare forwards never end a row early."""
    config, model, codec, batches = load(setting, model_name)
    if os.environ.get("NO_EOS"):
        codec.eos_ids = {model.config.vocab_size}
    rng = torch.Generator().manual_seed(0)
    programs = {
        "ours": lambda p: sum(
            len(c)
            for g in generate(model, p, G, config.MAX_NEW_TOKENS, 1.0, codec.eos_ids, rng, codec.eos_id)
            for c in g
        ),
        "bare": lambda p: bare_forwards(model, p, config.MAX_NEW_TOKENS, codec.eos_id),
        "genrl": lambda p: genrl(model, p, config.MAX_NEW_TOKENS, codec),
    }
    model.eval()
    took = {name: [] for name in programs}
    for step, questions in enumerate(batches):
        for name in sorted(programs, reverse=step % 2 == 1):
            began = time.perf_counter()
            tokens = programs[name]([codec.prompt(q) for q in questions])
            took[name].append(1000 * (time.perf_counter() - began) / tokens)
    ours = statistics.median(took["ours"][1:])  # the first one warms up
    for name, each in took.items():
        middle = statistics.median(each[1:])
        print(f"{name:6} {middle:8.2f} ms per token, {middle / ours:.2f} x ours ({len(each) - 1} rounds)")


def rest_of_a_round(*_) -> None:
    """The share of training that is neither generate() nor update(): prompts, scores, the folder, the log."""
    seconds = dict.fromkeys(("generate", "update", "train"), 0.0)
    for name in seconds:
        setattr(sapo, name, timed(getattr(sapo, name), seconds, name))
    given = {"MODEL_NAME": "tiny", "LOCAL_NODES": "4", "MAX_ROUNDS": "150"}
    given |= {"NUM_TRAIN_SAMPLES": "4", "NUM_TRANSPLANT_TREES": "4"}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        given |= {"GDRIVE_PATH": folder, "EXPERIMENT_NAME": f"speed-{time.time():.0f}"}
        given |= {k: os.environ[k] for k in (*given, "MAX_NEW_TOKENS", "TASKS") if k in os.environ}
        sapo.main(given)
    seconds["rest"] = seconds["train"] - seconds["generate"] - seconds["update"]
    shares = ", ".join(f"{k} {s / seconds['train']:.1%}" for k, s in seconds.items())
    print("{MODEL_NAME}, {LOCAL_NODES} nodes, {MAX_ROUNDS} rounds: ".format(**given) + shares)


def timed(function, seconds: dict, name: str, running: list | None = None):
    """The function, which adds to seconds[name]; a call inside one that shares `running` is not counted."""
    running = [] if running is None else running

    def call(*args, **kwargs):
        running.append(name)
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            running.pop()
            seconds[name] += 0 if running else time.perf_counter() - began

    return call


def fetch(*_) -> None:
    """Step 4 of a round, J = 4, with 8, 100 and 1000 peers that have all published; of it one look."""
    for peers in (8, 100, 1000):
        with tempfile.TemporaryDirectory() as folder:
            config, _ = sapo.read_config({
                "MODEL_NAME": "tiny", "NUM_TRANSPLANT_TREES": "4", "NODE_ID": "me", "GDRIVE_PATH": folder,
                "EXPERIMENT_NAME": "x",
            })  # fmt: skip
            store, log = DriveStore(folder, "x", "me"), sapo.Log("me", "", "")
            store.create()
            for peer in range(peers):
                store.register(f"p{peer}", "worker", {})
                for t in range(7):
                    groups = {str(i): a_group(peers * t + peer * 7 + i) for i in range(4)}
                    store.publish(t, 0, f"p{peer}", {}, groups)
            model, codec = load_model(config, SMALL_TASKS)
            swarm = sapo.Swarm(
                store, {"me": store.register("me", "worker", {})}, config, log.event, log.lines
            )
            node = sapo.Node("me", model, None)
            stop, tasks = sapo.StopButton(), list(SMALL_TASKS)
            run = sapo.Run(config, store, swarm, codec, [node], log, stop, tasks, Path(folder))
            began = time.perf_counter()
            swarm.start()
            first, took = time.perf_counter() - began, []
            for t in range(1, 7):
                swarm.round, began = t, time.perf_counter()
                sapo.sample_external(run, node, t, 0)
                took.append(time.perf_counter() - began)
            swarm.close(5.0)
        middle = 1000 * statistics.median(took)
        print(f"{peers:5} peers: {middle:.0f} ms to sample externals, {1000 * first:.0f} ms the first look")


def a_group(seed: int) -> dict:
    q = lucky_question("small_gcd", seed)
    texts = [f"<answer>{q.answer if i < 4 else '?'}</answer>" for i in range(G)]
    completions = [{"response": text, "finished": True} for text in texts]
    return {"task": q.task, "seed": q.seed, "prompt": q.text, "answer": q.answer, "completions": completions}


if __name__ == "__main__":
    what, setting, model_name, seed = (*sys.argv[1:], *["", "tiny", "tiny", "0"][len(sys.argv) - 1 :])
    programs = {"ours": run_ours, "trl": run_trl}
    roles = {"compare": compare, "generation": generation, "machine": machine}
    roles |= {"round": rest_of_a_round, "fetch": fetch, "inside": inside}
    if what not in programs | roles or setting not in SETTINGS:
        sys.exit(__doc__)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    programs[what](setting, model_name, int(seed)) if what in programs else roles[what](setting, model_name)
