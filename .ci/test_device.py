"""The learner on an accelerator. On a separate device of any CPU: torch_xla, with PJRT's client for CPUs.

    python3 -m venv env && env/bin/pip install torch==2.9.0 torch_xla==2.9.0 transformers==4.57.3 \
        'reasoning-gym>=0.1.25,<0.2' pytest
    XLA_FLAGS=--xla_backend_optimization_level=0 PJRT_DEVICE=CPU PYTHONPATH=. \
        env/bin/python -m pytest -q .ci/test_device.py

By hand: under three minutes here on one shared core, nearly all of it for compiling each new shape, which
takes three times as long without that flag.
Where there is no torch_xla, only the last part runs, with stand-ins for what CUDA and MPS alone have.
"""

import ast
import itertools
import json
import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import grpo
import pytest
import sapo
import torch
import torch.nn.functional as F
from grpo import Group, generate, halving_on_oom, sequence_logps, shared_prompt_logps
from safetensors.torch import save_file
from test_sapo import config_error, config_of, near, outcome_of, rows_of, weights_of
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Qwen2Config, Qwen2ForCausalLM
from transformers import modeling_utils

try:
    import torch_xla
except ImportError:
    torch_xla = None

torch.set_num_threads(1)
on_device = pytest.mark.skipif(torch_xla is None, reason="there is no torch_xla")


KEEPS_TIES = (torch.__future__, "_swap_module_params_on_conversion")  # else a move to XLA parts tied weights
MOVES = ("to", "copy_", "_has_compatible_shallow_copy_type")  # the last: asked when a module is moved


class AsOnACard(TorchFunctionMode):
    """XLA with what it lacks: it refuses operands on two devices, which XLA moves without a word, as CUDA
    does, and float64, as MPS does; its autocast includes attention, as that of all others does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention and torch.is_autocast_enabled("xla"):
            args = [x.to(torch.get_autocast_dtype("xla")) for x in args]
        result, name = function(*args, **kwargs or {}), function.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        kinds = {x.device.type for x in tensors if x.dim() or x.device.type == "xla"}
        indexed = name in ("__getitem__", "__setitem__") and args[0].device.type == "xla"
        if len(kinds) > 1 and not indexed and name not in MOVES:
            raise RuntimeError(f"{name}: tensors on two devices")
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (x.device.type, x.dtype) == ("xla", torch.float64):
                raise TypeError(f"{name}: float64 on the device")
        if name == "backward":
            torch_xla.sync()  # as in the fixture below
        return result


@pytest.fixture(scope="module")
def device():
    # Computed step by step: what is left pending is compiled again with all that follows from it.
    hook = register_optimizer_step_post_hook(lambda *_: torch_xla.sync())
    with pytest.MonkeyPatch.context() as patch, AsOnACard():
        patch.setattr(torch, "xla", torch_xla, raising=False)  # torch.utils.checkpoint looks there
        patch.setattr(*KEEPS_TIES, True)
        yield torch_xla.device()
    hook.remove()


def at(place):
    """A small Qwen2 there, with the rotations that models for cards have. One layer: less to compile."""
    torch.manual_seed(1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1, tie_word_embeddings=True)
    sizes = dict(vocab_size=23, hidden_size=16, intermediate_size=32, max_position_embeddings=64)
    return Qwen2ForCausalLM(Qwen2Config(**heads, **sizes, initializer_range=0.3)).eval().to(place)


@on_device
def test_device_a_tensor_left_on_the_cpu_and_a_float64_are_errors(device):
    there = torch.ones(3, device=device)
    for wrong in (lambda: there + torch.ones(3), lambda: torch.ones(3).masked_fill_(there > 0, 2)):
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(TypeError):
        there.double()
    assert (there + torch.tensor(1.0))[torch.tensor([0])].tolist() == [2]  # a card allows these


# -------- Log-probabilities, sampling, update: against the same on the CPU --------------------------------

START = [i * 5 % 21 for i in range(grpo.MIN_COMMON_TOKENS + 2)]
PROMPTS = {
    "no padding": [[3, 4, 5], [7, 8, 9]], "padding": [[3, 4, 5], [7]],
    "a common start": [[*START, 3], [*START, 7]], "both": [[*START, 3, 4], [*START, 7]],
}  # fmt: skip
ANSWERS = [[9, 8, 1, 2], [4], [5, 6, 2]]


@on_device
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_device_generation_draws_the_same_tokens_while_rows_leave_the_batch(device, prompts, monkeypatch):
    cache = DynamicCache
    left = create_autospec(cache.batch_select_indices, side_effect=cache.batch_select_indices)
    monkeypatch.setattr(cache, "batch_select_indices", left)
    settings = dict(num_generations=4, max_new_tokens=5, temperature=1.0, eos_ids={2, 7, 11}, pad_id=20)
    if prompts is PROMPTS["both"]:
        settings |= dict(answered=lambda ids: sum(ids) > 50, max_rows=4)
    draws = []
    for place in ("cpu", device):
        draws.append(generate(at(place), prompts, rng=torch.Generator().manual_seed(5), **settings))
    assert draws[0] == draws[1]
    assert len(set(map(len, itertools.chain(*draws[0])))) > 2 and left.call_count >= 2


@on_device
@pytest.mark.parametrize("elements", [grpo.LOGIT_ELEMENTS, 5 * 23])
@pytest.mark.parametrize("prompts", [PROMPTS["padding"], PROMPTS["both"]], ids=["padding", "both"])
def test_device_log_probabilities_and_their_gradients_are_the_same(device, prompts, elements, monkeypatch):
    monkeypatch.setattr(grpo, "LOGIT_ELEMENTS", elements)  # the second: in chunks, recomputed
    found = []
    for place in ("cpu", device):
        model = at(place)
        shared, mask = shared_prompt_logps(model, [(prompt, ANSWERS) for prompt in prompts], 0.7, 20)
        rows = zip(*itertools.product(prompts, ANSWERS), strict=True)
        plain, plain_mask = sequence_logps(model, *rows, 0.7, 20)
        (shared.square().sum() + plain.square().sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append([x.detach().cpu() for x in (shared, plain, gradient / gradient.norm())])
        assert torch.equal(mask, plain_mask) and mask.sum() == 2 * 8
    for ours, expected in zip(found[1], found[0], strict=True):
        near(ours, expected, 1e-4, 0)
    near(found[1][0], found[1][1], 1e-4, 0)


def learn(place, dtype="float32"):
    """sapo.policy_gradient on own and external groups, two steps in micro-batches -> (weights, figures)."""
    config = config_of(
        MODEL_NAME="tiny", DEVICE="cpu", DTYPE=dtype, EXTERNAL_FLOOR=0.25, NUM_ITERATIONS=2, TEMPERATURE=0.7
    )
    model, prompts, rollouts = at(place), [[3, 4, 5], [6, 7, 8], [9, 1]], []
    rewards = [[1.0, 0.0, 0.5], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]  # the second is flat
    for prompt, rewarded in zip(prompts, rewards, strict=True):
        group = Group(prompt, [[(i + prompt[0]) % 21 for i in ids] for ids in ANSWERS], rewarded)
        rollouts.append(SimpleNamespace(group=group))
    theirs = [[i + 12, i + 4, i + 9, i + 5] for i in range(4)]
    external = [SimpleNamespace(group=Group([5, 6], theirs, [1.0, 0.0, 0.0, 1.0]))]
    node = sapo.Node("n", model, torch.optim.SGD(model.parameters(), lr=0.5), rollouts=rollouts)
    run = SimpleNamespace(config=config, max_rows=4, next_beat=math.inf, codec=SimpleNamespace(pad_id=20))
    sapo.policy_gradient(run, node, external)
    node.figures.pop("train_seconds")
    return weights_of(model).cpu(), node.figures


@on_device
def test_device_an_update_with_externals_above_the_floor_makes_the_same_step(device):
    (expected, figures), (ours, found) = learn("cpu"), learn(device)
    near(ours, expected, 1e-4)
    assert found == pytest.approx(figures, rel=1e-4, abs=1e-5)
    assert found["grad_norm"] > 0 < found["clip_fraction"] and 0 < found["external_kept"] < 1
    assert (found["informative_groups"], found["external_groups"]) == (3, 1)
    assert (ours - weights_of(at("cpu"))).norm() > 0.5


@on_device
def test_device_bfloat16_is_autocast_with_weights_and_probabilities_in_float32(device, monkeypatch):
    kinds, update, exact, found = set(), grpo.ComputeCache.update, torch.float32, []

    def spy(*args, **kwargs):
        cached = update(*args, **kwargs)
        kinds.update(x.dtype for x in cached)
        return cached

    monkeypatch.setattr(grpo.ComputeCache, "update", spy)
    pairs = [(prompt, ANSWERS) for prompt in PROMPTS["both"]]
    for place, dtype in (("cpu", exact), ("cpu", torch.bfloat16), (device, torch.bfloat16)):
        logp = shared_prompt_logps(at(place), pairs, 0.7, 20, dtype)[0]
        found.append(logp.detach().cpu())
    assert kinds == {torch.bfloat16} and logp.dtype == exact
    near(found[2], found[1], 0.1, 0)
    assert (found[2] - found[0]).abs().max() > 1e-3
    (expected, figures), (ours, of_device) = learn("cpu", "bfloat16"), learn(device, "bfloat16")
    assert ours.dtype == exact and (ours - expected).norm() < 0.1 * (expected - weights_of(at("cpu"))).norm()
    assert of_device["grad_norm"] == pytest.approx(figures["grad_norm"], rel=0.05)
    rng = torch.Generator().manual_seed(5)
    drawn = generate(at(device), PROMPTS["both"], 2, 4, 1.0, {2}, rng, dtype=torch.bfloat16)
    assert all(0 <= token < 23 for group in drawn for ids in group for token in ids)


# -------- Whole runs of sapo.main -------------------------------------------------------------------------

TASK = "small_count_bits"
SMALL = {
    "MODEL_NAME": "tiny", "TASKS": TASK, "WARM_START_STEPS": 150, "ANSWER_TAG_SHARE": 0.5, "LOCAL_NODES": 2,
    "NUM_TRAIN_SAMPLES": 3, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "MAX_NEW_TOKENS": 5,
    "MAX_ROUNDS": 2, "CHECKPOINT_INTERVAL": 1, "EVAL_INTERVAL": 1, "EVAL_SAMPLES": 8, "EXTERNAL_FLOOR": 0.1,
    "SEED": 3,
}  # fmt: skip


def save_from_main_memory(tensors, *args, **kwargs):
    """safetensors tells tensors apart by their addresses; those on XLA have none."""
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, *args, **kwargs)


def main(drive, name, **settings) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sapo, "devices", lambda: {"cpu": "float32", "xla": "float32"})
        patch.setattr(modeling_utils, "safe_save_file", save_from_main_memory)
        return sapo.main({"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name} | SMALL | settings)


@pytest.fixture(scope="module")
def drive(device, tmp_path_factory):
    """Runs "cpu" and "xla", from one warm start that was made on the CPU."""
    drive = tmp_path_factory.mktemp("drive")
    for place in ("cpu", "xla"):
        assert main(drive, place, DEVICE=place) == 0
    return drive


@on_device
def test_device_a_swarm_writes_the_same_and_measures_the_same_held_out_accuracy(drive):
    said, rows = [], []
    for name in ("cpu", "xla"):
        files = sorted(drive.glob(f"experiments/{name}/rollouts/*/*/*.json"))
        said += [[json.loads(path.read_text())["rollouts"] for path in files]]
        rows.append(rows_of(drive, name))
    assert said[0] == said[1] and len(said[0]) == len(rows[0]) == 2 * 2
    for expected, ours in zip(*rows, strict=True):
        figures = {key for key, value in ours.items() if isinstance(value, int | float)}
        figures -= {"timestamp", "generate_seconds", "train_seconds", "wait_seconds"}
        assert [ours[key] for key in figures] == pytest.approx([expected[key] for key in figures], 1e-4, 1e-6)
    assert any(row["grad_norm"] > 0 < row["external_groups"] for row in rows[1])
    assert any(0 < row["held_out"] for row in rows[1])


@on_device
def test_device_a_run_that_was_stopped_and_restored_equals_an_unbroken_one(drive):
    for rounds in (1, 2):
        assert main(drive, "resumed", DEVICE="xla", MAX_ROUNDS=rounds) == 0
    assert outcome_of(drive, "resumed") == outcome_of(drive, "xla")


@on_device
def test_device_the_model_at_the_end_is_loaded_by_transformers_and_is_that_of_the_cpu(drive, monkeypatch):
    monkeypatch.setattr(*KEEPS_TIES, False)  # it stands in the way of loading
    prompts, found = [grpo.make_question(TASK, seed).text + "\n" for seed in range(3)], []
    for name in ("cpu", "xla"):
        folder = drive / f"experiments/{name}/models/node_1"
        model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
        ours = {f"node_1/{key}/weight": p.detach() for key, p in model.named_parameters()}
        saved = grpo.load_tensors(max(drive.glob(f"experiments/{name}/checkpoints/*/*")), ours)
        assert all(map(torch.equal, saved.values(), ours.values()))
        with torch.no_grad():
            found.append([model(**tokenizer(text, return_tensors="pt")).logits for text in prompts])
    for ours, expected in zip(found[1], found[0], strict=True):
        near(ours, expected, 1e-4, 0)


@on_device
def test_device_warm_start_steps_are_the_same(device):
    config, losses, steps = config_of(**SMALL | {"WARM_START_STEPS": 3, "DEVICE": "cpu"}), [], []
    for place in ("cpu", device):
        (model, codec), lines = grpo.load_model(config, [TASK]), []
        start = weights_of(model)
        grpo.warm_start(model.to(place), codec, config, [TASK], lines.append)
        losses.append([float(line.split("loss ")[1].split()[0]) for line in lines])
        steps.append(weights_of(model).cpu() - start)
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and len(losses[0]) == 3
    assert (steps[0] - steps[1]).norm() < 0.01 * steps[0].norm() > 0


# -------- What only CUDA and MPS have: stand-ins, in any environment --------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """machine(…) makes this one look like one with such cards. Returns the names whose memory is asked."""
    asked = []

    def build(cards=0, new=True, free=24e9, mps=False):
        set_in_cuda = lambda name, value: monkeypatch.setattr(torch.cuda, name, value)  # noqa: E731
        set_in_cuda("is_available", lambda: cards > 0)
        set_in_cuda("device_count", lambda: cards)
        set_in_cuda("is_bf16_supported", lambda including_emulation=True: new or including_emulation)
        set_in_cuda("mem_get_info", lambda device: (asked.append(device), (int(free), 80 * 10**9))[1])
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        return asked

    return build


def test_device_the_best_comes_first_and_only_a_card_that_has_bfloat16_computes_in_it(machine):
    for about, expected in [
        (dict(), "cpu float32"), (dict(mps=True), "mps float32, cpu float32"),
        (dict(cards=1, new=False), "cuda float32, cpu float32, cuda:0 float32"),  # a T4 emulates it, slowly
        (dict(cards=2), "cuda bfloat16, cpu float32, cuda:0 bfloat16, cuda:1 bfloat16"),
    ]:  # fmt: skip
        machine(**about)
        assert ", ".join(map(" ".join, grpo.devices().items())) == expected


def test_device_memory_is_what_is_free_on_the_card_that_was_named_and_else_main_memory(machine):
    asked = machine(cards=2, free=7e9)
    assert [grpo.available_memory(name) for name in ("cuda", "cuda:1")] == [7e9, 7e9]
    assert asked == ["cuda", "cuda:1"]
    for name in ("mps", "cpu"):
        assert 1e8 < grpo.available_memory(name) < 1e14 and len(asked) == 2


def test_device_workers_that_share_a_card_share_its_memory_and_local_nodes_add_up(machine):
    for nodes, workers, real in [(1, 0, 1), (2, 0, 1), (3, 0, 0), (1, 2, 1), (1, 3, 0), (2, 2, 0)]:
        asked = machine(cards=2)
        config = config_of(LOCAL_NODES=nodes, NUM_WORKERS=workers, DEVICE="cuda:1")
        assert config.MODEL_NAME == (sapo.REAL_MODEL if real else "tiny"), (nodes, workers)
        assert config.DTYPE == "bfloat16" and set(asked) == {"cuda:1"}
    machine(cards=1, new=False)
    assert (config_of().DEVICE, config_of().DTYPE) == ("cuda", "float32")
    assert (config_of(DEVICE="cpu").MODEL_NAME, config_of(MODEL_NAME="x").MODEL_NAME) == ("tiny", "x")
    machine(mps=True)
    assert config_of().DEVICE == "mps" and "this machine has mps, cpu" in config_error(DEVICE="cuda")


@pytest.mark.parametrize("text, is_lack", [
    ("CUDA out of memory. Tried to allocate 2.00 GiB", True), ("CUDA error: out of memory", True),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
    ("MPS backend out of memory (MPS allocated: 8.61 GiB, max allowed: 9.07 GiB)", True),
    ("Invalid buffer size: 19.45 GB", True),
    ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1125899906842624 bytes", True),
    ("CUDA error: device-side assert triggered", False), ("Placeholder not allocated on MPS device", False),
])  # fmt: skip
def test_device_what_each_backend_says_when_memory_is_out_halves_the_batch_once_it_is_freed(text, is_lack):
    tried, held = [], []

    def attempt(rows):
        assert not any(ref() is not None for ref in held), "what the failed attempt had is still there"
        tried.append(rows)
        big = torch.empty(min(rows, 9))
        held.append(weakref.ref(big))
        if rows > limit:
            raise (torch.OutOfMemoryError if "Tried" in text else RuntimeError)(text)
        return rows * 10

    limit = 2
    if not is_lack:
        with pytest.raises(RuntimeError, match=text):
            halving_on_oom(attempt, 2**30, 9, "the update")
        return
    assert halving_on_oom(attempt, 2**30, 9, "the update") == (20, 2) and tried == [2**30, 5, 3, 2]
    with pytest.raises(MemoryError, match="out of memory in generation: lower LOCAL_NODES"):
        halving_on_oom(attempt, 8, 8, "generation", smallest=4)
    assert tried[4:] == [8, 4]


def test_device_no_other_function_speaks_of_cuda_or_mps():
    speaks = set()
    for name in ("drive_store", "grpo", "coordinator", "sapo"):
        tree = ast.parse(Path(sapo.__file__).with_name(f"{name}.py").read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            code = " ".join(map(ast.unparse, function.body[ast.get_docstring(function) is not None :]))
            if "cuda" in code or "mps" in code.replace("dumps", ""):
                speaks.add(function.name)
    assert speaks == {"devices", "available_memory"}
