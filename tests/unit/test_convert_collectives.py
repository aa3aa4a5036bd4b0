"""The published sweeps with what is known of their sources: the bytes that the project carries."""

from convert_collectives import PLAIN, known, table
from convert_runs import zipped


def test_the_carried_table_is_what_the_converter_writes() -> None:
    assert zipped(table()) == PLAIN.read_bytes()


def test_what_is_known_of_a_source_is_said_in_columns() -> None:
    row = dict.fromkeys(("source", "location", "notes", "nccl_version", "gpu", "collective", "n_nodes"), "")
    row |= {"size_bytes": "1024", "n_gpus": "8"}
    assert known(row) == {"degraded": "", "left_out": "", "usual_network": ""}
    assert known(row | {"source": "github:microsoft/vidur@1"})["left_out"].startswith("few iterations")
    assert known(row | {"source": "repository not recorded (dgx06)"})["degraded"]
    assert known(row | {"notes": "DGX A100"})["usual_network"] == "y"
