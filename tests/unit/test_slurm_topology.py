"""SLURM's topology files and hostlists."""

from __future__ import annotations

import pytest

from simulator.base.errors import ClusterError
from simulator.formats.readers.hostlist import expand
from simulator.formats.readers.slurm_topology import read_conf, read_yaml

TREE = """
# two leaves and a spine
SwitchName=leaf0 Nodes=node[00-15]
SwitchName=leaf1 Nodes=node[16-31] LinkSpeed=400
switchname=spine \\
  Switches=leaf[0-1]
"""
YAML = """---
- topology: other
  block:
    block_sizes: [4, 16]
    blocks:
      - block: rack1
        nodes: n[1-4]
      - block: rack2
        nodes: n[5-8]
- topology: fabric
  cluster_default: true
  tree:
    switches:
      - switch: spine
        children: leaf[0-1]
      - switch: leaf0
        nodes: node[00-15]
      - switch: leaf1
        nodes: node[16-31]
"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ("a",)),
        ("a,b1", ("a", "b1")),
        ("n[08-10,2]", ("n08", "n09", "n10", "n2")),
        ("r[1-2]n[1,3]-x", ("r1n1-x", "r1n3-x", "r2n1-x", "r2n3-x")),
    ],
)
def test_hostlists(text: str, names: tuple[str, ...]) -> None:
    assert expand(text, "here") == names


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("n[0-99999]", "100,000 names"),
        ("a[0-9999][0-9999][0-9999]", "1,000,000,000,000 names"),
        ("n[0-65535],m", "65,537 names"),
        ("n[1", "is not a name"),
        ("n[]", "is not a range"),
        ("n[5-1]", "is not a range"),
        ("n[1-2", "is not a name"),
        ("a b", "is not a name"),
        ("", "empty"),
    ],
)
def test_hostlists_that_are_refused(text: str, told: str) -> None:
    with pytest.raises(ClusterError) as caught:
        expand(text, "here")
    assert told in str(caught.value)
    assert caught.value.faults[0].place == "here"


@pytest.mark.parametrize("tree", [read_conf(TREE, "t"), read_yaml(YAML, "t")])
def test_a_tree(tree: object) -> None:
    assert tree.kind == "tree"  # type: ignore[attr-defined]
    assert tree.num_nodes == 32  # type: ignore[attr-defined]
    assert tree.roots == ("spine",)  # type: ignore[attr-defined]
    assert tree.nodes_per_leaf == (16, 16)  # type: ignore[attr-defined]
    assert {s.name: (s.level, s.num_nodes) for s in tree.switches} == {  # type: ignore[attr-defined]
        "leaf0": (0, 16),
        "leaf1": (0, 16),
        "spine": (1, 32),
    }


def test_blocks() -> None:
    blocks = read_conf("BlockName=b1 Nodes=n[1-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18,36\n", "t")
    assert (blocks.kind, blocks.num_nodes, blocks.block_sizes) == ("block", 36, (18, 36))
    assert read_yaml(YAML.replace("  cluster_default: true\n", ""), "t").block_sizes == (4, 16)  # the first


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("SwitchName=a Nodes=n[0-99999]", "t: line 1: 'n[0-99999]' makes it 100,000 names"),
        ("SwitchName=a Nodes=n[0-40000]\nSwitchName=b Nodes=m[0-40000]", "t: line 2: makes it 80,002 nodes"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a", "t: line 1: a is below itself"),
        ("SwitchName=a Switches=b", "switch 'b' has no entry"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1", "node n1 is below a and below b"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "a appears at t: line 1 too"),
        ("SwitchName=a Nodes=n1 Switches=b", "both nodes and switches"),
        ("SwitchName=a", "neither nodes nor switches"),
        ("SwitchName=a Nods=n1", "unknown key 'nods'"),
        ("hello", "'hello' is not KEY=VALUE"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2", "switches and blocks"),
        ("# nothing", "no switch or block"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(text: str, told: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_conf(text, "t")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: &a [1]\nb: *a", "t:1: anchors and aliases are not read"),
        ("- topology: [", "not YAML"),
        ("- !!python/object/apply:os.system ['true']", "not YAML"),
        ("just text", "not a list of topologies"),
        ("[" * 40 + "]" * 40, "nested deeper than 30"),
        ("- topology: x\n" * 80_000, "larger than 1,048,576 characters"),
        ("- topology: a\n  tree: 3", "no switch or block"),
        ("- topology: a", "neither tree, block nor flat"),
        ("- topology: a\n  tree: {switches: [{switch: s, nodes: 'n[0-99999]'}]}", "t: a: tree[0]: 'n[0-99999]'"),
    ],
)
def test_yaml_that_is_refused(text: str, told: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_yaml(text, "t")
    assert told in str(caught.value)
