"""Where results are printed: in a log, as wide as they are."""

from rich.console import Console


def console() -> Console:
    """A console; where no terminal says how wide it is, tables are not cut."""
    found = Console()
    return found if found.is_terminal else Console(width=200)
