"""Optional parts of a prediction: keys of the JSON, sections of the text, counters of the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.finite import FiniteRange
from simulator.cli.options import all_of
from simulator.formats.study import Study
from simulator.predict import Prediction

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simulator.predict.data_loading import DataStall
    from simulator.predict.energy import EnergyUse
    from simulator.predict.parameter_server import Asynchronous
    from simulator.predict.phases import Phases
    from simulator.predict.telemetry import Telemetry

NAMES = ("telemetry", "step_jitter", "energy")


extra_options = all_of(  # of the optional parts
    click.option("--telemetry", is_flag=True, help="Also how busy each link, memory and processor is; in --trace as counters, with the gaps named."),
    click.option("--energy", is_flag=True, help="Also watts, joules a token, and with energy.tokens kWh of a run; the keys of [energy] by --set."),
    click.option("--step-jitter", type=FiniteRange(0, 0.2), metavar="SIGMA", help="With --telemetry: percentiles of a run's steps, where a rank's time varies by this from step to step (one sigma, relative)."),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Optional parts of the answer."""

    telemetry: Telemetry | None = None
    energy: EnergyUse | None = None
    data: DataStall | None = None
    servers: Asynchronous | None = None
    phases: Phases | None = None

    @property
    def keys(self) -> dict[str, Any]:
        """Of the JSON."""
        found = {
            "telemetry": self.telemetry,
            "energy": self.energy,
            "data_loading": self.data,
            "servers": self.servers,
            "phases": self.phases,
        }
        return {name: one.report() for name, one in found.items() if one is not None}

    @property
    def sections(self) -> list[tuple[str, RenderableType]]:
        """Of the text."""
        if self == Extras():  # a prediction alone loads none of their modules
            return []
        from simulator.formats.writers import extras_text as text

        found: list[tuple[str, Any, Callable[[Any], RenderableType]]] = [
            ("Data loading", self.data, text.loading),
            ("How busy each part is", self.telemetry, text.utilisation),
            ("Energy", self.energy, text.drawn),
            ("Phases of the run", self.phases, text.phases),
            ("With parameter servers", self.servers, text.servers),
        ]
        return [(title, write(part)) for title, part, write in found if part is not None]


def with_data_of(study: Study, prediction: Prediction) -> tuple[Prediction, DataStall | None]:
    """The prediction with what loading its data adds, where the study has a [data] table."""
    if study.data is None:
        return prediction, None
    from simulator.predict.data_loading import stall_of, with_data

    found = stall_of(study.data, prediction.step_s, study.plan, study.cluster)
    return with_data(prediction, found), found


def extras_of(flags: dict[str, Any], study: Study, prediction: Prediction, stall: DataStall | None = None) -> Extras:
    """The optional parts of a prediction that the flags request."""
    counters = drawn = asynchronous = phases = None
    if flags["telemetry"]:
        from simulator.predict.telemetry import telemetry

        counters = telemetry(prediction, *study.parts, jitter=flags["step_jitter"] or 0.0)
    if flags["energy"] or study.energy is not None:
        from simulator.predict.energy import Energy, energy_of

        drawn = energy_of(study.energy or Energy(), prediction, *study.parts)
    if study.servers is not None:
        from simulator.predict.parameter_server import served

        asynchronous = served(study.servers, prediction.tokens_per_s, *study.parts)
    if study.plan.deepspeed.one_bit.any and study.plan.deepspeed.one_bit.run_steps:
        from simulator.predict.phases import phases_of

        phases = phases_of(prediction, *study.parts)
    return Extras(telemetry=counters, energy=drawn, data=stall, servers=asynchronous, phases=phases)


def taken(flags: dict[str, Any]) -> dict[str, Any]:
    """Remove these flags from a command's and return them. Raises UsageError if one needs another."""
    found = {name: flags.pop(name) for name in NAMES}
    if found["step_jitter"] is not None and not found["telemetry"]:
        raise click.UsageError("--step-jitter needs --telemetry")
    return found
