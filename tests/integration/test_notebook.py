"""The notebook runs from top to bottom, and nothing of a run is stored in it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_valid_and_holds_no_outputs() -> None:
    notebook = read()
    nbformat.validate(notebook)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert code
    assert all(c.outputs == [] and c.execution_count is None for c in code)


@pytest.mark.engine
def test_the_notebook_runs_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    work = tmp_path / "work"
    work.mkdir()
    before = sorted(p.name for p in NOTEBOOK.parent.iterdir())
    notebook = read()
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(work)}}).execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    texts = [o.get("data", {}).get("text/plain", "") for o in outputs]
    shown = [ast.literal_eval(text) for text in texts if text.startswith("{")]
    results, scores = shown
    assert any("metrics.validation.accuracy" in text for text in texts)
    assert results["accuracy after"] > results["accuracy before"] + 0.1
    assert max(scores, key=scores.get) == "sports"  # the sentence is about a cup final
    assert sum(scores.values()) == pytest.approx(1, abs=0.01)
    assert any("image/svg+xml" in o.get("data", {}) for o in outputs)
    (run,) = (work / "runs").iterdir()
    assert (run / "adapter" / "adapter_model.safetensors").exists()
    assert sorted(p.name for p in NOTEBOOK.parent.iterdir()) == before
