"""Tests of the learner on an accelerator, which is CUDA if there is a GPU and XLA otherwise.

torch_xla provides a device on any machine. With PJRT_DEVICE=CPU, it computes on the CPU, but to
torch, it is a separate device.

    python3 -m venv env && env/bin/pip install torch==2.9.0 torch_xla==2.9.0 transformers==5.0.0 \
        'reasoning-gym>=0.1.25,<0.2' pytest
    XLA_FLAGS=--xla_backend_optimization_level=0 PJRT_DEVICE=CPU PYTHONPATH=. \
        env/bin/python -m pytest -q .ci/test_device.py

These tests are run by hand. With XLA, they take minutes on one core, mostly to compile each new
shape. Without a device, only the last part runs, with stand-ins for features that only CUDA and MPS
have.
"""

import itertools
import json
import re
import weakref
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM, modeling_utils

import grpo
import sapo
from test_sapo import assert_close, config_error, flat_weights, make_config, our_generate
from test_sapo import our_update, ragged_groups, read_results, read_rewards, small_codec
from test_sapo import small_gpt2, update_settings

try:
    import torch_xla
except ImportError:
    torch_xla = None

torch.set_num_threads(1)
PLACE = "cuda" if torch.cuda.is_available() else "xla"
there_is_none = PLACE == "xla" and torch_xla is None
on_device = pytest.mark.skipif(there_is_none, reason="there is neither a GPU nor torch_xla")


# Without this option, moving a model to XLA separates its tied weights.
KEEP_TIED_WEIGHTS = (torch.__future__, "_swap_module_params_on_conversion")
# These functions may have operands on two devices. The last is called when a module is moved.
MOVING_FUNCTIONS = ("to", "copy_", "_has_compatible_shallow_copy_type")


class StrictDevice(TorchFunctionMode):
    """Make XLA as strict as other devices.

    Operands on two devices raise an error, as on CUDA, while XLA itself would move them silently.
    float64 raises an error, as on MPS. Autocast includes attention, as on all other devices.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention and torch.is_autocast_enabled("xla"):
            args = [x.to(torch.get_autocast_dtype("xla")) for x in args]
        result = function(*args, **kwargs or {})
        name = function.__name__

        # A GPU allows CPU scalars as well, and CPU tensors that index a tensor on the device.
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors if x.dim() or x.device.type == "xla"}
        is_indexing = name in ("__getitem__", "__setitem__") and args[0].device.type == "xla"
        if len(devices) > 1 and not is_indexing and name not in MOVING_FUNCTIONS:
            raise RuntimeError(f"{name}: tensors on two devices")
        for x in tree_leaves(result):
            is_on_device = isinstance(x, torch.Tensor) and x.device.type == "xla"
            if is_on_device and x.dtype == torch.float64:
                raise TypeError(f"{name}: float64 on the device")

        if name == "backward":
            torch_xla.sync()  # for the same reason as in the fixture `device`
        return result


@pytest.fixture(scope="module")
def device():
    """Return the GPU, or a strict XLA device that executes each optimizer step immediately."""
    if PLACE == "cuda":
        yield torch.device("cuda")
        return

    # Otherwise, pending operations would be compiled again with everything that depends on them.
    hook = register_optimizer_step_post_hook(lambda *_: torch_xla.sync())
    with pytest.MonkeyPatch.context() as patch, StrictDevice():
        patch.setattr(torch, "xla", torch_xla, raising=False)  # torch.utils.checkpoint needs it
        patch.setattr(*KEEP_TIED_WEIGHTS, True)
        yield torch_xla.device()
    hook.remove()


def small_qwen2(device):
    """Return a small Qwen2 on `device`. Like most models for GPUs, it has rotary embeddings. It has
    only one layer, so that there is less to compile."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval().to(device)


@on_device
def test_device_a_tensor_left_on_the_cpu_and_a_float64_are_errors(device):
    on_the_device = torch.ones(3, device=device)
    with pytest.raises(RuntimeError):
        on_the_device + torch.ones(3)
    with pytest.raises(RuntimeError):
        torch.ones(3).masked_fill_(on_the_device > 0, 2)
    if PLACE == "xla":
        with pytest.raises(TypeError):
            on_the_device.double()

    # A GPU allows these operations.
    assert (on_the_device + torch.tensor(1.0))[torch.tensor([0])].tolist() == [2]


# -------- Log-probabilities, sampling, update: the same as on the CPU -----------------------------

START = [i * 5 % 21 for i in range(18)]
PROMPTS = {
    "no padding": [[3, 4, 5], [7, 8, 9]],
    "padding": [[3, 4, 5], [7]],
    "a common start": [[*START, 3], [*START, 7]],
    "both": [[*START, 3, 4], [*START, 7]],
}
COMPLETIONS = [[9, 8, 1, 2], [4], [5, 6, 2]]


def groups_of(prompts: list) -> list[grpo.Group]:
    return [grpo.Group(prompt, COMPLETIONS, []) for prompt in prompts]


@on_device
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_device_generation_draws_the_same_tokens_while_rows_leave_the_batch(
    device, prompts, monkeypatch
):
    select = DynamicCache.batch_select_indices
    recorded = create_autospec(select, side_effect=select)
    monkeypatch.setattr(DynamicCache, "batch_select_indices", recorded)

    config = update_settings(MAX_NEW_TOKENS=5, TEMPERATURE=1.0)
    limit = grpo.Limit(2**30, "generation")
    codec = small_codec({2, 7, 11}, pad_id=20)
    if prompts is PROMPTS["both"]:  # in addition, several batches and answers that end with a tag
        limit = grpo.Limit(4, "generation")
        codec.num_shots = 1
        monkeypatch.setattr(codec, "decode", lambda ids: "</answer>" * (sum(ids) > 50))
    draws = []
    for place in ("cpu", device):
        model = small_qwen2(place)
        draws.append(grpo.sample_in_batches(model, codec, prompts, 4, config, 5, limit))
    assert draws[0] == draws[1]
    assert len({len(ids) for ids in itertools.chain(*draws[0])}) > 2
    assert recorded.call_count >= 2


@on_device
@pytest.mark.parametrize("max_elements", [grpo.MAX_LOGIT_ELEMENTS, 5 * 23])
@pytest.mark.parametrize("prompts", [PROMPTS["padding"], PROMPTS["both"]], ids=["padding", "both"])
def test_device_log_probabilities_and_their_gradients_are_the_same(
    device, prompts, max_elements, monkeypatch
):
    # With the smaller limit, scoring is done in chunks, whose logits are computed twice.
    monkeypatch.setattr(grpo, "MAX_LOGIT_ELEMENTS", max_elements)
    found = []
    for place in ("cpu", device):
        model = small_qwen2(place)
        logprobs, mask = grpo.completion_logprobs(model, groups_of(prompts), 0.7, 20)
        assert mask.sum() == 2 * 8
        logprobs.square().sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append([logprobs.detach().cpu(), (gradient / gradient.norm()).cpu()])
    assert_close(found[1], found[0], 1e-4, 0)


def run_policy_gradient(place, dtype="float32"):
    """Run sapo.policy_gradient with two optimizer steps, in micro-batches, on own and external
    groups. Return (weights, metrics)."""
    settings = {"MODEL_NAME": "tiny", "DEVICE": "cpu", "NUM_ITERATIONS": 2, "TEMPERATURE": 0.7}
    config = make_config(DTYPE=dtype, **settings)

    # The second own group is uninformative.
    *own, external = ragged_groups((3, 3, 2, 4), uninformative=(1,))
    model = small_qwen2(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    node = sapo.Node("n", model, optimizer, groups=own, external=[external])
    external.key = (0, 0, "p", 0)
    limit = grpo.Limit(3, "")  # splits the external group of four completions
    run = SimpleNamespace(config=config, codec=small_codec(pad_id=20), update_limit=limit)
    sapo.policy_gradient(run, node)
    del node.metrics["train_seconds"]
    return flat_weights(model).cpu(), node.metrics


@on_device
def test_device_an_update_on_own_and_external_groups_makes_the_same_step(device):
    expected, expected_metrics = run_policy_gradient("cpu")
    weights, metrics = run_policy_gradient(device)
    assert_close(weights, expected, 1e-4)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)

    # Make sure that the step was large and that every part of the update contributed.
    assert metrics["grad_norm"] > 0
    assert metrics["clip_fraction"] > 0
    assert metrics["logp_own"] != metrics["logp_external"]
    assert metrics["informative_groups"] == 3
    assert metrics["local_groups"] == 3
    assert (weights - flat_weights(small_qwen2("cpu"))).norm() > 0.5


@on_device
def test_device_bfloat16_is_autocast_with_weights_and_probabilities_in_float32(device):
    # Within bfloat16's precision, the device's bfloat16 log-probabilities equal the CPU's. They
    # differ from float32 log-probabilities.
    found = []
    for place, dtype in (("cpu", "float32"), ("cpu", "bfloat16"), (device, "bfloat16")):
        model = small_qwen2(place)
        with grpo.autocast(dtype, model):
            logprobs, _ = grpo.completion_logprobs(model, groups_of(PROMPTS["both"]), 0.7, 20)
        found.append(logprobs.detach().cpu())
    exact, on_the_cpu, on_the_device = found
    assert logprobs.dtype == torch.float32
    assert_close(on_the_device, on_the_cpu, 0.1, 0)
    assert (on_the_device - exact).abs().max() > 1e-3

    # After an update in bfloat16, the weights are still in float32.
    start = flat_weights(small_qwen2("cpu"))
    expected, expected_metrics = run_policy_gradient("cpu", "bfloat16")
    weights, metrics = run_policy_gradient(device, "bfloat16")
    assert weights.dtype == torch.float32
    assert (weights - expected).norm() < 0.1 * (expected - start).norm()
    assert metrics["grad_norm"] == pytest.approx(expected_metrics["grad_norm"], rel=0.05)


# -------- Whole runs of sapo.main -----------------------------------------------------------------

TASK = "small_count_bits"
SMALL = {
    "MODEL_NAME": "tiny", "TASKS": TASK, "WARM_START_STEPS": 150, "ANSWER_TAG_SHARE": 0.5,
    "LOCAL_NODES": 2, "NUM_TRAIN_SAMPLES": 3, "NUM_TRANSPLANT_TREES": 2, "NUM_GENERATIONS": 4,
    "MAX_NEW_TOKENS": 5, "MAX_ROUNDS": 2, "CHECKPOINT_INTERVAL": 1, "EVAL_INTERVAL": 1,
    "EVAL_SAMPLES": 8, "SEED": 3,
}  # fmt: skip


def save_from_main_memory(tensors, *args, **kwargs):
    """Save tensors after copying them to the CPU. safetensors tells tensors apart by their memory
    addresses, which XLA tensors do not have."""
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, *args, **kwargs)


def run_main(drive, name, **settings) -> int:
    """Run sapo.main with SMALL and these settings, as if the machine had only a CPU and this
    device. Return the exit code."""
    devices = {"cpu": "float32", PLACE: "float32"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "available_devices", lambda: devices)
        if PLACE == "xla":
            patch.setattr(modeling_utils, "safe_save_file", save_from_main_memory)
        return sapo.main({"GDRIVE_PATH": drive, "EXPERIMENT_NAME": name, **SMALL, **settings})


@pytest.fixture(scope="module")
def drive(device, tmp_path_factory):
    """Run one experiment on the CPU and one on the device, with a warm start created on the CPU.
    Return the shared folder."""
    drive = tmp_path_factory.mktemp("drive")
    for place in ("cpu", PLACE):
        assert run_main(drive, place, DEVICE=place) == 0
    return drive


@on_device
def test_device_a_swarm_writes_the_same_and_measures_the_same_held_out_accuracy(drive):
    rollouts, rewards, models = {}, {}, {}
    for name in ("cpu", PLACE):
        files = sorted(drive.glob(f"experiments/{name}/nodes/*/rollouts/*.json"))
        rollouts[name] = [json.loads(path.read_text())["rollouts"] for path in files]
        rewards[name] = read_rewards(drive, name)
        model = drive / f"experiments/{name}/nodes/node_1/model/model.safetensors"
        models[name] = torch.cat([tensor.flatten() for tensor in load_file(model).values()])
    # Adam takes a full step even if the gradient is near zero, where rounding may decide its sign.
    is_different = (models[PLACE] - models["cpu"]).abs() > 1e-4
    assert is_different.float().mean() < (1e-3 if PLACE == "cuda" else 1e-6)
    assert rollouts["cpu"] == rollouts[PLACE]
    assert len(rollouts["cpu"]) == len(rewards["cpu"]) == 2 * 2

    # All metrics except times are the same.
    for expected, ours in zip(rewards["cpu"], rewards[PLACE], strict=True):
        for name, value in ours.items():
            if isinstance(value, int | float) and not re.search("seconds|timestamp", name):
                assert value == pytest.approx(expected[name], 1e-4, 1e-6), name

    # Make sure that the nodes had something to learn.
    assert any(row["grad_norm"] > 0 and row["external_groups"] > 0 for row in rewards[PLACE])
    assert any(row["held_out"] > 0 for row in rewards[PLACE])


@on_device
def test_device_a_stopped_and_resumed_run_equals_an_uninterrupted_one(drive):
    for max_rounds in (1, 2):
        assert run_main(drive, "resumed", DEVICE=PLACE, MAX_ROUNDS=max_rounds) == 0
    rewards, checkpoint = read_results(drive, "resumed")
    expected_rewards, expected_checkpoint = read_results(drive, PLACE)
    assert rewards == expected_rewards
    if PLACE == "xla":  # CUDA adds numbers in a different order each time
        assert checkpoint == expected_checkpoint


@on_device
def test_device_warm_start_steps_are_the_same(device, monkeypatch):
    # Compute in float32 if Muon asks for bfloat16, whose rounding differs between devices. (torch's
    # Muon computes in bfloat16; grpo's does not.)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
    config = make_config(**SMALL | {"WARM_START_STEPS": 3, "DEVICE": "cpu"})
    losses = []  # on the CPU, then on the device
    changes = []
    for place in ("cpu", device):
        model, codec = grpo.load_model(config, [TASK])
        start = flat_weights(model)
        steps = grpo.warm_start(model.to(place), codec, config, [TASK])
        losses.append([loss for _, loss in steps])
        changes.append(flat_weights(model).cpu() - start)
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert changes[0].norm() > 0
    assert (changes[0] - changes[1]).norm() < 0.01 * changes[0].norm()


# -------- Stand-ins for features that only CUDA and MPS have, in any environment ------------------


def make_machine(patch, num_gpus=0, has_bfloat16=True, has_mps=False) -> Mock:
    """Let this machine appear to have these devices. Return the mock that reports a GPU's free
    memory."""

    def is_bf16_supported(including_emulation=True):
        return has_bfloat16 or including_emulation

    mem_get_info = Mock(return_value=(24 * 10**9, 80 * 10**9))
    patch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    patch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    patch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    patch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    patch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    patch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    return mem_get_info


def test_device_the_best_comes_first_and_only_a_gpu_with_bfloat16_computes_in_it(monkeypatch):
    def devices_of(**machine) -> str:
        make_machine(monkeypatch, **machine)
        return ", ".join(map(" ".join, grpo.available_devices().items()))

    assert devices_of() == "cpu float32"
    assert devices_of(has_mps=True) == "mps float32, cpu float32"
    a_t4 = devices_of(num_gpus=1, has_bfloat16=False)  # a T4 emulates bfloat16 slowly
    assert a_t4 == "cuda float16, cuda:0 float16, cpu float32"
    assert devices_of(num_gpus=2) == "cuda bfloat16, cuda:0 bfloat16, cuda:1 bfloat16, cpu float32"


def test_device_auto_asks_the_chosen_gpu_and_takes_what_fits_it(monkeypatch):
    for num_workers, model, dtype in ((4, sapo.DEFAULT_MODEL, "bfloat16"), (5, "tiny", "float32")):
        mem_get_info = make_machine(monkeypatch, num_gpus=2)
        config = make_config(NUM_WORKERS=num_workers, DEVICE="cuda:1")
        assert (config.MODEL_NAME, config.DTYPE) == (model, dtype)
        assert {call.args for call in mem_get_info.call_args_list} == {("cuda:1",)}

    make_machine(monkeypatch, num_gpus=1, has_bfloat16=False)
    config = make_config()
    assert (config.DEVICE, config.DTYPE) == ("cuda", "float16")
    make_machine(monkeypatch, has_mps=True)
    assert make_config().DEVICE == "mps"
    assert "this machine has mps, cpu" in config_error(DEVICE="cuda")


OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "MPS backend out of memory (MPS allocated: 8.61 GiB, max allowed: 9.07 GiB)",
    "Invalid buffer size: 19.45 GB",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1125899906842624 bytes",
]


def test_device_lack_of_memory_is_told_from_other_errors_by_its_text():
    assert all(grpo.is_out_of_memory(RuntimeError(text)) for text in OUT_OF_MEMORY)
    for text in ("CUDA error: device-side assert", "Placeholder not allocated on MPS device"):
        assert not grpo.is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("name", ["completion_logprobs", "sample_completions"])
def test_device_the_memory_of_a_failed_pass_is_freed_before_the_next_one(monkeypatch, name):
    works = getattr(grpo, name)
    allocated = []  # weak references to the memory of each pass

    def fail_twice(*args, **kwargs):
        assert all(reference() is None for reference in allocated), "memory is still in use"
        tensor = torch.empty(9)
        allocated.append(weakref.ref(tensor))
        if len(allocated) < 3:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY[0])
        return works(*args, **kwargs)

    monkeypatch.setattr(grpo, name, fail_twice)
    our_generate(small_gpt2(), [[3], [4], [5], [6]], 2, update_settings(), 5, {2})
    our_update(small_gpt2(), ragged_groups())
    assert len(allocated) > 3
