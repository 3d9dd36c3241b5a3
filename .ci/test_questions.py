"""Tests of the user's own questions (TASKS=file:mine.jsonl) and of few-shot examples, mostly L3."""

import json
import re

import pytest

import coordinator
import grpo

from common import LEARNING, events_of, folder_of, read_log, run
from test_sapo import config_error, group_by_hand, make_config, write_peer

GOOD = '{"question": "1 + 1?", "answer": 2}\n{"question": "1 + 2?", "answer": "3"}\n'


def write(path, *questions) -> str:
    """Write a file of (question, answer) pairs. Return its name for TASKS."""
    rows = [json.dumps({"question": question, "answer": answer}) for question, answer in questions]
    path.write_text("\n".join(rows))
    return f"file:{path}"


@pytest.mark.parametrize("line, reason", [
    ('{"question": "x", "answer": ', "JSON"),
    ('{"question": ' + "[" * 100_000, "JSON"),
    ('["x", "y"]', "expected"),
    ('{"question": "x"}', "expected"),
    ('{"question": "x", "answer": [1]}', "expected"),
    ('{"question": "x", "answer": true}', "expected"),
    ('{"question": "x", "answer": NaN}', "expected"),
    ('{"question": "x", "answer": null}', "expected"),
    ('{"question": "x", "answer": " "}', "empty"),
    ('{"question": "1 + 1?", "answer": "3"}', "conflicting answers to the same question"),
    ('{"question": " 1 +\\n1? ", "answer": "3"}', "conflicting answers to the same question"),
    ('{"question": "x", "answer": "<answer>1</answer>"}', "tags"),
    ('{"question": "x", "answer": "' + "9" * 5000 + '"}', "answer"),
])  # fmt: skip
def test_L3_an_invalid_line_is_reported_with_its_reason(tmp_path, line, reason):
    (tmp_path / "mine.jsonl").write_text(GOOD + line)
    message = config_error(TASKS=f"file:{tmp_path}/mine.jsonl")
    assert re.search(rf"line 3: .*{reason}", message)
    assert len(message) < 1000


@pytest.mark.parametrize("right, answers, wrong_answers", [
    (4.0, ["4", "4.0", "+4", "$4", "４", "4e0"], ["5", "4e", "2+2", "four", ""]),
    ("1,000", ["1000", "1,000.00", r"\boxed{1000}", "1000."], ["1,00", "10,00", "1000 0", "1 000"]),
    (0.00005, ["0.00005", "5e-05", "0.5E-4"], ["5", "5 e-05", "0.0005"]),
    (1e22, ["1e22", "1" + "0" * 22], ["1e21", "122"]),
    ("-3", ["\N{MINUS SIGN}3", "-3.0"], ["3", "- -3"]),
    ("3 12", ["3 12", "3\n12 "], ["31 2", "312", "3, 12"]),
    ("123", ["123", r" $\boxed{ 123 }$. "], ["12 3", "1$23", r"1\boxed{2}3", r"\boxed{12}3", "$1$23"]),
    ("-55", ["-55", "$-55$"], ["-5 5", "-5$5"]),
    ("3 + 4 = 7\n#### 7", ["7", "7.0"], ["3 + 4 = 7 #### 7", "4"]),
    ("Übung", ["U\u0308bung", "Übung"], ["Ubung", "übung"]),
    ("한국 어", ["\u1112\u1161\u11ab\u1100\u116e\u11a8\u00a0어"], ["한국"]),
    ("5²", ["5²"], ["52", "25"]),
])  # fmt: skip
def test_L3_numbers_are_compared_by_value_and_texts_after_normalization(
    tmp_path, right, answers, wrong_answers
):
    tasks = write(tmp_path / "mine.jsonl", ("1 + 1?", right), ("1 + 2?", right))
    (task,) = make_config(TASKS=tasks).tasks
    question = grpo.make_question(task, 1)
    for answer in answers:
        assert grpo.compute_reward(question, f"<answer>{answer}</answer>") == 1, answer
    for answer in wrong_answers:
        assert grpo.compute_reward(question, f"<answer>{answer}</answer>") == 0, answer


def test_U4_files_with_similar_or_chinese_names_have_separate_columns(tmp_path):
    names = ("questions_about_arithmetic_easy", "questions_about_arithmetic_hard", "我的问题")
    files = []
    for i, name in enumerate(names):
        rows = [(f"{i} + {j}?", str(i + j)) for j in range(20)]
        files.append(write(tmp_path / f"{name}.jsonl", *rows))
    settings = LEARNING | {"TASKS": ",".join(files), "NUM_TRAIN_SAMPLES": 9, "WARM_START_STEPS": 4}
    assert run(tmp_path / "drive", settings, MAX_ROUNDS=2) == 0
    paths = folder_of(tmp_path / "drive").glob("*/rewards/*")
    columns = {name for path in paths for name in json.loads(path.read_text())}
    columns = sorted(name for name in columns if name.startswith("reward_"))
    assert len(columns) == 3 and all(re.fullmatch(r"\w{1,40}", name, re.ASCII) for name in columns)
    rows = coordinator.get_experiment_metrics(tmp_path / "drive", "default")
    assert set(columns) <= set(rows)


def test_L3_text_from_windows_and_from_the_web_is_read_unchanged(tmp_path):
    signs = "a\u2028b\u2029c\u0085d\x0c"
    lines = [GOOD, json.dumps({"question": signs, "answer": "4"}, ensure_ascii=False), "", GOOD]
    text = "\ufeff" + "\n".join(lines)
    (tmp_path / "a b.jsonl").write_bytes(text.replace("\n", "\r\n").encode())
    task, other = make_config(TASKS=f" file:{tmp_path}/a b.jsonl, small_gcd").tasks
    assert (task[:15], other) == ("file:a_b.jsonl#", "small_gcd")
    questions = {text for part in grpo.FILE_TASKS[task] for text, _ in part}
    assert questions == {"1 + 1?", "1 + 2?", signs}


def test_L3_questions_that_differ_in_whitespace_are_one_question_on_one_side_of_the_split(tmp_path):
    # Each of 100 questions is in the file five times, with different whitespace and with two
    # notations of its answer.
    rows = []
    for space in (" ", "  ", "\n", " \t "):
        rows += [(f"What is {i}{space}+ {i}?{space}", str(2 * i)) for i in range(100)]
    rows += [(f" What is {i} + {i}?", f"{i} + {i} =\n#### {2 * i}.0") for i in range(100)]
    (task,) = make_config(TASKS=write(tmp_path / "mine.jsonl", *rows)).tasks
    training, held_out = [
        [" ".join(text.split()) for text, _ in part] for part in grpo.FILE_TASKS[task]
    ]
    assert (len(training), len(held_out)) == (90, 10)
    assert len({*training, *held_out}) == 100

    # The order of the lines and their whitespace do not change the split.
    (other,) = make_config(TASKS=write(tmp_path / "other.jsonl", *reversed(rows))).tasks
    assert {" ".join(text.split()) for text, _ in grpo.FILE_TASKS[other][1]} == {*held_out}


def test_L3_questions_that_do_not_fit_are_reported_and_skipped_and_never_truncated(
    tmp_path, capsys
):
    long = [(letter * 600, "1") for letter in "xyz"]
    short = [(f"What is {i} + {i}?", str(2 * i)) for i in range(17)]
    tasks = write(tmp_path / "mine.jsonl", *short, *long)
    settings = LEARNING | {"TASKS": tasks, "NUM_TRAIN_SAMPLES": 8, "WARM_START_STEPS": 4}
    assert run(tmp_path / "drive", settings, MAX_ROUNDS=2) == 0
    output = capsys.readouterr().out
    assert "2 of 20 questions are held out" in output
    assert re.search(r"\b3 .*questions .*too long, such as '[xyz]{40}", output)

    asked = set()
    for path in folder_of(tmp_path / "drive").glob("*/rollouts/*"):
        asked |= {group["prompt"] for group in json.loads(path.read_text())["rollouts"].values()}
    assert len(asked) > 10 and not asked & {text for text, _ in long}

    # A peer whose model has room for such a question may use it. This node rejects the peer's group
    # and logs the reason.
    (task,) = make_config(TASKS=tasks).tasks
    seed = next(s for s in range(999) if len(grpo.make_question(task, s).text) == 600)
    write_peer(tmp_path / "drive", "default", "p", [group_by_hand(seed, task)], round_=2)
    assert run(tmp_path / "drive", settings, MAX_ROUNDS=3) == 0
    assert len(events_of(tmp_path / "drive", "n_0", "reject")) == 1


def test_L4_a_completion_that_is_too_long_costs_its_group_and_not_its_file(tmp_path):
    groups = [group_by_hand(i) for i in range(1, 4)]
    groups[1]["completions"][0]["response"] = "x" * 40_000
    write_peer(tmp_path, "default", "p", groups)
    assert run(tmp_path, LEARNING, TASKS="small_products", MAX_ROUNDS=1, WARM_START_STEPS=0) == 0
    assert events_of(tmp_path, "n_0", "reject") == ["p: a completion is too long"]
    assert read_log(tmp_path, "n_0")[0]["external_pool"] >= 2


def test_L3_few_shot_examples_differ_from_the_question_and_from_each_other(tmp_path):
    mine = write(tmp_path / "mine.jsonl", *((f"{i} + {i}?", str(2 * i)) for i in range(20)))
    two = write(tmp_path / "two.jsonl", ("1 + 1?", "2"), ("1 + 2?", "3"))  # 1 is held out
    tasks = f"{mine},small_count_bits,{two}"
    config = make_config(MODEL_NAME="tiny", NUM_SHOTS=4, TASKS=tasks, DEVICE="cpu")
    codec = grpo.load_model(config, config.tasks)[1]
    for task, number in zip(config.tasks, (4, 4, 0), strict=True):
        for seed in range(300):
            question = grpo.first_valid_question(task, seed)
            examples = codec.solved_examples(question)
            texts = [example.split("\n<answer>")[0] for example in examples]
            assert len({*texts, question.text}) == len(texts) + 1 == number + 1
