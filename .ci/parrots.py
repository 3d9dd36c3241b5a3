"""Measure parrots, which are rules that answer a question without solving it.

A model that scores no more than the best parrot has not shown that it learned the task.
"""

import functools
import re
from collections import Counter
from statistics import fmean, stdev

import grpo


def parrot_answers(text: str) -> dict[str, str]:
    """Return {rule: answer} for a question's text."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text) or ["0"]
    lines = [line for line in text.splitlines() if line.strip()]
    premises = re.findall(r"^\.?\d+\. (.+)$", text, re.MULTILINE) or [""]
    # The longest part without words is the formula, program or matrix. "\frac" is not a word.
    parts = [part.strip(" \n.,:?=") for part in re.split(r"(?<![\\\w])[A-Za-z]{2,}\b", text)]
    weekday_or_number = "1" if "num" in text else "Wednesday"
    return {
        "the first number": numbers[0],
        "the last number": numbers[-1],
        "the smallest number": min(numbers, key=float),
        "the largest number": max(numbers, key=float),
        "the first line": lines[0],
        "the last line": lines[-1],
        "the longest line": max(lines, key=len),
        "the formula, program or matrix": max(parts, key=len),
        "the whole question": text,
        "the first premise": premises[0],
        "the last premise": premises[-1],
        "the shortest premise with an operator": min(premises, key=lambda p: (len(p) < 2, len(p))),
        "the conjunction of the first and the last premise": f"{premises[0]} ∧ {premises[-1]}",
        "the conjunction of all premises": " ∧ ".join(premises),
        # These constants are the most frequent answers in calendar_arithmetic (seeds 0 to 599).
        "No, 1 or Wednesday": "No" if "leap year" in text else weekday_or_number,
        "an empty answer": "",
    }


def rewards_by_rule(questions: list[grpo.Question], constants: list[str]) -> dict[str, list[float]]:
    """Return each rule's rewards. Each constant adds a rule, such as "always 3"."""
    rewards = {}
    for question in questions:
        answers = {f"always {constant}": constant for constant in constants}
        for rule, answer in (answers | parrot_answers(question.text)).items():
            reward = grpo.compute_reward(question, f"<answer>{answer}</answer>")
            rewards.setdefault(rule, []).append(reward)
    return rewards


@functools.cache
def measure_task(task: str, size: int = 600) -> tuple[str, dict[str, list[float]]]:
    """Return a task's best parrot, and the rewards of all rules.

    The first `size` seeds choose the best rule and the constants. The rewards are from the next
    `size` seeds. These seeds are below the held-out seeds.
    """
    questions = [grpo.first_valid_question(task, seed) for seed in range(2 * size)]
    frequent = Counter(question.answer for question in questions[:size]).most_common(10)
    constants = [answer for answer, _ in frequent]
    choosing = rewards_by_rule(questions[:size], constants)
    best = max(choosing, key=lambda rule: fmean(choosing[rule]))
    return best, rewards_by_rule(questions[size:], constants)


def best_rows():
    """Yield the best parrot of each of the paper's nine tasks and tiny's eight tasks."""
    for task in grpo.PAPER_TASKS + grpo.TINY_TASKS:
        best, rewards = measure_task(task)
        row = {"task": task, "best parrot": best, "reward": format_error(rewards[best])}
        yield row | {"an empty answer": fmean(rewards["an empty answer"])}


def rule_rows(task: str):
    """Yield all parrots of a task, the best first."""
    _, rewards = measure_task(task)
    for rule in sorted(rewards, key=lambda rule: -fmean(rewards[rule])):
        yield {task: rule, "reward": format_error(rewards[rule])}


def format_error(rewards: list[float]) -> str:
    """Return the mean and its standard error as text."""
    return f"{fmean(rewards):.3f} ± {stdev(rewards) / len(rewards) ** 0.5:.3f}"
