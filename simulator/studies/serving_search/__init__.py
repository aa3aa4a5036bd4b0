"""Which serving plan meets a rate and its limits on the fewest GPUs: layouts, replicas, and pools for prompts and answers.

`ServingSearch` is what is asked, `search_serving` answers with a `ServingSearchReport`.
"""

from simulator.studies.serving_search.answers import Answer, Row, ServingSearchReport
from simulator.studies.serving_search.driver import SearchInterrupted, search_serving
from simulator.studies.serving_search.notes import Notes
from simulator.studies.serving_search.study import (
    DEGREES,
    DISAGGREGATED,
    Disaggregated,
    ServingSearch,
    degrees_given,
    fix_faults,
)

__all__ = [
    "DEGREES", "DISAGGREGATED", "Answer", "Disaggregated", "Notes", "Row", "SearchInterrupted", "ServingSearch",
    "ServingSearchReport", "degrees_given", "fix_faults", "search_serving",
]  # fmt: skip
