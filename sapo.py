# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "transformers", "reasoning-gym"]
# ///
"""SAPO, Swarm sAmpling Policy Optimization (arXiv:2509.08721): N nodes, each with its own model, learn by GRPO on
reasoning-gym questions and share decoded rollouts, plain text, through one shared folder.

`train` is the paper's Algorithm 1; read it first. The steps of a round stand above it, in their order; the clock
(`next_round`), the log line and checkpoints below. Configuration is environment variables only (class Config);
`python sapo.py` alone trains, NODE_ROLE=coordinator keeps a swarm in step.
"""

import contextlib
import copy
import ctypes
import decimal
import difflib
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
import platform
import random
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter, deque
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import reasoning_gym
import torch
import transformers
from reasoning_gym.logic.propositional_logic import Expression
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

if "DriveStore" not in globals():  # pasted into one notebook cell, the three modules are there already
    from coordinator import Liveness, Pace, coordinate, experiment_status, is_known_dead, process_identity
    from coordinator import compare, in_notebook, monitor, report_text, reward_rows, summarize, validate_experiment, write_report
    from drive_store import COORDINATOR, MAX_SEED, BadFile, Courier, DriveStore, StoreError
    from drive_store import bucket, check_name, list_experiments, read_bytes, read_json, write_atomically
    from grpo import Group, check_head, generate, halving_on_oom, sequence_logps, shared_prompt_logps, update

# -------- Configuration ---------------------------------------------------------------------------------------


class ConfigError(ValueError):
    """Settings that cannot be used. The text names each variable, what was found and what is allowed."""


def var(default, help, allowed=None, low=None, high=None):
    return field(default=default, metadata={"help": help, "allowed": allowed, "low": low, "high": high})


@dataclass(frozen=True, repr=False)
class Config:
    """Every environment variable, one line each. A default of "auto" is worked out by `resolve`."""

    GDRIVE_PATH: str = var("auto", "the shared folder; auto = /content/drive/MyDrive/rl-swarm where that mount exists, else ./rl-swarm")
    EXPERIMENT_NAME: str = var("default", "one experiment = one subfolder, isolated from all others")
    NODE_ROLE: str = var("worker", "worker or coordinator; the readers monitor, report, validate and benchmark change no experiment", ("worker", "coordinator", "monitor", "report", "validate", "benchmark"))
    NODE_ID: str = var("auto", "unique name of this node; auto = node_<8 hex>, or node if LOCAL_NODES > 1")
    MODEL_NAME: str = var("auto", "tiny (embedded, offline), a Hugging Face id or a local folder; auto = Gensyn/Qwen2.5-0.5B-Instruct with an accelerator, else tiny")
    SEED: int = var(42, "the swarm's seed; nodes differ by NODE_ID", low=0, high=2**31)
    TEST_MODE: bool = var(False, "quick validation: 3 rounds, I = 4, G = 4, tiny with a short warm start")
    MAX_ROUNDS: int = var(2000, "rounds to train", low=1, high=10**6)
    MAX_STAGES: int = var(1, "generate-share-update stages in a round", low=1, high=100)
    NUM_TRAIN_SAMPLES: int = var(8, "I: own questions per round and stage", low=1, high=4096)
    NUM_TRANSPLANT_TREES: int = var(0, "J: external groups per round and stage; 0 learns nothing from peers", low=0, high=4096)
    NUM_GENERATIONS: int = var(8, "G: completions per question", low=2, high=64)
    LOCAL_NODES: int = var(1, "workers hosted by this process, taking turns: NODE_ID_0, NODE_ID_1 …", low=1, high=256)
    TASKS: str = var("auto", "comma list of tasks; auto = the paper's nine, for tiny the eight small ones; or what the experiment began with")
    NUM_SHOTS: int = var("auto", "solved examples in the prompt of a model without chat template; auto = 2, for tiny 0", low=0, high=16)
    WARM_START_STEPS: int = var("auto", "supervised steps before RL on (question, <answer>) pairs, cached for all nodes; auto = 1750 for tiny, else 0", low=0, high=10**6)
    ANSWER_TAG_SHARE: float = var(0.02, "share of the rewarded answer style in the last phase of tiny's warm start", low=0, high=1)
    LEARNING_RATE: float = var("auto", "AdamW; auto = 3e-4 for tiny, else 1e-6", low=0, high=1)
    TEMPERATURE: float = var(1.0, "of sampling and of the log-probabilities in the loss", low=0.01, high=100)
    MAX_NEW_TOKENS: int = var("auto", "longest completion; auto = 10 for tiny, else 256", low=1, high=32768)
    CLIP_LOW: float = var(0.2, "ratio clipped below at 1 - this", low=0, high=1)
    CLIP_HIGH: float = var(0.28, "ratio clipped above at 1 + this", low=0, high=10)
    NUM_ITERATIONS: int = var(1, "optimizer steps on the completions of one stage; above 1 clipping bites", low=1, high=100)
    LOSS_TYPE: str = var("dapo", "dapo: mean over all tokens; grpo: mean of per-completion means; dr_grpo: sum / (B x MAX_NEW_TOKENS)", ("dapo", "grpo", "dr_grpo"))
    MICRO_BATCH_SIZE: int = var("auto", "completions per forward pass in the update; auto = what fits, on a CPU about a group", low=1, high=65536)
    DTYPE: str = var("auto", "compute type, weights stay float32; auto = bfloat16 where the hardware has it", ("auto", "float32", "bfloat16"))
    DEVICE: str = var("auto", "auto = cuda, mps or cpu, the first there is", ("auto", "cuda", "mps", "cpu"))
    REWARD: str = var("exact", "exact: 1 if the verifier's score is at least 0.99, else 0; verifier: its raw score", ("exact", "verifier"))
    EXTERNAL_FILTER: bool = var(True, "drop zero-advantage groups before drawing externals")
    LOCAL_OVERSAMPLE: int = var(1, "k: generate k x I questions, train on I of them, informative ones first (the fair baseline)", low=1, high=64)
    COORDINATOR_ROUND_INTERVAL: float = var(60.0, "seconds of a round under time, and at the latest under hybrid", low=0.01, high=86400)
    ROUND_ADVANCE: str = var("hybrid", "time, completion (all live workers submitted) or hybrid (either)", ("time", "completion", "hybrid"))
    ROLLOUT_PUBLISH_FREQUENCY: str = var("stage", "a file per question (generation), per stage or per round", ("generation", "stage", "round"))
    ROLLOUT_MAX_AGE: int = var(4, "how many rounds back externals may come from", low=0, high=1000)
    FETCH_MAX_PEERS: int = var(10, "how many peers to read per round, drawn at random", low=1, high=1000)
    FETCH_TIMEOUT_SECONDS: float = var(30.0, "how long to wait for this round's rollouts of live peers", low=0, high=3600)
    ROLLOUT_CLEANUP_ENABLED: bool = var(False, "remove own old rollouts")
    ROLLOUT_KEEP_LAST_N_ROUNDS: int = var(10, "rounds of rollouts to keep; at least CHECKPOINT_INTERVAL + ROLLOUT_MAX_AGE are kept", low=1, high=10**6)
    ROLLOUT_ARCHIVE_OLD: bool = var(False, "move old rollouts to archives/ instead of deleting them")
    CHECKPOINT_INTERVAL: int = var(10, "rounds between checkpoints", low=1, high=10**6)
    CHECKPOINT_KEEP: int = var(2, "checkpoints to keep", low=1, high=1000)
    EVAL_INTERVAL: int = var(0, "rounds between held-out evaluations (pass@1); 0 = none", low=0, high=10**6)
    EVAL_SAMPLES: int = var(64, "held-out questions, from a seed range no node trains on", low=1, high=65536)
    STALE_AFTER_SECONDS: float = var(300.0, "silence after which a node no longer counts as live", low=1, high=86400)
    HUGGINGFACE_ACCESS_TOKEN: str = var("", "push the model to the Hub with each checkpoint; never printed or stored")
    HF_REPO: str = var("auto", "where to; auto = <user>/<experiment>-<node>")
    NUM_WORKERS: int = var(4, "run_swarm.sh: workers to start; validate: nodes to expect", low=1, high=256)
    CONFIGS: str = var("", "run_swarm.sh: I/J pairs to compare, such as 8/0 4/4")
    SEEDS: str = var("", "run_swarm.sh: seeds to compare them over")

    def __repr__(self):  # the default one would show the access token in every traceback
        return config_table(self)


TEST_MODE_DEFAULTS = {"MAX_ROUNDS": 3, "NUM_TRAIN_SAMPLES": 4, "NUM_GENERATIONS": 4, "MODEL_NAME": "tiny", "WARM_START_STEPS": 60}
SHARED_SETTINGS = ("SEED", "TASKS", "REWARD", "MAX_STAGES")  # the same for all nodes of an experiment, and for ever
PRIVATE_SETTINGS = ("HUGGINGFACE_ACCESS_TOKEN", "HF_REPO", "NODE_ID", "NODE_ROLE", "GDRIVE_PATH", "DEVICE")  # not in config.json


def parse_value(text: str, spec):
    """One variable's text -> its value; ValueError says what is allowed."""
    kind, allowed = spec.type, spec.metadata["allowed"]
    low, high = spec.metadata["low"], spec.metadata["high"]
    if text == "auto" and spec.default == "auto":
        return text
    if kind is bool:  # never bool(text): bool("False") is True
        words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
        if text.lower() not in words:
            raise ValueError("expected True or False")
        return words[text.lower()]
    if kind is str:
        if allowed and text not in allowed:
            raise ValueError("expected " + ", ".join(allowed))
        return text
    bounds = f"{'an integer' if kind is int else 'a number'} from {low} to {high}" + (", or auto" if spec.default == "auto" else "")
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"expected {bounds}") from None
    if not low <= value <= high:  # also refuses nan
        raise ValueError(f"expected {bounds}")
    return value


def read_config(environ) -> tuple[Config, list[str]]:
    """Environment -> (Config with every "auto" worked out, warnings). All mistakes are reported in one ConfigError."""
    specs = {f.name: f for f in fields(Config)}
    given, mistakes, warnings = {}, [], []
    for name, spec in specs.items():
        if text := environ.get(name, "").strip():
            try:
                given[name] = parse_value(text, spec)
            except ValueError as error:
                mistakes.append(f"{name}={environ[name]!r}: {error}")
    for name in environ:
        near = difflib.get_close_matches(name, specs, n=1, cutoff=0.88)
        if near and name not in specs and name.isupper():
            warnings.append(f"{name} is not a variable of this program: did you mean {near[0]}?")
    if given.get("TEST_MODE"):
        given = {**TEST_MODE_DEFAULTS, **given}
    config = Config(**given)
    for name in ("EXPERIMENT_NAME", "NODE_ID"):
        try:
            check_name(getattr(config, name), name)
        except ValueError as error:
            mistakes.append(str(error))
    if config.NODE_ROLE == "worker" and config.NODE_ID.lower() == COORDINATOR:
        mistakes.append(f"NODE_ID={config.NODE_ID!r}: this name is the coordinator's seat; choose another")
    if config.LOCAL_NODES > 1 and len(config.NODE_ID) > 60:
        mistakes.append(f"NODE_ID={config.NODE_ID!r}: at most 60 characters when LOCAL_NODES > 1")
    tasks = [task.strip() for task in config.TASKS.split(",")]
    mistakes += [f"TASKS: {why_refused(task)}" for task in tasks if task not in TASK_TABLE and config.TASKS != "auto"]
    needed = config.CHECKPOINT_INTERVAL + config.ROLLOUT_MAX_AGE
    if config.ROLLOUT_CLEANUP_ENABLED and given.get("ROLLOUT_KEEP_LAST_N_ROUNDS", needed) < needed:
        mistakes.append(
            f"ROLLOUT_KEEP_LAST_N_ROUNDS={config.ROLLOUT_KEEP_LAST_N_ROUNDS}: a resumed node replays up to CHECKPOINT_INTERVAL + "
            f"ROLLOUT_MAX_AGE = {needed} rounds; expected at least that"
        )
    if mistakes:
        raise ConfigError("these settings cannot be used:\n  " + "\n  ".join(mistakes))
    return resolve(replace(config, TASKS=",".join(tasks))), warnings


def resolve(config: Config) -> Config:
    """Work out every "auto" except TASKS, which may come from the experiment's config.json."""
    there = [name for name, found in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()), ("cpu", True)) if found]
    device = there[0] if config.DEVICE == "auto" else config.DEVICE
    if device not in there:
        raise ConfigError(f"DEVICE={device!r}: this machine has {' and '.join(there)}")
    model = config.MODEL_NAME
    if model == "auto":
        model = "tiny" if device == "cpu" else "Gensyn/Qwen2.5-0.5B-Instruct"
    tiny = model == "tiny"
    colab = Path("/content/drive/MyDrive")
    has_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 has none
    auto = {
        "GDRIVE_PATH": str(colab / "rl-swarm") if colab.is_dir() else "rl-swarm",
        "NODE_ID": "node" if config.LOCAL_NODES > 1 else f"node_{secrets.token_hex(4)}",
        "NUM_SHOTS": 0 if tiny else 2,
        "WARM_START_STEPS": 1750 if tiny else 0,
        "LEARNING_RATE": 3e-4 if tiny else 1e-6,
        "MAX_NEW_TOKENS": 10 if tiny else 256,
        "DTYPE": "bfloat16" if has_bf16 else "float32",
    }
    chosen = {name: value for name, value in auto.items() if getattr(config, name) == "auto"}
    if config.NODE_ROLE == "coordinator":
        chosen["NODE_ID"] = COORDINATOR
    return replace(config, MODEL_NAME=model, DEVICE=device, **chosen)


def config_table(config: Config) -> str:
    """The settings in force, one per line, non-defaults marked with *; a secret only as set or unset."""
    lines = []
    for spec in fields(config):
        value = getattr(config, spec.name)
        shown = ("set" if value else "unset") if spec.name == "HUGGINGFACE_ACCESS_TOKEN" else value
        lines.append(f"{'*' if value != spec.default else ' '} {spec.name:28} {shown}")
    return "\n".join(lines)


# -------- Tasks and rewards -----------------------------------------------------------------------------------

SMALL_RANGE = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

# name -> (reasoning-gym dataset, its settings). Add a task here only after reading its score_answer: a peer's text reaches it.
TASK_TABLE = {
    # the paper's nine, at reasoning-gym's default difficulty
    "base_conversion": ("base_conversion", {"min_value": 1}),  # it writes 0 as an empty string
    "basic_arithmetic": ("basic_arithmetic", {}),
    "arc_1d": ("arc_1d", {}),
    "bf": ("bf", {}),
    "propositional_logic": ("propositional_logic", {}),
    "fraction_simplification": ("fraction_simplification", {}),
    "decimal_arithmetic": ("decimal_arithmetic", {}),
    "calendar_arithmetic": ("calendar_arithmetic", {}),
    "binary_matrix": ("binary_matrix", {}),
    # eight small ones, within reach of the embedded model
    "small_arithmetic": ("basic_arithmetic", {**SMALL_RANGE, "operators": ("+", "-", "*"), "allow_parentheses": False, "allow_negation": False}),
    "small_bases": ("base_conversion", {"min_base": 2, "max_base": 4, "min_value": 1, "max_value": 31}),
    "small_fractions": ("fraction_simplification", {"max_value": 9, "max_factor": 5, "styles": ("plain",)}),
    "small_chain_sum": ("chain_sum", {"min_terms": 3, "max_terms": 3, "max_digits": 1}),
    "small_gcd": ("gcd", {"max_value": 30}),
    "small_lcm": ("lcm", {"max_value": 12}),
    "small_count_bits": ("count_bits", {"max_n": 63}),
    "small_products": ("products", SMALL_RANGE),
    # others whose verifier was read
    "chain_sum": ("chain_sum", {}),
    "count_bits": ("count_bits", {}),
    "gcd": ("gcd", {}),
    "lcm": ("lcm", {}),
    "products": ("products", {}),
}
PAPER_TASKS = tuple(TASK_TABLE)[:9]
SMALL_TASKS = tuple(TASK_TABLE)[9:17]
EVAL_ON_ANSWER = (
    "spiral_matrix", "string_insertion", "n_queens", "countdown", "puzzle24", "simple_integration",
    "intermediate_integration", "polynomial_multiplication",
)  # fmt: skip
UNSTABLE = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
HELD_OUT_SEEDS = range(MAX_SEED // 2, MAX_SEED)  # training seeds lie below
MAX_SCORED_CHARS = 4096  # of the end of a completion


def why_refused(task: str) -> str:
    """Why a task is not in TASK_TABLE, as a sentence."""
    if task in EVAL_ON_ANSWER:
        return f"{task!r} is refused: its verifier runs eval on the answer, so a peer's text could run code here"
    if task in UNSTABLE:
        return f"{task!r} is refused: its questions differ between processes, so peers could not verify them"
    near = difflib.get_close_matches(task, TASK_TABLE, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{task!r} is refused: unknown, or its verifier has not been checked against hostile answers; {hint}allowed: " + ", ".join(TASK_TABLE)


@dataclass(frozen=True)
class Question:
    """(task, seed) regenerates everything else on any machine."""

    task: str
    seed: int
    text: str
    answer: str
    dataset: object = field(repr=False, compare=False)
    entry: dict = field(repr=False, compare=False)


@functools.lru_cache(maxsize=8192)
def make_question(task: str, seed: int) -> Question:
    """Item 0 of a fresh dataset: inside reasoning-gym item i uses Random(seed + i), so items of neighbouring seeds overlap."""
    name, settings = TASK_TABLE[task]
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=1, **settings)
    quiet = contextlib.redirect_stdout(io.StringIO()) if name == "bf" else contextlib.nullcontext()  # it prints dots
    with decimal.localcontext(), quiet:  # decimal_arithmetic would leave its precision behind for the whole process
        entry = dataset[0]
    answer = entry["answer"] if entry["answer"] is not None else entry["metadata"]["example_answer"]
    return Question(task, seed, entry["question"], answer, dataset, entry)


def score(question: Question, text: str, kind: str = "exact") -> float:
    """Reward in [0, 1] of a completion's text, by reasoning-gym's verifier. Never raises, never evaluates the text.

    The answer is what stands in the last <answer>…</answer> (with nested tags, all from the first opening one).
    exact: 1 if the verifier gives at least 0.99, else 0, because verifiers pay small sums for garbage, which the
    normalisation within a group would blow up to a full-size advantage. verifier: the raw score.
    """
    answer, source = find_answer(text), question.entry["metadata"]["source_dataset"]
    if answer is None:
        return 0.0
    try:
        if source == "binary_matrix":
            raw = float(answer == question.answer)  # its verifier calls eval(answer)
        elif source == "propositional_logic" and not is_small_formula(question, answer):
            raw = 0.0
        else:
            with decimal.localcontext():
                raw = float(question.dataset.score_answer(answer, question.entry))
    except Exception:  # whatever a verifier trips over is a wrong answer
        raw = 0.0
    raw = min(1.0, max(0.0, raw)) if math.isfinite(raw) else 0.0
    return float(raw >= 0.99) if kind == "exact" else raw


def is_small_formula(question: Question, answer: str) -> bool:
    """Short, and only the question's own variables: the verifier's work doubles with every distinct one (9 s for 69 chars).

    Its own parser must say what a variable is: to it "P ¬P", "P()" and "PP" are three.
    """
    allowed = set(question.entry["metadata"]["variables"])
    return len(answer) <= 200 and question.dataset._collect_variables([Expression.from_string(answer)]) <= allowed


def find_answer(text: str) -> str | None:
    """What stands in the last answer tag. Text is capped, and cut after it: there extract_answer would be quadratic."""
    text = text[-MAX_SCORED_CHARS:]
    return extract_answer(text[: text.rfind("</answer>") + len("</answer>")])


def stream_seed(config: Config, node_id: str, round_: int, stage: int, purpose: str, i: int = 0) -> int:
    """Seed of one random stream, from a hash: no state to save, nodes never overlap, a resumed node repeats itself."""
    text = f"{config.SEED}|{node_id}|{round_}|{stage}|{purpose}|{i}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_SEEDS.start


def task_hash() -> str:
    return hashlib.sha256(json.dumps(TASK_TABLE, sort_keys=True).encode()).hexdigest()[:16]


# -------- Models ----------------------------------------------------------------------------------------------

# The styles in which the embedded model learns to answer; only the first one is rewarded. See the README, "The tiny model".
ANSWER_STYLES = ("<answer>{}</answer>", "The answer is {}.", "Answer: {}", "= {}", "{}", "It is {}")


@dataclass
class Codec:
    """A tokenizer with this node's conventions: how a prompt looks, which ids end a completion, how much fits."""

    tokenizer: object
    eos_ids: set[int]
    eos_id: int  # the one appended to a stranger's finished completion
    num_shots: int
    max_prompt: int
    max_completion: int

    def prompt(self, question: Question) -> list[int]:
        """Chat template where the model has one; else plain text with `num_shots` solved examples of the same task."""
        if self.tokenizer.chat_template:
            chat = [{"role": "system", "content": SYSTEM_PROMPTS["default"]}, {"role": "user", "content": question.text}]
            try:
                text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            except Exception:  # templates without a system role raise
                chat = [{"role": "user", "content": SYSTEM_PROMPTS["default"] + "\n" + question.text}]
                text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            shots = [make_question(question.task, (question.seed + 1 + i) % HELD_OUT_SEEDS.start) for i in range(self.num_shots)]
            text = "".join(f"{q.text}\n<answer>{q.answer}</answer>\n\n" for q in shots) + f"{question.text}\n"
            ids = self.encode(text)
        return ids[-self.max_prompt :]

    def encode(self, text: str) -> list[int]:
        """Plain text -> ids, on its own and without special tokens: "<|im_end|>" in a stranger's text stays text."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def completion(self, text: str, finished: bool) -> list[int]:
        """A stranger's completion in this model's ids; its EOS iff the writer's model had ended it."""
        return self.encode(text) + [self.eos_id] * finished

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def answered(self, ids: list[int]) -> bool:
        """Whether a completion ends here without an EOS: after solved examples a base model goes on with the next one."""
        return self.few_shot and "</answer>" in self.decode(ids[-len("</answer>") :])  # a token is at least a byte

    @property
    def few_shot(self) -> bool:
        return self.num_shots > 0 and not self.tokenizer.chat_template


def tiny_phrases(tasks) -> list[str]:
    """Fixed pieces of the tasks' questions, each one token of the embedded model: recurring, digit-free, 5+ characters."""
    counts = Counter()
    for task in tasks:
        for i in range(100):
            counts.update(p for p in set(re.split(r"[0-9]+", make_question(task, 1000 * i).text + "\n")) if len(p) >= 5)
    recurring = [p for p, n in sorted(counts.items()) if n >= 10]
    return ["<answer>", "</answer>"] + recurring + [p.split("{}")[0] for p in ANSWER_STYLES[1:] if len(p) >= 5]


def build_tiny(tasks) -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    """The embedded model, 0.14 M parameters, and its tokenizer of characters and phrases; the same on every machine."""
    characters = sorted(set(map(chr, range(32, 127))) | set("\n∧∨¬→↔"))
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in tiny_phrases(tasks)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=512,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        initializer_range=0.1,  # about 1 / sqrt(n_embd): GPT-2's 0.02 is meant for 768 and learns half as much here
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config), tokenizer


def load_model(config: Config, tasks) -> tuple[torch.nn.Module, Codec]:
    """Model (float32, eval mode, on its device) and its Codec. ConfigError if it cannot be had."""
    if config.MODEL_NAME == "tiny":
        model, tokenizer = build_tiny(tasks)
    else:
        token = config.HUGGINGFACE_ACCESS_TOKEN or None
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.MODEL_NAME, token=token)
            model = AutoModelForCausalLM.from_pretrained(config.MODEL_NAME, dtype=torch.float32, token=token)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"MODEL_NAME={config.MODEL_NAME!r} cannot be loaded ({reason}): expected tiny, a Hugging Face id or a local folder") from error
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos_ids = {i for i in (eos if isinstance(eos, list) else [eos, tokenizer.eos_token_id]) if i is not None}
    if not eos_ids:
        raise ConfigError(f"MODEL_NAME={config.MODEL_NAME!r}: its tokenizer names no end-of-sequence token")
    eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(eos_ids)
    positions = getattr(model.config, "max_position_embeddings", 4096)
    if positions < 2 * config.MAX_NEW_TOKENS:
        raise ConfigError(f"MAX_NEW_TOKENS={config.MAX_NEW_TOKENS}: {config.MODEL_NAME} has {positions} positions; expected at most half of that")
    longest = min(max(256, 4 * config.MAX_NEW_TOKENS), positions // 2)  # of a stranger's completion
    model = model.to(config.DEVICE).eval()
    try:
        check_head(model)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return model, Codec(tokenizer, eos_ids | {eos_id}, eos_id, config.NUM_SHOTS, positions - longest, longest)


def rows_that_fit(model, config: Config) -> tuple[int, float, float]:
    """(completions per forward pass of the update, GB one of them needs, GB available), from a rough estimate.

    About 150 bytes of activations per token, layer and hidden unit; a quarter of the memory is used, because several
    workers may share it. A CPU gains little from more than a group at once, or 1.5 GB. Should the estimate be wrong,
    `update` halves the number when memory runs out.
    """
    shape = model.config
    row = config.MAX_NEW_TOKENS * shape.num_hidden_layers * shape.hidden_size * 150 / 1e9
    if config.DEVICE == "cuda":
        available = torch.cuda.mem_get_info()[0] / 1e9
    else:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS has the latter
        available = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") / 1e9
    if config.MICRO_BATCH_SIZE != "auto":
        return config.MICRO_BATCH_SIZE, row, available
    rows = min(1024, int(available / 4 / row))
    if config.DEVICE == "cpu":
        rows = min(rows, max(config.NUM_GENERATIONS, int(1.5 / row)))
    return max(1, rows), row, available


def keep_freed_memory() -> None:
    """Make glibc keep what is freed. By default large blocks go back to the system after each use, and to be given them
    again, page by page, takes up to two fifths of an update on a CPU. Does nothing where there is no mallopt."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # Windows, macOS, musl
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


WARM_START_RECIPE = 1  # raise this when anything below or in build_tiny changes: it is part of the cache's name


def warm_start_loss(model, codec: Codec, prompts, answers):
    """Mean negative log-likelihood of the answers' tokens: ordinary supervised fine-tuning."""
    if codec.tokenizer.chat_template:  # the system prompt, most of a short question's tokens, is run once for all
        pairs = [(prompt, [answer]) for prompt, answer in zip(prompts, answers, strict=True)]
        logp, mask = shared_prompt_logps(model, pairs, 1.0, codec.eos_id)
    else:
        logp, mask = sequence_logps(model, prompts, answers, pad_id=codec.eos_id)
    return -(logp * mask).sum() / mask.sum()


def warm_start(model, codec: Codec, config: Config, tasks, say) -> None:
    """Supervised steps on the tasks' own questions, counted in steps, not seconds, so that the result is repeatable.

    tiny: answers in all styles, half of them the rewarded one, then a last phase in which that style is made rare
    (ANSWER_TAG_SHARE): the model can do the arithmetic but hardly ever says it in the form that is rewarded. This is done
    on purpose: finding that form is what the swarm has to learn. Other models: the rewarded style only.
    """
    tiny, steps = config.MODEL_NAME == "tiny", config.WARM_START_STEPS
    batch_size, peak = (64, 4e-3) if tiny else (8, 2e-5)
    last_phase = min(150, steps // 4) if tiny else 0
    rng = random.Random(f"warm start {config.SEED}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.0, fused=not tiny)
    pool = []
    for step in range(steps):
        main = steps - last_phase
        if step < main:  # warm-up and cosine
            share, lr = 0.5, peak * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / main))
        else:
            share, lr = config.ANSWER_TAG_SHARE, peak / 2 * (steps - step) / last_phase
            pool = pool if step > main else []
        if not pool:  # length-bucketed batches: sort a few batches' worth, then take them in random order
            samples = []
            for _ in range(16 * batch_size):
                question = make_question(rng.choice(tasks), rng.randrange(HELD_OUT_SEEDS.start))
                style = ANSWER_STYLES[0] if not tiny or rng.random() < share else rng.choice(ANSWER_STYLES[1:])
                samples.append((codec.prompt(question), codec.completion(style.format(question.answer), True)))
            samples = sorted((s for s in samples if len(s[1]) <= codec.max_completion), key=lambda s: len(s[0]) + len(s[1]))
            pool = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
            rng.shuffle(pool)
        prompts, answers = zip(*pool.pop(), strict=True)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = warm_start_loss(model, codec, prompts, answers)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            say(f"warm start {step + 1}/{steps}: loss {loss.item():.3f}")
    make_question.cache_clear()


def load_warm_start(model, codec: Codec, config: Config, tasks, say) -> None:
    """Bring `model` to its warm start: from the shared cache, or by making it there once for all nodes.

    warmstart/<hash of the recipe>.safetensors is write-once; a claim file keeps the others from making it too, and is
    ignored when its maker died or took half an hour (making it twice is harmless).
    """
    steps = config.WARM_START_STEPS
    if steps == 0:
        return
    tiny = config.MODEL_NAME == "tiny"
    recipe = [WARM_START_RECIPE, config.MODEL_NAME, model.config.vocab_size, steps, config.SEED, task_hash(), sorted(tasks)]
    recipe += [config.NUM_SHOTS, reasoning_gym.__version__, [config.ANSWER_TAG_SHARE, ANSWER_STYLES] if tiny else None]
    name = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    folder = Path(config.GDRIVE_PATH) / "warmstart"
    folder.mkdir(parents=True, exist_ok=True)
    path, claim = folder / f"{name}.safetensors", folder / f"{name}.claim"
    largest = (1 << 20) + sum(w.numel() * w.element_size() for w in model.state_dict().values())  # of such a file, with its header
    waited_from = None
    while (weights := read_weights(path, largest)) is None:
        if take_claim(claim) or (waited_from and time.monotonic() - waited_from > 1800):
            say(f"warm start: {steps} supervised steps, once for all nodes")
            try:
                warm_start(model, codec, config, tasks, say)
                data = safetensors_save({k: v.cpu().contiguous() for k, v in model.state_dict().items() if k not in tied_names(model)})
                write_atomically(path, lambda file, data=data: file.write(data), config.NODE_ID, True, lambda p: read_weights(p, largest) is not None)
            finally:
                with contextlib.suppress(OSError):  # a folder of that name is somebody else's affair
                    claim.unlink()
            continue  # read it back like everybody else: if two made it, the first file counts
        if waited_from is None:
            waited_from = time.monotonic()
            say(f"another node is making the warm start; waiting up to 30 minutes (delete {claim} if it is dead)")
        time.sleep(0.5)
    ours = model.state_dict()
    fitting = all(name in ours and w.shape == ours[name].shape for name, w in weights.items())
    if not fitting or set(ours) - set(weights) - tied_names(model):
        raise StoreError(f"{path} does not fit the model; delete it and start again")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()


def take_claim(claim: Path) -> bool:
    """Create the claim file; True if it is now ours. A claim of a process known to be dead is removed first."""
    with contextlib.suppress(OSError, BadFile):
        if is_known_dead(read_json(claim)):
            claim.unlink(missing_ok=True)
    identity = json.dumps(process_identity()).encode()
    return write_atomically(claim, lambda file: file.write(identity), "claim", once=True, is_complete=Path.exists)


def read_weights(path: Path, max_bytes: int) -> dict | None:
    """Tensors of a safetensors file; None if it is missing, not fully synced, too large, damaged or not all finite floats."""
    try:
        weights = safetensors_load(read_bytes(path, max_bytes))
    except (OSError, BadFile, SafetensorError, KeyError):  # KeyError: a type that torch does not have
        return None
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return weights if all(w.dtype in floats and torch.isfinite(w).all() for w in weights.values()) else None


def tied_names(model) -> set[str]:
    """Names in the state dict that share memory with an earlier one (a tied output layer)."""
    first, tied = {}, set()
    for name, tensor in model.state_dict().items():
        if first.setdefault(tensor.data_ptr(), name) != name:
            tied.add(name)
    return tied


# -------- One process: its nodes, its log, its stop button ----------------------------------------------------


class Stopped(BaseException):
    """Ctrl-C, the notebook's stop button or SIGTERM. A BaseException, so that no `except Exception` swallows it."""


class Superseded(Exception):
    """A newer session of one of this process's nodes is running: this one must stop."""


class StopButton:
    """First signal: raise Stopped, or finish the round if weights have begun to change. Second signal: KeyboardInterrupt."""

    def __init__(self):
        self.requested, self.shielded, self._since, self._old = False, False, 0.0, {}

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number, frame) -> None:
        if self.requested:
            if time.monotonic() - self._since > 0.5:  # one key press may arrive twice
                raise KeyboardInterrupt
            return
        self.requested, self._since = True, time.monotonic()
        print("\nstopping; once more to exit at once", flush=True)
        if not self.shielded:
            raise Stopped

    def shield(self) -> None:
        """From here to `unshield` the weights are half-way through a round: a stop waits."""
        self.shielded = True

    def unshield(self) -> None:
        self.shielded = False
        if self.requested:
            raise Stopped


@dataclass
class Node:
    """One learner. Model, optimizer, total_reward and trained go into its checkpoint; the rest lasts a round or a session."""

    id: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    total_reward: float = 0.0
    trained: set = field(default_factory=set)  # keys of external groups already used: never twice
    session: str = ""
    rollouts: list = field(default_factory=list)  # of the current stage
    generate_seconds: float = 0.0  # what they took
    unpublished: list = field(default_factory=list)  # of the round so far, for publish frequency `round`
    signal_free: deque = field(default_factory=lambda: deque(maxlen=10))  # stats of the latest rounds without any signal


@dataclass
class Rollout:
    """A question with its G completions as text and as this process's token ids. key: where an external one came from."""

    question: Question
    group: Group
    texts: list[str]
    finished: list[bool]
    key: tuple | None = None


@dataclass
class Run:
    """What the functions below share: one process's nodes and its view of the swarm."""

    config: Config
    store: DriveStore
    courier: Courier
    codec: Codec
    live: Liveness
    nodes: list[Node]
    log: "Log"
    stop: StopButton
    tasks: list[str]
    scratch: Path  # local folder for files on their way to the shared one
    done: int = -1  # last round finished (or skipped)
    saved: int = -1  # last round of which a checkpoint was taken
    clock: int = -1  # highest round known to be open; never goes back
    replay_until: int = -1  # rounds up to here may have been worked on before this process started
    leaderless_since: float | None = None
    listed: dict = field(default_factory=dict)  # round -> who published in it; asked once a round, for all nodes here
    fetched: dict = field(default_factory=dict)  # (round, stage, peer) -> what `fetch` gave, once complete and whole
    verified: dict = field(default_factory=dict)  # key -> Rollout, or the reason of its rejection
    late: set = field(default_factory=set)  # (round, stage, peer) that were waited for in vain
    reported: set = field(default_factory=set)  # (peer, reason) of rejections that were logged
    started: float = field(default_factory=time.monotonic)
    rounds_worked: int = 0
    round_began: float = 0.0
    round_seconds: float = 0.0  # how long the last one took with the folder at hand
    max_rows: int = 1024  # completions per forward pass in the update
    max_decoded: int = 2**30  # completions generated at once; lowered when memory runs out
    state: str = "running"  # as the heartbeat says it

    def ask(self, function, *args, default=None, timeout: float = 60.0):
        """A read through the courier; `default` if the folder fails (the courier says so in the log).

        A call on a mount may hang: it is waited for as long as a round takes (10 s to a minute), once known to fail 2 s.
        """
        patience = max(10.0, self.round_seconds) if self.courier.outage_since is None else 2.0
        try:
            return self.courier.ask(function, *args, timeout=min(timeout, patience))
        except (OSError, BadFile):  # TimeoutError is an OSError
            return default
        except StoreError as error:  # the swarm's own state is damaged: whoever trains on must at least say so
            if ("", str(error)) not in self.reported:
                self.reported.add(("", str(error)))
                self.log.event("error", str(error))
            return default

    def append(self, path: str, text: str) -> None:
        """Append to a log in the shared folder, in the background."""
        self.courier.post(self.store.append, path, text)


class Log:
    """Lines for people, JSON lines for programs; both reach the shared folder every few seconds, through the courier."""

    def __init__(self, node_id: str, secret: str = "", resume_line: str = ""):
        self.node_id, self.secret, self.resume_line, self.bar = node_id, secret, resume_line, None
        self._buffers, self._lock, self._flushed = {}, threading.Lock(), time.monotonic()

    def say(self, text: str) -> None:
        text = self.scrub(text)
        if self.bar is not None:
            self.bar.write(text)
        else:
            with contextlib.suppress(BrokenPipeError):  # whoever read the output is gone; the log file is not
                print(text, flush=True)
        self._add(self.node_id, "stdout.log", text)

    def event(self, kind: str, text: str, quiet: bool = False, **data) -> None:
        """A row of training_events.jsonl, and unless `quiet` a line for people."""
        if not quiet:
            self.say(f"{self.node_id} {kind}: {text}")
        row = {"timestamp": time.time(), "event": kind, "node_id": self.node_id, "text": text, **data}
        self._add(self.node_id, "training_events.jsonl", json.dumps(row))

    def metrics(self, node_id: str, row: dict) -> None:
        self._add(node_id, "metrics.jsonl", json.dumps(row))

    def scrub(self, text: str) -> str:
        return text.replace(self.secret, "***") if self.secret else text

    def _add(self, node_id: str, name: str, line: str) -> None:
        with self._lock:
            self._buffers.setdefault(f"logs/{node_id}/{name}", []).append(self.scrub(line) + "\n")

    def flush(self, append, every: float = 5.0) -> None:
        """Hand what has gathered to append(path, text), at most every few seconds."""
        if time.monotonic() - self._flushed >= every:
            with self._lock:
                buffers, self._buffers = self._buffers, {}
            for path, lines in buffers.items():
                append(path, "".join(lines))
            self._flushed = time.monotonic()


# -------- The steps of a round, in the order of Algorithm 1 ---------------------------------------------------


def sample_batch(run: Run, node: Node, t: int, stage: int) -> list[Question]:
    """Step 1: I questions (times LOCAL_OVERSAMPLE), task uniform with replacement, seed from a hash."""
    questions = []
    for i in range(run.config.NUM_TRAIN_SAMPLES * run.config.LOCAL_OVERSAMPLE):
        seed = stream_seed(run.config, node.id, t, stage, "question", i)
        questions.append(make_question(random.Random(seed).choice(run.tasks), seed))
    return questions


def generate_rollouts(run: Run, node: Node, questions: list[Question], purpose: str, t: int, stage: int, g: int) -> list[Rollout]:
    """Step 2: `g` completions for each question, in one batched call, decoded and scored."""
    config, codec, began = run.config, run.codec, time.monotonic()
    seed = stream_seed(config, node.id, t, stage, purpose)
    prompts = [codec.prompt(q) for q in questions]

    def attempt(rows_at_once):
        return generate(
            node.model, prompts, g, config.MAX_NEW_TOKENS, config.TEMPERATURE, codec.eos_ids,
            torch.Generator().manual_seed(seed), codec.eos_id, rows_at_once, getattr(torch, config.DTYPE),
            answered=codec.answered if codec.few_shot else None,
        )  # fmt: skip

    completions, run.max_decoded = halving_on_oom(attempt, run.max_decoded, g * len(questions), "generation", smallest=g)
    rollouts = []
    for question, prompt, group in zip(questions, prompts, completions, strict=True):
        texts = [codec.decode(ids) for ids in group]
        rewards = [score(question, text, config.REWARD) for text in texts]
        finished = [ids[-1] in codec.eos_ids or codec.answered(ids) for ids in group]
        rollouts.append(Rollout(question, Group(prompt, group, rewards), texts, finished))
    node.generate_seconds = time.monotonic() - began
    return rollouts


def communicate(run: Run, node: Node, t: int, stage: int) -> None:
    """Step 3: publish this stage's groups as text, before training on them."""
    config, last_stage = run.config, run.config.MAX_STAGES - 1
    about = {"model": config.MODEL_NAME, "reasoning_gym": reasoning_gym.__version__, "tasks": task_hash()}
    groups = [publishable(rollout) for rollout in node.rollouts]
    if config.ROLLOUT_PUBLISH_FREQUENCY == "generation":
        for i, group in enumerate(groups):
            run.courier.post(run.store.publish, t, stage, node.id, about, {str(i): group}, part=i, parts=len(groups))
        return
    if config.ROLLOUT_PUBLISH_FREQUENCY == "round":
        node.unpublished += groups
        if stage < last_stage:
            return
        groups, node.unpublished = node.unpublished, []
    run.courier.post(run.store.publish, t, stage, node.id, about, {str(i): group for i, group in enumerate(groups)})


def publishable(rollout: Rollout) -> dict:
    """A group as it stands in a rollout file: the bare question, decoded completions, this node's own rewards."""
    question = rollout.question
    completions = [
        {"response": text, "reward": reward, "finished": finished}
        for text, reward, finished in zip(rollout.texts, rollout.group.rewards, rollout.finished, strict=True)
    ]
    return {"task": question.task, "seed": question.seed, "prompt": question.text, "answer": question.answer, "completions": completions}


def sample_external(run: Run, node: Node, t: int, stage: int) -> tuple[list[Rollout], dict]:
    """Step 4: verify and score the peers' groups, drop those without signal, draw J uniformly; older rounds fill gaps.

    Returns the drawn groups and figures for the log: how many could have been drawn, how many were rejected, peers, seconds.
    A round that this node worked on before a restart draws the same groups again: its reward file says which.
    """
    config, began = run.config, time.monotonic()
    figures = {"external_pool": 0, "rejected": 0, "external_peers": 0, "wait_seconds": 0.0}
    wanted = config.NUM_TRANSPLANT_TREES
    if wanted == 0:
        return [], figures
    before = run.ask(run.store.reward, t, stage, node.id) if t <= run.replay_until else None
    if before is not None:
        external = replayed_externals(run, before.get("externals"))
        return external, {**figures, "external_pool": len(external)}
    rng = random.Random(stream_seed(config, node.id, t, stage, "external"))
    drawn, seen = [], {}
    for age in range(min(config.ROLLOUT_MAX_AGE, t) + 1):
        if run.courier.outage_since is not None:
            break  # every question would cost its time-out
        peers = choose_peers(run, node, t, age, rng)
        files = wait_for_peers(run, t, stage, peers) if age == 0 else fetch_older(run, t - age, peers)
        pool = []
        for peer, (groups, rejected) in sorted(files.items()):
            count_rejections(run, figures, peer, rejected)
            groups = [raw for raw in groups if raw["key"] not in node.trained]
            if len(groups) > config.NUM_TRAIN_SAMPLES:  # a fair share: flooding the folder buys no influence
                groups = rng.sample(groups, config.NUM_TRAIN_SAMPLES)
            for raw in groups:
                rollout = verify(run, raw)
                if isinstance(rollout, str):
                    count_rejections(run, figures, peer, {rollout: 1})
                elif rollout.group.is_informative or not config.EXTERNAL_FILTER:
                    pool.append(rollout)
                if age == 0 and not isinstance(rollout, str):
                    seen.setdefault(peer, []).extend(rollout.group.rewards)
        figures["external_pool"] += len(pool)
        figures["external_peers"] += len(files) if age == 0 else 0
        drawn += rng.sample(pool, min(wanted - len(drawn), len(pool)))
        if len(drawn) == wanted:
            break
    announce_winner(run, node, t, seen)
    figures["wait_seconds"] = time.monotonic() - began
    return drawn, figures


def choose_peers(run: Run, node: Node, t: int, age: int, rng) -> list[str]:
    """Up to FETCH_MAX_PEERS nodes, at random. Costs one directory listing, however many peers there are.

    For this round (age 0): those that published in the round before, else whoever is registered and live. For an older
    round: those that published in it.
    """
    limit, source = run.config.FETCH_MAX_PEERS, max(0, t - max(1, age))
    if source not in run.listed:
        run.listed[source] = run.ask(run.store.publishers, source, run.config.MAX_STAGES - 1, default=[])
    known = run.listed[source]
    for peer in known:
        run.live.note(peer, "rollouts", source)
    peers = sorted(set(known) - {node.id})
    if len(peers) >= limit or age > 0:
        return rng.sample(peers, min(limit, len(peers)))
    others = sorted(set(run.live.sessions) - set(peers) - {node.id, COORDINATOR})
    others = rng.sample(others, min(len(others), 4 * limit))
    if others:
        run.ask(run.live.refresh, others)
    workers = [p for p in others if run.live.is_live(p) and run.live.about(p).get("role") == "worker"]
    return peers + workers[: limit - len(peers)]


def wait_for_peers(run: Run, t: int, stage: int, peers: list[str]) -> dict:
    """{peer: (groups, rejected)} of this round, once every live one of `peers` has published or the time is up.

    All are read, but only registered ones are waited for, and one that let the time run out not again in this round.
    """
    config = run.config
    if config.ROLLOUT_PUBLISH_FREQUENCY == "round" and stage < config.MAX_STAGES - 1:
        return {}  # nobody publishes before the last stage
    deadline, pace = time.monotonic() + config.FETCH_TIMEOUT_SECONDS, Pace()
    files, waiting = {}, set(peers)
    while waiting:
        for peer in sorted(waiting):
            answer = fetch_once(run, t, stage, peer)
            if answer is None or run.courier.outage_since is not None:
                return files  # an outage: train on what there is
            groups, complete, rejected = answer
            if groups or rejected:
                files[peer] = groups, rejected
            if complete:
                waiting.discard(peer)
                run.live.note(peer, "rollouts", t)
        if waiting:
            run.ask(run.live.refresh, sorted(waiting))
        waiting = {p for p in waiting if p in run.live.sessions and run.live.is_live(p) and (t, stage, p) not in run.late}
        if waiting and time.monotonic() > deadline:
            run.late = {(t, stage, peer) for peer in waiting}
            run.log.event("wait", f"round {t}: {' '.join(sorted(waiting))} not here after FETCH_TIMEOUT_SECONDS={config.FETCH_TIMEOUT_SECONDS:g}", round=t)
            break
        if waiting:
            pace.sleep()
    return files


def fetch_once(run: Run, round_: int, stage: int, peer: str):
    """What the store's `fetch` gives, None in an outage. A whole file never changes: the nodes here read it once for all."""
    key = (round_, stage, peer)
    answer = run.fetched.get(key) or run.ask(run.store.fetch, *key)
    if answer is not None:
        _, complete, rejected = answer
        if complete and not rejected:
            run.fetched[key] = answer
    return answer


def fetch_older(run: Run, round_: int, peers: list[str]) -> dict:
    """{peer: (groups, rejected)} of an earlier round, all stages, without waiting."""
    files = {}
    for peer in peers:
        for stage in range(run.config.MAX_STAGES):
            groups, _, rejected = fetch_once(run, round_, stage, peer) or ([], False, {})
            known, counted = files.get(peer, ([], Counter()))
            files[peer] = known + groups, counted + Counter(rejected)
    return files


def verify(run: Run, raw: dict):
    """A stranger's group -> Rollout in this process's token ids with rewards of its own, or the reason of rejection.

    Only (task, seed) and the completions' text are used; question and answer are made again from (task, seed).
    """
    key = raw["key"]
    if key not in run.verified:
        run.verified[key] = verify_uncached(run, raw)
    return run.verified[key]


def verify_uncached(run: Run, raw: dict):
    if raw["task"] not in run.tasks:
        return "task is not one of this experiment's"
    if raw["seed"] in HELD_OUT_SEEDS:
        return "held-out question"
    question = make_question(raw["task"], raw["seed"])
    if raw["prompt"] != question.text:
        return "prompt differs from the question"
    texts = [c["response"] for c in raw["completions"]]
    finished = [c["finished"] for c in raw["completions"]]
    completions = []
    for text, done in zip(texts, finished, strict=True):  # the first that does not fit ends it: encoding takes time
        completions.append(run.codec.completion(text, done))
        if not 1 <= len(completions[-1]) <= run.codec.max_completion:
            return f"completion empty or over {run.codec.max_completion} tokens here"
    rewards = [score(question, text, run.config.REWARD) for text in texts]
    return Rollout(question, Group(run.codec.prompt(question), completions, rewards), texts, finished, raw["key"])


def count_rejections(run: Run, figures: dict, peer: str, reasons: dict) -> None:
    for reason, count in reasons.items():
        figures["rejected"] += count
        if (peer, reason) not in run.reported:  # say it once
            run.reported.add((peer, reason))
            run.log.event("reject", f"{peer}: {reason}", peer=peer, count=count)


def replayed_externals(run: Run, keys) -> list[Rollout]:
    """The external groups that a reward file names, fetched and verified again."""
    rollouts = []
    for key in keys if isinstance(keys, list) else []:
        try:  # a stranger may have written this file in our name, and it leads to paths
            round_, stage, peer, index = key
            check_name(peer, "peer"), bucket(round_), bucket(stage)
        except (TypeError, ValueError):
            run.log.event("replay", f"{key!r:.100} in the reward file names no external group")
            continue
        groups, _, _ = fetch_once(run, round_, stage, peer) or ([], False, {})
        found = [verify(run, raw) for raw in groups if raw["key"] == (round_, stage, peer, index)]
        if not found or isinstance(found[0], str):
            run.log.event("replay", f"external group {key} is no longer there; this round will differ from its first run")
        rollouts += [r for r in found if not isinstance(r, str)]
    return rollouts


def announce_winner(run: Run, node: Node, t: int, seen: dict) -> None:
    """Whom this node found best in this round, by its own scoring of what it saw."""
    if seen:
        means = {peer: sum(rewards) / len(rewards) for peer, rewards in seen.items()}
        means[node.id] = mean_reward(node.rollouts)
        winner = max(sorted(means), key=means.get)
        data = {"round": t, "node_id": node.id, "winner": winner, "mean_rewards": means}
        run.courier.post(run.store.write_once, f"winners/{bucket(t)}/{node.id}.json", data)


def choose_local(rollouts: list[Rollout], wanted: int) -> list[Rollout]:
    """Of the node's own groups the I to train on: informative ones first, topped up with flat ones."""
    return sorted(rollouts, key=lambda r: not r.group.is_informative)[:wanted]


def policy_gradient(run: Run, node: Node, rollouts: list[Rollout]) -> dict:
    """Step 5: one GRPO update on own and external groups alike."""
    config, began = run.config, time.monotonic()
    stats = update(
        node.model, node.optimizer, [r.group for r in rollouts], max_new_tokens=config.MAX_NEW_TOKENS,
        temperature=config.TEMPERATURE, loss_type=config.LOSS_TYPE, clip_low=config.CLIP_LOW, clip_high=config.CLIP_HIGH,
        num_iterations=config.NUM_ITERATIONS, max_rows=run.max_rows, pad_id=run.codec.eos_id,
        dtype=getattr(torch, config.DTYPE), before_step=run.stop.shield,
    )  # fmt: skip
    run.max_rows = min(run.max_rows, stats.pop("max_rows"))
    return {**stats, "train_seconds": time.monotonic() - began}


def mean_reward(rollouts: list[Rollout]) -> float:
    """The node's reward of a round: mean over all its own completions, never over externals or what a filter left."""
    rewards = [reward for rollout in rollouts for reward in rollout.group.rewards]
    return sum(rewards) / len(rewards)


def held_out_accuracy(run: Run, node: Node, t: int, stage: int) -> dict:
    """Every EVAL_INTERVAL rounds pass@1 on EVAL_SAMPLES questions of the reserved seed range, the same for all nodes."""
    if not run.config.EVAL_INTERVAL or (t + 1) % run.config.EVAL_INTERVAL or stage < run.config.MAX_STAGES - 1:
        return {}
    questions = []
    for i in range(run.config.EVAL_SAMPLES):
        seed = HELD_OUT_SEEDS.start + stream_seed(run.config, "", 0, 0, "held-out", i)
        questions.append(make_question(random.Random(seed).choice(run.tasks), seed))
    seconds = node.generate_seconds
    accuracy = mean_reward(generate_rollouts(run, node, questions, "evaluate", t, 0, 1))
    node.generate_seconds = seconds  # of the round's own completions
    return {"held_out": accuracy}


def submit_reward(run: Run, node: Node, t: int, stage: int, stats: dict, external: list[Rollout]) -> None:
    """Step 6: publish the reward and the round's figures; the externals by key, so that a replay can draw them again."""
    run.stop.shield()  # from the first total on, the round is finished: a checkpoint must not count it twice
    node.total_reward += stats["reward"]
    node.trained = {key for key in node.trained if key[0] >= t - run.config.ROLLOUT_MAX_AGE} | {r.key for r in external}
    data = {**stats, "session": node.session, "externals": [list(r.key) for r in external]}
    run.courier.post(run.store.submit_reward, t, stage, node.id, data)
    row = {"timestamp": time.time(), "round": t, "stage": stage, "node_id": node.id, "experiment": run.config.EXPERIMENT_NAME}
    run.log.metrics(node.id, {**row, "my_reward": stats["reward"], "total_reward": node.total_reward, **stats})


# -------- Algorithm 1 -----------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """SAPO, Algorithm 1 of arXiv:2509.08721, for the nodes of this process; returns after the last round.

    With LOCAL_NODES > 1 all nodes share, then all learn: sharing is exactly synchronous and a run repeats bit for bit.
    """
    config = run.config
    while (t := next_round(run)) is not None:
        for stage in range(config.MAX_STAGES):
            for node in run.nodes:
                questions = sample_batch(run, node, t, stage)  # 1. draw I questions
                node.rollouts = generate_rollouts(run, node, questions, "generate", t, stage, config.NUM_GENERATIONS)  # 2. G answers
                communicate(run, node, t, stage)  # 3. publish them, decoded
            if config.NUM_TRANSPLANT_TREES and run.courier.outage_since is None:
                run.courier.flush(timeout=5.0)  # nobody samples before its own share is out
            for node in run.nodes:
                external, figures = sample_external(run, node, t, stage)  # 4. draw J of the peers' groups
                local = choose_local(node.rollouts, config.NUM_TRAIN_SAMPLES)
                figures |= policy_gradient(run, node, local + external)  # 5. learn from both
                figures |= held_out_accuracy(run, node, t, stage)
                stats = round_stats(run, node, t, local, external, figures)
                submit_reward(run, node, t, stage, stats, external)  # 6. report, then on to the next round
                report_round(run, node, t, stats)
        finish_round(run, t)


def next_round(run: Run) -> int | None:
    """The round to work on now, None after the last one. Waits for the clock, or opens the round where nobody leads."""
    config, own, pace = run.config, run.done + 1, Pace()
    patience = time.monotonic() + max(30.0, 2 * run.round_seconds)
    if own >= config.MAX_ROUNDS:
        return None
    while True:
        if run.ask(look_around, run, default="outage") == "outage":
            # Alone for now; not faster than the last rounds went, so as not to run away from the swarm's clock.
            while time.monotonic() < run.round_began + run.round_seconds:
                time.sleep(0.1)
            t = own
            break
        newer = [node.id for node in run.nodes if run.live.sessions.get(node.id, "") > node.session]
        if newer:
            raise Superseded(f"a newer session of {', '.join(newer)} is running; this one stops and changes nothing more")
        if run.live.is_live(COORDINATOR):
            run.leaderless_since = None
            if run.clock >= own:
                t = run.clock
                break
        else:
            run.leaderless_since = run.leaderless_since or time.monotonic()
            grace = 0.0 if config.LOCAL_NODES > 1 else 2.0
            if time.monotonic() - run.leaderless_since >= grace:
                t = own if own <= run.replay_until and not somebody_is_ahead(run) else max(own, run.clock)
                if t > run.clock:
                    run.courier.post(run.store.open_round, t, run.nodes[0].id)
                    run.clock = t
                break
        if time.monotonic() > patience:
            patience = float("inf")  # say it once
            run.log.event("wait", f"round {own} is not open here yet: the coordinator's rounds are long, or the folder shows old listings", round=own)
            run.log.flush(run.append, every=0.0)
        pace.sleep()
    if t >= config.MAX_ROUNDS:
        run.log.event("end", f"the experiment is at round {t} already and MAX_ROUNDS={config.MAX_ROUNDS}: nothing to do; raise MAX_ROUNDS to go on")
        return None
    if t > own:
        run.log.event("skip", f"rounds {own} to {t - 1} were opened by the swarm meanwhile; going on with round {t}", first=own, last=t - 1)
        for node in run.nodes:  # rounds it had finished before it was killed and does not replay
            rewards = [run.ask(run.store.reward, r, s, node.id) for r in range(own, min(t, run.replay_until + 1)) for s in range(config.MAX_STAGES)]
            node.total_reward += sum(reward["reward"] for reward in rewards if reward)
    now = time.monotonic()
    if run.courier.outage_since is None and run.rounds_worked:
        run.round_seconds = now - run.round_began
    run.round_began = now
    for node in run.nodes:
        node.unpublished = []
    return t


def look_around(run: Run) -> None:
    """Clock, coordinator and own sessions, as the folder shows them now."""
    run.live.refresh([COORDINATOR])
    run.clock = max(run.clock, run.store.current_round())
    if run.store.opened_by(run.clock) == COORDINATOR:  # rounds that workers open are no sign of its life
        run.live.note(COORDINATOR, "clock", run.clock)


def somebody_is_ahead(run: Run) -> bool:
    """Whether another live node works on a later round than this process's next: then rounds are not replayed."""
    run.ask(run.live.refresh)
    own = {node.id for node in run.nodes}
    rounds = [run.live.heartbeats.get(n, {}).get("round") for n in run.live.live_workers() if n not in own]
    return any(isinstance(r, int) and r > run.done + 1 for r in rounds)


def finish_round(run: Run, t: int) -> None:
    """Checkpoint when due, clean up, flush the log; then a pending stop takes effect."""
    config = run.config
    due = (t + 1) // config.CHECKPOINT_INTERVAL > (run.done + 1) // config.CHECKPOINT_INTERVAL  # also when that round was skipped
    run.done, run.rounds_worked = t, run.rounds_worked + 1
    if due or t == config.MAX_ROUNDS - 1:
        run.log.flush(run.append, every=0.0)  # before the checkpoint: rounds that are not replayed have their rows in the log
        save_checkpoint(run)
        for node in run.nodes if t < config.MAX_ROUNDS - 1 else ():  # the last model: see `run_worker`
            push_to_hub(run, node)
    if config.ROLLOUT_CLEANUP_ENABLED:
        before = t + 1 - rounds_to_keep(config)
        run.courier.post(run.store.clean_rollouts, before, [node.id for node in run.nodes], config.ROLLOUT_ARCHIVE_OLD)
    run.listed.clear()
    for cache in (run.fetched, run.verified):
        for key in [k for k in cache if k[0] < t - config.ROLLOUT_MAX_AGE]:
            del cache[key]
    run.log.flush(run.append)
    if run.log.bar is not None:
        run.log.bar.update(t + 1 - run.log.bar.n)
    run.stop.unshield()


def rounds_to_keep(config: Config) -> int:
    """Rounds of rollouts that retention leaves: what was asked for, and what a resumed node may draw from again."""
    return max(config.ROLLOUT_KEEP_LAST_N_ROUNDS, config.CHECKPOINT_INTERVAL + config.ROLLOUT_MAX_AGE)


# -------- The log line ----------------------------------------------------------------------------------------


def round_stats(run: Run, node: Node, t: int, local, external, figures: dict) -> dict:
    """Every figure of the log line, as it goes into metrics.jsonl and the reward file."""
    texts = [text for r in node.rollouts for text in r.texts]
    lengths = [len(ids) for r in node.rollouts for ids in r.group.completions]
    finished = [done for r in node.rollouts for done in r.finished]
    return {
        "reward": mean_reward(node.rollouts),
        "completions": len(texts),
        "local_groups": len(local),
        "external_groups": len(external),
        "external_short": max(0, run.config.NUM_TRANSPLANT_TREES - len(external)),
        "external_ages": [t - r.key[0] for r in external],
        "flat_groups": sum(not r.group.is_informative for r in local + external),
        "informative_local": sum(r.group.is_informative for r in node.rollouts),
        "answer_tag_rate": sum(find_answer(text) is not None for text in texts) / len(texts),
        "truncated_rate": 1 - sum(finished) / len(finished),
        "mean_length": sum(lengths) / len(lengths),
        "generated_tokens": sum(lengths),
        "generate_seconds": node.generate_seconds,
        **figures,
    }


def report_round(run: Run, node: Node, t: int, stats: dict) -> None:
    """Print the round; name a missing learning signal, and externals that did not come, with what to do about it."""
    config = run.config
    run.log.say(log_line(node.id, t, config.MAX_ROUNDS, stats, eta_seconds(run, t)))
    missing = stats["external_short"]
    if missing > 0 and stats["external_peers"] == 0 and run.rounds_worked % 10 == 0 and t > run.replay_until:
        newest = run.ask(newest_peer_file, run, node, t)
        age = f"the newest peer file is {newest} rounds old (ROLLOUT_MAX_AGE={config.ROLLOUT_MAX_AGE})" if newest is not None else "no peer file was found"
        run.log.event("wait", f"round {t}: {missing} of {config.NUM_TRANSPLANT_TREES} externals missing; {age}", round=t)
    if stats["flat_groups"] < stats["local_groups"] + stats["external_groups"]:
        node.signal_free.clear()
        return
    node.signal_free.append(stats)
    if len(node.signal_free) == node.signal_free.maxlen:
        mean = {k: sum(s[k] for s in node.signal_free) / len(node.signal_free) for k in ("reward", "answer_tag_rate", "truncated_rate")}
        run.log.event(
            "no signal",
            f"no informative group for {node.signal_free.maxlen} rounds: pass rate {mean['reward']:.3f}, answer tags in "
            f"{mean['answer_tag_rate']:.0%} of completions, {mean['truncated_rate']:.0%} cut off. Equal rewards give no gradient: "
            "try WARM_START_STEPS, NUM_SHOTS, a larger MAX_NEW_TOKENS or easier TASKS",
            round=t, **mean,
        )  # fmt: skip
        node.signal_free.clear()


def newest_peer_file(run: Run, node: Node, t: int) -> int | None:
    """Age in rounds of the newest rollouts any peer has in the folder, None if there are none."""
    for round_ in [r for r in reversed(run.store.rounds("rollouts")) if r <= t][:100]:
        for stage in range(run.config.MAX_STAGES):
            if set(run.store.publishers(round_, stage)) - {node.id}:
                return t - round_
    return None


def log_line(node_id: str, t: int, max_rounds: int, s: dict, eta: float) -> str:
    """One round in one line. How to read it: README, "The log line"."""
    width = len(str(max_rounds))
    held_out = f" (held-out {s['held_out']:.2f})" if "held_out" in s else ""
    short = f" ({s['external_short']} short)" if s["external_short"] else ""
    minutes = f"{eta / 60:.0f}m" if eta >= 60 else f"{eta:.0f}s"
    return (
        f"{node_id} round {t:0{width}d}/{max_rounds} | reward {s['reward']:.2f}{held_out} | "
        f"groups {s['local_groups']}+{s['external_groups']} of {s['external_pool']}{short}, {s['flat_groups']} flat, {s['rejected']} rejected | "
        f"tags {s['answer_tag_rate']:.0%} cut {s['truncated_rate']:.0%} len {s['mean_length']:.1f} | "
        f"loss {s['loss']:+.4f} clip {s['clip_fraction']:.1%} grad {s['grad_norm']:.1f} | "
        f"{s['generate_seconds']:.1f}s gen {s['wait_seconds']:.1f}s wait {s['train_seconds']:.1f}s train | eta {minutes}"
    )


def eta_seconds(run: Run, t: int) -> float:
    per_round = (time.monotonic() - run.started) / (run.rounds_worked + 1)
    return per_round * (run.config.MAX_ROUNDS - 1 - t)


# -------- Checkpoints, the final model, the Hub ---------------------------------------------------------------


CHECKPOINT_PARTS = {"model_name", "next_round", "model", "optimizer", "total_reward", "trained"}


def save_checkpoint(run: Run) -> None:
    """Every node's state after round `run.done`: written to the local disk, then carried to the folder in the background."""
    if run.done <= run.saved:
        return  # there is one already, perhaps still on its way
    run.saved = run.done
    for node in run.nodes:
        state = {
            "model_name": run.config.MODEL_NAME, "next_round": run.done + 1, "model": node.model.state_dict(), "optimizer": node.optimizer.state_dict(),
            "total_reward": node.total_reward, "trained": sorted(map(list, node.trained)),
        }  # fmt: skip
        local = run.scratch / f"{node.id}.{run.done}.pt"
        torch.save(state, local)
        run.courier.post(run.store.write_checkpoint, run.done, node.id, local)
        run.courier.post(local.unlink, missing_ok=True)
    for node in run.nodes:  # only now: there is always a round that all nodes of this process have
        run.courier.post(run.store.clean_checkpoints, node.id, run.config.CHECKPOINT_KEEP)
    run.log.event("checkpoint", f"after round {run.done}", quiet=True, round=run.done)


def resume(run: Run) -> None:
    """Load the newest checkpoint that is readable for all nodes of this process; none at all means round 0.

    StoreError if there are checkpoints and none can be used: a swarm never starts again from the beginning by accident.
    """
    paths = [dict(run.store.checkpoints(node.id)) for node in run.nodes]
    rounds = sorted(set.intersection(*map(set, paths)), reverse=True)
    damaged = []
    for round_ in rounds:
        states = []
        for path in (p[round_] for p in paths):
            try:
                damaged_part = zipfile.ZipFile(path).testzip()  # torch.load does not look at the checksums
                if damaged_part:
                    raise ValueError(f"checksum of {damaged_part}")
                state = torch.load(path, map_location="cpu", weights_only=True)
                if not state.keys() >= CHECKPOINT_PARTS:
                    raise ValueError("not what this program writes")
                states.append(state)
            except Exception as error:  # torch raises many kinds; an unreadable file is what they have in common
                damaged.append(path)
                run.log.event("resume", f"{path} is unreadable ({type(error).__name__}); trying the one before")
                break
        else:
            for node, state in zip(run.nodes, states, strict=True):
                restore(run, node, state)
            run.done = run.saved = states[0]["next_round"] - 1
            for path in damaged:
                run.store.set_aside(path)
            run.log.event("resume", f"from the checkpoint after round {round_}", round=round_)
            return
    first_was_interrupted = not all(paths) and len(set.union(*map(set, paths))) == 1  # killed between two nodes' very first
    if any(paths) and not first_was_interrupted:
        raise StoreError(
            f"{run.store.base / 'checkpoints'} holds checkpoints of {', '.join(n.id for n in run.nodes)} but none is readable"
            " for all of them. Nothing was changed; restore one, or start under another NODE_ID or EXPERIMENT_NAME"
        )


def restore(run: Run, node: Node, state: dict) -> None:
    if state["model_name"] != run.config.MODEL_NAME:
        raise ConfigError(
            f"MODEL_NAME={run.config.MODEL_NAME!r}: the checkpoint of {node.id} was made with {state['model_name']!r}; "
            "set that one, or start under another NODE_ID"
        )
    node.model.load_state_dict(state["model"])
    node.optimizer.load_state_dict(state["optimizer"])
    node.total_reward = state["total_reward"]
    node.trained = {tuple(key) for key in state["trained"]}


def save_models(run: Run) -> None:
    """models/NODE: an ordinary Hugging Face folder, with the line that tries it."""
    for node in run.nodes:
        local = save_locally(run, node, "models")
        run.courier.post(run.store.copy_folder, local, f"models/{node.id}")
    folder = run.store.base / "models" / run.nodes[0].id
    prompt = run.codec.tokenizer.decode(run.codec.prompt(make_question(run.tasks[0], 1)))
    ask = f"pipeline('text-generation', {str(folder)!r})({prompt!r}, max_new_tokens={run.config.MAX_NEW_TOKENS})"
    run.log.say(f"final model: {folder}\n  try it: python -c {shlex.quote(f'from transformers import pipeline; print({ask})')}")


def save_locally(run: Run, node: Node, folder: str) -> Path:
    local = run.scratch / folder / node.id
    node.model.save_pretrained(local)
    run.codec.tokenizer.save_pretrained(local)
    return local


HUB_PATIENCE = 1800.0  # seconds that the end of a run waits for uploads


def push_to_hub(run: Run, node: Node, last: bool = False) -> None:
    """Upload the model in the background if a token is set; a failed push is reported and never stops training.

    While one is under way none but the last is begun, and that one waits for it.
    """
    token, under_way = run.config.HUGGINGFACE_ACCESS_TOKEN, [t for t in threading.enumerate() if t.name == f"hub {node.id}"]
    if not token or (under_way and not last):
        return
    round_, local = run.done, save_locally(run, node, f"hub/{run.done}")

    def push():
        for thread in under_way:
            thread.join(HUB_PATIENCE / 2)
        try:
            from huggingface_hub import HfApi  # transformers brings it

            api = HfApi(token=token)
            repo = run.config.HF_REPO
            if repo == "auto":
                repo = f"{api.whoami()['name']}/{run.config.EXPERIMENT_NAME}-{node.id}"
            api.create_repo(repo, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=local, commit_message=f"after round {round_}")
            run.log.event("hub", f"pushed to {repo}")
        except Exception as error:
            run.log.event("hub", f"push failed, training goes on: {error!r}")
        shutil.rmtree(local, ignore_errors=True)

    threading.Thread(target=push, name=f"hub {node.id}", daemon=True).start()


# -------- Roles -----------------------------------------------------------------------------------------------


def join_experiment(config: Config, store: DriveStore, say) -> list[str]:
    """Create the experiment or check that this node's settings agree with it; returns the tasks. ConfigError names both values."""
    if not (store.base / "config.json").exists():
        others = list_experiments(config.GDRIVE_PATH)
        say(f"new experiment {config.EXPERIMENT_NAME}" + (f"; there are also: {', '.join(others)}" if others else ""))
    store.create()
    tasks = config.TASKS
    if tasks == "auto":
        tasks = ",".join(SMALL_TASKS if config.MODEL_NAME == "tiny" else PAPER_TASKS)
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in PRIVATE_SETTINGS}
    settings |= {"TASKS": tasks, "created_at": time.time(), "reasoning_gym": reasoning_gym.__version__, "task_table": task_hash()}
    began_with = store.open_config(settings, only_read=config.NODE_ROLE == "coordinator")  # it knows neither I, J nor model
    if config.TASKS == "auto" or config.NODE_ROLE == "coordinator":
        tasks = str(began_with.get("TASKS", tasks))
        unknown = [task for task in tasks.split(",") if task not in TASK_TABLE]
        if unknown:
            raise ConfigError(f"TASKS in {store.base / 'config.json'}: {why_refused(unknown[0])}")
    ours = {**settings, "TASKS": tasks}
    compared = ("MAX_STAGES",) if config.NODE_ROLE == "coordinator" else SHARED_SETTINGS
    wrong = [f"{n}={ours[n]!r}, but the experiment began with {began_with.get(n)!r}" for n in compared if began_with.get(n) != ours[n]]
    if wrong:
        raise ConfigError(f"{store.base / 'config.json'} disagrees; change these settings or EXPERIMENT_NAME:\n  " + "\n  ".join(wrong))
    return tasks.split(",")


def run_worker(config: Config, log: Log, stop: StopButton) -> str:
    """Load, resume, train, save. Returns how it ended: finished, stopped or superseded."""
    node_ids = [f"{config.NODE_ID}_{i}" for i in range(config.LOCAL_NODES)] if config.LOCAL_NODES > 1 else [config.NODE_ID]
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME, config.NODE_ID)
    tasks = join_experiment(config, store, log.say)
    about = {"model": config.MODEL_NAME, **process_identity(), "versions": versions()}
    sessions = {node_id: store.register(node_id, "worker", about) for node_id in node_ids}
    keep_freed_memory()
    if config.MODEL_NAME == "tiny":
        torch.set_num_threads(1)  # 0.14 M parameters: a second thread costs more than it brings
    model, codec = load_model(config, tasks)
    load_warm_start(model, codec, config, tasks, log.say)
    nodes = [new_node(node_id, model, config, sessions[node_id]) for node_id in node_ids]
    del model  # every node has a copy

    live = Liveness(store, config.STALE_AFTER_SECONDS)
    scratch = Path(tempfile.mkdtemp(prefix="sapo-"))
    courier = Courier(log.event, beat_seconds=min(15.0, config.STALE_AFTER_SECONDS / 4))
    run = Run(config, store, courier, codec, live, nodes, log, stop, tasks, scratch)
    courier.beat = lambda: beat(run)
    try:
        prepare(run)
        log.bar = progress_bar(run)
        train(run)
        run.state = "done"
        save_models(run)
        for node in nodes:
            push_to_hub(run, node, last=True)
        log.event("end", f"finished; cumulative reward {sum(n.total_reward for n in nodes) / len(nodes):.2f} per node")
        return "finished"
    except Stopped:
        run.state = "stopped"
        save_checkpoint(run)
        log.event("end", f"stopped before round {run.done + 1}; to go on:\n  {log.resume_line}")
        return "stopped"
    except Superseded as error:
        log.event("end", str(error))
        return "superseded"
    finally:
        close(run)


def new_node(node_id: str, model, config: Config, session: str) -> Node:
    """A node with its own copy of the weights."""
    own = copy.deepcopy(model)
    own.eval()
    fused = config.MODEL_NAME != "tiny"  # one pass over memory; it rounds differently, and tiny's published figures repeat bit for bit
    optimizer = torch.optim.AdamW(own.parameters(), lr=config.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    return Node(node_id, own, optimizer, session=session)


def beat(run: Run) -> None:
    """The heartbeat of all nodes of this process; called by the courier."""
    for node in run.nodes:
        run.store.heartbeat(node.id, {"session": node.session, "round": run.done + 1, "state": run.state})


def prepare(run: Run) -> None:
    """Resume, sweep what a killed session left, check the disk, and say what begins."""
    config, store = run.config, run.store
    resume(run)
    run.clock = store.current_round()
    run.replay_until = max(run.clock, store.highest_rewarded_round())  # an outage leaves rewards above the clock
    store.sweep_temp_files([node.id for node in run.nodes], max(0, run.done - 1))
    check_disk(run)
    run.max_rows, row, available = rows_that_fit(run.nodes[0].model, config)
    at_once = min(run.max_rows, (config.NUM_TRAIN_SAMPLES + config.NUM_TRANSPLANT_TREES) * config.NUM_GENERATIONS)
    run.log.say(f"memory: the update takes about {at_once * row:.1f} GB for {at_once} completions at once; {available:.1f} GB free")
    for node in run.nodes:
        info = {"node_id": node.id, **process_identity(), "versions": versions(), "device": config.DEVICE, "cpus": os.cpu_count()}
        run.courier.post(store.rewrite, f"logs/{node.id}/system_info.json", info)
    if config.NUM_TRANSPLANT_TREES == 0:
        run.log.say("NUM_TRANSPLANT_TREES=0: nothing is learned from peers (plain GRPO)")
    run.log.event("start", f"{len(run.nodes)} node(s), model {config.MODEL_NAME} on {config.DEVICE} ({config.DTYPE}), round {run.done + 1}")
    run.log.say(f"to resume: {run.log.resume_line}")


def check_disk(run: Run) -> None:
    """Checkpoint size against free space, on the shared folder and on the local disk it is written to first."""
    size = sum(12 * p.numel() for p in run.nodes[0].model.parameters()) * len(run.nodes)  # weights + two Adam moments
    for place, copies in ((run.store.base, run.config.CHECKPOINT_KEEP + 1), (run.scratch, 1)):
        free = shutil.disk_usage(place).free
        if free < copies * size:
            run.log.event("disk", f"{place}: {free / 1e9:.1f} GB free, {copies} checkpoints need {copies * size / 1e9:.1f} GB; lower CHECKPOINT_KEEP or make room")


def resume_line(config: Config, environ) -> str:
    """The command that resumes this node: what was set, and what was made up at the start; never the secret."""
    given = {f.name: environ[f.name] for f in fields(config) if environ.get(f.name) and f.name != "HUGGINGFACE_ACCESS_TOKEN"}
    given |= {"GDRIVE_PATH": os.path.abspath(config.GDRIVE_PATH), "NODE_ID": config.NODE_ID}
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in given.items()), "python sapo.py"])


def progress_bar(run: Run):
    """A bar on a terminal or in a notebook, None elsewhere: a log file wants plain lines."""
    if sys.stdout.isatty() or in_notebook():
        return tqdm(total=run.config.MAX_ROUNDS, initial=run.done + 1, unit="round", dynamic_ncols=True)
    return None


def close(run: Run) -> None:
    """Write what is still queued and say goodbye. Nothing is given up silently."""
    if run.log.bar is not None:
        run.log.bar.close()
        run.log.bar = None
    run.log.flush(run.append, every=0.0)
    if run.state != "running":
        run.courier.post(beat, run)
    uploads = [thread for thread in threading.enumerate() if thread.name.startswith("hub ")]
    if uploads:
        run.log.say("waiting for the Hub (Ctrl-C gives up)")
    deadline = time.monotonic() + (HUB_PATIENCE if run.state == "done" else 120.0)
    for thread in uploads:
        thread.join(max(0.0, deadline - time.monotonic()))
    uploading = any(thread.is_alive() for thread in uploads)
    if uploading:
        run.log.event("hub", f"an upload did not reach the Hub; the model lies in {run.scratch / 'hub'}")
    run.log.flush(run.append, every=0.0)
    if not run.courier.flush(timeout=10.0):
        run.log.say(f"{run.courier.pending} writes are still waiting for the shared folder; waiting up to 5 minutes (Ctrl-C gives up)")
    run.courier.flush(timeout=300.0)
    run.log.flush(run.append, every=0.0)  # what the courier said meanwhile
    pending = run.courier.close(timeout=10.0)
    if pending:
        run.log.say(f"{pending} writes did not reach the shared folder; checkpoints among them lie in {run.scratch}")
    elif not uploading:
        shutil.rmtree(run.scratch, ignore_errors=True)


def versions() -> dict:
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__, "reasoning_gym": reasoning_gym.__version__}


def run_coordinator(config: Config, log: Log, stop: StopButton) -> str:
    """Open rounds for the swarm; loads no model."""
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME, COORDINATOR)
    join_experiment(config, store, log.say)
    session = store.register(COORDINATOR, "coordinator", {"model": None, **process_identity(), "versions": versions()})
    store.sweep_temp_files([COORDINATOR], max(0, store.current_round() - 1))

    def each_round(round_):
        log.flush(store.append)
        if config.ROLLOUT_CLEANUP_ENABLED:  # owners clean up after themselves; this is for nodes long gone
            store.clean_rollouts(round_ - 2 * rounds_to_keep(config), None, config.ROLLOUT_ARCHIVE_OLD)

    stop.shield()  # no weights here: a stop just ends the loop
    return coordinate(
        store, session, COORDINATOR, max_rounds=config.MAX_ROUNDS, last_stage=config.MAX_STAGES - 1,
        strategy=config.ROUND_ADVANCE, interval=config.COORDINATOR_ROUND_INTERVAL,
        liveness=Liveness(store, config.STALE_AFTER_SECONDS), say=log.say,
        should_stop=lambda: stop.requested, each_round=each_round,
    )  # fmt: skip


def run_validate(config: Config) -> str:
    """Print what a finished run lacks; "valid" or "invalid". Rounds and nodes as set here, else as the run was started."""
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME)
    if not is_there(config):
        return "invalid"
    try:
        began_with = store.read("config.json")
    except BadFile as error:
        raise StoreError(f"{store.base / 'config.json'}: {error}") from error
    rounds, local = (began_with.get(name) for name in ("MAX_ROUNDS", "LOCAL_NODES"))
    if not (isinstance(rounds, int) and isinstance(local, int) and 1 <= rounds <= 10**6 and 1 <= local <= 256):
        raise StoreError(f"{store.base / 'config.json'}: MAX_ROUNDS or LOCAL_NODES is missing or out of range")
    rounds = config.MAX_ROUNDS if config.MAX_ROUNDS != Config.MAX_ROUNDS else rounds
    nodes = local if local > 1 else began_with.get("NUM_WORKERS")
    if config.NUM_WORKERS != Config.NUM_WORKERS or not isinstance(nodes, int):
        nodes = config.NUM_WORKERS
    problems = validate_experiment(store, rounds, nodes)
    for problem in problems:
        print(f"validate: {problem}")
    print(f"validate: {store.base}: " + ("FAILED" if problems else "passed"))
    return "invalid" if problems else "valid"


def is_there(config: Config) -> bool:
    """Whether the experiment to be read exists; else says so, and which ones do."""
    names = list_experiments(config.GDRIVE_PATH)
    if config.EXPERIMENT_NAME not in names:
        print(f"no experiment {config.EXPERIMENT_NAME!r} below {config.GDRIVE_PATH}" + (f"; there are: {', '.join(names)}" if names else ""))
    return config.EXPERIMENT_NAME in names


def run_monitor(config: Config, stop: StopButton) -> str:
    """The live dashboard: every 30 seconds on a terminal or in a notebook, once elsewhere. With matplotlib five charts too:
    inline in a notebook, else in GDRIVE_PATH/reports."""
    store = DriveStore(config.GDRIVE_PATH, config.EXPERIMENT_NAME)
    if not is_there(config):
        return "invalid"
    stop.shield()
    chart = None
    if importlib.util.find_spec("matplotlib") and not in_notebook():
        chart = Path(config.GDRIVE_PATH) / "reports" / f"{config.EXPERIMENT_NAME}.png"
        chart.parent.mkdir(exist_ok=True)
    live = sys.stdout.isatty() or in_notebook()
    monitor(store, config.STALE_AFTER_SECONDS, once=not live, should_stop=lambda: stop.requested, chart=chart)
    return "finished"


def run_report(config: Config) -> str:
    """Compare all experiments below GDRIVE_PATH; print the table, write it to GDRIVE_PATH/reports."""
    rows = compare_experiments(config.GDRIVE_PATH)
    if not rows:
        print(f"report: no experiment with rewards below {config.GDRIVE_PATH}")
        return "invalid"
    print(report_text(rows, REPORT_THRESHOLD))
    for path in write_report(rows, Path(config.GDRIVE_PATH) / "reports", REPORT_THRESHOLD):
        print(path)
    return "finished"


def run_benchmark(config: Config) -> str:
    """What this machine does: tokens per second, seconds per round, peak memory, store milliseconds. Touches no experiment."""
    tasks = (SMALL_TASKS if config.MODEL_NAME == "tiny" else PAPER_TASKS) if config.TASKS == "auto" else config.TASKS.split(",")
    keep_freed_memory()
    model, codec = load_model(config, tasks)
    node, rounds = new_node("benchmark", model, config, ""), []
    model, optimizer = node.model, node.optimizer
    for i in range(4):
        questions = [make_question(tasks[j % len(tasks)], 1000 * i + j) for j in range(config.NUM_TRAIN_SAMPLES)]
        prompts, began = [codec.prompt(q) for q in questions], time.monotonic()
        completions = generate(
            model, prompts, config.NUM_GENERATIONS, config.MAX_NEW_TOKENS, config.TEMPERATURE, codec.eos_ids,
            torch.Generator().manual_seed(i), codec.eos_id, dtype=getattr(torch, config.DTYPE),
        )  # fmt: skip
        generated = time.monotonic()
        made_up = [float(j % 2) for j in range(config.NUM_GENERATIONS)]  # so that every group has something to train on
        groups = [Group(prompt, group, made_up) for prompt, group in zip(prompts, completions, strict=True)]
        rows, _, _ = rows_that_fit(model, config)
        stats = update(
            model, optimizer, groups, max_new_tokens=config.MAX_NEW_TOKENS, loss_type=config.LOSS_TYPE, max_rows=rows,
            num_iterations=config.NUM_ITERATIONS, pad_id=codec.eos_id, dtype=getattr(torch, config.DTYPE),
        )  # fmt: skip
        seconds = (generated - began, time.monotonic() - generated)
        rounds.append((sum(len(c) for g in completions for c in g), stats["trained_tokens"], *seconds))
    tokens, trained, generating, training = (sum(column) for column in zip(*rounds[1:], strict=True))  # the first one warms up
    publish_ms, fetch_ms = store_milliseconds(questions, completions, codec)
    print(f"model {config.MODEL_NAME} on {config.DEVICE} ({config.DTYPE}), {config.NUM_TRAIN_SAMPLES} questions x {config.NUM_GENERATIONS}")
    print(f"generated {tokens / generating:.0f} tokens/s\ntrained   {trained / training:.0f} tokens/s")
    print(f"a round   {(generating + training) / 3:.2f} s\nmemory    {peak_memory_gb(config):.2f} GB at the peak")
    print(f"store     {publish_ms:.1f} ms to publish, {fetch_ms:.1f} ms to fetch (a temporary folder of this machine)")
    return "finished"


def store_milliseconds(questions, completions, codec: Codec, times: int = 20) -> tuple[float, float]:
    """Milliseconds to publish and to fetch these groups through a store in a temporary folder."""
    groups = {
        str(i): publishable(Rollout(q, Group([], group, [0.0] * len(group)), [codec.decode(c) for c in group], [True] * len(group)))
        for i, (q, group) in enumerate(zip(questions, completions, strict=True))
    }
    with tempfile.TemporaryDirectory(prefix="sapo-benchmark-") as folder:
        store, reading = DriveStore(folder, "benchmark"), DriveStore(folder, "benchmark")
        store.create()
        began = time.monotonic()
        for i in range(times):
            store.publish(i, 0, "node", {}, groups)
        published = time.monotonic()
        for i in range(times):
            reading.fetch(i, 0, "node")
        return (published - began) * 1000 / times, (time.monotonic() - published) * 1000 / times


def peak_memory_gb(config: Config) -> float:
    if config.DEVICE == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9


REPORT_THRESHOLD = 0.3  # "rounds to" and "completions to" this smoothed mean reward


# -------- For notebooks, and the command line -----------------------------------------------------------------


def get_experiment_status(path, name: str) -> dict:
    """Status of one experiment below the shared folder `path`: current_round, num_active_peers, cumulative_rewards, …"""
    return experiment_status(DriveStore(path, name))


def get_experiment_metrics(path, name: str) -> list[dict]:
    """One row per node, round and stage, ready for pandas.DataFrame."""
    return reward_rows(DriveStore(path, name))


def compare_experiments(path, names=None) -> list[dict]:
    """Figures of the experiments `names` (all below `path` by default), averaged over seeds, against their J = 0 baseline."""
    summaries = []
    for name in names or list_experiments(path):
        try:
            summaries.append(summarize(DriveStore(path, name), REPORT_THRESHOLD))
        except ValueError as error:  # one damaged config.json must not take the report of the others away
            print(f"experiment {name} is left out: {error}")
    return compare([summary for summary in summaries if summary])


def main(environ=None) -> int:
    """Run the role that the environment asks for; returns the exit status. The only place that reads the environment."""
    environ = os.environ if environ is None else environ
    try:
        config, warnings = read_config(environ)
    except ConfigError as error:
        print(error)
        return 2
    log = Log(config.NODE_ID, config.HUGGINGFACE_ACCESS_TOKEN, resume_line(config, environ))
    for warning in warnings:
        log.say(f"warning: {warning}")
    transformers.utils.logging.set_verbosity_error()  # it warns of padding that this program handles itself
    transformers.utils.logging.disable_progress_bar()
    stop = StopButton()
    stop.install()
    try:
        if config.NODE_ROLE == "monitor":
            outcome = run_monitor(config, stop)
        elif config.NODE_ROLE == "validate":
            outcome = run_validate(config)
        elif config.NODE_ROLE == "report":
            outcome = run_report(config)
        elif config.NODE_ROLE == "benchmark":
            outcome = run_benchmark(config)
        else:
            print(config_table(config), flush=True)
            role = run_coordinator if config.NODE_ROLE == "coordinator" else run_worker
            outcome = role(config, log, stop)
    except (ConfigError, StoreError) as error:
        log.say(str(error))
        return 2
    except OSError as error:
        log.say(f"{error.filename or config.GDRIVE_PATH} cannot be used: {error.strerror or error} (GDRIVE_PATH={config.GDRIVE_PATH})")
        return 2
    except (Stopped, KeyboardInterrupt):
        log.say(f"stopped; to go on:\n  {log.resume_line}")
        return 130
    finally:
        stop.restore()
    return {"finished": 0, "valid": 0, "stopped": 130, "superseded": 3, "invalid": 1}[outcome]


if __name__ == "__main__":
    status = main()
    if status and not in_notebook():  # in a notebook the cell just ends
        sys.exit(status)
