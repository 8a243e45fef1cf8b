"""Lets nbval run cleaned notebooks: one thread per kernel, and cells that have no execution count."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")


def pytest_collection_modifyitems(items):
    # nbdev_clean nulls the execution counts; nbval takes a cell without one for a cell that was never run.
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is not None and cell.get("cell_type") == "code" and cell.get("execution_count") is None:
            cell["execution_count"] = 0
