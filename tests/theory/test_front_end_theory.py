"""A front end that takes its time, against queues. Expected values are derived here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import Deployment, InferencePlan, Request
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.engine import Engine, ServedRun
from simulator.studies.serving.shared import Shared
from simulator.studies.serving.workload import Users
from tests.theory.test_inference_theory import limits, real_costs, service_s

ACCEPT_S, SEND_S = 3e-3, 2e-3
PROMPT = 64


@pytest.fixture(scope="module")
def plan() -> InferencePlan:
    return InferencePlan(max_model_len=256)


@pytest.fixture(scope="module")
def costs(plan: InferencePlan) -> StepCosts:
    """Of a stack whose requests spend no time outside the queue but at the front end."""
    found = real_costs(Model.load("llama3-8b"), plan, Cluster.load("hgx-h100-8"))
    engine = Stack.load(plan.stack).engine
    assert engine is not None
    timed = {"request_s": 0.0, "token_s": 0.0, "accept_s": ACCEPT_S, "stream_s": SEND_S}
    found.stack = found.stack.copy_with(engine=engine.model_copy(update=timed))
    return found


def played(costs: StepCosts, plan: InferencePlan, count: int, answer: int, users: int = 0) -> ServedRun:
    requests = [Request(arrival_s=0.0, prompt_tokens=PROMPT, output_tokens=answer)] * count
    return Engine(costs, limits(plan, costs), requests, (0.0, 1e9), users=Users(count=users)).run()


def test_a_lone_request_is_let_in_computed_and_sent(costs: StepCosts, plan: InferencePlan) -> None:
    (job,) = played(costs, plan, 1, 1).jobs
    assert job.first_s == pytest.approx(ACCEPT_S + service_s(costs, PROMPT) + SEND_S, rel=1e-12)


def test_requests_that_come_together_are_let_in_one_behind_another(costs: StepCosts, plan: InferencePlan) -> None:
    one_at_a_time = plan.model_copy(update={"max_sequences": 1})
    alone_s = service_s(costs, PROMPT)
    assert alone_s > ACCEPT_S + SEND_S  # so that the queue is never empty, and nothing waits for the front end again
    ends = [job.end_s for job in played(costs, one_at_a_time, 3, 1).jobs]
    assert ends == pytest.approx([ACCEPT_S + n * alone_s + SEND_S for n in (1, 2, 3)], rel=1e-12)


def test_a_busy_front_end_decides_how_much_a_closed_loop_is_served(costs: StepCosts, plan: InferencePlan) -> None:
    count, answer, users = 96, 32, 32
    found = played(costs, plan, count, answer, users)
    work_s = count * (ACCEPT_S + answer * SEND_S)
    assert found.end_s == pytest.approx(work_s)  # letting the first 32 in takes longer than a step: it is never idle


def test_a_server_has_no_more_capacity_than_its_front_end(plan: InferencePlan) -> None:
    stack = Stack.load("tensorrt-llm-2025")
    assert stack.engine is not None
    slow = stack.copy_with(engine=stack.engine.model_copy(update={"accept_s": 0.02, "stream_s": SEND_S}))
    two = plan.model_copy(update={"dp": 2, "max_sequences": 8})
    deployed = Deployment.of(Model.load("llama3-8b"), two, Cluster.load("hgx-h100-8"), slow)
    requests = [Request(arrival_s=0.0, prompt_tokens=PROMPT, output_tokens=n) for n in (10, 30)]
    assert deployed.capacity_per_s(requests) == pytest.approx(2 / (0.02 + 20 * SEND_S), rel=1e-12)


@given(st.floats(0, 2), st.floats(0, 1), st.lists(st.floats(0, 0.3), min_size=1, max_size=20), st.integers(1, 50))
def test_steps_at_once_are_sent_as_one_by_one(busy_s: float, first_s: float, longer: list[float], tokens: int) -> None:
    at_once, in_turn = (Shared([0.0], 0.0, 0.01, front_s=busy_s) for _ in range(2))
    ends, length = [first_s], 0.0
    for more_s in longer:
        length += more_s
        ends.append(ends[-1] + length)
    last_s = [in_turn.sent_s(end_s, end_s, tokens) for end_s in ends][-1]
    assert at_once.sent_s(ends[0], ends[-1], tokens, len(ends)) == pytest.approx(last_s)
