"""Plant small faults into the code, one at a time, and note which fast test catches each.

python -m tests.mutants FILE ... [--since COMMIT] [--count 60] [--seed 0] [--limit 120] [--output /tmp/mutants.jsonl]

--since: only on lines that changed since this commit. --limit: seconds for the tests of one mutant; what takes longer
is noted as "timeout": read it as caught only where the tests take much less without a mutant.

Works in a copy of the tracked files. Each mutant is a line {file, line, mutation, caught} of the output, which the same
command continues; caught is a test, or null: a missing test, or a mutant that changes nothing.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPPOSITES = {ast.Eq: ast.NotEq, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Is: ast.IsNot, ast.In: ast.NotIn}
OPPOSITES |= {new: old for old, new in OPPOSITES.items()} | {ast.And: ast.Or, ast.Or: ast.And}
ALSO = {"parallel": ["distributed"], "optim": ["distributed"], "simulate": ["distributed"]}  # folders of tests


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, mutation, the whole mutated source) for all mutants of a file."""
    starts = [0, *(match.end() for match in re.finditer(rb"\n", source.encode()))]
    for node in code_of(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old = source.encode()[begin:end].decode()
        for new in replacements(node):
            text = (source.encode()[:begin] + new.encode() + source.encode()[end:]).decode()
            yield node.lineno, f"{old} -> {new}".replace("\n", " "), text


def code_of(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield expressions and statements that run, but for parts of f-strings, whose places Python does not tell."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns") and not is_text(child):
                if isinstance(child, ast.expr | ast.stmt):
                    yield child
                yield from code_of(child)


def is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def replacements(node: ast.expr | ast.stmt) -> Iterator[str]:
    """Yield what may stand in the place of an expression or statement."""
    match node:
        case ast.Compare(left, [op], comparators):
            yield f"({ast.unparse(ast.Compare(left, [OPPOSITES[type(op)]()], comparators))})"
        case ast.BoolOp(op, values):
            yield f"({ast.unparse(ast.BoolOp(OPPOSITES[type(op)](), values))})"
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right) if not (is_text(left) or is_text(right)):
            yield f"({ast.unparse(ast.BinOp(left, ast.Sub() if isinstance(op, ast.Add) else ast.Add(), right))})"
        case ast.Constant(bool() | int() | float() as value):
            yield str(not value if isinstance(value, bool) else value + 1)
        case ast.If(test) | ast.While(test):
            head, *_ = ast.unparse(node).partition("\n")
            body = ast.unparse(node).removeprefix(head)
            keyword = head.split()[0]
            yield indented(f"{keyword} not ({ast.unparse(test)}):{body}", node)
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))})"
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "pass"


def indented(code: str, node: ast.stmt) -> str:
    return code.replace("\n", "\n" + " " * node.col_offset)


def changed_lines(file: str, since: str) -> set[int]:
    """Return the numbers of lines that differ from those of a commit."""
    diff = subprocess.run(
        ["git", "diff", "-U0", since, "--", file], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = re.findall(r"^@@ .*\+(\d+)(?:,(\d+))? @@", diff.stdout, re.MULTILINE)
    return {line for first, count in found for line in range(int(first), int(first) + int(count or 1))}


def tests_of(file: str, tree: Path) -> list[list[str]]:
    """Return the tests of a file in the order to run them: those that name its module, then those of its folders."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    named = [str(f.relative_to(tree)) for f in sorted(tree.glob("tests/**/test_*.py")) if module in f.read_text()]
    parts = [name for part in Path(file).parts for name in (part, *ALSO.get(part, []))]
    folders = [f"tests/{name}" for name in parts if (tree / "tests" / name).is_dir()]
    return [tests for tests in (named, folders or sorted(map(str, tree.glob("tests/test_*.py")))) if tests]


def failing(tree: Path, tests: list[str], limit_s: float) -> str | None:
    """Return the first fast test that fails, "timeout", or None."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *tests,
    ]
    process = subprocess.Popen(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    named = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", output, re.MULTILINE)
    return None if process.returncode in (0, 5) else named[1] if named else "tests do not run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--since")
    parser.add_argument("--output", type=Path, default=Path("/tmp/mutants.jsonl"))
    for name, default in {"count": 60, "seed": 0, "limit": 120}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    known = given.output.read_text().splitlines() if given.output.exists() else []
    done = {tuple(json.loads(line)[key] for key in ("file", "line", "mutation")) for line in known}
    found = []
    for file in given.files:
        lines = changed_lines(file, given.since) if given.since else None
        source = (ROOT / file).read_text()
        found += [(file, *mutant) for mutant in mutants(source) if lines is None or mutant[0] in lines]
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        for file in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, tree / file)
        for file, line, mutation, text in random.Random(given.seed).sample(found, min(given.count, len(found))):
            if (file, line, mutation) in done:
                continue
            original = (tree / file).read_text()
            (tree / file).write_text(text)
            caught = next(filter(None, (failing(tree, tests, given.limit) for tests in tests_of(file, tree))), None)
            (tree / file).write_text(original)
            if caught not in (None, "timeout", "tests do not run") and failing(tree, [caught], given.limit):
                caught = f"fails without a mutant, too: {caught}"
            with given.output.open("a") as output:
                output.write(json.dumps({"file": file, "line": line, "mutation": mutation, "caught": caught}) + "\n")


if __name__ == "__main__":
    main()
