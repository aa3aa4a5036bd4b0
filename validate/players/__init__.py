"""The ways to play a plan. `fake` and `real` have `run(task, report) -> dict`, called in a process of its own by `rank`."""
