"""The four ways to play a plan. Each module has `play(task, report) -> dict`, run in a process of its own."""
