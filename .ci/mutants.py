"""Check that the tests catch bugs. Each mutant breaks the program in one place, so that a test must
fail. Run it by hand:

    python .ci/mutants.py --check         check that each text occurs exactly once; takes seconds
    python .ci/mutants.py [FIRST LAST]    test all mutants, or a range of them; takes hours

If the guarantee is about the swarm or its folder, the random schedules run first. Then come the
guarantee's own tests, and finally all tests. The output is a row per mutant with its number, the
guarantee, the change, the first test that failed (SURVIVED if all passed), and the time. For a
random schedule, the row shows the seed, which equals the number of schedules that passed before it.
When the program changes, update MUTANTS.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROOFS = ("test_sapo.py", ".ci")
RANDOM_FIRST = ("S", "F", "L4", "L5", "L6", "X")  # guarantees about the swarm and its folder

MUTANTS = [  # module, text, its replacement, guarantee
    ("grpo", "r.std(unbiased=True)", "r.std(unbiased=False)", "L1"),
    ("grpo", "-torch.min(unclipped, clipped)", "-torch.max(unclipped, clipped)", "L1"),
    ("grpo", "if step == 0:", "if True:", "L1"),
    ("grpo", "(2.0**12, 2.0**6, 1.0)", "(1.0,)", "L1"),
    ("grpo", "model.eval()  # no dropout, so", "model.train()  # no dropout, so", "L1"),
    ("grpo", "torch.promote_types(logits.dtype, torch.float32)", "logits.dtype", "L1"),
    ("grpo", "return logits if temperature == 1 else logits / temperature", "return logits", "L2"),
    ("grpo", "torch.softmax(logits, dim=-1).cumsum(-1)", "torch.softmax(2 * logits, dim=-1).cumsum(-1)", "L2"),
    ("grpo", "ids.append(self.eos_id)", "pass", "L2"),
    ("grpo", "split_special_tokens=True", "split_special_tokens=False", "L2"),
    ("sapo", 'random.Random(f"task {seed}")', "random.Random(seed)", "L3"),
    ("sapo", 'derive_seed(run.config, node.id, at, "generate")', "0", "L3"),
    ("grpo", "return float(answer == question.answer)", "return float(eval(answer) == eval(question.answer))", "L3"),
    ("grpo", "else float(score >= 0.99)", "else score", "L3"),
    ("sapo", 'if record["seed"] in grpo.HELD_OUT_SEEDS:', "if False:", "L4"),
    ("sapo", 'if record["prompt"] != question.text:', "if False:", "L4"),
    ("sapo", "if len(records) > ", "if False and len(records) > ", "L4"),
    ("sapo", "rng.sample(candidates, min(num_missing, len(candidates)))", "candidates[:num_missing]", "L4"),
    ("sapo", "min(config.ROLLOUT_MAX_AGE, at.round) + 1", "1", "L4"),
    ("sapo", "node.used_external |= {group.key for group in external}", "pass", "L4"),
    ("sapo", "group.is_informative or not config.EXTERNAL_FILTER", "True", "L4"),
    ("sapo", "[: run.config.NUM_TRAIN_SAMPLES] + node.external", "[: run.config.NUM_TRAIN_SAMPLES]", "L4"),
    ("sapo", "for group in node.groups for reward", "for group in node.groups + node.external for reward", "L4"),
    ("sapo", "{config.SEED}|{node_id}", "{config.SEED}", "L5"),
    ("sapo", "{config.SEED}|{node_id}", "{id(config)}|{node_id}", "L5"),
    ("sapo", "\n        load_weights(run, name, model)\n", "\n", "L6"),
    ("grpo", "not error < 2e-3,", "False,", "L7"),
    ("grpo", "bool(missing)", "False", "L7"),
    ("sapo", "[*models, model], strict", "[*models, copy.deepcopy(model)], strict", "L8"),
    ("coordinator", "if not submitted and (t == 0", "if False and (t == 0", "S1"),
    ("drive_store", '*self.reached("open", At(t))}', "}", "S1"),
    ("drive_store", "> self.stale_after / 4:", "> 1e9:", "S1"),
    ("coordinator", "if swarm.is_alive(drive_store.COORDINATOR_ID):", "if drive_store.COORDINATOR_ID in board.sessions:", "S2"),
    ("sapo", "(lambda *_: run.swarm.beat())", "(lambda *_: None)", "S2"),
    ("sapo", "if run.seconds_to_wait <= 0:", "if run.seconds_to_wait <= -60:", "S3"),
    ("sapo", "return late if any(", "return late if late or any(", "S3"),
    ("drive_store", 'raise Stopped("superseded")', "pass", "S4"),
    ("sapo", "signal.SIGUSR1, signal.SIGHUP)", "signal.SIGHUP)", "S5"),
    ("drive_store", "            file.write(data)\n", "            file.write(data)\n        shutil.copyfile(temp, target)\n", "F1"),
    ("drive_store", "        content = dump_json(", "        self.move_marker(kind, node_id, at)\n        content = dump_json(", "F1"),
    ("drive_store", "self.write(path, content, replaces=False)", "self.write(path, content)", "F1"),
    ("drive_store", "error.errno in HOPELESS", "error.errno in ()", "F2"),
    ("drive_store", "if not self.was_there:", "if True:", "F2"),
    ("drive_store", "if path.startswith(precious) and", "if False and", "F2"),
    ("sapo", 'node.used_external = saved["trained"]', "pass", "F3"),
    ("sapo", "in node.optimizer.state[p].items():", "in ():", "F3"),
    ("coordinator", "if swarm.others() and board.open_round", "if board.open_round", "F3"),
    ("sapo", "if is_missing or (reason and", "if False and (reason and", "F4"),
    ("drive_store", r'r"[0-9a-f]{16}(\.post)?"', 'r".*"', "F5"),
    ("sapo", "needed = config.CHECKPOINT_INTERVAL + config.ROLLOUT_MAX_AGE", "needed = 0", "F5"),
    ("sapo", "given.get(name, value) != value:", "False:", "F6"),
    ("sapo", "    model, run.codec = load_checked_model(run)\n\n", "    run.store.begin(saved_settings(config))\n    model, run.codec = load_checked_model(run)\n\n", "F6"),
    ("drive_store", 'f"/experiments/{self.temporary_name}"', 'f"/experiments/{self.dir.name}"', "F6"),
    ("drive_store", '("/experiments", "/warmstart", "/reports", "/archives")', '("/experiments", "/reports", "/archives")', "F7"),
    ("drive_store", 'char if char.isprintable() else "?"', "char", "X1"),
    ("drive_store", "flags | os.O_NOFOLLOW | os.O_NONBLOCK", "flags | os.O_NONBLOCK", "X2"),
    ("drive_store", 'require(completion, {"response": str, "finished": bool})', "pass", "X3"),
    ("sapo", 'text.replace(self.secret, "***") if self.secret else text', "text", "X4"),
    ("sapo", 'replace(group, key=record["key"])', 'replace(group, key=record["key"], rewards=[each["reward"] for each in shared])', "X4"),
    ("sapo", "        elif close:\n", "        elif False:\n", "U1"),
    ("sapo", "if self.requested > 1:", "if self.requested > 2:", "U2"),
    ("coordinator", "(variance / max(1, len(nodes))) ** 0.5", "0.0", "U3"),
    ("sapo", 'for node in run.nodes:\n        run.store.write(f"nodes', 'for node in run.nodes[1:]:\n        run.store.write(f"nodes', "U4"),
    ("coordinator", "if len({facts[name] for facts in all_facts if name in facts}) > 1:", "if False:", "U5"),
    ("coordinator", "return 1 if problems else 0", "return 0", "U6"),
    ("coordinator", "max(reward, 0.01 * common) / baseline_rewards[seed]", "reward / max(baseline_rewards.values())", "U7"),
    ("sapo", "grpo.save_model(node.model,", "grpo.save_model(run.nodes[0].model,", "U8"),
    ("sapo", 'if "DriveStore" in globals():', "if False:", "U9"),
    ("sapo", "except BaseException as error:", "except ValueError as error:", "U10"),
    ("grpo", 'yield {"loss": loss, "clipped_tokens": num_clipped}', 'yield dict(loss=loss, clipped_tokens=num_clipped)', "U11"),
    ("grpo", '"dapo": lengths.sum(),', '"dapo": len(lengths) * lengths,', "U12"),
]  # fmt: skip


def first_failure(folder: Path, *selection: str) -> str:
    """Return the name of the first selected test that fails, or "" if all pass."""
    command = ["timeout", "3600", sys.executable, "-m", "pytest", "-xq", "--tb=no", "-rfE"]
    command += ["-p", "no:cacheprovider", *selection]
    environ = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode == 124:
        return "timed out after an hour"
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    assert failed or done.returncode in (0, 5), done.stdout + done.stderr  # 5: no test was selected
    return failed[1].split("::")[-1].replace("test_random[", "[seed ") if failed else ""


def main(numbers: range, only_check: bool) -> None:
    texts = [(row, (ROOT / f"{row[0]}.py").read_text().count(row[1])) for row in MUTANTS]
    assert all(count == 1 for _, count in texts), [each for each in texts if each[1] != 1]
    assert only_check or not first_failure(ROOT, *PROOFS, "--collect-only"), "fix the tests first"
    for number in numbers:
        module, text, replacement, promise = MUTANTS[number]
        mutated = (ROOT / f"{module}.py").read_text().replace(text, replacement)
        compile(mutated, f"row {number}", "exec")
        if only_check:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "copy")
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "venv", "rl-swarm"))
            (copy / f"{module}.py").write_text(mutated)
            selections = [(*PROOFS, "-k", f"{promise}_"), PROOFS]
            if promise.startswith(RANDOM_FIRST):
                selections.insert(0, (".ci/test_world.py", "-k", "random"))
            failures = (first_failure(copy, *selection) for selection in selections)
            caught_by = next(filter(None, failures), "SURVIVED")
        change = text.strip().splitlines()[0][:60].replace("|", "/")
        seconds = time.monotonic() - started
        print(f"| {number} | {promise} | `{change}` | {caught_by} | {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    chosen = [int(argument) for argument in sys.argv[1:] if argument != "--check"]
    first, last = chosen or (0, len(MUTANTS) - 1)
    main(range(first, last + 1), "--check" in sys.argv)
