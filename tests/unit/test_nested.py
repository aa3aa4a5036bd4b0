"""Records of plans and stacks: flat names are read, updated and written as ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from simulator.base.errors import InputError, PlanError
from simulator.spec.plan import PipelinePlan, Plan, RecomputePlan
from simulator.spec.software.stack import Stack

VALUES = {
    "tp": st.integers(1, 8),
    "schedule": st.sampled_from([None, "gpipe", "1f1b"]),
    "virtual_stages": st.integers(1, 4),
    "stage_layers": st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple),
    "precision": st.sampled_from(["bf16", "fp8"]),
    "fp8_recipe": st.sampled_from([None, "delayed"]),
    "recompute": st.sampled_from(["none", "full"]),
    "recompute_every": st.integers(1, 3),
    "bucket_bytes": st.integers(1, 10**9),
    "expert_imbalance": st.sampled_from([1.0, 1.5]),
}
PLANS = st.fixed_dictionaries({}, optional=VALUES)


def leaves(noun: type[BaseModel], records: frozenset[str]) -> list[str]:
    found = []
    for name, info in noun.model_fields.items():
        inner = info.annotation
        if name in records and isinstance(inner, type) and issubclass(inner, BaseModel):
            found += [f"{name}.{field}" for field in inner.model_fields]
        else:
            found.append(name)
    return found


@pytest.mark.parametrize("noun", [Plan, Stack])
def test_every_field_has_one_flat_name(noun: type[Plan | Stack]) -> None:
    records = frozenset(place.partition(".")[0] for place in noun.flat_names.values() if "." in place)
    assert sorted(noun.flat_names.values()) == sorted(leaves(noun, records))


@given(PLANS)
def test_flat_and_nested_spellings_are_one_plan(fields: dict[str, object]) -> None:
    plan = Plan(**fields)
    assert Plan(**Plan.in_records(fields)) == plan
    assert Plan.model_validate(plan.model_dump()) == plan
    assert Plan.flattened(Plan.in_records(fields)) == fields
    assert plan.flat_fields_set == set(fields)
    assert {name: plan.value(name) for name in fields} == fields
    assert plan.changed_fields() == plan.model_dump(mode="json", exclude_defaults=True)
    assert list(plan.model_dump()) == list(Plan.flat_names)


@given(PLANS, PLANS)
def test_an_update_is_the_plan_made_with_it(fields: dict[str, object], changes: dict[str, object]) -> None:
    assert Plan(**fields).copy_with(**changes) == Plan(**{**fields, **changes})
    assert Plan(**fields).model_copy(update=changes) == Plan(**{**fields, **changes})


def test_a_word_for_a_record_is_its_main_field() -> None:
    assert Plan(recompute="full").recompute == RecomputePlan(mode="full")
    assert Plan.moved_keys({"recompute": "full", "tp": 2, "schedule": "1f1b"}) == {"schedule": "pipeline.schedule"}
    plan = Plan(recompute={"every": 2}, pipeline=PipelinePlan(virtual_stages=2))
    assert plan.flat_fields_set == {"recompute_every", "virtual_stages"}


def test_one_field_is_given_once() -> None:
    with pytest.raises(InputError, match=r"virtual_stages and pipeline.virtual_stages are one field: keep one"):
        Plan(virtual_stages=2, pipeline={"virtual_stages": 2})
    assert Plan(virtual_stages=2, pipeline={"schedule": "interleaved"}).pipeline_schedule == "interleaved"


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"virtual_stages": 0}, "f: virtual_stages"),
        ({"pipeline": {"virtual_stages": 0}}, "f: pipeline.virtual_stages"),
        ({"precision": "bf17"}, "f: precision"),
        ({"precision": {"compute": "bf17"}}, "f: precision.compute"),
        ({"zeropp": {"secondary_ranks": 0}}, "f: zeropp.secondary_ranks"),
        ({"deepspeed": {"zeropp": {"secondary_ranks": 0}}}, "f: deepspeed.zeropp.secondary_ranks"),
        ({"stage_layers": [1, "x"]}, "f: stage_layers[1]"),
    ],
)
def test_a_fault_stands_where_it_was_written(data: dict[str, object], place: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(data, "f", PlanError)
    assert [fault.place for fault in caught.value.faults] == [place]


def test_a_stacks_source_may_name_the_record() -> None:
    stack = {
        "name": "x",
        "framework": "x",
        "date": "2026",
        "attention": {"kernel": "flash2"},
        "kernels": {"blocks": "eager"},
    }
    for name in ("host_launch_s", "host.launch_s"):
        assert (
            Stack.model_validate({**stack, "host": {"launch_s": 1e-6}, "sources": {name: "measured"}}).host.launch_s
            == 1e-6
        )
    with pytest.raises(ValidationError, match="host_launch_s is set"):
        Stack.model_validate({**stack, "host": {"launch_s": 1e-6}})
