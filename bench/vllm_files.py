"""Functions out of vLLM's files, whose own imports ask for its compiled extension or for a driver."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any


@functools.cache
def vllm_folder() -> Path:
    """Where vLLM's Python files lie.

    Raises:
        FileNotFoundError: they are not on the path.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("vllm is not on the Python path")
    return Path(spec.submodule_search_locations[0])


def jit_functions(path: Path, names: dict[str, Any], others: Collection[str] = ()) -> None:
    """Add the functions of a file that Triton compiles, and `others` of it, to the names that they use."""
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (node.name in others or any(ast.unparse(mark) == "triton.jit" for mark in node.decorator_list))
    ]
    # Line numbers stay those of the file, where Triton looks for a function's source.
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
