"""Print .github/sapo.ipynb, made from the cells of README and MANUAL. --check: compare it."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MANUAL = (ROOT / ".github/MANUAL.md").read_text()
PROGRAM = "/content/drive/MyDrive/sapo"
INTRODUCTION = """# SAPO in Colab
For a real model, as in the last cell, choose a GPU runtime first: *Runtime, Change runtime type*.
`tiny` needs none. Copy the four modules and run_swarm.sh into the folder `sapo` of your Drive, and
run the cells in order."""


def printed(text: str, marker: str) -> str:
    return re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)\n```", text, re.DOTALL)[1]


shell = [f"!cd {PROGRAM} && {line}" for line in re.findall(r"`(TEST_MODE=True [^`]+)`", README)]
model, _, page = printed(README, "command: page").splitlines()  # in between: what writes page.py
model = f"!GDRIVE_PATH=rl-swarm {model.replace('sapo.py', PROGRAM + '/sapo.py')}"
code = [printed(MANUAL, "cell: mount"), "\n".join(shell)]
code += ["%%writefile page.py\n" + printed(README, "page"), f"{model}\n!{page}"]
code += [printed(MANUAL, f"cell: {name}") for name in ("swarm", "look", "compare")]

cells = [{"cell_type": "markdown", "id": "cell0", "metadata": {}, "source": INTRODUCTION}]
for number, text in enumerate(code, start=1):
    more = {"execution_count": None, "outputs": [], "source": text}
    cells.append({"cell_type": "code", "id": f"cell{number}", "metadata": {}} | more)
kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
made = json.dumps(notebook, indent=1, ensure_ascii=False)
if "--check" not in sys.argv:
    print(made)
elif made + "\n" != (ROOT / ".github/sapo.ipynb").read_text():
    sys.exit(".github/sapo.ipynb differs: python .ci/notebook.py > .github/sapo.ipynb")
