"""The four modules pasted into one cell, in a real Jupyter kernel."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
ONE_CELL = "\n".join((ROOT / f).read_text() for f in ("drive_store.py", "grpo.py", "coordinator.py", "sapo.py"))


def run_cells(cells, cwd):
    """Execute cells in a fresh kernel whose folder is not the project's; returns the text each one printed."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(cwd)}}).execute()
    return ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("notebook")
    settings = {
        "GDRIVE_PATH": str(cwd / "drive"), "EXPERIMENT_NAME": "one_cell", "TEST_MODE": "True", "LOCAL_NODES": "2",
        "NUM_TRANSPLANT_TREES": "4", "EXTERNAL_FILTER": "False", "NUM_WORKERS": "2",
    }  # fmt: skip
    environment = f"import os\nos.environ.update({settings!r})"
    status = "print(get_experiment_status(os.environ['GDRIVE_PATH'], 'one_cell'))"
    validate = "os.environ['NODE_ROLE'] = 'validate'; print('exit', main())"
    return run_cells([environment, ONE_CELL, status, ONE_CELL, validate], cwd)


def test_one_cell_trains_a_whole_swarm(printed):
    assert "node end: finished" in printed[1]
    assert "node_0 round 2/3" in printed[1] and "node_1 round 2/3" in printed[1]
    assert "groups 4+4" in printed[1], "the two nodes of the cell share with one another"


def test_the_cell_leaves_its_functions_behind_for_the_next_cells(printed):
    assert "'current_round': 2" in printed[2] and "'peer_ids': ['node_0', 'node_1']" in printed[2]


def test_running_the_same_cell_again_resumes_instead_of_starting_over(printed):
    assert "from the checkpoint after round 2" in printed[3] and "round 0/3" not in printed[3]


def test_the_run_validates(printed):
    assert "exit 0" in printed[4]
