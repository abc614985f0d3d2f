"""The progress bar of Stoker's commands, applications and maps, drawn by `rich.progress`.

Bars appear only on terminals. For a pipe, callers write plain lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

_MOST_WIDTH, _LEAST_WIDTH = 36, 4

Lines = Callable[[], Sequence[str]]


class ProgressBar(Progress):
    """A progress bar with a name before the bar and facts after it; a context manager.

    `facts` returns the text after the bar; `above` and `below` return the lines around the bar. With `redraws`, the bar
    is drawn twice per second, otherwise only on `refresh`. With `vanishes`, the bar is removed at the end.
    """

    def __init__(
        self, name: str, *, total: float | None, done: float = 0, facts: Callable[[], str], above: Lines = list,
        below: Lines = list, console: Console, redraws: bool = False, vanishes: bool = False,
    ) -> None:  # fmt: skip
        self._name, self._facts, self._above, self._below = name, facts, above, below
        self._bar = BarColumn()
        super().__init__(
            TextColumn("  {task.description}"), self._bar, _FactsColumn(facts),
            console=console, auto_refresh=redraws, refresh_per_second=2, transient=vanishes,
        )  # fmt: skip
        self._task = self.add_task(name, total=total, completed=done)  # type: ignore[arg-type]  # rich's default is 100

    def set_done(self, done: float, *, refresh: bool = False) -> None:
        self.update(self._task, completed=done, refresh=refresh)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Limit the width of the bar, because rich cannot redraw a line that wraps."""
        if not self.tasks:  # rich calls this method in its constructor, before a task exists
            return
        yield from (Text(f"  {line}", style="dim") for line in self._above())
        room = self.console.width - len(self._name) - len(self._facts()) - 5
        self._bar.bar_width = max(_LEAST_WIDTH, min(_MOST_WIDTH, room))
        yield self.make_tasks_table(self.tasks)
        yield from (Text(line) for line in self._below())


class _FactsColumn(ProgressColumn):
    max_refresh = None

    def __init__(self, facts: Callable[[], str]) -> None:
        super().__init__()
        self._facts = facts

    def render(self, task: Task) -> Text:  # noqa: ARG002 - rich's interface
        return Text(self._facts(), no_wrap=True)
