"""Generate .github/sapo.ipynb from the code blocks of README and MANUAL, and print it.

With --check, compare it with the file instead, and exit with an error if they differ.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MANUAL = (ROOT / ".github/MANUAL.md").read_text()


def printed(text: str, marker: str) -> str:
    """Return the code block after a marker."""
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)\n```", text, re.DOTALL)[1]


check = re.search(r"`(TEST_MODE=True [^`]+)`", README)[1]
model, _, page = printed(README, "command: page").splitlines()  # the line in between writes page.py
page = page.replace("rl-swarm/", "$GDRIVE_PATH/")
metrics = printed(README, "pandas").replace(
    '"rl-swarm/experiments/default', 'path + "/experiments/ours'
)

# Each code cell comes with the text above it, which describes its purpose and its output.
cells = [
    (
        """# SAPO in a notebook
In Colab, copy the four modules and run_swarm.sh into a folder `sapo` on your Drive. Elsewhere,
install the packages of the README's main command, matplotlib and pandas, and start Jupyter in the
program's folder. Run the cells in order. `tiny`, the built-in model, needs no GPU. If you want
the last cell to train GPT-2, select a GPU runtime before you start.

**Set up.** Colab asks for access to your Drive.""",
        printed(MANUAL, "cell: mount"),
    ),
    (
        """**Check the installation** with a short warm start and three rounds. This takes about a minute
and ends with `check: passed`.""",
        f"!{check}",
    ),
    (
        """**SAPO on one page.** This cell writes the page to a file, and the next cell runs it.""",
        "%%writefile page.py\n" + printed(README, "page"),
    ),
    (
        """The first command creates a model, and the second trains four copies of it. Each node prints its
reward in each of the 30 rounds. The rewards start near 0 and end at about 0.5. This takes one to
two minutes.""",
        f"!{model}\n!{page}",
    ),
    (
        """**Train a swarm of four nodes in this process** for 200 rounds. The output shows a line per
round, a node's answers to two questions every 20 rounds and, at the end, a verdict and a plot.
If you press the stop button, the swarm finishes the round and saves a checkpoint. To resume, run
the cell again.""",
        printed(MANUAL, "cell: swarm"),
    ),
    (
        """**Examine the run.** This cell prints the list of experiments and this experiment's status, and
plots each node's reward, averaged over ten rounds.""",
        printed(MANUAL, "cell: look"),
    ),
    (
        """**Read the metrics without the program,** from the files that each node writes. For each of the
last five rounds, the table shows each node's mean reward over ten rounds. The section *Logs and
metrics* of the manual explains the other columns.""",
        metrics,
    ),
    (
        """**Compare four settings,** each with a coordinator and four workers on one machine. 4/0 is plain
GRPO. At 3/1, 2/2 and 1/3, one, two and three of the four groups, respectively, come from peers.
After each setting, a table compares all settings that have finished. Without a GPU, the cell trains
`tiny` and takes a few minutes. With a GPU, which was never tried, it trains GPT-2 and needs up to
18 GB on Drive.""",
        printed(MANUAL, "cell: compare"),
    ),
]

made = []
for number, (text, code) in enumerate(cells):
    said = {"cell_type": "markdown", "id": f"text{number}", "metadata": {}, "source": text}
    run = {"cell_type": "code", "id": f"cell{number}", "metadata": {}, "execution_count": None}
    made += [said, run | {"outputs": [], "source": code}]
kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
notebook = {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
text = json.dumps(notebook, indent=1, ensure_ascii=False)
if "--check" not in sys.argv:
    print(text)
elif text + "\n" != (ROOT / ".github/sapo.ipynb").read_text():
    sys.exit(".github/sapo.ipynb is out of date: run python .ci/notebook.py > .github/sapo.ipynb")
