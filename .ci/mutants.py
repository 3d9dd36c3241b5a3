"""Does it catch mistakes? Each row breaks the program in one place; a proof must fail. By hand:

    python .ci/mutants.py [FIRST LAST]      all, or some of them; hours on two cores

The proofs of the row's promise are run first, then all others. A row whose text is no longer in the
program is named: it follows the program when that changes.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MUTANTS = [  # promise, module, text, what stands there instead
    ("L1", "grpo", "r.std(unbiased=True)", "r.std(unbiased=False)"),
    ("L1", "grpo", '"dapo": lengths.sum()', '"dapo": lengths.sum() * 2'),
    ("L1", "grpo", "-torch.min(unclipped, clipped)", "-torch.max(unclipped, clipped)"),
    ("L1", "grpo", "is_first_step = not steps", "is_first_step = True"),
    ("L1", "grpo", "mask.cumsum(-1) - 1).clamp(min=0)", "torch.ones_like(mask).cumsum(-1) - 1)"),
    ("L1", "grpo", "model.eval()  # dropout off: log", "model.train()  # dropout off: log"),
    ("L1", "grpo", "    if not rows:  # even", "    if False:  # even"),
    ("L1", "grpo", "torch.promote_types(logits.dtype, torch.float32)", "logits.dtype"),
    ("L1", "grpo", "return [row for row in rows if row.group.is_informative]", "return rows"),
    ("L1", "grpo", "if not torch.isfinite(grad_norm):", "if False:"),
    ("L2", "grpo", "return logits if temperature == 1 else logits / temperature", "return logits"),
    ("L2", "grpo", "torch.softmax(logits, dim=-1).cumsum(-1)", "torch.softmax(2 * logits, dim=-1).cumsum(-1)"),
    ("L2", "grpo", "ids.append(self.eos_id)", "pass"),
    ("L2", "grpo", "split_special_tokens=True", "split_special_tokens=False"),
    ("L2", "grpo", "eos_ids.add(end_of_turn)", "pass"),
    ("L3", "grpo", "return float(answer == question.answer)  # its", "return float(eval(answer) == eval(question.answer))  # its"),
    ("L3", "grpo", "float(score >= 0.99)", "score"),
    ("L3", "grpo", "if math.gcd(a, b) > 10**12:", "if False:"),
    ("L4", "sapo", 'if record["seed"] in grpo.HELD_OUT_SEEDS:', "if False:"),
    ("L4", "sapo", 'if record["prompt"] != question.text:', "if False:"),
    ("L4", "sapo", "if len(records) > config.max_groups_per_peer:", "if False:"),
    ("L4", "sapo", "node.used_external |= {group.key for group in external}", "pass"),
    ("L4", "sapo", "group.is_informative or not config.EXTERNAL_FILTER", "True"),
    ("L4", "sapo", "own + node.external, run.config", "own, run.config"),
    ("L5", "sapo", 'text = f"{config.SEED}|{node_id}|{at.round}', 'text = f"{config.SEED}|{hash(node_id)}|{at.round}'),
    ("L6", "sapo", 'if store.has_dir("/warmstart") and not load_weights(store, path, model, log):', 'if store.has_dir("/warmstart"):'),
    ("L7", "grpo", "if not error < 2e-3:", "if False:"),
    ("L8", "grpo", "self.rows = max(self.smallest, (self.tried + 1) // 2)", "pass"),
    ("S1", "coordinator", "if current == 0 and not submitted:", "if False:"),
    ("S1", "drive_store", '*board.reached("open", At(t))}', "}"),
    ("S2", "sapo", 'run.log.event("skip", text)', "pass"),
    ("S2", "sapo", "register_forward_pre_hook(lambda *_: run.member.beat())", "register_forward_pre_hook(lambda *_: None)"),
    ("S3", "sapo", "if run.peers.seconds_to_wait <= 0:", "if run.peers.seconds_to_wait <= -60:"),
    ("S3", "sapo", "late if any(map(run.member.is_alive, sorted(late))) else set()", "late"),
    ("S4", "drive_store", 'raise Stopped("superseded")', "pass"),
    ("S5", "sapo", "in_job_step = 0 < len", "in_job_step = 0 <= len"),
    ("F1", "drive_store", "            temp.write_bytes(data)\n            os.replace(temp, self.resolve(path))", "            self.resolve(path).write_bytes(data)"),
    ("F1", "drive_store", "        published = self.already_published(kind, node, at)", "        self.move_marker(kind, node, at)\n        published = self.already_published(kind, node, at)"),
    ("F1", "drive_store", "        published = self.already_published(kind, node, at)", "        published = None"),
    ("F2", "drive_store", "self.store.markers.clear()", "pass"),
    ("F2", "drive_store", "            file.truncate(size)", "            pass"),
    ("F2", "drive_store", "                    if not self.store.session:", "                    if False:"),
    ("F3", "sapo", "node.total_reward, node.used_external, node.held_out = nodes[node.id]", "node.total_reward = nodes[node.id][0]"),
    ("F3", "sapo", 'node.total_reward += row.get("reward") or 0.0', "pass"),
    ("F3", "drive_store", 'rf"\\.new-{re.escape(node)}-[0-9a-f]{{16}}"', 'rf"\\.new-{re.escape(node)}.*"'),
    ("F4", "sapo", "if is_missing or (reason and node.id in board.sessions):", "if False:"),
    ("F5", "drive_store", "            if at.round >= before_round:", "            if at.round >= before_round + 3:"),
    ("F5", "drive_store", r'r"\.safetensors" if kind == "checkpoints" else r"\.stage_(0|[1-9]\d?)\.json"', r'r"\..*"'),
    ("F6", "sapo", 'if columns.get("agree") and values[name]', "if False and values[name]"),
    ("F6", "drive_store", 'is_foreign = not folders <= {"board", "nodes"}', "is_foreign = False"),
    ("F7", "drive_store", 'if saved is None or saved.get("maker") == settings["maker"]:', "if True:"),
    ("X1", "drive_store", 'char if char.isprintable() else "?"', "char"),
    ("X2", "drive_store", "flags | os.O_NOFOLLOW | os.O_NONBLOCK", "flags | os.O_NONBLOCK"),
    ("X3", "drive_store", "data = file.read(max_bytes + 1)", "data = file.read()"),
    ("X3", "sapo", "if time.thread_time() - started > MAX_VERIFY_SECONDS_PER_PEER:", "if False:"),
    ("X4", "sapo", 'record["text"] = mask(text, self.secret)', 'record["text"] = text'),
    ("X4", "sapo", "rewards = grpo.group_rewards(question, texts, run.config.REWARD)", "rewards = [float('<answer>' in text) for text in texts]"),
    ("U2", "sapo", "if self.requested > 1:", "if self.requested > 2:"),
    ("U5", "coordinator", "if len(seeds) > 1 and min", "if seeds and min"),
    ("U10", "sapo", "    except BaseException as error:  # sys.exit()", "    except ValueError as error:  # sys.exit()"),
]  # fmt: skip


def first_failure(folder: Path, *selection: str) -> str:
    """The name of the first proof that fails, "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *selection]
    command += ["test_sapo.py", ".ci", "--ignore=.ci/test_device.py", "--tb=no", "-rfE"]
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=3600
        )
    except subprocess.TimeoutExpired:
        return "a proof does not end"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split("::")[-1] if failed else ""


def main(first: int, last: int) -> None:
    for number, (promise, module, text, replacement) in enumerate(MUTANTS):
        if not first <= number <= last:
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "copy")
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "venv", "rl-swarm"))
            path = copy / f"{module}.py"
            code = path.read_text()
            if code.count(text) < 1:
                caught_by = "NOT IN THE PROGRAM"
            else:
                path.write_text(code.replace(text, replacement, 1))
                caught_by = first_failure(copy, "-k", f"{promise}_") or first_failure(copy)
            change = text.strip().splitlines()[0][:60].replace("|", "/")
            print(f"| {number} | {promise} | `{change}` | {caught_by or 'NOBODY'} |", flush=True)


if __name__ == "__main__":
    main(*(map(int, sys.argv[1:]) if len(sys.argv) > 2 else (0, len(MUTANTS))))
