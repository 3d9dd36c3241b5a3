"""Print .github/sapo.ipynb, made from the cells of README and MANUAL. --check: compare it."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MANUAL = (ROOT / ".github/MANUAL.md").read_text()


def printed(text: str, marker: str) -> str:
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)\n```", text, re.DOTALL)[1]


check = re.search(r"`(TEST_MODE=True [^`]+)`", README)[1]
model, _, page = printed(README, "command: page").splitlines()  # in between: what writes page.py
page = page.replace("rl-swarm/", "$GDRIVE_PATH/")
metrics = printed(README, "pandas").replace(
    '"rl-swarm/experiments/default', 'path + "/experiments/ours'
)

# Each cell with what is said before it: what it does and what will be seen.
cells = [
    (
        """# SAPO in a notebook
In Colab copy the four modules and run_swarm.sh into the folder `sapo` of your Drive. Elsewhere
install what the README says, matplotlib and pandas, and start Jupyter in the program's folder.
Run the cells in order. `tiny`, the model that comes with the program, needs no GPU; for the last
cell choose a GPU runtime first.

**Begin.** In Colab you are asked for access to your Drive. Nothing else is printed.""",
        printed(MANUAL, "cell: mount"),
    ),
    (
        """**Check the installation.** After a warm start and three rounds, in about a minute, you see
`check: passed`.""",
        f"!{check}",
    ),
    (
        """**SAPO on a page.** This cell writes the page into a file, the next one runs it.""",
        "%%writefile page.py\n" + printed(README, "page"),
    ),
    (
        """First a model is made. Then four nodes print their rewards in each of 30 rounds: near 0 in the
beginning, about 0.5 in the end. It takes a minute or two.""",
        f"!{model}\n!{page}",
    ),
    (
        """**A swarm of four nodes in this process,** 200 rounds. You see a line a round, every 20 rounds
two questions with what a node answers, and in the end a verdict and the picture of the run. The stop
button finishes the round and writes a checkpoint; the same cell goes on.""",
        printed(MANUAL, "cell: swarm"),
    ),
    (
        """**Examine it:** the experiments, the state of this one, and a curve of each node's reward.""",
        printed(MANUAL, "cell: look"),
    ),
    (
        """**Read the metrics without the program,** from the files that each node writes: the mean reward
of ten rounds, for the last five rounds. MANUAL's *Logs and metrics* names the other columns.""",
        metrics,
    ),
    (
        """**Compare four settings** with a coordinator and four workers on one GPU: plain GRPO, and one,
two or three of four groups from peers. After each you see a table of all that have ended. With GPT-2
it needs up to 18 GB of Drive, and it was never run on a GPU; with MODEL_NAME=tiny it takes some
minutes on a CPU.""",
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
    sys.exit(".github/sapo.ipynb differs: python .ci/notebook.py > .github/sapo.ipynb")
