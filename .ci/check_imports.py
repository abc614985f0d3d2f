"""Check that no modules of a package import each other in a cycle, and that functions import only listed modules.

Imports for type checking count. A function may import a module that only some processes load, or a slow module that the
command line must not load.

    python .ci/check_imports.py [folder of the package]      exit status 1, and a line for each fault
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SLOW_LIBRARIES = frozenset({
    "IPython", "accelerate", "asyncio", "decimal", "huggingface_hub", "jinja2", "llguidance", "matplotlib", "pyarrow",
    "pynvml", "tokenizers", "torch", "transformers",
})  # fmt: skip
"""Libraries that only some processes load."""

DEFERRED = {
    "importlib.metadata": "takes a fifth of the start of a command",
    "stoker.apps.batch_inference.run": "loads Parsl, for which --help does not wait",
    "stoker.apps.embed.run": "loads Parsl, for which --help does not wait",
    "stoker.apps.encoder_lengths.run": "loads Parsl, for which --help does not wait",
    "stoker.apps.fact_verification.run": "loads Parsl, for which --help does not wait",
    "stoker.apps.gateway.dashboard": "loads the HTTP server, for which --help does not wait",
    "stoker.apps.gateway.run": "loads Parsl and the HTTP server, for which --help does not wait",
    "stoker.apps.inference_sweep.run": "loads Parsl, for which --help does not wait",
    "stoker.apps.model_profile.run": "loads Parsl, for which --help does not wait",
    "stoker.apps.prompt_tuning.run": "loads Parsl, for which --help does not wait",
    "stoker.apps.prompt_tuning.submit": "an app's public name, resolved on its first use",
    "stoker.contexts.encoder_loading": "loads torch, in libraries alone",
    "stoker.contexts.reading": "loads torch, in libraries alone",
    "stoker.contexts.model_loading": "loads torch, in libraries alone",
    "stoker.contexts.streamed_model": "loads torch, in libraries alone",
    "stoker.contexts.inference.vllm_engine": "loads vLLM, where it is the engine",
    "stoker.manager.advice.estimating": "loads NumPy, which only estimates from similar recipes need",
    "stoker.manager.advice.answers": "the advisor has given way to all other work before it loads anything",
    "stoker.manager.cli.entry": "Ctrl-C is set up before anything else is loaded",
    "stoker.manager.cli.main": "Ctrl-C is set up before anything else is loaded",
    "stoker.manager.cli.simulating": "loads the simulator, for one command",
    "stoker.manager.environment.carrying": "takes a third of the factory's start, and few sites need it",
    "stoker.manager.executor.blocks": "loads Parsl",
    "stoker.manager.factory.batches": "loads Parsl for most batch systems",
    "stoker.manager.factory.kubernetes": "loads Parsl",
    "stoker.manager.factory.listed": "loads Parsl",
    "stoker.manager.factory.submitting": "loads Parsl",
    "stoker.manager.factory.slurm": "loads Parsl",
    "stoker.manager.live.session_policies": "loads all policies, for sessions that have ended and for replays",
    "stoker.manager.live.replay": "loads the manager's core, for sessions that have ended",
    "stoker.manager.study.calibrate": "loads the simulator, for `stoker replay --simulate`",
    "stoker.manager.study.evidence": "loads the simulator, for `stoker plan`",
    "stoker.manager.study.session_timeline": "loads the manager's core, for `stoker replay --perfetto`",
    "stoker.manager.study.plan": "loads the simulator, for `stoker plan`",
}
"""Modules that functions may import, each with the reason."""


def modules_of(folder: Path) -> dict[str, Path]:
    """Return the files of a package by module name. Folders that are links count."""
    found = {}
    for path in _files(folder):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path)
        elif path.suffix == ".py":
            yield path


def imports_of(tree: ast.AST, *, modules: dict[str, Path]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each import statement below a node, with each module that it names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node, inner if inner in modules else node.module


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that reach each other (Tarjan's algorithm, without recursion)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found = []
    for top in graph:
        if top in order:
            continue
        order[top] = low[top] = len(order)
        stack.append(top)
        on_stack.add(top)
        todo = [(top, iter(sorted(graph[top])))]
        while todo:
            module, rest = todo[-1]
            following = next(rest, None)
            if following is None:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[module])
                if low[module] == order[module]:
                    group = stack[stack.index(module) :]
                    del stack[stack.index(module) :]
                    on_stack.difference_update(group)
                    if len(group) > 1:
                        found.append(sorted(group))
            elif following not in order:
                order[following] = low[following] = len(order)
                stack.append(following)
                on_stack.add(following)
                todo.append((following, iter(sorted(graph[following]))))
            elif following in on_stack:
                low[module] = min(low[module], order[following])
    return found


def offences(folder: Path) -> Iterator[str]:
    modules = modules_of(folder)
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        tree = ast.parse(path.read_text(), str(path))
        graph[name] = {target for _, target in imports_of(tree, modules=modules) if target in modules} - {name}
        inside = {
            (node.lineno, target)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node, target in imports_of(function, modules=modules)
        }
        for line, target in sorted(inside):
            if target not in DEFERRED and target.partition(".")[0] not in SLOW_LIBRARIES:
                yield f"{path}:{line}: a function of {name} imports {target}"
    for group in cycles(graph):
        yield f"{len(group)} files import in a circle: {', '.join(group)}"


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "src" / "stoker")
    found = list(offences(folder))
    for line in found:
        sys.stdout.write(f"{line}\n")
    if not found:
        count = len(modules_of(folder))
        sys.stdout.write(f"{count} files: no import cycle, and no import inside a function without a reason\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
