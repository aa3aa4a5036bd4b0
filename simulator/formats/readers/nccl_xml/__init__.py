"""Reader of NCCL's and RCCL's topology XML (`NCCL_TOPO_DUMP_FILE`, or a cloud's `NCCL_TOPO_FILE`) as a Host."""

from simulator.formats.readers.nccl_xml.reading import Reading
from simulator.formats.readers.nccl_xml.tree import parse
from simulator.spec.cluster.host import Host


def read_xml(data: bytes, place: str) -> Host:
    """The host that the XML describes.

    Raises ClusterError with every fault: a document type or entity, nesting or size beyond reason, a GPU outside every
    CPU, links to themselves or with a count that differs by direction, speeds of zero.
    """
    root, comments = parse(data, place)
    return Reading(root, comments, place).host()
