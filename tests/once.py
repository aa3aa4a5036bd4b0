"""What several tests ask alike and is the same each time, made once for all of a worker's."""

from __future__ import annotations

from functools import cache

from simulator.studies.search import PlanOutcome, SearchStudy
from simulator.studies.search import evaluate as module

_evaluate = module.evaluate
_STUDIES: dict[str, SearchStudy] = {}


def evaluate(study: SearchStudy, key: str) -> PlanOutcome:
    """In the place of the searches' own: what comes of a plan does not depend on what is looked for, or in which order."""
    inputs = study.space.model, *study.space.clusters, study.stack, study.calibration
    asked = repr([*(one and one.model_dump_json() for one in inputs), study.fits_only])
    _STUDIES.setdefault(asked, study)
    return _outcome(asked, key)


@cache
def _outcome(asked: str, key: str) -> PlanOutcome:
    return _evaluate(_STUDIES[asked], key)
