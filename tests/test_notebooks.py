"""The notebooks are the source: package and README follow from them, and every chapter keeps the form that readers rely on."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.name)]
HANDWRITTEN = {"__init__.py", "__main__.py", "_modidx.py"}
LEAVES = {"figures", "exercises", "kv_cache"}  # import nothing from tinylm, may be imported from anywhere
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
by_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


def cells(path, kind=None):
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if kind in (None, cell["cell_type"])]


def source(cell):
    return "".join(cell["source"])


def module_of(path):
    names = re.findall(r"^#\| *default_exp +(\S+)", "\n".join(source(cell) for cell in cells(path, "code")), re.M)
    return names[0] if names else None


def test_clean_and_export_leave_no_difference(tmp_path):
    for name in ("nbs", "tinylm", "settings.ini", "README.md", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.suffix in (".py", ".ipynb")}
    for command in ("nbdev_clean", "nbdev_export"):
        tool = Path(sys.executable).with_name(command)
        subprocess.run([tool if tool.exists() else command], cwd=tmp_path, check=True, capture_output=True)
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.suffix in (".py", ".ipynb")}
    assert before.keys() == after.keys()
    assert [str(p.relative_to(tmp_path)) for p in before if before[p] != after[p]] == []


def test_every_module_has_its_notebook():
    modules = {p.stem for p in (ROOT / "tinylm").glob("*.py") if p.name not in HANDWRITTEN}
    assert modules == {module_of(path) for path in NOTEBOOKS} - {None}


@by_name
def test_a_notebook_begins_with_its_title_and_the_module_with_the_sentence_below_it(path):
    title, _, sentence = source(cells(path, "markdown")[0]).splitlines()[:3]
    assert title.startswith("# ")
    if module := module_of(path):
        code = (ROOT / "tinylm" / f"{module}.py").read_text(encoding="utf-8")
        assert f"> {ast.get_docstring(ast.parse(code))}" == sentence


def test_readme_is_made_from_the_index():
    command = [sys.executable, "-m", "nbconvert", "--to", "markdown", "--stdout", ROOT / "nbs" / "index.ipynb"]
    text = subprocess.run(command, check=True, capture_output=True).stdout.decode("utf-8").replace("\r\n", "\n")
    text = re.sub(r"\]\(((images/)?[A-Za-z0-9_]+\.(ipynb|png))\)", r"](nbs/\1)", text).replace("](../", "](")
    assert text == (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^):]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) >= 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_imports_run_downhill():
    order = {module_of(path): i for i, path in enumerate(CHAPTERS)}
    uphill = []
    for path in NOTEBOOKS:
        module = module_of(path)
        if module is None:
            continue
        tree = ast.parse((ROOT / "tinylm" / f"{module}.py").read_text(encoding="utf-8"))
        wanted = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}  # nbdev exports `from .x`
        uphill += [(module, w) for w in wanted if module in LEAVES or (w not in LEAVES and order[w] >= order[module])]
    assert uphill == []


def test_only_declared_packages_are_imported():
    settings = (ROOT / "settings.ini").read_text(encoding="utf-8")
    declared = {re.split(r"[<>=]", word)[0] for word in re.search(r"^requirements = (.*)$", settings, re.M)[1].split()} | {"tinylm"}
    for path in (ROOT / "tinylm").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level}
        assert names - declared - set(sys.stdlib_module_names) == set(), path.name


@by_name
def test_outputs_are_clean(path):
    for cell in cells(path, "code"):
        assert cell["execution_count"] is None
        for output in cell["outputs"]:
            assert output["output_type"] != "error", source(cell)
            assert output.get("name") != "stderr", source(cell)


@by_name
def test_cells_are_short(path):
    for cell in cells(path, "code"):
        lines = [line for line in source(cell).splitlines() if line.strip()]
        exported_class = re.match(r"#\| ?export\n(@\w+.*\n)?class ", source(cell))
        assert len(lines) <= 18 or exported_class or "#| export" in source(cell) and len(lines) <= 40, f"{len(lines)} lines:\n{source(cell)}"


@by_name
def test_the_project_speaks_of_itself_alone(path):
    text = "\n".join(source(cell) for cell in cells(path)) + json.dumps([c.get("outputs") for c in cells(path, "code")])
    for word in (r"\.\./shared", r"\bDESIGN\.md", r"\bCHAPTERS\.md", r"\bCASES\b", r"\bissue #?\d", r"\bthis session\b", r"\bworkplace\b", "/root/", "/work/"):
        assert not re.search(word, text), word


@by_chapter
def test_a_chapter_has_its_parts(path):
    prose = "\n".join(source(cell) for cell in cells(path, "markdown"))
    code = "\n".join(source(cell) for cell in cells(path, "code"))
    assert re.search(r"The question", prose)
    assert re.search(r"^#+ .*Break it", prose, re.M)
    assert re.search(r"Who sees it\?", prose)
    assert len(re.findall(r"^### Exercise \d", prose, re.M)) == 4
    assert code.count("### BEGIN SOLUTION") == code.count("### END SOLUTION") >= 4
    assert len(re.findall(r"\bgives_hint\(", code)) >= 8  # two usual mistakes an exercise, at least
    assert len(re.findall(r"^\s*assert\b", code, re.M)) >= 20
    pictures = sum("image/png" in output.get("data", {}) for cell in cells(path, "code") for output in cell["outputs"])
    assert pictures >= 2


@by_chapter
def test_no_output_is_compared_where_clocks_or_training_decide(path):
    # A cell that reads the clock must say so to nbval, or the stored figure could never be met again.
    for cell in cells(path, "code"):
        if re.search(r"perf_counter|time\.time\(", source(cell)) and cell["outputs"]:
            assert "# NBVAL_IGNORE_OUTPUT" in source(cell)
