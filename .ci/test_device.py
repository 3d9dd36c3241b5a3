"""The learner on an accelerator. On a separate device of any CPU: torch_xla, with PJRT's client for CPUs.

    python3 -m venv env && env/bin/pip install torch==2.9.0 torch_xla==2.9.0 transformers==4.57.3 \
        'reasoning-gym>=0.1.25,<0.2' pytest
    XLA_FLAGS=--xla_backend_optimization_level=0 PJRT_DEVICE=CPU PYTHONPATH=. \
        env/bin/python -m pytest -q .ci/test_device.py

By hand: XLA compiles each new shape, TIME here on one core (three times as long without that flag).
Where there is no torch_xla, only the last part runs, with stand-ins for what CUDA and MPS alone have.
"""

import ast
import itertools
import json
import math
import weakref
from pathlib import Path
from types import SimpleNamespace

import grpo
import pytest
import sapo
import torch
from grpo import Group, generate, halving_on_oom, sequence_logps, shared_prompt_logps
from test_sapo import config_error, config_of, near, outcome_of, rows_of, tiny_lm, weights_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer

try:
    import torch_xla
except ImportError:
    torch_xla = None

torch.set_num_threads(1)
on_device = pytest.mark.skipif(torch_xla is None, reason="there is no torch_xla")


class AsOnACard(TorchDispatchMode):
    """XLA moves some operands without a word. Here it refuses what CUDA does, and float64, as MPS does."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result, name = operation(*args, **kwargs or {}), operation.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        kinds = {x.device.type for x in tensors if x.dim() or x.device.type == "xla"}
        may_mix = name in ("_to_copy", "copy_") or ("index" in name and args[0].device.type == "xla")
        if len(kinds) > 1 and not may_mix:
            raise RuntimeError(f"{operation}: tensors on two devices")
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (x.device.type, x.dtype) == ("xla", torch.float64):
                raise TypeError(f"{operation}: float64 on the device")
        return result


@pytest.fixture(scope="module")
def device():
    torch.xla = torch_xla  # where torch.utils.checkpoint looks for a device's functions
    torch.__future__.set_swap_module_params_on_conversion(True)  # else a move to XLA parts tied weights
    with AsOnACard():
        yield torch_xla.device()


def at(place):
    """A small model there."""
    return tiny_lm().to(place)


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
    left, select = [], grpo.transformers.DynamicCache.batch_select_indices

    def spy(cache, indices):
        left.append(len(indices))
        return select(cache, indices)

    monkeypatch.setattr(grpo.transformers.DynamicCache, "batch_select_indices", spy)
    settings = dict(num_generations=4, max_new_tokens=5, temperature=1.0, eos_ids={2, 7, 11}, pad_id=20)
    if prompts is PROMPTS["both"]:
        settings |= dict(answered=lambda ids: sum(ids) > 20, max_rows=4)
    draws = []
    for place in ("cpu", device):
        draws.append(generate(at(place), prompts, rng=torch.Generator().manual_seed(5), **settings))
    assert draws[0] == draws[1]
    assert len(set(map(len, itertools.chain(*draws[0])))) > 2
    assert len(left) > 1 and left[: len(left) // 2] == left[len(left) // 2 :]


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
    external = [SimpleNamespace(group=Group([5, 6], [[i, 9, i, 3] for i in range(4)], [1.0, 0.0, 0.0, 1.0]))]
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
    assert (ours - weights_of(tiny_lm())).norm() > 0.5


@on_device
def test_device_bfloat16_is_autocast_with_weights_and_probabilities_in_float32(device, monkeypatch):
    """XLA's autocast leaves attention itself in float32, so there are no equal numbers to be had."""
    kinds, update = set(), grpo.ComputeCache.update

    def spy(*args, **kwargs):
        found = update(*args, **kwargs)
        kinds.update(x.dtype for x in found)
        return found

    monkeypatch.setattr(grpo.ComputeCache, "update", spy)
    pairs, found = [(prompt, ANSWERS) for prompt in PROMPTS["both"]], []
    for place, dtype in (("cpu", torch.float32), (device, torch.float32), (device, torch.bfloat16)):
        logp, mask = shared_prompt_logps(at(place), pairs, 0.7, 20, dtype)
        assert logp.dtype == torch.float32
        found.append(logp.detach().cpu())
    assert kinds == {torch.bfloat16}
    assert 1e-3 < (found[2] - found[0]).abs().max() < 0.2
    (expected, figures), (ours, figures_16) = learn("cpu"), learn(device, "bfloat16")
    assert ours.dtype == torch.float32 and not torch.equal(ours, expected)
    assert figures_16["grad_norm"] == pytest.approx(figures["grad_norm"], rel=0.05)
    rng = torch.Generator().manual_seed(5)
    drawn = generate(at(device), PROMPTS["both"], 2, 4, 1.0, {2}, rng, dtype=torch.bfloat16)
    assert all(0 <= token < 23 for group in drawn for ids in group for token in ids)


# -------- Whole runs of sapo.main -------------------------------------------------------------------------

TASK = "small_count_bits"
SMALL = {
    "MODEL_NAME": "tiny", "TASKS": TASK, "WARM_START_STEPS": 150, "ANSWER_TAG_SHARE": 0.9, "LOCAL_NODES": 2,
    "NUM_TRAIN_SAMPLES": 2, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4, "MAX_NEW_TOKENS": 5,
    "MAX_ROUNDS": 2, "CHECKPOINT_INTERVAL": 1, "EVAL_INTERVAL": 1, "EVAL_SAMPLES": 8, "EXTERNAL_FLOOR": 0.1,
    "SEED": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def drive(device, tmp_path_factory):
    """Runs "cpu" and "xla", from one warm start that was made on the CPU."""
    drive = tmp_path_factory.mktemp("drive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sapo, "devices", lambda: {"cpu": "float32", "xla": "float32"})
        for place in ("cpu", "xla"):
            assert main(drive, place, DEVICE=place) == 0
        yield drive


def main(drive, name, **settings) -> int:
    return sapo.main({"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name} | SMALL | settings)


@on_device
def test_device_a_swarm_writes_the_same_and_measures_the_same_held_out_accuracy(drive):
    said, rows = [], []
    for name in ("cpu", "xla"):
        files = sorted(drive.glob(f"experiments/{name}/rollouts/*/*/*.json"))
        said.append([json.loads(path.read_text())["rollouts"] for path in files])
        rows.append(rows_of(drive, name))
    assert said[0] == said[1] and len(said[0]) == len(rows[0]) == 2 * 2
    for expected, ours in zip(*rows, strict=True):
        figures = {key for key, value in ours.items() if isinstance(value, int | float)}
        figures -= {"timestamp", "generate_seconds", "train_seconds", "wait_seconds"}
        assert [ours[key] for key in figures] == pytest.approx([expected[key] for key in figures], 1e-3, 1e-5)
    assert any(row["grad_norm"] > 0 < row["external_groups"] for row in rows[1])
    assert any(0 < row["held_out"] for row in rows[1])


@on_device
def test_device_a_run_that_was_stopped_and_restored_equals_an_unbroken_one(drive):
    for rounds in (1, 2):
        assert main(drive, "resumed", DEVICE="xla", MAX_ROUNDS=rounds) == 0
    assert outcome_of(drive, "resumed") == outcome_of(drive, "xla")


@on_device
def test_device_the_model_at_the_end_is_loaded_by_transformers_and_is_that_of_the_cpu(drive):
    prompts, found = [grpo.make_question(TASK, seed).text + "\n" for seed in range(3)], []
    for name in ("cpu", "xla"):
        folder = drive / f"experiments/{name}/models/node_1"
        model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
        last = grpo.load_tensors(max(drive.glob(f"experiments/{name}/checkpoints/*/*")), {
            f"node_1/{key}/weight": p.detach() for key, p in model.named_parameters()})  # fmt: skip
        assert all(map(torch.equal, last.values(), model.parameters()))
        with torch.no_grad():
            found.append([model(**tokenizer(text, return_tensors="pt")).logits for text in prompts])
    for ours, expected in zip(found[1], found[0], strict=True):
        near(ours, expected, 1e-2, 0)


@on_device
def test_device_warm_start_steps_are_the_same(device):
    config, found = config_of(**SMALL | {"WARM_START_STEPS": 3, "DEVICE": "cpu"}), []
    for place in ("cpu", device):
        model, codec = grpo.load_model(config, [TASK])
        lines = []
        model.to(place)
        grpo.warm_start(model, codec, config, [TASK], lines.append)
        found.append([float(line.split("loss ")[1].split()[0]) for line in lines])
    assert found[1] == pytest.approx(found[0], abs=2e-3) and len(found[0]) == 3
    assert found[0][2] < found[0][0] - 0.2


# -------- What only CUDA and MPS have: stand-ins, in any environment --------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """machine(cards, new, free, mps): a machine with so many cards, of a kind that has bfloat16 or has not."""
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


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.61 GiB, max allowed: 9.07 GiB). Tried to …"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: …"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you …"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:30])
def test_device_each_backends_way_to_be_out_of_memory_halves_the_batch_when_the_rest_is_freed(error, capsys):
    tried, held = [], []

    def attempt(rows):
        assert not any(ref() is not None for ref in held), "what the failed attempt had is still there"
        tried.append(rows)
        big = torch.empty(rows)
        held.append(weakref.ref(big))
        if rows > limit:
            raise type(error)(*error.args)
        return rows * 10

    limit = 2
    assert halving_on_oom(attempt, 2**30, 9, "the update") == (20, 2) and tried == [2**30, 5, 3, 2]
    limit = 1
    with pytest.raises(MemoryError, match="out of memory in generation: lower LOCAL_NODES"):
        halving_on_oom(attempt, 8, 8, "generation", smallest=4)
    assert tried[4:] == [8, 4] and capsys.readouterr().out.count("again with") == 4


def test_device_any_other_error_of_a_device_is_not_taken_for_a_lack_of_memory():
    for text in ("CUDA error: device-side assert triggered", "Placeholder storage has not been allocated on MPS"):
        tried = []

        def attempt(rows):
            tried.append(rows)
            raise RuntimeError(text)  # noqa: B023

        with pytest.raises(RuntimeError, match=text):
            halving_on_oom(attempt, 8, 8, "the update")
        assert tried == [8]


def test_device_no_other_function_speaks_of_cuda_or_mps():
    speaks = set()
    for name in ("drive_store", "grpo", "coordinator", "sapo"):
        tree = ast.parse(Path(sapo.__file__).with_name(f"{name}.py").read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            code = " ".join(map(ast.unparse, function.body[ast.get_docstring(function) is not None :]))
            if "cuda" in code or "mps" in code.replace("dumps", ""):
                speaks.add(function.name)
    assert speaks == {"devices", "available_memory"}
