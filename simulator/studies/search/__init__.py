"""Search: the best plan of a model on a machine, out of every legal one.

    study = SearchStudy(space=Space(model=model, clusters=(cluster,), global_batch=1024, seq_len=8192))
    with Serial(study) as engine:
        report = search(study, engine)
    report.rows[0].plan

docs/guides/search.md explains what is searched, how bounds prune it, and when two plans count as equal.
"""

from simulator.studies.search.driver import Interrupted, Progress, search
from simulator.studies.search.engines import Dask, Engine, Processes, Serial
from simulator.studies.search.front import Front, front
from simulator.studies.search.front_text import render_front
from simulator.studies.search.journal import Journal
from simulator.studies.search.outcome import PlanOutcome
from simulator.studies.search.report import Row, SearchReport
from simulator.studies.search.software import USUAL, search_stacks, usual_stacks
from simulator.studies.search.space import Space
from simulator.studies.search.study import OBJECTIVES, Objective, SearchStudy
from simulator.studies.search.text import render

__all__ = [
    "OBJECTIVES", "USUAL", "Dask", "Engine", "Front", "Interrupted", "Journal", "Objective", "PlanOutcome", "Processes",
    "Progress", "Row", "SearchReport", "SearchStudy", "Serial", "Space", "front", "render", "render_front", "search",
    "search_stacks", "usual_stacks",
]  # fmt: skip
