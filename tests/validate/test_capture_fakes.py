"""The capture's memo of fake tensors gives what torch's own gives, and a backward runs where its forward did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.work.captured.kernels import priced
from simulator.work.captured.tensors import CapturedTensor

torch = pytest.importorskip("torch")

SCRIPT = """
import threading
import torch

weight = torch.nn.Parameter(torch.zeros(8, 8, device="cuda"))
optimizer = torch.optim.SGD([weight])
main = threading.get_ident()


def hook(gradient):
    assert threading.get_ident() == main, "the backward runs in a thread of its own"


weight.register_hook(hook)
while True:
    (weight @ weight).sum().backward()
    optimizer.step()
"""


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return (
            value.dtype,
            value.shape,
            value.stride(),
            value.storage_offset(),
            str(value.device),
            storage.nbytes(),
            value.is_conj(),
        )
    return [_described(one) for one in value] if isinstance(value, list | tuple) else value


def _both(run: Callable[[Any, Any], Any]) -> tuple[list[Any], list[Any]]:
    """What an operator gives, three times over, so that the memo is asked: under torch's mode and under the capture's."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from validate.capture.fakes import Fakes

    found = []
    for mode in (FakeTensorMode(), Fakes()):
        with mode:
            x, y = torch.empty(4, 6, dtype=torch.bfloat16), torch.empty(6, 4, dtype=torch.bfloat16).t()
            found.append([_described(run(x, y)) for _ in range(3)])
    return found[0], found[1]


@pytest.mark.parametrize(
    "run",
    [
        lambda x, y: x + y,
        lambda x, y: x.add_(y),
        lambda x, y: x @ y.t(),
        lambda x, _y: x.view(2, 12)[1],
        lambda _x, y: y.t().reshape(-1),
        lambda x, _y: x + 1,
        lambda x, _y: x + 1.5,
        lambda x, _y: [(x.to(kind) * True) for kind in (torch.float32, torch.int64)],
        lambda x, y: torch.cat([x, y], 1).split([3, 9], 1),
        lambda x, y: torch.stack([x, y.contiguous()]).sum((0, 2), dtype=torch.float32),
        lambda x, _y: torch.view_as_complex(x.float().view(4, 3, 2)).conj(),
        lambda _x, _y: torch.zeros(3, device="meta", dtype=torch.int8),
        lambda x, _y: torch.native_layer_norm(x, [6], None, None, 1e-5),
    ],
)  # fmt: skip
def test_an_operator_gives_what_torch_s_own_fake_mode_gives(run: Callable[[Any, Any], Any]) -> None:
    theirs, ours = _both(run)
    assert ours == theirs


def test_equal_numbers_of_different_types_are_told_apart() -> None:
    from validate.capture.fakes import Fakes

    with Fakes():
        x = torch.empty(3, dtype=torch.int64)
        assert [(x * one).dtype for one in (2, 2.0, True, 2)] == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_views_share_the_storage_of_what_they_look_at() -> None:
    from validate.capture.fakes import Fakes

    with Fakes():
        x = torch.empty(4, 6)
        views = [x[1:].t() for _ in range(3)]
        assert {one.untyped_storage()._cdata for one in views} == {x.untyped_storage()._cdata}


@pytest.mark.usefixtures("warm_captures")
def test_a_backward_runs_in_the_program_s_own_thread(tmp_path: Path) -> None:
    """Two threads would free what they share in an order of chance, and a capture would not be the same twice."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["capture", str(script), "-o", str(tmp_path / "out.capture.gz")]) == ExitCode.OK


def test_what_torch_calls_pointwise_or_a_reduction_has_a_rule() -> None:
    """Each of torch's operators whose own tags say so, but what autograd takes apart or a capture answers itself."""
    kinds = {torch.Tag.pointwise, *([torch.Tag.reduction] if hasattr(torch.Tag, "reduction") else [])}
    x = CapturedTensor("fp32", (64, 64))
    names = [one[6:] for one in torch._C._dispatch_get_all_op_names() if one.startswith("aten::")]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key
    found = set()
    for base, _, overload in (name.partition(".") for name in names):
        one = getattr(getattr(torch.ops.aten, base), overload or "default")
        if kinds & set(one.tags) and not composite(one.name(), "CompositeImplicitAutograd"):
            found.add(base)
    assert len(found) > 200
    unknown = {name for name in found if not priced(f"aten.{name}.default", ((x, x, x), ()), x).known}
    assert unknown <= {"equal"}
