"The student edition: nothing of a solution is left, what is left runs, and every check says that there is no answer yet."
import ast
import json
import re
from pathlib import Path

import pytest

from tinylm import cli
from tinylm.exercises import SOLUTION, assigned, stub_of, without_solutions

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted((ROOT / "nbs").glob("[0-9]*.ipynb"))


def cells(notebook, kind="code"):
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_no_solution_is_left_and_every_question_is(path):
    book, student = read(path), without_solutions(read(path))
    text = "\n".join(cells(student))
    assert not SOLUTION.search(text)
    solutions = [found for cell in cells(book) for found in SOLUTION.finditer(cell)]
    assert len(solutions) >= 4
    for found in solutions:
        for line in map(str.strip, found[2].splitlines()):
            assert len(line) < 20 or line not in text or "\n".join(cells(book)).count(line) > 1, line
    assert cells(student, "markdown") == cells(book, "markdown")
    for cell in cells(student):
        ast.parse(re.sub(r"^[!%].*$", "", cell, flags=re.M))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_what_proves_the_checks_is_gone_and_the_checks_are_not(path):
    book, student = read(path), without_solutions(read(path))
    assert "gives_hint(" not in "\n".join(cells(student))
    calls = [line for cell in cells(student) for line in cell.splitlines() if re.match(r"check_\d\(|check_pair\(", line)]
    assert len(calls) == 4
    exercises = [i for i, cell in enumerate(student["cells"]) if re.search(r"^## Exercises$", "".join(cell["source"]), re.M)]
    after = [i for i, cell in enumerate(student["cells"]) if cell["cell_type"] == "markdown" and i > exercises[0]
             and re.search(r"^## ", "".join(cell["source"]), re.M)]
    among = student["cells"][exercises[0] : after[0]]
    assert len(among) > 8 and not any(cell.get("outputs") for cell in among)
    assert any(cell.get("outputs") for cell in student["cells"][: exercises[0]]), "the lessons keep their outputs"


@pytest.mark.parametrize("name", ["02_positions", "05_tokenizer"])
def test_an_unanswered_chapter_runs_and_stops_only_at_its_checks(name, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    student = without_solutions(read(ROOT / "nbs" / f"{name}.ipynb"))
    notebook = nbformat.reads(json.dumps(student), as_version=4)
    nbclient.NotebookClient(notebook, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(ROOT / "nbs")}}).execute()
    errors = [(output["ename"], output["evalue"]) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs if output.output_type == "error"]
    assert [kind for kind, _ in errors] == ["AssertionError"] * 4
    assert all("No answer yet" in said for _, said in errors[:3]) and "survives your test" in errors[3][1]


def test_a_solution_in_a_function_leaves_dots_at_its_depth():
    cell = 'def f(x):\n    "Doc."\n    ### BEGIN SOLUTION\n    y = x\n\n    return y\n    ### END SOLUTION\n\nprint(1)'
    assert stub_of(cell, "") == 'def f(x):\n    "Doc."\n    ...\n\nprint(1)'


def test_only_names_that_others_ask_for_are_set():
    cell = "### BEGIN SOLUTION\nhelper = 1\na, (b, c) = helper, (2, 3)\ndef f():\n    return a\n### END SOLUTION\n"
    assert stub_of(cell, "check(a, c)\nf()") == "a = ...\nc = ...\nf = ...\n"
    assert stub_of(cell, "ab helper_2") == "\n"
    assert stub_of("a = ...\n" + cell, "check(a, c)") == "a = ...\nc = ...\n"


def test_two_solutions_in_one_cell():
    one = "### BEGIN SOLUTION\na = 1\n### END SOLUTION"
    assert stub_of(f"{one}\nx = 1\n{one.replace('a', 'b')}", "a b") == "a = ...\nx = 1\nb = ..."


def test_assigned_names():
    assert assigned("a = b = 1\nc, d = 1, 2\ndef f(x):\n    y = 1\nclass G: pass\nz += 1\nfor i in []: pass") == ["a", "b", "c", "d", "f", "G"]


def test_the_original_is_left_as_it_was():
    book = read(CHAPTERS[0])
    before = json.dumps(book)
    without_solutions(book)
    assert json.dumps(book) == before


def test_the_command_copies_every_notebook_and_picture(tmp_path, capsys):
    out = tmp_path / "ünder" / "student"
    with pytest.raises(SystemExit) as ended:
        cli.main(["student", "--nbs", str(ROOT / "nbs"), "--out", str(out)])
    assert ended.value.code in (0, None)
    assert {path.name for path in out.glob("*.ipynb")} == {path.name for path in (ROOT / "nbs").glob("*.ipynb")}
    assert (out / "images" / "demo.png").is_file()
    for path in out.glob("*.ipynb"):
        assert "\r" not in path.read_text(encoding="utf-8")
        assert read(path) == without_solutions(read(ROOT / "nbs" / path.name))
    assert f"{out}: " in capsys.readouterr().out


@pytest.mark.parametrize("line, said", [(["--nbs", "nowhere"], "nowhere holds no notebooks"), (["--out", "full"], "full already holds a.txt")])
def test_the_command_refuses_what_it_cannot_do(line, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()
    nbs = [] if "--nbs" in line else ["--nbs", str(ROOT / "nbs")]
    with pytest.raises(SystemExit) as ended:
        cli.main(["student", *line, *nbs])
    assert ended.value.code == 2 and said in capsys.readouterr().err
