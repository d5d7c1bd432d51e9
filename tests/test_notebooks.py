"""Every notebook runs from top to bottom, and prints what is stored in it."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == [
        "comparing_runs",
        "planning_a_cluster",
        "reading_a_sweep",
    ]


def texts(cell):
    """What a cell prints and shows, but pictures."""
    shown = [output.get("data", {"text/plain": output.get("text")}) for output in cell.outputs]
    return [
        {kind: value for kind, value in each.items() if kind.startswith("text/")} for each in shown
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    stored = [texts(cell) for cell in cells]
    assert path.stat().st_size < 500_000
    nbclient.NotebookClient(
        notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    kinds = [output.output_type for cell in cells for output in cell.outputs]
    assert "error" not in kinds
    assert [texts(cell) for cell in cells] == stored, (
        "jupyter execute --inplace stores the new ones"
    )
    shown = "".join(
        output.data.get("text/markdown", "")
        for cell in cells
        for output in cell.outputs
        if "data" in output
    )
    assert shown.count("\n|") > 5, "tables are shown"
    assert list(tmp_path.iterdir()) == []
